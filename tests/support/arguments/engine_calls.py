"""Public calls of engines, strategies, plans and callbacks, with arguments that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from support.arguments.layer_calls import X, Y, gpt
from support.arguments.public_call import PublicCall

import distgraph as dg
from distgraph import callbacks, nn, optim

STRATEGY: dict[str, Any] = {
    "mode": "semi", "micro_batches": 2, "schedule": None, "stages": None, "borders": None, "layers": None,
    "recompute": None, "zero": None, "uniform": False, "memory": None, "devices": None, "seconds": None,
    "runtime": None, "mesh": None, "batch_axis": None, "refine": "conflicts", "refine_budget": None,
    "device": None, "cuda_graphs": False, "nonfinite": "raise", "verify_replicas": None, "passes": (),
    "precision": None, "gradient_precision": None, "executor": "static",
}  # fmt: skip
SEARCHED: dict[str, Any] = {
    "micro_batches": 2, "schedule": None, "stages": None, "borders": None, "layers": 2, "recompute": None,
    "zero": 1, "uniform": False, "memory": "8GiB", "devices": 2, "seconds": 3.0, "runtime": "torch",
}  # fmt: skip


def engine(**arguments: Any) -> dg.Engine:
    """An engine that has not trained."""
    return dg.Engine(nn.Linear(6, 3), nn.CrossEntropy(), optim.SGD(lr=0.1), **arguments)


def _fit(trained: dg.Engine, **arguments: Any) -> dg.Engine:
    trained.fit((X, Y), batch_size=10, progress=False, **arguments)
    return trained


def engine_calls(folder: Path) -> dict[str, PublicCall]:
    """All calls by name."""
    trained = _fit(engine())
    trained.save(folder / "saved")
    tokens = np.arange(64, dtype="i4").reshape(8, 8) % 16
    decoder = dg.Engine(gpt(), nn.CrossEntropy(), optim.SGD(lr=0.1))
    decoder.fit((tokens, tokens), batch_size=4, progress=False)
    new = {
        "fit": {"train": (X, Y), "epochs": 1, "batch_size": 10, "valid_data": (X, Y), "callbacks": ()}
        | {"shuffle": True, "drop_last": False, "resume": False, "progress": False},
        "prepare": {"batch": (X, Y)},
        "run": {"batch": (X[:10], Y[:10])},
    }
    ready = {
        "evaluate": {"data": (X, Y), "batch_size": 5},
        "predict": {"x": X, "batch_size": 5},
        "save": {"path": folder / "again", "asynchronous": False},
        "load": {"path": folder / "saved", "states": True},
        "assign": {"arrays": {"weight": np.zeros((6, 3), "f4")}},
        "dataloader": {"data": (X, Y), "batch_size": 5, "shuffle": True, "drop_last": False, "epoch": 1},
        "forecast": {"cluster": "local", "runtime": None, "html": None, "trace": None, "measured": None},
    }
    parts = {"model": nn.Linear(6, 3), "loss": nn.CrossEntropy(), "optimizer": optim.SGD(), "metrics": ()}
    sampled = {"prompts": tokens[:2, :4], "max_new_tokens": 2, "temperature": 1.0, "top_k": 2, "top_p": 0.9}
    calls = {
        "Engine": PublicCall(
            dg.Engine, dg.Engine, {**parts, "strategy": None, "cluster": None, "seed": 0, "plan": None}
        ),
        "Engine.generate": PublicCall(
            decoder.generate,
            dg.Engine.generate,
            {**sampled, "end_token": 1, "length": 8, "keep": 2, "seed": 0},
        ),
        "Strategy": PublicCall(
            lambda **given: _fit(engine(strategy=dg.Strategy(**given))), dg.Strategy, STRATEGY
        ),
        "Strategy of a search": PublicCall(
            lambda **given: dg.Strategy(mode="auto", **given), dg.Strategy, SEARCHED
        ),
    }
    for name, arguments in ready.items():
        calls[f"Engine.{name}"] = PublicCall(getattr(trained, name), getattr(dg.Engine, name), arguments)
    for name, arguments in new.items():
        calls[f"Engine.{name}"] = PublicCall(
            lambda name=name, **given: getattr(engine(), name)(**given), getattr(dg.Engine, name), arguments
        )
    return calls | plan_calls(trained, folder)


def plan_calls(trained: dg.Engine, folder: Path) -> dict[str, PublicCall]:
    """Calls of a plan and of its view."""
    trained.plan.save(folder / "plan.json")
    plan, view = dg.Plan.load(folder / "plan.json"), trained.plan
    calls = {
        "Plan.load": PublicCall(dg.Plan.load, dg.Plan.load, {"path": folder / "plan.json"}),
        "Plan.parse": PublicCall(dg.Plan.parse, dg.Plan.parse, {"text": plan.text()}),
        "Plan.stage_of": PublicCall(plan.stage_of, dg.Plan.stage_of, {"layer": 0}),
        "Plan.compare": PublicCall(plan.compare, dg.Plan.compare, {"other": plan}),
    }
    for owner in (plan, view):
        kind = type(owner)
        for name, arguments in (
            ("save", {"path": folder / "other.json"}),
            ("explain", {"name": "weight"}),
            ("export", {"framework": "torch"}),
        ):
            calls[f"{kind.__name__}.{name}"] = PublicCall(
                getattr(owner, name), getattr(kind, name), arguments
            )
    return calls


def callback_calls(folder: Path) -> dict[str, PublicCall]:
    """All calls by name."""
    every = {"every": 1, "every_steps": None, "best": None, "mode": "min", "keep": 2, "asynchronous": False}
    adapt = {"margin": 0.25, "every": 100, "steps": 5, "seconds": 30.0, "gain": 0.05, "restarts": 3}
    arguments: dict[Any, dict[str, Any]] = {
        callbacks.ModelCheckpoint: {"path": folder / "{epoch}", **every},
        callbacks.EarlyStopping: {"monitor": "loss", "patience": 3, "min_delta": 0.0, "mode": "min"},
        callbacks.CSVLogger: {"path": folder / "x.csv", "append": False},
        callbacks.Timeline: {"path": folder / "t.json", "after": 1, "steps": 1},
        callbacks.Adapt: {**adapt, "cooldown": None, "path": folder / "adapted.json"},
    }
    logged = {"directory": folder / "board"}
    return {"callbacks.TensorBoard": PublicCall(callbacks.TensorBoard, callbacks.TensorBoard, logged)} | {
        f"callbacks.{kind.__name__}": PublicCall(
            lambda kind=kind, **given: _fit(engine(cluster="local"), callbacks=[kind(**given)]), kind, each
        )
        for kind, each in arguments.items()
    }
