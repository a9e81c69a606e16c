"""Where a rank program waits for its collectives: immediately before the first op that reads a result.

A product in slices (MeshSlice, see `distgraph/passes/matmul_algorithms/meshslice.py`) starts to gather the
operands of its next slice before it multiplies one. The wait for the operands of this one is then before that
start: otherwise both would share the links, and the product would begin later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distgraph.passes.partition import LocalOp
from distgraph.runtime.program.storage import Place, in_one_block, is_fused, is_started

if TYPE_CHECKING:
    from distgraph.runtime.program.memory_plan import StoragePlan


def place_waits(plan: StoragePlan) -> None:
    """Enter where the program waits for each collective, and until then its use of memory."""
    position = {task.name: i for i, task in enumerate(plan.program.tasks)}
    waits: dict[Place, list[str]] = {}
    for task in plan.program.tasks:
        late = []
        for number, local in enumerate(task.ops):
            if not is_started(local):
                continue
            result, roots = local.op.name, [plan.slots[v.name].root for v in local.op.results]
            aliases = [name for root in roots for name in plan.aliases[root]]
            all_readers = [p for n in aliases for p in plan.readers.get(n, ())]
            readers = [p for p in all_readers if p[0] != task.name or p[1] > number]  # not the op itself
            here = [p for p in readers if p[0] == task.name]
            if here:
                place = _before_next_slice(plan, min(here))
                waits.setdefault(place, []).append(result)
            elif readers:
                late.append(result)
                place = min(readers, key=lambda p: (position[p[0]], p[1]))
            else:  # no op reads it: wait at the end of the task, before its scratch memory is reused
                place = (task.name, len(task.ops))
                waits.setdefault(place, []).append(result)
                for root in roots:
                    plan.uses[root].append(place)
            packed = is_fused(local) and not in_one_block(local)  # what is sent is a copy
            for value in local.op.operands if local.mode != "recv" and not packed else ():
                plan.uses[plan.slots[value.name].root].append(place)
        plan.storage.late[task.name] = tuple(late)
    plan.storage.waits = {place: tuple(names) for place, names in waits.items()}


def _before_next_slice(plan: StoragePlan, place: Place) -> Place:
    """The start of the next slice's first collective where that stands immediately before an op; else the
    op's own place."""
    (task, number), first = place, place
    ops = plan.tasks[task].ops
    if _belongs_to_slice(plan, ops[number]):
        return place
    read = {plan.slots[v.name].root for v in ops[number].op.operands if v.name in plan.slots}
    for before in range(number - 1, -1, -1):
        local = ops[before]
        roots = {plan.slots[v.name].root for v in local.op.results if v.name in plan.slots}
        if roots & read or not _belongs_to_slice(plan, local):
            break
        if is_started(local):
            first = task, before
    return first


def _belongs_to_slice(plan: StoragePlan, local: LocalOp) -> bool:
    """Whether an op cuts a slice of an operand, or communicates one."""
    if not is_started(local):
        return local.op.kind == "block_slice"
    makers = (plan.program.graph.producers.get(value.name) for value in local.op.operands)
    return any(maker is not None and maker.kind == "block_slice" for maker in makers)
