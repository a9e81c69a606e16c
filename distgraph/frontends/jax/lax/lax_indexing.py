"""Look-ups and updates by position: gather and scatter.

Both are reduced to rows: the dims that positions refer to come first and are flattened to one, so that a row
is what one position selects. A gather of whole slices of a single dim stays a `take` along that dim, and one
element a row along a dim a `take_along`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.jax.folded_constant import Constant
from distgraph.frontends.jax.lax.lax_elementwise import as_positions
from distgraph.frontends.jax.rule_registry import primitive
from distgraph.ir.dtypes import is_float
from distgraph.tracing.tensor import emit_one

_CLIP, _FILL = "CLIP", "FILL_OR_DROP"


@primitive("gather")
def _gather(
    x: Any, indices: Any, *, dimension_numbers: Any, slice_sizes: Any, mode: Any, fill_value: Any = None,
    **params: Any,
) -> Any:  # fmt: skip
    numbers, sizes = dimension_numbers, tuple(int(n) for n in slice_sizes)
    ids = as_positions(indices)
    mapped = tuple(numbers.start_index_map)
    batching, index_batching = (
        tuple(numbers.operand_batching_dims),
        tuple(numbers.start_indices_batching_dims),
    )
    inside = None
    if mode.name == _CLIP:
        ids = _limited(ids, [x.shape[d] - sizes[d] for d in mapped])
    elif mode.name == _FILL and _is_intended(fill_value):
        inside = _inside(ids, [x.shape[d] - sizes[d] for d in mapped])
        ids = _limited(ids, [x.shape[d] - sizes[d] for d in mapped])
    gathered = _simple(x, ids, numbers, sizes)
    if gathered is None:
        gathered = _rows_taken(x, ids, numbers, sizes, mapped, batching, index_batching)
    if inside is None:
        return gathered
    rest = [d for d in range(gathered.ndim) if d not in numbers.offset_dims]
    shape = tuple(n if d in rest else 1 for d, n in enumerate(gathered.shape))
    return ops.where(ops.reshape(inside, shape), gathered, fill_value)


def _is_intended(fill_value: Any) -> bool:
    """Whether a value for positions outside was chosen: NaN and the extreme integers are defaults of JAX."""
    if fill_value is None:
        return False
    number = np.asarray(fill_value)
    if number.dtype.kind in "iu":
        limits = np.iinfo(number.dtype)
        return int(number) not in (limits.min, limits.max) or (limits.min == 0 and int(number) == 0)
    return number.dtype.kind == "b" or not math.isnan(float(number))


def _column(ids: Any, number: int) -> Any:
    """Positions in one of the dims: a column of the last dim of the indices."""
    if isinstance(ids, Constant):
        return Constant(ids.value[..., number])
    return ops.getitem(ids, (..., number))


def _limited(ids: Any, highest: list[int]) -> Any:
    limits = np.array(highest, np.int64)
    if isinstance(ids, Constant):
        return Constant(np.clip(ids.value, 0, limits))
    return ops.clip(ids, 0, Constant(limits) if len(set(highest)) > 1 else highest[0])


def _inside(ids: Any, highest: list[int]) -> Any:
    """Whether all positions of a look-up are in range, without the last dim."""
    limits = np.array(highest, np.int64)
    if isinstance(ids, Constant):
        return Constant(((ids.value >= 0) & (ids.value <= limits)).all(-1))
    fits = ops.logical_and(ops.greater_equal(ids, 0), ops.less_equal(ids, Constant(limits)))
    return ops.reduce("all", fits, -1)


def _simple(x: Any, ids: Any, numbers: Any, sizes: tuple[int, ...]) -> Any:
    """A gather along one dim as one op; None where it is not of that form."""
    mapped = tuple(numbers.start_index_map)
    if len(mapped) != 1 or tuple(numbers.collapsed_slice_dims) != mapped:
        return None
    (dim,) = mapped
    positions = _column(ids, 0)
    batching = tuple(numbers.operand_batching_dims)
    others = [d for d in range(x.ndim) if d != dim]
    if not batching and all(sizes[d] == x.shape[d] for d in others):
        gathered = _take(x, positions, dim)
        n = positions.ndim
        offsets = iter(range(n, n + len(others)))
        front = iter(range(n))
        target = [next(offsets) if d in numbers.offset_dims else next(front) for d in range(gathered.ndim)]
        now = [
            *range(n, n + dim),
            *range(n),
            *range(n + dim, gathered.ndim),
        ]  # positions replace the dim
        order = tuple(now.index(i) for i in target)
        return gathered if order == tuple(range(gathered.ndim)) else ops.transpose(gathered, order)
    along = list(batching) == others and positions.ndim == x.ndim and not numbers.offset_dims
    if along and tuple(numbers.start_indices_batching_dims) == tuple(others):
        return emit_one("take_along", x, positions, dim=dim)
    return None


def _take(x: Any, positions: Any, dim: int) -> Any:
    if isinstance(positions, Constant) and positions.ndim == 0:
        index = (slice(None),) * dim + (int(positions.value),)
        return ops.getitem(x, index)
    table = dim == 0 and x.ndim == 2 and is_float(x.dtype)
    return ops.embedding(x, positions) if table else emit_one("take", x, positions, dim=dim)


def _rows_taken(
    x: Any, ids: Any, numbers: Any, sizes: Any, mapped: Any, batching: Any, index_batching: Any
) -> Any:
    """Any gather: flat positions of rows, of which a look-up of rows makes the result."""
    gone = {*numbers.collapsed_slice_dims, *batching}
    window = [d for d in range(x.ndim) if d not in gone and sizes[d] != x.shape[d]]
    window += [d for d in mapped if d not in gone and d not in window]
    window.sort()
    whole = [d for d in range(x.ndim) if d not in gone and d not in window]
    indexed = [d for d in range(x.ndim) if d not in whole]
    rows = _rows_of(x, indexed, whole)
    lead = ids.ndim - 1
    flat = _flat_positions(x.shape, ids, indexed, mapped, batching, index_batching, window, sizes)
    gathered = emit_one("take", rows, flat, dim=0)
    # dims of the result so far: batch dims, window dims, whole dims
    offsets = dict(zip([*window, *whole], range(lead, gathered.ndim), strict=True))
    remaining = [d for d in range(x.ndim) if d not in gone]
    slots = iter(remaining)
    front = iter(range(lead))
    order = [offsets[next(slots)] if d in numbers.offset_dims else next(front) for d in range(gathered.ndim)]
    return gathered if order == list(range(gathered.ndim)) else ops.transpose(gathered, tuple(order))


def _rows_of(x: Any, indexed: list[int], whole: list[int]) -> Any:
    order = (*indexed, *whole)
    x = x if order == tuple(range(x.ndim)) else ops.transpose(x, order)
    return ops.reshape(x, (math.prod(x.shape[: len(indexed)]), *x.shape[len(indexed) :]))


def _flat_positions(
    shape: Any, ids: Any, indexed: Any, mapped: Any, batching: Any, index_batching: Any, window: Any,
    sizes: Any,
) -> Any:  # fmt: skip
    """Row of every element of [batch dims, window dims]: the position in the flattened indexed dims."""
    lead = ids.ndim - 1
    rank = lead + len(window)
    total: Any = Constant(np.zeros((1,) * rank, np.int64))
    step = 1
    for d in reversed(indexed):
        parts = []
        if d in mapped:
            column = _column(ids, mapped.index(d))
            parts.append(_with_dims(column, (*column.shape, *(1 for _ in window))))
        if d in batching:
            index_dim = index_batching[batching.index(d)]
            parts.append(_line(shape[d], index_dim, rank))
        if d in window:
            parts.append(_line(sizes[d], lead + window.index(d), rank))
        for part in parts:
            total = _sum(total, part, step)
        step *= shape[d]
    full = (*ids.shape[:-1], *(sizes[d] for d in window))
    return total if tuple(total.shape) == full else ops.broadcast_to(total, full)


def _line(length: int, dim: int, rank: int) -> Constant:
    return Constant(np.arange(length).reshape([-1 if d == dim else 1 for d in range(rank)]))


def _with_dims(x: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(x, Constant):
        return Constant(x.value.reshape(shape))
    return x if tuple(x.shape) == shape else ops.reshape(x, shape)


def _sum(total: Any, part: Any, step: int) -> Any:
    if isinstance(total, Constant) and isinstance(part, Constant):
        return Constant(total.value + part.value * step)
    scaled = part if step == 1 else part * step
    return scaled if isinstance(total, Constant) and not total.value.any() else total + scaled


# scatter


def _scattered(x: Any, indices: Any, updates: Any, numbers: Any, mode: Any) -> tuple[Any, Any, Any, Any]:
    """(rows of the operand, row of each update, updates as rows, function that restores the operand's dims).

    Updates outside of the operand are dropped or moved inside, as the mode says.
    """
    ids = as_positions(indices)
    mapped = tuple(numbers.scatter_dims_to_operand_dims)
    batching = tuple(numbers.operand_batching_dims)
    gone = {*numbers.inserted_window_dims, *batching}
    remaining = [d for d in range(x.ndim) if d not in gone]
    lead = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
    sizes = [1] * x.ndim
    for d, update_dim in zip(remaining, numbers.update_window_dims, strict=True):
        sizes[d] = updates.shape[update_dim]
    window = [d for d in remaining if d in mapped or sizes[d] != x.shape[d]]
    whole = [d for d in remaining if d not in window]
    indexed = [d for d in range(x.ndim) if d not in whole]
    highest = [x.shape[d] - sizes[d] for d in mapped]
    order = [*lead, *(numbers.update_window_dims[remaining.index(d)] for d in (*window, *whole))]
    updates = updates if order == list(range(updates.ndim)) else ops.transpose(updates, tuple(order))
    if mode.name == _FILL:
        inside = _inside(ids, highest)
        if not (isinstance(inside, Constant) and bool(inside.value.all())):
            shape = (*inside.shape, *(1 for _ in (*window, *whole)))
            updates = ops.where(_with_dims(inside, shape), updates, 0)
    if mode.name != "PROMISE_IN_BOUNDS":
        ids = _limited(ids, highest)
    batched = tuple(numbers.scatter_indices_batching_dims)
    flat = _flat_positions(x.shape, ids, indexed, mapped, batching, batched, window, sizes)
    rows = _rows_of(x, indexed, whole)
    front = tuple(x.shape[d] for d in (*indexed, *whole))
    back = tuple(int(d) for d in np.argsort((*indexed, *whole)))

    def restored(y: Any) -> Any:
        return ops.transpose(ops.reshape(y, front), back)

    return rows, flat, updates, restored


@primitive("scatter-add", "scatter_add")
def _scatter_add(
    x: Any, indices: Any, updates: Any, *, dimension_numbers: Any, mode: Any, **params: Any
) -> Any:
    rows, flat, changes, restored = _scattered(x, indices, updates, dimension_numbers, mode)
    return restored(ops.scatter_add(rows, flat, changes))


@primitive("scatter-sub", "scatter_sub")
def _scatter_sub(x: Any, indices: Any, updates: Any, **params: Any) -> Any:
    return _scatter_add(x, indices, -updates, **params)


@primitive("scatter")
def _scatter(
    x: Any, indices: Any, updates: Any, *, dimension_numbers: Any, mode: Any, unique_indices: bool = False,
    **params: Any,
) -> Any:  # fmt: skip
    """Elements replaced by others; positions must not repeat, as the sum of their updates is taken."""
    rows, flat, changes, restored = _scattered(x, indices, updates, dimension_numbers, mode)
    repeated = isinstance(flat, Constant) and len(np.unique(flat.value)) != flat.size
    if repeated or not (unique_indices or isinstance(flat, Constant)):
        raise GraphError(
            "positions of x.at[...].set may repeat, and then the result would depend on an order; give "
            "unique_indices=True where they do not, or use jax.numpy.where"
        )
    inside = ops.full(changes.shape, 1, "f32")
    if mode.name == _FILL:
        fits = _inside(as_positions(indices), _highest(x, updates, dimension_numbers))
        inside = ops.where(_with_dims(fits, (*fits.shape, *(1,) * (changes.ndim - fits.ndim))), inside, 0.0)
    hit = ops.scatter_add(ops.full(rows.shape, 0, "f32"), flat, inside)
    moved = ops.scatter_add(ops.full(rows.shape, 0, x.dtype), flat, changes)
    return restored(ops.where(ops.greater(hit, 0), moved, rows))


def _highest(x: Any, updates: Any, numbers: Any) -> list[int]:
    """Largest position in each indexed dim at which an update fits."""
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    remaining = [d for d in range(x.ndim) if d not in gone]
    sizes = dict(
        zip(remaining, (updates.shape[update_dim] for update_dim in numbers.update_window_dims), strict=True)
    )
    return [x.shape[d] - sizes.get(d, 1) for d in numbers.scatter_dims_to_operand_dims]
