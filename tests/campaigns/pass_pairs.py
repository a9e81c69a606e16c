"""Campaign: every pass alone and every pair of passes on several ranks, against one rank at fp64 1e-10.

    python tests/campaigns/pass_pairs.py                  # all, on 8 in-process ranks: dp2 x tp2 x pp2
    mpiexec -n 4 python tests/campaigns/pass_pairs.py     # on 4 MPI ranks: dp2 x pp2; --split tp: tp2 x pp2
    python tests/campaigns/pass_pairs.py --only zero-3    # those with this pass
    python tests/campaigns/pass_pairs.py --trials 20 --seed 7

A pass here is what a strategy, or an annotation, switches on or off without changing the numbers. Passes of
one group exclude each other (levels of ZeRO, schedules). The last line of the output is JSON: campaign,
trials, failed, worst (the largest relative error of a loss or a parameter) and the failures.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.programs.equivalence import gathered

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.runtime.execute.process_group import is_chief
from distgraph.runtime.launch.mpi_rank import ranks_of_job

WIDTH, BLOCKS, BATCH, STEPS = 8, 4, 16, 2
NEAR = 1e-10
grid = dg.ProcessMesh.grid
MESHES = {
    "dp-tp": (grid(0, dp=2, tp=2), grid(4, dp=2, tp=2)),
    "dp": (grid(0, dp=2, tp=1), grid(2, dp=2, tp=1)),
    "tp": (grid(0, dp=1, tp=2), grid(2, dp=1, tp=2)),
}
"""Axes that split -> the meshes of the two stages."""


@dataclass(frozen=True)
class Choice:
    """A pass that is switched on (or, where it is on by default, off).

    Attributes:
        group: choices of one group exclude each other.
        strategy: fields of the strategy.
        stages: order in which blocks use the two meshes.
        recompute, tasks: annotations of every block.
    """

    group: str
    strategy: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = (0, 0, 1, 1)
    recompute: bool = False
    tasks: bool = False


CHOICES: Mapping[str, Choice] = {
    "zero-1": Choice("zero", {"zero": 1}),
    "zero-2": Choice("zero", {"zero": 2}),
    "zero-3": Choice("zero", {"zero": 3}),
    "gpipe": Choice("schedule", {"schedule": "gpipe"}),
    "eager-1f1b": Choice("schedule", {"schedule": "eager-1f1b"}),
    "zb-h1": Choice("schedule", {"schedule": "zb-h1"}),
    "interleaved-1f1b": Choice("schedule", {"schedule": "interleaved-1f1b"}, (0, 1, 0, 1)),
    "zb-v": Choice("schedule", {"schedule": "zb-v"}, (0, 1, 1, 0)),
    "actors": Choice("executor", {"executor": "actors"}),
    "layouts-searched": Choice("refine", {"refine": "always"}),
    "recompute": Choice("recompute", recompute=True),
    "tasks": Choice("tasks", tasks=True),
    "no-gradient-buckets": Choice("gradients", {"passes": ("-bucket_gradients",)}),
    "no-parameter-buckets": Choice("parameters", {"passes": ("-bucket_parameters",)}),
    "no-fused-reductions": Choice("reductions", {"passes": ("-fuse_reductions",)}),
}
"""Name of a pass -> what switches it; all of them keep the numbers of a step."""


class Block(nn.Module):
    """A norm and two products, split over tp as in Megatron-LM."""

    def __init__(self, mesh: dg.ProcessMesh | None) -> None:
        self.norm = nn.LayerNorm(WIDTH, dtype="f64")
        self.up, self.down = (
            nn.Linear(WIDTH, 2 * WIDTH, dtype="f64"),
            nn.Linear(2 * WIDTH, WIDTH, dtype="f64"),
        )
        dg.shard_tensor(self.up.weight, mesh, [None, "tp"])
        dg.shard_tensor(self.down.weight, mesh, ["tp", None])

    def forward(self, x: Any) -> Any:
        return x + self.down(ops.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks on two stages, with the annotations of the choices."""

    def __init__(self, choices: Sequence[Choice], split: str | None) -> None:
        order = next((c.stages for c in choices if c.group == "schedule"), (0, 0, 1, 1))
        self.meshes = [MESHES[split][stage] if split else None for stage in order]
        self.blocks = [Block(mesh) for mesh in self.meshes]
        self.recompute, self.tasks = (
            any(getattr(c, name) for c in choices) for name in ("recompute", "tasks")
        )

    def forward(self, x: Any) -> Any:
        x = dg.shard_tensor(x, self.meshes[0], ["dp", None])
        for n, (block, mesh) in enumerate(zip(self.blocks, self.meshes, strict=True)):
            call = dg.recompute(block) if self.recompute else block
            with dg.on(mesh), dg.task(f"block{n}") if self.tasks else nullcontext():
                x = call(x)
        return x


