"""Shape ops: reshape, transpose, broadcast, slice, pad, concat, flip, roll."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.errors.arguments import Size, checked_arguments
from distgraph.ir.graph import Op, Value
from distgraph.ir.index_rule import Rule, make_rule, reshape_rule, term_of
from distgraph.ir.op_registry import (
    Attrs,
    GradientContext,
    Kernel,
    Local,
    RuleFunction,
    Shape,
    Shapes,
    define,
)
from distgraph.ops.contraction import as_tensors, reshape_to
from distgraph.tracing.tensor import Tensor, emit_one

Grads = Sequence[Tensor | None]


def _local_result(attrs: Attrs, local: Local) -> Attrs:
    return {**attrs, "shape": local.result_shapes[0]}


def _define_move(name: str, rule: RuleFunction, kernel: Kernel, **fields: Any) -> None:
    """Declare an op that only moves elements; linear in operand 0 unless declared otherwise."""
    define(name, rule, kernel, **{"flops": 0, "linear": ((0,),), **fields})


def _sliding_rule(kind: str, shape: Shape, sliding: set[str]) -> Rule:
    """Rule of an op of one operand whose result has the same dims, some of which slide."""
    term, sizes = term_of(shape)
    return make_rule(kind, (term,), (term,), sizes, sliding=sliding)


# reshape


def _infer_reshape(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    shape = tuple(attrs["shape"])
    if math.prod(shape) != operands[0].size:
        raise GraphError(
            f"{operands[0].type} has {operands[0].size} elements but shape {shape} {math.prod(shape)}"
        )
    return [(shape, operands[0].dtype)]


def _reshape_kernel(xp: Any, x: Any, out: Any = None, *, shape: Shape) -> Any:
    return x.reshape(shape)


_define_move(
    "reshape",
    lambda shapes, attrs: reshape_rule(shapes[0], tuple(attrs["shape"])),
    _reshape_kernel,
    infer=_infer_reshape,
    gradient=lambda c: [emit_one("reshape", c.grad, shape=c.operands[0].shape)],
    localize=_local_result,
    view="contiguous",
)


# transpose, broadcast


def _transpose_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    term, sizes = term_of(shapes[0])
    return make_rule("transpose", (term,), (tuple(term[d] for d in attrs["order"]),), sizes)


def _infer_transpose(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    order, shape = attrs["order"], operands[0].shape
    if sorted(order) != list(range(len(shape))):
        raise GraphError(
            f"order {tuple(order)} is no permutation of the {len(shape)} dims of {operands[0].type}"
        )
    return [(tuple(shape[d] for d in order), operands[0].dtype)]


def _transpose_kernel(xp: Any, x: Any, out: Any = None, *, order: tuple[int, ...]) -> Any:
    return x.transpose(order)


def _transpose_gradient(c: GradientContext) -> Grads:
    return [emit_one("transpose", c.grad, order=tuple(int(d) for d in np.argsort(c.attrs["order"])))]


_define_move(
    "transpose",
    _transpose_rule,
    _transpose_kernel,
    infer=_infer_transpose,
    gradient=_transpose_gradient,
    view="strided",
)


def _broadcast_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    operand_shape, shape = shapes[0], tuple(attrs["shape"])
    term, sizes = term_of(shape)
    skip = len(shape) - len(operand_shape)
    operand = tuple(term[skip + d] if n == shape[skip + d] else () for d, n in enumerate(operand_shape))
    return make_rule("broadcast_to", (operand,), (term,), sizes)


def _infer_broadcast(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    operand_shape, shape = operands[0].shape, tuple(attrs["shape"])
    tail = shape[len(shape) - len(operand_shape) :]
    if len(operand_shape) > len(shape) or any(
        n not in (1, m) for n, m in zip(operand_shape, tail, strict=True)
    ):
        raise GraphError(f"{operands[0].type} does not broadcast to shape {shape}")
    return [(shape, operands[0].dtype)]


def _broadcast_kernel(xp: Any, x: Any, out: Any = None, *, shape: Shape) -> Any:
    return xp.broadcast_to(x, shape)


def _broadcast_gradient(c: GradientContext) -> Grads:
    x, shape = c.operands[0], c.grad.shape
    skip = len(shape) - x.ndim
    dims = tuple(d for d, n in enumerate(shape) if d < skip or (x.shape[d - skip] == 1 and n != 1))
    summed = emit_one("reduce_sum", c.grad, dims=dims, keepdims=False) if dims else c.grad
    return [reshape_to(summed, x.shape)]


_define_move(
    "broadcast_to",
    _broadcast_rule,
    _broadcast_kernel,
    infer=_infer_broadcast,
    gradient=_broadcast_gradient,
    localize=_local_result,
    view="strided",
)


# slice, pad


def _cut(shape: Shape, attrs: Attrs) -> tuple[bool, ...]:
    """For each dim whether the slice omits any element."""
    parts = zip(attrs["starts"], attrs["stops"], attrs["strides"], shape, strict=True)
    return tuple((start, stop, stride) != (0, n, 1) for start, stop, stride, n in parts)


def _slice_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    term, sizes = term_of(shapes[0])
    parts = zip(attrs["starts"], attrs["stops"], attrs["strides"], sizes, strict=True)
    made = {index: -(-(stop - start) // stride) for start, stop, stride, index in parts}
    sliding = {index for cut, (index,) in zip(_cut(shapes[0], attrs), term, strict=True) if cut}
    return make_rule("slice", (term,), (term,), made, sliding=sliding)


def _reads_slice(op: Op, operand: int, dim: int, start: int, stop: int) -> tuple[int, int]:
    first, stride = op.attrs["starts"][dim], op.attrs["strides"][dim]
    return first + start * stride, first + (stop - 1) * stride + 1


def _infer_slice(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    lengths = []
    for d, n in enumerate(operands[0].shape):
        start, stop, stride = attrs["starts"][d], attrs["stops"][d], attrs["strides"][d]
        if not 0 <= start <= stop <= n or stride < 1:
            raise GraphError(f"slice {start}:{stop}:{stride} does not fit dim {d} of {operands[0].type}")
        lengths.append(-(-(stop - start) // stride))
    return [(tuple(lengths), operands[0].dtype)]


def _slice_kernel(xp: Any, x: Any, out: Any = None, *, starts: Shape, stops: Shape, strides: Shape) -> Any:
    return x[tuple(map(slice, starts, stops, strides))]


def _slice_gradient(c: GradientContext) -> Grads:
    shape, starts, strides = c.operands[0].shape, c.attrs["starts"], c.attrs["strides"]
    covered = [
        start + (n - 1) * s + 1 if n else start
        for start, n, s in zip(starts, c.grad.shape, strides, strict=True)
    ]
    high = tuple(n - end for n, end in zip(shape, covered, strict=True))
    interior = tuple(s - 1 for s in strides)
    return [emit_one("pad", c.grad, low=tuple(starts), high=high, interior=interior, value=0)]


def _localize_slice(attrs: Attrs, local: Local) -> Attrs:
    """Local bounds of a slice: a rank already reads only the sliced range of dims that are split."""
    cut = _cut(local.op.operands[0].shape, attrs)
    local_shape = local.operand_shapes[0]
    cuts = [c and not local.slides(0, dim, result=True) for dim, c in enumerate(cut)]
    starts = tuple(start if c else 0 for c, start in zip(cuts, attrs["starts"], strict=True))
    stops = tuple(stop if c else n for c, stop, n in zip(cuts, attrs["stops"], local_shape, strict=True))
    return {**attrs, "starts": starts, "stops": stops}


_define_move(
    "slice",
    _slice_rule,
    _slice_kernel,
    infer=_infer_slice,
    gradient=_slice_gradient,
    reads=_reads_slice,
    localize=_localize_slice,
    view="strided",
)


def _pad_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    parts = zip(attrs["low"], attrs["high"], attrs["interior"], strict=True)
    return _sliding_rule("pad", shapes[0], {f"i{d}" for d, sides in enumerate(parts) if any(sides)})


def _reads_pad(op: Op, operand: int, dim: int, start: int, stop: int) -> tuple[int, int]:
    low, step, length = op.attrs["low"][dim], op.attrs["interior"][dim] + 1, op.operands[0].shape[dim]
    first = min(max(0, -((low - start) // step)), length)
    return first, min(max(first, -((low - stop) // step)), length)


def _localize_pad(attrs: Attrs, local: Local) -> Attrs:
    """Local padding: the positions of the rank's block before the first and after the last that it reads."""
    low, high = list(attrs["low"]), list(attrs["high"])
    block = local.block(0, result=True)
    for dim, (first, last) in enumerate(local.window(0)):
        if not local.slides(0, dim, result=True):
            continue
        (start, stop), step = block[dim], attrs["interior"][dim] + 1
        if first == last:
            low[dim], high[dim] = stop - start, 0
        else:
            high[dim] = stop - 1 - (low[dim] + (last - 1) * step)
            low[dim] += first * step - start
    return {**attrs, "low": tuple(low), "high": tuple(high)}


