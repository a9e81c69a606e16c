"""Chooses between completions if annotations compete for an axis, and refines the one that it chose.

In:   an annotated serial graph.
Out:  a completed graph.
Invariant: annotations stay. A completion that computes in fewer parts than the first one, or that lays the
    tensors of a distributed algorithm out otherwise, is never chosen.
    Ties go to the first policy. Unless a search is requested, a program whose annotations do not compete and
    suit all its ops is completed as by `complete`.

    %x : f32[256, 512] [x, _]   # user        policy "data":        w1, w2 gathered, their gradients scattered
    %w1 : f32[512, 2048] [_, x] # user   ->   policy "parameters":  x gathered, the result scattered
    %w2 : f32[2048, 512] [x, _] # user
"""

from __future__ import annotations

from collections.abc import Sequence

from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import flops
from distgraph.ir.sharding_spec import DistAttr
from distgraph.passes.analysis.layout_space import rank_orders
from distgraph.passes.complete import complete
from distgraph.passes.layout_local_search import BUDGET, refined
from distgraph.passes.partition import RankProgram
from distgraph.passes.pass_pipeline import pipeline, run_passes
from distgraph.passes.pass_registry import PassContext, register_pass
from distgraph.passes.propagate_shardings import POLICIES, Policy
from distgraph.passes.redistribution.planner import Price, wire_price
from distgraph.passes.split_tasks import Parts

_GAIN = 0.5  # bytes
_SLACK = 1.01  # FLOP per rank of a completion, relative to the first one, up to which it may be chosen
_WORK, _WORK_PER_OP = 5_000, 100  # of a search by default; a change of layout is priced once


def choose_completion(
    graph: Graph,
    default: ProcessMesh | None = None,
    *,
    price: Price = wire_price,
    search: bool = True,
    budget: float | None = None,
) -> Graph:
    """Complete under several policies if annotations compete for an axis; return the cheapest completion.

    Args:
        graph: annotated graph.
        default: mesh of a graph without annotations.
        price: cost of one collective, for the search.
        search: refine every completion (`refine`), which decides between equal claims itself. Otherwise the
            completions are compared by the bytes that a rank sends, also that under the policy "last", and
            the cheapest one is refined if claims were lost or ranks in another order read less.
        budget: work of all searches together (see `refine`), of which each gets an equal share of what is
            left. None for 500,000, without `search` for 5,000 and 100 for every op.
    """
    first = complete(graph, default)
    compete = any(lost.reason == "taken" for lost in first.lost)
    if search:
        policies = POLICIES[1:-1] if compete else ()
        return _searched(graph, default, first, policies, price, BUDGET if budget is None else budget)
    if not (compete or _may_send_less(first)):
        return first
    sends, best = _cheapest(graph, default, first, POLICIES[1:] if compete else ())
    work = _WORK + _WORK_PER_OP * len(best.ops) if budget is None else budget
    other = refined(best, price, work).graph
    if _layouts(other) == _layouts(best) or operations(other) > _SLACK * operations(first):
        return best
    return other if sent(other) < sends - _GAIN else best


def _searched(
    graph: Graph,
    default: ProcessMesh | None,
    first: Graph,
    policies: Sequence[Policy],
    price: Price,
    budget: float,
) -> Graph:
    """The cheapest of the completions under all policies, each of them refined."""
    best = refined(first, price, budget / (1 + len(policies)))
    left = budget - best.work
    for number, policy in enumerate(policies, 1):
        completed = complete(graph, default, policy)
        if _of_algorithms(completed) != _of_algorithms(first):
            continue  # an algorithm allows few layouts, and may refuse those of another policy
        other = refined(completed, price, left / (1 + len(policies) - number))
        left -= other.work
        if other.cost < best.cost - _GAIN:
            best = other
    return best.graph


def _cheapest(
    graph: Graph, default: ProcessMesh | None, first: Graph, policies: Sequence[Policy]
) -> tuple[float, Graph]:
    """The cheapest of the completions under all policies as they are, after the bytes that a rank sends."""
    sends, best, work = sent(first), first, operations(first)
    different = [_layouts(first)]
    for policy in policies:
        completed = complete(graph, default, policy)
        layouts = _layouts(completed)
        if layouts in different or _of_algorithms(completed) != _of_algorithms(first):
            continue
        different.append(layouts)
        if operations(completed) <= _SLACK * work and (other := sent(completed)) < sends - _GAIN:
            sends, best = other, completed
    return sends, best


def _may_send_less(completed: Graph) -> bool:
    """Whether an op cannot keep an annotation, or would read less on its ranks in another order."""
    return any(lost.reason == "whole" for lost in completed.lost) or bool(rank_orders(completed))


def _layouts(completed: Graph) -> list[object]:
    """The layouts of all ops and values, whoever decided them."""
    layouts: list[object] = [op.layout for op in completed.ops]
    return layouts + [(attr.mesh, attr.spec) for attr in completed.attrs.values()]


def _of_algorithms(completed: Graph) -> list[DistAttr]:
    """Layouts of what distributed algorithms read and return."""
    ops = (op for op in completed.ops if op.name in completed.algorithms)
    return [completed.attrs[value.name] for op in ops for value in (*op.operands, *op.results)]


def sent(completed: Graph) -> float:
    """Bytes that the first rank of every mesh sends in a step."""
    passes = pipeline()
    parts: Parts = run_passes(completed, passes.reaching("resharded", "lowered", "tasks"), verified=False)
    total = 0.0
    for rank in {mesh.members[0] for mesh in completed.meshes}:
        program: RankProgram = run_passes(
            parts, passes.reaching("rank"), PassContext(rank=rank), verified=False
        )
        total += program.bytes_sent()
    return total


def operations(completed: Graph) -> float:
    """Floating point operations of one rank: the sum over ops, each divided by its number of parts."""
    total = 0.0
    for op in completed.ops:
        if op.layout is not None and op.operands:
            total += flops(op) / op.layout.mesh.count(axis for _, axes in op.layout.axes for axis in axes)
    return total


@register_pass("choose_completion", requires="serial", stage="completed", excludes=("complete",))
def _run(graph: Graph, context: PassContext) -> Graph:
    """Complete; if annotations compete, send fewest bytes."""
    return choose_completion(
        graph,
        context.mesh,
        price=context.layout_price,
        search=context.search_layouts,
        budget=context.search_budget,
    )
