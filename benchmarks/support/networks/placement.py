"""Placement carried out: steps of one program under every mapping of 4 ranks onto 2 machines.

    python -m benchmarks.support.networks.placement [--json FILE] [--rates 100,400,1000] [--steps 12]

Two blocks of linear layers train under dp=2 x tp=2, with tp over ranks 0, 2 and 1, 3; tp sends most bytes.
The machines are network namespaces of this computer (`benchmarks.support.machines`; needs root). A plan has
the mapping that distgraph chooses; `distgraph run --plan` carries out that one and, with the devices of the
plan exchanged, the two others, on a list of hosts in shuffled order. Each rank reports its machine.

The forecast is that of the same plan on a resource file whose links have the speed of the network; its
compute rates are guesses, so forecast ratios say more than forecast seconds.

Keys of the result, for each rate: `chosen`, `identity` and `worst` with {devices, measured_seconds (median of
the slowest rank), forecast_seconds}; `measured_ratio` and `forecast_ratio` of worst to chosen and of identity
to chosen; `placed`: whether every rank was on its planned machine in every run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import distgraph as dg
from benchmarks.support import machines as namespaces
from distgraph import nn, ops, optim
from distgraph.engine.compile.rank_placement import placement_of
from distgraph.plan.placement import ranks_by_machine
from distgraph.resources import load_cluster
from distgraph.runtime.launch.mpi_rank import current_transport

ROOT = Path(__file__).resolve().parents[3]
SAMPLES, WIDTH, BLOCKS = 4096, 64, 2
MAPPINGS = ((0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 3, 1))  # all of 4 ranks onto 2 equal machines of 2 devices
HOSTS = "10.77.0.2:1,10.77.0.1:1,10.77.0.2:1,10.77.0.1:1"
CLUSTER = """name: network
launch: 1 us
machines:
  - count: 2
    name: m
    devices:
      count: 2
      type: cpu
      model: share of a core
      memory: 256 MiB
      memory_bandwidth: 5 GB/s
      measured: {{f32: 0.02 TFLOP/s}}
      compute: {{launch: 10 us, memory_efficiency: 0.5, lookup_efficiency: 0.3,
                 matmul: {{f32: {{efficiency: 0.8, half: [64, 64, 64]}}}}}}
    inside: {{topology: full, kind: shared_memory, bandwidth: 2 GB/s, latency: 10 us}}
    nics: {{bandwidth: {rate} Mbit/s, latency: 50 us, attach: {{bandwidth: 5 GB/s, latency: 1 us}}}}
