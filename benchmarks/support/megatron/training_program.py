"""What one step of Megatron-DeepSpeed's GPT training does, as counted in graphs of distgraph.

*In:* a configuration (hidden, heads, sequence, micro-batch, tensor parallelism). *Out:* `Bill`s: how often
every work and every collective occurs in one block, in what is before the blocks and in what is after them.
*Invariant:* nothing is derived by hand: models with one and with two blocks are traced, completed and
partitioned, and what one rank of them runs is priced op by op as in a forecast; a block is the difference
of the two. So the bill of a model with any number of layers on any number of stages costs two small graphs.

Gradients are reduced tensor by tensor after the last micro-batch, the vocabulary of 50,257 is padded to a
multiple of 128 a tensor parallel rank. On a pipeline the first and the last stage both hold the table of
tokens. Checkpointing runs the whole forward part of a block again, also what distgraph would leave out
because nobody reads it; so backward is that of a graph without recomputation and the forward part once
more.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import distgraph as dg
from distgraph import models, optim
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.errors import ResourceError
from distgraph.passes.complete import complete
from distgraph.passes.pass_pipeline import pipeline
from distgraph.plan.strategy import Strategy
from distgraph.resources import Cluster, ComputeCost
from distgraph.resources.load import load_cluster
from distgraph.runtime.forecast.op_cost import OpCost, Work
from distgraph.runtime.program.build import Build, build
from distgraph.runtime.program.memory_plan import plan_storage
from distgraph.runtime.program.storage import is_started, nbytes

VOCABULARY = 50257
SINGLE_REDUCTIONS = pipeline(["-bucket_gradients", "-bucket_parameters", "-fuse_reductions"])
"""Passes that reduce each gradient on its own: the costs of a closed form are proportional to the layers."""


@dataclass(frozen=True, slots=True)
class Run:
    """One measured iteration: layout, sizes and seconds. batch: samples a step; micro: of one replica at a
    time."""

    gpus: int
    batch: int
    micro: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tp: int
    dp: int
    pp: int
    seconds: float

    @property
    def micro_batches(self) -> int:
        """Micro-batches a step."""
        return self.batch // (self.dp * self.micro)

    @property
    def model(self) -> tuple[int, ...]:
        """What is trained, on how many GPUs: rows with the same differ in layout only."""
        return (self.hidden, self.heads, self.layers, self.sequence, self.gpus, self.batch)


def read_runs(path: Path) -> list[Run]:
    """Rows of a file of vTrain, of one machine or of several (a leading column with the billions of
    parameters)."""
    with path.open(newline="") as file:
        names, *rows = [row for row in csv.reader(file) if row]
    skipped = int(names[0].strip().lower().startswith("parameters"))
    found = []
    for number, row in enumerate(rows, 2):
        try:
            *sizes, milliseconds = row[skipped:]
            run = Run(*(int(float(size)) for size in sizes), float(milliseconds) / 1e3)
        except (TypeError, ValueError):
            raise ResourceError(
                f"{path}, line {number}: expected 10 numbers and milliseconds, got {','.join(row)}; see "
                "benchmarks/support/data/vtrain"
            ) from None
        if run.tp * run.dp * run.pp != run.gpus or run.batch % (run.dp * run.micro):
            raise ResourceError(
                f"{path}, line {number}: tp {run.tp} x dp {run.dp} x pp {run.pp} on {run.gpus} GPUs, batch "
                f"{run.batch} in micro-batches of {run.micro}: they do not divide; correct the row"
            )
        found.append(run)
    return found


@dataclass(frozen=True, slots=True)
class Message:
    """A collective: along which axis (tp or dp), its kind and the bytes on a rank."""

    axis: str
    kind: str
    nbytes: int


Bill = Counter[Work | Message]


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the bill of a block."""

    hidden: int
    heads: int
    sequence: int
    micro: int
    tp: int


KINDS = ("load", "forward", "backward", "tail", "optimize")
"""Tasks of a stage; tail is what only the last micro-batch adds to backward."""
Bills = dict[str, Bill]


@dataclass(frozen=True, slots=True)
class Model:
    """Bills by kind of task: of one block, and of what else a stage has: the first, one between, the last,
    an only one."""

    block: Bills
    first: Bills
    middle: Bills
    last: Bills
    only: Bills


