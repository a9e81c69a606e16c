"""The forecast against this machine: seconds of a step and bytes of memory on one and two ranks.

    python -m benchmarks.own_forecast [--clusters ONE TWO] [--seconds S] [--rounds N] [--json FILE] [--quick]

`distgraph profile -n 1` and `-n 2` measure the machine (unless --clusters names files that they wrote), and
the programs run, each in processes of its own with one BLAS thread a rank: the GPT of the quickstart serial,
data and tensor parallel; the conv net of the digits tutorial in four micro-batches serial, data parallel
and as a pipeline of two stages. Programs of one rank are forecast from the profile of one rank, those of
two from that of two. Profiles and programs take turns over several rounds, in each of which a profile goes
on from where it was, so that minutes in which the machine is slow for reasons of its own touch forecast and
measurement alike (on a virtual machine one and the same step took 5.9 to 11 ms, changing several times a
second). Measured is the mean step over all rounds, of the slower rank, without the longest and the shortest
twentieth of the steps; forecasts come from the whole profile.

Memory is compared with the same programs made larger (wider GPT, more images), so that tensors and not
Python's objects decide: peak resident size of a fresh process during steps, less that after compiling, where
a small program of the same kind has loaded the kernels before. So what is there once and for all does not
count: imported modules, compiled kernels and their compiler, buffers of BLAS threads, MPI's segments. What
parameters and states take does, as the first step makes them. The largest rank counts.

With --quick the profiles take 9 s each, and seconds and memory of a program are measured once, in one
process a rank.

Keys of the result: mean_error, max_error (of seconds, relative to the measured ones), memory_mean_error,
memory_max_error, and load_mean, the mean load average: on a machine that others use, seconds say little.

History, on two virtual cores on which everything takes 1.0 to 1.8 times as long, in turns of 0.1 to 0.5 s,
mostly but not always the two at once:
  medians over ranks and rounds, 3 rounds: 9.5, 13.7, 14.0 % mean, 38, 28, 22 % at most; serial programs
  forecast too slow, those of two ranks too fast
  predicted: a rank alone is disturbed less than two, and of two the slower one decides, so that profiles of
  as many ranks and the slowest rank of a round close both gaps; more rounds are for chance. Evaluated on one
  set of 7 rounds: 7.7 % mean, 14.3 % at most with means over ranks, 3.0 and 5.8 % with the slowest; another
  run 9.2 and 23.3 %
  predicted: of two modes a median is one or the other, and a step is the sum of its ops, so that means over
  rounds and steps, and twice as many rounds of the profile, spread less. Measured in two
  runs: 5.8 and 4.3 % mean, 11.9 and 7.3 % at most
  convolutions by FLOPs and patches instead of FLOPs alone (see `real_plans`): 5.5 % mean, 10.6 % at most; of
  these few, small ones a table by FLOPs told as much
  messages of freshly written bytes; that nothing is hidden, which this script took for granted, now comes
  from the forecast itself: 6.5 % mean, 12.3 % at most (the digits data parallel, 4.1 instead of 4.7 ms)
  tried and left: fast repetitions only (lowest tenth, fastest steps in a row): 4.7 to 9.3 %, 10 to 22 % at
  most, as two ranks are hardly ever undisturbed together for a whole step
"""

import argparse
import ctypes
import gc
import io
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import trim_mean

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine.host_overhead import overheads
from distgraph.resources import load_cluster
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.launch.launch import launch
from distgraph.runtime.launch.mpi_rank import current_transport
from distgraph.runtime.profile.profiler import Request, profile

ROOT = Path(__file__).resolve().parent.parent
THREADS = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)
LENGTH, LAYERS = 64, 2
SCRIPT = "import sys; from benchmarks.own_forecast import rank_main; rank_main(sys.argv[1:])\n"


@dataclass(frozen=True, slots=True)
class Layout:
    """A program on some ranks."""

    model: str
    name: str
    ranks: int


LAYOUTS = (
    Layout("gpt", "serial", 1), Layout("gpt", "dp", 2), Layout("gpt", "tp", 2),
    Layout("digits", "serial", 1), Layout("digits", "dp", 2), Layout("digits", "pp", 2),
)  # fmt: skip


