"""Transformer modules: multi-head attention, the feed-forward module, and the pre-norm block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.errors.arguments import Count, Rate, checked_arguments
from distgraph.nn.initializers import Init
from distgraph.nn.layers import Dropout, LayerNorm, Linear
from distgraph.nn.module import Module
from distgraph.tracing.tensor import Tensor


@checked_arguments()
class MultiHeadAttention(Module):
    """Attention with separate projections for queries, keys and values, so that heads split cleanly.

    Args:
        width: of the input and output.
        heads: number of query heads; `width` is a multiple of it.
        causal: whether a position sees only itself and those before it.
        key_heads: number of key and value heads (grouped queries); `heads` by default.
        dropout: rate on the output.

    Parameters: q, k, v, out, each a Linear.
    """

    def __init__(
        self,
        width: Count,
        heads: Count,
        causal: bool = False,
        key_heads: Count | None = None,
        bias: bool = True,
        dropout: Rate = 0.0,
        init: Init | None = None,
        dtype: Any = "f32",
    ) -> None:
        key_heads = heads if key_heads is None else key_heads
        if width % heads or heads % key_heads:
            raise GraphError(
                f"width {width}, heads {heads} and key_heads {key_heads} do not fit; width must be a "
                "multiple of heads and heads of key_heads"
            )
        self.heads, self.key_heads, self.head_width, self.causal = heads, key_heads, width // heads, causal
        inner = key_heads * self.head_width
        self.q = Linear(width, width, bias, init, dtype)
        self.k = Linear(width, inner, bias, init, dtype)
        self.v = Linear(width, inner, bias, init, dtype)
        self.out = Linear(width, width, bias, init, dtype)
        self.dropout = Dropout(dropout)

    def forward(self, x: Any, memory: Any = None) -> Tensor:
        """x [b, s, width] attends to itself, or to memory [b, t, width] -> [b, s, width]."""
        source = x if memory is None else memory
        q = self._split(self.q(x), self.heads)
        k = self._split(self.k(source), self.key_heads)
        v = self._split(self.v(source), self.key_heads)
        o = ops.attention(q, k, v, causal=self.causal)
        joined = ops.reshape(ops.transpose(o, (0, 2, 1, 3)), x.shape)
        y: Tensor = self.dropout(self.out(joined))
        return y

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """[b, s, h * d] -> [b, h, s, d]."""
        batch, length, _ = x.shape
        return ops.transpose(ops.reshape(x, (batch, length, heads, self.head_width)), (0, 2, 1, 3))


@checked_arguments()
class MLP(Module):
    """The feed-forward part of a transformer: up, activation, down. Parameters: up, down, each a Linear."""

    def __init__(
        self,
        width: Count,
        hidden: Count | None = None,
        activation: Callable[..., Any] = ops.gelu,
        bias: bool = True,
        dropout: Rate = 0.0,
        init: Init | None = None,
        dtype: Any = "f32",
    ) -> None:
        hidden = 4 * width if hidden is None else hidden
        self.up = Linear(width, hidden, bias, init, dtype)
        self.down = Linear(hidden, width, bias, init, dtype)
        self.activation = activation
        self.dropout = Dropout(dropout)

    def forward(self, x: Any) -> Tensor:
        """x [..., width] -> the same shape."""
        y: Tensor = self.dropout(self.down(self.activation(self.up(x))))
        return y


@checked_arguments()
class TransformerBlock(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (pre-norm; Xiong et al., 2020).

    Args:
        width, heads: as in `MultiHeadAttention`.
        hidden: width of the feed-forward part, 4 * width by default.
        mlp: another feed-forward module, such as a MoE.
    """

    def __init__(
        self,
        width: Count,
        heads: Count,
        hidden: Count | None = None,
        causal: bool = True,
        key_heads: Count | None = None,
        activation: Callable[..., Any] = ops.gelu,
        dropout: Rate = 0.0,
        mlp: Module | None = None,
        init: Init | None = None,
        dtype: Any = "f32",
    ) -> None:
        self.norm1 = LayerNorm(width, dtype=dtype)
        self.attn = MultiHeadAttention(
            width, heads, causal, key_heads, dropout=dropout, init=init, dtype=dtype
        )
        self.norm2 = LayerNorm(width, dtype=dtype)
        if mlp is None:
            mlp = MLP(width, hidden, activation, dropout=dropout, init=init, dtype=dtype)
        self.mlp = mlp

    def forward(self, x: Any) -> Tensor:
        """x [b, s, width] -> the same shape."""
        x = x + self.attn(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y
