"""Collectives that are under way together, and those that a task leaves to later ones."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import pytest
from support.programs.equivalence import Case, batches, cases, mirrored, split_over_the_batch
from support.programs.forecasts import chain, machines

from distgraph import optim
from distgraph.ir.graph import Op, Value
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.partition import LocalOp
from distgraph.resources import ComputeCost
from distgraph.resources.runtimes.load_runtime import load_runtime
from distgraph.runtime.forecast.communication_cost import Message, TrafficCost
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.forecast.in_flight import NOTHING_IN_FLIGHT, InFlight
from distgraph.runtime.forecast.op_cost import OpCost, Work
from distgraph.runtime.forecast.stream_model import Streams, _PricedOp, _Run
from distgraph.runtime.forecast.task_time import TaskTime
from distgraph.runtime.program.memory_plan import plan_storage
from distgraph.runtime.report.timeline_segments import inner_segments

grid = ProcessMesh.grid


def streams_of_one_rank() -> Streams:
    build, cluster = chain(64, [128, 256], [grid(x=1)]), machines(1)
    program = build.program(0)
    storage = plan_storage(program, build.schedule)
    costs = OpCost(program, storage, ComputeCost(cluster), 0)
    return Streams(program, storage, costs, TrafficCost(build.lowered, cluster, (0,)))


def run_of(streams: Streams, in_flight: InFlight = NOTHING_IN_FLIGHT) -> _Run:
    return _Run(streams, streams.program.tasks[0], True, {}, in_flight, True)


def all_reduce(name: str, group: tuple[int, ...]) -> LocalOp:
    op = Op("comm.all_reduce", (Value("x", (8,), "f32"),), (Value(name, (8,), "f32"),), {})
    return LocalOp(op, op.kind, {"group": group})


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_product_waits_only_for_the_weight_that_it_reads(micro_batches: int):
    """Three weights are gathered at the start of a step; the products of a first one take longer than that.

    Products of two rows take next to no time, so that most of the three gathers, one after the other, counts.
    """

    def exposed(rows: int) -> tuple[float, float]:
        build = chain(rows, [1024] * 4, [grid(dp=2)] * 3, micro_batches, weights=[["dp", None]] * 3)
        step = forecast(build, machines(1, 1), trace=True)
        load = step.tasks["load.s0"].last
        spans = [span.seconds for span in load.spans if span.kind == "comm.all_gather"]
        assert spans == pytest.approx([spans[0]] * 3)
        return load.exposed, spans[0]

    assert exposed(4096)[0] == pytest.approx(exposed(4096)[1], rel=0.02)
    waited, one = exposed(2)
    assert 2.5 * one < waited < 3 * one


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_what_an_update_sends_follows_the_sums_of_gradients(micro_batches: int):
    """ZeRO-1: a first gradient is there while others are still scattered; a link carries one at a time."""
    mesh = grid(dp=2)
    optimizer = optim.Adam(lr=1e-3, state_spec=optim.shard_states(mesh, "dp"))
    build = chain(2, [1024] * 4, [mesh] * 3, micro_batches, weights=[[None, None]] * 3, optimizer=optimizer)
    step = forecast(build, machines(1, 1), trace=True)
    sent = sorted(
        (segment.start, segment.start + segment.seconds, segment.op)
        for segment in inner_segments(step, 0)
        if segment.lane == "communicate" and segment.task != "load.s0"
    )
    assert {"comm.reduce_scatter", "comm.all_gather"} <= {op for _, _, op in sent}
    assert all(end <= start + 1e-9 for (_, end, _), (start, _, _) in pairwise(sent))
    assert step.step_seconds >= sent[-1][1]


@pytest.mark.parametrize("row", range(4))
def test_sums_are_waited_for_by_the_update_of_their_stage(row: int):
    """Two stages on each rank: a load task and another update lie between a backward part and its update."""
    meshes = [grid(dp=4), grid(dp=4), grid(dp=2), grid(dp=2)]
    optimizer = optim.Adam(lr=1e-3, state_spec=optim.shard_states(meshes[0], "dp"))
    build = chain(16, [1024] * 5, meshes, 2, weights=[[None, None]] * 4, optimizer=optimizer)
    step = forecast(build, machines(2, 2), trace=True)
    sent = sorted(
        (segment.start, segment.start + segment.seconds, segment.op)
        for segment in inner_segments(step, row % len(step.timeline.columns))
        if segment.lane == "communicate" and segment.task in ("backward.s0", "optimize.s0")
    )
    assert {"comm.reduce_scatter", "comm.all_gather"} <= {op for _, _, op in sent}
    assert all(end <= start + 1e-9 for (_, end, _), (start, _, _) in pairwise(sent))


LAYOUTS = [
    ([grid(dp=2), grid(dp=2), grid(dp=4), grid(dp=4)], 2),
    ([grid(dp=4), grid(dp=2), grid(dp=4), grid(dp=2)], 3),
]


@pytest.mark.parametrize("policy", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("meshes", "micro_batches"), LAYOUTS)
def test_a_step_is_no_longer_than_when_it_waits_for_all_gathers_first(
    meshes: list[ProcessMesh], micro_batches: int, policy: str, monkeypatch: pytest.MonkeyPatch
):
    """Stages that share ranks have several load tasks there, and other ranks have one of them."""
    build = chain(8, [1024] * 5, meshes, micro_batches, policy, weights=[["dp", None]] * 4)
    seconds = forecast(build, machines(2, 2)).step_seconds
    monkeypatch.setattr(Streams, "hands_on", lambda self, task: False)
    assert seconds <= forecast(build, machines(2, 2)).step_seconds


CONVOLUTIONS = {
    case.layout.name: case
    for case in (*split_over_the_batch(), *cases(), *mirrored())
    if case.model == "conv" and case.layout.name in ("dp4_split1", "zero", "zero3")
}


@pytest.mark.parametrize("micro_batches", [2, 4])
@pytest.mark.parametrize("case", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_gathers_that_the_backward_part_reads_first(case: Case, micro_batches: int):
    """With gradients reduced in every micro-batch no task is shorter than what it computes."""
    gradients = load_runtime("deepspeed").gradients
    assert gradients.each_micro_batch
    runtime = replace(load_runtime("torch"), name="of a test", gradients=gradients)
    case = replace(case, micro=micro_batches, dtype="f32")
    with closing(case.engine()) as engine:
        build = engine.prepare(batches(case.model, case.dtype, case.size)[0]).build
        step = forecast(build, machines(2, 2), runtime=runtime)
    assert all(task.last.seconds >= task.last.compute for task in step.tasks.values())


def test_what_is_in_flight_uses_links_of_the_next_task():
    """A gather of 4 s that began 1 s before the end of a load task; the next one of its group follows it."""
    local, channel = all_reduce("a", (0, 1)), ("nvlink", (0, 1), 0)
    started = InFlight(
        {"x": 4.0}, {"x": 0.0}, {"x": channel}, {channel: 4.0}, {channel: local.op}, {channel: (0.0, 4.0)}
    )
    in_flight = started.after(1.0)
    assert (in_flight.ends, in_flight.channels) == ({"x": 3.0}, {channel: 3.0})
    assert not started.after(5.0).channels
    run = run_of(streams_of_one_rank(), in_flight)
    run._communicate(local, Message("all_gather", 2.0, 0.0, "nvlink"))
    assert [(span.start, span.seconds) for span in run.spans] == [(3.0, 2.0)]


def test_links_carry_no_more_than_all_that_use_them_together():
    """Groups over one link, of 1, 1 and 5 s: all end when the link has carried them.

    Three that begin together get a third of the link each, so the short ones end after 3 s. At that time 4 s
    are left of the long one, and another of 4 s ends with it.
    """
    run = run_of(streams_of_one_rank())
    for rank, (name, seconds) in enumerate((("a", 1.0), ("b", 1.0), ("c", 5.0))):
        run._communicate(all_reduce(name, (0, 1 + rank)), Message("all_reduce", seconds, 0.0, "nvlink"))
    assert run.ends == pytest.approx({"a": 3.0, "b": 3.0, "c": 7.0})
    run._wait_for(("a", "b"))
    run._communicate(all_reduce("d", (0, 7)), Message("all_reduce", 4.0, 0.0, "nvlink"))
    assert run.ends == pytest.approx({"c": 11.0, "d": 11.0})


def test_independent_collectives_delay_another_one_at_the_same_time(monkeypatch: pytest.MonkeyPatch):
    """One uses the links of x, one those of y, the third both: each takes 4 s, so the links need 8 s."""
    streams = streams_of_one_rank()
    monkeypatch.setattr(streams.traffic, "share_links", lambda one, other: bool({*one.name} & {*other.name}))
    run = run_of(streams)
    for rank, name in enumerate(("x", "y", "xy")):
        run._communicate(all_reduce(name, (0, 1 + rank)), Message("all_reduce", 4.0, 0.0, "ici"))
    assert run.ends == pytest.approx({"x": 8.0, "y": 8.0, "xy": 8.0})


@pytest.mark.parametrize(
    ("between", "clocks"),
    [(True, [2.5, 3.875, 4.0]), (False, [2.0, 3.0, 4.0])],
    ids=["between machines", "inside a machine"],
)
def test_work_for_a_transfer_between_machines_delays_what_is_computed_meanwhile(
    between: bool, clocks: list[float]
):
    """A sum of 4 s, 1 s of which the device works for it, during computations of 2 s and of 1 s."""
    run, local = run_of(streams_of_one_rank()), all_reduce("a", (0, 1))
    run._communicate(local, Message("all_reduce", 4.0, 0.0, "ethernet", 1.0, between))
    reached = []
    for seconds in (2.0, 1.0):
        run._execute(_PricedOp(LocalOp(local.op, "relu", {}), (), Work("memory"), seconds))
        reached.append(run.clock)
    run._wait_for(("a",))
    assert [*reached, run.clock] == pytest.approx(clocks)
    assert run.compute == 3.0
    assert run.exposed == pytest.approx(run.clock - 3.0)


def test_work_for_a_transfer_goes_on_in_the_next_task():
    """Half of a transfer of 4 s and of its 1 s of work has passed when the task ends that began it."""
    streams, channel = streams_of_one_rank(), ("ethernet", (0, 1), 0)
    local = all_reduce("a", (0, 1))
    begun = InFlight(
        {"x": 4.0}, {"x": 0.5}, {"x": channel}, {channel: 4.0}, {channel: local.op}, {channel: (0.0, 4.0)},
        {"x": (0.0, 1.0)},
    ).after(2.0)  # fmt: skip
    assert begun.transfers == {"x": (-2.0, 1.0)}
    run = run_of(streams, begun)
    run._execute(_PricedOp(LocalOp(local.op, "relu", {}), (), Work("memory"), 1.0))
    assert run.clock == pytest.approx(1.25)


def test_copies_and_loops_are_delayed_by_work_for_a_transfer_too():
    run, local = run_of(streams_of_one_rank()), all_reduce("a", (0, 1))
    run._communicate(local, Message("all_reduce", 8.0, 0.0, "ethernet", 2.0, True))
    run._run_loop(LocalOp(local.op, "scan", {}), TaskTime(2.0, 2.0, 0.0, 0.0, 0.0))
    assert run.clock == pytest.approx(2.5)
    copied = _PricedOp(all_reduce("b", (2, 3)), (), Work("memory"), 1.5, Message("all_reduce", 1.0, 0.0, ""))
    run._execute(copied)
    assert run.clock == pytest.approx(4.5, abs=0.6)
    assert run.busy["a"] == pytest.approx(2.0 * (8.0 - 4.0) / 8.0)


def test_delays_move_the_work_for_a_transfer_that_is_queued():
    run, local = run_of(streams_of_one_rank()), all_reduce("a", (0, 1))
    for name in ("a", "b"):
        queued = all_reduce(name, (0, 1))
        run._communicate(queued, Message("all_reduce", 4.0, 0.0, "ethernet", 1.0, True))
    run._delay(("ethernet", (0, 1), 0), 0.0, 2.0)
    assert run.transfers == {"a": (0.0, 1.0), "b": (6.0, 1.0)}
    assert run.ends == {"a": 6.0, "b": 10.0}
    assert local.op.name in run.ends


@pytest.mark.parametrize(("startup", "ends"), [(0.0, [4.0, 8.0, 12.0]), (3.0, [4.0, 5.0, 6.0])])
def test_transfers_of_a_group_follow_one_another(startup: float, ends: list[float]):
    """Three sums of 4 s; with a startup of 3 s, each starts 1 s after the one before it."""
    run = run_of(streams_of_one_rank())
    for name in "abc":
        message = Message("all_reduce", 4.0, 0.0, "ethernet", startup=startup)
        run._communicate(all_reduce(name, (0, 1)), message)
    assert [run.ends[name] for name in "abc"] == pytest.approx(ends)


def test_startups_overlap_where_the_runtime_says_so():
    """Three gradients that are ready at once: their sums take one startup less each than in a queue."""
    build = chain(2, [1024] * 4, [grid(dp=2)] * 3, weights=[[None, None]] * 3, passes=("-bucket_gradients",))
    cluster, together = machines(1, 1), load_runtime("distgraph_cpu")
    queue = replace(together, overlap=replace(together.overlap, startups=False))
    seconds = [forecast(build, cluster, runtime=runtime).step_seconds for runtime in (together, queue)]
    traffic = TrafficCost(build.lowered, cluster, (0, 1))
    estimates = [traffic.communication.estimate("all_reduce", grid(dp=2), ("dp",), 4.0 * n) for n in (0, 1)]
    startup = estimates[0][0]  # of an empty message
    assert 0 < startup < estimates[1][0]
    assert seconds[1] - seconds[0] == pytest.approx(2 * startup, rel=0.01)
