"""Models written for PyTorch without a thought of distgraph, small enough to compare numbers."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
nn: Any = torch.nn
F: Any = torch.nn.functional


class MLP(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int = 6, hidden: int = 16, outputs: int = 5) -> None:
        super().__init__()
        self.up, self.middle, self.down = (
            nn.Linear(inputs, hidden),
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, outputs),
        )

    def forward(self, x: Any) -> Any:
        return self.down(torch.tanh(self.middle(F.gelu(self.up(x)))))


class ConvNet(nn.Module):  # type: ignore[misc]
    """Convolutions with batch norm, pooling and a classifier."""

    def __init__(self, channels: int = 3, classes: int = 5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, stride=2, groups=2, bias=False),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d((2, 2)),
        )
        self.head = nn.Linear(32, classes)

    def forward(self, x: Any) -> Any:
        return self.head(self.features(x).flatten(1))


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int, rate: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(rate)

    def forward(self, x: Any) -> Any:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class TinyGPT(nn.Module):  # type: ignore[misc]
    """GPT-2 in plain torch; the table of tokens is also the output matrix."""

    def __init__(
        self, vocabulary: int = 23, width: int = 16, heads: int = 4, layers: int = 2, rate: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(12, width)
        self.blocks = nn.ModuleList(Block(width, heads, rate) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
