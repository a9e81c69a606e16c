"""A tensor that goes from one machine to another, and gradients that are summed over both, measured.

    python -m benchmarks.support.networks.resharding [--json FILE] [--rate MBIT] [--rounds N] [--profile S]

Two machines of two ranks are network namespaces of this computer (`benchmarks.support.machines`; needs root).
The network is first measured by `distgraph profile`, which knows nothing of the programs. The cases are those
of Zheng et al., "Alpa", OSDI 2022, Figure 11, and two more:

* `signal`: the ranks of the second machine have their tensor already and wait for a few numbers.
* `without`: the tensor is split over the first machine and wanted whole on both ranks of the second one, each
  of which gets all of it over the network.
* `with`: each gets another half over the network, and an all_gather inside the machine fills the rest, which
  is what distgraph does. `without` is made by leaving it no other layout to land in.
* `direct`: gradients are summed over four ranks by one all_reduce, whose members all send to each other, by a
  transport that lets no rank pass messages on. No forecast knows it.
* `relayed`: by one all_reduce, which adds up inside machines first, as distgraph does.
* `hierarchical`: by a reduce_scatter inside each machine, an all_reduce between the machines and an
  all_gather inside, which is how a user can write it by annotations.

Cases take turns over several jobs; seconds are medians of all steps on the slowest rank. Forecasts are those
of the program that runs, rank i on device i. Keys of the result: `rows`, a list of {case, measured_seconds,
forecast_seconds}, and `gains`: seconds of the transfer alone, which are those above `signal`, without over
with, measured and forecast, and seconds of direct over relayed, measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import distgraph as dg
from benchmarks.support.machines import machines
from benchmarks.support.networks.searched_plans import Setting, profiled, run_on
from distgraph import nn, ops, optim
from distgraph.ir.collective_registry import _forget_plans
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.passes.redistribution import cross_mesh
from distgraph.resources import Cluster
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.launch.mpi_rank import current_transport
from distgraph.runtime.transport.mpi_collectives import Relays

ROWS, COLUMNS = 1536, 1024
STEPS = 8
CASES = ("signal", "without", "with", "direct", "relayed", "hierarchical")
SUMS = CASES[3:]
MODULE = "benchmarks.support.networks.resharding"
SCRIPT = f"import sys; from {MODULE} import rank_main; rank_main(sys.argv[1:])"


class Sent(nn.Module):
    """A tensor of the first machine is scaled and averaged on the second one."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.first, self.second = dg.ProcessMesh([0, 1], "x"), dg.ProcessMesh([2, 3], "y")
        self.scale = nn.Parameter((COLUMNS,))

    def forward(self, a: Any, b: Any) -> Any:
        """Tensors [rows, columns] on the first and on the second machine to a number."""
        with dg.on(self.first):
            sent = dg.shard_tensor(a, self.first, ["x", None]) * 2.0
            sent = sent if self.whole else ops.mean(sent, axis=0)
        sent = dg.reshard(sent, self.second, [None] * len(sent.shape))
        with dg.on(self.second):
            scale = dg.shard_tensor(self.scale, self.second, [None])
            there = dg.shard_tensor(b, self.second, [None, None])
            return ops.mean((sent + there) * scale)


class Summed(nn.Module):
    """A product of which every rank has a summand, as of the gradient of a weight."""

    def __init__(self, hierarchical: bool) -> None:
        self.hierarchical = hierarchical
        self.mesh = dg.ProcessMesh([[0, 1], [2, 3]], ("machine", "rank"))
        self.scale = nn.Parameter((COLUMNS,))

    def forward(self, a: Any, b: Any) -> Any:
        """[samples, rows] and [samples, columns] to a number."""
        axes = ("machine", "rank")
        a, b = (dg.shard_tensor(x, self.mesh, [axes, None]) for x in (a, b))
        total = ops.matmul(ops.transpose(a), b)
        if self.hierarchical:
            total = dg.shard_tensor(total, self.mesh, ["rank", None])
        total = dg.reshard(total, self.mesh, [None, None])
        return ops.mean(total * dg.shard_tensor(self.scale, self.mesh, [None]))


