"""Run passes by name: verify the graph before and after each, measure it, let the caller watch.

    final = run_passes(graph, ["complete", "refine", "reshard", "lower"], watch=lambda ran: print(ran.after))

The name of a pass is the name of its file and of its option on the command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from distgraph.errors import GraphError
from distgraph.ir.graph import Graph
from distgraph.ir.op_registry import lookup
from distgraph.passes.choose_completion import arrange
from distgraph.passes.complete import complete
from distgraph.passes.dead_code_elimination import prune
from distgraph.passes.decompose import decompose
from distgraph.passes.layout_local_search import refine
from distgraph.passes.lower import lower
from distgraph.passes.reshard import reshard
from distgraph.verifier import verify


@dataclass(frozen=True, slots=True)
class Pass:
    """A graph to graph function and the stages (see `verify`) of what it takes and gives."""

    function: Callable[[Graph], Graph]
    takes: str
    gives: str


@dataclass(frozen=True, slots=True)
class Ran:
    """One pass that ran: its name, the graphs before and after it, seconds without verification."""

    name: str
    before: Graph
    after: Graph
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.before.ops)} -> {len(self.after.ops)} ops in {self.seconds * 1e3:.1f} ms"
        )


def _decompose_all(graph: Graph) -> Graph:
    return decompose(graph, [op.name for op in graph.ops if lookup(op.kind).decompose is not None])


PASSES = {
    "prune": Pass(prune, "serial", "serial"),
    "decompose": Pass(_decompose_all, "serial", "serial"),
    "complete": Pass(complete, "serial", "completed"),
    "refine": Pass(refine, "completed", "completed"),
    "arrange": Pass(arrange, "serial", "completed"),
    "reshard": Pass(reshard, "completed", "resharded"),
    "lower": Pass(lower, "resharded", "lowered"),
}


def run_passes(graph: Graph, names: Iterable[str], watch: Callable[[Ran], None] | None = None) -> Graph:
    """The graph after several passes.

    Args:
        graph: where to start.
        names: of passes, in order.
        watch: called after each pass.

    Raises:
        GraphError: an unknown pass, or a graph that is malformed for the stage it is in.
        ShardingError: what the passes raise.
    """
    wanted = tuple(names)
    for name in wanted:
        if name not in PASSES:
            raise GraphError(f"pass {name!r} does not exist; the passes are {', '.join(PASSES)}")
    for name in wanted:
        step = PASSES[name]
        before = verify(graph, step.takes)
        start = time.perf_counter()
        graph = step.function(before)
        seconds = time.perf_counter() - start
        verify(graph, step.gives)
        if watch is not None:
            watch(Ran(name, before, graph, seconds))
    return graph
