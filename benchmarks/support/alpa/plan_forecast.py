"""The forecast of one plan of Alpa's tables (OSDI 2022): seconds of a step, bytes of the GPU that needs most.

*In:* a `Plan` (see `recorded_plans`). *Out:* a `Found`.
*Invariant:* seconds and bytes are those of the forecast of distgraph for the plan's program under the runtime
that executed it (resources/runtimes), and nothing beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from benchmarks.support.alpa.recorded_plans import Plan
from distgraph import nn, ops, optim
from distgraph.engine.compile.train_graph import train_graph
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.models import GPT, GPTConfig, GShardMoE, MoEConfig, WideResNet, WideResNetConfig, stages
from distgraph.models.decoder import Decoder
from distgraph.models.megatron_layout import Layout, Stack
from distgraph.passes.complete import complete
from distgraph.resources import Cluster
from distgraph.resources.runtimes.load_runtime import load_runtime
from distgraph.resources.runtimes.runtime_model import RuntimeModel
from distgraph.runtime.forecast.forecast import forecast, out_of_memory
from distgraph.runtime.program.build import Build, build
from distgraph.tracing.annotations import shard_tensor
from distgraph.tracing.tensor import Tensor

FRACTION_WIDE = 0.88
"""Of a GPU, a setting of the artifact of Alpa for Wide-ResNet."""


@dataclass(frozen=True, slots=True)
class Found:
    """Forecast of a plan.

    Attributes:
        plan: what was forecast.
        seconds: of a step.
        memory: category -> bytes on the GPU that needs most.
        missing: bytes by which a GPU needs more than its runtime lets it use; 0 if the plan fits.
    """

    plan: Plan
    seconds: float
    memory: Mapping[str, float]
    missing: float

    @property
    def needed(self) -> float:
        """Bytes."""
        return sum(self.memory.values())


class OneHot(nn.Module):
    """A table of rows that are taken by a product with one-hot rows, as Alpa does (`embed_call_one_hot`)."""

    def __init__(self, table: nn.Embedding) -> None:
        self.weight = table.weight

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., width]."""
        return ops.matmul(ops.one_hot(ids, self.weight.shape[0], self.weight.dtype), self.weight)


def model_of(plan: Plan) -> Stack:
    """The model of a plan, laid out."""
    family = {GPTConfig: GPT, MoEConfig: GShardMoE}.get(type(plan.config), WideResNet)
    model: Stack = family(plan.config)  # type: ignore[arg-type]
    if plan.software == "xla" and not isinstance(plan.config, WideResNetConfig):
        model.tokens = OneHot(model.tokens)  # type: ignore[attr-defined]
    meshes, blocks = meshes_of(plan), [stage.blocks for stage in plan.stages]
    if plan.largest:
        _split_longest(model, meshes[0])
    else:
        stages(model, meshes, blocks, dp=("dp", "ep"), ep="ep")
    if isinstance(model, WideResNet) and not plan.largest:
        _split_channels(model)
    model.recompute = plan.recompute
    if plan.zero == 3:
        _split_parameters(model)
    return model


class ByChannels(Layout):
    """What goes from block to block is split by channels over `tp`."""

    def batch(self, x: Any) -> Any:
        """Images [n, channels, h, w]; anything else by the batch only."""
        return self.pin(x, "dp", "tp", None, None) if x.ndim == 4 else super().batch(x)


def _split_channels(model: WideResNet) -> None:
    """Blocks on a mesh with `tp` compute no convolution twice: Alpa does not replicate heavy operators (4.2).

    Of the ways to do so this one sends least: the first convolution and the projection add over input
    channels, the second splits output channels, the third adds over its input channels.
    """
    for block in model.blocks:
        if block.layout.axis("tp") is None:
            continue
        block.layout = ByChannels(**{f.name: getattr(block.layout, f.name) for f in fields(Layout)})
        for convolution in filter(None, (block.conv1, block.project)):
            _lay(convolution.weight, block.layout, None, "tp", None, None)
        for norm in filter(None, (block.bn3, block.bn4)):
            for _, parameter in norm.named_parameters():
                _lay(parameter, block.layout, "tp")


def _lay(parameter: nn.Parameter, layout: Layout, *roles: str | None) -> None:
    """Lay a parameter otherwise than the model does."""
    assert layout.mesh is not None
    spec = ShardSpec(tuple(layout.axes(role) for role in roles))
    parameter.annotation = DistAttr(layout.mesh, spec, Origin("user", "channels"))


def _split_longest(model: Stack, mesh: ProcessMesh) -> None:
    """Every parameter and the input split over tp by the longest dim, everything else left open."""
    for _, parameter in model.named_parameters():
        spec = ShardSpec(longest(parameter.shape, mesh))
        parameter.annotation = DistAttr(mesh, spec, Origin("user", "longest dim"))
    forward = model.forward  # type: ignore[attr-defined]
    model.forward = lambda x: forward(shard_tensor(x, mesh, longest(x.shape, mesh)))  # type: ignore[attr-defined]


