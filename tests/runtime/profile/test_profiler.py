"""Whole profiles: the file that a command writes, and a resumed profile that goes on."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.devices.measured_machines import works_of
from typer.testing import CliRunner

from distgraph.cli import application
from distgraph.errors import ResourceError
from distgraph.resources import ComputeCost, load_cluster
from distgraph.resources.cluster import Compute, MatmulRate
from distgraph.runtime.execute.blas_kernels import blas_kernels
from distgraph.runtime.profile import profiler as profiling
from distgraph.runtime.profile.collective_probes import (
    MESSAGE_WORK,
)
from distgraph.runtime.profile.evaluation import evaluate
from distgraph.runtime.profile.op_probes import PreparedProbe, Probe
from distgraph.runtime.profile.probe_programs import probes
from distgraph.runtime.profile.processor_use import OtherUse
from distgraph.runtime.profile.profiler import Request, Store, profile
from distgraph.runtime.profile.resource_writer import write_measured


def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only small programs, so that the test is short."""
    chosen = tuple(
        p
        for p in probes()
        if p.name in ("matmul/f32/small", "perceptron/24x112", "stream/192", "stream/49152", "stream/786432")
    )
    monkeypatch.setattr(profiling, "probes", lambda: chosen)
    share_by_others(monkeypatch, 0.0)


def share_by_others(monkeypatch: pytest.MonkeyPatch, *shares: float | None) -> None:
    """Have other programs use these shares of the processors in the windows, the last one from then on."""
    left = list(shares)

    class Watch:
        is_due = False

        def __init__(self, transport: object) -> None:
            pass

        def close(self) -> OtherUse:
            return OtherUse("here", left.pop(0) if len(left) > 1 else left[0])

    monkeypatch.setattr(profiling, "ProcessorWatch", Watch)


def test_command_writes_a_file_that_a_cost_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer(monkeypatch)
    # seconds of this process, so that others on the machine do not use up the time limit
    monkeypatch.setattr(profiling, "time", SimpleNamespace(monotonic=time.process_time))
    output = tmp_path / "mine.yaml"
    result = CliRunner().invoke(application.app, ["profile", "-o", str(output), "--seconds", "2"])
    assert result.exit_code == 0, result.output
    cost = ComputeCost(load_cluster(output))
    assert cost.time(0, "matmul", 2.0 * 64**3, 3 * 4.0 * 64**2, "f32", (1, 64, 64, 64), "matmul") > 0
    assert cost.time(0, "memory", 0.0, 2.0**20, "f32", op="multiply") > 0
    assert cost.time(0, "lookup", 0.0, 2.0**20, "f32", op="embedding") > 0
    assert (tmp_path / "mine.measurements.json").is_file()
    host = cost.cluster.devices[0].compute.host
    assert host.step is not None
    assert 0 < host.step + host.task < 0.1  # of an engine's step
    assert cost.cluster.devices[0].compute.blas == blas_kernels() != ""


def test_resumed_profile_measures_only_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer(monkeypatch)
    runs: list[str] = []
    real = PreparedProbe.run

    def counted(self: PreparedProbe, seconds: float = 0.0) -> list[float]:
        runs.append("run")
        return real(self, 0.0)

    monkeypatch.setattr(PreparedProbe, "run", counted)
    request = Request(str(tmp_path / "mine.yaml"), seconds=60.0, repeats=2)
    profile(request)
    assert len(runs) == 2 * len(profiling.probes())
    before = request.store_path.read_text()
    runs.clear()
    profile(request)
    assert not runs  # all there
    assert json.loads(request.store_path.read_text()) == json.loads(before)

    kept = json.loads(before)
    key = next(key for key in kept["runs"] if key.endswith("|perceptron/24x112"))
    for rounds in ("runs", "others"):
        kept["runs"][key][rounds].pop()  # as if interrupted there
    request.store_path.write_text(json.dumps(kept))
    profile(request)
    assert len(runs) == 1


def test_interrupted_profile_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer(monkeypatch)
    real, count = PreparedProbe.run, [0]

    def interrupted(self: PreparedProbe, seconds: float = 0.0) -> list[float]:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return real(self, 0.0)

    monkeypatch.setattr(PreparedProbe, "run", interrupted)
    request = Request(str(tmp_path / "mine.yaml"), repeats=2)
    with pytest.raises(KeyboardInterrupt):
        profile(request)
    assert len(Store.open(request).runs) == 2
    assert not Path(request.output).exists()


