"""Runs a user's script up to the first program or training step that a command looks at.

The command installs a `ScriptHook` and runs the script. Engines offer their programs and steps to the hook;
outside of a command there is none, and nothing happens. The hook computes the result of the command, keeps
it, and ends the script with SystemExit, as `sys.exit()` in the script would.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar

from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.data import Batch
from distgraph.engine.parameter_store import Memory
from distgraph.errors import DistGraphError, GraphError
from distgraph.resources import Cluster

Result = TypeVar("Result")


@dataclass(eq=False)
class ScriptHook(Generic[Result]):
    """What a command does with the first program, or the first training step, of a script.

    Attributes:
        on_program: makes the result from a program that is about to be compiled and the cluster of its
            engine; None where the command waits for a training step.
        on_step: makes the result from a training step that is about to be taken: its program, the cluster,
            the parameters, the batch and the scalar inputs; None where the command waits for a program.
        before_step: called before every training step; its first result that is not None ends the script.
        results: the result, once there is one.
    """

    on_program: Callable[[CompileRequest, Cluster | None], Result] | None = None
    on_step: Callable[[CompileRequest, Cluster | None, Memory, Batch, Mapping[str, Any]], Result] | None = (
        None
    )
    before_step: Callable[[], Result | None] | None = None
    results: list[Result] = field(default_factory=list)

    def end_script(self, result: Result) -> NoReturn:
        """Keep the result and end the script: no `except Exception` of the script goes on from here.

        Raises:
            SystemExit: always; `run_script` expects it.
        """
        self.results.append(result)
        raise SystemExit(0)


_HOOK: ContextVar[ScriptHook[Any] | None] = ContextVar("distgraph_script_hook", default=None)


def offer_program(request: CompileRequest, cluster: Cluster | None) -> None:
    """Called by an engine before it compiles a program; ends the script where a command waits for it."""
    hook = _HOOK.get()
    if hook is not None and hook.on_program is not None:
        hook.end_script(hook.on_program(request, cluster))


def offer_step(
    request: CompileRequest, cluster: Cluster | None, memory: Memory, batch: Batch, scalars: Mapping[str, Any]
) -> None:
    """Called by an engine before it takes a training step; ends the script where a command waits for it."""
    hook = _HOOK.get()
    if hook is None:
        return
    if hook.on_step is not None:
        hook.end_script(hook.on_step(request, cluster, memory, batch, scalars))
    result = None if hook.before_step is None else hook.before_step()
    if result is not None:
        hook.end_script(result)


def run_script(
    path: str | Path, argv: Sequence[str], hook: ScriptHook[Result], command: str, otherwise: str
) -> Result:
    """Run a script as `python path argv` until its hook has a result, and return that.

    Args:
        path: of the script.
        argv: its arguments.
        hook: of the command.
        command: its name, for messages.
        otherwise: what it means that there is no result, for messages.

    Raises:
        GraphError: there is no such file, or the script ends, exits or raises without a result.
    """
    if not Path(path).is_file():
        raise GraphError(f"{command}: script {str(path)!r} does not exist; give the path of a file")
    before = sys.argv, list(sys.path)
    sys.argv = [str(path), *argv]
    sys.path.insert(0, str(Path(path).resolve().parent))
    token = _HOOK.set(hook)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:
        if not hook.results:
            raise GraphError(
                f"{command}: {path} exits ({error.code}) before its first training step; {otherwise}"
            ) from None
    except DistGraphError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the script raises ends it
        traceback.print_exception(error.with_traceback(_from(error.__traceback__, str(path))))
        raise GraphError(
            f"{command}: {path} raised {type(error).__name__}: {error} before its first training step; fix "
            f"it first"
        ) from None
    finally:
        _HOOK.reset(token)
        sys.argv, sys.path[:] = before
    if not hook.results:
        raise GraphError(f"{command}: {path} ends without a training step; {otherwise}")
    return hook.results[0]


def _from(trace: TracebackType | None, path: str) -> TracebackType | None:
    """The part of a traceback from a file on."""
    start = trace
    while start is not None and start.tb_frame.f_code.co_filename != path:
        start = start.tb_next
    return start
