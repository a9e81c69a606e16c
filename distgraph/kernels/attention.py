"""Scaled dot-product attention, tile by tile, so that the scores never leave the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.kernels._common import (
    Array,
    Namespace,
    computed_in_f32,
    empty,
    is_half,
    outputs,
    store,
)
from distgraph.kernels._jit import FUSED_MIN_SIZE, has_numba, jit
from distgraph.kernels._math import exp32
from distgraph.kernels._row_loops import row_max
from distgraph.kernels.cuda.flash_attention import launch_attention, launch_attention_grad
from distgraph.kernels.matmul import blas_ready, multiply_into

_CACHE_SCORES = 1 << 17
"""Scores of one tile on a CPU: 512 KiB of float32, half of a second-level cache."""
_DEVICE_SCORES = 1 << 28
"""Scores of one tile on a GPU: 1 GiB of float32; fewer, larger launches."""
_CAUSAL_BLOCK = 64
"""Least number of query rows of a tile under a causal mask: smaller blocks skip more, but cost more calls."""

_TRANSPOSED_ROWS = 16
"""Rows whose elements the loop that transposes reads together: a line of the cache of each."""
_COPIED_QUERIES = 32
"""Least number of query rows of a group for which keys are copied, each of which reads the copy."""

_Tile = tuple[slice, slice, slice, int, int]


def _tiles(sizes: tuple[int, int, int, int, int], causal: bool, budget: int) -> Iterator[_Tile]:
    """Tiles as (batch, groups, query rows, number of keys seen, last key of the first row or more).

    The last rows of a batch and group come first: of its tiles, the first one sees all keys.

    ``sizes`` is (batch, groups, heads per group, queries, keys).
    """
    batch, groups, heads, queries, keys = sizes
    block = min(queries, max(16, budget // max(1, heads * keys)))
    if causal:
        block = min(block, max(_CAUSAL_BLOCK, queries // 4))
    area = max(1, heads * block * keys)
    per_group = min(groups, max(1, budget // area))
    per_batch = min(batch, max(1, budget // (area * groups))) if per_group == groups else 1
    for n in range(0, batch, per_batch):
        for g in range(0, groups, per_group):
            for i in reversed(range(0, queries, block)):
                stop = min(i + block, queries)
                # Aligned at the end, as in decoding with a cache: the last query sees every key.
                first = i + keys - queries if causal else keys
                seen = min(keys, max(0, stop + keys - queries)) if causal else keys
                yield slice(n, n + per_batch), slice(g, g + per_group), slice(i, stop), seen, first


def largest_tile(
    q: Array, k: Array, v: Array, *, causal: bool, gradient: bool = False
) -> tuple[int, int, int]:
    """The tile with most scores on a CPU: (rows of scores, keys that they see, pairs of batch and group).

    Zeros where there are no scores.
    """
    sizes = batch, groups, heads, _, _ = _split(q, k, v)
    if 0 in sizes:
        return 0, 0, 0
    budget = _CACHE_SCORES // (2 if gradient else 1)
    largest = (0, 0, 0)
    for n, g, i, seen, _ in _tiles(sizes, causal, budget):
        pairs = (min(n.stop, batch) - n.start) * (min(g.stop, groups) - g.start)
        rows = pairs * heads * (i.stop - i.start)
        largest = max(largest, (rows, seen, pairs), key=lambda tile: tile[0] * tile[1])
    return largest


def _split(q: Array, k: Array, v: Array) -> tuple[int, int, int, int, int]:
    """(batch, groups, heads per group, queries, keys), after checking that the shapes fit."""
    fits = q.ndim == k.ndim == v.ndim == 4 and k.shape[:3] == v.shape[:3]
    fits = fits and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or q.shape[1] % max(1, k.shape[1]):
        raise GraphError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit; "
            "expected q [b, h, s, d], k [b, g, t, d] and v [b, g, t, e] with h a multiple of g"
        )
    groups = k.shape[1]
    return q.shape[0], groups, q.shape[1] // max(1, groups), q.shape[2], k.shape[2]


def _grouped(x: Array, groups: int) -> Array:
    """[b, h, s, ...] as [b, g, h / g, s, ...], a view."""
    return x.reshape(x.shape[0], groups, x.shape[1] // max(1, groups), *x.shape[2:])


def _hidden(xp: Namespace, rows: int, seen: int, first: int) -> Array | None:
    """True at [i, j] where key j lies after the last one that query row i of a tile may see; None if
    nowhere."""
    if first + 1 >= seen:
        return None
    return xp.arange(seen) > xp.arange(rows)[:, None] + first


@jit
def _softmax_rows(scores: Any, scale: Any, first: Any, limit: Any, lse: Any) -> None:
    """scores[a, i] := softmax(scale * scores[a, i, :first + i + 1]), 0 beyond; lse[a, i] its logsumexp.

    ``limit`` bounds the columns; a row with no column is 0 with lse = -infinity. float32.
    """
    for a in range(scores.shape[0]):
        for i in range(scores.shape[1]):
            row, count = scores[a, i], min(limit, first + i + 1)
            row[max(count, 0) :] = np.float32(0.0)
            if count <= 0:
                lse[a, i] = np.float32(-np.inf)
                continue
            seen = row[:count]
            m = row_max(seen) * scale
            total = np.float32(0.0)
            for j in range(count):
                e = exp32(seen[j] * scale - m)
                seen[j] = e
                total += e
            share = np.float32(1.0) / total
            for j in range(count):
                seen[j] *= share
            lse[a, i] = m + np.log(total)


@jit
def _softmax_grad_rows(
    scores: Any, dp: Any, scale: Any, first: Any, limit: Any, lse: Any, delta: Any
) -> None:
    """scores := p = exp(scale * scores - lse); dp := p * (dp - delta) * scale, both 0 where masked.
    float32."""
    for a in range(scores.shape[0]):
        for i in range(scores.shape[1]):
            row, grad, count = scores[a, i], dp[a, i], max(min(limit, first + i + 1), 0)
            row[count:] = np.float32(0.0)
            grad[count:] = np.float32(0.0)
            shift, d = lse[a, i], delta[a, i]
            seen, change = row[:count], grad[:count]
            for j in range(count):
                seen[j] = exp32(seen[j] * scale - shift)
            for j in range(count):
                change[j] = seen[j] * (change[j] - d) * scale


@jit
def _transpose(x: Any, y: Any) -> None:
    """y[a, b, j, i] = x[a, b, i, j], some rows of x at a time, which stay in the cache."""
    for a in range(x.shape[0]):
        for b in range(x.shape[1]):
            matrix, transposed = x[a, b], y[a, b]
            whole = matrix.shape[0] - matrix.shape[0] % _TRANSPOSED_ROWS
            for start in range(0, whole, _TRANSPOSED_ROWS):
                for j in range(matrix.shape[1]):
                    for i in range(_TRANSPOSED_ROWS):  # a constant number, for vector code
                        transposed[j, start + i] = matrix[start + i, j]
            for j in range(matrix.shape[1]):
                for i in range(whole, matrix.shape[0]):
                    transposed[j, i] = matrix[i, j]


def _transposed(k: Array, copies: bool) -> Array:
    """[b, g, t, d] as [b, g, 1, d, t], a view, or a copy by rows: BLAS multiplies small matrices by it in
    half to three quarters of the time."""
    if not copies:
        return k.swapaxes(-1, -2)[:, :, None]
    y = np.empty((*k.shape[:2], k.shape[3], k.shape[2]), k.dtype)
    _transpose(k, y)
    return y[:, :, None]


def _softmax_tile(xp: Namespace, scores: Array, scale: float, first: int, compiled: bool) -> Array:
    """Turn raw scores [..., rows, seen] into probabilities in place; return logsumexp [..., rows]."""
    rows, seen = scores.shape[-2:]
    if compiled:
        lse = np.empty((scores.size // (rows * seen), rows), scores.dtype)
        _softmax_rows(scores.reshape(-1, rows, seen), np.float32(scale), first, seen, lse)
        return lse.reshape(scores.shape[:-1])
    scores *= scale
    hidden = _hidden(xp, rows, seen, first)
    if hidden is not None:
        xp.copyto(scores, scores.dtype.type(-np.inf), where=hidden)
    m = scores.max(axis=-1, keepdims=True)
    m = xp.where(m == -np.inf, scores.dtype.type(0), m)
    scores -= m
    xp.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    positive = xp.where(total == 0, scores.dtype.type(1), total)
    scores /= positive
    lse = xp.where(total == 0, scores.dtype.type(-np.inf), m + xp.log(positive))
    return lse[..., 0]


def _attention_on_cuda(
    xp: Namespace,
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    out: Any = None,
    wide: bool = False,
) -> Any:
    _split(q, k, v)
    return launch_attention(xp, q, k, v, causal=causal, scale=scale, out=out, wide=wide)


@computed_in_f32(0, 0, cuda=_attention_on_cuda)
def attention(
    xp: Namespace,
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    out: Any = None,
) -> tuple[Array, Array]:
    """o = softmax(scale * q k^T) v for each head; query heads share the keys of their group.

    Under ``causal`` query i of s sees the keys j of t with j <= i + t - s; one that sees none gives o = 0 and
    lse = -infinity.

    Args:
        q: [b, h, s, d].
        k: [b, g, t, d], h a multiple of g; head a uses group a // (h / g).
        v: [b, g, t, e].
        scale: 1 / sqrt(d) where not given.

    Returns:
        o [b, h, s, e], lse [b, h, s] = log(sum(exp(scale * q k^T))).

    Raises:
        GraphError: the shapes do not fit.
    """
    sizes = _split(q, k, v)
    groups, keys = sizes[1], sizes[4]
    factor = q.shape[3] ** -0.5 if scale is None else float(scale)
    out_o, out_lse = outputs(out, 2)
    o = empty(xp, out_o, (*q.shape[:3], v.shape[3]), q.dtype)
    lse = empty(xp, out_lse, q.shape[:3], q.dtype)
    if o.size == 0 or keys == 0:
        o[...], lse[...] = 0, -np.inf
        return store(xp, o, out_o), store(xp, lse, out_lse)
    compiled = _compiled(xp, q, keys)
    copies = compiled and copies_transposed(q, k)
    q, k, v = _grouped(blas_ready(q), groups), blas_ready(k), blas_ready(v)[:, :, None]
    grouped_o, grouped_lse = _grouped(o, groups), _grouped(lse, groups)
    budget = _CACHE_SCORES if xp is np else _DEVICE_SCORES
    transposed, place = k, None
    for n, g, i, seen, first in _tiles(sizes, causal, budget):
        if seen == 0:
            grouped_o[n, g, :, i], grouped_lse[n, g, :, i] = 0, -np.inf
            continue
        if place != (n, g):
            transposed, place = _transposed(k[n, g], copies), (n, g)
        scores = xp.matmul(q[n, g, :, i], transposed[..., :seen])
        grouped_lse[n, g, :, i] = _softmax_tile(xp, scores, factor, first, compiled)
        multiply_into(xp, scores, v[n, g, :, :seen], grouped_o[n, g, :, i])
        del scores  # before those of the next tile are made
    return store(xp, o, out_o), store(xp, lse, out_lse)


@computed_in_f32(0)
def attention_of_one_query(
    xp: Namespace, q: Array, k: Array, v: Array, *, scale: float, out: Array | None = None
) -> Array:
    """o of `attention` for one query, which sees every key: without tiles and logsumexp, which would take
    longer than its few scores.

    Args:
        q: [b, h, 1, d].
        k: [b, g, t, d] of one key or more.
        v: [b, g, t, e].
        scale: multiplies the scores.

    Returns:
        o [b, h, 1, e].

    Raises:
        GraphError: the shapes do not fit.
    """
    batch, groups, heads, _, keys = _split(q, k, v)
    o = empty(xp, out, (*q.shape[:3], v.shape[3]), q.dtype)
    queries = blas_ready(q.reshape(batch, groups, heads, q.shape[3]))
    scores = xp.matmul(queries, blas_ready(k).swapaxes(-1, -2))
    if _compiled(xp, q, keys):
        _softmax_tile(xp, scores, scale, keys, True)
    else:
        scores *= scores.dtype.type(scale)
        scores -= scores.max(axis=-1, keepdims=True)
        xp.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
    multiply_into(xp, scores, blas_ready(v), o.reshape(batch, groups, heads, v.shape[3]))
    return store(xp, o, out)


def copies_transposed(q: Array, k: Array) -> bool:
    """Whether a group has enough query rows that transposed copies of its keys pay, in compiled loops."""
    return bool(q.shape[1] * q.shape[2] >= _COPIED_QUERIES * k.shape[1])


def _compiled(xp: Namespace, q: Array, keys: int) -> bool:
    """Whether the compiled loops pay: float32 on NumPy and enough scores."""
    large = xp is np and q.dtype == np.float32 and (q.size // q.shape[-1]) * keys >= FUSED_MIN_SIZE
    return large and has_numba()


def _grad_tile(
    xp: Namespace, p: Array, dp: Array, numbers: tuple[float, int, bool], lse: Array, delta: Array
) -> None:
    """Turn raw scores into probabilities and ``dp`` into the gradient of the raw scores, both in place."""
    scale, first, compiled = numbers
    rows, seen = p.shape[-2:]
    if compiled:
        shape = (-1, rows, seen)
        flat_lse, flat_delta = (np.ascontiguousarray(a).reshape(-1, rows) for a in (lse, delta))
        _softmax_grad_rows(
            p.reshape(shape), dp.reshape(shape), np.float32(scale), first, seen, flat_lse, flat_delta
        )
        return
    shift = xp.where(lse == -np.inf, p.dtype.type(0), lse)
    hidden = _hidden(xp, rows, seen, first)
    p *= scale
    p -= shift[..., None]
    if hidden is not None:
        xp.copyto(p, p.dtype.type(-np.inf), where=hidden)
    xp.exp(p, out=p)
    dp -= delta[..., None]
    dp *= p
    dp *= scale


def attention_grad(
    xp: Namespace,
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    out: Any = None,
) -> tuple[Array, Array, Array]:
    """Gradients of `attention`, the probabilities recomputed from lse (Dao et al., 2022, appendix B.4):

    p = exp(scale * q k^T - lse), dv = p^T do, ds = p * (do v^T - sum(do * o)) * scale, dq = ds k, dk = ds^T
    q; dk and dv are summed over the query heads of their group.

    A half-precision lse is recomputed: rounded, it would put the probabilities of a row off by percents.

    Returns:
        dq [b, h, s, d], dk [b, g, t, d], dv [b, g, t, e].
    """
    if is_half(lse.dtype):
        lse = attention(xp, q, k, v, causal=causal, scale=scale, wide=True)[1]
    grads: tuple[Array, Array, Array] = _attention_grad(
        xp, do, q, k, v, o, lse, causal=causal, scale=scale, out=out
    )
    return grads


def _attention_grad_on_cuda(
    xp: Namespace, do: Array, q: Array, k: Array, v: Array, *others: Array, **attrs: Any
) -> Any:
    _split(q, k, v)
    return launch_attention_grad(xp, do, q, k, v, *others, **attrs)


@computed_in_f32(1, 2, 3, cuda=_attention_grad_on_cuda)
def _attention_grad(
    xp: Namespace,
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    *,
    causal: bool,
    scale: float | None,
    out: Any = None,
) -> tuple[Array, Array, Array]:
    """`attention_grad` for operands of float32 or float64."""
    sizes = _split(q, k, v)
    groups, keys = sizes[1], sizes[4]
    factor = q.shape[3] ** -0.5 if scale is None else float(scale)
    outs = outputs(out, 3)
    dq, dk, dv = (empty(xp, w, x.shape, q.dtype) for w, x in zip(outs, (q, k, v), strict=True))
    if q.size == 0 or keys == 0:
        dq[...], dk[...], dv[...] = 0, 0, 0
        return store(xp, dq, outs[0]), store(xp, dk, outs[1]), store(xp, dv, outs[2])
    compiled = _compiled(xp, q, keys)
    copies = compiled and copies_transposed(q, k)
    q, do, k, v = blas_ready(q), blas_ready(do), blas_ready(k), blas_ready(v)
    q, do, o, lse = (_grouped(x, groups) for x in (q, do, o, lse))
    grouped_dq = _grouped(dq, groups)
    budget = (_CACHE_SCORES if xp is np else _DEVICE_SCORES) // 2
    transposed, place = (k, v), None
    for n, g, i, seen, first in _tiles(sizes, causal, budget):
        if seen == 0:
            grouped_dq[n, g, :, i] = 0
            continue
        fresh = place != (n, g)
        if fresh:
            transposed, place = (_transposed(k[n, g], copies), _transposed(v[n, g], copies)), (n, g)
        queries, change = q[n, g, :, i], do[n, g, :, i]
        p = xp.matmul(queries, transposed[0][..., :seen])
        ds = xp.matmul(change, transposed[1][..., :seen])
        delta = xp.einsum("...d,...d->...", change, o[n, g, :, i])
        _grad_tile(xp, p, ds, (factor, first, compiled), lse[n, g, :, i], delta)
        _add_over_heads(xp, p, change, dv[n, g], fresh)
        _add_over_heads(xp, ds, queries, dk[n, g], fresh)
        multiply_into(xp, ds, k[n, g, None, :seen], grouped_dq[n, g, :, i])
        del p, ds  # before those of the next tile are made
    return store(xp, dq, outs[0]), store(xp, dk, outs[1]), store(xp, dv, outs[2])


def _add_over_heads(xp: Namespace, p: Array, x: Array, total: Array, fresh: bool) -> None:
    """total[..., key, :] += sum over heads and rows of p[..., head, row, key] * x[..., head, row, :], as one
    product per group; ``fresh`` where this is all of the total so far, and of all keys that any row sees."""
    p = p.reshape(*p.shape[:-3], -1, p.shape[-1])
    x = blas_ready(x.reshape(*x.shape[:-3], -1, x.shape[-1]))
    near = total[..., : p.shape[-1], :]
    if fresh:
        total[..., p.shape[-1] :, :] = 0
        multiply_into(xp, p.swapaxes(-1, -2), x, near)
    else:
        near += xp.matmul(p.swapaxes(-1, -2), x)
