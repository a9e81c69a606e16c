"""Which layers of a rank to recompute, so that it fits into memory at least added time.

*In:* what the recomputation of each layer costs and saves, and the bytes that a rank may use. *Out:* numbers
of layers. *Invariant:* on a chain of layers whose costs add up, no other choice that fits adds less time.

A rank stores the activations of the other layers from the forward part to the backward part. Its tasks share
scratch memory, which holds a recomputed layer while its gradients are computed. With x_k = 1 if layer k is
recomputed, the rank fits if

    stored - sum_k saved_k x_k + max(scratch, max_k scratch_k x_k) <= memory.

For each limit of the scratch memory, one of those of the layers, this is a covering knapsack problem: the
least sum_k seconds_k x_k with sum_k saved_k x_k >= missing. A dynamic programme over the layers keeps the
partial choices that no other beats in both bytes and seconds. Equal layers give equal sums, so that there are
few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MOST_CHOICES = 20_000
"""Partial choices that are kept; of more, bytes are rounded down: all still fit, but some are lost."""
_GRID = 10_000


@dataclass(frozen=True, slots=True)
class RecomputedLayer:
    """What the recomputation of one layer means for a rank.

    Attributes:
        number: of the layer.
        seconds: that it adds to a step.
        saved: bytes that the rank need not store.
        scratch: bytes of scratch memory that the rank then needs at least.
    """

    number: int
    seconds: float
    saved: float
    scratch: float


def cheapest_layers(
    layers: Sequence[RecomputedLayer], stored: float, scratch: float, memory: float
) -> tuple[int, ...] | None:
    """The layers to recompute at least added seconds; of equal layers the first ones.

    Args:
        layers: that may be recomputed.
        stored, scratch: bytes of the rank without recomputation.
        memory: bytes that it may use.

    Returns:
        Their numbers, ascending; None where no choice fits.

    Example:
        >>> costs = [(3.0, 40), (1.0, 20), (1.0, 20)]
        >>> layers = [RecomputedLayer(n, seconds, saved, 0) for n, (seconds, saved) in enumerate(costs)]
        >>> cheapest_layers(layers, stored=100, scratch=0, memory=60)
        (1, 2)
    """
    best: tuple[float, tuple[int, ...]] | None = None
    for limit, allowed in _limits(layers, scratch):
        cover = _covering(allowed, stored + limit - memory)
        if cover is not None and (best is None or cover[0] < best[0]):
            best = cover
    return None if best is None else best[1]


def smallest_choices(layers: Sequence[RecomputedLayer], scratch: float) -> list[tuple[int, ...]]:
    """For each limit of scratch memory the choice that needs least memory: one of them needs least of all."""
    choices = (
        tuple(sorted(layer.number for layer in allowed if layer.saved > 0))
        for _, allowed in _limits(layers, scratch)
    )
    return list(dict.fromkeys(choices))


def _limits(
    layers: Sequence[RecomputedLayer], scratch: float
) -> Iterator[tuple[float, list[RecomputedLayer]]]:
    """Every limit of scratch memory, ascending, with the layers that it allows."""
    for limit in sorted({scratch, *(layer.scratch for layer in layers if layer.scratch > scratch)}):
        yield limit, [layer for layer in layers if layer.scratch <= limit]


def _covering(layers: Sequence[RecomputedLayer], missing: float) -> tuple[float, tuple[int, ...]] | None:
    """Least seconds, and the layers, that save the missing bytes; None where they do not."""
    if missing <= 0:
        return 0.0, ()
    choices: dict[float, tuple[float, tuple[int, ...]]] = {0.0: (0.0, ())}  # bytes saved -> seconds, layers
    for layer in (layer for layer in layers if layer.saved > 0):
        more = dict(choices)
        for saved, (seconds, numbers) in choices.items():
            total, after = min(saved + layer.saved, missing), seconds + layer.seconds
            if total not in more or after < more[total][0]:
                more[total] = after, (*numbers, layer.number)
        choices = _unbeaten(more, missing)
    choice = choices.get(missing)
    return None if choice is None else (choice[0], tuple(sorted(choice[1])))


def _unbeaten(
    choices: dict[float, tuple[float, tuple[int, ...]]], missing: float
) -> dict[float, tuple[float, tuple[int, ...]]]:
    """The choices that no other beats: those that save more take more seconds."""
    if len(choices) > _MOST_CHOICES:
        step, rounded = missing / _GRID, dict[float, tuple[float, tuple[int, ...]]]()
        for saved, choice in choices.items():
            key = saved if saved == missing else step * (saved // step)
            if key not in rounded or choice[0] < rounded[key][0]:
                rounded[key] = choice
        choices = rounded
    unbeaten: dict[float, tuple[float, tuple[int, ...]]] = {}
    least = float("inf")
    for saved in sorted(choices, reverse=True):
        if choices[saved][0] < least:
            unbeaten[saved], least = choices[saved], choices[saved][0]
    return unbeaten
