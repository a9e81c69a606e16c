"""The layout of ops that load their result directly in the layout of the value."""

from __future__ import annotations

from distgraph.ir.graph import Op
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.op_registry import rule_of
from distgraph.ir.sharding_spec import DistAttr
from distgraph.passes.redistribution.tiles import without_unit_axes


def follow(op: Op, attr: DistAttr) -> OpLayout:
    """The layout of a source that loads its result directly in the layout of the value."""
    axes, spec = [], without_unit_axes(attr.spec, attr.mesh)
    for term, split in zip(rule_of(op).results[0], spec.dims, strict=True):
        if split and term:
            axes.append((term[0], split))
    return OpLayout(attr.mesh, tuple(sorted(axes)))
