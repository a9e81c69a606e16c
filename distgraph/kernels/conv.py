"""Convolution in one to three spatial dims, channels first: in float32 on NumPy by compiled loops without
copies of windows (`windows/window_products.py`), elsewhere as im2col and GEMMs by blocks of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.kernels._common import Array, Namespace, computed_in_f32, empty, store
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
from distgraph.kernels.windows.window_products import (
    convolution_tiles,
    convolve,
    gradient_tiles,
    kernel_gradient,
    multiplies_windows,
    pays_in_tiles,
)

_ADDED = 2
"""Copies of an element that take as long as adding one to where it came from (NumPy, rows of 14 to 56)."""


def patches(
    what: str,
    x: Sequence[int],
    w: Sequence[int],
    y: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[Sequence[int]],
    dilation: Sequence[int],
) -> tuple[float, float]:
    """Number of elements of the windows that a kernel multiplies or adds up, and of their contiguous rows. On
    NumPy it copies only some of them, see `_columns`, or none, see `windows/window_products.py`.

    Args:
        what: conv, whose input may be its own im2col (then there are none), or a gradient of it.
        x, w, y: shapes of input, kernel and output.
        stride, padding, dilation: by spatial dim.
    """
    if not all(map(prod, (x, w, y))):
        return 0.0, 0.0  # a block of nothing, or of padding alone
    if what == "conv" and window_of(what, x[2:], w[2:], stride, padding, dilation).plain:
        return 0.0, 0.0
    elements = prod(x[:2]) * prod(w[2:]) * prod(y[2:])
    return float(elements), elements / y[-1]


def tiles(
    what: str,
    x: Sequence[int],
    w: Sequence[int],
    y: Sequence[int],
    *,
    is_f32: bool,
    groups: int = 1,
    **steps: Any,
) -> tuple[float, float, float]:
    """FLOPs, copied elements and tiles of compiled loops (see `windows/window_products.py`), as `patches`;
    zeros where they do not pay. Whether a computer has Numba for them is not asked: a forecast may be made on
    another one.

    Args:
        what, x, w, y: as of `patches`.
        is_f32: whether the operands are multiplied in float32.
        groups, steps: as of `conv`.
    """
    if not all(map(prod, (x, w, y))) or not is_f32:
        return 0.0, 0.0, 0.0
    window = window_of(what, x[2:], w[2:], **steps)
    read, kernel, loops = x, w, gradient_tiles if what == "conv_grad_weight" else convolution_tiles
    if what == "conv_grad_input":
        turned = _turned_window(window)
        if turned is None:
            return 0.0, 0.0, 0.0
        window, read, kernel = turned, y, turned_shape(w, groups)
    if not pays_in_tiles(read[0], window, kernel, groups):
        return 0.0, 0.0, 0.0
    return loops(window, read, kernel, groups)


def lines_apart(xp: Namespace, window: Window) -> bool:
    """Whether the places of a kernel along the first spatial dim can share their columns: see `_columns`."""
    return xp is np and window.kernel[0] > 1 and window.stride[0] == 1


def columns_of(window: Window, *, apart: bool) -> int:
    """Elements that `_columns` copies for each channel of a sample."""
    if window.plain:
        return 0
    if not apart:
        return prod(window.kernel) * prod(window.output)
    return prod(window.kernel[1:]) * padded_size(window)[0] * prod(window.output[1:])


def _windows(xp: Namespace, wide: Array, window: Window) -> Array:
    """The windows of padded x [n, c, *spatial] as a view [n, c, *kernel, *output]."""
    outer, inner = wide.strides[:2], wide.strides[2:]
    along = tuple(s * d for s, d in zip(inner, window.dilation, strict=True))
    across = tuple(s * t for s, t in zip(inner, window.stride, strict=True))
    shape = (*wide.shape[:2], *window.kernel, *window.output)
    return xp.lib.stride_tricks.as_strided(wide, shape, (*outer, *along, *across))


def _columns(xp: Namespace, x: Array, window: Window, groups: int, apart: bool) -> Array:
    """The inputs that the elements of a kernel meet: [n, lines, groups, depth, area] of x [n, c, *spatial].

    Where ``apart``, the kernel is taken line by line along its first spatial dim. All its lines read one
    copy, which has every line of the input for each place along the other dims, each from another line on;
    their products are to be summed. Otherwise there is one entry for all lines, with a copy for each.
    """
    wide = padded(xp, x, window)
    n, channels = x.shape[:2]
    area = prod(window.output)
    if window.plain:
        return wide.reshape(n, 1, groups, channels // groups, area)
    depth = channels // groups * prod(window.kernel)
    if not apart:
        return _windows(xp, wide, window).reshape(n, 1, groups, depth, area)
    lines = xp.ascontiguousarray(_windows(xp, wide, _of_whole_lines(window))[:, :, 0])
    depth, line, item = depth // window.kernel[0], prod(window.output[1:]), lines.itemsize
    row = wide.shape[2] * line
    steps = (groups * depth * row, window.dilation[0] * line, depth * row, row, 1)
    made = (n, window.kernel[0], groups, depth, area)
    return xp.lib.stride_tricks.as_strided(lines, made, tuple(item * step for step in steps))


def _of_whole_lines(window: Window) -> Window:
    """The window with one line of the kernel, which meets every line of the padded input."""
    lines = padded_size(window)[0]
    return replace(window, kernel=(1, *window.kernel[1:]), output=(lines, *window.output[1:]))


def _by_lines(w: Array, groups: int, apart: bool) -> Array:
    """The kernel [o, c / groups, *kernel] in the order of `_columns`: [lines, groups, o / groups, depth]."""
    outputs = w.shape[0] // groups
    if not apart:
        return w.reshape(1, groups, outputs, prod(w.shape[1:]))
    lines = w.reshape(groups, outputs, w.shape[1], w.shape[2], prod(w.shape[3:])).transpose(3, 0, 1, 2, 4)
    return lines.reshape(w.shape[2], groups, outputs, w.shape[1] * prod(w.shape[3:]))


def _check_channels(what: str, channels: int, w_shape: Sequence[int], groups: int) -> None:
    if groups < 1 or channels != w_shape[1] * groups or w_shape[0] % groups:
        raise GraphError(
            f"{what}: input has {channels} channels but weight {tuple(w_shape)} with groups={groups} takes "
            f"{w_shape[1] * groups} and must have a multiple of {groups} outputs"
        )


@computed_in_f32(0)
def conv(
    xp: Namespace, x: Array, w: Array, *, groups: int = 1, out: Array | None = None, **steps: Any
) -> Array:
    """y[n, o, p] = sum over c, k of x[n, c, p * stride + k * dilation - low padding] * w[o, c, k] (no flip).

    Args:
        x: [n, c, *spatial], one to three spatial dims.
        w: [o, c / groups, *kernel].
        groups: output block j of o / groups channels sees input block j of c / groups.
        steps: stride, padding with zeros and dilation as of `window_of`.

    Returns:
        [n, o, *output], output = (spatial + low + high - dilation * (kernel - 1) - 1) // stride + 1.

    Raises:
        GraphError: channels or window do not fit.
    """
    _check_channels("conv", x.shape[1], w.shape, groups)
    window = window_of("conv", x.shape[2:], w.shape[2:], **steps)
    y = empty(xp, out, (x.shape[0], w.shape[0], *window.output), x.dtype)
    _convolve(xp, x, w, window, groups, y)
    return store(xp, y, out)


def sums_lines(xp: Namespace, window: Window, x: Sequence[int], w: Sequence[int]) -> bool:
    """Whether summing products of the lines of a kernel moves fewer elements than copying for each line."""
    if not lines_apart(xp, window):
        return False
    apart = convolve_area(window, x[1], w[0], apart=True)
    whole = convolve_area(window, x[1], w[0], apart=False)
    return x[0] * apart + prod(w) < x[0] * whole


def convolve_area(window: Window, channels: int, made: int, *, apart: bool) -> int:
    """Elements that `_convolve` allocates for a sample, without its padding."""
    products = window.kernel[0] * made * prod(window.output) if apart else 0
    return channels * columns_of(window, apart=apart) + products


def _convolve(xp: Namespace, x: Array, w: Array, window: Window, groups: int, y: Array) -> None:
    """y = `conv` of x and w."""
    samples, channels, made = x.shape[0], x.shape[1], w.shape[0]
    if multiplies_windows(xp, (x, w), window, w.shape, groups):
        convolve(x, w, window, groups, y)
        return
    apart = sums_lines(xp, window, x.shape, w.shape)
    weights = _by_lines(w, groups, apart)
    target = y.reshape(samples, groups, made // groups, prod(window.output))
    for n in blocks(xp, samples, convolve_area(window, channels, made, apart=apart)):
        columns = _columns(xp, x[n], window, groups, apart)
        if apart:
            xp.add.reduce(xp.matmul(weights, columns), axis=1, out=target[n])
        else:
            xp.matmul(weights[0], columns[:, 0], out=target[n])
        del columns  # before the next block is made


@computed_in_f32(0)
def conv_grad_input(
    xp: Namespace,
    dy: Array,
    w: Array,
    *,
    input_shape: Sequence[int],
    groups: int = 1,
    out: Array | None = None,
    **steps: Any,
) -> Array:
    """dx, the transpose of `conv` in x: the convolution of dy with the turned kernel, or columns w^T dy added
    back where they came from (col2im).

    Args:
        dy: [n, o, *output].
        w: [o, c / groups, *kernel].
        input_shape: [n, c, *spatial] of x, and of the result.
    """
    _check_channels("conv_grad_input", input_shape[1], w.shape, groups)
    window = window_of("conv_grad_input", input_shape[2:], w.shape[2:], **steps)
    dx = empty(xp, out, input_shape, dy.dtype)
    turned = turned_window(xp, window, dy, w, groups)
    if turned is None:
        _add_columns(xp, dy, w, window, groups, dx)
    else:
        _convolve(xp, dy, _turned(w, groups), turned, groups, dx)
    return store(xp, dx, out)


def turned_window(xp: Namespace, window: Window, dy: Array, w: Array, groups: int) -> Window | None:
    """The window of the convolution of dy with the turned kernel that is the gradient of a convolution; None
    where columns are to be added instead: for steps of several places, and where the turned kernel, or the
    columns of dy, would be the larger ones.
    """
    turned = _turned_window(window)
    if xp is not np or turned is None:
        return None
    kernel = turned_shape(w.shape, groups)
    if multiplies_windows(xp, (dy, w), turned, kernel, groups):
        return turned
    if dy.shape[1] // groups > dy.shape[0] * prod(window.output):
        return None
    apart = sums_lines(xp, turned, dy.shape, kernel)
    copied = convolve_area(turned, dy.shape[1], kernel[0], apart=apart)
    return turned if copied <= _ADDED * kernel[0] * prod((*window.kernel, *window.output)) else None


def _turned_window(window: Window) -> Window | None:
    """The window of the convolution with the turned kernel; None for steps of several places, and where more
    is padded than the kernel reaches."""
    reach = tuple(d * (k - 1) for d, k in zip(window.dilation, window.kernel, strict=True))
    pads = tuple((r - a, r - b) for r, (a, b) in zip(reach, window.padding, strict=True))
    if prod(window.stride) > 1 or min(map(min, pads)) < 0:
        return None
    return Window(window.kernel, window.stride, pads, window.dilation, window.output, window.input)


def turned_shape(w: Sequence[int], groups: int) -> tuple[int, ...]:
    """Shape of the kernel with inputs and outputs exchanged."""
    return groups * w[1], w[0] // groups, *w[2:]


def _turned(w: Array, groups: int) -> Array:
    """The kernel [o, c / groups, *kernel] with inputs and outputs exchanged and every place opposite."""
    blocks_of = w.reshape(groups, w.shape[0] // groups, *w.shape[1:]).swapaxes(1, 2)
    opposite = blocks_of[(ALL, ALL, ALL, *(slice(None, None, -1) for _ in w.shape[2:]))]
    return opposite.reshape(turned_shape(w.shape, groups))


def _add_columns(xp: Namespace, dy: Array, w: Array, window: Window, groups: int, dx: Array) -> None:
    """dx = columns w^T dy, added back where they came from (col2im)."""
    samples, made, area = dy.shape[0], w.shape[0], prod(window.output)
    depth, channels = w.shape[1] * prod(window.kernel), dx.shape[1]
    weights = w.reshape(groups, made // groups, depth).swapaxes(1, 2)
    for n in blocks(xp, samples, groups * depth * area):
        columns = xp.matmul(weights, dy[n].reshape(-1, groups, made // groups, area))
        columns = columns.reshape(-1, channels, *window.kernel, *window.output)
        wide = spread(xp, dx[n], window)
        for place, where in positions(window):
            wide[(ALL, ALL, *where)] += columns[(ALL, ALL, *place)]
        gather(dx[n], wide, window)
        del wide, columns  # before the next block is made


@computed_in_f32(0)
def conv_grad_weight(
    xp: Namespace,
    x: Array,
    dy: Array,
    *,
    kernel_shape: Sequence[int],
    groups: int = 1,
    out: Array | None = None,
    **steps: Any,
) -> Array:
    """dw, the transpose of `conv` in w: dy times the columns of x, summed over samples and places.

    Args:
        x: [n, c, *spatial].
        dy: [n, o, *output].
        kernel_shape: [o, c / groups, *kernel] of w, and of the result.
    """
    _check_channels("conv_grad_weight", x.shape[1], kernel_shape, groups)
    window = window_of("conv_grad_weight", x.shape[2:], kernel_shape[2:], **steps)
    if multiplies_windows(xp, (x, dy), window, kernel_shape, groups):
        dw = empty(xp, out, kernel_shape, x.dtype)
        kernel_gradient(x, dy, window, groups, dw)
    elif multiplies_samples(xp, window, kernel_shape[0] // groups):
        dw = _sum_of_samples(xp, x, dy, window, groups)
    else:
        dw = _sum_of_blocks(xp, x, dy, window, groups)
    return store(xp, dw.reshape(tuple(kernel_shape)), out)


def multiplies_samples(xp: Namespace, window: Window, made: int) -> bool:
    """Whether each sample gives a product of its own, of ``made`` rows: it has enough places for one."""
    return xp is np and made <= prod(window.output)


def _sum_of_samples(xp: Namespace, x: Array, dy: Array, window: Window, groups: int) -> Array:
    """The gradient of a kernel [groups, o / groups, c / groups, *kernel] as a sum of products of samples."""
    made, apart = dy.shape[1] // groups, lines_apart(xp, window)
    lines = window.kernel[0] if apart else 1
    channels = x.shape[1] // groups
    depth = channels * prod(window.kernel) // lines
    dw = xp.zeros((lines, groups, depth, made), x.dtype)
    for n in blocks(xp, x.shape[0], weight_area(x.shape[1], dy.shape[1], window, groups, apart)):
        columns = _columns(xp, x[n], window, groups, apart)
        changes = dy[n].reshape(-1, 1, groups, made, prod(window.output)).swapaxes(3, 4)
        if made < depth:  # BLAS multiplies by rows up to 1.7 times as fast, and this copy is the smaller one
            changes = xp.ascontiguousarray(changes)
        dw += xp.matmul(columns, changes).sum(axis=0)
        del columns, changes  # before the next block is made
    dw = dw.reshape(lines, groups, channels, depth // channels, made)
    return dw.transpose(1, 4, 2, 0, 3)


def weight_area(channels: int, made: int, window: Window, groups: int, apart: bool) -> int:
    """Elements that `_sum_of_samples` allocates for a sample, without its padding."""
    products = channels * made // groups * prod(window.kernel)
    depth = channels // groups * prod(window.kernel) // (window.kernel[0] if apart else 1)
    copied = made * prod(window.output) if made // groups < depth else 0
    return channels * columns_of(window, apart=apart) + products + copied


def _sum_of_blocks(xp: Namespace, x: Array, dy: Array, window: Window, groups: int) -> Array:
    """The same, with one product for a block of samples."""
    channels, area, dims = dy.shape[1], prod(window.output), len(window.kernel)
    depth = x.shape[1] // groups * prod(window.kernel)
    dw = xp.zeros((groups, channels // groups, depth), x.dtype)
    for n in blocks(xp, x.shape[0], groups * depth * area):
        columns = _windows(xp, padded(xp, x[n], window), window)
        # [n, c, *kernel, *output] -> [c, *kernel, n, *output]
        order = (*range(1, 2 + dims), 0, *range(2 + dims, 2 + 2 * dims))
        columns = columns.transpose(order).reshape(groups, depth, -1)
        changes = dy[n].reshape(-1, channels, area).swapaxes(0, 1).reshape(groups, channels // groups, -1)
        dw += xp.matmul(changes, columns.swapaxes(1, 2))
        del columns, changes  # before the next block is made
    return dw
