"""Outputs of imported models under their names."""

from __future__ import annotations

import pytest

from distgraph.errors import GraphError
from distgraph.frontends.imported_model import Outputs


def test_outputs_have_names() -> None:
    outputs = Outputs({"logits": 1, "a.0": 2})
    assert (outputs.logits, outputs["a.0"], outputs.get("b")) == (1, 2, None)
    for read in (lambda: outputs["a"], lambda: outputs.a):
        with pytest.raises(GraphError, match=r"model has no output 'a' but logits, a\.0"):
            read()
