"""Passes: pure functions from a program to a program, one file a pass, file name = pass name.

Importing this package registers the passes of `pass_pipeline`; `register_pass` registers one from elsewhere.
"""

from distgraph.passes import (
    choose_completion,
    communication,
    complete,
    decompose,
    layout_local_search,
    lower,
    matmul_algorithms,
    partition,
    reshard,
    serial,
    split_tasks,
    task_splitting,
)
from distgraph.passes.pass_registry import PassContext, register_pass

__all__ = [
    "PassContext",
    "choose_completion",
    "complete",
    "communication",
    "decompose",
    "layout_local_search",
    "lower",
    "matmul_algorithms",
    "partition",
    "register_pass",
    "reshard",
    "serial",
    "split_tasks",
    "task_splitting",
]
