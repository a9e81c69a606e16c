"""ImportedFunction: a function of JAX as a module of distgraph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from distgraph.errors import GraphError
from distgraph.frontends.imported_model import ImportedModel, returned
from distgraph.frontends.jax.jaxpr_evaluator import Evaluation
from distgraph.frontends.jax.jaxpr_tracing import (
    Arguments,
    Leaf,
    TracedFunction,
    flatten_arguments,
    trace_function,
)
from distgraph.frontends.jax.random_keys import RandomKey
from distgraph.frontends.jax.stacked_parameters import StackedParameters, scanned_inputs
from distgraph.ir.dtypes import is_float, short
from distgraph.nn import Buffer, Parameter
from distgraph.ops import cast
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

_ABSENT: Any = object()


class ImportedFunction(ImportedModel):
    """A function of JAX whose jaxpr is evaluated; made by `import_function`.

    Parameters have the paths of the leaves of the parameters, and their values; see `stacked_parameters` for
    those of layers that are scanned. The function is traced by JAX again for every shape of the inputs, so
    that any number of samples can be given.
    """

    def __init__(self, training: Arguments, evaluation: Arguments, has_state: bool) -> None:
        self._arguments = {True: training, False: evaluation}
        self._has_state = has_state
        self._traced: dict[Any, TracedFunction] = {}
        self._layers = self._scanned()
        inputs = [leaf.name for leaf in training.of_kind("input")]
        super().__init__(training.name, dict(self._made()), inputs)

    def _scanned(self) -> dict[str, int]:
        """Name of each parameter that only scans over layers read, in both modes -> number of layers."""
        names_by_mode: list[set[str]] = []
        for training, arguments in self._arguments.items():
            leaves = [leaf for leaf in arguments.leaves if leaf.kind != "static"]
            types = {leaf.name: (leaf.shape, short(leaf.dtype)) for leaf in arguments.of_kind("input")}
            scanned = scanned_inputs(self._jaxpr(training, types).closed)
            names_by_mode.append(
                {leaf.name for leaf, is_scanned in zip(leaves, scanned, strict=True) if is_scanned}
            )
        parameters = self._arguments[True].of_kind("parameter")
        return {
            leaf.name: leaf.shape[0]
            for leaf in parameters
            if all(leaf.name in names for names in names_by_mode)
        }

    def _made(self) -> Iterator[tuple[str, Parameter]]:
        """(name, parameter or buffer) of all leaves; those of layers one by one."""
        for leaf in self._arguments[True].of_kind("parameter", "buffer", "state"):
            if leaf.name not in self._layers:
                yield leaf.name, _tensor(leaf)
                continue
            for number in range(self._layers[leaf.name]):
                value = None if leaf.value is None else leaf.value[number]
                one = replace(leaf, name=f"{leaf.name}.{number}", shape=leaf.shape[1:], value=value)
                yield one.name, _tensor(one)

    def children(self) -> Iterator[tuple[str, Any]]:
        """(path in the parameters or the state, parameter or buffer)."""
        yield from self._tensors.items()

    def _run(self, given: Mapping[str, Any]) -> Any:
        trace = Trace.current()
        arguments = self._arguments[trace.training]
        inputs = {
            leaf.name: _input(arguments.name, leaf, trace.tensor(given[leaf.name]))
            for leaf in arguments.of_kind("input")
        }
        traced = self._jaxpr(trace.training, {name: (x.shape, x.dtype) for name, x in inputs.items()})
        values = [self._value(leaf, inputs) for leaf in arguments.leaves if leaf.kind != "static"]
        with jax.enable_x64(arguments.wide):
            results = Evaluation(arguments.name).run(traced.closed, values)
        count = len(results) - traced.states
        if trace.training:
            for leaf, new in zip(arguments.of_kind("state"), results[count:], strict=True):
                self._update(leaf.name, new)
        outputs = zip(traced.outputs, results[:count], strict=True)
        return returned(traced.kind, {name: trace.tensor(x) for name, x in outputs})

    def _value(self, leaf: Leaf, inputs: Mapping[str, Tensor]) -> Any:
        if leaf.kind == "key":
            return RandomKey()
        if leaf.name in self._layers and leaf.kind == "parameter":
            count = self._layers[leaf.name]
            return StackedParameters(tuple(self._tensors[f"{leaf.name}.{i}"] for i in range(count)))
        return inputs[leaf.name] if leaf.kind == "input" else self._tensors[leaf.name]

    def _jaxpr(self, training: bool, types: Mapping[str, tuple[tuple[int, ...], str]]) -> TracedFunction:
        """The jaxpr of a mode for inputs of some shapes and dtypes."""
        key = training or self._arguments[True] is self._arguments[False], tuple(types.items())
        if key not in self._traced:
            self._traced[key] = trace_function(self._arguments[training], types, self._has_state)
        return self._traced[key]

    def _check(self) -> None:
        """Trace the function for its example, in both modes. Raises GraphError as `Evaluation.run`."""
        for training, arguments in self._arguments.items():
            trace = Trace("import")
            trace.training = training
            with trace.activate():
                self(
                    *(
                        trace.source("input", leaf.name, leaf.shape, short(leaf.dtype))
                        for leaf in arguments.of_kind("input")
                    )
                )


def import_function(
    function: Callable[..., Any],
    params: Any,
    *examples: Any,
    state: Any = _ABSENT,
    evaluation: Callable[..., Any] | None = None,
) -> ImportedFunction:
    """A function of JAX as a module of distgraph, which trains, plans and exports like any other.

    Values of parameters are copied; those of which only the shape is known (`jax.eval_shape`) are drawn as
    normal numbers, so that a large model can be planned without its memory. Leaves that are no arrays, such
    as numbers of Python, stay part of the program. Random keys among the examples are no inputs: what is
    drawn from them becomes random ops, new in every step.

    Args:
        function: (params, *inputs) -> array, tuple or dict of arrays; with `state` it is
            (params, state, *inputs) -> (outputs, new state).
        params: pytree; floating arrays become parameters, named by their path, other arrays buffers.
        examples: pytrees of arrays like the inputs; any number of samples may be given later.
        state: pytree of what a step changes without learning it, such as running statistics.
        evaluation: the function for `evaluate` and `predict`, where that differs, with the same arguments.

    Raises:
        GraphError: JAX cannot trace the function, or it uses primitives without a rule: all are listed.

    Example:
        >>> import distgraph as dg, jax.numpy as jnp
        >>> def apply(params, x):
        ...     return x @ params["w"] + params["b"]
        >>> params = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4)}
        >>> model = dg.frontends.jax.import_function(apply, params, jnp.ones((2, 3)))
        >>> [(name, p.shape) for name, p in model.named_parameters()]
        [('b', (4,)), ('w', (3, 4))]
    """
    has_state = state is not _ABSENT
    for each in (function, evaluation):
        if each is not None and not callable(each):
            raise GraphError(
                f"function is a {type(each).__name__} but must be callable; give (params, *inputs) -> outputs"
            )
    training = flatten_arguments(function, params, state, examples, has_state)
    evaluating = training
    if evaluation is not None:
        evaluating = Arguments(evaluation, training.tree, training.leaves, training.wide)
    model = ImportedFunction(training, evaluating, has_state)
    model._check()
    return model


def _tensor(leaf: Leaf) -> Parameter:
    dtype = short(leaf.dtype)
    parameter = Parameter(leaf.shape, dtype) if leaf.kind == "parameter" else Buffer(leaf.shape, dtype)
    if leaf.value is not None:
        parameter.assign(np.asarray(leaf.value))
    return parameter


def _input(function: str, leaf: Leaf, x: Tensor) -> Tensor:
    """An input in the dtype of the example. Raises GraphError for another rank, or another floating dtype."""
    dtype = short(leaf.dtype)
    if x.ndim != len(leaf.shape):
        raise GraphError(
            f"input {leaf.name} of {function} is {x.value.type} but its example {leaf.type}; "
            "give as many dims"
        )
    if x.dtype == dtype:
        return x
    if is_float(x.dtype) or is_float(dtype):
        raise GraphError(
            f"input {leaf.name} of {function} is {x.value.type} but its example {leaf.type}; convert "
            "the array with .astype, or import with an example of this dtype"
        )
    return cast(x, dtype)
