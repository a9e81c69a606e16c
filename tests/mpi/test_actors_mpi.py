"""Actors give the bits of the recorded order: `mpiexec -n 4 python -m pytest -m mpi tests/mpi`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.pipelines.branching import batch, branching_engine, row_engine
from support.programs.equivalence import gathered

import distgraph as dg
from distgraph.runtime.launch.mpi_rank import current_transport

pytestmark = pytest.mark.mpi
grid = dg.ProcessMesh.grid

ROWS: dict[str, tuple[list[dg.ProcessMesh], str]] = {
    "1f1b": ([grid(0, a=1), grid(1, a=1)], "1f1b"),
    "gpipe": ([grid(0, a=1), grid(1, a=1)], "gpipe"),
    "zb-h1": ([grid(0, a=1), grid(1, a=1)], "zb-h1"),
    "interleaved": ([grid(0, a=1), grid(1, a=1)] * 2, "interleaved-1f1b"),
    "dp x pp": ([grid(0, dp=2), grid(2, dp=2)], "1f1b"),
    "tp x pp": ([grid(0, tp=2), grid(2, tp=2)], "eager-1f1b"),
    "unequal": ([grid(0, a=1), grid(1, dp=2), grid(3, a=1)], "1f1b"),
}


def trained(make: Any, meshes: list[dg.ProcessMesh], **strategy: Any) -> dict[str, np.ndarray]:
    """Losses, parameters and states after two steps."""
    engine = make(meshes, **strategy)
    try:
        losses = [engine.run(batch())["loss"] for _ in range(2)]
        return {"losses": np.array(losses), **gathered(engine)}
    finally:
        engine.close()


def same(make: Any, meshes: list[dg.ProcessMesh], **strategy: Any) -> None:
    transport = current_transport()
    assert transport is not None
    ranks = 1 + max(max(mesh.members) for mesh in meshes)
    if ranks > transport.size:
        pytest.skip(f"needs {ranks} ranks; there are {transport.size}")
    static = trained(make, meshes, executor="static", **strategy)
    actors = trained(make, meshes, executor="actors", **strategy)
    assert actors.keys() == static.keys()
    for name, array in static.items():
        np.testing.assert_array_equal(actors[name], array, err_msg=name)


@pytest.mark.parametrize("micro", [1, 2, 8])
@pytest.mark.parametrize("name", ROWS)
def test_training_equals_the_recorded_order(name: str, micro: int) -> None:
    meshes, policy = ROWS[name]
    same(row_engine, meshes, schedule=policy, micro_batches=micro)


@pytest.mark.parametrize("check", ["0", "1"])
@pytest.mark.parametrize(
    "meshes",
    [[grid(0, a=1), grid(1, a=1)], [grid(0, a=1), grid(1, dp=2), grid(3, a=1)]],
    ids=["two", "unequal"],
)
def test_branches(meshes: list[dg.ProcessMesh], check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTGRAPH_CHECK", check)
    same(branching_engine, meshes, schedule="eager-1f1b", micro_batches=6)
