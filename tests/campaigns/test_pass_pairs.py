"""The short form of the campaign of passes: each alone, and pairs that a seed draws."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from campaigns.pass_pairs import CHOICES, NEAR, combinations_of_passes, worst_error

PAIRS = [names for names in combinations_of_passes() if len(names) == 2]
SLOW = "layouts-searched"  # seconds of a search for each trial
DRAWN = random.Random(19).sample([names for names in PAIRS if SLOW not in names], 6)


@pytest.mark.parametrize("name", CHOICES)
def test_a_pass_alone_is_equal_to_one_rank(name: str) -> None:
    assert worst_error([name], "dp-tp") <= NEAR


@pytest.mark.parametrize("names", DRAWN, ids=" + ".join)
def test_a_pair_of_passes_is_equal_to_one_rank(names: Sequence[str]) -> None:
    assert worst_error(names, "dp-tp") <= NEAR


def test_every_pair_of_different_groups_is_a_trial() -> None:
    groups = [choice.group for choice in CHOICES.values()]
    same = sum(groups.count(group) - 1 for group in groups) // 2
    assert len(PAIRS) == len(groups) * (len(groups) - 1) // 2 - same
