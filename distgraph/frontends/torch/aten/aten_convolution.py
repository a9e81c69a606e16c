"""Convolutions, transposed convolutions, and the rearrangement of patches."""

from __future__ import annotations

from typing import Any

import numpy as np

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.torch.rule_registry import aten
from distgraph.tracing.tensor import emit_one


def _each(value: Any, count: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def _with_bias(y: Any, bias: Any) -> Any:
    return y if bias is None else y + ops.reshape(bias, (1, -1) + (1,) * (y.ndim - 2))


@aten("conv1d.default", "conv2d.default", "conv3d.default")
def _conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if x.ndim < weight.ndim:  # one sample without a batch
        whole = _conv(ops.expand_dims(x, 0), weight, bias, stride, padding, dilation, groups)
        return ops.squeeze(whole, 0)
    count = weight.ndim - 2
    steps, pads, spread = (_each(value, count) for value in (stride, padding, dilation))
    return _with_bias(ops.conv(x, weight, steps, pads, spread, groups), bias)


@aten("conv1d.padding", "conv2d.padding", "conv3d.padding")
def _conv_padding(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: str = "valid", dilation: Any = 1,
    groups: int = 1,
) -> Any:  # fmt: skip
    count = weight.ndim - 2
    steps = _each(dilation, count)
    total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(steps, weight.shape[2:], strict=True)]
    pads = [(n // 2, n - n // 2) for n in total]
    return _with_bias(ops.conv(x, weight, _each(stride, count), pads, steps, groups), bias)


@aten("convolution.default")
def _convolution(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    if transposed:
        return _conv_transpose(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return _conv(x, weight, bias, stride, padding, dilation, groups)


@aten("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input")
def _conv_transpose(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1,
) -> Any:  # fmt: skip
    """A convolution of `x`, spread by zeros, with the flipped kernel; weight [i, o / groups, ...]."""
    if x.ndim < weight.ndim:
        whole = _conv_transpose(
            ops.expand_dims(x, 0), weight, bias, stride, padding, output_padding, groups, dilation
        )
        return ops.squeeze(whole, 0)
    count = weight.ndim - 2
    steps, pads, more, spread = (_each(v, count) for v in (stride, padding, output_padding, dilation))
    reach = [d * (k - 1) for d, k in zip(spread, weight.shape[2:], strict=True)]
    low = (0, 0, *(r - p for r, p in zip(reach, pads, strict=True)))
    high = (0, 0, *(r - p + m for r, p, m in zip(reach, pads, more, strict=True)))
    interior = (0, 0, *(s - 1 for s in steps))
    if any(interior):
        zero = (0,) * x.ndim
        x = emit_one("pad", x, low=zero, high=zero, interior=interior, value=0)
    inputs, outputs, *kernel = weight.shape
    w = ops.reshape(weight, (groups, inputs // groups, outputs, *kernel))
    w = ops.transpose(w, (0, 2, 1, *range(3, w.ndim)))
    w = ops.reshape(w, (groups * outputs, inputs // groups, *kernel))
    w = ops.flip(w, tuple(range(2, w.ndim)))
    cut = tuple(slice(max(0, -a), n + min(0, b)) for a, b, n in zip(low, high, x.shape, strict=True))
    if any(n < 0 for n in (*low, *high)):
        x = ops.getitem(x, cut)
    sides = [(max(0, a), max(0, b)) for a, b in zip(low[2:], high[2:], strict=True)]
    return _with_bias(ops.conv(x, w, 1, sides, spread, groups), bias)


@aten("im2col.default")
def _im2col(x: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """Patches as columns, [n, c * k, positions]: a convolution with one-hot kernels of each channel."""
    batch, channels = x.shape[:2]
    height, width = kernel
    size = height * width
    one = np.eye(size).reshape(size, 1, height, width)
    w = ops.cast(x.trace.constant(np.tile(one, (channels, 1, 1, 1)).astype(np.float32)), x.dtype)
    y = ops.conv(x, w, tuple(stride), tuple(padding), tuple(dilation), channels)
    return ops.reshape(y, (batch, channels * size, -1))


@aten("col2im.default")
def _col2im(x: Any, output_size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """The sum of patches at their places: a transposed convolution with one-hot kernels of each channel."""
    if x.ndim != 3:
        raise GraphError(f"col2im of {x.value.type} needs a batch; give it a leading dim")
    batch, columns, _ = x.shape
    height, width = kernel
    size = height * width
    channels = columns // size
    spans = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(output_size, padding, dilation, kernel, stride, strict=True)
    ]
    used = [
        (m - 1) * s - 2 * p + d * (k - 1) + 1
        for m, s, p, d, k in zip(spans, stride, padding, dilation, kernel, strict=True)
    ]
    more = [n - m for n, m in zip(output_size, used, strict=True)]
    one = np.eye(size).reshape(size, 1, height, width)
    w = ops.cast(x.trace.constant(np.tile(one, (channels, 1, 1, 1)).astype(np.float32)), x.dtype)
    patches = ops.reshape(x, (batch, columns, *spans))
    return _conv_transpose(patches, w, None, tuple(stride), tuple(padding), more, channels, tuple(dilation))
