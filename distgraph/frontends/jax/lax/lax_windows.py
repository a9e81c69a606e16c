"""Reductions over sliding windows: pooling in any dims."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.jax.rule_registry import primitive


def _pooled(
    function: Callable[..., Any], x: Any, *, window_dimensions: Any, window_strides: Any, padding: Any,
    base_dilation: Any = None, window_dilation: Any = None, **params: Any,
) -> Any:  # fmt: skip
    """A pool over the dims that have a window; all other dims become batch and channels."""
    for name, values in (("base_dilation", base_dilation), ("window_dilation", window_dilation)):
        if values is not None and any(n != 1 for n in values):
            raise GraphError(f"{name} is {tuple(values)} but only 1 has a rule; write it with slices")
    windows = list(zip(window_dimensions, window_strides, padding, strict=True))
    sliding = [d for d, (n, step, pads) in enumerate(windows) if (n, step) != (1, 1) or any(pads)]
    if not sliding:
        return x
    if len(sliding) > 3:
        raise GraphError(f"windows slide along {len(sliding)} dims but at most 3 have a rule; pool twice")
    rest = [d for d in range(x.ndim) if d not in sliding]
    order = (*rest, *sliding)
    lead = [x.shape[d] for d in rest]
    merged = (lead[0] if lead else 1, math.prod(lead[1:]))
    flat = ops.reshape(ops.transpose(x, order), (*merged, *(x.shape[d] for d in sliding)))
    window, steps, sides = ([windows[d][part] for d in sliding] for part in range(3))
    y = function(flat, window, steps, [(int(a), int(b)) for a, b in sides])
    y = ops.reshape(y, (*lead, *y.shape[2:]))
    return ops.transpose(y, tuple(int(d) for d in np.argsort(order)))


@primitive("reduce_window_max")
def _max(x: Any, **params: Any) -> Any:
    return _pooled(ops.max_pool, x, **params)


@primitive("reduce_window_min")
def _min(x: Any, **params: Any) -> Any:
    return _pooled(lambda v, *options: -ops.max_pool(-v, *options), x, **params)


@primitive("reduce_window_sum")
def _sum(x: Any, **params: Any) -> Any:
    def total(v: Any, window: Any, *options: Any) -> Any:
        return ops.avg_pool(v, window, *options) * float(math.prod(window))

    return _pooled(total, x, **params)
