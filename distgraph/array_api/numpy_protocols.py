"""The NumPy protocols of traced tensors: how NumPy's own functions are traced.

`np.exp(x)` and `np.add.reduce(x)` call `apply_ufunc`, `np.concatenate([x, y])` calls `apply_function`.
Functions without a counterpart, and options that would write to a tensor, are refused; the message names an
alternative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distgraph import ops
from distgraph.array_api import namespace
from distgraph.errors import GraphError
from distgraph.ir.op_registry import REGISTRY
from distgraph.ops.contraction import as_tensors, reshape_to
from distgraph.tracing.tensor import Tensor, TensorOperators, emit_one


def _concatenate(arrays: Sequence[Any], axis: int | None = 0) -> Tensor:
    if axis is None:
        return ops.concat([ops.reshape(x, -1) for x in arrays], 0)
    return ops.concat(arrays, axis)


def _vstack(arrays: Sequence[Any]) -> Tensor:
    return ops.concat([ops.reshape(t, (1, -1)) if t.ndim < 2 else t for t in as_tensors(*arrays)], 0)


def _hstack(arrays: Sequence[Any]) -> Tensor:
    tensors = as_tensors(*arrays)
    return ops.concat(tensors, 0 if tensors[0].ndim == 1 else 1)


def _pad(x: Any, pad_width: Any, mode: str = "constant", constant_values: float = 0) -> Tensor:
    if mode != "constant":
        raise GraphError(f"numpy.pad with mode {mode!r} does not trace; use 'constant', or concat the edges")
    (tensor,) = as_tensors(x)
    widths = np.broadcast_to(np.asarray(pad_width), (tensor.ndim, 2))
    return ops.pad(tensor, widths[:, 0].tolist(), widths[:, 1].tolist(), constant_values)


def _reshape(x: Any, shape: Any = None, newshape: Any = None) -> Tensor:
    return ops.reshape(x, shape if shape is not None else newshape)


def _nan_to_num(x: Any, nan: float = 0.0) -> Tensor:
    return ops.where(ops.isnan(x), nan, x)


def _std(x: Any, axis: Any = None, ddof: float = 0, keepdims: bool = False) -> Tensor:
    return ops.std(x, axis, keepdims, ddof)


def _var(x: Any, axis: Any = None, ddof: float = 0, keepdims: bool = False) -> Tensor:
    return ops.var(x, axis, keepdims, ddof)


def _norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Tensor:
    if ord not in (None, 2, "fro") or (ord == 2 and axis is None and as_tensors(x)[0].ndim > 1):
        raise GraphError(
            f"numpy.linalg.norm with ord {ord!r} does not trace; only the Euclidean norm of vectors does"
        )
    return ops.norm(x, axis, keepdims)


_SAME = (
    "all", "any", "argmax", "argmin", "argsort", "broadcast_arrays", "broadcast_to", "clip",
    "count_nonzero", "cumulative_prod", "cumulative_sum", "diff", "dot", "expand_dims", "flip", "full_like",
    "inner", "matrix_transpose", "max", "mean", "min", "moveaxis", "ones_like", "outer", "permute_dims",
    "prod", "repeat", "roll", "round", "sort", "squeeze", "stack", "sum", "swapaxes", "take",
    "take_along_axis", "tensordot", "tile", "transpose", "tril", "triu", "unstack", "where", "zeros_like",
)  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {name: getattr(namespace, name) for name in _SAME} | {
    "amax": namespace.max,
    "amin": namespace.min,
    "around": namespace.round,
    "concatenate": _concatenate,
    "copy": namespace.positive,
    "cumprod": namespace.cumulative_prod,
    "cumsum": namespace.cumulative_sum,
    "einsum": ops.einsum,
    "empty_like": namespace.zeros_like,
    "hstack": _hstack,
    "linalg.matrix_transpose": namespace.matrix_transpose,
    "linalg.norm": _norm,
    "linalg.vecdot": namespace.vecdot,
    "nan_to_num": _nan_to_num,
    "ndim": lambda a: a.ndim,
    "pad": _pad,
    "ravel": lambda a: ops.reshape(a, -1),
    "reshape": _reshape,
    "shape": lambda a: a.shape,
    "size": lambda a: a.size,
    "split": ops.split,
    "std": _std,
    "var": _var,
    "vstack": _vstack,
}
_UFUNCS: dict[str, Callable[..., Any]] = {
    "conjugate": namespace.positive,
    "deg2rad": lambda x: x * (math.pi / 180),
    "exp2": lambda x: ops.exp(x * math.log(2)),
    "fabs": namespace.abs,
    "float_power": namespace.pow,
    "invert": ops.bitwise_not,
    "logaddexp": namespace.logaddexp,
    "matmul": ops.matmul,
    "mod": ops.remainder,
    "positive": namespace.positive,
    "rad2deg": lambda x: x * (180 / math.pi),
    "true_divide": ops.divide,
    "vecdot": namespace.vecdot,
}
_REDUCE = {
    "add": "sum",
    "multiply": "prod",
    "maximum": "max",
    "minimum": "min",
    "logical_or": "any",
    "logical_and": "all",
}
_NEUTRAL = {
    "sum": "0",
    "prod": "1",
    "max": "least",
    "min": "most",
    "amax": "least",
    "amin": "most",
    "any": "False",
    "all": "True",
    "count_nonzero": "0",
}
"""Reduction -> element that does not change its result."""
_ACCUMULATE = {"add": ops.cumsum, "multiply": ops.cumprod}


def _drop_defaults(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments that differ from their default. Raises GraphError for those that cannot be traced."""
    options = {
        k: v for k, v in kwargs.items() if v is not np._NoValue and not (k in ("out", "dtype") and v is None)
    }
    for option in ("out", "where", "casting", "subok", "order", "initial"):
        value = options.pop(option, None)
        idle = value is None or value is True or (isinstance(value, str) and value in ("same_kind", "C", "K"))
        if not idle:
            raise GraphError(f"numpy.{name} with {option}= does not trace; {_without(name, option)}")
    return options


