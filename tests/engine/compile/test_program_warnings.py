"""Warnings for training programs: losses that micro-batches change, meshes over which nothing is split,
random numbers that become constants, BLAS kernels other than the measured ones."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.ir.mesh import ProcessMesh
from distgraph.resources import Cluster, load_cluster
from distgraph.runtime.execute.blas_kernels import blas_kernels

BATCH = np.ones((4, 6), "f4"), np.zeros((4, 3), "f4")


def trained(mesh: ProcessMesh, batch_axis: str | None = None, *, annotated: bool = False) -> dg.Engine:
    model = nn.Linear(6, 3)
    if annotated:
        dg.shard_tensor(model.weight, mesh, ["tp", None])
    strategy = dg.Strategy(mesh=mesh, batch_axis=batch_axis)
    engine = dg.Engine(model, nn.MeanSquaredError(), optim.SGD(lr=0.1), strategy=strategy)
    engine.run(BATCH)
    return engine


def test_a_mesh_over_which_nothing_is_split() -> None:
    with pytest.warns(UserWarning, match=r"no tensor is split over mesh\(dp=2\), so that"):
        engine = trained(ProcessMesh.grid(dp=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.run(BATCH)
        engine.predict(BATCH[0])


@pytest.mark.parametrize(
    ("sizes", "batch_axis", "annotated"),
    [({"dp": 2}, "dp", False), ({"tp": 2}, None, True), ({"dp": 1}, None, False)],
)
def test_a_mesh_that_is_used(sizes: dict[str, int], batch_axis: str | None, annotated: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(ProcessMesh.grid(**sizes), batch_axis, annotated=annotated)


def trained_on(cluster: Cluster) -> None:
    engine = dg.Engine(nn.Linear(6, 3), nn.MeanSquaredError(), optim.SGD(lr=0.1), cluster=cluster)
    engine.run(BATCH)


def measured_with(blas: str) -> Cluster:
    """The local cluster as if it had been profiled with a BLAS library."""
    cluster = load_cluster("local")
    devices = [replace(device, compute=replace(device.compute, blas=blas)) for device in cluster.devices]
    return replace(cluster, devices=tuple(devices))


def test_a_cluster_measured_with_other_blas_kernels() -> None:
    with pytest.warns(UserWarning, match=r"computed by .*, but cluster local .*openblas 0.0 Another"):
        trained_on(measured_with("openblas 0.0 Another"))


@pytest.mark.parametrize("blas", ["", blas_kernels()], ids=["unknown", "the-same"])
def test_a_cluster_measured_with_these_blas_kernels(blas: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained_on(measured_with(blas))


def test_a_stage_over_which_nothing_is_split() -> None:
    first, second = ProcessMesh.grid(a=1), ProcessMesh.grid(1, a=2)

    class Model(nn.Module):
        def __init__(self) -> None:
            self.up, self.down = nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, x: Any) -> Any:
            with dg.on(first):
                x = self.up(x)
            with dg.on(second):
                return self.down(x)

    engine = dg.Engine(Model(), nn.MeanSquaredError(), optim.SGD(lr=0.1))
    with pytest.warns(UserWarning, match=r"no tensor is split over mesh\(a=2; 1..2\), so that each of its"):
        engine.run(BATCH)


class Divided(nn.Module):
    """Layers with boundaries before those that have a mesh; `first` places what comes before them."""

    def __init__(self, boundaries: dict[int, ProcessMesh], first: str = "", count: int = 3) -> None:
        self.layers = [nn.Linear(6, 6) for _ in range(count)]
        self.boundaries, self.first = boundaries, first
        if first == "parameter":
            dg.shard_tensor(self.layers[0].weight, ProcessMesh.grid(p=1), [None, None])

    def forward(self, x: Any) -> Any:
        if self.first == "input":
            x = dg.shard_tensor(x, ProcessMesh.grid(p=1), [None, None])
        for number, layer in enumerate(self.layers):
            if number in self.boundaries:
                x = dg.pipeline_boundary(x, self.boundaries[number])
            with dg.on(ProcessMesh.grid(p=1) if (self.first, number) == ("on", 0) else None):
                x = layer(x)
        return x


def divided(model: nn.Module, **strategy: Any) -> dg.Engine:
    settings = dg.Strategy(micro_batches=2, **strategy)
    return dg.Engine(model, nn.MeanSquaredError(), optim.SGD(lr=0.1), strategy=settings)


@pytest.mark.parametrize("strategy", [{}, {"mesh": ProcessMesh.grid(p=1)}])
def test_a_boundary_before_which_nothing_is_placed(strategy: dict[str, Any]) -> None:
    x = np.ones((4, 6), "f4")
    engine = divided(Divided({1: ProcessMesh.grid(1, p=1)}), **strategy)
    with pytest.warns(
        UserWarning, match=r"boundary \(test_program_warnings.py:\d+\) begins a stage"
    ) as caught:
        engine.prepare((x, x))
    assert len(caught) == 1
    assert "place what comes before it with dg.on(first_mesh)" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.run((x[:3], x[:3]))  # another program
        engine.predict(x)


LAST, FIRST = ProcessMesh.grid(1, p=1), ProcessMesh.grid(p=1)


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (Divided({1: LAST}, "on"), {}),
        (Divided({1: LAST}, "input"), {}),
        (Divided({1: LAST}, "parameter"), {}),
        (Divided({1: LAST}), {"mesh": FIRST, "batch_axis": "p"}),
        (Divided({0: FIRST, 1: LAST}), {}),
        (Divided({0: LAST, 2: FIRST}), {}),
        (Divided({1: FIRST, 2: LAST}), {}),
        (Divided({1: LAST, 2: FIRST}, "on"), {}),
    ],
)
def test_a_boundary_that_divides(model: nn.Module, strategy: dict[str, Any]) -> None:
    x = np.ones((4, 6), "f4")
    engine = divided(model, **strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.fit((x, x), batch_size=4, progress=False)
    assert len(engine.plan.build.ranks) == 2


def test_a_boundary_before_everything_places_the_program() -> None:
    x = np.ones((4, 6), "f4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        divided(Divided({0: FIRST})).prepare((x, x))


MEANS = {
    "square": lambda o, t: ((o - t) ** 2).mean(),
    "sum": lambda o, t: ((o - t) ** 2).sum() / o.shape[0],
    "two terms": lambda o, t: np.abs(o - t).sum(-1).mean() + 0.1 * (o * o).mean() + 1.0,
    "flat": lambda o, t: ((o.reshape(-1) - t.reshape(-1)) ** 2).mean(),
    "transposed": lambda o, t: ((o.T - t.T) ** 2).mean(),
    "einsum": lambda o, t: ops.einsum("bc,bc->", o - t, o - t) / o.shape[0],
    "cosine": lambda o, t: 1 - ((o * t).sum(-1) / np.sqrt((o * o).sum(-1) * (t * t).sum(-1) + 1)).mean(),
    "classes": lambda o, t: -(ops.log_softmax(o) * ops.softmax(t)).sum(-1).mean(),
    "hinge": lambda o, t: ops.relu(1 - o * np.sign(t)).mean(),
    "cast": lambda o, t: ((o - t) ** 2).mean().astype("f8").astype("f4"),
    "weights": lambda o, t: (((o - t) ** 2) * np.array([1, 2, 3], "f4")).mean(),
}
OTHERS = {
    "root": lambda o, t: np.sqrt(((o - t) ** 2).mean()),
    "largest": lambda o, t: np.abs(o - t).max(),
    "masked": lambda o, t: (((o - t) ** 2) * (t > 0)).sum() / ((t > 0).astype("f4").sum() + 1),
    "variance": lambda o, t: ((o - o.mean(0)) ** 2).mean(),
    "neighbours": lambda o, t: ((o[1:] - t[:-1]) ** 2).mean(),
    "pairs": lambda o, t: ops.softmax(o @ t.T, axis=-1).mean(),
    "square of a mean": lambda o, t: (o.mean() - t.mean()) ** 2,
}


def losses_of(loss: Any, caught: list[warnings.WarningMessage]) -> list[float]:
    """The loss of a step as a whole and in micro-batches."""
    rng = np.random.default_rng(0)
    batch, losses = (rng.normal(size=(12, 6)).astype("f4"), rng.normal(size=(12, 3)).astype("f4")), []
    for count in (1, 3):
        strategy = dg.Strategy(micro_batches=count)
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            engine = dg.Engine(nn.Linear(6, 3), loss, optim.SGD(lr=0.1), strategy=strategy)
            losses.append(engine.run(batch)["loss"])
        caught += raised
    return losses


@pytest.mark.parametrize("name", MEANS)
def test_a_loss_that_is_a_mean_may_be_cut(name: str) -> None:
    caught: list[warnings.WarningMessage] = []
    whole, cut = losses_of(MEANS[name], caught)
    assert cut == pytest.approx(whole, rel=1e-5)
    assert not caught


@pytest.mark.parametrize("name", OTHERS)
def test_a_loss_that_is_no_mean_is_named_in_micro_batches(name: str) -> None:
    caught: list[warnings.WarningMessage] = []
    whole, cut = losses_of(OTHERS[name], caught)
    assert cut != pytest.approx(whole, rel=1e-3)
    (warning,) = caught
    assert str(warning.message) == (
        "loss is not recognised as a mean over the samples but micro_batches is 3, whose losses are "
        "averaged; unless it is one after all, take the mean of a number for each sample, or use "
        "micro_batches=1"
    )


METRICS = {
    "accuracy": (lambda o, t: (o.argmax(-1) == t.argmax(-1)).astype("f4").mean(), ""),
    "error": (lambda o, t: np.abs(o - t).mean(), ""),
    "correct": (
        lambda o, t: (o.argmax(-1) == t.argmax(-1)).sum(),
        "metric correct is a sum over the samples",
    ),
    "largest": (
        lambda o, t: np.abs(o - t).max(),
        "metric largest is not recognised as a mean over the samples",
    ),
    "precision": (
        lambda o, t: ((o > 0) & (t > 0)).sum().astype("f4") / ((o > 0).sum() + 1).astype("f4"),
        "metric precision is not recognised as a mean over the samples",
    ),
}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_that_is_no_mean_is_named_in_micro_batches(name: str) -> None:
    metric, wanted = METRICS[name]
    engine = dg.Engine(
        nn.Linear(6, 3), nn.MeanSquaredError(), optim.SGD(lr=0.1), metrics={name: metric},
        strategy=dg.Strategy(micro_batches=2),
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.run(BATCH)
    cut = " but micro_batches is 2, whose values are averaged; "
    reasons = [str(warning.message).partition(cut)[0] for warning in caught]
    assert reasons == ([wanted] if wanted else [])


def test_a_loss_may_read_and_clear_what_the_model_has_stored() -> None:
    """The loss adds a mean that the model stored."""

    class Model(nn.Module):
        def __init__(self) -> None:
            self.layer, self.stored = nn.Linear(6, 3), list[Any]()

        def forward(self, x: Any) -> Any:
            h = self.layer(x)
            self.stored.append(ops.mean(h**2))
            return h

    model = Model()

    def loss(output: Any, target: Any) -> Any:
        total = ((output - target) ** 2).mean() + 0.1 * sum(model.stored)
        model.stored.clear()
        return total

    engine = dg.Engine(model, loss, optim.SGD(lr=0.1), strategy=dg.Strategy(micro_batches=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.run(BATCH)
    assert not model.stored


def test_a_sum_that_the_model_returns_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 3), lambda h: (h**2).sum())
    strategy = dg.Strategy(micro_batches=2)
    engine = dg.Engine(model, lambda output, target: output, optim.SGD(lr=0.1), strategy=strategy)
    with pytest.warns(UserWarning, match="loss is a sum over the samples but micro_batches is 2"):
        engine.run(BATCH)


def among_samples(h: Any) -> Any:
    """Each row against the other rows of the batch, as in a contrastive loss."""
    scores = h @ ops.transpose(h, (1, 0))
    return ops.mean(ops.cross_entropy(scores, np.arange(h.shape[0], dtype="i4")))


COUPLED = {
    "contrastive": (among_samples, "matmul"),
    "number of samples": (lambda h: (h**2).mean() ** 0.5 * len(h), "power"),
    "centred": (lambda h: ((h - h.mean(0)) ** 2).mean(), "subtract"),
    "square of a mean": (lambda h: h.mean() ** 2, "power"),
}


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("returned", [True, False])
def test_samples_that_the_model_combines_are_named_in_micro_batches(name: str, returned: bool) -> None:
    """Whether the model returns the loss, or a value that a loss of distgraph reads."""
    combine, kind = COUPLED[name]
    layer = nn.Linear(6, 3)
    model = nn.Sequential(layer, combine if returned else lambda h: h * combine(h))
    loss = None if returned else lambda output, target: ((output - target) ** 2).mean()
    engine = dg.Engine(model, loss, optim.SGD(lr=0.1), strategy=dg.Strategy(micro_batches=2))
    with pytest.warns(UserWarning, match="loss depends on") as caught:
        engine.run(BATCH if loss else BATCH[0])
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith(f"loss depends on {kind} (test_program_warnings.py:")
    assert message.endswith(
        " in the model, which is not recognised as computed from one sample alone, but micro_batches is 2, "
        "which divides the samples that it combines; unless it combines none, use micro_batches=1"
    )


class Normalised(nn.Module):
    """A model that returns its loss, with a batch norm and dropout."""

    def __init__(self) -> None:
        self.norm, self.drop, self.layer = nn.BatchNorm2d(6), nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x: Any, y: Any) -> Any:
        return ((self.layer(self.drop(self.norm(x))) - y) ** 2).mean()


def test_a_batch_norm_needs_no_warning() -> None:
    engine = dg.Engine(Normalised(), None, optim.SGD(lr=0.1), strategy=dg.Strategy(micro_batches=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.run(BATCH)


DRAWS: dict[str, Any] = {
    "np.random": lambda h: h + np.random.rand(3).astype("f4"),  # noqa: NPY002
    "the module random": lambda h: h * random.random(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_that_become_constants_are_named(name: str) -> None:
    model = nn.Sequential(nn.Linear(6, 3), DRAWS[name])
    engine = dg.Engine(model, nn.MeanSquaredError(), optim.SGD(lr=0.1))
    message = f"{name} drew numbers while the program was traced, .* use nn.Dropout, ops.random_uniform or"
    with pytest.warns(UserWarning, match=message):
        engine.run(BATCH)
    with pytest.warns(UserWarning, match=message):
        engine.predict(BATCH[0])

    def loss(output: Any, target: Any) -> Any:
        return nn.MeanSquaredError()(DRAWS[name](output), target)

    with pytest.warns(UserWarning, match=message):
        dg.Engine(nn.Linear(6, 3), loss, optim.SGD(lr=0.1)).run(BATCH)


def test_random_numbers_of_every_step_and_of_init_are_not() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            self.layer, self.dropout = nn.Linear(6, 3), nn.Dropout(0.5)
            self.shift = np.random.rand(3).astype("f4")  # noqa: NPY002

        def forward(self, x: Any) -> Any:
            h = self.dropout(self.layer(x)) + self.shift
            return h + ops.random_normal(h.shape) + np.random.default_rng(0).normal(size=3).astype("f4")

    engine = dg.Engine(Model(), nn.MeanSquaredError(), optim.Adam(lr=0.1))
    np.random.rand(2)  # noqa: NPY002
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.run(BATCH)
        engine.predict(BATCH[0])


def test_a_constant_that_nothing_reads_is_no_fault() -> None:
    """Numbers of samples that equal other constants are constants of one trace only."""
    engine = dg.Engine(
        nn.Linear(6, 3), lambda o, t: ((o - t) ** 2).sum() / o.shape[0] * 4.0, optim.SGD(lr=0.1),
        metrics={"half": lambda o, t: 0.5}, strategy=dg.Strategy(micro_batches=2),
    )  # fmt: skip
    batch = tuple(np.concatenate([each, each]) for each in BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.run(batch)["half"] == 0.5
