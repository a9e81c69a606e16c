"""Small problems of the search: shallow models of seven kinds on clusters of four to sixty-four devices.

A whole search of one takes a few CPU seconds. No constant of the search was chosen by these, so that a study
of constants may use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from distgraph import nn, ops, optim
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.engine.data import Field
from distgraph.models import (
    GPT,
    GPTConfig,
    GShardMoE,
    Llama,
    LlamaConfig,
    MoEConfig,
    WideResNet,
    WideResNetConfig,
)
from distgraph.plan.constraints import SearchConstraints
from distgraph.plan.strategy import Strategy
from distgraph.resources import Cluster
from distgraph.resources.cluster_builder import build_cluster
from distgraph.resources.schema import check
from distgraph.tracing.tensor import Tensor

_FILES = Path(__file__).parents[2] / "resources" / "files"
_TOKENS: Field = ((512,), "i32")


class EncoderDecoder(nn.Module):
    """A transformer with an encoder and a decoder that attends to it, as T5 (Raffel et al., 2020)."""

    def __init__(self, width: int, heads: int, layers: int, dtype: str) -> None:
        self.table = nn.Embedding(32_128, width, dtype=dtype)
        self.encoder = [
            nn.TransformerBlock(width, heads, causal=False, activation=ops.relu, dtype=dtype)
            for _ in range(layers)
        ]
        self.decoder = [
            nn.TransformerBlock(width, heads, activation=ops.relu, dtype=dtype) for _ in range(layers)
        ]
        self.cross = [nn.MultiHeadAttention(width, heads, dtype=dtype) for _ in range(layers)]
        self.norms = [nn.LayerNorm(width, dtype=dtype) for _ in range(layers)]
        self.head = nn.Linear(width, 32_128, bias=False, dtype=dtype)

    def forward(self, source: Any, target: Any) -> Tensor:
        """source [b, s] and target [b, t] -> logits [b, t, words]."""
        memory, y = self.table(source), self.table(target)
        for block in self.encoder:
            memory = block(memory)
        for block, cross, norm in zip(self.decoder, self.cross, self.norms, strict=True):
            y = block(y)
            y = y + cross(norm(y), memory)
        logits: Tensor = self.head(y)
        return logits


class VisionTransformer(nn.Module):
    """Patches of images -> transformer blocks -> classes, as ViT (Dosovitskiy et al., 2021)."""

    def __init__(self, width: int, heads: int, layers: int, dtype: str) -> None:
        self.patches = nn.Conv2d(3, width, 16, 16, dtype=dtype)
        self.blocks = [nn.TransformerBlock(width, heads, causal=False, dtype=dtype) for _ in range(layers)]
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.head = nn.Linear(width, 1000, dtype=dtype)

    def forward(self, images: Any) -> Tensor:
        """images [n, 3, h, w] -> logits [n, 1000]."""
        x = self.patches(images)
        count, width, rows, columns = x.shape
        x = ops.transpose(ops.reshape(x, (count, width, rows * columns)), (0, 2, 1))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(ops.mean(self.norm(x), 1))
        return logits


def _perceptron(width: int, layers: int, dtype: str) -> nn.Module:
    """Linear layers of one width with ReLU between them, and a classifier."""
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width, dtype=dtype), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(width, 1024, dtype=dtype))


def _llama(hidden: int, layers: int) -> nn.Module:
    return Llama(
        LlamaConfig(
            hidden=hidden, inner=3 * hidden, layers=layers, heads=hidden // 128, key_heads=hidden // 256,
            vocabulary=32_000, packed=True, dtype="bf16",
        )
    )  # fmt: skip


def _gpt(hidden: int, layers: int, dtype: str) -> nn.Module:
    return GPT(GPTConfig(hidden=hidden, layers=layers, heads=hidden // 64, packed=True, dtype=dtype))


def _experts(hidden: int, layers: int, experts: int, dtype: str) -> nn.Module:
    return GShardMoE(MoEConfig(hidden=hidden, layers=layers, experts=experts, group=1024, dtype=dtype))


def images(size: int, dtype: str) -> dict[str, Field]:
    """Fields of a sample: an image [3, size, size], and its class."""
    return {"batch.0": ((3, size, size), dtype), "batch.1": ((), "i32")}


_TEXT: dict[str, Field] = {"batch.0": _TOKENS, "batch.1": _TOKENS}
PAIRS: dict[str, Field] = {**_TEXT, "batch.2": _TOKENS}
"""Fields of a sample: source, target and labels, 512 tokens each."""


@dataclass(frozen=True)
class SmallProblem:
    """A program on a cluster.

    Attributes:
        model: makes the model.
        fields: of a sample.
        batch: samples of a step.
        file: of the cluster.
        machines: number of machines, and devices of each, for every kind of machine in the file.
        shape: of the torus, where the network is one.
        memory: that a device may use; None for all that it has.
        rate: bandwidth of a network card; None for that of the file.
    """

    model: Callable[[], nn.Module]
    fields: Mapping[str, Field]
    batch: int
    file: str
    machines: tuple[tuple[int, int], ...]
    shape: tuple[int, int] | None = None
    memory: str | None = None
    rate: str | None = None

    @property
    def request(self) -> CompileRequest:
        """The training step with Adam."""
        spec = TrainingSpec(self.model(), nn.CrossEntropy(), optim.Adam(), {}, Strategy())
        return CompileRequest(spec, "train", self.batch, self.fields, {})

    @property
    def constraints(self) -> SearchConstraints:
        """The limit of memory."""
        return SearchConstraints(memory=self.memory)

    def cluster(self, name: str) -> Cluster:
        """The cluster of the file with these machines."""
        document = yaml.safe_load((_FILES / f"{self.file}.yaml").read_text())
        for machine, (count, each) in zip(document["machines"], self.machines, strict=True):
            machine["count"] = count
            machine["devices"]["count"] = each
            if isinstance(links := machine.get("inside", {}).get("links"), list):
                machine["inside"]["links"] = [link for link in links if max(link[:2]) < each]
            if "nics" in machine:
                machine["nics"]["count"] = min(machine["nics"]["count"], each)
            if self.rate is not None:
                machine["nics"]["bandwidth"] = self.rate
        if self.shape is not None:
            document["network"]["shape"] = list(self.shape)
        if sum(count for count, _ in self.machines) == 1:
            document.pop("network")
        return build_cluster(check(document, name), name)


_A100, _H100, _V100 = "dgx_a100_pod", "dgx_h100_pod", "p3_16xlarge_x8"
_MIXED, _TPU = "mixed_a100_v100", "tpu_v4_16x16"

PROBLEMS: Mapping[str, SmallProblem] = {
    "mlp_4v": SmallProblem(
        lambda: _perceptron(4096, 6, "f32"),
        {"batch.0": ((4096,), "f32"), "batch.1": ((), "i32")}, 512, _V100, ((1, 4),),
    ),
    "mlp_mixed_2a4v": SmallProblem(
        lambda: _perceptron(8192, 4, "f16"),
        {"batch.0": ((8192,), "f16"), "batch.1": ((), "i32")}, 1024, _MIXED, ((1, 2), (1, 4)),
    ),
    "mlp_16t": SmallProblem(
        lambda: _perceptron(8192, 4, "bf16"),
        {"batch.0": ((8192,), "bf16"), "batch.1": ((), "i32")}, 2048, _TPU, ((4, 4),), shape=(4, 4),
    ),
    "llama_8h": SmallProblem(lambda: _llama(2048, 3), _TEXT, 32, _H100, ((1, 8),)),
    "llama_16a_tight": SmallProblem(lambda: _llama(4096, 4), _TEXT, 32, _A100, ((2, 8),), memory="8 GiB"),
    "llama_16t": SmallProblem(lambda: _llama(2048, 2), _TEXT, 32, _TPU, ((4, 4),), shape=(4, 4)),
    "t5_8a": SmallProblem(lambda: EncoderDecoder(1024, 16, 2, "bf16"), PAIRS, 64, _A100, ((1, 8),)),
    "t5_8v_slow": SmallProblem(
        lambda: EncoderDecoder(1024, 16, 2, "f16"), PAIRS, 64, _V100, ((2, 4),), rate="10 Gbit/s"
    ),
    "vit_4h": SmallProblem(
        lambda: VisionTransformer(1280, 16, 4, "bf16"), images(224, "bf16"), 128, _H100, ((1, 4),)
    ),
    "vit_mixed_4a4v": SmallProblem(
        lambda: VisionTransformer(1024, 16, 3, "f16"), images(224, "f16"), 96, _MIXED, ((1, 4), (1, 4))
    ),
    "moe_8v": SmallProblem(lambda: _experts(768, 2, 8, "f16"), _TEXT, 32, _V100, ((1, 8),)),
    "moe_64a": SmallProblem(lambda: _experts(1024, 4, 16, "bf16"), _TEXT, 256, _A100, ((8, 8),)),
    "conv_4a_tight": SmallProblem(
        lambda: WideResNet(WideResNetConfig(channels=128, width=4, blocks=(1, 1, 1), image=128)),
        images(128, "f32"), 128, _A100, ((1, 4),), memory="6 GiB",
    ),
    "conv_8v": SmallProblem(
        lambda: WideResNet(WideResNetConfig(channels=64, width=2, blocks=(1, 1, 1), image=128)),
        images(128, "f32"), 256, _V100, ((2, 4),), rate="25 Gbit/s",
    ),
    "gpt_32h": SmallProblem(lambda: _gpt(2048, 4, "bf16"), _TEXT, 128, _H100, ((4, 8),)),
}  # fmt: skip
"""Name -> problem. The letter behind the number of devices is their kind; `slow` networks, `tight` memory."""
