"""Searched plans against all uniform plans on networks of limited speed and on machines of unequal speed.

    python -m benchmarks.support.networks.searched_plans [--json FILE] [--quick] [--network N]
                                                         [--only MODEL] [--minutes M] [--profile S]

Machines are network namespaces of this computer (`benchmarks.support.machines`; needs root), each bound to
a core of which it may use 0.9 or less, so that the programs of the system have the rest: two machines of two
ranks whose links have 100, 400 and 1,000 Mbit/s; then, at 400 Mbit/s, machines of 0.9 and 0.45 cores with two
ranks and with one rank each, and of 0.9, 0.45 and 0.225 cores with one, of which the last two share a core.
Two ranks of a machine share its core, so that one of them computes faster while the other waits; a rank alone
has what the profile measured. Each network is first measured by `distgraph profile`, which knows nothing of
the models. Then, for a GPT, a conv net and a mixture of experts, the search (mode auto) makes a plan for the
profiled cluster, and all plans run in one job in which they take turns, as in `benchmarks/real_plans.py`.

Uniform plans are equal pipeline stages, dp x tp on each, with and without ZeRO, in 1, 2, 4, 8 and 12
micro-batches. On machines of unequal speed they are those for as many devices of one kind, since equal shares
are what makes a plan uniform. All plans run as rank i on device i, and all are forecast on the profiled
cluster.

Keys of the result, `plans`, for each network and model: `searched_over_best_uniform` (ratio of medians of one
turn, median over turns) with the `interval` that holds 95 % of such medians when turns are drawn again, the
same ratio by forecast, and `forecast_error`, the mean of |forecast / measured - 1| over all plans that ran.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.support.machines import Network, machines
from benchmarks.support.measured_plans import MODELS, ROOT, THREADS, Place, compared
from distgraph.resources import Cluster, load_cluster

MINUTES, PROFILE_SECONDS = 2.5, 110.0
MICRO_BATCHES = (1, 2, 4, 8, 12)
BATCH = {"gpt": 24, "conv": 96, "moe": 48}
"""Samples, which 2, 3, 4 and 6 devices can share equally."""
MACHINE = """  - name: {name}
    devices:
      count: {ranks}
      type: cpu
      model: {model}
      memory: 1 GiB
      memory_bandwidth: 5 GB/s
      measured: {{f32: 0.02 TFLOP/s, f64: 0.01 TFLOP/s}}
    inside: {{topology: full, kind: shared_memory, bandwidth: 5 GB/s, latency: 1 us}}
    nics:
      count: 1
      kind: ethernet
      bandwidth: {mbit} Mbit/s
      latency: 20 us
      attach: {{kind: memory, bandwidth: 5 GB/s, latency: 1 us}}
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """Machines of equally many ranks: Mbit/s of the link of each machine, and cores of each."""

    mbit: int
    cores: tuple[float, ...]
    ranks: int = 2

    @property
    def name(self) -> str:
        cores = " and ".join(f"{share:g}" for share in self.cores)
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"{len(self.cores)} machines of {ranks}, {cores} cores, {self.mbit} Mbit/s"

    @property
    def is_even(self) -> bool:
        return len(set(self.cores)) == 1

    def description(self) -> str:
        """A resource file, whose numbers the profile replaces; machines of one speed are of one kind."""
        text = "name: network\nlaunch: 1 us\nmachines:\n"
        for number, share in enumerate(self.cores):
            model = f"rank of {self.ranks} on {share:g} cores"
            text += MACHINE.format(name=f"m{number}", ranks=self.ranks, model=model, mbit=self.mbit)
        return text + "network: {topology: switch, kind: ethernet}\n"


SETTINGS = (
    Setting(100, (0.9, 0.9)),
    Setting(400, (0.9, 0.9)),
    Setting(1000, (0.9, 0.9)),
    Setting(400, (0.9, 0.45)),
    Setting(400, (0.9, 0.45, 0.225), ranks=1),
    Setting(400, (0.9, 0.45), ranks=1),
)


