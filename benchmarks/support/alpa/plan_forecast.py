"""The forecast of one plan of Alpa's tables (OSDI 2022): seconds of a step, bytes of the GPU that needs most.

*In:* a `Plan` (see `recorded_plans`). *Out:* a `Found`.
*Invariant:* seconds are the forecast of distgraph for the plan's program, without overlap of computation and
communication, and nothing beside it but the second gathering of ZeRO-3 (`gathering`). Bytes are those of the
same program under a compiler that fuses and plans memory (`fused_memory`).

A long pipeline repeats itself: once it is full every further micro-batch takes the same time. So `SIMULATED`
micro-batches a stage are simulated to fill it, as many again for the slope, and the rest is the slope times
the number left. Equal blocks repeat themselves too, see `cuts`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from benchmarks.support.alpa.fused_memory import moments
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
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.forecast.stream_model import TaskTime
from distgraph.runtime.program.build import Build, build
from distgraph.runtime.program.memory_plan import plan_storage
from distgraph.runtime.schedule.schedule import schedule
from distgraph.runtime.schedule.simulate import simulate
from distgraph.runtime.schedule.task import TaskGraph
from distgraph.tracing.annotations import shard_tensor
from distgraph.tracing.tensor import Tensor

SIMULATED = 2
STREAMS = ("memory", "lookup")


Moments = tuple[dict[str, float], ...]
"""Category -> bytes at each of some moments."""


def most(need: Moments) -> dict[str, float]:
    """The moment that needs most."""
    return max(need, key=lambda each: sum(each.values()))


@dataclass(frozen=True, slots=True)
class Found:
    """Forecast of a plan: seconds of a step; category -> bytes on the GPU that needs most."""

    plan: Plan
    seconds: float
    memory: Mapping[str, float]

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
    """The compiled program, of no more micro-batches than fill the pipeline."""
    graph = graph_of(plan)
    return build(complete(graph, meshes_of(plan)[0]), micro_batches=filling(plan))


def filling(plan: Plan) -> int:
    """Number of micro-batches after which each further one takes the same time."""
    return min(plan.micro, SIMULATED * (len(plan.stages) + 1))


@dataclass(frozen=True)
class Priced:
    """A program with all its costs.

    Attributes:
        graph, policy: its tasks and schedule.
        stages, kinds: task -> stage, load or forward or ...
        body, last: task -> seconds with any micro-batch, with the last one.
        memory: stage -> moments of its rank that needs most.
    """

    graph: TaskGraph
    policy: str
    stages: Mapping[str, int]
    kinds: Mapping[str, str]
    body: Mapping[str, float]
    last: Mapping[str, float]
    memory: Mapping[int, Moments]


def priced(plan: Plan, cluster: Cluster) -> Priced:
    """Costs of the program of a plan, without overlap of computation and communication."""
    program = built(plan)
    partitioned = plan.software == "torch" and plan.zero == 2
    found = forecast(program, cluster, overlap=False, trace=partitioned)
    stage = {rank: at for at, mesh in enumerate(meshes_of(plan)) for rank in mesh.members}
    memory: dict[int, Moments] = {}
    for rank in found.memory:
        own, order = program.program(rank), program.schedule.order(rank)
        need = moments(own, plan_storage(own, program.schedule), order, plan.micro)
        memory[stage[rank]] = max(
            memory.get(stage[rank], need), need, key=lambda each: sum(most(each).values())
        )
    body = {name: task.body.seconds for name, task in found.tasks.items()}
    last = {name: task.last.seconds for name, task in found.tasks.items()}
    if partitioned:
        last = {name: seconds + chained(program, found.tasks[name].last) for name, seconds in last.items()}
        # DeepSpeed keeps no whole gradients: it reduces those of every micro-batch.
        body = dict(last)
    for (source, target), seconds in found.transfers.items():
        # Neither end computes while a message is on its way.
        for name in (source, target):
            body[name], last[name] = body[name] + seconds, last[name] + seconds
    return Priced(
        program.task_graph,
        program.policy,
        {name: task.stage for name, task in found.tasks.items()},
        {name: task.kind for name, task in found.tasks.items()},
        body,
        last,
        memory,
    )


def chained(program: Build, task: TaskTime) -> float:
    """Seconds that DeepSpeed 0.5.4 takes longer to reduce gradients than a scattering reduction.

    It sends every piece to the rank that will update it with a `dist.reduce` of its own, one after another
    (`average_tensor` of runtime/zero/stage2.py): all bytes of a piece go down a chain of the n ranks that
    ends there, over every link of it. A reduce_scatter sends (n - 1)/n of them over each.
    """
    ops = {op.name: op for op in program.lowered.ops}
    seconds = 0.0
    for span in task.spans:
        if span.kind == "comm.reduce_scatter":
            op = ops[span.op]
            mesh = program.lowered.attrs[op.operands[0].name].mesh
            ranks = math.prod(mesh.axis_size(axis) for axis in op.attrs["axes"])
            seconds += span.seconds / (ranks - 1)
    return seconds


def cuts(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Blocks of every stage in the programs that are built for a plan: one, or two to draw a line through.

    In a stage of equal blocks everything is a line over their number: seconds exactly, since nothing
    overlaps, and bytes from two blocks on, since scratch memory is shared. The blocks of a mixture of experts
    come in pairs.
    """
    whole = tuple(stage.blocks for stage in plan.stages)
    if isinstance(plan.config, WideResNetConfig) or plan.same:
        return (whole,)
    unit = 2 if isinstance(plan.config, MoEConfig) else 1
    if any(blocks % unit for blocks in whole) or max(whole) <= 3 * unit:
        return (whole,)
    return tuple(tuple(min(blocks, count * unit) for blocks in whole) for count in (2, 3))


