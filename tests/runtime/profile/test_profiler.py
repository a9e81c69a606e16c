"""Profiling: fits find what made the measurements, the file round-trips, a resumed profile goes on."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.files.clusters import cluster_of
from typer.testing import CliRunner

from distgraph.cli import application
from distgraph.errors import ResourceError
from distgraph.ir.op_registry import flops as flops_of
from distgraph.passes.analysis.op_work import work_of
from distgraph.resources import CollectiveCost, ComputeCost, load_cluster
from distgraph.resources.cluster import Cluster, Compute, MatmulRate, MeasuredTable, OpTable
from distgraph.runtime.forecast.op_cost import Work
from distgraph.runtime.profile import op_probes as probing
from distgraph.runtime.profile import profiler as profiling
from distgraph.runtime.profile.collective_probes import (
    MESSAGE_WORK,
    axis_groups,
)
from distgraph.runtime.profile.cost_fitting import (
    ComputeFit,
    LinkFit,
    Message,
    fit_compute,
    fit_host,
    fit_links,
    fit_matmul,
    fit_table,
    fit_tables,
    robust,
)
from distgraph.runtime.profile.op_probes import PreparedProbe, probes
from distgraph.runtime.profile.profiler import Request, Store, evaluate, profile
from distgraph.runtime.profile.resource_writer import Measured, write_measured


def disturbed(seconds: np.ndarray, noise: float = 0.03, every: int = 11) -> np.ndarray:
    """Measurements of some times: a little noise on all, and some four times too long."""
    random = np.random.default_rng(1)
    found = seconds * (1 + noise * random.standard_normal(len(seconds)))
    found[::every] *= 4
    return found


# ------------------------------------------------------------------ fits


def test_line_is_found_in_spite_of_outliers() -> None:
    sizes = np.geomspace(1e3, 1e8, 40)
    rows = np.column_stack([np.ones(40), sizes])
    alpha, beta = robust(rows, disturbed(rows @ np.array([7e-6, 2e-10])))
    assert alpha == pytest.approx(7e-6, rel=0.1)
    assert beta == pytest.approx(2e-10, rel=0.1)


def test_no_number_is_negative() -> None:
    sizes = np.linspace(1, 10, 20)
    rows = np.column_stack([np.ones(20), sizes])
    alpha, beta = robust(rows, 3 * sizes - 2.5)  # least squares would start below zero
    assert alpha >= 0
    assert beta > 0


def test_stated_number_decides_only_what_measurements_leave_open() -> None:
    rows = np.column_stack(
        [np.ones(12), np.ones(12), np.linspace(1, 9, 12)]
    )  # two latencies that always add up
    found = robust(rows, rows @ np.array([1.0, 3.0, 5.0]), np.array([3.0, 1.0, np.nan]))
    assert found[0] + found[1] == pytest.approx(4.0, rel=0.01)
    assert found[0] == pytest.approx(3.0, rel=0.05)
    assert found[2] == pytest.approx(5.0, rel=0.01)


def test_matmul_rate_lengths_and_launch_are_found() -> None:
    rate, half, starts = 9e10, (40.0, 12.0, 25.0), {"matmul": 4e-6, "einsum": 9e-6}
    samples, exact = [], []
    random = np.random.default_rng(0)
    for _ in range(150):
        m, n, k = (int(size) for size in np.exp(random.uniform(2, 7.5, 3)))
        op = str(random.choice(["matmul", "einsum"]))
        flops = 2.0 * m * n * k
        reached = rate * m / (m + half[0]) * n / (n + half[1]) * k / (k + half[2])
        samples.append(Work("matmul", flops, 4.0 * (m * n + n * k + m * k), "f32", (1, m, n, k), op))
        exact.append(starts[op] + flops / reached)
    seconds = disturbed(np.array(exact), every=13)
    found_rate, found_half, found_starts, error = fit_matmul(
        list(zip(samples, seconds.tolist(), strict=True)), per_byte=1e-13
    )
    assert found_rate == pytest.approx(rate, rel=0.1)
    assert found_half == pytest.approx(half, rel=0.3)
    for op, start in starts.items():
        assert found_starts[op] == pytest.approx(start, rel=0.15)
    assert error < 0.12  # 3 % of noise, and one in thirteen three quarters off


def test_table_follows_the_knee_of_a_cache() -> None:
    sizes = np.repeat(np.geomspace(2**10, 2**26, 33), 3)
    exact = 2e-6 + np.where(sizes < 2**21, sizes / 50e9, 2**21 / 50e9 + (sizes - 2**21) / 10e9)
    table = fit_table("bytes", sizes, disturbed(exact))
    assert list(table.times) == sorted(table.times)
    within = np.interp(sizes, table.work, table.times) / exact
    assert np.median(np.abs(within - 1)) < 0.08
    assert table.error is not None
    assert table.error < 0.2


def test_a_step_is_the_sum_of_ops_that_take_unequal_times_in_unequal_places() -> None:
    """One op in four finds a cold cache and takes half as long again: the table is near the mean, 1.125."""
    sizes = np.repeat(np.geomspace(2**10, 2**24, 15), 8)
    exact = 20e-6 + sizes / 10e9
    places = np.tile([1.0, 1.0, 1.0, 1.5], 30)
    table = fit_table("bytes", sizes, exact * places)
    found = np.interp(sizes, table.work, table.times)
    assert found.sum() == pytest.approx((exact * places).sum(), rel=0.02)
    assert found[:8].sum() == pytest.approx((exact * places)[:8].sum(), rel=0.05)


def test_less_work_than_was_measured_takes_as_long_as_the_least() -> None:
    """Of a kind that starts with 70 us of Python nothing suggests 2 us for half the bytes."""
    add = [(Work("memory", 0.0, 2.0**power, op="add"), 2e-6 + 2.0**power / 20e9) for power in range(8, 27)]
    pool = [(Work("memory", 0.0, 2.0**power, op="pool"), 7e-5 + 2.0**power / 2e9) for power in range(15, 24)]
    found = fit_compute([*add, *pool], {}, 25e9)
    cost = ComputeCost(one_device(found.compute, found.memory_bandwidth, {}))
    least = cost.time(0, "memory", 0.0, 2.0**15, "f32", op="pool")
    assert least == pytest.approx(7e-5 + 2**15 / 2e9, rel=0.05)
    assert cost.time(0, "memory", 0.0, 2.0**10, "f32", op="pool") == pytest.approx(least, rel=1e-3)


@pytest.mark.parametrize("rates", [(1e-11, 1e-9, 5e-9), (3e-11, 5e-9, 1e-9), (2e-12, 4e-10, 5e-8)])
def test_rates_of_convolutions_are_told_apart(rates: tuple[float, float, float]) -> None:
    """By those that a profile meets: many and few channels made, long and short rows."""
    graphs = [probe.graph() for probe in probes() if probe.name.startswith("convolution")]
    for kind in ("conv", "conv_grad_input", "conv_grad_weight"):
        ops = [op for graph in graphs for op in graph.ops if op.kind == kind]
        works = [work_of(op, [value.nbytes for value in op.operands]) for op in ops]
        seconds = [2e-5 + np.dot(rates, (work.flops, *work.patches)) for work in works]
        samples = list(zip(works, seconds, strict=True))
        found = fit_tables(samples, 1e-10, {})[kind]["f32"]
        assert found.rates == pytest.approx(rates, rel=0.05)
        assert found.launch == pytest.approx(2e-5, rel=0.05)
        assert fit_tables(samples, 1e-10, {"f32": 1e-9})[kind]["f32"].rates[0] >= 1e-9  # as matmuls


def test_a_kind_met_on_few_bytes_only_is_not_taken_to_rise_from_there() -> None:
    """A division of single numbers says how long starting one takes; of 64 MiB it is any stream of bytes."""
    small = [
        (Work("memory", 0.0, 12.0, op="divide"), 5e-6),
        (Work("memory", 0.0, 2048.0, op="divide"), 5.1e-6),
    ]
    wide = [(Work("memory", 0.0, 2.0**power, op="add"), 2e-6 + 2.0**power / 20e9) for power in range(8, 27)]
    found = fit_compute([*small, *wide], {}, 25e9)
    cost = ComputeCost(one_device(found.compute, found.memory_bandwidth, {}))
    assert cost.time(0, "memory", 0.0, 12.0, "f32", op="divide") == pytest.approx(5e-6, rel=0.05)
    for nbytes in (2.0**20, 2.0**26):
        exact = 5e-6 + nbytes / 20e9
        assert cost.time(0, "memory", 0.0, nbytes, "f32", op="divide") == pytest.approx(exact, rel=0.05)
    assert found.compute.ops["divide"]["f32"].error == pytest.approx(0.0, abs=0.01)


def works_of(compute: Compute, bandwidth: float, peak: dict[str, float]) -> list[tuple[Work, float]]:
    """Measurements of a device with known numbers."""
    cluster = one_device(compute, bandwidth, peak)
    cost, found = ComputeCost(cluster), []
    for power in range(8, 27):
        for kind in ("memory", "lookup"):
            work = Work(kind, 0.0, 2.0**power, "f32", op="add" if kind == "memory" else "embedding")
            found.append(work)
    for m, n, k in ((64, 32, 900), (300, 300, 40), (1024, 700, 512), (2048, 2048, 2048), (16, 2000, 100)):
        found.append(
            Work("matmul", 2.0 * m * n * k, 4.0 * (m * n + n * k + m * k), "f32", (1, m, n, k), "matmul")
        )
    return [(w, cost.time(0, w.kind, w.flops, w.nbytes, w.dtype, w.dims)) for w in found]


def one_device(compute: Compute, bandwidth: float, peak: dict[str, float]) -> Cluster:
    cluster = load_cluster("local")
    device = replace(cluster.devices[0], compute=compute, memory_bandwidth=bandwidth, peak=peak)
    return replace(cluster, devices=(device, *cluster.devices[1:]))


def test_device_is_found_from_its_own_costs() -> None:
    given = Compute(3e-6, 0.6, 0.2, {"f32": MatmulRate(0.7, (30.0, 20.0, 50.0))})
    found = fit_compute(works_of(given, 50e9, {"f32": 1e12}), {"f32": 1e12}, 50e9)
    assert found.memory_bandwidth == 50e9  # what the file states stays
    assert not found.measured
    compute = found.compute
    assert compute.launch == pytest.approx(3e-6, rel=0.05)
    assert compute.memory_efficiency == pytest.approx(0.6, rel=0.05)
    assert compute.lookup_efficiency == pytest.approx(0.2, rel=0.05)
    assert compute.matmul["f32"].efficiency == pytest.approx(0.7, rel=0.05)
    assert set(compute.error) == {"launch", "memory_efficiency", "lookup_efficiency"}
    tables = compute.ops["add"]["f32"]
    assert tables.times[-1] == pytest.approx(3e-6 + 2**26 / 30e9, rel=0.05)


def test_without_a_peak_the_rate_is_measured() -> None:
    given = Compute(1e-6, 0.5, 0.5, {"f32": MatmulRate(0.5, (10.0, 10.0, 10.0))})
    found = fit_compute(works_of(given, 20e9, {"f32": 2e11}), {}, None)
    assert found.measured["f32"] == pytest.approx(1e11, rel=0.05)
    assert found.compute.matmul["f32"].efficiency == 1.0
    assert found.memory_bandwidth == pytest.approx(10e9, rel=0.05)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ResourceError, match="no measurement; give the profile more seconds"):
        fit_compute([], {}, None)


def test_steps_with_few_and_many_tasks_tell_what_each_costs() -> None:
    step, task = fit_host([(4, 100e-6 + 4 * 12e-6), (34, 100e-6 + 34 * 12e-6)])
    assert step == pytest.approx(100e-6, rel=0.01)
    assert task == pytest.approx(12e-6, rel=0.01)
    assert fit_host([(4, 50e-6), (34, 40e-6)])[1] == pytest.approx(0.0, abs=1e-9)  # disturbed: never below


# ------------------------------------------------------------------ links


def torn(**numbers: str) -> Cluster:
    """Two machines of three devices, one NIC each."""
    link = {"topology": "full", "bandwidth": numbers["inside"], "latency": numbers["near"]}
    attach = {"bandwidth": "40 GB/s", "latency": "0 us"}
    nics = {"bandwidth": numbers["cable"], "latency": numbers["far"], "attach": attach}
    device = {"count": 3, "type": "cpu", "model": "C", "memory": "1 GiB"}
    return cluster_of(
        {
            "name": "torn",
            "launch": numbers["launch"],
            "machines": [{"count": 2, "devices": device, "inside": link, "nics": nics}],
            "network": {"topology": "switch"},
        }
    )


def test_links_of_two_kinds_are_told_apart() -> None:
    real = torn(launch="11 us", inside="20 GB/s", near="2 us", cable="3 GB/s", far="9 us")
    cost, sent = CollectiveCost(real), []
    for groups in axis_groups(6):
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
            for power in range(10, 29, 2):
                seconds = cost.time(kind, groups[0], 2.0**power, groups[1:])
                sent.append(Message(kind, groups[0], groups[1:], 2.0**power, seconds))
    noisy = disturbed(np.array([m.seconds for m in sent]), noise=0.02, every=17)
    sent = [
        Message(m.kind, m.group, m.concurrent, m.nbytes, t) for m, t in zip(sent, noisy.tolist(), strict=True)
    ]
    guess = torn(launch="1 us", inside="1 GB/s", near="1 us", cable="1 GB/s", far="1 us")
    found = fit_links(guess, sent)
    assert found.bandwidth["machines[0].inside"] == pytest.approx(20e9, rel=0.1)
    assert found.bandwidth["machines[0].nics"] == pytest.approx(3e9, rel=0.1)
    assert found.launch == pytest.approx(11e-6, rel=0.2)
    assert found.latency["machines[0].inside"] == pytest.approx(2e-6, rel=0.2)
    assert found.latency["machines[0].nics"] == pytest.approx(9e-6, rel=0.2)


# ------------------------------------------------------------------ probes


def test_probe_times_every_op_that_costs() -> None:
    probe = next(p for p in probes() if p.name.startswith("perceptron"))
    timed = PreparedProbe(probe, load_cluster("local"))
    seconds = timed.run(0.0)
    assert len(seconds) == len(timed.works) > 20
    assert all(s > 0 for s in seconds)
    ops = [work.op for work in timed.works]
    assert ops.count("momentum") == 6  # a weight and a bias of each of three layers
    assert {"matmul", "einsum", "relu", "relu_grad", "cross_entropy_grad"} <= set(ops)
    first = timed.works[ops.index("matmul")]
    assert first.dims == (1, 8, 64, 64)
    assert first.flops == 2 * 8 * 64 * 64


def test_probe_of_micro_batches_meets_the_kernels_that_add() -> None:
    """Every op once, the mean over the micro-batches; gradients of weights are added up as they are made."""
    probe = next(p for p in probes() if p.name == "perceptron/micro")
    timed = PreparedProbe(probe, load_cluster("local"))
    seconds = timed.run(0.0)
    ops = [work.op for work in timed.works]
    assert len(set(timed.ops)) == len(seconds) == len(ops)
    assert ops.count("einsum+=") == 3  # the weights of three layers
    assert ops.count("einsum") == 2  # the inputs of two of them
    assert all(s > 1e-7 for s in seconds)


@pytest.mark.parametrize(("wall", "taken"), [(1e-3, 2e-4), (5e-5, 5e-5)])
def test_long_ops_take_their_cpu_time_and_short_ones_wall_time(
    wall: float, taken: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks that go on by so much whenever they are read, that of the processor by 0.2 ms."""
    clocks = tuple(partial(next, count(0.0, step)) for step in (wall, 2e-4))
    monkeypatch.setattr(probing, "CLOCKS", clocks)
    monkeypatch.setattr(probing, "_clock_seconds", lambda clock: 0.0)
    probe = next(probe for probe in probes() if probe.name == "perceptron/8x64")
    seconds = PreparedProbe(probe, load_cluster("local")).run()
    assert seconds == pytest.approx([taken] * len(seconds))


