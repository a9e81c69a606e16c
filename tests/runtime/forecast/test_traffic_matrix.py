"""Equal changes of layout of equal layers are looked at once; the matrix is the sum over all of them."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.ir.collective_registry import is_collective
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.step_phases import multiplicity
from distgraph.passes.partition import communication
from distgraph.runtime.forecast import traffic_matrix
from distgraph.runtime.forecast.traffic_matrix import exchanged_bytes
from distgraph.runtime.program.build import Build

RANKS = 8


class Net(nn.Module):
    """Equal layers."""

    def __init__(self, layers: int) -> None:
        self.layers = [nn.Linear(64, 64) for _ in range(layers)]

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return x


def built(layers: int) -> Build:
    """The layers under ZeRO-3: parameters are gathered, gradients scattered, layer by layer."""
    strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=RANKS), batch_axis="dp", zero=3, micro_batches=2)
    engine = dg.Engine(Net(layers), nn.MeanSquaredError(), optim.Adam(lr=1e-3), strategy=strategy)
    x = np.zeros((32, 64), "f4")
    with closing(engine):
        engine.prepare((x, x))
        (program,) = engine._session.programs.values()
        build: Build = program.build
        return build


def test_the_work_does_not_grow_with_equal_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []

    def counted(*args: Any) -> Any:
        looked_at[-1] += 1
        return communication(*args)

    monkeypatch.setattr(traffic_matrix, "communication", counted)
    builds = [built(layers) for layers in (6, 12)]
    for build in builds:
        looked_at.append(0)
        exchanged_bytes(build.lowered)
    few, many = (sum(map(is_collective, build.lowered.ops)) for build in builds)
    assert few < many
    assert looked_at[0] == looked_at[1] < RANKS * few


def test_every_change_of_layout_counts() -> None:
    build = built(6)
    times = multiplicity(build.lowered)
    changes = [op for op in build.lowered.ops if is_collective(op)]
    for rank in range(RANKS):
        local = [communication(build.lowered, op, rank) for op in changes]
        sent = sum(times[each.op.name] * float(each.attrs.get("wire", 0.0)) for each in local)
        matrix = exchanged_bytes(build.lowered)
        assert sum(size for (source, _), size in matrix.items() if source == rank) == pytest.approx(sent)


def test_lengths_on_a_group_are_computed_once_for_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank gathers with the lengths of the whole group: those of all ranks, not a table for each."""
    build = built(6)
    for rank in range(RANKS):
        build.program(rank)
    asked: list[int] = []
    block = ProcessMesh.block

    def counted(self: ProcessMesh, *args: Any) -> Any:
        asked.append(1)
        return block(self, *args)

    gathers = [op for op in build.lowered.ops if op.kind == "comm.all_gather"]
    assert gathers
    monkeypatch.setattr(ProcessMesh, "block", counted)
    for op in gathers:
        for rank in range(RANKS):
            communication(build.lowered, op, rank)
    # what is left are the bounds of the rank's own block, which do not grow with the group
    assert len(asked) <= 4 * RANKS * sum(len(op.results) for op in gathers)
