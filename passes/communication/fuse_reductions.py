"""Fuse reductions of single numbers into one message.

In:   a lowered graph.
Out:  the same program, in which every all_reduce of single numbers that runs once a step is fused with the
      others of its phase over the same group: the losses and metrics of a step, the squares of gradients
      whose sum is the norm for clipping.
Invariant: same numbers; to the last bit in one process and over MPI, where a message reduces every element
    in the order of the ranks, whatever its place in the message. Reductions of tensors with more elements do
    not change.

    %a = comm.all_reduce(%x) {axes=("tp",)}
    %b = mul(%a, %y)                              ->    %a, %c = comm.all_reduce(%x, %z) {axes=("tp",)}
    %c = comm.all_reduce(%z) {axes=("tp",)}             %b = mul(%a, %y)

Reductions of one *level* are fused. The level of a reduction is the number of such reductions on the longest
path to it, so none of a level depends on another one of it, and fused ones only depend on those of lower
levels. A reduction of a single number lasts as long as a message takes to start, so the number of messages
counts and not their bytes. Where a task of the user waits for the result, only reductions behind the same
tasks are fused (see `task_waits`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from distgraph.ir.collective_registry import collective_of
from distgraph.ir.graph import Graph, Op
from distgraph.ir.step_phases import AFTER, value_phases
from distgraph.passes.communication.task_waits import task_waits
from distgraph.passes.pass_registry import register_pass


@register_pass("fuse_reductions", stage="lowered")
def fuse_reductions(graph: Graph) -> Graph:
    """Reduce the single numbers of a phase in one message."""
    numbers = [op for op in graph.ops if _is_number(op)]
    if len(numbers) < 2:
        return graph
    phases, waits = value_phases(graph), task_waits(graph)

    def key(op: Op) -> Hashable | None:
        if not _is_number(op) or phases[op.name] != AFTER:
            return None
        return fusion_key(graph, op), waits.get(op.name)

    return fuse(graph, groups_by_level(graph, key))


def is_fusible(op: Op) -> bool:
    """Whether an op is a collective of one tensor that may share a message with others."""
    declared = collective_of(op.kind)
    return declared is not None and bool(declared.fusible) and len(op.operands) == 1


def _is_number(op: Op) -> bool:
    return op.kind == "comm.all_reduce" and op.results[0].size == 1 and is_fusible(op)


def fusion_key(graph: Graph, op: Op) -> Hashable:
    """What reductions have in common that one message may carry and that start in the same task."""
    mesh, operand = graph.attrs[op.operands[0].name].mesh, op.operands[0]
    declared = collective_of(op.kind)
    free = ("dim",) if declared is not None and declared.fusible == "pieces" else ()
    attrs = tuple(sorted((name, value) for name, value in op.attrs.items() if name not in free))
    return op.kind, mesh, attrs, operand.dtype, op.role, graph.producers[operand.name].role


def groups_by_level(graph: Graph, key: Callable[[Op], Hashable | None]) -> list[list[Op]]:
    """Ops with equal keys that do not depend on each other, by their level; None is no key.

    Of several ops of one key with the same operand, the first is in a group.
    """
    levels: dict[str, int] = {}
    groups: dict[Hashable, list[Op]] = {}
    occupied: set[tuple[Hashable, str]] = set()
    for op in graph.ops:
        level = max((levels[value.name] for value in op.operands), default=0)
        group_key = key(op)
        if group_key is not None and (group_key, op.operands[0].name) not in occupied:
            occupied.add((group_key, op.operands[0].name))
            groups.setdefault((group_key, level), []).append(op)
            level += 1
        levels.update((value.name, level) for value in op.results)
    return list(groups.values())


def fuse(graph: Graph, groups: list[list[Op]]) -> Graph:
    """The graph with one op in the place of each group; ops that read a result early follow the fused op.

    The members of a group have one operand each, and no path leads from one of them to another.
    """
    fused: dict[str, Op] = {}  # name of a member -> the op that takes its place
    waiting: dict[str, int] = {}  # name of that op -> its members that are still to come
    for group in groups:
        if len(group) > 1:
            operands = tuple(op.operands[0] for op in group)
            results = tuple(op.results[0] for op in group)
            joint = replace(group[-1], operands=operands, results=results, attrs=_joint_attrs(group))
            fused.update((op.name, joint) for op in group)
            waiting[joint.name] = len(group)
    if not fused:
        return graph
    order = _Order({value.name for op in fused.values() for value in op.results})
    for op in graph.ops:
        joint = fused.get(op.name, op)
        waiting[joint.name] = waiting.get(joint.name, 1) - 1
        if not waiting[joint.name]:
            order.add(joint)
            if joint is not op:
                order.add_postponed()
    assert not order.postponed, "fused collectives depend on each other"
    return graph.with_ops(order.ops)


def _joint_attrs(group: list[Op]) -> dict[str, Any]:
    """Attributes of the op in the place of a group; what is sent in pieces has a dim for each tensor."""
    attrs, declared = dict(group[-1].attrs), collective_of(group[-1].kind)
    if declared is not None and declared.fusible == "pieces":
        del attrs["dim"]
        attrs["dims"] = tuple(op.attrs["dim"] for op in group)
    return attrs


class _Order:
    """Ops in an order in which each follows its operands.

    Args:
        missing: results of ops that come later than they did.
    """

    def __init__(self, missing: set[str]) -> None:
        self.missing = missing
        self.ops: list[Op] = []
        self.postponed: list[Op] = []

    def add(self, op: Op) -> None:
        """Append an op, or postpone it if an operand is missing."""
        late = any(value.name in self.missing for value in op.operands)
        if late:
            self.postponed.append(op)
            self.missing.update(value.name for value in op.results)
        else:
            self.ops.append(op)
            self.missing.difference_update(value.name for value in op.results)

    def add_postponed(self) -> None:
        """Append the postponed ops whose operands are there by now, until none of the others has all."""
        left = len(self.postponed) + 1
        while len(self.postponed) < left:
            left = len(self.postponed)
            postponed, self.postponed = self.postponed, []
            for op in postponed:
                self.add(op)
