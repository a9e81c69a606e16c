"""Tasks that the user names in a model; `passes/task_splitting/split_user_tasks.py` makes tasks of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from distgraph.errors import GraphError
from distgraph.tracing.tracer import Trace, caller

_TASK_NAME = re.compile(r"(?!after\.)[A-Za-z][A-Za-z0-9_.\-]*")


def _is_task_name(name: object) -> bool:
    return isinstance(name, str) and _TASK_NAME.fullmatch(name) is not None


def task(name: str) -> AbstractContextManager[None]:
    """Ops inside are a task of their own: what a schedule orders, and a rank runs without interruption.

    By default all forward ops of a pipeline stage are one task, all backward ops another, and all updates a
    third. The gradients of ops inside become a backward task of this name, and the updates of parameters that
    are read inside first an update task. A schedule that is a table may name tasks
    (docs/parallelism/schedules.md).

    Args:
        name: letters, digits and `_.-`; unique for each place: layers that follow each other need two names.

    Raises:
        GraphError: the name has another form, or the task is opened inside of another one.

    Example:
        `with dg.task(f"attention{n}"): x = x + attention(x)`
    """
    where = caller()
    if not _is_task_name(name):
        raise GraphError(
            f"task ({where}): name is {name!r} but must begin with a letter, have only letters, digits "
            'and "_.-", and not begin with "after."; choose another'
        )
    return _opened(name, where)


@contextmanager
def _opened(name: str, where: str) -> Iterator[None]:
    trace = Trace.current()
    if trace.task:
        raise GraphError(
            f"task {name!r} ({where}) is inside of task {trace.task!r}; tasks do not contain each other: "
            "end the first one before"
        )
    with trace.naming(name):
        yield
