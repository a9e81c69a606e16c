"""Ops of torch without a rule as opaque ops: numbers, gradients, layouts, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.files.clusters import cluster_of
from support.frontends.torch_comparison import compare, engine_losses, torch_losses
from support.programs.searched import slow

import distgraph as dg
from distgraph.errors import GraphError, RuntimeFault
from distgraph.ir.parser import parse_graph
from distgraph.ir.printer import print_graph
from distgraph.ir.reference_interpreter import interpret
from distgraph.ops.opaque import FUNCTIONS
from distgraph.passes.analysis.op_work import work_of

torch: Any = pytest.importorskip("torch")

from support.frontends.torch_opaque import RANKED, RankedStack, Ranks, Special  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
frontend = dg.frontends.torch
grid = dg.ProcessMesh.grid


class Calls(torch.nn.Module):  # type: ignore[misc]
    """A linear layer and a function of its result."""

    def __init__(self, function: Any, width: int = 4) -> None:
        super().__init__()
        self.up, self.function = torch.nn.Linear(4, width), function

    def forward(self, x: Any) -> Any:
        return self.function(self.up(x))


def drawn(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_elementwise_ops_and_their_gradients_are_those_of_torch() -> None:
    torch.manual_seed(0)
    compare(Special().double(), (drawn(4, 6),), tolerance=1e-12, opaque="elementwise")


def test_an_op_with_results_of_new_sizes_and_its_gradient() -> None:
    torch.manual_seed(0)
    net = Calls(lambda h: torch.cat(torch.linalg.qr(h.reshape(-1, 5, 3)), 1), 15).double()
    rule = {"aten.linalg_qr.default": "b m! n! -> b m! k!, b k! n!"}
    compare(net, (drawn(4, 4),), tolerance=1e-10, opaque=rule)


@pytest.mark.slow
def test_an_op_of_two_results_in_equal_layers_trains_as_in_torch() -> None:
    torch.manual_seed(0)
    net = RankedStack().double()
    compare(net, (drawn(4, 8),), tolerance=1e-10, opaque=RANKED)
    batches = [(drawn(8, 8) / (1 + n), drawn(8, 3)) for n in range(4)]
    peer = copy.deepcopy(net)
    theirs = torch_losses(
        peer, torch.nn.functional.mse_loss, torch.optim.SGD(peer.parameters(), 0.01), batches
    )
    assert max(theirs) < 10  # sorting magnifies differences where training diverges
    for name, make in SETTINGS.items():
        model = frontend.import_module(net, batches[0][0], opaque=RANKED)
        engine = dg.Engine(model, dg.nn.MeanSquaredError(), dg.optim.SGD(lr=0.01), **make(model))
        assert engine_losses(engine, batches) == pytest.approx(theirs, rel=1e-9), name


def annotated(mesh: Any, *specs: tuple[str, list[Any]], **strategy: Any) -> Any:
    """Options of an engine in which parameters of every layer are annotated."""

    def make(model: Any) -> dict[str, Any]:
        for name, spec in specs:
            for layer in range(5):
                dg.shard_tensor(model.parameter(f"layers.{layer}.{name}"), mesh, spec)
        return {"strategy": dg.Strategy(mesh=mesh, **strategy)}

    return make


def pipeline(model: Any) -> dict[str, Any]:
    model.pipeline_boundary("layers.2", grid(2, dp=2))
    return {"strategy": dg.Strategy(mesh=grid(dp=2), batch_axis="dp", micro_batches=2)}


SETTINGS: dict[str, Any] = {
    "serial": lambda model: {},
    "dp2": annotated(grid(dp=2), batch_axis="dp", zero=3),
    "tp2": annotated(grid(tp=2), ("up.weight", ["tp", None]), ("down.weight", [None, "tp"])),
    "dp2 x tp2": annotated(grid(dp=2, tp=2), ("up.weight", ["tp", None]), batch_axis="dp", micro_batches=2),
    "searched": lambda model: {
        "strategy": dg.Strategy(mode="auto", seconds=5),
        "cluster": cluster_of(slow(2, 2, flops="1 GFLOP/s")),
    },
    "pipeline": pipeline,
}


def test_a_whole_dim_is_gathered_and_others_stay_split() -> None:
    net = Ranks()
    model = frontend.import_module(net, drawn(4, 8).float(), opaque=RANKED)
    mesh = grid(dp=2, tp=2)
    dg.shard_tensor(model.parameter("up.weight"), mesh, ["tp", None])
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp")
    engine = dg.Engine(model, dg.nn.MeanSquaredError(), dg.optim.SGD(lr=0.05), strategy=strategy)
    x = drawn(8, 8).numpy().astype("f4")
    ops = [op for op in engine.prepare((x, x)).build.completed.ops if op.kind.startswith("opaque")]
    assert [(op.kind, str(op.layout)) for op in ops] == [
        ("opaque", "{z0:dp}"),
        ("opaque_gradient", "{z0:dp}"),
    ]


def test_the_text_of_a_graph_needs_no_torch_until_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(4, 8).numpy()
    model = frontend.import_module(Ranks().double(), torch.from_numpy(x), opaque=RANKED)
    graph = dg.trace(model, x)
    again = parse_graph(print_graph(graph))
    assert print_graph(again) == print_graph(graph)
    monkeypatch.delitem(FUNCTIONS, "torch:dgtest.ranked.default")
    values = {name: tensor.value for name, tensor in model.named_tensors()}
    with pytest.raises(RuntimeFault, match=r"'torch:dgtest\.ranked\.default', which is not registered"):
        interpret(again, {"x0": x}, values)


def cubed(x: Any) -> Any:
    return x**3


def cubed_gradient(grads: Any, x: Any) -> Any:
    return grads[0] * 3 * x**2


def test_functions_of_the_user_give_an_op_a_gradient_that_torch_has_not() -> None:
    net, x = Calls(torch.ops.dgtest.cubed).double(), drawn(4, 4)
    name = "dgtest.cubed.default"
    model = frontend.import_module(net, x, opaque={name: "elementwise"})
    engine = dg.Engine(model, dg.nn.MeanSquaredError(), dg.optim.SGD(lr=0.1))
    np.testing.assert_allclose(engine.predict(x.numpy()), net(x).detach().numpy(), rtol=1e-12)
    with pytest.raises(
        GraphError,
        match=r"opaque op torch:dgtest\.cubed\.default \(test_torch_opaque\.py:\d+\), which has no gradient: "
        r"autograd of torch fails .*register_autograd",
    ):
        engine.run((x.numpy(), x.numpy()))
    given = frontend.OpaqueOp(function=cubed, gradient=cubed_gradient)
    weight = net.up.weight.detach().clone().requires_grad_()
    loss = (((x @ weight.T + net.up.bias.detach()) ** 3 - x) ** 2).mean()
    loss.backward()
    model = frontend.import_module(net, x, opaque={name: given})
    engine = dg.Engine(model, dg.nn.MeanSquaredError(), dg.optim.SGD(lr=0.1))
    assert engine.run((x.numpy(), x.numpy()))["loss"] == pytest.approx(loss.item(), rel=1e-12)
    expected = (weight - 0.1 * weight.grad).detach().numpy()
    np.testing.assert_allclose(engine.parameters()["up.weight"], expected, rtol=1e-10)


def test_functions_of_two_models_are_apart() -> None:
    net, x = Calls(torch.ops.dgtest.cubed).double(), drawn(4, 4)

    def imported(power: int) -> Any:
        given = frontend.OpaqueOp(function=lambda h: h**power)
        return dg.Engine(frontend.import_module(net, x, opaque={"dgtest.cubed.default": given}))

    engines = {power: imported(power) for power in (2, 5, 2)}
    h = net.up(x).detach().numpy()
    for power, engine in engines.items():
        np.testing.assert_allclose(engine.predict(x.numpy()), h**power, rtol=1e-12)
    powers = [key for key in FUNCTIONS if key.startswith("user:dgtest.cubed.default")]
    imported(5)
    assert [key for key in FUNCTIONS if key.startswith("user:dgtest.cubed.default")] == powers


def test_a_function_of_another_shape_is_a_fault() -> None:
    net, x = Calls(torch.ops.dgtest.cubed).double(), drawn(4, 4)
    given = frontend.OpaqueOp(function=lambda h: h.sum(0))
    engine = dg.Engine(frontend.import_module(net, x, opaque={"dgtest.cubed.default": given}))
    with pytest.raises(RuntimeFault, match=r"gives arrays of shapes \(4,\) but its rule .* says \(4, 4\)"):
        engine.predict(x.numpy())


def test_a_result_of_another_kind_of_number_is_a_fault() -> None:
    net, x = Calls(torch.ops.dgtest.cubed).double(), drawn(4, 4)
    given = frontend.OpaqueOp(function=lambda h: h * 1j)
    engine = dg.Engine(frontend.import_module(net, x, opaque={"dgtest.cubed.default": given}))
    with pytest.raises(RuntimeFault, match=r"gives an array of complex128 but the op has one of float64"):
        engine.predict(x.numpy())


def test_a_function_cannot_change_its_operands() -> None:
    net, x = Calls(lambda h: torch.ops.dgtest.cubed(h) + h).double(), drawn(4, 4)
    given = frontend.OpaqueOp(function=lambda h: np.multiply(h, 2, out=h))
    engine = dg.Engine(frontend.import_module(net, x, opaque={"dgtest.cubed.default": given}))
    with pytest.raises(ValueError, match="read-only"):
        engine.predict(x.numpy())


def test_all_arguments_of_a_call_reach_the_op() -> None:
    net = Calls(lambda h: torch.ops.dgtest.packed(h, torch.arange(1.0, 5), layout=3)).eval()
    model = frontend.import_module(net, torch.ones(2, 4), opaque={"dgtest.packed.default": "elementwise"})
    x = drawn(2, 4).float()
    np.testing.assert_allclose(dg.Engine(model).predict(x.numpy()), net(x).detach().numpy(), rtol=1e-6)


def test_a_dim_that_no_operand_has_is_whole() -> None:
    net = Calls(torch.ops.dgtest.corners).double()
    rule = {"dgtest.corners.default": "... d! -> ... k!"}
    model = frontend.import_module(net.eval(), drawn(4, 4), opaque=rule)
    engine = dg.Engine(model, strategy=dg.Strategy(mesh=grid(dp=3), batch_axis="dp"))
    x = drawn(7, 4)
    np.testing.assert_allclose(engine.predict(x.numpy(), batch_size=7), net(x).detach().numpy(), rtol=1e-12)


def test_the_forecast_counts_the_stated_traffic() -> None:
    x = drawn(4, 8).numpy()
    works = {}
    for traffic in (1.0, 4.0):
        entry = frontend.OpaqueOp(RANKED["dgtest.ranked.default"], traffic=traffic)
        model = frontend.import_module(
            Ranks().double(), torch.from_numpy(x), opaque={"dgtest.ranked.default": entry}
        )
        (op,) = [op for op in dg.trace(model, x).ops if op.kind == "opaque"]
        works[traffic] = work_of(op, [v.nbytes for v in op.operands]).nbytes
    assert works == {1.0: 3 * 4 * 16 * 8, 4.0: 12 * 4 * 16 * 8}


@pytest.mark.slow
def test_a_plan_of_an_opaque_op_is_saved_applied_and_exported(tmp_path: Any) -> None:
    x = drawn(8, 8).numpy()
    batch = (x, drawn(8, 3).numpy())
    net = RankedStack(2).double()

    def engine(**given: Any) -> dg.Engine:
        model = frontend.import_module(net, torch.from_numpy(x), opaque=RANKED)
        return dg.Engine(model, dg.nn.MeanSquaredError(), dg.optim.SGD(lr=0.05), **given)

    cluster = cluster_of(slow(2, 2, flops="1 GFLOP/s"))
    first = engine(strategy=dg.Strategy(mode="auto", seconds=5), cluster=cluster)
    plan = first.prepare(batch).portable
    plan.save(tmp_path / "p.json")
    loaded = dg.Plan.load(tmp_path / "p.json")
    assert engine(plan=loaded).run(batch)["loss"] == pytest.approx(first.run(batch)["loss"], rel=1e-12)
    assert "layers.0" in plan.export("torch").source


def doubled(x: Any) -> Any:
    y = x.clone()
    torch.ops.dgtest.doubled_(y)
    return y


CUBED, NAME = torch.ops.dgtest.cubed, "dgtest.cubed.default"
LINE = r"\(test_torch_opaque\.py:\d+\)"
REFUSED: list[tuple[Any, Any, str]] = [
    (CUBED, "elementwise", rf"dgtest\.cubed\.default {LINE}: torch does not declare it elementwise; give"),
    (torch.poisson, "elementwise", r"aten\.poisson\.default \(.*\): it draws random numbers"),
    (doubled, "elementwise", rf"{LINE}: it changes an operand in place"),
    (CUBED, {NAME: "a b, c -> a b"}, r"has 2 operands but 1 were given"),
    (CUBED, {NAME: "a b -> a"}, r"makes shapes \[\(2,\)\] but torch"),
    (CUBED, {NAME: "a b@ -> a b"}, r"an index with ~ or @ but an opaque"),
    (CUBED, {NAME: "a b"}, r"rule 'a b' has no '->'"),
    (CUBED, {NAME: "a b -> a b, a"}, r"has 2 results but the op has 1"),
    (CUBED, {NAME: 3}, r"is 3 but must be an index rule or an OpaqueOp"),
    (CUBED, {"dgtest.cubed": "a -> a"}, r"a name has a library, a name and an overload"),
    (torch.tanh, {"aten.tanh.default": "elementwise"}, r"aten\.tanh\.default, which has a rule; leave it"),
    (torch.tanh, {NAME: "elementwise"}, r"Calls computes nothing of its inputs by it"),
    (torch.tanh, 3, r"opaque is 3 but must be \"elementwise\", or a dict"),
]


@pytest.mark.parametrize(("function", "given", "message"), REFUSED)
def test_what_cannot_be_opaque_is_refused(function: Any, given: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        frontend.import_module(Calls(function).eval(), torch.ones(2, 4), opaque=given)


@pytest.mark.parametrize(
    "given", [{"traffic": 0}, {"traffic": np.inf}, {"function": 3}, {"gradient": "x"}, {"rule": 3}]
)
def test_a_malformed_entry_is_refused(given: Any) -> None:
    entry = replace(frontend.OpaqueOp(), **given)
    with pytest.raises(GraphError, match=r"of opaque op dgtest\.cubed\.default is .* but must be"):
        frontend.import_module(
            Calls(torch.ops.dgtest.cubed), torch.ones(2, 4), opaque={"dgtest.cubed.default": entry}
        )
