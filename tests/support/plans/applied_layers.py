"""Rank programs of test_apply_layers.py: models whose split layers DTensor alone does not compute.

`python applied_layers.py FOLDER`, with RANK and WORLD_SIZE: trains every model under its plan, and rank 0
writes the losses of the model on one rank and under the plan to FOLDER/losses.json.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import distgraph as dg

STEPS, CLASSES = 4, 5


class UnevenHeads(nn.Module):  # type: ignore[misc]
    """Attention of three heads, whose projections are split over two ranks."""

    sample, split = (6, 12), {"qkv.weight": ("tp", None), "out.weight": (None, "tp")}

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, CLASSES)

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).reshape(batch, length, 12)).mean(1)


class SplitChannels(nn.Module):  # type: ignore[misc]
    """A convolution with split channels, and a group norm of them."""

    sample, split = (3, 8, 8), {"conv.weight": ("tp", None, None, None)}

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.out(nn.functional.silu(self.norm(self.conv(x))).mean((2, 3)))


MODELS = {"heads": UnevenHeads, "channels": SplitChannels}


def made(name: str) -> tuple[Any, Any, Any]:
    """A model, a batch and its classes."""
    torch.manual_seed(0)
    net = MODELS[name]()
    return net, torch.randn(8, *net.sample), torch.arange(8) % CLASSES


def plan_of(name: str) -> dg.Plan:
    """The plan with the split parameters of a model."""
    net, x, y = made(name)
    model, mesh = dg.frontends.torch.import_module(net, x[:2]), dg.ProcessMesh.grid(tp=2)
    for path, dims in net.split.items():
        dg.shard_tensor(model.parameter(path), mesh, list(dims))
    strategy = dg.Strategy(mesh=mesh)
    engine = dg.Engine(model, dg.nn.CrossEntropy(), dg.optim.SGD(lr=0.1), strategy=strategy)
    plan: dg.Plan = engine.prepare((x.numpy(), y.numpy())).portable
    return plan


def trained(name: str, plan: dg.Plan | None) -> list[float]:
    """Losses on one rank, or under a plan."""
    net, x, y = made(name)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if plan is not None:
        applied = plan.apply_to_torch(net, optimizer)
        return [float(applied.train_step(x, y, nn.functional.cross_entropy)) for _ in range(STEPS)]
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=size)
    losses = {
        name: [trained(name, None), trained(name, dg.Plan.load(folder / f"{name}.json"))] for name in MODELS
    }
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
