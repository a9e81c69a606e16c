"""How long the search for a plan takes, and how that grows with layers and devices.

    python benchmarks/search_time.py [--only NAME] [--limit SECONDS] [--json FILE] [--quick] [--profile FILE]

Every case runs in a process of its own and starts from nothing, the cache of solved problems off. Its time
is that of `search` (mode auto: trace, layers, layouts, stages, micro-batches, recomputation, uniform plans to
compare with, all forecasts), without imports, model and cluster.
`seconds` are of the clock, on as many cores as there are; CPU seconds of all processes stand beside them, for
other work on the machine changes those less.

    gpt39b_64          GPT-39B of the Alpa paper (table 4), batch 1024, on its 8 x p3.16xlarge. Alpa: hours
    llama8b_64_layouts layouts of Llama 3 8B (32 layers), 64 sequences of 8192, on one 8 x 8 mesh of 64 H100:
                       layers, problem, solution; its trace is a line of its own. autoparallel: 35 s
    gpt175b_1024       GPT-175B, batch 1536, on 128 DGX A100
    gpt1t_3072         96 layers of width 29696 (1.0 T parameters), batch 3072, on 384 DGX A100

Targets: 30 s, 5 s, 60 s, 120 s. The DGX pods are those of resources/files with more machines; efficiencies
are round numbers that decide what is chosen, hardly how long that takes. With --quick the first two only, the
search of the first with fewer layers (12 of 48: repeated layers are folded, so it does almost the same work).

History (2 cores shared with other work, load about 4, so CPU seconds; searches of everything were cut off by
--limit, so that these are no figures of a finished search):
  first version, under a profiler            gpt39b: 116 for one number of micro-batches, 187 for uniform rows
  uniform rows by a bound, folds once, data parallelism that cannot fit not built
                                             gpt39b: 28 for one number; 61 at a limit of 100 s
                                             gpt175b: 46 and 32 for two numbers; llama8b layouts: 1.6
  From here on beside much other work (load 10 to 20, at which a loop takes 1.7 times its usual CPU seconds):
  steps between layouts found once for all meshes: they were 40 of 54 s of pricing under a profiler
  layouts taken over from other numbers of micro-batches, and for layers that are computed again: 0.04 s
  a problem instead of 0.1 to 0.2, mostly within 0.5 % of its best, 3.4 % at worst
                                             gpt39b: 41 for the first number, 15 for the next
  the same at load 3 to 4, --limit 150:      gpt39b: 18 for the first number with its forecast; 127 for seven
                                             numbers and ten forecasts, then the limit; llama8b layouts: 1.3
  From here on whole searches, beside one other process. Memory of programs as low as its estimate
  (packing, fewer send buffers): the first row fits, 130 in all. Counts of micro-batches climbed in growing
  strides, poor shapes left out, fewer forecasts:
                                             gpt39b: 53, the plan that won after 30
                                             gpt175b: 123, the plan that won after 49
  These two are up to double recursion, which on 64 devices did not come to its end in minutes (changes of
  layout on six axes), without the runners-up behind it. From here on seconds of the clock, nothing else on
  the machine. Predicted: shapes, forecasts, uniform rows and runners-up in two processes, two thirds of the
  time; double recursion left out of programs on more than four axes:
                                             gpt39b: 48 (71 CPU), the plan that won after 22
                                             gpt175b: 133 (191 CPU), the plan that won after 35
  Predicted from a profile of one process (66 and 172 CPU s): schedules simulated until they repeat and orders
  followed as longest paths, 1.0 -> 0.3 CPU s a program of 15 stages, 10 s of gpt39b; steps between layouts
  masked from one table, 20 -> 1.4 s for both; what ranks do alike timed once, 11 -> 2.6 s of a program of
  gpt175b; fewer states of stages, 41 -> 3 s of gpt175b, gpt1t 67 -> 4 s and 4.3 -> 0.3 GiB; this process
  works along with its copies and keeps what it solves; equal uniform programs once, double recursion beside
  them and given up by its forward ops; the cyclic collector off. The same plans:
                                             gpt39b: 28 (39 to 45 CPU; 26.6 to 30.4 in four), winner after 16
                                             llama8b layouts: 0.9
                                             gpt175b: 52 (74 to 86 CPU; 48.6 to 57.5 in four), winner after 16
                                             gpt1t: 117 (190 CPU), 1.5 GiB, winner after 71; before, it took
                                             7.6 GiB and had its winner after 114 CPU s
                                             12, 24, 48, 96 layers of gpt39b: 19, 26, 27, 48 (the last two run
                                             trace and forecast programs of 4, 8 times as many ops)
                                             gpt175b on 256, 1,024, 4,096: 48, 49, 84
  CPU seconds from here on, of one process on one core beside other work (load about 3, which makes equal runs
  differ by a quarter), each beside the state before in the same hour; rows beside others and runners-up of
  layers are in both. Messages between stages that lie alike priced once, tiles found once for meshes that
  differ in the numbers of their ranks, routes and lines of collectives known to all who ask about a cluster,
  the order of a group left out where nothing depends on it, loads of links added up in one go. The same
  plans, to the last bit:
                                             gpt39b: 36 -> 31
                                             gpt175b: 67 -> 58; 67 -> 68 in a noisier pair
                                             gpt1t: 192 -> 117, 1.8 -> 1.4 GiB
  seconds of the clock of the same state, nothing else on the machine. Rows of one size beside rows that mix
  sizes, forecast since, took gpt39b from 55.72 to 54.31 s a step:
                                             gpt39b: 28.4, 28.2 (44, 42 CPU)
                                             gpt175b: 52.8 (78 CPU)
                                             gpt1t: 92 (144 CPU), 1.2 GiB
  the same state on another day, the machine faster by a third; tests ran beside the last three:
                                             gpt39b: 21.2 (31 CPU); llama8b layouts: 0.8
                                             gpt175b: 33.3 (49 CPU)
                                             gpt1t: 61.6 (96 CPU), 1.2 GiB
                                             12, 24, 48, 96 layers of gpt39b: 14, 21, 21, 38
                                             gpt175b on 256, 1,024, 4,096: 33, 33, 52
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import json
import multiprocessing
import os
import pstats
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

PER_MACHINE = 8
GROWTH = {
    "layers": [("gpt39b", 64, layers) for layers in (12, 24, 96)],
    "devices": [("gpt175b", devices, None) for devices in (256, 4096)],
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and as many devices."""

    model: str
    devices: int
    layers: int | None = None


