"""The search on devices of different models: stages on both where that pays, as exhaustive search finds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations

import pytest
from clusters import cluster_of
from searched import CHAIN, mixed
from test_searching import trains_as_one_rank

from distgraph.engine.searching.oracle import Oracle
from distgraph.engine.searching.proposal import Proposal, StageChoice, realize
from distgraph.engine.searching.space import (
    micro_batch_counts,
    pools_of,
    shapes_of,
    submeshes_of,
)
from distgraph.passes.search.cache import VARIABLE
from distgraph.passes.search.placing import SubMesh, place


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of solved problems of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("solved")))
        yield


def rows(oracle: Oracle, layers: int) -> Iterator[list[tuple[SubMesh, tuple[int, ...]]]]:
    """Every row of sub-meshes that the cluster has devices for, in every order, with those devices."""
    every = submeshes_of(oracle.pools)
    most = [len(pool.machines) * pool.machine for pool in oracle.pools]
    for count in range(1, min(layers, sum(most)) + 1):
        seen = set()
        repeated = [s for s in every for _ in range(count)]
        for row in permutations(range(len(repeated)), count):
            chosen = tuple(repeated[i] for i in row)
            if chosen in seen:
                continue
            seen.add(chosen)
            if all(sum(s.sizes[p] for s in chosen) <= most[p] for p in range(len(most))):
                devices = place(oracle.pools, chosen)
                if devices is not None:
                    yield list(zip(chosen, devices, strict=True))


def proposals(oracle: Oracle, micro_batches: int) -> Iterator[Proposal]:
    """Every cut of the layers for every row of stages."""
    layers = len(oracle.traced(micro_batches).layers)
    for row in rows(oracle, layers):
        for cuts in combinations(range(1, layers), len(row) - 1):
            stages = []
            for (first, stop), (submesh, devices) in zip(pairwise((0, *cuts, layers)), row, strict=True):
                pool = next(p for p, n in zip(oracle.pools, submesh.sizes, strict=True) if n)
                (shape,) = shapes_of(pool, submesh.size)
                stages.append(StageChoice(first, stop, devices, shape))
            yield Proposal("exhaustive", micro_batches, "1f1b", tuple(stages), (), "none", 0.0)


@pytest.mark.parametrize(("speed", "models"), [(0.8, {"G", "H"}), (0.1, {"G"})])
def test_as_exhaustive_search_by_forecasts(speed: float, models: set[str]) -> None:
    """Both models have a stage where the slower one is not much slower; else only the faster one."""
    cluster = cluster_of(mixed(speed, 1, 1))
    oracle = Oracle(CHAIN.training(), cluster, pools_of(cluster))
    every = [
        realize(proposal, oracle)
        for count in micro_batch_counts(CHAIN.batch)
        for proposal in proposals(oracle, count)
    ]
    assert len(every) == 4 * (2 + 2 * 4)  # micro-batch counts x (one stage + two, in both orders, four cuts)
    best = min(every, key=lambda found: found.seconds)
    plan = CHAIN.search(cluster)
    assert plan.forecast is not None
    assert plan.forecast.seconds == pytest.approx(best.seconds)
    assert {cluster.devices[d].model for stage in plan.stages for d in stage.devices} == models
    trains_as_one_rank(CHAIN, plan)


def test_three_devices_of_two_models() -> None:
    """No row of stages on two devices of one model and one of another is forecast to be faster."""
    cluster = cluster_of(mixed(0.5, 2, 1))
    oracle = Oracle(CHAIN.training(), cluster, pools_of(cluster))
    every = [realize(proposal, oracle) for proposal in proposals(oracle, 1)]
    plan = CHAIN.search(cluster)
    assert plan.forecast is not None
    assert plan.forecast.seconds <= min(found.seconds for found in every)
