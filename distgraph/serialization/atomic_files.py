"""Atomic file writes, with the permissions that the user's umask gives."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from distgraph.errors import DistGraphError
from distgraph.serialization.documents import shown_path

_SHOWN_NAME: Final = 32  # characters of the target's name in the temporary one, which may have 255 bytes
_STREAMS: Final = ("/dev/", "/proc/")  # folders whose entries are devices and open files, never replaced


def check_writable(path: str | Path, error: type[DistGraphError]) -> None:
    """Check that `write_atomically` could write a file, before the work whose result it will contain.

    Raises:
        error: there is no such folder, it takes no new files, or the path is a folder itself.
    """
    try:
        target = _resolved(path)
        reasons: tuple[tuple[bool, str], ...]
        if _is_stream(target):
            reasons = ((not os.access(target, os.W_OK), "it takes no data"),)
        else:
            reasons = (
                (target.is_dir(), "it is a folder"),
                (not target.parent.is_dir(), f"{shown_path(target.parent)} is no folder"),
                (not os.access(target.parent, os.W_OK | os.X_OK), f"{target.parent} takes no new files"),
            )
        fails = next((reason for failed, reason in reasons if failed), None)
    except (OSError, ValueError) as reason:
        fails = str(getattr(reason, "strerror", None) or reason)
    if fails is not None:
        raise error(f"{shown_path(path)}: cannot be written: {fails}; choose another place")


def write_atomically(
    path: str | Path,
    content: str | bytes,
    error: type[DistGraphError],
    *,
    durable: bool = True,
    follow: bool = True,
) -> None:
    """Write a file atomically: at any time, also after a crash, it has either the old or the new content.

    The content is written to a new file of the same folder with an unpredictable name, which then replaces
    the old file. A new file has the permissions that the umask gives; a replaced file retains its
    permissions. A link is followed; a device, a pipe or `/dev/stdout` is written to directly.

    Args:
        path: of the file.
        content: text is written as UTF-8.
        error: what is raised.
        durable: whether to flush the content to disk before the old file is replaced.
        follow: whether links are followed; otherwise the file replaces the link, or any other file.

    Raises:
        error: it cannot be written; the old file is unchanged, and no temporary file remains.
    """
    try:
        data = content.encode("utf-8") if isinstance(content, str) else content
        target = _resolved(path) if follow else Path(path).absolute()
        if follow and _is_stream(target):
            with open(os.open(target, os.O_WRONLY | os.O_APPEND), "wb") as stream:  # noqa: PTH123
                stream.write(data)
        else:
            _replace(target, data, durable)
    except (OSError, ValueError) as reason:  # ValueError: a path with a NUL character, half a surrogate pair
        message = getattr(reason, "strerror", None) or reason
        raise error(f"{shown_path(path)}: cannot be written: {message}; choose another place") from None


def _replace(target: Path, data: bytes, durable: bool) -> None:
    draft = target.parent / f".{target.name[:_SHOWN_NAME]}.{secrets.token_hex(8)}.tmp"
    try:
        present_mode = target.lstat().st_mode
        mode = stat.S_IMODE(present_mode) if stat.S_ISREG(present_mode) else None
    except FileNotFoundError:
        mode = None
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        with open(handle, "wb") as file:  # noqa: PTH123
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    if durable:
        _flush_names(target.parent)


def _flush_names(folder: Path) -> None:
    """Flush the entries of a folder to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _resolved(path: str | Path) -> Path:
    """The target of a path: links are followed, except those to open files, which may not be replaced."""
    absolute = Path(path).absolute()
    return absolute if str(absolute).startswith(_STREAMS) else Path(os.path.realpath(absolute))


def _is_stream(target: Path) -> bool:
    if str(target).startswith(_STREAMS):
        return True
    try:
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