CASES = {
    "gpt39b_64": Case("gpt39b", 64),
    "llama8b_64_layouts": Case("llama8b", 64),
    "gpt175b_1024": Case("gpt175b", 1024),
    "gpt1t_3072": Case("gpt1t", 3072),
}


def pod(name: str, devices: int) -> Any:
    """A cluster of resources/files with as many machines as it takes."""
    import yaml

    from distgraph.resources.cluster_builder import build_cluster
    from distgraph.resources.schema import check

    file = Path(__file__).parent.parent / "resources" / "files" / f"{name}.yaml"
    document = yaml.safe_load(file.read_text())
    document["machines"][0]["count"] = devices // PER_MACHINE
    return build_cluster(check(document, str(file)), str(file))


def compile_request(model: Any, batch: int, sequence: int) -> Any:
    """A training step on `batch` sequences of tokens."""
    from distgraph import nn, optim
    from distgraph.engine.compile.compile_request import CompileRequest
    from distgraph.engine.compile.training_spec import TrainingSpec
    from distgraph.plan.strategy import Strategy

    tokens = ((sequence,), "i32")
    training_spec = TrainingSpec(model, nn.CrossEntropy(), optim.Adam(), {}, Strategy())
    return CompileRequest(training_spec, "train", batch, {"batch.0": tokens, "batch.1": tokens}, {})


def problem(case: Case) -> tuple[Any, Any]:
    """Program and cluster of a search."""
    from distgraph.models import GPT, GPT_PRESETS

    if case.model == "gpt39b":
        config, batch, cluster = GPT_PRESETS["39B"], 1024, pod("p3_16xlarge_x8", case.devices)
    else:
        config, batch = dataclasses.replace(GPT_PRESETS["175B"], fused=True), 1536
        cluster = pod("dgx_a100_pod", case.devices)
    if case.model == "gpt1t":
        config, batch = dataclasses.replace(config, hidden=29696, heads=232), 3072
    config = dataclasses.replace(config, layers=case.layers or config.layers)
    return compile_request(GPT(config), batch, config.sequence), cluster


def _cpu_seconds() -> float:
    """Of this process and of those that it had work for it."""
    return sum(os.times()[:4])


def searched(case: Case, limit: float, verbose: bool) -> dict[str, Any]:
    """A search of everything."""
    from distgraph.engine.commands.plan_search import SearchOptions, search

    program, cluster = problem(case)
    lines: list[str] = []
    start, cpu = time.perf_counter(), _cpu_seconds()

    def watch(progress: Any) -> None:
        lines.append(f"{_cpu_seconds() - cpu:8.1f} CPU s  {progress}")
        if verbose:
            print(f"    {lines[-1]}", flush=True)

    plan = search(program, cluster, SearchOptions(seconds=limit, watch=watch))
    seconds, used = time.perf_counter() - start, _cpu_seconds() - cpu
    assert plan.forecast is not None
    return {
        "seconds": seconds,
        "cpu_seconds": used,
        "step_seconds": plan.forecast.seconds,
        "status": plan.search.status,
        "stages": len(plan.stages),
        "micro_batches": plan.micro_batches,
        "baselines": dict(plan.baselines),
        "log": lines,
    }


