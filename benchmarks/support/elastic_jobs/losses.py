"""Losses of ranks in elastic jobs: `python -m benchmarks.support.elastic_jobs.losses [--quick]`.

Prints one JSON object with the key `elastic`: trials, failed, and the longest time from a loss to the end of
the next step. The trials are those of `tests/campaigns/elastic.py`, which checks the losses against a serial
run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))

from campaigns.elastic import campaign

KEYS = ("trials", "failed", "recovery_seconds_max")


def measure(quick: bool, seed: int = 0) -> dict[str, object]:
    """Trials, failures and the longest recovery of 50 trials, or of 3."""
    result = campaign(3 if quick else 50, seed)
    return {key: result[key] for key in KEYS}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(json.dumps({"elastic": measure(given.quick, given.seed)}))


if __name__ == "__main__":
    main()
