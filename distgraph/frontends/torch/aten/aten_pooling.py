"""Pooling and resampling. What is linear and separable is a product with a constant matrix along each dim."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.torch.rule_registry import aten
from distgraph.tracing.tensor import emit_one
from distgraph.tracing.tracer import Trace

_LETTERS = "abcdefgh"


def _each(value: Any, count: int, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    if not values:
        return default
    return values * count if len(values) == 1 else values


def _batched(function: Any, x: Any, dims: int, *args: Any) -> Any:
    """A function of [n, c, *spatial] on a tensor that may have no n."""
    if x.ndim == dims + 2:
        return function(x, *args)
    return ops.squeeze(function(ops.expand_dims(x, 0), *args), 0)


def _overhang(n: int, window: int, stride: int, pad: int, spread: int, ceil: bool) -> int:
    """Positions behind the padded input that the last window of a pool with ceil_mode covers."""
    if not ceil:
        return 0
    reach = spread * (window - 1) + 1
    count = -(-(n + 2 * pad - reach) // stride) + 1
    if (count - 1) * stride >= n + pad:
        count -= 1
    return max(0, (count - 1) * stride + reach - n - 2 * pad)


def _max_pool(dims: int) -> None:
    @aten(f"max_pool{dims}d.default")
    def _pool(
        x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> Any:
        window = _each(kernel, dims)
        steps, pads, spread = _each(stride, dims, window), _each(padding, dims), _each(dilation, dims)
        if any(d != 1 for d in spread):
            raise GraphError(
                f"max_pool{dims}d has dilation {spread} but only 1 has a rule; write it with slices"
            )
        return _batched(_padded_max, x, dims, window, steps, pads, ceil_mode)

    @aten(f"max_pool{dims}d_with_indices.default")
    def _pool_with_indices(
        x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> Any:
        values = _pool(x, kernel, stride, padding, dilation, ceil_mode)
        window = _each(kernel, dims)
        steps, pads = _each(stride, dims, window), _each(padding, dims)
        return values, _places(x, values.shape, window, steps, pads)

    @aten(f"max_unpool{dims}d.default")
    def _unpool(x: Any, places: Any, output_size: Any, *options: Any) -> Any:
        """Elements at their places, flat over the spatial dims; a place taken twice has equal elements."""
        shape = (*x.shape[: x.ndim - dims], *output_size)
        flat = (*shape[: x.ndim - dims], -1)
        ids, size = ops.reshape(places, flat), math.prod(output_size)
        target = {"dim": ids.ndim - 1, "size": size}
        total = emit_one("put_along", ops.reshape(x, flat), ids, **target)
        count = emit_one("put_along", ops.full(ids.shape, 1, x.dtype), ids, **target)
        return ops.reshape(total / ops.maximum(count, 1), shape)


def _places(x: Any, shape: Any, window: Any, steps: Any, pads: Any) -> Any:
    """Place of the largest element of each window, flat over the spatial dims: the first of equal ones."""
    dims = len(window)
    lead, spatial, counts = x.shape[: x.ndim - dims], x.shape[x.ndim - dims :], shape[x.ndim - dims :]
    reach = [(m - 1) * s + k for m, s, k in zip(counts, steps, window, strict=True)]
    low = (*(0,) * len(lead), *pads)
    high = (*(0,) * len(lead), *(max(0, r - n - p) for r, n, p in zip(reach, spatial, pads, strict=True)))
    padded = ops.pad(x, low, high, float("-inf"))
    parts, places = [], []
    for offset in np.ndindex(*window):
        cuts = [slice(o, o + (m - 1) * s + 1, s) for o, m, s in zip(offset, counts, steps, strict=True)]
        parts.append(ops.getitem(padded, (..., *cuts)))
        lines = [np.arange(m) * s + o - p for m, s, o, p in zip(counts, steps, offset, pads, strict=True)]
        grid = np.meshgrid(*lines, indexing="ij")
        flat = np.zeros_like(grid[0])
        for line, n in zip(grid, spatial, strict=True):
            flat = flat * n + line
        places.append(flat)
    best = ops.argmax(ops.stack(parts, -1), -1, keepdims=True)
    table = Trace.current().constant(np.stack(places, -1).astype(np.int64))
    positions = ops.take_along(ops.broadcast_to(table, (*shape, len(parts))), best, -1)
    return ops.squeeze(positions, -1)


def _padded_max(x: Any, window: Any, steps: Any, pads: Any, ceil: bool) -> Any:
    more = [
        _overhang(n, k, s, p, 1, ceil) for n, k, s, p in zip(x.shape[2:], window, steps, pads, strict=True)
    ]
    return ops.max_pool(x, window, steps, [(p, p + m) for p, m in zip(pads, more, strict=True)])


def _avg_pool(dims: int) -> None:
    @aten(f"avg_pool{dims}d.default")
    def _pool(
        x: Any, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Any:  # fmt: skip
        window = _each(kernel, dims)
        steps, pads = _each(stride, dims, window), _each(padding, dims)
        counts = count_include_pad, divisor_override
        return _batched(_padded_mean, x, dims, window, steps, pads, ceil_mode, *counts)


def _padded_mean(
    x: Any, window: Any, steps: Any, pads: Any, ceil: bool, padded: bool, divisor: int | None
) -> Any:
    spatial = x.shape[2:]
    more = [_overhang(n, k, s, p, 1, ceil) for n, k, s, p in zip(spatial, window, steps, pads, strict=True)]
    sides = [(p, p + m) for p, m in zip(pads, more, strict=True)]
    means = ops.avg_pool(x, window, steps, sides)
    size = math.prod(window)
    if divisor is not None:
        return means * (size / divisor)
    if not any(more) and (padded or not any(pads)):
        return means
    counts = np.ones((1, 1, *(1,) * len(spatial)))
    for d, (n, k, s, (low, high), p) in enumerate(zip(spatial, window, steps, sides, pads, strict=True)):
        inside = np.zeros(n + low + high)
        inside[: n + 2 * p] = 1  # what ceil_mode adds behind the padding is never counted
        if not padded:
            inside[:p] = inside[n + p :] = 0
        starts = range(0, n + low + high - k + 1, s)
        line = np.array([inside[a : a + k].sum() for a in starts])
        counts = counts * line.reshape([-1 if axis == d + 2 else 1 for axis in range(len(spatial) + 2)])
    return means * _constant(size / counts, x)


def _constant(array: Any, like: Any) -> Any:
    wide = np.asarray(array, np.float64 if like.dtype == "f64" else np.float32)
    return ops.cast(Trace.current().constant(wide), like.dtype)


def _along(x: Any, dim: int, matrix: Any) -> Any:
    """The product with a constant [outputs, inputs] along one dim."""
    letters = _LETTERS[: x.ndim]
    inner = letters[:dim] + "z" + letters[dim + 1 :]
    return ops.einsum(f"{inner},{letters[dim]}z->{letters}", x, _constant(matrix, x))


def _adaptive_avg(dims: int) -> None:
    @aten(f"adaptive_avg_pool{dims}d.default", f"_adaptive_avg_pool{dims}d.default")
    def _pool(x: Any, output_size: Any) -> Any:
        for position, size in enumerate(_each(output_size, dims)):
            d = x.ndim - dims + position
            n = x.shape[d]
            if size == n:
                continue
            x = ops.mean(x, d, keepdims=True) if size == 1 else _along(x, d, _regions(n, size))
        return x


def _bounds(n: int, size: int) -> list[tuple[int, int]]:
    """(start, stop) of each region of adaptive pooling."""
    return [(i * n // size, -(-(i + 1) * n // size)) for i in range(size)]


def _regions(n: int, size: int) -> Any:
    matrix = np.zeros((size, n))
    for row, (start, stop) in enumerate(_bounds(n, size)):
        matrix[row, start:stop] = 1 / (stop - start)
    return matrix


def _adaptive_max(dims: int) -> None:
    @aten(f"adaptive_max_pool{dims}d.default")
    def _pool(x: Any, output_size: Any) -> Any:
        for position, size in enumerate(_each(output_size, dims)):
            d = x.ndim - dims + position
            front = (slice(None),) * d
            parts = [
                ops.reduce("max", ops.getitem(x, (*front, slice(a, b))), d, keepdims=True)
                for a, b in _bounds(x.shape[d], size)
            ]
            x = ops.concat(parts, d)
        return x, None


# resampling


def _sizes(x: Any, output_size: Any, scales: Any, dims: int) -> list[tuple[int, int, float]]:
    """(dim, outputs, step of the input for one output) of each spatial dim."""
    sizes = []
    for position in range(dims):
        d = x.ndim - dims + position
        n, scale = x.shape[d], None if scales is None else scales[position]
        size = int(n * scale) if output_size is None else output_size[position]
        sizes.append((d, size, n / size if scale is None or output_size is not None else 1 / scale))
    return sizes


def _nearest(dims: int) -> None:
    @aten(f"upsample_nearest{dims}d.vec")
    def _resample(x: Any, output_size: Any, scale_factors: Any = None) -> Any:
        for d, size, step in _sizes(x, output_size, scale_factors, dims):
            n = x.shape[d]
            if size % n == 0 and step == n / size:
                x = ops.repeat(x, size // n, d) if size != n else x
            else:
                places = np.minimum((np.arange(size) * step).astype(np.int64), n - 1)
                x = ops.take(x, places, d)
        return x

    @aten(f"upsample_nearest{dims}d.default")
    def _resample_sizes(x: Any, output_size: Any, *scales: Any) -> Any:
        return _resample(x, output_size, None)


def _linear(name: str, dims: int) -> None:
    @aten(f"upsample_{name}.vec")
    def _resample(x: Any, output_size: Any, align_corners: bool, scale_factors: Any = None) -> Any:
        weights = _cubic_weights if name == "bicubic2d" else _linear_weights
        for d, size, step in _sizes(x, output_size, scale_factors, dims):
            x = _along(x, d, weights(x.shape[d], size, step, align_corners))
        return x

    @aten(f"upsample_{name}.default")
    def _resample_sizes(x: Any, output_size: Any, align_corners: bool, *scales: Any) -> Any:
        return _resample(x, output_size, align_corners, None)


for _dims in (1, 2, 3):
    for _declare in (_max_pool, _avg_pool, _adaptive_avg, _adaptive_max, _nearest):
        _declare(_dims)
for _kind, _dims in (("linear1d", 1), ("bilinear2d", 2), ("trilinear3d", 3), ("bicubic2d", 2)):
    _linear(_kind, _dims)


def _positions(n: int, size: int, step: float, corners: bool, clamp: bool) -> Any:
    """Positions in the input, as real numbers, of the outputs of a resampling."""
    if corners:
        return np.arange(size) * ((n - 1) / (size - 1) if size > 1 else 0.0)
    places = (np.arange(size) + 0.5) * step - 0.5
    return np.maximum(places, 0) if clamp else places


def _linear_weights(n: int, size: int, step: float, corners: bool) -> Any:
    places = _positions(n, size, step, corners, clamp=True)
    low = np.minimum(np.floor(places).astype(int), n - 1)
    share = places - low
    matrix = np.zeros((size, n))
    np.add.at(matrix, (np.arange(size), low), 1 - share)
    np.add.at(matrix, (np.arange(size), np.minimum(low + 1, n - 1)), share)
    return matrix


def _cubic_weights(n: int, size: int, step: float, corners: bool) -> Any:
    """Cubic convolution with a = -0.75 (Keys, 1981), borders repeated."""
    places, a = _positions(n, size, step, corners, clamp=False), -0.75
    low = np.floor(places).astype(int)
    matrix = np.zeros((size, n))
    for offset in (-1, 0, 1, 2):
        distance = np.abs(places - (low + offset))
        near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
        far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        weight = np.where(distance <= 1, near, far)
        np.add.at(matrix, (np.arange(size), np.clip(low + offset, 0, n - 1)), weight)
    return matrix
