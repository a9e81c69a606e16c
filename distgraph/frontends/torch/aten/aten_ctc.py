"""Connectionist temporal classification (Graves et al., 2006): a loss over all alignments of labels.

The labels of a sample, with a blank before, between and behind them, are the states of an automaton. A
recursion over the steps of the input has the logarithm of the probability that the first steps end in each
state; it is a loop (`ops.scan`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.torch.aten.aten_losses import reduced
from distgraph.frontends.torch.rule_registry import register_torch_op
from distgraph.tracing.tracer import Trace

_IMPOSSIBLE = -1e30
"""Logarithm of a probability of zero; finite, so that its gradient is."""


@register_torch_op("distgraph.ctc_loss.default")
def _ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int, reduction: int,
    zero_infinity: bool,
) -> Any:  # fmt: skip
    """The op that `recordable_modules` puts in the place of that of torch."""
    single = log_probs.ndim == 2
    if single:
        log_probs, targets = ops.expand_dims(log_probs, 1), ops.expand_dims(targets, 0)
    samples = log_probs.shape[1]
    if targets.ndim != 2:
        raise GraphError(
            f"ctc_loss has targets of {samples} samples in one dim, whose places depend on the data; give "
            "them as [samples, labels], padded with any number"
        )
    lengths = _lengths(target_lengths, samples)
    losses = _losses(log_probs, targets, _lengths(input_lengths, samples), lengths, blank)
    impossible = ops.greater(losses, -_IMPOSSIBLE / 2)  # the input is too short for the labels
    losses = ops.where(impossible, 0.0 if zero_infinity else float("inf"), losses)
    if reduction == 1:
        losses = losses / ops.cast(ops.maximum(lengths, 1), losses.dtype)
    return ops.squeeze(losses, 0) if single and reduction == 0 else reduced(losses, reduction)


def _lengths(given: Any, samples: int) -> Any:
    """A length for each sample, [samples]."""
    return ops.reshape(ops.cast(given, "i64"), (samples,))


def _losses(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int) -> Any:
    """Minus the logarithm of the probability of the labels of each sample, [samples]."""
    steps, samples, _ = log_probs.shape
    states = _states(targets, target_lengths, blank)
    count = states.shape[1]
    by_state = ops.broadcast_to(ops.expand_dims(states, 0), (steps, samples, count))
    scores = ops.maximum(ops.take_along(log_probs, by_state, 2), _IMPOSSIBLE)
    skips = ops.logical_and(ops.not_equal(states, blank), ops.not_equal(states, _shifted(states, 2, blank)))
    turns = Trace.current().constant(np.arange(steps)[:, None, None])
    active = ops.less(turns, ops.reshape(input_lengths, (1, samples, 1)))

    def step(before: Any, item: Any) -> Any:
        score, runs = item
        skipped = ops.where(skips, _shifted(before, 2, _IMPOSSIBLE), _IMPOSSIBLE)
        ways = ops.stack([before, _shifted(before, 1, _IMPOSSIBLE), skipped], 0)
        return ops.where(runs, ops.logsumexp(ways, 0) + score, before), None

    begins = Trace.current().constant(np.arange(count) < 2)
    state = ops.where(begins, ops.getitem(scores, 0), _IMPOSSIBLE)
    if steps > 1:
        rest = slice(1, None)
        state, _ = ops.scan(step, state, (ops.getitem(scores, rest), ops.getitem(active, rest)))
    ends = ops.expand_dims(target_lengths * 2, 1)
    on_label = ops.where(
        ops.greater(ends, 0), ops.take_along(state, ops.maximum(ends - 1, 0), 1), _IMPOSSIBLE
    )
    total = ops.logsumexp(ops.concat([ops.take_along(state, ends, 1), on_label], 1), 1)
    return -total + _as_in_torch(log_probs, active)


def _states(targets: Any, lengths: Any, blank: int) -> Any:
    """Labels of each sample with blanks around them, [samples, 2 labels + 1]; blanks behind its length."""
    samples, count = targets.shape
    places = Trace.current().constant(np.arange(count))
    labels = ops.where(ops.less(places, ops.expand_dims(lengths, 1)), ops.cast(targets, "i64"), blank)
    blanks = ops.full((samples, count), blank, "i64")
    pairs = ops.reshape(ops.stack([blanks, labels], -1), (samples, 2 * count))
    return ops.concat([pairs, ops.full((samples, 1), blank, "i64")], 1)


def _shifted(x: Any, by: int, first: float) -> Any:
    """Rows of `x` moved to the right."""
    moved = ops.concat([ops.full((x.shape[0], by), first, x.dtype), x], 1)
    return ops.getitem(moved, (slice(None), slice(x.shape[1])))


def _as_in_torch(log_probs: Any, active: Any) -> Any:
    """Zeros with the gradient that torch adds, exp(log_probs): it assumes that log_softmax comes before."""
    mass = ops.reduce("sum", ops.where(active, ops.exp(log_probs), 0.0), (0, 2))
    return mass - ops.stop_gradient(mass)
