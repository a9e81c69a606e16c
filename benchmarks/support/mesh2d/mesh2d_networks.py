"""Distributed matrix products on networks of limited speed: measured steps beside their forecasts.

    python -m benchmarks.support.mesh2d.mesh2d_networks [--json FILE] [--quick] [--network N]
                                                        [--rounds N] [--profile S]

Machines are network namespaces of this computer (`benchmarks.support.machines`; needs root), each with its
share of the cores, on a core of its own where it fills one: four machines of one rank, two machines of two
ranks, and four ranks of one machine, which no network limits. Machines with a link use 0.9 of the cores: the
system needs the rest for their packets, which it counts for none of them.

Each network is first measured by `distgraph profile`, which knows nothing of the products. Then two linear
layers train on a mesh of 2 x 2 ranks by every algorithm, in turns over several rounds; a step is one product
forward and two backward for each layer, without the gradient of the input. Seconds are medians of all steps,
forecasts those of the same compiled program on the profiled cluster, rank i on device i: the measured job
compares the graph that it runs and the host of every rank with those of the forecast.

Keys of the result: `measured`, a list of {network, product, algorithm, measured_seconds, forecast_seconds};
`signs`, of pairs of algorithms whose measured seconds differ by more than 10 %, the number of those forecast
in the right order and of all; `gain_error`, the largest difference between a measured and a forecast gain
over `collective`, in points.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

import distgraph as dg
from benchmarks.support.machines import Network, machines
from distgraph import nn, ops, optim
from distgraph.ir.printer import print_graph
from distgraph.resources import load_cluster
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.launch.mpi_rank import current_transport

ROOT = Path(__file__).resolve().parents[3]
RANKS, ROUNDS, STEPS = 4, 2, 6
PROFILE_SECONDS = 240.0
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
SHAPES = {"up and down": (1024, 1024, 4096), "square": (2048, 2048, 2048), "tall": (6144, 1024, 1024)}
CLUSTER = """name: network
launch: 1 us
machines:
  - count: {machines}
    name: m
    devices:
      count: {ranks}
      type: cpu
      model: share of a core
      memory: 1 GiB
      memory_bandwidth: 5 GB/s
      measured: {{f32: 0.02 TFLOP/s, f64: 0.01 TFLOP/s}}
    inside: {{topology: full, kind: shared_memory, bandwidth: 5 GB/s, latency: 1 us}}
"""
NICS = """    nics:
      count: 1
      kind: ethernet
      bandwidth: {rate} Mbit/s
      latency: 20 us
      attach: {{kind: memory, bandwidth: 5 GB/s, latency: 1 us}}
network: {{topology: switch, kind: ethernet}}
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """A network: machines, Mbit/s of the link of each, and cores of each machine."""

    name: str
    count: int
    mbit: int | None
    cores: float


