"""Damage files that distgraph reads at random, many times: each is refused by name, or read for what it says.

    nice python tests/campaigns/mutations.py --trials 50000 --seed 0

Prints JSON: trials, how many failed and why, how they ended by kind of file, and the slowest in CPU seconds.
Every trial has 20 seconds and the process 4 GiB. Exit code 1 if any failed. tests/campaigns/test_mutations.py
runs a short form.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from file_mutations import Sample, document_of, mutated, original, samples

from distgraph.errors import DistGraphError

SECONDS = 20
BYTES = 4 << 30


class TooLong(BaseException):
    """A trial has used up its time."""


def _ring(*_: object) -> None:
    raise TooLong


def trial(sample: Sample, data: bytes, folder: Path) -> tuple[str, str]:
    """How a reader takes a file: "refused", "read", or what is wrong, and the details."""
    path = folder / sample.file
    path.write_bytes(data)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        found = sample.read(path)
    except DistGraphError as error:
        named = path.name.partition(".")[0] in str(error)
        return ("refused", "") if named and len(str(error)) < 20_000 else ("unnamed", str(error)[:300])
    except TooLong:
        return "too long", f"more than {SECONDS} s"
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what the campaign looks for
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        return "raw", f"{type(error).__name__} at {place}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return _compared(sample, data, found, folder)


def _compared(sample: Sample, data: bytes, found: Any, folder: Path) -> tuple[str, str]:
    """Whether what was read says what the file says, where that is another thing than the sample says."""
    if not sample.structured or "*" in sample.loose:
        return "read", ""
    before, after = original(sample), document_of(sample, data.decode())
    if before == after or sample.meaning(_with_loose(sample, before, after)) == sample.meaning(after):
        return "read", ""
    different = [key for key in _differences(before, after) if key not in sample.loose]
    if different and _read_whole(sample) == found:
        return "silent", f"nothing says that {different[:3]} changed"
    return "read", ""


def _with_loose(sample: Sample, before: Any, after: Any) -> Any:
    """The first document with the loose keys of the second."""
    if isinstance(before, dict) and isinstance(after, dict):
        return {
            name: after[name]
            if name in sample.loose and name in after
            else _with_loose(sample, value, after.get(name))
            for name, value in before.items()
        }
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [_with_loose(sample, a, b) for a, b in zip(before, after, strict=True)]
    return before


@cache
def _read_whole(sample: Sample) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / sample.file
        path.write_text(sample.text)
        return sample.read(path)


def _differences(before: Any, after: Any, key: str = "") -> list[str]:
    """The innermost keys at which two documents differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            found
            for name in {**before, **after}
            if name not in before or name not in after or before[name] != after[name]
            for found in (
                _differences(before[name], after[name], name) if name in before and name in after else [name]
            )
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = zip(before, after, strict=True)
        return [found for a, b in pairs if a != b for found in _differences(a, b, key)]
    if (
        isinstance(before, str)
        and isinstance(after, str)
        and "".join(before.split()) == "".join(after.split())
    ):
        return []  # spaces between words
    return [key]


def run(trials: int, seed: int) -> dict[str, Any]:
    """The report of so many trials."""
    signal.signal(signal.SIGALRM, _ring)
    ends: dict[str, Counter[str]] = {}
    failures: Counter[str] = Counter()
    examples: dict[str, str] = {}
    worst: tuple[float, str] = (0.0, "")
    every = samples()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(trials):
            random_ = random.Random(seed * 1_000_003 + number)
            sample = every[number % len(every)]
            data = mutated(sample, random_)
            begin = time.process_time()
            end, why = trial(sample, data, Path(folder))
            worst = max(worst, (round(time.process_time() - begin, 3), f"{sample.name}, trial {number}"))
            ends.setdefault(sample.name, Counter())[end] += 1
            if end not in ("refused", "read"):
                failures[f"{sample.name}: {end}: {why}"] += 1
                examples.setdefault(f"{sample.name}: {end}: {why}", f"trial {number}")
    return {
        "campaign": "mutations",
        "trials": trials,
        "seed": seed,
        "failed": sum(failures.values()),
        "worst": {"cpu_seconds": worst[0], "trial": worst[1]},
        "failures": [f"{count} x {what} ({examples[what]})" for what, count in failures.most_common(40)],
        "ends": {name: dict(sorted(found.items())) for name, found in sorted(ends.items())},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    found = run(options.trials, options.seed)
    print(json.dumps(found, indent=1))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
