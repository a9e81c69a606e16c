"""Tensor parallelism on one axis in slices: all_gather under products, products under reduce_scatter."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from support.programs.search_cases import cluster

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine.compile.train_graph import train_graph
from distgraph.passes.complete import complete
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.program.build import build


class SequenceParallel(nn.Module):
    """An MLP on samples that are split: gathered before the first product, scattered behind the second."""

    def __init__(self, width: int, mesh: dg.ProcessMesh | None, slices: int, dtype: str = "f64") -> None:
        self.mesh, self.slices = mesh, slices
        self.up = nn.Linear(width, 4 * width, bias=False, dtype=dtype)
        self.down = nn.Linear(4 * width, width, bias=False, dtype=dtype)
        if mesh is not None:
            dg.shard_tensor(self.up.weight, mesh, [None, "tp"])
            dg.shard_tensor(self.down.weight, mesh, ["tp", None])

    def forward(self, x: dg.Tensor) -> dg.Tensor:
        chosen = {"algorithm": "meshslice" if self.slices > 1 else "collective", "slices": self.slices}
        up = dg.shard_op(self.up, self.mesh, [["tp", None]], [None, "tp"], **chosen)
        down = dg.shard_op(self.down, self.mesh, [[None, "tp"]], ["tp", None], **chosen)
        return x + down(ops.relu(up(x)))


def loss(y: dg.Tensor, target: dg.Tensor) -> dg.Tensor:
    return ops.mean(ops.square(y - target))


def losses(mesh: dg.ProcessMesh | None, slices: int) -> list[float]:
    trained = dg.Engine(SequenceParallel(12, mesh, slices), loss, optim.SGD(0.1))
    rng = np.random.default_rng(1)
    batch = rng.normal(size=(24, 12)), rng.normal(size=(24, 12))
    return [trained.run(batch)["loss"] for _ in range(3)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_in_slices_equals_serial_training(ranks: int) -> None:
    mesh = dg.ProcessMesh.grid(tp=ranks)
    assert losses(mesh, 4) == pytest.approx(losses(None, 1), rel=0, abs=1e-12)


def test_slices_hide_communication_forward_and_backward() -> None:
    steps, exposed, kinds = [], [], []
    batch = ((8192, 2048), "f32")
    for slices in (1, 4):
        model = SequenceParallel(2048, dg.ProcessMesh.grid(tp=4), slices, "f32")
        built = build(complete(train_graph(model, (batch, batch), loss, optim.SGD(0.1))))
        found = forecast(built, cluster((1, 1, 1, 1)), trace=True)
        steps.append(found.step_seconds)
        exposed.append(sum(task.last.exposed for task in found.tasks.values()))
        kinds.append(Counter(op.kind for op in built.lowered.ops))
    for kind in ("comm.all_gather", "comm.reduce_scatter"):
        assert kinds[1][kind] == 4 * kinds[0][kind] > 0
    assert steps[1] < steps[0]
    assert exposed[1] < exposed[0] / 2
