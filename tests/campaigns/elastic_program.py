"""The program that elastic.py disturbs: `python elastic_program.py FOLDER RANKS [AXES]`.

It knows nothing of checkpoints that there are: it makes an engine and trains. The end of each step, with its
time, is written to FOLDER/steps by rank 0, the losses to FOLDER/losses.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import distgraph as dg
from distgraph import callbacks, nn, optim
from distgraph.runtime.launch.mpi_rank import ranks_of_job

EPOCHS, STEPS, EVERY = 3, 8, 5
"""Epochs, steps of each, and steps between two checkpoints."""
RANKS, PAUSE = 4, 0.03
"""Ranks that the job starts with, and seconds that a step takes at least."""
PAUSE_OF_FEWER = float(os.environ.get("ELASTIC_PAUSE", PAUSE))
"""Seconds of a step on fewer ranks, at least."""


def data(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Random samples."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 24))
    return x, np.tanh(x @ rng.normal(size=(24, 3)))


class Steps(callbacks.Callback):
    """Writes the number and the time of every step. Args: path of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_batch_end(self, engine: dg.Engine, step: int, logs: dict[str, float]) -> None:
        """See `Callback`."""
        time.sleep(PAUSE if ranks_of_job() == RANKS else PAUSE_OF_FEWER)
        if engine.is_chief:
            with self.path.open("a") as file:
                file.write(f"{step} {time.time()}\n")


def train(folder: Path | None, axes: dict[str, int]) -> dg.History:
    """Train to the end."""
    mesh = dg.ProcessMesh.grid(**axes)
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp") if mesh.size > 1 else None
    up, down = nn.Linear(24, 32, dtype="f64"), nn.Linear(32, 3, dtype="f64")
    if "tp" in axes:
        dg.shard_tensor(up.weight, axes=[None, "tp"])
    model = nn.Sequential(up, nn.ReLU(), nn.Dropout(0.2), down)
    engine = dg.Engine(model, nn.MeanSquaredError(), optim.Adam(lr=1e-2), strategy=strategy, seed=5)
    watchers: list[callbacks.Callback] = []
    if folder is not None:
        saver = callbacks.ModelCheckpoint(folder / "checkpoint", every_steps=EVERY, asynchronous=True)
        watchers = [Steps(folder / "steps"), saver]
    engine.fit(data(1, STEPS * 16), EPOCHS, 16, data(2, 32), watchers, progress=False)
    if folder is not None and engine.is_chief:
        content = json.dumps([engine.history.losses, engine.history.epochs])
        (folder / "losses").write_text(content)
    return engine.history


def main(arguments: Sequence[str]) -> None:
    """Command line."""
    sizes = (word.split(":") for word in arguments[1:])
    train(Path(arguments[0]), {name: int(size) for name, size in sizes})


if __name__ == "__main__":
    main(sys.argv[1:])
