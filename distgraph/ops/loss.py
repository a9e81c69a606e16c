"""Cross-entropy of logits and integer labels.

With the classes split, `cross_entropy` decomposes into reductions whose results have one number a row: what
crosses the network is a maximum, a sum and the picked logit of every row, never the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distgraph.errors import GraphError
from distgraph.ir.dtypes import is_float
from distgraph.ir.graph import Value
from distgraph.ir.op_registry import Attrs, GradientContext, Shape, define
from distgraph.kernels import loss as kernels
from distgraph.kernels import workspace
from distgraph.ops.normalization import expand, narrowed, require_float, squeeze, total, widened
from distgraph.tracing.tensor import Tensor, emit, emit_one

Grads = Sequence[Tensor | None]


def _check_labels(logits: Value, labels: Value) -> str:
    if is_float(labels.dtype) or labels.dtype == "bool":
        raise GraphError(f"labels are {labels.type} but must be integers; cast them with .astype('i32')")
    if not logits.shape or labels.shape != logits.shape[:-1]:
        raise GraphError(
            f"labels are {labels.type} but logits {logits.type} want one label a row, {logits.shape[:-1]}"
        )
    return require_float(logits)


def _infer_loss(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    dtype = _check_labels(operands[0], operands[1])
    return [(operands[1].shape, dtype), (operands[1].shape, dtype)]


def _split_loss(attrs: Attrs, logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    wide, last = widened(logits), (logits.ndim - 1,)
    highest = emit_one("reduce_max", wide, dims=last, keepdims=True)
    mass = total(emit_one("exp", wide - highest), last)
    lse = squeeze(emit_one("log", mass) + highest)
    loss = lse - emit_one("pick", wide, labels)
    return narrowed(loss, logits), narrowed(lse, logits)


def _split_loss_grad(attrs: Attrs, logits: Tensor, labels: Tensor, lse: Tensor, dloss: Tensor) -> Tensor:
    grad = widened(dloss)
    probability = emit_one("exp", widened(logits) - expand(widened(lse)))
    at_label = emit_one("pick_grad", grad, labels, size=logits.shape[-1])
    return narrowed(probability * expand(grad) - at_label, logits)


def _loss_gradient(c: GradientContext) -> Grads:
    logits, labels = c.operands
    dloss, dlse = c.grads
    if dlse is not None or dloss is None:
        raise GraphError(
            "the log-sum-exp of cross_entropy has no gradient; use distgraph.ops.logsumexp for one"
        )
    return [emit_one("cross_entropy_grad", logits, labels, c.results[1], dloss), None]


define(
    "cross_entropy",
    "... v!, ... -> ..., ...",
    kernels.cross_entropy,
    infer=_infer_loss,
    gradient=_loss_gradient,
    flops=4,
    decompose=_split_loss,
    workspace=workspace.contiguous,
)
define(
    "cross_entropy_grad",
    "... v!, ..., ..., ... -> ... v!",
    kernels.cross_entropy_grad,
    infer=lambda operands, attrs: [(operands[0].shape, operands[0].dtype)],
    flops=3,
    linear=((3,),),
    decompose=_split_loss_grad,
    inplace=(0,),
    workspace=workspace.contiguous,
)


def cross_entropy(logits: Any, labels: Any) -> Tensor:
    """-log softmax(logits)[label] for every row.

    Args:
        logits: [..., classes].
        labels: [...], integers in [0, classes).

    Returns:
        [...]; take its mean for a loss.
    """
    loss: Tensor = emit("cross_entropy", logits, labels)[0]
    return loss
