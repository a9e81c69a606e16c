"""Tasks that the user names: split, trained with under every schedule, ordered by tables, and refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs.equivalence import gathered

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.errors import DistGraphError, GraphError
from distgraph.ir.parser import parse_graph
from distgraph.ir.printer import print_graph
from distgraph.passes.analysis.conflicts import explain
from distgraph.plan import pipeline_schedules
from distgraph.plan.schedule_text import parse_schedule

WIDTH = 6
grid = dg.ProcessMesh.grid
TABLE = """
halves n=2 m=2
F0:l0 -
F0    -
F1:l0 F0
F1    B0
-     F1
-     B1
B0:l1 -
B0    -
B1:l1 -
B1    -
"""


@pytest.fixture(autouse=True)
def _own_schedules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(pipeline_schedules, "_POLICIES", dict(pipeline_schedules._POLICIES))
        yield


class Net(nn.Module):
    """Four layers on the given meshes, each a task, with ops outside of tasks between them."""

    def __init__(self, meshes: list[dg.ProcessMesh], named: bool = True) -> None:
        self.layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.norm = nn.LayerNorm(WIDTH)
        self.meshes = [meshes[n * len(meshes) // 4] if meshes else None for n in range(4)]
        self.named = named

    def forward(self, x: Any) -> Any:
        for n, (layer, mesh) in enumerate(zip(self.layers, self.meshes, strict=True)):
            with dg.on(mesh):
                x = x * 1.5 if n % 2 else x
                with dg.task(f"l{n}") if self.named else nullcontext():
                    x = x + ops.tanh(layer(x))
        return self.norm(x)


def trained(
    model: nn.Module, optimizer: optim.Optimizer | None = None, **strategy: Any
) -> tuple[list[float], dict[str, Any], Any]:
    rng = np.random.default_rng(0)
    batch = [rng.normal(size=(12, WIDTH)).astype("f4") for _ in range(2)]
    optimizer = optimizer or optim.AdamW(lr=0.1, clip_norm=1.0)
    engine = dg.Engine(model, nn.MeanSquaredError(), optimizer, strategy=dg.Strategy(**strategy), seed=3)
    with closing(engine):
        losses = [engine.run(batch)["loss"] for _ in range(2)]
        (compiled, *_) = engine._session.programs.values()
        return losses, gathered(engine), compiled.build


PIPELINES = {
    "dp2": [grid(0, dp=2)],
    "pp2": [grid(0, dp=1), grid(1, dp=1)],
    "tp2 x pp2": [grid(0, tp=2), grid(2, tp=2)],
    "pp2, twice": [grid(0, dp=1), grid(1, dp=1)] * 2,
    "pp2, down and up": [grid(0, dp=1), grid(1, dp=1), grid(1, dp=1), grid(0, dp=1)],
}


@pytest.mark.parametrize("executor", ["static", "actors"])
@pytest.mark.parametrize(
    ("pipeline", "schedule"),
    [
        ("dp2", "1f1b"),
        ("pp2", "gpipe"),
        ("pp2", "1f1b"),
        ("tp2 x pp2", "eager-1f1b"),
        ("tp2 x pp2", "zb-h1"),
        ("pp2, twice", "interleaved-1f1b"),
        ("pp2, down and up", "zb-v"),
    ],
)
def test_training_is_that_without_tasks(pipeline: str, schedule: str, executor: str) -> None:
    meshes = PIPELINES[pipeline]
    given = {"micro_batches": 4, "schedule": schedule, "executor": executor}
    losses, parameters, build = trained(Net(meshes), **given)
    serial, expected, _ = trained(Net([], named=False), micro_batches=4)
    np.testing.assert_allclose(losses, serial, rtol=2e-6)
    for name, value in expected.items():
        np.testing.assert_allclose(parameters[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
    labels = {(task.kind, task.label) for task in build.task_graph.tasks}
    kinds = ("forward", "backward", "optimize")
    assert {(kind, f"l{n}") for kind in kinds for n in range(4)} <= labels


def test_every_op_is_in_the_task_that_names_it() -> None:
    _, _, build = trained(Net([grid(0, tp=2)]), micro_batches=2)
    for part in build.parts.tasks:
        for op in part.body:
            if op.task and part.kind != "load" and op.kind != "accumulate":
                assert op.task == part.label, (part.name, op)
    names = [part.name for part in build.parts.tasks if part.kind == "forward"]
    assert names == [
        "forward.s0:l0", "forward.s0:after.l0", "forward.s0:l1", "forward.s0:l2", "forward.s0:after.l2",
        "forward.s0:l3", "forward.s0:after.l3",
    ]  # fmt: skip
    assert parse_graph(print_graph(build.completed)).ops == build.completed.ops


@pytest.mark.parametrize("given", [{"recompute": True}, {"recompute": [0]}, {"precision": "fp16"}], ids=str)
def test_recomputation_and_loss_scaling_of_several_tasks(given: dict[str, Any]) -> None:
    """What is recomputed for several tasks, and the gradients that a norm reads, precede all of them."""
    meshes = [] if "precision" in given else PIPELINES["pp2"]
    losses, parameters, _ = trained(Net(meshes), micro_batches=2, **given)
    serial, expected, _ = trained(Net([], named=False), micro_batches=2, **given)
    np.testing.assert_allclose(losses, serial, rtol=2e-6)
    for name, value in expected.items():
        np.testing.assert_allclose(parameters[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def test_a_recomputed_block_with_two_tasks() -> None:
    class Whole(Net):
        def forward(self, x: Any) -> Any:
            return dg.recompute(super().forward)(x)

    losses, _, _ = trained(Whole([]), micro_batches=2)
    serial, _, _ = trained(Net([], named=False), micro_batches=2)
    np.testing.assert_allclose(losses, serial, rtol=2e-6)


def test_a_table_orders_tasks() -> None:
    meshes = PIPELINES["pp2"]
    losses, parameters, build = trained(Net(meshes), schedule=TABLE)
    serial, expected, _ = trained(Net([], named=False), micro_batches=2)
    np.testing.assert_allclose(losses, serial, rtol=2e-6)
    for name, value in expected.items():
        np.testing.assert_allclose(parameters[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
    order = [step for step in build.schedule.order(0) if step[0].startswith(("forward", "backward"))]
    assert order == [
        ("forward.s0:l0", 0), ("forward.s0:after.l0", 0), ("forward.s0:l1", 0),
        ("forward.s0:l0", 1), ("forward.s0:after.l0", 1), ("forward.s0:l1", 1),
        ("backward.s0:l1", 0), ("backward.s0:after.l1", 0), ("backward.s0:l0", 0),
        ("backward.s0:l1", 1), ("backward.s0:after.l1", 1), ("backward.s0:l0", 1),
    ]  # fmt: skip
    table = parse_schedule(TABLE)
    assert parse_schedule(str(table)) == table
    assert table.in_flight(0, 2, 2) == 2


class Partial(nn.Module):
    """The sum of a product over tp is sent in one task and read in the next."""

    def __init__(self) -> None:
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        dg.shard_tensor(self.first.weight, grid(0, tp=2), ["tp", None])

    def forward(self, x: Any) -> Any:
        with dg.task("send"):
            x = self.first(x)
        with dg.task("read"):
            return self.second(ops.tanh(x))


def test_a_message_is_under_way_while_another_task_runs() -> None:
    table = "between n=1 m=2\nF0:send\nF1:send\nF0\nF1\nB0\nB1"
    losses, _, build = trained(Partial(), schedule=table)
    serial, _, _ = trained(Partial(), micro_batches=2)
    np.testing.assert_allclose(losses, serial, rtol=2e-6)
    send, read, loss = (part for part in build.parts.tasks if part.kind == "forward")
    (message,) = (op for op in send.body if op.kind.startswith("comm."))
    assert any(value.name == message.name for op in read.body for value in op.operands)
    order = [step for step in build.schedule.order(0) if step[0].startswith("forward")]
    of_both = [(send.name, 0), (send.name, 1), *((part.name, n) for n in range(2) for part in (read, loss))]
    assert order == of_both


def test_a_program_that_is_made_from_a_plan_has_the_tasks_of_the_script(tmp_path: Path) -> None:
    batch = [np.random.default_rng(0).normal(size=(12, WIDTH)).astype("f4") for _ in range(2)]
    strategy = dg.Strategy(micro_batches=2, schedule="gpipe")
    made = []
    for plan in (None, tmp_path / "plan.json"):
        given = {"strategy": strategy} if plan is None else {"plan": str(plan)}
        model = Net(PIPELINES["pp2"] if plan is None else [])
        engine = dg.Engine(model, nn.MeanSquaredError(), optim.AdamW(lr=0.1), seed=3, **given)
        with closing(engine):
            engine.run(batch)
            (compiled, *_) = engine._session.programs.values()
            made.append(str(compiled.build.schedule))
            engine.plan.save(tmp_path / "plan.json")
    assert made[0] == made[1]
    assert "F=forward.s0:l0" in made[0]


def test_explain_names_the_task_of_a_value() -> None:
    _, _, build = trained(Net([grid(0, tp=2)]), micro_batches=2)
    op = next(op for op in build.completed.ops if op.task == "l2")
    assert f"  task l2, {op.role}" in explain(build.completed, op.name).splitlines()


class Updated(nn.Module):
    """Layers in a task each, and one outside of tasks; `split` are those whose weights are split over dp."""

    def __init__(self, width: int, split: tuple[int, ...] = (), named: bool = True) -> None:
        self.layers, self.named = [nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)], named
        self.head = nn.Linear(WIDTH, WIDTH)
        for n in split:
            dg.shard_tensor(self.layers[n].weight, grid(dp=2), [None, "dp"])

    def forward(self, x: Any) -> Any:
        for n, layer in enumerate(self.layers):
            with dg.task(f"l{n}") if self.named else nullcontext():
                x = ops.tanh(layer(x))
        return self.head(x)


@pytest.mark.parametrize("passes", [(), ("-fuse_reductions",)], ids=str)
@pytest.mark.parametrize(
    ("width", "split", "zero", "clip"),
    [(6, (), 1, None), (6, (), 3, 1.0), (6, (0,), None, None), (6, (0, 1), 1, 1.0), (7, (), 1, None)],
    ids=str,
)
def test_messages_of_an_update_let_no_task_wait_for_another(
    width: int, split: tuple[int, ...], zero: int | None, clip: float | None, passes: tuple[str, ...]
) -> None:
    """Adafactor reduces means within the update, and gathers rows of a width that dp does not divide."""
    given = {"mesh": grid(dp=2), "batch_axis": "dp", "zero": zero, "passes": passes}
    optimizer = optim.Adafactor(lr=0.1, clip_norm=clip)
    losses, parameters, build = trained(Updated(width, split), optimizer, **given)
    serial, expected, _ = trained(Updated(width, named=False), optimizer)
    np.testing.assert_allclose(losses, serial, rtol=2e-6)
    for name, value in expected.items():
        np.testing.assert_allclose(parameters[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
    assert {"l0", "l1"} <= {task.label for task in build.task_graph.tasks if task.kind == "optimize"}


class SplitNorm(nn.Module):
    """A norm in one task whose mean only the backward part reads in the end; the head is on another mesh."""

    def __init__(self, norm: dg.ProcessMesh | None, head: dg.ProcessMesh | None) -> None:
        self.norm, self.head, self.meshes = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), (norm, head)
        if norm is not None:
            dg.shard_tensor(self.norm.weight, norm, ["tp"])

    def forward(self, x: Any) -> Any:
        first, second = self.meshes
        with dg.on(first), dg.task("norm") if first else nullcontext():
            x = self.norm(x)
        with dg.on(second):
            return self.head(x)


@pytest.mark.parametrize("head", [grid(1, tp=2), grid(2, tp=2)], ids=str)
@pytest.mark.parametrize("data", [grid(dp=2), grid(dp=1, tp=2)], ids=str)
def test_a_norm_with_a_split_weight_is_one_task(data: dg.ProcessMesh, head: dg.ProcessMesh) -> None:
    given = {"mesh": data, "batch_axis": "dp", "refine": "never"}
    losses, parameters, build = trained(SplitNorm(grid(tp=2), head), **given)
    serial, expected, _ = trained(SplitNorm(None, None))
    np.testing.assert_allclose(losses, serial, rtol=2e-6)
    for name, value in expected.items():
        np.testing.assert_allclose(parameters[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
    named = [part for part in build.parts.tasks if part.kind == "forward" and part.label == "norm"]
    assert len(named) == 1


class Called(nn.Module):
    """A model of one function."""

    def __init__(self, function: Callable[[Called, Any], Any]) -> None:
        self.layer, self.other, self.function = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def _nested(model: Called, x: Any) -> Any:
    with dg.task("outer"), dg.task("inner"):
        return model.layer(x)


def _twice(model: Called, x: Any) -> Any:
    for layer in (model.layer, model.other):
        with dg.task("attention"):
            x = ops.tanh(layer(x))
        with dg.task("mlp"):
            x = ops.exp(x)
    return x


def _around(model: Called, x: Any) -> Any:
    with dg.task("mlp"):
        x = model.layer(x)
    x = ops.tanh(x)
    with dg.task("mlp"):
        return model.other(x)


def _two_meshes(model: Called, x: Any) -> Any:
    with dg.task("mlp"):
        with dg.on(grid(0, dp=1)):
            x = model.layer(x)
        with dg.on(grid(1, dp=1)):
            return model.other(x)


def _returning(model: Called, x: Any) -> Any:
    for mesh, name in ((grid(0, dp=1), "mlp"), (grid(1, dp=1), "other"), (grid(0, dp=1), "mlp")):
        with dg.on(mesh), dg.task(name):
            x = model.layer(x)
    return x


def _odd_name(model: Called, x: Any) -> Any:
    with dg.task("a b"):
        return model.layer(x)


def _in_loop(model: Called, x: Any) -> Any:
    def turn(carry: Any, item: Any) -> Any:
        with dg.task("turn"):
            return ops.tanh(carry + item), item

    return ops.scan(turn, model.layer(x), ops.stack([x, x]))[0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_nested, r"task 'inner' \(test_user_tasks.py:\d+\) is inside of task 'outer'"),
        (_twice, "tasks of forward.s0 wait for each other: 'attention' -> 'mlp'"),
        (_around, "task 'mlp' of forward.s0 would wait for itself: its op .* needs .*tanh"),
        (_two_meshes, "task 'mlp' has .*; a task runs on one mesh"),
        (_returning, "task 'mlp' has .* behind ops of another mesh"),
        (_odd_name, r"task \(test_user_tasks.py:\d+\): name is 'a b' but must begin with a letter"),
        (_in_loop, "marks a pipeline stage, a task or an output"),
    ],
)
def test_tasks_that_make_no_sense_are_refused(function: Callable[[Called, Any], Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        trained(Called(function))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            "a n=1 m=1\nF0:nowhere\nF0\nB0",
            "names task 'nowhere' in the forward part of stage 0.*: l0, after",
        ),
        ("b n=1 m=1\nF0:l3\nF0\nB0", "deadlock"),
        (
            "c n=1 m=1\nF0:l0\nB0",
            "has no forward of micro-batch 0 .*which has task forward.s0:after.l0",
        ),
        ("d n=1 m=2\nF0:l0\nF0\nF1\nB0\nB1", "F1:l0 on stage 0 is missing"),
        ("e n=1 m=1\nB0:l0\nF0:l0\nF0\nB0", "B0:l0 on stage 0 stands at time 0 but needs F0:l0"),
        ("f n=1 m=1\nF0:\nB0", "expected a cell such as .*F0:mlp"),
    ],
)
def test_tables_that_do_not_fit_the_tasks_are_refused(table: str, message: str) -> None:
    with pytest.raises(DistGraphError, match=message):
        trained(Net([]), schedule=table)
