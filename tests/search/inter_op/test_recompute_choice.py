"""The layers that a rank recomputes: compared with every subset of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distgraph.passes.search.inter_op import recompute_choice
from distgraph.passes.search.inter_op.recompute_choice import (
    RecomputedLayer,
    cheapest_layers,
    smallest_choices,
)


def needed(layers: list[RecomputedLayer], chosen: tuple[int, ...], stored: float, scratch: float) -> float:
    """Bytes of the rank with these layers recomputed."""
    inside = [layer for layer in layers if layer.number in chosen]
    return stored - sum(layer.saved for layer in inside) + max([scratch, *(each.scratch for each in inside)])


def random_layers(rng: np.random.Generator) -> list[RecomputedLayer]:
    """Up to nine layers, some of them equal, some of which save nothing."""
    kinds = [
        (float(rng.integers(1, 9)), float(rng.integers(-2, 12)), float(rng.integers(0, 15)))
        for _ in range(int(rng.integers(1, 6)))
    ]
    picked = rng.integers(0, len(kinds), int(rng.integers(1, 10)))
    return [RecomputedLayer(number, *kinds[kind]) for number, kind in enumerate(picked)]


def test_no_subset_that_fits_adds_less_time() -> None:
    rng = np.random.default_rng(7)
    for _ in range(60):
        layers, stored, scratch = random_layers(rng), 50.0, float(rng.integers(0, 8))
        numbers = [layer.number for layer in layers]
        subsets = [c for size in range(len(numbers) + 1) for c in itertools.combinations(numbers, size)]
        bytes_of = {subset: needed(layers, subset, stored, scratch) for subset in subsets}
        seconds_of = {subset: sum(layers[number].seconds for number in subset) for subset in subsets}
        for memory in (*np.linspace(min(bytes_of.values()), max(bytes_of.values()), 4), 1.0):
            fitting = [subset for subset in subsets if bytes_of[subset] <= memory]
            found = cheapest_layers(layers, stored, scratch, memory)
            assert (found is None) == (not fitting)
            if found is not None:
                assert bytes_of[found] <= memory
                assert seconds_of[found] == min(seconds_of[subset] for subset in fitting)
        least = min(bytes_of[choice] for choice in smallest_choices(layers, scratch))
        assert least == min(bytes_of.values())


def test_of_equal_layers_the_first_ones() -> None:
    layers = [RecomputedLayer(number, 1.0, 10.0, 5.0) for number in range(40)]
    assert cheapest_layers(layers, stored=400.0, scratch=0.0, memory=380.0) == (0, 1, 2)
    assert cheapest_layers(layers, stored=400.0, scratch=0.0, memory=400.0) == ()
    assert cheapest_layers(layers, stored=400.0, scratch=0.0, memory=4.0) is None


def test_many_unlike_layers_are_nearly_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many partial choices, their bytes are rounded down: what is chosen still fits."""
    rng = np.random.default_rng(3)
    layers = [RecomputedLayer(n, *rng.uniform(1, 2, 2), 0.0) for n in range(24)]
    exact = cheapest_layers(layers, stored=40.0, scratch=0.0, memory=22.0)
    monkeypatch.setattr(recompute_choice, "_MOST_CHOICES", 100)
    rounded = cheapest_layers(layers, stored=40.0, scratch=0.0, memory=22.0)
    assert exact is not None
    assert rounded is not None
    assert needed(layers, rounded, 40.0, 0.0) <= 22.0
    seconds = [sum(layers[number].seconds for number in choice) for choice in (exact, rounded)]
    assert seconds[0] <= seconds[1] <= 1.01 * seconds[0]