network: {{topology: switch, kind: ethernet}}
"""


class Block(nn.Module):
    """Two linear layers whose inner dim is split over tp."""

    def __init__(self, mesh: dg.ProcessMesh) -> None:
        self.mesh = mesh
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        """[samples, width] to [samples, width]."""
        up = dg.shard_tensor(self.up.weight, self.mesh, [None, "tp"])
        down = dg.shard_tensor(self.down.weight, self.mesh, ["tp", None])
        return x + ops.matmul(ops.relu(ops.matmul(x, up)), down)


class Net(nn.Module):
    """Blocks, then the mean of squares."""

    def __init__(self) -> None:
        self.mesh = dg.ProcessMesh([[0, 2], [1, 3]], ("dp", "tp"))
        self.blocks = [Block(self.mesh) for _ in range(BLOCKS)]

    def forward(self, x: Any) -> Any:
        """[samples, width] to a number."""
        x = dg.shard_tensor(x, self.mesh, ["dp", None])
        for block in self.blocks:
            x = block(x)
        return ops.mean(x * x)


def make(plan: Any = None) -> tuple[dg.Engine, Any]:
    """Engine and batch."""
    x = np.random.default_rng(0).standard_normal((SAMPLES, WIDTH), np.float32)
    return dg.Engine(Net(), None, optim.SGD(lr=1e-3), plan=plan), (x,)


def rank_main(steps: int, output: str) -> None:
    """One rank; rank 0 writes seconds of every step, of the slowest rank, and the machine of every rank."""
    transport = current_transport()
    assert transport is not None
    engine, batch = make()
    engine.run(batch)
    engine.run(batch)
    seconds = []
    for _ in range(steps):
        transport.barrier()
        start = time.perf_counter()
        engine.run(batch)
        seconds.append(time.perf_counter() - start)
    engine.close()
    found = transport.gather_objects((os.uname().nodename, seconds), 0)
    if found is not None:
        slowest = [max(column) for column in zip(*(each for _, each in found), strict=True)]
        Path(output).write_text(json.dumps({"hosts": [host for host, _ in found], "seconds": slowest}))


def measured(plan: Path, steps: int, folder: Path) -> dict[str, Any]:
    """Seconds of steps under a plan, and the machine of every rank."""
    script, output = folder / "rank.py", folder / "seconds.json"
    script.write_text(
        f"from benchmarks.support.networks.placement import rank_main\nrank_main({steps}, {str(output)!r})\n"
    )
    command = [sys.executable, "-m", "distgraph", "run", "--plan", str(plan), "--hosts", HOSTS, str(script)]
    env = namespaces.launch_environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def at_rate(rate: int, steps: int, rounds: int) -> dict[str, Any]:
    """Chosen, identity and worst mapping at one speed of the network, in Mbit/s."""
    with tempfile.TemporaryDirectory() as name, namespaces.machines(2, f"{rate}mbit"):
        folder = Path(name)
        source = folder / "network.yaml"
        source.write_text(CLUSTER.format(rate=rate))
        cluster = load_cluster(source)
        _, batch = make()
        engine = dg.Engine(Net(), None, optim.SGD(lr=1e-3), cluster=cluster)
        engine.prepare(batch)
        plan = engine.plan.portable
        chosen = tuple(device for _, device in sorted(zip(*_ranks_and_devices(plan), strict=True)))
        rows = {}
        for devices in dict.fromkeys((chosen, *MAPPINGS)):
            mapped = _on_devices(plan, cluster, devices)
            mapped.save(folder / f"{devices}.json")
            forecast = make(mapped)[0]
            forecast.prepare(batch)
            rows[devices] = {
                "devices": devices,
                "forecast_seconds": forecast.forecast(cluster).step_seconds,
                "seconds": [],
                "placed": True,
            }
        for _ in range(rounds):
            for devices, row in rows.items():
                found = measured(folder / f"{devices}.json", steps, folder)
                row["seconds"] += found["seconds"]
                planned = ranks_by_machine(placement_of(cluster, devices))
                row["placed"] &= all(
                    found["hosts"][rank] == machine for machine, ranks in planned.items() for rank in ranks
                )
    return _compared(rate, chosen, rows)


def _ranks_and_devices(plan: dg.Plan) -> tuple[list[int], list[int]]:
    pairs = [pair for stage in plan.stages for pair in zip(stage.mesh.members, stage.devices, strict=True)]
    return [rank for rank, _ in pairs], [device for _, device in pairs]


def _on_devices(plan: dg.Plan, cluster: Any, devices: Sequence[int]) -> dg.Plan:
    stages = tuple(
        replace(stage, devices=tuple(devices[rank] for rank in stage.mesh.members)) for stage in plan.stages
    )
    return replace(plan, stages=stages, placement=placement_of(cluster, devices))


def _compared(rate: int, chosen: tuple[int, ...], rows: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    for row in rows.values():
        row["measured_seconds"] = statistics.median(row["seconds"])
        row["quartiles"] = [float(q) for q in np.quantile(row.pop("seconds"), (0.25, 0.75))]
    identity, best = rows[MAPPINGS[0]], rows[chosen]
    worst = max(rows.values(), key=lambda row: row["forecast_seconds"])
    ratios = {
        f"{kind}_ratio": {
            name: row[f"{kind}_seconds"] / best[f"{kind}_seconds"]
            for name, row in (("worst", worst), ("identity", identity))
        }
        for kind in ("measured", "forecast")
    }
    placed = all(row["placed"] for row in rows.values())
    return {"mbit": rate, "chosen": best, "identity": identity, "worst": worst, **ratios, "placed": placed}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write the result there")
    parser.add_argument("--rates", default="100,400,1000", help="Mbit/s of the links")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    results = []
    for rate in map(int, given.rates.split(",")):
        results.append(at_rate(rate, given.steps, given.rounds))
        print(json.dumps(results[-1]), flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
