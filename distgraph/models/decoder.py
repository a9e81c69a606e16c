"""Modules of decoder models: causal attention, feed-forward, block, and tokens -> blocks -> logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.errors.arguments import Count, Positive, Rate, Size, checked_arguments
from distgraph.ir.dtypes import to_numpy
from distgraph.models.megatron_layout import Placed, Stack
from distgraph.nn import Dropout, Embedding, Linear, Module, Parameter
from distgraph.nn.initializers import Init
from distgraph.tracing.annotations import on
from distgraph.tracing.tensor import Tensor

NORMAL: Init = ("normal", 0.02)


@checked_arguments()
class CausalAttention(Placed):
    """Attention of a sequence to itself, each position to those before it.

    Args:
        width, heads, key_heads: as in `nn.MultiHeadAttention`.
        packed: one projection for queries, keys and values. Its outputs are ordered by key head: for each its
            queries, its key and its value, so that splitting the outputs splits the heads.
        fused: attention is one op that never stores the scores and skips masked ones; otherwise scores, mask,
            softmax and product are separate ops over all pairs of positions, as in models before 2022.
        dropout: rate on the output, and on the probabilities where they exist.
        rotary: base of rotary positions (Su et al., 2021); None for none.

    Parameters: qkv, or q, k, v; out; each a Linear.
    """

    def __init__(
        self,
        width: Count,
        heads: Count,
        key_heads: Count | None = None,
        *,
        packed: bool = False,
        fused: bool = True,
        bias: bool = True,
        dropout: Rate = 0.0,
        rotary: Positive | None = None,
        dtype: Any = "f32",
    ) -> None:
        groups = heads if key_heads is None else key_heads
        if width % heads or heads % groups:
            raise GraphError(
                f"width {width}, heads {heads} and key_heads {groups} do not fit; width must be a multiple "
                "of heads and heads of key_heads"
            )
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.fused, self.rotary = fused, rotary
        inner = groups * self.size
        if packed:
            self.qkv: Linear | None = Linear(width, width + 2 * inner, bias, NORMAL, dtype)
        else:
            self.qkv = None
            self.q = Linear(width, width, bias, NORMAL, dtype)
            self.k = Linear(width, inner, bias, NORMAL, dtype)
            self.v = Linear(width, inner, bias, NORMAL, dtype)
        self.out = Linear(width, width, bias, NORMAL, dtype)
        self.dropout = Dropout(dropout)

    def forward(self, x: Any) -> Tensor:
        """x [b, s, width] -> the same shape."""
        q, k, v = self._project(x)
        if self.rotary is not None:
            q, k = rotate(q, self.rotary), rotate(k, self.rotary)
        q, k, v = self.layout.heads(q), self.layout.heads(k), self.layout.heads(v)
        o = (
            self.layout.attention(ops.attention)(q, k, v, causal=True)
            if self.fused
            else self._composed(q, k, v)
        )
        o = self.layout.heads(o)
        joined = self.layout.inner(ops.reshape(ops.transpose(o, (0, 2, 1, 3)), x.shape))
        y: Tensor = self.dropout(self.out(joined))
        return y

    def _project(self, x: Any) -> tuple[Tensor, Tensor, Tensor]:
        """q [b, h, s, d], k and v [b, g, s, d]."""
        if self.qkv is None:
            q, k, v = self._split(self.q(x)), self._split(self.k(x)), self._split(self.v(x))
            return q, k, v
        batch, length, _ = x.shape
        shared = self.heads // self.groups
        packed = self.layout.inner(self.qkv(x))
        mixed = ops.reshape(packed, (batch, length, self.groups, shared + 2, self.size))
        q = ops.reshape(mixed[:, :, :, :shared], (batch, length, self.heads, self.size))
        k, v = mixed[:, :, :, shared], mixed[:, :, :, shared + 1]
        return ops.transpose(q, (0, 2, 1, 3)), ops.transpose(k, (0, 2, 1, 3)), ops.transpose(v, (0, 2, 1, 3))

    def _split(self, x: Tensor) -> Tensor:
        """[b, s, h * d] -> [b, h, s, d]."""
        batch, length, width = x.shape
        heads = ops.reshape(self.layout.inner(x), (batch, length, width // self.size, self.size))
        return ops.transpose(heads, (0, 2, 1, 3))

    def _composed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention as separate ops: scores, mask, softmax and product."""
        if self.layout.axis("sp") is not None and self.layout.context_parallel == "ring":
            raise GraphError(
                "attention as separate ops is not computed by a ring but context_parallel is 'ring'; build "
                "the model with fused=True"
            )
        batch, _, length, size = q.shape
        shared = self.heads // self.groups
        q = ops.reshape(q * size**-0.5, (batch, self.groups, shared, length, size))
        scores = ops.einsum("bgrqd,bgkd->bgrqk", q, k)
        rows = ops.reshape(ops.arange(length), (length, 1))
        visible = rows >= ops.arange(length)
        lowest = float(np.finfo(np.float16).min if q.dtype == "f16" else -1e9)
        weights = self.dropout(ops.softmax(ops.where(visible, scores, lowest)))
        o = ops.einsum("bgrqk,bgkd->bgrqd", weights, v)
        return ops.reshape(o, (batch, self.heads, length, size))


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary positions: element i of a head and element i + d/2 turn by position / base ** (2 i / d).

    Args:
        x: [b, h, s, d], d even.
        base: 10,000 in the paper, 500,000 in Llama 3.
    """
    length, size = x.shape[-2:]
    half = size // 2
    wide = "f64" if x.dtype == "f64" else "f32"
    speeds = (base ** (-np.arange(half) / half)).astype(to_numpy(wide))
    angles = ops.reshape(ops.arange(length).astype(wide), (length, 1)) * speeds
    cos, sin = ops.cos(angles).astype(x.dtype), ops.sin(angles).astype(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return ops.concat([left * cos - right * sin, right * cos + left * sin], -1)


class FeedForward(Placed):
    """down(gelu(up(x))). Parameters: up, down, each a Linear."""

    def __init__(self, width: int, inner: int, dropout: Rate = 0.0, dtype: str = "f32") -> None:
        self.up = Linear(width, inner, True, NORMAL, dtype)
        self.down = Linear(inner, width, True, NORMAL, dtype)
        self.dropout = Dropout(dropout)

    def forward(self, x: Any) -> Tensor:
        """x [b, s, width] -> the same shape."""
        y: Tensor = self.dropout(self.down(ops.gelu(self.layout.inner(self.up(x)))))
        return y


@checked_arguments()
class Block(Placed):
    """x + attn(norm1(x)), then x + mlp(norm2(x)); any norms, attention and feed-forward part."""

    def __init__(self, norm1: Module, attn: Module, norm2: Module, mlp: Module) -> None:
        self.norm1, self.attn, self.norm2, self.mlp = norm1, attn, norm2, mlp

    def forward(self, x: Any) -> Tensor:
        """x [b, s, width] -> the same shape."""
        x = self.layout.hidden(x + self.attn(self.layout.whole(self.norm1(x))))
        y: Tensor = self.layout.hidden(x + self.mlp(self.layout.whole(self.norm2(x))))
        return y


@checked_arguments()
class Decoder(Stack):
    """Token numbers -> logits of the next token.

    Args:
        vocabulary, width: of the table of tokens.
        positions: length of the table of learned positions; 0 for none.
        tied: the logits come from the table of tokens; otherwise from `head`.
        head_bias: whether an untied head has a bias.
    """

    tail = ("norm", "head")

    def __init__(
        self,
        blocks: list[Block],
        norm: Module,
        *,
        vocabulary: Count,
        width: Count,
        positions: Size = 0,
        tied: bool = False,
        head_bias: bool = False,
        dropout: Rate = 0.0,
        dtype: Any = "f32",
    ) -> None:
        self.tokens = Embedding(vocabulary, width, NORMAL, dtype)
        self.positions = Parameter((positions, width), dtype, NORMAL) if positions else None
        self.dropout = Dropout(dropout)
        self.blocks: list[Block] = blocks
        self.norm = norm
        self.head = None if tied else Linear(width, vocabulary, head_bias, NORMAL, dtype)

    def forward(self, ids: Any) -> Tensor:
        """ids [b, s] integers -> logits [b, s, vocabulary]. Raises GraphError where s is too long."""
        with on(self.layout.mesh):
            x = self.tokens(self.layout.batch(ids))
            if self.positions is not None:
                x = x + self._places(self.positions, ids.shape[1])
            x = self.layout.hidden(self.dropout(x))
        x = self.through(x)
        with on(self.end.mesh):
            x = self.end.whole(self.norm(x))
            y = self.head(x) if self.head is not None else ops.einsum("bsm,vm->bsv", x, self.tokens.weight)
            logits: Tensor = self.end.inner(y)
        return logits

    @property
    def most_positions(self) -> int | None:
        """Positions of the longest sequence that the model takes, for generation; None for any length."""
        return None if self.positions is None else self.positions.shape[0]

    @staticmethod
    def _places(table: Parameter, length: int) -> Any:
        table_length = table.shape[0]
        if length > table_length:
            raise GraphError(f"ids have length {length} but the model has {table_length} positions; cut them")
        return table if length == table_length else table.tensor()[:length]

    def loss(self, logits: Any, labels: Any) -> Tensor:
        """Mean cross-entropy of the logits [b, s, vocabulary] and the tokens that follow, labels [b, s]."""
        with on(self.end.mesh):
            return ops.mean(ops.cross_entropy(logits, self.end.batch(labels)))
