"""Values that are nan or infinite: messages about steps with such values, and checks before saving."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distgraph.engine.compile.loss_scaling import LossScale
from distgraph.engine.data import Batch
from distgraph.engine.history import History, Means
from distgraph.engine.parameter_store import Memory
from distgraph.errors import NonFiniteError
from distgraph.ir.dtypes import is_float
from distgraph.nn import Module
from distgraph.plan.strategy import Strategy
from distgraph.runtime.execute.finite_check import all_finite
from distgraph.runtime.execute.process_group import is_chief
from distgraph.tracing.tracer import user_stack_level

NonfiniteCounts = Mapping[int, Mapping[str, tuple[int, int]]]
"""Rank -> name -> (values that are not finite, values in the rank's block)."""


class NonFiniteSteps:
    """What happens after a training step whose loss or gradients are not finite.

    Args:
        strategy: says what, by `nonfinite` and `precision`.

    Attributes:
        scale: of the loss; None where it is not scaled.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.scale = None if strategy.scaling is None else LossScale.of(strategy.scaling)
        self._policy = strategy.nonfinite
        self._warned = False

    def after_step(
        self, nonfinite_counts: NonfiniteCounts | None, loss: float, step: int, batch: Any, history: History
    ) -> None:
        """Note a step, and apply the policy if not all of its values were finite.

        Args:
            nonfinite_counts: as of `described`; None if all values were finite.
            loss: of the step.
            step: its number.
            batch: of the step; a `Batch` knows its place in the epoch.
            history: gets the number of a step that was left out.

        Raises:
            NonFiniteError: the policy is "raise", and the scale of the loss is not the cause.
        """
        if nonfinite_counts is None:
            if self.scale is not None:
                self.scale.no_overflow()
            return
        if self.scale is not None and self.scale.overflow(loss):
            history.skipped.append(step)
            return
        self._warned = apply_policy(self._policy, nonfinite_counts, loss, step, batch, warned=self._warned)
        if self._policy == "skip":
            history.skipped.append(step)


def described(nonfinite_counts: NonfiniteCounts, loss: float, step_text: str) -> str:
    """Text for messages about values that are not finite: the loss, and the first gradient with its ranks.

    Args:
        nonfinite_counts: counts of all ranks, as `Compiled.nonfinite` returns them.
        loss: loss of the step.
        step_text: the step, such as "step 3".
    """
    parts = [] if np.isfinite(loss) else [f"loss is {loss} in {step_text}"]
    every = dict.fromkeys(
        name for rank in sorted(nonfinite_counts) for name in nonfinite_counts[rank] if name != "loss"
    )
    names = [name for name in every if name.startswith("gradient of ")] or list(every)
    if names:
        first, others = names[0], len(names) - 1
        ranks = [rank for rank in sorted(nonfinite_counts) if first in nonfinite_counts[rank]]
        count, size = nonfinite_counts[ranks[0]][first]
        on = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        others_text = f" (and of {others} more)" if others else ""
        step_phrase = "" if parts else f" in {step_text}"
        parts.append(f"{first}{others_text} is not finite{step_phrase} in {count} of {size} values on {on}")
    return " and ".join(parts)


def skipped_steps(means: Means, history: History, step: int, steps: int, epoch: int) -> float:
    """Number of the last `steps` steps, those of an epoch, that were skipped (Strategy(nonfinite="skip")).

    Raises:
        NonFiniteError: all were.
    """
    if not means.count:
        raise NonFiniteError(
            f"all {steps} steps of epoch {epoch} were skipped because loss or gradients were not finite; "
            f"lower lr, set clip_norm of the optimizer, or look for nan in the data"
        )
    return float(sum(number > step - steps for number in history.skipped))


def apply_policy(
    policy: str, nonfinite_counts: NonfiniteCounts, loss: float, step: int, batch: Any, *, warned: bool
) -> bool:
    """Handle a step with values that are not finite as `Strategy.nonfinite` says.

    Args:
        policy: raise, skip or warn.
        nonfinite_counts: counts of all ranks, as `Compiled.nonfinite` returns them.
        loss, step, batch: those of the step; the place of a `Batch` in its epoch is part of the message.
        warned: whether there was a warning before; it is given once.

    Returns:
        whether there was a warning.

    Raises:
        NonFiniteError: the policy is raise.
    """
    location = f" (epoch {batch.epoch}, samples from {batch.position})" if isinstance(batch, Batch) else ""
    problem = described(nonfinite_counts, loss, f"step {step}{location}")
    if policy == "raise":
        raise refuse_step(problem)
    if policy == "warn" and not warned:
        warn_step(problem)
    return warned or policy == "warn"


def refuse_step(problem: str) -> NonFiniteError:
    """The error of a step that is not applied."""
    return NonFiniteError(
        f"{problem}; the step was not applied, so parameters and states are those of before it; lower lr, "
        f"set clip_norm of the optimizer, look for nan in the data, or leave such steps out with "
        f'Strategy(nonfinite="skip")'
    )


def warn_step(problem: str) -> None:
    """Warn, on the process that prints, that a step with such values was applied."""
    if is_chief():
        warnings.warn(
            f'{problem}; Strategy(nonfinite="warn") trains on with it, and does not say so again',
            RuntimeWarning,
            stacklevel=user_stack_level(),
        )


def fault_of(model: Callable[..., Any], memory: Memory) -> Callable[[str, np.ndarray], str]:
    """The check of values before saving: (name, values of its block) -> text of the fault, or empty.

    Trained parameters and states must be finite. Tensors that a model does not train, such as a mask, may be
    infinite. Values that are not in memory are copied from a checkpoint unchecked.
    """
    tensors = model.named_tensors() if isinstance(model, Module) else ()
    untrained = {name for name, tensor in tensors if not tensor.trainable}
    kinds = {name: record.kind for name, record in memory.records.items() if is_float(record.dtype)}

    def fault(name: str, values: np.ndarray) -> str:
        if name not in kinds or all_finite(np, values):
            return ""
        wrong = int(np.count_nonzero(np.isnan(values) if name in untrained else ~np.isfinite(values)))
        return f"{kinds[name]} {name} is not finite in {wrong} of {values.size} values" if wrong else ""

    return fault