def _infer_pad(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    low, high, interior, shape = attrs["low"], attrs["high"], attrs["interior"], operands[0].shape
    if not len(low) == len(high) == len(interior) == len(shape):
        raise GraphError(f"pad of {operands[0].type} needs low, high and interior for {len(shape)} dims each")
    if min((*low, *high, *interior), default=0) < 0:
        raise GraphError(
            f"pad of {operands[0].type} by low {low}, high {high}, interior {interior} is negative"
        )
    lengths = (a + n + max(n - 1, 0) * i + b for a, n, i, b in zip(low, shape, interior, high, strict=True))
    return [(tuple(lengths), operands[0].dtype)]


def _pad_kernel(
    xp: Any, x: Any, out: Any = None, *, low: Shape, high: Shape, interior: Shape, value: float
) -> Any:
    lengths = [a + n + max(n - 1, 0) * i + b for a, n, i, b in zip(low, x.shape, interior, high, strict=True)]
    result = xp.empty(lengths, x.dtype) if out is None else out
    result[...] = value
    where = tuple(
        slice(a, a + n * (i + 1) - i if n else a, i + 1)
        for a, n, i in zip(low, x.shape, interior, strict=True)
    )
    result[where] = x
    return result


def _pad_gradient(c: GradientContext) -> Grads:
    low, high, interior = c.attrs["low"], c.attrs["high"], c.attrs["interior"]
    stops = tuple(n - b for n, b in zip(c.grad.shape, high, strict=True))
    return [emit_one("slice", c.grad, starts=tuple(low), stops=stops, strides=tuple(i + 1 for i in interior))]


_define_move(
    "pad",
    _pad_rule,
    _pad_kernel,
    infer=_infer_pad,
    gradient=_pad_gradient,
    linear=lambda count, attrs: ((0,),) if attrs["value"] == 0 else (),
    reads=_reads_pad,
    localize=_localize_pad,
)


# concat, flip


@lru_cache(maxsize=4096)
def _together(count: int) -> tuple[tuple[int, ...], ...]:
    """The linear group of all operands; cached, since it is needed for every operand."""
    return (tuple(range(count)),)


def _concat_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    term, sizes = term_of(shapes[0])
    joined = f"i{attrs['dim']}"
    sizes[joined] = min(shape[attrs["dim"]] for shape in shapes)
    return make_rule("concat", (term,) * len(shapes), (term,), sizes, sliding={joined})


def _reads_concat(op: Op, operand: int, dim: int, start: int, stop: int) -> tuple[int, int]:
    before = sum(v.shape[dim] for v in op.operands[:operand])
    length = op.operands[operand].shape[dim]
    first = min(max(0, start - before), length)
    return first, min(max(first, stop - before), length)


def _infer_concat(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    dim, first = attrs["dim"], operands[0]
    for value in operands[1:]:
        if value.dtype != first.dtype:
            raise GraphError(f"{first.type} and {value.type} have two dtypes; cast one of them with .astype")
        others = (first.shape[:dim] + first.shape[dim + 1 :], value.shape[:dim] + value.shape[dim + 1 :])
        if len(value.shape) != len(first.shape) or others[0] != others[1]:
            raise GraphError(
                f"{first.type} and {value.type} differ in a dim other than {dim}, along which they join"
            )
    total = sum(value.shape[dim] for value in operands)
    return [((*first.shape[:dim], total, *first.shape[dim + 1 :]), first.dtype)]


def _concat_kernel(xp: Any, *arrays: Any, out: Any = None, dim: int) -> Any:
    return xp.concatenate(arrays, axis=dim, out=out)


def _concat_gradient(c: GradientContext) -> Grads:
    dim, start, grads = c.attrs["dim"], 0, []
    for x in c.operands:
        starts = tuple(start if d == dim else 0 for d in range(x.ndim))
        stops = tuple(start + x.shape[dim] if d == dim else n for d, n in enumerate(x.shape))
        grads.append(emit_one("slice", c.grad, starts=starts, stops=stops, strides=(1,) * x.ndim))
        start += x.shape[dim]
    return grads


_define_move(
    "concat",
    _concat_rule,
    _concat_kernel,
    infer=_infer_concat,
    gradient=_concat_gradient,
    linear=lambda count, attrs: _together(count),
    reads=_reads_concat,
)


def _reads_flip(op: Op, operand: int, dim: int, start: int, stop: int) -> tuple[int, int]:
    length = op.operands[0].shape[dim]
    return length - stop, length - start


def _flip_kernel(xp: Any, x: Any, out: Any = None, *, dims: tuple[int, ...]) -> Any:
    return xp.flip(x, dims)


_define_move(
    "flip",
    lambda shapes, attrs: _sliding_rule("flip", shapes[0], {f"i{d}" for d in attrs["dims"]}),
    _flip_kernel,
    gradient=lambda c: [emit_one("flip", c.grad, dims=c.attrs["dims"])],
    reads=_reads_flip,
    view="strided",
)


def _reads_roll(op: Op, operand: int, dim: int, start: int, stop: int) -> tuple[int, int]:
    return start - op.attrs["shift"], stop - op.attrs["shift"]  # wraps around


def _localize_roll(attrs: Attrs, local: Local) -> Attrs:
    """Local shift: 0 on split dims, of which the rank reads the shifted range."""
    return {**attrs, "shift": 0} if local.slides(0, attrs["dim"], result=True) else attrs


def _roll_kernel(xp: Any, x: Any, out: Any = None, *, shift: int, dim: int) -> Any:
    if out is None:
        return xp.roll(x, shift, dim)
    front, offset = (slice(None),) * dim, shift % max(1, x.shape[dim])
    out[(*front, slice(offset, None))] = x[(*front, slice(0, x.shape[dim] - offset))]
    out[(*front, slice(0, offset))] = x[(*front, slice(x.shape[dim] - offset, None))]
    return out


_define_move(
    "roll",
    lambda shapes, attrs: _sliding_rule("roll", shapes[0], {f"i{attrs['dim']}"}),
    _roll_kernel,
    infer=lambda operands, attrs: [(operands[0].shape, operands[0].dtype)],
    gradient=lambda c: [emit_one("roll", c.grad, shift=-c.attrs["shift"], dim=c.attrs["dim"])],
    reads=_reads_roll,
    localize=_localize_roll,
)


# public functions of the ops above; composed ones are in distgraph.ops.manipulation


@checked_arguments()
def reshape(x: Any, shape: int | Sequence[int]) -> Tensor:
    """Same elements in row-major order; one length may be -1. Raises GraphError when the sizes differ."""
    (tensor,) = as_tensors(x)
    lengths = [int(n) for n in ((shape,) if isinstance(shape, (int, np.integer)) else shape)]
    if lengths.count(-1) > 1:
        raise GraphError(f"shape {tuple(lengths)} leaves two lengths open; give one of them")
    if -1 in lengths:
        product = -math.prod(lengths)
        if product == 0 or tensor.size % product:
            raise GraphError(
                f"{tensor.value.type} has {tensor.size} elements, no multiple of {product} ({tuple(lengths)})"
            )
        lengths[lengths.index(-1)] = tensor.size // product
    return reshape_to(tensor, tuple(lengths))


@checked_arguments()
def transpose(x: Any, order: Sequence[int] | None = None) -> Tensor:
    """Dims in another order; reversed by default."""
    (tensor,) = as_tensors(x)
    dims = tuple(reversed(range(tensor.ndim))) if order is None else tuple(int(d) for d in order)
    if any(not -tensor.ndim <= d < tensor.ndim for d in dims):
        raise GraphError(f"order {dims} is out of range for {tensor.value.type}")
    dims = tuple(d % tensor.ndim for d in dims)
    return tensor if dims == tuple(range(tensor.ndim)) else emit_one("transpose", tensor, order=dims)


@checked_arguments()
def broadcast_to(x: Any, shape: Sequence[Size]) -> Tensor:
    """Repeated along dims of length 1 and new leading dims."""
    (tensor,) = as_tensors(x)
    target = tuple(int(n) for n in shape)
    return tensor if tensor.shape == target else emit_one("broadcast_to", tensor, shape=target)


@checked_arguments()
def pad(x: Any, low: Sequence[Size], high: Sequence[Size], value: float | bool = 0) -> Tensor:
    """`low` elements of `value` before and `high` after each dim."""
    (tensor,) = as_tensors(x)
    sides = tuple(int(n) for n in low), tuple(int(n) for n in high)
    return emit_one("pad", tensor, low=sides[0], high=sides[1], interior=(0,) * tensor.ndim, value=value)


@checked_arguments()
def concat(tensors: Iterable[Any] | Tensor, axis: int = 0) -> Tensor:
    """Tensors joined along a dim. Raises GraphError for none, two dtypes, or other lengths elsewhere."""
    parts = as_tensors(*tensors)
    if not parts:
        raise GraphError("concat of no tensors; give at least one")
    ndim = parts[0].ndim
    if not -ndim <= axis < ndim:
        raise GraphError(f"axis {axis} is out of range for {parts[0].value.type}")
    return parts[0] if len(parts) == 1 else emit_one("concat", *parts, dim=axis % ndim)
