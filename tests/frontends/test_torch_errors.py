"""What cannot be imported from PyTorch is refused with the user's line and the way out."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from support.frontends.torch_comparison import compare
from support.frontends.torch_models import MLP

import distgraph as dg
from distgraph import nn, optim
from distgraph.errors import GraphError
from distgraph.frontends.torch.rule_registry import RULES

torch: Any = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

frontend = dg.frontends.torch


class TwoUnknown(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        y = torch.special.bessel_j0(x)
        return torch.cdist(y, torch.lgamma(x))


def test_all_ops_without_a_rule_are_listed_with_their_lines() -> None:
    with pytest.raises(GraphError) as caught:
        frontend.import_module(TwoUnknown().eval(), torch.zeros(3, 4))
    text = str(caught.value)
    assert text.startswith("TwoUnknown uses ")
    for op in ("aten.special_bessel_j0.default", "aten.lgamma.default"):
        assert f"  {op} (test_torch_errors.py:" in text
    assert "register_torch_op" in text


class Inverse(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return torch.linalg.inv(x)


class OfComplex(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return torch.view_as_real(torch.exp(torch.view_as_complex(x)))


@pytest.mark.parametrize(
    ("net", "shape", "listed"),
    [
        (Inverse, (2, 3, 3), ["aten.linalg_inv_ex.default", "aten._linalg_check_errors.default"]),
        (OfComplex, (2, 3, 2), ["aten.exp.default of complex numbers"]),
    ],
)
def test_ops_with_effects_and_of_complex_numbers_are_listed(net: Any, shape: Any, listed: list[str]) -> None:
    with pytest.raises(GraphError, match=f"{net.__name__} uses {len(listed)} op") as caught:
        frontend.import_module(net().eval(), torch.zeros(shape))
    for op in listed:
        assert f"  {op} (test_torch_errors.py:" in str(caught.value)


class Calling(torch.nn.Module):  # type: ignore[misc]
    """A layer, and a function of the module and the input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.fc = function, torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def repeated(net: Any, x: Any) -> Any:
    for _ in range(int(x.max())):
        x = net.fc(x)
    return x


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: x if x.sum() > 0 else -x,
        lambda net, x: x if torch.any(net.fc.weight < 0) else -x,
        lambda net, x: x * float(x.mean()),
        repeated,
    ],
)
def test_control_flow_on_numbers_is_refused_in_one_sentence(function: Any, capfd: Any) -> None:
    """The message of torch is the cause; torch prints nothing in front."""
    with pytest.raises(GraphError) as caught:
        frontend.import_module(Calling(function).eval(), torch.zeros(3, 4))
    text = str(caught.value)
    assert re.fullmatch(
        r"Calling \(test_torch_errors\.py:\d+\) asks for a number that is computed from its inputs or "
        r"parameters \(if, int\(\), float\(\)\), but a program is .*; keep it a tensor, and .*torch\.where.*",
        text,
    )
    assert f":{function.__code__.co_firstlineno + (function is repeated)})" in text
    assert "Could not guard on data-dependent expression" in str(caught.value.__cause__)
    assert capfd.readouterr() == ("", "")


def test_another_reason_of_torch_is_in_front_as_far_as_it_is_short(capfd: Any) -> None:
    def failing(net: Any, x: Any) -> Any:
        raise ValueError("heads must divide " * 50 + "\nsecond line")

    with pytest.raises(
        GraphError, match=r"Calling cannot be exported .*:\d+\): heads must.* \.\.\.; change"
    ) as caught:
        frontend.import_module(Calling(failing).eval(), torch.zeros(3, 4))
    assert len(str(caught.value)) < 450
    assert "second line" in str(caught.value.__cause__)
    with pytest.raises(GraphError, match="reduction dim"):
        frontend.import_module(Calling(lambda net, x: x @ torch.zeros(5, 5)).eval(), torch.zeros(3, 4))
    assert capfd.readouterr() == ("", "")


def without_gradients(change: Any) -> Any:
    def function(net: Any, x: Any) -> Any:
        with torch.no_grad():
            change(net, x)
        return net.fc(x)

    return function


