"""A short form of the campaign of random programs on the ranks of an MPI job, as many as there are."""

from __future__ import annotations

import pytest
from campaigns.program_generator import draw_case
from campaigns.program_trial import FAILURES, References, run_trial

from distgraph.runtime.launch.mpi_rank import ranks_of_job

pytestmark = pytest.mark.mpi
SEED = 20


def test_random_programs_train_as_on_one_rank() -> None:
    references = References()
    for number in range(20):
        case = draw_case(SEED, number, ranks_of_job())
        case.layout.refine = "conflicts" if case.layout.refine == "always" else case.layout.refine
        verdict = run_trial(case, references)
        assert verdict.kind not in FAILURES, f"trial {number}: {verdict.why}\n{verdict.trace}\n{case}"
