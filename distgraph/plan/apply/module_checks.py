"""Checks of a torch model before a plan is applied to it, so that nothing has run when one fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from distgraph.errors import GraphError, ShardingError
from distgraph.plan.apply.stage_layouts import Layouts, check_parameters

if TYPE_CHECKING:
    from distgraph.plan.plan import Plan

_CHUNK = 1 << 20
"""Words of which a checksum holds the numbers of positions at a time."""
_GOLDEN_RATIO = 0x9E3779B97F4A7C15 - (1 << 64)
_MIXING = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def check_module(plan: Plan, layouts: Layouts, module: Any, device: str) -> None:
    """Compare a model with the plan.

    Raises:
        GraphError: it is no module of torch.
        ShardingError: its parameters are not those of the plan; it has tensors without values, or on another
            device; a layer would compute other numbers on several ranks than on one.
    """
    if not isinstance(module, torch.nn.Module):
        raise GraphError(f"module is a {type(module).__name__} but must be a torch.nn.Module")
    named = dict(module.named_parameters(remove_duplicate=False))
    check_parameters(plan, {name: tuple(parameter.shape) for name, parameter in named.items()})
    for kind, name, tensor in _named_tensors(module):
        if tensor.device.type != device:
            raise ShardingError(
                f"{kind} {name} is on device {tensor.device.type} but the ranks compute on {device}; "
                + ("give it values first" if tensor.is_meta else f'move the model there, .to("{device}")')
            )
    data = max(stage.parts for stage in layouts.stages)
    model = max(stage.ranks.shape[2] for stage in layouts.stages)
    for path, layer in module.named_modules():
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) and layer.training and data > 1:
            _refuse_batch_norm(path, layer, data)
        if (
            isinstance(layer, torch.nn.modules.dropout._DropoutNd)
            and layer.p
            and layer.training
            and model > 1
        ):
            _refuse_dropout(path, layer, device)


def _refuse_batch_norm(path: str, layer: Any, ranks: int) -> None:
    if not isinstance(layer, torch.nn.SyncBatchNorm):
        raise ShardingError(
            f"{path} ({type(layer).__name__}): the batch is split over {ranks} ranks but it would "
            "normalise the "
            "rows of each rank alone; convert the model with torch.nn.SyncBatchNorm.convert_sync_batchnorm"
        )


def _refuse_dropout(path: str, layer: Any, device: str) -> None:
    if device == "cpu":
        raise ShardingError(
            f"{path} ({type(layer).__name__}, p={layer.p}): ranks that share a tensor must drop the same "
            "elements but DTensor has no random numbers on cpu; set p to 0, or run on GPUs"
        )


def check_equal_values(module: torch.nn.Module) -> None:
    """Raises ShardingError where ranks start from different values of a parameter or buffer. Collective."""
    named = _named_tensors(module)
    sums = [checksum(tensor) for _, _, tensor in named]
    local_sums = torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)
    least, most = local_sums.clone(), local_sums.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    for (kind, name, _), low, high in zip(named, least.tolist(), most.tolist(), strict=True):
        if low != high:
            raise ShardingError(
                f"{kind} {name} has checksum {_hex(low)} on one rank and {_hex(high)} on another; start "
                "every rank from the same values: the same torch.manual_seed, or the same file"
            )


def _named_tensors(module: torch.nn.Module) -> list[tuple[str, str, torch.Tensor]]:
    """(kind, name, tensor) of the parameters and buffers of a module."""
    parameters = [("parameter", name, p.detach()) for name, p in module.named_parameters()]
    return [*parameters, *(("buffer", name, b) for name, b in module.named_buffers())]


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit checksum of the bytes of a tensor, which depends on their order; an int64 tensor of shape ().

    Sums each word times an odd pseudo-random number of its position, modulo 2 ** 64. The numbers of positions
    are those of SplitMix64 (Steele et al., Fast Splittable Pseudorandom Number Generators, 2014).
    """
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        mixed = torch.arange(start + 1, start + 1 + part.numel(), device=part.device) * _GOLDEN_RATIO
        for shift, factor in _MIXING:
            mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
        total += (part * (mixed | 1)).sum()
    return total


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a vector of integers of the same bytes."""
    flat = tensor.contiguous().flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(integers[flat.element_size()])


def _hex(number: int) -> str:
    return f"{number % 2**64:016x}"


def rebind_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], parameters: Mapping[str, torch.nn.Parameter]
) -> None:
    """Let an optimiser train the distributed parameters of this rank; its states are distributed too.

    Args:
        optimizer: changed in place.
        names: id of a parameter of the model -> its name.
        parameters: name -> the parameter on this rank; those of other stages are left out.

    Raises:
        GraphError: the optimiser trains a tensor that is no parameter of the model.
    """
    for group in optimizer.param_groups:
        unknown = next((p for p in group["params"] if id(p) not in names), None)
        if unknown is not None:
            raise GraphError(
                f"optimizer trains a tensor of shape {list(unknown.shape)} that is no parameter of "
                "the module; make it from module.parameters()"
            )
        old = {names[id(p)]: p for p in group["params"]}
        group["params"] = [parameters[name] for name in old if name in parameters]
        for name, parameter in old.items():
            state = optimizer.state.pop(parameter, None)
            if state and name in parameters:
                optimizer.state[parameters[name]] = {
                    key: _distributed_as(value, parameter, parameters[name]) for key, value in state.items()
                }


def _distributed_as(value: Any, old: Any, new: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != old.shape or not isinstance(new, DTensor):
        return value
    return distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)
