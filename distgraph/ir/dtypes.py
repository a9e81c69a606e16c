"""Element types: a short name in the graph, a NumPy dtype in memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from distgraph.errors import GraphError
from distgraph.errors.arguments import shown

_NUMPY: dict[str, np.dtype[Any]] = {
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32),
    "i16": np.dtype(np.int16),
    "i8": np.dtype(np.int8),
    "u64": np.dtype(np.uint64),
    "u32": np.dtype(np.uint32),
    "u16": np.dtype(np.uint16),
    "u8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}
_SHORT = {dtype: name for name, dtype in _NUMPY.items()}
_FLOATS = ("f16", "bf16", "f32", "f64")
NAMES = tuple(_NUMPY)


def to_numpy(name: str) -> np.dtype[Any]:
    """NumPy dtype of a short name. Raises GraphError for an unknown one."""
    try:
        return _NUMPY[name]
    except KeyError:
        raise GraphError(f"dtype {name!r} is not one of {', '.join(NAMES)}") from None


def short(dtype: Any) -> str:
    """Short name of anything NumPy takes as a dtype, or of a short name itself.

    Example:
        >>> short(np.float32), short("bf16"), short(bool)
        ('f32', 'bf16', 'bool')
    """
    if isinstance(dtype, str) and dtype in _NUMPY:
        return dtype
    try:
        if dtype is None:  # NumPy's default would be f64
            raise TypeError
        return _SHORT[np.dtype(dtype)]
    except (KeyError, TypeError, ValueError):
        is_dtype = type(dtype).__name__.lower().endswith("dtype")  # also of another library
        text = str(dtype) if is_dtype else shown(dtype)
        raise GraphError(f"dtype {text} is not supported; use one of {', '.join(NAMES)}") from None


def itemsize(name: str) -> int:
    """Bytes of one element."""
    return to_numpy(name).itemsize


def is_float(name: str) -> bool:
    """True for the floating types, bf16 included."""
    return name in _FLOATS


def promote(left: str, right: str) -> str:
    """Common type of two operands: floats win over ints, f16 with bf16 gives f32, otherwise as NumPy does."""
    if left == right:
        return left
    if is_float(left) and is_float(right):
        if {left, right} == {"f16", "bf16"}:
            return "f32"
        return max(left, right, key=_FLOATS.index)
    if is_float(left) != is_float(right):
        return left if is_float(left) else right
    return short(np.promote_types(to_numpy(left), to_numpy(right)))


def epsilon(name: str) -> float:
    """Distance from 1 to the next number; 0 for types that are exact."""
    return float(ml_dtypes.finfo(to_numpy(name)).eps) if is_float(name) else 0.0  # type: ignore[no-untyped-call]


def is_normal(number: float, name: str) -> bool:
    """Whether a floating type holds a number with all its digits: neither too large nor too close to zero.

    Example:
        >>> is_normal(-1e9, "bf16"), is_normal(-1e9, "f16"), is_normal(0.0, "f16"), is_normal(1e-12, "f16")
        (True, False, True, False)
    """
    limits: Any = ml_dtypes.finfo(to_numpy(name))  # type: ignore[no-untyped-call]
    return number == 0 or bool(float(limits.smallest_normal) <= abs(number) <= float(limits.max))
