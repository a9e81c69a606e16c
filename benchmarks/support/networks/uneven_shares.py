"""Data parallelism with the shares of a searched plan against equal shares, on machines of unequal speed.

    python -m benchmarks.support.networks.uneven_shares [--json FILE] [--quick] [--only MODEL]
                                                        [--minutes M] [--profile S]

Machines are network namespaces of this computer (`benchmarks.support.machines`; needs root) with one rank
each, links of 400 Mbit/s, and 0.9 and 0.45, or 0.9, 0.45 and 0.225 cores; the first has a core of its own,
the others share one. The network is first measured by `distgraph profile`, which knows nothing of the models.
The search, for one stage in one micro-batch, decides how many samples every rank gets. The other program is
the same plan without weights of its mesh, so that all ranks get as many samples. Both run in one job in which
they take turns, as in `benchmarks/support/measured_plans.py`.

Keys of the result, `shares`, for each network and model: `weights` of the searched plan, `even_over_uneven`
(ratio of medians of one turn, median over turns) with the `interval` that holds 95 % of such medians when
turns are drawn again, and the same ratio by forecast. Where the search takes equal shares, `weights` is
empty and nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import distgraph as dg
from benchmarks.support.machines import machines
from benchmarks.support.measured_plans import (
    MODELS,
    forecast_on,
    in_device_order,
    measured,
    median,
    ratios,
    show,
)
from benchmarks.support.networks.searched_plans import BATCH, Setting, profiled, run_on
from distgraph.engine.commands.plan_search import SearchOptions, search
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.search_space import pools_of
from distgraph.plan.constraints import SearchConstraints
from distgraph.plan.plan import Plan
from distgraph.resources import Cluster

SETTINGS = (Setting(400, (0.9, 0.45), ranks=1), Setting(400, (0.9, 0.45, 0.225), ranks=1))
MINUTES, PROFILE_SECONDS, SEARCH_SECONDS = 1.0, 80.0, 30.0
ONE_STAGE = SearchConstraints(stages=1, micro_batches=1, zero=0)


def with_equal_shares(plan: Plan) -> Plan:
    """The same plan with meshes without weights."""
    stages = (replace(stage, mesh=dg.ProcessMesh(stage.mesh.ranks, stage.mesh.axes)) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


def run(setting: Setting, names: Sequence[str], minutes: float, profile: float) -> list[dict[str, Any]]:
    """Profile a network, compare the shares for each model."""
    ranks = len(setting.cores)
    rows = []
    with (
        tempfile.TemporaryDirectory() as temporary,
        machines(ranks, f"{setting.mbit}mbit", setting.cores, own_cores=True) as network,
    ):
        folder = Path(temporary)

        def start(arguments: Sequence[str], variables: dict[str, str]) -> None:
            run_on(network, ranks, [sys.executable, *arguments], 60 * minutes + 300, variables)

        cluster, _ = profiled(setting, network, folder, profile)
        for name in names:
            plans = plans_of(name, cluster)
            row: dict[str, Any] = {"network": setting.name, "model": name, "weights": weights_of(plans[0])}
            if row["weights"]:
                (folder / name).mkdir()
                for number, plan in enumerate(plans):
                    plan.save(folder / name / f"{number:03}.json")
                job = [name, str(BATCH[name]), str(folder / name), str(60 * minutes), str(cluster.source)]
                row |= compared(name, cluster, plans, measured(start, job))
            rows.append(row)
            print(row, flush=True)
    return rows


def plans_of(name: str, cluster: Cluster) -> tuple[Plan, Plan]:
    """The searched plan and that with equal shares."""
    request = replace(MODELS[name], batch=BATCH[name]).compile_request()
    options = SearchOptions(seconds=SEARCH_SECONDS, constraints=ONE_STAGE)
    plan = in_device_order(search(request, cluster, options), cluster)
    return plan, with_equal_shares(plan)


def weights_of(plan: Plan) -> dict[str, list[int]]:
    """The weights of the only stage."""
    (stage,) = plan.stages
    return {axis: list(weights) for axis, weights in stage.mesh.weights.items()}


def compared(
    name: str, cluster: Cluster, plans: Sequence[Plan], rounds: tuple[dict[str, Any], dict[str, Any]]
) -> dict[str, Any]:
    """Seconds of both plans, measured and forecast."""
    request = replace(MODELS[name], batch=BATCH[name]).compile_request()
    layout_costs = LayoutCosts(request, cluster, pools_of(cluster))
    uneven, even = (forecast_on(plan, layout_costs) for plan in plans)
    _, counted = rounds
    ratio, interval = ratios(counted["001"], counted["000"])
    titles = {"000": "searched shares", "001": "equal shares"}
    show(name, {"searched shares": uneven, "equal shares": even}, {titles[n]: counted[n] for n in titles})
    return {
        "even_over_uneven": ratio,
        "interval": interval,
        "forecast_ratio": even / uneven,
        "measured": [median(counted[number]) for number in ("000", "001")],
        "forecast": [uneven, even],
        "turns": len(counted["000"]),
    }


def run_all(
    quick: bool,
    names: Sequence[str] = tuple(MODELS),
    minutes: float | None = None,
    profile: float | None = None,
) -> list[dict[str, Any]]:
    """Rows of all networks.

    Args:
        quick: the first network and model alone.
        names: models.
        minutes: for each model; None for 1, or 0.4 if quick.
        profile: seconds of a profile; None for 80, or 50 if quick.
    """
    settings, names = (SETTINGS[:1], names[:1]) if quick else (SETTINGS, names)
    minutes = minutes or (0.4 if quick else MINUTES)
    profile = profile or (50.0 if quick else PROFILE_SECONDS)
    return [row for setting in settings for row in run(setting, names, minutes, profile)]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--quick", action="store_true", help="one network, one model")
    parser.add_argument("--only", choices=list(MODELS), help="this model alone")
    parser.add_argument("--minutes", type=float, help=f"for each model; by default {MINUTES:g}")
    parser.add_argument("--profile", type=float, help=f"seconds of a profile; by default {PROFILE_SECONDS:g}")
    given = parser.parse_args()
    names = [given.only] if given.only else list(MODELS)
    result = {"shares": run_all(given.quick, names, given.minutes, given.profile)}
    print(json.dumps(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
