"""Normalisation layers. Batch norm returns the new running statistics, which become updates of buffers."""

from __future__ import annotations

import math
from typing import Any

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.torch.rule_registry import aten
from distgraph.tracing.tracer import Trace


def _affine(x: Any, weight: Any, bias: Any, shape: tuple[int, ...]) -> Any:
    x = x if weight is None else x * ops.reshape(weight, shape)
    return x if bias is None else x + ops.reshape(bias, shape)


def _normalised(x: Any, dims: tuple[int, ...], eps: float) -> Any:
    mean = ops.mean(x, dims, keepdims=True)
    centred = x - mean
    return centred * ops.rsqrt(ops.mean(ops.square(centred), dims, keepdims=True) + eps)


@aten("layer_norm.default")
def _layer_norm(
    x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: bool = False
) -> Any:
    size, lead = math.prod(shape), x.shape[: x.ndim - len(shape)]
    weight = ops.ones((size,), x.dtype) if weight is None else ops.reshape(weight, (size,))
    bias = ops.zeros((size,), x.dtype) if bias is None else ops.reshape(bias, (size,))
    flat = x if len(shape) == 1 else ops.reshape(x, (*lead, size))
    return ops.reshape(ops.layer_norm(flat, weight, bias, eps), x.shape)


@aten("native_layer_norm.default")
def _native_layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    return _layer_norm(x, shape, weight, bias, eps), None, None


@aten("rms_norm.default")
def _rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    size, lead = math.prod(shape), x.shape[: x.ndim - len(shape)]
    epsilon = (
        {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}[x.dtype] if eps is None else eps
    )
    weight = ops.ones((size,), x.dtype) if weight is None else ops.reshape(weight, (size,))
    flat = x if len(shape) == 1 else ops.reshape(x, (*lead, size))
    return ops.reshape(ops.rms_norm(flat, weight, epsilon), x.shape)


@aten("group_norm.default")
def _group_norm(
    x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: bool = True
) -> Any:
    batch, channels, *rest = x.shape
    split = ops.reshape(x, (batch, groups, channels // groups, *rest))
    normal = ops.reshape(_normalised(split, tuple(range(2, split.ndim)), eps), x.shape)
    return _affine(normal, weight, bias, (1, -1) + (1,) * len(rest))


@aten("native_group_norm.default")
def _native_group_norm(
    x: Any, weight: Any, bias: Any, n: int, channels: int, size: int, groups: int, eps: float
) -> Any:
    return _group_norm(x, groups, weight, bias, eps), None, None


@aten("instance_norm.default")
def _instance_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, batch_stats: bool, momentum: float, eps: float,
    cudnn: bool = True,
) -> Any:  # fmt: skip
    wide = (1, -1) + (1,) * (x.ndim - 2)
    if batch_stats:
        if mean is not None:
            raise GraphError(
                "torch.instance_norm hides the update of its running statistics from torch.export; in "
                "training, call torch.nn.functional.instance_norm, or use torch.nn.InstanceNorm1d, 2d or 3d"
            )
        return _affine(_normalised(x, tuple(range(2, x.ndim)), eps), weight, bias, wide)
    centred = (x - ops.reshape(mean, wide)) * ops.rsqrt(ops.reshape(var, wide) + eps)
    return _affine(centred, weight, bias, wide)


@aten("_native_batch_norm_legit_functional.default")
def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    if not training:
        return (*_batch_norm_fixed(x, weight, bias, mean, var, momentum, eps), mean, var)
    dims, wide = (0, *range(2, x.ndim)), (1, -1) + (1,) * (x.ndim - 2)
    observed = ops.mean(x, dims, keepdims=True)
    centred = x - observed
    variance = ops.mean(ops.square(centred), dims, keepdims=True)
    y = _affine(centred * ops.rsqrt(variance + eps), weight, bias, wide)
    count = math.prod(x.shape[d] for d in dims)
    unbiased = variance * (count / max(1, count - 1))
    new = []
    for old, step in ((mean, observed), (var, unbiased)):
        once = ops.accumulate(ops.stop_gradient(ops.reshape(step, old.shape)))
        with Trace.current().within(role="optimize"):
            new.append(old * (1 - momentum) + ops.cast(once, old.dtype) * momentum)
    return y, None, None, *new


@aten("_native_batch_norm_legit_no_training.default")
def _batch_norm_fixed(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> Any:
    wide = (1, -1) + (1,) * (x.ndim - 2)
    scale = ops.rsqrt(ops.reshape(var, wide) + eps)
    return _affine((x - ops.reshape(mean, wide)) * scale, weight, bias, wide), None, None


@aten("_native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    dims, wide = (0, *range(2, x.ndim)), (1, -1) + (1,) * (x.ndim - 2)
    return _affine(_normalised(x, dims, eps), weight, bias, wide), None, None
