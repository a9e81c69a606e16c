"""The cases of `equivalence` that fit on the ranks of `mpiexec -n 2 python -m pytest -m mpi`; or 4, or 8."""

from __future__ import annotations

from dataclasses import replace

import pytest
from equivalence import Case, cases, check

from distgraph.runtime.rank import ranks_of_job

pytestmark = pytest.mark.mpi

# Every process compiles for itself: the slow search for cheaper layouts is left to the cases in one process.
CASES = dict.fromkeys(
    replace(c, refine="never") for c in cases() if c.dtype == "f64" and c.refine != "always"
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_that_of_one_rank(case: Case) -> None:
    if case.layout.ranks > ranks_of_job():
        pytest.skip(f"needs {case.layout.ranks} ranks; there are {ranks_of_job()}")
    check(case)
