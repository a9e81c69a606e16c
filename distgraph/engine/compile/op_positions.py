"""Positions of ops: a plan names an op by its layer and its position among the ops of that layer.

Forward, backward and optimiser ops of a layer are counted together. An op that belongs to no layer is named
by the name of its value. When `decompose` replaces the fused op "y" at position "12", the simpler op "y.3"
has the position "12.3". The second result of an op at position "12" has the position "12:1".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from distgraph.errors import GraphError
from distgraph.ir.graph import SOURCES, Graph, Op
from distgraph.passes.decompose import decompose
from distgraph.passes.search.layering.layer_sequence import REST, Layer, layering


class OpPositions:
    """Names and positions of the ops of a serial graph."""

    def __init__(self, serial: Graph, layers: Sequence[Layer]) -> None:
        self._positions: dict[str, tuple[int, str]] = {}
        self._names: dict[tuple[int, str], str] = {}
        layer_of = layering(serial, layers).of
        counts: dict[int, int] = {}
        for op in serial.ops:
            layer = layer_of[op.name]
            counts[layer] = number = counts.get(layer, -1) + 1
            for result, value in enumerate(op.results):
                text = f"{number}:{result}" if result else str(number)
                position = layer, value.name if layer == REST else text
                self._positions[value.name] = position
                self._names[position] = value.name

    def of(self, name: str) -> tuple[int, str]:
        """Layer and position of an op.

        An op that a pass has derived from another ("y.3" from "y") has the position of that op with the same
        suffix ("12.3").
        """
        base, suffix = name, ""
        while base not in self._positions:
            base, dot, last = base.rpartition(".")
            if not dot:
                raise AssertionError(f"op {name} is derived from no op of the serial graph")
            suffix = f".{last}{suffix}"
        layer, position = self._positions[base]
        return layer, position + suffix

    def name(self, layer: int, position: str) -> str | None:
        """Name of the op at a position; None if there is none."""
        base, suffix = position, ""
        while (layer, base) not in self._names:
            base, dot, last = base.rpartition(".")
            if not dot:
                return None
            suffix = f".{last}{suffix}"
        return self._names[layer, base] + suffix


def layers_by_first_ops(serial: Graph, firsts: Sequence[str]) -> tuple[Layer, ...]:
    """The layers of a serial graph, given the names of their first ops.

    Raises:
        GraphError: the graph has not all of these ops, or they are not in this order.
    """
    names = [op.name for op in serial.ops if op.role == "forward" and op.kind not in SOURCES]
    position = {name: i for i, name in enumerate(names)}
    starts = [position.get(first, -1) for first in firsts]
    if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
        raise GraphError(
            f"graph @{serial.name} has no forward ops {', '.join(f'%{first}' for first in firsts)} in this "
            f"order, the first of all among them"
        )
    return tuple(Layer(tuple(names[a:b])) for a, b in zip(starts, [*starts[1:], len(names)], strict=True))


def decompose_ops(serial: Graph, names: Collection[str]) -> Graph:
    """Replace ops by simpler ones; `names` may include ops that only another decomposition creates.

    Raises:
        GraphError: the graph has no such op, or the op has no decomposition.
    """
    remaining = set(names)
    while remaining:
        present = remaining & serial.producers.keys()
        if not present:
            raise GraphError(f"graph @{serial.name} has no op %{min(remaining)} to decompose")
        serial = decompose(serial, present)
        remaining -= present
    return serial


def is_named(op: Op) -> bool:
    """Whether a plan names the result itself: parameters, states, and inputs that are not scalars."""
    return op.kind in ("param", "state") or (op.kind == "input" and op.result.shape != ())
