"""Loss scaling: the loss times a factor, so that small gradients do not become zero in fp16.

The factor is an input of the training program, a power of two times `MixedPrecision.loss_scale`. The backward
part computes scaled gradients; before the update they are divided by the factor, in f32. All ranks agree on
whether a step overflowed (`runtime/execute/finite_check.py`), so that all have the same factor.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distgraph import ops
from distgraph.errors import RuntimeFault
from distgraph.plan.precision import MixedPrecision
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

SCALE = "loss_scale"
"""Name of the input of a training program that is the factor."""

_LARGEST = 2.0**126


def scale_factor(trace: Trace, loss: Tensor) -> Tensor:
    """The factor, in the type of the loss: where the backward part starts.

    The loss itself is not multiplied: an op of the forward part that only the backward part belongs to would
    be removed, and the backward part would belong to nothing.
    """
    factor = trace.source("input", SCALE, (), "f32")
    if factor.dtype == loss.dtype:
        return factor
    with trace.within(role="backward"), trace.on_behalf_of(loss.value.name, "", "loss"):
        return factor.astype(loss.dtype)


def unscaled(trace: Trace, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """(parameter, gradient) with gradients divided by the factor."""
    divided = []
    for parameter, gradient in pairs:
        factor = trace.source("input", SCALE, (), "f32").astype(gradient.dtype)
        with trace.within(role="optimize"), trace.on_behalf_of(parameter.value.name, "", "", task=""):
            divided.append((parameter, ops.divide(gradient, factor)))
    return divided


@dataclass(slots=True)
class LossScale:
    """The factor, and when it changes.

    Attributes:
        precision: says how it changes.
        value: the factor.
        finished: steps without overflow since it changed.

    Example:
        >>> scale = LossScale.of(MixedPrecision("fp16", loss_scale=8, growth_interval=2))
        >>> scale.overflow(loss=1.0), scale.value
        (True, 4.0)
        >>> scale.no_overflow(), scale.no_overflow(), scale.value
        (None, None, 8.0)
    """

    precision: MixedPrecision
    value: float
    finished: int = 0

    @staticmethod
    def of(precision: MixedPrecision) -> LossScale:
        """The factor of a training that begins."""
        return LossScale(precision, float(precision.loss_scale))

    def no_overflow(self) -> None:
        """Note a step whose gradients were finite."""
        self.finished += 1
        if self.finished >= self.precision.growth_interval:
            self.value, self.finished = min(self.value * self.precision.growth, _LARGEST), 0

    def overflow(self, loss: float) -> bool:
        """Note a step whose gradients were not finite.

        Returns:
            Whether the factor shrinks. It does not if the loss itself is not finite, or if it is 1 already:
            then no factor helps.
        """
        if not math.isfinite(loss) or self.value <= 1:
            return False
        self.value, self.finished = max(1.0, self.value * self.precision.backoff), 0
        return True

    def restore(self, saved: Sequence[float]) -> None:
        """Go on from a checkpoint; one that was written without a factor says nothing.

        Raises:
            RuntimeFault: what is saved is no factor.
        """
        if not saved:
            return
        if len(saved) != 2 or not 1 <= saved[0] <= _LARGEST:
            raise RuntimeFault(
                f"checkpoint: loss_scale is {list(saved)} but must be a factor from 1 up and a number of "
                "steps; it is damaged, load another"
            )
        self.value, self.finished = float(saved[0]), int(saved[1])
