"""Workspaces: bytes that the NumPy kernels allocate while they run, in addition to operands and results.

A workspace is declared with the op (`OpDef.workspace`) and called like its kernel,

    workspace(*arrays, **attrs) -> bytes

with arrays of which shape, dtype and strides are read and nothing else: there need be no memory behind them.
Declared is what grows with the operands. Temporaries of a few times `FUSED_MIN_SIZE` elements, which fit a
cache, are not; nor is what kernels take in plain NumPy, without the compiled loops of the extra ``fast``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from distgraph.kernels._common import Array, is_half
from distgraph.kernels._jit import FUSED_MIN_SIZE
from distgraph.kernels.attention import copies_transposed, largest_tile
from distgraph.kernels.conv import (
    convolve_area,
    lines_apart,
    multiplies_samples,
    sums_lines,
    turned_shape,
    turned_window,
    weight_area,
)
from distgraph.kernels.matmul import einsum_workspace, is_blas_ready, matmul_workspace
from distgraph.kernels.windows.window import Window, block_samples, window_of
from distgraph.kernels.windows.window_products import (
    convolution_workspace,
    gradient_workspace,
    multiplies_windows,
)

__all__ = [
    "argument", "attention", "attention_from", "attention_grad", "avg_pool_grad", "contiguous", "conv",
    "conv_grad_input", "conv_grad_weight", "cumulative", "dropout", "einsum_workspace", "embedding",
    "logarithmic_softmax", "matmul_workspace", "max_pool_grad", "one_hot", "order", "padding", "pick",
    "pick_grad", "put_along", "random", "softmax_grad", "take", "take_along", "top_k",
]  # fmt: skip

_INDEX = 8  # bytes of a position


def contiguous(*arrays: Array, **attrs: Any) -> int:
    """Copies of operands that are not C-contiguous: kernels that go over vectors or rows."""
    return sum(a.nbytes for a in arrays if a.size >= FUSED_MIN_SIZE and not a.flags.c_contiguous)


# along a dim


def softmax_grad(y: Array, dy: Array, *, axis: int = -1) -> int:
    """Products with y, where the dim is not the last one."""
    return contiguous(y, dy) if _is_last(y, axis) else int(y.nbytes)


def logarithmic_softmax(x: Array, *others: Array, axis: int = -1) -> int:
    """Exponentials and their shifted arguments, where the dim is not the last one."""
    return contiguous(x, *others) if _is_last(x, axis) else int(2 * x.nbytes)


def _is_last(x: Array, axis: int) -> bool:
    return bool(axis in (-1, x.ndim - 1))


def argument(x: Array, *, dim: int) -> int:
    """NumPy brings the dim to the end."""
    return 0 if _is_last(x, dim) and x.flags.c_contiguous else int(x.nbytes)


def order(x: Array, *, dim: int) -> int:
    """Positions, before they go to the result."""
    return int(_INDEX * x.size)


def cumulative(x: Array, *, dim: int) -> int:
    """Half-precision operand and result in float32."""
    return int(8 * x.size) if is_half(x.dtype) else 0


def top_k(x: Array, *, k: int) -> int:
    """Keys to sort by, their order, and what is taken of it."""
    rows = x.size // x.shape[-1] if x.shape[-1] else 0
    return int(x.nbytes + _INDEX * x.size + rows * k * x.itemsize)


# by position


def embedding(table: Array, ids: Array, *, offset: int = 0, length: int | None = None) -> int:
    """Positions in this shard and whether they are there."""
    return int((2 * _INDEX + 2) * ids.size) if offset or length is not None else 0


def take(x: Array, ids: Array, *, dim: int, offset: int = 0, length: int | None = None) -> int:
    """The table with the dim in front, and what is taken of that."""
    if not dim:
        return embedding(x, ids, offset=offset, length=length)
    nbytes = x.nbytes // x.shape[dim] * ids.size if x.shape[dim] else 0
    return int(x.nbytes + nbytes) + embedding(x, ids, offset=offset, length=length)


def pick(x: Array, labels: Array, **attrs: Any) -> int:
    """Positions, twice, whether they are in this shard, and what is there."""
    return int((2 * _INDEX + 1 + x.itemsize) * labels.size)


pick_grad = take_along = pick  # with the gradients that belong here; for every position


def put_along(x: Array, ids: Array, *, dim: int, size: int, offset: int = 0) -> int:
    """The sum, positions, and the elements that are in this shard."""
    wide = max(4, x.itemsize)
    lines = x.size // x.shape[dim] if x.shape[dim] else 0
    return int(lines * size * wide + (2 * _INDEX + 1 + x.itemsize + wide) * ids.size)


def one_hot(ids: Array, *, classes: int, dtype: str, offset: int = 0, length: int | None = None) -> int:
    """A truth value for every element of the result."""
    return int(ids.size * classes)


# contractions


def attention(q: Array, k: Array, v: Array, *, causal: bool = False, scale: float | None = None) -> int:
    """The scores of a tile and their statistics, and its keys transposed."""
    copied = sum(x.nbytes for x in (q, k, v) if not is_blas_ready(x))
    rows, keys, groups = largest_tile(q, k, v, causal=causal)
    transposed = groups * keys * q.shape[3] if copies_transposed(q, k) else 0
    return int(copied + q.itemsize * (rows * (keys + 2) + transposed))


def attention_from(q: Array, k: Array, v: Array, start: Array, *, scale: float) -> int:
    """As `attention`; one query has all its scores at once."""
    if q.shape[2] != 1:
        return attention(q, k, v, causal=True, scale=scale)
    copied = sum(x.nbytes for x in (q, k, v) if not is_blas_ready(x))
    return int(copied + q.itemsize * q.shape[0] * q.shape[1] * (k.shape[2] + 2))


def attention_grad(
    do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, *, causal: bool, scale: float | None = None
) -> int:
    """Scores of a tile and their gradient, one product with them that is to be added, and keys and values
    transposed."""
    copied = sum(x.nbytes for x in (do, q, k, v) if not is_blas_ready(x))
    rows, keys, groups = largest_tile(q, k, v, causal=causal, gradient=True)
    width = max(q.shape[3], v.shape[3])
    transposed = groups * keys * (q.shape[3] + v.shape[3]) if copies_transposed(q, k) else 0
    return int(copied + q.itemsize * (rows * (2 * keys + 3) + width * (groups * keys + rows) + transposed))


# spatial


def conv(x: Array, w: Array, *, groups: int = 1, **steps: Any) -> int:
    """What compiled loops take; or a block of samples with its padding, its columns (im2col), and products
    that are to be summed."""
    window = window_of("conv", x.shape[2:], w.shape[2:], **steps)
    return int(x.itemsize * _convolved((x, w), window, w.shape, groups))


def _convolved(operands: tuple[Array, Array], window: Window, w: Sequence[int], groups: int) -> int:
    x, _ = operands
    if multiplies_windows(np, operands, window, w, groups):
        copied = sum(a.size for a in operands if not a.flags.c_contiguous)
        return int(convolution_workspace(window, x.shape, w) + copied)
    apart = sums_lines(np, window, x.shape, w)
    area = convolve_area(window, x.shape[1], w[0], apart=apart)
    by_lines = prod(w) if apart else 0  # the kernel in another order
    return block_samples(x.shape[0], area) * (area + _padded(x.shape, window.padding)) + by_lines


def conv_grad_input(dy: Array, w: Array, *, input_shape: Sequence[int], groups: int = 1, **steps: Any) -> int:
    """What a convolution takes, and the turned kernel; or columns of a block, and it with its padding."""
    window = window_of("conv", input_shape[2:], w.shape[2:], **steps)
    turned = turned_window(np, window, dy, w, groups)
    if turned is not None:
        kernel = turned_shape(w.shape, groups)
        return int(dy.itemsize * (w.size + _convolved((dy, w), turned, kernel, groups)))
    columns = input_shape[1] * prod(window.kernel) * prod(window.output)
    samples = block_samples(dy.shape[0], columns)
    return int(dy.itemsize * samples * (columns + _padded(input_shape, window.padding)))


def conv_grad_weight(
    x: Array, dy: Array, *, kernel_shape: Sequence[int], groups: int = 1, **steps: Any
) -> int:
    """What compiled loops take; or a block with its padding, its columns, products or gradients in the order
    of columns, sum and term."""
    window = window_of("conv", x.shape[2:], kernel_shape[2:], **steps)
    if multiplies_windows(np, (x, dy), window, kernel_shape, groups):
        return int(x.itemsize * gradient_workspace(window, x.shape, kernel_shape, groups))
    if multiplies_samples(np, window, kernel_shape[0] // groups):
        area = weight_area(x.shape[1], dy.shape[1], window, groups, lines_apart(np, window))
        block = block_samples(x.shape[0], area) * (area + _padded(x.shape, window.padding))
        return int(x.itemsize * (block + 2 * prod(kernel_shape)))
    columns = x.shape[1] * prod(window.kernel) * prod(window.output)
    changes = kernel_shape[0] * prod(window.output)
    block = block_samples(x.shape[0], columns) * (columns + changes + _padded(x.shape, window.padding))
    return int(x.itemsize * (block + 2 * prod(kernel_shape)))


def padding(x: Array, *, padding: Sequence[Sequence[int]], **attrs: Any) -> int:
    """A block of samples with its padding."""
    return int(x.itemsize * block_samples(x.shape[0], prod(x.shape[1:])) * _padded(x.shape, padding))


def max_pool_grad(x: Array, y: Array, dy: Array, *, padding: Sequence[Sequence[int]], **attrs: Any) -> int:
    """A block of inputs and of their gradient with their padding, and of what is not contiguous."""
    samples = block_samples(x.shape[0], prod(x.shape[1:]))
    wide = _padded(x.shape, padding)
    copied = ([] if wide else [x]) + [y, dy]
    sizes = [prod(a.shape[1:]) for a in copied if not a.flags.c_contiguous]
    return int(samples * x.itemsize * (2 * wide + sum(sizes)))


def avg_pool_grad(
    dy: Array, *, input_shape: Sequence[int], padding: Sequence[Sequence[int]], **attrs: Any
) -> int:
    """The shares of a block, and its gradient with its padding."""
    samples = block_samples(dy.shape[0], prod(input_shape[1:]))
    return int(dy.itemsize * samples * (_padded(input_shape, padding) + prod(dy.shape[1:])))


def _padded(shape: Sequence[int], padding: Sequence[Sequence[int]]) -> int:
    """Elements of a sample with its padding; none where the sample itself is read."""
    if not any(low or high for low, high in padding):
        return 0
    return int(shape[1] * prod(n + low + high for n, (low, high) in zip(shape[2:], padding, strict=True)))


# random


def random(key: Array, *, shape: Sequence[int], bytes_each: int, **attrs: Any) -> int:
    """Words and what is made of them, ``bytes_each`` an element at most."""
    local = attrs.get("local_shape")
    return bytes_each * prod(shape if local is None else local)


def dropout(x: Array, key: Array, *, batch_dim: int | None = 0, **attrs: Any) -> int:
    """Operand and result with the batch in front, where it is not."""
    return int(2 * x.nbytes) if batch_dim else contiguous(x)
