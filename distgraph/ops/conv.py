"""Convolution and pooling in one to three spatial dims, channels first.

Batch and channels are split by the index rule. Spatial dims slide: for a block of outputs a rank reads the
range of the input that their windows cover, and for a block of the input's gradient the gradients of all
windows that touch it. A rank pads only at the borders of the tensor. Input channels are summed over, so a
split of them leaves a partial result; with groups, either the groups are split or the channels within a
single group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from operator import itemgetter
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.errors.arguments import Count, Size, checked_arguments
from distgraph.ir.dtypes import is_float
from distgraph.ir.graph import Op, Value
from distgraph.ir.index_rule import Rule, bind
from distgraph.ir.op_registry import (
    WIDE,
    Attrs,
    GradientContext,
    Local,
    MatmulDims,
    Patches,
    Shape,
    Shapes,
    Tiles,
    define,
    flops,
)
from distgraph.kernels import conv as kernels
from distgraph.kernels import workspace
from distgraph.kernels._common import store
from distgraph.kernels.windows import pooling
from distgraph.kernels.windows.window import window_of
from distgraph.ops.contraction import as_tensors, product_dtype
from distgraph.ops.normalization import require_float
from distgraph.tracing.tensor import Tensor, emit_one

Grads = Sequence[Tensor | None]

_SLIDING = ("h~", "w~", "u~")  # spatial dims of input and output
_KERNEL = ("i!", "j!", "l!")  # spatial dims of the kernel


def _covered(attrs: Attrs, dim: int, kernel: int, first: int, last: int) -> tuple[int, int]:
    """Positions of the input, padding included, under the windows of outputs first:last of a spatial dim."""
    stride, dilation = attrs["stride"][dim], attrs.get("dilation", (1,) * (dim + 1))[dim]
    low, _ = attrs["padding"][dim]
    return first * stride - low, (last - 1) * stride - low + dilation * (kernel - 1) + 1


def _clipped(start: int, stop: int, length: int) -> tuple[int, int]:
    start = min(max(start, 0), length)
    return start, min(max(stop, start), length)


def _touching(attrs: Attrs, dim: int, kernel: int, outputs: int, start: int, stop: int) -> tuple[int, int]:
    """Outputs whose windows touch positions start:stop of the input.

    Where there are gaps between windows, the window before is included, so that local padding is never
    negative.
    """
    stride = attrs["stride"][dim]
    before, after = _covered(attrs, dim, kernel, 0, 1)
    first = min(-(-(start + 1 - after) // stride), (start - before) // stride)
    return _clipped(first, (stop - 1 - before) // stride + 1, outputs)


def _local_padding(
    attrs: Attrs,
    kernel: Shape,
    split: tuple[bool, ...],
    inputs: tuple[tuple[int, int], ...],
    outputs: tuple[tuple[int, int], ...],
) -> dict[str, Any]:
    """Local padding of a rank that computes `outputs` from `inputs`: (start, stop) for each spatial dim."""
    padding = []
    for dim, pads in enumerate(attrs["padding"]):
        if split[dim]:
            start, stop = _covered(attrs, dim, kernel[dim], *outputs[dim])
            pads = (inputs[dim][0] - start, stop - inputs[dim][1])
        padding.append(pads)
    return {"padding": tuple(padding)}


def _bind(template: str, x: Shape, w: Shape, given: Shapes, results: Shapes, groups: int) -> Rule:
    """A rule from a template with {x} {w} {y}; a term of one group needs no composite dim."""
    count = len(x) - 2
    spatial, kernel = " ".join(_SLIDING[:count]), " ".join(_KERNEL[:count])
    text = template.format(x=f"b (g c) {spatial}", w=f"(g o) c {kernel}", y=f"b (g o) {spatial}")
    return bind(text, given, results, (("g", groups), ("c", w[1]), ("o", w[0] // max(1, groups))))


def _options(attrs: Attrs) -> dict[str, Any]:
    return {name: attrs[name] for name in ("stride", "padding", "dilation")}


def _output(x: Shape, w: Shape, attrs: Attrs) -> Shape:
    window = window_of("conv", x[2:], w[2:], **_options(attrs))
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


def _split(local: Local, tensor: int, *, result: bool) -> tuple[bool, ...]:
    rank = len((local.op.results if result else local.op.operands)[tensor].shape)
    return tuple(local.slides(tensor, dim, result=result) for dim in range(2, rank))


def _window(op: Op) -> Shape:
    """Lengths of the windows on the input, by spatial dim."""
    pooled: Shape | None = op.attrs.get("window")
    return op.operands[1].shape[2:] if pooled is None else pooled


def _reads_input(op: Op, operand: int, dim: int, start: int, stop: int) -> tuple[int, int]:
    window = _window(op)[dim - 2]
    return _clipped(*_covered(op.attrs, dim - 2, window, start, stop), op.operands[0].shape[dim])


def _reads_grad_input(op: Op, operand: int, dim: int, start: int, stop: int) -> tuple[int, int]:
    kernel, outputs = op.operands[1].shape[dim], op.operands[0].shape[dim]
    return _touching(op.attrs, dim - 2, kernel, outputs, start, stop)


def _reads_grad_weight(op: Op, operand: int, dim: int, start: int, stop: int) -> tuple[int, int]:
    if operand == 1:
        return start, stop
    return _clipped(
        *_covered(op.attrs, dim - 2, op.result.shape[dim], start, stop), op.operands[0].shape[dim]
    )


def _local_groups(attrs: Attrs, local: Local) -> Attrs:
    if "groups" not in attrs:
        return attrs
    start, stop = local.bounds("g")
    return {**attrs, "groups": stop - start}


def _local_output(attrs: Attrs, local: Local) -> Attrs:
    outputs, split = local.block(0, result=True)[2:], _split(local, 0, result=True)
    padding = _local_padding(attrs, _window(local.op), split, local.window(0)[2:], outputs)
    return {**_local_groups(attrs, local), **padding}


def _local_input(attrs: Attrs, local: Local) -> Attrs:
    inputs, split = local.block(0, result=True)[2:], _split(local, 0, result=True)
    padding = _not_cut(_local_padding(attrs, _window(local.op), split, inputs, local.window(0)[2:]))
    return {**_local_groups(attrs, local), **padding, "input_shape": local.result_shapes[0]}


def _local_kernel(attrs: Attrs, local: Local) -> Attrs:
    kernel, split = local.op.result.shape[2:], _split(local, 0, result=False)
    padding = _local_padding(attrs, kernel, split, local.window(0)[2:], local.window(1)[2:])
    return {**_local_groups(attrs, local), **padding, "kernel_shape": local.result_shapes[0]}


def _not_cut(padding: dict[str, Any]) -> dict[str, Any]:
    """Replaces negative padding after a block of the input, which may end after its last window, by zero."""
    return {"padding": tuple((low, max(0, high)) for low, high in padding["padding"])}


def _flops(y: Shape, w: Shape) -> int:
    """A multiply and an add for every output element and weight of its group."""
    return 2 * math.prod(y) * math.prod(w[1:])


def _conv_gradient(c: GradientContext) -> Grads:
    x, w = c.operands
    return [
        emit_one("conv_grad_input", c.grad, w, input_shape=x.shape, **c.attrs) if c.needs[0] else None,
        emit_one("conv_grad_weight", x, c.grad, kernel_shape=w.shape, **c.attrs) if c.needs[1] else None,
    ]


def _guarded(kernel: Any, empty: Any, fill: float = 0.0) -> Any:
    """A kernel that also accepts empty blocks, of an uneven split or of outputs that read only padding."""

    @wraps(kernel)
    def run(xp: Any, *arrays: Any, out: Any = None, **attrs: Any) -> Any:
        if all(a.size for a in arrays):
            return kernel(xp, *arrays, out=out, **attrs)
        shape = empty(*(a.shape for a in arrays), attrs)
        if out is None:
            return xp.full(shape, fill, "f4" if attrs.get(WIDE) else arrays[0].dtype)
        out[...] = fill
        return out

    return run


def _windows_in(x: Shape, kernel: Shape, attrs: Attrs) -> Shape:
    """Lengths of the spatial dims of the output for a block of the input, which may be empty."""
    lengths = []
    for dim, (length, (low, high)) in enumerate(zip(x, attrs["padding"], strict=True)):
        start, stop = _covered(attrs, dim, kernel[dim], 0, 1)
        lengths.append(max(0, (length + low + high - (stop - start)) // attrs["stride"][dim] + 1))
    return tuple(lengths)


def _matmul_dims(columns: Callable[[Shape], int]) -> Callable[[Op], MatmulDims]:
    """`OpDef.matmul_dims` of the product of patches whose result has some number of columns."""

    def matmul_dims(op: Op) -> MatmulDims:
        size, n = max(1, op.result.size), max(1, columns(op.result.shape))
        return 1, size // n, n, max(1, round(flops(op) / (2 * size)))

    return matmul_dims


def _patches(op: Op, x: Value, w: Value, y: Value) -> Patches:
    return kernels.patches(op.kind, x.shape, w.shape, y.shape, **_options(op.attrs))


def _tiles(op: Op, x: Value, w: Value, y: Value) -> Tiles:
    narrow = is_float(x.dtype) and x.dtype != "f64"
    groups, options = op.attrs["groups"], _options(op.attrs)
    return kernels.tiles(op.kind, x.shape, w.shape, y.shape, is_f32=narrow, groups=groups, **options)


define(
    "conv",
    _conv_rule,
    _guarded(kernels.conv, lambda x, w, attrs: (x[0], w[0], *_windows_in(x[2:], w[2:], attrs))),
    infer=_infer_conv,
    gradient=_conv_gradient,
    flops=lambda op, rule: _flops(op.result.shape, op.operands[1].shape),
    linear=((0,), (1,)),
    reads=_reads_input,
    localize=_local_output,
    cost="matmul",
    matmul_dims=_matmul_dims(itemgetter(1)),
    patches=lambda op: _patches(op, op.operands[0], op.operands[1], op.result),
    tiles=lambda op: _tiles(op, op.operands[0], op.operands[1], op.result),
    workspace=workspace.conv,
)
define(
    "conv_grad_input",
    _grad_input_rule,
    _guarded(kernels.conv_grad_input, lambda dy, w, attrs: tuple(attrs["input_shape"])),
    infer=lambda operands, attrs: [(tuple(attrs["input_shape"]), operands[0].dtype)],
    flops=lambda op, rule: _flops(op.operands[0].shape, op.operands[1].shape),
    linear=((0,), (1,)),
    reads=_reads_grad_input,
    localize=_local_input,
    cost="matmul",
    matmul_dims=_matmul_dims(itemgetter(1)),
    patches=lambda op: _patches(op, op.result, op.operands[1], op.operands[0]),
    tiles=lambda op: _tiles(op, op.result, op.operands[1], op.operands[0]),
    workspace=workspace.conv_grad_input,
)
define(
    "conv_grad_weight",
    _grad_weight_rule,
    _guarded(kernels.conv_grad_weight, lambda x, dy, attrs: tuple(attrs["kernel_shape"])),
    infer=lambda operands, attrs: [(tuple(attrs["kernel_shape"]), product_dtype(operands[0].dtype, attrs))],
    flops=lambda op, rule: _flops(op.operands[1].shape, op.result.shape),
    linear=((0,), (1,)),
    reads=_reads_grad_weight,
    localize=_local_kernel,
    cost="matmul",
    matmul_dims=_matmul_dims(lambda shape: math.prod(shape[1:])),
    patches=lambda op: _patches(op, op.operands[0], op.result, op.operands[1]),
    tiles=lambda op: _tiles(op, op.operands[0], op.result, op.operands[1]),
    workspace=workspace.conv_grad_weight,
    wide=True,
)


def _pool_output(x: Shape, attrs: Attrs, what: str) -> Shape:
    steps = {"stride": attrs["stride"], "padding": attrs["padding"]}
    return (*x[:2], *window_of(what, x[2:], attrs["window"], **steps).output)


def _infer_pool(what: str) -> Any:
    def infer(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
        x = operands[0]
        if not 3 <= len(x.shape) <= 5:
            raise GraphError(f"x is {x.type}; expected [n, c, 1 to 3 spatial dims]")
        return [(_pool_output(x.shape, attrs, what), require_float(x))]

    return infer


def _pool_rule(operands: int, *, grows: bool) -> Any:
    """Rule over b, c and sliding spatial dims; `grows`: the result is of the input's shape."""

    def rule(shapes: Shapes, attrs: Attrs) -> Rule:
        x = attrs.get("input_shape", shapes[0])
        term = f"b c {' '.join(_SLIDING[: len(x) - 2])}"
        result = x if grows else _pool_output(x, attrs, "pool")
        return bind(f"{', '.join([term] * operands)} -> {term}", shapes, (result,))

    return rule


