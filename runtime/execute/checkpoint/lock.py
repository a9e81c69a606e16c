"""One job writes a folder: a lock that lasts as long as the process that took it, however that ends.

Rank 0 of a job takes it at its first save, for all ranks. It is a lock of the operating system (`flock`,
which NFS passes on to its server) on the file `.lock`: when the process is gone, so is the lock, and there is
nothing to guess about. The content of the file only says who holds it. A process that ends in order empties
the file; content without a lock is what a killed job left, and whoever takes over says so.

Where the file system has no locks, or does not share them between machines, the content decides: a process of
this machine counts if it lives, one of another machine counts until its name is gone from the file; and a job
whose name was replaced by another one stops at its next save.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import json
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from distgraph.errors import RuntimeFault
from distgraph.runtime.job.processes import process_start

LOCK: Final = ".lock"
_OPEN: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TAKEN: Final = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS: Final = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
_MOST_HELD: Final = 64
"""Locks that a process keeps, each with a descriptor: of the folders that it has written last."""
_CONTENT_MOST: Final = 4096  # bytes
_TRIES: Final = 5  # where others delete the file at the same time


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that writes a folder.

    Attributes:
        host: its machine.
        process: its number there.
        start: when it was started, in clock ticks since boot.
        since: when it took the lock.
        command: what it runs.
    """

    host: str
    process: int
    start: str
    since: str
    command: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host} ({self.command}) since {self.since}"

    def same(self, other: Holder) -> bool:
        """Whether it is the same process."""
        return (self.host, self.process, self.start) == (other.host, other.process, other.start)


@dataclass(slots=True)
class _Held:
    descriptor: int
    place: tuple[int, int]  # device and inode
    holder: Holder
    writing: threading.Lock = field(default_factory=threading.Lock)


_held: dict[Path, _Held] = {}  # locks belong to a process, and so does this; the one written last comes last
_guard = threading.Lock()


def hold(folder: Path) -> None:
    """Take the lock of a folder until this process ends; do nothing if it is held already.

    Raises:
        RuntimeFault: another job holds it, which is named; or the lock cannot be used.
    """
    with _guard:
        _hold(folder.resolve())


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Hold the lock, and keep other threads of this process from writing there.

    Raises:
        RuntimeFault: as `hold`, or another thread writes there now.
    """
    with _guard:
        held = _hold(folder.resolve())
    if not held.writing.acquire(blocking=False):
        raise RuntimeFault(
            f"checkpoint {folder} is being written by another thread of this process; wait for it, or save "
            f"to another directory"
        )
    try:
        yield
    finally:
        held.writing.release()


def release(folder: Path) -> None:
    """Give up the lock of a folder, if it is held."""
    with _guard:
        held = _held.pop(folder.resolve(), None)
        if held is not None:
            _let_go(held)


def _hold(folder: Path) -> _Held:
    _prepare_ends()
    held = _held.pop(folder, None)
    if held is not None and _place(folder) != held.place:  # the folder was deleted, and perhaps made again
        os.close(held.descriptor)
        held = None
    if held is None:
        held = _take(folder)
    else:
        now = _read(held.descriptor)
        if now is not None and not now.same(held.holder):
            os.close(held.descriptor)
            raise RuntimeFault(
                f"checkpoint {folder} has been taken over by another job: {now}; end one of the two, or have "
                f"them save to different directories"
            )
    _held[folder] = held
    for old in [name for name, each in _held.items() if not each.writing.locked()][
        : max(0, len(_held) - _MOST_HELD)
    ]:
        _let_go(_held.pop(old))
    return held


def _take(folder: Path) -> _Held:
    path = folder / LOCK
    for _ in range(_TRIES):
        try:
            descriptor = os.open(path, _OPEN, 0o666)
        except OSError as error:
            raise RuntimeFault(
                f"checkpoint {folder} cannot be locked: {error}; choose another directory"
            ) from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise RuntimeFault(
                    f"checkpoint {path} is no regular file; delete it, or choose another folder"
                )
            _lock(descriptor, folder)
            if _place(folder) != (found.st_dev, found.st_ino):
                os.close(descriptor)
                continue
            return _Held(descriptor, (found.st_dev, found.st_ino), _sign(descriptor, folder))
        except BaseException:
            os.close(descriptor)
            raise
    raise RuntimeFault(f"checkpoint {path} is deleted again and again; choose another directory")


def _lock(descriptor: int, folder: Path) -> None:
    """Lock the open file, or raise RuntimeFault that names who has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        other = _read(descriptor)
        if error.errno in _TAKEN:
            raise RuntimeFault(
                f"checkpoint {folder} is written by another job: {other or 'a process without a name'}; end "
                f"it, or save to another directory"
            ) from None
        if error.errno not in _NO_LOCKS:
            raise RuntimeFault(
                f"checkpoint {folder} cannot be locked: {error}; choose another directory"
            ) from None
        if other is not None and _may_live(other):
            raise RuntimeFault(
                f"checkpoint {folder} is written by another job: {other}; end it, save to another directory, "
                f"or, if it has ended, delete {folder / LOCK}"
            ) from None


def _may_live(other: Holder) -> bool:
    me = _me()
    return not other.same(me) and (other.host != me.host or process_start(other.process) == other.start)


def _sign(descriptor: int, folder: Path) -> Holder:
    """Write who holds the lock, and say whose it was if that process did not end in order."""
    before, me = _read(descriptor), _me()
    if before is not None and not before.same(me):
        sys.stderr.write(
            f"distgraph: checkpoint {folder}: its lock was left by {before}, which has ended; taken over\n"
        )
    with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(asdict(me)) + "\n").encode(), 0)
    return me


def _me() -> Holder:
    number = os.getpid()
    since = datetime.now(UTC).isoformat(timespec="seconds")
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200] if sys.argv else ""
    return Holder(socket.gethostname(), number, process_start(number) or "", since, command or "python")


def _read(descriptor: int) -> Holder | None:
    """Who is named in the file; None for nobody, or what makes no sense."""
    try:
        found: Any = json.loads(os.pread(descriptor, _CONTENT_MOST, 0))
        holder = Holder(**found)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    texts = (holder.host, holder.start, holder.since, holder.command)
    if not all(isinstance(text, str) for text in texts) or type(holder.process) is not int:
        return None
    return holder if all(text.isprintable() for text in texts) else None


def _place(folder: Path) -> tuple[int, int] | None:
    try:
        found = (folder / LOCK).lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _let_go(held: _Held) -> None:
    """Take the name out of the file and end the lock."""
    with contextlib.suppress(OSError):
        now = _read(held.descriptor)
        if now is not None and now.same(held.holder):
            os.ftruncate(held.descriptor, 0)
    with contextlib.suppress(OSError):
        os.close(held.descriptor)


@functools.cache
def _prepare_ends() -> None:
    atexit.register(_end)
    os.register_at_fork(after_in_child=_forget)


def _end() -> None:
    for held in _held.values():
        if held.holder.process == os.getpid():
            _let_go(held)
    _held.clear()


def _forget() -> None:
    """In a child process: the locks are the parent's, and end with it, not with its children."""
    global _guard  # noqa: PLW0603 - another thread of the parent may have held it
    _guard = threading.Lock()
    for held in _held.values():
        with contextlib.suppress(OSError):
            os.close(held.descriptor)
    _held.clear()
