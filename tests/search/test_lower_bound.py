"""The bound for whole plans: closed formulas, and below every program that is forecast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.files.clusters import cluster_of
from support.programs.searched import CHAIN, PROGRAMS, Program, mixed, slow, two_by_two
from support.search.candidates import candidates

from benchmarks.support.all_uniform_pipelines import uniform_pipelines
from distgraph import nn
from distgraph.engine.search_driver.candidate import build_candidate
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.lower_bound import _divided, least_bytes, least_seconds
from distgraph.engine.search_driver.run_search import run_search
from distgraph.engine.search_driver.search_space import pools_of
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.passes.analysis.op_work import work_of
from distgraph.plan.plan import Plan
from distgraph.resources import Cluster
from distgraph.resources.cluster import OpTable
from distgraph.tracing.tensor import Tensor


def bound_of(program: Program, cluster: Cluster) -> float:
    """Of the program on a cluster."""
    return least_seconds(
        LayoutCosts(program.compile_request(), cluster, pools_of(cluster)).layered_graph(1).fold, cluster
    )


def chain_flops() -> tuple[int, int]:
    """FLOPs and number of the products of the chain: 4 layers of 24 x 24 and one of 24 x 6, forward, for the
    weights, and for what goes in (of the first layer nobody asks)."""
    inner, last = 2 * CHAIN.batch * 24 * 24, 2 * CHAIN.batch * 24 * 6
    return 3 * (4 * inner + last) - inner, 3 * 5 - 1


def chain_bytes() -> tuple[int, int]:
    """Bytes and number of the ops that move data, all in f64: four activations and their gradients,
    the bias, the mean over the samples, and Adam (four tensors and two numbers read, three written). The
    cross-entropy reads scores and labels (of 4 bytes) and writes two numbers a sample, its gradient reads
    scores, labels, one number a sample and that of the mean."""
    hidden, out, weights = CHAIN.batch * 24, CHAIN.batch * 6, (24 * 24,) * 4 + (24 * 6, 6)
    labels = CHAIN.batch // 2
    sizes = [2 * hidden] * 4 + [3 * hidden] * 4 + [2 * out + 6, CHAIN.batch + 1, 3, 3, out + 6]
    sizes += [out + labels + 2 * CHAIN.batch, 2 * out + labels + CHAIN.batch + 1]
    sizes += [7 * size + 2 for size in weights]
    return 8 * sum(sizes), len(sizes)


LAUNCH, RATE = 50e-9, 0.5 * 10e9  # of `searched.slow`
KINDS = ("matmul", "einsum")  # of the products of the chain


def moving(document: dict[str, Any]) -> float:
    """Bytes/s of every device of a document."""
    devices = [machine["devices"] for machine in document["machines"]]
    (bandwidth,) = {device["memory_bandwidth"] for device in devices}
    (efficiency,) = {device["compute"]["memory_efficiency"] for device in devices}
    return 1e9 * float(bandwidth.removesuffix(" GB/s")) * float(efficiency)


def test_equal_devices_share_all_ops() -> None:
    (flops, products), (nbytes, moves) = chain_flops(), chain_bytes()
    for machines in ((1,), (2, 2), (3, 1)):
        seconds = (products + moves) * LAUNCH + flops / RATE + nbytes / moving(slow(*machines))
        expected = seconds / sum(machines)
        assert bound_of(CHAIN, cluster_of(slow(*machines))) == pytest.approx(expected, rel=1e-12)


def test_unequal_devices_share_by_their_speed() -> None:
    """Without launches the rates add up; with them the step takes a little longer."""
    document = mixed(0.25, 2, 3)
    for machine in document["machines"]:
        machine["devices"]["memory_bandwidth"] = "1e9 GB/s"
    flops, _ = chain_flops()
    together = RATE * (2 + 3 * 0.25)
    assert bound_of(CHAIN, cluster_of(document)) > flops / together
    for machine in document["machines"]:
        machine["devices"]["compute"]["launch"] = "0 ns"
    assert bound_of(CHAIN, cluster_of(document)) == pytest.approx(flops / together, rel=1e-9)


def test_every_product_goes_where_it_is_fastest() -> None:
    assert _divided(np.array([[1.0, 10.0], [10.0, 1.0]]), [1, 1]) == pytest.approx(1.0)
    assert _divided(np.array([[1.0, 10.0], [10.0, 1.0]]), [2, 1]) == pytest.approx(11 / 12)
    assert _divided(np.array([[6.0], [3.0]]), [1, 1]) == pytest.approx(2.0)
    assert _divided(np.zeros((2, 0)), [1, 1]) == 0.0


def test_a_measured_table_bounds_by_its_best_rate() -> None:
    cluster = two_by_two()
    table = OpTable(flops=(1e3, 1e4, 1e5), times=(1e-6, 4e-6, 5e-5))  # 2.5 GFLOP/s at 1e4
    devices = tuple(
        replace(device, compute=replace(device.compute, ops={kind: {"f64": table} for kind in KINDS}))
        for device in cluster.devices
    )
    (flops, _), (nbytes, moves) = chain_flops(), chain_bytes()
    rest = moves * LAUNCH + nbytes / moving(slow(2, 2))
    assert bound_of(CHAIN, replace(cluster, devices=devices)) == pytest.approx((flops / 2.5e9 + rest) / 4)


def with_rates(cluster: Cluster) -> Cluster:
    """Convolutions by FLOPs and patches."""
    kinds = ("conv", "conv_grad_input", "conv_grad_weight")
    table = OpTable(launch=2e-6, rates=(1e-11, 3e-9, 2e-8))
    devices = tuple(
        replace(device, compute=replace(device.compute, ops={kind: {"f64": table} for kind in kinds}))
        for device in cluster.devices
    )
    return replace(cluster, devices=devices)


def every_row(program: Program, cluster: Cluster) -> Iterator[float]:
    """Forecasts of uniform rows of every kind."""
    layout_costs = LayoutCosts(program.compile_request(), cluster, pools_of(cluster))
    for restriction in ("uniform", "none"):
        for micro_batches in (1, program.batch):
            for row in uniform_pipelines(layout_costs, micro_batches, restriction):
                yield build_candidate(row, layout_costs).seconds


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("measured", [False, True])
def test_no_uniform_row_is_below(name: str, measured: bool) -> None:
    cluster = with_rates(two_by_two()) if measured else two_by_two()
    least = bound_of(PROGRAMS[name], cluster)
    assert 0 < least <= min(every_row(PROGRAMS[name], cluster))


class Convolutions(nn.Module):
    """Two convolutions in f32 whose windows reach beyond the input, so that outputs are larger than it."""

    def __init__(self) -> None:
        self.first, self.second = (nn.Conv2d(32, 32, 3, padding=2, dtype="f32") for _ in range(2))
        self.last = nn.Linear(32, 6, dtype="f32")

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 32, 10, 10] to scores."""
        scores: Tensor = self.last(self.second(self.first(x.astype("f32"))).mean((2, 3)))
        return scores


