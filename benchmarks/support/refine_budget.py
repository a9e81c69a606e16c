"""CPU seconds of `refine="always"` over seeded programs, and what its budget costs in bytes.

    python benchmarks/support/refine_budget.py [--seeds FIRST LAST] [--budget WORK] [--without SECONDS]
                                               [--json FILE]

The programs are those of `tests/support/programs/seeded_programs.py`: training graphs of 30 to 80 ops on
2 x 2 x 2 ranks, each laid out in a new process, so that no cache holds results of the program before. Printed
are the CPU seconds of completing and searching under all policies of competing annotations, the
work counted against the budget, the bytes that all ranks send in a step, and the modelled cost of the layouts
(bytes and latency).

With `--without` every program is searched once more without a budget, for at most as many CPU seconds; the
ratios of cost and bytes are of the programs whose search ends in that time.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.programs.seeded_programs import CUBE, seeded_program

from distgraph.ir.graph import Graph
from distgraph.ir.step_phases import multiplicity
from distgraph.passes import choose_completion
from distgraph.passes.layout_local_search import BUDGET, Refined, _Refiner, refined
from distgraph.passes.lower import lower
from distgraph.passes.partition import partition
from distgraph.passes.redistribution.planner import Price, latency_price
from distgraph.passes.reshard import reshard
from distgraph.passes.split_tasks import phases


def searched(seed: int, budget: float, limit: int | None = None) -> dict[str, Any]:
    """Figures of one program, in a process whose CPU seconds are limited."""
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    graph = seeded_program(seed)
    works: list[float] = []

    def counted(completed: Graph, price: Price, share: float) -> Refined:
        found = refined(completed, price, share)
        works.append(found.work)
        return found

    start = time.process_time()
    with patch.object(choose_completion, "refined", counted):
        best = choose_completion.choose_completion(graph, CUBE, price=latency_price, budget=budget)
    seconds = time.process_time() - start
    parts = phases(lower(reshard(best)))
    return {
        "seed": seed,
        "ops": len(graph.ops),
        "seconds": seconds,
        "work": sum(works),
        "searches": len(works),
        "cost": sum(_Refiner(best, multiplicity(best), latency_price).costs),
        "bytes": sum(partition(parts, rank).bytes_sent() for rank in CUBE.members),
    }


def alone(seed: int, budget: float, limit: int | None = None) -> dict[str, Any] | None:
    """`searched` in a new process; None when that does not end within its limit."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        try:
            return pool.submit(searched, seed, budget, limit).result()
        except BrokenProcessPool:
            return None


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs=2, default=(1000, 1280), metavar=("FIRST", "LAST"))
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="WORK")
    parser.add_argument("--without", type=int, metavar="SECONDS", help="also search without a budget")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    results = []
    for seed in range(*arguments.seeds):
        result = alone(seed, arguments.budget)
        assert result is not None, f"seed {seed} ended its process"
        if arguments.without:
            result["without"] = alone(seed, math.inf, arguments.without)
        results.append(result)
        print(json.dumps(result), flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    seconds = np.array([each["seconds"] for each in results])
    quantiles = np.quantile(seconds, (0.5, 0.9, 0.99, 1.0))
    print(f"{len(results)} programs; CPU s median, 90 %, 99 %, most:", *(f"{q:.1f}" for q in quantiles))
    ended = [each for each in results if each.get("without")]
    for name in ("cost", "bytes") if ended else ():
        ratios = [each[name] / each["without"][name] for each in ended if each["without"][name]]
        print(
            f"{name} with the budget / without, {len(ratios)} searches that ended: "
            f"geometric mean {math.exp(np.mean(np.log(ratios))):.4f}, most {max(ratios):.3f}, "
            f"equal {sum(abs(r - 1) < 1e-9 for r in ratios)}"
        )


if __name__ == "__main__":
    main()
