"""The kind of device of every rank: from meshes, plan and strategy, which must not contradict one another."""

from __future__ import annotations

import copy
import importlib.util
import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.devices import fake_cupy
from support.devices.mixed_devices import engine, on, samples
from support.files.clusters import cluster_of
from support.paths import TESTS
from support.programs.forecasts import document

import distgraph as dg
from distgraph.errors import ResourceError, RuntimeFault, ShardingError
from distgraph.plan.device_types import device_types
from distgraph.plan.placement import PlacedRanks
from distgraph.runtime.execute import device as devices
from distgraph.runtime.launch.launch import launch
from distgraph.runtime.transport.inprocess import connect


def placed(*types: str) -> tuple[PlacedRanks, ...]:
    """Rank i on a device of the i-th type."""
    return tuple(
        PlacedRanks(machine="m", type=kind, model="M", memory=1, count=9, ranks=(rank,), devices=(rank,))
        for rank, kind in enumerate(types)
    )


def test_where_the_type_of_a_device_comes_from() -> None:
    two, three = range(2), range(3)
    assert device_types(3, three, {}, None) == ("cpu", "cpu", "cpu")
    assert device_types(3, three, {1: "gpu"}, None) == ("cpu", "gpu", "cpu")
    assert device_types(3, three, {1: "cpu"}, "gpu") == ("gpu", "cpu", "gpu")
    assert device_types(2, two, {}, None, placed("cpu", "gpu")) == ("cpu", "gpu")
    assert device_types(3, two, {}, None, placed("cpu", "gpu")) == ("cpu", "gpu", "cpu")  # rank 2 is idle
    assert device_types(2, two, {}, None, placed("gpu", "gpu")) == (
        "cpu",
        "cpu",
    )  # a plan for GPUs, tried here
    assert device_types(2, two, {}, "gpu", placed("gpu", "gpu")) == ("gpu", "gpu")
    assert device_types(2, two, {0: "gpu"}, None, placed("gpu", "gpu")) == ("gpu", "gpu")
    assert device_types(2, (), {}, None) == ("cpu", "cpu")


@pytest.mark.parametrize(
    ("needed", "device", "placement", "message"),
    [
        (
            {0: "cpu", 1: "cpu"},
            "gpu",
            (),
            r"Strategy\(device='gpu'\) but the meshes of all ranks need .* cpu",
        ),
        ({}, "cpu", ("cpu", "gpu"), r"places rank 1 on a gpu device of m but Strategy\(device='cpu'\)"),
        ({}, "gpu", ("cpu", "cpu"), r"places rank 0 on a cpu device of m but Strategy\(device='gpu'\)"),
        ({1: "cpu"}, None, ("cpu", "gpu"), "places rank 1 on a gpu device of m but its meshes need a cpu"),
        ({1: "tpu"}, None, (), "rank 1 needs a tpu device but ranks run on cpu, gpu; declare it"),
        ({}, None, ("cpu", "xpu"), "rank 1 needs a xpu device but ranks run on"),
    ],
)
def test_contradictions_are_errors(
    needed: dict[int, str], device: str | None, placement: tuple[str, ...], message: str
) -> None:
    for size in (2, 3):  # rank 2 is idle
        with pytest.raises(ResourceError, match=message):
            device_types(size, range(2), needed, device, placed(*placement))


def test_a_strategy_and_its_mesh_agree() -> None:
    (mesh,) = on(("gpu", "gpu"))
    with pytest.raises(
        ShardingError, match=r"device of Strategy is 'cpu' but its mesh\(dp=2\) has the .* gpu"
    ):
        dg.Strategy(mesh=mesh, device="cpu")
    assert dg.Strategy(mesh=mesh, device="gpu").device == "gpu"
    (mixed,) = on(("gpu", "cpu"))
    assert dg.Strategy(mesh=mixed, device="cpu").device == "cpu"  # that of rank 1


def test_the_engine_says_that_meshes_leave_no_rank_to_the_strategy() -> None:
    with pytest.raises(ResourceError, match=r"Strategy\(device='gpu'\) but the meshes of all ranks"):
        engine(on("cpu", "cpu"), device="gpu").run(samples(16))


CLUSTER = """name: mixed
launch: 1 us
machines:
  - name: c
    devices: {count: 1, type: cpu, model: C, memory: 4 GiB}
    inside: {topology: full, bandwidth: 5 GB/s, latency: 1 us}
    nics: {bandwidth: 1 GB/s, latency: 5 us, attach: {bandwidth: 5 GB/s, latency: 1 us}}
  - name: g
    devices: {count: 1, type: gpu, model: G, memory: 16 GiB}
    inside: {topology: full, bandwidth: 5 GB/s, latency: 1 us}
    nics: {bandwidth: 1 GB/s, latency: 5 us, attach: {bandwidth: 5 GB/s, latency: 1 us}}
network: {topology: switch}
"""


