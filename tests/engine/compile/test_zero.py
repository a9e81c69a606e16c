"""`Strategy(zero=...)`: what ranks store and send, and what it refuses. Equality: `split_over_the_batch`."""

from __future__ import annotations

import re
import warnings
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from support.programs.forecasts import machines

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine import Engine
from distgraph.errors import ShardingError
from distgraph.passes.partition import RankProgram
from distgraph.runtime.execute.worker import Worker
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.forecast.memory_forecast import RankMemory, rank_memory
from distgraph.runtime.program.build import Build
from distgraph.runtime.program.memory_plan import plan_storage

RANKS, LAYERS, WIDTH, BATCH = 4, 8, 256, 8
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
PARAMETERS = LAYERS * LAYER
mesh = dg.ProcessMesh.grid(dp=RANKS)
AS_WHOLE = pytest.mark.filterwarnings("ignore:zero of Strategy is 3 but .* annotated as whole:UserWarning")


class Net(nn.Module):
    """Equal layers, each with a weight and a bias that divide by the number of ranks."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH) -> None:
        self.layers = [nn.Linear(width, width) for _ in range(layers)]

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return x


def batch(size: int = BATCH, width: int = WIDTH) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(size, width)).astype("f4") for _ in range(2))


def engine(zero: int, micro: int = 1, model: Any = None, **options: Any) -> Engine:
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp", zero=zero, micro_batches=micro)
    given = {"strategy": strategy, "optimizer": optim.Adam(lr=1e-3), **options}
    return Engine(model or Net(), nn.MeanSquaredError(), seed=1, **given)


def compiled(zero: int, micro: int = 1) -> Build:
    with closing(engine(zero, micro)) as made:
        made.prepare(batch())
        (program,) = made._session.programs.values()
        build: Build = program.build
        return build


def memory(build: Build) -> RankMemory:
    program = build.program(0)
    return rank_memory(program, plan_storage(program, build.schedule))


def scratch(build: Build) -> int:
    """Bytes that tasks share, but for the activations of the small batch."""
    return memory(build).temporary


@pytest.mark.parametrize("micro", [1, 2])
def test_a_rank_stores_its_part_and_two_layers(micro: int) -> None:
    part, near = PARAMETERS // RANKS, 0.02
    whole, states, gradients, parameters = (memory(compiled(zero, micro)) for zero in range(4))
    loss, small = 64, 4 * BATCH * WIDTH * 4 * LAYERS
    assert (whole.parameters, whole.states) == (PARAMETERS, 2 * PARAMETERS)
    assert whole.gradients == pytest.approx(PARAMETERS, abs=loss)
    assert (states.parameters, states.states) == (PARAMETERS, 2 * part)
    assert states.gradients == pytest.approx(PARAMETERS, rel=near, abs=loss)  # the reduced part is in them
    assert (gradients.parameters, gradients.states) == (PARAMETERS, 2 * part)
    assert (parameters.parameters, parameters.states) == (part, 2 * part)
    for each in (gradients, parameters):
        assert each.gradients == pytest.approx(part, rel=near, abs=loss)
    # two gradients are under way at the same time; with parts of parameters, two layers are gathered as well
    # and with micro-batches one part waits to be added
    added = LAYER // RANKS * 2 * (micro > 1)
    assert gradients.temporary <= 2 * LAYER + added + small
    assert parameters.temporary <= 4 * LAYER + added + small
    assert parameters.total < 0.45 * whole.total


def wire(build: Build) -> float:
    return build.program(0).bytes_sent()


def test_bytes_on_the_wire() -> None:
    """1, 1, 1 and 1.5 times the bytes of data parallelism: the first layer is not gathered for backward."""
    builds = [compiled(zero) for zero in range(4)]
    share, loss = (RANKS - 1) / RANKS, 2 * 4 * (RANKS - 1) / RANKS
    for build in builds[:3]:
        assert wire(build) == 2 * share * PARAMETERS + loss
    weights = 4 * WIDTH * WIDTH * (LAYERS - 1)
    assert wire(builds[3]) == share * (2 * PARAMETERS + weights) + loss
    assert wire(builds[3]) <= 1.5 * wire(builds[0])


def test_gradients_are_reduced_and_parameters_gathered_in_each_micro_batch() -> None:
    share, loss = (RANKS - 1) / RANKS, 2 * 4 * (RANKS - 1) / RANKS
    weights = 4 * WIDTH * WIDTH * (LAYERS - 1)
    assert wire(compiled(1, 2)) == 2 * share * PARAMETERS + loss
    assert wire(compiled(2, 2)) == 3 * share * PARAMETERS + loss
    assert wire(compiled(3, 2)) == 2 * share * (2 * PARAMETERS + weights) + loss


def collectives(program: RankProgram, task: str) -> list[str]:
    (found,) = (each for each in program.tasks if each.name == task)
    return [local.mode for local in found.ops if local.mode.startswith("comm.")]


def test_no_task_before_the_micro_batches_gathers() -> None:
    program = compiled(3).program(0)
    assert "comm.all_gather" not in collectives(program, "load.s0")
    assert collectives(program, "forward.s0").count("comm.all_gather") == 2 * LAYERS
    assert collectives(program, "backward.s0").count("comm.all_gather") == LAYERS - 1
    assert collectives(program, "backward.s0").count("comm.reduce_scatter") == 2 * LAYERS
    assert collectives(program, "optimize.s0") == []


def test_the_forecast_of_memory_is_that_of_the_plan() -> None:
    cluster = machines(RANKS)
    for zero in (2, 3):
        build = compiled(zero)
        found = forecast(build, cluster).memory[0]
        plan = memory(build)
        assert found.total >= plan.total
        assert (found.parameters, found.gradients, found.states) == (
            plan.parameters, plan.gradients, plan.states,
        )  # fmt: skip


@pytest.mark.parametrize("zero", range(4))
def test_a_worker_allocates_what_the_plan_says(zero: int) -> None:
    """Buckets and parts of layers included: the bytes of the arrays that a rank holds during a step."""
    build = compiled(zero, 2)
    program = build.program(0)
    sources = {
        op.name: np.zeros(program.types[op.name][0], "f4") for op in program.graph.sources("param", "state")
    }
    arena = Worker(program, build.schedule, None, np, sources).arena
    owners = {}
    for array in (*arena.fixed.values(), *(each for ring in arena.rings.values() for each in ring)):
        while isinstance(array.base, np.ndarray):
            array = array.base
        owners[id(array)] = array.nbytes
    planned = memory(build)
    constants = 4 * len(program.graph.sources("constant"))
    assert planned.total - planned.inputs <= sum(owners.values())
    assert sum(owners.values()) <= planned.total - planned.inputs + constants


def test_training_evaluation_prediction_and_a_short_batch_share_the_parts() -> None:
    x, y = batch(19, 12)
    outcomes = []
    for zero in (0, 3):
        with closing(engine(zero, model=Net(3, 12))) as made:
            before = made.predict(x)
            history = made.fit((x, y), epochs=2, batch_size=8, valid_data=(x, y))
            outcomes.append((before, history.losses, history["valid_loss"], made.predict(x)))
            layouts = {record.attr.spec.dims for record in made.memory.records.values()}
            assert any("dp" in dim for dims in layouts for dim in dims) == (zero == 3)
    for left, right in zip(*outcomes, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 4}, "zero of Strategy is 4 but must be 0, 1 .states are split., 2 .gradients too. or 3"),
        ({"zero": True}, "zero of Strategy is True but must be"),
        ({"zero": 4, "mode": "auto"}, "zero of the search is 4 but must be 0, 1 .states may be split.*or 3"),
        ({"mesh": mesh, "mode": "auto"}, "mesh of Strategy is .* but mode 'auto' makes meshes itself; leave"),
        ({"zero": 1, "mode": "recursive"}, "zero of Strategy is 1 but mode 'recursive' does not search it"),
    ],
)
def test_a_strategy_that_makes_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        dg.Strategy(**options)


def test_a_batch_that_is_not_split_is_refused() -> None:
    with (
        closing(engine(1, strategy=dg.Strategy(zero=1), model=Net(1, 8))) as made,
        pytest.raises(
            ShardingError, match="zero of Strategy is 1 but no axis splits the batch over several ranks"
        ),
    ):
        made.prepare(batch(8, 8))


@pytest.mark.parametrize(
    ("zero", "optimizer", "what", "way"),
    [
        (1, optim.SGD(lr=0.1), "state", "leave zero out, or use 3"),
        (2, optim.SGD(lr=0.1), "state", "gradients are split as states or parameters are; .* or use 3"),
        (3, optim.SGD(lr=0.1), "parameter or", "leave zero out$"),
    ],
)
def test_nothing_to_split_is_refused(zero: int, optimizer: Any, what: str, way: str) -> None:
    message = f"zero of Strategy is {zero} but no {what}.* can be split over dp: there is none.*{way}"
    width = 3  # shorter than the mesh has ranks
    with (
        closing(engine(zero, optimizer=optimizer, model=Net(1, width))) as made,
        pytest.raises(ShardingError, match=message),
    ):
        made.prepare(batch(8, width))


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("width", [12, 13])  # equal parts, and unequal ones
def test_parts_in_the_memory_of_whole_gradients_are_those_of_plain_training(
    micro: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small tensors share a message, which packs them; the weight is reduced where it is."""
    data = batch(8, width)
    with closing(engine(0, micro, Net(3, width))) as plain:
        plain.fit(data, epochs=3, batch_size=8)
        expected = plain.parameters()
    monkeypatch.setenv("DISTGRAPH_CHECK", "1")  # of reads, of what is sent, and of the ends of buffers
    for passes in ((), ("-bucket_gradients",)):
        strategy = dg.Strategy(mesh=mesh, batch_axis="dp", zero=1, micro_batches=micro, passes=passes)
        with closing(engine(1, micro, Net(3, width), strategy=strategy)) as split:
            split.fit(data, epochs=3, batch_size=8)
            (compiled,) = split._session.programs.values()
            in_place = any(worker.storage.parts for worker in compiled.workers.values())
            assert in_place == (micro > 1 or bool(passes))  # gradients that were packed are not kept
            for name, value in split.parameters().items():
                np.testing.assert_allclose(value, expected[name], atol=1e-6)