@pytest.mark.parametrize("rates", [None, (1e-11, 3e-9, 2e-8)])
@pytest.mark.parametrize("tile_rates", [(1e-11, 0.0, 0.0), (2e-11, 1e-9, 1e-8)])
def test_convolutions_in_tiles_are_not_above_forecasts(rates: Any, tile_rates: Any) -> None:
    """Gradients of inputs that are smaller than outputs have fewer FLOPs in tiles than by their operands."""
    program = Program(Convolutions, (32, 10, 10), batch=4)
    table = OpTable(launch=2e-6, rates=rates, tile_rates=tile_rates)
    kinds = ("conv", "conv_grad_input", "conv_grad_weight")
    cluster = cluster_of(slow(2))
    devices = tuple(
        replace(device, compute=replace(device.compute, ops={kind: {"f32": table} for kind in kinds}))
        for device in cluster.devices
    )
    cluster = replace(cluster, devices=devices)
    fold = LayoutCosts(program.compile_request(), cluster, pools_of(cluster)).layered_graph(1).fold
    works = [work_of(each.op, [0] * len(each.op.operands)) for each in fold.ops if each.op.kind in kinds]
    assert any(0 < work.tiles[0] < work.flops for work in works)
    assert 0 < bound_of(program, cluster) <= min(every_row(program, cluster))


