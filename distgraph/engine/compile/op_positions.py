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
    """Names and positions of the ops of a serial graph.

    Args:
        serial: the training graph.
        layers: runs of its forward ops.
    """

    def __init__(self, serial: Graph, layers: Sequence[Layer]) -> None:
        self._at: dict[str, tuple[int, str]] = {}
        self._named: dict[tuple[int, str], str] = {}
        of = layering(serial, layers).of
        counts: dict[int, int] = {}
        for op in serial.ops:
            layer = of[op.name]
            counts[layer] = number = counts.get(layer, -1) + 1
            for result, value in enumerate(op.results):
                place = f"{number}:{result}" if result else str(number)
                position = layer, value.name if layer == REST else place
                self._at[value.name] = position
                self._named[position] = value.name

    def of(self, name: str) -> tuple[int, str]:
        """Layer and position of an op; of what a pass derived from an op, that of the op with the ending."""
        base, ending = name, ""
        while base not in self._at:
            base, dot, last = base.rpartition(".")
            if not dot:
                raise AssertionError(f"op {name} comes from no op of the serial graph")
            ending = f".{last}{ending}"
        layer, position = self._at[base]
        return layer, position + ending

    def name(self, layer: int, position: str) -> str | None:
        """Name of the op at a position; None where there is none."""
        base, ending = position, ""
        while (layer, base) not in self._named:
            base, dot, last = base.rpartition(".")
            if not dot:
                return None
            ending = f".{last}{ending}"
        return self._named[layer, base] + ending


def cut(serial: Graph, firsts: Sequence[str]) -> tuple[Layer, ...]:
    """Layers of a serial graph by the names of their first ops.

    Raises:
        GraphError: the graph has no such ops, or not in this order.
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


def decomposed(serial: Graph, names: Collection[str]) -> Graph:
    """A graph with some ops replaced by simpler ones, and parts of these again.

    Raises:
        GraphError: there is no such op, or it has no decomposition.
    """
    left = set(names)
    while left:
        known = left & serial.producers.keys()
        if not known:
            raise GraphError(f"graph @{serial.name} has no op %{min(left)} to decompose")
        serial = decompose(serial, known)
        left -= known
    return serial


def is_named(op: Op) -> bool:
    """Whether a plan knows the result by its own name: inputs that are no single numbers, parameters,
    states."""
    return op.kind in ("param", "state") or (op.kind == "input" and op.result.shape != ())
