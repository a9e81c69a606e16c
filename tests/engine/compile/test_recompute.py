"""Recomputation: the same numbers, and nothing inside a block is kept for the backward part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn
from distgraph.array_api.trace import trace
from distgraph.passes.serial.dead_code_elimination import prune
from distgraph.passes.split_tasks import phases


class Net(nn.Module):
    """Three blocks with dropout."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.blocks = [nn.TransformerBlock(8, 2, dropout=0.1, dtype="f64") for _ in range(3)]
        self.again = again

    def forward(self, x: dg.Tensor) -> dg.Tensor:
        for block in self.blocks:
            x = dg.recompute(block)(x) if self.again else block(x)
        return x


def engine(again: bool, strategy: dg.Strategy | None = None) -> dg.Engine:
    return dg.Engine(Net(again), nn.MeanSquaredError(), dg.optim.Adam(lr=0.01), strategy=strategy, seed=3)


@pytest.mark.parametrize("micro", [1, 2])
def test_losses_are_the_same(rng: np.random.Generator, micro: int) -> None:
    x, y = rng.normal(size=(2, 8, 5, 8))
    plain = engine(False).fit((x, y), epochs=4, batch_size=4, progress=False)
    mesh = dg.ProcessMesh.grid(dp=2)
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp", micro_batches=micro)
    again = engine(True, strategy).fit((x, y), epochs=4, batch_size=4, progress=False)
    np.testing.assert_allclose(again.losses, plain.losses, rtol=1e-10)


ONE, TWO, THREE = (dg.ProcessMesh.grid(rank, dp=1) for rank in range(3))


class Staged(nn.Module):
    """A linear layer on each mesh of a list, of which a part is one block that is recomputed."""

    def __init__(self, order: Sequence[dg.ProcessMesh], block: slice) -> None:
        super().__init__()
        self.layers = [nn.Linear(3, 3, dtype="f64") for _ in order]
        self.order, self.block = order, block

    def part(self, x: dg.Tensor, numbers: range) -> dg.Tensor:
        for number in numbers:
            with dg.on(self.order[number]):
                x = dg.ops.tanh(self.layers[number](x))
        return x

    def forward(self, x: dg.Tensor) -> dg.Tensor:
        first, stop, _ = self.block.indices(len(self.layers))
        x = self.part(x, range(first))
        x = dg.recompute(lambda y: self.part(y, range(first, stop)))(x)
        return self.part(x, range(stop, len(self.layers)))


@pytest.mark.parametrize("executor", ["static", "actors"])
@pytest.mark.parametrize("block", [slice(2), slice(1, 3), slice(3)], ids=str)
@pytest.mark.parametrize(
    ("schedule", "order"),
    [
        ("1f1b", (ONE, TWO, THREE)),
        ("zb-h1", (ONE, TWO, THREE)),
        ("zb-v", (ONE, TWO, THREE)),
        ("zb-v", (ONE, TWO, THREE, TWO, ONE)),
        ("interleaved-1f1b", (ONE, TWO, THREE)),
        ("interleaved-1f1b", (ONE, TWO, ONE, TWO)),
    ],
)
def test_a_block_on_several_stages(
    rng: np.random.Generator, schedule: str, order: Sequence[dg.ProcessMesh], block: slice, executor: str
) -> None:
    x, y = rng.normal(size=(2, 10, 3))
    losses = []
    for meshes, strategy in (
        ((ONE,) * len(order), dg.Strategy(micro_batches=4)),
        (order, dg.Strategy(schedule=schedule, micro_batches=4, executor=executor)),
    ):
        model = Staged(meshes, block)
        trained = dg.Engine(model, nn.MeanSquaredError(), dg.optim.Adam(lr=0.01), strategy=strategy, seed=3)
        losses.append(trained.fit((x, y), epochs=2, batch_size=8, progress=False).losses)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-10)


def test_tables_order_recomputation_right_before_its_gradient() -> None:
    model = Staged((ONE, TWO, THREE), slice(2))
    strategy = dg.Strategy(schedule="zb-v", micro_batches=2)
    trained = dg.Engine(model, nn.MeanSquaredError(), dg.optim.SGD(), strategy=strategy, seed=3)
    build = trained.prepare((np.zeros((4, 3)), np.zeros((4, 3)))).build
    assert [task.name for task in build.task_graph.tasks if task.recomputes] == ["backward.s0"]
    order = [step for step in build.schedule.order(0) if step[0] != "optimize.s0"]
    again, gradient, weight = "backward.s0", "backward.s0.l4", "weight.s0.l4"
    forward = [("forward.s0", 0), ("forward.s0", 1)]
    assert order[:4] == [*forward, (again, 0), (gradient, 0)]
    assert sorted(order[4:]) == sorted([(weight, 0), (again, 1), (gradient, 1), (weight, 1)])


def crossing(again: bool) -> set[str]:
    """Scopes whose forward results the backward part reads."""
    trained = engine(again)
    trained.run((np.zeros((4, 5, 8)), np.zeros((4, 5, 8))))
    graph = trained.plan.build.lowered
    parts = phases(graph)
    made = {v.name: op for t in parts.tasks if t.kind == "forward" for op in t.body for v in op.results}
    read = {v.name for t in parts.tasks if t.kind == "backward" for op in t.body for v in op.operands}
    return {made[name].scope for name in read & set(made)}


def test_only_inputs_of_blocks_cross() -> None:
    assert any("blocks.1.attn" in scope for scope in crossing(False))
    assert not any("attn" in scope or "mlp.up" in scope for scope in crossing(True))


def test_prune_drops_what_nobody_reads() -> None:
    graph = trace(lambda x: (x.sum(), dg.ops.exp(x * 2 + 1))[0], ((3, 5), "f32"))
    kinds = [op.kind for op in prune(graph).ops]
    assert "exp" not in kinds
    assert "reduce_sum" in kinds
    assert len(kinds) < len(graph.ops)
