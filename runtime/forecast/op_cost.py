"""What one op of a rank program costs: FLOPs and bytes from its local shapes, seconds from the cluster.

*In:* local ops, their storage, a cluster.
*Out:* `Work` (see `passes.analysis.op_work`) and seconds.
*Invariant:* the cost of an op is that of its generated code: a view costs nothing, an op that adds into the
sum over micro-batches reads that sum, and a broadcast operand is read at its original size. Seconds are
cached by kind and shapes, so that repeated layers and micro-batches are priced once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from distgraph.ir.collective_registry import WIRE, Collective, wire_dtype
from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import Op, Value
from distgraph.ir.op_registry import freeze, lookup
from distgraph.passes.analysis.op_work import NOTHING, Work, work_of
from distgraph.passes.partition import LocalOp, LocalTask, RankProgram
from distgraph.resources import ComputeCost
from distgraph.resources.runtimes.runtime_model import Kernels
from distgraph.runtime.program.storage import Storage, in_one_block, is_fused, nbytes

__all__ = ["NOTHING", "OpCost", "Work"]

_STRIDED_COPY = "block_slice"
"""Op whose costs packing a message has: both copy a part of a matrix that is not in the nearest caches. A
resource file without costs of this op prices both as all ops that are bound by memory."""


class OpCost:
    """Works and seconds of the computations of one rank program.

    Args:
        program, storage: the rank's program and its memory.
        cost: of the cluster.
        device: number of the rank's device.
        cache: works and seconds by kind and shapes; ranks and programs may share it.
        kernels: of the runtime.
    """

    def __init__(
        self,
        program: RankProgram,
        storage: Storage,
        cost: ComputeCost,
        device: int,
        cache: dict[object, tuple[Work, float]] | None = None,
        kernels: Kernels = Kernels(),  # noqa: B008 - frozen
    ) -> None:
        self.kernels = kernels
        self.program, self.storage, self.cost, self.device = program, storage, cost, device
        self._cache = {} if cache is None else cache
        self._makers = program.makers()
        hardware = cost.cluster.devices[device]
        self._model = (hardware.type, hardware.model, hardware.origin)

    def of_program(self, program: RankProgram, storage: Storage) -> OpCost:
        """The costs of the body of a loop on the same device."""
        return OpCost(program, storage, self.cost, self.device, self._cache, self.kernels)

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
        if key not in self._cache:
            self._cache[key] = (work, self.cost.time(self.device, *work.amounts))
        return self._cache[key][1]

    def more(self, local: LocalOp) -> tuple[int, float]:
        """Number and seconds of the further ops that an op takes under the kernels of the runtime."""
        kind = local.op.kind
        rules, types = self.kernels, self.program.types
        if rules.softmax_passes == 0 or kind not in ("softmax", "softmax_grad") or local.mode != "compute":
            return 0, 0.0
        shape = types[local.op.result.name][0]
        matrices = math.prod(shape[:-2])
        if len(shape) < 2 or matrices % max(1, rules.softmax_matrices) == 0:
            return 0, 0.0
        small = rules.softmax_ops if kind == "softmax" else 0
        one_pass = Work("memory", nbytes=8 * math.prod(shape), dtype="f32")
        seconds = rules.softmax_passes * self.seconds(one_pass) + small * self.seconds(Work("launch"))
        return rules.softmax_passes + small, seconds

    def updated_at_once(self, local: LocalOp) -> bool:
        """Whether an op is part of the one kernel that updates all parameters."""
        update = local.mode == "compute" and local.op.role == "optimize"
        return update and self.kernels.update_bytes is not None

    def update(self, task: LocalTask) -> float:
        """Seconds of the one kernel that updates all parameters of a task."""
        per_parameter = self.kernels.update_bytes
        if per_parameter is None or task.kind != "optimize":
            return 0.0
        results = {value.name for local in task.ops if local.mode == "compute" for value in local.op.results}
        producers, types = self.program.graph.producers, self.program.types
        parameters = {op.attrs.get("name") for op in producers.values() if op.kind == "param"}
        count = sum(
            math.prod(types[new.name][0])
            for name, new in self.program.graph.updates
            if name in parameters and new.name in results
        )
        moved = Work("memory", nbytes=round(per_parameter * count), dtype="f32")
        return self.seconds(moved) if count else 0.0

    def scaling(self, local: LocalOp) -> tuple[Work, float]:
        """Work and seconds of dividing a sum over micro-batches by their number, once per step."""
        slot = self.storage.slots[local.op.result.name]
        value = local.op.operands[0].name
        added = value in self.storage.into and self.storage.slots[value].kind == "view"
        unscaled = self.kernels.scaled_loss or self.program.graph.micro_batches == 1
        if slot.kind == "view" or added or unscaled:
            return NOTHING, 0.0
        size, dtype = nbytes(self.program, local.op.result.name), local.op.result.dtype
        work = Work("memory", nbytes=2 * size, dtype=dtype, op="multiply")
        return work, self.seconds(work)

    def work(self, local: LocalOp) -> Work:
        """Work of a local op of any mode, without its communication."""
        mode = local.mode
        if mode == "compute":
            return self._compute_work(local)
        if mode == "accumulate":
            return self._accumulation_work(local)
        declared = local.collective
        if declared is not None and declared.local:
            copied = local.attrs.get("keep", True) and not self._is_view(local)
            return self._copy_work(local) if copied else NOTHING
        if mode == "recv" and local.attrs["copies"]:
            size = itemsize(local.op.result.dtype)
            moved = sum(math.prod(s.stop - s.start for s in want) for _, want in local.attrs["copies"])
            return Work("memory", nbytes=2 * size * moved, dtype=local.op.result.dtype)
        return NOTHING if declared is None else self._packing_work(local, declared)

    def _packing_work(self, local: LocalOp, declared: Collective) -> Work:
        """Copies that a rank makes for a collective (see `runtime.transport.collectives`).

        Pieces along a dim other than the first are packed, as are those of several tensors in one message,
        and an operand that is still read is not reduced in place. A part of another value is copied where it
        is not contiguous; copies of other such views are not modelled. Devices whose messages are moved by
        other hardware have no such work, because copies there are fast compared to messages.
        """
        if WIRE in local.op.attrs:  # rounded before, and widened after, on every device
            values = (*local.op.operands, *local.op.results)
            size = sum(nbytes(self.program, value.name) for value in values)
            narrow = size * itemsize(wire_dtype(local.op)) // itemsize(values[0].dtype)
            return Work("memory", nbytes=size + narrow, dtype=values[0].dtype, op="cast")
        if not self.cost.cluster.devices[self.device].compute.host.moves_messages:
            return NOTHING
        operand, result = local.op.operands[0].name, local.op.name
        copied = 0
        if is_fused(local) and not in_one_block(local):
            values = (*local.op.operands, *local.op.results)
            copied = sum(nbytes(self.program, value.name) for value in values)
        for name, dim in declared.packed.items() if len(local.op.results) == 1 else ():
            value = operand if name == "operand" else result
            shape = self.program.types[value][0]
            if math.prod(shape[: local.attrs[dim]]) > 1:
                copied += nbytes(self.program, value)
        slots = self.storage.slots
        if not copied or "operand" not in declared.packed:
            copied += self._scattered_part(operand)
        if declared.result_memory == "operand":
            pairs = zip(local.op.operands, local.op.results, strict=True)
            elsewhere = (r.name for o, r in pairs if slots[o.name].root != slots[r.name].root)
            copied = sum(nbytes(self.program, name) for name in elsewhere)
        if not copied:
            return NOTHING
        return Work("memory", nbytes=2 * copied, dtype=local.op.results[0].dtype, op=_STRIDED_COPY)

    def _scattered_part(self, name: str) -> int:
        """Bytes of a value that is a part of another one and not contiguous in it, else 0."""
        maker = self._makers.get(name)
        if maker is None or maker.mode != "comm.slice" or not self._is_view(maker):
            return 0
        whole = self.program.types[maker.op.operands[0].name][0]
        part = self.program.types[name][0]
        cut = max(
            (dim for dim, lengths in enumerate(zip(whole, part, strict=True)) if len(set(lengths)) > 1),
            default=0,
        )
        return nbytes(self.program, name) if math.prod(part[:cut]) > 1 else 0

    def _is_view(self, local: LocalOp) -> bool:
        slot = self.storage.slots[local.op.results[0].name]
        return slot.kind == "view"

    def _copy_work(self, local: LocalOp) -> Work:
        name = local.op.results[0].name
        return Work("memory", nbytes=2 * nbytes(self.program, name), dtype=local.op.results[0].dtype)

    def _accumulation_work(self, local: LocalOp) -> Work:
        value = local.op.operands[0].name
        if self._is_view(local) or (value in self.storage.into and self.storage.slots[value].kind == "view"):
            return NOTHING
        size, dtype = nbytes(self.program, local.op.result.name), local.op.result.dtype
        return Work("memory", nbytes=3 * size, dtype=dtype, op="add")

    def _compute_work(self, local: LocalOp) -> Work:
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
        if key not in self._cache:
            self._cache[key] = (work_of(_local_op(local, types), read, adds), 0.0)
        return self._cache[key][0]

    def _read(self, name: str) -> int:
        """Bytes that are read for an operand: for a view at most the size of its root."""
        root = self.storage.slots[name].root
        size = nbytes(self.program, name)
        return size if root == name else min(size, nbytes(self.program, root))


def _local_op(local: LocalOp, types: Mapping[str, tuple[tuple[int, ...], str]]) -> Op:
    """The op with the shapes of one rank."""

    def local_value(value: Value) -> Value:
        return Value(value.name, *types[value.name])

    op = local.op
    return replace(
        op,
        operands=tuple(map(local_value, op.operands)),
        results=tuple(map(local_value, op.results)),
        attrs=local.attrs,
        layout=None,
    )
