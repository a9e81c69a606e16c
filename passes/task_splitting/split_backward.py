"""Split the backward tasks: gradients of activations first, gradients of parameters in tasks of their own.

In:   the tasks of a step.
Out:  the same ops in more tasks: of every backward task, the products and reductions that make gradients of
      parameters, and what depends on nothing but them, are a task of the kind "weight". It needs results of
      the backward task, and no other stage waits for it.
Invariant: every op is in the task in which it was, or in the weight task that stands behind that one; ops of
      a task keep their order.

    backward.s1: %dw = einsum(%x, %g)               backward.s1: %dx = einsum(%g, %w)
                 %dx = einsum(%g, %w)       ->                   %sent = comm.transfer(%dx)
                 %sent = comm.transfer(%dx)         weight.s1:   %dw = einsum(%x, %g)
                 %sum = accumulate(%dw)                          %sum = accumulate(%dw)

An op that computes both gradients at once, as that of a norm or a custom op may, stays in the backward task;
what is accumulated is in the weight task in any case.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.
"""

from __future__ import annotations

from dataclasses import replace

from distgraph.ir.graph import Graph, Op
from distgraph.ir.op_registry import lookup
from distgraph.passes.pass_registry import register_pass
from distgraph.passes.split_tasks import Part, Parts
from distgraph.passes.task_splitting.task_edges import task_edges

_SUMS = ("reduce_sum",)
_SAME_NUMBERS = ("add", "cast", "reshape", "transpose", "broadcast_to", "identity")
"""Ops between a product and the accumulation of its result, or of which only a product reads the result."""


@register_pass("split_backward", stage="tasks", after=("split_user_tasks",))
def split_backward(parts: Parts) -> Parts:
    """Compute gradients of parameters in tasks of their own."""
    tasks: list[Part] = []
    for part in parts.tasks:
        late = _weight_ops(parts.graph, part) if part.kind == "backward" else frozenset()
        if not late or len(late) == len(part.body):
            tasks.append(part)
            continue
        first, second = ([op for op in part.body if (op.name in late) is side] for side in (False, True))
        tasks.append(replace(part, body=tuple(first), tail=part.tail - late))
        name = part.name.replace("backward", "weight", 1)
        tasks.append(replace(part, name=name, kind="weight", body=tuple(second), tail=part.tail & late))
    return replace(parts, tasks=tuple(tasks), edges=task_edges(parts.graph, tasks))


def _weight_ops(graph: Graph, part: Part) -> frozenset[str]:
    """Names of the ops of a backward task that may wait: accumulations, what follows, what only they need."""
    inside = {op.name for op in part.body}
    late: set[str] = set()
    for op in part.body:
        if op.kind == "accumulate" or any(graph.producers[v.name].name in late for v in op.operands):
            late.add(op.name)
    before_product: set[str] = set()  # ops of which products read the results: other products stay
    for op in reversed(part.body):
        readers = [user for value in op.results for user in graph.users[value.name]]
        if op.name in late or not readers or any(user.name not in late for user in readers):
            continue
        feeds = any(_is_product(user) or user.name in before_product for user in readers)
        if _is_product(op) and not feeds:
            late.add(op.name)
        elif op.kind in _SAME_NUMBERS and all(user.name in inside for user in readers):
            late.add(op.name)
            if feeds:
                before_product.add(op.name)
    return frozenset(late)


def _is_product(op: Op) -> bool:
    return lookup(op.kind).cost == "matmul" or op.kind in _SUMS
