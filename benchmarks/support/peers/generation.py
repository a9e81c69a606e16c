"""Generation by hand: the GPT of `benchmarks.support.peers` with a cache of keys and values, in NumPy and in
PyTorch eager.

A step is one call: `PROMPT` tokens of `BATCH` sequences are read at once, then `NEW` tokens are chosen, each
the most probable one. Its "loss" is the mean of the numbers of the new tokens, so that programs that choose
different tokens are no comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.peers import Array, GptSizes, gpt_parameters

BATCH, PROMPT, NEW = 4, 32, 64
_EPSILON = 1e-5  # of the norms, as in PyTorch


def prompts(sizes: GptSizes) -> NDArray[np.int64]:
    """[batch, prompt] token numbers, uniform over the vocabulary."""
    return np.random.default_rng(19).integers(sizes.vocabulary, size=(BATCH, PROMPT))


def numpy_generation(sizes: GptSizes) -> Callable[[], float]:
    """A step of a plain NumPy loop."""
    p = gpt_parameters(sizes)
    cache = np.zeros((sizes.layers, 2, BATCH, sizes.heads, PROMPT + NEW, sizes.hidden // sizes.heads), "f4")

    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled: Array = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + _EPSILON)
        return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]

    def attend(x: Array, block: int, start: int) -> Array:
        stop = start + x.shape[1]
        packed = x @ p[f"{block}.qkv.weight"] + p[f"{block}.qkv.bias"]
        q, k, v = (
            part.reshape(BATCH, -1, sizes.heads, sizes.hidden // sizes.heads).transpose(0, 2, 1, 3)
            for part in np.split(packed, 3, -1)
        )
        keys, values = cache[block]
        keys[:, :, start:stop], values[:, :, start:stop] = k, v
        scores = q @ keys[:, :, :stop].swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5)
        if x.shape[1] > 1:
            scores[:, :, np.triu(np.ones(scores.shape[-2:], bool), 1 + start)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        joined = (weights @ values[:, :, :stop]).transpose(0, 2, 1, 3).reshape(x.shape)
        return joined @ p[f"{block}.out.weight"] + p[f"{block}.out.bias"]

    def next_tokens(ids: NDArray[np.int64], start: int) -> NDArray[np.int64]:
        x = p["tokens"][ids] + p["positions"][start : start + ids.shape[1]]
        for block in range(sizes.layers):
            x = x + attend(norm(x, f"{block}.norm1"), block, start)
            up = norm(x, f"{block}.norm2") @ p[f"{block}.fc1.weight"] + p[f"{block}.fc1.bias"]
            up *= 0.5 * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (up + np.float32(0.044715) * up**3)))
            x = x + up @ p[f"{block}.fc2.weight"] + p[f"{block}.fc2.bias"]
        logits = norm(x[:, -1], "norm") @ p["head.weight"]
        chosen: NDArray[np.int64] = logits.argmax(-1)
        return chosen

    def step() -> float:
        ids, start, chosen = prompts(sizes), 0, []
        for _ in range(NEW):
            chosen.append(next_tokens(ids, start))
            start, ids = start + ids.shape[1], chosen[-1][:, None]
        return float(np.mean(chosen))

    return step


def torch_generation(sizes: GptSizes) -> Callable[[], float]:
    """A step of PyTorch eager with its fused attention."""
    import torch
    from torch.nn import functional as f

    p = {name: torch.from_numpy(value) for name, value in gpt_parameters(sizes).items()}
    shape = (sizes.layers, 2, BATCH, sizes.heads, PROMPT + NEW, sizes.hidden // sizes.heads)
    cache = torch.zeros(shape)

    def norm(x: Any, name: str) -> Any:
        return f.layer_norm(x, (sizes.hidden,), p[f"{name}.weight"], p[f"{name}.bias"], _EPSILON)

    def linear(x: Any, name: str) -> Any:
        return torch.addmm(p[f"{name}.bias"], x.flatten(0, 1), p[f"{name}.weight"]).unflatten(0, x.shape[:2])

    def next_tokens(ids: Any, start: int) -> Any:
        x, stop = p["tokens"][ids] + p["positions"][start : start + ids.shape[1]], start + ids.shape[1]
        for block in range(sizes.layers):
            packed = linear(norm(x, f"{block}.norm1"), f"{block}.qkv")
            q, k, v = (part.unflatten(-1, (sizes.heads, -1)).transpose(1, 2) for part in packed.chunk(3, -1))
            keys, values = cache[block]
            keys[:, :, start:stop], values[:, :, start:stop] = k, v
            o = f.scaled_dot_product_attention(
                q, keys[:, :, :stop], values[:, :, :stop], is_causal=ids.shape[1] > 1
            )
            x = x + linear(o.transpose(1, 2).flatten(2), f"{block}.out")
            up = f.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.fc1"), approximate="tanh")
            x = x + linear(up, f"{block}.fc2")
        return (norm(x[:, -1], "norm") @ p["head.weight"]).argmax(-1)

    def step() -> float:
        ids, start, chosen = torch.from_numpy(prompts(sizes)), 0, []
        with torch.no_grad():
            for _ in range(NEW):
                chosen.append(next_tokens(ids, start))
                start, ids = start + ids.shape[1], chosen[-1][:, None]
        return float(torch.stack(chosen).double().mean())

    return step
