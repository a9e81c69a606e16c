"""Fits find what made the measurements: of ops, devices, steps and links."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from support.devices.measured_machines import one_device, works_of
from support.files.clusters import cluster_of

from distgraph.errors import ResourceError
from distgraph.passes.analysis.op_work import work_of
from distgraph.resources import CollectiveCost, ComputeCost
from distgraph.resources.cluster import Cluster, Compute, MatmulRate
from distgraph.runtime.forecast.op_cost import Work
from distgraph.runtime.profile.collective_probes import (
    axis_groups,
)
from distgraph.runtime.profile.cost_fitting import (
    Message,
    fit_compute,
    fit_links,
    fit_table,
    fit_tables,
)
from distgraph.runtime.profile.matmul_fitting import MatmulFit, fit_matmul
from distgraph.runtime.profile.probe_programs import probes
from distgraph.runtime.profile.robust_fitting import robust


def disturbed(seconds: np.ndarray, noise: float = 0.03, every: int = 11) -> np.ndarray:
    """Measurements of some times: a little noise on all, and some four times too long."""
    random = np.random.default_rng(1)
    found = seconds * (1 + noise * random.standard_normal(len(seconds)))
    found[::every] *= 4
    return found


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


@pytest.mark.parametrize(
    ("per_copied", "exponent", "moved"),
    [(0.7e-9, 1.0, 0.0), (None, 1.0, 0.0), (None, 1.75, 0.0), (None, 1.0, 4e-10)],
)
def test_products_that_were_not_measured_take_as_long_as_the_fit_says(
    per_copied: float | None, exponent: float, moved: float
) -> None:
    """The seconds of bytes and those of short lengths can replace each other in part, so what is compared are
    seconds of products, and not these numbers."""
    truth = MatmulFit(
        9e10, (40.0, 12.0, 25.0), exponent, per_copied, moved, {"matmul": 4e-6, "einsum": 9e-6}, 0
    )
    random = np.random.default_rng(0)
    samples = [product_of(random, copies=per_copied is not None) for _ in range(300)]
    exact = np.array([seconds_of(truth, work) for work in samples])
    seconds = disturbed(exact[:150], every=13)
    fit = fit_matmul(list(zip(samples, seconds.tolist(), strict=False)))
    assert fit.exponent == pytest.approx(exponent, abs=0.25)
    assert fit.rate == pytest.approx(truth.rate, rel=0.1)
    assert fit.copied == (None if per_copied is None else pytest.approx(per_copied, rel=0.15))
    fitted = np.array([seconds_of(fit, work) for work in samples[150:]])
    assert fitted.sum() == pytest.approx(exact[150:].sum(), rel=0.02)
    assert np.abs(fitted / exact[150:] - 1).mean() < 0.05
    assert fit.error < 0.12  # 3 % of noise, and one in thirteen three quarters off


def product_of(random: np.random.Generator, copies: bool) -> Work:
    """A product of any shape, which may copy its result."""
    m, n, k = (int(size) for size in np.exp(random.uniform(2, 7.5, 3)))
    op = str(random.choice(["matmul", "einsum"]))
    copied = m * n * float(random.integers(2)) if op == "einsum" and copies else 0.0
    nbytes = 4.0 * (m * n + n * k + m * k)
    return Work("matmul", 2.0 * m * n * k, nbytes, "f32", (1, m, n, k), op, copied=copied)


def seconds_of(fit: MatmulFit, work: Work) -> float:
    """What a product takes by these numbers."""
    ratios = [half / size for half, size in zip(fit.half, work.dims[1:], strict=True)]
    slower = math.prod(1 + (ratio**fit.exponent if ratio < 1 else ratio) for ratio in ratios)
    moving = work.copied * (fit.copied or 0.0) + work.nbytes * fit.moved
    return fit.launches[work.op] + work.flops / fit.rate * slower + moving


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
    """By those that a profile meets: many and few channels made, long and short rows; in tiles or not."""
    graphs = [probe.graph() for probe in probes() if probe.name.startswith("convolution")]
    for kind in ("conv", "conv_grad_input", "conv_grad_weight"):
        ops = [op for graph in graphs for op in graph.ops if op.kind == kind]
        works = [work_of(op, [value.nbytes for value in op.operands]) for op in ops]
        copied = [replace(work, tiles=(0.0, 0.0, 0.0)) for work in works]
        seconds = [2e-5 + np.dot(rates, (work.flops, *work.patches)) for work in copied]
        tiled = [work for work in works if any(work.tiles)]
        tile_rates = rates[0] / 2, rates[1] / 3, rates[2]
        seconds += [2e-5 + np.dot(tile_rates, work.tiles) for work in tiled]
        samples = list(zip((*copied, *tiled), seconds, strict=True))
        found = fit_tables(samples, 1e-10, {})[kind]["f32"]
        assert found.rates == pytest.approx(rates, rel=0.05)
        assert found.tile_rates == pytest.approx(tile_rates, rel=0.05)
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


def messages_on(cluster: Cluster) -> list[Message]:
    """Collectives of all sizes on the groups of all meshes of six devices, with their seconds."""
    cost = CollectiveCost(cluster)
    return [
        Message(kind, groups[0], groups[1:], 2.0**power, cost.time(kind, groups[0], 2.0**power, groups[1:]))
        for groups in axis_groups(6)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
        for power in range(10, 29, 2)
    ]


def test_links_of_two_kinds_are_told_apart() -> None:
    sent = messages_on(torn(launch="11 us", inside="20 GB/s", near="2 us", cable="3 GB/s", far="9 us"))
    noisy = disturbed(np.array([m.seconds for m in sent]), noise=0.02, every=17)
    sent = [replace(m, seconds=t) for m, t in zip(sent, noisy.tolist(), strict=True)]
    guess = torn(launch="1 us", inside="1 GB/s", near="1 us", cable="1 GB/s", far="1 us")
    found = fit_links(guess, sent)
    assert found.bandwidth["machines[0].inside"] == pytest.approx(20e9, rel=0.1)
    assert found.bandwidth["machines[0].nics"] == pytest.approx(3e9, rel=0.1)
    assert found.launch == pytest.approx(11e-6, rel=0.2)
    assert found.latency["machines[0].inside"] == pytest.approx(2e-6, rel=0.2)
    assert found.latency["machines[0].nics"] == pytest.approx(9e-6, rel=0.2)


def test_a_message_that_came_out_as_almost_nothing_does_not_decide() -> None:
    """On shared cores, the time of a message is a difference; one of these has the least that it can have."""
    sent = messages_on(torn(launch="11 us", inside="20 GB/s", near="2 us", cable="3 GB/s", far="9 us"))
    sent[2] = replace(sent[2], seconds=1e-9)
    found = fit_links(torn(launch="1 us", inside="1 GB/s", near="1 us", cable="1 GB/s", far="1 us"), sent)
    assert found.bandwidth["machines[0].nics"] == pytest.approx(3e9, rel=0.1)
    assert found.error["latency"] < 0.3