def layouts(case: Case, limit: float, verbose: bool) -> dict[str, Any]:
    """The layouts of everything on one mesh of 8 x 8."""
    from distgraph.ir.mesh import ProcessMesh
    from distgraph.models import Llama
    from distgraph.passes.search.intra_op.cost_model import CostModel
    from distgraph.passes.search.intra_op.formulate import formulate
    from distgraph.passes.search.intra_op.solution_cache import solve_cached
    from distgraph.passes.search.layering.layer_sequence import cluster_layers, layering

    model = Llama.preset("3-8B")
    program, cluster = compile_request(model, 64, model.config.sequence), pod("dgx_h100_pod", case.devices)
    start, cpu = time.perf_counter(), time.process_time()
    graph = program.training_spec.trace("train", program.blocks(1), {})
    traced, traced_cpu = time.perf_counter() - start, time.process_time() - cpu
    lines = [f"{traced_cpu:8.1f} CPU s  trace, {traced:.1f} s, not counted"]
    start, cpu = time.perf_counter(), time.process_time()
    devices = tuple(range(case.devices))
    rows = layering(graph, cluster_layers(graph))
    lines.append(f"{time.process_time() - cpu:8.1f} CPU s  layers")
    found = formulate(graph, ProcessMesh.grid(dp=8, tp=8), CostModel(cluster, devices), rows)
    lines.append(f"{time.process_time() - cpu:8.1f} CPU s  problem of {len(found.problem.costs)} nodes")
    solution = solve_cached(found.problem, seconds=limit, gap=1e-3)
    found.decode(solution.choice)
    seconds, used = time.perf_counter() - start, time.process_time() - cpu
    lines.append(f"{used:8.1f} CPU s  {solution.status}, gap {solution.gap:.2%}")
    if verbose:
        print("\n".join(f"    {line}" for line in lines), flush=True)
    return {
        "seconds": seconds,
        "cpu_seconds": used,
        "step_seconds": solution.objective,
        "status": solution.status,
        "stages": 1,
        "micro_batches": 1,
        "baselines": {},
        "log": lines,
    }


def run(case: Case, limit: float, profile: str | None, verbose: bool) -> dict[str, Any]:
    """One case in this process."""
    os.environ["DISTGRAPH_CACHE"] = "off"
    work: Callable[[Case, float, bool], dict[str, Any]] = layouts if case.model == "llama8b" else searched
    profiler = cProfile.Profile(time.process_time) if profile else None
    found = profiler.runcall(work, case, limit, verbose) if profiler else work(case, limit, verbose)
    if profiler is not None and profile is not None:
        with Path(profile).open("w") as out:
            pstats.Stats(profiler, stream=out).sort_stats("cumulative").print_stats(90)
            pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(40)
    who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    found["rss_gib"] = (
        max(resource.getrusage(each).ru_maxrss for each in who) / 2**20
    )  # of the largest process
    return found


def measured(name: str, case: Case, limit: float, profile: str | None, verbose: bool) -> dict[str, Any]:
    """One case in a process of its own, printed."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(run, case, limit, profile, verbose).result()
    print(
        f"{name:<26}{found['seconds']:>9.1f}{found['cpu_seconds']:>9.1f}{found['rss_gib']:>9.2f}"
        f"{found['step_seconds']:>10.4g}{found['stages']:>8}{found['micro_batches']:>7}  {found['status']}",
        flush=True,
    )
    return {"name": name, **dataclasses.asdict(case), **found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="one case")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of one search")
    parser.add_argument("--profile", help="write where CPU time goes, of the last case, there")
    parser.add_argument("--verbose", action="store_true", help="the progress of every search")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="two cases, see above")
    given = parser.parse_args()
    cases = dict(CASES)
    if given.quick:
        cases = {"gpt39b_64": Case("gpt39b", 64, 12), "llama8b_64_layouts": CASES["llama8b_64_layouts"]}
    if given.only:
        cases = {given.only: cases[given.only]}
    print(f"load {os.getloadavg()[0]:.1f}")
    print(f"{'case':<26}{'seconds':>9}{'CPU s':>9}{'RSS GiB':>9}{'step s':>10}{'stages':>8}{'micro':>7}")
    figures: dict[str, Any] = {}
    rows = []
    for name, case in cases.items():
        rows.append(measured(name, case, given.limit, given.profile, given.verbose))
        figures[f"{name}_seconds"] = rows[-1]["seconds"]
    for axis, growth in GROWTH.items() if not given.quick and not given.only else ():
        for case in (Case(*entry) for entry in growth):
            name = (
                f"{case.model}, {case.layers} layers" if axis == "layers" else f"{case.model}, {case.devices}"
            )
            rows.append(measured(name, case, given.limit, None, given.verbose))
    figures["rows"] = rows
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