class Gpt(nn.Module):
    """The model of the quickstart."""

    def __init__(self, width: int, mesh: dg.ProcessMesh, name: str) -> None:
        self.token, self.place = nn.Embedding(256, width), nn.Parameter((LENGTH, width))
        self.blocks = [nn.TransformerBlock(width, width // 32, dropout=0.1) for _ in range(LAYERS)]
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        if name == "tp":
            for block in self.blocks:
                dg.shard_tensor(block.attn.q.weight, mesh, [None, "tp"])
                dg.shard_tensor(block.mlp.up.weight, mesh, [None, "tp"])

    def forward(self, text: Any) -> Any:
        """[batch, length] bytes to logits."""
        x = self.token(text) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Digits(nn.Module):
    """The conv net of the digits tutorial; with two meshes a pipeline."""

    def __init__(self, stages: tuple[dg.ProcessMesh, dg.ProcessMesh] | None) -> None:
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.up, self.down = nn.Linear(32 * 2 * 2, 64), nn.Linear(64, 10)
        self.pool, self.dropout = nn.MaxPool2d(2), nn.Dropout(0.2)
        self.stages = stages

    def forward(self, images: Any) -> Any:
        """[batch, 1, 8, 8] images to logits."""
        if self.stages:
            images = dg.shard_tensor(images, self.stages[0], ["dp", None, None, None])
        x = self.pool(ops.relu(self.conv1(images)))
        if self.stages:
            x = dg.reshard(x, self.stages[1], ["dp", None, None, None])
        x = self.pool(ops.relu(self.conv2(x)))
        return self.down(self.dropout(ops.relu(self.up(nn.Flatten()(x)))))


def make(layout: Layout, width: int, batch: int) -> tuple[dg.Engine, Any]:
    """Engine and batch of a layout."""
    axis = "tp" if layout.name == "tp" else "dp"
    mesh = dg.ProcessMesh.grid(**{axis: layout.ranks})
    split = {"mesh": mesh, "batch_axis": "dp"} if layout.name == "dp" else {"mesh": mesh}
    random = np.random.default_rng(0)
    if layout.model == "gpt":
        text = random.integers(0, 256, (batch, LENGTH + 1)).astype("i4")
        engine = dg.Engine(
            Gpt(width, mesh, layout.name), nn.CrossEntropy(), optim.AdamW(lr=1e-3, clip_norm=1.0),
            strategy=dg.Strategy(**split),
        )  # fmt: skip
        return engine, (text[:, :-1].copy(), text[:, 1:].copy())
    stages = (dg.ProcessMesh([0], ["dp"]), dg.ProcessMesh([1], ["dp"])) if layout.name == "pp" else None
    strategy = dg.Strategy(micro_batches=4, **({} if stages else split))
    engine = dg.Engine(Digits(stages), nn.CrossEntropy(), optim.Adam(lr=2e-3), strategy=strategy)
    images = random.random((batch, 1, 8, 8), np.float32)
    return engine, (images, random.integers(0, 10, batch).astype("i4"))


def small(layout: Layout) -> tuple[dg.Engine, Any]:
    """The program of the tutorial."""
    return make(layout, 128, 32)


def large(layout: Layout) -> tuple[dg.Engine, Any]:
    """The same for memory."""
    return make(layout, 512, 32) if layout.model == "gpt" else make(layout, 0, 16384)


def rank_main(arguments: list[str]) -> None:
    """One rank of one program: prints a line of JSON, on rank 0."""
    layout, what = Layout(arguments[0], arguments[1], int(arguments[2])), arguments[3]
    transport = current_transport()
    own: list[float] = []
    if what in ("seconds", "both"):
        own += _seconds(layout, transport, 1.0 if what == "both" else 2.0)
    if what in ("memory", "both"):
        own.append(_growth(layout))
    found = [own] if transport is None else transport.gather_objects(own, 0)
    if found is not None:
        print(json.dumps([max(column) for column in zip(*found, strict=True)]))


def _seconds(layout: Layout, transport: Any, budget: float) -> list[float]:
    """Seconds of as many steps as fill the budget, after some that warm up."""
    engine, batch = small(layout)
    warm = statistics.median(_step(engine, batch, transport) for _ in range(8))
    count = max(1, round(budget / warm))
    if transport is not None:
        count = transport.broadcast_object(count, 0)
    seconds = [_step(engine, batch, transport) for _ in range(count)]
    engine.close()
    return seconds


def _step(engine: dg.Engine, batch: Any, transport: Any) -> float:
    if transport is not None:
        transport.barrier()
    start = time.perf_counter()
    engine.run(batch)
    return time.perf_counter() - start


def _growth(layout: Layout) -> float:
    """Bytes by which the resident size grows at most during steps of the large program."""
    # Enough samples that compiled kernels are used: their compiler, loaded with the first of them, is large.
    engine, batch = make(layout, 512, 4) if layout.model == "gpt" else make(layout, 0, 4096)
    engine.run(batch)
    engine.close()
    del engine
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    engine, batch = large(layout)
    engine.prepare(batch)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident("VmRSS")
    for _ in range(2):
        engine.run(batch)
    return _resident("VmHWM") - before


def _resident(name: str) -> float:
    text = Path("/proc/self/status").read_text()
    return 1024.0 * int(text.partition(f"{name}:")[2].split()[0])


def measured(layout: Layout, what: str) -> list[float]:
    """Run a layout in fresh processes."""
    out, errors = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "rank.py"
        script.write_text(SCRIPT)
        env = {**os.environ, **THREADS, "PYTHONPATH": str(ROOT)}
        arguments = [str(script), layout.model, layout.name, str(layout.ranks), what]
        code = launch(layout.ranks, arguments, env=env, stdout=out, stderr=errors)
    if code:
        sys.exit(f"{layout} ended with {code}:\n{errors.getvalue()}")
    numbers: list[float] = json.loads(out.getvalue().strip().splitlines()[-1])
    return numbers


def forecasts(layout: Layout, cluster: Any) -> tuple[float, float]:
    """Seconds of the small program's step, bytes of the large program."""
    engine, batch = small(layout)
    seconds = forecast(engine.prepare(batch).build, cluster).step_seconds
    engine, batch = large(layout)
    return seconds, forecast(engine.prepare(batch).build, cluster).peak_memory


def profile_more(file: str, ranks: int, turn: int, turns: int, seconds: float) -> None:
    """A turn of a profile: its part of the rounds and of the seconds."""
    whole = Request(file, ranks=ranks, seconds=seconds / turns, fresh=turn == 0)
    request = replace(whole, repeats=math.ceil(whole.repeats * (turn + 1) / turns))
    if profile(request, overheads):
        sys.exit("the profile failed")


def main() -> None:
    """Profile, measure, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--clusters", nargs=2, metavar=("ONE", "TWO"),
        help="resource files of distgraph profile -n 1 and -n 2; without them, they are measured",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=110.0, help="of either profile")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="gpt or digits")
    parser.add_argument("--json", help="write the result there")
    parser.add_argument("--quick", action="store_true", help="short profiles, one round, fewer steps")
    given = parser.parse_args()
    layouts = [layout for layout in LAYOUTS if layout.model.startswith(given.only)]
    steps: dict[Layout, list[float]] = {layout: [] for layout in layouts}
    grown: dict[Layout, float] = {}
    loads = []
    rounds, seconds = (1, 9.0) if given.quick else (given.rounds, given.seconds)
    with tempfile.TemporaryDirectory() as folder:
        files = given.clusters or [str(Path(folder) / f"{ranks}.yaml") for ranks in (1, 2)]
        for turn in range(rounds):
            for ranks, file in enumerate(files, 1):
                if not given.clusters:
                    profile_more(file, ranks, turn, rounds, seconds)
            for layout in layouts:
                found = measured(layout, "both" if given.quick else "seconds")
                if given.quick:
                    grown[layout] = found.pop()
                steps[layout] += found
                loads.append(os.getloadavg()[0])
        clusters = {ranks: load_cluster(file) for ranks, file in enumerate(files, 1)}
    for layout in layouts if not given.quick else ():
        grown[layout] = measured(layout, "memory")[0]
    result = compare(layouts, steps, grown, clusters)
    result["load_mean"] = statistics.mean(loads)
    print(json.dumps(result))
    if given.json:
        Path(given.json).write_text(json.dumps(result))


def compare(
    layouts: list[Layout],
    steps: dict[Layout, list[float]],
    grown: dict[Layout, float],
    clusters: Mapping[int, Any],
) -> dict[str, float]:
    """Print the table; the errors. Clusters are those of profiles, by ranks."""
    table = Table(
        "program", "ranks", "measured", "quartiles", "forecast", "error", "memory", "forecast", "error"
    )
    errors, memory = [], []
    for layout in layouts:
        low, high = np.quantile(steps[layout], (0.25, 0.75))
        seconds = float(trim_mean(steps[layout], 0.05))
        predicted, size = forecasts(layout, clusters[layout.ranks])
        errors.append(predicted / seconds - 1)
        memory.append(size / grown[layout] - 1)
        table.add_row(
            f"{layout.model} {layout.name}", str(layout.ranks), f"{seconds * 1e3:.2f} ms",
            f"{low * 1e3:.2f} - {high * 1e3:.2f}", f"{predicted * 1e3:.2f} ms", f"{errors[-1]:+.1%}",
            f"{grown[layout] / 2**20:.1f} MiB", f"{size / 2**20:.1f} MiB", f"{memory[-1]:+.1%}",
        )  # fmt: skip
    Console(width=140).print(table)
    return {
        "mean_error": statistics.mean(map(abs, errors)),
        "max_error": max(map(abs, errors)),
        "memory_mean_error": statistics.mean(map(abs, memory)),
        "memory_max_error": max(map(abs, memory)),
    }


if __name__ == "__main__":
    main()
