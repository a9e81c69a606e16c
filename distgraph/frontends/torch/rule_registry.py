"""The table of rules: name of an ATen op -> function of distgraph tensors that computes it.

A rule takes the arguments of the op as its schema has them: tensors are traced tensors, symbolic sizes are
numbers, dtypes are those of torch. It returns a tensor or, for an op of several results, a tuple; an entry of
the tuple may be None where the rule does not compute it. The evaluator casts the result to the dtype that
torch computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from distgraph.errors import GraphError

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Rule:
    """How to compute an op.

    Attributes:
        function: see the docstring of this module.
        operands: dtype to which operands are cast first: "result" (that of the result), "common" (the one to
            which torch promotes them), or "" for none.
    """

    function: Callable[..., Any]
    operands: str = ""


RULES: dict[str, Rule] = {}
"""Name of an op such as "aten.add.Tensor" -> its rule."""

RANDOM = {"aten.native_dropout.default", "aten.dropout.default"}
"""Ops that draw random numbers: never folded, even where their operands are constants."""

IGNORED = {
    "aten._assert_tensor_metadata.default",
    "aten._assert_scalar.default",
    "aten._assert_async.msg",
    "aten.sym_constrain_range.default",
    "aten.sym_constrain_range_for_size.default",
}
"""Ops without a result: checks that torch has made while it exported."""


def aten(*names: str, operands: str = "", random: bool = False) -> Callable[[Function], Function]:
    """Register a function as the rule of ATen ops, which are named without the prefix "aten."."""

    def register(function: Function) -> Function:
        for name in names:
            RULES[f"aten.{name}"] = Rule(function, operands)
            if random:
                RANDOM.add(f"aten.{name}")
        return function

    return register


def register_torch_op(name: str) -> Callable[[Function], Function]:
    """Register the rule of an op that has none yet, as a decorator.

    Args:
        name: of the op with its overload, as in the error that lists it, such as "mylib.scale.default".

    Raises:
        GraphError: the name has no overload, or has a rule already.

    Example:
        >>> import distgraph as dg
        >>> @dg.frontends.torch.register_torch_op("mylib.scale.default")
        ... def scale(x, factor):
        ...     return x * factor
    """
    if name.count(".") != 2:
        raise GraphError(
            f"op is named {name!r} but must have a library, a name and an overload, such as "
            f'"aten.add.Tensor" or "mylib.scale.default"'
        )
    if name in RULES:
        raise GraphError(f"op {name} has a rule already: {RULES[name].function.__module__}; remove this one")

    def register(function: Function) -> Function:
        RULES[name] = Rule(function)
        return function

    return register
