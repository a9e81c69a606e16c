"""Every public function of `distgraph.ops` that takes more than operands, with arguments that fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from support.arguments.public_call import PublicCall

import distgraph as dg
from distgraph import ops

Operand = tuple[tuple[int, ...], str]
X, MATRIX, IDS, IMAGES = ((4, 6), "f32"), ((6, 3), "f32"), ((4,), "i32"), ((2, 3, 8, 8), "f32")
ROW, HEADS = ((6,), "f32"), ((2, 2, 4, 3), "f32")
SIDES = {"stride": 2, "padding": 0}

ARGUMENTS: list[tuple[Callable[..., Any], tuple[Operand, ...], dict[str, Any]]] = [
    (ops.arange, (), {"start": 0, "stop": 5, "step": 1, "dtype": "f32"}),
    (ops.argmax, (X,), {"axis": 1, "keepdims": False}),
    (ops.argmin, (X,), {"axis": 1, "keepdims": False}),
    (ops.argsort, (X,), {"axis": 1}),
    (ops.attention, (HEADS, HEADS, HEADS), {"causal": True, "scale": 0.5}),
    (ops.attention_from, (HEADS, HEADS, HEADS, ((), "i32")), {"scale": 0.5}),
    (ops.avg_pool, (IMAGES,), {"window": 2, **SIDES}),
    (ops.broadcast_to, (X,), {"shape": (2, 4, 6)}),
    (ops.cast, (X,), {"dtype": "f64"}),
    (ops.clip, (X,), {"low": 0.0, "high": 1.0}),
    (ops.conv, (IMAGES, ((3, 3, 3, 3), "f32")), {**SIDES, "dilation": 1, "groups": 1}),
    (ops.cumprod, (X,), {"axis": 1}),
    (ops.cumsum, (X,), {"axis": 1}),
    (ops.dropout, (X,), {"rate": 0.5, "batch_dim": 0}),
    (ops.dynamic_slice, (X, ((2,), "i32")), {"sizes": (2, 2)}),
    (ops.expand_dims, (X,), {"axis": 1}),
    (ops.flip, (X,), {"axis": 1}),
    (ops.full, (), {"shape": (2, 3), "value": 1.0, "dtype": "f32"}),
    (ops.gelu, (X,), {"approximate": True}),
    (ops.getitem, (X,), {"key": 1}),
    (ops.iota, (), {"shape": (2, 3), "dim": 1, "dtype": "i64"}),
    (ops.layer_norm, (X, ROW, ROW), {"eps": 1e-5}),
    (ops.log_softmax, (X,), {"axis": 1}),
    (ops.logsumexp, (X,), {"axis": 1, "keepdims": False}),
    (ops.max_pool, (IMAGES,), {"window": 2, **SIDES}),
    (ops.mean, (X,), {"axis": 1, "keepdims": False}),
    (ops.norm, (X,), {"axis": 1, "keepdims": False}),
    (ops.one_hot, (IDS,), {"classes": 3, "dtype": "f32", "outside": "error"}),
    (ops.ones, (), {"shape": (2, 3), "dtype": "f32"}),
    (ops.pad, (X,), {"low": (1, 1), "high": (0, 1), "value": 0.0}),
    (ops.random_normal, (), {"shape": (2, 3), "dtype": "f32", "batch_dim": 0}),
    (ops.random_uniform, (), {"shape": (2, 3), "dtype": "f32", "batch_dim": 0}),
    (ops.repeat, (X,), {"count": 2, "axis": 1}),
    (ops.reshape, (X,), {"shape": (6, 4)}),
    (ops.rms_norm, (X, ROW), {"eps": 1e-5}),
    (ops.roll, (X,), {"shift": 1, "axis": 1}),
    (ops.softmax, (X,), {"axis": 1}),
    (ops.sort, (X,), {"axis": 1}),
    (ops.split, (X,), {"sections": 2, "axis": 1}),
    (ops.squeeze, (((4, 1), "f32"),), {"axis": 1}),
    (ops.std, (X,), {"axis": 1, "keepdims": False, "correction": 1}),
    (ops.take, (X, IDS), {"axis": 0}),
    (ops.take_along, (X, ((4, 6), "i32")), {"axis": 0}),
    (ops.tile, (X,), {"repetitions": (2, 1)}),
    (ops.top_k, (X,), {"k": 2}),
    (ops.transpose, (X,), {"order": (1, 0)}),
    (ops.tril, (X,), {"k": 0}),
    (ops.triu, (X,), {"k": 0}),
    (ops.var, (X,), {"axis": 1, "keepdims": False, "correction": 1}),
    (ops.zeros, (), {"shape": (2, 3), "dtype": "f32"}),
]
OPERANDS: list[tuple[Callable[..., Any], dict[str, Operand]]] = [
    (ops.attention, {"q": HEADS, "k": HEADS, "v": HEADS}),
    (ops.accumulate, {"x": X}),
    (ops.dynamic_update_slice, {"x": X, "update": ((2, 2), "f32"), "starts": ((2,), "i32")}),
    (ops.cross_entropy, {"logits": X, "labels": IDS}),
    (ops.embedding, {"table": X, "ids": IDS}),
    (ops.erf, {"x": X}),
    (ops.matmul, {"x": X, "y": MATRIX}),
    (ops.outer, {"x": ROW, "y": ROW}),
    (ops.pick, {"x": X, "labels": IDS}),
    (ops.relu, {"x": X}),
    (ops.scatter_add, {"x": X, "ids": IDS, "updates": X}),
    (ops.sigmoid, {"x": X}),
    (ops.silu, {"x": X}),
    (ops.tanh, {"x": X}),
]


def _traced(function: Callable[..., Any], operands: Sequence[Operand]) -> Callable[..., Any]:
    def call(**arguments: Any) -> None:
        dg.trace(lambda *tensors: function(*tensors, **arguments), *operands)

    return call


def _with_operands(function: Callable[..., Any], operands: dict[str, Operand]) -> Callable[..., Any]:
    def call(**arguments: Any) -> None:
        tensors = [name for name, operand in operands.items() if arguments[name] is operand]

        def traced(*values: Any) -> Any:
            return function(**{**arguments, **dict(zip(tensors, values, strict=True))})

        dg.trace(traced, *(operands[name] for name in tensors))

    return call


def _of_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **arguments: dg.trace(lambda x: function([x, x], **arguments), X)


def _scan(**arguments: Any) -> None:
    dg.trace(lambda x: ops.scan(lambda c, y: (c + y, c), ops.zeros((6,)), x, **arguments), X)


def _while_loop(**arguments: Any) -> None:
    def looped(x: Any) -> Any:
        start = (ops.full((), 0, "i32"), x)
        return ops.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), start, **arguments)

    dg.trace(looped, X)


def op_calls() -> dict[str, PublicCall]:
    """All calls by name."""
    calls = {
        f"ops.{function.__name__}": PublicCall(_traced(function, operands), function, arguments)
        for function, operands, arguments in ARGUMENTS
    }
    for function, operands in OPERANDS:
        call = PublicCall(_with_operands(function, operands), function, operands)
        calls[f"operands of ops.{function.__name__}"] = call
    for function in (ops.concat, ops.stack):
        calls[f"ops.{function.__name__}"] = PublicCall(_of_tensors(function), function, {"axis": 0})
    calls["ops.reduce"] = PublicCall(
        lambda **given: dg.trace(lambda x: ops.reduce(x=x, **given), X),
        ops.reduce,
        {"kind": "sum", "axis": 1, "keepdims": False},
    )
    calls["ops.einsum"] = PublicCall(
        lambda spec: dg.trace(lambda x, y: ops.einsum(spec, x, y), X, MATRIX),
        ops.einsum,
        {"spec": "ab,bc->ac"},
    )
    calls["ops.scan"] = PublicCall(_scan, ops.scan, {"length": 4, "reverse": False, "recompute": False})
    calls["ops.while_loop"] = PublicCall(_while_loop, ops.while_loop, {"turns": 1})
    return calls
