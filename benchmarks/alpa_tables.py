"""How well the forecast meets the tables of Alpa (OSDI 2022): GPT, MoE and Wide-ResNet on 1 to 64 V100.

    python benchmarks/alpa_tables.py [--quick] [--table NAME] [--calibrate] [--search] [--json FILE]

Every row is a graph of `distgraph.models` with forward, backward and update, completed, lowered and
scheduled like any program (`plan_forecast`), for the plan that its authors recorded (`recorded_plans`), and
forecast on resources/files/p3_16xlarge_x8.yaml under the runtime that executed it: xla (Alpa), megatron or
deepspeed of resources/runtimes. TFLOPS are per GPU, of the FLOP that the row counts (`published_rows`).
`mean_error` is mean |forecast seconds / published seconds - 1| of all rows that ran on 2 GPUs or more and
that the forecast says fit. Rows on 1 GPU are those of the calibration and projected rows were not run: both
stand in the tables and not in the mean. `mean_error_of_tflops` is the same of TFLOPS.

What is calibrated, on rows of 1 GPU only (`--calibrate` fits it anew): `compute` of the resource file on
those of Alpa, and one speed of computation for each table and for Megatron-LM and DeepSpeed. Links are
those of the file: wiring and NCCL table of vTrain inside a machine, the data sheet between machines.
Programs are what the systems ran, from the paper and its artifact: f16 with f32 master copies, AdamW
for GPT, Adafactor for MoE, embeddings as products with one-hot rows, states split over the batch axes
where the plan reduces and scatters gradients. How they ran them (no computation while a GPU communicates,
what a program may use of a GPU, reductions of DeepSpeed) is in the runtime models.

History (mean error of the rows that were forecast to fit; predicted, measured):
    plans guessed, one speed a row, f16 moments where f32 ones did not fit
                                                               -        6.7 to 18 %, several tables not run
    plans, optimisers, one-hot embeddings and FLOP of the artifact, calibration on 24 rows of 1 GPU
                                                               10 %     8.2 % of the first 24 rows
    experts stay where they are in recomputed blocks and in the backward part, which the library got wrong
                                                               MoE from 18 to 12 %     17 % (12 rows)
    neither end computes while a message is on its way         3 points of the rows on several machines;
                                                               MoE 17 to 13 %, GPT 5.2 to 5.7 %
    bytes by liveness under a fusing compiler, whole gradients until all are reduced, 90 % of a GPU
                                                               within 10 %     within 10 % of most peaks
    no convolution twice where channels are split: Alpa does not replicate heavy operators (section 4.2)
                                                               Wide-ResNet on 8 GPUs +26 to -5 %     -8.5 %
    no GPU forwards for two others (NCCL before 2.11), pairs without NVLink use PCIe
                                                               MoE on 16 GPUs -11 to -4 %     -4.4 %
    DeepSpeed reduces gradients down chains                    16 GPUs -32 to about 0 %     +3.8 %
    "shard-largest" splits the input too, as its source does   less than 14 % for GPT     GPT 21, MoE 16,
                                                               Wide-ResNet 40 %: kept, it is what was run

Last figures, of one whole run by the product's forecast under runtime models (9.7 minutes of CPU time for
everything, on 2 cores shared with much other work, which took it 45 by the clock): 11.1 % over all 104 rows
that ran and whose plan can be expressed (GPT 4.6 %, MoE 9.8, Wide-ResNet 16.7; ablations in a machine 10.4,
13.1 and 16.5; cuts of GPT 4.9, of Wide-ResNet 14.4), median 6.5 %. All 18 entries out of memory are forecast
so, and no row that ran. Peaks of memory are 12.5 % off.

Not forecast, by rule: "equal operator" (6 rows), which cuts inside blocks; where is not recorded. A star
marks rows of which something is not recorded (numbers of micro-batches tried, splits that Alpa's solver
chose): of such a family the forecast takes the fastest that fits.

Known to be off: 16 stages of one block of Wide-ResNet (pp_dp and inter_only, 16 GPUs) reached 0.37 TFLOPS,
18 times less than forecast and than the same blocks in fewer stages; nothing that is recorded says why, and
they are counted (94 % each, 1.8 points of the mean). "Shard-largest" is 4 to 50 % off: our completion is not
that of XLA. Wide-ResNet on one machine with 8 images a GPU or fewer is 12 to 21 % too fast: published ZeRO-3
is faster than ZeRO-2 there though it sends more, so small convolutions are slower than rows on 1 GPU, all of
32 images or more, can tell. "Equal layer" of Wide-ResNet on 8 GPUs has the recorded plan of "dp", yet was
published 18 % slower. intra_only on two machines is 30 to 37 % too fast, MoE by DeepSpeed on four 31 %: the
25 Gbit/s of the data sheet, all of it. Experts on 8 GPUs of one machine (intra_moe ilp 8) are 28 % too slow.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of the package `benchmarks`

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import alpa_search
from benchmarks.support.alpa.plan_forecast import Found, built, forecast_of
from benchmarks.support.alpa.published_rows import Row, read_rows
from benchmarks.support.alpa.recorded_plans import Plan
from distgraph.resources import Cluster, ComputeCost
from distgraph.resources.cluster import MatmulRate
from distgraph.resources.load import load_cluster
from distgraph.runtime.forecast.op_cost import OpCost, Work
from distgraph.runtime.profile.calibration.robust_fit import Fit, Parameter, fit
from distgraph.runtime.program.memory_plan import plan_storage

CLUSTER = "p3_16xlarge_x8"
USABLE = 16160 * 2**20
"""Bytes of a V100-SXM2-16GB that programs get, as its driver states them."""
PARAMETERS = (
    Parameter("memory_efficiency", 0.8, 0.2, 2.0, 1.5),
    Parameter("efficiency_f16", 0.85, 0.5, 1.0, 1.1),
    Parameter("half_f16", 64.0, 1.0, 1000.0),
    Parameter("efficiency_f32", 0.8, 0.3, 1.0, 1.2),
    Parameter("half_f32", 32.0, 1.0, 200.0),
    Parameter("launch", 4e-6, 5e-7, 2e-5),
)
"""Guesses beforehand (what is common for the device), bounds, how far off the guess may be. Memory efficiency
is per byte that ops move each on its own; fused by a compiler they move fewer, so it may be above 1."""


def best(found: Iterable[Found]) -> Found:
    """The fastest that fits, or the one that lacks least."""
    found = list(found)
    fitting = [each for each in found if not each.missing]
    if fitting:
        return min(fitting, key=lambda each: each.seconds)
    return min(found, key=lambda each: each.missing)


def faster(cluster: Cluster, speed: float) -> Cluster:
    """The cluster with all computation `speed` times as fast, and the memory that the driver states."""
    devices = []
    for device in cluster.devices:
        rates, bandwidth = device.compute, device.memory_bandwidth
        assert bandwidth is not None
        assert rates.launch is not None
        peak = {dtype: speed * rate for dtype, rate in device.peak.items()}
        compute = replace(rates, launch=rates.launch / speed)
        bandwidth *= speed
        devices.append(replace(device, peak=peak, memory=USABLE, memory_bandwidth=bandwidth, compute=compute))
    return replace(cluster, devices=tuple(devices))


COPIED = ("moe alpa 1",)
"""Rows on 1 GPU that are the number of another run, digit by digit: that of intra_only."""


def one_gpu(rows: Iterable[Row]) -> list[tuple[Row, Plan]]:
    """Rows on 1 GPU; of a family the plan with the largest micro-batches."""
    return [(r, r.plans[0]) for r in rows if r.gpus == 1 and r.plans and r.name not in COPIED]


def kind(row: Row) -> str:
    """What a speed is of: a table, or a system that is not Alpa."""
    if row.plans and row.plans[0].software != "xla":
        return row.system
    return row.table.split("_")[1] if row.table.startswith("inter_") else row.table


def speeds(known: Mapping[Plan, Found]) -> dict[str, float]:
    """How much faster a table or system computes on 1 GPU than the resource file says: geometric mean."""
    found = dict[str, list[float]]()
    for row, plan in one_gpu(read_rows()):
        assert row.published is not None
        found.setdefault(kind(row), []).append(row.published / row.tera(plan, known[plan].seconds))
    return {name: float(np.exp(np.mean(np.log(ratios)))) for name, ratios in found.items()}


class Calibration:
    """The rows of Alpa on 1 GPU as sums of ops, fitted."""

    def __init__(self, rows: Iterable[Row], cluster: Cluster) -> None:
        self.cluster = cluster
        self.rows = [(row, plan) for row, plan in one_gpu(rows) if plan.software == "xla"]
        self.measured = np.array([row.flop(plan) / (row.published or 1.0) / 1e12 for row, plan in self.rows])
        known = {plan: self._works(plan) for plan in dict.fromkeys(plan for _, plan in self.rows)}
        self.works = [known[plan] for _, plan in self.rows]

    def _works(self, plan: Plan) -> list[tuple[Work, int]]:
        program = built(plan)
        rank = program.program(0)
        ops = OpCost(rank, plan_storage(rank, program.schedule), ComputeCost(self.cluster), 0)
        counts: dict[Work, int] = {}
        for task in rank.tasks:
            for local in task.ops:
                work = ops.work(local)
                if work.kind != "none":
                    counts[work] = counts.get(work, 0) + (plan.micro if task.per_micro else 1)
        return list(counts.items())

    def seconds(self, values: Mapping[str, float]) -> np.ndarray:
        """Seconds of every row."""
        cost, known = ComputeCost(_with(self.cluster, values)), dict[Work, float]()

        def one(w: Work) -> float:
            if w not in known:
                known[w] = cost.time(0, *w.amounts)
            return known[w]

        return np.array([sum(count * one(work) for work, count in works) for works in self.works])

    def fit(self) -> Fit:
        """The parameters."""
        return fit(PARAMETERS, self.seconds, self.measured)


def _with(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    device = cluster.devices[0]
    halves = {dtype: (values[f"half_{dtype}"],) * 3 for dtype in ("f16", "f32")}
    matmul = {dtype: MatmulRate(values[f"efficiency_{dtype}"], half) for dtype, half in halves.items()}
    compute = replace(
        device.compute,
        launch=values["launch"],
        memory_efficiency=values["memory_efficiency"],
        matmul=matmul,
    )
    return replace(cluster, devices=(replace(device, compute=compute), *cluster.devices[1:]))


@cache
def _cluster(speed: float) -> Cluster:
    return faster(load_cluster(CLUSTER), speed)


def _forecast(task: tuple[Plan, float]) -> Found:
    plan, speed = task
    return forecast_of(plan, _cluster(speed))


Tasks = Sequence[tuple[Plan, float]]
Run = Callable[[Tasks], list[Found]]


@contextmanager
def running(workers: int, console: Console) -> Iterator[Run]:
    """Forecasts many plans, each at its speed, on so many processes, deep pipelines first."""

    def follow(found: Iterable[Found], total: int) -> list[Found]:
        return list(track(found, "forecasting", total=total, console=console, transient=True))

    def alone(tasks: Tasks) -> list[Found]:
        return follow(map(_forecast, tasks), len(tasks))

    if workers < 2:
        yield alone
        return
    with ProcessPoolExecutor(workers) as pool:

        def together(tasks: Tasks) -> list[Found]:
            order = sorted(range(len(tasks)), key=lambda at: -len(tasks[at][0].stages))
            done = follow(pool.map(_forecast, [tasks[at] for at in order]), len(tasks))
            return [found for _, found in sorted(zip(order, done, strict=True), key=lambda pair: pair[0])]

        yield together


def calibrated(run: Run) -> dict[str, float]:
    """Speeds, from the plans on 1 GPU at the speed of the resource file."""
    plans = list(dict.fromkeys(plan for _, plan in one_gpu(read_rows())))
    return speeds(dict(zip(plans, run([(plan, 1.0) for plan in plans]), strict=True)))


def forecasts(rows: Iterable[Row], speed: Mapping[str, float], run: Run) -> dict[tuple[Plan, float], Found]:
    """Every plan of the rows, once each; by plan and speed."""
    tasks = list(dict.fromkeys((plan, speed_of(row, speed)) for row in rows for plan in row.plans))
    return dict(zip(tasks, run(tasks), strict=True))


def speed_of(row: Row, speed: Mapping[str, float]) -> float:
    """How much faster the row's system computes than the resource file says."""
    return speed.get(kind(row), 1.0)


