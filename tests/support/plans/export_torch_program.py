"""Trains the GPT of `exported.py`, written in torch, as exported plans say: one rank of several.

    RANK=0 WORLD_SIZE=2 python export_torch_program.py FOLDER HEADS RATE CASE...

Reads start.npz, batches.npz and plan_CASE.py; rank 0 writes CASE.json: losses, and the shapes of its blocks
of parameters.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, pipeline
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Any) -> Any:
        q, k, v = (m(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for m in (self.q, self.k, self.v))
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(o.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), FeedForward(width)

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, start: dict[str, Any], heads: int) -> None:
        super().__init__()
        rows, width = start["tokens.weight"].shape
        self.tokens = nn.Embedding(rows, width)
        self.positions = nn.Parameter(torch.empty(start["positions"].shape))
        layers = sum(name.endswith(".norm1.weight") for name in start)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, rows, bias=False)
        linear = {name for name, module in self.named_modules() if isinstance(module, nn.Linear)}
        for name, parameter in self.named_parameters():
            owner, _, last = name.rpartition(".")
            array = torch.from_numpy(start[name])
            parameter.data.copy_(array.T if owner in linear and last == "weight" else array)

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cross_entropy(logits: Any, labels: Any) -> Any:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def blocks_of(model: Any) -> dict[str, list[int]]:
    local = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {n.replace("_checkpoint_wrapped_module.", ""): list(p.shape) for n, p in local.items()}


def train(plan: dict[str, Any], model: Any, data: Any, rate: float) -> tuple[list[float], Any]:
    """One stage: every rank computes its rows."""
    mesh = plan["device_mesh"](0, "cpu")
    plan["parallelize"](model, 0, "cpu", mesh)
    optimizer, losses, micro = torch.optim.Adam(model.parameters(), lr=rate), [], plan["MICRO_BATCHES"]
    shapes = blocks_of(model)
    for x, y in data:
        total = torch.zeros(())
        for a, b in zip(x.chunk(micro), y.chunk(micro), strict=True):
            with loss_parallel() if plan["LOSS_PARALLEL"] else nullcontext():
                loss = cross_entropy(model(plan["rows"](a, mesh)), plan["rows"](b, mesh)) / micro
                loss.backward()
            total += (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses, shapes


def train_pipeline(plan: dict[str, Any], model: Any, data: Any, rate: float) -> tuple[list[float], Any]:
    """Several stages: rank = the position in its stage, and which stage."""
    ranks = [np.asarray(stage.ranks).ravel().tolist() for stage in plan["STAGES"]]
    number = next(i for i, members in enumerate(ranks) if dist.get_rank() in members)
    meshes = [plan["device_mesh"](i, "cpu") for i in range(len(ranks))]
    mesh, rows = meshes[number], plan["rows"]
    groups = [dist.new_group(list(column)) for column in zip(*ranks, strict=True)]
    group = groups[ranks[number].index(dist.get_rank())]
    micro = plan["MICRO_BATCHES"]
    example = rows(data[0][0].chunk(micro)[0], mesh)
    pipe = pipeline(model, (example,), split_spec=plan["SPLIT_POINTS"])
    part = pipe.get_stage_module(number)
    plan["parallelize"](part, number, "cpu", mesh)
    stage = PipelineStage(part, number, len(ranks), torch.device("cpu"), group=group)
    schedule = plan["SCHEDULE"](stage, micro, loss_fn=cross_entropy)
    optimizer, losses = torch.optim.Adam(part.parameters(), lr=rate), []
    last = number == len(ranks) - 1
    for x, y in data:
        a, b = (torch.cat([rows(piece, mesh) for piece in whole.chunk(micro)]) for whole in (x, y))
        found: list[Any] = []
        if number == 0:
            schedule.step(a)
        elif last:
            schedule.step(target=b, losses=found)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack(found).mean().detach() if last else torch.zeros(())
        dist.all_reduce(total)
        losses.append(total.item() / len(ranks[-1]))
    return losses, {name: list(p.shape) for name, p in model.named_parameters()}


def main() -> None:
    folder, heads, rate, *cases = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{folder}/meeting_{size}", rank=rank, world_size=size)
    start = dict(np.load(Path(folder) / "start.npz"))
    stacked = np.load(Path(folder) / "batches.npz")
    pairs = zip(stacked["x"], stacked["y"], strict=True)
    data = [(torch.from_numpy(x).long(), torch.from_numpy(y).long()) for x, y in pairs]
    for case in cases:
        plan = runpy.run_path(str(Path(folder) / f"plan_{case}.py"))
        run = train if len(plan["STAGES"]) == 1 else train_pipeline
        losses, shapes = run(plan, GPT(start, int(heads)), data, float(rate))
        if rank == 0:
            (Path(folder) / f"{case}.json").write_text(json.dumps({"losses": losses, "blocks": shapes}))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
