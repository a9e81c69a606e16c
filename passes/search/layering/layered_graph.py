"""A serial train graph with its layers.

*In:* a traced program. *Out:* what the search asks of it. *Invariant:* it is computed once, on demand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distgraph.ir.graph import Graph
from distgraph.passes.search.layering.layer_folding import Fold, fold
from distgraph.passes.search.layering.layer_sequence import Layer, Layering


@dataclass(frozen=True, eq=False)
class LayeredGraph:
    """A serial train graph, its layers, and which of them are recomputed."""

    graph: Graph
    layers: tuple[Layer, ...]
    layering: Layering
    recompute: tuple[int, ...]
    repeats: int = 1  # how often annotated meshes are repeated

    @cached_property
    def fold(self) -> Fold:
        """Equal layers on top of each other."""
        return fold(self.graph, self.layering)

    @cached_property
    def crossing(self) -> np.ndarray:
        """Bytes [layers - 1] of one micro-batch that pass between a layer and later ones, both ways."""
        count, of = len(self.layers), self.layering.of
        change = np.zeros(count + 1)
        for op in self.graph.ops:
            if op.role not in ("forward", "backward"):
                continue
            home = of[op.name]
            for value in op.results:
                reached = [of[user.name] for user in self.graph.users[value.name]]
                reached = [layer for layer in reached if layer >= 0] + [home]
                low, high = min(reached), max(reached)
                if home >= 0 and high > low:
                    change[low] += value.nbytes
                    change[high] -= value.nbytes
        return np.cumsum(change)[: count - 1]