def test_convolutions_are_met_at_sizes_that_train() -> None:
    """What starting one costs hides the rates of small ones."""
    graphs = [probe.graph() for probe in probes() if probe.name.startswith("convolution")]
    flops = [flops_of(op) for graph in graphs for op in graph.ops if op.kind == "conv"]
    assert min(flops) < 1e5
    assert max(flops) == 2 * 64 * 8 * 8 * 64 * 128 * 9


# ------------------------------------------------------------------ the file


SOURCE = """# Two machines of ours.
# Second line.
name: ours
about: kept as it is
machines:
  - count: 2
    name: box
    devices: {count: 2, type: cpu, model: C, memory: 3 GiB, peak: {f64: 1 TFLOP/s}}
    inside: {topology: full, bandwidth: 1 GB/s}
    nics: {bandwidth: 10 Gbit/s, latency: 5 us, attach: {bandwidth: 12 GB/s, latency: 1 us}}
network: {topology: switch, kind: ethernet}
measured:
  - {collective: all_reduce, machines: 1, devices_per_machine: 2, sizes: [1 KiB], times: [1 s]}
  - {collective: all_gather, machines: 2, devices_per_machine: 2, sizes: [1 KiB], times: [2 s]}
"""


def numbers() -> Measured:
    ops = {
        "gelu": {"f32": OpTable(bytes=(1024.0, 3000.0), times=(2e-6, 3e-6), error=0.07)},
        "attention": {"f32": OpTable(flops=(1e6, 1.23e9), times=(2e-5, 3e-3), error=0.01)},
        "conv": {"f32": OpTable(error=0.02, launch=2e-5, rates=(1.25e-11, 1.5e-9, 3e-9))},
        "einsum": {"f32": OpTable(launch=9e-6)},
    }
    rates = {"f32": MatmulRate(1.0, (8.0, 4.0, 2.0), {"efficiency": 0.05})}
    compute = Compute(1.5e-6, 0.75, 0.25, rates, ops, {"launch": 0.11})
    links = LinkFit(
        7e-6,
        {"machines[0].inside": 2.5e-6, "machines[0].nics": 8e-6},
        {"machines[0].inside": 6e9},
        {"latency": 0.031, "bandwidth": 0.25},
    )
    table = MeasuredTable(
        "all_reduce", 1, 2, (1024.0, 5000.0), (3e-6, 4e-6), groups=((0, 1), (2, 3)), busy=(1e-6, 2e-6)
    )
    fitted = ComputeFit(compute, 3e10, {"f32": 9.5e10})
    return Measured({"machines[0].devices": fitted}, links, (table,))


