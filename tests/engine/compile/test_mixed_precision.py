"""Training in 16 bits: the losses of f32 within the rounding of the type, the same in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.mixed_precision import EPS, STEPS, batch, engine, losses, serial_losses

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine.callbacks import CSVLogger
from distgraph.engine.compile.train_graph import train_graph
from distgraph.errors import DistGraphError, GraphError, NonFiniteError, ShardingError
from distgraph.ir.collective_registry import is_collective
from distgraph.ir.graph import Graph
from distgraph.runtime.execute.checkpoint import Checkpoint


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_trains_to_the_losses_of_f32(precision: str) -> None:
    found = serial_losses(precision)
    # the logits come from several products, each of them rounded
    np.testing.assert_allclose(found, serial_losses(None), rtol=2 * EPS[precision])
    assert found[-1] < found[0] - 0.4
    assert found != serial_losses(None)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "dp2tp2pp2"])
def test_layouts_train_as_one_rank(layout: str, precision: str) -> None:
    trained, whole = engine(layout, precision), engine("serial", precision)
    losses(trained, 1), losses(whole, 1)
    if "tp2" not in layout:  # the same products, and gradients that are reduced in f32
        expected = whole.parameters()
        for name, array in trained.parameters().items():
            np.testing.assert_allclose(array, expected[name], atol=2e-7, rtol=1e-6)
    found = [*trained.history.losses, *losses(trained, STEPS - 1)]
    if layout == "pp2":
        assert found == serial_losses(precision)  # the same arithmetic on other ranks
    # a difference of one bit in f32 can round a weight to the next number in 16 bits
    np.testing.assert_allclose(found, serial_losses(precision), rtol=2 * EPS[precision])


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero(zero: int) -> None:
    trained = engine("dp2", "bf16", zero=zero)
    np.testing.assert_allclose(losses(trained), serial_losses("bf16"), rtol=2 * EPS["bf16"])
    compiled = next(iter(trained._session.programs.values()))
    moved = messages(compiled.build.lowered)
    assert moved["comm.reduce_scatter"] == {"f32"}
    assert moved["comm.all_gather"] == ({"bf16", "f32"} if zero == 3 else {"f32"})
    gathered = [
        op
        for op in compiled.build.lowered.ops
        if op.kind == "comm.all_gather" and op.role in ("forward", "backward")
    ]
    matrices = {value.dtype for op in gathered for value in op.results if len(value.shape) > 1}
    assert matrices == ({"bf16"} if zero == 3 else set())


def messages(graph: Graph) -> dict[str, set[str]]:
    """Kind of collective -> dtypes that it moves, numbers apart."""
    found: dict[str, set[str]] = {}
    for op in graph.ops:
        if is_collective(op):
            found.setdefault(op.kind, set()).update(v.dtype for v in op.results if v.shape)
    return found


def test_activations_move_in_16_bits() -> None:
    trained = engine("dp2tp2pp2", "bf16")
    trained.prepare(batch())
    graph = next(iter(trained._session.programs.values())).build.lowered
    sent = [op.result for op in graph.ops if op.kind == "comm.transfer" and op.result.shape]
    assert sent
    assert {value.dtype for value in sent if value.shape == (4, 8, 16)} == {"bf16"}
    reduced = [v for op in graph.ops if op.kind == "comm.all_reduce" for v in op.results]
    assert {v.dtype for v in reduced if v.shape == (4, 8, 16)} == {"bf16"}


def test_memory_and_rates_are_forecast() -> None:
    bytes_of, seconds_of = {}, {}
    for precision in (None, "bf16"):
        forecast = _large(precision).forecast("dgx_a100_pod")
        bytes_of[precision] = max(memory.total for memory in forecast.memory.values())
        seconds_of[precision] = forecast.step_seconds
    assert bytes_of["bf16"] < 0.75 * bytes_of[None]  # activations halve, parameters have a copy
    assert seconds_of["bf16"] < 0.3 * seconds_of[None]  # 312 TFLOP/s instead of 19.5


def _large(precision: str | None) -> dg.Engine:
    strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp", precision=precision)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU())))
    trained = dg.Engine(model, nn.MeanSquaredError(), optim.SGD(0.1), strategy=strategy)
    trained.prepare((np.empty((16384, 1024), "f4"), np.empty((16384, 1024), "f4")))
    return trained


# loss scaling


@pytest.mark.parametrize("layout", ["dp2", "dp2tp2pp2"])
def test_overflow_leaves_the_step_out_and_halves_the_scale(layout: str) -> None:
    precision = dg.MixedPrecision("fp16", loss_scale=2.0**24, growth_interval=2)
    trained = engine(layout, precision)
    trained.prepare(batch())
    trained.run(batch())
    records = trained.memory.records
    before = {
        (name, rank): trained.memory.block(name, rank).tobytes()
        for name, record in records.items()
        for rank in record.attr.mesh.members
    }
    assert trained.history.skipped == [1]
    scales = [scale(trained)]
    while trained.history.skipped[-1] == trained.step:
        assert before == {(name, rank): trained.memory.block(name, rank).tobytes() for name, rank in before}
        trained.run(batch())
        scales.append(scale(trained))
    skipped = trained.history.skipped
    assert scales == [2.0 ** (24 - n) for n in range(1, len(skipped) + 1)] + [scales[-1]]
    trained.run(batch())
    assert scale(trained) == 2 * scales[-1]  # two steps without overflow


def test_an_epoch_whose_steps_all_overflow_has_no_loss(tmp_path: Path) -> None:
    precision = dg.MixedPrecision("fp16", loss_scale=2.0**24)
    trained, path = engine("dp2", precision), tmp_path / "log.csv"
    history = trained.fit(
        batch(), epochs=12, batch_size=len(batch()[0]), progress=False, callbacks=[CSVLogger(path)]
    )
    assert 0 < len(history.skipped) < 12
    assert [step for step, loss in enumerate(history["loss"], 1) if np.isnan(loss)] == history.skipped
    assert len(path.read_text().splitlines()) == 13
    trained.save(tmp_path / "checkpoint")
    again = engine("dp2", precision)
    again.load(tmp_path / "checkpoint")
    np.testing.assert_array_equal(again.history["loss"], history["loss"])


def scale(trained: dg.Engine) -> float:
    return float(trained._scalars()["loss_scale"])


def test_resumed_training_is_equal_bit_for_bit(tmp_path: Path) -> None:
    precision = dg.MixedPrecision("fp16", loss_scale=2.0**18, growth_interval=3)
    first = engine("dp2pp2", precision)
    losses(first, 4)
    first.save(tmp_path / "saved")
    second = engine("tp2", precision)
    second.prepare(batch())
    second.load(tmp_path / "saved")
    assert scale(second) == scale(first)
    assert second.history.skipped == first.history.skipped
    third = engine("dp2pp2", precision)
    third.prepare(batch())
    third.load(tmp_path / "saved")
    assert losses(third, 4) == losses(first, 4)
    assert scale(third) == scale(first)
    ends = {name: (array, third.parameters()[name]) for name, array in first.parameters().items()}
    assert all(a.dtype == "f4" and a.tobytes() == b.tobytes() for a, b in ends.values())
    stored = Checkpoint.open(tmp_path / "saved").index["tensors"]
    assert {entry["dtype"] for entry in stored.values()} == {"f32"}


def test_a_checkpoint_without_a_scale_keeps_that_of_the_strategy(tmp_path: Path) -> None:
    first = engine("serial", None)
    losses(first, 1)
    first.save(tmp_path / "saved")
    second = engine("serial", "fp16")
    second.prepare(batch())
    second.load(tmp_path / "saved")
    assert scale(second) == 65536


def test_a_gradient_that_no_scale_repairs_is_refused() -> None:
    def loss(output: Any, target: Any) -> Any:
        return ops.mean(ops.sqrt(target * ops.square(output)))  # a gradient of 0/0 at target 0

    precision = dg.MixedPrecision("fp16", loss_scale=2.0)
    strategy = dg.Strategy(precision=precision)
    trained = dg.Engine(nn.Linear(3, 2), loss, optim.SGD(0.1), strategy=strategy)
    rows = np.ones((4, 3), "f4"), np.zeros((4, 2), "f4")
    with np.errstate(all="ignore"):
        trained.run(rows)
        assert trained.history.skipped == [1]
        assert scale(trained) == 1
        with pytest.raises(NonFiniteError, match="gradient of weight"):
            trained.run(rows)


# lists of ops, and the other programs


def graph_of(precision: Any) -> Graph:
    def model(x: Any) -> Any:
        return ops.softmax(ops.gelu(linear(x)))

    linear = nn.Linear(4, 6)
    shapes = ((8, 4), "f32"), ((8, 6), "f32")
    return train_graph(model, shapes, nn.MeanSquaredError(), optim.SGD(0.1), dg.Strategy(precision=precision))


def dtypes(graph: Graph) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for op in graph.ops:
        found.setdefault(op.kind, set()).update(v.dtype for v in op.results)
    return found


def test_products_are_narrow_and_sensitive_ops_wide() -> None:
    found = dtypes(graph_of("bf16"))
    assert found["matmul"] == found["gelu"] == found["gelu_grad"] == {"bf16"}
    assert found["softmax"] == found["softmax_grad"] == found["reduce_sum"] == {"f32"}
    assert found["param"] == found["accumulate"] == {"f32"}
    assert found["einsum"] == {"f32"}  # the gradient of the weight leaves its product in f32


def test_lists_change_that() -> None:
    allowed = dtypes(graph_of(dg.MixedPrecision(allow=["softmax"], deny=["gelu"])))
    assert allowed["softmax"] == {"bf16"}
    assert allowed["gelu"] == {"f32"}


def test_outputs_have_the_types_of_the_model() -> None:
    trained = engine("serial", "bf16")
    losses(trained, 1)
    assert trained.evaluate(batch())["loss"] < 4
    predicted = dg.Engine(nn.Linear(4, 6), strategy=dg.Strategy(precision="bf16")).predict(
        np.ones((2, 4), "f4")
    )
    assert predicted.dtype == np.float32


def test_a_convolution() -> None:
    def model(x: Any) -> Any:
        return ops.reshape(ops.relu(conv(x)), (x.shape[0], -1))

    conv = nn.Conv2d(2, 3, 3)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(6, 2, 5, 5)).astype("f4"), rng.normal(size=(6, 27)).astype("f4")
    results = []
    for precision, mesh in ((None, None), ("bf16", None), ("bf16", dg.ProcessMesh.grid(dp=2))):
        strategy = dg.Strategy(precision=precision, mesh=mesh, batch_axis=mesh and "dp")
        trained = dg.Engine(model, nn.MeanSquaredError(), optim.SGD(0.5), strategy=strategy)
        results.append([trained.run(rows)["loss"] for _ in range(4)])
    np.testing.assert_allclose(results[1], results[0], rtol=EPS["bf16"])
    np.testing.assert_allclose(results[2], results[1], rtol=2e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"precision": "f32"}, "precision 'f32' of Strategy does not exist"),
        ({"precision": "fp16", "nonfinite": "warn"}, "applies every update"),
        ({"precision": "bf16", "mode": "mesh2d"}, "add partial products in the type of the operands"),
        ({"precision": dg.MixedPrecision(deny=["matmull"])}, "did you mean 'matmul'"),
        (
            {"precision": dg.MixedPrecision("fp16", deny=["matmul", "einsum"])},
            "no op of @train is computed",
        ),
    ],
)
def test_errors(given: dict[str, Any], message: str) -> None:
    shapes = ((8, 4), "f32"), ((8, 6), "f32")
    with pytest.raises(DistGraphError, match=message):
        train_graph(nn.Linear(4, 6), shapes, nn.MeanSquaredError(), optim.SGD(0.1), dg.Strategy(**given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "f16"}, "dtype of MixedPrecision is 'f16'"),
        ({"deny": "softmax"}, "deny of MixedPrecision is 'softmax' but must be a list"),
        ({"allow": ["exp"], "deny": ["exp"]}, "both name exp"),
        ({"loss_scale": 0}, "loss_scale of MixedPrecision is 0"),
        (
            {"loss_scale": 8},
            "loss_scale of MixedPrecision is 8 but bf16 scales no loss; leave it out, or use",
        ),
        ({"backoff": 1}, "backoff of MixedPrecision is 1 .* below 1"),
        ({"growth_interval": 0}, "growth_interval of MixedPrecision is 0"),
    ],
)
def test_errors_of_the_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        dg.MixedPrecision(**given)


def test_distributed_algorithms_of_products_are_refused() -> None:
    mesh = dg.ProcessMesh.grid(x=2, y=2)
    product = dg.shard_op(nn.Linear(8, 8, bias=False), mesh, algorithm="collective", dataflow="OS")
    strategy = dg.Strategy(precision="bf16")
    trained = dg.Engine(product, nn.MeanSquaredError(), optim.SGD(0.1), strategy=strategy)
    with pytest.raises(ShardingError, match="leave precision of Strategy or the algorithm out"):
        trained.prepare((np.empty((8, 8), "f4"), np.empty((8, 8), "f4")))


@pytest.mark.parametrize(
    ("use", "exact"),
    [
        (lambda x, w: ops.matmul(x, w[:, :6]) + ops.tanh(ops.matmul(x, w[:, 6:])), True),
        (lambda x, w: ops.matmul(x, ops.concat([-w, w], 1)), True),
        (lambda x, w: ops.matmul(x, w * 0.5 + w / 3.0), True),
        (lambda x, w: ops.matmul(x, ops.tanh(w)), False),
    ],
    ids=["slice", "concat", "factor", "tanh"],
)
def test_gradients_of_parts_of_a_parameter_are_not_rounded(use: Any, exact: bool) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            self.w = nn.Parameter((4, 12))

        def forward(self, x: Any) -> Any:
            return ops.mean(use(x, self.w))

    graph = train_graph(Parts(), (((8, 4), "f32"),), None, optim.SGD(0.1), dg.Strategy(precision="bf16"))
    made = [op for op in graph.ops if op.role == "backward" and op.kind in ("matmul", "einsum")]
    assert made
    assert {op.result.dtype for op in made} == {"f32" if exact else "bf16"}
    assert all(v.dtype == "bf16" for op in made for v in op.operands)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_search_knows_the_precision(precision: str) -> None:
    model = nn.Linear(8, 8)
    strategy = dg.Strategy(mode="auto", precision=precision, seconds=5)
    trained = dg.Engine(model, nn.MeanSquaredError(), optim.SGD(0.1), strategy=strategy, cluster="local")
    trained.prepare((np.empty((8, 8), "f4"), np.empty((8, 8), "f4")))
    half = dg.MixedPrecision(precision).half
    assert half in str(next(iter(trained._session.programs.values())).build.lowered)


def test_a_plan_in_fp16_is_saved_and_used(tmp_path: Path) -> None:
    x, y = _numbers(8, 4), _numbers(8, 6)
    layout = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp", precision="fp16", micro_batches=2)
    planned = _small(layout)
    found = [planned.run((x, y))["loss"] for _ in range(2)]
    planned.plan.save(tmp_path / "fp16.plan")
    plan = dg.Plan.load(tmp_path / "fp16.plan")
    second = _small(dg.Strategy(precision="fp16"), plan=plan)
    assert [second.run((x, y))["loss"] for _ in range(2)] == found


def _small(strategy: dg.Strategy, loss: Any = None, **given: Any) -> dg.Engine:
    loss = loss or nn.MeanSquaredError()
    return dg.Engine(nn.Linear(4, 6), loss, optim.SGD(0.1), strategy=strategy, seed=1, **given)


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype("f4")


def test_fp16_with_a_loss_in_f64() -> None:
    def loss(output: Any, target: Any) -> Any:
        return ops.mean(ops.square(output.astype("f64") - target.astype("f64")))

    batch = _numbers(8, 4), _numbers(8, 6)
    found = [
        [each.run(batch)["loss"] for _ in range(3)]
        for each in (_small(dg.Strategy(precision=p), loss) for p in (None, "fp16"))
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=EPS["fp16"])
    assert found[1] != found[0]


@pytest.mark.parametrize("precision", ["fp16", dg.MixedPrecision("bf16", deny=["matmul", "einsum"])])
def test_a_step_function_has_the_precision_of_its_strategy(precision: Any) -> None:
    def loss(p: Any, x: Any, y: Any) -> Any:
        return ((x @ p["w"] - y) ** 2).mean()

    def step(p: Any, batch: Any) -> Any:
        return {"w": p["w"] - dg.grad(loss)(p, *batch)["w"]}, {}

    parallel = dg.parallelize(step, donate=False, strategy=dg.Strategy(precision=precision))
    message = "not scaled, so small .* use precision=" if precision == "fp16" else "no op of .* is computed"
    with pytest.raises(GraphError, match=message):
        parallel({"w": _numbers(4, 6)}, (_numbers(8, 4), _numbers(8, 6)))


def test_the_pass_can_be_left_out() -> None:
    strategy = dg.Strategy(precision="bf16", passes=["-mixed_precision"])
    shapes = ((8, 4), "f32"), ((8, 6), "f32")
    graph = train_graph(nn.Linear(4, 6), shapes, nn.MeanSquaredError(), optim.SGD(0.1), strategy)
    assert {v.dtype for v in graph.values.values()} == {"f32"}
