"""The tests are tested: a wrong rule, gradient, reduction, offset or linear group must each be caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.ops.op_checks import Sample, check_gradient, check_layouts, check_values
from support.ops.op_samples import SAMPLES as PRIMITIVES
from support.ops.op_samples_fused import SAMPLES as FUSED

from distgraph.errors import DistGraphError
from distgraph.ir import op_registry
from distgraph.ir.index_rule import make_rule
from distgraph.ir.op_registry import REGISTRY, elementwise
from distgraph.tracing.tensor import emit_one

SAMPLES = PRIMITIVES | FUSED
CAUGHT = (AssertionError, DistGraphError, ValueError, IndexError)


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`mutate("matmul", rule=...)` changes a declaration for one test."""

    def change(kind: str, **fields: Any) -> None:
        monkeypatch.setitem(REGISTRY, kind, replace(REGISTRY[kind], **fields))
        op_registry._rule.cache_clear()

    yield change
    op_registry._rule.cache_clear()


def caught(check: Callable[[str, Sample], Any], kind: str) -> bool:
    """Whether some sample of the op fails the check."""
    for sample in SAMPLES[kind]:
        try:
            check(kind, sample)
        except CAUGHT:
            return True
    return False


RULES = {
    "matmul": ["... m k, ... k n -> ... n m", "... m k, ... n k -> ... m n", "... m k, ... k n -> ... m k"],
    "softmax": ["... k -> ... k"],
    "layer_norm": ["... k, k, k -> ... k, ..., ..."],
    "cross_entropy": ["... v, ... -> ..., ..."],
    "rms_norm_grad": ["... k, ... k, k, ... -> ... k, k"],
}


@pytest.mark.parametrize(("kind", "rule"), [(kind, rule) for kind, rules in RULES.items() for rule in rules])
def test_wrong_rule(kind: str, rule: str, mutate: Callable[..., None]) -> None:
    mutate(kind, rule=rule)
    assert caught(check_layouts, kind)


SCANS = ("cumsum", "cumprod", "sort", "argsort", "argmax", "top_k")


@pytest.mark.parametrize("kind", SCANS)
def test_index_that_must_be_whole_is_split(kind: str, mutate: Callable[..., None]) -> None:
    right = REGISTRY[kind].rule
    mutate(kind, rule=lambda shapes, attrs: replace(right(shapes, attrs), whole=frozenset()))
    assert caught(check_layouts, kind)


SLIDING = (
    "conv", "conv_grad_input", "conv_grad_weight", "max_pool", "max_pool_grad", "avg_pool", "avg_pool_grad",
    "flip", "roll", "slice", "pad", "concat",
)  # fmt: skip


@pytest.mark.parametrize("kind", SLIDING)
def test_window_is_one_position_off(kind: str, mutate: Callable[..., None]) -> None:
    right = REGISTRY[kind].reads

    def shifted(op: Any, operand: int, dim: int, start: int, stop: int) -> tuple[int, int]:
        start, stop = right(op, operand, dim, start, stop)
        return start - 1, stop - 1

    mutate(kind, reads=shifted)
    assert caught(check_layouts, kind)


@pytest.mark.parametrize(
    "kind", ["transpose", "broadcast_to", "reduce_sum", "concat", "embedding", "take", "pad", "one_hot"]
)
def test_letters_swapped(kind: str, mutate: Callable[..., None]) -> None:
    right = REGISTRY[kind].rule

    def swapped(shapes: Any, attrs: Any) -> Any:
        rule = right(shapes, attrs)
        first, *rest = rule.results
        return make_rule("mutant", rule.operands, (first[::-1], *rest), rule.sizes, rule.whole, rule.located)

    mutate(kind, rule=swapped)
    assert caught(check_layouts, kind)


