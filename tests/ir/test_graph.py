"""Ops that differ from others in their layout only."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from distgraph.ir.graph import Op, Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import rule_of

MESH = ProcessMesh.grid(dp=2, tp=3)


@pytest.mark.parametrize("layout", [None, OpLayout(MESH, (("a", ("dp",)),), (("tp", 0),))])
def test_an_op_under_another_layout_keeps_all_its_other_fields(layout: OpLayout | None) -> None:
    values = [Value(name, (4, 6), "f32") for name in "xyz"]
    given = {"role": "backward", "scope": "blocks.0", "source": "train.py:3", "link": "w", "task": "loss"}
    op = Op("add", (values[0], values[1]), (values[2],), {"alpha": 2}, layout=OpLayout(MESH), **given)
    assert all(getattr(op, each.name) != each.default for each in fields(op) if each.init)  # none is left out
    other = op.with_layout(layout)
    assert other == replace(op, layout=layout)
    assert other.layout == layout
    assert op.layout == OpLayout(MESH)


def test_an_op_under_another_layout_has_the_same_rule() -> None:
    x, y = (Value(name, (4, 6), "f32") for name in "xy")
    op = Op("exp", (x,), (y,))
    rule = rule_of(op)
    assert rule_of(op.with_layout(OpLayout(MESH))) is rule
