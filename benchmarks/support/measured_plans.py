"""Searched plans and all uniform plans of small models, measured in one job in which they take turns.

`benchmarks/real_plans.py` does this on this machine, `benchmarks/support/networks/searched_plans.py` on
machines with networks of limited speed and unequal shares of cores; the first one says how plans take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import distgraph as dg
from benchmarks.support.all_uniform_pipelines import uniform_pipelines
from distgraph import nn, ops, optim
from distgraph.engine.commands.plan_search import SearchOptions, search
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.rank_placement import placement_of
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.engine.search_driver.candidate import build_candidate, plan_of, program_of_plan
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.search_space import pools_of
from distgraph.models import GPT, GPTConfig
from distgraph.passes.search.intra_op.restrictions import Restriction
from distgraph.plan.plan import Plan
from distgraph.resources import Cluster, load_cluster
from distgraph.runtime.launch.mpi_rank import current_transport

ROOT = Path(__file__).resolve().parents[2]
THREADS = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)
UNIFORM: tuple[Restriction, ...] = ("uniform", "zero1", "zero3")
SEARCH, MAKE = 0.2, 0.4  # of a model's time are over when the search, and when making uniform plans ends
TRIAL, CHOICE = 0.3, 0.6  # of what is left then: when first turns, and when the choice of the fastest ends
OUT = 1.5  # times the best so far
STEPS = 5  # a turn, after one that does not count
MICRO_BATCHES = (1, 2, 4)
LENGTH, CLASSES, IMAGE = 64, 10, 16


class Images(nn.Module):
    """Three convolutions and two linear layers."""

    def __init__(self) -> None:
        self.conv1 = nn.Conv2d(3, 32, 3, padding=1)
        self.conv2, self.conv3 = nn.Conv2d(32, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.up, self.down = nn.Linear(64 * (IMAGE // 4) ** 2, 1024), nn.Linear(1024, CLASSES)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Any) -> Any:
        """[batch, 3, 16, 16] images to logits."""
        x = self.pool(ops.relu(self.conv1(x)))
        x = self.pool(ops.relu(self.conv3(ops.relu(self.conv2(x)))))
        return self.down(ops.relu(self.up(nn.Flatten()(x))))


class Experts(nn.Module):
    """Two mixtures of experts over embedded bytes."""

    def __init__(self) -> None:
        self.token, self.head = nn.Embedding(256, 128), nn.Linear(128, 256)
        self.blocks = [nn.MoE(128, 256, 4) for _ in range(2)]

    def forward(self, text: Any) -> Any:
        """[batch, length] bytes to logits."""
        x = self.token(text)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@dataclass(frozen=True, slots=True)
class Model:
    """What is trained: shapes and dtypes of one sample."""

    make: Any
    batch: int
    x: tuple[tuple[int, ...], str]
    y: tuple[tuple[int, ...], str]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """A batch."""
        random = np.random.default_rng(0)
        arrays = []
        for shape, dtype in (self.x, self.y):
            size = (self.batch, *shape)
            whole = random.integers(0, CLASSES, size).astype("i4")
            arrays.append(whole if dtype == "i32" else random.normal(size=size).astype("f4"))
        return arrays[0], arrays[1]

    def compile_request(self) -> CompileRequest:
        """The program that is searched."""
        training_spec = TrainingSpec(self.make(), nn.CrossEntropy(), optim.Adam(lr=1e-3), {}, dg.Strategy())
        return CompileRequest(training_spec, "train", self.batch, {"batch.0": self.x, "batch.1": self.y}, {})


def _gpt() -> GPT:
    return GPT(GPTConfig(hidden=256, layers=4, heads=8, vocabulary=512, sequence=LENGTH))


TEXT = ((LENGTH,), "i32")
MODELS = {
    "gpt": Model(_gpt, 16, TEXT, TEXT),
    "conv": Model(Images, 64, ((3, IMAGE, IMAGE), "f32"), ((), "i32")),
    "moe": Model(Experts, 32, TEXT, TEXT),
}


Rounds = dict[str, list[list[float]]]
"""Seconds of steps, by turn, by plan."""

Start = Callable[[Sequence[str], dict[str, str]], None]
"""Runs a script with arguments on every rank, process i on device i, with variables of the environment."""

SCRIPT = "import sys; from benchmarks.support.measured_plans import rank_main; rank_main(sys.argv[1:])\n"
PLANS, SECONDS = "[0-9]*.json", "seconds.json"


class Turns:
    """Engines of one rank that take turns, and what the steps of each took.

    Args:
        model: what is trained.
        cluster: that the plans were made for; it prices their changes of layout.
        seconds: for everything.
    """

    def __init__(self, model: Model, cluster: Cluster, seconds: float) -> None:
        transport = current_transport()
        assert transport is not None
        self.transport, self.model, self.batch = transport, model, model.arrays()
        self.cluster = cluster
        self.begin, self.seconds = time.monotonic(), seconds
        self.engines: dict[str, dg.Engine] = {}
        self.rounds: Rounds = {}

    def goes_on(self, share: float) -> bool:
        """Whether that share of the time is not over; the same on all ranks."""
        over = time.monotonic() >= self.begin + share * self.seconds
        return not self.transport.broadcast_object(over, 0)

    def turn(self, name: str) -> list[float]:
        """Seconds of some steps, each on its slowest rank; the same on all ranks."""
        own = []
        for _ in range(1 + STEPS):
            self.transport.barrier()
            start = time.perf_counter()
            self.engines[name].run(self.batch)
            own.append(time.perf_counter() - start)
        gathered = self.transport.gather_objects(own, 0)
        slowest = None if gathered is None else [max(column) for column in zip(*gathered, strict=True)][1:]
        together: list[float] = self.transport.broadcast_object(slowest, 0)
        return together

    def median(self, name: str) -> float:
        """Seconds of a step so far."""
        return median(self.rounds[name])

    def try_all(self, files: Sequence[Path]) -> None:
        """One turn of every plan, as long as there is time; those far behind, but the first, are closed."""
        for file in files:
            if len(self.rounds) > 1 and not self.goes_on(TRIAL):
                break
            name, loss, optimizer = file.stem, nn.CrossEntropy(), optim.Adam(lr=1e-3)
            plan, model = Plan.load(file), self.model.make()
            self.engines[name] = dg.Engine(model, loss, optimizer, cluster=self.cluster, plan=plan)
            self.rounds[name] = [self.turn(name)]
            others = [other for other in self.rounds if other != files[0].stem]
            if name in others and self.median(name) > OUT * min(map(self.median, others)):
                self.engines.pop(name).close()

    def fastest(self, names: Sequence[str], beside: str) -> str:
        """The fastest of some plans, by halves."""
        while len(names) > 1 and self.goes_on(CHOICE):
            for name in 2 * [beside, *names]:
                self.rounds[name].append(self.turn(name))
            names = sorted(names, key=self.median)[: (len(names) + 1) // 2]
        return min(names, key=self.median)

    def last(self, pair: Sequence[str]) -> Rounds:
        """Turns of two plans until the time limit is reached."""
        rounds: Rounds = {name: [] for name in pair}
        while not all(rounds.values()) or self.goes_on(1.0):
            for name in pair:
                rounds[name].append(self.turn(name))
            pair = pair[::-1]
        return rounds


def rank_main(arguments: Sequence[str]) -> None:
    """One rank of a job that tries the plans of a folder, the searched one first; rank 0 writes seconds by
    plan and turn, those of the choice and those that count.

    Args:
        arguments: name of the model, samples of a batch, folder, seconds, resource file.
    """
    name, batch, folder, seconds, cluster = arguments
    turns = Turns(replace(MODELS[name], batch=int(batch)), load_cluster(cluster), float(seconds))
    files = sorted(Path(folder).glob(PLANS))
    turns.try_all(files)
    ours = files[0].stem
    others = [name for name in turns.engines if name != ours]
    last = turns.last([ours, turns.fastest(others, ours)])
    if turns.transport.rank == 0:
        (Path(folder) / SECONDS).write_text(json.dumps([turns.rounds, last]))


def measured(start: Start, arguments: Sequence[str]) -> tuple[Rounds, Rounds]:
    """Try the plans of a folder in one job, see `rank_main`."""
    folder = Path(arguments[2])
    script = folder / "rank.py"
    script.write_text(SCRIPT)
    start([str(script), *arguments], {**THREADS, "PYTHONPATH": str(ROOT)})
    rounds, last = json.loads((folder / SECONDS).read_text())
    return rounds, last


def uniform_plans(
    request: CompileRequest, cluster: Cluster, end: float, most: int | None, micro_batches: Sequence[int]
) -> dict[str, Plan | None]:
    """Every uniform plan by name, those of least estimate first; equal programs once, None past the end.

    Args:
        request: the program.
        cluster: of devices of one kind.
        end: monotonic time after which no more than two plans are made.
        most: number of plans; None for all.
        micro_batches: numbers of them.
    """
    layout_costs = LayoutCosts(request, cluster, pools_of(cluster))
    rows = [
        row
        for micro in micro_batches
        for restriction in UNIFORM
        for row in uniform_pipelines(layout_costs, micro, restriction)
    ]
    plans: dict[str, Plan | None] = {}
    programs = []
    for row in sorted(rows, key=lambda row: row.estimate):
        if most is not None and len(plans) == most:
            break
        name = f"{row.origin}, {row.micro_batches} micro-batch{'es' * (row.micro_batches > 1)}"
        if len(plans) > 1 and time.monotonic() > end:
            plans[name] = None
            continue
        plan = plan_of(build_candidate(row, layout_costs), layout_costs)
        program = program_of(plan)
        if program not in programs:
            programs.append(program)
            plans[name] = plan
    return plans


def program_of(plan: Plan) -> tuple[object, ...]:
    """What makes two plans the same program."""
    return plan.tensors, plan.ops, plan.rest, plan.stages, plan.micro_batches


def ratios(ours: list[list[float]], theirs: list[list[float]]) -> tuple[float, tuple[float, float]]:
    """Median over turns of the ratio of medians, and the interval of 95 % (bootstrap over turns)."""
    pairs = zip(ours, theirs, strict=True)
    each = np.array([statistics.median(a) / statistics.median(b) for a, b in pairs])
    drawn = np.random.default_rng(0).choice(each, (2000, len(each)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(np.median(each)), (float(low), float(high))


def forecast_on(plan: Plan, layout_costs: LayoutCosts) -> float:
    """Seconds of a step of a plan, rank i on device i."""
    return program_of_plan(plan, layout_costs).seconds


def in_device_order(plan: Plan, cluster: Cluster) -> Plan:
    """The same program with rank i on device i of the cluster of the plan."""
    stages = (
        replace(stage, mesh=dg.ProcessMesh(np.reshape(stage.devices, mesh.shape), mesh.axes, mesh.weights))
        for stage in plan.stages
        for mesh in [stage.mesh]
    )
    devices = range(1 + max(device for stage in plan.stages for device in stage.devices))
    return replace(plan, stages=tuple(stages), cluster=cluster.name, placement=placement_of(cluster, devices))


@dataclass(frozen=True, slots=True)
class Place:
    """Where plans are measured.

    Attributes:
        cluster: what the searched plan is made for, and by which all plans are forecast.
        start: of jobs on its devices.
        equal: the same devices as if all were of one kind, for which uniform plans are made; None where they
            are.
    """

    cluster: Cluster
    start: Start
    equal: Cluster | None = None


def compared(
    name: str,
    place: Place,
    seconds: float,
    folder: Path,
    *,
    most: int | None = None,
    batch: int | None = None,
    micro_batches: Sequence[int] = MICRO_BATCHES,
) -> dict[str, Any]:
    """Search, make the uniform plans, run all in turns.

    Args:
        name: of the model.
        place: where.
        seconds: for everything.
        folder: for files; it is created.
        most: number of uniform plans; None for all.
        batch: samples; None for those of the model.
        micro_batches: numbers of them in uniform plans.
    """
    begin, cluster = time.monotonic(), place.cluster
    model = MODELS[name] if batch is None else replace(MODELS[name], batch=batch)
    request, ranks = model.compile_request(), len(cluster.devices)
    searched = search(request, cluster, SearchOptions(seconds=SEARCH * seconds))
    made = uniform_plans(request, place.equal or cluster, begin + MAKE * seconds, most, micro_batches)
    known = {title: plan for title, plan in made.items() if plan is not None}
    same = next((title for title, plan in known.items() if program_of(plan) == program_of(searched)), None)
    known.pop(same or "", None)
    layout_costs = LayoutCosts(request, cluster, pools_of(cluster))
    plans = {title: in_device_order(plan, cluster) for title, plan in {"searched": searched, **known}.items()}
    forecasts = {title: forecast_on(plan, layout_costs) for title, plan in plans.items()}
    order = ["searched", *sorted(known, key=forecasts.__getitem__)]
    folder.mkdir()
    for number, title in enumerate(order):
        plans[title].save(folder / f"{number:03}.json")
    left = begin + seconds - time.monotonic()
    chosen, counted = (
        {title: measured_rounds[f"{i:03}"] for i, title in enumerate(order) if f"{i:03}" in measured_rounds}
        for measured_rounds in measured(
            place.start, [name, str(model.batch), str(folder), str(left), str(cluster.source)]
        )
    )
    rounds = {title: turns + counted.get(title, []) for title, turns in chosen.items()}
    (best,) = (title for title in counted if title != "searched")
    untried = len(made) + (same is None) - len(rounds)
    ratio, interval = ratios(counted["searched"], counted[best])
    steps = {title: median(turns) for title, turns in rounds.items()}
    show(f"{name} on {ranks} ranks" + f", {untried} not tried" * (untried > 0), forecasts, rounds)
    return {
        "model": name,
        "ranks": ranks,
        "searched_seconds": median(counted["searched"]),
        "best_uniform_seconds": median(counted[best]),
        "ratio": ratio,
        "interval": interval,
        "forecast_ratio": forecasts["searched"] / forecasts[best],
        "forecast_error": statistics.mean(abs(forecasts[title] / steps[title] - 1) for title in steps),
        "turns": len(counted[best]),
        "best_uniform": best,
        "same": same,
        "untried": untried,
        "searched": [str(stage.mesh) for stage in searched.stages],
        "micro_batches": searched.micro_batches,
        "rounds": {title: len(turns) for title, turns in rounds.items()},
        "measured": steps,
        "forecast": forecasts,
        "load": os.getloadavg()[0],
    }


def median(rounds: list[list[float]]) -> float:
    """Of all steps."""
    return statistics.median(seconds for own in rounds for seconds in own)


def show(title: str, forecasts: dict[str, float], rounds: Rounds) -> None:
    """The table of one model."""
    table = Table("plan", "measured", "quartiles", "rounds", "forecast", title=title)
    steps = {name: [seconds for own in turns for seconds in own] for name, turns in rounds.items()}
    for name in sorted(steps, key=lambda name: statistics.median(steps[name])):
        low, middle, high = np.quantile(steps[name], (0.25, 0.5, 0.75)) * 1e3
        quartiles, forecast = f"{low:.2f} - {high:.2f}", f"{forecasts[name] * 1e3:.2f} ms"
        table.add_row(name, f"{middle:.2f} ms", quartiles, str(len(rounds[name])), forecast)
    Console(width=120).print(table)