def test_a_plan_for_two_kinds_of_devices_runs_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The types are those of the placement, where the program itself has none."""
    cluster = tmp_path / "mixed.yaml"
    cluster.write_text(CLUSTER)
    planned = engine(on("gpu", "cpu"), cluster=cluster)
    planned.prepare(samples(16))
    plan = dg.Plan.parse(planned.plan.portable.text())
    fake_cupy.install(monkeypatch, devices=1)
    free = [mesh.requiring() for mesh in on("gpu", "cpu")]
    applied, serial = engine(free, plan=plan), engine([None, None])
    assert applied.run(samples(16))["loss"] == pytest.approx(serial.run(samples(16))["loss"], rel=1e-12)
    assert applied._session.devices == ("gpu", "cpu")
    applied.close()
    with pytest.raises(ResourceError, match=r"the plan places rank 0 on a gpu device of g but Strategy"):
        engine(free, plan=plan, device="cpu").run(samples(16))
    with pytest.raises(ResourceError, match="places rank 0 on a gpu device of g but its meshes need a cpu"):
        engine(on("cpu", "cpu"), plan=plan).run(samples(16))


def test_the_strategy_chooses_devices_of_a_mixed_cluster(tmp_path: Path) -> None:
    """So that the forecast prices a rank by the device that it runs on."""
    cluster = tmp_path / "mixed.yaml"
    cluster.write_text(CLUSTER)
    for device, index in (("cpu", 0), ("gpu", 1)):
        made = engine([None], cluster=cluster, device=device)
        made.prepare(samples(16))
        (compiled,) = made._session.programs.values()
        assert compiled.mapping is not None
        assert compiled.mapping.devices == (index,)


def test_a_rank_is_priced_by_its_kind_of_device() -> None:
    """The processor of this cluster needs 20 times as long to start an op, and its own runtime model."""
    described = document(1, 1)
    for number, (kind, start) in enumerate((("gpu", "2 us"), ("cpu", "40 us"))):
        hardware = copy.deepcopy(described["machines"][number]["devices"])
        hardware |= {"type": kind, "model": kind.upper(), "peak": {"f64": "10 TFLOP/s"}}
        hardware["compute"] |= {"launch": start, "matmul": {"f64": {"efficiency": 0.5, "half": [0, 0, 0]}}}
        described["machines"][number]["devices"] = hardware
    for kinds in (("gpu", "cpu"), ("cpu", "gpu")):
        made = engine(on(*kinds), cluster=cluster_of(described))
        made.prepare(samples(16))
        seconds = dict(zip(kinds, made.forecast().compute_seconds.values(), strict=True))
        assert seconds["cpu"] > 5 * seconds["gpu"]


def test_a_rank_without_its_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ResourceError, match=r'rank 1 on .* is to run on a gpu: device "gpu" needs CuPy'):
        engine(on("cpu", "gpu")).run(samples(16))
    fake_cupy.install(monkeypatch, devices=0)
    with pytest.raises(ResourceError, match=r'rank 1 on .* is to run on a gpu: device "gpu" needs a CUDA'):
        engine(on("cpu", "gpu")).run(samples(16))


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
sys.modules["cupy"] = None
from support.devices.mixed_devices import engine, on, samples
engine(on("cpu", "gpu")).run(samples(16))
"""


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_the_launcher_names_the_rank_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes end with one error; none waits for its time limit, which is beyond that of the test."""
    monkeypatch.setenv("DISTGRAPH_TIMEOUT", "900")
    script, out, errors = tmp_path / "train.py", io.StringIO(), io.StringIO()
    script.write_text(SCRIPT.format(tests=str(TESTS)))
    assert launch(2, [str(script)], stdout=out, stderr=errors) == 1
    text = errors.getvalue()
    assert text.count('is to run on a gpu: device "gpu" needs CuPy') == 1
    assert "rank 1 on " in text
    assert "Traceback" not in text


def test_engines_of_a_process_share_the_gpus_of_the_same_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two NCCL transports over one transport for host arrays would receive each other's messages."""
    monkeypatch.setattr(devices, "_NCCL", {})
    monkeypatch.setattr(devices, "NcclTransport", lambda control, ranks, **_: SimpleNamespace(members=ranks))
    (control,) = connect(1)
    first = devices._nccl_of_process(control, (0, 1))
    assert devices._nccl_of_process(control, (0, 1)) is first
    with pytest.raises(RuntimeFault, match=r"ranks 1-2 are to compute on GPUs but .* ranks 0-1 do"):
        devices._nccl_of_process(control, (1, 2))


def test_types_are_found_on_meshes_of_all_ranks() -> None:
    made = engine(on("cpu", ("gpu", "cpu")))
    made.prepare(samples(16))
    (compiled,) = made._session.programs.values()
    assert compiled.build.device_types == {0: "cpu", 1: "gpu", 2: "cpu"}
