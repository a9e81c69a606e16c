"""Engine against PyTorch on the CPU: same initial weights, same batches, 20 steps of Adam, dropout off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from support.programs.equivalence import (
    GPT_LAYOUTS,
    RATE,
    WIDTH,
    Case,
    Layout,
    Parts,
    batches,
    gathered,
    gpt,
    grid,
    layouts,
    make_engine,
)

from distgraph import nn

pytestmark = pytest.mark.torch

HEADS, FEATURES, LABELS, EPS = 4, 9, 7, 1e-8
SPLIT = {"0.steps.0.weight": (None, "tp"), "2.steps.0.weight": ("tp",)}
TWO = grid(dp=2, tp=2)


def mlp(layout: Layout, dtype: str) -> Parts:
    """Three hidden layers, each with another activation."""
    steps = [(FEATURES, 16, nn.GELU()), (16, 20, nn.SiLU()), (20, 12, nn.Tanh())]
    hidden = [nn.Sequential(nn.Linear(i, o, dtype=dtype), activation) for i, o, activation in steps]
    return Parts(layout, *hidden, nn.Linear(12, LABELS, dtype=dtype))


def torch_mlp(torch: Any, p: Mapping[str, Any], x: Any) -> Any:
    for number, activation in enumerate((torch.nn.functional.gelu, torch.nn.functional.silu, torch.tanh)):
        x = activation(x @ p[f"parts.{number}.steps.0.weight"] + p[f"parts.{number}.steps.0.bias"])
    return x @ p["parts.3.weight"] + p["parts.3.bias"]


def torch_gpt(torch: Any, p: Mapping[str, Any], ids: Any) -> Any:
    functional = torch.nn.functional

    def norm(x: Any, path: str) -> Any:
        return functional.layer_norm(x, (WIDTH,), p[f"{path}.weight"], p[f"{path}.bias"])

    def linear(x: Any, path: str) -> Any:
        return functional.linear(x, p[f"{path}.weight"].T, p[f"{path}.bias"])

    x = functional.embedding(ids, p["parts.0.tokens.weight"]) + p["parts.0.positions"]
    for block in ("parts.1", "parts.2"):
        h = norm(x, f"{block}.norm1")
        q, k, v = (linear(h, f"{block}.attn.{n}").unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "qkv")
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(o.transpose(1, 2).flatten(2), f"{block}.attn.out")
        x = x + linear(
            functional.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.up")), f"{block}.mlp.down"
        )
    return norm(x, "parts.3.norm") @ p["parts.3.weight"]


def torch_losses(forward: Callable[..., Any], start: Mapping[str, np.ndarray], data: Any) -> list[float]:
    import torch

    p = {name: torch.tensor(array, requires_grad=True) for name, array in start.items()}
    optimizer, losses = torch.optim.Adam(p.values(), lr=RATE, eps=EPS), []
    for x, y in data:
        logits = forward(torch, p, torch.from_numpy(x))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), torch.from_numpy(y).long().flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(case: Case, model: Parts, forward: Callable[..., Any], data: Any) -> None:
    engine = make_engine(case, model, EPS)
    try:
        engine.prepare(data[0])
        records = engine.memory.records
        start = {n: a for n, a in gathered(engine).items() if records[n].kind == "param"}
        losses = [engine.run(batch)["loss"] for batch in data]
    finally:
        engine.close()
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.05
    np.testing.assert_allclose(losses, torch_losses(forward, start, data), rtol=0, atol=1e-4)


GPT_CHOICE = [
    Layout("serial"),
    *(layout for layout in layouts("gpt") if layout.name in ("dp2_tp2", "dp2_tp2_pp2", "zero3")),
    *(layout for layout in GPT_LAYOUTS if layout.name in ("vocab", "sequence_tp")),
]


@pytest.mark.parametrize("layout", GPT_CHOICE, ids=lambda layout: layout.name)
@pytest.mark.parametrize("micro", [1, 2])
def test_gpt_follows_the_loss_curve_of_pytorch(layout: Layout, micro: int) -> None:
    case = Case("gpt", layout, micro, dtype="f32", refine="never" if micro > 1 else "conflicts")
    compare(case, gpt(layout, "f32", dropout=0.0), torch_gpt, batches("gpt", "f32", case.size))


@pytest.mark.parametrize(
    "layout",
    [
        Layout("serial"),
        Layout("dp2_tp2", (TWO,), rows="dp", weights=SPLIT),
        Layout("stages_1_3", (grid(0, dp=1), grid(1, dp=3)), rows="dp"),
        Layout("zero", (grid(dp=4),), rows="dp", states="dp"),
    ],
    ids=lambda layout: layout.name,
)
@pytest.mark.parametrize("micro", [1, 3])
def test_mlp_follows_the_loss_curve_of_pytorch(layout: Layout, micro: int, rng: np.random.Generator) -> None:
    data = [
        (rng.standard_normal((18, FEATURES)).astype(np.float32), rng.integers(0, LABELS, 18).astype(np.int32))
        for _ in range(5)
    ] * 4
    compare(Case("mlp", layout, micro, size=18, dtype="f32"), mlp(layout, "f32"), torch_mlp, data)
