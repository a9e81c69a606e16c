"""Stages: the published instance, brute force over all pipelines, mistakes, time."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from support.paths import DATA
from support.search.dense_costs import DenseCosts
from support.search.stage_problems import brute_force, check, sizes

from distgraph.errors import GraphError, InfeasibleError
from distgraph.passes.search.inter_op.stage_costs import (
    Config,
    ProfileCosts,
)
from distgraph.passes.search.inter_op.stages import StageProblem, find_stages
from distgraph.passes.search.inter_op.submesh_placement import (
    Pool,
    SubMesh,
    submeshes,
)
from distgraph.passes.search.intra_op.chosen_layouts import Profile
from distgraph.plan.pipeline_schedules import GPIPE, ONE_F_ONE_B

SCHEDULES = (GPIPE, ONE_F_ONE_B)


def test_the_published_instance() -> None:
    case = json.loads((DATA / "stage_dp.json").read_text())["case"]
    np.random.seed(case["numpy_seed"])  # noqa: NPY002 (the instance is defined by it)
    cost = np.random.rand(8, 8, 4, 5)  # noqa: NPY002
    assert "np.random.rand(8, 8, 4, 5)" in case["cost"]
    problem = StageProblem(
        DenseCosts(cost),
        (Pool.grid("a", 1, case["devices"]),),
        sizes(*(rows * columns for rows, columns in case["submeshes"])),
        case["micro_batches"],
        ONE_F_ONE_B,
    )
    found = find_stages(problem)
    assert found.seconds == pytest.approx(case["optimum"], rel=1e-12)
    assert [(s.first, s.stop, s.submesh, s.config) for s in found.stages] == [(0, 4, 2, 2), (4, 8, 2, 4)]
    assert "layers 0-3 on (1,4) config 2, layers 4-7 on (1,4) config 4" in case["solution"]


def random_problem(seed: int) -> StageProblem:
    rng = np.random.default_rng(seed)
    kind = seed % 4
    if kind == 0:  # one pool, any machine
        machine = int(rng.choice([3, 4, 6]))
        pools: tuple[Pool, ...] = (Pool.grid("a", int(rng.integers(1, 3)), machine),)
        meshes = submeshes(pools)
    elif kind == 1:  # sizes that need not pack
        pools = (Pool.grid("a", 2, 5),)
        meshes = sizes(1, 2, 3, 5, 10)
    elif kind == 2:  # two pools
        pools = (Pool.grid("a", 1, 2), Pool.grid("b", 2, 3, start=2))
        meshes = submeshes(pools)
    else:  # two pools, some stages over both
        pools = (Pool.grid("a", 1, 2), Pool.grid("b", 1, 3, start=2))
        meshes = (*submeshes(pools), SubMesh((1, 1)), SubMesh((2, 3)))
    layers = int(rng.integers(2, 5))
    configs = int(rng.integers(1, 3))
    shape = (layers, layers, len(meshes), configs)
    length = np.maximum(np.arange(layers)[None, :] - np.arange(layers)[:, None] + 1, 0)[:, :, None, None]
    seconds = length * rng.random(shape) + 0.1
    optional: dict[str, object] = {}
    if rng.random() < 0.6:
        optional |= {"fixed": length * rng.random(shape), "activations": length * rng.random(shape)}
        optional["memory"] = rng.uniform(1.0, 4.0, len(meshes))
    if rng.random() < 0.5:
        optional["step"] = 3 * rng.random(shape)
    transfer = occupied = None
    if rng.random() < 0.6:
        transfer = 0.3 * rng.random((layers - 1, len(meshes), len(meshes)))
        occupied = transfer / 2 if seed % 3 == 0 else None
    return StageProblem(
        DenseCosts(seconds, **optional),
        pools,
        meshes,
        int(rng.choice([1, 2, 4, 16])),
        SCHEDULES[seed // 4 % 2],
        transfer,
        whole=bool(rng.random() < 0.5),
        most=int(rng.integers(1, 4)) if rng.random() < 0.3 else None,
        occupied=occupied,
    )


@pytest.mark.parametrize("seed", range(160))
def test_equals_brute_force(seed: int) -> None:
    problem = random_problem(seed)
    best = brute_force(problem)
    if best == np.inf:
        with pytest.raises(InfeasibleError):
            find_stages(problem)
        return
    found = find_stages(problem)
    check(problem, found)
    assert found.bound <= best * (1 + 1e-12)
    if found.bound == found.seconds:
        assert found.seconds == pytest.approx(best, rel=1e-12)
    else:
        assert seed % 4 == 1  # the best row of sizes that do not divide one another could not be placed
        assert found.seconds >= best * (1 - 1e-12)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(0, 160, 4))
def test_an_exact_number_of_stages_equals_brute_force(seed: int, count: int) -> None:
    problem = replace(random_problem(seed), most=count, exact=True)
    best = brute_force(problem)
    if best == np.inf:
        with pytest.raises(InfeasibleError):
            find_stages(problem)
        return
    found = find_stages(problem)
    check(problem, found)
    assert len(found.stages) == count
    assert found.seconds == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", [0, 2, 3, 6, 9])
def test_only_rows_below_are_looked_for(seed: int) -> None:
    problem = random_problem(seed)
    best = find_stages(problem)
    again = find_stages(problem, below=best.seconds * 1.0001)
    assert again.seconds == best.seconds
    with pytest.raises(InfeasibleError, match="no pipeline that fits takes less than"):
        find_stages(problem, below=best.seconds)


def test_what_does_not_fit_is_said() -> None:
    seconds = np.ones((2, 2, 1, 1))
    held = np.full((2, 2, 1, 1), 5.0)
    held[1, 1] = 1.0
    costs = DenseCosts(seconds, fixed=held, memory=[2.0])
    pools = (Pool.grid("a", 1, 2),)
    with pytest.raises(
        InfeasibleError, match=r"layer 0 fits into memory; alone on 1 of pool 0 with 4 .* needs 3 more bytes"
    ):
        find_stages(StageProblem(costs, pools, sizes(1), 4, GPIPE))
    with pytest.raises(InfeasibleError, match="uses every device, but some use fewer"):
        find_stages(StageProblem(DenseCosts(seconds), (Pool.grid("a", 1, 3),), sizes(1), 4, GPIPE))
    held = np.ones((2, 2, 1, 1))
    held[0, 1] = 2.0
    costs = DenseCosts(seconds, activations=held, memory=[1.5])
    with pytest.raises(InfeasibleError, match="1f1b, which keeps up to 2 micro-batches in flight"):
        find_stages(StageProblem(costs, pools, sizes(1), 4, ONE_F_ONE_B))
    with pytest.raises(InfeasibleError, match="costs of stages are for 1 sub-meshes but 2"):
        StageProblem(costs, pools, sizes(1, 2), 4, GPIPE)
    with pytest.raises(InfeasibleError, match="transfers have shape"):
        StageProblem(costs, pools, sizes(1), 4, GPIPE, np.zeros((2, 1, 1)))
    with pytest.raises(GraphError, match="need \\[layers, layers"):
        DenseCosts(np.ones((2, 3, 1, 1)))
    one = Profile(*[np.ones(3)] * 8)
    with pytest.raises(GraphError, match="2 sub-meshes have 1 memories"):
        ProfileCosts([[Config(one)], [Config(one)]], [1.0])


def transformer(counts: list[int], layers: int, memory: float) -> ProfileCosts:
    """Equal blocks whose time falls with the devices, less so the more there are."""
    configs = []
    for n in counts:

        def column(value: float) -> np.ndarray:
            return np.append(np.full(layers, value), 0.0)

        share = (1 + 0.02 * np.log2(n)) / n
        plain = Profile(
            column(share),
            column(2 * share),
            column(0.1),
            column(0.0),
            column(40 / n),
            column(8 / n),
            column(1 / n),
            column(0.0),
        )
        again = replace(plain, backward=1.5 * plain.backward, activations=column(0.5 / n))
        configs.append([Config(plain, again)])
    return ProfileCosts(configs, [memory] * len(counts))


def test_time_of_large_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    pool = Pool.grid("a", 1280, 8)
    counts = [8 * 2**k for k in range(11) if 8 * 2**k <= pool.size]
    problem = StageProblem(transformer(counts, 96, 16.0), (pool,), sizes(*counts), 512, ONE_F_ONE_B)
    start = time.process_time()
    found = find_stages(problem)
    took = time.process_time() - start
    with capsys.disabled():
        print(f"\n96 layers, 10,240 devices: {took:.1f} s of CPU, {found.limits} limits")
    assert sum(len(s.devices) for s in found.stages) == 10_240
