"""Where a checkpoint can be written, told before anything is."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from distgraph.documents import shown_path
from distgraph.errors import RuntimeFault


def check_folder(directory: str | Path) -> Path:
    """Refuse a directory that no checkpoint can be written to, as far as that shows without writing.

    Args:
        directory: there or not; those above it are made, too.

    Raises:
        RuntimeFault: it is no path or an empty one, it or one above it is a file, or takes no new files.
    """
    if not isinstance(directory, (str, Path)):
        raise RuntimeFault(
            f"checkpoint path is {directory!r} but must be the path of a directory; give a text or a Path"
        )
    if not str(directory):
        raise RuntimeFault('checkpoint path is "" but must be that of a directory, such as "checkpoint"')
    try:
        reason = _reason(Path(directory))
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL character
        reason = str(getattr(error, "strerror", None) or error)
    if reason:
        raise RuntimeFault(
            f"checkpoint {shown_path(directory)} cannot be written: {reason}; choose another directory"
        )
    return Path(directory)


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
