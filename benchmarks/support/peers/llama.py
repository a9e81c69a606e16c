"""The Llama of the step benchmark on one rank: sizes and initial numbers, our model, and the same in PyTorch.

Blocks of RMS norm, causal attention with rotary positions whose key heads serve several query heads, and
SwiGLU; no biases; an untied head; mean cross-entropy; AdamW. Ours is `distgraph.models.Llama`. PyTorch has
the block written out with its own functions: `rms_norm`, `scaled_dot_product_attention` with `enable_gqa`,
`silu`, and sines and cosines computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.peers import BETA1, BETA2, EPSILON, LEARNING_RATE, Array

NORM_EPSILON = 1e-5
WEIGHT_DECAY = 0.1


@dataclass(frozen=True, slots=True)
class LlamaSizes:
    """Sizes of the Llama; `inner` is the width of SwiGLU, `rotary` the base of the rotary positions."""

    layers: int = 4
    hidden: int = 256
    inner: int = 688
    heads: int = 8
    key_heads: int = 2
    sequence: int = 128
    batch: int = 16
    vocabulary: int = 4096
    rotary: float = 10_000.0

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


def llama_parameters(sizes: LlamaSizes) -> dict[str, Array]:
    """Initial parameters by the names of `distgraph.models.Llama`: weights [in, out], normal with deviation
    0.02; those of norms are 1."""
    random = np.random.default_rng(31)
    hidden, keys = sizes.hidden, sizes.key_heads * sizes.head

    def normal(*shape: int) -> Array:
        return (0.02 * random.standard_normal(shape)).astype(np.float32)

    parameters = {"tokens.weight": normal(sizes.vocabulary, hidden)}
    shapes = {
        "attn.q": (hidden, hidden), "attn.k": (hidden, keys), "attn.v": (hidden, keys),
        "attn.out": (hidden, hidden), "mlp.gate": (hidden, sizes.inner), "mlp.up": (hidden, sizes.inner),
        "mlp.down": (sizes.inner, hidden),
    }  # fmt: skip
    for block in range(sizes.layers):
        for name in ("norm1", "norm2"):
            parameters[f"blocks.{block}.{name}.weight"] = np.ones(hidden, np.float32)
        for name, shape in shapes.items():
            parameters[f"blocks.{block}.{name}.weight"] = normal(*shape)
    parameters["norm.weight"] = np.ones(hidden, np.float32)
    return parameters | {"head.weight": normal(hidden, sizes.vocabulary)}


def llama_batch(sizes: LlamaSizes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens and targets, both int64 [batch, sequence], uniform over the vocabulary."""
    random = np.random.default_rng(37)
    shape = (sizes.batch, sizes.sequence)
    return random.integers(sizes.vocabulary, size=shape), random.integers(sizes.vocabulary, size=shape)


def torch_llama(sizes: LlamaSizes) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """The model in PyTorch: its parameters, and [batch, sequence] tokens to logits."""
    import torch
    from torch.nn import functional as f

    p: dict[str, Any] = {}
    for name, value in llama_parameters(sizes).items():
        is_linear = value.ndim == 2 and name != "tokens.weight"
        value = np.ascontiguousarray(value.T) if is_linear else value  # as nn.Linear stores it
        p[name] = torch.nn.Parameter(torch.from_numpy(value))
    half = sizes.head // 2
    speeds = sizes.rotary ** (-torch.arange(half) / half)
    angles = torch.arange(sizes.sequence)[:, None] * torch.cat([speeds, speeds])
    cos, sin = angles.cos(), angles.sin()

    def rotate(x: Any) -> Any:
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * cos.to(x.dtype) + turned * sin.to(x.dtype)

    def norm(x: Any, name: str) -> Any:
        return f.rms_norm(x, (sizes.hidden,), p[f"{name}.weight"], NORM_EPSILON)

    def attend(x: Any, name: str) -> Any:
        q, k, v = (
            f.linear(x, p[f"{name}.{part}.weight"]).unflatten(-1, (-1, sizes.head)).transpose(1, 2)
            for part in "qkv"
        )
        q, k = rotate(q), rotate(k)
        o = f.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return f.linear(o.transpose(1, 2).flatten(2), p[f"{name}.out.weight"])

    def logits(tokens: Any) -> Any:
        x = f.embedding(tokens, p["tokens.weight"])
        for block in range(sizes.layers):
            name = f"blocks.{block}"
            x = x + attend(norm(x, f"{name}.norm1"), f"{name}.attn")
            y = norm(x, f"{name}.norm2")
            gate, up = (f.linear(y, p[f"{name}.mlp.{part}.weight"]) for part in ("gate", "up"))
            x = x + f.linear(f.silu(gate) * up, p[f"{name}.mlp.down.weight"])
        return f.linear(norm(x, "norm"), p["head.weight"])

    return p, logits


def torch_step(sizes: LlamaSizes, *, bf16: bool = False) -> Callable[[], float]:
    """A training step in PyTorch eager, in bf16 under `torch.autocast`; returns the loss."""
    import torch
    from torch.nn import functional as f

    p, logits = torch_llama(sizes)
    tokens, targets = (torch.from_numpy(part) for part in llama_batch(sizes))
    options = {"lr": LEARNING_RATE, "betas": (BETA1, BETA2), "eps": EPSILON, "weight_decay": WEIGHT_DECAY}
    optimizer = torch.optim.AdamW(p.values(), fused=True, **options)  # type: ignore[arg-type]

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = f.cross_entropy(logits(tokens).flatten(0, -2), targets.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.item()

    return step
