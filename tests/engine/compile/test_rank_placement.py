"""What meshes need of devices: the mapping keeps it, the placement of a plan states it, errors name ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.errors import InfeasibleError, ShardingError

CLUSTER = """name: mixed
launch: 1 us
machines:
  - name: c
    devices: {count: 2, type: cpu, model: C, memory: 4 GiB}
    inside: {topology: full, bandwidth: 5 GB/s, latency: 1 us}
    nics: {bandwidth: 1 GB/s, latency: 5 us, attach: {bandwidth: 5 GB/s, latency: 1 us}}
  - name: g
    devices: {count: 2, type: gpu, model: G, memory: 16 GiB}
    inside: {topology: full, bandwidth: 5 GB/s, latency: 1 us}
    nics: {bandwidth: 1 GB/s, latency: 5 us, attach: {bandwidth: 5 GB/s, latency: 1 us}}
network: {topology: switch}
"""
FIRST, SECOND = dg.ProcessMesh.grid(dp=2), dg.ProcessMesh.grid(2, dp=2)


class Stages(nn.Module):
    """A layer on each of two meshes."""

    def __init__(self, *meshes: dg.ProcessMesh) -> None:
        self.meshes, self.up, self.down = meshes, nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        with dg.on(self.meshes[0]):
            h = ops.relu(self.up(x))
        with dg.on(self.meshes[1]):
            return ops.mean(self.down(h) ** 2)


BATCH = (np.ones((8, 8), np.float32),)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.yaml"
    path.write_text(CLUSTER)
    return path


def engine(
    first: dg.ProcessMesh, second: dg.ProcessMesh, cluster: Path | None, plan: Any = None
) -> dg.Engine:
    made = dg.Engine(Stages(first, second), None, optim.SGD(lr=0.1), cluster=cluster, plan=plan)
    made.prepare(BATCH)
    return made


def test_stages_are_mapped_to_the_devices_that_they_need(cluster: Path) -> None:
    plan = engine(FIRST.requiring("gpu"), SECOND.requiring("cpu", memory="2 GiB"), cluster).plan.portable
    assert [(part.machine, part.type, part.count, part.ranks, part.devices) for part in plan.placement] == [
        ("c", "cpu", 2, (2, 3), (0, 1)),
        ("g", "gpu", 2, (0, 1), (0, 1)),
    ]
    assert plan.placement[1].memory == 16 << 30
    read = dg.Plan.parse(plan.text())
    assert read == plan
    with pytest.raises(InfeasibleError, match=r"rank 0 needs a cpu device but .* of type gpu"):
        engine(FIRST.requiring("cpu"), SECOND, cluster, read)


def test_derived_meshes_need_the_same() -> None:
    mesh = dg.ProcessMesh([[0, 1], [2, 3]], ("x", "y"), device_type="gpu", memory=5)
    for derived in (mesh["x", 0], mesh[0:1], mesh.weighted(x=(2, 1)), mesh.reshape(z=4), mesh.repeated(2),
                    mesh.reordered(("x",), (1, 0))):  # fmt: skip
        assert (derived.device_type, derived.memory) == ("gpu", 5)
    assert mesh == mesh.requiring("cpu")


@pytest.mark.parametrize(
    ("first", "second", "error", "message"),
    [
        (
            FIRST.requiring("gpu"),
            SECOND.requiring("gpu"),
            InfeasibleError,
            r"4 ranks \(rank 0 first\) need a gpu",
        ),
        (FIRST, SECOND.requiring("xpu"), InfeasibleError, "rank 2 needs a xpu device .* is of type cpu"),
        (
            FIRST.requiring(memory="80 GiB"),
            SECOND,
            InfeasibleError,
            "rank 0 needs a device with 80 GiB memory",
        ),
        (
            FIRST.requiring("gpu"),
            dg.ProcessMesh.grid(1, dp=2).requiring("cpu"),
            ShardingError,
            "rank 1 is on a mesh of .pu devices and on mesh",
        ),
        (FIRST.requiring(memory="80"), SECOND, ShardingError, "memory of mesh.dp=2. is '80' but must be"),
        (FIRST.requiring(memory=-1), SECOND, ShardingError, "is -1 but must be a size such as 16 GiB"),
    ],
)
def test_meshes_that_cannot_be_placed(
    first: dg.ProcessMesh, second: dg.ProcessMesh, error: type[Exception], message: str, cluster: Path
) -> None:
    with pytest.raises(error, match=message):
        engine(first, second, cluster)


def test_device_types_are_words() -> None:
    with pytest.raises(ShardingError, match="device type 'a gpu' of a mesh must be a word"):
        FIRST.requiring("a gpu")
    with pytest.raises(ShardingError, match=r"device types .* of a mesh are 1 but it has 2 ranks"):
        FIRST.requiring(["gpu"])
    with pytest.raises(ShardingError, match=r"are for ranks \[2\] too but it has ranks \[0, 1\]"):
        FIRST.requiring({1: "gpu", 2: "cpu"})
    with pytest.raises(ShardingError, match="device_type of requiring is 5 but must be text"):
        FIRST.requiring(5)  # type: ignore[arg-type]
    assert FIRST.requiring({1: "gpu"}).device_type_of(0) is None


def test_every_rank_of_a_mesh_may_need_another_device(cluster: Path) -> None:
    both = dg.ProcessMesh.grid(dp=2).requiring(("cpu", "gpu"))
    assert [both.device_type_of(rank) for rank in (0, 1)] == ["cpu", "gpu"]
    assert both.reordered(("dp",), (1, 0)).device_type_of(1) == "gpu"  # a rank keeps its device
    assert both.renumbered([5, 4]).device_type_of(4) == "gpu"  # another rank takes a place
    assert both.repeated(2).device_type_of(3) == "gpu"
    assert both[1:].device_type_of(1) == both.weighted(dp=(1, 3)).device_type_of(1) == "gpu"
    assert both.requiring(["gpu", "gpu"]).device_type == "gpu"
    plan = engine(both, SECOND.requiring(("gpu", "cpu")), cluster).plan.portable
    types = {rank: part.type for part in plan.placement for rank in part.ranks}
    assert types == {0: "cpu", 1: "gpu", 2: "gpu", 3: "cpu"}
