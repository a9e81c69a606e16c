"""What passes and schedules save: memory and bytes of ZeRO, bubbles, exposed messages, generation, bf16.

    python -m benchmarks.passes [--quick] [--skip-generate] [--json FILE]

Compared:

* `zero`: parameters, gradients and states of the optimiser that the memory plan of a rank has under each
  level of ZeRO, over the formula (parts that are split are 1 / ranks; the layers under way are temporary
  memory and do not count), and the bytes that a rank sends, over 1, 1, 1 and 1.5 times those of data
  parallelism. Workers allocate what is planned (`tests/engine/compile/test_zero.py`).
* `bubble`: share of a step in which a rank waits, on the simulated clock, and the published formula, for four
  stages and eight micro-batches whose forward, input gradient and weight gradient take equally long.
* `overlap_exposed_ratio`: seconds that a rank waits for the synchronisation of gradients, over the seconds
  that its messages take one after another while nothing is computed: forecast for a GPT on two machines with
  eight V100 each and 25 Gbit/s between them. `overlap_buckets`: the step with buckets over that without.
* `generate`: `engine.generate` over a plain NumPy loop with a cache, the pair of `benchmarks.step`.
* `precision`: a step in bf16 over one in f32, measured on this processor (processor time, pairs in turns),
  where NumPy has no products in 16 bits; and forecast on one A100.

`--quick` takes fewer repeats and does the same work otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import distgraph as dg
from benchmarks import step
from distgraph import nn, ops, optim
from distgraph.engine.compile.train_graph import train_graph
from distgraph.models import GPT, GPTConfig
from distgraph.passes import pass_pipeline
from distgraph.passes.complete import complete
from distgraph.resources import CollectiveCost, load_cluster
from distgraph.resources.mesh_communication import MeshCommunication
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.forecast.memory_forecast import rank_memory
from distgraph.runtime.program.build import Build, build
from distgraph.runtime.program.memory_plan import plan_storage
from distgraph.runtime.schedule.simulate import simulate
from distgraph.runtime.schedule.task import Edge, Task, TaskGraph, pipeline

RANKS, LAYERS, WIDTH, BATCH = 4, 8, 256, 8
STAGES, MICRO_BATCHES = 4, 8
MACHINES = "p3_16xlarge_x8"


class Net(nn.Module):
    """Equal layers."""

    def __init__(self, layers: int, width: int) -> None:
        self.layers = [nn.Linear(width, width) for _ in range(layers)]

    def forward(self, x: Any) -> Any:
        """[batch, width] to the same."""
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return x


def samples(size: int, width: int) -> tuple[Any, Any]:
    """Inputs and targets."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(size, width)).astype("f4"), rng.normal(size=(size, width)).astype("f4")


def zero_figures() -> dict[str, dict[str, float]]:
    """Level of ZeRO -> bytes of what a rank stores and sends, over the formulas."""
    mesh = dg.ProcessMesh.grid(dp=RANKS)
    parameters = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    figures = {}
    for level in range(4):
        strategy = dg.Strategy(mesh=mesh, batch_axis="dp", zero=level)
        engine = dg.Engine(Net(LAYERS, WIDTH), nn.MeanSquaredError(), optim.Adam(lr=1e-3), strategy=strategy)
        with closing(engine):
            made: Build = engine.prepare(samples(BATCH, WIDTH)).build
        program = made.program(0)
        memory = rank_memory(program, plan_storage(program, made.schedule))
        stored = memory.parameters + memory.gradients + memory.states
        # parameters, gradients, and the two moments of Adam
        parts = [1 / RANKS if level >= first else 1.0 for first in (3, 2, 1, 1)]
        sent = 2 * (RANKS - 1) / RANKS * parameters * (1.5 if level == 3 else 1.0)
        figures[str(level)] = {
            "state_bytes_ratio": stored / (parameters * sum(parts)),
            "wire_bytes_ratio": program.bytes_sent() / sent,
        }
    return figures


