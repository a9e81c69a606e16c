"""Convolution in one to three spatial dims, channels first, as im2col and one GEMM per block of samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.kernels._common import Array, Namespace, computed_in_f32, empty, store

_CACHE_COLUMNS = 1 << 18
"""Elements of the im2col block on a CPU: 1 MiB of float32, a second-level cache."""
_DEVICE_COLUMNS = 1 << 28
"""The same on a GPU: 1 GiB of float32."""

ALL = slice(None)

Pads = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Window:
    """Where a kernel lies over its input: sizes, per spatial dim."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Pads
    dilation: tuple[int, ...]
    input: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def plain(self) -> bool:
        """A 1 x 1 kernel that moves by one: the input is its own im2col."""
        return prod(self.kernel) == 1 and prod(self.stride) == 1 and not any(a or b for a, b in self.padding)


def patches(
    what: str,
    x: Sequence[int],
    w: Sequence[int],
    y: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[Sequence[int]],
    dilation: Sequence[int],
) -> tuple[float, float]:
    """Number of elements that a kernel copies to multiply them or to add them up, and of contiguous rows.

    Args:
        what: conv, which copies nothing where its input is its own im2col, or a gradient of it.
        x, w, y: shapes of input, kernel and output.
        stride, padding, dilation: by spatial dim.
    """
    if not all(map(prod, (x, w, y))):
        return 0.0, 0.0  # a block of nothing, or of padding alone
    if what == "conv" and window_of(what, x[2:], w[2:], stride, padding, dilation).plain:
        return 0.0, 0.0
    elements = prod(x[:2]) * prod(w[2:]) * prod(y[2:])
    return float(elements), elements / y[-1]


def window_of(
    what: str,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int] | int = 1,
    padding: Sequence[Sequence[int]] | int = 0,
    dilation: Sequence[int] | int = 1,
) -> Window:
    """Check and complete the attributes of a convolution or a pooling; one number stands for all spatial
    dims.

    Raises:
        GraphError: wrong number of dims, or the window does not fit in the padded input.
    """
    n = len(size)
    strides = (stride,) * n if isinstance(stride, int) else tuple(stride)
    dilations = (dilation,) * n if isinstance(dilation, int) else tuple(dilation)
    pads: Pads = (
        ((padding, padding),) * n if isinstance(padding, int) else tuple((p[0], p[1]) for p in padding)
    )
    if not len(kernel) == len(strides) == len(dilations) == len(pads) == n:
        raise GraphError(
            f"{what}: input has {n} spatial dims but window {tuple(kernel)}, stride {strides}, "
            f"padding {pads}, dilation {dilations}; give one entry for each dim"
        )
    out = tuple(
        (i + a + b - d * (k - 1) - 1) // s + 1
        for i, k, s, (a, b), d in zip(size, kernel, strides, pads, dilations, strict=True)
    )
    if min(out, default=1) < 1:
        raise GraphError(
            f"{what}: window {tuple(kernel)} does not fit in input {tuple(size)} with padding {pads}"
        )
    return Window(tuple(kernel), strides, pads, dilations, tuple(size), out)


def padded(xp: Namespace, x: Array, window: Window, value: float = 0.0) -> Array:
    """``x`` with its spatial dims padded; ``x`` itself where there is nothing to pad."""
    if not any(a or b for a, b in window.padding):
        return x
    wide = xp.full((*x.shape[:2], *_padded_size(window)), value, x.dtype)  # `xp.pad` does the same, slower
    wide[_inside(window)] = x
    return wide


def spread(xp: Namespace, dx: Array, window: Window) -> Array:
    """Zeros of the shape of a block of inputs with its padding: ``dx`` itself where there is none."""
    if any(a or b for a, b in window.padding):
        return xp.zeros((*dx.shape[:2], *_padded_size(window)), dx.dtype)
    dx[...] = 0
    return dx


def gather(dx: Array, wide: Array, window: Window) -> None:
    """dx = ``wide``, made by `spread`, without its padding."""
    if wide is not dx:
        dx[...] = wide[_inside(window)]


def _padded_size(window: Window) -> tuple[int, ...]:
    return tuple(i + a + b for i, (a, b) in zip(window.input, window.padding, strict=True))


def _inside(window: Window) -> tuple[slice, ...]:
    """Index of the input in itself padded."""
    return ALL, ALL, *(slice(a, a + i) for i, (a, _) in zip(window.input, window.padding, strict=True))


@lru_cache(maxsize=1024)
def positions(window: Window) -> tuple[tuple[tuple[int, ...], tuple[slice, ...]], ...]:
    """Each place in the window, with the slices of the padded input that it meets over all outputs."""
    spaced = tuple(zip(window.dilation, window.output, window.stride, strict=True))
    return tuple(
        (
            place,
            tuple(
                slice(p * d, p * d + (o - 1) * s + 1, s) for p, (d, o, s) in zip(place, spaced, strict=True)
            ),
        )
        for place in product(*(range(k) for k in window.kernel))
    )