def make(case: str) -> tuple[dg.Engine, Any]:
    """Engine and batch of a case."""
    rng, gradients = np.random.default_rng(0), case in SUMS
    shapes = ((64, ROWS), (64, COLUMNS)) if gradients else ((ROWS, COLUMNS),) * 2
    model = Summed(case == "hierarchical") if gradients else Sent(case != "signal")
    batch = tuple(rng.standard_normal(shape, np.float32) for shape in shapes)
    return dg.Engine(model, None, optim.SGD(lr=1e-3), strategy=dg.Strategy(refine="never")), batch


@contextmanager
def landing_of(case: str) -> Iterator[None]:
    """In the case `without`, a transfer has no other layout to land in than the one that is wanted."""

    def wanted(target: DistAttr) -> Iterator[ShardSpec]:
        yield target.spec

    if case != "without":
        yield
        return
    with mock.patch.object(cross_mesh, "_landings", wanted):
        _forget_plans()  # those of other cases
        yield
    _forget_plans()


def messages_of(case: str) -> AbstractContextManager[object]:
    """In the case `direct`, no rank passes messages on."""
    return mock.patch.object(Relays, "of", return_value=None) if case == "direct" else nullcontext()


def rank_main(arguments: list[str]) -> None:
    """One rank of one case; rank 0 writes the seconds of every step, of the slowest rank, to a file."""
    case, output = arguments
    transport = current_transport()
    assert transport is not None
    seconds = []
    with landing_of(case), messages_of(case):
        engine, batch = make(case)
        engine.run(batch)
        engine.run(batch)
        for _ in range(STEPS):
            transport.barrier()
            start = time.perf_counter()
            engine.run(batch)
            seconds.append(time.perf_counter() - start)
        engine.close()
    found = transport.gather_objects(seconds, 0)
    if found is not None:
        Path(output).write_text(json.dumps([max(column) for column in zip(*found, strict=True)]))


def forecast_seconds(case: str, cluster: Cluster) -> float:
    """Seconds of a step of a case on a profiled cluster: the program that runs, rank i on device i."""
    with landing_of(case):
        engine, batch = make(case)
        return forecast(engine.prepare(batch).build, cluster).step_seconds


def run(rate: int, rounds: int, profile_seconds: float) -> dict[str, Any]:
    """Profile, measure and forecast at a speed of the network, in Mbit/s."""
    setting = Setting(rate, (0.9, 0.9))
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    with (
        tempfile.TemporaryDirectory() as temporary,
        machines(2, f"{rate}mbit", setting.cores) as network,
    ):
        folder = Path(temporary)
        cluster, _ = profiled(setting, network, folder, profile_seconds)
        for _ in range(rounds):
            for case in CASES:
                output = folder / "seconds.json"
                run_on(network, 4, [sys.executable, "-c", SCRIPT, case, str(output)], 300)
                seconds[case] += json.loads(output.read_text())
    kinds = {
        "measured": {case: statistics.median(steps) for case, steps in seconds.items()},
        "forecast": {case: forecast_seconds(case, cluster) for case in CASES if case != "direct"},
    }
    rows = [{"case": case, **{f"{kind}_seconds": kinds[kind].get(case) for kind in kinds}} for case in CASES]
    return {"rate": rate, "rows": rows, "gains": {kind: gains(of_case) for kind, of_case in kinds.items()}}


def gains(seconds: dict[str, float]) -> dict[str, float]:
    """Of seconds by case; that of relays where `direct` is among them."""
    signal = seconds["signal"]
    gained = {"local_all_gather": (seconds["without"] - signal) / (seconds["with"] - signal)}
    if "direct" in seconds:
        gained["relayed_all_reduce"] = seconds["direct"] / seconds["relayed"]
    return gained


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--rate", type=int, default=400, help="Mbit/s of the links; by default 400")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of every case; by default 3")
    parser.add_argument("--profile", type=float, default=60.0, help="seconds of the profile; by default 60")
    given = parser.parse_args()
    result = run(given.rate, given.rounds, given.profile)
    print(json.dumps(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
