"""Sample instances of the fused ops: rows, activations, loss, attention, optimisers, random, convolution.

References are SciPy's functions, or the textbook formula written over whole tensors, loops and all.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from scipy import special
from support.ops.op_checks import Sample

from distgraph import ops
from distgraph.array_api.trace import trace

SAMPLES: dict[str, list[Sample]] = {}
_RNG = np.random.default_rng(23)


def _normal(*shape: int) -> Any:
    return _RNG.standard_normal(shape)


def _positive(*shape: int) -> Any:
    return 0.5 + _RNG.random(shape)


def _off_zero(*shape: int) -> Any:
    return (0.1 + 2 * _RNG.random(shape)) * _RNG.choice([-1.0, 1.0], shape)


def _labels(classes: int, *shape: int) -> Any:
    return _RNG.integers(0, classes, shape).astype(np.int32)


def _add(
    kind: str, *operands: Any, reference: Any = None, wrt: Any = None, dtypes: Any = None, **attrs: Any
) -> None:
    options = {} if dtypes is None else {"dtypes": dtypes}
    SAMPLES.setdefault(kind, []).append(Sample(operands, attrs, reference, wrt, **options))


# rows

for _shape, _axis in (((5, 6), 1), ((4, 3, 2), 0), ((2, 5, 3), 1), ((7,), 0)):
    _x, _dy = _normal(*_shape), _normal(*_shape)
    _add("softmax", _x, axis=_axis, reference=lambda x, a=_axis: special.softmax(x, a))
    _add("log_softmax", _x, axis=_axis, reference=lambda x, a=_axis: special.log_softmax(x, a))
    _add(
        "softmax_grad", special.softmax(_x, _axis), _dy, axis=_axis,
        reference=lambda y, dy, a=_axis: y * (dy - (y * dy).sum(a, keepdims=True)),
    )  # fmt: skip
    _add(
        "log_softmax_grad", special.log_softmax(_x, _axis), _dy, axis=_axis,
        reference=lambda y, dy, a=_axis: dy - np.exp(y) * dy.sum(a, keepdims=True),
    )  # fmt: skip


def _layer_norm(x: Any, w: Any, b: Any) -> Any:
    mean, rstd = x.mean(-1), (x.var(-1) + 1e-5) ** -0.5
    return (x - mean[..., None]) * rstd[..., None] * w + b, mean, rstd


def _layer_norm_grad(dy: Any, x: Any, w: Any, mean: Any, rstd: Any) -> Any:
    """From the Jacobian of the normalised row: (identity - 1/n - h h^T / n) * rstd."""
    n = x.shape[-1]
    h = (x - mean[..., None]) * rstd[..., None]
    jacobian = (np.eye(n) - 1 / n - h[..., :, None] * h[..., None, :] / n) * rstd[..., None, None]
    rows = tuple(range(x.ndim - 1))
    return np.einsum("...j,...ji->...i", dy * w, jacobian), (dy * h).sum(rows), dy.sum(rows)


def _rms_norm(x: Any, w: Any) -> Any:
    rstd = ((x**2).mean(-1) + 1e-6) ** -0.5
    return x * rstd[..., None] * w, rstd


def _rms_norm_grad(dy: Any, x: Any, w: Any, rstd: Any) -> Any:
    n = x.shape[-1]
    h = x * rstd[..., None]
    jacobian = (np.eye(n) - h[..., :, None] * h[..., None, :] / n) * rstd[..., None, None]
    return np.einsum("...j,...ji->...i", dy * w, jacobian), (dy * h).sum(tuple(range(x.ndim - 1)))


for _shape in ((5, 6), (2, 5, 3), (4,)):
    _x, _dy, _w, _b = _normal(*_shape), _normal(*_shape), _normal(_shape[-1]), _normal(_shape[-1])
    _, _mean, _rstd = _layer_norm(_x, _w, _b)
    _add("layer_norm", _x, _w, _b, eps=1e-5, reference=_layer_norm)
    _add("layer_norm_grad", _dy, _x, _w, np.asarray(_mean), np.asarray(_rstd), reference=_layer_norm_grad)
    _add("rms_norm", _x, _w, eps=1e-6, reference=_rms_norm)
    _add("rms_norm_grad", _dy, _x, _w, np.asarray(_rms_norm(_x, _w)[1]), reference=_rms_norm_grad)

# activations

_X, _DY = _off_zero(5, 3), _normal(5, 3)
_DENSITY = np.exp(-(_X**2) / 2) / np.sqrt(2 * np.pi)
_add("relu", _X, reference=lambda x: np.maximum(x, 0))
_add("sigmoid", _X, reference=special.expit)
_add("tanh", _X, reference=np.tanh)
_add("erf", _X, reference=special.erf)
_add("silu", _X, reference=lambda x: x * special.expit(x))
_add("gelu", _X, approximate=False, reference=lambda x: x * special.ndtr(x))
_add(
    "gelu", _X, approximate=True,
    reference=lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
)  # fmt: skip
_add("relu_grad", _X, _DY, reference=lambda x, dy: dy * (x > 0))
_add("sigmoid_grad", special.expit(_X), _DY, reference=lambda y, dy: dy * y * (1 - y))
_add("tanh_grad", np.tanh(_X), _DY, reference=lambda y, dy: dy * (1 - y**2))
_add(
    "silu_grad", _X, _DY,
    reference=lambda x, dy: dy * (special.expit(x) + x * special.expit(x) * special.expit(-x)),
)  # fmt: skip
_add("gelu_grad", _X, _DY, approximate=False, reference=lambda x, dy: dy * (special.ndtr(x) + x * _DENSITY))

# loss


def _cross_entropy(logits: Any, labels: Any) -> Any:
    lse = special.logsumexp(logits, -1)
    return lse - np.take_along_axis(logits, labels[..., None], -1)[..., 0], lse


def _cross_entropy_grad(logits: Any, labels: Any, lse: Any, dloss: Any) -> Any:
    return (np.exp(logits - lse[..., None]) - np.eye(logits.shape[-1])[labels]) * dloss[..., None]


for _shape in ((5, 6), (2, 3, 5), (4,)):
    _logits, _at = _normal(*_shape), np.asarray(_labels(_shape[-1], *_shape[:-1]))
    _lse = np.asarray(_cross_entropy(_logits, _at)[1])
    _add("cross_entropy", _logits, _at, reference=_cross_entropy)
    _add(
        "cross_entropy_grad", _logits, _at, _lse, np.asarray(_normal(*_shape[:-1])),
        reference=_cross_entropy_grad, dtypes=("f32",),  # not half: exp of a rounded lse is far off
    )  # fmt: skip

# attention


def _attention(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    share = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, share, 1), np.repeat(v, share, 1)
    scores = scale * np.einsum("bhsd,bhtd->bhst", q, k)
    s, t = scores.shape[-2:]
    if causal:
        scores = np.where(np.tril(np.ones((s, t), bool), t - s), scores, -np.inf)
    return np.einsum("bhst,bhtd->bhsd", special.softmax(scores, -1), v), special.logsumexp(scores, -1)


def _attention_grad(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, causal: bool, scale: float) -> Any:
    groups, share = k.shape[1], q.shape[1] // k.shape[1]
    wide_k, wide_v = np.repeat(k, share, 1), np.repeat(v, share, 1)
    scores = scale * np.einsum("bhsd,bhtd->bhst", q, wide_k)
    s, t = scores.shape[-2:]
    if causal:
        scores = np.where(np.tril(np.ones((s, t), bool), t - s), scores, -np.inf)
    p = special.softmax(scores, -1)
    dp = np.einsum("bhsd,bhtd->bhst", do, wide_v)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale

    def grouped(x: Any) -> Any:
        return x.reshape(x.shape[0], groups, share, *x.shape[2:]).sum(2)

    dk, dv = np.einsum("bhst,bhsd->bhtd", ds, q), np.einsum("bhst,bhsd->bhtd", p, do)
    return np.einsum("bhst,bhtd->bhsd", ds, wide_k), grouped(dk), grouped(dv)


for (_h, _g, _s, _t), _causal in itertools.product(((4, 2, 5, 5), (3, 3, 4, 6), (2, 1, 1, 3)), (False, True)):
    _q, _k, _v = _normal(3, _h, _s, 3), _normal(3, _g, _t, 3), _normal(3, _g, _t, 2)
    _o, _lse = _attention(_q, _k, _v, _causal, 0.6)
    _add(
        "attention", _q, _k, _v, causal=_causal, scale=0.6,
        reference=lambda q, k, v, c=_causal: _attention(q, k, v, c, 0.6),
    )  # fmt: skip
    _add(
        "attention_grad", _normal(*_o.shape), _q, _k, _v, _o, _lse, causal=_causal, scale=0.6,
        reference=lambda *x, c=_causal: _attention_grad(*x, c, 0.6), dtypes=("f32",),
    )  # fmt: skip

for _width, _start in ((1, 4), (3, 2), (5, 0)):
    _add(
        "attention_from", _normal(3, 4, _width, 3), _normal(3, 2, 6, 3), _normal(3, 2, 6, 2),
        np.array(_start), scale=0.6,
        reference=lambda q, k, v, at: _attention(
            q, *(x[:, :, : int(at) + q.shape[2]] for x in (k, v)), True, 0.6
        )[0],
    )  # fmt: skip

# attention whose keys go round a ring, in blocks of ceil(length / parts) positions


def _ring_scores(q: Any, k: Any, parts: int, shift: int, causal: bool, scale: float) -> Any:
    """Scores, minus infinity where block (q + shift) mod parts of the keys is not that of the query."""
    length = q.shape[2]
    block = np.arange(length) // -(-length // parts)
    seen = block[None, :] == (block[:, None] + shift) % parts
    if causal:
        seen &= np.tril(np.ones((length, length), bool))
    return np.where(seen, scale * np.einsum("bhsd,bhtd->bhst", q, k), -np.inf)


def _ring_attention(q: Any, k: Any, v: Any, *step: Any) -> Any:
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = _ring_scores(q, k, *step)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(scores).sum(-1))
    p = np.exp(scores) / np.maximum(np.exp(scores).sum(-1, keepdims=True), 1e-300)
    return np.einsum("bhst,bhtd->bhsd", p, v), lse


def _ring_merged(total: Any, total_lse: Any, *qkv_and_step: Any) -> Any:
    o, lse = _ring_attention(*qkv_and_step)
    weights = np.exp(total_lse)[..., None], np.exp(lse)[..., None]
    return (weights[0] * total + weights[1] * o) / sum(weights), np.log(sum(weights))[..., 0]


def _ring_grad(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *step: Any) -> Any:
    groups, share = k.shape[1], q.shape[1] // k.shape[1]
    wide_k, wide_v = np.repeat(k, share, 1), np.repeat(v, share, 1)
    p = np.exp(_ring_scores(q, wide_k, *step) - lse[..., None])
    ds = p * (np.einsum("bhsd,bhtd->bhst", do, wide_v) - (do * o).sum(-1)[..., None]) * step[-1]
    dk, dv = np.einsum("bhst,bhsd->bhtd", ds, q), np.einsum("bhst,bhsd->bhtd", p, do)
    dk, dv = (x.reshape(x.shape[0], groups, share, *x.shape[2:]).sum(2) for x in (dk, dv))
    return np.einsum("bhst,bhtd->bhsd", ds, wide_k), dk, dv


for (_length, _parts, _shift), _causal in itertools.product(
    ((8, 2, 1), (7, 3, 0), (6, 3, 2), (9, 4, 3), (12, 6, 1)), (False, True)
):
    _step, _of = (_parts, _shift, _causal, 0.6), {"parts": _parts, "shift": _shift, "causal": _causal}
    _q, _k, _v = _normal(2, 4, _length, 3), _normal(2, 2, _length, 3), _normal(2, 2, _length, 2)
    _o, _lse, _do = _normal(2, 4, _length, 2), _normal(2, 4, _length), _normal(2, 4, _length, 2)
    _add(
        "ring_attention", _q, _k, _v, scale=0.6, **_of,
        reference=lambda *x, s=_step: _ring_attention(*x, *s),
    )  # fmt: skip
    _add(
        "ring_attention_add", _o, _lse, _q, _k, _v, scale=0.6, **_of, dtypes=("f32",),
        reference=lambda *x, s=_step: _ring_merged(*x, *s),
    )  # fmt: skip
    _add(
        "ring_attention_grad", _do, _q, _k, _v, _o, _lse, scale=0.6, **_of, dtypes=("f32",),
        reference=lambda *x, s=_step: _ring_grad(*x, *s),
    )  # fmt: skip

# optimiser steps


def _adam(p: Any, g: Any, m: Any, v: Any, lr: Any, t: Any) -> Any:
    g = g + 0.1 * p
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
    return p - lr * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8), m, v


def _adamw(p: Any, g: Any, m: Any, v: Any, lr: Any, t: Any) -> Any:
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    return p - lr * 0.1 * p - lr * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8), m, v


_state = (_normal(5, 3), _normal(5, 3), _normal(5, 3), _positive(5, 3), np.array(0.1), np.array(3.0))
_add("adam", *_state, beta2=0.95, weight_decay=0.1, wrt=(), dtypes=("f32",), reference=_adam)
_add("adam", *_state, weight_decay=0.1, decoupled=True, wrt=(), dtypes=("f32",), reference=_adamw)
_add(
    "momentum", *_state[:3], np.array(0.1), momentum=0.8, wrt=(), dtypes=("f32",),
    reference=lambda p, g, v, lr: (p - lr * (0.8 * v + g), 0.8 * v + g),
)  # fmt: skip
_add(
    "momentum", *_state[:3], np.array(0.1), momentum=0.8, nesterov=True, wrt=(), dtypes=("f32",),
    reference=lambda p, g, v, lr: (p - lr * (g + 0.8 * (0.8 * v + g)), 0.8 * v + g),
)  # fmt: skip

# random numbers

_KEY = np.array(77, np.uint64)
for _batch_dim in (0, 1, None):
    _add("random_uniform", _KEY, shape=(5, 3, 2), dtype="f32", salt=5, batch_dim=_batch_dim)
    _add("random_normal", _KEY, shape=(5, 3, 2), dtype="f64", salt=6, batch_dim=_batch_dim)
    _add("dropout", _normal(5, 3, 2), _KEY, rate=0.4, salt=7, batch_dim=_batch_dim)

# convolution and pooling


def _windows(x: Any, kernel: Any, attrs: Any, fill: float = 0.0) -> Any:
    """[n, c, *output, *kernel] by plain indexing."""
    stride, dilation = attrs["stride"], attrs.get("dilation", (1,) * len(kernel))
    wide = np.pad(x, ((0, 0), (0, 0), *attrs["padding"]), constant_values=fill)
    made = [
        (n - d * (k - 1) - 1) // s + 1
        for n, k, s, d in zip(wide.shape[2:], kernel, stride, dilation, strict=True)
    ]
    result = np.empty((*x.shape[:2], *made, *kernel))
    for p in np.ndindex(*made):
        at = [
            slice(i * s, i * s + d * (k - 1) + 1, d)
            for i, s, d, k in zip(p, stride, dilation, kernel, strict=True)
        ]
        result[(slice(None), slice(None), *p)] = wide[(slice(None), slice(None), *at)]
    return result


def _conv(x: Any, w: Any, groups: int, **attrs: Any) -> Any:
    dims = w.ndim - 2
    found = _windows(x, w.shape[2:], attrs)
    inputs, outputs = np.split(found, groups, 1), np.split(w, groups, 0)
    axes = ([1, *range(2 + dims, 2 + 2 * dims)], list(range(1, w.ndim)))
    return np.concatenate(
        [np.moveaxis(np.tensordot(a, b, axes), -1, 1) for a, b in zip(inputs, outputs, strict=True)], 1
    )


def _transposed(function: Any, shape: tuple[int, ...], cotangent: Any) -> Any:
    """The transpose of a linear function, one unit tensor at a time."""
    result = np.empty(shape)
    for at in np.ndindex(*shape):
        unit = np.zeros(shape)
        unit[at] = 1
        result[at] = (function(unit) * cotangent).sum()
    return result


_SIDES = {"stride": (2, 1), "padding": ((1, 0), (1, 1)), "dilation": (1, 2)}
_LINE = {"stride": (2,), "padding": ((1, 2),), "dilation": (1,)}
for _groups, _c, _o, _sides, _size, _kernel in (
    (1, 2, 3, _SIDES, (4, 5), (3, 2)), (2, 4, 2, _SIDES, (5, 4), (2, 2)), (3, 3, 6, _LINE, (5,), (3,)),
):  # fmt: skip
    _x, _w = _normal(3, _c, *_size), _normal(_o, _c // _groups, *_kernel)
    _attrs = {**_sides, "groups": _groups}
    _change = _normal(*_conv(_x, _w, **_attrs).shape)
    _add("conv", _x, _w, **_attrs, reference=lambda x, w, a=_attrs: _conv(x, w, **a))
    _add(
        "conv_grad_input", _change, _w, **_attrs, input_shape=_x.shape,
        reference=lambda dy, w, a=_attrs, s=_x.shape: _transposed(lambda x: _conv(x, w, **a), s, dy),
    )  # fmt: skip
    _add(
        "conv_grad_weight", _x, _change, **_attrs, kernel_shape=_w.shape,
        reference=lambda x, dy, a=_attrs, s=_w.shape: _transposed(lambda w: _conv(x, w, **a), s, dy),
    )  # fmt: skip

_POOL = {"window": (3, 2), "stride": (2, 1), "padding": ((1, 1), (0, 1))}
# different numbers, so that maxima have a derivative
_x = (_RNG.permutation(3 * 2 * 5 * 4).reshape(3, 2, 5, 4) - 60.5) / 8
_best = _windows(_x, _POOL["window"], _POOL, -np.inf).max((-1, -2))
_change = _normal(*_best.shape)


def _max_pool_grad(x: Any, y: Any, dy: Any) -> Any:
    result = np.zeros(x.shape)
    for n, c, *where in np.ndindex(*y.shape):
        place = np.argwhere(x[n, c] == y[(n, c, *where)])[0]
        result[(n, c, *place)] += dy[(n, c, *where)]
    return result


def _mean_pool(x: Any) -> Any:
    return _windows(x, _POOL["window"], _POOL).mean((-1, -2))


_add("max_pool", _x, **_POOL, reference=lambda x: _windows(x, _POOL["window"], _POOL, -np.inf).max((-1, -2)))
_add("max_pool_grad", _x, _best, _change, **_POOL, reference=_max_pool_grad, dtypes=("f32",))
_add("avg_pool", _x, **_POOL, reference=_mean_pool)
_add(
    "avg_pool_grad", _change, input_shape=_x.shape, **_POOL,
    reference=lambda dy: _transposed(_mean_pool, _x.shape, dy),
)  # fmt: skip

# loops


def _loop(function: Any, *operands: Any) -> dict[str, Any]:
    """Attributes of the loop that a function of operands makes."""
    return dict(trace(function, *operands).ops[-1].attrs)


def _running(h: Any, x: Any, w: Any) -> Any:
    return np.sum(x * w, 0) + h, np.cumsum(x * w, 0) + h


_operands = (np.array([1.0, 3.0, 0.5]), np.array(1.5))
_add(
    "while_loop", *_operands,
    **_loop(lambda x, f: ops.while_loop(lambda x: x.max() < 50.0, lambda x: x * f, (x,)), *_operands),
    wrt=(), reference=lambda x, f: x * 1.5 ** np.ceil(np.log(50 / 3) / np.log(1.5)), dtypes=(),
)  # fmt: skip
_operands = (np.array([1.0, 3.0, 0.5]), _RNG.standard_normal((4, 3)), np.array([1.0, 2.0, 3.0]))
_add(
    "scan", *_operands,
    **_loop(lambda h, x, w: ops.scan(lambda h, x: (h + x * w, h + x * w), h, x), *_operands),
    reference=_running, dtypes=(),
)  # fmt: skip
_add("fold_key", np.array(7, np.uint64), np.array(3, np.int64), dtypes=(), wrt=())
