"""Export to Megatron-LM: command line arguments, for plans that they can express.

Megatron-LM has one tensor-, data- and pipeline-parallel size for the whole model, splits every layer in the
same way (Shoeybi et al., 2019, section 3; Narayanan et al., 2021, section 2; Korthikanti et al., 2022,
section 4.2), and numbers ranks tp first, then dp, then stages. Other plans have no arguments: the error lists
every reason. Differences that do not change which rank computes what are notes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distgraph.errors import ShardingError
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.plan.export.axis_roles import MOST, mostly_split, strays_of
from distgraph.plan.export.module_interface import Read, in_order
from distgraph.plan.export.result import Export, data_axes, listed, surface
from distgraph.plan.pipeline_schedules import schedule_policy

if TYPE_CHECKING:
    from distgraph.plan.plan import Plan

_BLOCK = re.compile(r"^(.*?\.\d+)(?:\.|$)")
_NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(slots=True)
class _Translation:
    """State of the translation of one plan to arguments.

    Attributes:
        data, tensor: per stage, the axes that split the batch, and the others.
        blocks: per stage, paths of the transformer layers in order.
        reasons: reasons why Megatron-LM cannot express the plan.
    """

    plan: Plan
    data: list[tuple[str, ...]]
    tensor: list[tuple[str, ...]]
    blocks: list[list[str]]
    arguments: dict[str, int | str | bool] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def matrices(self) -> dict[str, Read]:
        """Right operands of matmuls inside the layers, by name."""
        interface = surface(self.plan).tensors
        return {
            name: read
            for name, read in interface.items()
            if read.reader == "matmul" and read.operand == 1 and _BLOCK.match(name)
        }

    def by_role(self, name: str) -> ShardSpec:
        """Layout of a tensor with its axes called data and tensor."""
        tensor = self.plan.tensors[name]
        data = self.data[tensor.stage]
        sizes = self.plan.stages[tensor.stage].mesh.sizes
        roles = [
            tuple(dict.fromkeys("data" if axis in data else "tensor" for axis in dim if sizes[axis] > 1))
            for dim in tensor.spec.dims
        ]
        return ShardSpec(tuple(roles))


def export_megatron(plan: Plan) -> Export:
    """Arguments for Megatron-LM.

    Returns:
        the data {"arguments": {name: value, or true for a flag}, "ranks": the plan's rank for each rank of
        Megatron-LM}; the source is the arguments quoted for a shell.

    Raises:
        GraphError: the plan has no surface.
        ShardingError: Megatron-LM cannot express the plan; the message lists every reason.
    """
    stages = range(len(plan.stages))
    data = [data_axes(plan, number) for number in stages]
    meshes = [stage.mesh for stage in plan.stages]
    tensor = [
        tuple(a for a in mesh.axes if a not in split and mesh.axis_size(a) > 1)
        for mesh, split in zip(meshes, data, strict=True)
    ]
    translation = _Translation(plan, data, tensor, [_blocks(plan, number) for number in stages])
    for translate in (
        _sizes,
        _batch,
        _pipeline,
        _strays,
        _matrices,
        _tables,
        _sequence,
        _zero,
        _experts,
        _recompute,
    ):
        translate(translation)
    if translation.reasons:
        reasons = "".join(f"\n  {reason}" for reason in translation.reasons)
        raise ShardingError(
            f"plan of {plan.program.name} is more than arguments of Megatron-LM can say; export it to jax or "
            f"torch, or search for equal stages:{reasons}"
        )
    content = {"arguments": translation.arguments, "ranks": _ranks(translation)}
    return Export("megatron", content, _shell(translation.arguments), tuple(translation.notes))


def _blocks(plan: Plan, number: int) -> list[str]:
    parameters = {name: t for name, t in plan.tensors.items() if t.kind == "param" and t.stage == number}
    names = in_order(parameters)
    matches = [_BLOCK.match(name) for name in names]
    return list(dict.fromkeys(match[1] for match in matches if match is not None))


def _sizes(translation: _Translation) -> None:
    """Tensor- and pipeline-parallel size; the data-parallel size follows from the number of ranks."""
    meshes = [stage.mesh for stage in translation.plan.stages]
    pairs = zip(meshes, translation.data, translation.tensor, strict=True)
    sizes = [(mesh.count(data), mesh.count(tensor)) for mesh, data, tensor in pairs]
    for number, (dp, tp) in enumerate(sizes):
        if (dp, tp) != sizes[0]:
            translation.reasons.append(
                f"stage 0 has dp={sizes[0][0]} x tp={sizes[0][1]} but stage {number} dp={dp} x tp={tp}: "
                f"Megatron-LM has one size of each for all stages"
            )
        if len(translation.tensor[number]) > 1:
            translation.reasons.append(
                f"stage {number}: axes {', '.join(translation.tensor[number])} split other things than the "
                f"batch; Megatron-LM has one group of tensor-parallel ranks"
            )
    ranks = [rank for mesh in meshes for rank in mesh.members]
    if len(set(ranks)) < len(ranks):
        translation.reasons.append("stages share ranks: Megatron-LM gives each rank one stage")
    translation.arguments["tensor-model-parallel-size"] = sizes[0][1]
    translation.arguments["pipeline-model-parallel-size"] = len(meshes)


def _batch(translation: _Translation) -> None:
    plan = translation.plan
    parts = plan.micro_batches * plan.stages[0].mesh.count(translation.data[0])
    if plan.batch % parts:
        translation.reasons.append(
            f"batch {plan.batch} in {plan.micro_batches} micro-batches over {parts // plan.micro_batches} "
            f"data-parallel ranks is uneven: Megatron-LM gives every rank as many samples"
        )
    translation.reasons += [
        f"stage {number} shares samples or weights unevenly (mesh {stage.mesh.described}): Megatron-LM gives "
        f"every rank as much"
        for number, stage in enumerate(plan.stages)
        if stage.mesh.weights
    ]
    translation.arguments["micro-batch-size"] = plan.batch // parts
    translation.arguments["global-batch-size"] = plan.batch


def _pipeline(translation: _Translation) -> None:
    """Layers of every stage, and the schedule."""
    blocks, plan = translation.blocks, translation.plan
    paths = list(dict.fromkeys(path for stage in blocks for path in stage))
    shared = [path for path in paths if sum(path in stage for stage in blocks) > 1]
    if shared:
        translation.reasons.append(
            f"layers {listed(shared)} are cut between stages: Megatron-LM cuts between layers"
        )
    if not paths:
        translation.reasons.append("there are no numbered layers: Megatron-LM trains stacks of equal ones")
    if "megatron" not in schedule_policy(plan.schedule).export_names and len(blocks) > 1:
        translation.reasons.append(f"schedule {plan.schedule}: Megatron-LM runs 1f1b")
    other_stages = {
        name: t.stage for name, t in plan.tensors.items() if t.kind == "param" and not _BLOCK.match(name)
    }
    middle = [name for name, stage in other_stages.items() if 0 < stage < len(blocks) - 1]
    if middle:
        translation.reasons.append(
            f"{listed(middle)} are stored on a stage in the middle: Megatron-LM has them at the ends"
        )
    translation.arguments["num-layers"] = len(paths)
    if len({len(stage) for stage in blocks}) > 1:
        layers = [f"t*{len(stage)}" if stage else "" for stage in blocks]
        translation.arguments["pipeline-model-parallel-layout"] = f"E{'|'.join(layers)}L"


def _strays(translation: _Translation) -> None:
    """Parameters other than experts whose computation is split over data-parallel ranks."""
    experts = _experts_of(translation)
    for number in range(len(translation.plan.stages)):
        strays = strays_of(translation.plan, number)
        if set(strays.names) <= experts.keys():
            continue
        note = f"stage {number}: {strays}; Megatron-LM computes them on the rows of each data-parallel rank"
        (translation.reasons if strays.share > MOST else translation.notes).append(note)


def _matrices(translation: _Translation) -> None:
    """Check that every matrix of a layer is split by its outputs or its inputs, equally in all layers."""
    first: dict[str, str] = {}
    for name in (
        name for name, t in translation.plan.tensors.items() if t.kind == "param" and _BLOCK.match(name)
    ):
        equal_name = first.setdefault(_NUMBER.sub(".*", f".{name}"), name)
        if translation.by_role(equal_name) != translation.by_role(name):
            tensors = translation.plan.tensors
            translation.reasons.append(
                f"{equal_name} is sharded {tensors[equal_name].spec} but {name} {tensors[name].spec}: "
                f"Megatron-LM splits all layers in the same way"
            )
    if translation.arguments["tensor-model-parallel-size"] == 1:
        return
    whole = [
        n for n in translation.matrices() if not any("tensor" in dim for dim in translation.by_role(n).dims)
    ]
    if whole:
        translation.reasons.append(
            f"{listed(whole)} are whole on every tensor-parallel rank: Megatron-LM splits them"
        )


def _tables(translation: _Translation) -> None:
    """The table of tokens and the matrix of the logits: whether they are tied, and their layouts."""
    tables = {
        name: read
        for name, read in surface(translation.plan).tensors.items()
        if translation.plan.tensors[name].kind == "param" and not _BLOCK.match(name)
        if len(read.shape) == 2 and read.reader in ("embedding", "matmul")
    }
    if {"embedding", "matmul"} <= {read.reader for read in tables.values()}:
        translation.arguments["untie-embeddings-and-output-weights"] = True
    whole = [name for name in tables if not any("tensor" in dim for dim in translation.by_role(name).dims)]
    if whole and translation.arguments["tensor-model-parallel-size"] != 1:
        translation.notes.append(
            f"{listed(whole)} are whole in the plan; Megatron-LM splits them by the vocabulary"
        )


def _sequence(translation: _Translation) -> None:
    """Whether hidden states between the modules of a layer are split along the sequence."""
    split = {}
    for number, blocks in enumerate(translation.blocks):
        for path in blocks:
            module = surface(translation.plan).modules.get(path)
            if module is not None and module.enters and len(module.enters[0].used.dims) > 2:
                split[path] = any(
                    axis in translation.tensor[number] for axis in module.enters[0].used.dims[1]
                )
    if len(set(split.values())) > 1:
        split_paths = [path for path, on in split.items() if on]
        translation.reasons.append(
            f"the sequence is split in {listed(split_paths)} only: Megatron-LM splits it in all layers"
        )
    if split and all(split.values()):
        translation.arguments["sequence-parallel"] = True


def _zero(translation: _Translation) -> None:
    """Whether states, or parameters too, are split over the data-parallel ranks; experts are left out."""
    stages, experts = range(len(translation.plan.stages)), _experts_of(translation)
    split = {
        kind: any(mostly_split(translation.plan, n, kind, experts) for n in stages)
        for kind in ("param", "state")
    }
    if split["param"]:
        translation.arguments |= {
            "use-distributed-optimizer": True,
            "use-megatron-fsdp": True,
            "data-parallel-sharding-strategy": "optim_grads_params",
            "no-gradient-accumulation-fusion": True,
        }
    elif split["state"]:
        translation.arguments["use-distributed-optimizer"] = True
    for kind in (kind for kind, on in split.items() if on):
        tensors = {
            n: t for n, t in translation.plan.tensors.items() if t.kind == kind and len(t.spec.dims) > 1
        }
        whole = [n for n, t in tensors.items() if not set(t.spec.axes) & set(translation.data[t.stage])]
        if whole:
            translation.notes.append(
                f"{listed(whole)} are whole on all data-parallel ranks in the plan; Megatron-LM splits all"
            )


def _experts_of(translation: _Translation) -> dict[str, Read]:
    """Parameters whose leading dim, the experts, is computed split over data axes."""
    interface = surface(translation.plan).tensors
    return {
        name: read
        for name, read in interface.items()
        if translation.plan.tensors[name].kind == "param"
        and len(read.shape) > 2
        and any(axis in translation.data[translation.plan.tensors[name].stage] for axis in read.used.dims[0])
    }


def _experts(translation: _Translation) -> None:
    sizes = set()
    for name, read in _experts_of(translation).items():
        stage = translation.plan.tensors[name].stage
        mesh, data = translation.plan.stages[stage].mesh, translation.data[stage]
        sizes.add(mesh.count(axis for axis in read.used.dims[0] if axis in data))
    if len(sizes) > 1:
        translation.reasons.append(
            f"experts are split {', '.join(map(str, sorted(sizes)))} ways: Megatron-LM has one"
        )
    if sizes:
        translation.arguments["expert-model-parallel-size"] = max(sizes)


def _recompute(translation: _Translation) -> None:
    """Recomputed layers: all of them, or the same number of first layers of every stage."""
    recomputed = [path for path, module in surface(translation.plan).modules.items() if module.again]
    if not recomputed:
        return
    partial_layers = [path for path in recomputed if not any(path in blocks for blocks in translation.blocks)]
    if partial_layers:
        translation.reasons.append(f"{listed(partial_layers)} are recomputed, but are no whole layers")
    counts = [[path in recomputed for path in blocks] for blocks in translation.blocks]
    prefixes = all(flags == sorted(flags, reverse=True) for flags in counts)
    all_layers = all(map(all, counts))
    if not all_layers and (not prefixes or len({sum(flags) for flags in counts}) > 1):
        translation.reasons.append(
            "recomputed layers must be the same number of first layers of every stage, but are: "
            f"{', '.join(str(sum(flags)) for flags in counts)}"
        )
        return
    translation.arguments["recompute-granularity"] = "full"
    translation.arguments["recompute-method"] = "uniform" if all_layers else "block"
    translation.arguments["recompute-num-layers"] = 1 if all_layers else sum(counts[0])


def _ranks(translation: _Translation) -> list[int]:
    """Megatron-LM's rank -> rank of the plan; Megatron-LM numbers stage by stage, dp, then tp fastest."""
    ranks: list[int] = []
    for stage, data in zip(translation.plan.stages, translation.data, strict=True):
        axes = [*data, *(axis for axis in stage.mesh.axes if axis not in data)]
        order = [stage.mesh.axes.index(axis) for axis in axes]
        ranks += [int(rank) for rank in stage.mesh.ranks.transpose(order).ravel()]
    if ranks != list(range(len(ranks))):
        translation.notes.append(
            f"Megatron-LM numbers ranks otherwise: start its rank i where the plan has {ranks}[i]"
        )
    return ranks


def _shell(arguments: Mapping[str, int | str | bool]) -> str:
    lines = [
        f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}"
        for name, value in arguments.items()
    ]
    return " \\\n".join(lines) + "\n"


_PARTS = (
    _sizes, _batch, _pipeline, _strays, _matrices, _tables, _sequence, _zero, _experts, _recompute,
)  # fmt: skip
