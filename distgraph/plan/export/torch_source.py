"""The Python module of an export to PyTorch: the tables of a plan, and functions that apply them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distgraph.plan.export.result import header, literal, quoted_list
from distgraph.plan.pipeline_schedules import schedule_names, schedule_policy

if TYPE_CHECKING:
    from distgraph.plan.plan import Plan

_IMPORTS = """from types import SimpleNamespace

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import {names}
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

"""

_APPLY = '''

def device_mesh(stage=0, device_type="cuda"):
    """The ranks of a stage as (dp_replicate, dp_shard, tp)."""
    names = ("dp_replicate", "dp_shard", "tp")
    return DeviceMesh(device_type, torch.tensor(STAGES[stage].ranks), mesh_dim_names=names)


def rows(batch, mesh):
    """The rows of a batch that this rank computes."""
    replicate, shard = mesh.size(0), mesh.size(1)
    number = mesh.get_local_rank("dp_replicate") * shard + mesh.get_local_rank("dp_shard")
    return batch.chunk(replicate * shard)[number]


def parallelize(model, stage=0, device_type="cuda", mesh=None):
    """Apply the plan of a stage to a model, or to the part of it that the stage computes; in place.

    Every rank calls it with the same weights. Attention gets the heads of its rank: its code must take the
    number of heads from the shape, as in x.unflatten(-1, (-1, head_size)).
    """
    plan, mesh = STAGES[stage], mesh or device_mesh(stage, device_type)
    known = dict(model.named_modules())
    if plan.styles:
        parallelize_module(model, mesh["tp"], {path: s for path, s in plan.styles.items() if path in known})
    for path in plan.checkpoint:
        if path in known:
            parent, _, name = path.rpartition(".")
            known[parent].register_module(name, checkpoint_wrapper(known[path]))
    if plan.fully_shard is not None:
        settings = {
            "mesh": mesh["dp_replicate", "dp_shard"],
            "reshard_after_forward": plan.reshard_after_forward,
        }
        for path in plan.fully_shard:
            if path in known:
                fully_shard(model.get_submodule(path), **settings)
        fully_shard(model, **settings)
    return model
'''


def torch_schedules() -> dict[str, str]:
    """Name of a schedule -> its class in torch.distributed.pipelining, for schedules that PyTorch has."""
    policies = (schedule_policy(name) for name in schedule_names())
    return {p.name: p.export_names["torch"] for p in policies if "torch" in p.export_names}


def torch_source(plan: Plan, data: Mapping[str, Any], notes: Sequence[str]) -> str:
    """Text of a Python module."""
    stages = "".join(_stage_source(stage) for stage in data["stages"])
    points = [(path, "SplitPoint.BEGINNING") for path in data["split_points"]]
    return (
        header(plan, "Parallelisation", notes)
        + _IMPORTS.format(names=", ".join(sorted({*torch_schedules().values(), "SplitPoint"})))
        + f"STAGES = (\n{stages})\n"
        + literal("SPLIT_POINTS", points)
        + f"\nSCHEDULE = {data['schedule']}\nMICRO_BATCHES = {data['micro_batches']}\n"
        + f"LOSS_PARALLEL = {data['loss_parallel']}  # train inside torch.distributed.tensor.parallel."
        + "loss_parallel()\n"
        + _APPLY
    )


def _stage_source(stage: Mapping[str, Any]) -> str:
    indent = " " * 8
    styles = literal("styles", stage["parallelize"].items(), indent).replace(" = ", "=", 1)
    shard = stage["fully_shard"]
    return (
        f"    SimpleNamespace(\n{indent}ranks={stage['ranks']},  # [dp_replicate, dp_shard, tp]\n"
        f"{indent}{styles},\n"
        f"{indent}fully_shard={quoted_list(shard['modules']) if shard else None},\n"
        f"{indent}reshard_after_forward={bool(shard and shard['reshard_after_forward'])},\n"
        f"{indent}checkpoint={quoted_list(stage['checkpoint'])},\n    ),\n"
    )
