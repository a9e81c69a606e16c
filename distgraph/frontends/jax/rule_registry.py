"""The table of rules: name of a primitive of JAX -> function of distgraph tensors that computes it.

A rule takes the operands of the primitive by position, as traced tensors or constants, and its parameters by
name. It returns a tensor or, for a primitive of several results, a tuple. The evaluator casts the result to
the dtype that JAX computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from distgraph.errors import GraphError

Rule = Callable[..., Any]
Function = TypeVar("Function", bound=Rule)

RULES: dict[str, Rule] = {}
"""Name of a primitive such as "dot_general" -> its rule."""


ELEMENTWISE: set[str] = set()
"""Primitives whose operands may be repeated along dims implicitly."""


def primitive(*names: str, elementwise: bool = False) -> Callable[[Function], Function]:
    """Register a function as the rule of primitives."""

    def register(function: Function) -> Function:
        for name in names:
            RULES[name] = function
            if elementwise:
                ELEMENTWISE.add(name)
        return function

    return register


def register_jax_primitive(name: str) -> Callable[[Function], Function]:
    """Register the rule of a primitive that has none yet, as a decorator.

    Args:
        name: of the primitive, as in the error that lists it, such as "lgamma".

    Raises:
        GraphError: the primitive has a rule already.

    Example:
        >>> import distgraph as dg
        >>> @dg.frontends.jax.register_jax_primitive("scale_by")
        ... def scale_by(x, *, factor):
        ...     return x * factor
    """
    if name in RULES:
        raise GraphError(f"primitive {name} has a rule already: {RULES[name].__module__}; remove this one")
    return primitive(name)
