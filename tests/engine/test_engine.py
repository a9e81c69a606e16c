"""The engine trains the same model to the same numbers under every layout, and refuses what makes no
sense."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.programs.training import LAYOUTS, OUTPUTS, Net, by_hand, data, engine, whole

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine.callbacks import Callback
from distgraph.engine.data import order
from distgraph.errors import GraphError, ResourceError, RuntimeFault, ShardingError
from distgraph.runtime.forecast.traffic_matrix import exchanged_bytes

TIGHT = 1e-10  # fp64; sums of at most a few hundred terms, so that their order changes the last digits only


def test_equals_plain_numpy() -> None:
    """Batches in the documented order, the last one short, against gradient descent written by hand."""
    x, y = data(50)
    trained = engine(optimizer=optim.SGD(lr=0.1))
    trained.prepare((x[:16], y[:16]))
    weights = {name: whole(trained, name) for name in trained.memory.records}
    history = trained.fit((x, y), epochs=3, batch_size=16, progress=False)
    batches = []
    for epoch in range(3):
        rows = order(50, seed=5, epoch=epoch, shuffle=True)
        batches += [(x[rows[i : i + 16]], y[rows[i : i + 16]]) for i in range(0, 50, 16)]
    np.testing.assert_allclose(history.losses, by_hand(weights, batches, 0.1), rtol=TIGHT)
    for name, wanted in weights.items():
        np.testing.assert_allclose(whole(trained, name), wanted, rtol=1e-8, atol=TIGHT)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "serial"])
@pytest.mark.parametrize("micro", [1, 4])
def test_same_losses_under_every_layout(layout: str, micro: int) -> None:
    """With dropout, a batch of 16 over 3 ranks, a short batch of 2, and 4 micro-batches."""
    losses = {}
    for name, parts in (("serial", 1), (layout, micro)):
        trained = engine(name, dropout=0.3, micro=parts)
        trained.fit(data(50), epochs=2, batch_size=16, progress=False)
        losses[name] = trained.history.losses
        trained.close()
    assert len(losses["serial"]) == 8
    assert losses["serial"][0] > losses["serial"][-2]
    np.testing.assert_allclose(losses[layout], losses["serial"], rtol=TIGHT)


@pytest.mark.parametrize("layout", ["serial", "dp2tp3", "pp1_3"])
def test_evaluate_is_the_exact_mean_and_predict_is_whole(layout: str) -> None:
    x, y = data(23)
    model = engine(
        layout,
        metrics={"accuracy": lambda logits, labels: (logits.argmax(-1) == labels).astype("f64").mean()},
    )
    model.fit((x, y), epochs=1, batch_size=8, progress=False)
    weights = {name: whole(model, name) for name in ("up.weight", "up.bias", "down.weight", "down.bias")}
    logits = (
        np.maximum(x @ weights["up.weight"] + weights["up.bias"], 0) @ weights["down.weight"]
        + weights["down.bias"]
    )
    predicted = model.predict(x, batch_size=5)
    np.testing.assert_allclose(predicted, logits, rtol=1e-9)
    result = model.evaluate((x, y), batch_size=10)  # 10, 10, 3
    np.testing.assert_allclose(result["loss"], by_hand(weights, [(x, y)], 0.0)[0], rtol=TIGHT)
    assert result["accuracy"] == pytest.approx(float((logits.argmax(1) == y).mean()), rel=1e-12)
    model.close()


def test_run_and_dataloader_do_what_fit_does() -> None:
    x, y = data(40)
    fitted = engine("tp2")
    fitted.fit((x, y), epochs=2, batch_size=16, progress=False)
    stepped = engine("tp2")
    for epoch in range(2):
        for batch in stepped.dataloader((x, y), batch_size=16, epoch=epoch):
            stepped.run(batch)
    assert stepped.history.losses == fitted.history.losses


def test_bare_arrays_do_not_move_the_place_in_training() -> None:
    x, y = data(16)
    trained = engine()
    trained.fit((x, y), epochs=2, batch_size=8, progress=False)
    trained.run((x[:4], y[:4]))
    assert (trained.step, trained.epoch, trained.position) == (5, 2, 0)


def test_stopping_in_the_middle_of_an_epoch() -> None:
    class Stop(Callback):
        def on_batch_end(self, engine: Any, step: int, logs: dict[str, float]) -> None:
            engine.should_stop = step == 5

    x, y = data(30)
    through, stopped = engine(), engine()
    through.fit((x, y), epochs=3, batch_size=8, progress=False)
    stopped.fit((x, y), epochs=3, batch_size=8, callbacks=[Stop()], progress=False)
    assert (stopped.step, stopped.epoch, stopped.position) == (5, 1, 8)
    with pytest.raises(RuntimeFault, match="goes on after sample 8 of an epoch but the data has 6; give the"):
        stopped.fit((x[:6], y[:6]), epochs=3, batch_size=8, resume=True, progress=False)
    stopped.fit((x, y), epochs=3, batch_size=8, resume=True, progress=False)
    assert stopped.history.losses == through.history.losses
    assert stopped.history.epochs == through.history.epochs


def test_a_loss_that_is_a_sum_is_named_in_micro_batches() -> None:
    """Losses of micro-batches are averaged; a mean that is written by hand passes."""

    def difference(output: Any, target: Any) -> Any:
        return ((output - target) ** 2).sum()

    def mean(output: Any, target: Any) -> Any:
        return difference(output, target) / output.size

    x, y = np.ones((12, 3), "f4"), np.zeros((12, 2), "f4")
    losses = []
    for loss, count in ((mean, 1), (mean, 3), (mean, 4), (difference, 1)):
        trained = dg.Engine(nn.Linear(3, 2), loss, optim.SGD(0.1), strategy=dg.Strategy(micro_batches=count))
        losses.append(trained.run((x, y))["loss"])
    np.testing.assert_allclose(losses, [losses[0]] * 3 + [24 * losses[0]], rtol=1e-6)
    summed = dg.Engine(nn.Linear(3, 2), difference, optim.SGD(0.1), strategy=dg.Strategy(micro_batches=3))
    with pytest.warns(UserWarning, match="loss is a sum over the samples but micro_batches is 3"):
        np.testing.assert_allclose(summed.run((x, y))["loss"], 8 * losses[0], rtol=1e-6)


def test_a_later_program_may_need_more_ranks() -> None:
    """One rank predicts first; the annotated target of training brings in three more."""
    first, second = dg.ProcessMesh([0], ["dp"]), dg.ProcessMesh([1, 2, 3], ["dp"])

    def loss(output: Any, labels: Any) -> Any:
        return nn.CrossEntropy()(dg.reshard(output, second, ["dp", None]), labels)

    class Placed(Net):
        def forward(self, x: Any) -> Any:
            return super().forward(dg.shard_tensor(x, first, [None, None]))

    x, y = data(14)
    grown = dg.Engine(Placed(), loss, optim.Adam(lr=0.01), seed=5)
    before = grown.predict(x)
    grown.fit((x, y), epochs=2, batch_size=7, progress=False)
    plain = engine()
    np.testing.assert_array_equal(plain.predict(x), before)
    plain.fit((x, y), epochs=2, batch_size=7, progress=False)
    np.testing.assert_allclose(grown.history.losses, plain.history.losses, rtol=TIGHT)
    np.testing.assert_allclose(grown.predict(x), plain.predict(x), rtol=1e-9)


def test_a_rank_loads_only_its_rows() -> None:
    """Stage 0 of one rank reads x of all rows; the three ranks of stage 1 their own rows, never the
    others'."""
    x, y = data(32)
    asked: dict[str, set[tuple[int, int]]] = {}

    class Recorder:
        def __len__(self) -> int:
            return 32

        def __getitem__(self, row: int) -> Any:
            return x[row], y[row]

        def __getitems__(self, rows: list[int]) -> Any:
            asked.setdefault(threading.current_thread().name, set()).add((rows[0], len(rows)))
            return [self[row] for row in rows]

    model = engine("dp3")
    batch = next(iter(model.dataloader(Recorder(), batch_size=32, shuffle=False)))
    model.run(batch)
    by_rank = {name: rows for name, rows in asked.items() if name.startswith("rank-")}
    assert by_rank == {"rank-0": {(0, 11)}, "rank-1": {(11, 11)}, "rank-2": {(22, 10)}}
    model.close()