@dataclass(frozen=True)
class Bubble:
    """One schedule.

    Attributes:
        graph: its pipeline.
        seconds: by kind of task, or by task.
        waits: published time of the bubble, in units of a forward of a whole stage.
    """

    graph: TaskGraph
    seconds: Mapping[str, float]
    waits: float


def folded(stages: int, micro_batches: int) -> TaskGraph:
    """A pipeline that goes down its stages and comes back up, with weight tasks."""
    way = [(s, 0) for s in range(stages)] + [(s, 1) for s in reversed(range(stages - 1))]
    kinds = ("forward", "backward", "weight")
    tasks = [Task(f"{kind}.s{s}.c{c}", kind, s, (s,), True) for kind in kinds for s, c in way]
    edges = []
    for (s, c), (t, d) in pairwise(way):
        edges.append(Edge(f"forward.s{s}.c{c}", f"forward.s{t}.c{d}"))
        edges.append(Edge(f"backward.s{t}.c{d}", f"backward.s{s}.c{c}"))
    for s, c in way:
        edges.append(Edge(f"forward.s{s}.c{c}", f"backward.s{s}.c{c}"))
        edges.append(Edge(f"backward.s{s}.c{c}", f"weight.s{s}.c{c}"))
    return TaskGraph(tuple(tasks), tuple(edges), micro_batches)


def bubbles() -> dict[str, Bubble]:
    """The schedules; every stage takes 1 for the forward part, 2 for the backward part of a micro-batch."""
    p, m = STAGES, MICRO_BATCHES
    ranks = [(rank,) for rank in range(p)]
    whole = pipeline(ranks, m, optimize=False)
    chunked = pipeline(ranks, m, chunks=2, optimize=False)
    split = pipeline(ranks, m, weight=True, optimize=False)
    back = folded(p, m)
    full, halves = {"forward": 1.0, "backward": 2.0}, {"forward": 0.5, "backward": 1.0}
    thirds = {"forward": 1.0, "backward": 1.0, "weight": 1.0}
    turned = {task.name: 1.0 if task.stage == p - 1 else 0.5 for task in back.tasks}
    return {
        "gpipe": Bubble(whole, full, 3.0 * (p - 1)),
        "1f1b": Bubble(whole, full, 3.0 * (p - 1)),
        "eager-1f1b": Bubble(whole, full, 3.0 * (p - 1)),
        "interleaved-1f1b": Bubble(chunked, halves, 3.0 * (p - 1) / 2),
        "zb-h1": Bubble(split, thirds, 1.0 * (p - 1)),
        "zb-v": Bubble(back, turned, 0.5 * (p - 1)),
    }


def bubble_figures() -> dict[str, dict[str, float]]:
    """Schedule -> share of the step in which a rank waits, simulated and by the formula."""
    work = 3.0 * MICRO_BATCHES
    figures = {}
    for name, case in bubbles().items():
        makespan = simulate(case.graph, case.seconds, policy=name).makespan
        figures[name] = {
            "simulated": 1 - work / makespan,
            "formula": case.waits / (work + case.waits),
        }
    return figures


def exposed(buckets: bool) -> tuple[float, float, float]:
    """Forecast seconds: that a rank waits for gradients; of all its messages by themselves; of the step."""
    cluster, mesh = load_cluster(MACHINES), dg.ProcessMesh.grid(dp=16)
    model = GPT(GPTConfig(hidden=1024, layers=8, heads=16, vocabulary=8192, sequence=512))
    tokens = ((16 * 16, 512), "i32")
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp", passes=() if buckets else ("-bucket_gradients",))
    serial = train_graph(model, (tokens, tokens), strategy=strategy)
    communication = MeshCommunication(cluster)
    made = build(
        complete(serial, mesh), price=communication.price, passes=pass_pipeline.pipeline(strategy.passes)
    )
    cost, program = CollectiveCost(cluster), made.program(0)
    alone = 0.0
    for task in program.tasks:
        for local in task.ops:
            if local.mode == "comm.all_reduce":
                nbytes = sum(value.nbytes for value in local.op.operands)
                alone += cost.time("all_reduce", mesh.members, nbytes)
    result = forecast(made, cluster)
    return max(result.exposed_seconds.values()), alone, result.step_seconds


