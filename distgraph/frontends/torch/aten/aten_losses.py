"""Losses."""

from __future__ import annotations

from typing import Any

from distgraph import ops
from distgraph.frontends.torch.aten.aten_pointwise import softplus
from distgraph.frontends.torch.rule_registry import aten
from distgraph.ir.dtypes import is_float

_NONE, _MEAN = 0, 1


def reduced(loss: Any, reduction: int, weights: Any = None) -> Any:
    """The loss of every sample, their mean (weighted where they have weights), or their sum."""
    if reduction == _NONE:
        return loss
    total = ops.reduce("sum", loss)
    if reduction != _MEAN:
        return total
    return ops.mean(loss) if weights is None else total / ops.reduce("sum", weights)


def _classes_last(x: Any) -> Any:
    return x if x.ndim < 3 else ops.transpose(x, (0, *range(2, x.ndim), 1))


@aten("cross_entropy_loss.default")
def _cross_entropy(
    x: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    logits = _classes_last(x) if x.ndim > 1 else x
    if is_float(target.dtype):
        return _soft_cross_entropy(logits, _classes_last(target), weight, reduction, label_smoothing)
    counted = ops.not_equal(target, ignore_index)
    labels = ops.where(counted, target, 0)
    loss = ops.cross_entropy(logits, labels)
    shares = ops.cast(counted, x.dtype)
    if weight is not None:
        shares = shares * ops.embedding(weight, labels)
    loss = loss * shares
    if label_smoothing:
        scores = ops.log_softmax(logits)
        scores = scores if weight is None else scores * weight
        even = ops.where(counted, -ops.reduce("sum", scores, -1), 0)
        loss = loss * (1 - label_smoothing) + even * (label_smoothing / logits.shape[-1])
    return reduced(loss, reduction, shares)


def _soft_cross_entropy(logits: Any, target: Any, weight: Any, reduction: int, smoothing: float) -> Any:
    if smoothing:
        target = target * (1 - smoothing) + smoothing / logits.shape[-1]
    terms = ops.log_softmax(logits) * target
    terms = terms if weight is None else terms * weight
    return reduced(-ops.reduce("sum", terms, -1), reduction)


@aten("nll_loss.default", "nll_loss2d.default", "nll_loss_nd.default")
def _nll_loss(x: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100) -> Any:
    scores = _classes_last(x) if x.ndim > 1 else x
    counted = ops.not_equal(target, ignore_index)
    labels = ops.where(counted, target, 0)
    shares = ops.cast(counted, x.dtype)
    if weight is not None:
        shares = shares * ops.embedding(weight, labels)
    return reduced(-ops.pick(scores, labels) * shares, reduction, shares)


@aten("nll_loss_forward.default", "nll_loss2d_forward.default")
def _nll_loss_forward(x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    return _nll_loss(x, target, weight, reduction, ignore_index), None


@aten("mse_loss.default", operands="result")
def _mse_loss(x: Any, target: Any, reduction: int = 1) -> Any:
    return reduced(ops.square(x - target), reduction)


@aten("l1_loss.default", operands="result")
def _l1_loss(x: Any, target: Any, reduction: int = 1) -> Any:
    return reduced(ops.absolute(x - target), reduction)


@aten("huber_loss.default", operands="result")
def _huber_loss(x: Any, target: Any, reduction: int = 1, delta: float = 1.0) -> Any:
    distance = ops.absolute(x - target)
    near = ops.square(distance) * 0.5
    return reduced(ops.where(ops.less(distance, delta), near, (distance - delta / 2) * delta), reduction)


@aten("smooth_l1_loss.default", operands="result")
def _smooth_l1_loss(x: Any, target: Any, reduction: int = 1, beta: float = 1.0) -> Any:
    if beta == 0:
        return _l1_loss(x, target, reduction)
    distance = ops.absolute(x - target)
    near = ops.square(distance) * (0.5 / beta)
    return reduced(ops.where(ops.less(distance, beta), near, distance - beta / 2), reduction)


@aten("binary_cross_entropy_with_logits.default", operands="result")
def _bce_with_logits(
    x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1
) -> Any:
    positive = 1 if pos_weight is None else (pos_weight - 1) * target + 1
    tail = softplus(-x)
    loss = (1 - target) * x + positive * tail
    return reduced(loss if weight is None else loss * weight, reduction)


@aten("binary_cross_entropy.default", operands="result")
def _bce(x: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    first, second = ops.maximum(ops.log(x), -100), ops.maximum(ops.log1p(-x), -100)
    loss = -(target * first + (1 - target) * second)
    return reduced(loss if weight is None else loss * weight, reduction)
