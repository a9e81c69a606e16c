"""The workspace of a task: memory that kernels and messages allocate, on a device with the NumPy kernels.

*In:* a rank program and its storage.
*Out:* for each task, the most bytes that one of its ops and the messages under way allocate apart from the
planned buffers. A message of several tensors is packed until it has been waited for.
*Invariant:* operands have the layouts that they have in the program: views have the strides of the views that
`codegen` makes. Nothing is allocated to compute the result.

On GPUs, libraries of the vendors run these ops. Their workspaces are not known before they run and are not
counted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from distgraph.ir.collective_registry import WIRE, wire_dtype
from distgraph.ir.dtypes import itemsize, to_numpy
from distgraph.ir.graph import Value
from distgraph.ir.op_registry import freeze, lookup, workspace
from distgraph.passes.partition import LocalOp, LocalTask, RankProgram
from distgraph.runtime.program.loop_plan import LoopPlan, plan_loop
from distgraph.runtime.program.storage import Storage, in_one_block, is_fused, nbytes

Shell = np.ndarray[Any, Any]
"""An array with shape, dtype and strides but no memory of its own."""


def task_workspace(program: RankProgram, storage: Storage) -> dict[str, int]:
    """Task -> the most bytes that one of its ops allocates, with the packed messages that are under way."""
    shells = _OperandShells(program, storage)
    cache: dict[object, int] = {}
    return {task.name: _task_workspace(task, shells, cache) for task in program.tasks}


def _task_workspace(task: LocalTask, shells: _OperandShells, cache: dict[object, int]) -> int:
    most, packed = 0, dict[str, int]()  # message -> bytes
    for number, local in enumerate(task.ops):
        for name in shells.storage.waits.get((task.name, number), ()):
            packed.pop(name, None)
        bytes_packed = _packed_bytes(local, shells.program)
        if bytes_packed:
            packed[local.op.name] = bytes_packed
        most = max(most, sum(packed.values()) + _op_workspace(local, shells, cache))
    return most


def _packed_bytes(local: LocalOp, program: RankProgram) -> int:
    """Bytes that a message allocates: packed pieces of several tensors, or rounded ones."""
    narrow = WIRE in local.op.attrs
    if not narrow and (not is_fused(local) or in_one_block(local)):
        return 0
    reduced_in_place = local.collective is not None and local.collective.result_memory == "operand"
    values = local.op.operands if reduced_in_place else (*local.op.operands, *local.op.results)
    size = sum(nbytes(program, value.name) for value in values)
    return size * itemsize(wire_dtype(local.op)) // itemsize(local.op.results[0].dtype)


def _op_workspace(local: LocalOp, shells: _OperandShells, cache: dict[object, int]) -> int:
    declared = lookup(local.op.kind)
    if local.mode == "loop":
        return _loop_workspace(plan_loop(local))
    if local.mode != "compute" or declared.view:
        return 0
    adds = local.op.results[0].name in shells.storage.into and declared.adds is not None
    operands = [shells.of(value.name) for value in local.op.operands]
    layouts = tuple((x.shape, x.strides, x.dtype.str) for x in operands)
    key = (local.op.kind, layouts, freeze(local.attrs), adds)
    if key not in cache:
        results = [shells.local(value) for value in local.op.results]
        cache[key] = workspace(local.op.kind, operands, local.attrs, results, adds=adds)
    return cache[key]


def _loop_workspace(plan: LoopPlan) -> int:
    """Bytes of the buffers of a loop, which loops of a rank share, and of the kernels inside."""
    kernels = [task_workspace(body.program, body.storage) for body in plan.bodies.values()]
    return plan.nbytes + max((size for each in kernels for size in each.values()), default=0)


class _OperandShells:
    """Makes shells of the operands of one rank."""

    def __init__(self, program: RankProgram, storage: Storage) -> None:
        self.program, self.storage = program, storage
        self._made: dict[str, Shell] = {}
        self._makers = program.makers()

    def local(self, value: Value) -> Value:
        """A value with the shape of its block."""
        return Value(value.name, *self.program.types[value.name])

    def of(self, name: str) -> Shell:
        """A shell with the layout that a value has where it is read."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Shell:
        slot, local = self.storage.slots.get(name), self._makers.get(name)
        if slot is None or local is None or slot.root == name:
            return self._block(name)
        first = local.op.operands[0].name
        if local.mode == "comm.slice":
            apply: Callable[[Any], Any] = operator.itemgetter(local.attrs["slices"])
        elif local.mode == "compute" and lookup(local.op.kind).view:
            apply = partial(lookup(local.op.kind).kernel, np, **local.attrs)
        else:  # it reuses the buffer of another value and has the strides of a value with its own memory
            return self._block(name)
        shell: Shell = apply(self.of(first))
        return shell

    def _block(self, name: str) -> Shell:
        shape, dtype = self.program.types[name]
        kind = to_numpy(dtype)
        strides = [kind.itemsize * math.prod(shape[d + 1 :]) for d in range(len(shape))]
        return np.lib.stride_tricks.as_strided(np.empty(1, kind), shape, strides, writeable=False)
