"""Damage small checkpoints at random, many times: each load is refused, or gives exactly what was saved.

    python tests/campaigns/checkpoint_mutations.py --trials 20000 --seed 0

Prints JSON: trials, how many failed, trials by kind of damage, and the slowest in seconds. Exit code 1 if any
failed. tests/runtime/checkpoint/test_damage.py runs a short form.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.files.checkpoint_damage import Trials, folder_in_memory

from distgraph.runtime.execute.checkpoint import files

_ROUND = 500  # trials of one checkpoint, with pages of one size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds: Counter[str] = Counter()
    failures: list[str] = []
    slowest, slowest_kind = 0.0, ""
    for start in range(0, options.trials, _ROUND):
        files.PAGE = (16, 64, 1 << 22)[start // _ROUND % 3]  # type: ignore[misc]
        with folder_in_memory() as folder:
            trials = Trials(folder, options.seed * 1_000_003 + start)
            for number in range(start, min(start + _ROUND, options.trials)):
                begin = time.perf_counter()
                kind, problem = trials.trial()
                seconds = time.perf_counter() - begin
                kinds[kind] += 1
                if seconds > slowest:
                    slowest, slowest_kind = seconds, kind
                if problem is not None:
                    failures.append(f"trial {number}, {kind}: {problem}")
    print(
        json.dumps(
            {
                "campaign": "checkpoint_mutations",
                "trials": options.trials,
                "seed": options.seed,
                "failed": len(failures),
                "worst": {"seconds": round(slowest, 3), "kind": slowest_kind, "failures": failures[:10]},
                "kinds": dict(sorted(kinds.items())),
            },
            indent=1,
        )
    )
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
