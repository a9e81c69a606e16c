"""The benchmark of the checks leaves out what it says, and puts it back."""

from __future__ import annotations

import pytest

from benchmarks import safety
from distgraph.engine.checkpoints import saving
from distgraph.runtime.execute.checkpoint import files


@pytest.mark.slow
def test_saves_and_loads_with_and_without_checks() -> None:
    before = files.checksum, saving.fault_of
    ratios = safety.measure_files(2)
    assert {name: len(values) for name, values in ratios.items()} == {"save": 2, "load": 2}
    assert (files.checksum, saving.fault_of) == before
