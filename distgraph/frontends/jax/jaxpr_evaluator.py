"""Evaluation of a jaxpr on traced tensors: one walk over its equations, in order.

What depends on no input and no parameter stays an array (`folded_constant`); everything else is computed by
the rule of its primitive. Primitives without a rule are collected, so that one error lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from distgraph import ops
from distgraph.errors import GraphError, first_of
from distgraph.frontends.jax import jaxpr_loops as _loops  # noqa: F401 - registers scan and while
from distgraph.frontends.jax.control_flow import CALLS, CONTROL, Refused
from distgraph.frontends.jax.folded_constant import Constant, is_key
from distgraph.frontends.jax.jaxpr_tracing import scope_names, source_line
from distgraph.frontends.jax.random_keys import RandomKey, random_result
from distgraph.frontends.jax.rule_registry import ELEMENTWISE, RULES
from distgraph.frontends.jax.stacked_parameters import StackedParameters
from distgraph.ir.dtypes import short
from distgraph.nn.parameter import Parameter
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

_LARGEST = 1 << 26
"""Numbers of the largest constant that is computed by JAX."""


@dataclass(slots=True)
class Evaluation:
    """The evaluation of one jaxpr and of those that it calls.

    Attributes:
        function: name of the function, for errors.
        loops: number of loops that were unrolled so far.
        inlining: whether functions with a derivative of their own are inlined without it.
        missing: primitive -> places that use it, of those without a rule.
        refused: what rules have refused, with the place.
    """

    function: str
    loops: int = 0
    inlining: bool = False
    missing: dict[str, list[str]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def run(self, closed: Any, operands: Sequence[Any]) -> list[Any]:
        """The results of a closed jaxpr for traced tensors, constants and random keys.

        Raises:
            GraphError: it uses primitives without a rule, or in a way that a rule refuses: all are listed.
        """
        results = self.evaluate(closed, operands)
        if self.missing or self.refused:
            raise GraphError(self._report())
        return results

    def evaluate(self, closed: Any, operands: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr, closed or without constants, in the scope of the trace."""
        jaxpr, constants = (closed.jaxpr, closed.consts) if hasattr(closed, "consts") else (closed, ())
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, map(Constant, constants), strict=True))
        values.update(zip(jaxpr.invars, operands, strict=True))

        trace = Trace.current()

        def read(atom: Any) -> Any:
            if hasattr(atom, "val"):
                return Constant(np.asarray(atom.val, atom.aval.dtype))
            value = values[atom]
            return trace.tensor(value) if isinstance(value, Parameter) else value

        for eqn in jaxpr.eqns:
            scope = ".".join([*([trace.scope] if trace.scope else []), *scope_names(eqn)])
            where = source_line(eqn)
            with trace.on_behalf_of(trace.link, scope, trace.where if where == "?" else where):
                results = self._equation(eqn, [read(atom) for atom in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        drawn = random_result(eqn, operands)
        if drawn is not None:
            return drawn
        if name not in CALLS and all(isinstance(x, Constant) for x in operands):
            folded = self._folded(eqn, operands)
            if folded is not None:
                return folded
        if name not in CONTROL and name not in RULES:
            places = self.missing.setdefault(name, [])
            if Trace.current().where not in places:
                places.append(Trace.current().where)
            return [Refused() for _ in eqn.outvars]
        if name not in CONTROL and any(isinstance(x, Refused) for x in operands):
            return [Refused() for _ in eqn.outvars]
        try:
            if name in CONTROL:
                return CONTROL[name](eqn, operands, self)
            return self._traced(eqn, operands)
        except GraphError as error:
            return self._refuse(eqn, str(error))

    def _refuse(self, eqn: Any, reason: str) -> list[Any]:
        line = f"{eqn.primitive.name} ({Trace.current().where}): {reason}"
        if line not in self.refused:
            self.refused.append(line)
        return [Refused() for _ in eqn.outvars]

    def _folded(self, eqn: Any, operands: Sequence[Constant]) -> list[Any] | None:
        """The results of an equation of constants; None where they are too large."""
        if any(var.aval.size > _LARGEST for var in eqn.outvars):
            return None

        def recipe(position: int) -> Callable[[], Any] | None:
            return (lambda: self._traced(eqn, operands)[position]) if eqn.primitive.name in RULES else None

        arrays = [x.value for x in operands]
        broadcast = _broadcast(eqn, arrays)
        if broadcast is not None:
            return [Constant(broadcast, recipe(0))]
        with jax.ensure_compile_time_eval():
            result = eqn.primitive.bind(*map(_as_jax, arrays), **eqn.params)
        results = result if eqn.primitive.multiple_results else [result]
        return [Constant(x, recipe(i)) for i, x in enumerate(results)]

    def _traced(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """The results of an equation by its rule, in the dtypes that JAX computes."""
        if any(isinstance(x, RandomKey) for x in operands):
            raise GraphError("it reads a random key as numbers; draw with uniform, normal or bernoulli")
        ready = [x.stacked() if isinstance(x, StackedParameters) else x for x in operands]
        if eqn.primitive.name in ELEMENTWISE:
            ready = _narrowed(ready, eqn.outvars[0].aval.shape)
        result = RULES[eqn.primitive.name](*ready, **eqn.params)
        results = result if isinstance(result, (tuple, list)) else [result]
        return [_checked(eqn, x, var.aval) for x, var in zip(results, eqn.outvars, strict=True)]

    def _report(self) -> str:
        count = len(self.missing)
        lines = [f"  {name} ({first_of(places)})" for name, places in self.missing.items()]
        text = ""
        if lines:
            text = (
                f"{self.function} uses {count} primitive{'s' if count > 1 else ''} of jax without a rule:\n"
                + "\n".join(lines)
                + "\nwrite them with other functions, or give each a rule with "
                '@distgraph.frontends.jax.register_jax_primitive("name")'
            )
        if self.refused:
            text += "\n" * bool(text) + f"{self.function} cannot be imported:\n  " + "\n  ".join(self.refused)
        return text


def _as_jax(array: Any) -> Any:
    return array if is_key(array) else jax.numpy.asarray(array)


def _broadcast(eqn: Any, arrays: Sequence[Any]) -> Any:
    """A constant that repeats a smaller one, as a view of it; None for another primitive."""
    params = eqn.params
    if eqn.primitive.name == "iota":
        dim, shape = params["dimension"], params["shape"]
        line = np.arange(shape[dim]).astype(params["dtype"])
        return np.broadcast_to(line.reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape)
    if eqn.primitive.name == "broadcast_in_dim" and len(arrays) == 1 and not is_key(arrays[0]):
        dims = {int(d): n for d, n in zip(params["broadcast_dimensions"], arrays[0].shape, strict=True)}
        aligned = arrays[0].reshape([dims.get(d, 1) for d in range(len(params["shape"]))])
        return np.broadcast_to(aligned, params["shape"])
    return None


def _narrowed(operands: Sequence[Any], shape: Any) -> list[Any]:
    """Operands of an elementwise primitive, with constants that repeat along a dim once along it."""
    if not any(isinstance(x, Tensor) and x.shape == tuple(shape) for x in operands):
        return list(operands)
    return [x.narrow() if isinstance(x, Constant) else x for x in operands]


def _checked(eqn: Any, result: Any, expected: Any) -> Any:
    """A result in the dtype that JAX computes. Raises GraphError for another shape."""
    if not isinstance(result, (Tensor, Constant)):
        return result
    if tuple(result.shape) != tuple(expected.shape):
        raise GraphError(
            f"the rule of {eqn.primitive.name} computes shape {tuple(result.shape)} but jax "
            f"{tuple(expected.shape)}; correct the rule"
        )
    dtype = short(expected.dtype)
    return ops.cast(result, dtype) if result.dtype != dtype else result
