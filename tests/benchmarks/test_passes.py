"""Figures of `benchmarks/passes.py` that do not depend on the machine."""

from __future__ import annotations

import pytest

from benchmarks.passes import bubble_figures, zero_figures


def test_bubbles_are_those_of_the_formulas() -> None:
    for name, found in bubble_figures().items():
        assert found["simulated"] == pytest.approx(found["formula"]), name


def test_zero_stores_and_sends_what_the_formulas_say() -> None:
    for level, found in zero_figures().items():
        assert found["wire_bytes_ratio"] <= 1.001, level
        if level != "1":  # keeps whole gradients beside the parts that updates read
            assert found["state_bytes_ratio"] == pytest.approx(1, rel=0.02), level
