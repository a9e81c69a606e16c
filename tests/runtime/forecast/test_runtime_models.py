"""The runtime model decides what overlaps, what the host costs and what memory is left for a program."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.programs.forecasts import BANDWIDTH, WAITING, chain, machines

from distgraph.errors import ResourceError
from distgraph.ir.mesh import ProcessMesh
from distgraph.resources.host_times import HostTimes
from distgraph.resources.runtimes.load_runtime import default_runtime
from distgraph.resources.runtimes.runtime_model import (
    Gradients,
    Kernels,
    Memory,
    Messages,
    Overlap,
    RuntimeModel,
)
from distgraph.runtime.forecast.forecast import Forecast, forecast, out_of_memory
from distgraph.runtime.program.build import Build

grid = ProcessMesh.grid
OVERLAPPED = default_runtime("gpu")


def data_parallel() -> Build:
    return chain(64, [64] * 6, [grid(dp=2)] * 5, 3)


def pipeline(micro_batches: int = 3) -> Build:
    return chain(64, [64] * 3, [grid(0, x=1), grid(1, x=1)], micro_batches)


def with_runtime(build: Build, runtime: RuntimeModel | str | None, devices: int = 2) -> Forecast:
    return forecast(build, machines(devices), runtime=runtime)


def test_without_a_runtime_distgraph_executes():
    build = data_parallel()
    ours, explicit = with_runtime(build, None), with_runtime(build, "distgraph_gpu")
    assert ours.step_seconds == explicit.step_seconds
    assert ours.memory == explicit.memory
    assert "under" not in str(ours)
    assert "step under distgraph_gpu" in str(explicit)


def test_collectives_overlap_by_what_they_are_for():
    build = data_parallel()
    waiting = with_runtime(build, WAITING)
    others = replace(WAITING, overlap=Overlap(activations="all", parameters="all"))
    gradients = replace(WAITING, overlap=Overlap(gradients=("all_reduce",)))
    scattered = replace(WAITING, overlap=Overlap(gradients=("reduce_scatter",)))
    assert with_runtime(build, others).step_seconds == waiting.step_seconds
    assert with_runtime(build, scattered).step_seconds == waiting.step_seconds
    hidden = with_runtime(build, gradients)
    assert hidden.step_seconds < waiting.step_seconds
    assert hidden.step_seconds == with_runtime(build, OVERLAPPED).step_seconds


def test_gradients_reduced_at_the_end_do_not_delay_the_stages_in_front():
    """In backward tasks, one stage after the other waits for its reductions; at the end all do at once."""
    stages = [grid(2 * stage, dp=2) for stage in range(3)]
    build = chain(64, [64] * 4, stages, 4)
    waiting = with_runtime(build, WAITING, 6)
    at_end = with_runtime(build, replace(WAITING, gradients=Gradients(reduce="end")), 6)
    reductions = []
    for stage in range(3):
        task = waiting.tasks[f"backward.s{stage}"]
        reductions.append(task.last.communication - task.body.communication)
        assert at_end.tasks[f"backward.s{stage}"].last == task.body
        ends = [forecast.tasks[f"optimize.s{stage}"].last for forecast in (waiting, at_end)]
        assert ends[1].communication - ends[0].communication == pytest.approx(reductions[-1])
        assert ends[1].seconds - ends[0].seconds == pytest.approx(reductions[-1])
    assert min(reductions) > 0
    # The reductions of the two later stages no longer stand before the last backward task of the first.
    assert waiting.step_seconds - at_end.step_seconds == pytest.approx(sum(reductions[1:]), rel=0.01)
    assert dict(at_end.traffic) == pytest.approx(dict(waiting.traffic))


def test_gradients_that_are_reduced_on_one_stage_take_as_long_at_its_end():
    build = data_parallel()
    at_end = with_runtime(build, replace(WAITING, gradients=Gradients(reduce="end")))
    assert at_end.step_seconds == pytest.approx(with_runtime(build, WAITING).step_seconds)
    overlapped = replace(WAITING, gradients=Gradients(reduce="end"), overlap=Overlap(gradients="all"))
    assert with_runtime(build, overlapped).step_seconds == pytest.approx(at_end.step_seconds)


def test_a_blocking_message_stops_both_ends():
    build = pipeline(1)
    passing = with_runtime(build, WAITING)
    stopping = with_runtime(build, replace(WAITING, messages=Messages(blocking=True)))
    assert not stopping.transfers
    for (source, target), seconds in passing.transfers.items():
        for name in (source, target):
            assert stopping.tasks[name].last.exposed >= passing.tasks[name].last.exposed + seconds * 0.999
    assert stopping.step_seconds > passing.step_seconds


def test_the_start_of_a_message_is_that_of_the_runtime():
    build = pipeline(1)
    slow = with_runtime(build, replace(WAITING, messages=Messages(start=1e-3)))
    usual = with_runtime(build, WAITING)
    launch = machines(2).launch
    assert launch is not None
    added = (1e-3 - launch) * len(usual.transfers)
    assert slow.step_seconds == pytest.approx(usual.step_seconds + added, rel=1e-3)


def test_host_times():
    build = pipeline()
    usual = with_runtime(build, WAITING)
    step = with_runtime(build, replace(WAITING, host=HostTimes(step=2e-3)))
    assert step.step_seconds == pytest.approx(usual.step_seconds + 2e-3)
    micro = with_runtime(build, replace(WAITING, host=HostTimes(micro_batch=1e-3)))
    assert micro.step_seconds == pytest.approx(usual.step_seconds + 4e-3, rel=0.05)  # 3, and 1 to fill
    slow = with_runtime(build, replace(WAITING, host=HostTimes(op=1e-3)))
    assert slow.step_seconds > 10 * usual.step_seconds


def test_memory_of_the_runtime():
    build = data_parallel()
    usual = with_runtime(build, WAITING)
    own = usual.memory[0]
    rules = Memory(workspace=1000, fragmentation=0.5)
    more = with_runtime(build, replace(WAITING, memory=rules)).memory[0]
    assert more.temporary - own.temporary == 1000 + round(0.5 * (own.activations + own.temporary))
    assert replace(more, temporary=own.temporary) == own


@pytest.mark.parametrize(("usable", "context"), [(0.9, 0.0), (1.0, 1e3)])
def test_a_runtime_leaves_less_memory_to_programs(usable: float, context: float):
    build = data_parallel()
    bytes_needed = int(with_runtime(build, WAITING).peak_memory)
    cluster = machines(2, memory=f"{bytes_needed} B")
    assert not out_of_memory(forecast(build, cluster, runtime=WAITING), cluster)
    runtime = replace(WAITING, memory=Memory(usable=usable, context=context))
    shortage = out_of_memory(forecast(build, cluster, runtime=runtime), cluster)[0]
    assert shortage.available == pytest.approx(usable * bytes_needed - context)


def test_liveness_needs_less_than_buffers_and_fusion_less_still():
    build = chain(64, [64] * 6, [grid(dp=2)] * 5, 2)
    planned, alive, fused = (
        with_runtime(build, replace(WAITING, memory=rules)).memory[0]
        for rules in (Memory(), Memory(planner="liveness"), Memory(planner="liveness", fused=True))
    )
    assert fused.total <= alive.total <= planned.total
    assert fused.parameters == planned.parameters
    assert fused.states == planned.states


def test_of_a_pipeline_activations_are_alive_as_long_as_its_schedule_says():
    """One forward, one backward: a stage keeps a matrix for it and each stage after it."""
    rules = Memory(planner="liveness")
    found = with_runtime(pipeline(8), replace(WAITING, memory=rules))
    matrix = 4 * 64 * 64
    assert [found.memory[rank].activations for rank in (0, 1)] == [2 * matrix, matrix]


def test_an_unknown_runtime_is_refused():
    with pytest.raises(ResourceError, match="fast_one: neither a file nor a runtime"):
        with_runtime(pipeline(), "fast_one")


def test_one_kernel_updates_all_parameters():
    build = data_parallel()
    free = with_runtime(build, replace(WAITING, kernels=Kernels(update_bytes=1e-3)))
    at_once = with_runtime(build, replace(WAITING, kernels=Kernels(update_bytes=30.0)))
    moved = 5 * 64 * 64 * 30.0
    added = at_once.tasks["optimize.s0"].last.compute - free.tasks["optimize.s0"].last.compute
    assert added == pytest.approx(moved / BANDWIDTH, rel=1e-3)
    op_by_op = with_runtime(build, WAITING)
    assert op_by_op.tasks["optimize.s0"].last.compute > free.tasks["optimize.s0"].last.compute