def cut(plan: Plan, blocks: tuple[int, ...]) -> Plan:
    """The plan for a model with fewer blocks."""
    if isinstance(plan.config, WideResNetConfig):
        return plan
    sizes = tuple(replace(s, blocks=n) for s, n in zip(plan.stages, blocks, strict=True))
    return replace(plan, config=replace(plan.config, layers=sum(blocks)), stages=sizes)


def extended(plan: Plan, two: Priced, three: Priced) -> Priced:
    """Costs of a plan from those with two and with three units of blocks a stage."""
    whole = [stage.blocks for stage in plan.stages]
    factors = [(n - a) / (b - a) if b > a else 0.0 for n, a, b in zip(whole, *cuts(plan), strict=True)]

    def line(a: float, b: float, stage: int) -> float:
        return a + factors[stage] * (b - a)

    def tasks(field: str) -> dict[str, float]:
        old, new = getattr(two, field), getattr(three, field)
        return {name: line(seconds, new[name], two.stages[name]) for name, seconds in old.items()}

    memory = {
        stage: tuple(
            {name: line(size, more[name], stage) for name, size in few.items()}
            for few, more in zip(need, three.memory[stage], strict=True)
        )
        for stage, need in two.memory.items()
    }
    return replace(two, body=tasks("body"), last=tasks("last"), memory=memory)


def forecast_of(plan: Plan, cluster: Cluster) -> Found:
    """The forecast of a plan on a cluster."""
    costs = [priced(cut(plan, blocks), cluster) for blocks in cuts(plan)]
    found = costs[0] if len(costs) == 1 else extended(plan, *costs)
    seconds = makespan(found, plan.micro) + (gathering(found) if plan.zero == 3 else 0.0)
    memory = max(map(most, found.memory.values()), key=lambda need: sum(need.values()))
    return Found(plan, seconds, memory)


def gathering(costs: Priced) -> float:
    """Seconds of gathering split parameters again: ZeRO-3 does so before every use, our runtime once."""
    return sum(seconds for name, seconds in costs.last.items() if costs.kinds[name] == "load")


def makespan(costs: Priced, micro: int) -> float:
    """Seconds of a step: simulated as far as the program goes, then along the slope."""
    end, filled = _simulated(costs, costs.graph), costs.graph.micro_batches
    more = min(micro - filled, filled)
    if not more:
        return end
    longer = _simulated(costs, replace(costs.graph, micro_batches=filled + more))
    return end + (micro - filled) * (longer - end) / more


def _simulated(costs: Priced, graph: TaskGraph) -> float:
    order = schedule(graph, costs.policy).orders()
    return simulate(graph, costs.body, policy=costs.policy, order=order, last=costs.last).makespan
