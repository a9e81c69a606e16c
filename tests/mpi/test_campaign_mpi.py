"""Short forms of campaigns on the ranks of an MPI job: random programs, and pairs of passes."""

from __future__ import annotations

import random

import pytest
from campaigns.pass_pairs import NEAR, combinations_of_passes, worst_error
from campaigns.program_generator import draw_case
from campaigns.program_trial import FAILURES, References, run_trial

from distgraph.runtime.launch.mpi_rank import ranks_of_job

pytestmark = pytest.mark.mpi
SEED, PAIRS = 20, 8


def test_random_programs_train_as_on_one_rank() -> None:
    references = References()
    for number in range(20):
        case = draw_case(SEED, number, ranks_of_job())
        case.layout.refine = "conflicts" if case.layout.refine == "always" else case.layout.refine
        verdict = run_trial(case, references)
        assert verdict.kind not in FAILURES, f"trial {number}: {verdict.why}\n{verdict.trace}\n{case}"


@pytest.mark.skipif(ranks_of_job() != 4, reason="the meshes have 4 ranks")
@pytest.mark.parametrize("split", ["dp", "tp"])
def test_pairs_of_passes_train_as_one_rank(split: str) -> None:
    """Every second pass, and a few pairs, on dp2 x pp2 and tp2 x pp2."""
    every = list(combinations_of_passes(split))
    pairs, single = ([names for names in every if len(names) == size] for size in (2, 1))
    for names in (*single[split == "tp" :: 2], *random.Random(f"{SEED} {split}").sample(pairs, PAIRS)):
        assert worst_error(names, split) <= NEAR, names
