"""Llama: grouped queries, RMS norms, SwiGLU, rotary positions (Touvron et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distgraph import ops
from distgraph.errors.arguments import Count, Positive, Rate, check_fields, checked_arguments
from distgraph.models.decoder import NORMAL, Block, CausalAttention, Decoder
from distgraph.models.megatron_layout import Placed
from distgraph.nn import Linear, RMSNorm
from distgraph.tracing.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Shape of a Llama.

    Attributes:
        hidden: width of the model.
        inner: width of the feed-forward part.
        layers, heads: number of blocks, and of query heads in each.
        key_heads: key and value heads; `heads` is a multiple of it.
        vocabulary: tokens.
        sequence: length of inputs when planned; positions have no table, so longer ones work.
        rotary: base of the rotary positions.
        tied, packed, fused, dropout, dtype: as in `GPTConfig`.
    """

    hidden: Count
    inner: Count
    layers: Count
    heads: Count
    key_heads: Count
    vocabulary: Count = 128256
    sequence: Count = 8192
    rotary: Positive = 500_000.0
    tied: bool = False
    packed: bool = False
    fused: bool = True
    dropout: Rate = 0.0
    dtype: Any = "f32"

    def __post_init__(self) -> None:
        check_fields(self)


LLAMA_PRESETS: dict[str, LlamaConfig] = {
    "3-8B": LlamaConfig(hidden=4096, inner=14336, layers=32, heads=32, key_heads=8, dtype="bf16"),
    "3-70B": LlamaConfig(hidden=8192, inner=28672, layers=80, heads=64, key_heads=8, dtype="bf16"),
}
"""Llama 3 (Dubey et al., 2024, table 3)."""


class SwiGLU(Placed):
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020). Parameters: gate, up, down, each a Linear without bias."""

    def __init__(self, width: int, inner: int, dtype: str = "f32") -> None:
        self.gate = Linear(width, inner, False, NORMAL, dtype)
        self.up = Linear(width, inner, False, NORMAL, dtype)
        self.down = Linear(inner, width, False, NORMAL, dtype)

    def forward(self, x: Any) -> Tensor:
        """x [..., width] -> the same shape."""
        gate, up = self.layout.inner(self.gate(x)), self.layout.inner(self.up(x))
        y: Tensor = self.down(self.layout.inner(ops.silu(gate) * up))
        return y


@checked_arguments()
class Llama(Decoder):
    """A decoder over tokens.

    Example:
        >>> Llama.preset("3-8B").parameter_count()
        8030261248
    """

    presets = LLAMA_PRESETS

    def __init__(self, config: LlamaConfig) -> None:
        c, self.config = config, config
        blocks = [
            Block(
                RMSNorm(c.hidden, 1e-5, c.dtype),
                CausalAttention(
                    c.hidden,
                    c.heads,
                    c.key_heads,
                    packed=c.packed,
                    fused=c.fused,
                    bias=False,
                    dropout=c.dropout,
                    rotary=c.rotary,
                    dtype=c.dtype,
                ),
                RMSNorm(c.hidden, 1e-5, c.dtype),
                SwiGLU(c.hidden, c.inner, c.dtype),
            )
            for _ in range(c.layers)
        ]
        super().__init__(
            blocks,
            RMSNorm(c.hidden, 1e-5, c.dtype),
            vocabulary=c.vocabulary,
            width=c.hidden,
            tied=c.tied,
            dropout=c.dropout,
            dtype=c.dtype,
        )
