"""Plans of a small GPT in many layouts, and its serial losses: what the tests of exports share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from support.programs.equivalence import gathered

import distgraph as dg
from distgraph.engine import Engine
from distgraph.ir.mesh import ProcessMesh
from distgraph.models import GPT, GPTConfig, Layout, stages
from distgraph.optim import Adam, shard_states
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import Strategy

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 16, 2, 2, 24, 8
ROWS, STEPS, RATE, SEED = 8, 6, 1e-2, 3
CONFIG = GPTConfig(hidden=WIDTH, layers=LAYERS, heads=HEADS, vocabulary=VOCABULARY, sequence=LENGTH)

grid = ProcessMesh.grid


@dataclass(frozen=True)
class Case:
    """A layout of the GPT.

    Attributes:
        meshes: one a stage.
        states: axis over which the optimiser's states are split; None for as the parameters.
        whole: every parameter is split over `dp` by its first dim (ZeRO-3), nothing over `tp`.
    """

    meshes: tuple[ProcessMesh, ...]
    micro: int = 1
    schedule: str = "1f1b"
    states: str | None = None
    zero3: bool = False
    sequence: bool = False
    recompute: bool = False


CASES: dict[str, Case] = {
    "dp": Case((grid(dp=2),)),
    "dp_micro": Case((grid(dp=2),), micro=2),
    "tp": Case((grid(tp=2),)),
    "sequence": Case((grid(tp=2),), sequence=True),
    "zero1": Case((grid(dp=2),), states="dp"),
    "zero3": Case((grid(dp=2),), zero3=True),
    "recompute": Case((grid(dp=2),), recompute=True),
    "pp": Case((grid(0, one=1), grid(1, one=1)), micro=2),
    "gpipe": Case((grid(0, one=1), grid(1, one=1)), micro=4, schedule="gpipe"),
    "dp_tp": Case((grid(dp=2, tp=2),)),
    "dp_tp_zero1_sequence": Case((grid(dp=2, tp=2),), states="dp", sequence=True, recompute=True),
    "dp_pp": Case((grid(0, dp=2), grid(2, dp=2)), micro=2),
}


def engine_of(case: Case | None) -> Engine:
    """An engine for the GPT in a layout, or serial."""
    model = GPT(CONFIG)
    optimizer, strategy = Adam(lr=RATE), Strategy()
    if case is not None:
        spec = shard_states(case.meshes[0], case.states) if case.states else None
        optimizer = Adam(lr=RATE, state_spec=spec)
        strategy = Strategy(micro_batches=case.micro, schedule=case.schedule)
        if case.zero3:
            _split_all(model, case.meshes[0])
        else:
            stages(model, case.meshes, sequence_parallel=case.sequence, recompute=case.recompute)
    return Engine(model, model.loss, optimizer, strategy=strategy, seed=SEED)


def _split_all(model: GPT, mesh: ProcessMesh) -> None:
    """The batch and every parameter over `dp`."""
    layout = Layout(mesh=mesh)
    model.layout = model.end = layout
    for _, module in model.named_modules():
        if hasattr(type(module), "layout"):
            module.layout = layout
    for parameter in model.parameters():
        dg.shard_tensor(parameter, mesh, ["dp"] + [None] * (parameter.ndim - 1))


@cache
def plan_of(name: str) -> Plan:
    """The plan of a case, taken from the program that its annotations compile to, through a plan's file."""
    plan: Plan = engine_of(CASES[name]).prepare(batches()[0]).portable
    return Plan.parse(plan.text())


@cache
def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """A batch a step; there is something to learn in them."""
    rng = np.random.default_rng(SEED)
    made = []
    for _ in range(STEPS):
        ids = rng.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
        made.append((ids, (7 * ids + 11) % VOCABULARY))
    return made


@cache
def serial() -> tuple[Mapping[str, np.ndarray], list[float]]:
    """Parameters at the start, and the loss of every step on one rank."""
    engine = engine_of(None)
    try:
        engine.prepare(batches()[0])
        records = engine.memory.records
        start = {n: a for n, a in gathered(engine).items() if records[n].kind == "param"}
        return start, [engine.run(batch)["loss"] for batch in batches()]
    finally:
        engine.close()


def write_inputs(folder: Path, names: Sequence[str], framework: str) -> None:
    """Weights, batches, and the exported module of every case, for programs that run elsewhere."""
    start, _ = serial()
    np.savez(folder / "start.npz", **start)
    np.savez(
        folder / "batches.npz", x=np.stack([x for x, _ in batches()]), y=np.stack([y for _, y in batches()])
    )
    for name in names:
        plan_of(name).export(framework).save(folder / f"plan_{name}.py")


def run(script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """A program of this folder in a process of its own."""
    path = Path(__file__).parent / script
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, str(path), *arguments], env=settings, stderr=subprocess.PIPE, text=True
    )


def finish(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Wait for programs; the test fails with what the first broken one said."""
    for process in processes:
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors[-3000:]
