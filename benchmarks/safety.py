"""What the checks of a training step and of a checkpoint cost: with them over without them.

    python benchmarks/safety.py [--quick] [--json FILE]

Compared, in one process (of each rank) and in turns: an engine as it is, and the same engine without the part
under test:

* `step`: a training step with the check that loss and gradients are finite, over one without
  (`Strategy(nonfinite=...)`, docs/running/training_safety.md), for the programs of `benchmarks/step.py`:
  the GPT on one rank, the MLP data, tensor and pipeline parallel and ZeRO-2 on two MPI ranks.
* `save`: a save of the GPT with the checksums of its pages and the look at every value, over one without, on
  the disk of the folder for temporary files, with what the disk needs to confirm it.
* `load`: the same for a load, whose checksums are verified.

A ratio is the median over pairs of (seconds with) / (seconds without), the order inside a pair alternating;
the interval is that of the median (95 %, from order statistics). Steps with and without the check must first
give the same losses bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
PROGRAMS = {"gpt_serial": 1, "mlp_dp2": 2, "mlp_tp2": 2, "mlp_pp2": 2, "mlp_zero2": 2}
WARMUP = 3
TIME_LIMIT = 600.0  # seconds for one program


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Median of the ratios and the 95 % interval of the median."""
    ranked = sorted(ratios)
    n = len(ranked)
    low = max(0, int(stats.binom.ppf(0.025, n, 0.5)) - 1)
    return ranked[n // 2], ranked[low], ranked[n - 1 - low]


def paired(
    first: Callable[[], Any], second: Callable[[], Any], pairs: int, barrier: Callable[[], object]
) -> list[float]:
    """Seconds of the first over those of the second, for each pair of calls."""

    def seconds(call: Callable[[], Any]) -> float:
        barrier()
        start = time.perf_counter()
        call()
        barrier()
        return time.perf_counter() - start

    ratios = []
    for number in range(pairs):
        if number % 2:
            without = seconds(second)
            ratios.append(seconds(first) / without)
        else:
            ratios.append(seconds(first) / seconds(second))
    return ratios


def measure_step(name: str, pairs: int) -> list[float]:
    """Pairs of training steps with and without the check, on every rank of this job.

    Both steps of a pair are of one engine: two engines differ by up to 2 % from where their memory lies.
    """
    from benchmarks.support.peers import MlpSizes
    from benchmarks.support.peers.distgraph_peers import engine_of
    from distgraph.runtime.launch.mpi_rank import current_transport

    transport = current_transport()
    barrier = (lambda: None) if transport is None else transport.barrier

    def prepared() -> tuple[Any, Any, list[Any]]:
        engine, batch = engine_of(name, MlpSizes())
        engine.prepare(batch)
        engine.run(batch)
        workers = [w for compiled in engine._session.programs.values() for w in compiled.workers.values()]
        assert workers, "the engine has compiled nothing"
        return engine, batch, workers

    engine, batch, workers = prepared()
    checks = [worker.check for worker in workers]
    assert None not in checks
    losses = [engine.run(batch)["loss"] for _ in range(WARMUP)]
    reference, _, unchecked = prepared()
    _exchange_checks(unchecked, [None] * len(unchecked))
    others = [reference.run(batch)["loss"] for _ in range(WARMUP)]
    reference.close()
    if losses != others:
        raise SystemExit(f"{name}: losses {losses} and {others} differ; nothing to compare")

    def without() -> None:
        _exchange_checks(workers, [None] * len(workers))
        engine.run(batch)
        _exchange_checks(workers, checks)

    ratios = paired(lambda: engine.run(batch), without, pairs, barrier)
    engine.close()
    return ratios


def _exchange_checks(workers: Sequence[Any], checks: Sequence[Any]) -> None:
    for worker, check in zip(workers, checks, strict=True):
        worker.check = check


def _no_checksum(data: object) -> str:
    return "0" * 16


def _no_look(*arguments: object) -> Callable[..., str]:
    """`fault_of` that finds no fault with anything."""
    return lambda *_: ""


def measure_files(pairs: int) -> dict[str, list[float]]:
    """Pairs of saves and of loads with and without checksums and the look at values."""
    from benchmarks.support.peers import MlpSizes
    from benchmarks.support.peers.distgraph_peers import engine_of
    from distgraph.engine.checkpoints import saving as saving_module
    from distgraph.runtime.execute.checkpoint import files

    engine, batch = engine_of("gpt_serial", MlpSizes())
    engine.prepare(batch)
    engine.run(batch)
    saving: Any = saving_module
    checksum, look = files.checksum, saving.fault_of
    with tempfile.TemporaryDirectory() as folder:
        checked, unchecked = Path(folder, "checked"), Path(folder, "unchecked")

        def without(call: Callable[[], Any]) -> None:
            files.checksum, saving.fault_of = _no_checksum, _no_look
            try:
                call()
            finally:
                files.checksum, saving.fault_of = checksum, look

        engine.save(checked)
        without(lambda: engine.save(unchecked))
        ratios = {
            "save": paired(
                lambda: engine.save(checked),
                lambda: without(lambda: engine.save(unchecked)),
                pairs,
                lambda: None,
            ),
            "load": paired(
                lambda: engine.load(checked),
                lambda: without(lambda: engine.load(unchecked)),
                pairs,
                lambda: None,
            ),
        }
    engine.close()
    return ratios


def run_alone(name: str, pairs: int) -> dict[str, list[float]]:
    """Run one measurement in processes of its own."""
    ranks = PROGRAMS.get(name, 1)
    start = ["mpiexec", "-n", str(ranks), sys.executable, "-m", "mpi4py"] if ranks > 1 else [sys.executable]
    command = [*start, "-m", "benchmarks.safety", "--one", name, "--pairs", str(pairs)]
    environment = os.environ | dict.fromkeys(THREADS, "1")
    done = subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Run all measurements, or one of them in this process."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="a quarter of the pairs")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--pairs", type=int, default=40, help="of steps, saves and loads")
    arguments = parser.parse_args()
    pairs = max(8, arguments.pairs // 4) if arguments.quick else arguments.pairs
    if arguments.one is not None:
        from distgraph.runtime.launch.mpi_rank import current_transport

        found = (
            measure_files(pairs) if arguments.one == "files" else {"step": measure_step(arguments.one, pairs)}
        )
        transport = current_transport()
        if transport is None or transport.rank == 0:
            print(json.dumps(found), flush=True)
        return
    console, table = Console(), Table("what", "with / without", "95 %")
    load = os.getloadavg()[0]
    figures: dict[str, Any] = {"load": load, "step": {}}
    for name in PROGRAMS:
        figures["step"][name] = interval(run_alone(name, pairs)["step"])
    figures |= {name: interval(ratios) for name, ratios in run_alone("files", pairs).items()}
    rows = {f"step {name}": values for name, values in figures["step"].items()}
    rows |= {name: figures[name] for name in ("save", "load")}
    for name, (median, low, high) in rows.items():
        table.add_row(name, f"{median:.4f}", f"{low:.4f} - {high:.4f}")
    console.print(table)
    console.print(f"load of the machine at the beginning: {load:.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
