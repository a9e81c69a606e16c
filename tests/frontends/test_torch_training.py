"""Models of several families train for 20 steps as torch does, serially and by a searched plan on 4 ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from support.files.clusters import cluster_of
from support.frontends.torch_models import (
    MLP,
    ConvNet,
    LSTMLanguageModel,
    MoE,
    TinyGPT,
    TinyLlama,
    Translator,
    UNet,
    ViT,
)
from support.programs.searched import slow

import distgraph as dg
from distgraph import ops

torch: Any = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, BATCHES, SAMPLES = 20, 4, 8
CASES: dict[str, tuple[Callable[[], Any], tuple[Any, ...], tuple[int, ...]]] = {
    "mlp": (MLP, ((6,),), ()),
    "conv": (ConvNet, ((3, 10, 8),), ()),
    "vit": (ViT, ((3, 12, 8),), ()),
    "unet": (UNet, ((3, 12, 8),), (12, 8)),
    "moe": (MoE, ((6, 6),), (6,)),
    "gpt": (TinyGPT, (("ids", 6),), (6,)),
    "llama": (TinyLlama, (("ids", 6),), (6,)),
    "lstm": (LSTMLanguageModel, (("ids", 5),), (5,)),
    "translator": (Translator, (("ids", 6), ("ids", 5)), (5,)),
}
"""Name -> model, shape of a sample of each input ("ids" for integers), shape of the labels of a sample."""


def drawn(shape: Any, made: Any) -> Any:
    if shape[:1] == ("ids",):
        return torch.randint(1, 20, (SAMPLES, *shape[1:]), generator=made)
    return torch.randn(SAMPLES, *shape, generator=made)


@cache
def curve(name: str) -> tuple[Any, list[Any], list[float]]:
    """A model, batches, and the losses of torch."""
    torch.manual_seed(0)
    kind, inputs, labels = CASES[name]
    made = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(BATCHES):
        y = torch.randint(0, 5, (SAMPLES, *labels), generator=made)
        batches.append((*(drawn(shape, made) for shape in inputs), y))
    net = kind().train()
    peer, losses = copy.deepcopy(net), []
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-2, weight_decay=0.1)
    for *x, y in batches * (STEPS // BATCHES):
        logits = peer(*x)
        if name in ("conv", "vit", "mlp") or logits.ndim == 3:
            logits = logits.flatten(0, -2)
        loss = torch.nn.functional.cross_entropy(logits, y if logits.ndim > 2 else y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net, batches, losses


def loss_of(logits: Any, labels: Any) -> Any:
    """Classes are in the last dim, or in dim 1 of images."""
    if logits.ndim == 4:
        logits = ops.transpose(logits, (0, 2, 3, 1))
    return ops.mean(ops.cross_entropy(logits, labels))


STRATEGIES: dict[str, dict[str, Any]] = {
    "serial": {},
    "searched": {
        # statistics of batch norm are those of a micro-batch
        "strategy": dg.Strategy(mode="auto", micro_batches=1),
        "cluster": slow(2, 2, flops="1 GFLOP/s"),
    },
}


@pytest.mark.timeout(300)  # a search of up to a minute of work, on a machine that may be busy
@pytest.mark.filterwarnings("ignore:.*wall clock ended the search:RuntimeWarning")  # any plan trains equally
@pytest.mark.parametrize("setting", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_follow_the_loss_curve_of_torch(name: str, setting: str) -> None:
    net, batches, theirs = curve(name)
    assert theirs[-1] < theirs[0]
    model = dg.frontends.torch.import_module(net, tuple(batches[0][:-1]))
    options = dict(STRATEGIES[setting])
    if "cluster" in options:
        options["cluster"] = cluster_of(options["cluster"])
    optimizer = dg.frontends.torch.import_optimizer(
        torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    )
    engine = dg.Engine(model, loss_of, optimizer, **options)
    arrays = [tuple(x.numpy() for x in batch) for batch in batches] * (STEPS // BATCHES)
    losses = [engine.run(batch)["loss"] for batch in arrays]
    if setting == "searched":
        assert len(engine.plan.portable.ranks) == 4
    engine.close()
    assert losses == pytest.approx(theirs, rel=0, abs=1e-4)
