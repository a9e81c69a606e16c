"""Gradients and sizes that an exported graph does not contain are refused, never computed otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import ops, optim
from distgraph.errors import GraphError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Reversed(torch.autograd.Function):  # type: ignore[misc]
    """The identity, whose gradient has the opposite sign."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return -gradient


class WithFunction(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return Reversed.apply(self.inner(x))


class WithHook(WithFunction):
    def forward(self, x: Any) -> Any:
        hidden = self.inner(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: 2 * gradient)
        return hidden


class StraightThrough(WithFunction):
    def forward(self, x: Any) -> Any:
        hidden = self.inner(x)
        return hidden + (hidden.round() - hidden).detach()


def of_parameter() -> Any:
    net = torch.nn.Linear(6, 6)
    net.weight.register_hook(lambda gradient: 0 * gradient)
    return net


def of_module() -> Any:
    net = torch.nn.Sequential(torch.nn.Linear(6, 6))
    net[0].register_full_backward_hook(lambda module, inside, outside: None)
    return net


def engine(net: Any, x: Any) -> dg.Engine:
    model = dg.frontends.torch.import_module(net, x[:3])
    return dg.Engine(model, lambda output, y: ops.mean((output - y) ** 2), optim.SGD(lr=1.0))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (WithFunction, r"the backward of Reversed \(test_torch_gradients.py:[0-9]+\)"),
        (WithHook, r"a hook on a gradient \(test_torch_gradients.py:[0-9]+\)"),
        (of_parameter, "a hook on the gradient of parameter weight"),
        (of_module, "a backward hook of module 0"),
    ],
)
def test_gradients_that_are_not_those_of_the_forward_part(make: Any, text: str) -> None:
    """Training is refused; predictions are those of torch."""
    net, x = make(), torch.randn(8, 6)
    trained = engine(net, x)
    with pytest.raises(GraphError, match=rf"are not those of its forward part: {text}; torch.export does"):
        trained.fit((x.numpy(), x.numpy()), batch_size=8, progress=False)
    np.testing.assert_allclose(
        trained.predict(x.numpy(), batch_size=8), net(x).detach().numpy(), rtol=1e-5, atol=1e-6
    )


def test_a_gradient_that_passes_a_function_by_detach() -> None:
    net, x, y = StraightThrough(), torch.randn(8, 6), torch.randn(8, 6)
    before, trained = net.inner.weight.detach().numpy().copy(), engine(net, x)
    trained.fit((x.numpy(), y.numpy()), batch_size=8, progress=False)
    ((net(x) - y) ** 2).mean().backward()
    moved = before - trained.parameters()["inner.weight"]
    np.testing.assert_allclose(moved, net.inner.weight.grad.numpy(), rtol=1e-4, atol=1e-6)


class BySize(torch.nn.Module):  # type: ignore[misc]
    """Another computation for large batches, or for some numbers of columns."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Any) -> Any:
        return x * 2 if self.of(x) else x * 100


@pytest.mark.parametrize(
    ("of", "example", "right", "wrong", "text"),
    [
        (lambda x: x.shape[0] > 4, 2, 3, 16, r"x.shape\[0\] <= 4"),
        (lambda x: x.shape[0] > 4, 8, 5, 3, r"x.shape\[0\] >= 5"),
        (lambda x: x.shape[0] % 4 == 0, 2, 6, 8, r"Ne\(Mod\(x.shape\[0\], 4\), 0\)"),
    ],
)
def test_sizes_for_which_the_code_takes_another_way(
    of: Any, example: int, right: int, wrong: int, text: str
) -> None:
    net = BySize(of)
    model = dg.frontends.torch.import_module(net, torch.ones(example, 6))
    predicting = dg.Engine(model, lambda output, y: ops.mean(output), optim.SGD(lr=1.0))
    x = torch.randn(right, 6)
    np.testing.assert_array_equal(predicting.predict(x.numpy(), batch_size=right), net(x).numpy())
    with pytest.raises(GraphError, match=rf"was exported for inputs with {text} but x is f32\[{wrong}, 6\]"):
        predicting.predict(np.ones((wrong, 6), np.float32), batch_size=wrong)


class Scaled(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return x * x.max().item()


def test_a_number_of_python_that_depends_on_data() -> None:
    with pytest.raises(
        GraphError, match=r"aten._local_scalar_dense.default \(test_torch_gradients.py:[0-9]+"
    ):
        dg.frontends.torch.import_module(Scaled(), torch.ones(4, 6))
