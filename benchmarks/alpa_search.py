"""Whether the search is at least as fast as every plan of Alpa's tables (OSDI 2022), by one forecast.

    python benchmarks/alpa_search.py [--quick] [--only NAME ...] [--limit SECONDS] [--done FILE] [--json FILE]

A point is a published model on as many GPUs of p3.16xlarge (GPT, MoE and Wide-ResNet on 1 to 64, and the
models of the ablations on 1 to 8). Its baselines are the plans of Alpa, Megatron-LM, DeepSpeed and of all
ablations (`recorded_plans`), each laid out by its recorded meshes, micro-batches, recomputation and ZeRO, and
once more with recomputation the other way round. Ours is what the search of mode auto finds.

Both are the same program: the model of `distgraph.models` with embeddings by lookup, its loss without the
auxiliary term, one optimiser (AdamW for GPT, Adafactor for MoE, each with f32 masters; SGD with momentum for
Wide-ResNet), one batch. Where a row was run with a smaller batch, its micro-batches keep their size. Both are
built by `runtime.build` with the same price of collectives, forecast by `runtime.forecast` with overlap on
the same devices, and have to fit the same memory, that of the resource file, as the runtime needs it.

A baseline counts with the fastest of its plans that fits. Where none fits by our runtime though its authors
ran it, it counts with the fastest all the same (*): Alpa's compiler keeps less than our runtime. `equal
operator` cuts inside blocks, which `recorded_plans` cannot express: it has no figure (-).

`seconds` of a search are CPU seconds of its process; a search without any plan in that time counts as slower.
Points that --done has are not searched again, so that a long run can be taken up where it ended.

All 33 points, one process each on 2 cores beside other work (--limit 200): ours, the best of all others,
seconds of a step:

    GPT          1: 52.28, 52.28    2: 42.06, 44.28    4: 36.36, 41.04    8: 34.00, 38.19    16: 37.67, 49.66
                 32: 45.25, 56.57   64: 56.97, 70.22
    MoE          1: 25.46, 25.46    2: 12.36, 12.38    4: 11.81, 12.00    8: 8.286, 10.99    16: 8.227, 11.38
                 32: 7.740, 7.788   64: 9.735, 11.66
    Wide-ResNet  1: 44.74, 44.99    2: 41.30, 41.36    4: 39.81, 40.18    8: 37.99, 39.97    16: 42.26, 52.96
                 32: 36.43, 53.19   64: 40.57, 60.92
    ablations    GPT          1: 0.3468, 0.3468   2: 0.3850, 0.4395   4: 0.3086, 0.3575   8: 0.2952, 0.3054
                 MoE          1: 0.3888, 0.3888   2: 0.3386, 0.3471   4: 0.2148, 0.2200   8: 0.1592, 0.1677
                 Wide-ResNet  1: 0.9402, 0.9402   2: 0.8986, 0.9233   4: 0.8604, 0.8810   8: 0.8274, 0.9103

28 points are faster, by up to 1.50 times, 5 (of one GPU) equal, none slower. Ours seldom computes anything
again where the authors always did; without that on either side it is ahead by less. Wide-ResNet-4B on 16 GPUs
has four stages of 4, ahead of the 4, 4 and 8 (as Alpa's) that were found before. No search ran out of time.

History: while numbers of micro-batches were climbed only where the first one fit, GPT on 1 and 2 GPUs came
out at 65.8 and 51.32; over the 19 points of an earlier state, Wide-ResNet 8 and 16 at 40.71 and 56.77. Before
stages of one size were forecast beside mixtures, and divisors that the climb left out, MoE 32 and 64 at 7.973
and 10.37, Wide-ResNet 2, 16 and 64 at 41.69, 42.47 and 46.04, and two points were behind. Wide-ResNet 8 came
to 38.37 where the three prices of memory of a front were all that there are: at none its best row lacks 2 %,
at the next it takes 38.57, at 1/64 of that it fits and takes 37.99. The lower prices beside a row cost
Wide-ResNet 32 another neighbour (36.39 before): larger programs have few.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of the package `benchmarks`

from rich.console import Console
from rich.table import Table

from benchmarks.support.alpa.plan_forecast import batch_of, meshes_of, model_of, optimizer_of
from benchmarks.support.alpa.published_rows import Row, read_rows
from benchmarks.support.alpa.recorded_plans import Plan, Stage, blocks_of
from distgraph import data
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.train_graph import train_graph
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.engine.search_driver.candidate import BuiltCandidate
from distgraph.engine.search_driver.run_search import run_search
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.errors import DistGraphError, InfeasibleError
from distgraph.models import MoEConfig
from distgraph.models.decoder import Decoder
from distgraph.passes.complete import complete
from distgraph.plan.strategy import Strategy
from distgraph.resources import Cluster
from distgraph.resources.cluster_builder import build_cluster
from distgraph.resources.load import read_document
from distgraph.resources.mesh_communication import MeshCommunication
from distgraph.resources.schema import check
from distgraph.runtime.forecast.forecast import forecast, out_of_memory
from distgraph.runtime.program.build import build

CLUSTER, PER_MACHINE = "p3_16xlarge_x8", 8
LIMIT = 60.0
QUICK, QUICK_LIMIT = ("gpt 1", "gpt 2", "intra_gpt 2"), 15.0


@dataclass(frozen=True)
class Point:
    """A published model on some GPUs, with the rows that it is compared with."""

    table: str
    gpus: int
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        """Table and GPUs."""
        return f"{self.table} {self.gpus}"

    @property
    def reference(self) -> Plan:
        """Alpa's plan: its model and its batch are those of the point."""
        system = "ilp" if self.table.startswith("intra_") else "alpa"
        return next(row.plans[0] for row in self.rows if row.system == system)


