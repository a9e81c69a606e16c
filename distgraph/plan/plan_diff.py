"""Differences of two plans as lines of text, and the application of such lines to a plan.

A plan file states for every decision the lines in which the plan with the runner-up differs from the plan:

blocks.{0..3}.up.weight   [_, _]                           the layout of a tensor; with @1, its stage
layers 0-3 op 12          matmul {m:dp} -> [dp, _]         how op 12 of the ops of these layers is computed
op %57                    add {} -> []                     the same of an op that belongs to no layer
layers of stages          0-4 | 5-7                        which layers every stage computes
layers computed again     0-2                              in the backward part
ops of layers 4           12 | 3@1 | matmul {m:dp} -> ...  all of layers: what is decomposed | placed | ops
ops of no layer            |  | 57 add @0 {} -> []         the same of what belongs to none, ops with names
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from distgraph.errors import GraphError, ShardingError
from distgraph.ir.range_notation import fold, parse_spans, spans, unfold
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.plan.plan_components import Computed, LayerOps, Rest, Stage, Stored

if TYPE_CHECKING:
    from distgraph.plan.plan import Plan

_LAYERS = re.compile(r"^layers (?P<layers>[\d\-, ]+) op (?P<number>\d+)$")
_WHOLE = re.compile(r"^ops of layers (?P<layers>[\d\-, ]+)$")
_REST = re.compile(r"^op %(?P<name>\S+)$")
_STAGES, _AGAIN, _NO_LAYER = "layers of stages", "layers computed again", "ops of no layer"
_ZERO = "level of ZeRO"


def layer_line(layers: Sequence[int], number: int) -> str:
    """Name of the line of an op of equal layers, counted from 0 as in `LayerOps.ops`."""
    return f"layers {spans(layers)} op {number}"


def rest_line(name: str) -> str:
    """Name of the line of an op that belongs to no layer."""
    return f"op %{name}"


def difference(plan: Plan, other: Plan) -> dict[str, str]:
    """The lines that make one plan of the other: of the same program, with stages on the same meshes."""
    assert [stage.mesh for stage in plan.stages] == [stage.mesh for stage in other.stages]
    lines = {}
    if _borders(plan.stages) != _borders(other.stages):
        lines[_STAGES] = _borders(other.stages)
    if plan.recompute != other.recompute:
        lines[_AGAIN] = spans(other.recompute)
    if plan.zero != other.zero:
        lines[_ZERO] = str(other.zero)
    lines |= fold(
        {name: str(layout) for name, layout in other.tensors.items() if plan.tensors[name] != layout}
    )
    groups: dict[LayerOps, list[int]] = {}
    for number, (mine, theirs) in enumerate(zip(plan.ops, other.ops, strict=True)):
        if mine != theirs:
            groups.setdefault(theirs, []).append(number)
    lines |= {f"ops of layers {spans(numbers)}": str(ops) for ops, numbers in groups.items()}
    if plan.rest != other.rest:
        lines[_NO_LAYER] = str(other.rest)
    return lines


def changed(plan: Plan, lines: Mapping[str, str]) -> Plan:
    """A plan with some lines (name -> new text) replaced; everything else is as it was.

    Raises:
        GraphError: the plan has no such line, or it makes no sense.
    """
    tensors, rest = dict(plan.tensors), dict(plan.rest.ops)
    layers, computed = list(plan.ops), [list(layer.ops) for layer in plan.ops]
    whole = plan
    for name, text in lines.items():
        try:
            in_layers, in_rest, of_layers = _LAYERS.match(name), _REST.match(name), _WHOLE.match(name)
            if name == _STAGES:
                whole = replace(whole, stages=_with_borders(plan.stages, text))
            elif name == _AGAIN:
                whole = replace(whole, recompute=_ascending(parse_spans(text), len(plan.layers)))
            elif name == _ZERO:
                whole = replace(whole, zero=_level(text))
            elif name == _NO_LAYER:
                whole = replace(whole, rest=Rest.parse(text))
                rest = dict(whole.rest.ops)
            elif of_layers is not None:
                for layer in parse_spans(of_layers["layers"]):
                    layers[layer] = LayerOps.parse(text)
                    computed[layer] = list(layers[layer].ops)
            elif in_layers is not None:
                number = int(in_layers["number"])
                for layer in parse_spans(in_layers["layers"]):
                    computed[layer][number] = _as(computed[layer][number], text)
            elif in_rest is not None:
                rest[in_rest["name"]] = _as(rest[in_rest["name"]], text)
            else:
                tensors |= {each: _with_layout(tensors[each], text) for each in unfold(name)}
        except (KeyError, IndexError, ValueError, ShardingError):
            raise GraphError(f"plan: it cannot have the line {name}: {text!r}; search again") from None
    ops = tuple(replace(layer, ops=tuple(new_ops)) for layer, new_ops in zip(layers, computed, strict=True))
    return replace(whole, tensors=tensors, ops=ops, rest=replace(whole.rest, ops=tuple(rest.items())))


def _level(text: str) -> int:
    """A level of ZeRO. Raises ValueError for any other number."""
    return range(4)[("0", "1", "2", "3").index(text)]


def _borders(stages: Sequence[Stage]) -> str:
    return " | ".join(spans(range(stage.first, stage.last)) for stage in stages)


def _with_borders(stages: Sequence[Stage], text: str) -> tuple[Stage, ...]:
    """Stages on the same meshes with other layers, together as many as before."""
    moved, done = [], 0
    for stage, part in zip(stages, text.split("|"), strict=True):
        layers = parse_spans(part)
        if layers != tuple(range(done, done + len(layers))):
            raise ValueError(text)
        moved.append(replace(stage, first=done, last=done + len(layers)))
        done += len(layers)
    if done != stages[-1].last:
        raise ValueError(text)
    return tuple(moved)


def _ascending(layers: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Numbers of some of the layers."""
    if list(layers) != sorted({*layers}) or any(layer >= count for layer in layers):
        raise ValueError(layers)
    return layers


def _with_layout(stored: Stored, text: str) -> Stored:
    """A tensor with another layout, on the same stage if the text names none."""
    return Stored.parse(stored.kind, text) if " @" in text else replace(stored, spec=ShardSpec.parse(text))


def _as(line: Computed, text: str) -> Computed:
    """A line computed in another way, on the same stages."""
    computed = Computed.parse(text)
    if computed.kind != line.kind or len(computed.results) != len(line.results):
        raise ValueError(text)
    return replace(
        line,
        axes=computed.axes,
        partial=computed.partial,
        results=computed.results,
        algorithm=computed.algorithm,
    )
