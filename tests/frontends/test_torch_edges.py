"""Where definitions have edges: zeros, hidden rows, repeated positions, no_grad, buffers not saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.frontends.torch_comparison import compare

import distgraph as dg
from distgraph import nn, optim
from distgraph.errors import GraphError

torch: Any = pytest.importorskip("torch")
from distgraph.frontends.torch.exporting import export  # noqa: E402
from distgraph.frontends.torch.opaque_ops import OpaqueOps  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
F = torch.nn.functional


class Of(torch.nn.Module):  # type: ignore[misc]
    """A function of a parameter and the input."""

    def __init__(self, function: Callable[[Any, Any], Any], values: Any) -> None:
        super().__init__()
        self.function, self.p = function, torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        return self.function(self.p, x)


X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
AT_ZERO: dict[str, Callable[[Any, Any], Any]] = {
    "softplus": lambda p, x: F.softplus(p) * x,
    "logsigmoid": lambda p, x: F.logsigmoid(p) * x,
    "cross-entropy with logits": lambda p, x: F.binary_cross_entropy_with_logits(
        p + 0 * x, torch.ones_like(x)
    ),
    "asinh": lambda p, x: torch.asinh(p) * x,
    "relu6": lambda p, x: F.relu6(p) * x,
    "logaddexp": lambda p, x: torch.logaddexp(p, 2 * p) * x,
    "mish": lambda p, x: F.mish(p) * x,
}


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [-2.5, 0.3, 7.0], [-40.0, 1e-9, 30.0]])
@pytest.mark.parametrize("function", AT_ZERO.values(), ids=AT_ZERO)
def test_gradients_at_zero_and_beside_it(function: Callable[[Any, Any], Any], values: list[float]) -> None:
    compare(Of(function, values).eval(), (X,), size=None, tolerance=1e-12)


def test_remainders_of_divisions_that_round() -> None:
    compare(Of(lambda p, x: torch.fmod(x * p, 0.1) + torch.fmod(-x, 0.3), [1.0, 1.0, 1.0]).eval(), (X,))
    ones = torch.ones(4, 3, dtype=torch.float64)
    compare(Of(lambda p, x: torch.fmod(x * p, 0.1), [1.0, -1.0, 2.0]).eval(), (ones,), size=None)


def test_a_query_that_sees_no_key_gets_zeros() -> None:
    visible = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])

    def attend(p: Any, x: Any) -> Any:
        q = (x * p).reshape(1, 1, 4, 3)[:, :, :3]
        return F.scaled_dot_product_attention(q, q + 1, q * 2, attn_mask=visible)

    compare(Of(attend, [0.3, 0.5, 0.7]).eval(), (X,), size=None, tolerance=1e-10, dynamic_batch=False)


def test_a_number_is_scattered_once_to_a_position_that_repeats() -> None:
    class MultiHot(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.arange(5, dtype=torch.float64))

        def forward(self, ids: Any) -> Any:
            hot = torch.zeros(ids.shape[0], 5, dtype=torch.float64).scatter(1, ids, 1.0)
            return hot * self.w

    ids = torch.tensor([[0, 0, 1, 2], [3, 3, 3, 3]])
    compare(MultiHot().eval(), (ids,), size=None, tolerance=1e-12)


class WithoutGradient(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            target = self.b(x)
            scale = target.exp()
        return self.a(x) * target + self.b(x) * scale


@pytest.mark.parametrize("training", [True, False])
def test_what_is_computed_without_gradients_has_none(training: bool) -> None:
    compare(WithoutGradient().train(training), (X,), tolerance=1e-10)


class Centred(torch.nn.Module):  # type: ignore[misc]
    """A buffer that is not saved and that only training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(3, 3, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64), persistent=False)

    def forward(self, x: Any) -> Any:
        h = self.a(x)
        if self.training:
            self.mean.mul_(0.5).add_(h.detach().mean(0) * 0.5)
        return h - self.mean


def test_prediction_reads_a_buffer_that_training_changes() -> None:
    module = Centred()
    engine = dg.Engine(dg.frontends.torch.import_module(module, X), nn.MeanSquaredError(), optim.SGD(0.1))
    theirs = torch.optim.SGD(module.parameters(), lr=0.1)
    y = torch.ones(4, 3, dtype=torch.float64)
    for _ in range(3):
        engine.run((X.numpy(), y.numpy()))
        theirs.zero_grad()
        F.mse_loss(module(X), y).backward()
        theirs.step()
    module.eval()
    np.testing.assert_allclose(engine.predict(X.numpy()), module(X).detach().numpy(), rtol=0, atol=1e-10)
    engine.close()


def _in_place(p: Any, x: Any) -> Any:
    x.mul_(2.0)
    return x * p


def _clamped(p: Any, x: Any) -> Any:
    with torch.no_grad():
        p.clamp_(min=0.1)
    return x * p


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_in_place, r"Of changes its input x in place \(test_torch_edges.py:\d+\)"),
        (_clamped, "Of changes its parameter p in place"),
        (
            lambda p, x: x[x > 0].sum() * p,
            r"aten.index.Tensor with a boolean mask, .*\(test_torch_edges.py:\d+\)",
        ),
        (
            lambda p, x: F.embedding(x.long().abs(), p.reshape(3, 1), scale_grad_by_freq=True),
            r"aten.embedding.default \(test_torch_edges.py:\d+\): .*scale_grad_by_freq=True",
        ),
        (lambda p, x: None, "returns no tensor"),
    ],
)
def test_what_has_no_meaning_is_refused(function: Callable[[Any, Any], Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        compare(Of(function, [1.0, 2.0, 3.0]).eval(), (X.clone(),), size=None)


def test_several_inputs_are_a_tuple() -> None:
    with pytest.raises(GraphError, match=r"example_kwargs is a Tensor but must be a dict; .* as a tuple"):
        dg.frontends.torch.import_module(torch.nn.Bilinear(3, 3, 2), X, X)


class Shifted(torch.nn.Module):  # type: ignore[misc]
    """Adds a constant of its mode."""

    def forward(self, x: Any) -> Any:
        return x + torch.tensor([1.0, 2.0] if self.training else [2.0, 1.0])


@pytest.mark.parametrize(
    ("net", "equal"),
    [(torch.nn.Linear(2, 2), True), (torch.nn.Dropout(0.5), False), (Shifted(), False)],
    ids=["linear", "dropout", "constant"],
)
def test_a_mode_that_computes_the_same_is_not_decomposed_again(net: Any, equal: bool) -> None:
    given = (torch.zeros(2, 2),), {}, None, True, OpaqueOps()
    training = export(net.train(), *given)
    assert (export(net.eval(), *given, training) is training) == equal
