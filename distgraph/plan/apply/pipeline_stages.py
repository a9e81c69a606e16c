"""A model of torch split into pipeline stages: `torch.distributed.pipelining` at the borders of a plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from distgraph.errors import ShardingError

PREFIX = "module."
"""Of the names of parameters and modules in a stage."""


@dataclass(slots=True)
class _Returned:
    """How a model returned its results when it was traced; None stands for a tensor.

    torch.export restores the attributes of a module after tracing it, but not those of this object.
    """

    leaves: list[Any] = field(default_factory=list)
    spec: Any = None


class _DetachMode(TorchFunctionMode):  # type: ignore[misc]
    """Detaches what is computed under `torch.no_grad()` instead of switching gradients off.

    A graph that switches them off has a subgraph there, whose inputs `torch.export.unflatten` loses.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch._C._set_grad_enabled:
            self._depth = max(0, self._depth + (-1 if args[0] else 1))
            return None
        result = func(*args, **(kwargs or {}))
        return pytree.tree_map(_detached, result) if self._depth else result


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x


class FlatModule(torch.nn.Module):  # type: ignore[misc]
    """A model that takes its inputs by position and returns a tuple of tensors."""

    def __init__(self, module: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self._names = tuple(names)
        self._returned = _Returned()

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors among the results."""
        with _DetachMode():
            result = self.module(**dict(zip(self._names, inputs, strict=True)))
        leaves, spec = pytree.tree_flatten(result)
        self._returned.leaves = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        self._returned.spec = spec
        return tuple(x for x in leaves if isinstance(x, torch.Tensor))

    def rebuilt(self, tensors: Any) -> Any:
        """The result of the model that has these tensors."""
        remaining = iter(tensors if isinstance(tensors, (tuple, list)) else [tensors])
        leaves = [next(remaining) if x is None else x for x in self._returned.leaves]
        return pytree.tree_unflatten(leaves, self._returned.spec)


def split_model(
    module: torch.nn.Module, example: Mapping[str, torch.Tensor], first_modules: Sequence[str]
) -> tuple[FlatModule, list[torch.nn.Module]]:
    """The model as one module a stage, with the names of its parameters behind `PREFIX`.

    Args:
        module: the model.
        example: inputs of the rows of one rank in a micro-batch.
        first_modules: path of the first module of every stage but the first.

    Raises:
        ShardingError: torch cannot split the model there.
    """
    flat = FlatModule(module, tuple(example))
    points = {PREFIX + path: pipelining.SplitPoint.BEGINNING for path in first_modules}
    try:
        with warnings.catch_warnings():  # of torch, about itself
            warnings.simplefilter("ignore")
            pipe = pipelining.pipeline(flat, tuple(example.values()), split_spec=points)
    except Exception as error:
        text = str(error).strip().splitlines()
        raise ShardingError(
            f"{type(module).__name__} cannot be split before {', '.join(first_modules)} by "
            f"torch.distributed.pipelining: {text[0] if text else type(error).__name__}; apply a plan of one "
            "stage, or write control flow that depends on numbers with torch.where"
        ) from error
    stages = [pipe.get_stage_module(number) for number in range(pipe.num_stages)]
    for stage in stages:
        _tie(stage, module)
    return flat, stages


def _tie(stage: torch.nn.Module, module: torch.nn.Module) -> None:
    """Make names of one parameter of the model one parameter of the stage again."""
    identity = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    replaced: dict[int, torch.nn.Parameter] = {}
    for path, owner in stage.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            full = (f"{path}.{name}" if path else name).removeprefix(PREFIX)
            owner.register_parameter(name, replaced.setdefault(identity[full], parameter))


class TiedGradients:
    """Sums the gradients of parameters that several stages hold, after each step. Made by all ranks.

    Args:
        tied: the names of each parameter that has several.
        stages: the parts of the model.
        ranks: [stages, ranks of a stage] in the process group.
    """

    def __init__(
        self,
        tied: Sequence[Sequence[str]],
        stages: Sequence[torch.nn.Module],
        ranks: Sequence[Sequence[int]],
    ) -> None:
        names_of_stages = [
            {name.removeprefix(PREFIX) for name, _ in stage.named_parameters(remove_duplicate=False)}
            for stage in stages
        ]
        self._groups: list[tuple[tuple[str, ...], Any]] = []
        for names in tied:
            owners = [number for number, own_names in enumerate(names_of_stages) if own_names & set(names)]
            for column in zip(*(ranks[number] for number in owners), strict=True):
                group = dist.new_group(list(column)) if len(owners) > 1 else None
                if group is not None and dist.get_rank() in column:
                    self._groups.append((tuple(names), group))

    def sum(self, parameters: Mapping[str, Any]) -> None:
        """Sum them over the stages; name -> parameter of this rank."""
        for names, group in self._groups:
            parameter = next(parameters[name] for name in names if name in parameters)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            dist.all_reduce(getattr(gradient, "_local_tensor", gradient), group=group)


def pipeline_schedule(
    name: str,
    part: torch.nn.Module,
    number: int,
    ranks: Sequence[Sequence[int]],
    device: torch.device,
    micro_batches: int,
    loss: Callable[[Any, Any], Any],
) -> Any:
    """The schedule of this rank's stage. Collective over all ranks.

    Args:
        name: of the class in torch.distributed.pipelining.
        part: module of the stage.
        number: of the stage.
        ranks: [stages, ranks of a stage] in the process group; equal positions send to each other.
        device: of this rank.
        micro_batches: of a batch.
        loss: (output of the last stage, target) -> loss of a micro-batch.
    """
    groups = [dist.new_group(list(column)) for column in zip(*ranks, strict=True)]
    group = groups[list(ranks[number]).index(dist.get_rank())]
    stage = pipelining.PipelineStage(part, number, len(ranks), device, group=group)
    return getattr(pipelining, name)(stage, micro_batches, loss_fn=loss)
