"""Parts of `torch.nn` of which torch.export records nothing or too little, in a form that it can record.

    torch.ctc_loss                  has a second result whose size depends on the labels
    gaussian_nll_loss               asks whether a variance is negative
    AdaptiveLogSoftmaxWithLoss      selects the rows of each cluster of classes
    instance_norm                   updates its running statistics inside of one op, which hides the update

While a module is exported, the functions below take the place of these. They compute the same outputs and
gradients for all numbers by one graph. Numbers that torch refuses give nan. CrossMapLRN2d has no such form.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.nn.modules.adaptive import _ASMoutput

from distgraph.errors import GraphError
from distgraph.frontends.torch.exported_graph import model_line

_CTC_LOSS, _INSTANCE_NORM = torch.ctc_loss, functional.instance_norm


@contextmanager
def recordable_modules() -> Iterator[None]:
    """Replace the parts of `torch.nn` that torch.export cannot record."""
    with (
        patch.object(torch, "ctc_loss", _ctc_loss),
        patch.object(functional, "gaussian_nll_loss", _gaussian_nll_loss),
        patch.object(functional, "instance_norm", _instance_norm),
        patch.object(torch.nn.AdaptiveLogSoftmaxWithLoss, "forward", _adaptive_log_softmax),
        patch.object(torch.nn.CrossMapLRN2d, "forward", _cross_map_normalisation),
    ):
        yield


@torch.library.custom_op("distgraph::ctc_loss", mutates_args=())  # type: ignore[untyped-decorator]
def _ctc_op(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    reduction: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """The loss of torch as an op with one result; `aten_ctc` has its rule."""
    return _CTC_LOSS(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)


@_ctc_op.register_fake  # type: ignore[untyped-decorator]
def _(log_probs: torch.Tensor, *given: Any) -> torch.Tensor:
    reduction = given[-2]
    return log_probs.new_empty(() if reduction else log_probs.shape[1:-1])


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    lengths = (torch.as_tensor(each) for each in (input_lengths, target_lengths))
    return _ctc_op(log_probs, targets, *lengths, blank, reduction, zero_infinity)


def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """As of torch; the loss of a negative variance is nan."""
    if not isinstance(var, torch.Tensor):
        var = torch.full_like(input, var)
    if var.size() != input.size() and input.size()[:-1] == var.size():
        var = var.unsqueeze(-1)
    if var.size() != input.size():
        others = [m for n, m in zip(input.size(), var.size(), strict=False) if n != m]
        if input.ndim != var.ndim or others != [1]:
            raise ValueError(f"var is {tuple(var.size())} but input {tuple(input.size())}")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    clamped = var + (var.clamp(min=eps) - var).detach()  # the gradient passes the clamp
    loss = 0.5 * (torch.log(clamped) + (input - target) ** 2 / clamped)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    loss = torch.where(var < 0, math.nan, loss)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """As of torch, with the running statistics, [channels], updated by the means over the samples."""
    if use_input_stats and running_mean is not None and running_var is not None:
        places, given = tuple(range(2, input.ndim)), input.detach()
        running_mean.mul_(1 - momentum).add_(given.mean(places).mean(0), alpha=momentum)
        running_var.mul_(1 - momentum).add_(given.var(places).mean(0), alpha=momentum)
        running_mean = running_var = None
    return _INSTANCE_NORM(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _adaptive_log_softmax(self: Any, input_: torch.Tensor, target_: torch.Tensor) -> Any:
    """As of torch, with every cluster computed for all rows; nan for a target that is no class."""
    rows, target = (input_, target_) if target_.dim() else (input_.unsqueeze(0), target_.unsqueeze(0))
    if rows.dim() != 2 or target.dim() != 1 or rows.size(0) != target.size(0):
        raise ValueError(
            f"input is {tuple(input_.size())} and target {tuple(target_.size())} but must be [rows, "
            "features] and [rows]"
        )
    head = functional.log_softmax(self.head(rows), dim=1)
    first = self.cutoffs[0]
    output = torch.where((target >= 0) & (target < first), _chosen(head, target, first), math.nan)
    for number, (low, high) in enumerate(pairwise(self.cutoffs)):
        cluster = functional.log_softmax(self.tail[number](rows), dim=1)
        inside = _chosen(cluster, target - low, high - low) + head[:, self.shortlist_size + number]
        output = torch.where((target >= low) & (target < high), inside, output)
    loss = (-output).mean()
    return _ASMoutput(output if target_.dim() else output.squeeze(0), loss)


def _chosen(scores: torch.Tensor, classes: torch.Tensor, count: int) -> torch.Tensor:
    """The score of the class of each row, of any class where it is not in 0 to count - 1."""
    return scores.gather(1, classes.clamp(0, count - 1).unsqueeze(1)).squeeze(1)


def _cross_map_normalisation(self: Any, input: torch.Tensor) -> torch.Tensor:
    line = model_line(sys._getframe(1))
    at = "" if line == "?" else f" ({line})"
    raise GraphError(
        f"CrossMapLRN2d{at} has a backward in torch that is not the derivative of its forward part, but a "
        "program computes the derivative; use LocalResponseNorm"
    )