def _columns(xp: Namespace, x: Array, window: Window) -> Array:
    """The windows of padded x [n, c, *spatial] as a view [n, c, *kernel, *output]."""
    outer, inner = x.strides[:2], x.strides[2:]
    along = tuple(s * d for s, d in zip(inner, window.dilation, strict=True))
    across = tuple(s * t for s, t in zip(inner, window.stride, strict=True))
    shape = (*x.shape[:2], *window.kernel, *window.output)
    return xp.lib.stride_tricks.as_strided(x, shape, (*outer, *along, *across))


def block_samples(samples: int, area: int, budget: int = _CACHE_COLUMNS) -> int:
    """Samples of a block whose temporaries, ``area`` elements a sample, fit the budget; at least one."""
    return max(1, min(samples, budget // max(1, area)))


def blocks(xp: Namespace, samples: int, area: int) -> Iterator[slice]:
    """Blocks of samples, see `block_samples`: only they are padded, spread out and multiplied at once."""
    step = block_samples(samples, area, _CACHE_COLUMNS if xp is np else _DEVICE_COLUMNS)
    for n in range(0, samples, step):
        yield slice(n, min(n + step, samples))


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
    samples, channels, area = x.shape[0], w.shape[0], prod(window.output)
    y = empty(xp, out, (samples, channels, *window.output), x.dtype)
    depth = w.shape[1] * prod(window.kernel)
    weights = w.reshape(groups, channels // groups, depth)
    target = y.reshape(samples, groups, channels // groups, area)
    for n in blocks(xp, samples, groups * depth * area):
        wide = padded(xp, x[n], window)
        columns = wide if window.plain else _columns(xp, wide, window)
        xp.matmul(weights, columns.reshape(-1, groups, depth, area), out=target[n])
        del wide, columns  # before the next block is made
    return store(xp, y, out)


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
    """dx, the transpose of `conv` in x: columns w^T dy added back where they came from (col2im).

    Args:
        dy: [n, o, *output].
        w: [o, c / groups, *kernel].
        input_shape: [n, c, *spatial] of x, and of the result.
    """
    _check_channels("conv_grad_input", input_shape[1], w.shape, groups)
    window = window_of("conv_grad_input", input_shape[2:], w.shape[2:], **steps)
    samples, made, area = dy.shape[0], w.shape[0], prod(window.output)
    depth = w.shape[1] * prod(window.kernel)
    weights = w.reshape(groups, made // groups, depth).swapaxes(1, 2)
    dx = empty(xp, out, input_shape, dy.dtype)
    channels = input_shape[1]
    for n in blocks(xp, samples, groups * depth * area):
        columns = xp.matmul(weights, dy[n].reshape(-1, groups, made // groups, area))
        columns = columns.reshape(-1, channels, *window.kernel, *window.output)
        wide = spread(xp, dx[n], window)
        for place, where in positions(window):
            wide[(ALL, ALL, *where)] += columns[(ALL, ALL, *place)]
        gather(dx[n], wide, window)
        del wide, columns  # before the next block is made
    return store(xp, dx, out)


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
    """dw, the transpose of `conv` in w: dy times the columns of x, summed over samples and places in one GEMM
    a block.

    Args:
        x: [n, c, *spatial].
        dy: [n, o, *output].
        kernel_shape: [o, c / groups, *kernel] of w, and of the result.
    """
    _check_channels("conv_grad_weight", x.shape[1], kernel_shape, groups)
    window = window_of("conv_grad_weight", x.shape[2:], kernel_shape[2:], **steps)
    channels, area, dims = kernel_shape[0], prod(window.output), len(window.kernel)
    depth = kernel_shape[1] * prod(window.kernel)
    dw = xp.zeros((groups, channels // groups, depth), x.dtype)
    for n in blocks(xp, x.shape[0], groups * depth * area):
        columns = _columns(xp, padded(xp, x[n], window), window)
        # [n, c, *kernel, *output] -> [c, *kernel, n, *output]
        order = (*range(1, 2 + dims), 0, *range(2 + dims, 2 + 2 * dims))
        columns = columns.transpose(order).reshape(groups, depth, -1)
        changes = dy[n].reshape(-1, channels, area).swapaxes(0, 1).reshape(groups, channels // groups, -1)
        dw += xp.matmul(changes, columns.swapaxes(1, 2))
        del columns, changes  # before the next block is made
    return store(xp, dw.reshape(tuple(kernel_shape)), out)
