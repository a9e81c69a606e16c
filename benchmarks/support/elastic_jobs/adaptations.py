"""An adaptive job on two machines of which one has half of the other's share of a core.

    python -m benchmarks.support.elastic_jobs.adaptations [--json FILE] [--steps 80] [--cpu 0.8,0.4]

A perceptron trains under dp=2 by `distgraph run --elastic --hosts`. The resource file says that both machines
are equal; `callbacks.Adapt` measures them, and the job starts again with uneven shares. The machines are
network namespaces of this computer (`benchmarks.support.machines`; needs root). Rank 0 writes when every step
ends.

Keys of the result: `before` and `after` with {steps, median_seconds} of the two starts, without the first two
steps of each and without recorded ones; `ratio` of their medians; `shares` of the batch after;
`forecast_ratio`; `said`: what the job printed; `load`: load average of the computer before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import distgraph as dg
from benchmarks.support import machines as namespaces
from distgraph import callbacks, nn, optim

ROOT = Path(__file__).resolve().parents[3]
SAMPLES, WIDTH, DEPTH, EVERY, RECORDED = 768, 512, 3, 20, 5
CLUSTER = """name: two_machines
launch: 1 us
machines:
  - count: 2
    name: m
    devices:
      count: 1
      type: cpu
      model: share of a core
      memory: 512 MiB
      memory_bandwidth: 10 GB/s
      measured: {f32: 0.05 TFLOP/s}
      compute: {launch: 10 us, memory_efficiency: 0.5, lookup_efficiency: 0.3,
                matmul: {f32: {efficiency: 0.8, half: [64, 64, 64]}}}
    nics: {bandwidth: 10 Gbit/s, latency: 30 us, attach: {bandwidth: 5 GB/s, latency: 1 us}}
network: {topology: switch}
"""


class Ends(callbacks.Callback):
    """Writes the time at which every step ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_batch_end(self, engine: dg.Engine, step: int, logs: dict[str, float]) -> None:
        """See `Callback`."""
        if engine.is_chief:
            with self.path.open("a") as file:
                file.write(f"{os.getpid()} {step} {time.perf_counter()}\n")


def train(folder: Path, steps: int) -> None:
    """The script of the job."""
    strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp")
    layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    engine = dg.Engine(
        nn.Sequential(*layers),
        nn.MeanSquaredError(),
        optim.SGD(lr=1e-3),
        strategy=strategy,
        cluster=folder / "two.yaml",
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES * steps, WIDTH)).astype("f4")
    adapt = callbacks.Adapt(
        every=EVERY, steps=RECORDED, restarts=1, cooldown=steps, path=folder / "plan.json"
    )
    engine.fit((x, x), 1, SAMPLES, callbacks=[Ends(folder / "ends"), adapt], progress=False)


def medians(path: Path) -> list[dict[str, Any]]:
    """Number and median seconds of the steps of every start."""
    starts: dict[str, list[tuple[int, float]]] = {}
    for line in path.read_text().splitlines():
        process, step, seconds = line.split()
        starts.setdefault(process, []).append((int(step), float(seconds)))
    results = []
    for number, ends in enumerate(starts.values()):
        recorded = range(EVERY + 1, EVERY + RECORDED + 1) if number == 0 else range(0)
        lengths = [
            seconds - before for (_, before), (step, seconds) in pairwise(ends[1:]) if step not in recorded
        ]
        results.append({"steps": len(lengths), "median_seconds": statistics.median(lengths)})
    return results


def measure(steps: int, cpu: Sequence[float]) -> dict[str, Any]:
    """One job; see the module for the keys."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name, namespaces.machines(2, cpu=cpu):
        folder = Path(name)
        (folder / "two.yaml").write_text(CLUSTER)
        command = [sys.executable, "-m", "distgraph", "run", "--elastic", "-n", "2"]
        command += ["--hosts", "10.77.0.1:1,10.77.0.2:1", __file__, "--train", name, "--steps", str(steps)]
        env = namespaces.launch_environment() | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        before, after = medians(folder / "ends")
        plan = dg.Plan.load(folder / "plan.json")
    (stage,) = plan.stages
    forecasts = re.search(r"takes ([\d.]+) (\w+) instead of ([\d.]+) (\w+)", done.stderr)
    assert forecasts is not None
    assert forecasts[2] == forecasts[4]
    return {
        "before": before,
        "after": after,
        "ratio": before["median_seconds"] / after["median_seconds"],
        "shares": list(stage.mesh.weights.get("dp", (1, 1))),
        "forecast_ratio": float(forecasts[3]) / float(forecasts[1]),
        "said": done.stderr.splitlines(),
        "load": load,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--cpu", default="0.8,0.4")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train is not None:
        train(given.train, given.steps)
        return
    text = json.dumps(measure(given.steps, [float(share) for share in given.cpu.split(",")]), indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text)


if __name__ == "__main__":
    main()
