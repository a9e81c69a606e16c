"""The request to compile one program: the training specification, the mode and the size of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distgraph.engine.compile.incremental_decoding import incremental_program
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.engine.data import Field
from distgraph.engine.validation import constant_draws
from distgraph.errors import GraphError
from distgraph.ir.graph import Graph
from distgraph.ir.sharding_spec import DistAttr
from distgraph.plan.plan import Plan


@dataclass(frozen=True)
class CompileRequest:
    """A program that is to be compiled.

    Attributes:
        training_spec: model, loss, optimiser, strategy.
        mode: train, evaluate, predict or generate.
        size: samples of a batch.
        fields: shape and dtype of a sample.
        layouts: the layouts in which parameters and states are stored already.
        plan: the plan to apply; None to complete the annotations.
        sequence: positions of a whole sequence, in the mode generate, whose `fields` are those of a step.
    """

    training_spec: TrainingSpec
    mode: str
    size: int
    fields: Mapping[str, Field]
    layouts: Mapping[str, DistAttr]
    plan: Plan | None = None
    sequence: int = 0

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches into which a batch is split; one for generation, whose caches are whole."""
        if self.mode == "generate":
            return 1
        decided = self.training_spec.strategy.start if self.plan is None else self.plan
        return equal_parts(self.size, decided.micro_batches)

    @property
    def planned(self) -> bool:
        """Whether the plan is for this program; it is not for the shorter last batch of an epoch."""
        return self.plan is not None and self.mode == "train" and self.size == self.plan.batch

    def blocks(self, micro_batches: int) -> dict[str, Field]:
        """Shape and dtype of a micro-batch."""
        count = self.size // micro_batches
        return {name: ((count, *shape), dtype) for name, (shape, dtype) in self.fields.items()}

    def trace(self) -> Graph:
        """The serial graph of a micro-batch. Raises GraphError if shapes or dtypes do not fit."""
        if self.mode == "generate":
            ((name, ((width,), dtype)),) = self.fields.items()
            fields = {name: ((self.size, self.sequence), dtype)}
            with constant_draws():
                whole = self.training_spec.trace("predict", fields, self.layouts)
            return incremental_program(whole, self.training_spec.names((name,), "predict")[name], width)
        with constant_draws():
            return self.training_spec.trace(self.mode, self.blocks(self.micro_batches), self.layouts)

    def outputs_of(self, samples: int) -> dict[str, tuple[int, ...]]:
        """Label -> shape of the outputs for so many samples; empty where the model does not take as many."""
        fields = {name: ((samples, *shape), dtype) for name, (shape, dtype) in self.fields.items()}
        try:
            graph = self.training_spec.trace(self.mode, fields, {})
        except GraphError:
            return {}
        return {label: value.shape for label, value in graph.outputs}


def equal_parts(size: int, limit: int) -> int:
    """The largest number of equal parts of a batch that is at most `limit`.

    Example:
        >>> equal_parts(12, 8), equal_parts(7, 4)
        (6, 1)
    """
    return max(parts for parts in range(1, min(size, limit) + 1) if size % parts == 0)
