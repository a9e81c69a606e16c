"""The lock of a checkpoint folder, which only one job may write. It ends with the process that holds it.

Rank 0 of a job takes the lock at its first save, for all ranks. It is a lock of the operating system
(`flock`, which NFS passes on to its server) on the file `.lock`, so it ends when the process ends for any
reason. The content of the file only names the holder. A process that ends normally empties the file. Content
without a lock was left by a killed job; the process that takes the lock then prints a note.

Where the file system has no locks, or does not share them between machines, the content decides: a holder on
this machine counts if its process runs, a holder on another machine counts until its name is removed from the
file, and a job whose name was replaced by another one stops at its next save.

A host that an elastic job has lost may only be stopped, so that a process of it still holds the lock. Then a
later start of the same job takes the lock by replacing the file; the process that held it stops at its next
save.
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
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from distgraph.errors import RuntimeFault
from distgraph.runtime.job.job_files import JOB
from distgraph.runtime.job.losses import elastic_folder
from distgraph.runtime.job.processes import process_start

LOCK: Final = ".lock"
_OPEN: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TAKEN: Final = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS: Final = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
_MOST_LOCKS: Final = 64
"""Number of locks that a process holds, each with a descriptor: those of the folders written last."""
_CONTENT_MOST: Final = 4096  # bytes
_TRIES: Final = 5  # while other jobs delete the file
_ENDING_SECONDS: Final = 1.0  # for which a process that was killed may still hold its locks


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that writes a folder.

    Attributes:
        host: name of its machine.
        process: its process number there.
        start: time of its start, in clock ticks since boot.
        since: time at which it took the lock.
        command: its command line.
        job: the elastic job on several hosts that it belongs to; "" for none.
        job_start: start of that job; later ones sort behind earlier ones.
    """

    host: str
    process: int
    start: str
    since: str
    command: str
    job: str = ""
    job_start: str = ""

    def __str__(self) -> str:
        return f"process {self.process} on {self.host} ({self.command}) since {self.since}"

    def follows(self, other: Holder) -> bool:
        """Whether it belongs to a later start of the same elastic job."""
        return bool(self.job) and self.job == other.job and self.job_start > other.job_start

    def same(self, other: Holder) -> bool:
        """Whether it is the same process."""
        return (self.host, self.process, self.start) == (other.host, other.process, other.start)


@dataclass(slots=True)
class _Lock:
    descriptor: int
    place: tuple[int, int]  # device and inode
    holder: Holder
    writing: threading.Lock = field(default_factory=threading.Lock)


_locks: dict[Path, _Lock] = {}  # locks of this process by folder; the one written last comes last
_guard = threading.Lock()


