"""Parts of values: slices that get memory of their own, and reduced parts that need none.

A slice is a view of the value that it is cut from, and keeps all of it alive. Where that costs much memory,
the slice is copied. The result of a reduce_scatter has memory of its own, which it does not need where the
operand stays alive anyway. Under ZeRO-1 (Rajbhandari et al., 2020, section 5) a rank keeps the gradients of
the step whole, and the part that its optimiser reads is a stretch of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from distgraph.passes.partition import LocalOp
from distgraph.runtime.program.storage import Part, is_fused, nbytes

if TYPE_CHECKING:
    from distgraph.runtime.program.memory_plan import StoragePlan

_MIN_FREED_BYTES: Final = 2**20
"""A slice is copied only if that frees at least this much memory, since a copy takes time."""


def outliving_slices(plan: StoragePlan) -> frozenset[str]:
    """Slices to copy because as views they would keep all of a large value alive after its task.

    Args:
        plan: after `visit`, with all aliases and readers.
    """
    slices: set[str] = set()
    for root, names in plan.aliases.items():
        if plan.slots[root].kind == "source" or root not in plan.made:
            continue
        read_later = [name for name in names if _leaves(plan, name, plan.made[root][0])]
        cut = {_slice_of(plan, name) for name in read_later}
        copies = sum(nbytes(plan.program, name) for name in cut if name)
        if "" not in cut and nbytes(plan.program, root) - copies >= _MIN_FREED_BYTES:
            slices |= cut
    return frozenset(slices)


def _leaves(plan: StoragePlan, name: str, task: str) -> bool:
    """Whether a value is read in another task, or sent."""
    return any(
        place[0] != task or place in plan.sending
        for place in (*plan.readers.get(name, ()), *plan.copies.get(name, ()))
    )


def _slice_of(plan: StoragePlan, name: str) -> str:
    """The nearest slice among a view and the values that it is a view of; "" where there is none."""
    while name in plan.viewed and plan.viewed[name].mode != "comm.slice":
        name = plan.viewed[name].op.operands[0].name
    return name if name in plan.viewed else ""


def reduced_parts(plan: StoragePlan) -> dict[str, Part]:
    """Results to leave in their operands: these are alive for as long anyway, and nothing else reads them.

    Args:
        plan: as for `outliving_slices`.
    """
    return {
        local.op.results[position].name: _part(plan, local, position)
        for task in plan.program.tasks
        for local in task.ops
        if local.collective is not None and local.collective.result_memory == "part"
        for position in range(len(local.op.results))
        if _is_one_stretch(plan, local, position) and _lives_as_long(plan, task.name, local, position)
    }


def _part(plan: StoragePlan, local: LocalOp, position: int) -> Part:
    dim, sizes = (_of_tensor(local, name, position) for name in ("dim", "sizes"))
    member = local.attrs["group"].index(plan.program.rank)
    start = sum(sizes[:member])
    where = (*[slice(None)] * dim, slice(start, start + sizes[member]))
    return Part(local.op.operands[position].name, where)


def _of_tensor(local: LocalOp, name: str, position: int) -> Any:
    """An argument of the call of a collective, for one of its tensors."""
    return local.attrs[name][position] if is_fused(local) else local.attrs[name]


def _is_one_stretch(plan: StoragePlan, local: LocalOp, position: int) -> bool:
    """Whether the part is consecutive in memory that holds the operand and nothing else."""
    operand, result = local.op.operands[position].name, local.op.results[position].name
    shape, dtype = plan.program.types[operand]
    root = plan.slots[operand].root
    return (
        math.prod(shape[: _of_tensor(local, "dim", position)]) == 1
        and plan.program.types[result][1] == dtype
        and nbytes(plan.program, root) == nbytes(plan.program, operand)
        and plan.is_only_reader(operand)
    )


def _lives_as_long(plan: StoragePlan, task: str, local: LocalOp, position: int) -> bool:
    """Whether the operand's memory stays until the result has been read, wherever the result is.

    So it is for the sum over micro-batches, and for what a message is sent from that one later task waits
    for, which alone reads the result.
    """
    operand, result = local.op.operands[position].name, local.op.results[position].name
    maker, number = plan.made[plan.slots[operand].root]
    readers = {place[0] for name in plan.aliases[result] for place in plan.readers.get(name, ())}
    if result in plan.program.graph.live_out or not readers:
        return False
    summed = plan.tasks[maker].ops[number].mode == "accumulate"
    return summed or (not is_fused(local) and len(readers) == 1 and task not in readers)