IN_PLACE = (
    r"Calling changes its {} in place \(test_torch_errors\.py:\d+\), which a program cannot do; compute a new"
)
DATA = r"Calling uses \.data of its {} \(test_torch_errors\.py:\d+\), which torch.* write \.detach\(\)"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (without_gradients(lambda net, x: net.fc.weight.mul_(0.5)), IN_PLACE.format("parameter fc.weight")),
        (without_gradients(lambda net, x: net.fc.weight[0].zero_()), IN_PLACE.format("parameter fc.weight")),
        (
            without_gradients(lambda net, x: torch.add(net.fc.bias, 1, out=net.fc.bias)),
            IN_PLACE.format("parameter fc.bias"),
        ),
        (
            without_gradients(lambda net, x: torch.nn.init.ones_(net.fc.bias)),
            IN_PLACE.format("parameter fc.bias"),
        ),
        (without_gradients(lambda net, x: x.t().add_(1)), IN_PLACE.format("input x")),
        (lambda net, x: net.fc(x) + net.fc.bias.detach().add_(1), IN_PLACE.format("parameter fc.bias")),
        (lambda net, x: net.fc(x) + net.fc.weight.data.mul_(0.5)[0], DATA.format("parameter fc.weight")),
        (lambda net, x: net.fc(x) + net.fc.bias.data.add_(1), DATA.format("parameter fc.bias")),
        (lambda net, x: net.fc(x) + net.seen.data.add_(1), DATA.format("buffer seen")),
        (lambda net, x: net.fc(x.data.mul_(2)), DATA.format("input")),
        (
            lambda net, x: setattr(net.fc.bias, "data", net.fc.bias + 1) or net.fc(x),
            DATA.format("parameter fc.bias"),
        ),
    ],
)
def test_what_a_forward_part_changes_in_place_is_refused_with_its_line(
    function: Any, message: str, training: bool
) -> None:
    net = Calling(function).train(training)
    before = net.fc.weight.detach().clone()
    with pytest.raises(GraphError, match=message):
        frontend.import_module(net, torch.zeros(3, 4))
    assert torch.equal(net.fc.weight, before)


def test_what_may_be_changed_in_place() -> None:
    """A copy of a parameter, and a buffer."""

    def function(net: Any, x: Any) -> Any:
        with torch.no_grad():
            scale = net.fc.weight.clone().mul_(0.5)
            net.seen.add_(1)
        return net.fc(x) @ scale + net.seen

    compare(Calling(function).double().train(), (torch.zeros(3, 4, dtype=torch.float64),), tolerance=1e-10)


