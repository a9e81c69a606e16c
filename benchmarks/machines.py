"""Several machines: placement, searched plans, executors and losses of ranks, measured beside the forecasts.

    python -m benchmarks.machines [--only PART ...] [--quick] [--json FILE]

Machines are network namespaces of this computer with links of limited speed and shares of the cores
(`benchmarks.support.machines`; they need root, the part `actors` does not). The parts, which are also the
keys of the result:

* `mapping`: a program with tensor parallelism on two machines of two ranks, under the mapping that distgraph
  chooses, the identity and the worst mapping (`benchmarks/support/networks/placement.py`).
* `plans`: searched plans against the fastest of all uniform plans, for a GPT, a conv net and a mixture of
  experts, on three speeds of the network and on machines of unequal speed
  (`benchmarks/support/networks/searched_plans.py`).
* `shares`: data parallelism with the shares of a searched plan against equal shares, on machines of unequal
  speed (`benchmarks/support/networks/uneven_shares.py`).
* `resharding`: a tensor that goes from machine to machine with and without an all_gather at its end, and
  gradients summed by one all_reduce, with and without ranks that pass messages on
  (`benchmarks/support/networks/resharding.py`).
* `overlap`: gradients that are summed between two machines while the backward part computes
  (`benchmarks/support/networks/gradient_overlap.py`).
* `actors`: a step under `Strategy(executor="actors")` over one under "static"
  (`benchmarks/support/networks/actor_runs.py`). Pipelines of four stages, a row under 1F1B and eager 1F1B,
  and branches: three stages read one and are summed on it; 8 micro-batches. Stages pause for 1.5 ms forward
  and 3 ms backward besides a small layer. In `even` nothing is late. In `slow stage` the tasks of one stage,
  drawn for each step, take up to 9 ms longer, drawn for each task. In `late messages` data arrive up to 13.5
  ms after they were sent; decisions and signals are not delayed. In `stopped rank` one rank does nothing for
  200 ms in one micro-batch. Both executors get the same delays, and must give the same losses bit for bit. A
  ratio is the median over pairs of (seconds under actors) / (seconds under static), with the 95 % interval of
  the median. `no_jitter_ratio` is the largest of `even`, `straggler_ratio` the mean over the other scenarios.
* `elastic`: ranks and machines that are lost in jobs of `distgraph run --elastic`, in the campaign
  `tests/campaigns/elastic.py`; `recovery_seconds_max` is that from the signal to the end of the next step.

With --quick: one speed, one model with two uniform plans, 8 pairs and two losses; some six minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.safety import interval
from benchmarks.support.networks import gradient_overlap, placement, searched_plans, uneven_shares
from benchmarks.support.networks import resharding as transfers

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4
LOST = ("kill", "machine")
"""Disturbances of the campaign: one of four ranks is killed, and one of two machines is lost."""


def mapping(quick: bool) -> Any:
    """Steps under three mappings at each speed of the network."""
    rows = []
    for rate in (100,) if quick else (100, 400, 1000):
        row = placement.at_rate(rate, steps=6 if quick else 12, rounds=1 if quick else 2)
        over_chosen = {
            f"{kind}_{name}_over_chosen": row[f"{kind}_ratio"][name]
            for kind in ("measured", "forecast")
            for name in ("worst", "identity")
        }
        rows.append({"rate": rate, **over_chosen, **row})
    keys = ("rate", *over_chosen)
    show("mapping", keys, [[f"{row[key]:.3g}" for key in keys] for row in rows])
    return rows


def plans(quick: bool) -> Any:
    """Searched plans over the fastest uniform plans."""
    rows = searched_plans.run_all(quick)
    keys = ("network", "model", "searched_over_best_uniform", "forecast_ratio", "forecast_error", "untried")
    show("plans", keys, [[_text(row[key]) for key in keys] for row in rows])
    return rows


def shares(quick: bool) -> Any:
    """Equal shares over those of a searched plan."""
    rows = uneven_shares.run_all(quick)
    keys = ("network", "model", "weights", "even_over_uneven", "interval", "forecast_ratio")
    show("shares", keys, [[_text(row.get(key, "")) for key in keys] for row in rows])
    return rows


def resharding(quick: bool) -> Any:
    """Gains of the all_gather behind a transfer, and of ranks that pass the messages of an all_reduce on."""
    rows = []
    for rate in (400,) if quick else (100, 400, 1000):
        rounds, seconds = (1, 50.0) if quick else (3, 60.0)
        rows.append(transfers.run(rate, rounds, seconds))
    names = [(gain, kind) for kind, gained in rows[0]["gains"].items() for gain in gained]
    texts = [[str(row["rate"]), *(f"{row['gains'][kind][gain]:.2f}" for gain, kind in names)] for row in rows]
    show("resharding", ("Mbit/s", *(f"{gain}, {kind}" for gain, kind in names)), texts)
    return rows


def overlap(quick: bool) -> Any:
    """Exposed time of gradient synchronisation."""
    result = gradient_overlap.run(400, 8 if quick else 20, 50.0 if quick else 60.0)
    keys = tuple(result["rows"][0])
    show("overlap", keys, [[_text(row[key]) for key in keys] for row in result["rows"]])
    return result


def actors(quick: bool) -> Any:
    """Steps under actors over those in the recorded order."""
    module, pairs = "benchmarks.support.networks.actor_runs", "8" if quick else "30"
    start = ["mpiexec", "-n", str(RANKS), sys.executable, "-m", "mpi4py"]
    printed = _printed([*start, "-m", module, pairs])
    rows = []
    for row in json.loads(printed.strip().splitlines()[-1]):
        ratio, low, high = interval(row.pop("ratios"))
        static = median(row.pop("static"))
        rows.append({**row, "static_seconds": static, "ratio": ratio, "low": low, "high": high})
    texts = [
        [
            row["program"],
            row["scenario"],
            f"{row['static_seconds'] * 1e3:.1f}",
            f"{row['ratio']:.3f}",
            f"{row['low']:.3f} - {row['high']:.3f}",
        ]
        for row in rows
    ]
    show("actors", ("program", "scenario", "static, ms", "actors / static", "95 %"), texts)
    return {
        "no_jitter_ratio": max(row["ratio"] for row in rows if row["scenario"] == "even"),
        "straggler_ratio": mean(row["ratio"] for row in rows if row["scenario"] != "even"),
        "rows": rows,
    }


def elastic(quick: bool) -> Any:
    """Losses in elastic jobs."""
    script, trials = str(ROOT / "tests/campaigns/elastic.py"), "2" if quick else "20"
    result = json.loads(_printed([sys.executable, script, "--trials", trials, "--kinds", *LOST]))
    keys = ("trials", "failed", "recovery_seconds_max")
    show("elastic", keys, [[str(result[key]) for key in keys]])
    return result


PARTS: dict[str, Callable[[bool], Any]] = {
    "mapping": mapping,
    "plans": plans,
    "shares": shares,
    "resharding": resharding,
    "overlap": overlap,
    "actors": actors,
    "elastic": elastic,
}


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(*head, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)


def _printed(command: list[str]) -> str:
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    """Run the measurements and print them."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=list(PARTS), help="parts")
    parser.add_argument("--quick", action="store_true", help="less of everything, about six minutes")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    figures = {}
    for part in arguments.only:
        figures[part] = PARTS[part](arguments.quick)
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
