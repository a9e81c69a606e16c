"""Modules of PyTorch as modules of distgraph: outputs, gradients and training are those of torch."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
from support.frontends.torch_comparison import compare, engine_losses, torch_losses
from support.frontends.torch_models import MLP, ConvNet, TinyGPT

import distgraph as dg
from distgraph import ops

torch: Any = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

IDS = (torch.arange(24).reshape(4, 6) % 23,)


def mean_cross_entropy(logits: Any, labels: Any) -> Any:
    return ops.mean(ops.cross_entropy(logits, labels))


def torch_cross_entropy(logits: Any, labels: Any) -> Any:
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_perceptron_computes_what_torch_computes(size: int) -> None:
    compare(MLP().double(), (torch.zeros(4, 6, dtype=torch.float64),), size=size, tolerance=1e-10)


@pytest.mark.parametrize("training", [True, False])
def test_a_conv_net_with_batch_norm_computes_what_torch_computes(training: bool) -> None:
    net = ConvNet().double().train(training)
    compare(net, (torch.zeros(4, 3, 10, 8, dtype=torch.float64),), tolerance=1e-10)


def test_a_gpt_with_tied_weights_computes_what_torch_computes() -> None:
    model = compare(TinyGPT().double(), IDS, tolerance=1e-10)
    names = [name for name, _ in model.named_parameters()]
    assert "tokens.weight" in names
    assert "head.weight" not in names
    assert model.parameter("head.weight") is model.parameter("tokens.weight")


def test_names_and_values_are_those_of_torch() -> None:
    net = ConvNet()
    model = dg.frontends.torch.import_module(net, torch.zeros(2, 3, 10, 8))
    named = dict(model.named_tensors())
    assert set(named) == set(net.state_dict())
    for name, value in net.state_dict().items():
        np.testing.assert_array_equal(named[name].value, value.numpy())
    assert {n for n, _ in model.named_buffers()} == {n for n, _ in net.named_buffers()}


def test_trained_weights_go_back_into_torch() -> None:
    net, model, batches = make("gpt")
    engine = dg.Engine(model, mean_cross_entropy, dg.optim.SGD(lr=0.1), strategy=STRATEGIES["data"]())
    engine.run((batches[0][0].numpy(), batches[0][1].numpy()))
    arrays = engine.parameters()
    peer = copy.deepcopy(net)
    peer.load_state_dict({name: torch.from_numpy(arrays[first]) for name, first in model.names.items()})
    x = batches[1][0]
    np.testing.assert_allclose(engine.predict(x.numpy()), peer(x).detach().numpy(), rtol=0, atol=1e-5)
    engine.close()


def test_attention_and_norms_are_the_fused_ops() -> None:
    model = dg.frontends.torch.import_module(TinyGPT(), IDS[0])
    graph = dg.trace(model, np.zeros((3, 6), np.int64))
    kinds = [op.kind for op in graph.ops]
    assert (kinds.count("attention"), kinds.count("layer_norm"), kinds.count("gelu")) == (2, 5, 2)
    attention = next(op for op in graph.ops if op.kind == "attention")
    assert attention.attrs["causal"]
    assert attention.scope == "blocks.0.attn"
    assert attention.source.startswith("torch_models.py:")


CASES = {
    "mlp": (MLP, (6,), ()),
    "conv": (ConvNet, (3, 10, 8), ()),
    "gpt": (TinyGPT, None, (6,)),
}


@cache
def make(name: str) -> tuple[Any, Any, Any]:
    """A module of torch, the imported one, and batches of inputs and labels."""
    kind, shape, labels = CASES[name]
    made = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(4):
        x = (
            torch.randint(0, 23, (8, 6), generator=made)
            if shape is None
            else torch.randn(8, *shape, generator=made)
        )
        batches.append((x, torch.randint(0, 5, (8, *labels), generator=made)))
    net = kind()
    return net, dg.frontends.torch.import_module(net, batches[0][0]), batches * 2


STRATEGIES: dict[str, Any] = {
    "serial": dg.Strategy,
    "data": lambda: dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp"),
    "micro": lambda: dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp", micro_batches=2),
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [(n, s) for n in CASES for s in STRATEGIES if (n, s) != ("conv", "micro")],  # its statistics differ
)
def test_training_follows_the_loss_curve_of_torch(name: str, strategy: str) -> None:
    net, model, batches = make(name)
    peer = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-2, weight_decay=0.1)
    engine = dg.Engine(
        model,
        mean_cross_entropy,
        dg.frontends.torch.import_optimizer(optimizer),
        strategy=STRATEGIES[strategy](),
    )
    theirs = torch_losses(peer, torch_cross_entropy, optimizer, batches)
    assert theirs[-1] < theirs[0]
    np.testing.assert_allclose(engine_losses(engine, batches), theirs, rtol=0, atol=1e-4)