def test_measurements_with_other_blas_kernels_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(str(tmp_path / "mine.yaml"))
    Store.open(request).save()
    monkeypatch.setattr(profiling, "blas_kernels", lambda: "openblas 0.0 Another")
    with pytest.raises(ResourceError, match=r"but this is .*blas .?openblas 0.0 Another.*--fresh"):
        Store.open(request)


def test_measurements_of_another_job_are_refused(tmp_path: Path) -> None:
    one, two = (Request(str(tmp_path / "mine.yaml"), ranks=ranks) for ranks in (1, 2))
    store = Store.open(one)
    store.save()
    with pytest.raises(ResourceError, match=r"measurements of .*ranks 1.*ranks 2.*--fresh"):
        Store.open(two)
    long = {"header": {**store.header, "source": "a" * 20_000}, "runs": {}}
    one.store_path.write_text(json.dumps(long))
    with pytest.raises(ResourceError, match=r'measurements of source "a{50,60}\.\.\., ranks 1'):
        Store.open(one)
    earlier = {"header": {"source": "", "ranks": 1}, "runs": {}}
    one.store_path.write_text(json.dumps(earlier))
    with pytest.raises(ResourceError, match=r"of another version of distgraph.*--fresh"):
        Store.open(one)
    one.store_path.write_text("{")
    with pytest.raises(ResourceError, match=r"mine.measurements.json:1:2: not JSON"):
        Store.open(one)


def test_devices_that_are_not_there_are_not_measured() -> None:
    with pytest.raises(ResourceError, match="is a gpu, but programs run on CPUs here"):
        profile(Request("x.yaml", "dgx_a100_pod", 1))
    with pytest.raises(ResourceError, match="3 ranks but cluster local has 2 devices"):
        profile(Request("x.yaml", "local", 3))


def test_means_of_rounds_are_fitted() -> None:
    cluster = load_cluster("local")
    given = Compute(2e-6, 0.5, 0.5, {"f32": MatmulRate(0.5, (10.0, 10.0, 10.0))})
    samples = works_of(given, 20e9, {"f32": 2e11})
    times = [seconds for _, seconds in samples]
    spoiled = [[1.4 * t for t in times], times, [0.6 * t for t in times]]
    entry = {"works": [asdict(work) for work, _ in samples], "runs": spoiled}
    found = evaluate(cluster, {"machines[0].devices|all": json.loads(json.dumps(entry))})
    compute = found.compute["machines[0].devices"].compute
    assert compute.launch == pytest.approx(2e-6, rel=0.05)
    assert found.links is None
    with pytest.raises(ResourceError, match="not for the links between 2 ranks; run the same command again"):
        evaluate(cluster, {"machines[0].devices|all": json.loads(json.dumps(entry))}, ranks=2)


def test_what_a_step_costs_beside_its_tasks_goes_to_its_device(tmp_path: Path) -> None:
    """From the mean of the rounds; the file holds it; without such measurements it is not stated."""
    given = Compute(2e-6, 0.5, 0.5, {"f32": MatmulRate(0.5, (10.0, 10.0, 10.0))})
    samples = works_of(given, 20e9, {"f32": 2e11})
    works = {"works": [asdict(work) for work, _ in samples], "runs": [[seconds for _, seconds in samples]]}
    few = {"tasks": 4, "runs": [[1.2e-4], [1.5e-4], [0.9e-4]]}
    many = {"tasks": 34, "runs": [[5.2e-4], [4.2e-4], [3.2e-4]]}
    origin = "machines[0].devices"
    runs = {f"{origin}|all": works, f"{origin}|host/1": few, f"{origin}|host/16": many}
    found = evaluate(load_cluster("local"), runs)
    path = tmp_path / "here.yaml"
    write_measured(str(path), "", 1, found)
    host = load_cluster(path).devices[0].compute.host
    assert host.step == pytest.approx(8e-5, rel=0.01)
    assert host.task == pytest.approx(1e-5, rel=0.01)
    without = evaluate(load_cluster("local"), {f"{origin}|all": works}).compute[origin].compute.host
    assert (without.step, without.task) == (None, None)


def test_what_a_rank_is_busy_with_for_a_message_goes_to_its_device(tmp_path: Path) -> None:
    """The median of the rounds, a number of its own: no link is fitted to it; the file holds it."""
    given = Compute(2e-6, 0.5, 0.5, {"f32": MatmulRate(0.5, (10.0, 10.0, 10.0))})
    samples = works_of(given, 20e9, {"f32": 2e11})
    works = {"works": [asdict(work) for work, _ in samples], "runs": [[seconds for _, seconds in samples]]}
    pattern = {"kind": MESSAGE_WORK, "groups": [[0, 1]], "nbytes": 1024}
    attended = {"message": pattern, "runs": [[3e-5], [9e-5], [4e-5]]}
    found = evaluate(load_cluster("local"), {"machines[0].devices|all": works, "|attend": attended})
    assert found.compute["machines[0].devices"].compute.host.message == 4e-5
    assert found.links is None
    path = tmp_path / "here.yaml"
    write_measured(str(path), "", 2, found)
    assert load_cluster(path).devices[1].compute.host.message == pytest.approx(4e-5)