def points() -> tuple[Point, ...]:
    """All of them; the ablations of stages belong to the points whose models they train."""
    rows = read_rows()
    tables = dict.fromkeys(row.table for row in rows if not row.table.startswith("inter_"))
    found = []
    for table in tables:
        for gpus in dict.fromkeys(row.gpus for row in rows if row.table == table):
            same = tuple(row for row in rows if row.gpus == gpus and _is_of(row, table))
            found.append(Point(table, gpus, same))
    return tuple(found)


def _is_of(row: Row, table: str) -> bool:
    return row.table == table or (row.table.startswith(f"inter_{table}_") and row.system != "dp")


def devices_of(gpus: int) -> Cluster:
    """As many GPUs of the cluster: some of one machine, or several machines."""
    document, file = read_document(CLUSTER)
    (machine,) = document["machines"]
    machine["count"] = max(1, gpus // PER_MACHINE)
    if gpus < PER_MACHINE:
        machine["devices"]["count"] = gpus
        inside = machine["inside"]
        inside["links"] = [link for link in inside["links"] if max(link[:2]) < gpus]
        document["measured"] = []
        if not inside["links"]:
            del machine["inside"]
    return build_cluster(check(document, file), file)


# the same program for both


def _loss(model: Any) -> Any:
    """Without the auxiliary loss of experts, which neither Alpa nor DeepSpeed's script has."""
    return partial(Decoder.loss, model) if isinstance(model, Decoder) else model.loss


def _lookups(plan: Plan) -> Plan:
    """A plan whose model looks its embeddings up."""
    return replace(plan, software="megatron")


def _optimizer(plan: Plan) -> Any:
    return optimizer_of(replace(plan, software="xla"))


def compile_request_of(point: Point) -> CompileRequest:
    """The serial program."""
    plan = point.reference
    serial = replace(plan, stages=(Stage(blocks_of(plan.config), 1),), same=False, zero=0, recompute=False)
    model = type(model_of(_lookups(serial)))(plan.config)
    training_spec = TrainingSpec(model, _loss(model), _optimizer(serial), {}, Strategy())
    fields = {
        f"{data.POSITION}{number}": (shape[1:], dtype)
        for number, (shape, dtype) in enumerate(batch_of(replace(serial, micro=serial.batch)))
    }
    return CompileRequest(training_spec, "train", plan.batch, fields, {})


def same_program(plan: Plan, point: Point) -> Plan:
    """A plan for the model and the batch of a point; micro-batches keep their size as far as they can."""
    config, batch = point.reference.config, point.reference.batch
    size = max(1, plan.batch // plan.micro)
    micro = max(n for n in range(1, batch + 1) if batch % n == 0 and (n * size <= batch or n == 1))
    if isinstance(config, MoEConfig):
        config = replace(config, group=min(config.group, batch // micro * config.sequence))
    return replace(plan, config=config, batch=batch, micro=micro, software="xla")


@dataclass(frozen=True)
class Evaluation:
    """A plan with its forecast; missing: bytes that the device lacks which lacks most."""

    plan: str
    seconds: float
    missing: float


def evaluation_of(plan: Plan, cluster: Cluster) -> Evaluation:
    """Build and forecast a plan as the search does its own."""
    model = model_of(_lookups(plan))
    graph = train_graph(model, batch_of(plan), _loss(model), _optimizer(plan))
    completed = replace(complete(graph, meshes_of(plan)[0]), micro_batches=plan.micro)
    devices = tuple(range(plan.gpus))
    built = build(completed, micro_batches=plan.micro, price=MeshCommunication(cluster, devices).price)
    found = forecast(built, cluster, devices)
    missing = max((short.missing for short in out_of_memory(found, cluster)), default=0.0)
    text = f"{plan}, {'all' if plan.recompute else 'nothing'} computed again"
    return Evaluation(text, found.step_seconds, missing)


def baselines_of(point: Point, cluster: Cluster) -> Iterator[tuple[Row, list[Evaluation]]]:
    """Every row with the forecasts of its plans, each with and without recomputation."""
    known: dict[Plan, Evaluation | None] = {}
    for row in point.rows:
        found = []
        plans = [same_program(plan, point) for plan in row.plans]
        for plan in dict.fromkeys(replace(p, recompute=again) for p in plans for again in (True, False)):
            if plan not in known:
                known[plan] = None
                with contextlib.suppress(DistGraphError):  # such as more ranks than samples
                    known[plan] = evaluation_of(plan, cluster)
            found.append(known[plan])
        yield row, [each for each in found if each is not None]


def chosen(row: Row, found: Iterable[Evaluation]) -> Evaluation | None:
    """The fastest that fits; of a row that ran, the fastest of all where none fits."""
    found = list(found)
    fitting = [each for each in found if not each.missing]
    usable = fitting or (found if row.published is not None and not row.projected else [])
    return min(usable, key=lambda each: each.seconds, default=None)


# our plan


def searched(point: Point, cluster: Cluster, limit: float, log: bool = False) -> dict[str, Any]:
    """The search of everything; seconds are None where it finds nothing that fits."""
    start = time.process_time()
    state = SearchState(compile_request_of(point), cluster, "auto", limit, clock=time.process_time)
    message = ""
    try:
        for event in run_search(state):
            if log:
                best = "" if state.best is None else f"{state.best.seconds:.4g} s"
                print(f"{time.process_time() - start:7.1f} {event.phase} {best}", flush=True)
    except InfeasibleError as error:
        message = str(error)
    best = None if state.best is None else state.best.built(state.layout_costs)
    return {
        "seconds": None if best is None else best.seconds,
        "plan": message if best is None else _shown(best),
        "origin": "" if best is None else best.origin,
        "gpus_of_stages": [] if best is None else _sizes(best),
        "peak_gib": None if best is None else best.forecast.peak_memory / 2**30,
        "search_seconds": time.process_time() - start,
        "limit": limit,
        "out_of_time": state.expired(),
    }


def _sizes(found: BuiltCandidate) -> list[int]:
    """GPUs of every stage, the first stage first."""
    if found.candidate is None:
        return [len(mesh.members) for mesh in dict.fromkeys(found.build.lowered.meshes)]
    return [len(stage.devices) for stage in found.candidate.stages]


def _shown(found: BuiltCandidate) -> str:
    if found.candidate is None:
        return f"{found.origin}, {found.layered.graph.micro_batches} micro-batches"
    return str(found.candidate)


def compared(point: Point, cluster: Cluster) -> list[dict[str, Any]]:
    """What is known of every row of a point."""
    rows = []
    for row, found in baselines_of(point, cluster):
        best = chosen(row, found)
        rows.append(
            {
                "table": row.table,
                "system": row.system,
                "gpus": row.gpus,
                "published": row.published,
                "projected": row.projected,
                "sample_flop": row.sample,
                "seconds": None if best is None else best.seconds,
                "fits": best is not None and not best.missing,
                "plan": None if best is None else best.plan,
                "tried": [asdict(each) for each in found],
            }
        )
    return rows


def finish(point: Point, ours: dict[str, Any] | None, limit: float, log: bool = False) -> dict[str, Any]:
    """Everything about a point; `ours` where it is known."""
    cluster = devices_of(point.gpus)
    rows = compared(point, cluster)
    ours = searched(point, cluster, limit, log) if ours is None else ours
    return {"name": point.name, "batch": point.reference.batch, "ours": ours, "rows": rows}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How points are finished.

    Attributes:
        limit: CPU seconds of one search.
        done: file of what is finished, kept up to date; None for none.
        baselines: keep the plans of `done`, and forecast what they are compared with anew.
        workers: processes.
        verbose: print the progress of every search.
    """

    limit: float = LIMIT
    done: Path | None = None
    baselines: bool = False
    workers: int = 2
    verbose: bool = False


# figures


def figures_of(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What `BENCHMARKS.md` names: TFLOPS of every row beside ours, and whether ours is ever slower."""
    rows, lost = [], []
    for entry in entries:
        ours = _seconds(entry)
        for row in entry["rows"]:
            flop = row["sample_flop"] * entry["batch"] / row["gpus"] / 1e12
            slower = row["seconds"] is not None and ours > row["seconds"] * (1 + 1e-9)
            if slower:
                lost.append(f"{row['table']} {row['system']} {row['gpus']}")
            rows.append(
                {
                    **{name: row[name] for name in ("table", "system", "gpus", "published", "fits")},
                    "forecast": None if row["seconds"] is None else flop / row["seconds"],
                    "ours": flop / ours or None,
                    "forecast_seconds": row["seconds"],
                    "ours_seconds": entry["ours"]["seconds"],
                    "ours_plan": entry["ours"]["plan"],
                    "slower": slower,
                }
            )
    return {"ours_not_slower": bool(rows) and not lost, "slower_than": lost, "rows": rows}


def beside(figures: dict[str, Any], settings: Settings, console: Console) -> dict[str, Any]:
    """Figures of `alpa_tables` with TFLOPS per GPU of our plan in every row whose point was searched.

    Rows of the ablations of stages are of the points whose models they train.
    """
    wanted = {(row["table"], row["system"], row["gpus"]) for row in figures["rows"]}
    own = [p.name for p in points() if any((r.table, r.system, r.gpus) in wanted for r in p.rows)]
    found = figures_of(study(own, settings, console))
    ours = {(row["table"], row["system"], row["gpus"]): row["ours"] for row in found["rows"]}
    rows = [{**row, "ours": ours.get((row["table"], row["system"], row["gpus"]))} for row in figures["rows"]]
    names = ("ours_not_slower", "slower_than")
    return {**figures, **{name: found[name] for name in names}, "rows": rows, "searched": found["rows"]}


def show(entries: Iterable[dict[str, Any]], console: Console) -> None:
    """Seconds of a step, ours beside all others."""
    entries = list(entries)
    for table in dict.fromkeys(entry["name"].split()[0] for entry in entries):
        own = [entry for entry in entries if entry["name"].split()[0] == table]
        systems = list(dict.fromkeys(_system(row) for entry in own for row in entry["rows"]))
        shown = Table(
            "GPUs",
            "ours",
            *systems,
            "least gain",
            "stages",
            "plan",
            title=f"{table}: seconds of a step by forecast",
        )
        for entry in own:
            ours, seconds = _seconds(entry), {_system(row): _cell(row) for row in entry["rows"]}
            others = [row["seconds"] for row in entry["rows"] if row["seconds"] is not None]
            gain = f"{min(others) / ours:.3f}" if others else "-"
            shown.add_row(
                entry["name"].split()[1],
                f"{ours:.4g}",
                *[seconds.get(system, "") for system in systems],
                gain,
                "/".join(map(str, entry["ours"]["gpus_of_stages"])),
                f"{entry['ours']['origin']}: {entry['ours']['plan']}",
            )
        console.print(shown)
    console.print("* does not fit by the memory of our runtime, though it ran; OOM fits nowhere")


def _seconds(entry: dict[str, Any]) -> float:
    """Of a step of ours; inf where there is none."""
    found = entry["ours"]["seconds"]
    return math.inf if found is None else float(found)


def _system(row: dict[str, Any]) -> str:
    return str(row["system"])


def _cell(row: dict[str, Any]) -> str:
    if row["seconds"] is None:
        return "OOM" if row["tried"] else "-"
    return f"{row['seconds']:.4g}" + ("" if row["fits"] else "*")


# the script


def _finish(task: tuple[str, dict[str, Any] | None, float, bool]) -> dict[str, Any]:
    name, ours, limit, log = task
    point = next(point for point in points() if point.name == name)
    return finish(point, ours, limit, log)


def read(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Entries of files by name; missing files have none."""
    found = [entry for file in files if file.exists() for entry in json.loads(file.read_text())]
    return {entry["name"]: entry for entry in found}


def study(names: Iterable[str], settings: Settings, console: Console) -> list[dict[str, Any]]:
    """Entries of some points, printed; those of `done` are not made again."""
    names, done = list(names), settings.done
    known = {} if done is None else read([done])
    left = [name for name in names if settings.baselines or name not in known]
    tasks = [
        (name, known[name]["ours"] if name in known else None, settings.limit, settings.verbose)
        for name in left
    ]
    with ProcessPoolExecutor(settings.workers) as pool:
        for entry in pool.map(_finish, tasks):
            known[entry["name"]] = entry
            others = [row["seconds"] for row in entry["rows"] if row["seconds"] is not None]
            least = f", best of the others {min(others):.4g} s" if others else ""
            console.print(f"{entry['name']}: {_seconds(entry):.4g} s{least}")
            if done is not None:
                done.write_text(json.dumps(list(known.values()), indent=1) + "\n")
    entries = [known[name] for name in names if name in known]
    show(entries, console)
    return entries


def main() -> None:
    """Search every point, print the tables and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} only")
    parser.add_argument("--only", nargs="+", metavar="NAME", help='tables or points, such as gpt "moe 8"')
    parser.add_argument("--limit", type=float, default=LIMIT, help="CPU seconds of one search")
    parser.add_argument("--done", type=Path, metavar="FILE", help="points that are finished; kept up to date")
    parser.add_argument("--baselines", action="store_true", help="keep the plans of --done, baselines anew")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--verbose", action="store_true", help="the progress of every search")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    given = parser.parse_args()
    os.environ["DISTGRAPH_CACHE"] = "off"
    names = [point.name for point in points()]
    if given.quick:
        names = list(QUICK)
    if given.only:
        names = [name for name in names if name in given.only or name.split()[0] in given.only]
    console = Console(width=200)
    settings = Settings(
        limit=QUICK_LIMIT if given.quick else given.limit,
        done=given.done,
        baselines=given.baselines,
        workers=given.workers,
        verbose=given.verbose,
    )
    figures = figures_of(study(names, settings, console))
    console.print(
        f"ours_not_slower: {figures['ours_not_slower']}; slower than: {figures['slower_than'] or 'none'}"
    )
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
