"""Fields of a strategy as text: every field has a form, and mistakes are named."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

import distgraph as dg
from distgraph.errors import ShardingError
from distgraph.plan.strategy import Strategy
from distgraph.plan.strategy_text import FORMS, with_fields


def test_every_field_has_a_form() -> None:
    assert set(FORMS) == {field.name for field in fields(Strategy)}


def test_fields_replace_those_of_the_script() -> None:
    own = Strategy(micro_batches=4, nonfinite="skip")
    text = "mesh=dp:2,tp:3 batch_axis=dp precision=bf16 passes=-fuse_reductions,lower=other"
    found = with_fields(own, text)
    assert found.mesh == dg.ProcessMesh.grid(dp=2, tp=3)
    assert (found.batch_axes, found.precision, found.micro_batches) == (("dp",), "bf16", 4)
    assert (found.passes, found.nonfinite) == (("-fuse_reductions", "lower=other"), "skip")
    searched = with_fields(own, "mode=auto recompute=none borders=2,4 uniform=true memory=8GiB")
    assert (searched.recompute, searched.borders, searched.uniform) == (False, (2, 4), True)
    assert with_fields(own, "") is own


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("precision", "'precision' is no field of Strategy with a value; write field=value"),
        ("speed=fast", "'speed=fast' is no field of Strategy with a value"),
        ("zero=1 zero=2", "zero is given twice, also as '2'"),
        ("micro_batches=two", "micro_batches is 'two' but must be a number"),
        ("mesh=dp", "mesh is 'dp' but must be axes and sizes such as dp:2,tp:4"),
        ("mesh=dp:0", "must be numbers from 1 up"),
        ("uniform=perhaps", "uniform is 'perhaps' but must be true or false"),
        ("recompute=some", "recompute is 'some' but must be all, none, auto, or numbers of layers"),
        ("precision=fp8", "precision 'fp8' of Strategy does not exist"),
        ("stages=2", "stages of Strategy"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ShardingError, match=re.escape(message)):
        with_fields(Strategy(), text)