@cache
def model_bills(shape: Shape, plain: bool = False) -> Model:
    """Bills of a GPT of this shape, from three small graphs; `plain` as distgraph runs it, without
    checkpointing."""
    (one,), (two,) = (_stage_bills(gpt_build(shape, [n], 2, 2)) for n in (1, 2))
    block = _less(two, one)
    stages = _stage_bills(gpt_build(shape, [1, 1, 1], 2, 2))
    rest = [_less(stage, block) for stage in (*stages, one)]
    if plain:
        return Model(block, *rest)
    block = {**block, "backward": block["backward"] + block["forward"]}
    if shape.micro * shape.heads // shape.tp % 4:
        _unfuse(block, shape)
    return Model(*(_at_once(bills) for bills in (block, *rest)))


def _unfuse(block: Bills, shape: Shape) -> None:
    """Megatron's fused softmax takes matrices by fours; others go op by op: to f32, scale, make the mask (3
    ops), fill, softmax, back to f16, and in backward four of these."""
    elements = shape.micro * shape.heads // shape.tp * shape.sequence**2
    over = Work("memory", nbytes=8 * elements, dtype="f32")
    block["forward"] += Counter({over: 4, Work("launch"): 3})
    block["backward"] += Counter({over: 8, Work("launch"): 3})


def _at_once(bills: Bills) -> Bills:
    """All updates in one kernel, no division by the number of micro-batches (the loss is scaled)."""
    updated = sum(work.nbytes * count for work, count in bills["optimize"].items())  # type: ignore[union-attr]
    tail = Counter({item: count for item, count in bills["tail"].items() if isinstance(item, Message)})
    # An update in f16 moves 14 bytes a parameter: parameter, two states, read and written, and the gradient.
    return {**bills, "tail": tail, "optimize": Counter({Work("update", nbytes=1): round(updated / 14)})}


def _less(whole: Bills, part: Bills) -> Bills:
    found = {}
    for kind in KINDS:
        left = Counter(whole[kind])
        left.subtract(part[kind])
        found[kind] = Counter({item: count for item, count in left.items() if count})
    return found


def gpt_build(shape: Shape, layers: Sequence[int], dp: int, micro_batches: int) -> Build:
    """The compiled training step of a GPT with so many layers on every stage."""
    each = dp * shape.tp
    meshes = [dg.ProcessMesh.grid(i * each, dp=dp, tp=shape.tp) for i in range(len(layers))]
    model = gpt_model(shape, layers, meshes)
    strategy = Strategy(mesh=meshes[0], batch_axis="dp") if len(meshes) == 1 else Strategy()
    fields = {f"batch.{i}": ((shape.micro * dp, shape.sequence), "i64") for i in range(2)}
    graph = TrainingSpec(model, model.loss, optim.Adam(), {}, strategy).trace("train", fields, {})
    return build(complete(graph, strategy.mesh), micro_batches=micro_batches, passes=SINGLE_REDUCTIONS)


def gpt_model(shape: Shape, layers: Sequence[int], meshes: Sequence[dg.ProcessMesh]) -> models.GPT:
    """A GPT with so many layers on every stage, laid out on their meshes."""
    padded = -(-VOCABULARY // (128 * shape.tp)) * 128 * shape.tp
    model = models.GPT.megatron(
        shape.hidden, sum(layers), shape.heads, shape.sequence, vocabulary=padded, tied=len(layers) == 1
    )
    models.stages(model, meshes, layers)
    return model


@cache
def _cluster() -> Cluster:
    return load_cluster("vtrain_a100_pod")


def _stage_bills(built: Build) -> list[Bills]:
    """Bills of the first rank of every stage."""
    cost = ComputeCost(_cluster())  # only its works are asked for, no seconds
    found: list[Bills] = []
    for column in built.schedule.columns:
        program = built.program(column.ranks[0])
        storage = plan_storage(program, built.schedule)
        ops = OpCost(program, storage, cost, 0)
        bills: Bills = {kind: Counter() for kind in KINDS}
        for task in program.tasks:
            for local in task.ops:
                bill = bills["tail" if local.tail else task.kind]
                if local.mode.startswith("comm.") and is_started(local):
                    if len(local.attrs["group"]) > 1:
                        kind = local.mode.removeprefix("comm.")
                        before, after = (
                            nbytes(program, v.name) for v in (local.op.operands[0], local.op.result)
                        )
                        size = after if kind in ("all_reduce", "all_gather") else before
                        bill[Message("_".join(local.op.attrs["axes"]), kind, size)] += 1
                    continue
                if local.mode == "send":
                    continue
                work, _ = ops.of(local)
                if work.kind != "none":
                    bill[work] += 1
                if local.mode == "accumulate":
                    scaling, _ = ops.scaling(local)
                    if scaling.kind != "none":
                        bills["tail"][scaling] += 1
        found.append(bills)
    return found
