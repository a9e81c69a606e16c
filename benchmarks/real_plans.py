"""Searched plans against all uniform plans, measured: 2 and 4 MPI ranks of this machine.

    python -m benchmarks.real_plans [--clusters FILE2 FILE4] [--seconds 60] [--rounds 3] [--only gpt]
                                    [--json FILE] [--quick]

First `distgraph profile` measures the machine with as many ranks (unless --clusters names files that it
wrote). Then for a GPT, a conv net and a mixture of experts the search (mode auto) makes a plan, and every
uniform plan is made beside: equal pipeline stages, dp x tp on each, batch split over dp, without ZeRO, with
optimiser states split, with parameters split too, in each of 1, 2 and 4 micro-batches; the same program once.
All of them run, each in processes of its own with one BLAS thread a rank, in turns over several rounds. A
step takes as long as on the slowest rank; what counts is the median over all rounds.

Keys of the result: a list of {model, ranks, searched_seconds, best_uniform_seconds}, with the plans' names,
forecasts and the load average beside. With more ranks than cores ranks wait for each other's time slices, and
on a machine that others use, too: then the order of plans close to each other says little.

With --quick: 2 ranks, a profile and a search of 10 s each, the two uniform plans ranked first by estimate,
one round.

History:
"""

import argparse
import io
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine.planning import SearchOptions, search
from distgraph.engine.program import Recipe
from distgraph.engine.searching.oracle import Oracle
from distgraph.engine.searching.proposal import plan_of, realize
from distgraph.engine.searching.restrict import Restriction
from distgraph.engine.searching.space import pools_of
from distgraph.engine.searching.uniform import uniform_rows
from distgraph.engine.training import Training
from distgraph.models import GPT, GPTConfig
from distgraph.plan import Plan
from distgraph.resources import Cluster, load_cluster
from distgraph.runtime.launch import launch
from distgraph.runtime.profile import Request, profile
from distgraph.runtime.rank import current_transport

ROOT = Path(__file__).resolve().parent.parent
THREADS = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)
SCRIPT = "import sys; from benchmarks.real_plans import rank_main; rank_main(sys.argv[1:])\n"
UNIFORM: tuple[Restriction, ...] = ("uniform", "zero1", "zero3")
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
        found = []
        for shape, dtype in (self.x, self.y):
            size = (self.batch, *shape)
            whole = random.integers(0, CLASSES, size).astype("i4")
            found.append(whole if dtype == "i32" else random.normal(size=size).astype("f4"))
        return found[0], found[1]

    def training(self) -> Training:
        """The program that is searched."""
        recipe = Recipe(self.make(), nn.CrossEntropy(), optim.Adam(lr=1e-3), {}, dg.Strategy())
        return Training(recipe, "train", self.batch, {"batch.0": self.x, "batch.1": self.y}, {})


def _gpt() -> GPT:
    return GPT(GPTConfig(hidden=256, layers=4, heads=8, vocabulary=512, sequence=LENGTH))


TEXT = ((LENGTH,), "i32")
MODELS = {
    "gpt": Model(_gpt, 16, TEXT, TEXT),
    "conv": Model(Images, 64, ((3, IMAGE, IMAGE), "f32"), ((), "i32")),
    "moe": Model(Experts, 32, TEXT, TEXT),
}


def rank_main(arguments: list[str]) -> None:
    """One rank of one plan: prints a line of JSON, the seconds of every step, on rank 0."""
    model, plan, steps = MODELS[arguments[0]], Plan.load(arguments[1]), int(arguments[2])
    transport = current_transport()
    engine = dg.Engine(model.make(), nn.CrossEntropy(), optim.Adam(lr=1e-3), plan=plan)
    batch, own = model.arrays(), []
    for _ in range(4 + steps):
        if transport is not None:
            transport.barrier()
        start = time.perf_counter()
        engine.run(batch)
        own.append(time.perf_counter() - start)
    engine.close()
    found = [own] if transport is None else transport.gather_objects(own, 0)
    if found is not None:
        print(json.dumps([max(column) for column in zip(*found, strict=True)][4:]))


