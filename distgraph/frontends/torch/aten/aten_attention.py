"""Scaled dot-product attention: the fused op where the mask is none or causal, else its steps."""

from __future__ import annotations

import math
from typing import Any

import torch

from distgraph import ops
from distgraph.frontends.torch.folded_constant import Constant
from distgraph.frontends.torch.rule_registry import RANDOM, aten

RANDOM.add("aten.scaled_dot_product_attention.default")


@aten("scaled_dot_product_attention.default")
def _attention(
    q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """q [..., h, s, d], k [..., g, t, d], v [..., g, t, e] -> [..., h, s, e]."""
    lead = q.shape[:-2]
    if q.ndim != 4 or k.shape[:1] != q.shape[:1]:
        whole = [ops.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (q, k, v)]
        q, k, v = (
            ops.reshape(
                x, (math.prod(lead[:-1]) if len(lead) > 1 else 1, lead[-1] if lead else 1, *x.shape[-2:])
            )
            for x in whole
        )
    size = q.shape[-1]
    factor = size**-0.5 if scale is None else scale
    mask = _mask_kind(attn_mask, q.shape[-2], k.shape[-2])
    causal = mask == "causal" or (is_causal and q.shape[-2] == k.shape[-2])
    explicit = mask == "other" or (is_causal and not causal)
    if not explicit and not dropout_p:
        return _restored(ops.attention(q, k, v, causal=causal, scale=factor), lead)
    heads, groups = q.shape[1], k.shape[1]
    if heads != groups:
        k, v = (ops.repeat(x, heads // groups, 1) for x in (k, v))
    scores = ops.einsum("bhsd,bhtd->bhst", q * factor, k)
    if causal or is_causal:
        rows, columns = (ops.arange(n) for n in scores.shape[-2:])
        visible = ops.greater_equal(ops.reshape(rows, (-1, 1)), ops.reshape(columns, (1, -1)))
        scores = ops.where(visible, scores, -1e30 if q.dtype != "f16" else -6e4)
    if mask == "other":
        scores = _restored(scores, lead)
        lowest = -1e30 if q.dtype != "f16" else -6e4
        scores = ops.where(attn_mask, scores, lowest) if attn_mask.dtype == "bool" else scores + attn_mask
        scores = ops.reshape(scores, (*q.shape[:2], *scores.shape[-2:]))
    weights = ops.softmax(scores)
    if mask == "other" and attn_mask.dtype == "bool":  # a query that sees nothing gets zeros
        weights = ops.reshape(ops.where(attn_mask, _restored(weights, lead), 0), weights.shape)
    weights = ops.dropout(weights, dropout_p) if dropout_p else weights
    return _restored(ops.einsum("bhst,bhte->bhse", weights, v), lead)


def _restored(x: Any, lead: tuple[int, ...]) -> Any:
    return x if x.shape[:-2] == lead else ops.reshape(x, (*lead, *x.shape[-2:]))


def _mask_kind(mask: Any, queries: int, keys: int) -> str:
    """What a mask is: "none" (it hides nothing), "causal" or "other"; computed once for all readers."""
    if mask is None:
        return "none"
    if not isinstance(mask, Constant):
        return "other"
    if (queries, keys) not in mask.mask_kinds:
        mask.mask_kinds[queries, keys] = _kind_of_constant(mask.value, queries, keys)
    return mask.mask_kinds[queries, keys]


def _kind_of_constant(value: torch.Tensor, queries: int, keys: int) -> str:
    for d in range(value.ndim - 2):  # dims along which the mask is repeated
        if value.stride(d) == 0 or value.shape[d] == 1:
            value = value.narrow(d, 0, 1)
    visible = value if value.dtype is torch.bool else value == 0
    if value.dtype is not torch.bool and not bool((visible | (value <= -1e4)).all()):
        return "other"
    if bool(visible.all()):
        return "none"
    square = visible.shape[-2:] == (queries, keys) and queries == keys
    causal = square and bool((visible == torch.ones(queries, keys, dtype=torch.bool).tril()).all())
    return "causal" if causal else "other"
