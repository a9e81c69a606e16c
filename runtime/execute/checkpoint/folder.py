"""Paths of checkpoints: what is refused before anything is read or written."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from distgraph.errors import RuntimeFault
from distgraph.serialization.documents import shown_path


def check_folder(directory: str | Path) -> Path:
    """Refuse a directory that no checkpoint can be written to, as far as that shows without writing.

    Args:
        directory: there or not; those above it are made, too.

    Raises:
        RuntimeFault: it is no path or an empty one, it or one above it is a file, or takes no new files.
    """
    path = check_path(directory, "written")
    try:
        reason = _reason(path)
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise _refused(path, "written", reason)
    return path


def check_path(directory: str | Path, action: str = "read") -> Path:
    """Refuse what can be no path of a checkpoint, without a look at the disk.

    Args:
        directory: there or not.
        action: what it is to be, for messages.

    Raises:
        RuntimeFault: it is no text and no Path, is empty, or no file can have such a name.
    """
    if not isinstance(directory, (str, Path)):
        raise RuntimeFault(
            f"checkpoint path is {directory!r} but must be the path of a directory; give a text or a Path"
        )
    if not str(directory):
        raise RuntimeFault('checkpoint path is "" but must be that of a directory, such as "checkpoint"')
    try:
        if b"\0" in os.fsencode(directory):
            raise _refused(directory, action, "embedded null character")
    except UnicodeEncodeError as error:  # half a surrogate pair
        raise _refused(directory, action, str(error)) from None
    return Path(directory)


def _refused(directory: str | Path, action: str, reason: str) -> RuntimeFault:
    return RuntimeFault(
        f"checkpoint {shown_path(directory)} cannot be {action}: {reason}; choose another directory"
    )


def _reason(path: Path) -> str:
    path = path.absolute()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.stat()  # raises where a name is too long
    above = path
    while not above.exists() and above.parent != above:
        if above.is_symlink():
            return f"{above} is a link to what is not there"
        above = above.parent
    if not above.is_dir():
        return f"{above} is a file" if above != path else "it is a file"
    if not os.access(above, os.W_OK | os.X_OK):
        return f"{above} takes no new files"
    return ""
