"""Large graphs: nothing recurses over a graph, ranks share what is compiled; work is counted, not timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.ir.dtypes import to_numpy
from distgraph.ir.graph import Op, Value
from distgraph.ir.op_registry import linear_groups
from distgraph.passes.complete import complete
from distgraph.runtime.execute.worker import Worker
from distgraph.runtime.program import memory_packing
from distgraph.runtime.program.build import Build, build
from distgraph.runtime.transport.inprocess import connect

MESH = dg.ProcessMesh.grid(dp=2, tp=2)


class Chain(nn.Module):
    """Each op reads the one before."""

    def __init__(self, length: int) -> None:
        self.length, self.weight = length, nn.Parameter((8,))

    def forward(self, x: Any) -> Any:
        y = x * self.weight
        for _ in range(self.length):
            y = ops.tanh(y)
        return y


class Fan(nn.Module):
    """All ops read one value, and are summed up two by two."""

    def __init__(self, width: int) -> None:
        self.width, self.weight = width, nn.Parameter((8,))

    def forward(self, x: Any) -> Any:
        y = x * self.weight
        parts = [ops.tanh(y) for _ in range(self.width)]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=False)
            parts = [left + right for left, right in pairs] + parts[len(parts) // 2 * 2 :]
        return parts[0]


class Join(Fan):
    """All ops read one value, and one op reads them all."""

    def forward(self, x: Any) -> Any:
        y = x * self.weight
        return ops.concat([ops.tanh(y) for _ in range(self.width)], axis=1)[:, :8]


def squares(output: Any, target: Any) -> Any:
    return ((output - target) ** 2).mean()


def compiled(model: nn.Module) -> tuple[Build, list[Worker]]:
    """The training program of a model, and its worker of every rank."""
    strategy = dg.Strategy(mesh=MESH, batch_axis="dp")
    training_spec = TrainingSpec(model, squares, dg.optim.SGD(lr=0.1), {}, strategy)
    serial = training_spec.trace("train", {f"batch.{i}": ((8, 8), "f32") for i in range(2)}, {})
    built, workers = build(complete(serial, MESH)), []
    for rank, transport in zip(MESH.members, connect(MESH.size), strict=True):
        program = built.program(rank)
        types = {op.name: program.types[op.name] for op in program.graph.sources("param", "state")}
        blocks = {name: np.ones(shape, to_numpy(dtype)) for name, (shape, dtype) in types.items()}
        workers.append(Worker(program, built.schedule, transport, np, blocks))
    return built, workers


@pytest.mark.parametrize("model", [Chain(1500), Fan(500), Join(500)], ids=["deep", "wide", "joined"])
def test_graphs_deeper_than_the_stack_compile(model: nn.Module) -> None:
    built, workers = compiled(model)
    assert len(built.lowered.ops) > 1500
    assert len(workers) == MESH.size


def test_ranks_share_places_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []

    def counted(blocks: Sequence[memory_packing.Block]) -> int:
        packed.append(len(blocks))
        return pack(blocks)

    pack = memory_packing.pack
    monkeypatch.setattr(memory_packing, "pack", counted)
    _, workers = compiled(Fan(20))
    assert len(workers) == MESH.size
    assert len(packed) == 1  # the ranks hold as large blocks at the same times


def test_groups_of_operands_are_not_made_again_for_each_operand() -> None:
    """For an op of n operands that would be n ** 2 numbers."""
    values = tuple(Value(f"x{i}", (2,), "f32") for i in range(5))
    op = Op("concat", values, (Value("y", (10,), "f32"),), {"dim": 0})
    assert linear_groups(op) == ((0, 1, 2, 3, 4),)
    assert linear_groups(op) is linear_groups(op)


def test_ranks_share_compiled_code() -> None:
    built, workers = compiled(Chain(20))
    modules = [task for worker in workers for task in worker.tasks.values()]
    assert len(modules) == MESH.size * len(built.parts.tasks)
    assert len(built.parts.codes) == len(built.parts.tasks)
    first, second = (worker.tasks["forward.s0"] for worker in workers[:2])
    assert first.last.__code__.co_code == second.last.__code__.co_code
    assert first.last.__code__.co_filename == "<distgraph rank 0 forward.s0>"
    assert second.last.__code__.co_filename == "<distgraph rank 1 forward.s0>"
