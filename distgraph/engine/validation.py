"""What a user hands to an engine, checked where it is handed over.

A mistake is told in words of the call, not found later as an exception in the middle of a library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distgraph.engine.callbacks import Callback
from distgraph.errors import GraphError, ResourceError, RuntimeFault
from distgraph.ir.dtypes import is_integer
from distgraph.nn import Module
from distgraph.optim import Optimizer
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import Strategy
from distgraph.resources import Cluster

_ACCURACY = "lambda logits, labels: (logits.argmax(-1) == labels).astype('f32').mean()"
_OTHERS = ("torch", "flax", "keras", "tensorflow")


def check_parts(
    model: Any, loss: Any, optimizer: Any, metrics: Any, strategy: Any, cluster: Any, seed: Any, plan: Any
) -> None:
    """The parts of an engine.

    Raises:
        GraphError: model, loss, optimizer, metrics, strategy or plan are of another kind, or a class in place
            of an object.
        ResourceError: likewise cluster.
    """
    _check_model(model)
    if loss is not None:
        _check_function("loss", loss, "such as distgraph.nn.CrossEntropy()")
    for subject, given, wanted, example in (
        ("optimizer", optimizer, Optimizer, "distgraph.optim.Adam(lr=1e-3)"),
        ("strategy", strategy, Strategy, "distgraph.Strategy(micro_batches=4)"),
    ):
        if given is not None and not isinstance(given, wanted):
            raise GraphError(f"{subject} is {_shown(given)} but must be an object such as {example}")
    _check_metrics(metrics)
    if cluster is not None and not isinstance(cluster, (Cluster, str, Path)):
        raise ResourceError(
            f"cluster is {_shown(cluster)} but must be a Cluster, or the path or name of a resource file"
        )
    if plan is not None and not isinstance(plan, (Plan, str, Path)):
        raise GraphError(f"plan is {_shown(plan)} but must be a distgraph.Plan, or the path of a plan file")
    if not is_integer(seed):
        raise GraphError(f"seed is {_shown(seed)} but must be an integer")


def check_training(epochs: Any, batch_size: Any, micro_batches: int, callbacks: Any) -> None:
    """Arguments of `fit`.

    Raises:
        GraphError: the batch does not divide into micro-batches.
        RuntimeFault: a number makes no sense, or a callback is none.
    """
    if not is_integer(epochs) or epochs < 0:
        raise RuntimeFault(f"epochs is {epochs!r} but must be a number from 0 up")
    if not is_integer(batch_size) or batch_size < 1:
        raise RuntimeFault(f"batch_size is {batch_size!r} but must be a number from 1 up")
    if batch_size % micro_batches:
        raise GraphError(
            f"batch_size is {batch_size} but micro_batches of the strategy is {micro_batches}; make one a "
            f"multiple of the other"
        )
    if not isinstance(callbacks, (list, tuple)):
        raise RuntimeFault(f"callbacks is {_shown(callbacks)} but must be a list of callbacks; put it in [ ]")
    for position, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            raise RuntimeFault(
                f"callbacks[{position}] is {_shown(callback)} but must be an object of a subclass of "
                "distgraph.callbacks.Callback"
            )


def check_call(subject: str, function: Callable[..., Any], count: int) -> None:
    """Whether a loss or metric takes the output and the targets. Raises GraphError."""
    called = function.forward if isinstance(function, Module) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # some builtins have none; the call will tell
        return
    try:
        signature.bind(*range(count))
    except TypeError:
        raise GraphError(
            f"{subject} takes {signature} but is called with {count} arguments, the output of the model and "
            f"{count - 1} target{'s' if count != 2 else ''}; give it these arguments"
        ) from None


def _check_model(model: Any) -> None:
    _check_function("model", model, "a distgraph.nn.Module or a function of tensors")
    homes = {each.__module__.partition(".")[0] for each in type(model).__mro__}
    for other in _OTHERS:
        if other in homes:
            raise GraphError(
                f"model is a {type(model).__name__} of {other} but must be a distgraph.nn.Module or a "
                f"function of tensors; write it with distgraph.nn or NumPy functions"
            )


def _check_metrics(metrics: Any) -> None:
    if isinstance(metrics, (str, Module)) or not isinstance(metrics, (Mapping, Sequence)):
        raise GraphError(f"metrics is {_shown(metrics)} but must be a list or a dict of functions")
    for name, metric in metrics.items() if isinstance(metrics, Mapping) else enumerate(metrics):
        example = (
            f'such as {{"accuracy": {_ACCURACY}}}' if isinstance(metric, str) else "(output, target) -> mean"
        )
        _check_function(f"metrics[{name!r}]", metric, example)


def _check_function(subject: str, given: Any, example: str) -> None:
    if isinstance(given, type):
        raise GraphError(
            f"{subject} is the class {given.__name__} but must be an object; call it: {given.__name__}()"
        )
    if not callable(given):
        raise GraphError(f"{subject} is {_shown(given)} but must be a function or module, {example}")


def _shown(given: Any) -> str:
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if given is None or isinstance(given, (str, int, float)):
        return repr(given)
    return f"a {type(given).__name__}"