def _reads_pool_grad(op: Op, operand: int, dim: int, start: int, stop: int) -> tuple[int, int]:
    """Range of an operand for a block of the input: outputs with windows on it, or the input below them."""
    window, outputs = op.attrs["window"][dim - 2], op.operands[-1].shape[dim]
    first, last = _touching(op.attrs, dim - 2, window, outputs, start, stop)
    if operand == len(op.operands) - 1 or operand == 1:
        return first, last  # operands x, y, dy of max pooling, dy of average pooling
    if first == last:
        return start, stop
    low, high = _covered(op.attrs, dim - 2, window, first, last)
    return _clipped(min(start, low), max(stop, high), op.operands[0].shape[dim])


def _local_max_grad(attrs: Attrs, local: Local) -> Attrs:
    inputs, split = local.window(0)[2:], _split(local, 0, result=True)
    if not any(split):
        return attrs
    padding = _local_padding(attrs, attrs["window"], split, inputs, local.window(1)[2:])
    blocks = local.block(0, result=True)[2:]
    windows = tuple((a - start, b - start) for (a, b), (start, _) in zip(blocks, inputs, strict=True))
    return {**attrs, **_not_cut(padding), "kept": windows}


def _max_pool_grad(xp: Any, x: Any, y: Any, dy: Any, out: Any = None, kept: Any = None, **attrs: Any) -> Any:
    """`pool.max_pool_grad`; of a block with a halo only the positions `kept`, (start, stop) a spatial dim."""
    if kept is None:
        return pooling.max_pool_grad(xp, x, y, dy, out=out, **attrs)
    index = (slice(None), slice(None), *(slice(a, b) for a, b in kept))
    block = pooling.max_pool_grad(xp, x, y, dy, **attrs)[index]
    return xp.ascontiguousarray(block) if out is None else store(xp, block, out)


