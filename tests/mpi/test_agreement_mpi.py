"""Ranks that give different arguments to a call of the engine: every rank raises, and all can go on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine import Engine
from distgraph.errors import DistGraphError, GraphError, RuntimeFault
from distgraph.ir.mesh import ProcessMesh
from distgraph.models.gpt import GPT, GPTConfig
from distgraph.runtime.launch.mpi_rank import current_transport
from distgraph.runtime.transport.mpi import MpiTransport

pytestmark = pytest.mark.mpi
X = np.random.default_rng(0).normal(size=(40, 6)).astype("f4")
Y = np.arange(40, dtype="i4") % 3


@pytest.fixture
def transport() -> MpiTransport:
    transport = current_transport()
    assert transport is not None
    transport.barrier()
    return transport


def trained(rows: int = 40, *, lr: float = 0.1, seed: int = 0, loss: Any = None, **fit: Any) -> Engine:
    strategy = dg.Strategy(mesh=ProcessMesh.grid(dp=2), batch_axis="dp")
    model, loss = nn.Linear(6, 3), loss or nn.CrossEntropy()
    engine = dg.Engine(model, loss, optim.SGD(lr=lr), seed=seed, strategy=strategy)
    engine.fit((X[:rows], Y[:rows]), **{"batch_size": 10, "progress": False, **fit})
    return engine


def started(last: int) -> Engine:
    """Training from values that were assigned to a parameter."""
    model = nn.Linear(6, 3)
    model.weight.assign(np.full((6, 3), 0.5 + last, "f4"))
    strategy = dg.Strategy(mesh=ProcessMesh.grid(dp=2), batch_axis="dp")
    engine = dg.Engine(model, nn.CrossEntropy(), optim.SGD(lr=0.1), strategy=strategy)
    engine.fit((X, Y), batch_size=10, progress=False)
    return engine


def stepped(last: int, learned: int = 1) -> Any:
    """A step of a function, from a state."""

    @dg.parallelize(method="data_parallel", devices=2)
    def step(state: Any, batch: Any) -> Any:
        loss, g = dg.value_and_grad(lambda w: ops.mean((batch @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * g, "n": state["n"] + 1}, {"loss": loss}

    return step({"w": np.full((6, 3), 0.5 + last * learned, "f4"), "n": np.int64(last)}, X)


def continued(last: int, prompt: int = 0, **options: Any) -> Any:
    """Tokens behind a prompt."""
    model = GPT(GPTConfig(hidden=8, layers=1, heads=2, vocabulary=7, sequence=6))
    strategy = dg.Strategy(mesh=ProcessMesh.grid(dp=2), batch_axis="dp")
    engine = dg.Engine(model, nn.CrossEntropy(), optim.SGD(lr=0.1), strategy=strategy)
    return engine.generate([[1, 2 + last * prompt]], 2, temperature=1.0, **options)


def halved(output: Any, target: Any) -> Any:
    return nn.CrossEntropy()(output, target) * 0.5


CASES: dict[str, tuple[Callable[[int], Any], str]] = {
    "seeds": (lambda last: trained(seed=last), r"engine.fit\(\): seed is 0 on rank 0 but 1 on rank \d"),
    "learning rates": (lambda last: trained(lr=0.1 + last), "lr is 0.1 on rank 0 but 1.1 on rank"),
    "samples": (lambda last: trained(40 - 10 * last), "samples is 40 on rank 0 but 30 on rank"),
    "batch sizes": (lambda last: trained(batch_size=10 + 10 * last), "batch size is 10 on rank 0 but 20"),
    "orders": (lambda last: trained(shuffle=bool(last)), "shuffle is False on rank 0 but True on rank"),
    "losses": (
        lambda last: trained(loss=halved if last else None),
        r"the first run of the program to train: program is \d+ ops .* but \d+ ops",
    ),
    "samples to predict": (
        lambda last: trained().predict(X[: 10 + 10 * last]),
        r"engine.predict\(\): samples is 10 on rank 0 but 20 on rank",
    ),
    "samples to evaluate": (
        lambda last: trained().evaluate((X[: 10 + 10 * last], Y[: 10 + 10 * last])),
        r"engine.evaluate\(\): samples is 10 on rank 0 but 20",
    ),
    "initial values": (started, "checksum of the initial values of weight is .* on rank 0 but .* on rank"),
    "initial state": (stepped, "checksum of the initial values of w is .* on rank 0 but .* on rank"),
    "initial state that is not learned": (
        lambda last: stepped(last, 0),
        "checksum of the initial values of n is .* on rank 0 but",
    ),
    "assigned values": (
        lambda last: trained().assign({"bias": np.full(3, float(last))}),
        r"engine.assign\(\): checksum of the values of bias is",
    ),
    "assigned tensors": (
        lambda last: trained().assign({"bias": np.zeros(3)} if last else {}),
        r"checksum of the values of bias is absent on rank 0 but",
    ),
    "prompts": (
        lambda last: continued(last, 1),
        r"engine.generate\(\): checksum of the tokens of prompt 0 is .* on rank 0 but",
    ),
    "seeds of generation": (lambda last: continued(0, seed=last), "seed is 0 on rank 0 but 1 on rank"),
    "places of a checkpoint": (lambda last: trained().save(f"place-{last}"), "path is place-0 on rank 0 but"),
}


@pytest.mark.parametrize("case", CASES)
def test_different_arguments_are_refused_on_every_rank(case: str, transport: MpiTransport) -> None:
    wrong, message = CASES[case]
    with pytest.raises(RuntimeFault, match=f"{message}.*; give every rank the same"):
        wrong(int(transport.rank == transport.size - 1))
    assert len(trained().history.losses) == 4


class Noisy:
    """A data set whose samples have noise, of a generator or by their index alone."""

    def __init__(self, random: np.random.Generator | None, clean: int = 0) -> None:
        self.random, self.clean = random, clean

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: Any) -> tuple[np.ndarray, int]:
        self.clean -= 1
        random = self.random if self.random and self.clean < 0 else np.random.default_rng((0, int(index)))
        return X[index] + random.normal(size=6).astype("f4"), Y[index]


def split_by_columns(size: int, verify: int | None = None) -> Engine:
    """A product whose columns are split, so that all ranks read all samples."""
    mesh, model = ProcessMesh.grid(tp=size), nn.Linear(6, 12)
    dg.shard_tensor(model.weight, mesh, [None, "tp"])
    strategy = dg.Strategy(mesh=mesh, verify_replicas=verify)
    return dg.Engine(model, nn.CrossEntropy(), optim.SGD(lr=0.1), strategy=strategy)


def test_samples_that_differ_between_ranks_are_refused(transport: MpiTransport) -> None:
    """In the first batch of every program; a data set that depends on the index alone can be trained on."""
    random = np.random.default_rng(transport.rank)
    engine = split_by_columns(transport.size)
    ranks = ", ".join(map(str, range(min(4, transport.size)))) + ", ..." * (transport.size > 4)
    message = (
        rf"the first run of the program to train: ranks {ranks} read samples 0 to 9 of the batch, but field "
        r"batch.0 has other values on ranks? .* than on rank 0; let __getitem__ of Noisy depend on the index"
    )
    with pytest.raises(RuntimeFault, match=message):
        engine.fit(Noisy(random), batch_size=10, progress=False)
    engine.fit(Noisy(None), batch_size=10, progress=False)
    assert len(engine.history.losses) == 4
    with pytest.raises(RuntimeFault, match="the first run of the program to evaluate: ranks"):
        engine.evaluate(Noisy(random), 10)
    with pytest.raises(RuntimeFault, match=r"to predict: .* than on rank 0; give every rank the same arrays"):
        engine.predict(X + transport.rank)
    trained_by_rows = dg.Strategy(mesh=ProcessMesh.grid(dp=transport.size), batch_axis="dp")
    engine = dg.Engine(nn.Linear(6, 3), nn.CrossEntropy(), optim.SGD(lr=0.1), strategy=trained_by_rows)
    engine.fit(Noisy(random), batch_size=4 * transport.size, drop_last=True, progress=False)


def test_verified_steps_compare_samples(transport: MpiTransport) -> None:
    engine = split_by_columns(transport.size, verify=2)
    data = Noisy(np.random.default_rng(transport.rank), clean=15)  # the first batch, and more
    with pytest.raises(
        RuntimeFault, match=r"step 2 read a batch that differs between ranks: ranks 0, .*Noisy"
    ):
        engine.fit(data, batch_size=10, progress=False)
    with pytest.raises(RuntimeFault, match="parameters and states are damaged: step 2 read a batch"):
        engine.run((X[:10], Y[:10]))


def test_different_checkpoints_are_not_loaded(transport: MpiTransport, tmp_path: Path) -> None:
    folder = Path(transport.broadcast_object(tmp_path, 0))
    engine = trained()
    engine.save(folder / "four")
    engine.run((X[:10], Y[:10]))
    engine.save(folder / "five")
    with pytest.raises(RuntimeFault, match=r"checkpoint is step 4 of run .* on rank 0 but step 5 of run"):
        engine.load(folder / ("five" if transport.rank == transport.size - 1 else "four"))
    assert engine.step == 5
    engine.run((X[:10], Y[:10]))  # it stays as it was


def test_a_program_that_some_ranks_cannot_compile_fails_on_all(transport: MpiTransport) -> None:
    """A schedule refuses the program of its ranks; the other ranks hear of it, and the next program runs."""
    if transport.size < 3:
        pytest.skip("all ranks of two take part in the program")
    meshes = ProcessMesh([0], ["dp"]), ProcessMesh([1], ["dp"])

    class Back(nn.Module):
        def __init__(self) -> None:
            self.parts = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)]

        def forward(self, x: Any) -> Any:
            x = self.parts[0](dg.shard_tensor(x, meshes[0], ["dp", None]))
            x = self.parts[1](dg.reshard(x, meshes[1], ["dp", None]))
            return self.parts[2](dg.reshard(x, meshes[0], ["dp", None]))

    strategy = dg.Strategy(schedule="zb-h1", micro_batches=2)
    engine = dg.Engine(Back(), nn.CrossEntropy(), optim.SGD(lr=0.1), strategy=strategy)
    error: type[DistGraphError] = GraphError if transport.rank < 2 else RuntimeFault
    with pytest.raises(error, match="schedule zb-h1: a micro-batch comes back to stage 0"):
        engine.run((X[:10], Y[:10]))
    assert len(trained().history.losses) == 4


def test_ranks_that_training_does_not_use_are_named(transport: MpiTransport) -> None:
    """By the process that prints; where the program uses all ranks there is no warning."""
    count, text = transport.size, "MPI job has"
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        trained()
    texts = [str(each.message) for each in raised if text in str(each.message)]
    idle = ", ".join(str(rank) for rank in range(2, min(count, 6))) + (", ..." if count > 6 else "")
    expected = (
        f"MPI job has {count} ranks but training uses 2 of them, without rank {idle}; start fewer ranks, or "
        f"train on a mesh of {count}"
    )
    assert texts == ([expected] if transport.rank == 0 and count > 2 else [])
