"""Models of torch and their plans for the tests of `apply_to_torch`, and the program that each rank runs.

    RANK=0 WORLD_SIZE=4 python applied_models.py FOLDER CASE...

Rank 0 writes CASE.json: the losses of the distributed and of the serial model, and the largest difference
between their parameters.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import distgraph as dg
from distgraph.errors import ShardingError
from distgraph.plan.apply.module_checks import check_equal_values

ROWS, LENGTH, VOCABULARY, WIDTH, STEPS = 8, 8, 32, 16, 4
grid = dg.ProcessMesh.grid


class Block(nn.Module):
    """Attention with a packed projection, and a feed-forward layer; dims of the heads are fixed numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        heads = (x.shape[0], LENGTH, 2, WIDTH // 2)
        q, k, v = (t.reshape(heads).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(WIDTH, 2))
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A GPT with a tied table, positions of its own and results by name, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Any) -> dict[str, Any]:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x))}


def decoder() -> Decoder:
    """The same model on every rank."""
    torch.manual_seed(0)
    return Decoder()


def model_of(case: str) -> nn.Module:
    """The model of a case: one of transformers, which a prefix names, or the decoder."""
    if not case.startswith(("llama", "gpt2")):
        return decoder()
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    if case.startswith("llama"):
        widths = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **widths, **heads))
    dropped = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    widths = {"n_layer": 2, "n_embd": WIDTH, "n_head": 4, "n_positions": LENGTH}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **widths, **dropped))


BLOCKS = {"llama": "model.layers.", "gpt2": "transformer.h."}
"""Path of the layers of a model of transformers."""
OUTPUTS = ("qkv.weight", "up.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight",
           "up_proj.weight")  # fmt: skip
INPUTS = ("out.weight", "down.weight", "o_proj.weight", "down_proj.weight", "c_attn.weight", "c_fc.weight")
"""Matrices whose second dim is split; those of GPT-2 have their outputs there."""


SEARCHED: dict[str, dict[str, Any]] = {
    "searched_dp_tp": {"mesh": grid(dp=2, tp=2), "batch_axis": "dp"},
    "searched_zero": {"stages": 1, "memory": "110 KiB"},
    "searched_pp": {"stages": 2, "micro_batches": 2, "schedule": "1f1b"},
}
"""Settings of plans that are searched; the first keeps to the split matrices."""


def _split(model: Any, mesh: dg.ProcessMesh, blocks: str, number: str = "") -> None:
    """Tensor parallelism in the blocks, or in the one of a number."""
    for name, parameter in model.named_parameters():
        if f"{blocks}{number}" in name and name.endswith(OUTPUTS):
            dg.shard_tensor(parameter, mesh, ["tp", None])
        if f"{blocks}{number}" in name and name.endswith(INPUTS):
            dg.shard_tensor(parameter, mesh, [None, "tp"])


@cache
def plan_of(case: str) -> dg.Plan:
    """The plan of a case, annotated on the imported model."""
    net = model_of(case).eval()
    model = dg.frontends.torch.import_module(net, torch.zeros(2, LENGTH, dtype=torch.int64))
    family, _, layout = case.rpartition(":")
    blocks, cluster = BLOCKS.get(family, "blocks."), None
    settings: dict[str, Any] = {"mesh": grid(dp=4), "batch_axis": "dp"}
    if layout == "dp_tp":
        settings["mesh"] = grid(dp=2, tp=2)
        _split(model, settings["mesh"], blocks)
    elif layout in ("zero1", "zero3"):
        settings |= {"zero": int(layout[-1]), "micro_batches": 2}
    elif layout == "pp_dp":
        settings |= {"mesh": grid(dp=2), "micro_batches": 2}
        model.pipeline_boundary(f"{blocks}1", grid(2, dp=2))
    elif layout == "pp_tp":
        settings = {"mesh": grid(tp=2), "micro_batches": 4, "schedule": "gpipe"}
        model.pipeline_boundary(f"{blocks}1", grid(2, tp=2))
        _split(model, grid(tp=2), blocks, "0")
        _split(model, grid(2, tp=2), blocks, "1")
    elif layout in SEARCHED:
        from support.files.clusters import cluster_of  # the program of a rank has no tests on its path
        from support.programs.searched import slow

        cluster = cluster_of(slow(4))
        settings = {"mode": "auto", "seconds": 60} | SEARCHED[layout]
        if "mesh" in settings:
            _split(model, settings["mesh"], blocks)
    engine = dg.Engine(
        model,
        _mean_cross_entropy,
        dg.optim.SGD(lr=0.1, momentum=0.9),
        strategy=dg.Strategy(**settings),
        cluster=cluster,
    )
    x = np.zeros((ROWS, LENGTH), np.int64)
    plan: dg.Plan = engine.prepare((x, x)).portable
    return plan


def _mean_cross_entropy(output: Any, y: Any) -> Any:
    return dg.ops.mean(dg.ops.cross_entropy(output["logits"], y))


def loss_of(output: Any, y: Any) -> Any:
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), torch.as_tensor(y).flatten())


def batches() -> list[tuple[Any, Any]]:
    """A batch a step."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (STEPS, ROWS, LENGTH), generator=draw)
    return [(x, (5 * x + 3) % VOCABULARY) for x in ids]


def serial(case: str) -> tuple[list[float], dict[str, Any]]:
    """Losses and parameters of the model of a case on one rank."""
    net, losses = model_of(case), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches():
        loss = loss_of(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(net.named_parameters(remove_duplicate=False))


def _refusal_of_permuted_values(rank: int) -> str:
    """The error where one rank has the elements of a parameter in another order."""
    net = decoder()
    net.norm.weight.data[int(rank == 1)] = 2.0
    try:
        check_equal_values(net)
    except ShardingError as error:
        return str(error)
    return ""


def main() -> None:
    folder, *cases = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=size)
    refusal = _refusal_of_permuted_values(rank)
    for case in cases:
        expected, parameters = serial(case)
        net = model_of(case)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        plan = dg.Plan.load(Path(folder) / f"{case}.plan.json")
        model = plan.apply_to_torch(net, optimizer)
        arrays = case == "zero3"  # targets in NumPy
        losses = [model.train_step(x, y.numpy() if arrays else y, loss_of) for x, y in batches()]
        found = model.whole_parameters()
        apart = torch.tensor(max((found[n] - parameters[n]).abs().max().item() for n in found))
        dist.all_reduce(apart, dist.ReduceOp.MAX)
        text = {"losses": losses, "serial": expected, "apart": apart.item(), "notes": model.notes}
        text["refusal"] = refusal
        text["shapes"] = {n: list(p.to_local().shape) for n, p in model.module.named_parameters()}
        if dist.get_rank() == 0:
            (Path(folder) / f"{case}.json").write_text(json.dumps(text))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
