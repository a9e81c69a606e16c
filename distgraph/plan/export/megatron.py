"""Export to Megatron-LM: command line arguments, where a plan is one that they can say.

Megatron-LM has one tensor-, data- and pipeline-parallel size for the whole model, splits every layer in the
same way (Shoeybi et al., 2019, section 3; Narayanan et al., 2021, section 2; Korthikanti et al., 2022,
section 4.2), and numbers ranks tp first, then dp, then stages. A plan that is not so has no arguments: every
reason is in the error. What differs without changing what is computed where is a note.
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
from distgraph.plan.schedule_policies import schedule_policy

if TYPE_CHECKING:
    from distgraph.plan.plan import Plan

_BLOCK = re.compile(r"^(.*?\.\d+)(?:\.|$)")
_NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(slots=True)
class _Translation:
    """A plan on its way to arguments.

    Attributes:
        data, tensor: per stage, the axes that split the batch, and the others.
        blocks: per stage, paths of the transformer layers in order.
        reasons: why there are no arguments.
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
        known = surface(self.plan).tensors
        return {
            name: read
            for name, read in known.items()
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

    Args:
        plan: of a stack of equal layers, with a surface.

    Returns:
        the data {"arguments": {name: value, or true for a flag}, "ranks": the plan's rank that stands for
        each of Megatron-LM's}; the source is the arguments as a shell takes them.

    Raises:
        GraphError: the plan has no surface.
        ShardingError: Megatron-LM cannot do what the plan says; the message lists every reason.
    """
    stages = range(len(plan.stages))
    data = [data_axes(plan, number) for number in stages]
    meshes = [stage.mesh for stage in plan.stages]
    tensor = [
        tuple(a for a in mesh.axes if a not in split and mesh.axis_size(a) > 1)
        for mesh, split in zip(meshes, data, strict=True)
    ]
    found = _Translation(plan, data, tensor, [_blocks(plan, number) for number in stages])
    for part in (
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
        part(found)
    if found.reasons:
        reasons = "".join(f"\n  {reason}" for reason in found.reasons)
        raise ShardingError(
            f"plan of {plan.program.name} is more than arguments of Megatron-LM can say; export it to jax or "
            f"torch, or search for equal stages:{reasons}"
        )
    content = {"arguments": found.arguments, "ranks": _ranks(found)}
    return Export("megatron", content, _shell(found.arguments), tuple(found.notes))


def _blocks(plan: Plan, number: int) -> list[str]:
    parameters = {name: t for name, t in plan.tensors.items() if t.kind == "param" and t.stage == number}
    names = in_order(parameters)
    matches = [_BLOCK.match(name) for name in names]
    return list(dict.fromkeys(match[1] for match in matches if match is not None))


def _sizes(found: _Translation) -> None:
    """Tensor- and pipeline-parallel size; the data-parallel size follows from the number of ranks."""
    meshes = [stage.mesh for stage in found.plan.stages]
    pairs = zip(meshes, found.data, found.tensor, strict=True)
    sizes = [(mesh.count(data), mesh.count(tensor)) for mesh, data, tensor in pairs]
    for number, (dp, tp) in enumerate(sizes):
        if (dp, tp) != sizes[0]:
            found.reasons.append(
                f"stage 0 has dp={sizes[0][0]} x tp={sizes[0][1]} but stage {number} dp={dp} x tp={tp}: "
                f"Megatron-LM has one size of each for all stages"
            )
        if len(found.tensor[number]) > 1:
            found.reasons.append(
                f"stage {number}: axes {', '.join(found.tensor[number])} split other things than the batch; "
                f"Megatron-LM has one group of tensor-parallel ranks"
            )
    ranks = [rank for mesh in meshes for rank in mesh.members]
    if len(set(ranks)) < len(ranks):
        found.reasons.append("stages share ranks: Megatron-LM gives each rank one stage")
    found.arguments["tensor-model-parallel-size"] = sizes[0][1]
    found.arguments["pipeline-model-parallel-size"] = len(meshes)


def _batch(found: _Translation) -> None:
    plan = found.plan
    parts = plan.micro_batches * plan.stages[0].mesh.count(found.data[0])
    if plan.batch % parts:
        found.reasons.append(
            f"batch {plan.batch} in {plan.micro_batches} micro-batches over {parts // plan.micro_batches} "
            f"data-parallel ranks is uneven: Megatron-LM gives every rank as many samples"
        )
    found.reasons += [
        f"stage {number} shares samples or weights unevenly (mesh {stage.mesh.described}): Megatron-LM gives "
        f"every rank as much"
        for number, stage in enumerate(plan.stages)
        if stage.mesh.weights
    ]
    found.arguments["micro-batch-size"] = plan.batch // parts
    found.arguments["global-batch-size"] = plan.batch


def _pipeline(found: _Translation) -> None:
    """Layers of every stage, and the schedule."""
    blocks, plan = found.blocks, found.plan
    every = list(dict.fromkeys(path for stage in blocks for path in stage))
    shared = [path for path in every if sum(path in stage for stage in blocks) > 1]
    if shared:
        found.reasons.append(
            f"layers {listed(shared)} are cut between stages: Megatron-LM cuts between layers"
        )
    if not every:
        found.reasons.append("there are no numbered layers: Megatron-LM trains stacks of equal ones")
    if "megatron" not in schedule_policy(plan.schedule).export_names and len(blocks) > 1:
        found.reasons.append(f"schedule {plan.schedule}: Megatron-LM runs 1f1b")
    outside = {
        name: t.stage for name, t in plan.tensors.items() if t.kind == "param" and not _BLOCK.match(name)
    }
    middle = [name for name, stage in outside.items() if 0 < stage < len(blocks) - 1]
    if middle:
        found.reasons.append(
            f"{listed(middle)} lie on a stage in the middle: Megatron-LM has them at the ends"
        )
    found.arguments["num-layers"] = len(every)
    if len({len(stage) for stage in blocks}) > 1:
        layers = [f"t*{len(stage)}" if stage else "" for stage in blocks]
        found.arguments["pipeline-model-parallel-layout"] = f"E{'|'.join(layers)}L"


def _strays(found: _Translation) -> None:
    """What the plan computes over the ranks that share a batch, experts apart."""
    experts = _experts_of(found)
    for number in range(len(found.plan.stages)):
        strays = strays_of(found.plan, number)
        if set(strays.names) <= experts.keys():
            continue
        said = f"stage {number}: {strays}; Megatron-LM computes them on the rows of each data-parallel rank"
        (found.reasons if strays.share > MOST else found.notes).append(said)


def _matrices(found: _Translation) -> None:
    """Every matrix of a layer is split by its outputs or its inputs, in all layers alike."""
    first: dict[str, str] = {}
    for name in (name for name, t in found.plan.tensors.items() if t.kind == "param" and _BLOCK.match(name)):
        same = first.setdefault(_NUMBER.sub(".*", f".{name}"), name)
        if found.by_role(same) != found.by_role(name):
            found.reasons.append(
                f"{same} lies {found.plan.tensors[same].spec} but {name} {found.plan.tensors[name].spec}: "
                f"Megatron-LM splits all layers alike"
            )
    if found.arguments["tensor-model-parallel-size"] == 1:
        return
    whole = [n for n in found.matrices() if not any("tensor" in dim for dim in found.by_role(n).dims)]
    if whole:
        found.reasons.append(
            f"{listed(whole)} are whole on every tensor-parallel rank: Megatron-LM splits them"
        )


def _tables(found: _Translation) -> None:
    """The table of tokens and the matrix of the logits: one or two, and how they lie."""
    tables = {
        name: read
        for name, read in surface(found.plan).tensors.items()
        if found.plan.tensors[name].kind == "param" and not _BLOCK.match(name)
        if len(read.shape) == 2 and read.reader in ("embedding", "matmul")
    }
    if {"embedding", "matmul"} <= {read.reader for read in tables.values()}:
        found.arguments["untie-embeddings-and-output-weights"] = True
    kept = [name for name in tables if not any("tensor" in dim for dim in found.by_role(name).dims)]
    if kept and found.arguments["tensor-model-parallel-size"] != 1:
        found.notes.append(f"{listed(kept)} are whole in the plan; Megatron-LM splits them by the vocabulary")


def _sequence(found: _Translation) -> None:
    """Whether hidden states between the parts of a layer are split along the sequence."""
    split = {}
    for number, blocks in enumerate(found.blocks):
        for path in blocks:
            part = surface(found.plan).modules.get(path)
            if part is not None and part.enters and len(part.enters[0].used.dims) > 2:
                split[path] = any(axis in found.tensor[number] for axis in part.enters[0].used.dims[1])
    if len(set(split.values())) > 1:
        yes = [path for path, on in split.items() if on]
        found.reasons.append(
            f"the sequence is split in {listed(yes)} only: Megatron-LM splits it in all layers"
        )
    if split and all(split.values()):
        found.arguments["sequence-parallel"] = True


def _zero(found: _Translation) -> None:
    """What is split over the data-parallel ranks: states, or parameters too; experts are apart."""
    stages, experts = range(len(found.plan.stages)), _experts_of(found)
    split = {
        kind: any(mostly_split(found.plan, n, kind, experts) for n in stages) for kind in ("param", "state")
    }
    if split["param"]:
        found.arguments |= {
            "use-distributed-optimizer": True,
            "use-megatron-fsdp": True,
            "data-parallel-sharding-strategy": "optim_grads_params",
            "no-gradient-accumulation-fusion": True,
        }
    elif split["state"]:
        found.arguments["use-distributed-optimizer"] = True
    for kind in (kind for kind, on in split.items() if on):
        tensors = {n: t for n, t in found.plan.tensors.items() if t.kind == kind and len(t.spec.dims) > 1}
        rest = [n for n, t in tensors.items() if not set(t.spec.axes) & set(found.data[t.stage])]
        if rest:
            found.notes.append(
                f"{listed(rest)} are whole on all data-parallel ranks in the plan; Megatron-LM splits all"
            )


def _experts_of(found: _Translation) -> dict[str, Read]:
    """Parameters whose leading dim, the experts, is computed split over data axes."""
    known = surface(found.plan).tensors
    return {
        name: read
        for name, read in known.items()
        if found.plan.tensors[name].kind == "param"
        and len(read.shape) > 2
        and any(axis in found.data[found.plan.tensors[name].stage] for axis in read.used.dims[0])
    }


def _experts(found: _Translation) -> None:
    sizes = set()
    for name, read in _experts_of(found).items():
        stage = found.plan.tensors[name].stage
        mesh, data = found.plan.stages[stage].mesh, found.data[stage]
        sizes.add(mesh.count(axis for axis in read.used.dims[0] if axis in data))
    if len(sizes) > 1:
        found.reasons.append(
            f"experts are split {', '.join(map(str, sorted(sizes)))} ways: Megatron-LM has one"
        )
    if sizes:
        found.arguments["expert-model-parallel-size"] = max(sizes)


def _recompute(found: _Translation) -> None:
    """Layers that are computed again: all, or as many first ones of every stage."""
    again = [path for path, part in surface(found.plan).modules.items() if part.again]
    if not again:
        return
    inside = [path for path in again if not any(path in blocks for blocks in found.blocks)]
    if inside:
        found.reasons.append(f"{listed(inside)} are computed again, which are no whole layers")
    counts = [[path in again for path in blocks] for blocks in found.blocks]
    prefixes = all(flags == sorted(flags, reverse=True) for flags in counts)
    everything = all(map(all, counts))
    if not everything and (not prefixes or len({sum(flags) for flags in counts}) > 1):
        found.reasons.append(
            "layers that are computed again are not as many first ones of every stage: "
            f"{', '.join(str(sum(flags)) for flags in counts)}"
        )
        return
    found.arguments["recompute-granularity"] = "full"
    found.arguments["recompute-method"] = "uniform" if everything else "block"
    found.arguments["recompute-num-layers"] = 1 if everything else sum(counts[0])


def _ranks(found: _Translation) -> list[int]:
    """For each rank as Megatron-LM numbers them, stage by stage, dp and then tp fastest: the plan's rank."""
    ranks: list[int] = []
    for stage, data in zip(found.plan.stages, found.data, strict=True):
        axes = [*data, *(axis for axis in stage.mesh.axes if axis not in data)]
        order = [stage.mesh.axes.index(axis) for axis in axes]
        ranks += [int(rank) for rank in stage.mesh.ranks.transpose(order).ravel()]
    if ranks != list(range(len(ranks))):
        found.notes.append(
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