def test_disturbed_measurements_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds are wanted, and the first is disturbed: a third one is made, and the file says nothing."""
    fewer(monkeypatch)
    profile(Request(str(tmp_path / "compiling.yaml"), seconds=60.0, repeats=1))  # compiles loops
    share_by_others(monkeypatch, 0.4, 0.0)
    request = Request(str(tmp_path / "mine.yaml"), seconds=60.0, repeats=2)
    profile(request)
    entries = Store.open(request).runs.values()
    assert all([use["share"] for use in entry["others"]] == [0.4, 0.0, 0.0] for entry in entries)
    assert "other programs" not in Path(request.output).read_text()


def test_what_was_never_measured_comes_before_what_was_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a profile beside other programs would never reach its last items, however often it is resumed."""
    fewer(monkeypatch)
    share_by_others(monkeypatch, 0.4)
    request = Request(str(tmp_path / "mine.yaml"), seconds=60.0, repeats=1)
    profile(request)
    kept = json.loads(request.store_path.read_text())
    last = next(key for key in kept["runs"] if key.endswith("|stream/786432"))
    del kept["runs"][last]
    request.store_path.write_text(json.dumps(kept))
    measured: list[str] = []
    real = PreparedProbe.__init__

    def noted(self: PreparedProbe, probe: Probe, *given: Any) -> None:
        measured.append(probe.name)
        real(self, probe, *given)

    monkeypatch.setattr(PreparedProbe, "__init__", noted)
    profile(request)
    assert measured[0] == "stream/786432"
    assert len(measured) > 1


def test_what_could_not_be_measured_undisturbed_is_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer(monkeypatch)
    share_by_others(monkeypatch, 0.4)
    request = Request(str(tmp_path / "mine.yaml"), seconds=60.0, repeats=2)
    profile(request)
    entries = Store.open(request).runs.values()
    assert all(len(entry["runs"]) == 4 for entry in entries)  # twice as many rounds, and no more
    stated = f"other programs used 40% of the processors of here during {len(entries)} of {len(entries)}"
    assert f"profile: machines[0].devices: {stated} measurements, in every round" in capsys.readouterr().err
    origin = load_cluster(request.output).origin_of("machines[0].devices.compute.launch")
    assert origin.error == pytest.approx(0.1 + 0.4)
    assert stated in origin.source

    share_by_others(monkeypatch, 0.0)  # the same command, once the other programs have ended
    profile(request)
    assert all(len(entry["runs"]) == 6 for entry in Store.open(request).runs.values())
    assert "other programs" not in capsys.readouterr().err + Path(request.output).read_text()


def test_a_profile_says_that_other_programs_could_not_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer(monkeypatch)
    share_by_others(monkeypatch, None)
    request = Request(str(tmp_path / "mine.yaml"), seconds=60.0, repeats=1)
    profile(request)
    assert all(len(entry["runs"]) == 1 for entry in Store.open(request).runs.values())
    assert "use by other programs could not be read on here during" in capsys.readouterr().err
    origin = load_cluster(request.output).origin_of("machines[0].devices.compute.launch")
    assert (origin.error, "could not be read on here" in origin.source) == (None, True)


def test_undisturbed_rounds_are_fitted() -> None:
    """Of three rounds the two undisturbed ones count; if there are none, the less disturbed half does."""
    given = Compute(2e-6, 0.5, 0.5, {"f32": MatmulRate(0.5, (10.0, 10.0, 10.0))})
    samples = works_of(given, 20e9, {"f32": 2e11})
    times = [seconds for _, seconds in samples]
    runs = [[9 * t for t in times], times, times]
    entry = {"works": [asdict(work) for work, _ in samples], "runs": runs}
    for shares in ((0.3, 0.0, 0.05), (0.3, 0.2, 0.2)):
        others = [{"host": "a", "share": share} for share in shares]
        found = evaluate(load_cluster("local"), {"machines[0].devices|all": entry | {"others": others}})
        assert found.compute["machines[0].devices"].compute.launch == pytest.approx(2e-6, rel=0.05)
        assert ("machines[0].devices" in found.disturbances) == (shares[1] > 0.05)
