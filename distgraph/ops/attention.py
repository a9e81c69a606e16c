"""Scaled dot-product attention as one op. Batch, heads and query rows may be split; keys stay whole.

Splitting the query rows over a sequence axis gathers only keys and values, and their gradients come back as
partial sums (one reduce_scatter): the scores are never materialised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.errors.arguments import Finite, checked_arguments
from distgraph.ir.graph import Op, Value
from distgraph.ir.index_rule import Rule, bind
from distgraph.ir.op_registry import Attrs, GradientContext, Local, MatmulDims, Shape, Shapes, define
from distgraph.kernels import attention as kernels
from distgraph.kernels import workspace
from distgraph.kernels._common import store_all
from distgraph.ops.contraction import as_tensors
from distgraph.ops.normalization import require_float
from distgraph.tracing.tensor import Tensor, emit

Grads = Sequence[Tensor | None]


def attention_sizes(shapes: Shapes) -> tuple[int, int, int, int, int]:
    """(b, h, g, s, t) of the shapes of q, k, v. Raises GraphError when they do not fit."""
    q, k, v = shapes
    fits = len(q) == len(k) == len(v) == 4 and k[:3] == v[:3] and q[0] == k[0] and q[3] == k[3]
    if not fits or not k[1] or q[1] % k[1]:
        raise GraphError(
            f"q {q}, k {k}, v {v} do not fit; expected q [b, h, s, d], k [b, g, t, d] and v [b, g, t, e] "
            "with h a multiple of g"
        )
    return q[0], q[1], k[1], q[2], k[2]


def _rule(shapes: Shapes, attrs: Attrs) -> Rule:
    _, heads, groups, _, _ = attention_sizes(shapes)
    text = "b (g r) s@ d!, b g t! d!, b g t! e! -> b (g r) s e!, b (g r) s"
    return bind(text, shapes, None, (("g", groups), ("r", heads // groups)))


def _grad_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    _, heads, groups, _, _ = attention_sizes(shapes[1:4])
    text = (
        "b (g r) s@ e!, b (g r) s d!, b g t! d!, b g t! e!, b (g r) s e!, b (g r) s "
        "-> b (g r) s d!, b g t! d!, b g t! e!"
    )
    return bind(text, shapes, None, (("g", groups), ("r", heads // groups)))


def _infer(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    q, k, v = operands
    b, h, _, s, _ = attention_sizes((q.shape, k.shape, v.shape))
    dtype = require_float(q)
    if not q.dtype == k.dtype == v.dtype:
        raise GraphError(f"q is {q.type}, k {k.type}, v {v.type}; cast them to one dtype with .astype")
    return [((b, h, s, v.shape[3]), dtype), ((b, h, s), dtype)]


def _visible(attrs: Attrs, local: Local) -> Attrs:
    """Number of keys that the last local query sees under a causal mask; the keys after them are skipped."""
    if not attrs.get("causal") or not local.layout.of("s"):
        return attrs
    q = 0 if len(local.op.operands) == 3 else 1
    queries, keys = local.op.operands[q].shape[2], local.op.operands[q + 1].shape[2]
    return {**attrs, "keys": max(0, local.bounds("s")[1] + keys - queries)}


def _kernel(
    xp: Any, q: Any, k: Any, v: Any, out: Any = None, *, keys: int | None = None, **attrs: Any
) -> Any:
    return kernels.attention(xp, q, *_seen(k, v, keys), out=out, **attrs)


def _seen(k: Any, v: Any, keys: int | None) -> tuple[Any, Any]:
    """The first `keys` keys and their values; all of them for None."""
    return (k, v) if keys is None else (k[:, :, :keys], v[:, :, :keys])


def _grad_kernel(
    xp: Any,
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    out: Any = None,
    *,
    keys: int | None = None,
    **attrs: Any,
) -> Any:
    if keys is None or keys >= k.shape[2]:
        return kernels.attention_grad(xp, do, q, k, v, o, lse, out=out, **attrs)
    dq, near_k, near_v = kernels.attention_grad(xp, do, q, *_seen(k, v, keys), o, lse, **attrs)
    # the mask hides the keys after `near_k` from every query of this rank
    dk, dv = xp.zeros_like(k), xp.zeros_like(v)
    dk[:, :, :keys], dv[:, :, :keys] = near_k, near_v
    return store_all(xp, (dq, dk, dv), out)


def _workspace(q: Any, k: Any, v: Any, *, keys: int | None = None, **attrs: Any) -> int:
    return workspace.attention(q, *_seen(k, v, keys), **attrs)


def _grad_workspace(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, keys: int | None = None, **attrs: Any
) -> int:
    seen = _seen(k, v, keys)
    inside = workspace.attention_grad(do, q, *seen, o, lse, **attrs)
    if keys is None or keys >= k.shape[2]:
        return inside
    gradients = sum(x.nbytes for x in (q, *seen))
    return int(gradients + max(inside, k.nbytes + v.nbytes))


def _from_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    _, heads, groups, _, _ = attention_sizes(shapes[:3])
    text = "b (g r) s! d!, b g t! d!, b g t! e!, -> b (g r) s! e!"
    return bind(text, shapes, None, (("g", groups), ("r", heads // groups)))


def _infer_from(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    *qkv, start = operands
    if start.shape or not start.dtype.startswith(("i", "u")):
        raise GraphError(f"start is {start.type} but must be one integer: the position of the first query")
    return _infer(qkv, attrs)[:1]


def _from_kernel(xp: Any, q: Any, k: Any, v: Any, start: Any, out: Any = None, *, scale: float) -> Any:
    """Raises GraphError where the last query is behind the last key."""
    keys = int(start) + q.shape[2]
    if not q.shape[2] <= keys <= k.shape[2]:
        raise GraphError(
            f"queries {int(start)} to {keys - 1} do not lie within the {k.shape[2]} positions of the keys"
        )
    visible = _seen(k, v, keys)
    if xp is np and q.shape[2] == 1:
        return kernels.attention_of_one_query(xp, q, *visible, scale=scale, out=out)
    outputs = None if out is None else (out, None)
    return kernels.attention(xp, q, *visible, causal=True, scale=scale, out=outputs)[0]


def _pairs(shapes: Shapes, attrs: Attrs) -> int:
    """Number of (query, key) pairs that are computed, over batch and heads."""
    b, h, _, s, t = attention_sizes(shapes)
    if not attrs.get("causal"):
        return b * h * s * t
    first = max(1, t - s + 1)  # keys that the first query with a key sees; every later query sees one more
    return b * h * (t + first) * (t - first + 1) // 2


def _flops(op: Op, rule: Rule) -> int:
    q, k, v = (x.shape for x in op.operands[:3])
    return 2 * _pairs((q, k, v), op.attrs) * (q[3] + v[3])


def _grad_flops(op: Op, rule: Rule) -> int:
    q, k, v = (x.shape for x in op.operands[1:4])
    return 2 * _pairs((q, k, v), op.attrs) * (3 * q[3] + 2 * v[3])  # the scores again, dq, dk; dp, dv


def _gradient(c: GradientContext) -> Grads:
    o, lse = c.results
    do, dlse = c.grads
    if do is None or dlse is not None:
        raise GraphError(
            "the log-sum-exp of attention has no gradient; compute the scores with einsum for one"
        )
    grads: Grads = emit("attention_grad", do, *c.operands, o, lse, **c.attrs)
    return grads


def _matmul_dims(first: int) -> Callable[[Op], MatmulDims]:
    """Dims of the scores, of which the queries are operand number `first` and the keys the next one."""

    def matmul_dims(op: Op) -> MatmulDims:
        q, k = op.operands[first].shape, op.operands[first + 1].shape
        return q[0] * q[1], q[2], k[2], q[3]

    return matmul_dims


define(
    "attention",
    _rule,
    _kernel,
    infer=_infer,
    gradient=_gradient,
    flops=_flops,
    localize=_visible,
    cost="matmul",
    matmul_dims=_matmul_dims(0),
    workspace=_workspace,
)
define(
    "attention_from",
    _from_rule,
    _from_kernel,
    infer=_infer_from,
    flops=_flops,
    cost="matmul",
    matmul_dims=_matmul_dims(0),
    workspace=workspace.attention_from,
)
define(
    "attention_grad",
    _grad_rule,
    _grad_kernel,
    infer=lambda operands, attrs: [(x.shape, x.dtype) for x in operands[1:4]],
    flops=_grad_flops,
    localize=_visible,
    cost="matmul",
    matmul_dims=_matmul_dims(1),
    workspace=_grad_workspace,
)


@checked_arguments()
def attention(q: Any, k: Any, v: Any, causal: bool = False, scale: Finite | None = None) -> Tensor:
    """softmax(scale * q k^T) v for every head.

    Args:
        q: [b, h, s, d].
        k: [b, g, t, d]; h is a multiple of g, and h / g query heads share a key head.
        v: [b, g, t, e].
        causal: query i sees the keys up to i + t - s.
        scale: 1 / sqrt(d) where not given.

    Returns:
        [b, h, s, e].
    """
    q, k, v = as_tensors(q, k, v)
    size = max(1, q.shape[-1]) if q.ndim else 1
    o: Tensor = emit(
        "attention", q, k, v, causal=bool(causal), scale=size**-0.5 if scale is None else float(scale)
    )[0]
    return o


@checked_arguments()
def attention_from(q: Any, k: Any, v: Any, start: Any, scale: Finite | None = None) -> Tensor:
    """Causal attention of some positions of a sequence whose keys and values are known up to them.

    Args:
        q: [b, h, s, d], the queries of positions start to start + s - 1.
        k: [b, g, t, d]; those behind position start + s - 1 are not read.
        v: [b, g, t, e].
        start: one integer, from 0 to t - s.
        scale: 1 / sqrt(d) where not given.

    Returns:
        [b, h, s, e]; there is no gradient.
    """
    size = q.shape[-1]
    o: Tensor = emit("attention_from", q, k, v, start, scale=size**-0.5 if scale is None else float(scale))[0]
    return o
