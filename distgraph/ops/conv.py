"""Convolution and pooling in one to three spatial dims, channels first. Batch and channels split by rule.

Spatial dims stay whole: splitting them needs the neighbours' edges. Input channels are summed over, so a
split there leaves a partial result; with groups the split is one of groups, or of what lies inside a single
group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distgraph.errors import GraphError
from distgraph.graph import Op, Value
from distgraph.kernels import conv as kernels
from distgraph.kernels import pool
from distgraph.ops.linear import as_tensors
from distgraph.ops.normalize import require_float
from distgraph.ops.registry import Attrs, GradientContext, Local, Shape, Shapes, define
from distgraph.rule import Rule, bind
from distgraph.tensor import Tensor, emit_one

Grads = Sequence[Tensor | None]

_SPATIAL = ("h! w! u!", "p! q! r!", "i! j! l!")  # of the input, of the output, of the kernel


def _letters(which: int, count: int) -> str:
    return " ".join(_SPATIAL[which].split()[:count])


def _terms(shapes: tuple[Shape, Shape], groups: int) -> tuple[str, str, str, tuple[tuple[str, int], ...]]:
    """Terms of x, w and y, and the sizes of the indices inside composite dims."""
    x, w = shapes
    count = len(x) - 2
    spatial, made, kernel = (_letters(which, count) for which in range(3))
    sizes = (("g", groups), ("c", w[1]), ("o", w[0] // max(1, groups)))
    return f"b (g c) {spatial}", f"(g o) c {kernel}", f"b (g o) {made}", sizes


def _bind(template: str, x: Shape, w: Shape, given: Shapes, results: Shapes, groups: int) -> Rule:
    """A rule from a template with {x} {w} {y}; a term of one group needs no composite dim."""
    first, second, third, sizes = _terms((x, w), groups)
    text = template.format(x=first, w=second, y=third)
    return bind(text, given, results, sizes)


def _options(attrs: Attrs) -> dict[str, Any]:
    return {name: attrs[name] for name in ("stride", "padding", "dilation")}


def _output(x: Shape, w: Shape, attrs: Attrs, what: str = "conv") -> Shape:
    window = kernels.window_of(what, x[2:], w[2:], **_options(attrs))
    return (x[0], w[0], *window.output)


def _infer_conv(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    x, w = operands
    groups = attrs["groups"]
    if not 3 <= len(x.shape) <= 5 or len(w.shape) != len(x.shape):
        raise GraphError(
            f"x is {x.type} and w {w.type}; expected [n, c, 1 to 3 spatial dims] and [o, c / groups, ...]"
        )
    if groups < 1 or x.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise GraphError(
            f"x has {x.shape[1]} channels but w {w.type} with groups={groups} takes {w.shape[1] * groups} "
            f"and must have a multiple of {groups} outputs"
        )
    dtype = require_float(x)
    if w.dtype != dtype:
        raise GraphError(f"x is {x.type} but w is {w.type}; cast one of them with .astype")
    return [(_output(x.shape, w.shape, attrs), dtype)]


def _conv_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    x, w = shapes
    return _bind("{x}, {w} -> {y}", x, w, shapes, (_output(x, w, attrs),), attrs["groups"])


def _grad_input_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    x, w = attrs["input_shape"], shapes[1]
    return _bind("{y}, {w} -> {x}", x, w, shapes, (x,), attrs["groups"])


def _grad_weight_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    x, w = shapes[0], attrs["kernel_shape"]
    return _bind("{x}, {y} -> {w}", x, w, shapes, (w,), attrs["groups"])


def _local_groups(attrs: Attrs, local: Local) -> Attrs:
    start, stop = local.bounds("g")
    return {**attrs, "groups": stop - start}


def _local_input(attrs: Attrs, local: Local) -> Attrs:
    return {**_local_groups(attrs, local), "input_shape": local.result_shapes[0]}


def _local_kernel(attrs: Attrs, local: Local) -> Attrs:
    return {**_local_groups(attrs, local), "kernel_shape": local.result_shapes[0]}


def _flops(y: Shape, w: Shape) -> int:
    """A multiply and an add for every output element and weight of its group."""
    return 2 * math.prod(y) * math.prod(w[1:])


def _conv_gradient(c: GradientContext) -> Grads:
    x, w = c.operands
    return [
        emit_one("conv_grad_input", c.grad, w, input_shape=x.shape, **c.attrs) if c.needs[0] else None,
        emit_one("conv_grad_weight", x, c.grad, kernel_shape=w.shape, **c.attrs) if c.needs[1] else None,
    ]


def _guarded(kernel: Any, empty: Any) -> Any:
    """A kernel that also takes the empty blocks of an uneven split: of no samples or no channels."""

    def run(xp: Any, *arrays: Any, out: Any = None, **attrs: Any) -> Any:
        if all(a.size for a in arrays):
            return kernel(xp, *arrays, out=out, **attrs)
        shape = empty(*(a.shape for a in arrays), attrs)
        if out is None:
            return xp.zeros(shape, arrays[0].dtype)
        out[...] = 0
        return out

    return run


define(
    "conv",
    _conv_rule,
    _guarded(kernels.conv, _output),
    infer=_infer_conv,
    gradient=_conv_gradient,
    flops=lambda op, rule: _flops(op.result.shape, op.operands[1].shape),
    linear=((0,), (1,)),
    localize=_local_groups,
    cost="matmul",
)
define(
    "conv_grad_input",
    _grad_input_rule,
    _guarded(kernels.conv_grad_input, lambda dy, w, attrs: tuple(attrs["input_shape"])),
    infer=lambda operands, attrs: [(tuple(attrs["input_shape"]), operands[0].dtype)],
    flops=lambda op, rule: _flops(op.operands[0].shape, op.operands[1].shape),
    linear=((0,), (1,)),
    localize=_local_input,
    cost="matmul",
)
define(
    "conv_grad_weight",
    _grad_weight_rule,
    _guarded(kernels.conv_grad_weight, lambda x, dy, attrs: tuple(attrs["kernel_shape"])),
    infer=lambda operands, attrs: [(tuple(attrs["kernel_shape"]), operands[0].dtype)],
    flops=lambda op, rule: _flops(op.operands[1].shape, op.result.shape),
    linear=((0,), (1,)),
    localize=_local_kernel,
    cost="matmul",
)


def _pool_output(x: Shape, attrs: Attrs, what: str) -> Shape:
    return (
        *x[:2],
        *kernels.window_of(what, x[2:], attrs["window"], attrs["stride"], attrs["padding"]).output,
    )


def _infer_pool(what: str) -> Any:
    def infer(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
        x = operands[0]
        if not 3 <= len(x.shape) <= 5:
            raise GraphError(f"x is {x.type}; expected [n, c, 1 to 3 spatial dims]")
        return [(_pool_output(x.shape, attrs, what), require_float(x))]

    return infer


def _pool_rule(template: str) -> Any:
    """Rule over b, c and spatial dims that stay whole: x before pooling, y after it."""

    def rule(shapes: Shapes, attrs: Attrs) -> Rule:
        x = attrs.get("input_shape", shapes[0])
        count = len(x) - 2
        text = template.format(x=f"b c {_letters(0, count)}", y=f"b c {_letters(1, count)}")
        result = x if text.rstrip().endswith(_letters(0, count)) else _pool_output(x, attrs, "pool")
        return bind(text, shapes, (result,))

    return rule


def _window_flops(op: Op, rule: Rule) -> int:
    smallest = min(v.size for v in op.operands + op.results)
    window: tuple[int, ...] = op.attrs["window"]
    return smallest * math.prod(window)


def _max_pool_gradient(c: GradientContext) -> Grads:
    return [emit_one("max_pool_grad", c.operands[0], c.results[0], c.grad, **c.attrs)]


def _avg_pool_gradient(c: GradientContext) -> Grads:
    return [emit_one("avg_pool_grad", c.grad, input_shape=c.operands[0].shape, **c.attrs)]


define(
    "max_pool",
    _pool_rule("{x} -> {y}"),
    pool.max_pool,
    infer=_infer_pool("max_pool"),
    gradient=_max_pool_gradient,
    flops=_window_flops,
)
define(
    "max_pool_grad",
    _pool_rule("{x}, {y}, {y} -> {x}"),
    pool.max_pool_grad,
    infer=lambda operands, attrs: [(operands[0].shape, operands[0].dtype)],
    flops=_window_flops,
    linear=((2,),),
)
define(
    "avg_pool",
    _pool_rule("{x} -> {y}"),
    pool.avg_pool,
    infer=_infer_pool("avg_pool"),
    gradient=_avg_pool_gradient,
    flops=_window_flops,
    linear=((0,),),
)
define(
    "avg_pool_grad",
    _pool_rule("{y} -> {x}"),
    pool.avg_pool_grad,
    infer=lambda operands, attrs: [(tuple(attrs["input_shape"]), operands[0].dtype)],
    flops=_window_flops,
    linear=((0,),),
    localize=lambda attrs, local: {**attrs, "input_shape": local.result_shapes[0]},
)


def _pairs(padding: int | Sequence[Any], count: int) -> tuple[tuple[int, int], ...]:
    """Padding as (low, high) a dim, from one number, one number a dim, or pairs."""
    given = (padding,) * count if isinstance(padding, int) else tuple(padding)
    return tuple((p, p) if isinstance(p, int) else (int(p[0]), int(p[1])) for p in given)


def _each(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value)


def conv(
    x: Any,
    w: Any,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[Any] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolution (no flip): x [n, c, *spatial], w [o, c / groups, *kernel] -> [n, o, *output].

    Args:
        stride, dilation: one number, or one a spatial dim.
        padding: zeros on each side: one number, one a dim, or (low, high) a dim.
        groups: output block j sees input block j.
    """
    tensors = as_tensors(x, w)
    count = max(0, tensors[0].ndim - 2)
    sides = {
        "stride": _each(stride, count),
        "padding": _pairs(padding, count),
        "dilation": _each(dilation, count),
    }
    return emit_one("conv", *tensors, groups=int(groups), **sides)


def max_pool(
    x: Any,
    window: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[Any] = 0,
) -> Tensor:
    """Largest element of each window: x [n, c, *spatial] -> [n, c, *output]; stride = window by default."""
    return _pool("max_pool", x, window, stride, padding)


def avg_pool(
    x: Any,
    window: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[Any] = 0,
) -> Tensor:
    """Mean of each window, padding counted as zeros: x [n, c, *spatial] -> [n, c, *output]."""
    return _pool("avg_pool", x, window, stride, padding)


def _pool(kind: str, x: Any, window: Any, stride: Any, padding: Any) -> Tensor:
    (tensor,) = as_tensors(x)
    count = max(0, tensor.ndim - 2)
    size = _each(window, count)
    sides = {"window": size, "stride": size if stride is None else _each(stride, count)}
    return emit_one(kind, tensor, padding=_pairs(padding, count), **sides)
