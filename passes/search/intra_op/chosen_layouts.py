"""The result of a choice: `Layouts` of every op and value, and a `Profile` of their costs by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distgraph.ir.float_arrays import Floats
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.sharding_spec import DistAttr


@dataclass(frozen=True)
class Layouts:
    """The layouts of all ops and values on one mesh.

    Attributes:
        ops: op name -> how it is computed; sources too.
        values: value name -> how it is stored.
    """

    ops: Mapping[str, OpLayout]
    values: Mapping[str, DistAttr]


@dataclass(frozen=True)
class Profile:
    """Costs of one choice by layer; the cost of consecutive layers is a difference of prefix sums.

    Every array is [layers + 1]; the last entry, index -1, holds what belongs to no layer.

    Attributes:
        forward, backward: seconds of one micro-batch, changes of layout inside the layer included.
        step: seconds of what runs once a step: gradient synchronisation, optimiser, loading.
        border: seconds per micro-batch of changes of layout between the layer and later ones, both ways.
        fixed: bytes held for the whole step: parameters, gradients, states, constants, inputs of one step.
        activations: bytes that the forward part stores for the backward part, for one micro-batch in flight.
        temporary: peak bytes of scratch memory.
        gradients: the part of `step` that synchronises gradients, which the backward part can hide.
    """

    forward: Floats
    backward: Floats
    step: Floats
    border: Floats
    fixed: Floats
    activations: Floats
    temporary: Floats
    gradients: Floats

    def seconds(self, micro_batches: int) -> float:
        """Seconds of a step if all layers ran on one mesh and nothing overlapped."""
        per_micro = float((self.forward + self.backward + self.border).sum())
        return micro_batches * per_micro + float(self.step.sum())

    def nbytes(self, live_micro_batches: int) -> float:
        """Peak bytes if all layers ran on one mesh."""
        persistent = float(self.fixed.sum()) + live_micro_batches * float(self.activations.sum())
        return persistent + float(self.temporary.max(initial=0.0))
