"""Opaque ops: functions of the host that a program calls by name, about which only an index rule is known.

A frontend emits one where an op of its framework has no rule of distgraph's own. The graph has the name of
the function, its index rule and the dtypes of its results, so that it is completed, resharded, searched and
forecast like any other and has a text form; the function itself is registered by the process that runs it.

An index is split only if every result has it: the op may combine the elements of any other in any way, so
those stay whole. The gradient is an op of its own, computed by the function's `pull_back`. Its index rule is
the same, read from results to operands: where an operand lacks an index, its gradient is a partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from distgraph.errors import GraphError, RuntimeFault
from distgraph.ir.dtypes import is_float, to_numpy
from distgraph.ir.graph import Op, Value
from distgraph.ir.index_rule import Rule, bind, make_rule
from distgraph.ir.op_registry import Attrs, GradientContext, Shape, Shapes, define
from distgraph.kernels._common import Array, outputs, store
from distgraph.tracing.tensor import Tensor, emit

Arrays = Sequence[Array]
_FLOATS = "fV"
"""Kinds of NumPy of floating dtypes; V is that of bf16."""


@dataclass(frozen=True, slots=True)
class HostFunction:
    """A function of NumPy arrays.

    Attributes:
        run: (operands, arguments) -> results.
        pull_back: (operands, gradients of the results, arguments) -> gradients of the operands. A gradient is
            None where it is zero or the tensor has none.
        no_gradient: (operands as values, arguments) -> why it has no gradient; empty where it has one.
    """

    run: Callable[[Arrays, Any], Arrays]
    pull_back: Callable[[Arrays, Sequence[Array | None], Any], Sequence[Array | None]]
    no_gradient: Callable[[Sequence[Value], Any], str]


FUNCTIONS: dict[str, HostFunction] = {}
"""Name -> function of this process."""


def opaque(
    function: str,
    operands: Sequence[Any],
    rule: str,
    dtypes: Sequence[str],
    *,
    arguments: Any = None,
    sizes: Mapping[str, int] | None = None,
    traffic: float = 1.0,
) -> tuple[Tensor, ...]:
    """Call a function of the host.

    Args:
        function: its name in `FUNCTIONS`.
        operands: tensors.
        rule: index rule (`distgraph.ir.index_rule`), with `...` for dims that broadcast.
        dtypes: short names of the dtypes of the results.
        arguments: what else the function gets: numbers, texts, lists and dicts of them.
        sizes: lengths of indices that no operand has.
        traffic: how often operands and results move through memory, for the forecast.

    Returns:
        the results.

    Raises:
        GraphError: the rule does not fit the operands.
    """
    attrs = {"function": function, "rule": rule, "dtypes": tuple(dtypes), "sizes": dict(sizes or {})}
    results = emit("opaque", *operands, **attrs, arguments=arguments, traffic=float(traffic))
    return results if isinstance(results, tuple) else (results,)


def opaque_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    """The index rule of an opaque op, in which all indices are whole that a result lacks.

    Raises:
        GraphError: the rule does not fit the shapes, or says what an opaque op cannot do.
    """
    return _bound(attrs["rule"], shapes, tuple(sorted(attrs["sizes"].items())), len(attrs["dtypes"]))


@lru_cache(maxsize=4096)
def _bound(text: str, shapes: Shapes, sizes: tuple[tuple[str, int], ...], results: int) -> Rule:
    rule = bind(text, shapes, None, sizes)
    if len(rule.results) != results:
        raise GraphError(f"rule {text!r} has {len(rule.results)} results but the op has {results}")
    if rule.sliding or rule.located:
        raise GraphError(
            f"rule {text!r} has an index with ~ or @ but an opaque op is not told where its block "
            "begins; write ! after the index, which keeps it whole"
        )
    unknown = [i for i in rule.indices if i not in rule.sizes]
    if unknown:
        raise GraphError(
            f"rule {text!r} has the index {unknown[0]} in a result only; give its length in `sizes`"
        )
    whole = {index for index in rule.indices if not _is_local(rule, index)}
    return make_rule(text, rule.operands, rule.results, rule.sizes, rule.whole | whole)


def _is_local(rule: Rule, index: str) -> bool:
    """Whether every result has an index, and an operand; no tensor has it twice."""
    counts = [[i for dim in term for i in dim].count(index) for term in (*rule.operands, *rule.results)]
    read, made = counts[: len(rule.operands)], counts[len(rule.operands) :]
    return max(counts) == 1 and 1 in read and 0 not in made


def _gradient_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    """Operands are those of the op and the gradients of results that have one."""
    rule = opaque_rule(shapes[: len(attrs["needs"])], attrs)
    received = [term for term, given in zip(rule.results, attrs["received"], strict=True) if given]
    needed = [term for term, need in zip(rule.operands, attrs["needs"], strict=True) if need]
    return make_rule(
        f"gradient of {rule.text}", (*rule.operands, *received), tuple(needed), rule.sizes, rule.whole
    )


def _infer(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    shapes = _result_shapes(tuple(v.shape for v in operands), attrs)
    return list(zip(shapes, attrs["dtypes"], strict=True))


def _result_shapes(shapes: Shapes, attrs: Attrs) -> Shapes:
    rule = opaque_rule(shapes, attrs)
    return tuple(tuple(math.prod(rule.sizes[i] for i in dim) for dim in term) for term in rule.results)


def _infer_gradient(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    own = operands[: len(attrs["needs"])]
    return [(v.shape, v.dtype) for v, need in zip(own, attrs["needs"], strict=True) if need]


def _function(name: str) -> HostFunction:
    if name not in FUNCTIONS:
        raise RuntimeFault(
            f"opaque op calls {name!r}, which is not registered in this process; import the model here, as "
            "the script that made the program does"
        )
    return FUNCTIONS[name]


def _kernel(xp: Any, *arrays: Array, out: Any = None, **attrs: Any) -> Any:
    results = _function(attrs["function"]).run(_on_host(xp, arrays), attrs["arguments"])
    shapes = _result_shapes(tuple(tuple(x.shape) for x in arrays), attrs)
    return _stored(xp, attrs, results, list(zip(shapes, attrs["dtypes"], strict=True)), out)


def _gradient_kernel(xp: Any, *arrays: Array, out: Any = None, **attrs: Any) -> Any:
    count, given = len(attrs["needs"]), iter(_on_host(xp, arrays[len(attrs["needs"]) :]))
    operands = _on_host(xp, arrays[:count])
    received = [next(given) if each else None for each in attrs["received"]]
    grads = list(_function(attrs["function"]).pull_back(operands, received, attrs["arguments"]))
    if len(grads) != count:
        raise RuntimeFault(
            f"gradient of {attrs['function']} gives {len(grads)} arrays but the op has {count} operands; "
            "return one for each tensor, None where there is none"
        )
    needed = [(x, grad) for x, grad, need in zip(operands, grads, attrs["needs"], strict=True) if need]
    results = [np.zeros_like(x) if grad is None else grad for x, grad in needed]
    return _stored(xp, attrs, results, [(tuple(x.shape), x.dtype) for x, _ in needed], out)


def _on_host(xp: Any, arrays: Arrays) -> list[Array]:
    return list(arrays) if xp is np else [xp.asnumpy(x) for x in arrays]


def _stored(xp: Any, attrs: Attrs, results: Arrays, expected: Sequence[tuple[Shape, Any]], out: Any) -> Any:
    """Results in `out`, cast to their dtypes. Raises RuntimeFault where a shape or dtype does not fit."""
    made = [np.asarray(x) for x in results]
    if [x.shape for x in made] != [shape for shape, _ in expected]:
        raise RuntimeFault(
            f"{attrs['function']} gives arrays of shapes {', '.join(str(x.shape) for x in made)} but its "
            f"rule {attrs['rule']!r} says {', '.join(str(shape) for shape, _ in expected)} for the operands "
            "of this rank; correct the function, or its rule"
        )
    dtypes = [to_numpy(dtype) if isinstance(dtype, str) else dtype for _, dtype in expected]
    for x, dtype in zip(made, dtypes, strict=True):
        if not _is_cast(x.dtype, dtype):
            raise RuntimeFault(
                f"{attrs['function']} gives an array of {x.dtype} but the op has one of {dtype}; convert it "
                "in the function"
            )
    arrays = [xp.asarray(x.astype(dtype, copy=False)) for x, dtype in zip(made, dtypes, strict=True)]
    if len(arrays) == 1:
        return store(xp, arrays[0], out[0] if isinstance(out, tuple) else out)
    return tuple(store(xp, x, o) for x, o in zip(arrays, outputs(out, len(arrays)), strict=True))


def _is_cast(dtype: Any, target: Any) -> bool:
    """Whether results of a dtype are stored as another: not floats as integers, and no complex numbers."""
    return dtype.kind in "biu" or (dtype.kind in _FLOATS and target.kind in _FLOATS)


def _gradient(c: GradientContext) -> list[Tensor | None]:
    needs = tuple(need and is_float(x.dtype) for x, need in zip(c.operands, c.needs, strict=True))
    received = [g for g in c.grads if g is not None]
    if not any(needs) or not received:
        return [None] * len(needs)
    name, values = c.attrs["function"], [x.value for x in c.operands]
    reason = _function(name).no_gradient(values, c.attrs["arguments"])
    if reason:
        shown = c.results[0].value
        raise GraphError(
            f"%{shown.name} {shown.type} is computed by the opaque op {name} ({c.operands[0].trace.where}), "
            f"which has no gradient: {reason}; give one, or wrap the op in stop_gradient (torch: detach)"
        )
    given = tuple(g is not None for g in c.grads)
    grads = emit("opaque_gradient", *c.operands, *received, **c.attrs, needs=needs, received=given)
    made = iter(grads if isinstance(grads, tuple) else (grads,))
    return [next(made) if need else None for need in needs]


def _traffic(op: Op) -> int:
    moved = sum(v.nbytes for v in (*op.operands, *op.results))
    return int(op.attrs["traffic"] * moved * (2 if op.kind == "opaque_gradient" else 1))


def _workspace(*arrays: Array, **attrs: Any) -> int:
    """Results before they are stored, and contiguous copies of operands."""
    count = len(attrs.get("needs", arrays))
    shapes = _result_shapes(tuple(tuple(x.shape) for x in arrays[:count]), attrs)
    made = sum(math.prod(s) * to_numpy(d).itemsize for s, d in zip(shapes, attrs["dtypes"], strict=True))
    if "needs" in attrs:  # the forward part again, gradients and what autograd keeps between the two
        made += 2 * sum(int(x.nbytes) for x in arrays[:count])
    return made + sum(int(x.nbytes) for x in arrays if not x.flags.c_contiguous)


define(
    "opaque", opaque_rule, _kernel, infer=_infer, gradient=_gradient, traffic=_traffic, workspace=_workspace
)
define(
    "opaque_gradient",
    _gradient_rule,
    _gradient_kernel,
    infer=_infer_gradient,
    traffic=_traffic,
    workspace=_workspace,
)
