"""Task graphs of pipelines, for tests of schedules and the simulated clock."""

from __future__ import annotations

from hypothesis import strategies as st

from distgraph.runtime.schedule.task import Edge, Task, TaskGraph, pipeline


def plain(stages: int, micro_batches: int) -> TaskGraph:
    return pipeline([(stage,) for stage in range(stages)], micro_batches, optimize=False)


def with_transfers(graph: TaskGraph) -> TaskGraph:
    """The graph with a send and a recv task on every edge between stages that is taken per micro-batch."""
    tasks, edges = list(graph.tasks), []
    for edge in graph.edges:
        source, target = graph.task(edge.source), graph.task(edge.target)
        if source.stage == target.stage or not (source.per_micro and target.per_micro):
            edges.append(edge)
            continue
        send, recv = f"send.{source.name}.s{target.stage}", f"recv.{source.name}.s{target.stage}"
        tasks += [
            Task(send, "send", source.stage, source.ranks, True),
            Task(recv, "recv", target.stage, target.ranks, True),
        ]
        edges += [Edge(source.name, send), Edge(send, recv), Edge(recv, target.name)]
        if target.kind == "forward" and any(task.name == f"backward.s{target.stage}" for task in graph.tasks):
            edges.append(Edge(recv, f"backward.s{target.stage}"))  # saved for the backward
    return TaskGraph(tuple(tasks), tuple(edges), graph.micro_batches)


@st.composite
def task_graphs(draw: st.DrawFn) -> TaskGraph:
    """Meshes that overlap or come twice, skips, work once per step, limits, explicit transfers."""
    stages = draw(st.integers(1, 6))
    micro = draw(st.integers(1, 12))
    ranks = [tuple(sorted(draw(st.sets(st.integers(0, 5), min_size=1, max_size=3)))) for _ in range(stages)]
    graph = pipeline(ranks, micro, optimize=draw(st.booleans()))
    if draw(st.booleans()):
        skips = draw(st.sets(st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1)), max_size=3))
        for low, high in sorted(skips):
            if low + 1 < high:
                more = (
                    Edge(f"forward.s{low}", f"forward.s{high}"),
                    Edge(f"backward.s{high}", f"backward.s{low}"),
                )
                graph = TaskGraph(graph.tasks, graph.edges + more, micro)
    if draw(st.booleans()):
        tasks = (
            Task("gather", "sync", 0, ranks[0], False),
            Task("batch", "load", 0, ranks[0], True),
            Task("norm", "sync", 0, tuple(sorted({r for group in ranks for r in group})), False),
        )
        edges = [
            Edge("gather", "forward.s0"),
            Edge("batch", "forward.s0", draw(st.sampled_from([None, 1, 2]))),
        ]
        edges += [Edge(f"backward.s{stage}", "norm") for stage in range(stages)]
        graph = TaskGraph(graph.tasks + tasks, graph.edges + tuple(edges), micro)
    return with_transfers(graph) if draw(st.booleans()) else graph
