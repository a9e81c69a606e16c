"""Searched plans against all uniform plans, measured: 2 and 4 MPI ranks of this machine.

    python -m benchmarks.real_plans [--clusters FILE2 FILE4] [--minutes 9] [--only gpt] [--json FILE]
                                    [--quick]

First `distgraph profile` measures the machine with as many ranks (unless --clusters names files that it
wrote). Then for a GPT, a conv net and a mixture of experts the search (mode auto) makes a plan, and every
uniform plan is made beside: equal pipeline stages, dp x tp on each, batch split over dp, without ZeRO, with
optimiser states split, with parameters split too, in each of 1, 2 and 4 micro-batches; the same program once.

One job of as many ranks runs them all, with one BLAS thread a rank, the searched plan first and the others in
the order of their forecasts; a step takes as long as on the slowest rank. A plan whose first steps take more
than 1.5 times as long as the best so far is out; the others take turns, a few steps each, and after every
second round the slower half of them is out, by the median of all its steps, until one is left. Last this one
and the searched plan take turns, and only these steps count: the least of many medians is below what the plan
would show again, however many plans were equally fast. The ratio is that of the medians of one turn, median
over the turns, so that a slow minute of the machine touches both sides; beside it stands the interval that
holds 95 % of such medians when turns are drawn again (bootstrap).

--minutes bounds the whole run; a sixth of it goes to profiles, the rest in equal parts to the models. Where a
model's time does not suffice to make and try all uniform plans, those of the greatest estimates are left out
and counted (`untried`). With more ranks than cores ranks wait for each other's time slices, and on a machine
that others use, too: then the order of plans close to each other says little.

A uniform plan that is the searched program is not run twice; its name is in `same`.

Keys of the result: a list of {model, ranks, searched_seconds, best_uniform_seconds, ratio, interval}, with
the plans' names, forecasts and the load average beside.

With --quick: 2 ranks, two uniform plans each, within 50 seconds.

History. What was wrong where a searched plan was behind; each was found by measuring and is repaired:

    profiles met convolutions of at most 5 MFLOP, divisions of single numbers, and other programs' time slices
        (conv net on 2 ranks 155 against 105 ms)
    the least of up to 33 medians of 3 turns stood for the uniform plans: the searched program, run as one of
        them, took 52 ms and as itself 67. Since then the fastest is measured again
    ranks that share a core do not get it back at once, and profiles sent one message after the other: behind
        computation all_reduce of 1 KiB costs pairs 0.35 ms instead of 0.1 (MoE on 4 ranks 1.10 and 1.04, then
        1.01; all its programs 0.98 to 1.6 times their forecast, then 0.81 to 0.95)
    convolutions were priced by FLOPs: the same 75 MFLOP took 2.8, 4.4 and 7.6 ms where 64, 32 and 16 channels
        were made, as patches are copied for all of them alike (conv net on 4 ranks 1.24 to 1.41, then 0.99)

The GPT on 4 ranks was 0.995, 0.940 and 1.058 at first (programs of one stage took 0.98 to 1.22 times their
forecast, by layout). Processor time by op showed kernels forecast right, 3 to 6 % too long for all layouts
alike, and messages wrong: 40 to 63 ms of a step, of which the forecast knew 17 to 38:

    collectives that were started early were taken to hide behind computation, which the same processors do
    pairs of ranks at once were priced by fitted lines: 1 MiB 0.53 ms instead of the 1.0 measured
    profiles sent bytes that had not just been written
    copies of collectives along other dims than the first were free (0.4 ms for reduce_scatter of 1 MiB)
    the kernel placed ranks anew in every job: a pair on one core pays 0.4 ms for 1 MiB, on two 0.4 to 1.6
    plans ran without the cluster they were made for, so that layouts were changed by other collectives than
        had been forecast (conv net: an all_to_all in place of a permute)

Predicted: with these mended, forecasts of all layouts in one micro-batch lie within 10 %. Seen, profile and
programs minutes apart: 0.91 to 1.03 times for the GPT, 0.97 to 1.05 for the conv net, and 0.95 to 1.26 where
the machine changed in between. For it does, as if the cores of this virtual machine shared a cache in one
minute and not in the next. An all_reduce of 1 MiB on four ranks takes 0.7 ms or 1.3 to 1.5, across two cores
0.45 or 1.1 to 1.4, on one core always 0.45; and all programs take up to 1.25 times as long for minutes. No
plan made before knows. That the mixture on 2 ranks was once 1.093 behind, and 1.000 after memory had been
compacted, may have been this as well.

Ratio, interval, turns, milliseconds, plans not tried. With all of it, profiles of 60 and 85 s, 2 to 5 minutes
each:

    2       GPT     1.004   0.996 - 1.018   24      147, 146                 0
    2       conv    1.009   1.003 - 1.016   323     27.6, 27.3               0
    2       MoE     0.995   0.986 - 1.002   203     39.9, 39.8               0
    4       GPT     1.020   0.989 - 1.031   43      211, 210                 0
    4       conv    1.028   1.016 - 1.037   302     38.1, 37.4               0
    4       MoE     1.003   0.992 - 1.012   195     49.7, 49.8               0

Before the last of the list above was mended, profiles of 60 and 100 s:

    2       GPT     1.003   0.994 - 1.011   45      140, 139                 0
    2       conv    1.004   0.999 - 1.008   462     25.2, 25.1               0
    2       MoE     1.003   1.000 - 1.009   297     37.1, 37.1               0
    4       GPT     0.996   0.939 - 1.027   40      209, 212                 0
    4       conv    1.001   0.991 - 1.008   322     33.1, 33.2               0
    4       MoE     0.994   0.986 - 1.008   299     46.7, 47.0               0

and in a run of 17 minutes with its own profiles:

    2       GPT     0.987   0.945 - 0.996   25      148, 152                 0
    2       conv    0.992   0.985 - 1.000   340     29.1, 29.6               0
    2       MoE     1.016   1.008 - 1.024   235     40.3, 39.5               0
    4       GPT     1.004   0.948 - 1.032   19      220, 217                 13
    4       conv    1.067   1.051 - 1.079   183     40.5, 37.8               0
    4       MoE     0.985   0.970 - 0.992   146     46.7, 48.0               0

The mixture takes 1.2 to 1.4 times its forecast on 2 ranks, all layouts alike: why is not known.
"""