def test_reshape_that_ignores_nesting(mutate: Callable[..., None]) -> None:
    def careless(shapes: Any, attrs: Any) -> Any:
        before, after = shapes[0], tuple(attrs["shape"])
        left = tuple((f"i{d}",) for d in range(len(before)))
        right = tuple((f"i{d}",) if d < len(before) and n == before[d] else () for d, n in enumerate(after))
        return make_rule("mutant", (left,), (right,), {f"i{d}": n for d, n in enumerate(before)})

    mutate("reshape", rule=careless)
    assert caught(check_layouts, "reshape")


@pytest.mark.parametrize(
    ("kind", "reduction"),
    [("reduce_max", "sum"), ("reduce_sum", "max"), ("reduce_prod", "sum"), ("reduce_any", "min")],
)
def test_wrong_reduction(kind: str, reduction: str, mutate: Callable[..., None]) -> None:
    mutate(kind, reduction=reduction)
    assert caught(check_layouts, kind)


@pytest.mark.parametrize(
    ("kind", "linear"),
    [
        ("maximum", ((0, 1),)), ("multiply", ((0, 1),)), ("add", ((0,),)), ("exp", ((0,),)),
        ("divide", ((1,),)),
        ("where", ((1,),)), ("matmul", ((0, 1),)), ("scatter_add", ((0,),)), ("softmax_grad", ((0, 1),)),
        ("concat", ((0,),)), ("reduce_max", ((0,),)), ("layer_norm_grad", ((1,),)),
        ("pad", ((0,),)),
    ],
)  # fmt: skip
def test_wrong_linear_group(kind: str, linear: Any, mutate: Callable[..., None]) -> None:
    mutate(kind, linear=linear)
    assert caught(check_layouts, kind)


LOCALIZED = (
    "embedding", "embedding_grad", "take", "pick", "pick_grad", "take_along", "put_along", "one_hot", "iota",
    "full",
    "reshape", "broadcast_to", "dynamic_slice", "scatter_add", "dropout", "random_uniform", "attention",
)  # fmt: skip


@pytest.mark.parametrize("kind", LOCALIZED)
def test_missing_offset(kind: str, mutate: Callable[..., None]) -> None:
    mutate(kind, localize=None)
    assert caught(check_layouts, kind)


def _half(c: Any) -> Any:
    return [c.grad * 0.5 for _ in c.operands]


@pytest.mark.parametrize("kind", ["add", "exp", "square", "maximum", "tanh", "gelu", "sin"])
def test_wrong_gradient(kind: str, mutate: Callable[..., None]) -> None:
    mutate(kind, gradient=_half)
    assert caught(check_gradient, kind)


def test_gradient_of_matmul_without_transpose(mutate: Callable[..., None]) -> None:
    def wrong(c: Any) -> Any:
        x, y = c.operands
        return [emit_one("einsum", c.grad, y, spec="mn,nk->mk") if y.shape[0] == y.shape[1] else c.grad, x]

    mutate("matmul", gradient=wrong)
    assert caught(check_gradient, "matmul")


def test_wrong_kernels(mutate: Callable[..., None]) -> None:
    mutate("sin", kernel=lambda xp, x, out=None: xp.cos(x, out=out))
    assert caught(check_values, "sin")
    mutate("cos", kernel=lambda xp, x, out=None: xp.cos(x))  # forgets out
    assert caught(check_values, "cos")


def test_result_that_is_an_operand(mutate: Callable[..., None]) -> None:
    mutate("identity", view=False)
    assert caught(check_values, "identity")


def test_kernel_that_writes_to_its_operand(mutate: Callable[..., None]) -> None:
    def careless(xp: Any, x: Any, out: Any = None) -> Any:
        return xp.exp(x, out=x)

    mutate("exp", kernel=careless)
    assert caught(check_values, "exp")


def test_split_softmax_is_not_elementwise(mutate: Callable[..., None]) -> None:
    mutate("softmax", rule=elementwise)
    assert caught(check_layouts, "softmax")
    assert np.isfinite(SAMPLES["softmax"][0].operands[0]).all()
