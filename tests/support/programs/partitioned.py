"""Run a completed graph on in-process ranks and join what the ranks hold into whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from support.programs.rank_threads import run_ranks

import distgraph.ops  # noqa: F401  registers every op
from distgraph.ir.graph import Graph
from distgraph.ir.reference_interpreter import interpret
from distgraph.ir.sharding_spec import DistAttr
from distgraph.runtime.execute.worker import Worker
from distgraph.runtime.program.build import Build, build
from distgraph.runtime.transport.transport import Transport

Array = Any
Feeds = Sequence[Mapping[str, Array]]
TIME_LIMIT = 100.0  # seconds after which a rank that waits in vain gives up


Blocks = tuple[dict[str, list[Array]], dict[str, Array]]
"""What one rank holds after a step: label -> block of every micro-batch, param or state -> new block."""


def run_partitioned(
    completed: Graph,
    feeds: Feeds,
    params: Mapping[str, Array],
    policy: str = "1f1b",
    wrap: Callable[[Transport], Any] = lambda transport: transport,
    executor: str = "static",
) -> tuple[dict[str, list[Array]], dict[str, Array], Build]:
    """One step of a completed graph.

    Args:
        completed: graph of one micro-batch.
        feeds: for every micro-batch its inputs by name; a scalar is taken from the first.
        params: whole params and states by name.
        policy: of the schedule.
        wrap: makes the transport that a rank uses from its own.
        executor: "static" or "actors".

    Returns:
        label -> whole output of every micro-batch (one where it is accumulated), param -> whole new value,
        the build.

    Raises:
        AssertionError: two ranks that should hold the same block do not, or a block is held by no rank.
    """
    built = build(completed, micro_batches=len(feeds), policy=policy)
    held = run_ranks(
        max(built.ranks) + 1,
        lambda t: run_rank(built, wrap(t), feeds, params, executor),
        limit=TIME_LIMIT,
    )
    return *joined(built, held), built


def run_rank(
    built: Build, transport: Any, feeds: Feeds, params: Mapping[str, Array], executor: str = "static"
) -> Blocks:
    """One step of one rank."""
    rank, attrs = transport.rank, built.lowered.attrs
    names = {op.name: str(op.attrs["name"]) for op in built.lowered.sources("param", "state")}
    inputs = {op.name: str(op.attrs["name"]) for op in built.lowered.sources("input")}

    def block(name: str, array: Array) -> Array:
        attr = attrs[name]
        return np.array(array[attr.spec.slices(array.shape, attr.mesh, rank)])

    sources = {v: block(v, params[n]) for v, n in names.items() if rank in attrs[v].mesh}
    actors = built.actor_plan if executor == "actors" else None
    worker = Worker(built.program(rank), built.schedule, transport, np, sources, actors=actors)
    local: dict[str, Any] = {}
    for value, name in inputs.items():
        if rank in attrs[value].mesh:
            scalar = np.ndim(feeds[0][name]) == 0
            local[name] = feeds[0][name] if scalar else [block(value, f[name]) for f in feeds]
    found = worker.step(local)
    outputs = {
        label: [np.array(x) for x in (y if isinstance(y, list) else [y])] for label, y in found.items()
    }
    return outputs, {v: np.array(x) for v, x in sources.items()}


def joined(built: Build, held: Sequence[Blocks]) -> Blocks:
    """Whole outputs and params of what all ranks hold."""
    attrs = built.lowered.attrs
    names = {op.name: str(op.attrs["name"]) for op in built.lowered.sources("param", "state")}
    outputs = {}
    for label, value in built.lowered.outputs:
        attr = attrs[value.name]
        count = len(held[attr.mesh.members[0]][0][label])
        pieces = [{r: held[r][0][label][m] for r in attr.mesh.members} for m in range(count)]
        outputs[label] = [join(label, value.shape, attr, piece) for piece in pieces]
    updates = {}
    for old, _ in built.lowered.updates:
        attr = attrs[old]
        piece = {r: held[r][1][old] for r in attr.mesh.members}
        updates[names[old]] = join(old, built.lowered.values[old].shape, attr, piece)
    return outputs, updates


def join(name: str, shape: tuple[int, ...], attr: DistAttr, blocks: Mapping[int, Array]) -> Array:
    """The whole tensor from the blocks of the ranks, by the layout that the graph states."""
    assert not attr.spec.partial, f"%{name} leaves the program as {attr.spec}"
    first = next(iter(blocks.values()))
    whole, seen = np.zeros(shape, first.dtype), np.zeros(shape, bool)
    for rank, array in blocks.items():
        where = attr.spec.slices(shape, attr.mesh, rank)
        assert array.shape == whole[where].shape, f"%{name}: rank {rank} holds {array.shape}, not {attr}"
        again = seen[where]
        replica = whole[where][again]
        # replicas may sum in another order, but they are copies of one number to rounding
        np.testing.assert_allclose(
            array[again], replica, rtol=1e-9, atol=1e-9, err_msg=f"%{name} rank {rank}"
        )
        whole[where] = array
        seen[where] = True
    assert seen.all(), f"%{name}: part of {attr} is on no rank"
    return whole


def run_serial(
    graph: Graph, feeds: Feeds, params: Mapping[str, Array]
) -> tuple[dict[str, list[Array]], dict[str, Array]]:
    """The same step by the serial interpreter, for graphs whose part after `accumulate` is affine in it.

    The mean of what an affine function gives for every micro-batch is what it gives for the mean.
    """
    runs = [interpret(graph, feed, params, micro=m) for m, feed in enumerate(feeds)]
    outputs = {label: [run[0][label] for run in runs] for label, _ in graph.outputs}
    updates = {name: np.mean([run[1][name] for run in runs], axis=0) for name in runs[0][1]}
    return outputs, updates


def assert_same(
    found: Mapping[str, Sequence[Array]], expected: Mapping[str, Sequence[Array]], bound: float
) -> None:
    """Outputs equal to `bound` of their largest element; an accumulated one equals the mean."""
    assert found.keys() == expected.keys()
    for label, arrays in expected.items():
        wanted = arrays if len(found[label]) == len(arrays) else [np.mean(arrays, axis=0)]
        for m, (array, target) in enumerate(zip(found[label], wanted, strict=True)):
            if target.dtype.kind in "biu":
                assert np.array_equal(array, target), f"{label} of micro-batch {m} differs"
                continue
            scale = max(1.0, float(np.abs(target).max(initial=0.0)))
            error = float(np.abs(array - target).max(initial=0.0))
            assert error <= bound * scale, (
                f"{label} of micro-batch {m} is off by {error:.3g}, scale {scale:.3g}"
            )