def _without(name: str, option: str) -> str:
    """How a NumPy function is called without an option that does not trace, with the same result."""
    reduced = _REDUCE.get(name, name)
    mean = "np.where(mask, x, 0).sum(axis) / mask.sum(axis)"
    if option == "where" and reduced == "mean":
        return f"use {mean}, the mean of those where mask holds"
    if option == "where" and reduced in ("std", "var"):
        return f"use m = {mean}, and then the same of (x - m) ** 2 (its root for std)"
    if option == "where" and reduced in _NEUTRAL:
        neutral = _NEUTRAL[reduced]
        what = f" with a number that none is {'below' if neutral == 'least' else 'above'}"
        return f"use np.{reduced}(np.where(mask, x, {neutral}), axis){what * (neutral in ('least', 'most'))}"
    if option == "where":
        return f"use np.where(mask, np.{name}(...), other)"
    if option == "order" and name in ("reshape", "ravel"):
        return 'use np.reshape(x.T, shape[::-1]).T, which is order="F"; without order it is "C"'
    if option == "initial":
        joint = {"sum": "add", "prod": "multiply", "min": "minimum", "amin": "minimum"}.get(
            reduced, "maximum"
        )
        return f"use np.{joint}(np.{reduced}(x, axis), initial)"
    return "leave it out, tensors are never written to and have no order in memory"


def apply_ufunc(ufunc: Any, method: str, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A NumPy ufunc (or its reduce, accumulate, outer) of traced tensors. Raises GraphError for others."""
    name = ufunc.__name__
    options = _drop_defaults(name, kwargs)
    dtype = options.pop("dtype", None)
    if dtype is not None:
        inputs = [ops.cast(x, dtype) for x in inputs]
    if method == "__call__" and not options:
        if name in _UFUNCS:
            return _UFUNCS[name](*inputs)
        if name in REGISTRY:
            return emit_one(name, *inputs)
    if method == "reduce" and name in _REDUCE:
        return ops.reduce(_REDUCE[name], inputs[0], options.get("axis", 0), options.get("keepdims", False))
    if method == "accumulate" and name in _ACCUMULATE:
        return _ACCUMULATE[name](inputs[0], options.get("axis", 0))
    if method == "outer" and name in REGISTRY:
        left, right = as_tensors(*inputs)
        return emit_one(name, reshape_to(left, left.shape + (1,) * right.ndim), right)
    called = name if method == "__call__" else f"{name}.{method}"
    raise GraphError(
        f"numpy.{called} does not trace with {sorted(options) or 'these operands'}; {namespace.way_out(name)}"
    )


def apply_function(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A NumPy function of traced tensors. Raises GraphError where there is no counterpart."""
    module = getattr(function, "__module__", "numpy") or "numpy"
    name = function.__name__ if module == "numpy" else f"{module.removeprefix('numpy.')}.{function.__name__}"
    counterpart = _FUNCTIONS.get(name)
    if counterpart is None:
        raise namespace.Unsupported(f"numpy.{name} does not trace; {namespace.way_out(name)}")
    options = _drop_defaults(name, kwargs)
    try:
        return counterpart(*args, **options)
    except TypeError as error:
        raise GraphError(
            f"numpy.{name} with {sorted(options) or 'these arguments'} does not trace: {error}"
        ) from None


def bind_numpy_protocols() -> None:
    """Binds the protocols of NumPy and of the array API to traced tensors."""

    def array_ufunc(self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return apply_ufunc(ufunc, method, inputs, kwargs)

    def array_function(self: Any, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return apply_function(function, args, kwargs)

    def array_namespace(self: Any, *, api_version: str | None = None) -> Any:
        return namespace

    setattr(TensorOperators, "__array_ufunc__", array_ufunc)  # noqa: B010 (mypy: no assignment to a method)
    setattr(TensorOperators, "__array_function__", array_function)  # noqa: B010
    setattr(TensorOperators, "__array_namespace__", array_namespace)  # noqa: B010