def _kept_shape(x: Shape, y: Shape, dy: Shape, attrs: Attrs) -> Shape:
    return (*x[:2], *(b - a for a, b in attrs["kept"])) if "kept" in attrs else x


def _pooled(x: Shape, attrs: Attrs) -> Shape:
    return (*x[:2], *_windows_in(x[2:], attrs["window"], attrs))


def _window_flops(op: Op, rule: Rule) -> int:
    smallest = min(v.size for v in op.operands + op.results)
    window: tuple[int, ...] = op.attrs["window"]
    return smallest * math.prod(window)


define(
    "max_pool",
    _pool_rule(1, grows=False),
    _guarded(pooling.max_pool, _pooled, -math.inf),
    infer=_infer_pool("max_pool"),
    gradient=lambda c: [emit_one("max_pool_grad", c.operands[0], c.results[0], c.grad, **c.attrs)],
    flops=_window_flops,
    reads=_reads_input,
    localize=_local_output,
    workspace=workspace.padding,
)
define(
    "max_pool_grad",
    _pool_rule(3, grows=True),
    _guarded(_max_pool_grad, _kept_shape),
    infer=lambda operands, attrs: [(operands[0].shape, operands[0].dtype)],
    flops=_window_flops,
    linear=((2,),),
    reads=_reads_pool_grad,
    localize=_local_max_grad,
    workspace=workspace.max_pool_grad,
)
define(
    "avg_pool",
    _pool_rule(1, grows=False),
    _guarded(pooling.avg_pool, _pooled),
    infer=_infer_pool("avg_pool"),
    gradient=lambda c: [emit_one("avg_pool_grad", c.grad, input_shape=c.operands[0].shape, **c.attrs)],
    flops=_window_flops,
    linear=((0,),),
    reads=_reads_input,
    localize=_local_output,
    workspace=workspace.padding,
)
define(
    "avg_pool_grad",
    _pool_rule(1, grows=True),
    _guarded(pooling.avg_pool_grad, lambda dy, attrs: tuple(attrs["input_shape"])),
    infer=lambda operands, attrs: [(tuple(attrs["input_shape"]), operands[0].dtype)],
    flops=_window_flops,
    linear=((0,),),
    reads=_reads_pool_grad,
    localize=_local_input,
    workspace=workspace.avg_pool_grad,
)