@AS_WHOLE
def test_batches_that_no_axis_splits_use_the_parts_of_a_weight_that_is_annotated_as_whole() -> None:
    mesh, (x, y) = dg.ProcessMesh.grid(dp=2), batch(12, 12)

    class Annotated(nn.Module):
        def __init__(self, *, placed: bool) -> None:
            self.up, self.down, self.placed = nn.Linear(12, 6), nn.Linear(6, 8), placed
            if placed:
                dg.shard_tensor(self.down.weight, mesh, [None, None])

        def forward(self, x: Any) -> Any:
            h = ops.tanh(self.up(x))
            return self.down(dg.shard_tensor(h, mesh, ["dp", None]) if self.placed else h)

    outcomes = []
    for zero in (0, 3):
        strategy = dg.Strategy(zero=zero or None)
        parts = Annotated(placed=zero > 0), nn.MeanSquaredError(), optim.Adam()
        with closing(Engine(*parts, strategy=strategy)) as e:
            losses = e.fit(
                (x, y[:, :8]), batch_size=11, progress=False
            ).losses  # the last batch has one sample
            outcomes.append((losses, e.evaluate((x[:9], y[:9, :8]), 4)["loss"], e.predict(x[:1])))
    for left, right in zip(*outcomes, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(("zero", "axes"), [(3, [None, None]), (2, [None, None]), (3, [None, "tp"])])
def test_a_parameter_that_is_split_although_it_is_annotated_as_whole_is_named(
    zero: int, axes: list[str | None], by_name: bool
) -> None:
    mesh, model = dg.ProcessMesh.grid(dp=2, tp=2), Net(1, 8)
    if by_name:
        dg.shard_tensor(model.layers[0].weight, axes=axes)
    else:
        dg.shard_tensor(model.layers[0].weight, mesh, axes)
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp", zero=zero)
    made = Engine(model, nn.MeanSquaredError(), optim.Adam(lr=1e-3), strategy=strategy)
    x, y = batch(width=8)
    with closing(made), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.prepare((x, y))
        made.evaluate((x, y))
    warned = [str(w.message) for w in caught if "zero of Strategy" in str(w.message)]
    if zero < 3 or "tp" in axes:
        assert not warned
        return
    (message,) = warned
    assert re.match(
        r"zero of Strategy is 3 but layers.0.weight \(test_zero.py:\d+\) is annotated as whole: a rank "
        r"stores a part of it, and gathers the rest for each use; leave the annotation out, or use zero=2",
        message,
    )


pair = dg.ProcessMesh.grid(dp=2)


class Crossed(nn.Module):
    """Its second weight is split over the axis of the batch by what reads it, whose layout a user gives."""

    def __init__(self) -> None:
        self.stem, self.up = nn.Parameter((4, 4)), nn.Parameter((4, 7))
        self.down, self.head = nn.Parameter((7, 4)), nn.Parameter((4, 3))
        dg.shard_tensor(self.up, pair, [None, None])
        dg.shard_tensor(self.down, pair, [None, "dp"])

    def forward(self, x: Any) -> Any:
        dg.shard_tensor(x, pair, ["dp", None])
        with dg.on(pair):
            x = x + ops.tanh(x @ self.stem)
            x = x + ops.tanh(x @ self.up) @ self.down
        with dg.on(dg.ProcessMesh.grid(2, dp=1)):
            return x @ self.head


@AS_WHOLE
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_programs_of_two_sizes_store_every_tensor_alike(zero: int) -> None:
    """A state that completion splits by itself keeps that layout, and a short batch does not change it."""
    rng = np.random.default_rng(3)
    data = tuple(rng.normal(size=(13, width)).astype("f4") for width in (4, 3))
    losses = {}
    for level in (0, zero):
        strategy = dg.Strategy(zero=level, micro_batches=5)
        made = Engine(
            Crossed(), nn.MeanSquaredError(), optim.SGD(lr=0.1, momentum=0.9), strategy=strategy, seed=1
        )
        with closing(made):
            losses[level] = made.fit(data, batch_size=5, progress=False).losses
            assert made.memory.layouts["up.momentum"].spec.axes == ("dp",) or not level
            made.evaluate(data, batch_size=3)
    np.testing.assert_allclose(losses[zero], losses[0], rtol=1e-5)


def test_parameters_that_an_unsplit_program_has_stored_whole_are_named() -> None:
    class Several(Net):
        def forward(self, x: Any) -> Any:
            if x.shape[0] > 1:
                dg.shard_tensor(x, mesh, ["dp", None])
            return super().forward(x)

    made = Engine(
        Several(1, 8), nn.MeanSquaredError(), optim.Adam(lr=1e-3), strategy=dg.Strategy(mesh=mesh, zero=3)
    )
    x, y = batch(width=8)
    with closing(made):
        made.predict(x[:1])
        with pytest.raises(
            ShardingError, match=r"is 3 but layers.0.weight is stored whole by an earlier prog"
        ):
            made.fit((x, y), progress=False)
