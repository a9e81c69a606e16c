"""Random numbers: keys that are arguments of the function become the random numbers of distgraph.

JAX computes random numbers from a key that the program passes along. Where the key is an argument, every draw
becomes a random op of distgraph, whose numbers are new in every step and the same under every layout. The
distribution is that of JAX, the numbers are not. Keys that are made inside of the function, from a constant,
give the numbers of JAX, the same in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distgraph import ops
from distgraph.frontends.jax.folded_constant import Constant
from distgraph.ir.dtypes import short


class RandomKey:
    """A random key, or an array of them, that depends on an argument."""

    def item(self, position: int) -> RandomKey:
        """An item of an array of keys."""
        return self


_PASSED = {
    "random_wrap", "random_unwrap", "random_split", "random_fold_in", "slice", "squeeze", "reshape", "copy",
    "broadcast_in_dim", "dynamic_slice", "gather", "convert_element_type", "select_n", "concatenate",
    "transpose", "expand_dims", "copy_p",
}  # fmt: skip
"""Primitives of which one key makes another."""

_DRAWS = ("_uniform", "_normal", "_normal_real")
"""Functions of `jax.random` that draw numbers; all others are made of them."""


def random_result(eqn: Any, operands: Sequence[Any]) -> Sequence[Any] | None:
    """The results of an equation that makes keys of a key or draws numbers; None for any other equation."""
    name = eqn.primitive.name
    if name == "random_wrap" and not isinstance(operands[0], Constant):
        return [RandomKey()]
    if not any(isinstance(x, RandomKey) for x in operands):
        return None
    if name in _PASSED:
        return [RandomKey() for _ in eqn.outvars]
    if name not in ("jit", "pjit"):
        return None
    called = eqn.params["name"]
    if called not in _DRAWS:
        return None
    aval = eqn.outvars[0].aval
    shape, dtype = tuple(aval.shape), short(aval.dtype)
    if called != "_uniform":
        return [ops.random_normal(shape, dtype)]
    low, high = (ops.cast(x, dtype) for x in operands[1:3])
    unit = ops.random_uniform(shape, dtype)
    if _is(operands[1], 0) and _is(operands[2], 1):
        return [unit]
    return [ops.maximum(low, unit * (high - low) + low)]


def _is(x: Any, number: float) -> bool:
    return isinstance(x, Constant) and x.size == 1 and float(x.value) == number
