"""Layers over images: convolution, pooling, batch norm. Channels first: [n, c, h, w]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.errors.arguments import Count, NonNegative, Share, checked_arguments, shown
from distgraph.nn.initializers import Init, fan_in_uniform
from distgraph.nn.module import Module
from distgraph.nn.parameter import Buffer, Parameter
from distgraph.ops.conv import Padding, pairs_of
from distgraph.tracing.tensor import Tensor


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    return (int(value),) * 2 if isinstance(value, (int, np.integer)) else (value[0], value[1])


def _check_sides(layer: str, padding: Any) -> None:
    """Raises GraphError where padding is a list that has not one entry for each of h and w."""
    if not isinstance(padding, (int, np.integer)) and len(padding) != 2:
        raise GraphError(
            f"padding of {layer} is {shown(padding)} but images have 2 dims; give one number, (h, w), or a "
            f"(low, high) pair for each of both"
        )


@checked_arguments()
class Conv2d(Module):
    """Convolution. Parameters: weight [outputs, inputs / groups, h, w], bias [outputs].

    Args:
        inputs, outputs: channels.
        kernel, stride, dilation: one number, or (h, w).
        padding: zeros on each side: one number, (h, w), or a (low, high) pair a dim.
        groups: output block j sees input block j.
    """

    def __init__(
        self,
        inputs: Count,
        outputs: Count,
        kernel: Count | tuple[Count, Count],
        stride: Count | tuple[Count, Count] = 1,
        padding: Padding = 0,
        dilation: Count | tuple[Count, Count] = 1,
        groups: Count = 1,
        bias: bool = True,
        init: Init | None = None,
        dtype: Any = "f32",
    ) -> None:
        if inputs % groups or outputs % groups:
            raise GraphError(
                f"Conv2d has {inputs} inputs and {outputs} outputs but {groups} groups, which must divide "
                f"both; change one of them"
            )
        _check_sides("Conv2d", padding)
        height, width = _pair(kernel)
        fan_in = inputs // groups * height * width
        self.weight = Parameter(
            (outputs, inputs // groups, height, width),
            dtype,
            fan_in_uniform(fan_in) if init is None else init,
        )
        self.bias = Parameter((outputs,), dtype, ("zeros",)) if bias else None
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def forward(self, x: Any) -> Tensor:
        """x [n, inputs, h, w] -> [n, outputs, h', w']."""
        y = ops.conv(x, self.weight, self.stride, self.padding, self.dilation, self.groups)
        return y if self.bias is None else y + ops.reshape(self.bias, (1, -1, 1, 1))


@checked_arguments()
class _Pool2d(Module):
    """`_pool` of each window."""

    _pool: Callable[..., Tensor]

    def __init__(
        self,
        window: Count | tuple[Count, Count],
        stride: Count | tuple[Count, Count] | None = None,
        padding: Padding = 0,
    ) -> None:
        _check_sides(type(self).__name__, padding)
        sides, lengths = pairs_of(padding, 2), _pair(window)
        if any(max(side) >= length for side, length in zip(sides, lengths, strict=True)):
            raise GraphError(
                f"padding of {type(self).__name__} is {shown(padding)} but windows are {lengths}; make it "
                "shorter than a window"
            )
        self.window, self.stride, self.padding = window, stride, padding

    def forward(self, x: Any) -> Tensor:
        """x [n, c, h, w] -> [n, c, h', w']."""
        return self._pool(x, self.window, self.stride, self.padding)


class MaxPool2d(_Pool2d):
    """Largest element of each window; `stride` is the window by default."""

    _pool = staticmethod(ops.max_pool)


class AvgPool2d(_Pool2d):
    """Mean of each window; `stride` is the window by default; padding counts as zeros."""

    _pool = staticmethod(ops.avg_pool)


@checked_arguments()
class BatchNorm2d(Module):
    """(x - mean) / sqrt(var + eps) * weight + bias for every channel (Ioffe and Szegedy, 2015).

    Mean and variance are those of the whole (micro-)batch under every layout; a split batch costs two
    reductions of one number a channel. Training updates the running statistics with those of the step (their
    mean over its micro-batches); evaluation uses them.

    Parameters: weight [channels], bias [channels]; buffers running_mean, running_var [channels].
    """

    def __init__(
        self, channels: Count, momentum: Share = 0.1, eps: NonNegative = 1e-5, dtype: Any = "f32"
    ) -> None:
        self.weight = Parameter((channels,), dtype, ("ones",))
        self.bias = Parameter((channels,), dtype, ("zeros",))
        self.running_mean = Buffer((channels,), dtype, ("zeros",))
        self.running_var = Buffer((channels,), dtype, ("ones",))
        self.momentum, self.eps = momentum, eps

    def forward(self, x: Any) -> Tensor:
        """x [n, channels, ...] -> the same shape."""
        dims = (0, *range(2, x.ndim))
        wide = (1, -1) + (1,) * (x.ndim - 2)
        if self.training:
            mean = ops.mean(x, dims, keepdims=True)
            centred = x - mean
            variance = ops.mean(ops.square(centred), dims, keepdims=True)
            self._remember(mean, variance, x.size // x.shape[1])
        else:
            centred = x - ops.reshape(self.running_mean, wide)
            variance = ops.reshape(self.running_var, wide)
        scale = ops.rsqrt(variance + self.eps) * ops.reshape(self.weight, wide)
        y: Tensor = centred * scale + ops.reshape(self.bias, wide)
        return y

    def _remember(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Updates the running statistics; the variance is the unbiased one, as in other frameworks."""
        correction = count / max(1, count - 1)
        for buffer, observed in ((self.running_mean, mean), (self.running_var, variance * correction)):
            step = ops.accumulate(ops.stop_gradient(ops.reshape(observed, buffer.shape)))
            with mean.trace.within(role="optimize"):
                buffer.update(buffer * (1 - self.momentum) + step * self.momentum)
