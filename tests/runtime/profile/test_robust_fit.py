"""The robust fit: known parameters come back, no row has a part in its own forecast."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.support.cross_validation import by_rows, cross_validate, regret
from distgraph.errors import ResourceError
from distgraph.runtime.profile.calibration.robust_fit import Parameter, by_group, deviations, fit, splits

SIZES = np.array([1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0])
LINE = (Parameter("start", 1.0, 1e-3, 1e3, 30.0), Parameter("rate", 1.0, 1e-3, 1e3, 30.0))


def line(values):
    """Seconds of SIZES."""
    return values["start"] + SIZES / values["rate"]


def test_known_parameters_come_back():
    found = fit(LINE, line, line({"start": 0.7, "rate": 12.0}))
    assert found.values == pytest.approx({"start": 0.7, "rate": 12.0}, rel=5e-3)
    assert found.deviation < 5e-3
    assert all(error < 0.01 for error in found.errors.values())


def test_a_row_gone_wrong_does_not_bend_the_rest():
    measured = line({"start": 0.7, "rate": 12.0})
    measured[4] *= 3.0
    found = fit(LINE, line, measured)
    assert found.values == pytest.approx({"start": 0.7, "rate": 12.0}, rel=0.05)


def test_a_parameter_without_rows_stays_at_its_guess():
    parameters = (*LINE, Parameter("unseen", 4.0, 1.0, 9.0))
    found = fit(parameters, line, line({"start": 0.7, "rate": 12.0}))
    assert found.values["unseen"] == pytest.approx(4.0)
    assert found.errors["unseen"] > found.errors["rate"]


def test_no_row_has_a_part_in_its_own_forecast():
    clean = line({"start": 0.7, "rate": 12.0}) * np.linspace(0.9, 1.1, len(SIZES))
    folds = by_rows(len(SIZES), 4)
    before = cross_validate(LINE, line, clean, folds)
    for fold in folds:
        changed = clean.copy()
        changed[fold] *= 5.0
        after = cross_validate(LINE, line, changed, folds)
        assert after[fold] == pytest.approx(before[fold])
        others = np.setdiff1d(np.arange(len(SIZES)), fold)
        assert not np.allclose(after[others], before[others], rtol=1e-6)


def test_folds_cover_every_row_once():
    for folds in (by_rows(11, 4), by_group("abacabadaba")):
        assert sorted(np.concatenate(folds)) == list(range(11))
        for fold, outside in splits(11, folds):
            assert not set(fold) & set(outside)
            assert len(fold) + len(outside) == 11
    assert [len(fold) for fold in by_rows(11, 4)] == [3, 3, 3, 2]


def test_regret_is_of_the_first_choice_in_groups_of_two_and_more():
    measured = np.array([3.0, 2.0, 5.0, 4.0, 9.0])
    forecasts = np.array([1.0, 2.0, 6.0, 5.0, 1.0])
    assert regret(forecasts, measured, ["a", "a", "b", "b", "c"]) == pytest.approx([0.5, 0.0])
    assert deviations(forecasts, measured)[2] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fit(LINE, line, SIZES, np.array([], int)), "no rows"),
        (lambda: fit(LINE, line, -SIZES), "positive"),
        (lambda: fit((Parameter("x", 5.0, 1.0, 2.0),), line, SIZES), "parameter x: starts at 5.0"),
        (lambda: cross_validate(LINE, line, SIZES, [np.arange(9)]), "1 folds"),
        (lambda: cross_validate(LINE, line, SIZES, [np.arange(9), np.arange(2)]), "11 rows for 9"),
    ],
)
def test_what_cannot_be_calibrated_says_so(call, words):
    with pytest.raises(ResourceError, match=words):
        call()