def strategy_of(choices: Sequence[Choice]) -> dg.Strategy:
    """The fields of all choices together."""
    fields: dict[str, Any] = {"micro_batches": 4}
    for choice in choices:
        for name, value in choice.strategy.items():
            fields[name] = (*fields.get(name, ()), *value) if name == "passes" else value
    return dg.Strategy(**fields)


def trained(names: Sequence[str], split: str | None) -> tuple[list[float], dict[str, Any]]:
    """Losses and parameters behind a few steps, on one rank where no axes split."""
    choices = [CHOICES[name] for name in names]
    rng = np.random.default_rng(5)
    data = [rng.normal(size=(BATCH, WIDTH)) for _ in range(2)]
    optimizer = optim.Adam(lr=1e-2, eps=1e-3, clip_norm=0.5)
    strategy = strategy_of(choices) if split else dg.Strategy(micro_batches=4)
    engine = dg.Engine(Net(choices, split), nn.MeanSquaredError(), optimizer, strategy=strategy, seed=3)
    with closing(engine):
        return [engine.run(data)["loss"] for _ in range(STEPS)], gathered(engine)


@cache
def serial() -> tuple[list[float], dict[str, Any]]:
    """What one rank gives."""
    return trained((), None)


def worst_error(names: Sequence[str], split: str) -> float:
    """Largest difference of a loss or a parameter from that of one rank, by its magnitude or 1."""
    losses, parameters = trained(names, split)
    expected_losses, expected = serial()
    assert set(parameters) == set(expected)
    errors = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, expected_losses, strict=True)]
    for name, value in expected.items():
        scale = np.maximum(1.0, np.abs(value))
        errors.append(float(np.max(np.abs(parameters[name] - value) / scale)))
    return max(errors)


def combinations_of_passes(split: str = "dp-tp") -> Iterator[tuple[str, ...]]:
    """Nothing, each pass, and each pair of different groups; ZeRO only where an axis splits the batch."""
    names = [name for name in CHOICES if "dp" in split or CHOICES[name].group != "zero"]
    yield ()
    yield from ((name,) for name in names)
    for pair in combinations(names, 2):
        if CHOICES[pair[0]].group != CHOICES[pair[1]].group:
            yield pair


def main(words: Sequence[str] | None = None) -> int:
    """Run the campaign; the exit code is 1 if a trial failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=CHOICES, help="combinations with this pass")
    parser.add_argument("--split", choices=MESHES, help="axes that split; dp under MPI, else dp-tp")
    parser.add_argument("--trials", type=int, help="as many combinations, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    split = arguments.split or ("dp" if ranks_of_job() > 1 else "dp-tp")
    trials = [names for names in combinations_of_passes(split) if arguments.only in (None, *names)]
    if arguments.trials is not None:
        trials = random.Random(arguments.seed).sample(trials, min(arguments.trials, len(trials)))
    failures, worst = [], 0.0
    for names in trials:
        try:
            error = worst_error(names, split)
        except Exception as failure:
            failures.append({"passes": names, "error": f"{type(failure).__name__}: {failure}"})
            traceback.print_exc(limit=4)
            if ranks_of_job() > 1:
                raise  # the other ranks may wait for this one
            continue
        worst = max(worst, error)
        if not error <= NEAR:
            failures.append({"passes": names, "error": error})
        if is_chief():
            print(" + ".join(names) or "none", f"{error:.1e}", flush=True)
    report = {"campaign": "pass_pairs", "trials": len(trials), "failed": len(failures), "worst": worst}
    if is_chief():
        print(json.dumps({**report, "failures": failures}))
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