def test_batch_axis_is_plain_data_parallelism() -> None:
    strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=3), batch_axis="dp")
    parallel = dg.Engine(Net(), nn.CrossEntropy(), optim.Adam(lr=0.01), strategy=strategy, seed=5)
    parallel.fit(data(), epochs=1, batch_size=16, progress=False)
    serial = engine()
    serial.fit(data(), epochs=1, batch_size=16, progress=False)
    np.testing.assert_allclose(parallel.history.losses, serial.history.losses, rtol=TIGHT)
    kinds = {c.kind for c in parallel.plan.collectives}
    assert kinds == {"all_reduce"}
    gradients = 8 * (6 * 10 + 10 + 10 * 3 + 3)
    (backward,) = [c for c in parallel.plan.collectives if c.role == "backward"]
    assert backward.nbytes == pytest.approx(2 * (2 / 3) * gradients)


@pytest.mark.parametrize("parts", [2, 3])
def test_arrays_in_the_model_are_split_with_their_readers(parts: int) -> None:
    """Elements that differ, over a dim that does not divide; one array is an operand of a matmul too."""
    slopes, mixed = np.linspace(-1, 2, 10)[None], np.linspace(0, 1, 100).reshape(10, 10)

    class Fixed(nn.Module):
        def __init__(self, mesh: Any) -> None:
            self.out = nn.Linear(10, OUTPUTS, dtype="f64")
            dg.shard_tensor(self.out.weight, mesh, ["tp", None])

        def forward(self, x: Any) -> Any:
            return self.out(x[:, :1] * slopes + ops.tanh(x[:, 1:2] * slopes) @ mixed)

    losses = {}
    for mesh in (None, dg.ProcessMesh.grid(tp=parts)):
        trained = dg.Engine(Fixed(mesh), nn.CrossEntropy(), optim.Adam(lr=0.01), seed=5)
        losses[mesh] = trained.fit(data(30), epochs=2, batch_size=10, progress=False).losses
        trained.close()
    np.testing.assert_allclose(losses.pop(None), *losses.values(), rtol=TIGHT)


