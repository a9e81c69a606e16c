"""Gradients that are summed between two machines while the backward part computes, measured and forecast.

    python -m benchmarks.support.networks.gradient_overlap [--json FILE] [--rate MBIT]
                                                            [--turns N] [--profile S]

Two machines of one rank, each on a core of its own (`benchmarks.support.machines`; needs root), train a model
by data parallelism. The network is first measured by `distgraph profile`, which knows nothing of the models.
Then four versions of the step take turns in one job:

* `no messages`: gradients are not summed (a transport that does nothing with them).
* `no overlap`: every sum is waited for where it is started.
* `without buckets`: a sum for every parameter, as its gradient is ready.
* `buckets`: several parameters in one message, which is what distgraph does.

Two of the models, `layers` and `gpt`, have gradients of about 1 MiB, whose sums the bandwidth of the network
limits; `narrow` has many of 1 KiB and less, whose sums take as long as their messages take to start.

The exposed time of a version is that by which its step is longer than that of `no messages`, the median over
turns on the slower rank. Its forecast is the time that the slower rank waits for sums; without overlap under
a runtime model that hides nothing.

Keys of the result: `rows`, a list of {model, case, step_seconds, exposed_seconds, forecast_step_seconds,
forecast_exposed_seconds}, and for each model `exposed_ratio` (of `buckets` over `no overlap`, measured and
forecast) and `buckets_over_without` (ratio of steps).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np

import distgraph as dg
from benchmarks.passes import Net, samples
from benchmarks.support.machines import machines
from benchmarks.support.networks.searched_plans import Setting, profiled, run_on
from distgraph import nn, optim
from distgraph.models import GPT, GPTConfig
from distgraph.resources import Cluster
from distgraph.resources.runtimes.load_runtime import load_runtime
from distgraph.resources.runtimes.runtime_model import Overlap
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.launch.mpi_rank import current_transport
from distgraph.runtime.transport.mpi import MpiTransport
from distgraph.runtime.transport.transport import Array, Group, Request

CASES = ("no messages", "no overlap", "without buckets", "buckets")
MODELS = ("layers", "gpt", "narrow")
MODULE = "benchmarks.support.networks.gradient_overlap"
SCRIPT = f"import sys; from {MODULE} import rank_main; rank_main(sys.argv[1:])"
AllReduce = Callable[[MpiTransport, Array, str, Group], Request]


class Nothing:
    """A request that is complete."""

    def wait(self) -> None:
        """See `Request`."""

    def done(self) -> bool:
        """See `Request`."""
        return True


@contextmanager
def sums_of(case: str) -> Iterator[None]:
    """How gradients are summed in a case."""
    original: AllReduce = MpiTransport.all_reduce

    def at_once(transport: MpiTransport, buffer: Array, op: str, group: Group) -> Request:
        request = original(transport, buffer, op, group)
        request.wait()
        return request

    replaced: dict[str, AllReduce] = {"no messages": lambda *_: Nothing(), "no overlap": at_once}
    patched = mock.patch.object(MpiTransport, "all_reduce", replaced.get(case, original))
    with patched if case in replaced else nullcontext():
        yield


def make(name: str, case: str) -> tuple[dg.Engine, Any]:
    """Engine and batch of a model in a case."""
    passes = ("-bucket_gradients",) if case == "without buckets" else ()
    strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp", passes=passes)
    if name != "gpt":
        layers, width, rows = {"layers": (8, 512, 4096), "narrow": (64, 16, 512)}[name]
        model, batch = Net(layers, width), samples(rows, width)
        return dg.Engine(model, nn.MeanSquaredError(), optim.SGD(lr=1e-3), strategy=strategy), batch
    gpt = GPT(GPTConfig(hidden=256, layers=4, heads=4, vocabulary=1024, sequence=128))
    tokens = np.random.default_rng(0).integers(0, 1024, (16, 129)).astype("i4")
    return dg.Engine(gpt, gpt.loss, optim.SGD(lr=1e-3), strategy=strategy), (tokens[:, :-1], tokens[:, 1:])


def rank_main(arguments: list[str]) -> None:
    """One rank; rank 0 writes the seconds of every step of the slower rank, by case."""
    name, turns, output = arguments
    transport = current_transport()
    assert transport is not None
    made = {case: make(name, case) for case in CASES}
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    for turn in range(int(turns) + 1):
        for case, (engine, batch) in made.items():
            with sums_of(case):
                transport.barrier()
                start = time.perf_counter()
                engine.run(batch)
                if turn:  # the first steps compile
                    seconds[case].append(time.perf_counter() - start)
    for engine, _ in made.values():
        engine.close()
    gathered = transport.gather_objects(seconds, 0)
    if gathered is not None:
        slower = {
            case: [max(pair) for pair in zip(*(of[case] for of in gathered), strict=True)] for case in CASES
        }
        Path(output).write_text(json.dumps(slower))


def forecast_seconds(name: str, case: str, cluster: Cluster) -> tuple[float, float]:
    """Forecast seconds of a step, and of the sums of gradients in it that no computation hides."""
    runtime = load_runtime("distgraph_cpu")
    if case == "no overlap":
        runtime = replace(runtime, overlap=Overlap())
    engine, batch = make(name, case)
    result = forecast(engine.prepare(batch).build, cluster, runtime=runtime)
    exposed = max(result.exposed_seconds.values())
    return (result.step_seconds - exposed, 0.0) if case == "no messages" else (result.step_seconds, exposed)


def run(rate: int, turns: int, profile_seconds: float) -> dict[str, Any]:
    """Profile, measure and forecast at a speed of the network, in Mbit/s."""
    setting, rows, ratios = Setting(rate, (0.9, 0.9), ranks=1), [], {}
    with (
        tempfile.TemporaryDirectory() as temporary,
        machines(2, f"{rate}mbit", setting.cores, own_cores=True) as network,
    ):
        folder = Path(temporary)
        cluster, _ = profiled(setting, network, folder, profile_seconds)
        for name in MODELS:
            output = folder / f"{name}.json"
            run_on(network, 2, [sys.executable, "-c", SCRIPT, name, str(turns), str(output)], 600)
            seconds = json.loads(output.read_text())
            steps = {case: median(seconds[case]) for case in CASES}
            bare = seconds["no messages"]
            exposed = {
                case: median(a - b for a, b in zip(seconds[case], bare, strict=True)) for case in CASES
            }
            predicted = {case: forecast_seconds(name, case, cluster) for case in CASES}
            rows += [
                {
                    "model": name,
                    "case": case,
                    "step_seconds": steps[case],
                    "exposed_seconds": exposed[case],
                    "forecast_step_seconds": predicted[case][0],
                    "forecast_exposed_seconds": predicted[case][1],
                }
                for case in CASES
            ]
            ratios[name] = {
                "exposed_ratio": exposed["buckets"] / exposed["no overlap"],
                "forecast_exposed_ratio": predicted["buckets"][1] / predicted["no overlap"][1],
                "buckets_over_without": steps["buckets"] / steps["without buckets"],
            }
    return {"rate": rate, "rows": rows, "ratios": ratios}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--rate", type=int, default=400, help="Mbit/s of the links; by default 400")
    parser.add_argument("--turns", type=int, default=20, help="steps of every case; by default 20")
    parser.add_argument("--profile", type=float, default=60.0, help="seconds of the profile; by default 60")
    given = parser.parse_args()
    result = run(given.rate, given.turns, given.profile)
    print(json.dumps(result, indent=1))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
