"""Chooses between completions if annotations compete for an axis, and refines the completion on request.

In:   an annotated serial graph.
Out:  a completed graph.
Invariant: annotations stay. A completion that computes in fewer parts than the first one, or that lays the
    tensors of a distributed algorithm out otherwise, is never chosen.
    Ties go to the first policy, so that a program without competing annotations is completed as by
    `complete`.

    %x : f32[256, 512] [x, _]   # user        policy "data":        w1, w2 gathered, their gradients scattered
    %w1 : f32[512, 2048] [_, x] # user   ->   policy "parameters":  x gathered, the result scattered
    %w2 : f32[2048, 512] [x, _] # user
"""

from __future__ import annotations

from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import flops
from distgraph.ir.sharding_spec import DistAttr
from distgraph.passes.complete import complete
from distgraph.passes.layout_local_search import BUDGET, Refined, refined
from distgraph.passes.partition import RankProgram
from distgraph.passes.pass_pipeline import pipeline, run_passes
from distgraph.passes.pass_registry import PassContext, register_pass
from distgraph.passes.propagate_shardings import POLICIES
from distgraph.passes.redistribution.planner import Price, wire_price
from distgraph.passes.split_tasks import Parts

_GAIN = 0.5  # bytes
_SLACK = 1.01  # FLOP per rank of a completion, relative to the first one, up to which it may be chosen


def choose_completion(
    graph: Graph,
    default: ProcessMesh | None = None,
    *,
    price: Price = wire_price,
    search: bool = True,
    budget: float = BUDGET,
) -> Graph:
    """Complete under several policies if annotations compete for an axis; return the cheapest completion.

    Args:
        graph: annotated graph.
        default: mesh of a graph without annotations.
        price: cost of one collective, for the search.
        search: also refine each completion (`refine`), which decides between equal claims itself; otherwise
            completions are compared by the bytes that a rank sends, also of that under the policy "last".
        budget: work of all searches together (see `refine`); each gets an equal share of the remaining work.
    """
    first = complete(graph, default)
    compete = any(lost.reason == "taken" for lost in first.lost)
    policies = POLICIES[1 : -1 if search else None] if compete else ()
    if not (policies or search):
        return first
    best = _measured(first, price, search, budget / (1 + len(policies)))
    left, work = budget - best.work, operations(first)
    for number, policy in enumerate(policies, 1):
        completed = complete(graph, default, policy)
        if _of_algorithms(completed) != _of_algorithms(first):
            continue  # an algorithm allows few layouts, and may refuse those of another policy
        if not search and operations(completed) > _SLACK * work:
            continue
        other = _measured(completed, price, search, left / (1 + len(policies) - number))
        left -= other.work
        if other.cost < best.cost - _GAIN:
            best = other
    return best.graph


def _measured(completed: Graph, price: Price, search: bool, budget: float) -> Refined:
    """A completion with its cost: refined if `search`, else as it is."""
    return refined(completed, price, budget) if search else Refined(sent(completed), completed, 0.0)


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
        budget=context.search_budget or BUDGET,
    )