def study(rows: Iterable[Row], console: Console, workers: int = 2) -> dict[str, Any]:
    """Forecast and print all rows."""
    rows = tuple(rows)
    with running(workers, console) as run:
        speed = calibrated(run)
        found = forecasts(rows, speed, run)
    shown = [
        entry(row, best(found[plan, speed_of(row, speed)] for plan in row.plans)) for row in rows if row.plans
    ]
    show(shown, console)
    return {**summary(shown, [row.name for row in rows if not row.plans], console), "speeds": speed}


def entry(row: Row, found: Found) -> dict[str, Any]:
    """What is known of a row."""
    forecast = row.tera(found.plan, found.seconds) if not found.missing else None
    return {
        "table": row.table,
        "system": row.system,
        "gpus": row.gpus,
        "published": row.published,
        "forecast": forecast,
        "counted": row.counted,
        "projected": row.projected,
        "recorded": row.recorded,
        "plan": str(found.plan),
        "gib": found.needed / 2**30,
        "published_gib": row.peak,
        "seconds": found.seconds,
        # Seconds that are too many and TFLOPS that are too few are the same thing.
        "error": None if forecast is None or row.published is None else row.published / forecast - 1.0,
    }


def summary(rows: list[dict[str, Any]], left: list[str], console: Console) -> dict[str, Any]:
    """The figures, printed."""
    ran = [r for r in rows if r["counted"] and r["error"] is not None]
    errors = np.array([abs(r["error"]) for r in ran])
    tflops = np.array([abs(1 / (1 + r["error"]) - 1) for r in ran])
    memory = [
        abs(r["gib"] / r["published_gib"] - 1) for r in rows if r["published_gib"] and not r["projected"]
    ]

    def names(chosen: Iterable[dict[str, Any]]) -> list[str]:
        return [f"{r['table']} {r['system']} {r['gpus']}" for r in chosen]

    def mean(values: Any) -> float | None:
        return float(np.mean(values)) if len(values) else None

    figures: dict[str, Any] = {
        "mean_error": mean(errors),
        "median_error": float(np.median(errors)) if len(errors) else None,
        "mean_error_of_tflops": mean(tflops),
        "mean_error_recorded_plans": mean([abs(r["error"]) for r in ran if r["recorded"]]),
        "mean_error_by_table": {
            name: mean([abs(r["error"]) for r in ran if r["table"] == name])
            for name in dict.fromkeys(r["table"] for r in ran)
        },
        "memory_mean_error": mean(memory),
        "errors_counted": len(errors),
        "oom_rows": sum(r["published"] is None for r in rows),
        "oom_missed": names(r for r in rows if r["published"] is None and r["forecast"] is not None),
        "oom_false": names(
            r for r in rows if r["published"] and not r["projected"] and r["forecast"] is None
        ),
        "not_forecast": left,
        "rows": rows,
    }
    for name, value in figures.items():
        if name != "rows":
            console.print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    return figures


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """All rows side by side."""
    columns = ("table", "system", "GPUs", "published", "forecast", "error", "GiB", "published GiB", "plan")
    table = Table(*columns, title="TFLOPS per GPU; error of seconds; plan = blocks:dp x tp, micro-batches")
    for r in rows:
        number = "OOM" if r["published"] is None else f"{r['published']:g}{'p' if r['projected'] else ''}"
        made = "OOM" if r["forecast"] is None else f"{r['forecast']:.2f}"
        error = "" if r["error"] is None else f"{r['error']:+.1%}"
        peak = "" if r["published_gib"] is None else f"{r['published_gib']:.1f}"
        plan = r["plan"] + ("" if r["recorded"] else " *")
        cells = (r["table"], r["system"], str(r["gpus"]), number, made, error, f"{r['gib']:.1f}", peak, plan)
        table.add_row(*cells)
    console.print(table)
    console.print("* of a family, the fastest that fits by the forecast; p projected by its authors, not run")


