"""Costs of stages that are given as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distgraph.errors import GraphError
from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.inter_op.interval_sums import Numbers

_ROUNDING = 1e-12  # of the memory


@dataclass(frozen=True, eq=False)
class DenseCosts:
    """Costs that are given for every run.

    Attributes:
        seconds: [first, last, sub-mesh, config], last included in the run.
        step: the same shape, or None for none.
        fixed, activations: bytes of the same shape that a stage holds always, and for each micro-batch in
            flight; None for none.
        memory: bytes of one device of every sub-mesh; None where memory is unlimited.

    Raises:
        GraphError: shapes differ.
    """

    seconds: Floats
    step: Floats | None = None
    fixed: Floats | None = None
    activations: Floats | None = None
    memory: Sequence[float] | None = None

    def __post_init__(self) -> None:
        shape = self.seconds.shape
        if len(shape) != 4 or shape[0] != shape[1]:
            raise GraphError(
                f"costs of stages have shape {shape} but need [layers, layers, sub-meshes, configs]"
            )
        for name in ("step", "fixed", "activations"):
            array = getattr(self, name)
            if array is not None and array.shape != shape:
                raise GraphError(f"{name} of stages has shape {array.shape} but their seconds {shape}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, sub-meshes, configs."""
        _, layers, submeshes, configs = self.seconds.shape
        return layers, submeshes, configs

    def seconds_of(self, stages: Numbers, in_flight: int) -> Floats:
        """Seconds of one micro-batch, inf where a stage does not fit."""
        return np.where(self._missing(stages, in_flight) <= 0, self.seconds.reshape(-1)[stages], np.inf)

    def step_of(self, stages: Numbers) -> Floats:
        """Seconds once a step."""
        return np.zeros(len(stages)) if self.step is None else self.step.reshape(-1)[stages]

    def missing(self, in_flight: int) -> Floats:
        """Bytes above the memory of a device."""
        return self._missing(np.arange(self.seconds.size), in_flight).reshape(self.seconds.shape)

    def _missing(self, stages: Numbers, in_flight: int) -> Floats:
        held = np.zeros(len(stages))
        if self.memory is None:
            return held
        if self.fixed is not None:
            held += self.fixed.reshape(-1)[stages]
        if self.activations is not None:
            held += in_flight * self.activations.reshape(-1)[stages]
        _, submeshes, configs = self.shape
        submesh = stages // configs % submeshes
        return np.asarray(held - np.asarray(self.memory)[submesh] * (1 + _ROUNDING))

    def recomputed(self, first: int, last: int, submesh: int, config: int, in_flight: int) -> tuple[int, ...]:
        """None: what a config does is in its costs."""
        return ()
