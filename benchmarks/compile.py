"""Seconds to compile a GPT's training graph for a mesh: trace, every pass of the pipeline, schedule, storage
and code.

    python benchmarks/compile.py [--quick] [--json FILE] [--scale] [--shapes]

The model has hidden 256, 8 heads and sequence 128, annotated as Megatron-LM does (attention and feed-forward
split by columns, then by rows) on a mesh of dp=2 x tp=2; only its number of layers grows. The times do not
depend on the widths, because nothing is allocated: the code of rank 0 is generated over arrays that are
never touched. Each number is the least of three runs (one with `--quick`). Beside it: XLA needs over 200 s
to compile a train graph of 48 layers on such a machine, 1.1 s of that for the propagation of shardings.

`--scale` compiles a narrow model of up to 100,000 ops for all four ranks in one process, from the trace to
workers that could run, and prints CPU seconds of each phase and the growth of the whole: the exponent k of
ops ** k between one size and the next. `--shapes` does the same for programs that are unlike a GPT: 1,500 to
12,000 ops beside each other that are summed two by two (fan) or joined by one op (join), and a chain of up to
25,000 ops, to which the backward part adds as many again or more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import distgraph as dg
from distgraph import nn, ops
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.ir.graph import Graph
from distgraph.passes.partition import RankProgram
from distgraph.passes.pass_pipeline import pipeline, run_passes
from distgraph.passes.pass_registry import PassContext
from distgraph.runtime.execute.worker import Worker
from distgraph.runtime.program.build import Build
from distgraph.runtime.transport.inprocess import connect

SHAPES = {"fan": (1500, 3000, 6000, 12000), "join": (1500, 3000, 6000, 12000), "chain": (6000, 12500, 25000)}
SCALE = (78, 155, 310, 624)  # layers of 12,500, 25,000, 50,000 and 100,000 ops
LAYERS = (6, 12, 24, 48, 120)  # 48 layers are 7,700 ops here, 120 are 19,300
HIDDEN, HEADS, SEQUENCE, BATCH, VOCABULARY = 256, 8, 128, 16, 4096


class Gpt(nn.Module):
    """A decoder of some layers, split over the axis tp of a mesh."""

    def __init__(self, layers: int, mesh: dg.ProcessMesh, hidden: int = HIDDEN) -> None:
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Parameter((SEQUENCE, hidden))
        self.blocks = [nn.TransformerBlock(hidden, HEADS) for _ in range(layers)]
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("q.weight", "k.weight", "v.weight", "up.weight")):
                dg.shard_tensor(parameter, mesh, [None, "tp"])
            elif name.endswith(("out.weight", "down.weight")):
                dg.shard_tensor(parameter, mesh, ["tp", None])

    def forward(self, tokens: Any) -> Any:
        """[batch, sequence] to [batch, sequence, vocabulary]."""
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Shape(nn.Module):
    """Ops that do hardly anything: so many beside each other, summed two by two or joined, or in a chain."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.count, self.weight = kind, count, nn.Parameter((8,))

    def forward(self, x: Any) -> Any:
        """[batch, 8] to the same."""
        y = x * self.weight
        if self.kind == "chain":
            for _ in range(self.count):
                y = ops.tanh(y)
            return y
        parts = [ops.tanh(y) for _ in range(self.count)]
        if self.kind == "join":
            return ops.concat(parts, axis=1)[:, :8]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=False)
            parts = [left + right for left, right in pairs] + parts[len(parts) // 2 * 2 :]
        return parts[0]


def squares(output: Any, target: Any) -> Any:
    """Mean of the squares of the error."""
    return ((output - target) ** 2).mean()


def shaped(kind: str, count: int) -> dict[str, float]:
    """CPU seconds of every step of compiling one `Shape` for all ranks, and the number of ops."""
    mesh = dg.ProcessMesh.grid(dp=2, tp=2)
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp")
    training_spec = TrainingSpec(Shape(kind, count), squares, dg.optim.SGD(lr=0.1), {}, strategy)
    return steps(training_spec, mesh, {f"batch.{i}": ((8, 8), "f32") for i in range(2)}, every=True)


def compiled(layers: int, hidden: int = HIDDEN, *, every: bool = False) -> dict[str, float]:
    """Seconds of every step of compiling one model, and the number of ops.

    Args:
        layers, hidden: of the model.
        every: workers of all ranks, and CPU seconds; else rank 0, and seconds of the clock.
    """
    mesh = dg.ProcessMesh.grid(dp=2, tp=2)
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp")
    training_spec = TrainingSpec(Gpt(layers, mesh, hidden), nn.CrossEntropy(), dg.optim.Adam(), {}, strategy)
    return steps(
        training_spec, mesh, {f"batch.{i}": ((BATCH, SEQUENCE), "i64") for i in range(2)}, every=every
    )


def steps(
    training_spec: TrainingSpec, mesh: dg.ProcessMesh, fields: dict[str, Any], *, every: bool
) -> dict[str, float]:
    """Seconds of every step of compiling a program, and the number of ops; `every` as in `compiled`."""
    clock = time.process_time if every else time.perf_counter
    found: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        start = clock()
        result = function(*arguments)
        found[name] = clock() - start
        return result

    graph: Graph = timed("trace", training_spec.trace, "train", fields, {})
    passes, program = pipeline(["choose_completion=complete"]), graph
    reached: dict[str, Any] = {}
    for each in passes.reaching("completed", "resharded", "lowered", "tasks"):
        context = PassContext(mesh=mesh)
        program = timed(each.name, partial(run_passes, program, [each], context, verified=False))
        reached[each.stage] = program
    build = Build(reached["completed"], reached["lowered"], reached["tasks"], "1f1b", passes)
    programs: list[RankProgram] = timed("partition", lambda: [build.program(rank) for rank in mesh.members])
    timed("schedule", lambda: build.schedule)
    timed("codegen", lambda: [generate(build, program) for program in programs[: None if every else 1]])
    return {"ops": len(build.lowered.ops), **found}


def generate(build: Build, program: RankProgram) -> Worker:
    """The worker of one rank, over parameters that are never touched."""
    blocks = {}
    for op in program.graph.sources("param", "state"):
        shape, dtype = program.types[op.name]
        blocks[op.name] = np.empty(shape, "f4" if dtype == "f32" else dtype)
    return Worker(
        program, build.schedule, connect(program.parts.tasks[0].mesh.size)[program.rank], np, blocks
    )


def least(layers: int, runs: int) -> dict[str, float]:
    """The run with the smallest sum."""
    return min((compiled(layers) for _ in range(runs)), key=total)


def total(times: dict[str, float]) -> float:
    """Seconds from the model to rank programs."""
    return sum(seconds for name, seconds in times.items() if name != "ops")


def scale(sizes: tuple[int, ...], measure: Callable[[int], dict[str, float]], name: str) -> None:
    """Print what graphs of growing size take, each compiled in a process of its own."""
    table: Table | None = None
    before: tuple[float, float] | None = None
    for size in sizes:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            times = pool.submit(measure, size).result()
        if table is None:
            table = Table(*times, "all", "exponent", title=f"CPU seconds to compile, all four ranks: {name}")
        whole = total(times)
        growth = math.log(whole / before[1], times["ops"] / before[0]) if before else math.nan
        before = times["ops"], whole
        cells = [f"{times[name]:.2f}" for name in times if name != "ops"]
        table.add_row(str(times["ops"]), *cells, f"{whole:.1f}", f"{growth:.2f}")
        Console().print(f"{times['ops']} ops: {whole:.1f} s")
    assert table is not None
    Console(width=140).print(table)


def main() -> None:
    """Measure, print the table and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one run of each size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--scale", action="store_true", help="up to 100,000 ops, for all ranks")
    parser.add_argument("--shapes", action="store_true", help="wide graphs and a deep one, for all ranks")
    arguments = parser.parse_args()
    if arguments.scale:
        scale(SCALE, partial(compiled, hidden=16, every=True), "GPT")
    for kind, sizes in SHAPES.items() if arguments.shapes else ():
        scale(sizes, partial(shaped, kind), kind)
    if arguments.scale or arguments.shapes:
        return
    load = os.getloadavg()[0]
    results = {layers: least(layers, 1 if arguments.quick else 3) for layers in LAYERS}
    names = list(results[LAYERS[0]])
    table = Table("layers", *names, "all", title=f"seconds to compile (load average {load:.2f} at the start)")
    for layers, times in results.items():
        cells = [str(times["ops"]), *(f"{times[name]:.2f}" for name in names[1:])]
        table.add_row(str(layers), *cells, f"{total(times):.2f}")
    Console(width=140).print(table)
    if arguments.json is not None:
        most = results[48]
        figures = {
            "gpt48_ops": most["ops"],
            "gpt48_seconds": total(most),
            "gpt48_complete_seconds": most["complete"],
            "layers": [{"layers": layers, "seconds": total(times)} for layers, times in results.items()],
            "steps": {str(layers): times for layers, times in results.items()},
            "load_before": load,
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
