"""A program before it is compiled: what an engine was given, and for batches of which size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distgraph.engine.compile.training_spec import Recipe
from distgraph.engine.data import Field
from distgraph.ir.graph import Graph
from distgraph.ir.sharding_spec import DistAttr
from distgraph.plan.plan import Plan


@dataclass(frozen=True)
class Training:
    """A program that is to be compiled.

    Attributes:
        recipe: model, loss, optimiser, strategy.
        mode: train, evaluate or predict.
        size: samples of a batch.
        fields: shape and dtype of a sample.
        layouts: where parameters lie already.
        plan: what is decided about it; None to complete its annotations.
    """

    recipe: Recipe
    mode: str
    size: int
    fields: Mapping[str, Field]
    layouts: Mapping[str, DistAttr]
    plan: Plan | None = None

    @property
    def micro_batches(self) -> int:
        """Parts into which a batch is cut."""
        wanted = self.recipe.strategy.micro_batches if self.plan is None else self.plan.micro_batches
        return equal_parts(self.size, wanted)

    @property
    def planned(self) -> bool:
        """Whether this is the very program that its plan is for: not the short last batch of an epoch."""
        return self.plan is not None and self.mode == "train" and self.size == self.plan.batch

    def blocks(self, micro_batches: int) -> dict[str, Field]:
        """Shape and dtype of a micro-batch."""
        count = self.size // micro_batches
        return {name: ((count, *shape), dtype) for name, (shape, dtype) in self.fields.items()}

    def trace(self) -> Graph:
        """The serial graph of a micro-batch. Raises GraphError: the program does not fit."""
        return self.recipe.trace(self.mode, self.blocks(self.micro_batches), self.layouts)


def equal_parts(size: int, wanted: int) -> int:
    """The largest number of equal parts of a batch, at most `wanted`.

    Example:
        >>> equal_parts(12, 8), equal_parts(7, 4)
        (6, 1)
    """
    return max(parts for parts in range(1, min(size, wanted) + 1) if size % parts == 0)
