"""Programs with annotations of every sort, for tests that take their plans and apply them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.models import GPT, GPTConfig, stages

P = dg.ProcessMesh.grid


class Classifier(nn.Module):
    """Logits over classes that `tp` splits: the loss is decomposed; dropout; an embedding used twice."""

    def __init__(
        self,
        first: Any = None,
        second: Any = None,
        tied: bool = False,
        again: bool = False,
        dtype: str = "f64",
    ) -> None:
        self.first, self.second, self.tied, self.again = first, second, tied, again
        self.words = nn.Embedding(12, 8, dtype=dtype)
        self.up, self.down = nn.Linear(8, 10, dtype=dtype), nn.Linear(10, 8, dtype=dtype)
        self.head = nn.Linear(8, 12, bias=False, dtype=dtype)
        self.dropout = nn.Dropout(0.1)
        if second is not None and "tp" in second.axes:
            dg.shard_tensor(self.up.weight, second, [None, "tp"])
            if not tied:
                dg.shard_tensor(self.head.weight, second, [None, "tp"])

    def forward(self, x: Any) -> Any:
        if self.first is not None:
            dg.shard_tensor(x, self.first, ["dp" if "dp" in self.first.axes else None, None])
        with dg.on(self.first):
            x = self.words(x)
        with dg.on(self.second):
            x = dg.recompute(self.block)(x) if self.again else self.block(x)
            return x @ self.words.weight.T if self.tied else self.head(x)

    def block(self, x: Any) -> Any:
        return self.down(self.dropout(ops.gelu(self.up(x)))) + x


ADAM = optim.Adam(lr=0.01)


@dataclass(frozen=True)
class Case:
    """A program with annotations, and the same one without.

    Attributes:
        make: annotated (True) or not -> model.
        strategy: of the annotated one.
        optimizer: of both.
        batch: samples in a batch.
    """

    make: Callable[[bool], Any]
    strategy: dg.Strategy
    optimizer: optim.Optimizer = ADAM
    batch: int = 8

    def engine(self, plan: Any = None, annotated: bool = False, **given: Any) -> dg.Engine:
        """With its annotations, or with a plan and without them."""
        return dg.Engine(
            self.make(plan is None or annotated), nn.CrossEntropy(), self.optimizer,
            strategy=self.strategy if plan is None else None, plan=plan, seed=3, **given,
        )  # fmt: skip

    def first(self) -> tuple[np.ndarray, ...]:
        """The first batch."""
        return tuple(array[: self.batch] for array in self.data())

    def data(self, count: int = 16) -> tuple[np.ndarray, np.ndarray]:
        """Token numbers and the classes to find."""
        rng = np.random.default_rng(1)
        x, y = rng.integers(0, 12, (2, count, 6), dtype="i4")
        return x, y


def classifier(*meshes: Any, **given: Any) -> Callable[[bool], Any]:
    return lambda annotated: Classifier(*(meshes if annotated else (None, None)), **given)


def gpt(annotated: bool, sequence_parallel: bool = False, dtype: str = "f64") -> Any:
    """Four blocks on two stages; with `sequence_parallel` its layouts are part of the program."""
    model = GPT(GPTConfig(hidden=8, layers=4, heads=2, vocabulary=12, sequence=6, dtype=dtype))
    if annotated or sequence_parallel:
        stages(model, [P(dp=2), P(2, dp=1, tp=2)], sequence_parallel=sequence_parallel)
    return model


def replace_spec(optimizer: optim.Optimizer) -> optim.Optimizer:
    """An optimiser without layouts of its own, for one rank."""
    return replace(optimizer, state_spec=None)


class Mirror(nn.Module):
    """The samples come in reverse order, twice; refined, ops between run on their ranks in that order."""

    def __init__(self) -> None:
        self.words = nn.Embedding(12, 8, dtype="f64")
        self.between, self.head = nn.Linear(8, 8, dtype="f64"), nn.Linear(8, 12, dtype="f64")

    def forward(self, x: Any) -> Any:
        x = ops.tanh(ops.flip(self.between(self.words(x)), 0))
        return self.head(ops.tanh(ops.flip(self.between(x), 0)))


DP2, TP2, DP2TP2 = P(dp=2), P(tp=2), P(dp=2, tp=2)
CASES = {
    "serial": Case(classifier(), dg.Strategy()),
    "dp": Case(classifier(), dg.Strategy(mesh=DP2, batch_axis="dp", micro_batches=2)),
    "tp": Case(classifier(TP2, TP2), dg.Strategy()),
    "dp x tp, refined": Case(classifier(DP2TP2, DP2TP2), dg.Strategy(refine="always", micro_batches=2)),
    "pipeline": Case(classifier(P(dp=1), P(1, dp=1)), dg.Strategy(micro_batches=4, schedule="gpipe")),
    "pipeline, tied": Case(classifier(P(dp=2), P(2, dp=1, tp=2), tied=True), dg.Strategy(micro_batches=2)),
    "recomputed": Case(classifier(TP2, TP2, again=True), dg.Strategy()),
    "states split": Case(
        classifier(),
        dg.Strategy(mesh=DP2, batch_axis="dp"),
        optim.AdamW(lr=0.01, state_spec=optim.shard_states(DP2, "dp")),
    ),
    "clipped": Case(
        classifier(P(dp=2), P(2, dp=2)), dg.Strategy(micro_batches=2), optim.Adam(lr=0.01, clip_norm=0.1)
    ),
    "mirrored": Case(lambda _: Mirror(), dg.Strategy(mesh=P(dp=4), batch_axis="dp", refine="always")),
    "gpt": Case(gpt, dg.Strategy(micro_batches=2)),
    "gpt, reshards": Case(lambda _: gpt(True, sequence_parallel=True), dg.Strategy(micro_batches=2)),
    "narrow": Case(classifier(DP2TP2, DP2TP2, dtype="f32"), dg.Strategy(micro_batches=2)),
}
