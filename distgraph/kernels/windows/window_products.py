"""Convolution and the gradient of its kernel without copies of the windows (im2col): compiled loops.

An element of a window lies at the sum of two positions in the padded sample: that of the first element of the
window, and that of the element in the first window. So both are products with rows of the sample at these
sums, of a matrix whose last dim has as many columns as a vector has lanes: outputs. A tile of six rows of
sums stays in registers; see `vector_tiles`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from distgraph.kernels._common import Array, Namespace
from distgraph.kernels._jit import has_numba, jit
from distgraph.kernels.windows.vector_tiles import LANES, TILE_ROWS, add_products, transpose_tile
from distgraph.kernels.windows.window import Window, block_samples, inside, padded_size, positions

_TERMS = 256
"""Terms that are added before their sum joins the total: 16 KiB of weights, half of a first-level cache, and
sums of two levels keep float32 error small."""

_LEAST_MADE = LANES // 2
"""Outputs of a group from which a vector of them is full enough."""

_LEAST_ROWS = 4 * LANES
"""Places of all samples from which the kernel is worth its transposition."""

_LEAST_PRODUCTS = 1 << 18
"""Multiplications from which the loops are worth their calls and tables."""


def multiplies_windows(
    xp: Namespace, operands: Sequence[Array], window: Window, kernel: Sequence[int], groups: int
) -> bool:
    """Whether the loops are used: for float32 on NumPy, with Numba, where they pay.

    Args:
        xp: namespace of the operands.
        operands: arrays that are multiplied, the first one [samples, ...].
        window: of the convolution.
        kernel: shape [o, c / groups, *kernel].
        groups: of the convolution.
    """
    if xp is not np or any(a.dtype != np.float32 for a in operands):
        return False
    return pays_in_tiles(operands[0].shape[0], window, kernel, groups) and has_numba()


def pays_in_tiles(samples: int, window: Window, kernel: Sequence[int], groups: int) -> bool:
    """Whether the loops pay for some samples: for large enough products whose windows are not the input."""
    if window.plain or kernel[0] // groups < _LEAST_MADE:
        return False
    rows = samples * prod(window.output)
    return rows >= _LEAST_ROWS and rows * prod(kernel) >= _LEAST_PRODUCTS


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step


def _sum_rows(rows: int) -> int:
    """Rows of a matrix of sums: whole tiles of products, and whole tiles that are transposed."""
    return max(_rounded(rows, TILE_ROWS), _rounded(rows, LANES))


def padded_samples(window: Window, samples: int, channels: int) -> int:
    """Samples of a block that is copied with its padding; none where nothing is padded."""
    if not any(a or b for a, b in window.padding):
        return 0
    return block_samples(samples, channels * prod(padded_size(window)))


def convolution_workspace(window: Window, x: Sequence[int], w: Sequence[int]) -> int:
    """Elements that `convolve` allocates, of shapes x and w."""
    area, depth = prod(window.output), prod(w[1:])
    vectors = _rounded(depth, LANES) + _sum_rows(area) + _rounded(max(area, depth), LANES)
    return _padded_elements(window, x) + LANES * vectors


def gradient_workspace(window: Window, x: Sequence[int], w: Sequence[int], groups: int) -> int:
    """Elements that `kernel_gradient` allocates, of shapes x and w."""
    area, depth = prod(window.output), prod(w[1:])
    sums = groups * _rounded(w[0] // groups, LANES) * _sum_rows(depth)
    return (
        _padded_elements(window, x)
        + sums
        + LANES * (_rounded(area, LANES) + _rounded(max(area, depth), LANES))
    )


def convolution_tiles(
    window: Window, x: Sequence[int], w: Sequence[int], groups: int
) -> tuple[float, float, float]:
    """FLOPs of the tiles of `convolve`, elements that it copies, number of its tiles, of shapes x and w."""
    area, depth, vectors = prod(window.output), prod(w[1:]), groups * -(-w[0] // groups // LANES)
    sums = x[0] * vectors * _sum_rows(area)
    copied = _padded_elements(window, x, x[0]) + LANES * (sums + vectors * _rounded(depth, LANES))
    return _of_tiles(x[0] * vectors, area, depth, copied)


def gradient_tiles(
    window: Window, x: Sequence[int], w: Sequence[int], groups: int
) -> tuple[float, float, float]:
    """The same of `kernel_gradient`."""
    area, depth, vectors = prod(window.output), prod(w[1:]), groups * -(-w[0] // groups // LANES)
    changes = x[0] * vectors * _rounded(area, LANES)
    copied = _padded_elements(window, x, x[0]) + LANES * (changes + vectors * _sum_rows(depth))
    return _of_tiles(x[0] * vectors, depth, area, copied)


def _of_tiles(times: int, rows: int, terms: int, copied: int) -> tuple[float, float, float]:
    """FLOPs of `_multiply` for some times, what is copied, and its tiles."""
    tiles = -(-rows // TILE_ROWS)
    runs = times * tiles * -(-terms // _TERMS)
    return float(2 * times * tiles * TILE_ROWS * LANES * terms), float(copied), float(runs)


def _padded_elements(window: Window, x: Sequence[int], samples: int | None = None) -> int:
    """Elements with padding, of some samples or of a block; none where nothing is padded."""
    block = padded_samples(window, x[0], x[1])
    return (block if samples is None or not block else samples) * x[1] * prod(padded_size(window))


@lru_cache(maxsize=64)
def _places(window: Window, channels: int) -> tuple[Array, Array]:
    """Positions in padded channels as a vector: of the first element of each window, and of the elements of
    the first window."""
    index = np.arange(channels * prod(padded_size(window)), dtype=np.int64)
    index = index.reshape(channels, *padded_size(window))
    met = [index[(slice(None), *where)] for _, where in positions(window)]
    first = np.stack([places.reshape(channels, -1)[:, 0] for places in met], axis=1)
    return met[0][0].reshape(-1), first.reshape(-1)


def _whole_tiles(places: Array) -> Array:
    """Positions of rows of sums, repeated to whole tiles."""
    return np.concatenate([places, np.full(-len(places) % TILE_ROWS, places[-1])])


@jit
def _multiply(x: Any, starts: Any, taps: Any, weights: Any, sums: Any) -> None:
    """sums[i] += sum over k of x[starts[i] + taps[k]] * weights[k]."""
    for k in range(0, taps.size, _TERMS):
        some, factors = taps[k : k + _TERMS], weights[k : k + _TERMS]
        for i in range(0, starts.size, TILE_ROWS):
            add_products(x, starts, i, some, factors, sums)


@jit
def _to_columns(x: Any, scratch: Any, y: Any) -> None:
    """y [columns, LANES] = the transpose of x [at most LANES, columns], by way of scratch [LANES, columns];
    the columns of both are rounded up to `LANES`, and what x does not fill is undefined."""
    for i in range(x.shape[0]):
        source, target = x[i], scratch[i]
        for j in range(source.size):
            target[j] = source[j]
    for j in range(0, x.shape[1], LANES):
        transpose_tile(scratch, 0, j, y)


@jit
def _to_rows(x: Any, scratch: Any, y: Any) -> None:
    """y [at most LANES, columns] = the transpose of x [columns, LANES], as `_to_columns`."""
    for j in range(0, y.shape[1], LANES):
        transpose_tile(x, j, 0, scratch)
    for i in range(y.shape[0]):
        source, target = scratch[i], y[i]
        for j in range(target.size):
            target[j] = source[j]


@jit
def _convolve_block(
    x: Any, w: Any, starts: Any, taps: Any, y: Any, packed: Any, sums: Any, scratch: Any
) -> None:
    """y [samples, groups, made, area] of padded x [samples, groups, elements] and w [groups, made, depth];
    packed [depth, LANES] and sums [area, LANES] have their first dim rounded up."""
    for group in range(w.shape[0]):
        for first in range(0, w.shape[1], LANES):
            _to_columns(w[group, first : first + LANES], scratch, packed)
            for sample in range(x.shape[0]):
                sums[:] = np.float32(0.0)
                _multiply(x[sample, group], starts, taps, packed[: taps.size], sums)
                _to_rows(sums, scratch, y[sample, group, first : first + LANES])


def convolve(x: Array, w: Array, window: Window, groups: int, y: Array) -> None:
    """y [n, o, *output] = the convolution of x [n, c, *spatial] and w [o, c / groups, *kernel], float32."""
    samples, depth, area = x.shape[0], prod(w.shape[1:]), prod(window.output)
    windows, taps = _places(window, w.shape[1])
    starts = _whole_tiles(windows)
    packed = np.zeros((_rounded(depth, LANES), LANES), np.float32)
    sums = np.empty((_sum_rows(area), LANES), np.float32)
    scratch = np.zeros((LANES, _rounded(max(area, depth), LANES)), np.float32)
    kernel = np.ascontiguousarray(w).reshape(groups, w.shape[0] // groups, depth)
    made = y.reshape(samples, groups, w.shape[0] // groups, area)
    for n, block in _padded_blocks(x, window, groups):
        _convolve_block(block, kernel, starts, taps, made[n], packed, sums, scratch)


@jit
def _gradient_of_block(x: Any, dy: Any, starts: Any, taps: Any, dw: Any, packed: Any, scratch: Any) -> None:
    """dw [groups, vectors, depth, LANES] += products of padded x [samples, groups, elements] and dy [samples,
    groups, made, area]; depth, and that of packed [area, LANES], is rounded up."""
    for group in range(dw.shape[0]):
        for vector in range(dw.shape[1]):
            first = vector * LANES
            for sample in range(x.shape[0]):
                _to_columns(dy[sample, group, first : first + LANES], scratch, packed)
                _multiply(x[sample, group], starts, taps, packed[: taps.size], dw[group, vector])


@jit
def _unpack(sums: Any, scratch: Any, dw: Any) -> None:
    """dw [groups, made, depth] = sums [groups, vectors, depth, LANES]."""
    for group in range(dw.shape[0]):
        for vector in range(sums.shape[1]):
            first = vector * LANES
            _to_rows(sums[group, vector], scratch, dw[group, first : first + LANES])


def kernel_gradient(x: Array, dy: Array, window: Window, groups: int, dw: Array) -> None:
    """dw [o, c / groups, *kernel] of the convolution of x [n, c, *spatial] to which dy [n, o, *output]
    belongs, float32."""
    depth, area, made = prod(dw.shape[1:]), prod(window.output), dw.shape[0] // groups
    taps, places = _places(window, dw.shape[1])
    starts = _whole_tiles(places)
    sums = np.zeros((groups, _rounded(made, LANES) // LANES, _sum_rows(depth), LANES), np.float32)
    packed = np.zeros((_rounded(area, LANES), LANES), np.float32)
    scratch = np.zeros((LANES, _rounded(max(area, depth), LANES)), np.float32)
    for n, block in _padded_blocks(x, window, groups):
        changes = np.ascontiguousarray(dy[n]).reshape(-1, groups, made, area)
        _gradient_of_block(block, changes, starts, taps, sums, packed, scratch)
    _unpack(sums, scratch, dw.reshape(groups, made, depth))


def _padded_blocks(x: Array, window: Window, groups: int) -> Iterator[tuple[slice, Array]]:
    """Blocks of samples, and each with its padding as [samples, groups, elements]; all blocks use one memory,
    whose padding is written once."""
    samples, channels = x.shape[:2]
    elements = channels // groups * prod(padded_size(window))
    step = padded_samples(window, samples, channels)
    if not step:
        yield slice(0, samples), np.ascontiguousarray(x).reshape(samples, groups, elements)
        return
    wide = np.zeros((step, channels, *padded_size(window)), np.float32)
    for first in range(0, samples, step):
        some = slice(first, min(first + step, samples))
        block = wide[: some.stop - first]
        block[inside(window)] = x[some]
        yield some, block.reshape(-1, groups, elements)
