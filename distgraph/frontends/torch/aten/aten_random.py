"""Dropout and random numbers: drawn again in every step, not the numbers that torch would draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distgraph import ops
from distgraph.frontends.torch.rule_registry import aten
from distgraph.frontends.torch.torch_dtypes import short_dtype


@aten("dropout.default", random=True)
def _dropout(x: Any, p: float, train: bool) -> Any:
    if not train or not p:
        return x
    return ops.zeros(x.shape, x.dtype) if p >= 1 else ops.dropout(x, p)


@aten("native_dropout.default", random=True)
def _native_dropout(x: Any, p: float, train: bool | None = True) -> Any:
    return _dropout(x, p, train is not False), None


@aten("bernoulli.default", random=True)
def _bernoulli(x: Any, generator: Any = None) -> Any:
    return ops.cast(ops.less(ops.random_uniform(x.shape, x.dtype), x), x.dtype)


@aten("bernoulli.p", random=True)
def _bernoulli_p(x: Any, p: float = 0.5, generator: Any = None) -> Any:
    return ops.cast(ops.less(ops.random_uniform(x.shape, x.dtype), p), x.dtype)


def _drawn(name: str, draw: Callable[..., Any]) -> None:
    @aten(f"{name}_like.default", random=True)
    def _of_shape(x: Any, dtype: Any = None, **options: Any) -> Any:
        return draw(x.shape, x.dtype if dtype is None else short_dtype(dtype))

    @aten(f"{name}.default", random=True)
    def _of_size(size: Any, dtype: Any = None, **options: Any) -> Any:
        return draw(tuple(size), "f32" if dtype is None else short_dtype(dtype))


_drawn("rand", ops.random_uniform)
_drawn("randn", ops.random_normal)
