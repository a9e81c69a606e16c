"""Rows and elements by position."""

from __future__ import annotations

from typing import Any

import numpy as np

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.torch.folded_constant import Constant
from distgraph.frontends.torch.rule_registry import aten
from distgraph.tracing.tensor import emit_one
from distgraph.tracing.tracer import Trace


def _not_negative(ids: Any, length: int) -> Any:
    """Positions from 0 up: torch counts negative ones from the end."""
    if isinstance(ids, Constant):
        value = ids.value
        return ids if bool((value >= 0).all()) else Constant(value % length)
    return ops.where(ops.less(ids, 0), ids + length, ids)


@aten("embedding.default")
def _embedding(weight: Any, ids: Any, padding_idx: int = -1, *options: Any) -> Any:
    if len(options) > 0 and options[0]:
        raise GraphError("embedding has scale_grad_by_freq=True, which has no rule; leave it out")
    if padding_idx < 0:
        return ops.embedding(weight, ids)
    rows = ops.embedding(weight, ids)  # the padding row is looked up but learns nothing
    fixed = ops.expand_dims(ops.equal(ids, padding_idx), -1)
    return ops.where(fixed, ops.stop_gradient(rows), rows)


@aten("_embedding_bag.default", "_embedding_bag_forward_only.default")
def _embedding_bag(
    weight: Any, ids: Any, offsets: Any, scale_grad: bool = False, mode: int = 0, sparse: bool = False,
    weights: Any = None, last_offset: bool = False, padding_idx: int = -1,
) -> Any:  # fmt: skip
    """Sum (mode 0), mean (1) or maximum (2) over bags of rows that all have one length."""
    bags = offsets.shape[0] - last_offset
    if not isinstance(offsets, Constant) or ids.shape[0] % max(1, bags) or padding_idx >= 0:
        raise GraphError(
            "embedding_bag has bags of several lengths or padding; use embedding and a masked sum"
        )
    size = ids.shape[0] // bags
    if offsets.value.tolist()[:bags] != list(range(0, ids.shape[0], size)):
        raise GraphError("embedding_bag has bags of several lengths; use embedding and a masked sum")
    rows = ops.embedding(weight, ops.reshape(ids, (bags, size)))
    if weights is not None:
        rows = rows * ops.reshape(weights, (bags, size, 1))
    result = ops.mean(rows, 1) if mode == 1 else ops.reduce("max" if mode == 2 else "sum", rows, 1)
    return result, None, None, None


@aten("index_select.default")
def _index_select(x: Any, dim: int, ids: Any) -> Any:
    return emit_one("take", x, ids, dim=dim % x.ndim)


@aten("gather.default")
def _gather(x: Any, dim: int, ids: Any, sparse_grad: bool = False) -> Any:
    axis = dim % x.ndim
    shorter = tuple(slice(0, n) if d != axis else slice(None) for d, n in enumerate(ids.shape))
    return ops.take_along(ops.getitem(x, shorter), ids, axis)


@aten("index.Tensor")
def _index(x: Any, indices: Any) -> Any:
    """`x[indices]` for integer positions in some dims, which broadcast; one flat dim replaces them."""
    used = [d for d, ids in enumerate(indices) if ids is not None]
    arrays = [indices[d] for d in used]
    if any(ids.dtype == "bool" for ids in arrays):
        raise GraphError(
            "index with a boolean mask: its number of elements depends on the data; use torch.where"
        )
    ready = [_not_negative(ids, x.shape[d]) for d, ids in zip(used, arrays, strict=True)]
    if len(used) == 1:
        return emit_one("take", x, ready[0], dim=used[0])
    shape = np.broadcast_shapes(*(ids.shape for ids in ready))
    together = used == list(range(used[0], used[-1] + 1))
    rest = [d for d in range(x.ndim) if d not in used]
    lengths = [x.shape[d] for d in used]
    flat = ops.reshape(ops.transpose(x, (*used, *rest)), (-1, *(x.shape[d] for d in rest)))
    place: Any = ready[0]
    for ids, length in zip(ready[1:], lengths[1:], strict=True):
        place = place * length + ids
    gathered = emit_one("take", flat, ops.broadcast_to(place, shape), dim=0)
    if not together or used[0] == 0:
        return gathered
    n = len(shape)  # the new dims go where the first indexed dim was
    order = (*range(n, n + used[0]), *range(n), *range(n + used[0], gathered.ndim))
    return ops.transpose(gathered, order)


