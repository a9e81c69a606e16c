"""Ops that need a whole dim at once: softmax, log-softmax, layer norm, rms norm, and their gradients.

Each is one fused kernel while the dim it normalises is whole. Where that dim is split, `decompose` replaces
the op by primitive ops, so that ranks reduce only row statistics and never gather the tensor itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distgraph.errors import GraphError
from distgraph.errors.arguments import NonNegative, checked_arguments
from distgraph.ir.dtypes import is_float
from distgraph.ir.graph import Value
from distgraph.ir.index_rule import Rule, make_rule, term_of
from distgraph.ir.op_registry import Attrs, GradientContext, Shape, Shapes, define
from distgraph.kernels import norm as kernels
from distgraph.kernels import softmax as softmax_kernels
from distgraph.kernels import workspace
from distgraph.ops.reduction import dims_of
from distgraph.tracing.tensor import Tensor, emit, emit_one

Grads = Sequence[Tensor | None]


def require_float(value: Value) -> str:
    """Dtype of an operand that must be floating. Raises GraphError otherwise."""
    if not is_float(value.dtype):
        raise GraphError(f"%{value.name} is {value.type} but must be floating; cast it first with .astype")
    return value.dtype


def widened(x: Tensor) -> Tensor:
    """The tensor in float32 if it is of half precision, as the fused kernels compute; else unchanged."""
    return x.astype("f32") if x.dtype in ("f16", "bf16") else x


def narrowed(x: Tensor, like: Tensor) -> Tensor:
    """The tensor cast to the dtype of another tensor."""
    return x if x.dtype == like.dtype else x.astype(like.dtype)


def total(x: Tensor, dims: Sequence[int], keepdims: bool = True) -> Tensor:
    """Sum over dims; the tensor itself without an op where there is no dim to sum over."""
    return emit_one("reduce_sum", x, dims=tuple(dims), keepdims=keepdims) if dims else x


def expand(x: Tensor) -> Tensor:
    """The tensor with a last dim of length 1 added."""
    return emit_one("reshape", x, shape=(*x.shape, 1))


def squeeze(x: Tensor) -> Tensor:
    """The tensor without its last dim, which has length 1."""
    return emit_one("reshape", x, shape=x.shape[:-1])


def _along_axis(shapes: Shapes, attrs: Attrs) -> Rule:
    term, sizes = term_of(shapes[0])
    whole = set(term[attrs["axis"]])
    return make_rule("i.. k! -> i.. k!", (term,) * len(shapes), (term,), sizes, whole)


def _infer_along_axis(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    first = operands[0]
    axis = attrs["axis"]
    if not 0 <= axis < len(first.shape):
        raise GraphError(f"axis is {axis} but %{first.name} {first.type} has {len(first.shape)} dims")
    for other in operands[1:]:
        if other.shape != first.shape:
            raise GraphError(f"shapes {first.shape} and {other.shape} differ")
    return [(first.shape, require_float(first))]


def _exponentials(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """exp(x - max) and x - max along an axis."""
    shifted = x - emit_one("reduce_max", x, dims=(axis,), keepdims=True)
    return emit_one("exp", shifted), shifted


def _split_softmax(attrs: Attrs, x: Tensor) -> Tensor:
    e, _ = _exponentials(widened(x), attrs["axis"])
    return narrowed(e / total(e, (attrs["axis"],)), x)


def _split_softmax_grad(attrs: Attrs, y: Tensor, dy: Tensor) -> Tensor:
    wide, grad = widened(y), widened(dy)
    return narrowed(wide * (grad - total(wide * grad, (attrs["axis"],))), y)


def _split_log_softmax(attrs: Attrs, x: Tensor) -> Tensor:
    e, shifted = _exponentials(widened(x), attrs["axis"])
    return narrowed(shifted - emit_one("log", total(e, (attrs["axis"],))), x)


def _split_log_softmax_grad(attrs: Attrs, y: Tensor, dy: Tensor) -> Tensor:
    grad = widened(dy)
    return narrowed(grad - emit_one("exp", widened(y)) * total(grad, (attrs["axis"],)), y)


def _gradient_from_result(kind: str) -> Callable[[GradientContext], Grads]:
    def gradient(c: GradientContext) -> Grads:
        return [emit_one(kind, c.results[0], c.grad, **c.attrs)]

    return gradient


def _define_softmax(name: str, forward: Any, backward: Any) -> None:
    define(
        name,
        _along_axis,
        getattr(softmax_kernels, name),
        infer=_infer_along_axis,
        gradient=_gradient_from_result(f"{name}_grad"),
        flops=5,
        decompose=forward,
        inplace=(0,),
        workspace=workspace.contiguous if name == "softmax" else workspace.logarithmic_softmax,
    )
    define(
        f"{name}_grad",
        _along_axis,
        getattr(softmax_kernels, f"{name}_grad"),
        infer=_infer_along_axis,
        flops=4,
        linear=((1,),),
        decompose=backward,
        inplace=(0, 1),
        workspace=workspace.softmax_grad if name == "softmax" else workspace.logarithmic_softmax,
    )


_define_softmax("softmax", _split_softmax, _split_softmax_grad)
_define_softmax("log_softmax", _split_log_softmax, _split_log_softmax_grad)


def _axis_of(tensor: Tensor, axis: int) -> int:
    return dims_of(axis, max(tensor.ndim, 1))[0]


@checked_arguments()
def softmax(x: Any, axis: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along an axis."""
    tensor = emit_one("identity", x) if not isinstance(x, Tensor) else x
    return emit_one("softmax", tensor, axis=_axis_of(tensor, axis))