@pytest.fixture(scope="module")
def model() -> Any:
    return frontend.import_module(MLP().eval(), torch.zeros(2, 6))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((3, 7), "f4", r"input x of MLP is f32\[3, 7\] but was exported as f32\[.*, 6\]"),
        ((3, 6), "f8", r"input x of MLP is f64\[3, 6\] but was exported as f32; convert the array"),
        ((6,), "f4", r"input x of MLP is f32\[6\] but was exported as"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(model: Any, shape: Any, dtype: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        dg.trace(model, np.zeros(shape, dtype))


def test_a_fixed_batch_is_refused_with_another_size() -> None:
    model = frontend.import_module(MLP().eval(), torch.zeros(2, 6), dynamic_batch=False)
    with pytest.raises(GraphError, match=r"input x of MLP is f32\[3, 6\] but was exported as f32\[2, 6\]"):
        dg.trace(model, np.zeros((3, 6), "f4"))


def test_missing_inputs_are_named(model: Any) -> None:
    with pytest.raises(GraphError, match=r"takes the inputs of its example, \(x\)"):
        dg.trace(model)


def test_an_unknown_parameter_is_refused_with_near_names(model: Any) -> None:
    with pytest.raises(GraphError, match=r"MLP has no parameter or buffer 'up.weigth'; near are up.weight"):
        model.parameter("up.weigth")


@pytest.mark.parametrize(
    ("given", "message"), [(nn.Linear(2, 3), "must be a torch.nn.Module"), (3, "is a int but must be")]
)
def test_what_is_no_module_of_torch_is_refused(given: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        frontend.import_module(given, torch.zeros(2, 6))


def test_an_example_of_another_type_is_refused() -> None:
    with pytest.raises(GraphError, match=r"example_inputs is a str but must be a torch\.Tensor"):
        frontend.import_module(MLP(), "x")


def parameters() -> list[Any]:
    return [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.2),
            optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.2),
        ),
        (lambda p: torch.optim.Adam(p, betas=(0.8, 0.9)), optim.Adam(1e-3, beta1=0.8, beta2=0.9)),
        (lambda p: torch.optim.AdamW(p, lr=0.2, eps=1e-6), optim.AdamW(0.2, eps=1e-6)),
    ],
)
def test_optimizers_have_the_hyper_parameters_of_torch(make: Any, expected: Any) -> None:
    found = frontend.import_optimizer(make(parameters()))
    assert type(found) is type(expected)
    for name in ("lr", "weight_decay", "momentum", "nesterov", "beta1", "beta2", "eps"):
        assert getattr(found, name, None) == getattr(expected, name, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.RMSprop, "optimizer is a RMSprop but torch.optim.SGD, Adam and AdamW"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad of Adam is True but only False"),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1), "dampening of SGD is 0.1"),
        (
            lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:], "lr": 0.3}], lr=0.1),
            "lr of SGD is 0.1 in group 0 but 0.3 in group 1",
        ),
    ],
)
def test_optimizers_without_a_counterpart_are_refused(make: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        frontend.import_optimizer(make(parameters()))


@pytest.mark.parametrize(
    ("name", "message"),
    [("relu", "must have a library, a name and an overload"), ("aten.relu.default", "has a rule already")],
)
def test_names_of_rules_are_checked(name: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        frontend.register_torch_op(name)


@torch.library.custom_op("distgraph_tests::twice", mutates_args=())  # type: ignore[untyped-decorator]
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda context, grad: grad * 2)


class Custom(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return twice(self.fc(x))


def test_an_op_of_the_user_can_be_given_a_rule() -> None:
    net, example = Custom().double().eval(), torch.zeros(2, 4, dtype=torch.float64)
    with pytest.raises(GraphError, match=r"distgraph_tests.twice.default \(test_torch_errors.py:"):
        frontend.import_module(net, example)
    try:
        frontend.register_torch_op("distgraph_tests.twice.default")(lambda x: x * 2)
        compare(net, (example,), tolerance=1e-10)
    finally:
        RULES.pop("distgraph_tests.twice.default", None)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": MLP()}, r"model is a MLP of torch .* dg\.frontends\.torch\.import_module"),
        ({"model": nn.Linear(2, 3), "loss": torch.nn.MSELoss()}, "loss is a MSELoss of torch"),
        ({"model": nn.Linear(2, 3), "loss": torch.nn.functional.mse_loss}, "loss is mse_loss of torch"),
        (
            {"model": nn.Linear(2, 3), "optimizer": torch.optim.SGD(parameters(), lr=0.1)},
            r"optimizer is a SGD of torch .* dg\.frontends\.torch\.import_optimizer",
        ),
    ],
)
def test_parts_of_torch_in_an_engine_are_refused_with_the_way_to_import_them(
    parts: dict[str, Any], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        dg.Engine(**parts)


def test_torch_that_is_not_installed_is_an_extra() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import distgraph as dg\n"
        "try:\n    dg.frontends.torch\n"
        "except dg.errors.RuntimeFault as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "torch is not installed" in done.stdout
    assert 'pip install "distgraph[torch]"' in done.stdout


class Instances(torch.nn.Module):  # type: ignore[misc]
    """Normalises instances by an op that updates its running statistics without a record of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("var", torch.ones(2))

    def forward(self, x: Any) -> Any:
        return torch.instance_norm(x, None, None, self.mean, self.var, self.training, 0.1, 1e-5, False)


def test_running_statistics_that_an_op_hides_are_refused_in_training() -> None:
    net = Instances()
    model = frontend.import_module(net, torch.zeros(2, 2, 3, 3))
    engine = dg.Engine(model, nn.MeanSquaredError(), optim.SGD(0.1))
    x = np.ones((2, 2, 3, 3), "f4")
    np.testing.assert_allclose(engine.predict(x), net.eval()(torch.ones(2, 2, 3, 3)).numpy(), rtol=1e-5)
    with pytest.raises(GraphError, match=r"torch.instance_norm hides .* call torch.nn.functional"):
        engine.run((x, x))
