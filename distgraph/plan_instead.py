"""A plan with the runner-up of a decision in place of the choice: the lines in which the two differ.

blocks.{0..3}.up.weight   [_, _]                           where a tensor lies
layers 0-3 op 12          matmul {m:dp} -> [dp, _]         how op 12 of the ops of these layers is computed
op %57                    add {} -> []                     the same of an op that belongs to no layer
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from distgraph.errors import GraphError, ShardingError
from distgraph.folding import parse_spans, spans, unfold
from distgraph.plan_parts import Computed, LayerOps, Rest, Stored
from distgraph.spec import ShardSpec

_LAYERS = re.compile(r"^layers (?P<layers>[\d\-, ]+) op (?P<number>\d+)$")
_REST = re.compile(r"^op %(?P<name>\S+)$")


def layer_line(layers: Sequence[int], number: int) -> str:
    """Name of the line of an op of equal layers, counted from 0 as in `LayerOps.ops`."""
    return f"layers {spans(layers)} op {number}"


def rest_line(name: str) -> str:
    """Name of the line of an op that belongs to no layer."""
    return f"op %{name}"


def changed(
    tensors: Mapping[str, Stored], ops: Sequence[LayerOps], rest: Rest, lines: Mapping[str, str]
) -> tuple[dict[str, Stored], tuple[LayerOps, ...], Rest]:
    """The parts of a plan with some lines replaced; stages stay.

    Args:
        tensors, ops, rest: as in a plan.
        lines: name of a line -> what it is to be.

    Raises:
        GraphError: the plan has no such line, or it makes no sense.
    """
    stored, computed = dict(tensors), [list(layer.ops) for layer in ops]
    others = dict(rest.ops)
    for name, text in lines.items():
        try:
            in_layers, in_rest = _LAYERS.match(name), _REST.match(name)
            if in_layers is not None:
                number = int(in_layers["number"])
                for layer in parse_spans(in_layers["layers"]):
                    computed[layer][number] = _as(computed[layer][number], text)
            elif in_rest is not None:
                others[in_rest["name"]] = _as(others[in_rest["name"]], text)
            else:
                spec = ShardSpec.parse(text)
                stored |= {each: replace(stored[each], spec=spec) for each in unfold(name)}
        except (KeyError, IndexError, ValueError, ShardingError):
            raise GraphError(f"plan: it cannot have the line {name}: {text!r}; search again") from None
    layers = tuple(replace(layer, ops=tuple(found)) for layer, found in zip(ops, computed, strict=True))
    return stored, layers, replace(rest, ops=tuple(others.items()))


def _as(line: Computed, text: str) -> Computed:
    """A line computed in another way, on the same stages."""
    found = Computed.parse(text)
    if found.kind != line.kind or len(found.results) != len(line.results):
        raise ValueError(text)
    return replace(line, axes=found.axes, partial=found.partial, results=found.results)
