"""Small programs, and clusters so slow that these gain from being distributed: for tests of the search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from support.files.clusters import cluster_of
from support.programs.forecasts import document

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine.commands.inspection import check_step
from distgraph.engine.commands.plan_search import SearchOptions, search
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.data import Batch, whole
from distgraph.engine.search_driver.run_search import run_search
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.models import GPT, GPTConfig
from distgraph.nn.moe import MoE
from distgraph.plan.plan import Plan
from distgraph.resources import Cluster

SECONDS = 3600.0
"""More than any search of these takes, however busy the machine."""


def slow(
    *sizes: int, memory: str = "1 GiB", flops: str = "10 GFLOP/s", cable: str = "1 GB/s"
) -> dict[str, Any]:
    """Machines of so many devices, whose matmuls take longer than starting them and sending their results."""
    found = document(
        *sizes, launch="100 ns", latency="20 ns", bandwidth="10 GB/s", cable=cable, memory=memory
    )
    for machine in found["machines"]:
        device = machine["devices"]
        device["peak"] = {"f32": flops, "f64": flops}
        device["compute"]["launch"] = "50 ns"
        device["compute"]["matmul"] = {
            dtype: {"efficiency": 0.5, "half": [0, 0, 0]} for dtype in ("f32", "f64")
        }
    return found


def mixed(speed: float, *sizes: int) -> dict[str, Any]:
    """Two machines, the second one's devices `speed` times as fast, with a quarter of the memory."""
    found = slow(*sizes)
    rate = f"{speed * 10} GFLOP/s"
    found["machines"][1]["devices"] |= {
        "model": "H",
        "memory": "256 MiB",
        "peak": {"f32": rate, "f64": rate},
    }
    return found


class Net(nn.Module):
    """Three linear layers, the first one annotated where there is a mesh."""

    def __init__(self, mesh: Any = None, dims: Any = (None, "tp")) -> None:
        self.first = nn.Linear(24, 32, dtype="f64")
        self.second, self.last = nn.Linear(32, 40, dtype="f64"), nn.Linear(40, 6, dtype="f64")
        dg.shard_tensor(self.first.weight, mesh, dims)

    def forward(self, x: Any) -> Any:
        return self.last(ops.relu(self.second(ops.relu(self.first(x)))))


class Chain(nn.Module):
    """Four equal linear layers, and one to the classes."""

    def __init__(self) -> None:
        self.layers = [nn.Linear(24, 24, bias=False, dtype="f64") for _ in range(4)]
        self.last = nn.Linear(24, 6, dtype="f64")

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = ops.relu(layer(x))
        return self.last(x)


class Experts(nn.Module):
    """A mixture of experts between two linear layers."""

    def __init__(self) -> None:
        self.first, self.last = nn.Linear(6, 8, dtype="f64"), nn.Linear(8, 6, dtype="f64")
        self.experts = MoE(8, 12, 4, dtype="f64")

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        return self.last(x + self.experts(x))


class Images(nn.Module):
    """A convolution, a pool, a linear layer."""

    def __init__(self) -> None:
        self.conv, self.pool = nn.Conv2d(2, 4, 3, padding=1, dtype="f64"), nn.MaxPool2d(2)
        self.last = nn.Linear(4 * 3 * 3, 6, dtype="f64")

    def forward(self, x: Any) -> Any:
        return self.last(nn.Flatten()(self.pool(ops.relu(self.conv(x)))))


def gpt() -> GPT:
    """Two blocks."""
    return GPT(GPTConfig(hidden=16, layers=2, heads=2, vocabulary=12, sequence=6, dtype="f64"))


def _rows(shape: tuple[int, ...]) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.normal(size=shape)


@dataclass(frozen=True)
class Program:
    """A model without layouts, and its data.

    Attributes:
        make: the model.
        sample: shape of a sample of floats; of tokens where `tokens`.
        target: shape of the classes to find.
    """

    make: Callable[[], Any]
    sample: tuple[int, ...]
    target: tuple[int, ...] = ()
    tokens: bool = False
    batch: int = 4

    def data(self, batches: int = 2) -> tuple[np.ndarray, np.ndarray]:
        """Samples and classes."""
        rng, count = np.random.default_rng(5), batches * self.batch
        x = (
            rng.integers(0, 12, (count, *self.sample))
            if self.tokens
            else rng.normal(size=(count, *self.sample))
        )
        y = rng.integers(0, 6, (count, *self.target), dtype="i4")
        return x.astype("i4" if self.tokens else "f8"), y

    def engine(self, model: Any = None, **given: Any) -> dg.Engine:
        """An engine of its own for the model."""
        model = self.make() if model is None else model
        return dg.Engine(model, nn.CrossEntropy(), optim.Adam(lr=0.01), seed=3, **given)

    def first(self) -> Batch:
        """The first batch."""
        return whole(self.data(1))

    def compile_request(self, model: Any = None, strategy: dg.Strategy | None = None) -> CompileRequest:
        """What is searched."""
        return self.engine(model, strategy=strategy)._session.compile_request("train", self.first())

    def search(self, cluster: Cluster, mode: str = "auto", model: Any = None, **options: Any) -> Plan:
        """The plan that is found, which passes `distgraph check`: every value of a step as on one rank.

        In one process by default: the plan is the same (`test_worker_pool`), and nothing is forked."""
        model = self.make() if model is None else model
        given = SearchOptions(mode=mode, **{"seconds": SECONDS, "processes": 1, **options})
        plan = search(self.compile_request(model), cluster, given)
        engine = self.engine(model, plan=plan)
        request = engine._session.compile_request("train", self.first())
        report = check_step(request, engine._session.memory, self.first(), engine._scalars())
        assert report.ok, str(report)
        assert report.ranks == len(plan.ranks)
        return plan


PROGRAMS = {
    "mlp": Program(Net, (24,)),
    "gpt": Program(gpt, (6,), (6,), tokens=True, batch=2),
    "experts": Program(Experts, (5, 6), (5,), batch=2),
    "conv": Program(Images, (2, 6, 6)),
}
CHAIN = Program(Chain, (24,), batch=8)


def two_by_two(**changes: str) -> Cluster:
    """Two machines of two devices."""
    return cluster_of(slow(2, 2, **changes))


@cache
def finished_search(program: Program) -> SearchState:
    """The search of everything for a program on two machines of two devices, run to its end.

    Tests of several files read it; none changes it.
    """
    state = SearchState(program.compile_request(), two_by_two(), "auto", SECONDS)
    for _ in run_search(state):
        pass
    return state
