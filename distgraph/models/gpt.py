"""GPT: learned positions, layer norms before each part, GELU (Radford et al., 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from distgraph.errors.arguments import Count, Rate, check_fields, checked_arguments
from distgraph.models.decoder import Block, CausalAttention, Decoder, FeedForward
from distgraph.nn import LayerNorm, Module


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Shape of a GPT.

    Attributes:
        hidden: width of the model; the feed-forward part is `mlp_factor` times as wide.
        layers, heads: number of blocks, and of heads in each.
        vocabulary: tokens.
        sequence: longest input, the length of the table of positions.
        tied: logits come from the table of tokens, there is no head.
        head_bias: whether an untied head has a bias.
        packed: one projection for queries, keys and values instead of three.
        fused: attention as one op, see `CausalAttention`.
        dropout: rate on embeddings, outputs of both parts of a block, and on probabilities where not `fused`.
        dtype: of parameters and computation.
    """

    hidden: Count
    layers: Count
    heads: Count
    vocabulary: Count = 51200
    sequence: Count = 1024
    mlp_factor: Count = 4
    tied: bool = False
    head_bias: bool = False
    packed: bool = False
    fused: bool = True
    dropout: Rate = 0.0
    dtype: Any = "f32"

    def __post_init__(self) -> None:
        check_fields(self)


_ALPA = {"tied": False, "head_bias": True, "packed": True, "fused": False, "dtype": "f16"}

GPT_PRESETS: dict[str, GPTConfig] = {
    name: GPTConfig(hidden=hidden, layers=layers, heads=heads, **_ALPA)  # type: ignore[arg-type]
    for name, hidden, layers, heads in (
        ("350M", 1024, 24, 16),
        ("760M", 1536, 24, 16),
        ("1.3B", 2048, 24, 32),
        ("2.6B", 2560, 32, 32),
        ("6.7B", 4096, 32, 32),
        ("15B", 5120, 48, 40),
        ("39B", 8192, 48, 64),
    )
}
"""Those of Alpa (Zheng et al., OSDI 2022, table 4), 175B of Brown et al., 2020, table 2.1, and 530B, which is
Megatron-Turing NLG (Smith et al., 2022), as described by Narayanan et al., SC 2021, section 5.1, table 1."""

_MEGATRON = {"sequence": 2048, "tied": True, "packed": True, "fused": False, "dtype": "f16"}

GPT_PRESETS["175B"] = GPTConfig(hidden=12288, layers=96, heads=96, vocabulary=50257, **_MEGATRON)  # type: ignore[arg-type]
GPT_PRESETS["530B"] = GPTConfig(hidden=20480, layers=105, heads=128, vocabulary=51200, **_MEGATRON)  # type: ignore[arg-type]


def feed_forward(c: GPTConfig) -> Module:
    """The feed-forward part of a block."""
    return FeedForward(c.hidden, c.mlp_factor * c.hidden, c.dropout, c.dtype)


def decoder_parts(c: GPTConfig, mlps: Sequence[Module]) -> dict[str, Any]:
    """Arguments of `Decoder` for a GPT with these feed-forward parts, one a block."""
    blocks = [
        Block(
            LayerNorm(c.hidden, dtype=c.dtype),
            CausalAttention(
                c.hidden, c.heads, packed=c.packed, fused=c.fused, dropout=c.dropout, dtype=c.dtype
            ),
            LayerNorm(c.hidden, dtype=c.dtype),
            mlp,
        )
        for mlp in mlps
    ]
    sizes = {"vocabulary": c.vocabulary, "width": c.hidden, "positions": c.sequence}
    head = {"norm": LayerNorm(c.hidden, dtype=c.dtype), "tied": c.tied, "head_bias": c.head_bias}
    return {"blocks": blocks, **sizes, **head, "dropout": c.dropout, "dtype": c.dtype}


@checked_arguments()
class GPT(Decoder):
    """A decoder over tokens.

    Example:
        >>> GPT(GPTConfig(hidden=64, layers=2, heads=4, vocabulary=100, sequence=16)).parameter_count()
        113920
        >>> GPT.preset("175B").parameter_count()
        174604259328
    """

    presets = GPT_PRESETS

    def __init__(self, config: GPTConfig) -> None:
        self.config = config
        super().__init__(**decoder_parts(config, [feed_forward(config) for _ in range(config.layers)]))

    @classmethod
    def megatron(cls, hidden: int, layers: int, heads: int, sequence: int = 2048, **changes: Any) -> GPT:
        """Megatron-LM's GPT as vTrain (Bang et al., MICRO 2024) measured it: 50257 tokens, tied, fp16."""
        config = GPTConfig(hidden=hidden, layers=layers, heads=heads, vocabulary=50257, **_MEGATRON)  # type: ignore[arg-type]
        return cls(replace(config, sequence=sequence, **changes))
