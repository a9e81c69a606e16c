"""Complex numbers, branches and large masks in models of torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.frontends.torch_comparison import compare

import distgraph as dg

torch: Any = pytest.importorskip("torch")
nn: Any = torch.nn
pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Rotary(nn.Module):  # type: ignore[misc]
    """Attention with positions as complex factors, as in the reference code of Llama."""

    def __init__(self, length: int = 6, heads: int = 2, size: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(heads * size, heads * size) for _ in range(3))
        angles = torch.outer(torch.arange(length), 100.0 ** -(torch.arange(0, size, 2) / size))
        factors = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("factors", factors.to(torch.complex128), persistent=False)

    def rotated(self, x: Any) -> Any:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        factors = self.factors.view(1, x.shape[1], 1, -1)
        return torch.view_as_real(pairs * factors).flatten(3).type_as(x)

    def forward(self, x: Any) -> Any:
        q, k, v = (f(x).view(*x.shape[:2], self.heads, -1) for f in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (self.rotated(q), self.rotated(k), v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class ComplexParts(nn.Module):  # type: ignore[misc]
    """Sums, quotients, conjugates, moved elements, and what is read of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=DOUBLE))

    def forward(self, x: Any) -> Any:
        z = torch.complex(x @ self.weight, x[:, :1] + self.weight[0])
        unit = torch.polar(torch.ones_like(x[:, 0]), x[:, 1])[:, None]
        w = (z * unit + z.conj() / unit - 2 * z)[:, 1:].transpose(0, 1)
        w = torch.cat([w, w.flip(0)]).sum(0)
        return torch.view_as_real(w), w.real, w.imag * w.abs()


def test_rotary_positions_as_complex_numbers_compute_what_torch_computes() -> None:
    net = Rotary().double()
    net.factors = net.factors.to(torch.complex128)
    compare(net, (torch.zeros(4, 6, 8, dtype=DOUBLE),), tolerance=1e-10)


def test_arithmetic_of_complex_numbers_computes_what_torch_computes() -> None:
    compare(ComplexParts(), (torch.zeros(4, 3, dtype=DOUBLE),), tolerance=1e-10)


class Choice(nn.Module):  # type: ignore[misc]
    """A branch on data, and one inside of it on a constant size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda y: self.up(y) + 1, lambda y: self.down(y).sin(), (x,))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_branch_on_data_is_selected(sign: float) -> None:
    net = Choice().double()
    model = dg.frontends.torch.import_module(net, torch.zeros(4, 6, dtype=DOUBLE))
    x = sign * torch.rand(3, 6, dtype=DOUBLE)
    expected = net.up(x) + 1 if sign > 0 else net.down(x).sin()
    engine = dg.Engine(model)
    np.testing.assert_allclose(engine.predict(x.numpy()), expected.detach().numpy(), atol=1e-12)
    engine.close()


def test_both_branches_are_differentiated() -> None:
    compare(Choice().double(), (torch.zeros(4, 6, dtype=DOUBLE),), tolerance=1e-10)


class InPlace(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        y[:, 0] = 0
        y[:, 1:3] *= 2
        y.add_(1).clamp_(min=-1)
        z = torch.empty_like(y)
        z[:, ::2] = y[:, ::2]
        z[:, 1:6:2] = -y[:, 1:6:2]
        return z.masked_fill_(z > 1, 0.5)


class Lines(nn.Module):  # type: ignore[misc]
    """Windows, orders and running sums along lines."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 9)

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        value, place = torch.kthvalue(y, 3, 1)
        counts = torch.bucketize(y, torch.tensor([-1.0, 0.0, 1.0], dtype=y.dtype))
        windows = y.unfold(1, 3, 2), y.unfold(0, 2, 1)
        far = [torch.cdist(y, y[1:], p) for p in (2.0, 1.0, 3.0, torch.inf)]
        return (
            *far,
            torch.cdist(y, y),
            *windows,
            value,
            place,
            y.median(1)[0],
            y.median(),
            y.logcumsumexp(1),
            y * counts,
        )


@pytest.mark.parametrize("net", [InPlace, Lines])
def test_elements_by_position_and_order_compute_what_torch_computes(net: Any) -> None:
    module = net().double()
    compare(module, (torch.zeros(4, module.linear.in_features, dtype=DOUBLE),), tolerance=1e-10)


class Masked(nn.Module):  # type: ignore[misc]
    """Attention with a causal mask for every sample, from positions for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv = nn.Embedding(9, 4), nn.Linear(4, 12)

    def forward(self, ids: Any) -> Any:
        samples, length = ids.shape
        places = torch.arange(length).expand(samples, -1)
        document = torch.cumsum(places[:, :1] != places[:, :1], 1)  # all tokens are of one document
        mask = (places[:, None, :, None] >= places[:, None, None, :]) & (document == 0)[:, None, None]
        q, k, v = self.qkv(self.tokens(ids)).unsqueeze(1).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1)


def test_a_mask_for_every_sample_is_computed_once() -> None:
    net = Masked().double()
    compare(net, (torch.arange(20).reshape(4, 5) % 9,), tolerance=1e-10)
    model = dg.frontends.torch.import_module(net, torch.zeros(2, 256, dtype=torch.int64))
    graph = dg.trace(model, np.zeros((100_000, 256), np.int32))  # 6 GiB for a mask of every sample
    (attention,) = (op for op in graph.ops if op.kind == "attention")
    assert attention.attrs["causal"]
    assert not [op for op in graph.ops if op.kind in ("greater_equal", "bitwise_and", "where")]


class Places(nn.Module):  # type: ignore[misc]
    """Positions of every sample, which are viewed as one line, as pairs and as complex numbers."""

    def forward(self, x: Any) -> Any:
        places = torch.arange(x.shape[1], dtype=x.dtype).expand(x.shape[0], -1) * 2 + 1
        turned = torch.view_as_complex(places.view(x.shape[0], -1, 2)) * torch.view_as_complex(
            x.view(-1, 2, 2)
        )
        return x.view(-1) + places.view(-1), torch.view_as_real(turned)


def test_constants_of_every_sample_are_viewed_in_other_shapes() -> None:
    compare(Places(), (torch.zeros(4, 4, dtype=DOUBLE),), tolerance=1e-12)
