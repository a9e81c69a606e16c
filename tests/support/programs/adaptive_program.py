"""A program that adapts: `python adaptive_program.py FOLDER STEPS SLOW [KILL]` on two ranks.

Tasks of rank 1 take SLOW times as long as they need, because it sleeps after each. Under KILL, rank 1 kills
itself after that step in the first start that was adapted. Losses are written to FOLDER/losses by rank 0.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import distgraph as dg
from distgraph import callbacks, nn, optim
from distgraph.runtime.execute.worker import Worker

BATCH, INPUTS, HIDDEN = 48, 64, 192


class Kill(callbacks.Callback):
    """Rank 1 kills itself once, after a step of a start with another plan."""

    def __init__(self, step: int, folder: Path) -> None:
        self.step, self.mark = step, folder / "killed"

    def on_batch_end(self, engine: dg.Engine, step: int, logs: dict[str, float]) -> None:
        """See `Callback`."""
        if step == self.step and not self.mark.exists() and os.environ.get("PMI_RANK") == "1":
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def slow_down(rank: int, factor: float) -> None:
    """Have all tasks of a rank take `factor` times as long as they need."""
    compile_tasks = Worker._compile_tasks

    def slowed(task: Callable[[int], None]) -> Callable[[int], None]:
        def run(micro: int) -> None:
            start = time.thread_time()
            task(micro)
            time.sleep((factor - 1) * (time.thread_time() - start))

        return run

    def compile_slowed(worker: Worker, graphs: Any) -> Any:
        tasks = compile_tasks(worker, graphs)
        if worker.program.rank != rank:
            return tasks
        return {
            name: replace(task, body=slowed(task.body), last=slowed(task.last))
            for name, task in tasks.items()
        }

    Worker._compile_tasks = compile_slowed  # type: ignore[method-assign]


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Random samples."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(rows, INPUTS))
    return x, np.tanh(x @ rng.normal(size=(INPUTS, 3)))


def engine(ranks: int, cluster: Any = "local") -> dg.Engine:
    """A perceptron with data parallelism."""
    strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=ranks), batch_axis="dp") if ranks > 1 else None
    up, down = nn.Linear(INPUTS, HIDDEN, dtype="f64"), nn.Linear(HIDDEN, 3, dtype="f64")
    model = nn.Sequential(up, nn.ReLU(), nn.Dropout(0.2), down)
    loss, optimizer = nn.MeanSquaredError(), optim.Adam(lr=1e-3)
    return dg.Engine(model, loss, optimizer, strategy=strategy, cluster=cluster, seed=5)


def train(folder: Path | None, steps: int, kill: int = 0) -> dg.History:
    """Train for two epochs, whose last batches are shorter."""
    trained = engine(2 if folder is not None else 1)
    watchers: list[callbacks.Callback] = []
    if folder is not None:
        watchers = [callbacks.Adapt(0.5, 4, 3, gain=0.02, restarts=1, cooldown=4, path=folder / "plan.json")]
        if kill:
            watchers.append(Kill(kill, folder))
    rows = BATCH * (steps // 2) - BATCH // 2
    trained.fit(data(rows), 2, BATCH, callbacks=watchers, progress=False)
    if folder is not None and trained.is_chief:
        (folder / "losses").write_text(json.dumps(trained.history.losses))
    return trained.history


def main(arguments: list[str]) -> None:
    """Command line."""
    folder, steps, factor, *rest = arguments
    slow_down(1, float(factor))
    train(Path(folder), int(steps), int(rest[0]) if rest else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
