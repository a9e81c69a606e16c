"""Max and average pooling in one to three spatial dims, channels first: one pass per place in the window."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from distgraph.kernels._common import Array, Namespace, computed_in_f32, empty, flat, store
from distgraph.kernels._jit import jit, pays
from distgraph.kernels.windows.window import (
    ALL,
    Window,
    blocks,
    gather,
    padded,
    padded_size,
    positions,
    spread,
    window_of,
)


def _window_of(
    what: str, shape: Sequence[int], *, window: Sequence[int], stride: Any = None, padding: Any = 0
) -> Window:
    """The window of a pooling over [n, c, *spatial]; it moves by its own size where no stride is given."""
    return window_of(what, shape[2:], window, stride=window if stride is None else stride, padding=padding)


def _lowest(dtype: np.dtype) -> float:
    """What no element is below."""
    return -np.inf if dtype.kind == "f" else np.iinfo(dtype).min


def _reduce(reduction: Any, wide: Array, over: Window, y: Array) -> None:
    """y = the reduction of every window over a padded block."""
    for i, (_, where) in enumerate(positions(over)):
        part = wide[(ALL, ALL, *where)]
        if i == 0:
            y[...] = part
        else:
            reduction(y, part, out=y)


def _max_pool_grad_block(xp: Namespace, wide: Array, y: Array, dy: Array, over: Window, dx: Array) -> None:
    """`max_pool_grad` of one padded block."""
    grown = spread(xp, dx, over)
    if pays(xp, y, np.float32, np.float64) and y.dtype == dy.dtype and grown.flags.c_contiguous:
        planes = y.shape[0] * y.shape[1]
        inputs, outputs = (flat(wide).reshape(planes, -1), grown.reshape(planes, -1)), (planes, -1)
        _first_of_each(*inputs, flat(y).reshape(outputs), flat(dy).reshape(outputs), *_flat_places(over))
    else:
        _first_by_place(xp, wide, y, dy, over, grown)
    gather(dx, grown, over)


@lru_cache(maxsize=16)
def _flat_places(over: Window) -> tuple[Array, Array, Any]:
    """Positions in a padded input as a vector: of the first place of each window, of all places of the first
    window from the last on; and their number."""
    index = np.arange(prod(padded_size(over)), dtype=np.uint64).reshape(padded_size(over))
    where = [slices for _, slices in positions(over)]
    places = np.array([index[slices].flat[0] for slices in reversed(where)])
    return index[where[0]].reshape(-1), places, np.uint64(index.size)


@jit
def _first_of_each(x: Any, dx: Any, y: Any, dy: Any, first: Any, backwards: Any, nowhere: Any) -> None:
    """Add every dy where x first equals y in its window; all are [planes, elements]. Positions are unsigned,
    as Numba looks at the sign of others; ``nowhere`` is none of them."""
    for plane in range(x.shape[0]):
        inputs, changes, largest, gradient = x[plane], dx[plane], y[plane], dy[plane]
        for window in range(first.size):
            start, value, chosen = first[window], largest[window], nowhere
            for place in backwards:  # without jumps, which nobody could predict
                at = start + place
                chosen = at if inputs[at] == value else chosen
            if chosen != nowhere:
                changes[chosen] += gradient[window]


def _first_by_place(xp: Namespace, wide: Array, y: Array, dy: Array, over: Window, grown: Array) -> None:
    """The same in array functions."""
    free = xp.ones(y.shape, bool)
    for _, where in positions(over):
        place = (ALL, ALL, *where)
        chosen = free & (wide[place] == y)
        grown[place] += dy * chosen
        free &= ~chosen


@computed_in_f32(0)
def max_pool(xp: Namespace, x: Array, *, out: Array | None = None, **steps: Any) -> Array:
    """y[n, c, p] = max over k of x[n, c, p * stride + k - low padding]; padding never wins.

    Args:
        x: [n, c, *spatial].
        steps: arguments of `_window_of`.

    Raises:
        GraphError: the window does not fit.
    """
    over = _window_of("max_pool", x.shape, **steps)
    y = empty(xp, out, (*x.shape[:2], *over.output), x.dtype)
    for n in blocks(xp, x.shape[0], prod(x.shape[1:])):
        _reduce(xp.maximum, padded(xp, x[n], over, _lowest(x.dtype)), over, y[n])
    return store(xp, y, out)


@computed_in_f32(2)
def max_pool_grad(
    xp: Namespace, x: Array, y: Array, dy: Array, *, out: Array | None = None, **steps: Any
) -> Array:
    """dx: each dy goes to the first place (row-major) of its window where x equals y, the result of
    `max_pool`."""
    over = _window_of("max_pool_grad", x.shape, **steps)
    dx = empty(xp, out, x.shape, dy.dtype)
    for n in blocks(xp, x.shape[0], prod(x.shape[1:])):
        _max_pool_grad_block(xp, padded(xp, x[n], over, _lowest(x.dtype)), y[n], dy[n], over, dx[n])
    return store(xp, dx, out)


@computed_in_f32(0)
def avg_pool(xp: Namespace, x: Array, *, out: Array | None = None, **steps: Any) -> Array:
    """y[n, c, p] = mean over k of x[n, c, p * stride + k - low padding]; padding counts as zeros.

    Arguments as `max_pool`.
    """
    over = _window_of("avg_pool", x.shape, **steps)
    y = empty(xp, out, (*x.shape[:2], *over.output), x.dtype)
    for n in blocks(xp, x.shape[0], prod(x.shape[1:])):
        _reduce(xp.add, padded(xp, x[n], over), over, y[n])
    y *= x.dtype.type(1 / prod(over.kernel))
    return store(xp, y, out)


@computed_in_f32(0)
def avg_pool_grad(
    xp: Namespace, dy: Array, *, input_shape: Sequence[int], out: Array | None = None, **steps: Any
) -> Array:
    """dx: each dy spread evenly over its window. ``input_shape`` is that of x and of the result."""
    over = _window_of("avg_pool_grad", input_shape, **steps)
    dx = empty(xp, out, input_shape, dy.dtype)
    for n in blocks(xp, dy.shape[0], prod(input_shape[1:])):
        share = dy[n] * dy.dtype.type(1 / prod(over.kernel))
        grown = spread(xp, dx[n], over)
        for _, where in positions(over):
            grown[(ALL, ALL, *where)] += share
        gather(dx[n], grown, over)
        del share, grown  # before the next block is made
    return store(xp, dx, out)
