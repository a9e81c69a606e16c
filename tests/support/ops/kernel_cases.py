"""One table of kernel calls, walked by the CPU tests (NumPy against Numba) and the GPU tests (NumPy against
CuPy)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distgraph.kernels import (
    activation,
    attention,
    conv,
    embedding,
    loss,
    matmul,
    norm,
    optimizer,
    softmax,
)
from distgraph.kernels import random as rnd
from distgraph.kernels.windows import pooling

KEY = rnd.random_key(11, "kernel cases")


@dataclass(frozen=True)
class Case:
    """``kernel(xp, *arrays, **attrs)``; large ones take the compiled loops, small ones the plain path."""

    name: str
    kernel: Callable[..., Any]
    arrays: tuple[Any, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 2e-5


def _rows_cases(draw: Callable[..., Any], n: int, m: int, tag: str) -> list[Case]:
    x, dy, w, b = draw(n, m), draw(n, m), draw(m), draw(m)
    _, mean, rstd = norm.layer_norm(np, x, w, b)
    _, root = norm.rms_norm(np, x, w)
    labels = (np.arange(n) * 7) % m
    lse = np.log(np.exp(x.astype(np.float64)).sum(-1)).astype(x.dtype)
    y = softmax.softmax(np, x)
    return [
        Case(f"softmax-{tag}", softmax.softmax, (x,)),
        Case(f"softmax-axis0-{tag}", softmax.softmax, (x,), {"axis": 0}),
        Case(f"softmax_grad-{tag}", softmax.softmax_grad, (y, dy)),
        Case(f"log_softmax-{tag}", softmax.log_softmax, (x,)),
        Case(f"log_softmax_grad-{tag}", softmax.log_softmax_grad, (np.log(y), dy), tolerance=1e-4),
        Case(f"layer_norm-{tag}", norm.layer_norm, (x, w, b)),
        Case(f"layer_norm_grad-{tag}", norm.layer_norm_grad, (dy, x, w, mean, rstd), tolerance=2e-4),
        Case(f"rms_norm-{tag}", norm.rms_norm, (x, w)),
        Case(f"rms_norm_grad-{tag}", norm.rms_norm_grad, (dy, x, w, root), tolerance=2e-4),
        Case(f"cross_entropy-{tag}", loss.cross_entropy, (x, labels)),
        Case(
            f"cross_entropy-shard-{tag}", loss.cross_entropy, (x, labels + 3), {"offset": 5, "classes": m + 8}
        ),
        Case(
            f"cross_entropy_grad-{tag}",
            loss.cross_entropy_grad,
            (x, labels, lse, w[0] + 0 * lse),
            {"offset": 2},
        ),
        Case(f"pick-{tag}", loss.pick, (x, labels), {"offset": 4}),
        Case(
            f"pick_grad-{tag}", loss.pick_grad, (lse, labels.astype(np.int32)), {"size": m - 3, "offset": 2}
        ),
    ]


def _element_cases(draw: Callable[..., Any], n: int, m: int, tag: str) -> list[Case]:
    x, dy = draw(n, m) * 3, draw(n, m)
    p, g, first, second = draw(n, m), draw(n, m), draw(n, m), draw(n, m) ** 2
    decay = {"weight_decay": 0.1, "decoupled": True}
    return [
        Case(f"gelu-{tag}", activation.gelu, (x,)),
        Case(f"gelu-tanh-{tag}", activation.gelu, (x,), {"approximate": True}),
        Case(f"gelu_grad-{tag}", activation.gelu_grad, (x, dy)),
        Case(f"gelu_grad-tanh-{tag}", activation.gelu_grad, (x, dy), {"approximate": True}),
        Case(f"silu-{tag}", activation.silu, (x,)),
        Case(f"silu_grad-{tag}", activation.silu_grad, (x, dy)),
        Case(f"sigmoid-{tag}", activation.sigmoid, (x,)),
        Case(f"erf-{tag}", activation.erf, (x,)),
        Case(f"relu_grad-{tag}", activation.relu_grad, (x, dy)),
        Case(f"tanh_grad-{tag}", activation.tanh_grad, (np.tanh(x), dy)),
        Case(f"adam-{tag}", optimizer.adam, (p, g, first, second, 0.01, 3), {"weight_decay": 0.1}),
        Case(f"adam-decoupled-{tag}", optimizer.adam, (p, g, first, second, 0.01, 3), decay),
        Case(f"momentum-{tag}", optimizer.momentum, (p, g, first, 0.01), {"weight_decay": 0.1}),
        Case(f"momentum-nesterov-{tag}", optimizer.momentum, (p, g, first, 0.01), {"nesterov": True}),
        Case(f"dropout-{tag}", rnd.dropout, (x, KEY), {"rate": 0.3, "salt": 5}),
        Case(
            f"dropout-shard-{tag}",
            rnd.dropout,
            (x, KEY),
            {"rate": 0.3, "shape": (2 * n, m + 9), "starts": (n, 9)},
        ),
    ]


def _lookup_cases(draw: Callable[..., Any], n: int, m: int, tag: str) -> list[Case]:
    ids = ((np.arange(n * 3) * 13) % (n + 6)).reshape(3, n)
    updates = draw(3, n, m)
    return [
        Case(f"embedding-{tag}", embedding.embedding, (draw(n + 6, m), ids)),
        Case(f"embedding-shard-{tag}", embedding.embedding, (draw(n, m), ids), {"offset": 4}),
        Case(f"embedding_grad-{tag}", embedding.embedding_grad, (updates, ids), {"rows": n, "offset": 2}),
        Case(
            f"scatter_add-{tag}",
            embedding.scatter_add,
            (draw(n, m), ids.astype(np.int32), updates),
            {"offset": 1},
        ),
    ]


def _attention_cases(draw: Callable[..., Any], s: int, t: int, tag: str) -> list[Case]:
    q, k, v, do = draw(2, 6, s, 8), draw(2, 2, t, 8), draw(2, 2, t, 5), draw(2, 6, s, 5)
    cases = []
    for causal in (False, True):
        o, lse = attention.attention(np, q, k, v, causal=causal)
        attrs = {"causal": causal}
        name = f"{tag}-causal" if causal else tag
        cases.append(Case(f"attention-{name}", attention.attention, (q, k, v), attrs))
        cases.append(
            Case(f"attention_grad-{name}", attention.attention_grad, (do, q, k, v, o, lse), attrs, 1e-4)
        )
    return cases


def _spatial_cases(draw: Callable[..., Any]) -> list[Case]:
    x, w = draw(3, 4, 9, 7), draw(6, 2, 3, 2)
    attrs = {"stride": (2, 1), "padding": ((1, 0), (2, 1)), "dilation": (1, 2), "groups": 2}
    dy = draw(*conv.conv(np, x, w, **attrs).shape)
    over = {"window": (3, 2), "stride": (2, 1), "padding": ((1, 0), (0, 1))}
    y = pooling.max_pool(np, x, **over)
    return [
        Case("matmul", matmul.matmul, (draw(2, 3, 4), draw(4, 5))),
        Case("matmul-batched", matmul.matmul, (draw(3, 1, 2, 4), draw(5, 4, 6))),
        Case("einsum", matmul.einsum, (draw(2, 3, 4), draw(2, 5, 4)), {"spec": "b s d, b t d -> b t s"}),
        Case("conv", conv.conv, (x, w), attrs),
        Case("conv_grad_input", conv.conv_grad_input, (dy, w), attrs | {"input_shape": x.shape}),
        Case("conv_grad_weight", conv.conv_grad_weight, (x, dy), attrs | {"kernel_shape": w.shape}),
        Case("max_pool", pooling.max_pool, (x,), over),
        Case("max_pool_grad", pooling.max_pool_grad, (x, y, draw(*y.shape)), over),
        Case("avg_pool", pooling.avg_pool, (x,), over),
        Case("avg_pool_grad", pooling.avg_pool_grad, (draw(*y.shape),), over | {"input_shape": x.shape}),
    ]


def all_cases(dtype: Any = np.float32) -> list[Case]:
    """Every kernel, small (plain NumPy) and above the size at which compiled loops take over."""
    rng = np.random.default_rng(5)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    cases = _spatial_cases(draw)
    for n, m, tag in ((5, 13, "small"), (131, 257, "large")):
        cases += (
            _rows_cases(draw, n, m, tag) + _element_cases(draw, n, m, tag) + _lookup_cases(draw, n, m, tag)
        )
    return cases + _attention_cases(draw, 5, 9, "small") + _attention_cases(draw, 97, 131, "large")


def as_tuple(results: Any) -> tuple[Any, ...]:
    """Results of a kernel, one or several, as a tuple."""
    return results if isinstance(results, tuple) else (results,)