def test_dict_batches_and_a_model_that_returns_its_loss() -> None:
    x, y = data(20)

    class Both(Net):
        def forward(self, x: Any, y: Any) -> Any:  # type: ignore[override]
            return ops.mean(ops.cross_entropy(super().forward(x), y))

    named = dg.Engine(Net(), nn.CrossEntropy(), optim.Adam(lr=0.01), seed=5)
    named.fit({"labels": y, "x": x}, batch_size=10, progress=False)
    itself = dg.Engine(Both(), None, optim.Adam(lr=0.01), seed=5)
    itself.fit({"x": x, "y": y}, batch_size=10, progress=False)
    pair = engine()
    pair.fit((x, y), batch_size=10, progress=False)
    assert named.history.losses == itself.history.losses == pair.history.losses


def test_frozen_parameters_stay() -> None:
    model = Net()
    model.up.weight.trainable = False
    trained = dg.Engine(model, nn.CrossEntropy(), optim.SGD(lr=0.5), seed=1)
    trained.prepare(data(8))
    before = whole(trained, "up.weight").copy(), whole(trained, "down.weight").copy()
    trained.fit(data(8), batch_size=8, progress=False)
    np.testing.assert_array_equal(whole(trained, "up.weight"), before[0])
    assert not np.array_equal(whole(trained, "down.weight"), before[1])


def test_prepare_makes_no_memory() -> None:
    class Huge(nn.Module):
        def __init__(self) -> None:
            self.steps = nn.Sequential(
                *(nn.Linear(100_000, 100_000) for _ in range(10))
            )  # 400 GB of parameters

        def forward(self, x: Any) -> Any:
            return self.steps(dg.shard_tensor(x, dg.ProcessMesh.grid(dp=8), ["dp", None]))

    planner = dg.Engine(Huge(), nn.MeanSquaredError(), optim.Adam())
    like = SimpleNamespace(shape=(8, 100_000), dtype="f32")
    plan = planner.prepare((like, like))
    assert len(plan.build.ranks) == 8
    assert sum(c.nbytes for c in plan.collectives if c.role == "backward") >= 2 * 7 / 8 * 10 * 4e10


def test_the_plan_names_layouts_origins_and_bytes() -> None:
    planned = engine("dp2tp2")
    plan = planned.prepare(data(16))
    text = str(plan)
    assert "4 ranks" in text
    assert "[_, tp]" in text
    assert "user training.py:" in text
    explained = plan.explain("up.weight")
    assert "[_, tp] on mesh(dp=2, tp=2)" in explained
    assert "training.py:" in explained
    with pytest.raises(GraphError, match="no tensor 'nonsense'"):
        plan.explain("nonsense")


def test_the_plan_folds_repeated_layers() -> None:
    x = np.zeros((4, 6), "f4")
    deep = dg.Engine(
        nn.Sequential(*(nn.Linear(6, 6) for _ in range(12))), nn.MeanSquaredError(), optim.Adam()
    )
    lines = [line.split() for line in str(deep.prepare((x, x))).splitlines()]
    assert [line[0] for line in lines if line and line[0].startswith("steps")] == [
        "steps.{0..11}.weight",
        "steps.{0..11}.bias",
    ]


