"""Gather parameters that are stored in parts next to the ops that read them, for each use anew.

In:   a lowered graph in which ranks store parts of parameters (ZeRO-3, Rajbhandari et al., 2020).
Out:  the same program, in which no rank keeps a whole parameter: the all_gathers of a layer run in each
      micro-batch once before its forward and once before its backward part, one layer ahead of the first op
      that reads their results, which are freed after the last one.
Invariant: same numbers. Ops that run once a step read parameters as before.

    %w  = comm.all_gather(%p)                          %a = comm.all_gather(%p)   # before the layer above
    %h  = matmul(%x, %w)       # forward         ->    %h = matmul(%x, %a)
    %dx = matmul(%g, %w)       # backward              %b = comm.all_gather(%p)
                                                       %dx = matmul(%g, %b)

A *layer* is a module: the scope of an op up to its first number, such as "blocks.3". Ops that change a
gathered parameter alone, such as a transposition or a cast, are computed with it for each use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distgraph.ir.collective_registry import EACH_MICRO_BATCH, collective_of
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr
from distgraph.ir.step_phases import BEFORE, EACH, value_phases
from distgraph.passes.pass_registry import register_pass

Place = tuple[ProcessMesh, str]
"""Where a layer is computed: mesh and role."""


@dataclass(slots=True)
class _Layer:
    """The gathers of one layer in the forward or the backward part: value -> its clone, and the new ops."""

    first: int  # position of the first op that reads one of the gathered values
    number: int
    clones: dict[str, Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)


@register_pass("gather_parameters", stage="lowered", after=("lower",))
def gather_parameters(graph: Graph) -> Graph:
    """Gather the parameters of a layer for each use of it."""
    phases = value_phases(graph)
    chains = _chains(graph, phases)
    if not chains:
        return graph
    attrs = dict(graph.attrs)
    layers: dict[Place, dict[str, _Layer]] = {}
    begins: dict[Place, int] = {}
    ops: list[Op] = []
    for position, op in enumerate(graph.ops):
        if phases[op.name] != EACH or op.role not in ("forward", "backward"):
            ops.append(op)
            continue
        place = graph.attrs[op.name].mesh, op.role
        begins.setdefault(place, position)
        read = [value.name for value in op.operands if value.name in chains]
        if not read:
            ops.append(op)
            continue
        number = sum(map(len, layers.values()))
        layer = layers.setdefault(place, {}).setdefault(layer_of(op, read[0]), _Layer(position, number))
        for name in read:
            _clone(layer, chains[name], op.role, attrs)
        ops.append(replace(op, operands=tuple(layer.clones.get(v.name, v) for v in op.operands)))
    inserted = _positions(layers, begins)
    moved = _sources_first(graph, [each for n, op in enumerate(ops) for each in (*inserted.get(n, ()), op)])
    return _without_unread(graph.with_ops(moved, attrs=attrs), {op.name for c in chains.values() for op in c})


def layer_of(op: Op, default: str = "") -> str:
    """The module that an op belongs to: its scope up to the first number.

    >>> layer_of(Op("add", (), (), scope="blocks.3.attn.q")), layer_of(Op("add", (), (), scope="head"))
    ('blocks.3', 'head')
    """
    numbered = re.match(r"(.*?\.)?\d+(?=\.|$)", op.scope)
    return numbered.group() if numbered else op.scope.partition(".")[0] or default


def _chains(graph: Graph, phases: Mapping[str, int]) -> dict[str, tuple[Op, ...]]:
    """Value that is made of one gathered parameter -> the gather and the ops that follow it, in order."""
    alone: set[str] = {op.name for op in graph.sources("param")}  # what is made of one parameter
    chains: dict[str, tuple[Op, ...]] = {}
    for op in graph.ops:
        if op.kind in SOURCES or len(op.operands) != 1 or op.role not in ("data", "forward", "backward"):
            continue
        name, declared = op.operands[0].name, collective_of(op.kind)
        if name not in alone or phases[op.name] != BEFORE or len(op.results) != 1:
            continue
        alone.add(op.name)
        gathers = declared is not None and declared.grouped and declared.growth > 0
        if name in chains or gathers:
            chains[op.name] = (*chains.get(name, ()), op)
    return chains


def _clone(layer: _Layer, chain: tuple[Op, ...], role: str, attrs: dict[str, DistAttr]) -> None:
    """Add the ops of a chain to a layer, unless it has them."""
    for op in chain:
        if op.name in layer.clones:
            continue
        value = replace(op.result, name=f"{op.name}.{role}{layer.number}")
        attrs[value.name] = attrs[op.name]
        marked = {**op.attrs, EACH_MICRO_BATCH: True} if op is chain[0] else op.attrs
        operands = tuple(layer.clones.get(v.name, v) for v in op.operands)
        layer.ops.append(replace(op, operands=operands, results=(value,), attrs=marked, role=role))
        layer.clones[op.name] = value


def _positions(layers: dict[Place, dict[str, _Layer]], begins: dict[Place, int]) -> dict[int, list[Op]]:
    """Position in the program -> gathers before it: those of the layer after the one that begins there."""
    inserted: dict[int, list[Op]] = {}
    for place, parameters in layers.items():
        before = begins[place]
        for layer in sorted(parameters.values(), key=lambda each: each.first):
            inserted.setdefault(before, []).extend(layer.ops)
            before = layer.first
    return inserted


def _sources_first(graph: Graph, ops: list[Op]) -> list[Op]:
    """The ops, each once and in this order, but a parameter, and what is made of it, before its readers."""
    defined: set[str] = set()
    ordered: list[Op] = []
    for op in ops:
        pending = [op]
        while pending:
            earlier = [v.name for v in pending[-1].operands if v.name not in defined]
            if earlier:
                pending.extend(graph.producers[name] for name in earlier)
                continue
            each = pending.pop()
            if each.name not in defined:
                defined.update(value.name for value in each.results)
                ordered.append(each)
    return ordered


def _without_unread(graph: Graph, names: set[str]) -> Graph:
    """The graph without those of the named ops that nothing reads any more."""
    needed = set(graph.live_out)
    ops: list[Op] = []
    for op in reversed(graph.ops):
        if op.name not in names or op.name in needed:
            ops.append(op)
            needed.update(value.name for value in op.operands)
    defined = {value.name for op in ops for value in op.results}
    attrs = {name: attr for name, attr in graph.attrs.items() if name in defined}
    return graph.with_ops(reversed(ops), attrs=attrs)