def quick(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Of every table and system the first recorded plan on several GPUs that ran, and that did not."""
    chosen: dict[tuple[str, str, bool], Row] = {}
    for row in rows:
        if row.gpus > 1 and row.recorded and not row.projected:
            chosen.setdefault((row.table, row.system, row.counted), row)
    return tuple(chosen.values())


def main() -> None:
    """Forecast, print the table and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one row of every table and system")
    parser.add_argument("--table", help="one table only")
    parser.add_argument("--calibrate", action="store_true", help="fit the rows of 1 GPU anew and print that")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--search", action="store_true", help="besides our own plans, see alpa_search.py")
    parser.add_argument("--done", type=Path, metavar="FILE", help="points that --search has finished")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    console = Console(width=140)
    rows = read_rows()
    if arguments.calibrate:
        calibration = Calibration(rows, load_cluster(CLUSTER))
        found = calibration.fit()
        for name, value in found.values.items():
            console.print(f"{name}: {value:.4g}, relative error {found.errors[name]:.2g}")
        console.print(f"mean error on the {len(calibration.rows)} rows of 1 GPU: {found.deviation:.2%}")
        return
    if arguments.table:
        rows = tuple(r for r in rows if r.table == arguments.table)
    if arguments.quick:
        rows = quick(rows)
    figures = study(rows, console, arguments.workers)
    if arguments.search:
        settings = alpa_search.Settings(done=arguments.done, workers=arguments.workers)
        figures = alpa_search.beside(figures, settings, console)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