def test_a_cluster_places_the_ranks_and_prices_the_collectives() -> None:
    """tp groups exchange activations of every layer: on 2 machines of 8 devices they must not be torn
    apart."""
    mesh = dg.ProcessMesh.grid(tp=4, dp=4)  # identity would put the members of a tp group on both machines
    wide = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    dg.shard_tensor(wide[0].weight, mesh, [None, "tp"])
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp")
    cluster = "dgx_a100_pod"
    planner = dg.Engine(wide, nn.MeanSquaredError(), optim.Adam(), strategy=strategy, cluster=cluster)
    x = np.zeros((4096, 64), "f4")
    plan = planner.prepare((x, x))
    assert plan.mapping is not None
    assert plan.mapping.cost < plan.mapping.identity_cost
    machine = [plan.mapping.cluster.devices[d].machine for d in plan.mapping.devices]
    for group in mesh.groups(("tp",)):
        assert len({machine[rank] for rank in group}) == 1
    assert "across machines" in str(plan)


def test_what_ranks_exchange_adds_up_to_what_they_send() -> None:
    plan = engine("pp1_3", micro=2).prepare(data(16))
    pairs = exchanged_bytes(plan.build.lowered)
    for rank, sent in plan.bytes_per_rank.items():
        assert sum(n for (source, _), n in pairs.items() if source == rank) == pytest.approx(sent)
    assert all(source != target for source, target in pairs)
    assert {source for source, target in pairs if target == 0} == {1, 2, 3}


def test_dump_writes_every_stage(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTGRAPH_DUMP", str(tmp_path / "dump"))
    engine("pp2", micro=2).fit(data(8), batch_size=8, progress=False)
    names = sorted(p.name.partition(".")[2] for p in (tmp_path / "dump").iterdir())
    assert names == [
        "train.completed.dg",
        "train.lowered.dg",
        "train.rank-0.py",
        "train.rank-1.py",
        "train.resharded.dg",
        "train.schedule.txt",
        "train.serial.dg",
    ]
    (source,) = (tmp_path / "dump").glob("*.rank-1.py")
    assert "matmul" in source.read_text()


def test_threads_end_with_the_engine() -> None:
    trained = engine("dp2tp2")
    trained.fit(data(16), batch_size=16, progress=False)
    assert sum(t.name.startswith("rank-") for t in threading.enumerate()) >= 4
    mine = [t for t in threading.enumerate() if t.name.startswith("rank-")][-4:]
    trained.close()
    del trained
    gc.collect()
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()


# What is refused
# ------------------------------------------------------------------------------------------------------


def test_mesh_larger_than_the_cluster() -> None:
    cluster = dg.resources.local_cluster(4)
    too_large = dg.Engine(Net("dp2tp3"), nn.CrossEntropy(), optim.Adam(), cluster=cluster)
    wanted = (
        r"mesh dp=2 x tp=3 needs 6 devices but cluster .* has 4; use a smaller mesh or another resource file"
    )
    with pytest.raises(ResourceError, match=wanted):
        too_large.prepare(data(12))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x, y: (x[:, :5], y), GraphError, "matmul"),
        (lambda x, y: (x, y.astype("f4")), GraphError, "labels are f32.* must be integers"),
        (lambda x, y: (x, y[:-1]), RuntimeFault, "batch.0 has 20, batch.1 has 19"),
        (lambda x, y: (x.astype("c16"), y), RuntimeFault, "complex128.* is not supported"),
        (lambda x, y: (x, x, y), GraphError, r"model takes \(x\) but the batch gives it 2 inputs"),
        (
            lambda x, y: [*x],
            GraphError,
            r"the batch gives it 19 inputs.*; for rows of one array pass np.asarray",
        ),
        (lambda x, y: x, GraphError, "batch has no target"),
        (lambda x, y: ((x, x), y), RuntimeFault, r"one sample each .* such as \(x, z, labels\)"),
        (lambda x, y: None, RuntimeFault, "data is None"),
        (lambda x, y: ((a, b) for a, b in zip(x, y, strict=True)), RuntimeFault, "is a generator"),
        (lambda x, y: (x[:0], y[:0]), RuntimeFault, "0 samples"),
    ],
)
def test_bad_data(change: Any, error: type[Exception], message: str) -> None:
    x, y = data(20)
    with pytest.raises(error, match=message):
        engine("tp2").fit(change(x, y), batch_size=10, progress=False)


def test_a_loss_that_is_missing_is_named() -> None:
    with pytest.raises(GraphError, match=r"gives it 2 inputs: .*; the engine has no loss, so that every"):
        dg.Engine(nn.Linear(6, 3), None, optim.SGD(lr=0.1)).fit(data(20), batch_size=10, progress=False)


