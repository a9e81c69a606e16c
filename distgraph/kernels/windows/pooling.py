"""Max and average pooling in one to three spatial dims, channels first: one pass per place in the window, or
compiled loops over rows of windows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import prod
from typing import Any

import numpy as np

from distgraph.kernels._common import Array, Namespace, computed_in_f32, empty, flat, store
from distgraph.kernels._elementwise import copy
from distgraph.kernels._jit import Loop, jit, pays
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

_WIDE_ROW = 16
"""Windows of a row from which vectors of windows pay for the calls of a row."""


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


def _max_pool_block(xp: Namespace, wide: Array, over: Window, y: Array) -> None:
    """`max_pool` of one padded block."""
    if not (_loops_pay(xp, wide, y) and wide.flags.c_contiguous):
        _reduce(xp.maximum, wide, over, y)
        return
    planes = y.shape[0] * y.shape[1]
    largest = _largest_of_rows(over.kernel[-1], over.stride[-1])
    largest(wide.reshape(planes, -1), *_rows_of(over), y.dtype.type(-np.inf), y.reshape(planes, -1))


def _max_pool_grad_block(xp: Namespace, wide: Array, y: Array, dy: Array, over: Window, dx: Array) -> None:
    """`max_pool_grad` of one padded block."""
    grown = spread(xp, dx, over)
    if _loops_pay(xp, wide, y) and y.dtype == dy.dtype and grown.flags.c_contiguous:
        x, values, changes, result = (
            flat(a).reshape(y.shape[0] * y.shape[1], -1) for a in (wide, y, dy, grown)
        )
        places, step, width = over.kernel[-1], over.stride[-1], over.output[-1]
        if step >= places and width >= _WIDE_ROW and _lines_apart(over):
            _first_of_rows(places, step)(x, values, changes, *_rows_of(over), result)
        else:
            _first_of_each(prod(over.kernel))(x, values, changes, *_places_of(over), result)
    else:
        _first_by_place(xp, wide, y, dy, over, grown)
    gather(dx, grown, over)


def _loops_pay(xp: Namespace, wide: Array, y: Array) -> bool:
    """Whether compiled loops pay for a padded block and its results."""
    return pays(xp, y, np.float32, np.float64) and bool(wide.dtype == y.dtype)


def _lines_apart(over: Window) -> bool:
    """Whether no element lies in two windows that are not of one row."""
    return all(step >= places for places, step in zip(over.kernel[:-1], over.stride[:-1], strict=True))


def _index(over: Window) -> Array:
    """Positions in a padded input, unsigned, as Numba looks at the sign of others."""
    return np.arange(prod(padded_size(over)), dtype=np.uint64).reshape(padded_size(over))


@lru_cache(maxsize=64)
def _rows_of(over: Window) -> tuple[Array, Array]:
    """Positions in a padded input as a vector: of the first place of each row of windows, and of the lines of
    the first window. A line is what a window has along the last dim."""
    index = _index(over)
    lines = [index[slices] for place, slices in positions(over) if place[-1] == 0]
    return lines[0][..., 0].reshape(-1), np.array([line.flat[0] for line in lines])


@lru_cache(maxsize=64)
def _places_of(over: Window) -> tuple[Array, Array, Any]:
    """Positions in a padded input as a vector: of the first place of each window, of all places of the first
    window from the last on; and their number."""
    index, where = _index(over), [slices for _, slices in positions(over)]
    places = np.array([index[slices].flat[0] for slices in reversed(where)])
    return index[where[0]].reshape(-1), places, np.uint64(index.size)


# LLVM unrolls and vectorises the loops below because sizes of the window are constants of each of them.


@cache
def _largest_of_rows(places: int, step: int) -> Loop[..., None]:
    """The loop of max pooling by windows of some places along the last dim that move by a step."""

    @jit
    def largest(x: Any, starts: Any, lines: Any, lowest: Any, y: Any) -> None:
        """y [planes, elements] = the largest elements of the windows of x [planes, elements], or a NaN."""
        width = y.shape[1] // starts.size
        row, end = np.empty(width, y.dtype), np.uint64((width - 1) * step + places)
        for plane in range(x.shape[0]):
            for i in range(starts.size):
                row[:] = lowest
                for line in lines:
                    start = starts[i] + line
                    inputs = x[plane, start : start + end]
                    for window in range(width):
                        most = row[window]
                        for place in range(places):
                            value = inputs[window * step + place]
                            most = value if (value > most) | (value != value) else most
                        row[window] = most
                copy(row, y[plane, i * width : (i + 1) * width])

    return largest


@cache
def _first_of_rows(places: int, step: int) -> Loop[..., None]:
    """The loop of the gradient of max pooling by windows without common elements, see `_largest_of_rows`."""

    @jit
    def first(x: Any, y: Any, dy: Any, starts: Any, lines: Any, dx: Any) -> None:
        """Write every dy to dx where x first equals y in its window; all are [planes, elements]."""
        width, zero = y.shape[1] // starts.size, y.dtype.type(0.0)
        left, end = np.empty(width, y.dtype), np.uint64((width - 1) * step + places)
        for plane in range(x.shape[0]):
            for i in range(starts.size):
                values = y[plane, i * width : (i + 1) * width]
                copy(dy[plane, i * width : (i + 1) * width], left)
                for line in lines:
                    start = starts[i] + line
                    inputs, changes = x[plane, start : start + end], dx[plane, start : start + end]
                    for window in range(width):
                        value, change = values[window], left[window]
                        for place in range(places):
                            hit = inputs[window * step + place] == value
                            changes[window * step + place] = change if hit else zero
                            change = zero if hit else change
                        left[window] = change

    return first


@cache
def _first_of_each(count: int) -> Loop[..., None]:
    """The loop of the gradient of max pooling by windows of some number of places."""

    @jit
    def first(x: Any, y: Any, dy: Any, starts: Any, backwards: Any, nowhere: Any, dx: Any) -> None:
        """Add every dy where x first equals y in its window; all are [planes, elements], ``nowhere`` is none
        of their positions."""
        for plane in range(x.shape[0]):
            inputs, values, changes, result = x[plane], y[plane], dy[plane], dx[plane]
            for window in range(starts.size):
                start, value, chosen = starts[window], values[window], nowhere
                for place in range(count):  # without jumps, which nobody could predict
                    at = start + backwards[place]
                    chosen = at if inputs[at] == value else chosen
                if chosen != nowhere:
                    result[chosen] += changes[window]

    return first


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
        _max_pool_block(xp, padded(xp, x[n], over, _lowest(x.dtype)), over, y[n])
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
