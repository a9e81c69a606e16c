"""Costs of stages from profiles: sums by hand, bans and borders, brute force over all pipelines."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from support.search.stage_problems import brute_force, check, every_stage, sizes

from distgraph.errors import InfeasibleError
from distgraph.passes.search.inter_op.stage_candidates import StageCandidates
from distgraph.passes.search.inter_op.stage_costs import (
    Config,
    IncreasedCosts,
    IntervalCosts,
    ProfileCosts,
    stage_indices,
)
from distgraph.passes.search.inter_op.stages import StageProblem, find_stages
from distgraph.passes.search.inter_op.submesh_placement import (
    Pool,
)
from distgraph.passes.search.intra_op.chosen_layouts import Profile
from distgraph.plan.pipeline_schedules import ONE_F_ONE_B


def random_profile(rng: np.random.Generator, layers: int, equal: bool) -> Config:
    def column(scale: float) -> np.ndarray:
        inner = np.full(layers, rng.random()) if equal else rng.random(layers)
        return scale * np.append(inner, rng.random() * 0.1)

    forward, backward = column(1.0), column(2.0)
    activations, temporary = column(1.0), column(0.5)
    plain = Profile(
        forward, backward, column(0.5), column(0.2), column(1.0), activations, temporary, 0 * forward
    )
    again = replace(
        plain, backward=backward + forward, activations=0.2 * activations, temporary=1.5 * temporary
    )
    again.backward[-1], again.activations[-1] = backward[-1], activations[-1]
    return Config(plain, again if rng.random() < 0.8 else None)


def stage_by_hand(config: Config, first: int, last: int, live: int, memory: float) -> float:
    """Least seconds of a stage over all subsets of layers to recompute."""
    p, q, run = config.profile, config.recompute, range(first, last + 1)
    best = np.inf
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(run, r) for r in range(len(run) + 1 if q is not None else 1)
    ):
        of = {layer: (q if layer in chosen else p) for layer in run} | {-1: p}
        held = sum(of[layer].fixed[layer] + live * of[layer].activations[layer] for layer in of)
        scratch = max(x.temporary[layer] for x in ((p, q) if chosen else (p,)) for layer in of)
        if held + scratch <= memory:
            seconds = sum(of[layer].forward[layer] + of[layer].backward[layer] for layer in of)
            best = min(best, seconds + sum(p.border[first:last]))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_profiles_give_the_costs_of_every_run(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, equal = 5, seed % 2 == 0
    table = [[random_profile(rng, layers, equal) for _ in range(2)], [random_profile(rng, layers, equal)]]
    memory = [float(m) for m in rng.uniform(2.0, 9.0, 2)]
    costs = ProfileCosts(table, memory)
    assert costs.shape == (5, 2, 2)
    assert np.isinf(every_stage(costs, 1).seconds[:, :, 1, 1]).all()
    for live, (n, row) in itertools.product((1, 3), enumerate(table)):
        found = every_stage(costs, live)
        for c, config in enumerate(row):
            for first, last in itertools.product(range(layers), repeat=2):
                value = found.seconds[first, last, n, c]
                if last < first:
                    assert value == np.inf
                    continue
                least = stage_by_hand(config, first, last, live, memory[n])
                again = costs.recomputed(first, last, n, c, live)
                assert np.isinf(value) == np.isinf(least)
                if np.isinf(value):
                    continue
                if equal or not again:
                    assert value == pytest.approx(least, rel=1e-12)
                extra = 0.0 if config.recompute is None else float(config.profile.forward.max())
                assert least * (1 - 1e-12) <= value <= (least + extra) * (1 + 1e-12)
                assert set(again) <= set(range(first, last + 1))
                once = config.profile.step[first : last + 1].sum() + config.profile.step[-1]
                assert found.step[first, last, n, c] == pytest.approx(once, rel=1e-12)


def some_costs(seed: int) -> tuple[list[list[Config]], ProfileCosts]:
    """Five layers on three sub-meshes, the second with one config, the others with two."""
    rng = np.random.default_rng(seed)
    table = [[random_profile(rng, 5, True) for _ in range(count)] for count in (2, 1, 2)]
    return table, ProfileCosts(table, [float(m) for m in rng.uniform(3.0, 8.0, 3)])


@pytest.mark.parametrize("seed", range(6))
def test_a_border_or_a_ban_changes_the_stages_it_is_for(seed: int) -> None:
    _, costs = some_costs(seed)
    behind = np.random.default_rng(seed).random((5, 3))
    forbidden = np.random.default_rng(seed).random((5, 5, 3)) < 0.3
    bordered = IncreasedCosts(costs, behind)
    restricted = IncreasedCosts(costs, np.where(forbidden, np.inf, 0.0))
    for live in (1, 4):
        plain, longer, fewer = (
            every_stage(costs, live),
            every_stage(bordered, live),
            every_stage(restricted, live),
        )
        for first, last, n, c in np.ndindex(plain.seconds.shape):
            here = first, last, n, c
            assert longer.seconds[here] == plain.seconds[here] + behind[last, n]
            assert fewer.seconds[here] == (np.inf if forbidden[first, last, n] else plain.seconds[here])
            assert longer.step[here] == fewer.step[here] == plain.step[here]


@pytest.mark.parametrize("seed", range(6))
def test_candidates_leave_out_only_what_cannot_matter(seed: int) -> None:
    _, costs = some_costs(seed)
    rounds, behind, best = 3.0, 2, 40.0
    first = StageCandidates.of(costs, 1, rounds).below(best)
    found = first.followed_by(behind).fitting(costs, 1 + behind, rounds)
    every = every_stage(costs, 1 + behind)
    slowest = rounds * every.seconds + every.step
    for limit in (15.0, 25.0, best * 0.999):
        table = found.within(limit)
        for at in np.ndindex(table.shape):
            allowed = every.seconds[at][slowest[at] <= limit]
            least = allowed.min(initial=np.inf)
            assert table[at] == (least if at[1] < 5 - behind else np.inf)
    assert set(found.stages) <= set(first.stages) <= set(stage_indices(costs.shape))
    assert np.array_equal(found.maxima() <= 25.0, np.isfinite(found.within(25.0)))


@pytest.mark.parametrize("seed", range(40))
def test_stages_from_profiles_equal_brute_force(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    table = [[random_profile(rng, 4, True) for _ in range(2)] for _ in range(3)]
    costs: IntervalCosts = ProfileCosts(table, [float(m) for m in rng.uniform(4.0, 9.0, 3)])
    problem = StageProblem(costs, (Pool.grid("a", 1, 4),), sizes(1, 2, 4), 8, ONE_F_ONE_B)
    problem = replace(problem, whole=seed % 2 == 0)
    best = brute_force(problem)
    if best == np.inf:
        with pytest.raises(InfeasibleError):
            find_stages(problem)
        return
    found = find_stages(problem)
    check(problem, found)
    assert found.seconds == pytest.approx(best, rel=1e-12)


def test_no_more_layers_are_recomputed_than_memory_asks_for() -> None:
    one = np.array([1.0] * 6 + [0.0])
    zero = np.zeros(7)
    plain = Profile(one, 2 * one, zero, zero, zero, one, zero, zero)
    again = replace(plain, backward=3 * one, activations=zero)
    costs = ProfileCosts([[Config(plain, again)]], [4.0])
    # 6 layers keep 6 bytes a micro-batch; with one in flight two must go, with two four, with four five
    for live, count in ((1, 2), (2, 4), (4, 5)):
        assert len(costs.recomputed(0, 5, 0, 0, live)) == count
        assert every_stage(costs, live).seconds[0, 5, 0, 0] == 18 + count


def test_the_backward_part_hides_the_synchronisation_of_gradients() -> None:
    one, zero = np.array([1.0] * 4 + [0.0]), np.zeros(5)
    of_gradients = np.array([0.0, 1.0, 2.0, 9.0, 0.0])
    profile = Profile(one, 2 * one, 0.5 * one + of_gradients, zero, zero, zero, zero, of_gradients)
    costs = ProfileCosts([[Config(profile)]])
    stages = np.array([0 * 4 + 2, 3 * 4 + 3])  # layers 0 to 2 on one device, then layer 3 alone
    assert costs.step_of(stages).tolist() == [1.5, 0.5 + 9.0 - 2.0]
