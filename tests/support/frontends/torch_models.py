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


class ViT(nn.Module):  # type: ignore[misc]
    """Vision transformer: patches by a convolution, a class token, encoder layers of torch."""

    def __init__(self, width: int = 16, classes: int = 5, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 7, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 2, 24, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


class MoE(nn.Module):  # type: ignore[misc]
    """Every token goes to its two best experts of four; their outputs are weighted by a softmax."""

    def __init__(self, width: int = 6, hidden: int = 10, experts: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.3)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Any) -> Any:
        scores, chosen = self.gate(x).topk(2, -1)
        shares = torch.zeros_like(self.gate(x)).scatter(-1, chosen, scores.softmax(-1))
        hidden = torch.relu(torch.einsum("btd,edh->bteh", x, self.up))
        outputs = torch.einsum("bteh,ehd->bted", hidden, self.down)
        return self.head(x + (outputs * shares.unsqueeze(-1)).sum(2))


class UNet(nn.Module):  # type: ignore[misc]
    """Down by pooling, up by a transposed convolution, with a skip connection."""

    def __init__(self, channels: int = 3, classes: int = 5) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Conv2d(channels, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU())
        self.below = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding="same"), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.after = nn.Conv2d(12, classes, 1)

    def forward(self, x: Any) -> Any:
        x = self.before(x)
        up = self.up(F.interpolate(self.below(x), scale_factor=0.5, mode="bilinear"))
        up = F.interpolate(up, size=x.shape[-2:], mode="nearest")
        return self.after(torch.cat([x, up], 1))


class LSTMLanguageModel(nn.Module):  # type: ignore[misc]
    def __init__(self, vocabulary: int = 23, width: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, 12, 2, batch_first=True)
        self.head = nn.Linear(12, vocabulary)

    def forward(self, ids: Any) -> Any:
        return self.head(self.lstm(self.tokens(ids))[0])


class Translator(nn.Module):  # type: ignore[misc]
    """Encoder and decoder; the source has padding, which attention hides."""

    def __init__(self, vocabulary: int = 23, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.body = nn.Transformer(width, 2, 1, 1, 24, 0.0, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Any, target: Any) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.head.weight.dtype)
        hidden = source == 0
        y = self.body(
            self.tokens(source),
            self.tokens(target),
            tgt_mask=mask,
            src_key_padding_mask=hidden,
            memory_key_padding_mask=hidden,
            tgt_is_causal=True,
        )
        return self.head(y)


class RMSNorm(nn.Module):  # type: ignore[misc]
    """As models of half precision write it: in f32, and back before the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        dtype = x.dtype
        x = x.to(torch.promote_types(dtype, torch.float32))
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class LlamaLayer(nn.Module):  # type: ignore[misc]
    """Grouped-query attention with rotary positions, and a gated perceptron."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=False)
        self.gate, self.up = nn.Linear(width, 24, bias=False), nn.Linear(width, 24, bias=False)
        self.down = nn.Linear(24, width, bias=False)
        self.repeats = heads // groups

    def repeated(self, x: Any) -> Any:
        batch, groups, length, size = x.shape
        x = x[:, :, None, :, :].expand(batch, groups, self.repeats, length, size)
        return x.reshape(batch, groups * self.repeats, length, size)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (
            t * cos + torch.cat([-t[..., self.size // 2 :], t[..., : self.size // 2]], -1) * sin
            for t in (q, k)
        )
        y = F.scaled_dot_product_attention(q, self.repeated(k), self.repeated(v), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class TinyLlama(nn.Module):  # type: ignore[misc]
    def __init__(self, vocabulary: int = 20, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaLayer(width, 4, 2) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("frequencies", 100.0 ** -torch.arange(0.0, 1.0, 0.5), persistent=False)

    def forward(self, ids: Any) -> Any:
        with torch.no_grad():
            angles = torch.arange(ids.shape[1])[:, None] * self.frequencies
            angles = torch.cat([angles, angles], -1)
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))
