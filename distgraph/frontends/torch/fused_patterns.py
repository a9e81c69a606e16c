"""Patterns of ATen ops that models write out and that are one op here; rewritten before the graph is used.

    mul(w, mul(x, rsqrt(add(mean(pow(x, 2), [-1], True), eps))))      -> rms_norm(x, w, eps)
    attention(q, view(expand(unsqueeze(k, 2))), view(expand(...v)))   -> attention(q, k, v, enable_gqa=True)

The first may have casts: of x to f32 before, and of the normalised numbers back after it, which is how models
of half precision write it and how `rms_norm` computes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

_ATEN = torch.ops.aten
_MUL, _CAST = _ATEN.mul.Tensor, _ATEN._to_copy.default
_VIEWS = (_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default)
_HALVES = (torch.float16, torch.bfloat16)


def fuse_patterns(graph: torch.fx.Graph) -> None:
    """Rewrite the patterns of a graph in place; what they leave unused is removed."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is _MUL:
            _fuse_rms_norm(node)
        elif node.op == "call_function" and node.target is _ATEN.scaled_dot_product_attention.default:
            _fuse_repeated_heads(node)
    graph.eliminate_dead_code()


def _fuse_rms_norm(node: torch.fx.Node) -> None:
    operands = [x for x in node.args if isinstance(x, torch.fx.Node)]
    if len(operands) != 2:
        return
    for weight, scaled in (operands, operands[::-1]):
        normal = scaled.args[0] if scaled.target is _CAST else scaled
        match = _normalised(normal)
        if match is None:
            continue
        x, eps = match
        dtype = node.meta["val"].dtype
        if x.target is _CAST and x.args[0].meta["val"].dtype is dtype and dtype in _HALVES:
            x = x.args[0]
        width = x.meta["val"].shape[-1]
        kinds = {each.meta["val"].dtype for each in (x, weight, node)}
        if len(kinds) == 1 and tuple(weight.meta["val"].shape) == (width,) and isinstance(width, int):
            node.target, node.args, node.kwargs = _ATEN.rms_norm.default, (x, [width], weight, eps), {}
            return


def _normalised(node: Any) -> tuple[torch.fx.Node, float] | None:
    """(x, eps) of x * rsqrt(mean(x^2) + eps) over the last dim; None for anything else."""
    if not _is_call(node, _MUL) or not all(isinstance(x, torch.fx.Node) for x in node.args):
        return None
    for x, root in (node.args, node.args[::-1]):
        added = root.args[0] if _is_call(root, _ATEN.rsqrt.default) else None
        if added is None or added.target is not _ATEN.add.Tensor or not isinstance(added.args[1], float):
            continue
        mean, eps = added.args[0], added.args[1]
        if not _is_call(mean, _ATEN.mean.dim) or list(mean.args[1:3]) not in ([[-1], True], [(-1,), True]):
            continue
        power = mean.args[0]
        if _is_call(power, _ATEN.pow.Tensor_Scalar) and power.args[0] is x and power.args[1] == 2:
            return x, eps
    return None


def _is_call(node: Any, target: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target is target


def _fuse_repeated_heads(node: torch.fx.Node) -> None:
    """Give attention the key heads as they are, where the model repeats each for several query heads."""
    q, k, v, *rest = node.args
    single = [_unrepeated(x) for x in (k, v)]
    if None in single or single[0].meta["val"].shape[:3] != single[1].meta["val"].shape[:3]:
        return
    node.args = (q, *single, *rest)
    node.kwargs = {**node.kwargs, "enable_gqa": True}


def _unrepeated(node: Any) -> Any:
    """k [b, g, t, d] of its heads repeated in place, [b, g r, t, d]; None for anything else."""
    if not isinstance(node, torch.fx.Node) or node.target not in _VIEWS:
        return None
    wide = node.args[0]
    wide = wide.args[0] if _is_call(wide, _ATEN.clone.default) else wide
    if not _is_call(wide, _ATEN.expand.default):
        return None
    narrow = wide.args[0]
    if not _is_call(narrow, _ATEN.unsqueeze.default) or narrow.args[1] not in (2, -3):
        return None
    k = narrow.args[0]
    before, spread, after = (x.meta["val"].shape for x in (k, wide, node))
    if len(before) != 4 or len(after) != 4 or len(spread) != 5:
        return None
    heads = [operator.eq(a, b) for a, b in zip(after[2:], before[2:], strict=True)]
    repeated = isinstance(after[1], int) and after[1] == before[1] * spread[2] and spread[1] == before[1]
    return k if repeated and all(bool(same) for same in heads) else None
