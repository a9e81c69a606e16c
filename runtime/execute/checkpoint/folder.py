"""Checks of the paths of checkpoints, before anything is read or written."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from distgraph.errors import RuntimeFault
from distgraph.serialization.documents import shown_path


def check_folder(directory: str | Path) -> Path:
    """Check that a checkpoint can be written to a directory, as far as possible without writing.

    Args:
        directory: path of the directory, which need not exist; its parents are made as well.

    Raises:
        RuntimeFault: it is no path or an empty one, it or a parent is a file, or takes no new files.
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
    """Check that a path can be that of a checkpoint, without access to the disk.

    Args:
        directory: path of the directory, which need not exist.
        action: "read" or "written", for messages.

    Raises:
        RuntimeFault: it is no text and no Path, is empty, or is no possible file name.
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
    parent = path
    while not parent.exists() and parent.parent != parent:
        if parent.is_symlink():
            return f"{parent} is a link to a file that does not exist"
        parent = parent.parent
    if not parent.is_dir():
        return f"{parent} is a file" if parent != path else "it is a file"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{parent} takes no new files"
    return ""
