"""Small decoders whose sequence is split over ranks, and training them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

import distgraph as dg
from distgraph.models import GPT, GPTConfig, Llama, LlamaConfig, Stack, stages

WORDS, BATCH, STEPS = 42, 8, 3
GRID = dg.ProcessMesh.grid
LAYOUTS: dict[str, tuple[tuple[dg.ProcessMesh, ...], dict[str, Any]]] = {
    "dp2 sp2": ((GRID(dp=2, sp=2),), {}),
    "sp4": ((GRID(sp=4),), {}),
    "dp2 sp3": ((GRID(dp=2, sp=3),), {}),
    "sp2 tp2": ((GRID(sp=2, tp=2),), {}),
    "sp2 tp2, sequence parallel, recomputed": (
        (GRID(sp=2, tp=2),),
        {"sequence_parallel": True, "recompute": True},
    ),
    "pp2 sp2": ((GRID(0, sp=2), GRID(2, sp=2)), {}),
    "pp2, sp2 then sp3": ((GRID(0, sp=2), GRID(2, sp=3)), {}),
    "dp2 sp2 tp2": ((GRID(dp=2, sp=2, tp=2),), {}),
}
"""Name -> a mesh a stage, options of `stages`."""


def model(kind: str, length: int, dtype: str = "f64") -> Stack:
    """A GPT, or a Llama with half as many key heads as heads."""
    shape = {
        "hidden": 16,
        "heads": 4,
        "vocabulary": WORDS,
        "sequence": length,
        "dropout": 0.1,
        "dtype": dtype,
    }
    if kind == "gpt":
        return GPT(GPTConfig(layers=2, packed=True, **shape))
    return Llama(LlamaConfig(layers=2, inner=24, key_heads=2, **shape))


def laid_out(kind: str, length: int, layout: str, context_parallel: str, dtype: str = "f64") -> Stack:
    """The same in one of `LAYOUTS`."""
    meshes, options = LAYOUTS[layout]
    made = model(kind, length, dtype)
    stages(made, meshes, context_parallel=context_parallel, **options)
    return made


def batch(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and those that follow."""
    text = np.random.default_rng(5).integers(0, WORDS, (BATCH, length + 1)).astype("i4")
    return text[:, :-1], text[:, 1:]


def engine(made: Stack, **options: Any) -> dg.Engine:
    """To train a model; `options` are those of the strategy."""
    strategy = dg.Strategy(refine="never", **options)
    return dg.Engine(made, made.loss, dg.optim.AdamW(lr=1e-2), strategy=strategy, seed=3)


def losses(made: Stack, length: int, **options: Any) -> list[float]:
    """Of a few steps."""
    trained = engine(made, **options)
    try:
        return [trained.run(batch(length))["loss"] for _ in range(STEPS)]
    finally:
        trained.close()


@cache
def serial_losses(kind: str, length: int) -> list[float]:
    """What one rank gives."""
    return losses(model(kind, length), length)
