"""Milliseconds per kernel at the sizes of a small GPT, beside PyTorch eager on one thread.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python -m benchmarks.support.kernels [--quick] [--json FILE]

Sizes: 4 layers, hidden 256, 8 heads of 32, sequence 128, batch 16 (2048 tokens), vocabulary 4096, float32.
Columns: ours with compiled loops (extra ``fast``), ours in plain NumPy, PyTorch, and ours / PyTorch. Each is
the least of repeated runs, the three taking turns, so that a busy machine slows all of them.

What was tried, and what it gave (AMD EPYC Zen 5, OpenBLAS 0.3.31, PyTorch 2.13 with MKL):

* exp by libm in a Numba loop: 4.0 ms for 2 Mi elements; our polynomial, which LLVM vectorises: 0.25 ms;
numpy.exp 0.8 ms. * the same polynomial under reassociating fast-math: 8 units of error, as LLVM merges the
two steps of the argument
  reduction; element functions are compiled without it, loops with it: 1 unit, the same speed.
* a row maximum in a Numba loop does not vectorise for floats (134 us for 256 Ki elements); compared as
integers 12 us. * outputs written through a scratch row: an output that is an input (Adam in place, gradients
over their operand) keeps
  vector code; without it LLVM's overlap check falls back to scalar code.
* attention in one batched matmul over all (batch, head) moves 8 MiB of scores four times; tiles of 512 KiB
stay in the
  second-level cache. Causal tiles of at least 64 query rows skip what lies above the diagonal.
* embedding gradient: numpy.add.at 10x slower than sort + reduceat, which is 3x slower than the compiled loop.
* OpenBLAS with AVX-512 gives 200 to 240 GFLOP/s, held to AVX2 (OPENBLAS_CORETYPE=Haswell)
  110 to 128; MKL in PyTorch uses AVX2 on this processor, 88 to 114.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distgraph.kernels import (
    _jit,
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

TOKENS, HIDDEN, HEADS, SEQUENCE, BATCH, VOCABULARY = 2048, 256, 8, 128, 16, 4096
Call = Callable[[], Any]
F = torch.nn.functional
RNG = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


@contextmanager
def no_numba() -> Iterator[None]:
    """As if Numba were not installed."""
    kept = sys.modules.get("numba")
    sys.modules["numba"] = None  # type: ignore[assignment]
    _jit.has_numba.cache_clear()
    yield
    if kept is None:
        del sys.modules["numba"]
    else:
        sys.modules["numba"] = kept
    _jit.has_numba.cache_clear()


def once(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def measure(ours: Call, other: Call, repeats: int) -> tuple[float, float, float]:
    """Least milliseconds of our compiled path, our plain path, and the other."""
    times: list[tuple[float, float, float]] = []
    for _ in range(repeats + 1):  # the first round warms up
        fast, eager = once(ours), once(other)
        with no_numba():
            times.append((fast, once(ours), eager))
    return tuple(min(column) for column in zip(*times[1:], strict=True))  # type: ignore[return-value]


def into(kernel: Callable[..., Any], *arrays: Any, **attrs: Any) -> Call:
    """The kernel writing to outputs allocated once, as compiled tasks do."""
    results = kernel(np, *arrays, **attrs)
    out = (
        tuple(np.empty(r.shape, r.dtype) for r in results)
        if isinstance(results, tuple)
        else np.empty_like(results)
    )
    return lambda: kernel(np, *arrays, out=out, **attrs)


def row_kernels() -> Iterator[tuple[str, Call, Call]]:
    aten, t = torch.ops.aten, torch.from_numpy
    x, w, b, dy = draw(TOKENS, HIDDEN), draw(HIDDEN), draw(HIDDEN), draw(TOKENS, HIDDEN)
    _, mean, rstd = norm.layer_norm(np, x, w, b)
    tx, tw, tb, tdy, tm, tr = (t(a) for a in (x, w, b, dy, mean[:, None], rstd[:, None]))
    yield "layer_norm", into(norm.layer_norm, x, w, b), lambda: F.layer_norm(tx, (HIDDEN,), tw, tb)
    yield (
        "layer_norm_grad",
        into(norm.layer_norm_grad, dy, x, w, mean, rstd),
        lambda: aten.native_layer_norm_backward(tdy, tx, (HIDDEN,), tm, tr, tw, tb, (True, True, True)),
    )
    logits, labels = draw(TOKENS, VOCABULARY), RNG.integers(0, VOCABULARY, TOKENS)
    _, lse = loss.cross_entropy(np, logits, labels)
    share = np.full(TOKENS, 1 / TOKENS, np.float32)
    tl, tlabels, one, count = t(logits), t(labels), torch.tensor(1.0), torch.tensor(float(TOKENS))
    logp = torch.log_softmax(tl, -1)

    def backward() -> None:
        picked = aten.nll_loss_backward(one, logp, tlabels, None, 1, -100, count)
        aten._log_softmax_backward_data(picked, logp, 1, torch.float32)

    yield "softmax", into(softmax.softmax, logits), lambda: torch.softmax(tl, -1)
    yield "cross_entropy", into(loss.cross_entropy, logits, labels), lambda: F.cross_entropy(tl, tlabels)
    yield "cross_entropy_grad", into(loss.cross_entropy_grad, logits, labels, lse, share), backward


def element_kernels() -> Iterator[tuple[str, Call, Call]]:
    aten, t = torch.ops.aten, torch.from_numpy
    h, dh = draw(TOKENS, 4 * HIDDEN), draw(TOKENS, 4 * HIDDEN)
    th, tdh = t(h), t(dh)
    for name, approximate in (("none", False), ("tanh", True)):
        yield (
            f"gelu {name}",
            into(activation.gelu, h, approximate=approximate),
            lambda n=name: F.gelu(th, approximate=n),
        )
        yield (
            f"gelu_grad {name}",
            into(activation.gelu_grad, h, dh, approximate=approximate),
            lambda n=name: aten.gelu_backward(tdh, th, approximate=n),
        )
    yield "dropout", into(rnd.dropout, h, 7, rate=0.1), lambda: F.dropout(th, 0.1)
    p, g, m, v = (
        draw(VOCABULARY, HIDDEN),
        draw(VOCABULARY, HIDDEN),
        draw(VOCABULARY, HIDDEN),
        draw(VOCABULARY, HIDDEN),
    )
    v *= v
    copies = [[t(a.copy())] for a in (p, g, m, v)]
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
    yield (
        "adam in place (PyTorch: fused)",
        lambda: optimizer.adam(np, p, g, m, v, 1e-3, 5, out=(p, m, v)),
        lambda: torch._fused_adam_(
            *copies, [], [torch.tensor(5.0)], **options, amsgrad=False, maximize=False
        ),
    )
    weight = torch.nn.Parameter(copies[0][0].clone())
    weight.grad = copies[1][0]
    eager = torch.optim.Adam([weight], foreach=False)
    yield (
        "adam in place (PyTorch: eager)",
        lambda: optimizer.adam(np, p, g, m, v, 1e-3, 5, out=(p, m, v)),
        eager.step,
    )


def contraction_kernels() -> Iterator[tuple[str, Call, Call]]:
    t = torch.from_numpy
    x, w = draw(BATCH, SEQUENCE, HIDDEN), draw(HIDDEN, 4 * HIDDEN)
    dy = draw(BATCH, SEQUENCE, 4 * HIDDEN)
    tx, tw, tdy = t(x), t(w), t(dy)
    yield "matmul 2048x256x1024", into(matmul.matmul, x, w), lambda: tx @ tw
    spec = "b s k, b s n -> k n"
    flat = tx.view(TOKENS, HIDDEN).T, tdy.view(TOKENS, 4 * HIDDEN)
    yield "einsum of a weight gradient", into(matmul.einsum, x, dy, spec=spec), lambda: flat[0] @ flat[1]
    heads = [draw(BATCH, SEQUENCE, HEADS, HIDDEN // HEADS).transpose(0, 2, 1, 3) for _ in range(4)]
    for causal in (False, True):
        q, k, v, do = heads
        o, lse = attention.attention(np, q, k, v, causal=causal)
        tq, tk, tv = (t(a).requires_grad_() for a in (q, k, v))
        y, tdo = F.scaled_dot_product_attention(tq, tk, tv, is_causal=causal), t(do)
        name = "causal" if causal else "full"
        yield (
            f"attention {name}",
            into(attention.attention, q, k, v, causal=causal),
            lambda c=causal, a=(tq, tk, tv): F.scaled_dot_product_attention(*a, is_causal=c),
        )
        yield (
            f"attention_grad {name}",
            into(attention.attention_grad, do, q, k, v, o, lse, causal=causal),
            lambda y=y, a=(tq, tk, tv), g=tdo: torch.autograd.grad(y, a, g, retain_graph=True),
        )


def lookup_kernels() -> Iterator[tuple[str, Call, Call]]:
    aten, t = torch.ops.aten, torch.from_numpy
    table, ids = draw(VOCABULARY, HIDDEN), RNG.integers(0, VOCABULARY, (BATCH, SEQUENCE))
    dy = draw(BATCH, SEQUENCE, HIDDEN)
    tt, ti, td = t(table), t(ids), t(dy)
    yield "embedding", into(embedding.embedding, table, ids), lambda: F.embedding(ti, tt)
    yield (
        "embedding_grad",
        into(embedding.embedding_grad, dy, ids, rows=VOCABULARY),
        lambda: aten.embedding_dense_backward(td, ti, VOCABULARY, -1, False),
    )
    x, w = draw(32, 16, 28, 28), draw(32, 16, 3, 3)
    y = conv.conv(np, x, w, padding=1)
    tx, tw, ty = t(x), t(w), t(y)
    options = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    yield "conv 32x16x28x28, 32x16x3x3", into(conv.conv, x, w, padding=1), lambda: F.conv2d(tx, tw, padding=1)
    yield (
        "conv_grad_input",
        into(conv.conv_grad_input, y, w, input_shape=x.shape, padding=1),
        lambda: aten.convolution_backward(ty, tx, tw, None, *options, (True, False, False)),
    )
    yield (
        "conv_grad_weight",
        into(conv.conv_grad_weight, x, y, kernel_shape=w.shape, padding=1),
        lambda: aten.convolution_backward(ty, tx, tw, None, *options, (False, True, False)),
    )


def main() -> None:
    """Measure, print the table and write the figures."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="3 repeats instead of 9")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there (milliseconds)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, dict[str, float]] = {}
    print(f"{'kernel':32} {'compiled':>9} {'NumPy':>9} {'PyTorch':>9} {'ratio':>6}")
    for family in (row_kernels, element_kernels, contraction_kernels, lookup_kernels):
        for name, ours, other in family():
            fast, plain, eager = measure(ours, other, 3 if options.quick else 9)
            print(f"{name:32} {fast:9.3f} {plain:9.3f} {eager:9.3f} {fast / eager:6.2f}")
            figures[name] = {"compiled": fast, "numpy": plain, "torch": eager}
    if options.json is not None:
        options.json.write_text(json.dumps({"kernels": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
