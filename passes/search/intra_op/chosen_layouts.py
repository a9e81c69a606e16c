"""What a choice means: a layout for every op and value, and what that costs by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.index_rule import OpLayout
from distgraph.ir.sharding_spec import DistAttr

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Layouts:
    """How everything lies on one mesh.

    Attributes:
        ops: op name -> how it is computed; sources too.
        values: value name -> how it is stored.
    """

    ops: Mapping[str, OpLayout]
    values: Mapping[str, DistAttr]


@dataclass(frozen=True)
class Profile:
    """Costs of one choice by layer, so that those of a run of layers are differences of prefix sums.

    Every array is [layers + 1]; the last entry, number -1, is what belongs to no layer.

    Attributes:
        forward, backward: seconds of one micro-batch, changes of layout inside the layer included.
        step: seconds of what is done once a step: gradient synchronisation, optimiser, loading.
        border: seconds per micro-batch of changes of layout between the layer and later ones, both ways.
        fixed: bytes held for the whole step: parameters, gradients, states, constants, inputs of one step.
        activations: bytes kept from the forward for the backward part, for one micro-batch in flight.
        temporary: bytes of the largest scratch memory at any one time.
    """

    forward: Floats
    backward: Floats
    step: Floats
    border: Floats
    fixed: Floats
    activations: Floats
    temporary: Floats

    def seconds(self, micro_batches: int) -> float:
        """Of a step, were all layers on one mesh and nothing overlapped."""
        per_micro = float((self.forward + self.backward + self.border).sum())
        return micro_batches * per_micro + float(self.step.sum())

    def nbytes(self, live_micro_batches: int) -> float:
        """Bytes at the peak, were all layers on one mesh."""
        held = float(self.fixed.sum()) + live_micro_batches * float(self.activations.sum())
        return held + float(self.temporary.max(initial=0.0))