def test_written_file_loads_with_what_was_measured_and_keeps_the_rest(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(SOURCE)
    output = tmp_path / "new.yaml"
    write_measured(str(output), str(tmp_path / "ours.yaml"), 4, numbers())
    cluster = load_cluster(output)
    before = load_cluster(tmp_path / "ours.yaml")
    assert [d.node for d in cluster.devices] == [d.node for d in before.devices]
    for device in cluster.devices:
        given = numbers().compute["machines[0].devices"].compute
        assert (device.compute.launch, device.compute.lookup_efficiency) == (given.launch, 0.25)
        assert device.compute.matmul == given.matmul
        assert device.compute.matmul["f32"].error == {"efficiency": 0.05}
        assert device.compute.error == {"launch": 0.11}
        for op, tables in given.ops.items():
            read, table = device.compute.ops[op]["f32"], tables["f32"]
            assert (read.unit, read.work, read.error) == (table.unit, table.work, table.error)
            assert read.rates == pytest.approx(table.rates) if table.rates else read.rates is None
            assert read.times == pytest.approx(table.times)
            assert read.launch == pytest.approx(table.launch) if table.launch else read.launch is None
        assert device.memory_bandwidth == 3e10
        assert dict(device.peak) == {"f64": 1e12}
        assert dict(device.measured) == {"f32": 9.5e10}
    by_origin = {link.origin: link for link in cluster.links}
    inside, cable = by_origin["machines[0].inside"], by_origin["machines[0].nics"]
    assert (inside.bandwidth, inside.latency) == (6e9, pytest.approx(2.5e-6))
    assert (cable.bandwidth, cable.latency) == (1.25e9, pytest.approx(8e-6))
    assert cluster.launch == pytest.approx(7e-6)
    assert cluster.measured[0] == before.measured[1]  # another shape
    assert cluster.measured[1] == numbers().tables[0]  # in place of the old one
    assert len(cluster.measured) == 2
    text = output.read_text()
    assert text.startswith("# Two machines of ours.\n# Second line.\n")
    assert "bandwidth: 6 GB/s  # fit error 25.0%" in text
    assert "launch: 7 us  # fit error 3.1%" in text
    assert yaml.safe_load(text)["about"] == "kept as it is"


def test_new_tables_replace_those_of_the_same_groups(tmp_path: Path) -> None:
    """In whatever order they stand; those of other groups stay."""
    document = yaml.safe_load(SOURCE)
    same, other = ([[2, 3], [1, 0]], [[0, 1]])
    table = document["measured"][0]
    document["measured"] = [{**table, "groups": same}, {**table, "groups": other}, table]
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(document))
    write_measured(str(tmp_path / "new.yaml"), str(tmp_path / "ours.yaml"), 4, numbers())
    kept, new = load_cluster(tmp_path / "new.yaml").measured
    assert (kept.groups, kept.times) == (((0, 1),), (1.0,))
    assert new == numbers().tables[0]