@checked_arguments()
def log_softmax(x: Any, axis: int = -1) -> Tensor:
    """Logarithm of `softmax`, without its rounding."""
    tensor = emit_one("identity", x) if not isinstance(x, Tensor) else x
    return emit_one("log_softmax", tensor, axis=_axis_of(tensor, axis))


def _infer_rows(weights: int, statistics: int) -> Callable[[Sequence[Value], Attrs], list[tuple[Shape, str]]]:
    def infer(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
        x = operands[0]
        dtype = require_float(x)
        for w in operands[1 : 1 + weights]:
            if not x.shape or w.shape != x.shape[-1:]:
                raise GraphError(
                    f"weight is {w.type} but x is {x.type}; the weight has the length of the last dim of x"
                )
        return [(x.shape, dtype)] + [(x.shape[:-1], dtype)] * statistics

    return infer


def _infer_rows_grad(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    x, w = operands[1], operands[2]
    return [(x.shape, x.dtype), (w.shape, w.dtype), (w.shape, w.dtype)]


def _only_first(c: GradientContext, kind: str) -> Tensor:
    if c.grads[0] is None or any(g is not None for g in c.grads[1:]):
        raise GraphError(
            f"row statistics of {kind} have no gradient; compute them with mean and var where one is needed"
        )
    return c.grads[0]


def _over_rows(x: Tensor) -> Tensor:
    """Sum over all dims but the last; always a new value, also where there is no dim to sum over."""
    return total(x, range(x.ndim - 1), keepdims=False) if x.ndim > 1 else emit_one("identity", x)


def _split_layer_norm(attrs: Attrs, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    wide, last = widened(x), (x.ndim - 1,)
    mean = total(wide, last) * (1 / x.shape[-1])
    centred = wide - mean
    variance = total(emit_one("square", centred), last) * (1 / x.shape[-1])
    rstd = emit_one("rsqrt", variance + attrs.get("eps", 1e-5))
    y = centred * rstd * w + b
    return narrowed(y, x), narrowed(squeeze(mean), x), narrowed(squeeze(rstd), x)


def _split_layer_norm_grad(
    attrs: Attrs, dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, ...]:
    grad, last, share = widened(dy), (x.ndim - 1,), 1 / x.shape[-1]
    scale = expand(widened(rstd))
    h = (widened(x) - expand(widened(mean))) * scale
    g = grad * w
    dx = scale * (g - total(g, last) * share - h * (total(g * h, last) * share))
    return narrowed(dx, x), narrowed(_over_rows(grad * h), w), narrowed(_over_rows(grad), w)


def _layer_norm_gradient(c: GradientContext) -> Grads:
    x, w, _ = c.operands
    _, mean, rstd = c.results
    grads: Grads = emit("layer_norm_grad", _only_first(c, "layer_norm"), x, w, mean, rstd)
    return grads


define(
    "layer_norm",
    "... k!, k!, k! -> ... k!, ..., ...",
    kernels.layer_norm,
    infer=_infer_rows(2, 2),
    gradient=_layer_norm_gradient,
    flops=8,
    decompose=_split_layer_norm,
    inplace=(0,),
    workspace=workspace.contiguous,
)
define(
    "layer_norm_grad",
    "... k!, ... k!, k!, ..., ... -> ... k!, k!, k!",
    kernels.layer_norm_grad,
    infer=_infer_rows_grad,
    flops=14,
    linear=((0,),),
    decompose=_split_layer_norm_grad,
    inplace=(0, 1),
    workspace=workspace.contiguous,
)


@checked_arguments()
def layer_norm(x: Any, w: Any, b: Any, eps: NonNegative = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * w + b over the last dim. x [..., n], w [n], b [n]."""
    y: Tensor = emit("layer_norm", x, w, b, eps=eps)[0]
    return y


def _split_rms_norm(attrs: Attrs, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    wide = widened(x)
    square = total(emit_one("square", wide), (x.ndim - 1,)) * (1 / x.shape[-1])
    rstd = emit_one("rsqrt", square + attrs.get("eps", 1e-6))
    return narrowed(wide * rstd * w, x), narrowed(squeeze(rstd), x)


def _split_rms_norm_grad(attrs: Attrs, dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
    grad, scale = widened(dy), expand(widened(rstd))
    h = widened(x) * scale
    g = grad * w
    dx = scale * (g - h * (total(g * h, (x.ndim - 1,)) * (1 / x.shape[-1])))
    return narrowed(dx, x), narrowed(_over_rows(grad * h), w)


def _rms_norm_gradient(c: GradientContext) -> Grads:
    x, w = c.operands
    grads: Grads = emit("rms_norm_grad", _only_first(c, "rms_norm"), x, w, c.results[1])
    return grads


define(
    "rms_norm",
    "... k!, k! -> ... k!, ...",
    kernels.rms_norm,
    infer=_infer_rows(1, 1),
    gradient=_rms_norm_gradient,
    flops=5,
    decompose=_split_rms_norm,
    inplace=(0,),
    workspace=workspace.contiguous,
)
define(
    "rms_norm_grad",
    "... k!, ... k!, k!, ... -> ... k!, k!",
    kernels.rms_norm_grad,
    infer=lambda operands, attrs: _infer_rows_grad(operands, attrs)[:2],
    flops=10,
    linear=((0,),),
    decompose=_split_rms_norm_grad,
    inplace=(0, 1),
    workspace=workspace.contiguous,
)


@checked_arguments()
def rms_norm(x: Any, w: Any, eps: NonNegative = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * w over the last dim. x [..., n], w [n]."""
    y: Tensor = emit("rms_norm", x, w, eps=eps)[0]
    return y