def measured(model: str, file: Path, ranks: int, steps: int) -> list[float]:
    """Run a plan in fresh processes."""
    out, errors = io.StringIO(), io.StringIO()
    script = file.parent / "rank.py"
    script.write_text(SCRIPT)
    env = {**os.environ, **THREADS, "PYTHONPATH": str(ROOT)}
    if launch(ranks, [str(script), model, str(file), str(steps)], env=env, stdout=out, stderr=errors):
        sys.exit(f"{model} with {file}:\n{errors.getvalue()}")
    numbers: list[float] = json.loads(out.getvalue().strip().splitlines()[-1])
    return numbers


def uniform_plans(training: Training, cluster: Cluster, most: int | None) -> dict[str, Plan]:
    """Every uniform plan by name, those of least estimate first; equal programs once."""
    oracle = Oracle(training, cluster, pools_of(cluster))
    rows = [
        row
        for micro in MICRO_BATCHES
        for restriction in UNIFORM
        for row in uniform_rows(oracle, micro, restriction)
    ]
    found: dict[str, Plan] = {}
    programs = []
    for row in sorted(rows, key=lambda row: row.estimate):
        if most is not None and len(found) == most:
            break
        plan = plan_of(realize(row, oracle), oracle)
        program = plan.tensors, plan.ops, plan.rest, plan.stages, plan.micro_batches
        if program not in programs:
            programs.append(program)
            found[f"{row.origin}, {row.micro_batches} micro-batches"] = plan
    return found


def compared(name: str, cluster: Cluster, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Search, make the uniform plans, run all in turns."""
    training = MODELS[name].training()
    ranks = len(cluster.devices)
    plans = {"searched": search(training, cluster, SearchOptions(seconds=given.seconds))}
    plans |= uniform_plans(training, cluster, 2 if given.quick else None)
    files = {title: folder / f"{name}_{ranks}_{number}.json" for number, title in enumerate(plans)}
    for title, plan in plans.items():
        plan.save(files[title])
    steps: dict[str, list[float]] = {title: [] for title in plans}
    loads = []
    for _ in range(1 if given.quick else given.rounds):
        for title, plan in plans.items():
            steps[title] += measured(name, files[title], len(plan.ranks), 8 if given.quick else 20)
            loads.append(os.getloadavg()[0])
    medians = {title: statistics.median(seconds) for title, seconds in steps.items()}
    show(name, ranks, plans, steps)
    best = min((title for title in plans if title != "searched"), key=lambda title: medians[title])
    return {
        "model": name,
        "ranks": ranks,
        "searched_seconds": medians["searched"],
        "best_uniform_seconds": medians[best],
        "best_uniform": best,
        "searched": [str(stage.mesh) for stage in plans["searched"].stages],
        "micro_batches": plans["searched"].micro_batches,
        "measured": medians,
        "forecast": {title: plan.forecast.seconds for title, plan in plans.items() if plan.forecast},
        "load_mean": statistics.mean(loads),
    }


def show(name: str, ranks: int, plans: dict[str, Plan], steps: dict[str, list[float]]) -> None:
    """The table of one model."""
    table = Table("plan", "measured", "quartiles", "forecast", title=f"{name} on {ranks} ranks")
    for title in sorted(plans, key=lambda title: statistics.median(steps[title])):
        low, middle, high = np.quantile(steps[title], (0.25, 0.5, 0.75)) * 1e3
        estimate = plans[title].forecast
        forecast = "" if estimate is None else f"{estimate.seconds * 1e3:.2f} ms"
        table.add_row(title, f"{middle:.2f} ms", f"{low:.2f} - {high:.2f}", forecast)
    Console(width=120).print(table)


def main() -> None:
    """Profile, search, measure, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", nargs="+", default=[], help="files of distgraph profile")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a profile, and of a search")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="gpt, conv or moe")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="2 ranks, few plans, one round")
    given = parser.parse_args()
    if given.quick:
        given.seconds = 10.0
    figures = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = given.clusters
        for ranks in () if files else (2,) if given.quick else (2, 4):
            file = str(folder / f"here{ranks}.yaml")
            if profile(Request(file, ranks=ranks, seconds=given.seconds, fresh=True)):
                sys.exit("the profile failed")
            files = [*files, file]
        for file in files:
            cluster = load_cluster(file)
            names = [name for name in MODELS if name.startswith(given.only)]
            figures += [compared(name, cluster, given, folder) for name in names]
    print(json.dumps(figures))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
