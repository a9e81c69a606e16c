"""Runs a user's script up to the moment in which one of its engines shows what a command wants to see."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from distgraph.errors import DistGraphError, GraphError


class Seen(BaseException):
    """Leaves the script with what was found; no `except Exception` of the script holds it."""

    def __init__(self, found: Any) -> None:
        self.found = found


def run_until_seen(path: str | Path, argv: Sequence[str], command: str, otherwise: str) -> Any:
    """Run a script as `python path argv` until `Seen` is raised in it.

    Args:
        path: of the script.
        argv: its arguments.
        command: who runs it, for messages.
        otherwise: what it means that nothing is seen, for messages.

    Returns:
        what `Seen` carries.

    Raises:
        GraphError: there is no such file, or the script ends, exits or raises before.
    """
    if not Path(path).is_file():
        raise GraphError(f"{command}: script {str(path)!r} does not exist; give the path of a file")
    before = sys.argv, list(sys.path)
    sys.argv = [str(path), *argv]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Seen as seen:
        return seen.found
    except SystemExit as error:
        raise GraphError(
            f"{command}: {path} exits ({error.code}) before its first training step; {otherwise}"
        ) from None
    except DistGraphError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the script raises ends it
        traceback.print_exception(error.with_traceback(_from(error.__traceback__, str(path))))
        raise GraphError(
            f"{command}: {path} raised {type(error).__name__}: {error} before its first training step; mend "
            f"it first"
        ) from None
    finally:
        sys.argv, sys.path[:] = before
    raise GraphError(f"{command}: {path} ends without a training step; {otherwise}")


def _from(trace: TracebackType | None, path: str) -> TracebackType | None:
    """The part of a traceback from a file on."""
    start = trace
    while start is not None and start.tb_frame.f_code.co_filename != path:
        start = start.tb_next
    return start
