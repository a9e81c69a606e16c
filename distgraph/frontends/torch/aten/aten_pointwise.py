"""Elementwise ops: arithmetic, comparisons, activations, casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from distgraph import ops
from distgraph.array_api.namespace import logaddexp
from distgraph.frontends.torch.rule_registry import aten
from distgraph.frontends.torch.torch_dtypes import short_dtype
from distgraph.ir.dtypes import is_float


def _asinh(x: Any) -> Any:
    """With s = |x|, log(1 + s + s^2 / (1 + sqrt(1 + s^2))), and the sign of x; its derivative at 0 is 1."""
    side = ops.where(ops.less(x, 0), ops.full(x.shape, -1, x.dtype), ops.full(x.shape, 1, x.dtype))
    size = x * side
    return side * ops.log1p(size + ops.square(size) / (ops.sqrt(ops.square(size) + 1) + 1))


def _fmod(x: Any, y: Any) -> Any:
    """The remainder with the sign of x, exact also where x / y rounds to a whole number."""
    exact = ops.sign(x) * ops.remainder(ops.absolute(x), ops.absolute(y))
    if not is_float(exact.dtype):
        return exact
    quotient = ops.stop_gradient(ops.trunc(x / y))
    return ops.stop_gradient(exact) + _change(x) - quotient * _change(y)


def _change(x: Any) -> Any:
    """Zero, with the gradient of x."""
    return x - ops.stop_gradient(x) if hasattr(x, "dtype") else 0


_SINGLE: dict[str, Callable[..., Any]] = {
    "abs": ops.absolute, "acos": ops.arccos, "asin": ops.arcsin, "atan": ops.arctan, "ceil": ops.ceil,
    "cos": ops.cos, "cosh": ops.cosh, "erf": ops.erf, "exp": ops.exp, "expm1": ops.expm1, "floor": ops.floor,
    "log": ops.log, "log10": ops.log10, "log1p": ops.log1p, "log2": ops.log2, "neg": ops.negative,
    "reciprocal": ops.reciprocal, "round": ops.rint, "rsqrt": ops.rsqrt, "sigmoid": ops.sigmoid,
    "sign": ops.sign, "sgn": ops.sign, "silu": ops.silu, "sin": ops.sin, "sinh": ops.sinh, "sqrt": ops.sqrt,
    "square": ops.square, "tan": ops.tan, "tanh": ops.tanh, "trunc": ops.trunc,
    "acosh": lambda x: ops.log(x + ops.sqrt(ops.square(x) - 1)),
    "asinh": _asinh,
    "atanh": lambda x: (ops.log1p(x) - ops.log1p(-x)) * 0.5,
    "erfc": lambda x: 1 - ops.erf(x),
    "exp2": lambda x: ops.exp(x * math.log(2)),
    "frac": lambda x: x - ops.trunc(x),
    "deg2rad": lambda x: x * (math.pi / 180),
    "rad2deg": lambda x: x * (180 / math.pi),
    "relu": lambda x: ops.relu(x) if is_float(x.dtype) else ops.maximum(x, 0),
    "relu6": lambda x: ops.minimum(ops.relu(x), 6),
    "hardsigmoid": lambda x: ops.clip(x + 3, 0, 6) * (1 / 6),
    "hardswish": lambda x: x * ops.clip(x + 3, 0, 6) * (1 / 6),
    "log_sigmoid": lambda x: -softplus(-x),
    "mish": lambda x: x * ops.tanh(softplus(x)),
    "gelu": lambda x, approximate="none": ops.gelu(x, approximate=approximate == "tanh"),
    "threshold": lambda x, threshold, value: ops.where(ops.greater(x, threshold), x, value),
    "hardshrink": lambda x, lambd=0.5: ops.where(ops.greater(ops.absolute(x), lambd), x, 0),
    "softshrink": lambda x, lambd=0.5: ops.sign(x) * ops.maximum(ops.absolute(x) - lambd, 0),
    "addcmul": lambda x, y, z, value=1: x + y * z * value,
    "addcdiv": lambda x, y, z, value=1: x + y / z * value,
}  # fmt: skip
"""Name of an op with one overload -> function."""

_TESTS: dict[str, Callable[..., Any]] = {
    "eq": ops.equal, "ne": ops.not_equal, "lt": ops.less, "le": ops.less_equal, "gt": ops.greater,
    "ge": ops.greater_equal,
}  # fmt: skip

_BINARY: dict[str, Callable[..., Any]] = {
    "mul": ops.multiply, "maximum": ops.maximum, "minimum": ops.minimum, "atan2": ops.arctan2,
    "hypot": ops.hypot, "remainder": ops.remainder, "floor_divide": ops.floor_divide,
    "bitwise_and": ops.bitwise_and, "bitwise_or": ops.bitwise_or, "bitwise_xor": ops.bitwise_xor,
    "bitwise_left_shift": ops.left_shift, "bitwise_right_shift": ops.right_shift,
    "fmax": ops.maximum, "fmin": ops.minimum, "clamp_min": ops.maximum, "clamp_max": ops.minimum,
    "fmod": _fmod,
    "logaddexp": logaddexp,
    "xlogy": lambda x, y: ops.where(ops.equal(x, 0), 0, x * ops.log(ops.where(ops.equal(x, 0), 1, y))),
}  # fmt: skip

for _name, _function in _SINGLE.items():
    aten(f"{_name}.default", operands="result")(_function)
for _name, _function in _TESTS.items():
    aten(f"{_name}.Tensor", f"{_name}.Scalar", operands="common")(_function)
for _name, _function in _BINARY.items():
    overloads = (f"{_name}.default", f"{_name}.Tensor", f"{_name}.Scalar", f"{_name}.Tensor_Scalar")
    aten(*overloads, f"{_name}.Scalar_Tensor", operands="result")(_function)

for _name in ("isnan", "isinf", "isfinite", "logical_not", "logical_and", "logical_or", "logical_xor"):
    aten(f"{_name}.default")(getattr(ops, _name))
aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")(ops.where)
aten("clamp.default", "clamp.Tensor", "clip.default", "hardtanh.default", operands="result")(ops.clip)
aten("bitwise_not.default")(lambda x: ops.logical_not(x) if x.dtype == "bool" else ops.bitwise_not(x))


@aten("add.Tensor", "add.Scalar", operands="result")
def _add(x: Any, y: Any, alpha: Any = 1) -> Any:
    return ops.add(x, y if alpha == 1 else y * alpha)


@aten("sub.Tensor", "sub.Scalar", operands="result")
def _subtract(x: Any, y: Any, alpha: Any = 1) -> Any:
    return ops.subtract(x, y if alpha == 1 else y * alpha)


@aten("rsub.Tensor", "rsub.Scalar", operands="result")
def _subtract_from(x: Any, y: Any, alpha: Any = 1) -> Any:
    return ops.subtract(y, x if alpha == 1 else x * alpha)


@aten(
    "div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode", "true_divide.Tensor", operands="result"
)
def _divide(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return ops.floor_divide(x, y)
    if rounding_mode == "trunc" and not is_float(x.dtype):
        return ops.sign(x) * ops.sign(y) * ops.floor_divide(ops.absolute(x), ops.absolute(y))
    if isinstance(y, (int, float)) and y and is_float(x.dtype) and rounding_mode is None and _power_of_two(y):
        return x * (1 / y)
    quotient = ops.divide(x, y)
    return ops.trunc(quotient) if rounding_mode == "trunc" else quotient


def _power_of_two(number: float) -> bool:
    return math.frexp(abs(number))[0] == 0.5


@aten("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", operands="result")
def _power(x: Any, y: Any) -> Any:
    special: dict[Any, Callable[[Any], Any]] = {
        0.5: ops.sqrt,
        1: ops.identity,
        2: ops.square,
        3: lambda v: ops.square(v) * v,
        -0.5: ops.rsqrt,
        -1: ops.reciprocal,
    }
    if isinstance(y, (int, float)) and y in special and (y >= 1 or is_float(x.dtype)):
        return special[y](x)
    return ops.power(x, y)


@aten("lerp.Tensor", "lerp.Scalar", operands="result")
def _interpolate(x: Any, y: Any, weight: Any) -> Any:
    return x + (y - x) * weight


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return ops.where(mask, value if isinstance(value, (int, float)) else ops.cast(value, x.dtype), x)


@aten("_to_copy.default", "to.dtype", "to.dtype_layout")
def _to_copy(x: Any, dtype: Any = None, **options: Any) -> Any:
    return x if dtype is None else ops.cast(x, short_dtype(dtype))


def softplus(x: Any) -> Any:
    """log(1 + exp(x)), whose derivative at 0 is 1/2, as that of (x + |x|) / 2."""
    size = ops.absolute(x)
    return (x + size) * 0.5 + ops.log1p(ops.exp(-size))


@aten("softplus.default", operands="result")
def _scaled_softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    scaled = x * beta
    return ops.where(ops.greater(scaled, threshold), x, softplus(scaled) * (1 / beta))


@aten("log_sigmoid_forward.default", operands="")
def _log_sigmoid(x: Any) -> Any:
    return -softplus(-x), None


@aten("elu.default", operands="result")
def _elu(x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    falling = ops.expm1(ops.minimum(x, 0) * input_scale) * alpha
    return ops.where(ops.greater(x, 0), x, falling) * scale


aten("selu.default", operands="result")(lambda x: _elu(x, 1.6732632423543772, 1.0507009873554805))
aten("celu.default", operands="result")(lambda x, alpha=1: _elu(x, alpha, 1, 1 / alpha))


@aten("leaky_relu.default", operands="result")
def _leaky_relu(x: Any, negative_slope: float = 0.01) -> Any:
    return ops.where(ops.greater(x, 0), x, x * negative_slope)


@aten("rrelu.default", operands="result")
def _random_leaky_relu(x: Any, lower: float = 0.125, upper: float = 1 / 3, training: bool = False) -> Any:
    if not training:
        return _leaky_relu(x, (lower + upper) / 2)
    slope = ops.random_uniform(x.shape, x.dtype) * (upper - lower) + lower
    return ops.where(ops.greater_equal(x, 0), x, x * slope)


@aten("prelu.default", "_prelu_kernel.default", operands="result")
def _prelu(x: Any, weight: Any) -> Any:
    if weight.ndim == 1 and x.ndim > 1:
        weight = ops.reshape(weight, (1, -1) + (1,) * (x.ndim - 2))
    return ops.where(ops.greater(x, 0), x, x * weight)


@aten("glu.default", operands="result")
def _glu(x: Any, dim: int = -1) -> Any:
    first, second = ops.split(x, 2, dim)
    return first * ops.sigmoid(second)
