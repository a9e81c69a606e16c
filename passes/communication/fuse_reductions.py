"""Fuse reductions of single numbers into one message.

In:   a lowered graph.
Out:  the same program, in which every all_reduce of single numbers that runs once a step is fused with the
      others of its phase over the same group: the losses and metrics of a step, the squares of gradients
      whose sum is the norm for clipping.
Invariant: same numbers to the last bit, because a message reduces every element in the order of the ranks,
    whatever its place in the message. Reductions of tensors with more elements do not change.

    %a = comm.all_reduce(%x) {axes=("tp",)}
    %b = mul(%a, %y)                              ->    %a, %c = comm.all_reduce(%x, %z) {axes=("tp",)}
    %c = comm.all_reduce(%z) {axes=("tp",)}             %b = mul(%a, %y)

Reductions of one *level* are fused. The level of a reduction is the number of such reductions on the longest
path to it, so none of a level depends on another one of it, and fused ones only depend on those of lower
levels. A reduction of a single number lasts as long as a message takes to start, so the number of messages
counts and not their bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from dataclasses import replace

from distgraph.ir.collective_registry import collective_of
from distgraph.ir.graph import Graph, Op
from distgraph.ir.step_phases import AFTER, value_phases
from distgraph.passes.pass_registry import register_pass


@register_pass("fuse_reductions", stage="lowered")
def fuse_reductions(graph: Graph) -> Graph:
    """Reduce the single numbers of a phase in one message."""
    phases = value_phases(graph)

    def key(op: Op) -> Hashable | None:
        declared = collective_of(op.kind)
        if declared is None or not declared.fusible or len(op.operands) > 1 or op.results[0].size != 1:
            return None
        return fusion_key(graph, op) if phases[op.name] == AFTER else None

    return fuse(graph, groups_by_level(graph, key))


def fusion_key(graph: Graph, op: Op) -> Hashable:
    """What reductions have in common that one message may carry and that start in the same task."""
    mesh, operand = graph.attrs[op.name].mesh, op.operands[0]
    attrs = tuple(sorted(op.attrs.items()))
    return op.kind, mesh, attrs, operand.dtype, op.role, graph.producers[operand.name].role


def groups_by_level(graph: Graph, key: Callable[[Op], Hashable | None]) -> list[list[Op]]:
    """Ops with equal keys that do not depend on each other, by their level; None is no key.

    Of several ops that reduce the same value, the first is in a group.
    """
    levels: dict[str, int] = {}
    groups: dict[Hashable, list[Op]] = {}
    reduced: set[str] = set()
    for op in graph.ops:
        level = max((levels[value.name] for value in op.operands), default=0)
        found = key(op)
        if found is not None and op.operands[0].name not in reduced:
            reduced.add(op.operands[0].name)
            groups.setdefault((found, level), []).append(op)
            level += 1
        levels.update((value.name, level) for value in op.results)
    return list(groups.values())


def fuse(graph: Graph, groups: list[list[Op]]) -> Graph:
    """The graph with one op in the place of each group; ops that read a result early follow the fused op.

    Args:
        graph: a lowered graph.
        groups: collectives with one operand each. No path leads from one group to itself.
    """
    fused: dict[str, Op] = {}  # name of a member -> the op that takes its place
    for group in groups:
        if len(group) > 1:
            operands = tuple(op.operands[0] for op in group)
            joint = replace(group[-1], operands=operands, results=tuple(op.results[0] for op in group))
            fused.update((op.name, joint) for op in group)
    if not fused:
        return graph
    return graph.with_ops(_in_order([fused.get(op.name, op) for op in graph.ops]))


def _in_order(ops: list[Op]) -> list[Op]:
    """The ops, each once, in the given order, but every op after those whose results it reads."""
    distinct = list({op.name: op for op in ops}.values())
    place = {op.name: number for number, op in enumerate(distinct)}
    readers: dict[str, list[int]] = {}
    missing = [len({value.name for value in op.operands}) for op in distinct]
    for number, op in enumerate(distinct):
        for name in {value.name for value in op.operands}:
            readers.setdefault(name, []).append(number)
    ready = [place[op.name] for op in distinct if not op.operands]
    ordered: list[Op] = []
    while ready:
        op = distinct[heapq.heappop(ready)]
        ordered.append(op)
        for number in (n for value in op.results for n in readers.get(value.name, ())):
            missing[number] -= 1
            if not missing[number]:
                heapq.heappush(ready, number)
    assert len(ordered) == len(distinct), "fused collectives depend on each other"
    return ordered
