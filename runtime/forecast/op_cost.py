"""What one op of a rank program costs: FLOPs and bytes from its local shapes, seconds from the cluster.

*In:* local ops, their storage, a cluster.
*Out:* `Work` (see `passes.work`) and seconds.
*Invariant:* an
op costs what the generated program does for it: a view costs nothing, what is computed into the sum over
micro-batches reads that sum, a broadcast operand is read at its own size. Seconds are remembered by kind
and shapes, so that repeated layers and micro-batches are priced once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from distgraph.ir.collective_registry import Collective
from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import Op, Value
from distgraph.ir.op_registry import freeze, lookup
from distgraph.passes.analysis.op_work import NOTHING, Work, work_of
from distgraph.passes.partition import LocalOp, RankProgram
from distgraph.resources import ComputeCost
from distgraph.runtime.program.storage import Storage, nbytes

__all__ = ["NOTHING", "OpCost", "Work"]


class OpCost:
    """Works and seconds of the computations of one rank program.

    Args:
        program, storage: the rank's program and its memory.
        cost: of the cluster.
        device: number of the rank's device.
        known: works and seconds found so far; ranks and programs may share it.
    """

    def __init__(
        self,
        program: RankProgram,
        storage: Storage,
        cost: ComputeCost,
        device: int,
        known: dict[object, tuple[Work, float]] | None = None,
    ) -> None:
        self.program, self.storage, self.cost, self.device = program, storage, cost, device
        self._known = {} if known is None else known
        found = cost.cluster.devices[device]
        self._model = (found.type, found.model, found.origin)

    def of(self, local: LocalOp) -> tuple[Work, float]:
        """Work and seconds of the computation in a local op of any mode, without communication."""
        work = self.work(local)
        if work is NOTHING:
            return work, 0.0
        return work, self.seconds(work)

    def seconds(self, work: Work) -> float:
        """Seconds of a work on the rank's device."""
        if work.kind == "none":
            return 0.0
        key = (self._model, work)
        if key not in self._known:
            self._known[key] = (work, self.cost.time(self.device, *work.amounts))
        return self._known[key][1]

    def scaling(self, local: LocalOp) -> tuple[Work, float]:
        """The division of a sum over micro-batches by their number, once a step."""
        slot = self.storage.slots[local.op.result.name]
        value = local.op.operands[0].name
        added = value in self.storage.into and self.storage.slots[value].kind == "view"
        if slot.kind == "view" or added or self.program.graph.micro_batches == 1:
            return NOTHING, 0.0
        size, dtype = nbytes(self.program, local.op.result.name), local.op.result.dtype
        work = Work("memory", nbytes=2 * size, dtype=dtype, op="multiply")
        return work, self.seconds(work)

    def work(self, local: LocalOp) -> Work:
        """What there is to do in a local op of any mode, without communication."""
        mode = local.mode
        if mode == "compute":
            return self._computed(local)
        if mode == "accumulate":
            return self._accumulated(local)
        if mode in ("comm.slice", "comm.mask"):
            kept = mode == "comm.slice" or local.attrs["keep"]
            return self._copy(local) if kept and not self._is_view(local) else NOTHING
        if mode == "recv" and local.attrs["copies"]:
            size = itemsize(local.op.result.dtype)
            moved = sum(math.prod(s.stop - s.start for s in want) for _, want in local.attrs["copies"])
            return Work("memory", nbytes=2 * size * moved, dtype=local.op.result.dtype)
        declared = local.collective
        return NOTHING if declared is None else self._packed(local, declared)

    def _packed(self, local: LocalOp, declared: Collective) -> Work:
        """Copies that a rank makes for a collective, see `collectives`: pieces along a dim that is not the
        first go one after the other, and what others still read is not reduced in place. (A view that does
        not lie in one piece is copied, too; that is left out.) None on devices whose messages others move:
        copies are fast there beside the messages.
        """
        if self.cost.cluster.devices[self.device].compute.message is None:
            return NOTHING
        operand, result = local.op.operands[0].name, local.op.result.name
        copied = 0
        for name, dim in declared.packed.items():
            value = operand if name == "operand" else result
            shape = self.program.types[value][0]
            if math.prod(shape[: local.attrs[dim]]) > 1:
                copied += nbytes(self.program, value)
        slots = self.storage.slots
        if declared.result_memory == "operand" and slots[operand].root != slots[result].root:
            copied = nbytes(self.program, result)
        if not copied:
            return NOTHING
        return Work("memory", nbytes=2 * copied, dtype=local.op.result.dtype, op="reshape")

    def _is_view(self, local: LocalOp) -> bool:
        slot = self.storage.slots[local.op.results[0].name]
        return slot.kind == "view"

    def _copy(self, local: LocalOp) -> Work:
        name = local.op.results[0].name
        return Work("memory", nbytes=2 * nbytes(self.program, name), dtype=local.op.results[0].dtype)

    def _accumulated(self, local: LocalOp) -> Work:
        value = local.op.operands[0].name
        if self._is_view(local) or (value in self.storage.into and self.storage.slots[value].kind == "view"):
            return NOTHING
        size, dtype = nbytes(self.program, local.op.result.name), local.op.result.dtype
        return Work("memory", nbytes=3 * size, dtype=dtype, op="add")

    def _computed(self, local: LocalOp) -> Work:
        declared, first = lookup(local.op.kind), local.op.results[0].name
        slot = self.storage.slots[first]
        if declared.view and slot.kind == "view" and slot.root != first:
            return NOTHING
        read = tuple(self._read(v.name) for v in local.op.operands)
        adds = first in self.storage.into and slot.kind == "view"
        types = self.program.types
        shapes = tuple(types[v.name] for v in (*local.op.operands, *local.op.results))
        key: object = (local.op.kind, shapes, read, adds)
        if declared.cost in ("matmul", "lookup"):
            key = (key, freeze(local.attrs))
        if key not in self._known:
            self._known[key] = (work_of(_localized(local, types), read, adds), 0.0)
        return self._known[key][0]

    def _read(self, name: str) -> int:
        """Bytes in memory behind an operand: of a view no more than what it is a view of."""
        root = self.storage.slots[name].root
        own = nbytes(self.program, name)
        return own if root == name else min(own, nbytes(self.program, root))


def _localized(local: LocalOp, types: Mapping[str, tuple[tuple[int, ...], str]]) -> Op:
    """The op with the shapes of one rank."""

    def own(value: Value) -> Value:
        return Value(value.name, *types[value.name])

    op = local.op
    return replace(
        op,
        operands=tuple(map(own, op.operands)),
        results=tuple(map(own, op.results)),
        attrs=local.attrs,
        layout=None,
    )
