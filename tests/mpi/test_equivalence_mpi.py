"""The cases of `equivalence` that fit on the ranks of `mpiexec -n 2 python -m pytest -m mpi`; or 4, 6, 8.

Those that need just so many:

    mpiexec -n 6 python -m pytest -m mpi tests/mpi/test_equivalence_mpi.py -k 6ranks
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.programs.equivalence import Case, cases, check

from distgraph.runtime.launch.mpi_rank import ranks_of_job

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:loss depends on flip"),  # of the samples, on one rank too
]

# Every process compiles for itself: the slow search for cheaper layouts is left to the cases in one process,
# but for a model that is nothing without it.
CASES = dict.fromkeys(
    c if c.model == "mirror" else replace(c, refine="never")
    for c in cases()
    if c.dtype == "f64" and (c.refine != "always" or c.model == "mirror")
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layout.ranks}ranks-{case}")
def test_training_is_that_of_one_rank(case: Case) -> None:
    if case.layout.ranks > ranks_of_job():
        pytest.skip(f"needs {case.layout.ranks} ranks; there are {ranks_of_job()}")
    check(case)
