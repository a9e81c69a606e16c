"""Elementwise primitives: arithmetic, comparisons, selection, and conversions of dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.jax.folded_constant import Constant
from distgraph.frontends.jax.rule_registry import primitive
from distgraph.ir.dtypes import is_float, short

_UNARY: dict[str, Callable[..., Any]] = {
    "abs": ops.absolute, "acos": ops.arccos, "asin": ops.arcsin, "atan": ops.arctan, "ceil": ops.ceil,
    "cos": ops.cos, "cosh": ops.cosh, "erf": ops.erf, "exp": ops.exp, "expm1": ops.expm1, "floor": ops.floor,
    "is_finite": ops.isfinite, "log": ops.log, "log1p": ops.log1p, "logistic": ops.sigmoid,
    "neg": ops.negative, "rsqrt": ops.rsqrt, "sign": ops.sign, "sin": ops.sin, "sinh": ops.sinh,
    "sqrt": ops.sqrt, "square": ops.square, "stop_gradient": ops.stop_gradient, "tan": ops.tan,
    "tanh": ops.tanh,
    "acosh": lambda x: ops.log(x + ops.sqrt(ops.square(x) - 1)),
    "asinh": lambda x: ops.sign(x) * ops.log(ops.absolute(x) + ops.sqrt(ops.square(x) + 1)),
    "atanh": lambda x: (ops.log1p(x) - ops.log1p(-x)) * 0.5,
    "cbrt": lambda x: ops.sign(x) * ops.power(ops.absolute(x), 1 / 3),
    "erfc": lambda x: 1 - ops.erf(x),
    "exp2": lambda x: ops.exp(x * math.log(2)),
}  # fmt: skip
"""Primitive of one operand -> function."""

_BINARY: dict[str, Callable[..., Any]] = {
    "add": ops.add, "add_any": ops.add, "sub": ops.subtract, "atan2": ops.arctan2,
    "eq": ops.equal, "ne": ops.not_equal, "lt": ops.less, "le": ops.less_equal, "gt": ops.greater,
    "ge": ops.greater_equal, "shift_left": ops.left_shift, "shift_right_arithmetic": ops.right_shift,
    "max": lambda x, y: _extreme(ops.maximum, -math.inf, x, y),
    "min": lambda x, y: _extreme(ops.minimum, math.inf, x, y),
    # the remainder of JAX has the sign of the dividend, that of NumPy the sign of the divisor
    "rem": lambda x, y: ops.sign(x) * ops.remainder(ops.absolute(x), ops.absolute(y)),
}  # fmt: skip
"""Primitive of two operands -> function."""

_LOGICAL: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mul": (ops.logical_and, ops.multiply),
    "and": (ops.logical_and, ops.bitwise_and),
    "or": (ops.logical_or, ops.bitwise_or),
    "xor": (ops.logical_xor, ops.bitwise_xor),
    "not": (ops.logical_not, ops.bitwise_not),
}
"""Primitive -> its function of truth values, and that of numbers."""


def _register(name: str, function: Callable[..., Any]) -> None:
    @primitive(name, elementwise=True)
    def _rule(*operands: Any, **params: Any) -> Any:
        return function(*operands)


def _register_logical(name: str, truth: Callable[..., Any], number: Callable[..., Any]) -> None:
    _register(name, lambda x, *others: (truth if x.dtype == "bool" else number)(x, *others))


for _name, _function in {**_UNARY, **_BINARY}.items():
    _register(_name, _function)
for _name, _functions in _LOGICAL.items():
    _register_logical(_name, *_functions)


@primitive("div", elementwise=True)
def _divide(x: Any, y: Any, **params: Any) -> Any:
    if is_float(x.dtype):
        return ops.divide(x, y)
    return ops.sign(x) * ops.sign(y) * ops.floor_divide(ops.absolute(x), ops.absolute(y))


def _extreme(function: Callable[..., Any], neutral: float, x: Any, y: Any) -> Any:
    """The larger or smaller operand; where one is everywhere infinite, the other itself.

    Where both are equal, each gets half of the gradient, as in JAX.
    """
    for one, other in ((x, y), (y, x)):
        if isinstance(one, Constant) and one.size == 1 and float(one.value) == neutral:
            return other
    if not is_float(x.dtype):
        return ops.logical_or(x, y) if x.dtype == "bool" and neutral < 0 else function(x, y)
    either, average = function(x, y), (x + y) * 0.5
    return ops.where(ops.equal(x, y), average, either)


@primitive("shift_right_logical")
def _shift_right(x: Any, y: Any, **params: Any) -> Any:
    if not x.dtype.startswith("u"):
        raise GraphError(f"operand is {x.dtype} but must be unsigned; convert it with .astype(jnp.uint32)")
    return ops.right_shift(x, y)


@primitive("pow", elementwise=True)
def _power(x: Any, y: Any, **params: Any) -> Any:
    if isinstance(y, Constant) and y.size == 1:
        number = float(y.value)
        if number.is_integer() and abs(number) <= 16:
            return _integer_power(x, int(number))
        if abs(number) == 0.5:
            return ops.sqrt(x) if number > 0 else ops.rsqrt(x)
    return ops.power(x, ops.cast(y, x.dtype))


@primitive("integer_pow")
def _integer_pow(x: Any, *, y: int, **params: Any) -> Any:
    return _integer_power(x, y)


def _integer_power(x: Any, exponent: int) -> Any:
    """Repeated squares, as XLA computes it."""
    if exponent < 0:
        return ops.reciprocal(_integer_power(x, -exponent))
    if exponent == 0:
        return ops.full(x.shape, 1, x.dtype)
    half = _integer_power(x, exponent // 2) if exponent > 1 else None
    squared = x if half is None else ops.square(half)
    return squared * x if exponent % 2 and half is not None else squared


@primitive("round")
def _round(x: Any, *, rounding_method: Any, **params: Any) -> Any:
    if int(rounding_method) == 1:  # to the nearest even number
        return ops.rint(x)
    return ops.sign(x) * ops.floor(ops.absolute(x) + 0.5)


@primitive("clamp", elementwise=True)
def _clamp(low: Any, x: Any, high: Any, **params: Any) -> Any:
    inside = ops.clip(ops.stop_gradient(x), low, high)
    return ops.where(ops.logical_and(ops.greater(x, low), ops.less(x, high)), x, inside)


@primitive("select_n", elementwise=True)
def _select(which: Any, *cases: Any, **params: Any) -> Any:
    if which.dtype == "bool":
        return ops.where(which, cases[1], cases[0]) if len(cases) == 2 else cases[0]
    result = cases[-1]
    for number in range(len(cases) - 2, -1, -1):
        result = ops.where(ops.equal(which, number), cases[number], result)
    return result


@primitive("convert_element_type")
def _convert(x: Any, *, new_dtype: Any, **params: Any) -> Any:
    return ops.cast(x, short(new_dtype)) if short(new_dtype) != x.dtype else x


@primitive("reduce_precision")
def _reduce_precision(x: Any, *, exponent_bits: int, mantissa_bits: int, **params: Any) -> Any:
    narrow = {(8, 7): "bf16", (5, 10): "f16", (8, 23): "f32", (11, 52): "f64"}.get(
        (exponent_bits, mantissa_bits)
    )
    if narrow is None:
        raise GraphError(
            f"{exponent_bits} bits of exponent and {mantissa_bits} of mantissa are those of no dtype; use "
            "bf16, f16, f32 or f64"
        )
    return ops.cast(ops.cast(x, narrow), x.dtype)


@primitive("copy", "copy_p", "name", "sharding_constraint", "pvary", "reduce_replicated", "mesh_cast")
def _same(x: Any, **params: Any) -> Any:
    return x


@primitive("optimization_barrier", "device_put", "layout_constraint")
def _all_same(*operands: Any, **params: Any) -> Any:
    return operands


@primitive("nextafter")
def _next_after(x: Any, y: Any, **params: Any) -> Any:
    raise GraphError("the neighbour of a number that depends on data has no op; use x + eps")


def as_positions(x: Any) -> Any:
    """Integer positions in i64; constants stay constants."""
    if isinstance(x, Constant):
        return Constant(x.value.astype(np.int64))
    return ops.cast(x, "i64") if x.dtype != "i64" else x
