"""What one op of a rank program costs: FLOPs and bytes from its local shapes, seconds from the cluster.

*In:* local ops, their storage, a cluster.
*Out:* `Work` (what there is to do) and seconds.
*Invariant:* an
op costs what the generated program does for it: a view costs nothing, what is computed into the sum over
micro-batches reads that sum, a broadcast operand is read at its own size. Seconds are remembered by kind
and shapes, so that repeated layers and micro-batches are priced once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from distgraph.dtypes import itemsize
from distgraph.graph import Op, Value
from distgraph.ops.registry import flops, freeze, lookup, rule_of
from distgraph.passes.partition import LocalOp, RankProgram
from distgraph.resources import ComputeCost
from distgraph.resources.compute import Dims
from distgraph.runtime.storage import Storage, nbytes


@dataclass(frozen=True, slots=True)
class Work:
    """What an op does on one rank.

    Attributes:
        kind: matmul, memory, lookup, launch; "none" for what is only a name for memory.
        flops: floating point operations.
        nbytes: bytes read and written.
        dtype: of the first operand.
        dims: (batch, m, n, k) of a matmul, else ones.
        op: kind of the op; "" for a copy.
    """

    kind: str
    flops: float = 0.0
    nbytes: float = 0.0
    dtype: str = "f32"
    dims: Dims = (1, 1, 1, 1)
    op: str = ""


NOTHING = Work("none")


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
            time = self.cost.time(
                self.device, work.kind, work.flops, work.nbytes, work.dtype, work.dims, work.op
            )
            self._known[key] = (work, time)
        return self._known[key][1]

    def scaling(self, local: LocalOp) -> tuple[Work, float]:
        """The division of a sum over micro-batches by their number, once a step."""
        slot = self.storage.slots[local.op.result.name]
        value = local.op.operands[0].name
        added = value in self.storage.into and self.storage.slots[value].kind == "view"
        if slot.kind == "view" or added or self.program.graph.micro_batches == 1:
            return NOTHING, 0.0
        work = Work(
            "memory", nbytes=2 * nbytes(self.program, local.op.result.name), dtype=local.op.result.dtype
        )
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
        return NOTHING

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
        return Work(
            "memory", nbytes=3 * nbytes(self.program, local.op.result.name), dtype=local.op.result.dtype
        )

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
            self._known[key] = (_work_of(local, types, read, adds), 0.0)
        return self._known[key][0]

    def _read(self, name: str) -> int:
        """Bytes in memory behind an operand: of a view no more than what it is a view of."""
        root = self.storage.slots[name].root
        own = nbytes(self.program, name)
        return own if root == name else min(own, nbytes(self.program, root))


def _work_of(
    local: LocalOp, types: Mapping[str, tuple[tuple[int, ...], str]], read: tuple[int, ...], adds: bool
) -> Work:
    op = _localized(local, types)
    declared = lookup(op.kind)
    written = sum(v.nbytes for v in op.results)
    dtype = op.operands[0].dtype if op.operands else op.results[0].dtype
    if declared.cost == "launch" or written == 0:
        return Work("launch", dtype=dtype, op=op.kind)
    if declared.cost == "lookup":
        read = tuple(
            min(size, written) if _is_located(op, i) else size for i, size in enumerate(read)
        )  # rows that nobody asks for are not read
    total = sum(read) + written * (2 if adds else 1)
    if declared.cost != "matmul" or len(op.operands) == 1:
        kind = "lookup" if declared.cost == "lookup" else "memory"
        return Work(kind, 0.0, total, dtype, op=op.kind)
    count = flops(op)
    return Work("matmul", count, total, dtype, _dims(op, count), op.kind)


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


def _is_located(op: Op, operand: int) -> bool:
    rule = rule_of(op)
    return any(index in rule.located for dim in rule.operands[operand] for index in dim)


def _dims(op: Op, count: int) -> Dims:
    """(batch, m, n, k) of a contraction."""
    if op.kind.startswith("conv"):
        return _convolution(op, count)
    if op.kind.startswith("attention"):
        q, k = (
            (op.operands[1], op.operands[2])
            if op.kind == "attention_grad"
            else (op.operands[0], op.operands[1])
        )
        return math.prod(q.shape[:2]), q.shape[2], k.shape[2], q.shape[3]
    rule = rule_of(op)
    left, right = ({i for dim in rule.operands[side] for i in dim} for side in (0, 1))
    result = {i for dim in rule.results[0] for i in dim}

    def size(indices: set[str]) -> int:
        return math.prod(rule.sizes[i] for i in indices)

    batch, m, n = size(left & right & result), size((left & result) - right), size((right & result) - left)
    return batch, m, n, max(1, size(left | right)) // max(1, batch * m * n)


def _convolution(op: Op, count: int) -> Dims:
    """A convolution as the matmul of its patches."""
    if op.kind == "conv_grad_weight":
        m, n = op.result.shape[0], math.prod(op.result.shape[1:])
    else:
        m, n = op.result.shape[0] * math.prod(op.result.shape[2:]), op.result.shape[1]
    return 1, m, n, max(1, round(count / (2 * max(1, m * n))))
