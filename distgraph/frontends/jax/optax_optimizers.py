"""Optimisers of optax as those of `distgraph.optim`.

An optimiser of optax is a pair of functions. What it does is in the variables that its functions are closed
over, which `_transformations` lists; optax itself is not imported.

    chain(clip_by_global_norm(1.0), adamw(1e-3))
        -> clip_by_global_norm, scale_by_adam, add_decayed_weights, scale
        -> optim.AdamW(1e-3, clip_norm=1.0)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from distgraph.errors import GraphError
from distgraph.optim import SGD, Adam, AdamW, Optimizer

_CLIP, _DECAY, _ADAM, _TRACE = "clip_by_global_norm", "add_decayed_weights", "scale_by_adam", "trace"
_RATES = {"scale": "step_size", "scale_by_schedule": "step_size_fn"}
"""Transformations that multiply by the negative learning rate -> their variable."""
_NEUTRAL: dict[str, dict[str, Any]] = {
    _ADAM: {"eps_root": 0.0, "mu_dtype": None, "nesterov": False},
    _TRACE: {"accumulator_dtype": None},
}
"""Variables that have no counterpart, and the value under which they change nothing."""
_KNOWN = "optax.sgd, adam and adamw, also after clip_by_global_norm and with a schedule"


def import_optimizer(optimizer: Any) -> Optimizer:
    """The optimiser with the hyper-parameters of one of optax: `sgd`, `adam` or `adamw`.

    It may be chained after `clip_by_global_norm`, and its learning rate may be a schedule. The states of the
    result start at zero.

    Args:
        optimizer: a `GradientTransformation`.

    Raises:
        GraphError: it is none; one of its transformations, or the order of them, has no counterpart.

    Example:
        >>> import optax                                                        # doctest: +SKIP
        >>> dg.frontends.jax.import_optimizer(optax.adam(1e-3)).beta2           # doctest: +SKIP
        0.999
    """
    if not callable(getattr(optimizer, "init", None)) or not inspect.isfunction(
        getattr(optimizer, "update", None)
    ):
        raise GraphError(
            f"optimizer is a {type(optimizer).__name__} but must be a GradientTransformation of optax, such "
            "as optax.adamw(1e-3); micro-batches are given by Strategy(micro_batches=...)"
        )
    steps = list(_transformations(optimizer.update))
    names = [name for name, _ in steps]
    *rest, last = steps or [("nothing", {})]
    if last[0] not in _RATES:
        raise _refusal(names, f"ends with {last[0]} but must end with a learning rate")
    clip = _number(rest.pop(0)[1], "max_norm", names) if rest and rest[0][0] == _CLIP else None
    before = _number(rest.pop(0)[1], "weight_decay", names) if rest and rest[0][0] == _DECAY else 0.0
    kind, numbers = rest.pop(0) if rest and rest[0][0] in _NEUTRAL else ("", {})
    decoupled = kind == _ADAM and bool(rest) and rest[0][0] == _DECAY
    after = _number(rest.pop(0)[1], "weight_decay", names) if decoupled else 0.0
    if rest:
        raise _refusal(names, f"has {rest[0][0]}, which has no counterpart at its place")
    if before and after:
        raise _refusal(names, "has two weight decays")
    for name, neutral in _NEUTRAL.get(kind, {}).items():
        if numbers.get(name, neutral) != neutral:
            raise _refusal(
                names, f"has {name}={numbers[name]} in {kind} but only {neutral} has a counterpart"
            )
    rate = _rate(last[1][_RATES[last[0]]], names)
    if kind != _ADAM:
        momentum = _number(numbers, "decay", names) if kind else 0.0
        nesterov = bool(numbers.get("nesterov", False))
        return SGD(rate, clip_norm=clip, weight_decay=before, momentum=momentum, nesterov=nesterov)
    beta1, beta2, eps = (_number(numbers, name, names) for name in ("b1", "b2", "eps"))
    make = Adam if before or not after else AdamW
    return make(rate, clip_norm=clip, weight_decay=before or after, beta1=beta1, beta2=beta2, eps=eps)


def _transformations(update: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name of the function of optax that made it, its variables) of each transformation, in order."""
    name = getattr(update, "__qualname__", type(update).__name__).partition(".")[0]
    variables = dict(inspect.getclosurevars(update).nonlocals) if inspect.isfunction(update) else {}
    if name == "chain":
        for inner in variables["update_fns"]:
            yield from _transformations(inner)
    elif name == "with_extra_args_support":
        yield from _transformations(variables["tx"].update)
    elif name not in ("identity", "update_identity"):
        yield name, variables


def _number(variables: Mapping[str, Any], name: str, names: list[str]) -> float:
    """A hyper-parameter that is a number."""
    if callable(variables[name]):
        raise _refusal(names, f"has a schedule of {name} but only the learning rate may have one")
    return float(variables[name])


def _rate(scale: Any, names: list[str]) -> Any:
    """The learning rate, or the schedule, by whose negative value a transformation multiplies."""
    if callable(scale):
        return lambda step: -float(scale(step))
    if float(scale) > 0:
        raise _refusal(names, f"multiplies by {scale}, which ascends; the learning rate must be 0 or more")
    return -float(scale)


def _refusal(names: list[str], why: str) -> GraphError:
    return GraphError(
        f"optimizer of optax ({', '.join(names)}) {why}; {_KNOWN} can be imported, or choose one of "
        "distgraph.optim"
    )