Padding = Size | Sequence[Size | tuple[Size, Size]]
"""Zeros on each side: one number, one a dim, or a (low, high) pair a dim."""


def pairs_of(padding: int | Sequence[Any], count: int) -> tuple[tuple[int, int], ...]:
    """Padding as (low, high) a dim, from one number, one number a dim, or pairs."""
    values = (padding,) * count if isinstance(padding, (int, np.integer)) else tuple(padding)
    pairs = ((p, p) if isinstance(p, (int, np.integer)) else p for p in values)
    return tuple((int(low), int(high)) for low, high in pairs)


def _each(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(map(int, (value,) * count if isinstance(value, (int, np.integer)) else value))


@checked_arguments()
def conv(
    x: Any,
    w: Any,
    stride: Count | Sequence[Count] = 1,
    padding: Padding = 0,
    dilation: Count | Sequence[Count] = 1,
    groups: Count = 1,
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
        "padding": pairs_of(padding, count),
        "dilation": _each(dilation, count),
    }
    return emit_one("conv", *tensors, groups=int(groups), **sides)


@checked_arguments()
def max_pool(
    x: Any,
    window: Count | Sequence[Count],
    stride: Count | Sequence[Count] | None = None,
    padding: Padding = 0,
) -> Tensor:
    """Largest element of each window: x [n, c, *spatial] -> [n, c, *output]; stride = window by default."""
    return _pool("max_pool", x, window, stride, padding)


@checked_arguments()
def avg_pool(
    x: Any,
    window: Count | Sequence[Count],
    stride: Count | Sequence[Count] | None = None,
    padding: Padding = 0,
) -> Tensor:
    """Mean of each window, padding counted as zeros: x [n, c, *spatial] -> [n, c, *output]."""
    return _pool("avg_pool", x, window, stride, padding)


def _pool(kind: str, x: Any, window: Any, stride: Any, padding: Any) -> Tensor:
    (tensor,) = as_tensors(x)
    count = max(0, tensor.ndim - 2)
    size = _each(window, count)
    sides = {"window": size, "stride": size if stride is None else _each(stride, count)}
    return emit_one(kind, tensor, padding=pairs_of(padding, count), **sides)
