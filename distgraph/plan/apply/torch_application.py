"""`apply_to_torch`: a plan applied to a module of torch on the ranks of `torchrun`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from distgraph.errors import ResourceError, ShardingError
from distgraph.plan.apply.distributed_module import DistributedModule, Pipeline
from distgraph.plan.apply.dtensor_module import (
    DTensorMode,
    DTensorModule,
    constrain_outputs,
    distribute_parameters,
    recompute_activations,
)
from distgraph.plan.apply.module_checks import check_equal_values, check_module, rebind_optimizer
from distgraph.plan.apply.pipeline_stages import PREFIX, FlatModule, TiedGradients, split_model
from distgraph.plan.apply.stage_layouts import Layouts, StageLayout, layouts_of
from distgraph.plan.export.torch import schedule_class

if TYPE_CHECKING:
    from distgraph.plan.plan import Plan

_AXES = ("dp_replicate", "dp_shard", "tp")
_DTYPES = {"i64": torch.int64, "i32": torch.int32, "f32": torch.float32, "f64": torch.float64,
           "f16": torch.float16, "bf16": torch.bfloat16, "bool": torch.bool}  # fmt: skip


def apply_to_torch(
    plan: Plan,
    module: Any,
    optimizer: Any = None,
    device_mesh: Any = None,
    example_inputs: Mapping[str, Any] | None = None,
) -> DistributedModule:
    """`Plan.apply_to_torch`, which documents the arguments."""
    layouts = layouts_of(plan)
    schedule = _schedule(plan)
    order = _rank_order(plan, device_mesh)
    device = _device(device_mesh)
    check_module(plan, layouts, module, device.type)
    check_equal_values(module)
    named = {id(p): name for name, p in module.named_parameters()}
    tied = _tied(module)
    positions = {rank: position for position, rank in enumerate(plan.ranks)}
    ranks = [order[np.vectorize(positions.__getitem__)(stage.ranks)] for stage in layouts.stages]
    number = next(i for i, members in enumerate(ranks) if dist.get_rank() in members)
    meshes = [DeviceMesh(device.type, torch.from_numpy(r), mesh_dim_names=_AXES) for r in ranks]
    layout, mesh = layouts.stages[number], meshes[number]
    flat, parts = _split(plan, layouts, module, layout.parts, example_inputs)
    prefix = PREFIX if flat is not None else ""
    local = _distribute(parts[number], layout, mesh, prefix, tied)
    parameters = {
        name.removeprefix(prefix): p for name, p in local.module.named_parameters(remove_duplicate=False)
    }
    if optimizer is not None:
        first = {name: names[0] for names in tied for name in names}
        trained = {first.get(name, name): parameter for name, parameter in parameters.items()}
        rebind_optimizer(optimizer, named, trained)
    columns = [members.ravel().tolist() for members in ranks]
    pipeline = None
    if flat is not None:
        gradients = TiedGradients(tied, parts, columns)
        pipeline = Pipeline(schedule, local, number, columns, device, plan, flat, gradients)
    return DistributedModule(local, mesh, optimizer, plan, layout, pipeline, layouts.notes, parameters)


def _distribute(
    part: torch.nn.Module, layout: StageLayout, mesh: Any, prefix: str, tied: list[list[str]]
) -> DTensorModule:
    """The module of a stage with its parameters, results and recomputation as planned; in place."""
    mode = None
    if layout.ranks.shape[2] > 1:
        mode = DTensorMode(mesh["tp"])
        first = {name: names[0] for names in tied for name in names}

        def dim(name: str) -> int | None:
            name = name.removeprefix(prefix)
            return layout.parameters.get(first.get(name, name))

        distribute_parameters(part, mesh["tp"], dim)
        constrain_outputs(part, layout.outputs, prefix)
    modules = dict(part.named_modules())
    for path in layout.recomputed:
        if prefix + path in modules:
            recompute_activations(modules[prefix + path], mode)
    if layout.units is not None:
        data = mesh["dp_replicate", "dp_shard"]
        for path in layout.units:
            if prefix + path in modules:
                fully_shard(modules[prefix + path], mesh=data, reshard_after_forward=layout.reshard)
        fully_shard(part, mesh=data, reshard_after_forward=layout.reshard)
    return DTensorModule(part, mode)


def _rank_order(plan: Plan, mesh: Any) -> np.ndarray:
    """Rank of the process group at each position of the plan's ranks.

    Raises:
        ResourceError: there are no processes, or not as many as ranks of the plan.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise ResourceError(
                f"plan of {plan.program.name} needs {len(plan.ranks)} processes but none were "
                f"started; run the script with torchrun --nproc-per-node {len(plan.ranks)}"
            )
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    ranks = np.arange(dist.get_world_size()) if mesh is None else mesh.mesh.cpu().numpy().ravel()
    if len(ranks) != len(plan.ranks) or len(ranks) != dist.get_world_size():
        raise ResourceError(
            f"plan of {plan.program.name} is for {len(plan.ranks)} ranks but "
            + (
                f"{dist.get_world_size()} processes"
                if mesh is None
                else f"a device mesh of {len(ranks)} ranks"
            )
            + f" in a group of {dist.get_world_size()} are given; start torchrun --nproc-per-node "
            f"{len(plan.ranks)}, or search a plan with devices={dist.get_world_size()}"
        )
    return ranks


def _schedule(plan: Plan) -> str:
    """Class of the schedule; with fewer micro-batches than stages every order is that of GPipe."""
    if len(plan.stages) == 1:
        return ""
    return schedule_class(plan) if plan.micro_batches >= len(plan.stages) else "ScheduleGPipe"


def _device(mesh: Any) -> torch.device:
    kind = mesh.device_type if mesh is not None else ("cuda" if dist.get_backend() == "nccl" else "cpu")
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _tied(module: torch.nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _split(
    plan: Plan, layouts: Layouts, module: torch.nn.Module, parts: int, example: Mapping[str, Any] | None
) -> tuple[FlatModule | None, list[torch.nn.Module]]:
    """The parts of a model that the stages compute; the model itself for one stage."""
    if len(layouts.stages) == 1:
        return None, [module]
    rows = plan.batch // plan.micro_batches // parts
    inputs = _stand_ins(plan, module) if example is None else dict(example)
    return split_model(module, {name: x[:rows] for name, x in inputs.items()}, layouts.first_modules)


def _stand_ins(plan: Plan, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Inputs of zeros, of the shapes and dtypes that the plan was made for."""
    arguments = inspect.signature(module.forward).parameters
    replacements = {}
    for name, text in plan.program.inputs.items():
        dtype, _, sizes = text.rstrip("]").partition("[")
        if name in arguments and dtype in _DTYPES:
            shape = [int(size) for size in sizes.split(",")] if sizes else []
            replacements[name] = torch.zeros(shape, dtype=_DTYPES[dtype])
    if not replacements:
        raise ShardingError(
            f"plan of {plan.program.name} has the inputs {', '.join(plan.program.inputs)} but forward of "
            f"{type(module).__name__} takes {', '.join(arguments)}; give example_inputs, a dict of tensors"
        )
    return replacements
