"""How much time a step loses to late stages, messages and ranks, under both executors of the order of tasks.

    python benchmarks/machines.py [--quick] [--json FILE]

Compared, in one MPI job and in turns: a training step under `Strategy(executor="actors")` and under "static",
for pipelines of four stages (a row under 1F1B and eager 1F1B) and for branches (three stages read one and are
summed on it), 8 micro-batches. Stages pause for 1.5 ms forward and 3 ms backward besides a small layer.

* `even`: nothing is late.
* `slow stage`: the tasks of one stage, drawn for each step, take up to 9 ms longer, drawn for each task.
* `late messages`: data arrive up to 13.5 ms after they were sent; decisions and signals are not delayed.
* `stopped rank`: one rank does nothing for 200 ms in one micro-batch.

Both executors get the same delays, and must give the same losses bit for bit. A ratio is the median over
pairs of (seconds under actors) / (seconds under static), with the 95 % interval of the median; below 1 actors
are faster. `actors.no_jitter_ratio` is the largest of `even`, `actors.straggler_ratio` the mean over the
other scenarios and programs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, median

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4


def main() -> None:
    """Run the measurement and print it."""
    from benchmarks.safety import interval

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="8 pairs instead of 30")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    command = [
        "mpiexec",
        "-n",
        str(RANKS),
        sys.executable,
        "-m",
        "mpi4py",
        "-m",
        "benchmarks.support.actor_runs",
    ]
    done = subprocess.run(
        [*command, "8" if arguments.quick else "30"], check=False, cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    table = Table("program", "scenario", "static, ms", "actors / static", "95 %")
    figures = []
    for row in rows:
        ratio, low, high = interval(row["ratios"])
        milliseconds = median(row["static"]) * 1e3
        table.add_row(
            row["program"], row["scenario"], f"{milliseconds:.1f}", f"{ratio:.3f}", f"{low:.3f} - {high:.3f}"
        )
        figures.append(
            {**{k: row[k] for k in ("program", "scenario")}, "ratio": ratio, "low": low, "high": high}
        )
    Console().print(table)
    even = max(figure["ratio"] for figure in figures if figure["scenario"] == "even")
    late = mean(figure["ratio"] for figure in figures if figure["scenario"] != "even")
    print(f"no_jitter_ratio {even:.3f}, straggler_ratio {late:.3f}")
    if arguments.json:
        actors = {"no_jitter_ratio": even, "straggler_ratio": late, "rows": figures}
        arguments.json.write_text(json.dumps({"actors": actors}, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