import argparse
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.engine.search_driver.candidate import build_candidate, plan_of
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.search_space import pools_of
from distgraph.models import GPT, GPTConfig
from distgraph.passes.search.intra_op.restrictions import Restriction
from distgraph.plan.plan import Plan
from distgraph.resources import Cluster, load_cluster
from distgraph.runtime.launch.launch import launch
from distgraph.runtime.launch.mpi_rank import current_transport
from distgraph.runtime.profile.profiler import Request, profile

ROOT = Path(__file__).resolve().parent.parent
THREADS = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)
SCRIPT = "import sys; from benchmarks.real_plans import rank_main; rank_main(sys.argv[1:])\n"
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
        found = []
        for shape, dtype in (self.x, self.y):
            size = (self.batch, *shape)
            whole = random.integers(0, CLASSES, size).astype("i4")
            found.append(whole if dtype == "i32" else random.normal(size=size).astype("f4"))
        return found[0], found[1]

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
        found = self.transport.gather_objects(own, 0)
        slowest = None if found is None else [max(column) for column in zip(*found, strict=True)][1:]
        together: list[float] = self.transport.broadcast_object(slowest, 0)
        return together

    def median(self, name: str) -> float:
        """Seconds of a step so far."""
        return median(self.rounds[name])

    def try_all(self, files: Sequence[Path]) -> None:
        """One turn of every plan, as long as there is time; those far behind are closed."""
        for file in files:
            if len(self.rounds) > 1 and not self.goes_on(TRIAL):
                break
            name, loss, optimizer = file.stem, nn.CrossEntropy(), optim.Adam(lr=1e-3)
            plan, model = Plan.load(file), self.model.make()
            self.engines[name] = dg.Engine(model, loss, optimizer, cluster=self.cluster, plan=plan)
            self.rounds[name] = [self.turn(name)]
            if self.median(name) > OUT * min(map(self.median, self.rounds)):
                self.engines.pop(name).close()

    def fastest(self, names: Sequence[str], beside: str) -> str:
        """The fastest of some plans, by halves."""
        while len(names) > 1 and self.goes_on(CHOICE):
            for name in 2 * [beside, *names]:
                self.rounds[name].append(self.turn(name))
            names = sorted(names, key=self.median)[: (len(names) + 1) // 2]
        return min(names, key=self.median)

    def last(self, pair: Sequence[str]) -> Rounds:
        """Turns of two plans until the time is up."""
        found: Rounds = {name: [] for name in pair}
        while not all(found.values()) or self.goes_on(1.0):
            for name in pair:
                found[name].append(self.turn(name))
            pair = pair[::-1]
        return found


def rank_main(arguments: list[str]) -> None:
    """One rank of a job that tries the plans of a folder, the searched one first; rank 0 prints seconds by
    plan and turn, those of the choice and those that count."""
    turns = Turns(MODELS[arguments[0]], load_cluster(arguments[3]), float(arguments[2]))
    files = sorted(Path(arguments[1]).glob("*.json"))
    turns.try_all(files)
    ours = files[0].stem
    others = [name for name in turns.engines if name != ours]
    last = turns.last([ours, turns.fastest(others, ours)])
    if turns.transport.rank == 0:
        print(json.dumps([turns.rounds, last]))


def measured(model: str, folder: Path, cluster: Cluster, seconds: float) -> tuple[Rounds, Rounds]:
    """Try the plans of a folder in one job, see `rank_main`."""
    out, errors = io.StringIO(), io.StringIO()
    script = folder / "rank.py"
    script.write_text(SCRIPT)
    env = {**os.environ, **THREADS, "PYTHONPATH": str(ROOT)}
    arguments = [str(script), model, str(folder), str(seconds), cluster.source]
    if launch(len(cluster.devices), arguments, env=env, stdout=out, stderr=errors):
        sys.exit(f"{model} on {len(cluster.devices)} ranks:\n{errors.getvalue()}")
    rounds, last = json.loads(out.getvalue().strip().splitlines()[-1])
    return rounds, last


def uniform_plans(
    request: CompileRequest, cluster: Cluster, end: float, most: int | None
) -> dict[str, Plan | None]:
    """Every uniform plan by name, those of least estimate first; equal programs once, None past the end."""
    layout_costs = LayoutCosts(request, cluster, pools_of(cluster))
    rows = [
        row
        for micro in MICRO_BATCHES
        for restriction in UNIFORM
        for row in uniform_pipelines(layout_costs, micro, restriction)
    ]
    found: dict[str, Plan | None] = {}
    programs = []
    for row in sorted(rows, key=lambda row: row.estimate):
        if most is not None and len(found) == most:
            break
        name = f"{row.origin}, {row.micro_batches} micro-batch{'es' * (row.micro_batches > 1)}"
        if len(found) > 1 and time.monotonic() > end:
            found[name] = None
            continue
        plan = plan_of(build_candidate(row, layout_costs), layout_costs)
        program = program_of(plan)
        if program not in programs:
            programs.append(program)
            found[name] = plan
    return found


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


def compared(name: str, cluster: Cluster, seconds: float, folder: Path, quick: bool) -> dict[str, Any]:
    """Search, make the uniform plans, run all in turns."""
    begin = time.monotonic()
    request, ranks = MODELS[name].compile_request(), len(cluster.devices)
    searched = search(request, cluster, SearchOptions(seconds=SEARCH * seconds))
    made = uniform_plans(request, cluster, begin + MAKE * seconds, 2 if quick else None)
    known = {title: plan for title, plan in made.items() if plan is not None and plan.forecast is not None}
    same = next((title for title, plan in known.items() if program_of(plan) == program_of(searched)), None)
    known.pop(same or "", None)
    seconds_of = {title: plan.forecast.seconds for title, plan in known.items() if plan.forecast}
    order = sorted(known, key=seconds_of.__getitem__)
    plans = {"searched": searched, **{title: known[title] for title in order}}
    folder.mkdir()
    for number, plan in enumerate(plans.values()):
        plan.save(folder / f"{number:03}.json")
    chosen, counted = (
        {title: found[f"{i:03}"] for i, title in enumerate(plans) if f"{i:03}" in found}
        for found in measured(name, folder, cluster, begin + seconds - time.monotonic())
    )
    rounds = {title: found + counted.get(title, []) for title, found in chosen.items()}
    (best,) = (title for title in counted if title != "searched")
    untried = len(made) + (same is None) - len(rounds)
    ratio, interval = ratios(counted["searched"], counted[best])
    show(f"{name} on {ranks} ranks" + f", {untried} not tried" * (untried > 0), plans, rounds)
    return {
        "model": name,
        "ranks": ranks,
        "searched_seconds": median(counted["searched"]),
        "best_uniform_seconds": median(counted[best]),
        "ratio": ratio,
        "interval": interval,
        "turns": len(counted[best]),
        "best_uniform": best,
        "same": same,
        "untried": untried,
        "searched": [str(stage.mesh) for stage in searched.stages],
        "micro_batches": searched.micro_batches,
        "rounds": {title: len(found) for title, found in rounds.items()},
        "measured": {title: median(found) for title, found in rounds.items()},
        "forecast": {title: plan.forecast.seconds for title, plan in plans.items() if plan.forecast},
        "load": os.getloadavg()[0],
    }


def median(rounds: list[list[float]]) -> float:
    """Of all steps."""
    return statistics.median(seconds for own in rounds for seconds in own)


def show(title: str, plans: dict[str, Plan], rounds: dict[str, list[list[float]]]) -> None:
    """The table of one model."""
    table = Table("plan", "measured", "quartiles", "rounds", "forecast", title=title)
    steps = {name: [seconds for own in found for seconds in own] for name, found in rounds.items()}
    for name in sorted(steps, key=lambda name: statistics.median(steps[name])):
        low, middle, high = np.quantile(steps[name], (0.25, 0.5, 0.75)) * 1e3
        estimate = plans[name].forecast
        forecast = "" if estimate is None else f"{estimate.seconds * 1e3:.2f} ms"
        quartiles = f"{low:.2f} - {high:.2f}"
        table.add_row(name, f"{middle:.2f} ms", quartiles, str(len(rounds[name])), forecast)
    Console(width=120).print(table)


def main() -> None:
    """Profile, search, measure, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", nargs="+", default=[], help="files of distgraph profile")
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole run")
    parser.add_argument("--only", default="", help="gpt, conv or moe")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="2 ranks, few plans, 50 seconds")
    given = parser.parse_args()
    seconds = 50.0 if given.quick else 60 * given.minutes
    jobs = (2,) if given.quick else (2, 4)
    names = [name for name in MODELS if name.startswith(given.only)]
    figures = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, begin = Path(temporary), time.monotonic()
        files = given.clusters
        for ranks in () if files else jobs:
            file = str(folder / f"here{ranks}.yaml")
            share = max(10.0, seconds / 6 / len(jobs))
            if profile(Request(file, ranks=ranks, seconds=share, fresh=True)):
                sys.exit("the profile failed")
            files = [*files, file]
        left = [(file, name) for file in files for name in names]
        for number, (file, name) in enumerate(left):
            share = (begin + seconds - time.monotonic()) / (len(left) - number)
            figures.append(compared(name, load_cluster(file), share, folder / str(number), given.quick))
    print(json.dumps(figures))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
