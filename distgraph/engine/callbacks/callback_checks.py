"""Checks of the arguments of callbacks, before training starts."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distgraph.errors import RuntimeFault
from distgraph.serialization.documents import shown_path

if TYPE_CHECKING:
    from distgraph.engine import Engine
    from distgraph.engine.callbacks.callback import Callback


def check_place(who: str, path: str | Path, *, file: bool = False) -> None:
    """Check that a folder, or a file, could be created at a path, with its folders.

    Raises:
        RuntimeFault: the path is empty, or its nearest existing parent is no folder or takes no new files; or
            a file is to be written where a folder is.
    """
    given: object = path
    is_path = isinstance(given, (str, os.PathLike)) and str(path) and "\0" not in str(path)
    fails = "" if is_path else "it is no path"
    if not fails:
        try:
            folder = next(parent for parent in Path(path).absolute().parents if parent.exists())
            if file and Path(path).is_dir():
                fails = "it is a folder"
            elif not folder.is_dir():
                fails = f"{folder} is no folder"
            elif not os.access(folder, os.W_OK | os.X_OK):
                fails = f"{folder} takes no new files"
        except OSError as error:
            fails = str(error.strerror)
    if fails:
        raise RuntimeFault(
            f"{who}: {shown_path(path) or repr(str(path))} cannot be written: {fails}; choose another"
        )


def check_hooks(callbacks: Sequence[Callback], base: type[Callback]) -> None:
    """Check that methods named as hooks are hooks, as others are never called, and take their arguments.

    Args:
        callbacks: to be given to an engine.
        base: class whose methods the engine calls.

    Raises:
        RuntimeFault: a method begins with `on_` but the base has none of its name, or takes other arguments
            than that.
    """
    hooks = [name for name in dir(base) if name.startswith("on_")]
    for callback in callbacks:
        for name in hooks:
            _check_arguments(callback, name, list(inspect.signature(getattr(base, name)).parameters))
    for kind in dict.fromkeys(map(type, callbacks)):
        for name in dir(kind):
            method = getattr(kind, name, None) if name.startswith("on_") and name not in hooks else None
            if callable(method) and not isinstance(method, type):
                near = difflib.get_close_matches(name, hooks, 1)
                way = f"rename it to {near[0]}" if near else "rename it to one of these"
                raise RuntimeFault(
                    f"callback {kind.__name__} has a method {name} but an engine calls only "
                    f"{', '.join(hooks)}; {way}, or begin its name with _"
                )


def _check_arguments(callback: Callback, hook: str, arguments: Sequence[str]) -> None:
    """Raises RuntimeFault where a hook of a callback does not take the arguments of `Callback`."""
    try:
        signature = inspect.signature(getattr(callback, hook))
    except (TypeError, ValueError):  # some builtins have none; the call will tell
        return
    try:
        signature.bind(*arguments[1:])  # without self
    except TypeError:
        raise RuntimeFault(
            f"{hook} of callback {type(callback).__name__} takes {signature} but an engine calls it with "
            f"({', '.join(arguments[1:])}); write def {hook}({', '.join(arguments)})"
        ) from None


def check_files(callbacks: Sequence[Callback]) -> None:
    """Check that no two callbacks write the same file or folder. Raises RuntimeFault: two do."""
    writers: dict[str, Callback] = {}
    for callback in callbacks:
        path: object = callback.writes  # a user's callback may use the name for something else
        if not path or not isinstance(path, (str, Path)):
            continue
        place = os.path.realpath(path)
        if place in writers and not callback.may_share(writers[place]):
            raise RuntimeFault(
                f"callbacks {type(writers[place]).__name__} and {type(callback).__name__} both write "
                f"{shown_path(path)}; give each a path of its own"
            )
        writers[place] = callback


def check_monitor(who: str, name: str, engine: Engine) -> None:
    """Check that an epoch measures a number. Raises RuntimeFault: it does not."""
    measured = ["epoch", "loss", *engine.training_spec.metrics]
    if engine.validates:
        measured += [f"valid_{number}" for number in measured[1:]]
    if engine.training_spec.strategy.nonfinite == "skip":
        measured.append("skipped_steps")
    if name not in measured:
        raise RuntimeFault(
            f"callback {who} watches {name!r} but an epoch measures {', '.join(measured)}; name one of these"
        )
