"""Fractional max pooling (Graham, 2014): the largest element of windows that begin at random positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distgraph import ops
from distgraph.frontends.torch.rule_registry import aten
from distgraph.tracing.tracer import Trace


def _fractional_max_pool(dims: int, sample_of_dim: Sequence[int]) -> None:
    """Register the rule for a number of spatial dims, each with the position of its random number."""

    @aten(f"fractional_max_pool{dims}d.default")
    def _pool(x: Any, window: Sequence[int], output_size: Sequence[int], samples: Any) -> Any:
        lead, spatial = x.shape[: x.ndim - dims], x.shape[x.ndim - dims :]
        places: Any = 0  # of each element in x, flat over the spatial dims
        for d, (length, size, count) in enumerate(zip(spatial, window, output_size, strict=True)):
            sample = ops.reshape(ops.getitem(samples, (..., sample_of_dim[d])), lead)
            starts = ops.expand_dims(_starts(sample, length, size, count), -1)
            rows = starts + Trace.current().constant(np.arange(size))
            rows = ops.reshape(rows, (*lead, *(1,) * d, count * size, *(1,) * (dims - d - 1)))
            before, after = x.shape[: len(lead) + d], x.shape[len(lead) + d + 1 :]
            x = ops.take_along(x, ops.broadcast_to(rows, (*before, count * size, *after)), len(lead) + d)
            places = places * length + rows
        best = ops.argmax(_windows(x, lead, window, output_size), -1, keepdims=True)
        results = [
            ops.squeeze(ops.take_along(_windows(each, lead, window, output_size), best, -1), -1)
            for each in (x, ops.broadcast_to(places, x.shape))
        ]
        return tuple(results)


def _starts(sample: Any, length: int, size: int, count: int) -> Any:
    """First position of each window along a dim, by random numbers between 0 and 1; the last ends there."""
    last = ops.full((*sample.shape, 1), length - size, "i64")
    if count == 1:
        return last
    step = (length - size) / (count - 1)
    sample = ops.expand_dims(sample, -1)
    numbers = ops.cast(Trace.current().constant(np.arange(count - 1)), sample.dtype)
    starts = ops.trunc((numbers + sample) * step) - ops.trunc(sample * step)
    return ops.concat([ops.cast(starts, "i64"), last], -1)


def _windows(x: Any, lead: Sequence[int], window: Sequence[int], counts: Sequence[int]) -> Any:
    """Windows that lie side by side along each spatial dim as [*lead, *counts, elements]."""
    dims, first = len(window), len(lead)
    pairs = [n for pair in zip(counts, window, strict=True) for n in pair]
    split = ops.reshape(x, (*lead, *pairs))
    order = [*range(first), *range(first, first + 2 * dims, 2), *range(first + 1, first + 2 * dims, 2)]
    return ops.reshape(ops.transpose(split, order), (*lead, *counts, -1))


_fractional_max_pool(2, (1, 0))
_fractional_max_pool(3, (0, 1, 2))
