"""Training with products by distributed algorithms: as serial training, and from a plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, optim
from distgraph.errors import ShardingError


class TwoLayers(nn.Module):
    """Two linear layers; on a mesh the first in dataflow OS and the second in LS."""

    def __init__(
        self, mesh: dg.ProcessMesh | None, algorithm: str = "meshslice", ring: str | None = None
    ) -> None:
        self.mesh, self.algorithm, self.slices = mesh, algorithm, 2 if algorithm == "meshslice" else 1
        self.ring = ring
        self.first = nn.Linear(24, 48, dtype="f64")
        self.second = nn.Linear(48, 24, bias=False, dtype="f64")

    def forward(self, x: dg.Tensor) -> dg.Tensor:
        chosen = {"algorithm": self.algorithm, "slices": self.slices, "ring": self.ring}
        first = dg.shard_op(self.first, self.mesh, dataflow="OS", **chosen)
        second = dg.shard_op(self.second, self.mesh, dataflow="LS", block=self.slices, **chosen)
        return second(dg.ops.gelu(first(x)))


def engine(
    mesh: dg.ProcessMesh | None, algorithm: str = "meshslice", ring: str | None = None, **options: object
) -> dg.Engine:
    model = TwoLayers(mesh, algorithm, ring)
    return dg.Engine(model, lambda y, t: dg.ops.mean((y - t) * (y - t)), optim.AdamW(0.01), **options)


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    return rng.normal(size=(24, 24)), rng.normal(size=(24, 24))


def losses(trained: dg.Engine) -> list[float]:
    return [trained.run(batch())["loss"] for _ in range(3)]


@pytest.mark.parametrize("shape", [(2, 2), (2, 3)])
def test_training_evaluation_and_prediction_equal_serial(shape: tuple[int, int]) -> None:
    serial, sharded = engine(None), engine(dg.ProcessMesh.grid(rows=shape[0], cols=shape[1]))
    assert losses(sharded) == pytest.approx(losses(serial), rel=0, abs=1e-12)
    x, _ = batch()
    np.testing.assert_allclose(sharded.predict(x), serial.predict(x), rtol=0, atol=1e-12)


class Biased(nn.Module):
    """A layer in dataflow LS with a bias, and one without an algorithm behind it."""

    def __init__(self, mesh: dg.ProcessMesh | None) -> None:
        self.mesh = mesh
        self.first, self.second = nn.Linear(24, 48, dtype="f64"), nn.Linear(48, 24, dtype="f64")

    def forward(self, x: dg.Tensor) -> dg.Tensor:
        first = dg.shard_op(self.first, self.mesh, algorithm="collective", dataflow="LS")
        return self.second(dg.ops.tanh(first(x)))


@pytest.mark.parametrize("refine", ["never", "conflicts", "always"])
def test_a_bias_does_not_decide_the_layout_of_a_product(refine: str) -> None:
    """The sum with the bias is what the call returns; the product itself has the layout of the dataflow."""

    def trained(mesh: dg.ProcessMesh | None) -> list[float]:
        strategy = dg.Strategy(refine=refine)
        return losses(dg.Engine(Biased(mesh), nn.MeanSquaredError(), optim.SGD(0.1), strategy=strategy))

    expected = trained(None)
    assert trained(dg.ProcessMesh.grid(rows=2, cols=4)) == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("algorithm", ["collective", "wang", "summa", "cannon"])
def test_every_algorithm_trains_and_is_kept_in_a_plan(algorithm: str, tmp_path: Path) -> None:
    mesh = dg.ProcessMesh.grid(rows=2, cols=2)
    annotated = engine(mesh, algorithm)
    found = losses(annotated)
    assert found == pytest.approx(losses(engine(None)), rel=0, abs=1e-12)
    path = tmp_path / "plan.json"
    annotated.plan.save(path)
    assert f'"matmul by {algorithm} {{k:rows, n:cols}} -> [rows, cols]"' in path.read_text()
    assert losses(engine(mesh, algorithm, plan=dg.Plan.load(path))) == found


@pytest.mark.parametrize("ring", ["rows", "cols"])
def test_the_ring_of_wang_is_chosen_by_hand_and_kept_in_a_plan(ring: str, tmp_path: Path) -> None:
    mesh = dg.ProcessMesh.grid(rows=2, cols=3)
    annotated = engine(mesh, "wang", ring)
    found = losses(annotated)
    assert found == pytest.approx(losses(engine(None)), rel=0, abs=1e-12)
    path = tmp_path / "plan.json"
    annotated.plan.save(path)
    assert f'"matmul by wang(ring={ring}) {{k:rows, n:cols}} -> [rows, cols]"' in path.read_text()
    plan = dg.Plan.load(path)
    assert losses(engine(mesh, "wang", ring, plan=plan)) == found
    other = engine(mesh, "wang")
    losses(other)
    rows = {what: (mine, theirs) for what, mine, theirs in plan.compare(other.plan.portable).rows}
    assert rows["matrix products"] == (f"2 by wang(ring={ring})", "2 by wang")


def test_a_plan_keeps_the_algorithms(tmp_path: Path) -> None:
    mesh = dg.ProcessMesh.grid(rows=2, cols=2)
    annotated = engine(mesh)
    expected = losses(annotated)
    path = tmp_path / "plan.json"
    annotated.plan.save(path)
    text = path.read_text()
    assert '"matmul by meshslice(slices=2) {k:rows, n:cols} -> [rows, cols]"' in text
    assert losses(engine(mesh, plan=dg.Plan.load(path))) == expected
    path.write_text(text.replace(" by meshslice(slices=2, block=2)", ""))
    message = r"computed by meshslice\(slices=2, block=2\) but in plan of TwoLayers by no algorithm"
    with pytest.raises(ShardingError, match=message):
        engine(mesh, plan=dg.Plan.load(path)).prepare(batch())
