"""Ops of attention whose keys and values go round a ring of ranks, one block a step.

The positions of a sequence are seen as p blocks, as p ranks store them: of equal length, the last ones
shorter or empty. One step computes, for every block q of the queries, attention to block (q + shift) mod p of
the keys. On p ranks, each with one block of queries, a rank needs one block of keys and values, which its
neighbour had in the step before: they are stored on the ranks in another order (`OpDef.operand_mesh`), and
nothing is copied.

    ring_attention        o, lse of every query over one block of keys
    ring_attention_add    the same, merged into o and lse over other blocks
    ring_attention_grad   dq from one block of keys, and dk, dv of that block, which are left on the ranks in
                          the order of the keys (`OpDef.result_mesh`)

With lse the logarithm of the sum of exponentials of the scores, two partial results merge exactly:

    lse = log(exp(lse1) + exp(lse2)),   o = exp(lse1 - lse) o1 + exp(lse2 - lse) o2

and the gradients of a block of keys need the o and lse over all keys alone. Under a causal mask a block
behind that of the queries is skipped, and the block of the queries themselves is masked. Results of operands
in 16 bits are in f32, so that merging p of them rounds no more than one attention does.

The pass `distribute_attention` makes these ops after the backward part, so they have no gradients.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023;
Dao et al., "FlashAttention", 2022, appendix B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from distgraph.errors import GraphError
from distgraph.ir.graph import Op, Value
from distgraph.ir.index_rule import Rule, bind
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import Attrs, Local, MatmulDims, Shape, Shapes, define
from distgraph.kernels import attention as kernels
from distgraph.kernels import workspace
from distgraph.kernels._common import Array, Namespace, is_half, outputs, store, widen
from distgraph.ops.attention import attention_sizes
from distgraph.ops.normalization import require_float

_QKV = {"ring_attention": 0, "ring_attention_add": 2, "ring_attention_grad": 1}
"""Kind -> position of the queries, which keys and values follow, among the operands."""
_TERMS = {
    "ring_attention": "b (g r) s d!, b g s d!, b g s e! -> b (g r) s e!, b (g r) s",
    "ring_attention_add": (
        "b (g r) s e!, b (g r) s, b (g r) s d!, b g s d!, b g s e! -> b (g r) s e!, b (g r) s"
    ),
    "ring_attention_grad": (
        "b (g r) s e!, b (g r) s d!, b g s d!, b g s e!, b (g r) s e!, b (g r) s "
        "-> b (g r) s d!, b g s d!, b g s e!"
    ),
}


def _rule(kind: str, shapes: Shapes, attrs: Attrs) -> Rule:
    first = _QKV[kind]
    _, heads, groups, queries, keys = attention_sizes(shapes[first : first + 3])
    if queries != keys:
        raise GraphError(f"there are {queries} queries but {keys} keys; blocks of a ring need as many")
    rule = bind(_TERMS[kind], shapes, None, (("g", groups), ("r", heads // groups)))
    return replace(rule, joint={"s": attrs["parts"]} if "s" in rule.indices else {})


@lru_cache(maxsize=4096)
def turned(mesh: ProcessMesh, axes: tuple[str, ...], shift: int) -> ProcessMesh:
    """The mesh on which the rank with block j of the queries along `axes` has block j + shift of the keys."""
    parts = mesh.count(axes)
    return mesh.reordered(axes, [(block - shift) % parts for block in range(parts)])


def _ordered(op: Op, moves: bool) -> ProcessMesh:
    """The mesh of an op, its ranks in the order in which they have the blocks of keys of its step."""
    layout = op.layout
    assert layout is not None
    if not moves or layout.parts("s") == 1:
        return layout.mesh
    return turned(layout.mesh, layout.of("s"), op.attrs["shift"])


def _operand_mesh(op: Op, operand: int) -> ProcessMesh:
    return _ordered(op, operand - _QKV[op.kind] in (1, 2))


def _result_mesh(op: Op, result: int) -> ProcessMesh:
    return _ordered(op, op.kind == "ring_attention_grad" and result > 0)


def _localize(attrs: Attrs, local: Local) -> Attrs:
    """The number of the block of queries that a rank has; all of them where the sequence is not split."""
    layout = local.layout
    if layout.parts("s") == 1:
        return attrs
    return {**attrs, "block": layout.mesh.index(local.rank, layout.of("s"))}


def _wide(value: Value) -> str:
    dtype = require_float(value)
    return "f32" if dtype in ("f16", "bf16") else dtype


def _infer(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    q, k, v = operands[-3:]
    b, h, _, s, _ = attention_sizes((q.shape, k.shape, v.shape))
    expected = [((b, h, s, v.shape[3]), _wide(q)), ((b, h, s), _wide(q))]
    if [(x.shape, x.dtype) for x in operands[:-3]] != expected[: len(operands) - 3]:
        types = ", ".join(x.type for x in operands[:-3])
        raise GraphError(f"attention of one step gives {expected} but is to be merged into {types}")
    return expected


def _infer_grad(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    attention_sizes(tuple(x.shape for x in operands[1:4]))
    return [(x.shape, _wide(x)) for x in operands[1:4]]


class _Pair(NamedTuple):
    """A block of queries and the block of keys that it attends to: where they start and stop, and the mask:
    "none", "causal", or "hidden" where every key is behind every query."""

    rows: slice
    keys: slice
    mask: str


def _pairs(attrs: Attrs, queries: int, keys: int) -> Iterator[_Pair]:
    """The pairs of blocks of a step that are computed here, of local lengths."""
    parts, shift = attrs["parts"], attrs["shift"]
    if attrs.get("block") is not None:
        block = attrs["block"]
        yield _Pair(slice(0, queries), slice(0, keys), _mask(block, (block + shift) % parts, attrs["causal"]))
        return
    length = -(-queries // parts)
    spans = [slice(min(queries, n * length), min(queries, (n + 1) * length)) for n in range(parts)]
    for block in range(parts):
        other = (block + shift) % parts
        yield _Pair(spans[block], spans[other], _mask(block, other, attrs["causal"]))


def _mask(rows: int, keys: int, causal: bool) -> str:
    if not causal or keys < rows:
        return "none"
    return "causal" if keys == rows else "hidden"


def _outputs(xp: Namespace, q: Array, v: Array, out: Any) -> tuple[Array, Array]:
    """Arrays for o and lse: those of the caller, or new ones."""
    dtype = np.float32 if is_half(q.dtype) else q.dtype
    o, lse = outputs(out, 2)
    o = xp.empty((*q.shape[:3], v.shape[3]), dtype) if o is None else o
    lse = xp.empty(q.shape[:3], dtype) if lse is None else lse
    return o, lse


def _kernel(
    xp: Namespace, q: Array, k: Array, v: Array, out: Any = None, *, causal: bool, scale: float, **attrs: Any
) -> tuple[Array, Array]:
    o, lse = _outputs(xp, q, v, out)
    for rows, keys, mask in _pairs({"causal": causal, **attrs}, q.shape[2], k.shape[2]):
        if mask == "hidden":
            o[:, :, rows], lse[:, :, rows] = 0, -np.inf
            continue
        near = (widen(xp, x) for x in (q[:, :, rows], k[:, :, keys], v[:, :, keys]))
        target = o[:, :, rows], lse[:, :, rows]
        kernels.attention(xp, *near, causal=mask == "causal", scale=scale, out=target)
    return o, lse


def _add_kernel(
    xp: Namespace,
    total: Array,
    total_lse: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Any = None,
    *,
    causal: bool,
    scale: float,
    **attrs: Any,
) -> tuple[Array, Array]:
    o, lse = _outputs(xp, q, v, out)
    store(xp, total, o)
    store(xp, total_lse, lse)
    for rows, keys, mask in _pairs({"causal": causal, **attrs}, q.shape[2], k.shape[2]):
        if mask == "hidden":
            continue
        near = (widen(xp, x) for x in (q[:, :, rows], k[:, :, keys], v[:, :, keys]))
        more = kernels.attention(xp, *near, causal=mask == "causal", scale=scale)
        _merge(xp, o[:, :, rows], lse[:, :, rows], *more)
    return o, lse


def _merge(xp: Namespace, o: Array, lse: Array, more: Array, more_lse: Array) -> None:
    """Merge attention to other keys into o and lse, in place; a row that sees no key has lse = -infinity."""
    both = xp.logaddexp(lse, more_lse)
    shift = xp.where(both == -np.inf, both.dtype.type(0), both)
    o *= xp.exp(lse - shift)[..., None]
    more *= xp.exp(more_lse - shift)[..., None]
    o += more
    lse[...] = both


def _grad_kernel(
    xp: Namespace,
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    out: Any = None,
    *,
    causal: bool,
    scale: float,
    **attrs: Any,
) -> tuple[Array, ...]:
    grads = []
    for given, x in zip(outputs(out, 3), (q, k, v), strict=True):
        dtype = np.float32 if is_half(x.dtype) else x.dtype
        grads.append(xp.empty(x.shape, dtype) if given is None else given)
    dq, dk, dv = grads
    for rows, keys, mask in _pairs({"causal": causal, **attrs}, q.shape[2], k.shape[2]):
        target = dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]
        if mask == "hidden":
            for x in target:
                x[...] = 0
            continue
        near = do[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], o[:, :, rows], lse[:, :, rows]
        wide = (widen(xp, x) for x in near)
        kernels.attention_grad(xp, *wide, causal=mask == "causal", scale=scale, out=target)
    return dq, dk, dv


def _scores(op: Op) -> int:
    """Number of (query, key) pairs that are computed here, over batch and heads."""
    q, k = op.operands[_QKV[op.kind]].shape, op.operands[_QKV[op.kind] + 1].shape
    total = 0
    for rows, keys, mask in _pairs(op.attrs, q[2], k[2]):
        s, t = rows.stop - rows.start, keys.stop - keys.start
        total += {"none": s * t, "causal": s * (s + 1) // 2, "hidden": 0}[mask]
    return q[0] * q[1] * total


def _flops(op: Op, rule: Rule) -> int:
    q, v = (op.operands[_QKV[op.kind] + position].shape for position in (0, 2))
    if op.kind == "ring_attention_grad":
        return 2 * _scores(op) * (3 * q[3] + 2 * v[3])  # the scores again, dq, dk; dp, dv
    return 2 * _scores(op) * (q[3] + v[3])


def _matmul_dims(op: Op) -> MatmulDims:
    """Dims of the scores of one block, and the number of blocks that are computed here in their place."""
    q, k = op.operands[_QKV[op.kind]].shape, op.operands[_QKV[op.kind] + 1].shape
    here = [pair for pair in _pairs(op.attrs, q[2], k[2]) if pair.mask != "hidden"]
    rows = max((p.rows.stop - p.rows.start for p in here), default=0)
    keys = max((p.keys.stop - p.keys.start for p in here), default=0)
    return q[0] * q[1] * len(here), rows, keys, q[3]


def _workspace(*arrays: Array, gradient: bool = False, causal: bool, scale: float, **attrs: Any) -> int:
    """What attention of the largest block needs, and copies of 16-bit operands and of what is merged."""
    first = 1 if gradient else len(arrays) - 3
    q, k = arrays[first : first + 2]
    needed = 0
    for rows, keys, mask in _pairs({"causal": causal, **attrs}, q.shape[2], k.shape[2]):
        if mask == "hidden":
            continue
        spans = {first: rows, first + 1: keys, first + 2: keys}
        blocks = [x[:, :, spans.get(n, rows)] for n, x in enumerate(arrays)]
        needed = max(needed, _block_workspace(blocks, first, mask == "causal", scale, gradient))
    return needed


def _block_workspace(blocks: Sequence[Array], first: int, causal: bool, scale: float, gradient: bool) -> int:
    copied = sum(2 * x.nbytes for x in blocks if is_half(x.dtype))
    wide = [np.broadcast_to(np.float32(0), x.shape) if is_half(x.dtype) else x for x in blocks]
    if gradient:
        return int(copied + workspace.attention_grad(*wide, causal=causal, scale=scale))
    q, k, v = wide[first:]
    merged = q.itemsize * q[..., 0].size * (v.shape[3] + 6) if first else 0
    return int(copied + merged + workspace.attention(q, k, v, causal=causal, scale=scale))


_declare = partial(
    define,
    flops=_flops,
    localize=_localize,
    operand_mesh=_operand_mesh,
    result_mesh=_result_mesh,
    matmul_dims=_matmul_dims,
    cost="matmul",
)
_declare("ring_attention", partial(_rule, "ring_attention"), _kernel, infer=_infer, workspace=_workspace)
_declare(
    "ring_attention_add",
    partial(_rule, "ring_attention_add"),
    _add_kernel,
    infer=_infer,
    workspace=_workspace,
    inplace=(0,),
)
_declare(
    "ring_attention_grad",
    partial(_rule, "ring_attention_grad"),
    _grad_kernel,
    infer=_infer_grad,
    workspace=partial(_workspace, gradient=True),
)
