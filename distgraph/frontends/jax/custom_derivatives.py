"""Functions with a derivative of their own (`jax.custom_jvp`, `jax.custom_vjp`).

Such a function is inlined where the derivative of what it computes is the one that it declares, which is
tried with numbers. Otherwise the declared derivative B(x, dy), which is linear in dy, is kept by

    y = stop_gradient(f(x)) + L(stop_gradient(x), x - stop_gradient(x)),    L(x, .) the transpose of B(x, .)

whose second term is zero and has the gradient B(x, dy).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import numpy as np

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.jax.folded_constant import is_key
from distgraph.tracing.tensor import Tensor

_LARGEST = 1 << 24
"""Numbers of the largest operands with which a derivative is tried."""

_TOLERANCE = {2: 5e-2, 4: 1e-3, 8: 1e-7}
"""Bytes of a number -> relative difference of derivatives that counts as rounding."""


def custom_derivative(eqn: Any, inner: Any, operands: Sequence[Any]) -> Any | None:
    """The jaxpr of L(x, dx) over all floating operands; None where the function can be inlined.

    Raises:
        GraphError: the declared derivative is another one, and not linear.
    """
    if not any(isinstance(x, Tensor) and _is_differentiable(v.aval) for x, v in _pairs(eqn, operands)):
        return None
    points = [var.aval for var in eqn.invars]
    small = sum(aval.size for aval in points) <= _LARGEST
    if small and not any(is_key(aval) for aval in points) and _agrees(eqn, inner, points):
        return None
    try:
        return _transposed(eqn, points)
    except (TypeError, ValueError, NotImplementedError, AssertionError, AttributeError) as error:
        text = str(error).strip().splitlines()
        raise GraphError(
            f"the derivative that {inner.jaxpr.debug_info.func_name} declares is not that of what it "
            f"computes, and not linear ({text[0] if text else type(error).__name__}); write the function "
            "without it, and clip gradients with the optimizer"
        ) from error


def with_derivative(
    transposed: Any, eqn: Any, operands: Sequence[Any], values: Sequence[Any], evaluate: Any
) -> list[Any]:
    """The results of a function, with the gradient that it declares; `transposed` is the jaxpr of L
    (see `custom_derivative`).
    """
    fixed = [ops.stop_gradient(x) if isinstance(x, Tensor) else x for x in operands]
    zeros = [
        ops.subtract(x, still)
        for (x, var), still in zip(_pairs(eqn, operands), fixed, strict=True)
        if _is_differentiable(var.aval)
    ]
    changes = iter(evaluate(transposed, [*fixed, *zeros]))
    results = []
    for value, var in zip(values, eqn.outvars, strict=True):
        still = ops.stop_gradient(value) if isinstance(value, Tensor) else value
        results.append(ops.add(still, next(changes)) if _is_differentiable(var.aval) else still)
    return results


def _pairs(eqn: Any, operands: Sequence[Any]) -> Any:
    return zip(operands, eqn.invars, strict=True)


def _is_differentiable(aval: Any) -> bool:
    return not is_key(aval) and bool(jax.numpy.issubdtype(aval.dtype, np.floating))


def _function(eqn: Any) -> Any:
    """The equation as a function of its operands, with the derivative that it declares."""
    names = [jax.extend.core.Var(var.aval) for var in eqn.invars]
    single = jax.extend.core.Jaxpr(
        constvars=[],
        invars=names,
        outvars=list(eqn.outvars),
        eqns=[eqn.replace(invars=names)],
        effects=eqn.effects,
        debug_info=eqn.params["call_jaxpr"].jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    return lambda *xs: jax.core.eval_jaxpr(single, [], *xs)


def _differentiated(function: Any, points: Sequence[Any], avals: Sequence[Any]) -> Any:
    """(results, (dy of floating results) -> dx of floating operands) of a function."""
    moving = [i for i, aval in enumerate(avals) if _is_differentiable(aval)]

    def of_moving(*xs: Any) -> Any:
        every = list(points)
        for i, x in zip(moving, xs, strict=True):
            every[i] = x
        return [y for y in function(*every) if _is_differentiable(y)]

    return jax.vjp(of_moving, *(points[i] for i in moving))


def _agrees(eqn: Any, inner: Any, avals: Sequence[Any]) -> bool:
    """Whether the declared derivative is that of what the function computes, at two points."""

    def plain(*xs: Any) -> Any:
        return jax.core.eval_jaxpr(inner.jaxpr, inner.consts, *xs)

    for seed in (0, 1):
        numbers = np.random.default_rng(seed)
        points = [_point(aval, numbers, positive=seed == 1) for aval in avals]
        try:
            results, declared = _differentiated(_function(eqn), points, avals)
            _, computed = _differentiated(plain, points, avals)
            slopes = [_point(y, numbers, positive=False) for y in results]
            pairs = list(zip(declared(slopes), computed(slopes), strict=True))
        except (TypeError, ValueError, NotImplementedError):
            return False  # what it computes has no derivative
        if not all(_close(a, b) for a, b in pairs):
            return False
    return True


def _point(aval: Any, numbers: Any, *, positive: bool) -> Any:
    if not _is_differentiable(aval):
        return jax.numpy.zeros(aval.shape, aval.dtype)
    drawn = numbers.uniform(0.1, 0.9, aval.shape) if positive else numbers.standard_normal(aval.shape)
    return jax.numpy.asarray(drawn, aval.dtype)


def _close(declared: Any, computed: Any) -> bool:
    first, second = (np.asarray(x, np.float64) for x in (declared, computed))
    finite = np.isfinite(first) & np.isfinite(second)
    scale = max(1.0, float(np.abs(first[finite]).max(initial=0.0)))
    limit = _TOLERANCE[declared.dtype.itemsize] * scale
    return bool((np.abs(first - second)[finite] <= limit).all())


def _transposed(eqn: Any, avals: Sequence[Any]) -> Any:
    """The jaxpr of L: (operands, dx of the floating ones) -> dy of the floating results."""
    moving = [aval for aval in avals if _is_differentiable(aval)]
    results = [var.aval for var in eqn.outvars if _is_differentiable(var.aval)]

    def transposed(*arrays: Any) -> Any:
        points, changes = arrays[: len(avals)], arrays[len(avals) :]
        _, backward = _differentiated(_function(eqn), points, avals)
        shapes = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in results]
        (changes_of_inputs,) = jax.linear_transpose(backward, shapes)(tuple(changes))
        return changes_of_inputs

    given = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in (*avals, *moving)]
    return jax.make_jaxpr(transposed)(*given)