def overlap_figures() -> dict[str, float]:
    """Exposed over all seconds of messages, with and without buckets."""
    waits, alone, seconds = exposed(buckets=True)
    single, single_alone, unbucketed = exposed(buckets=False)
    return {
        "overlap_exposed_ratio": waits / alone,
        "overlap_buckets": seconds / unbucketed,
        "overlap_exposed_ratio_without_buckets": single / single_alone,
    }


def generate_figures(rounds: int, steps: int, console: Console) -> dict[str, float]:
    """Time of `engine.generate` over that of the hand-written loop."""
    case = step.Case("gpt_generate", 1, {"handwritten": "time_over_numpy_loop"})
    return step.ratios(case, step.run_rounds([case], False, rounds, steps, 1, console)["gpt_generate"])


def precision_engine(precision: str | None) -> dg.Engine:
    """A small GPT."""
    model = GPT(GPTConfig(hidden=128, layers=2, heads=4, vocabulary=256, sequence=64))
    return dg.Engine(model, model.loss, optim.Adam(lr=1e-3), strategy=dg.Strategy(precision=precision))


def forecast_step(precision: str | None) -> float:
    """Forecast seconds of a step of a GPT on one A100."""
    mesh = dg.ProcessMesh.grid(dp=1)
    model = GPT(GPTConfig(hidden=1024, layers=4, heads=16, vocabulary=8192, sequence=512))
    strategy, tokens = dg.Strategy(precision=precision), ((8, 512), "i32")
    graph = train_graph(model, (tokens, tokens), strategy=strategy)
    return forecast(build(complete(graph, mesh)), load_cluster("dgx_a100_pod")).step_seconds


def precision_figures(pairs: int) -> dict[str, float]:
    """A step in bf16 over one in f32: the median over pairs of processor time, and the forecast."""
    tokens = np.random.default_rng(0).integers(0, 256, (8, 65)).astype("i4")
    batch = tokens[:, :-1], tokens[:, 1:]
    engines = [precision_engine(precision) for precision in ("bf16", None)]
    ratios = []
    for number in range(pairs + 2):
        seconds = []
        for engine in engines:
            start = time.process_time()
            engine.run(batch)
            seconds.append(time.process_time() - start)
        if number >= 2:  # the first steps compile
            ratios.append(seconds[0] / seconds[1])
    for engine in engines:
        engine.close()
    return {
        "bf16_step_over_f32": statistics.median(ratios),
        "forecast_a100_bf16_step_over_f32": forecast_step("bf16") / forecast_step(None),
    }


def main(words: list[str] | None = None) -> None:
    """Measure, print and write the figures."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--skip-generate", action="store_true", help="without the pair of generations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    given = parser.parse_args(words)
    console = Console(stderr=True)
    figures: dict[str, Any] = {"zero": zero_figures(), "bubble": bubble_figures(), **overlap_figures()}
    figures["precision"] = precision_figures(5 if given.quick else 40)
    if not given.skip_generate:
        rounds, steps = (1, 3) if given.quick else (5, 12)
        figures["generate"] = generate_figures(rounds, steps, console)
    figures["load_before"] = os.getloadavg()[0]
    for key, value in figures.items():
        print(f"{key:<40}{value:.4f}" if isinstance(value, float) else key)
        for name, entry in value.items() if isinstance(value, dict) else ():
            shown = entry if isinstance(entry, dict) else {"": entry}
            print(f"  {name:<34}" + "".join(f"{label:>20} {number:.4f}" for label, number in shown.items()))
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