@aten("unfold.default")
def _unfold(x: Any, dim: int, size: int, step: int) -> Any:
    """Windows along a dim, whose elements become the last dim."""
    axis = dim % x.ndim if x.ndim else 0
    starts = np.arange(0, x.shape[axis] - size + 1, step)
    windows = emit_one("take", x, Trace.current().constant(starts[:, None] + np.arange(size)), dim=axis)
    order = [d for d in range(windows.ndim) if d != axis + 1]
    return ops.transpose(windows, (*order, axis + 1))


@aten("one_hot.default")
def _one_hot(ids: Any, classes: int = -1) -> Any:
    if classes < 0:
        raise GraphError("one_hot has no number of classes: it would depend on the data; give num_classes")
    return ops.one_hot(ids, classes, "i64")


@aten("scatter.src", "scatter.value")
def _scatter(x: Any, dim: int, ids: Any, src: Any) -> Any:
    """Elements of `x` along a dim replaced by those of `src`; positions of a tensor must not repeat."""
    axis = dim % x.ndim
    if tuple(n for d, n in enumerate(ids.shape) if d != axis) != tuple(
        n for d, n in enumerate(x.shape) if d != axis
    ):
        raise GraphError(f"scatter into {x.shape} at positions {ids.shape}: only dim {axis} may differ")
    size = x.shape[axis]
    ones = ops.full(ids.shape, 1, "f32")
    hit = ops.greater(emit_one("put_along", ones, ids, dim=axis, size=size), 0)
    if isinstance(src, (int, float, bool)):
        return ops.where(hit, src, x)
    return ops.where(hit, emit_one("put_along", ops.cast(src, x.dtype), ids, dim=axis, size=size), x)


@aten("scatter_add.default")
def _scatter_add(x: Any, dim: int, ids: Any, src: Any) -> Any:
    axis = dim % x.ndim
    if ids.shape != src.shape:
        src = ops.getitem(src, tuple(slice(0, n) for n in ids.shape))
    return x + emit_one("put_along", src, ids, dim=axis, size=x.shape[axis])


@aten("index_add.default")
def _index_add(x: Any, dim: int, ids: Any, source: Any, alpha: Any = 1) -> Any:
    source = source if alpha == 1 else source * alpha
    if dim % x.ndim == 0:
        return ops.scatter_add(x, ids, source)
    order = (dim % x.ndim, *(d for d in range(x.ndim) if d != dim % x.ndim))
    added = ops.scatter_add(ops.transpose(x, order), ids, ops.transpose(source, order))
    return ops.transpose(added, tuple(int(d) for d in np.argsort(order)))


@aten("select_scatter.default")
def _select_scatter(x: Any, src: Any, dim: int, index: int) -> Any:
    axis = dim % x.ndim
    return _slice_scatter(
        x, ops.expand_dims(src, axis), axis, index % x.shape[axis], index % x.shape[axis] + 1
    )


@aten("slice_scatter.default")
def _slice_scatter(x: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    axis = dim % x.ndim
    first, last, _ = slice(start, end).indices(x.shape[axis])
    if step != 1:
        places = np.arange(x.shape[axis])
        hit = (places >= first) & (places < last) & ((places - first) % step == 0)
        rows = np.where(hit, (places - first) // step, 0)
        spread = emit_one("take", ops.cast(src, x.dtype), Trace.current().constant(rows), dim=axis)
        return ops.where(Trace.current().constant(hit.reshape(-1, *(1,) * (x.ndim - axis - 1))), spread, x)
    front = (slice(None),) * axis
    parts = [ops.getitem(x, (*front, slice(0, first))), src, ops.getitem(x, (*front, slice(last, None)))]
    return ops.concat([ops.cast(part, x.dtype) for part in parts if part.shape[axis]], axis)
