"""The forecast of pipelines whose messages need one link at the same time."""

from __future__ import annotations

import pytest
from support.programs.forecasts import chain, machines

from distgraph.ir.mesh import ProcessMesh
from distgraph.runtime.forecast.forecast import forecast

grid = ProcessMesh.grid
ROWS, WIDTH, CABLE = 4096, 1024, 1.25e9
MESSAGE = 4 * ROWS * WIDTH / CABLE
"""Seconds of 16.8 MB over the cable: 13.4 ms, eight times the matmul of a stage."""


def seconds_per_micro_batch(stages: int, sizes: list[int], mapping: list[int]) -> float:
    """Of GPipe, once the pipeline is filled; half of it is forward, half backward."""
    meshes = [grid(stage, x=1) for stage in range(stages)]
    cluster = machines(*sizes, cable="1.25 GB/s", memory="64 GiB")
    few, many = (
        forecast(chain(ROWS, [WIDTH] * (stages + 1), meshes, m, "gpipe"), cluster, mapping).step_seconds
        for m in (6, 10)
    )
    return (many - few) / 4


def test_a_slow_cable_is_the_period_of_a_pipeline():
    assert seconds_per_micro_batch(2, [1, 1], [0, 1]) == pytest.approx(2 * MESSAGE, rel=1e-3)


def test_messages_of_two_borders_take_twice_as_long_over_one_cable():
    crossing_once = seconds_per_micro_batch(4, [2, 2], [0, 1, 2, 3])
    crossing_thrice = seconds_per_micro_batch(4, [2, 2], [0, 2, 1, 3])  # two of the three the same way
    assert crossing_once == pytest.approx(2 * MESSAGE, rel=1e-3)
    assert crossing_thrice == pytest.approx(2 * 2 * MESSAGE, rel=1e-3)


def test_different_cables_are_not_shared():
    assert seconds_per_micro_batch(4, [1, 1, 1, 1], [0, 1, 2, 3]) == pytest.approx(2 * MESSAGE, rel=1e-3)