def hold(folder: Path) -> None:
    """Take the lock of a folder until this process ends, unless this process holds it already.

    Raises:
        RuntimeFault: another job, which is named, holds it; or the file cannot be locked.
    """
    with _guard:
        _hold(folder.resolve())


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Context that holds the lock and excludes other threads of this process.

    Raises:
        RuntimeFault: as `hold`, or another thread is writing the folder.
    """
    with _guard:
        lock = _hold(folder.resolve())
    if not lock.writing.acquire(blocking=False):
        raise RuntimeFault(
            f"checkpoint {folder} is being written by another thread of this process; wait for it, or save "
            f"to another directory"
        )
    try:
        yield
    finally:
        lock.writing.release()


def release(folder: Path) -> None:
    """Release the lock of a folder, if this process holds it."""
    with _guard:
        lock = _locks.pop(folder.resolve(), None)
        if lock is not None:
            _release(lock)


def living_holder(folder: Path) -> Holder | None:
    """The process that the lock file of a folder names, which may be this one; None where it has ended."""
    try:
        descriptor = os.open(folder / LOCK, _READ)
    except OSError:
        return None
    try:
        named = _read_holder(descriptor)
    finally:
        os.close(descriptor)
    return named if named is not None and (named.same(_this_process()) or _may_live(named)) else None


def _hold(folder: Path) -> _Lock:
    _register_handlers()
    lock = _locks.pop(folder, None)
    if (
        lock is not None and _place(folder) != lock.place
    ):  # the folder was deleted, and may have been made again
        os.close(lock.descriptor)
        lock = None
    if lock is None:
        lock = _take(folder)
    else:
        named = _read_holder(lock.descriptor)
        if named is not None and not named.same(lock.holder):
            os.close(lock.descriptor)
            raise RuntimeFault(
                f"checkpoint {folder} has been taken over by another job: {named}; end one of the two, or "
                "have them save to different directories"
            )
    _locks[folder] = lock
    for old in [name for name, other_lock in _locks.items() if not other_lock.writing.locked()][
        : max(0, len(_locks) - _MOST_LOCKS)
    ]:
        _release(_locks.pop(old))
    return lock


def _take(folder: Path) -> _Lock:
    path = folder / LOCK
    for _ in range(_TRIES):
        try:
            descriptor = os.open(path, _OPEN, 0o666)
        except OSError as error:
            raise RuntimeFault(
                f"checkpoint {folder} cannot be locked: {error}; choose another directory"
            ) from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise RuntimeFault(
                    f"checkpoint {path} is no regular file; delete it, or choose another folder"
                )
            if not _lock(descriptor, folder):
                os.close(descriptor)
                continue
            if _place(folder) != (status.st_dev, status.st_ino):
                os.close(descriptor)
                continue
            return _Lock(descriptor, (status.st_dev, status.st_ino), _write_holder(descriptor, folder))
        except BaseException:
            os.close(descriptor)
            raise
    raise RuntimeFault(f"checkpoint {path} is deleted again and again; choose another directory")


def _lock(descriptor: int, folder: Path) -> bool:
    """Lock the open file.

    Returns:
        Whether it is locked. Otherwise an earlier start of this job held it, and the file was removed.

    Raises:
        RuntimeFault: another process, which is named, holds it, or it cannot be locked.
    """
    try:
        _flock(descriptor)
    except OSError as error:
        other = _read_holder(descriptor)
        if error.errno in _TAKEN and other is not None and _this_process().follows(other):
            sys.stderr.write(
                f"distgraph: checkpoint {folder}: its lock is held by {other}, which this job has lost; "
                "taken over\n"
            )
            (folder / LOCK).unlink(missing_ok=True)
            return False
        if error.errno in _TAKEN:
            raise RuntimeFault(
                f"checkpoint {folder} is written by another job: {other or 'a process without a name'}; end "
                f"it, or save to another directory"
            ) from None
        if error.errno not in _NO_LOCKS:
            raise RuntimeFault(
                f"checkpoint {folder} cannot be locked: {error}; choose another directory"
            ) from None
        if other is not None and _may_live(other) and not _this_process().follows(other):
            raise RuntimeFault(
                f"checkpoint {folder} is written by another job: {other}; end it, save to another directory, "
                f"or, if it has ended, delete {folder / LOCK}"
            ) from None
    return True


def _flock(descriptor: int) -> None:
    """Lock the open file. A killed process keeps its locks until its memory is freed, so this waits a little.

    Raises:
        OSError: another process holds the lock, or there are no locks here.
    """
    deadline = time.monotonic() + _ENDING_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _TAKEN or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def _may_live(other: Holder) -> bool:
    this_process = _this_process()
    return not other.same(this_process) and (
        other.host != this_process.host or process_start(other.process) == other.start
    )


def _write_holder(descriptor: int, folder: Path) -> Holder:
    """Write this process into the file; print a note where the previous holder did not end normally."""
    previous, this_process = _read_holder(descriptor), _this_process()
    if previous is not None and not previous.same(this_process):
        sys.stderr.write(
            f"distgraph: checkpoint {folder}: its lock was left by {previous}, which has ended; taken over\n"
        )
    with contextlib.suppress(OSError):  # on a full disk the lock is valid without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(asdict(this_process)) + "\n").encode(), 0)
    return this_process


def _this_process() -> Holder:
    number = os.getpid()
    since = datetime.now(UTC).isoformat(timespec="seconds")
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200] if sys.argv else ""
    host, elastic = socket.gethostname(), elastic_folder()
    job_start = os.environ.get(JOB, "")
    job = elastic.name if elastic is not None and job_start else ""
    return Holder(host, number, process_start(number) or "", since, command or "python", job, job_start)


def _read_holder(descriptor: int) -> Holder | None:
    """The holder that the file names; None where it names none or has other content."""
    try:
        content: Any = json.loads(os.pread(descriptor, _CONTENT_MOST, 0))
        holder = Holder(**content)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    texts = (holder.host, holder.start, holder.since, holder.command, holder.job, holder.job_start)
    if not all(isinstance(text, str) for text in texts) or type(holder.process) is not int:
        return None
    return holder if all(text.isprintable() for text in texts) else None


def _place(folder: Path) -> tuple[int, int] | None:
    try:
        status = (folder / LOCK).lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _release(lock: _Lock) -> None:
    """Remove the holder from the file and release the lock."""
    with contextlib.suppress(OSError):
        named = _read_holder(lock.descriptor)
        if named is not None and named.same(lock.holder):
            os.ftruncate(lock.descriptor, 0)
    with contextlib.suppress(OSError):
        os.close(lock.descriptor)


@functools.cache
def _register_handlers() -> None:
    atexit.register(_release_all)
    os.register_at_fork(after_in_child=_forget)


def _release_all() -> None:
    for lock in _locks.values():
        if lock.holder.process == os.getpid():
            _release(lock)
    _locks.clear()


def _forget() -> None:
    """In a forked child: close the parent's locks, so that they end when the parent ends."""
    global _guard  # noqa: PLW0603 - another thread of the parent may have held it
    _guard = threading.Lock()
    for lock in _locks.values():
        with contextlib.suppress(OSError):
            os.close(lock.descriptor)
    _locks.clear()
