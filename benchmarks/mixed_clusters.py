"""Plans for clusters of unequal devices against plans that ignore, or shun, the slower ones. Forecasts only.

    python benchmarks/mixed_clusters.py [--seconds 60] [--json FILE] [--quick]

    a100_v100   resources/files/mixed_a100_v100.yaml: 2 x 8 A100, 2 x 4 V100 on PCIe
    gpu_xpu     resources/files/gpu2_xpu2.yaml: 2 x 8 V100, 2 x 8 Kunlun R300 (the figure of Paddle's talk)
    unequal     three machines on one switch: 8 A100, 8 V100 of 32 GB, 4 V100 of 16 GB

For each cluster and model, seconds of a step by forecast on the cluster:

    ours              the searched plan, mode auto: stages on devices of any kinds, also across kinds with
                      uneven shares of the samples
    homogeneous_only  the plan searched for the machines of the one model that has the most FLOP/s together
    slowest_uniform   the best uniform dp x tp x pp plan, without and with ZeRO, for as many devices of the
                      slowest model: what who knows no difference between devices would run. The two best
                      by estimate of each kind, over every second number of micro-batches, are forecast on
                      the real cluster, where the faster devices wait for the slowest

Efficiencies of the devices are partly estimates (see the files), so are the ratios. Seconds of searches are
of processor time, so that other work on the machine changes nothing. With --quick the models have a quarter
of the layers and searches 10 s each.

History (2 cores shared with other work, load about 4):
  first version, 60 s a search     a100_v100: 1.10 and 1.74 times as fast (GPT-1.3B), 1.10 and 1.95 (GPT-6.7B)
                --quick            unequal: 0.65 and 0.86: in 10 s only one number of micro-batches, on small
                                   sub-meshes, was looked at
  uneven shares, 40 s of processor time, a quarter of the layers of GPT-1.3B, stages with 8 micro-batches
  only, load 18: over homogeneous_only (which may have 1 micro-batch) and slowest_uniform
                gpu_xpu            1.13 and 1.48
                unequal            1.22 and 1.67, the V100 of 32 and 16 GB in one stage, 6 and 4 samples each
                a100_v100          0.85 and 1.56: 16 A100 with 1 micro-batch take 0.305 s, which such a search
                                   does not try. Data parallel over all devices takes 0.583 s with equal and
                                   0.447 s with uneven shares
  the same in full, 60 s of processor time, load 2, over homogeneous_only and slowest_uniform
                a100_v100          1.01 and 1.45 (GPT-1.3B), 1.11 and 1.97 (GPT-6.7B)
                gpu_xpu            1.21 and 1.17 (GPT-1.3B), 1.41 and 1.09 (GPT-6.7B)
  unequal in full: no row in 9 minutes. Double recursion was best on 8 A100 alone, and to tell what else could
  have been, 441,200 pairs of layouts on its three axes were priced one by one. From tables that takes 1 s;
  no entry of the cache of solved problems looks through all others any more (a fifth of a search, with 7,748
  entries); rows are forecast before the search tries 1 micro-batch, in which time ran out
                unequal            1.45 and 1.31 (GPT-1.3B), 1.46 and 1.45 (GPT-6.7B) with the first of these
                                   alone, 1.46 and 1.32, 1.49 and 1.48 with all; 232 s of processor time
                a100_v100          1.13 and 1.50 (GPT-1.3B)
                --quick            unequal 1.08 and 1.40, gpu_xpu 1.02 and 1.52, a100_v100 1.00 and 1.67: 16
                                   A100 with 1 micro-batch, as homogeneous_only
  all in full on one state, rows of one size beside mixtures, all divisors of the batch and lower prices of
  memory beside rows since:
                a100_v100          1.13 and 1.50 (GPT-1.3B), 1.17 and 1.97 (GPT-6.7B)
                gpu_xpu            1.40 and 1.36 (GPT-1.3B), 1.43 and 1.09 (GPT-6.7B)
                unequal            1.46 and 1.32 (GPT-1.3B), 1.49 and 1.48 (GPT-6.7B)
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.support.all_uniform_pipelines import uniform_pipelines
from distgraph import nn, optim
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.engine.search_driver.candidate import Candidate, build_candidate
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.run_search import plan_of_search, run_search
from distgraph.engine.search_driver.search_space import micro_batch_counts, pools_of
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.errors import InfeasibleError
from distgraph.models import GPT, GPT_PRESETS
from distgraph.passes.search.intra_op.restrictions import Restriction
from distgraph.plan.plan_components import Stage
from distgraph.plan.strategy import Strategy
from distgraph.resources import Cluster
from distgraph.resources.cluster_builder import build_cluster
from distgraph.resources.schema import check
from distgraph.runtime.forecast.forecast import forecast, out_of_memory

FILES = Path(__file__).parent.parent / "resources" / "files"
MODELS = {"GPT-1.3B": ("1.3B", 256), "GPT-6.7B": ("6.7B", 256)}
UNIFORM: tuple[Restriction, ...] = ("uniform", "zero1", "zero3")


def document(name: str) -> dict[str, Any]:
    """A resource file."""
    found: dict[str, Any] = yaml.safe_load((FILES / f"{name}.yaml").read_text())
    return found


def built(given: dict[str, Any]) -> Cluster:
    """The cluster of a description."""
    return build_cluster(check(copy.deepcopy(given), given["name"]), given["name"])


def unequal() -> dict[str, Any]:
    """Three machines, each of its own kind, from those of the files."""
    a100, small = document("mixed_a100_v100")["machines"]
    large = document("gpu2_xpu2")["machines"][0]
    machines = [{**machine, "count": 1} for machine in (a100, large, small)]
    network = {"topology": "switch", "kind": "ethernet"}
    return {"name": "unequal", "launch": "20 us", "machines": machines, "network": network}


def clusters() -> dict[str, dict[str, Any]]:
    """Descriptions."""
    return {
        "a100_v100": document("mixed_a100_v100"),
        "gpu_xpu": document("gpu2_xpu2"),
        "unequal": unequal(),
    }


def speed(entry: dict[str, Any]) -> float:
    """FLOP/s that the devices of some machines reach in f16."""
    devices = check({"name": "machines", "machines": [entry]}, "machines").machines[0].devices
    rates = (d.count * d.peak["f16"] * d.compute.matmul["f16"].efficiency for d in devices)
    return entry.get("count", 1) * sum(rates)


def homogeneous(given: dict[str, Any]) -> Cluster:
    """The machines of the model that has the most FLOP/s together."""
    best = max(given["machines"], key=speed)
    alone = {**given, "name": f"{given['name']} without the others", "machines": [best]}
    if best.get("count", 1) == 1:
        alone.pop("network")
    return built(alone)


def slowest(given: dict[str, Any]) -> Cluster:
    """As many devices, all of the slowest kind, in machines that all sizes are multiples of."""
    sizes = [m["devices"]["count"] for m in given["machines"] for _ in range(m.get("count", 1))]
    size = math.gcd(*sizes)
    machine = copy.deepcopy(min(given["machines"], key=speed))
    machine |= {"count": sum(sizes) // size}
    machine["devices"]["count"] = size
    return built({**given, "name": "slowest", "machines": [machine], "network": {"topology": "switch"}})


def compile_request(model: str, batch: int, layers: int | None) -> CompileRequest:
    """A step of a GPT."""
    config = GPT_PRESETS[model]
    config = dataclasses.replace(config, layers=layers or config.layers)
    tokens = ((config.sequence,), "i32")
    training_spec = TrainingSpec(GPT(config), nn.CrossEntropy(), optim.Adam(), {}, Strategy())
    return CompileRequest(training_spec, "train", batch, {"batch.0": tokens, "batch.1": tokens}, {})


def searched(program: CompileRequest, cluster: Cluster, seconds: float) -> tuple[float | None, str]:
    """Forecast of the searched plan, and what it is."""
    state = SearchState(program, cluster, "auto", seconds, clock=time.process_time)
    try:
        for _ in run_search(state):
            pass
    except InfeasibleError as error:
        return None, str(error)
    assert state.best is not None
    plan = plan_of_search(state, {})
    stages = "; ".join(described(stage, cluster) for stage in plan.stages)
    return state.best.seconds, f"{plan.micro_batches} micro-batches on {stages}"


def described(stage: Stage, cluster: Cluster) -> str:
    """The devices of a stage, its layers and its mesh."""
    models = Counter(cluster.devices[device].model for device in stage.devices)
    devices = " + ".join(f"{count} x {model}" for model, count in models.items())
    return f"{devices} ({stage.last - stage.first} layers, {stage.mesh.described})"


def uniform(
    program: CompileRequest, alike: Cluster, real: Cluster, seconds: float
) -> tuple[float | None, str]:
    """Forecast on the real cluster of the best uniform plan for devices that are all alike."""
    layout_costs = LayoutCosts(program, alike, pools_of(alike))
    end = time.process_time() + seconds
    best: tuple[float | None, str] = (None, "none fits")
    for candidate in _uniform_candidates(layout_costs, program, end):
        found = build_candidate(candidate, layout_costs)
        if not found.fits:
            continue
        there = forecast(found.build, real, found.devices)
        if not out_of_memory(there, real) and (best[0] is None or there.step_seconds < best[0]):
            best = there.step_seconds, candidate.origin
    return best


def _uniform_candidates(
    layout_costs: LayoutCosts, program: CompileRequest, end: float
) -> Iterator[Candidate]:
    """The best rows by estimate of every restriction."""
    counts = micro_batch_counts(program.size)[::2]
    rows: dict[Restriction, list[Candidate]] = {restriction: [] for restriction in UNIFORM}
    for micro in counts:
        for restriction in UNIFORM:
            if any(rows.values()) and time.process_time() > end:
                break
            rows[restriction] += uniform_pipelines(layout_costs, micro, restriction)
    for found in rows.values():
        yield from sorted(found, key=lambda row: row.estimate)[:2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of one search, processor time")
    parser.add_argument("--only", default="", help="name of a cluster")
    parser.add_argument("--model", default="", help="name of a model")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="fewer layers, 10 s a search, the smaller model")
    given = parser.parse_args()
    seconds = 10.0 if given.quick else given.seconds
    print(f"load {os.getloadavg()[0]:.1f}")
    print(f"{'cluster':<11}{'model':<10}{'ours':>9}{'homogeneous':>13}{'slowest':>9}   ours is")
    figures = []
    for name, description in clusters().items():
        for title, (model, batch) in list(MODELS.items())[: 1 if given.quick else None]:
            if not (name.startswith(given.only) and title.startswith(given.model)):
                continue
            program = compile_request(model, batch, GPT_PRESETS[model].layers // 4 if given.quick else None)
            cluster = built(description)
            ours, what = searched(program, cluster, seconds)
            alone, _ = searched(program, homogeneous(description), seconds)
            alike, uniform_what = uniform(program, slowest(description), cluster, seconds)
            row = {"cluster": name, "model": title, "ours": ours, "homogeneous_only": alone}
            figures.append(row | {"slowest_uniform": alike, "plan": what, "uniform_plan": uniform_what})
            numbers = "".join(
                f"{'none fits' if found is None else format(found, '.4g'):>{width}}"
                for found, width in ((ours, 9), (alone, 13), (alike, 9))
            )
            print(f"{name:<11}{title:<10}{numbers}   {what}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