def test_profile_of_a_written_file_changes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(SOURCE)
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    write_measured(str(first), str(tmp_path / "ours.yaml"), 4, numbers())
    write_measured(str(second), str(first), 4, numbers())
    left, right = yaml.safe_load(first.read_text()), yaml.safe_load(second.read_text())
    assert left == right


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("launch", "compute.launch: missing"),
        ("memory_bandwidth", "memory_bandwidth: missing"),
        ("lookup_efficiency", "compute.lookup_efficiency: missing"),
        ("matmul", "compute.matmul.f32: missing"),
    ],
)
def test_missing_number_is_named_with_the_way_to_get_it(missing: str, words: str, tmp_path: Path) -> None:
    entry = {
        "count": 1, "type": "cpu", "model": "C", "memory": "1 GiB", "memory_bandwidth": "1 GB/s",
        "measured": {"f32": "1 GFLOP/s"},
        "compute": {
            "launch": "1 us", "memory_efficiency": 1.0, "lookup_efficiency": 1.0,
            "matmul": {"f32": {"efficiency": 1.0, "half": [1, 1, 1]}},
        },
    }  # fmt: skip
    for place in (entry, entry["compute"]):
        assert isinstance(place, dict)
        place.pop(missing, None)
    path = tmp_path / "partial.yaml"
    path.write_text(yaml.safe_dump({"name": "partial", "machines": [{"devices": entry}]}))
    cost = ComputeCost(load_cluster(path))
    kind = {"memory_bandwidth": "memory", "lookup_efficiency": "lookup"}.get(missing, missing)
    with pytest.raises(ResourceError) as caught:
        cost.time(0, kind, 8.0, 8.0, "f32", (1, 2, 2, 1))
    assert str(path) in str(caught.value)
    assert f"machines[0].devices.{words}" in str(caught.value)
    assert "distgraph profile" in str(caught.value)


