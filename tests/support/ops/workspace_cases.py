"""Instances of every op that are large enough for their arrays to outweigh Python's objects: a few MiB."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from distgraph.kernels import conv
from distgraph.kernels.windows import pooling

_RNG = np.random.default_rng(3)


@dataclass(frozen=True)
class Case:
    """One instance of an op.

    Attributes:
        kind: of the op.
        operands: NumPy arrays; some are no C-contiguous blocks.
        attrs: of the op, on one rank.
        note: tells the cases of a kind apart.
    """

    kind: str
    operands: tuple[Any, ...]
    attrs: dict[str, Any]
    note: str = ""


def f32(*shape: int) -> Any:
    return _RNG.random(shape, np.float32) + np.float32(0.1)


def i32(high: int, *shape: int) -> Any:
    return _RNG.integers(0, high, shape).astype(np.int32)


def turned(x: Any) -> Any:
    """The same block seen with its last two dims exchanged: not contiguous."""
    return x.swapaxes(-1, -2)


UNARY = (
    "negative", "absolute", "sign", "exp", "log", "log1p", "expm1", "sqrt", "square", "reciprocal", "sin",
    "cos", "tan", "arcsin", "arccos", "arctan", "sinh", "cosh", "log2", "log10", "trunc", "floor", "ceil",
    "rint", "rsqrt", "tanh", "relu", "gelu", "silu", "sigmoid", "erf", "isnan", "isfinite", "isinf",
    "logical_not",
)  # fmt: skip
BINARY = (
    "add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "arctan2", "hypot",
    "floor_divide", "remainder", "equal", "not_equal", "less", "less_equal", "greater", "greater_equal",
    "logical_and", "logical_or", "logical_xor",
)  # fmt: skip
INTEGER = ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift")
SLOPES = ("relu_grad", "gelu_grad", "silu_grad", "sigmoid_grad", "tanh_grad")


def elementwise() -> Iterator[Case]:
    for kind in UNARY:
        small = f32(256, 1024) / 2
        yield Case(kind, (small,), {})
        yield Case(kind, (turned(small),), {}, "turned")
    for kind in BINARY:
        yield Case(kind, (f32(256, 1024), f32(256, 1024)), {})
        yield Case(kind, (f32(256, 1024), f32(1024)), {}, "broadcast")
        yield Case(kind, (f32(256, 1024), turned(f32(1024, 256))), {}, "turned")
    for kind in INTEGER:
        yield Case(kind, (i32(8, 256, 1024), i32(8, 256, 1024)), {})
    yield Case("bitwise_not", (i32(8, 256, 1024),), {})
    for kind in SLOPES:
        yield Case(kind, (f32(256, 1024), f32(256, 1024)), {})
        yield Case(kind, (turned(f32(1024, 256)), f32(256, 1024)), {}, "turned")
    yield Case("cast", (f32(256, 1024),), {"dtype": "f64"})
    yield Case("where", (f32(256, 1024) > 0.5, f32(256, 1024), f32(256, 1024)), {})
    yield Case("where", (f32(256, 1024) > 0.5, f32(256, 1024), np.float32(0)), {}, "scalar")
    for kind, count in (("adam", 4), ("momentum", 3)):
        scalars = (np.float32(1e-3), np.float32(3)) if kind == "adam" else (np.float32(1e-3),)
        yield Case(kind, (*(f32(256, 1024) for _ in range(count)), *scalars), {})
        yield Case(kind, (*(f32(64, 64) for _ in range(count)), *scalars), {}, "few")
        states = (f32(256, 1024) for _ in range(count - 2))
        yield Case(kind, (f32(256, 1024), turned(f32(1024, 256)), *states, *scalars), {}, "turned")


def contractions() -> Iterator[Case]:
    yield Case("matmul", (f32(256, 1024), f32(1024, 768)), {})
    yield Case("matmul", (turned(f32(1024, 256)), f32(1024, 768)), {}, "turned")
    yield Case("matmul", (f32(8, 128, 256), f32(256, 512)), {}, "batch")
    yield Case("matmul", (f32(8, 128, 256), f32(8, 256, 64)), {}, "batches")
    yield Case("matmul", (f32(256, 1024, 2)[..., 0], f32(1024, 768)), {}, "apart")
    yield Case("einsum", (f32(256, 1024), f32(1024, 768)), {"spec": "mk,kn->mn"})
    yield Case("einsum", (f32(16, 128, 256), f32(16, 128, 256)), {"spec": "bsm,bsn->mn"}, "weight")
    yield Case("einsum", (f32(16, 128, 256), f32(256, 512)), {"spec": "bsm,mn->bsn"}, "linear")
    yield Case("einsum", (f32(16, 128, 256), f32(512, 256)), {"spec": "bsm,nm->bsn"}, "back")
    yield Case("einsum", (f32(16, 128, 4, 64), f32(16, 128, 4, 64)), {"spec": "bshd,bthd->bhst"}, "scores")
    yield Case("einsum", (f32(512, 512), f32(512, 256), f32(256, 512)), {"spec": "ab,bc,cd->ad"}, "three")
    yield Case("einsum", (f32(64, 64, 64),), {"spec": "abc->ca"}, "one")
    heads = (f32(4, 256, 8, 32).transpose(0, 2, 1, 3) for _ in range(3))
    yield Case("attention", tuple(heads), {"causal": True})
    yield Case("attention", tuple(f32(8, 4, 256, 64) for _ in range(3)), {"causal": False}, "whole")
    visible = (f32(4, 8, 64, 32), f32(4, 8, 256, 32), f32(4, 8, 256, 32))  # queries 64 to 127 of 256
    yield Case("attention", visible, {"causal": True, "keys": 128}, "split")
    yield Case("dynamic_slice", (f32(64, 1024), np.array([8, 0])), {"sizes": (32, 1024)})
    cached = (f32(4, 8, 64, 64), f32(4, 8, 256, 64), f32(4, 8, 256, 64), np.array(192))
    yield Case("attention_from", cached, {"scale": 0.1})
    step = (f32(4, 8, 1, 16), f32(4, 8, 4096, 16), f32(4, 8, 4096, 16), np.array(4095))
    yield Case("attention_from", step, {"scale": 0.1}, "one query")
    for causal in (True, False):
        shapes = [f32(4, 256, 8, 32).transpose(0, 2, 1, 3) for _ in range(5)]
        yield Case("attention_grad", (*shapes, f32(4, 8, 256)), {"causal": causal}, f"causal={causal}")
    q, k, v = visible
    for keys in (128, 256):
        split = {"causal": True, "keys": keys}
        yield Case("attention_grad", (q, q, k, v, q, f32(4, 8, 64)), split, f"split, keys={keys}")

    for shift in (0, 1):
        step = {"causal": True, "scale": 0.2, "parts": 4, "shift": shift, "block": 2}
        heads = [f32(4, 256, 8, 32).transpose(0, 2, 1, 3) for _ in range(5)]
        lse = f32(4, 8, 256)
        yield Case("ring_attention", tuple(heads[:3]), step, f"shift={shift}")
        yield Case("ring_attention_add", (heads[0], lse, *heads[:3]), step, f"shift={shift}")
        yield Case("ring_attention_grad", (*heads, lse), step, f"shift={shift}")


def lookups() -> Iterator[Case]:
    ids = i32(4096, 64, 64)
    yield Case("embedding", (f32(4096, 128), ids), {})
    yield Case("embedding", (f32(2048, 128), ids), {"offset": 2048, "length": 4096}, "split")
    yield Case("take", (f32(4096, 128), ids), {"dim": 0})
    yield Case("take", (f32(128, 4096), ids), {"dim": 1}, "columns")
    yield Case("embedding_grad", (f32(64, 64, 128), ids), {"rows": 4096})
    yield Case("embedding_grad", (f32(64, 64, 128), ids), {"rows": 2048, "offset": 2048}, "split")
    yield Case("scatter_add", (f32(4096, 128), ids, f32(64, 64, 128)), {})
    yield Case("pick", (f32(65536, 16), i32(16, 65536)), {})
    yield Case("pick_grad", (f32(65536), i32(16, 65536)), {"size": 16})
    yield Case("take_along", (f32(512, 1024), i32(1024, 512, 512)), {"dim": 1})
    yield Case("put_along", (f32(512, 512), i32(1024, 512, 512)), {"dim": 1, "size": 1024})
    yield Case("one_hot", (i32(64, 8192),), {"classes": 64, "dtype": "f32"})
    yield Case("dynamic_update_slice", (f32(256, 1024), f32(256, 256), np.array([0, 128])), {})


def reductions() -> Iterator[Case]:
    for kind in ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_any", "reduce_all"):
        operand = f32(256, 1024) > 0.5 if kind in ("reduce_any", "reduce_all") else f32(256, 1024)
        for dims in ((0,), (1,), (0, 1)):
            yield Case(kind, (operand,), {"dims": dims, "keepdims": False}, str(dims))
    for kind in ("cumsum", "cumprod", "sort", "argsort"):
        for dim in (0, 1):
            yield Case(kind, (f32(256, 1024),), {"dim": dim}, str(dim))
    for kind in ("argmax", "argmin"):
        for dim in (0, 1):
            yield Case(kind, (f32(1024, 1024),), {"dim": dim}, str(dim))
    yield Case("top_k", (f32(1024, 256),), {"k": 64})


def shapes() -> Iterator[Case]:
    yield Case("pad", (f32(256, 1024),), {"low": (1, 2), "high": (0, 3), "interior": (1, 0), "value": 0.0})
    yield Case("concat", (f32(512, 512), f32(512, 512)), {"dim": 1})
    yield Case("roll", (f32(256, 1024),), {"shift": 3, "dim": 1})
    cut = {"dim": 1, "index": 1, "slices": 4, "block": 8}
    yield Case("block_slice", (f32(256, 1024),), cut)
    yield Case("block_expand", (f32(256, 256),), cut)
    yield Case("block_insert", (f32(256, 1024), f32(256, 256)), cut)
    yield Case("einsum_add", (f32(256, 768), f32(256, 1024), f32(1024, 768)), {"spec": "mk,kn->mn"})
    ring = {"spec": "mk,kn->mn", "outer": "n", "inner": "k", "whole": "k", "parts": 4, "shift": 1}
    yield Case("ring_einsum", (f32(256, 1024), f32(1024, 768)), ring)
    yield Case("ring_einsum_add", (f32(256, 768), f32(256, 1024), f32(1024, 768)), ring)
    skewed = {"spec": "mk,kn->mn", "rows": "m", "inner": "k", "cols": "n", "parts": 2, "shift": 1}
    skewed |= {"row_sign": 1, "col_sign": 1, "exchanged": -1}
    yield Case("skewed_einsum", (f32(256, 1024), f32(1024, 768)), skewed)
    yield Case("skewed_einsum_add", (f32(256, 768), f32(256, 1024), f32(1024, 768)), skewed)
    yield Case("ring_join", tuple(f32(256, 256) for _ in range(4)), {"outer": 0, "inner": 1})
    yield Case("full", (), {"shape": (256, 1024), "value": 2.5, "dtype": "f32"})
    yield Case("iota", (), {"shape": (256, 1024), "dim": 1, "dtype": "i64"})
    yield Case("iota", (), {"shape": (256, 1024), "dim": 0, "dtype": "f32"}, "f32")


def rows() -> Iterator[Case]:
    for size in (1024, 96):  # long rows, and so few elements that no compiled loop is used
        x = f32(512, size) if size == 1024 else f32(160, size)
        note = "" if size == 1024 else "few"
        lead = x.shape[0]
        for kind in ("softmax", "log_softmax"):
            yield Case(kind, (x,), {"axis": 1}, note)
            yield Case(f"{kind}_grad", (x, x.copy()), {"axis": 1}, note)
            yield Case(kind, (x,), {"axis": 0}, f"{note} first")
            yield Case(f"{kind}_grad", (x, x.copy()), {"axis": 0}, f"{note} first")
        yield Case("layer_norm", (x, f32(size), f32(size)), {}, note)
        yield Case("layer_norm", (turned(turned(x).copy()), f32(size), f32(size)), {}, f"{note} turned")
        yield Case("layer_norm_grad", (x, x.copy(), f32(size), f32(lead), f32(lead)), {}, note)
        yield Case("rms_norm", (x, f32(size)), {}, note)
        yield Case("rms_norm_grad", (x, x.copy(), f32(size), f32(lead)), {}, note)
        yield Case("cross_entropy", (x, i32(size, lead)), {}, note)
        yield Case("cross_entropy_grad", (x, i32(size, lead), f32(lead), f32(lead)), {}, note)


_WINDOWS = (
    ("apart", {"window": (2, 2), "stride": (2, 2), "padding": ((0, 0), (0, 0))}),
    ("overlap", {"window": (3, 3), "stride": (2, 2), "padding": ((1, 1), (1, 1))}),
)
_KERNELS = (
    ("padded", {"stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1), "groups": 1}, 3),
    ("plain", {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}, 1),
    ("strided", {"stride": (2, 2), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 2}, 2),
)


def spatial() -> Iterator[Case]:
    x = f32(256, 16, 16, 16)
    for note, attrs in _WINDOWS:
        y = pooling.max_pool(np, x, **attrs)
        yield Case("max_pool", (x,), attrs, note)
        yield Case("max_pool_grad", (x, y, f32(*y.shape)), attrs, note)
        yield Case("avg_pool", (x,), attrs, note)
        yield Case("avg_pool_grad", (f32(*y.shape),), {**attrs, "input_shape": x.shape}, note)
    for note, attrs, size in _KERNELS:
        w = f32(32, 16 // attrs["groups"], size, size)
        y = conv.conv(np, x, w, **attrs)
        yield Case("conv", (x, w), attrs, note)
        yield Case("conv_grad_input", (f32(*y.shape), w), {**attrs, "input_shape": x.shape}, note)
        yield Case("conv_grad_weight", (x, f32(*y.shape)), {**attrs, "kernel_shape": w.shape}, note)


def random() -> Iterator[Case]:
    key = np.uint64(7)
    for kind in ("random_uniform", "random_normal"):
        yield Case(kind, (key,), {"shape": (256, 1024), "dtype": "f32"})
        yield Case(kind, (key,), {"shape": (256, 1024), "dtype": "f32", "batch_dim": 1}, "second")
    yield Case("dropout", (f32(256, 1024), key), {"rate": 0.1})
    yield Case("dropout", (f32(64, 64), key), {"rate": 0.1}, "few")
    yield Case("dropout", (f32(256, 1024), key), {"rate": 0.1, "batch_dim": 1}, "second")


FAMILIES = (elementwise, contractions, lookups, reductions, shapes, rows, spatial, random)
