"""Checks of the arguments of an engine, at the call that gets them, and of what a model does in a trace.

Messages name the argument, so that a mistake does not become an exception inside of a library later.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from distgraph.errors import GraphError, ResourceError, RuntimeFault
from distgraph.errors.arguments import is_integer, shown
from distgraph.nn import Buffer, Module, Parameter
from distgraph.optim import Optimizer
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import Strategy
from distgraph.resources import Cluster
from distgraph.runtime.execute.process_group import is_chief
from distgraph.tracing.tracer import Trace, user_stack_level

_ACCURACY = "lambda logits, labels: (logits.argmax(-1) == labels).astype('f32').mean()"
_OTHERS = ("torch", "jax", "flax", "optax", "keras", "tensorflow")


def check_parts(
    model: Any, loss: Any, optimizer: Any, metrics: Any, strategy: Any, cluster: Any, seed: Any, plan: Any
) -> None:
    """Check the arguments of `Engine`.

    Raises:
        GraphError: model, loss, optimizer, metrics, strategy or plan have a wrong type, or are a class in
            place of an object.
        ResourceError: cluster has a wrong type.
    """
    _check_model(model)
    if loss is not None:
        _check_function("loss", loss, "such as distgraph.nn.CrossEntropy()")
        way = "give one of distgraph.nn, such as CrossEntropy(), or a function of distgraph.ops"
        _check_not_foreign("loss", loss, way)
    way = "dg.frontends.torch.import_optimizer(optimizer) makes one of distgraph.optim of SGD, Adam and AdamW"
    _check_not_foreign("optimizer", optimizer, way)
    for subject, argument, type_, example in (
        ("optimizer", optimizer, Optimizer, "distgraph.optim.Adam(lr=1e-3)"),
        ("strategy", strategy, Strategy, "distgraph.Strategy(micro_batches=4)"),
    ):
        if argument is not None and not isinstance(argument, type_):
            raise GraphError(f"{subject} is {shown(argument)} but must be an object such as {example}")
    _check_metrics(metrics)
    if cluster is not None and not isinstance(cluster, (Cluster, str, Path)):
        raise ResourceError(
            f"cluster is {shown(cluster)} but must be a Cluster, or the path or name of a resource file"
        )
    if plan is not None and not isinstance(plan, (Plan, str, Path)):
        raise GraphError(f"plan is {shown(plan)} but must be a distgraph.Plan, or the path of a plan file")
    if not is_integer(seed):
        raise GraphError(f"seed is {shown(seed)} but must be an integer")
    if not -(2**63) <= seed < 2**64:
        raise GraphError(f"seed is {shown(seed)} but must fit into 64 bits; use a number below 2**64")


def check_micro_batches(batch_size: int, micro_batches: int) -> None:
    """Raises GraphError where a batch size is no multiple of the number of micro-batches."""
    if batch_size % micro_batches:
        raise GraphError(
            f"batch_size is {batch_size} but micro_batches is {micro_batches}, which does not divide it; "
            f"change one of them"
        )


def check_call(subject: str, function: Callable[..., Any], count: int, named: Sequence[str] = ()) -> None:
    """Check that a loss or metric takes the output and the targets, some by name. Raises GraphError
    otherwise."""
    called = function.forward if isinstance(function, Module) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # some builtins have none; the call will tell
        return
    try:
        signature.bind(*range(count), **dict.fromkeys(named))
    except TypeError:
        targets = count - 1 + len(named)
        by_name = f", of which {', '.join(named)} by name" if named else ""
        raise GraphError(
            f"{subject} takes {signature} but is called with {targets + 1} arguments, the output of the "
            f"model and {targets} target{'s' if targets != 1 else ''}{by_name}; give it these arguments"
        ) from None


def check_held(model: Any, held: Mapping[str, Parameter], trace: Trace) -> None:
    """Check that the attributes of a model, its loss and its metrics lead to what their program learns.

    Any other parameter may be new whenever a program is traced, and a checkpoint with it cannot be loaded.

    Args:
        model: a function is not checked; nothing says what it holds.
        held: parameters and buffers by name, as they were before the trace.
        trace: of the program.

    Raises:
        GraphError: the program uses another parameter or buffer.
    """
    identities = set(map(id, held.values()))
    stray = next((p for p in trace.parameters.values() if id(p) not in identities), None)
    if stray is None or not isinstance(model, Module):
        return
    op = next(op for op in trace.ops if op.kind == stray.kind and op.attrs["name"] == stray.name)
    what = "buffer" if isinstance(stray, Buffer) else "parameter"
    where = f"used at {op.source}" if op.source else "used"
    raise GraphError(
        f"{what} {stray.name} ({op.result.type}) is {where} but no attribute of "
        f"{type(model).__name__}, or of modules that it holds or that are the loss or a metric, led to it "
        f"before the call, so that no checkpoint of it could be loaded; make layers in __init__, keep them "
        f"in attributes, each, or in a list, tuple or dict, and give a loss with layers as a module"
    )


@contextmanager
def constant_draws() -> Iterator[None]:
    """Warn, on the process that prints, where the trace inside draws from a generator of the process.

    It is no error: a model may choose its structure in this way, and another thread may draw meanwhile.
    """
    before = _generator_states()
    yield
    after = _generator_states()
    drawn = " and ".join(name for name, state in before.items() if not _same(state, after[name]))
    if drawn and is_chief():
        warnings.warn(
            f"{drawn} drew numbers while the program was traced, which makes them constants, the same in "
            f"every step; use nn.Dropout, ops.random_uniform or ops.random_normal for new numbers in "
            f"every step, or draw in __init__ what is to be drawn once",
            UserWarning,
            stacklevel=user_stack_level(),
        )


def _generator_states() -> dict[str, Any]:
    """Module with a generator of the process -> state of that."""
    of_numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    return {"np.random": of_numpy, "the module random": random.getstate()}


def _same(state: Any, other: Any) -> bool:
    if isinstance(state, dict):
        return all(_same(part, other.get(name)) for name, part in state.items())
    return bool(np.array_equal(state, other)) if isinstance(state, np.ndarray) else bool(state == other)


def _check_model(model: Any) -> None:
    _check_function("model", model, "a distgraph.nn.Module or a function of tensors")
    other = _framework(model)
    if other:
        way = (
            "dg.frontends.torch.import_module(model, example_inputs) makes one of it"
            if other == "torch"
            else "write it with distgraph.nn or NumPy functions"
        )
        raise GraphError(
            f"model is {_named(model)} of {other} but must be a distgraph.nn.Module or a function of "
            f"tensors; {way}"
        )


def _check_not_foreign(subject: str, argument: Any, way: str) -> None:
    other = _framework(argument)
    if other:
        raise GraphError(f"{subject} is {_named(argument)} of {other} but computes with its tensors; {way}")


def _framework(argument: Any) -> str:
    """Name of the other framework that an object or a function comes from; empty if from none."""
    bases = [base.__module__ for base in type(argument).__mro__]
    homes = {str(home).partition(".")[0] for home in (*bases, getattr(argument, "__module__", ""))}
    return next((other for other in _OTHERS if other in homes), "")


def _named(argument: Any) -> str:
    return argument.__name__ if inspect.isroutine(argument) else f"a {type(argument).__name__}"


def _check_metrics(metrics: Any) -> None:
    if isinstance(metrics, (str, Module)) or not isinstance(metrics, (Mapping, Sequence)):
        raise GraphError(f"metrics is {shown(metrics)} but must be a list or a dict of functions")
    for name, metric in metrics.items() if isinstance(metrics, Mapping) else enumerate(metrics):
        if isinstance(metrics, Mapping) and not (isinstance(name, str) and name):
            raise GraphError(f"name of a metric is {shown(name)} but must be a text of a sign or more")
        example = (
            f'such as {{"accuracy": {_ACCURACY}}}' if isinstance(metric, str) else "(output, target) -> mean"
        )
        _check_function(f"metrics[{name!r}]", metric, example)


def _check_function(subject: str, function: Any, example: str) -> None:
    if isinstance(function, type):
        raise GraphError(
            f"{subject} is the class {function.__name__} but must be an object; call it: "
            f"{function.__name__}()"
        )
    if not callable(function):
        raise GraphError(f"{subject} is {shown(function)} but must be a function or module, {example}")


def first_sample(position: int, resume: bool, samples: int) -> int:
    """The sample of an epoch with which training begins: `position` where it is resumed, else 0.

    Raises:
        RuntimeFault: the data ends before the position.
    """
    if resume and position > samples:
        raise RuntimeFault(
            f"fit(resume=True) goes on after sample {position} of an epoch but the data has {samples}; "
            f"give the data of the checkpoint, or leave resume out"
        )
    return position if resume else 0