def test_bad_settings() -> None:
    with pytest.raises(
        ShardingError, match="mode 'magic' of Strategy does not exist; the modes are manual, semi, "
    ):
        dg.Strategy(mode="magic")
    with pytest.raises(ShardingError, match=r"there is no mesh; give it one, or, .*shard_tensor\(x, mesh"):
        dg.Strategy(batch_axis="dp")
    with pytest.raises(ShardingError, match="axis 'tp' is not in mesh"):
        dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="tp")
    with pytest.raises(GraphError, match="batch_size is 10 but micro_batches is 4"):
        engine(micro=4).fit(data(20), batch_size=10, progress=False)
    with pytest.raises(GraphError, match="has no optimizer"):
        engine(optimizer=None).fit(data(20), batch_size=10, progress=False)
    with pytest.raises(RuntimeFault, match="no plan yet"):
        _ = engine().plan
    manual = dg.Engine(Net(), nn.CrossEntropy(), optim.Adam(), strategy=dg.Strategy(mode="manual"))
    with pytest.raises(GraphError, match=r"parameter up.weight .* has no annotation but the mode is manual"):
        manual.prepare(data(8))


def test_a_rank_that_raises_comes_first_and_ends_all() -> None:
    x, y = data(30)

    class Broken:
        def __len__(self) -> int:
            return 30

        def __getitem__(self, row: int) -> Any:
            if isinstance(row, np.ndarray):
                raise TypeError("one at a time")
            if row == 25 and threading.current_thread().name == "rank-2":
                raise ValueError("page 25 is torn")
            return x[row], y[row]

    broken = engine("dp3")
    with pytest.raises(RuntimeFault, match=r"rank 2 failed: ValueError: page 25 is torn") as caught:
        broken.fit(Broken(), batch_size=30, shuffle=False, progress=False)
    assert isinstance(caught.value.__cause__, ValueError)
    broken.fit((x, y), batch_size=30, progress=False)  # others take their place
    assert len(broken.history.losses) == 1


def test_samples_that_change_their_shape() -> None:
    x, y = data(30)
    ragged = [(x[i] if i < 20 else x[i][:4], y[i]) for i in range(30)]

    with pytest.raises(RuntimeFault, match=r"field batch.0 of sample 2\d is float64\(4,\)"):
        engine("tp2").fit(ragged, batch_size=15, shuffle=False, progress=False)


def test_callbacks_see_every_step_in_order() -> None:
    seen: list[Any] = []

    class Watch(Callback):
        def on_epoch_begin(self, engine: Any, epoch: int, batches: int) -> None:
            seen.append(("begin", epoch, batches))

        def on_batch_end(self, engine: Any, step: int, logs: dict[str, float]) -> None:
            seen.append(("step", step))

        def on_epoch_end(self, engine: Any, epoch: int, logs: dict[str, float]) -> None:
            seen.append(("end", epoch))

    engine().fit(data(20), epochs=2, batch_size=8, drop_last=True, callbacks=[Watch()], progress=False)
    assert seen == [
        ("begin", 0, 2),
        ("step", 1),
        ("step", 2),
        ("end", 0),
        ("begin", 1, 2),
        ("step", 3),
        ("step", 4),
        ("end", 1),
    ]


def test_an_output_that_is_a_parameter_is_that_of_before_the_update() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            self.scale = nn.Parameter((), init=("constant", 2.0), dtype="f64")

        def forward(self, x: Any) -> Any:
            return x * self.scale

    model = Scale()
    trained = dg.Engine(
        model,
        nn.MeanSquaredError(),
        dg.optim.SGD(lr=0.1),
        metrics={"scale": lambda output, target: model.scale.tensor()},
    )
    x = np.ones((4, 3))
    logs = [trained.run((x, 0.0 * x)) for _ in range(2)]
    assert [each["scale"] for each in logs] == pytest.approx([2.0, 2.0 - 0.1 * 2 * 2.0], rel=1e-12)


def test_a_slice_whose_start_is_computed_is_read_anew_in_every_step() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            self.table = nn.Parameter((6, 2), init=("normal", 1.0))

        def forward(self, at: dg.Tensor) -> dg.Tensor:
            return ops.broadcast_to(ops.dynamic_slice(self.table, at[0], (3, 2))[None], (at.shape[0], 3, 2))

    engine = dg.Engine(Cut())
    first = engine.predict(np.array([[0, 0]]))
    (table,) = (engine.parameters()["table"],)
    np.testing.assert_array_equal(first[0], table[:3])
    np.testing.assert_array_equal(engine.predict(np.array([[2, 0]]))[0], table[2:5])
