"""Tensors that are made of sizes and numbers, or have the shape of another tensor."""

from __future__ import annotations

from typing import Any

import torch

from distgraph import ops
from distgraph.frontends.torch.rule_registry import aten
from distgraph.frontends.torch.torch_dtypes import short_dtype


def _dtype(dtype: Any, value: Any = 0.0) -> str:
    if dtype is not None:
        return short_dtype(dtype)
    return "bool" if isinstance(value, bool) else "i64" if isinstance(value, int) else _default()


def _default() -> str:
    return short_dtype(torch.get_default_dtype())


@aten("full.default", "new_full.default")
def _full(*args: Any, dtype: Any = None, **options: Any) -> Any:
    *like, size, value = args
    name = like[0].dtype if like and dtype is None else _dtype(dtype, value)
    return ops.full(tuple(size), value, name)


@aten("zeros.default", "empty.memory_format")
def _zeros(size: Any, dtype: Any = None, **options: Any) -> Any:
    return ops.full(tuple(size), 0, _dtype(dtype))


@aten("ones.default")
def _ones(size: Any, dtype: Any = None, **options: Any) -> Any:
    return ops.full(tuple(size), 1, _dtype(dtype))


@aten("full_like.default")
def _full_like(x: Any, value: Any, dtype: Any = None, **options: Any) -> Any:
    return ops.full(x.shape, value, x.dtype if dtype is None else short_dtype(dtype))


@aten("zeros_like.default", "empty_like.default")
def _zeros_like(x: Any, dtype: Any = None, **options: Any) -> Any:
    return _full_like(x, 0, dtype)


@aten("ones_like.default")
def _ones_like(x: Any, dtype: Any = None, **options: Any) -> Any:
    return _full_like(x, 1, dtype)


@aten("new_zeros.default", "new_empty.default")
def _new_zeros(x: Any, size: Any, dtype: Any = None, **options: Any) -> Any:
    return ops.full(tuple(size), 0, x.dtype if dtype is None else short_dtype(dtype))


@aten("new_ones.default")
def _new_ones(x: Any, size: Any, dtype: Any = None, **options: Any) -> Any:
    return ops.full(tuple(size), 1, x.dtype if dtype is None else short_dtype(dtype))


@aten("scalar_tensor.default")
def _scalar(value: Any, dtype: Any = None, **options: Any) -> Any:
    return ops.full((), value, _dtype(dtype, value))


@aten("arange.default", "arange.start", "arange.start_step")
def _arange(*args: Any, dtype: Any = None, **options: Any) -> Any:
    start, stop, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    whole = all(isinstance(n, int) for n in (start, stop, step))
    return ops.arange(start, stop, step, dtype=_dtype(dtype, 0 if whole else 0.0))


@aten("eye.default", "eye.m")
def _eye(rows: int, columns: int | None = None, dtype: Any = None, **options: Any) -> Any:
    ids = ops.arange(rows)
    return ops.one_hot(ids, rows if columns is None else columns, _dtype(dtype), outside="zeros")


@aten("tril.default")
def _tril(x: Any, diagonal: int = 0) -> Any:
    return ops.tril(x, diagonal)


@aten("triu.default")
def _triu(x: Any, diagonal: int = 0) -> Any:
    return ops.triu(x, diagonal)
