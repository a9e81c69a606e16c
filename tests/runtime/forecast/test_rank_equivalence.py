"""Equivalent ranks share costs in a forecast, and sharing does not change the forecast."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.programs.forecasts import chain, machines

from distgraph import optim
from distgraph.ir.mesh import ProcessMesh
from distgraph.runtime.forecast.forecast import Forecast, forecast
from distgraph.runtime.forecast.rank_equivalence import RankClasses
from distgraph.runtime.program.build import Build
from distgraph.runtime.program.ring_buffer_sizes import _window_in_any_order, window

grid = ProcessMesh.grid
WEIGHTS = [None, "tp"]


def stages(widths: list[int], micro_batches: int = 6, size: int = 2, policy: str = "1f1b") -> Build:
    """A layer a stage, each on `size` x 2 ranks, with a gradient to reduce and one to hold in parts."""
    meshes = [grid(2 * size * i, dp=size, tp=2) for i in range(len(widths) - 1)]
    weights = [WEIGHTS] * len(meshes)
    return chain(24, widths, meshes, micro_batches, policy, weights, optim.Adam())


def facts(found: Forecast) -> object:
    tasks = {
        name: replace(task, body=replace(task.body, spans=()), last=replace(task.last, spans=()))
        for name, task in found.tasks.items()
    }
    return found.step_seconds, tasks, found.memory, found.ranks, found.transfers, found.traffic


def test_stages_of_equal_layers_are_equivalent_but_for_the_first_and_the_last():
    classes = RankClasses(stages([64] * 6).parts)
    numbers = [classes.of(4 * stage).key for stage in range(5)]
    assert numbers[1] == numbers[2] == numbers[3]
    assert len(set(numbers)) == 3
    assert classes.of(5).key == classes.of(9).key != classes.of(4).key  # other coordinates
    for one, other in zip(classes.of(4).names, classes.of(8).names, strict=True):
        values = classes.parts.graph.values
        assert one != other
        assert values[one].shape == values[other].shape


def test_stages_that_differ_in_anything_are_not_equivalent():
    wide = RankClasses(stages([64, 64, 64, 96, 96, 64, 64]).parts)
    assert len({wide.of(4 * stage).key for stage in range(6)}) == 6
    meshes = [grid(0, dp=2), grid(2, dp=2), grid(4, dp=2), ProcessMesh([7, 6], ["dp"]), grid(8, dp=2)]
    other = RankClasses(
        chain(24, [64] * 6, meshes, 4).parts
    )  # ranks in another order in stage 3, beside 2 and 4
    assert len({other.of(2 * stage).key for stage in range(5)}) == 5


@pytest.mark.parametrize("policy", ["1f1b", "gpipe"])
@pytest.mark.parametrize("sizes", [(16,), (8, 8), (6, 6, 6)])  # machines cut through stages, or between them
def test_what_is_shared_is_what_every_rank_finds_alone(policy, sizes):
    cluster = machines(*sizes)
    build = stages([64] * 5, policy=policy)
    assert facts(forecast(build, cluster)) == facts(forecast(build, cluster, trace=True))  # nothing shared


def test_uneven_blocks_share_between_stages_only():
    build, cluster = stages([63] * 5, 3, size=3), machines(12, 12)
    found = forecast(build, cluster)
    assert not found.exact
    assert facts(found) == facts(forecast(build, cluster, trace=True))


def test_buffers_in_a_ring_are_the_widest_gap_of_micro_batches_alive_together():
    random = np.random.default_rng(0)
    for _ in range(300):
        count = int(random.integers(1, 12))
        starts = random.integers(0, 20, count)
        ends = starts + random.integers(0, 9, count)
        if random.random() < 0.5:
            starts, ends = np.sort(starts), np.sort(ends)
        together = [
            abs(i - j) + 1
            for i in range(count)
            for j in range(count)
            if starts[i] <= ends[j] and starts[j] <= ends[i]
        ]
        assert window(starts, ends) == max(together)
        assert _window_in_any_order(list(zip(starts.tolist(), ends.tolist(), strict=True))) == max(together)
