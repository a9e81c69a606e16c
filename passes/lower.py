"""Turn every reshard into collectives.

In:   a graph whose changes of layout are `reshard` ops.
Out:  a graph whose changes of layout are `comm.*` ops, each one collective on groups of one mesh, or one
      transfer between two meshes; attrs name axes, dims and reduction.
Invariant: every comm op is the identity on the global tensor; operand and result layouts stand in the graph.

    %p : f32[64, 128] [dp, _] = reshard(%p.raw)   ->   %p : ... = comm.all_reduce(%p.raw) {axes=("tp",)}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distgraph.ir.collective_registry import Step
from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.loops import with_bodies
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin
from distgraph.passes.pass_registry import PassContext, register_pass
from distgraph.passes.redistribution.cross_mesh import transfer
from distgraph.passes.redistribution.planner import Price, redistribute, wire_price


def lower(graph: Graph, price: Price = wire_price) -> Graph:
    """Lower all reshards; `price` is the cost of one collective (see `redistribute`)."""
    attrs = dict(graph.attrs)
    ops: list[Op] = []
    for op in graph.ops:
        changed = with_bodies(op, lambda body: lower(body, price))
        ops.extend(_lower(op, attrs, price) if op.kind == "reshard" else [changed])
    return graph.with_ops(ops, attrs=attrs)


def _lower(op: Op, attrs: dict[str, DistAttr], price: Price) -> list[Op]:
    source, target = attrs[op.operands[0].name], attrs[op.result.name]
    value, size = op.result, itemsize(op.result.dtype)
    if source.mesh == target.mesh:
        steps = redistribute(value.shape, size, source.mesh, source.spec, target.spec, price)
        return _chain(op, op.operands[0], source.mesh, steps, attrs, value)
    crossing = transfer(value.shape, size, source, target, price=price)
    names = _Names(value)
    ops: list[Op] = []
    current = op.operands[0]
    if crossing.before:
        current = replace(value, name=names.fresh())
        ops += _chain(op, op.operands[0], source.mesh, crossing.before, attrs, current)
    landing = value if not crossing.after else replace(value, name=names.fresh())
    attrs.setdefault(landing.name, replace(crossing.landing, origin=Origin("op", f"%{op.name}")))
    layout = OpLayout(crossing.landing.mesh)
    ops.append(replace(op, kind="comm.transfer", operands=(current,), results=(landing,), layout=layout))
    if crossing.after:
        ops += _chain(op, landing, target.mesh, crossing.after, attrs, value)
    return ops


class _Names:
    """Names of the values between the steps of one reshard."""

    def __init__(self, value: Value) -> None:
        self.value = value
        self.count = 0

    def fresh(self) -> str:
        self.count += 1
        return f"{self.value.name}.t{self.count}"


def _chain(
    op: Op, source: Value, mesh: ProcessMesh, steps: Sequence[Step], attrs: dict[str, DistAttr], target: Value
) -> list[Op]:
    """The steps as ops from `source` to `target`; no step at all is an identity (the layouts are the same
    blocks)."""
    if not steps:
        return [
            replace(
                op, kind="identity", operands=(source,), results=(target,), attrs={}, layout=OpLayout(mesh)
            )
        ]
    ops = []
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        result = target if last else replace(target, name=f"{target.name}.s{number}")
        attrs.setdefault(result.name, DistAttr(mesh, step.target, Origin("op", f"%{op.name}")))
        ops.append(
            replace(
                op,
                kind=f"comm.{step.kind}",
                operands=(source,),
                results=(result,),
                attrs=_attrs(step),
                layout=OpLayout(mesh),
            )
        )
        source = result
    return ops


def _attrs(step: Step) -> dict[str, Any]:
    fields = {"axes": step.axes, "dim": step.dim, "to_dim": step.to_dim, "reduction": step.reduction}
    return {name: field for name, field in fields.items() if field is not None and field != ()}


@register_pass("lower", requires="resharded", stage="lowered")
def _run(graph: Graph, context: PassContext) -> Graph:
    """Turn every reshard into the cheapest collectives."""
    return lower(graph, context.price)