def longest(shape: Sequence[int], mesh: ProcessMesh) -> tuple[tuple[str, ...], ...]:
    """tp on the longest dim, none where that does not divide, as in `AnnotateShardingWithSimpleHeuristic`."""
    chosen = max(range(len(shape)), key=lambda dim: shape[dim])
    split = ("tp",) if shape[chosen] % mesh.sizes["tp"] == 0 else ()
    return tuple(split if dim == chosen else () for dim in range(len(shape)))


def _split_parameters(model: Stack) -> None:
    """Every parameter split over dp by its longest dim, beside what splits it."""
    for _, parameter in model.named_parameters():
        held = parameter.annotation
        spec = optim.shard_states(held.mesh, "dp")("", parameter.shape, held)
        if spec is not None:
            parameter.annotation = spec


def meshes_of(plan: Plan) -> list[ProcessMesh]:
    """One a stage, on consecutive ranks, or all on the same; axes of length one are left out."""
    found, start = [], 0
    for stage in plan.stages:
        sizes = {"dp": stage.dp, "ep": stage.ep, "tp": stage.tp}
        used = {axis: size for axis, size in sizes.items() if size > 1} or {"dp": 1}
        found.append(ProcessMesh.grid(start, **used))
        start += 0 if plan.same else stage.gpus
    return found


def optimizer_of(plan: Plan) -> optim.Optimizer:
    """AdamW for GPT, Adafactor for MoE, SGD with momentum for Wide-ResNet; f16 parameters have f32 masters.

    DeepSpeed's Adafactor keeps a first moment and works on flat pieces of all parameters, which have no rows
    and columns: its states are as large as those of Adam.
    """
    spec = _states(plan)
    if isinstance(plan.config, WideResNetConfig):
        return optim.SGD(momentum=0.9, nesterov=True, state_spec=spec)
    if isinstance(plan.config, MoEConfig) and plan.software == "xla":
        return optim.Adafactor(master="f32", state_spec=spec)
    return optim.AdamW(master="f32", state_spec=spec)


def _states(plan: Plan) -> optim.StateSpec:
    """States lie like their parameter; with ZeRO split over every axis of the batch that does not split it.

    The row and the column sums of Adafactor lie like the dims of the master copy that they keep.
    """
    axes = ("dp", "ep") if plan.zero else ()
    masters: dict[str, tuple[tuple[int, ...], DistAttr]] = {}

    def spec(name: str, shape: tuple[int, ...], held: DistAttr | None) -> DistAttr | None:
        if held is None:
            return None
        if name in masters and masters[name][0] != shape:
            whole, attr = masters[name]
            dims = attr.spec.dims
            kept = dims[:-1] if whole[:-1] == shape else (*dims[:-2], dims[-1])
            return replace(attr, spec=ShardSpec(kept))
        found = held
        for axis in axes:
            if axis in held.mesh.sizes:
                found = optim.shard_states(held.mesh, axis)(name, shape, found) or found
        masters[name] = (shape, found)
        return found

    return spec


def batch_of(plan: Plan) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shapes of one micro-batch."""
    size, c = plan.batch // plan.micro, plan.config
    if isinstance(c, WideResNetConfig):
        return ((size, 3, c.image, c.image), "f32"), ((size,), "i32")
    return (((size, c.sequence), "i32"),) * 2


def graph_of(plan: Plan) -> Graph:
    """Forward, backward and update of one micro-batch; what is computed again is so to the last op."""
    model = model_of(plan)
    # Neither Alpa's experts nor the DeepSpeed script have the loss that keeps experts equally busy.
    loss = partial(Decoder.loss, model) if isinstance(plan.config, MoEConfig) else None
    return train_graph(model, batch_of(plan), loss, optimizer_of(plan), pruned=False)


def built(plan: Plan) -> Build:
    """The compiled program."""
    return build(complete(graph_of(plan), meshes_of(plan)[0]), micro_batches=plan.micro)


def runtime_of(plan: Plan) -> RuntimeModel:
    """What executed a plan; XLA took 88 % of a GPU in Alpa's runs of Wide-ResNet (`FRACTION_WIDE`)."""
    runtime = load_runtime(plan.software)
    if plan.software == "xla" and isinstance(plan.config, WideResNetConfig) and plan.micro > 1:
        return replace(runtime, memory=replace(runtime.memory, usable=FRACTION_WIDE))
    return runtime


def forecast_of(plan: Plan, cluster: Cluster) -> Found:
    """The forecast of a plan on a cluster under its runtime."""
    found = forecast(built(plan), cluster, runtime=runtime_of(plan))
    missing = max((short.missing for short in out_of_memory(found, cluster)), default=0.0)
    memory = max(found.memory.values(), key=lambda each: each.total)
    return Found(plan, found.step_seconds, memory.categories, missing)
