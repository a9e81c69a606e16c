"""Random numbers and dropout: a hash of (key, salt, position in the global tensor).

The same numbers come out under every layout, on any number of ranks and with any number of micro-batches: a
rank hashes the global positions of its own block, and a micro-batch those of its own part of the whole batch.
The dim along which micro-batches follow each other (`batch_dim`) counts as the outermost one, so that
positions do not depend on how long the whole batch is. The key is an input of the graph: the engine feeds a
new one every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.errors.arguments import Rate, Size, checked_arguments
from distgraph.ir.dtypes import is_float, short, to_numpy
from distgraph.ir.graph import Value
from distgraph.ir.index_rule import Rule, make_rule, term_of
from distgraph.ir.op_registry import Attrs, Local, Shape, Shapes, define, elementwise
from distgraph.kernels import random as kernels
from distgraph.kernels import workspace
from distgraph.kernels._common import store, widening
from distgraph.ops.normalization import require_float
from distgraph.tracing.loop_trace import LoopTrace
from distgraph.tracing.tensor import Tensor, current_trace, emit_one
from distgraph.tracing.tracer import Trace

KEY = "key"
"""Name of the graph input that holds the key of the step, u64[]."""


def step_key() -> Tensor:
    """The key of this step: an input that the engine feeds with a hash of seed and step.

    Inside the body of a loop it is a key of the turn, which is made of that of the step.
    """
    return _key_of(current_trace())


def _key_of(trace: Trace) -> Tensor:
    if isinstance(trace, LoopTrace):
        key = trace.tensor(_key_of(trace.parent))
        return trace.emit("fold_key", (key, trace.turn()))[0]
    return trace.source("input", KEY, (), "u64")


def _fold_key(xp: Any, key: Any, turn: Any, out: Any = None) -> Any:
    new = np.uint64(kernels.random_key(int(key), int(turn)))
    if out is None:
        return xp.asarray(new)
    out[...] = new
    return out


def _infer_fold(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    key, turn = operands
    if key.type != "u64[]" or turn.type != "i64[]":
        raise GraphError(f"key is {key.type} and turn {turn.type} but they must be u64[] and i64[]")
    return [((), "u64")]


define("fold_key", elementwise, _fold_key, infer=_infer_fold, flops=0, cost="launch")


def _place(shape: Shape, starts: Shape | None, batch_dim: int | None, micro: int) -> tuple[Shape, Shape]:
    """Global shape and starts of a block, with the batch dim first and shifted to its micro-batch."""
    starts = starts if starts is not None else (0,) * len(shape)
    if batch_dim is None or not shape:
        return shape, starts
    order = (batch_dim, *(d for d in range(len(shape)) if d != batch_dim))
    size = shape[batch_dim]
    moved, global_starts = [shape[d] for d in order], [starts[d] for d in order]
    moved[0], global_starts[0] = size * (micro + 1), global_starts[0] + size * micro
    return tuple(moved), tuple(global_starts)


def _random_kernel(
    draw: Any,
    xp: Any,
    key: Any,
    out: Any = None,
    *,
    shape: Shape,
    dtype: str,
    salt: int = 0,
    batch_dim: int | None = 0,
    starts: Shape | None = None,
    local_shape: Shape | None = None,
    micro: int = 0,
) -> Any:
    local = tuple(shape if local_shape is None else local_shape)
    whole, begin = _place(tuple(shape), starts, batch_dim, micro)
    options = {"shape": whole, "starts": begin, "salt": salt, "dtype": to_numpy(dtype)}
    if not batch_dim:
        return draw(xp, key, local_shape=local, out=out, **options)
    moved = (local[batch_dim], *(n for d, n in enumerate(local) if d != batch_dim))
    result = xp.moveaxis(draw(xp, key, local_shape=moved, **options), 0, batch_dim)
    return xp.ascontiguousarray(result) if out is None else store(xp, result, out)


@widening
def _dropout_kernel(
    xp: Any,
    x: Any,
    key: Any,
    out: Any = None,
    *,
    rate: float,
    salt: int = 0,
    batch_dim: int | None = 0,
    shape: Shape | None = None,
    starts: Shape | None = None,
    micro: int = 0,
) -> Any:
    whole, begin = _place(tuple(x.shape if shape is None else shape), starts, batch_dim, micro)
    if not batch_dim:
        return kernels.dropout(xp, x, key, rate=rate, shape=whole, starts=begin, salt=salt, out=out)
    moved = xp.moveaxis(x, batch_dim, 0)
    result = kernels.dropout(
        xp, xp.ascontiguousarray(moved), key, rate=rate, shape=whole, starts=begin, salt=salt
    )
    result = xp.moveaxis(result, 0, batch_dim)
    return xp.ascontiguousarray(result) if out is None else store(xp, result, out)


def _local_block(attrs: Attrs, local: Local) -> Attrs:
    return {**attrs, "starts": local.starts(0, result=True), "local_shape": local.result_shapes[0]}


def _local_mask(attrs: Attrs, local: Local) -> Attrs:
    return {**attrs, "shape": local.op.results[0].shape, "starts": local.starts(0, result=True)}


def _random_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    term, sizes = term_of(attrs["shape"])
    return make_rule("random", ((),), (term,), sizes)


def _check_batch_dim(attrs: Attrs, ndim: int) -> None:
    batch_dim = attrs.get("batch_dim", 0)
    if batch_dim is not None and ndim and not 0 <= batch_dim < ndim:
        raise GraphError(
            f"batch_dim is {batch_dim} but the tensor has {ndim} dims; use None where there is no batch"
        )


def _infer_random(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    if operands[0].shape != ():
        raise GraphError(f"key is {operands[0].type} but must be a scalar")
    _check_batch_dim(attrs, len(attrs["shape"]))
    return [(tuple(attrs["shape"]), attrs["dtype"])]


def _infer_dropout(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    x, key = operands
    if key.shape != ():
        raise GraphError(f"key is {key.type} but must be a scalar")
    if not 0 <= attrs["rate"] < 1:
        raise GraphError(f"rate is {attrs['rate']} but must be at least 0 and below 1")
    _check_batch_dim(attrs, len(x.shape))
    return [(x.shape, require_float(x))]


for _name, _flops, _bytes in (("random_uniform", 6, 20), ("random_normal", 20, 24)):
    define(
        _name,
        _random_rule,
        partial(_random_kernel, getattr(kernels, _name)),
        infer=_infer_random,
        flops=_flops,
        localize=_local_block,
        micro=True,
        workspace=partial(workspace.random, bytes_each=_bytes),
    )

define(
    "dropout",
    elementwise,
    _dropout_kernel,
    infer=_infer_dropout,
    gradient=lambda c: [emit_one("dropout", c.grad, c.operands[1], **c.attrs), None],
    flops=7,
    linear=((0,),),
    localize=_local_mask,
    inplace=(0,),
    micro=True,
    workspace=workspace.dropout,
)


@checked_arguments()
def random_uniform(shape: Sequence[Size], dtype: Any = "f32", batch_dim: Size | None = 0) -> Tensor:
    """Uniform in [0, 1), new every step. `batch_dim`: where micro-batches follow each other, or None."""
    return _draw("random_uniform", shape, dtype, batch_dim)


@checked_arguments()
def random_normal(shape: Sequence[Size], dtype: Any = "f32", batch_dim: Size | None = 0) -> Tensor:
    """Standard normal, new every step. `batch_dim`: where micro-batches follow each other, or None."""
    return _draw("random_normal", shape, dtype, batch_dim)


def _draw(kind: str, shape: Sequence[int], dtype: Any, batch_dim: int | None) -> Tensor:
    if not is_float(short(dtype)):
        raise GraphError(
            f"dtype of {kind} is {short(dtype)} but random numbers are floats; cast them with .astype"
        )
    attrs = {
        "shape": tuple(int(n) for n in shape),
        "dtype": short(dtype),
        "batch_dim": batch_dim if len(shape) else None,
    }
    return emit_one(kind, step_key(), salt=current_trace().salt(), **attrs)


@checked_arguments()
def dropout(x: Any, rate: Rate, batch_dim: Size | None = 0) -> Tensor:
    """x / (1 - rate) with probability 1 - rate, else 0. The gradient drops the same elements.

    Args:
        x: any shape.
        rate: probability of a zero, in [0, 1).
        batch_dim: along which micro-batches follow each other, or None.
    """
    return emit_one(
        "dropout", x, step_key(), rate=float(rate), salt=current_trace().salt(), batch_dim=batch_dim
    )
