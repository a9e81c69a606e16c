"""What a callback can know to be wrong before training starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distgraph.errors import RuntimeFault
from distgraph.ir.dtypes import is_integer
from distgraph.serialization.documents import shown_path

if TYPE_CHECKING:
    from distgraph.engine import Engine


def check_place(who: str, path: str | Path) -> None:
    """Check that a file or folder could be made under a path, its folders too.

    Raises:
        RuntimeFault: the path is empty, or what is there already is no folder or takes no new files.
    """
    fails = "" if str(path) and "\0" not in str(path) else "it is no path"
    if not fails:
        try:
            held = next(each for each in Path(path).absolute().parents if each.exists())
            if not held.is_dir():
                fails = f"{held} is no folder"
            elif not os.access(held, os.W_OK | os.X_OK):
                fails = f"{held} takes no new files"
        except OSError as error:
            fails = str(error.strerror)
    if fails:
        raise RuntimeFault(
            f"{who}: {shown_path(path) or repr(str(path))} cannot be written: {fails}; choose another"
        )


def check_count(who: str, name: str, given: Any, least: int) -> None:
    """Check a number of steps or epochs. Raises RuntimeFault: it is no integer, or below the least."""
    if not is_integer(given) or given < least:
        raise RuntimeFault(f"{who}: {name} is {given!r} but must be a number from {least} up")


def check_monitor(who: str, name: str, engine: Engine) -> None:
    """Check that an epoch measures a number. Raises RuntimeFault: it does not."""
    known = ["epoch", "loss", *engine.recipe.metrics]
    if engine.validates:
        known += [f"valid_{each}" for each in known[1:]]
    if engine.recipe.strategy.nonfinite == "skip":
        known.append("skipped_steps")
    if name not in known:
        raise RuntimeFault(
            f"callback {who} watches {name!r} but an epoch measures {', '.join(known)}; name one of these"
        )
