"""Complex numbers of a model of torch, such as rotary positions: a pair of tensors, real and imaginary part.

They come from `view_as_complex`, `complex` or constants and end in `view_as_real`, `real`, `imag` or `abs`.
Between these, sums and products have a rule, and what moves elements moves both parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from distgraph import ops
from distgraph.frontends.torch.folded_constant import Constant
from distgraph.frontends.torch.rule_registry import RULES, aten

MOVING = {
    f"aten.{name}"
    for name in (
        "alias.default", "cat.default", "clone.default", "expand.default", "expand_as.default",
        "flip.default", "mean.dim", "neg.default", "permute.default", "repeat.default", "reshape.default",
        "roll.default", "select.int", "slice.Tensor", "split.Tensor", "split_with_sizes.default",
        "squeeze.default", "squeeze.dim", "squeeze.dims", "stack.default", "sum.dim_IntList", "t.default",
        "transpose.int", "unbind.int", "unsqueeze.default", "view.default", "_unsafe_view.default",
        "_to_copy.default",
    )
}  # fmt: skip
"""Ops that are the same for real and imaginary part."""


@dataclass(frozen=True, slots=True)
class Complex:
    """A complex tensor.

    Attributes:
        real, imag: tensors of equal shape and dtype, or constants.
    """

    real: Any
    imag: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape."""
        return tuple(self.real.shape)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)


def is_complex(value: Any) -> bool:
    """Whether a value of an exported graph, or one of its parts, is complex."""
    return any(isinstance(x, torch.Tensor) and x.is_complex() for x in pytree.tree_leaves(value))


def has_rule(name: str) -> bool:
    """Whether an op has a rule for complex numbers."""
    return name in MOVING or name in _RULES


def complex_result(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an op of which an operand is complex; tensors of other operands are real."""
    if name in _RULES:
        return _RULES[name](*(_parts(x) for x in args), **kwargs)
    results = []
    for part in ("real", "imag"):
        own = pytree.tree_map(
            lambda x, part=part: _part(x, part), (list(args), dict(kwargs)), is_leaf=_is_number
        )
        own[1].pop("dtype", None)  # complex, of `_to_copy`
        results.append(RULES[name].function(*own[0], **own[1]))
    real, imag = results
    if isinstance(real, (tuple, list)):
        return tuple(Complex(a, b) for a, b in zip(real, imag, strict=True))
    return Complex(real, imag)


def _is_number(x: Any) -> bool:
    return isinstance(x, (Complex, Constant))


def _part(x: Any, part: str) -> Any:
    x = _parts(x)
    return getattr(x, part) if isinstance(x, Complex) else x


def _parts(x: Any) -> Any:
    """A complex constant or number as a pair."""
    if isinstance(x, Constant) and x.value.is_complex():
        return Complex(Constant(x.value.real.contiguous()), Constant(x.value.imag.contiguous()))
    return Complex(x.real, x.imag) if isinstance(x, complex) else x


def _pair(x: Any) -> tuple[Any, Any]:
    return (x.real, x.imag) if isinstance(x, Complex) else (x, 0.0)


def _multiply(x: Any, y: Any) -> Complex:
    if not isinstance(y, Complex):
        return Complex(x.real * y, x.imag * y)
    if not isinstance(x, Complex):
        return Complex(y.real * x, y.imag * x)
    return Complex(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)


def _divide(x: Any, y: Any) -> Complex:
    if not isinstance(y, Complex):
        return Complex(x.real / y, x.imag / y)
    size = ops.square(y.real) + ops.square(y.imag)
    return _multiply(x, Complex(y.real / size, -y.imag / size))


def _sum(sign: int) -> Callable[..., Complex]:
    def rule(x: Any, y: Any, alpha: Any = 1) -> Complex:
        (a, b), (c, d) = _pair(x), _pair(y)
        return Complex(a + c * (sign * alpha), b + d * (sign * alpha))

    return rule


def _size(x: Any) -> Any:
    """The absolute value; its gradient at 0 is 0, as in torch."""
    square = ops.square(x.real) + ops.square(x.imag)
    zero = ops.equal(square, 0)
    return ops.where(zero, 0, ops.sqrt(ops.where(zero, 1, square)))


_RULES: dict[str, Callable[..., Any]] = {
    "aten.mul.Tensor": _multiply,
    "aten.div.Tensor": _divide,
    "aten.add.Tensor": _sum(1),
    "aten.sub.Tensor": _sum(-1),
    "aten._conj.default": lambda x: Complex(x.real, -x.imag),
    "aten.conj_physical.default": lambda x: Complex(x.real, -x.imag),
    "aten.view_as_real.default": lambda x: ops.stack([x.real, x.imag], -1),
    "aten.real.default": lambda x: x.real,
    "aten.imag.default": lambda x: x.imag,
    "aten.abs.default": _size,
    "aten.angle.default": lambda x: ops.arctan2(x.imag, x.real),
}


@aten("view_as_complex.default")
def _view_as_complex(x: Any) -> Complex:
    return Complex(ops.getitem(x, (..., 0)), ops.getitem(x, (..., 1)))


@aten("complex.default")
def _complex(real: Any, imag: Any) -> Complex:
    return Complex(real, imag)


@aten("polar.default")
def _polar(size: Any, angle: Any) -> Complex:
    return Complex(size * ops.cos(angle), size * ops.sin(angle))
