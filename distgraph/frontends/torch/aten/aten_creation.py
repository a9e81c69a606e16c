"""Tensors that are made of sizes and numbers, or have the shape of another tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from distgraph import ops
from distgraph.frontends.torch.rule_registry import aten
from distgraph.frontends.torch.torch_dtypes import short_dtype
from distgraph.ir.dtypes import is_float


def _dtype(dtype: Any, value: Any = 0.0) -> str:
    if dtype is not None:
        return short_dtype(dtype)
    if isinstance(value, int):
        return "bool" if isinstance(value, bool) else "i64"
    return short_dtype(torch.get_default_dtype())


@aten("full.default", "new_full.default")
def _full(*args: Any, dtype: Any = None, **options: Any) -> Any:
    *like, size, value = args
    name = like[0].dtype if like and dtype is None else _dtype(dtype, value)
    return ops.full(tuple(size), _truncated(value, name), name)


def _truncated(value: Any, dtype: str) -> Any:
    """A number as torch stores it in a dtype: integers are cut at the point."""
    return int(value) if isinstance(value, float) and math.isfinite(value) and not is_float(dtype) else value


@aten("full_like.default")
def _full_like(x: Any, value: Any, dtype: Any = None, **options: Any) -> Any:
    name = x.dtype if dtype is None else short_dtype(dtype)
    return ops.full(x.shape, _truncated(value, name), name)


def _filled(value: int, sized: Sequence[str], like: Sequence[str], new: Sequence[str]) -> None:
    """Rules of ops that fill a size, the shape of a tensor, or a size in the dtype of a tensor."""

    @aten(*sized)
    def _of_size(size: Any, dtype: Any = None, **options: Any) -> Any:
        return ops.full(tuple(size), value, _dtype(dtype))

    @aten(*like)
    def _of_shape(x: Any, dtype: Any = None, **options: Any) -> Any:
        return _full_like(x, value, dtype)

    @aten(*new)
    def _of_dtype(x: Any, size: Any, dtype: Any = None, **options: Any) -> Any:
        return ops.full(tuple(size), value, x.dtype if dtype is None else short_dtype(dtype))


_filled(
    0,
    ("zeros.default", "empty.memory_format"),
    ("zeros_like.default", "empty_like.default"),
    ("new_zeros.default", "new_empty.default"),
)
_filled(1, ("ones.default",), ("ones_like.default",), ("new_ones.default",))


@aten("scalar_tensor.default")
def _scalar(value: Any, dtype: Any = None, **options: Any) -> Any:
    name = _dtype(dtype, value)
    return ops.full((), _truncated(value, name), name)


@aten("arange.default", "arange.start", "arange.start_step")
def _arange(*args: Any, dtype: Any = None, **options: Any) -> Any:
    start, stop, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    whole = all(isinstance(n, int) for n in (start, stop, step))
    return ops.arange(start, stop, step, dtype=_dtype(dtype, 0 if whole else 0.0))


@aten("eye.default", "eye.m")
def _eye(rows: int, columns: int | None = None, dtype: Any = None, **options: Any) -> Any:
    ids = ops.arange(rows)
    return ops.one_hot(ids, rows if columns is None else columns, _dtype(dtype), outside="zeros")


aten("tril.default")(ops.tril)
aten("triu.default")(ops.triu)