def run(
    setting: Setting, names: Sequence[str], minutes: float, profile: float, most: int | None
) -> list[dict[str, Any]]:
    """Profile a network, compare the plans of each model."""
    count, ranks = len(setting.cores), len(setting.cores) * setting.ranks
    rows = []
    with (
        tempfile.TemporaryDirectory() as temporary,
        machines(count, f"{setting.mbit}mbit", setting.cores, own_cores=True) as network,
    ):
        folder = Path(temporary)

        def start(arguments: Sequence[str], variables: dict[str, str]) -> None:
            run_on(network, ranks, [sys.executable, *arguments], 60 * minutes + 300, variables)

        cluster, equal = profiled(setting, network, folder, profile)
        for name in names:
            place = Place(cluster, start, equal)
            options: dict[str, Any] = {"batch": BATCH[name], "micro_batches": MICRO_BATCHES}
            row = compared(name, place, 60 * minutes, folder / name, most=most, **options)
            rows.append({"network": setting.name, "searched_over_best_uniform": row.pop("ratio"), **row})
    return rows


def profiled(
    setting: Setting, network: Network, folder: Path, seconds: float
) -> tuple[Cluster, Cluster | None]:
    """The cluster that `distgraph profile` writes; where machines are unequal, also one whose devices are all
    as those of the first machine."""
    source, output, equal = (folder / f"{name}.yaml" for name in ("network", "profiled", "equal"))
    source.write_text(setting.description())
    command = [sys.executable, "-m", "distgraph", "profile", "--cluster", str(source), "-o", str(output)]
    ranks = len(setting.cores) * setting.ranks
    run_on(network, ranks, [*command, "--seconds", str(seconds)], seconds + 300)
    if setting.is_even:
        return load_cluster(output), None
    document = yaml.safe_load(output.read_text())
    for machine in document["machines"]:
        machine["devices"] = document["machines"][0]["devices"]
    equal.write_text(yaml.safe_dump(document, sort_keys=False))
    return load_cluster(output), load_cluster(equal)


def run_on(
    network: Network, ranks: int, command: list[str], timeout: float, variables: dict[str, str] | None = None
) -> None:
    """Run a command on all ranks of the machines; its output is shown if it fails."""
    try:
        network.run(ranks, command, timeout, **{**THREADS, "PYTHONPATH": str(ROOT), **(variables or {})})
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(command)} ended with {error.returncode}:\n{error.stdout}{error.stderr}")


def run_all(
    quick: bool,
    settings: Sequence[Setting] = SETTINGS,
    names: Sequence[str] = tuple(MODELS),
    minutes: float | None = None,
    profile: float | None = None,
    output: Path | None = None,
) -> list[dict[str, Any]]:
    """Rows of all networks.

    Args:
        quick: the first network and model alone, with two uniform plans.
        settings, names: networks and models.
        minutes: for each model; None for 2.5, or 0.8 if quick.
        profile: seconds of a profile; None for 110, or 50 if quick.
        output: a file for the rows so far.
    """
    if quick:
        settings, names = settings[:1], names[:1]
    minutes = minutes or (0.8 if quick else MINUTES)
    profile = profile or (50.0 if quick else PROFILE_SECONDS)
    rows: list[dict[str, Any]] = []
    for setting in settings:
        rows += run(setting, names, minutes, profile, 2 if quick else None)
        if output:
            output.write_text(json.dumps({"plans": rows}, indent=1))
    return rows


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--quick", action="store_true", help="one network, one model, two uniform plans")
    parser.add_argument("--network", type=int, choices=range(len(SETTINGS)), help="this network alone")
    parser.add_argument("--only", choices=list(MODELS), help="this model alone")
    parser.add_argument("--minutes", type=float, help=f"for each model; by default {MINUTES:g}")
    parser.add_argument("--profile", type=float, help=f"seconds of a profile; by default {PROFILE_SECONDS:g}")
    given = parser.parse_args()
    settings = SETTINGS if given.network is None else SETTINGS[given.network :][:1]
    names = [given.only] if given.only else list(MODELS)
    rows = run_all(given.quick, settings, names, given.minutes, given.profile, given.json)
    print(json.dumps({"plans": rows}))


if __name__ == "__main__":
    main()