SETTINGS = (
    Setting("4 machines of 1 rank, 400 Mbit/s", 4, 400, 0.45),
    Setting("2 machines of 2 ranks, 400 Mbit/s", 2, 400, 0.9),
    Setting("4 ranks of one machine", 1, None, 2.0),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Two linear layers, width to inner and back, on [samples, width], by one algorithm."""

    samples: int
    width: int
    inner: int
    algorithm: str
    slices: int

    @property
    def label(self) -> str:
        return self.algorithm if self.slices == 1 else f"{self.algorithm}, {self.slices} slices"


class Layers(nn.Module):
    """Two linear layers without bias, both in dataflow OS."""

    def __init__(self, case: Case) -> None:
        self.case, self.mesh = case, dg.ProcessMesh.grid(rows=2, cols=2)
        self.up = nn.Linear(case.width, case.inner, bias=False)
        self.down = nn.Linear(case.inner, case.width, bias=False)

    def forward(self, x: Any) -> Any:
        """[samples, width] to the mean of the outputs."""
        for layer in (self.up, self.down):
            x = dg.shard_op(
                layer, self.mesh, algorithm=self.case.algorithm, dataflow="OS", slices=self.case.slices
            )(x)
        return ops.mean(x)


def make(case: Case) -> tuple[dg.Engine, Any]:
    """Engine and batch of a case."""
    x = np.random.default_rng(0).standard_normal((case.samples, case.width), np.float32)
    return dg.Engine(Layers(case), None, optim.SGD(lr=1e-3)), (x,)


def rank_main(arguments: list[str]) -> None:
    """One rank of one case; rank 0 writes the seconds of every step, of the slowest rank, to a file."""
    case, steps, output = Case(**json.loads(arguments[0])), int(arguments[1]), Path(arguments[2])
    transport = current_transport()
    assert transport is not None
    engine, batch = make(case)
    engine.run(batch)
    engine.run(batch)
    program = program_digest(engine, batch)
    seconds = []
    for _ in range(steps):
        transport.barrier()
        start = time.perf_counter()
        engine.run(batch)
        seconds.append(time.perf_counter() - start)
    engine.close()
    found = transport.gather_objects((seconds, program, socket.gethostname()), 0)
    if found is not None:
        columns = zip(*(steps for steps, _, _ in found), strict=True)
        job = {"programs": [digest for _, digest, _ in found], "hosts": [host for _, _, host in found]}
        output.write_text(json.dumps({"seconds": [max(column) for column in columns], **job}))


def program_digest(engine: dg.Engine, batch: Any) -> str:
    """Digest of the graph that an engine compiles: ops, collectives, layouts, ranks; no source lines."""
    text = print_graph(engine.prepare(batch).build.lowered)
    lines = re.sub(r"[\w.]+\.py:[0-9]+", "", text).split()  # the columns are as wide as the source lines
    return hashlib.sha256(" ".join(lines).encode()).hexdigest()


@contextmanager
def network_of(setting: Setting) -> Iterator[Network]:
    """The machines of a setting."""
    rate = None if setting.mbit is None else f"{setting.mbit}mbit"
    with machines(setting.count, rate, (setting.cores,) * setting.count, own_cores=True) as network:
        yield network


def profiled(setting: Setting, network: Network, folder: Path, seconds: float) -> Any:
    """The cluster that `distgraph profile` writes on a network."""
    source, output = folder / "network.yaml", folder / "profiled.yaml"
    source.write_text(description(setting))
    command = [sys.executable, "-m", "distgraph", "profile", "--cluster", str(source), "-o", str(output)]
    _run(network, [*command, "--seconds", str(seconds)], seconds + 300)
    return load_cluster(output)


def description(setting: Setting) -> str:
    """A resource file of a setting; the profile replaces its numbers."""
    text = CLUSTER.format(machines=setting.count, ranks=RANKS // setting.count)
    return text if setting.mbit is None else text + NICS.format(rate=setting.mbit)


def measured(network: Network, case: Case, steps: int) -> list[float]:
    """Seconds of steps of a case, whose program and hosts are those of `forecast_seconds`."""
    script = (
        "import sys; from benchmarks.support.mesh2d.mesh2d_networks import rank_main; rank_main(sys.argv[1:])"
    )
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "seconds.json"
        _run(network, [sys.executable, "-c", script, json.dumps(asdict(case)), str(steps), str(output)], 600)
        job = json.loads(output.read_text())
    hosts = [f"m{rank * network.count // RANKS}" for rank in range(RANKS)]
    if network.count > 1 and job["hosts"] != hosts:
        sys.exit(f"ranks of {case.label} ran on {job['hosts']} but are forecast on {hosts}")
    if set(job["programs"]) != {program_digest(*make(case))}:
        sys.exit(f"ranks of {case.label} ran another program than the one that is forecast")
    seconds: list[float] = job["seconds"]
    return seconds


def _run(network: Network, command: list[str], timeout: float) -> None:
    try:
        network.run(RANKS, command, timeout, **THREADS, PYTHONPATH=str(ROOT))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(command)} ended with {error.returncode}:\n{error.stderr}")


def forecast_seconds(case: Case, cluster: Any) -> float:
    """Seconds of a step of a case on a profiled cluster: the program that runs, rank i on device i."""
    engine, batch = make(case)
    return forecast(engine.prepare(batch).build, cluster).step_seconds


def cases(quick: bool) -> list[tuple[str, Case]]:
    """Every product by every algorithm."""
    algorithms = (("collective", 1), ("meshslice", 2), ("meshslice", 4), ("wang", 1))
    shapes = list(SHAPES.items())[: 1 if quick else None]
    return [(name, Case(*shape, *algorithm)) for name, shape in shapes for algorithm in algorithms]


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How forecasts agree with measurements; see the head of this file."""
    right = pairs = 0
    worst = 0.0
    key = itemgetter("network", "product")
    for _, group in itertools.groupby(rows, key):
        of_product = list(group)
        for one, other in itertools.combinations(of_product, 2):
            ratio = one["measured_seconds"] / other["measured_seconds"]
            if abs(ratio - 1) > 0.1:
                pairs += 1
                right += (ratio > 1) == (one["forecast_seconds"] > other["forecast_seconds"])
        first = of_product[0]
        for row in of_product[1:]:
            gains = [
                first[f"{kind}_seconds"] / row[f"{kind}_seconds"] - 1 for kind in ("measured", "forecast")
            ]
            worst = max(worst, abs(gains[0] - gains[1]))
    return {"measured": rows, "signs": {"right": right, "pairs": pairs}, "gain_error": 100 * worst}


def run(
    settings: Sequence[Setting], quick: bool, rounds: int = ROUNDS, profile_seconds: float = PROFILE_SECONDS
) -> dict[str, Any]:
    """Profile, measure and forecast on every network."""
    rows: list[dict[str, Any]] = []
    for setting in settings:
        seconds: dict[tuple[str, Case], list[float]] = {case: [] for case in cases(quick)}
        with network_of(setting) as network, tempfile.TemporaryDirectory() as folder:
            cluster = profiled(setting, network, Path(folder), profile_seconds)
            for _ in range(rounds):
                for product, case in seconds:
                    seconds[product, case] += measured(network, case, 3 if quick else STEPS)
        for (product, case), steps in seconds.items():
            row: dict[str, Any] = {"network": setting.name, "product": product, "algorithm": case.label}
            row["measured_seconds"] = statistics.median(steps)
            row["quartiles"] = [float(q) for q in np.quantile(steps, (0.25, 0.75))]
            row["forecast_seconds"] = forecast_seconds(case, cluster)
            rows.append(row)
            print(f"{setting.name:34} {product:12} {case.label:20} {row['measured_seconds']:8.3f} s measured "
                  f"{row['forecast_seconds']:8.3f} s forecast", flush=True)  # fmt: skip
    return compare(rows)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write the result there")
    parser.add_argument("--quick", action="store_true", help="one network, one product, few steps")
    parser.add_argument("--network", type=int, choices=range(len(SETTINGS)), help="this network alone")
    parser.add_argument("--rounds", type=int, help=f"rounds over all cases; by default {ROUNDS}")
    parser.add_argument("--profile", type=float, help="seconds of the profile of a network; by default 240")
    given = parser.parse_args()
    settings = SETTINGS[: 1 if given.quick else None] if given.network is None else [SETTINGS[given.network]]
    rounds = given.rounds or (1 if given.quick else ROUNDS)
    result = run(settings, given.quick, rounds, given.profile or (60.0 if given.quick else PROFILE_SECONDS))
    print(json.dumps(result))
    if given.json:
        Path(given.json).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
