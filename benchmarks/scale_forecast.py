"""How long a forecast of GPT-175B takes, and how that grows with devices and micro-batches.

Every case runs in a process of its own, from the first import to the printed forecast (seconds of the clock;
beside them those of the CPU, which other work on the machine changes less): trace, gradients,
completion, lowering, tasks, schedule, rank programs, costs, simulation. 96 blocks, 16 stages, 8-way tensor
parallel, the rest data parallel, 1F1B, blocks computed again in the backward part, on DGX A100 machines.

    python benchmarks/scale_forecast.py [--json FILE] [--quick]

History (2 cores shared with other work, so within a factor of two):
  first version                                                     1,024: 11.7 s  10,240: 30.6 s  0.23 GiB
  tiles kept per pair of layouts, even meshes in one pass                  13.3            29.9
  stages of equal shape share one transfer plan                             6.0             9.3    0.22 GiB
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

STAGES, TENSOR, PER_MACHINE = 16, 8, 8
CASES = {
    "gpt175b_1024": (1024, 128),
    "gpt175b_10240": (10240, 128),
}
GROWTH = [(256, 128), (2048, 128), (4096, 128), (1024, 32), (1024, 512)]


def run(devices: int, micro_batches: int) -> dict[str, Any]:
    """One case in this process: seconds of every phase, forecast seconds of a step, peak memory."""
    phases, clock = {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        phases[name], clock = now - clock, now

    import yaml

    from distgraph.engine.compile.train_graph import train_graph
    from distgraph.ir.mesh import ProcessMesh
    from distgraph.models import GPT, GPT_PRESETS, stages
    from distgraph.passes.complete import complete
    from distgraph.resources.cluster_builder import build_cluster
    from distgraph.resources.schema import check
    from distgraph.runtime.forecast.forecast import forecast
    from distgraph.runtime.program.build import build

    lap("import")
    file = Path(__file__).parent.parent / "resources" / "files" / "dgx_a100_pod.yaml"
    document = yaml.safe_load(file.read_text())
    document["machines"][0]["count"] = devices // PER_MACHINE
    cluster = build_cluster(check(document, str(file)), str(file))
    lap("cluster")
    data = devices // (STAGES * TENSOR)
    meshes = [ProcessMesh.grid(s * data * TENSOR, dp=data, tp=TENSOR) for s in range(STAGES)]
    model = GPT(dataclasses.replace(GPT_PRESETS["175B"], fused=True))
    stages(model, meshes, recompute=True)
    tokens = ((data, model.config.sequence), "i32")
    serial = train_graph(model, (tokens, tokens))
    lap("trace")
    completed = complete(serial, meshes[0])
    lap("complete")
    built = build(completed, micro_batches=micro_batches)
    lap("lower")
    found = forecast(built, cluster)
    lap("forecast")
    return {
        "devices": devices,
        "micro_batches": micro_batches,
        "ops": len(built.lowered.ops),
        "seconds": sum(phases.values()),
        "cpu_seconds": time.process_time(),
        "phases": phases,
        "step_seconds": found.step_seconds,
        "peak_gib": found.peak_memory / 2**30,
        "rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def growth(rows: list[dict[str, Any]]) -> list[str]:
    """In words how CPU seconds grow with devices and with micro-batches, the other held."""
    said = []
    for axis, other, held in (
        ("devices", "micro_batches", CASES["gpt175b_1024"][1]),
        ("micro_batches", "devices", CASES["gpt175b_1024"][0]),
    ):
        found = sorted((row[axis], row["cpu_seconds"]) for row in rows if row[other] == held)
        (few, first), (many, last) = found[0], found[-1]
        if many > few:
            more, longer = many / few, last / first
            said.append(f"{axis.replace('_', '-')} {few} to {many}, x{more:g}: CPU seconds x{longer:.2f}")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="without the growth table")
    arguments = parser.parse_args()
    columns = ("cluster", "trace", "complete", "lower", "forecast")
    print(f"{'devices':>8}{'micro':>7}{'ops':>8}" + "".join(f"{c:>10}" for c in columns), end="")
    print(f"{'seconds':>10}{'CPU s':>10}{'RSS GiB':>10}{'step s':>10}{'peak GiB':>10}")
    figures: dict[str, Any] = {}
    rows = []
    for name, case in [*CASES.items(), *((None, case) for case in GROWTH if not arguments.quick)]:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(run, case)
        rows.append(row)
        print(f"{row['devices']:>8}{row['micro_batches']:>7}{row['ops']:>8}", end="")
        print("".join(f"{row['phases'][c]:>10.2f}" for c in columns), end="")
        print(
            f"{row['seconds']:>10.2f}{row['cpu_seconds']:>10.2f}{row['rss_gib']:>10.2f}"
            f"{row['step_seconds']:>10.2f}{row['peak_gib']:>10.2f}"
        )
        if name is not None:
            figures[f"{name}_seconds"] = row["seconds"]
    figures["growth"] = growth(rows)
    print("\n".join(figures["growth"]))
    figures["peak_rss_gib"] = max(row["rss_gib"] for row in rows)
    figures["rows"] = rows
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
