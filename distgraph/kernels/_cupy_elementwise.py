"""Elementwise CUDA kernels for the hot elementwise families on CuPy: one pass over memory each.

Sources are templates over the dtype; CuPy compiles them at first use and caches them on disk.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

_HASH = """
__device__ unsigned long long distgraph_hash(unsigned long long z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}
"""
_STATE = "key + (offsets[i / run] + (unsigned long long)(i % run)) * 0x9E3779B97F4A7C15ULL"

_TANH_SIGMOID = "T s = T(1) / (T(1) + exp(T(-1.5957691216057308) * (x + T(0.044715) * x * x * x)));"
_ERF_CDF = "T s = T(0.5) * (T(1) + erf(x * T(0.7071067811865476)));"
_SIGMOID = "T s = T(1) / (T(1) + exp(-x));"

_ADAM = """
T d = g + coupled * p;
T a = b1 * m + (T(1) - b1) * d;
T b = b2 * v + (T(1) - b2) * d * d;
T q = keep * p - size * a / (sqrt(b) * root + eps);
new_m = a;
new_v = b;
new_p = q;
"""

# name: inputs, outputs, body, preamble
SOURCES: dict[str, tuple[str, str, str, str]] = {
    "gelu": ("T x", "T y", _ERF_CDF + "y = x * s;", ""),
    "gelu_tanh": ("T x", "T y", _TANH_SIGMOID + "y = x * s;", ""),
    "gelu_grad": (
        "T x, T dy",
        "T dx",
        _ERF_CDF + "dx = dy * (s + x * T(0.3989422804014327) * exp(T(-0.5) * x * x));",
        "",
    ),
    "gelu_tanh_grad": (
        "T x, T dy",
        "T dx",
        _TANH_SIGMOID
        + "dx = dy * (s + x * s * (T(1) - s) * T(1.5957691216057308) * (T(1) + T(0.134145) * x * x));",
        "",
    ),
    "silu": ("T x", "T y", _SIGMOID + "y = x * s;", ""),
    "silu_grad": ("T x, T dy", "T dx", _SIGMOID + "dx = dy * s * (T(1) + x * (T(1) - s));", ""),
    "sigmoid": ("T x", "T y", _SIGMOID + "y = s;", ""),
    "erf": ("T x", "T y", "y = erf(x);", ""),
    "relu_grad": ("T x, T dy", "T dx", "dx = x > T(0) ? dy : T(0);", ""),
    "tanh_grad": ("T y, T dy", "T dx", "dx = dy * (T(1) - y * y);", ""),
    "adam": (
        "T p, T g, T m, T v, T b1, T b2, T size, T root, T eps, T coupled, T keep",
        "T new_p, T new_m, T new_v",
        _ADAM,
        "",
    ),
    "random_bits": (
        "uint64 key, raw uint64 offsets, int64 run",
        "uint64 bits",
        f"bits = distgraph_hash({_STATE});",
        _HASH,
    ),
    "dropout": (
        "T x, uint64 key, raw uint64 offsets, int64 run, uint64 threshold, T scale",
        "T y",
        f"y = (distgraph_hash({_STATE}) >> 32) >= threshold ? x * scale : T(0);",
        _HASH,
    ),
}


@cache
def elementwise(name: str) -> Any:
    """The compiled kernel ``name`` of `SOURCES`: ``kernel(*inputs, *outputs)``, or ``kernel(*inputs,
    size=n)``."""
    inputs, results, body, preamble = SOURCES[name]
    cupy = import_module("cupy")
    return cupy.ElementwiseKernel(inputs, results, body, f"distgraph_{name}", preamble=preamble)