@pytest.mark.parametrize("speed", [0.8, 0.1])
@pytest.mark.parametrize("program", [CHAIN, PROGRAMS["gpt"]], ids=["chain", "gpt"])
def test_not_above_the_optimum_of_exhaustive_search(program: Program, speed: float) -> None:
    """Softmax, norms and the loss of the second program may be replaced by simpler ops."""
    cluster = cluster_of(mixed(speed, 1, 1))
    layout_costs = LayoutCosts(program.compile_request(), cluster, pools_of(cluster))
    best = min(
        build_candidate(p, layout_costs).seconds
        for count in (1, 2, 4, 8)
        if program.batch % count == 0
        for p in candidates(layout_costs, count)
    )
    assert 0.1 * best < bound_of(program, cluster) <= best


def test_a_replaced_op_counts_as_the_cheaper_way_to_compute_it() -> None:
    """With a fused loss that takes a second, the bound is that of the simpler ops."""
    cluster = two_by_two()
    table = OpTable(launch=1.0, rates=(0.0, 0.0, 0.0))
    devices = tuple(
        replace(device, compute=replace(device.compute, ops={"cross_entropy": {"f64": table}}))
        for device in cluster.devices
    )
    assert bound_of(CHAIN, cluster) < bound_of(CHAIN, replace(cluster, devices=devices)) < 0.01


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_on_one_mesh_needs_fewer_bytes(name: str) -> None:
    program, cluster = PROGRAMS[name], two_by_two()
    layout_costs = LayoutCosts(program.compile_request(), cluster, pools_of(cluster))
    for micro_batches in (1, program.batch):
        fold = layout_costs.layered_graph(micro_batches).fold
        least = least_bytes(fold, len(cluster.devices))
        held = sum(op.result.nbytes for op in fold.graph.sources("param", "state"))
        assert least >= held / len(cluster.devices)
        rows = uniform_pipelines(layout_costs, micro_batches, "none")
        whole = [row for row in rows if len(row.stages) == 1 and not row.recompute]
        assert whole
        for row in whole:
            assert build_candidate(row, layout_costs).forecast.peak_memory >= least


def test_one_device_with_products_alone_reaches_it() -> None:
    """Where starting an op and moving bytes cost nothing, one device computes just that."""
    document = slow(1)
    (machine,) = document["machines"]
    machine["devices"] |= {"memory_bandwidth": "1e9 GB/s"}
    machine["devices"]["compute"]["launch"] = "0 ns"
    cluster = cluster_of(document)
    plan = CHAIN.search(cluster)
    assert plan.forecast is not None
    assert plan.search.bound == pytest.approx(plan.forecast.seconds, rel=1e-3)
    assert plan.search.gap == pytest.approx(0, abs=1e-3)
    assert plan.forecast.seconds >= plan.search.bound


def test_the_plan_tells_its_bound_and_gap() -> None:
    cluster = two_by_two()
    plan = PROGRAMS["mlp"].search(cluster, seconds=0.0)
    least = bound_of(PROGRAMS["mlp"], cluster)
    assert plan.forecast is not None
    assert plan.search.bound == least
    assert plan.search.gap == pytest.approx(plan.forecast.seconds / least - 1)
    assert f"; no plan can take less than {least * 1e3:.4g} ms" in str(plan)
    assert Plan.parse(plan.text()) == plan


def test_a_bound_is_told_by_what_it_says_about_the_plan() -> None:
    plan = PROGRAMS["mlp"].search(two_by_two(), seconds=0.0)
    assert plan.forecast is not None
    seconds = plan.forecast.seconds
    near, far = (replace(plan, search=replace(plan.search, bound=part * seconds)) for part in (0.9, 0.1))
    assert f"no plan can take less than {0.9e3 * seconds:.4g} ms, 10.0% less than this one" in str(near)
    assert "ms, which computation alone takes, without communication and idle devices" in str(far)


def test_it_is_known_before_any_plan() -> None:
    state = SearchState(PROGRAMS["mlp"].compile_request(), two_by_two(), "auto", 60.0)
    next(run_search(state))
    assert state.best is None
    assert state.bound == bound_of(PROGRAMS["mlp"], two_by_two())
