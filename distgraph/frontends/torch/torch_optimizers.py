"""Optimisers of torch as those of `distgraph.optim`."""

from __future__ import annotations

from typing import Any

import torch

from distgraph.errors import GraphError
from distgraph.optim import SGD, Adam, AdamW, Optimizer

_REFUSED = {"amsgrad": False, "maximize": False, "dampening": 0}
"""Hyper-parameters that have no counterpart, and the value under which they change nothing."""


def import_optimizer(optimizer: torch.optim.Optimizer) -> Optimizer:
    """The optimiser with the hyper-parameters of one of torch: SGD, Adam or AdamW.

    The states of the optimiser start at zero. A learning-rate schedule of torch is not read; give
    `distgraph.schedules` to the result with `dataclasses.replace(optimizer, lr=...)`.

    Raises:
        GraphError: it is another optimiser; its groups of parameters differ; a hyper-parameter has no
            counterpart.

    Example:
        >>> import torch, distgraph as dg
        >>> net = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        >>> dg.frontends.torch.import_optimizer(optimizer).momentum
        0.9
    """
    name = type(optimizer).__name__
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        raise GraphError(
            f"optimizer is a {name} but torch.optim.SGD, Adam and AdamW can be imported; choose one of "
            "distgraph.optim"
        )
    options: dict[str, Any] = _options(optimizer, name)
    for key, neutral in _REFUSED.items():
        if options.get(key, neutral) != neutral:
            raise GraphError(f"{key} of {name} is {options[key]} but only {neutral} has a counterpart")
    rate, decay = float(options["lr"]), float(options["weight_decay"])
    if isinstance(optimizer, torch.optim.SGD):
        momentum, nesterov = float(options["momentum"]), bool(options["nesterov"])
        return SGD(rate, weight_decay=decay, momentum=momentum, nesterov=nesterov)
    decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(options.get("decoupled_weight_decay"))
    beta1, beta2 = (float(beta) for beta in options["betas"])
    make = AdamW if decoupled else Adam
    return make(rate, weight_decay=decay, beta1=beta1, beta2=beta2, eps=float(options["eps"]))


def _options(optimizer: torch.optim.Optimizer, name: str) -> dict[str, Any]:
    """The hyper-parameters that all groups of parameters have. Raises GraphError where they differ."""
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "initial_lr")}
        for group in optimizer.param_groups
    ]
    for number, group in enumerate(groups):
        for key, value in group.items():
            if value != groups[0].get(key):
                raise GraphError(
                    f"{key} of {name} is {groups[0].get(key)} in group 0 but {value} in group {number}; give "
                    "all one value, or set `decays` of an optimiser of distgraph.optim for weight decay"
                )
    return groups[0]
