"""The program that the campaigns disturb: `python trained_program.py FOLDER RANKS`.

It trains with dropout and Adam, saves every few steps, validates after every epoch, and goes on with the
checkpoint in FOLDER where there is one. What it is at is written to FOLDER/phases, a word for each event.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import distgraph as dg
from distgraph import callbacks, nn, optim

EPOCHS, STEPS, EVERY = 3, 8, 3
"""Epochs, steps of each, and steps between two checkpoints, of which one is behind the last step."""


def data(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Random samples."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 24))
    return x.astype("f4"), np.tanh(x @ rng.normal(size=(24, 3))).astype("f4")


class Phases(callbacks.Callback):
    """Tells what training is at. Args: path of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tell(self, engine: dg.Engine, phase: str) -> None:
        """Append a word, on rank 0."""
        if engine.is_chief:
            with self.path.open("a") as file:
                file.write(f"{phase}\n")

    @contextmanager
    def of(self, engine: dg.Engine, phase: str) -> Iterator[None]:
        """Tell that a phase begins, and that it has ended."""
        self.tell(engine, phase)
        yield
        self.tell(engine, f"{phase} done")

    def on_batch_end(self, engine: dg.Engine, step: int, logs: dict[str, float]) -> None:
        """See `Callback`."""
        self.tell(engine, "step")


class Watched(dg.Engine):
    """An engine that tells when it saves and evaluates."""

    phases: Phases

    def save(self, path: Any, *, asynchronous: bool = False) -> None:
        """See `Engine`."""
        with self.phases.of(self, "save"):
            super().save(path, asynchronous=asynchronous)

    def evaluate(self, data: Any, batch_size: int | None = None) -> dict[str, float]:
        """See `Engine`."""
        with self.phases.of(self, "evaluate"):
            return super().evaluate(data, batch_size)


def train(folder: Path, ranks: int, checkpoint: Path | None = None) -> list[float]:
    """Train to the end, from a checkpoint (by default in the folder) if there is one; losses of all steps."""
    model = nn.Sequential(nn.Linear(24, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 3))
    strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=ranks), batch_axis="dp") if ranks > 1 else None
    engine = Watched(model, nn.MeanSquaredError(), optim.Adam(lr=1e-2), strategy=strategy, seed=5)
    engine.phases = Phases(folder / "phases")
    engine.phases.tell(engine, "start")
    checkpoint = checkpoint or folder / "checkpoint"
    if (checkpoint / "index.json").exists():
        engine.load(checkpoint)
    watchers = [engine.phases, callbacks.ModelCheckpoint(checkpoint, every_steps=EVERY)]
    valid = data(2, 32)
    engine.fit(data(1, STEPS * 16), EPOCHS, 16, valid, watchers, resume=True, progress=False)
    return list(engine.history.losses)


def main(arguments: Sequence[str]) -> None:
    """Command line."""
    train(Path(arguments[0]), int(arguments[1]))
    print("trained", os.getpid())


if __name__ == "__main__":
    main(sys.argv[1:])
