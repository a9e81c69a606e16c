"""Ops without operands (sources, iota, full), and slices whose start is only known at run time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.errors.arguments import Finite, Size, checked_arguments, shown
from distgraph.ir.dtypes import is_float, short, to_numpy
from distgraph.ir.graph import SOURCES, Value
from distgraph.ir.index_rule import Rule, make_rule, term_of
from distgraph.ir.op_registry import Attrs, GradientContext, Local, Shape, Shapes, define
from distgraph.kernels._common import store
from distgraph.ops.contraction import as_tensors
from distgraph.tracing.tensor import Tensor, emit_one

Grads = Sequence[Tensor | None]


def _no_kernel(xp: Any, *arrays: Any, out: Any = None, **attrs: Any) -> Any:
    raise AssertionError("a source is fed by the runtime, not computed")


def _infer_declared(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    return [(tuple(attrs["shape"]), short(attrs["dtype"]))]


def _localize_constant(attrs: Attrs, local: Local) -> Attrs:
    value = attrs["value"]
    if not isinstance(value, np.ndarray) or value.ndim == 0:
        return attrs
    starts = local.starts(0, result=True)
    block = tuple(slice(a, a + n) for a, n in zip(starts, local.result_shapes[0], strict=True))
    return {**attrs, "value": value[block]}


for _kind in SOURCES:
    define(
        _kind,
        "-> ...",
        _no_kernel,
        flops=0,
        localize=_localize_constant if _kind == "constant" else None,
        cost="launch",
        anywhere=_kind == "constant",
    )


def _declared_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    term, sizes = term_of(attrs["shape"])
    located = {f"i{attrs['dim']}"} if "dim" in attrs else set()
    return make_rule("declared", (), (term,), sizes, located=located)


def _full_kernel(xp: Any, out: Any = None, *, shape: Shape, value: Any, dtype: str) -> Any:
    if out is None:
        return xp.full(shape, value, dtype=to_numpy(dtype))
    out[...] = value
    return out


define(
    "full",
    _declared_rule,
    _full_kernel,
    infer=_infer_declared,
    gradient=lambda c: [],
    flops=0,
    localize=lambda attrs, local: {**attrs, "shape": local.result_shapes[0]},
    anywhere=True,
)


def _localize_iota(attrs: Attrs, local: Local) -> Attrs:
    return {**attrs, "shape": local.result_shapes[0], "start": local.starts(0, result=True)[attrs["dim"]]}


def _iota_kernel(xp: Any, out: Any = None, *, shape: Shape, dim: int, dtype: str, start: int = 0) -> Any:
    line = xp.arange(start, start + shape[dim]).astype(to_numpy(dtype))
    wide = xp.broadcast_to(line.reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape)
    return xp.ascontiguousarray(wide) if out is None else store(xp, wide, out)


define(
    "iota",
    _declared_rule,
    _iota_kernel,
    infer=_infer_declared,
    gradient=lambda c: [],
    flops=0,
    localize=_localize_iota,
    anywhere=True,
)


# slices whose start is computed


def _block_rule(shapes: Shapes, sizes: Shape, *, update: bool) -> Rule:
    every, lengths = term_of(shapes[0])
    term = tuple(i if sizes[d] == n else () for d, (i, n) in enumerate(zip(every, shapes[0], strict=True)))
    operands = (term, term, ((),)) if update else (term, ((),))
    return make_rule("block", operands, (term,), lengths)


def _check_block(x: Value, sizes: Shape, starts: Value) -> None:
    if len(sizes) != len(x.shape) or any(not 0 <= s <= n for s, n in zip(sizes, x.shape, strict=True)):
        raise GraphError(f"block of shape {tuple(sizes)} does not fit in {x.type}")
    if starts.shape != (len(x.shape),) or not starts.dtype.startswith(("i", "u")):
        raise GraphError(f"starts are {starts.type} but {x.type} needs {len(x.shape)} integers")


def _infer_dynamic_slice(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    _check_block(operands[0], attrs["sizes"], operands[1])
    return [(tuple(attrs["sizes"]), operands[0].dtype)]


def _infer_dynamic_update(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    x, update, starts = operands
    _check_block(x, update.shape, starts)
    if update.dtype != x.dtype:
        raise GraphError(f"{x.type} is updated with {update.type}; cast one of them with .astype")
    return [(x.shape, x.dtype)]


def _place(shape: Shape, sizes: Shape, starts: Any) -> tuple[slice, ...]:
    """Index of the block; starts are clamped so that it fits, as in XLA."""
    return tuple(
        slice(first := min(max(start, 0), n - size), first + size)
        for start, n, size in zip(starts.tolist(), shape, sizes, strict=True)
    )


def _dynamic_slice_kernel(xp: Any, x: Any, starts: Any, out: Any = None, *, sizes: Shape) -> Any:
    block = x[_place(x.shape, sizes, starts)]
    if out is None:
        return block.copy()
    out[...] = block
    return out


def _dynamic_update_kernel(xp: Any, x: Any, update: Any, starts: Any, out: Any = None) -> Any:
    result = xp.empty(x.shape, x.dtype) if out is None else out
    if result is not x:
        result[...] = x
    result[_place(x.shape, update.shape, starts)] = update
    return result


def _dynamic_slice_gradient(c: GradientContext) -> Grads:
    x, starts = c.operands
    zeros = emit_one("full", shape=x.shape, value=0, dtype=x.dtype)
    return [emit_one("dynamic_update_slice", zeros, c.grad, starts), None]


def _dynamic_update_gradient(c: GradientContext) -> Grads:
    _, update, starts = c.operands
    zeros = emit_one("full", shape=update.shape, value=0, dtype=update.dtype)
    return [
        emit_one("dynamic_update_slice", c.grad, zeros, starts) if c.needs[0] else None,
        emit_one("dynamic_slice", c.grad, starts, sizes=update.shape) if c.needs[1] else None,
        None,
    ]


define(
    "dynamic_slice",
    lambda shapes, attrs: _block_rule(shapes, attrs["sizes"], update=False),
    _dynamic_slice_kernel,
    infer=_infer_dynamic_slice,
    gradient=_dynamic_slice_gradient,
    flops=0,
    linear=((0,),),
    localize=lambda attrs, local: {"sizes": local.result_shapes[0]},
)
define(
    "dynamic_update_slice",
    lambda shapes, attrs: _block_rule(shapes, shapes[1], update=True),
    _dynamic_update_kernel,
    infer=_infer_dynamic_update,
    gradient=_dynamic_update_gradient,
    flops=0,
    linear=((0, 1),),
    inplace=(0,),
)


@checked_arguments()
def iota(shape: Sequence[Size], dim: int, dtype: Any = "i64") -> Tensor:
    """The position along one dim at every element."""
    lengths = tuple(int(n) for n in shape)
    if not -len(lengths) <= dim < len(lengths):
        raise GraphError(f"dim {dim} is out of range for shape {lengths}")
    return emit_one("iota", shape=lengths, dim=dim % len(lengths), dtype=short(dtype))


@checked_arguments()
def arange(start: Finite, stop: Finite | None = None, step: Finite = 1, dtype: Any = None) -> Tensor:
    """Numbers from start (0 by default) up to but without stop."""
    first, last = (0, start) if stop is None else (start, stop)
    if step == 0:
        raise GraphError("arange with step 0 never ends")
    exact = all(isinstance(n, (int, np.integer)) for n in (first, last, step))
    dtype_name = short(dtype) if dtype is not None else "i64" if exact else "f32"
    count = max(0, int(np.ceil((last - first) / step)))
    line = iota((count,), 0, dtype_name)
    line = line if step == 1 else line * step
    return line if first == 0 else line + first


@checked_arguments()
def full(shape: Size | Sequence[Size], value: float | bool, dtype: Any = None) -> Tensor:
    """One number everywhere; f32 for a Python float, i64 for an int, bool for a bool."""
    lengths = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
    by_type = "bool" if isinstance(value, bool) else "i64" if isinstance(value, int) else "f32"
    name = by_type if dtype is None else short(dtype)
    number = value.item() if isinstance(value, np.generic) else value
    if name != "bool" and not is_float(name):
        limits = np.iinfo(to_numpy(name))
        if number != number or number % 1 or not limits.min <= number <= limits.max:
            raise GraphError(
                f"value of full is {shown(value)} but {name} holds whole numbers from {limits.min} to "
                f"{limits.max}; give another dtype"
            )
    return emit_one("full", shape=lengths, value=number, dtype=name)


@checked_arguments()
def zeros(shape: Size | Sequence[Size], dtype: Any = "f32") -> Tensor:
    """Zeros."""
    return full(shape, 0, "f32" if dtype is None else dtype)


@checked_arguments()
def ones(shape: Size | Sequence[Size], dtype: Any = "f32") -> Tensor:
    """Ones."""
    return full(shape, 1, "f32" if dtype is None else dtype)


@checked_arguments()
def dynamic_slice(x: Any, starts: Any, sizes: Sequence[Size]) -> Tensor:
    """The block of `x` of the given sizes at `starts` (one integer a dim, clamped so that the block fits)."""
    tensor, starts_tensor = as_tensors(x, np.asarray(starts) if isinstance(starts, (list, tuple)) else starts)
    return emit_one("dynamic_slice", tensor, starts_tensor, sizes=tuple(int(n) for n in sizes))


def dynamic_update_slice(x: Any, update: Any, starts: Any) -> Tensor:
    """`x` with the block at `starts` replaced by `update`."""
    return emit_one(
        "dynamic_update_slice",
        *as_tensors(x, update, np.asarray(starts) if isinstance(starts, (list, tuple)) else starts),
    )


@checked_arguments()
def tril(x: Any, k: int = 0) -> Tensor:
    """Zero above the k-th diagonal of the last two dims."""
    return _triangle(x, k, "greater_equal")


@checked_arguments()
def triu(x: Any, k: int = 0) -> Tensor:
    """Zero below the k-th diagonal of the last two dims."""
    return _triangle(x, k, "less_equal")


def _triangle(x: Any, k: int, keep: str) -> Tensor:
    (tensor,) = as_tensors(x)
    if tensor.ndim < 2:
        raise GraphError(f"{tensor.value.type} has no last two dims")
    shape = tensor.shape[-2:]
    inside = emit_one(keep, iota(shape, 0) + k, iota(shape, 1))
    return emit_one("where", inside, tensor, False if tensor.dtype == "bool" else 0)
