"""Shape functions made of the primitives: indexing, split, stack, squeeze, roll, tile, repeat."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.errors.arguments import Count, Size, checked_arguments, shown
from distgraph.ir.dtypes import is_float
from distgraph.ops.contraction import as_tensors, reshape_to
from distgraph.ops.gather_scatter import take
from distgraph.ops.reduction import dims_of
from distgraph.ops.shape import concat
from distgraph.tracing.tensor import Tensor, emit_one


def getitem(x: Any, key: Any) -> Tensor:
    """`x[key]` for integers, slices, None, Ellipsis, and one integer tensor or array (rows by position).

    Raises:
        GraphError: a boolean mask (its result has no static shape), two arrays, an index out of range.
    """
    (tensor,) = as_tensors(x)
    parts = _expand(tensor, key if isinstance(key, tuple) else (key,))
    cuts: list[slice] = []  # of each dim, forwards
    flips, shape, rows = [], [], None
    for part in parts:
        if part is None:
            shape.append(1)
            continue
        n = tensor.shape[len(cuts)]
        if isinstance(part, slice):
            _check_slice(part, tensor)
            if part.indices(n)[2] < 0:
                flips.append(len(cuts))
            cuts.append(_forward_slice(part, n))
            shape.append(len(range(*part.indices(n))))
        elif isinstance(part, (int, np.integer)) and not isinstance(part, (bool, np.bool_)):
            number = operator.index(part)
            if not -n <= number < n:
                raise GraphError(f"index {number} is out of range for dim {len(cuts)} of {tensor.value.type}")
            cuts.append(slice(number % n, number % n + 1, 1))
        else:
            if rows is not None:
                raise GraphError(
                    f"{tensor.value.type} is indexed by two arrays; use take or pick, one dim at a time"
                )
            rows = (len(shape), part)
            cuts.append(slice(0, n, 1))
            shape.append(n)
    cut = _cut(tensor, cuts)
    if flips:
        cut = emit_one("flip", cut, dims=tuple(flips))
    result = reshape_to(cut, tuple(shape))
    return result if rows is None else take(result, rows[1], rows[0])


def _forward_slice(part: slice, n: int) -> slice:
    """The same positions of a dim of length n in ascending order, without negative bounds."""
    start, stop, stride = part.indices(n)
    if stride < 0:
        length = len(range(start, stop, stride))
        start, stop, stride = (start + (length - 1) * stride, start + 1, -stride) if length else (0, 0, 1)
    return slice(start, max(start, stop), stride)


def _cut(tensor: Tensor, cuts: Sequence[slice]) -> Tensor:
    """A part of a tensor, by a slice of each dim as `_forward_slice` returns it."""
    if all(cut == slice(0, n, 1) for cut, n in zip(cuts, tensor.shape, strict=True)):
        return tensor
    starts, stops, strides = (
        tuple(getattr(cut, bound) for cut in cuts) for bound in ("start", "stop", "step")
    )
    return emit_one("slice", tensor, starts=starts, stops=stops, strides=strides)


def _expand(x: Tensor, key: tuple[Any, ...]) -> list[Any]:
    """The key with its ellipsis expanded, one part a dim. Raises GraphError for an untraceable key."""
    for part in key:
        dtype = (
            part.dtype if isinstance(part, Tensor) else np.asarray(part).dtype if _is_array(part) else None
        )
        if isinstance(part, (bool, np.bool_)) or (dtype is not None and str(dtype) == "bool"):
            raise GraphError(
                f"{x.value.type} is indexed by a boolean mask: its length is not known while tracing; "
                "use dg.ops.where"
            )
        if isinstance(part, Tensor) and is_float(part.dtype):
            raise GraphError(f"{x.value.type} is indexed by {part.value.type}; cast it to an integer dtype")
    used = sum(part is not None and part is not Ellipsis for part in key)
    ellipses = sum(part is Ellipsis for part in key)
    if used > x.ndim or ellipses > 1:
        raise GraphError(
            f"{x.value.type} has {x.ndim} dims but the index names {used} (and {ellipses} ellipses)"
        )
    fill = [slice(None)] * (x.ndim - used)
    if not ellipses:
        return [*key, *fill]
    position = next(i for i, part in enumerate(key) if part is Ellipsis)
    return [*key[:position], *fill, *key[position + 1 :]]


def _is_array(part: Any) -> bool:
    return isinstance(part, (list, np.ndarray))


@checked_arguments()
def expand_dims(x: Any, axis: int | Sequence[int]) -> Tensor:
    """New dims of length 1 at these places of the result."""
    (tensor,) = as_tensors(x)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    dims = dims_of(axes, tensor.ndim + len(axes))
    lengths = iter(tensor.shape)
    return reshape_to(
        tensor, tuple(1 if d in dims else next(lengths) for d in range(tensor.ndim + len(axes)))
    )


@checked_arguments()
def squeeze(x: Any, axis: int | Sequence[int] | None = None) -> Tensor:
    """Dims of length 1 removed; all of them by default. Raises GraphError when a named one is longer."""
    (tensor,) = as_tensors(x)
    dims = (
        tuple(d for d, n in enumerate(tensor.shape) if n == 1) if axis is None else dims_of(axis, tensor.ndim)
    )
    for d in dims:
        if tensor.shape[d] != 1:
            raise GraphError(
                f"dim {d} of {tensor.value.type} is {tensor.shape[d]} long; only length 1 is squeezed"
            )
    return reshape_to(tensor, tuple(n for d, n in enumerate(tensor.shape) if d not in dims))


def _check_slice(part: slice, tensor: Tensor) -> None:
    for name in ("start", "stop", "step"):
        end = getattr(part, name)
        try:
            operator.index(0 if end is None else end)
        except TypeError:
            raise GraphError(
                f"{name} of a slice of {tensor.value.type} is {shown(end)} but must be an integer or None"
            ) from None
    if part.step is not None and part.step == 0:
        raise GraphError(f"step of a slice of {tensor.value.type} is 0 but must be another number")


@checked_arguments()
def split(x: Any, sections: Count | Sequence[int], axis: int = 0) -> list[Tensor]:
    """Parts along a dim: a number of equal ones, or cut before each position of a sequence."""
    (tensor,) = as_tensors(x)
    (dim,) = dims_of(axis, tensor.ndim)
    n = tensor.shape[dim]
    if isinstance(sections, (int, np.integer)):
        if sections < 1 or n % sections:
            raise GraphError(
                f"dim {dim} of {tensor.value.type} does not split in {sections} equal parts; give positions"
            )
        cuts = [n // sections * i for i in range(1, int(sections))]
    else:
        cuts = [int(c) for c in sections]
    places = [0, *cuts, n]
    front = (slice(None),) * dim
    return [getitem(tensor, (*front, slice(a, b))) for a, b in pairwise(places)]


@checked_arguments()
def stack(tensors: Iterable[Any] | Tensor, axis: int = 0) -> Tensor:
    """Tensors of one shape joined along a new dim."""
    arrays = as_tensors(*tensors)
    (dim,) = dims_of(axis, arrays[0].ndim + 1) if arrays else (0,)
    return concat([expand_dims(x, dim) for x in arrays], dim)


@checked_arguments()
def flip(x: Any, axis: int | Sequence[int] | None = None) -> Tensor:
    """Reversed along dims."""
    (tensor,) = as_tensors(x)
    dims = dims_of(axis, tensor.ndim)
    return emit_one("flip", tensor, dims=dims) if dims else tensor


@checked_arguments()
def roll(x: Any, shift: int, axis: int) -> Tensor:
    """Elements moved along a dim; those pushed out come back at the other end."""
    (tensor,) = as_tensors(x)
    (dim,) = dims_of(axis, tensor.ndim)
    shift = int(shift) % max(1, tensor.shape[dim])
    return emit_one("roll", tensor, shift=shift, dim=dim) if shift else tensor


@checked_arguments()
def tile(x: Any, repetitions: Size | Sequence[Size]) -> Tensor:
    """The whole tensor repeated along each dim."""
    (tensor,) = as_tensors(x)
    counts = (repetitions,) if isinstance(repetitions, (int, np.integer)) else tuple(repetitions)
    ndim = max(len(counts), tensor.ndim)
    times = (1,) * (ndim - len(counts)) + counts
    shape = (1,) * (ndim - tensor.ndim) + tensor.shape
    split_shape = tuple(n for length in shape for n in (1, length))
    wide = tuple(n for count, length in zip(times, shape, strict=True) for n in (count, length))
    spread = reshape_to(tensor, split_shape)
    spread = spread if wide == split_shape else emit_one("broadcast_to", spread, shape=wide)
    return reshape_to(spread, tuple(a * b for a, b in zip(times, shape, strict=True)))


@checked_arguments()
def repeat(x: Any, count: Size, axis: int) -> Tensor:
    """Every element repeated in place along a dim."""
    (tensor,) = as_tensors(x)
    (dim,) = dims_of(axis, tensor.ndim)
    narrow = (*tensor.shape[: dim + 1], 1, *tensor.shape[dim + 1 :])
    wide = (*tensor.shape[: dim + 1], int(count), *tensor.shape[dim + 1 :])
    shape = (*tensor.shape[:dim], tensor.shape[dim] * int(count), *tensor.shape[dim + 1 :])
    return reshape_to(emit_one("broadcast_to", reshape_to(tensor, narrow), shape=wide), shape)