# ------------------------------------------------------------------ whole profiles


def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only small programs, so that the test is short."""
    chosen = tuple(
        p
        for p in probes(("f32",))
        if p.name in ("matmul/f32/small", "perceptron/8x64", "stream/256", "stream/65536", "stream/262144")
    )
    monkeypatch.setattr(profiling, "probes", lambda: chosen)


def test_command_writes_a_file_that_a_cost_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer(monkeypatch)
    output = tmp_path / "mine.yaml"
    result = CliRunner().invoke(application.app, ["profile", "-o", str(output), "--seconds", "2"])
    assert result.exit_code == 0, result.output
    cost = ComputeCost(load_cluster(output))
    assert cost.time(0, "matmul", 2.0 * 64**3, 3 * 4.0 * 64**2, "f32", (1, 64, 64, 64), "matmul") > 0
    assert cost.time(0, "memory", 0.0, 2.0**20, "f32", op="multiply") > 0
    assert cost.time(0, "lookup", 0.0, 2.0**20, "f32", op="embedding") > 0
    assert (tmp_path / "mine.measurements.json").is_file()
    compute = cost.cluster.devices[0].compute
    assert compute.step is not None
    assert 0 < compute.step + compute.task < 0.1  # of an engine's step


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
    key = next(key for key in kept["runs"] if key.endswith("|perceptron/8x64"))
    kept["runs"][key]["runs"].pop()  # as if interrupted there
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
    compute = load_cluster(path).devices[0].compute
    assert compute.step == pytest.approx(8e-5, rel=0.01)
    assert compute.task == pytest.approx(1e-5, rel=0.01)
    without = evaluate(load_cluster("local"), {f"{origin}|all": works}).compute[origin].compute
    assert (without.step, without.task) == (None, None)


def test_what_a_rank_is_busy_with_for_a_message_goes_to_its_device(tmp_path: Path) -> None:
    """The median of the rounds, a number of its own: no link is fitted to it; the file holds it."""
    given = Compute(2e-6, 0.5, 0.5, {"f32": MatmulRate(0.5, (10.0, 10.0, 10.0))})
    samples = works_of(given, 20e9, {"f32": 2e11})
    works = {"works": [asdict(work) for work, _ in samples], "runs": [[seconds for _, seconds in samples]]}
    pattern = {"kind": MESSAGE_WORK, "groups": [[0, 1]], "nbytes": 1024}
    attended = {"message": pattern, "runs": [[3e-5], [9e-5], [4e-5]]}
    found = evaluate(load_cluster("local"), {"machines[0].devices|all": works, "|attend": attended})
    assert found.compute["machines[0].devices"].compute.message == 4e-5
    assert found.links is None
    path = tmp_path / "here.yaml"
    write_measured(str(path), "", 2, found)
    assert load_cluster(path).devices[1].compute.message == pytest.approx(4e-5)
