"""Matrix products and einsum: everything becomes GEMM, on views where BLAS can read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from string import ascii_letters

import numpy as np

from distgraph.errors import GraphError
from distgraph.kernels._common import Array, Namespace, computed_in_f32, empty, is_half, store
from distgraph.kernels.gemm import add_product


def blas_ready(x: Array) -> Array:
    """``x`` itself where BLAS reads its last two dims as they lie (row- or column-major), else a contiguous
    copy.

    NumPy multiplies other layouts element by element, far slower than this copy.
    """
    return x if is_blas_ready(x) else np.ascontiguousarray(x)


def is_blas_ready(x: Array) -> bool:
    """Whether `blas_ready` leaves ``x`` as it is; looks at shape and strides alone."""
    if not isinstance(x, np.ndarray) or x.flags.c_contiguous or x.ndim < 2 or x.dtype.kind not in "fc":
        return True
    (rows, columns), (down, across), item = x.shape[-2:], x.strides[-2:], x.itemsize
    row_major = (across == item or columns == 1) and (
        rows == 1 or (down >= columns * item and down % item == 0)
    )
    column_major = (down == item or rows == 1) and (
        columns == 1 or (across >= rows * item and across % item == 0)
    )
    return row_major or column_major


def multiply_into(xp: Namespace, a: Array, b: Array, out: Array) -> None:
    """out[...] = a b, for an ``out`` of any strides: BLAS writes to those it can; CuPy's ``out`` is
    contiguous."""
    if xp is np:
        np.matmul(a, b, out=out)
    else:
        out[...] = xp.matmul(a, b)


@computed_in_f32(0)
def matmul(xp: Namespace, a: Array, b: Array, *, out: Array | None = None) -> Array:
    """y[..., m, n] = sum over k of a[..., m, k] * b[..., k, n], leading dims broadcast as in NumPy.

    Leading dims of ``a`` against a plain matrix ``b`` are collapsed into one GEMM. Transposed views are not
    copied.

    Args:
        a: [..., m, k] or [k].
        b: [..., k, n] or [k].
    """
    a, b = blas_ready(a), blas_ready(b)
    dtype = a.dtype if a.dtype == b.dtype else np.result_type(a.dtype, b.dtype)
    direct = out if out is not None and out.dtype == dtype else None
    if a.ndim > 2 and b.ndim == 2 and a.flags.c_contiguous:
        y, rows = empty(xp, direct, (*a.shape[:-1], b.shape[-1]), dtype), prod(a.shape[:-1])
        xp.matmul(a.reshape(rows, a.shape[-1]), b, out=y.reshape(rows, b.shape[-1]))
        return store(xp, y, out)
    y = xp.matmul(a, b) if direct is None else xp.matmul(a, b, out=direct)
    return store(xp, y, out)


def matmul_direct(
    xp: Namespace, a: Array, b: Array, *, out: Array, wide: bool = False
) -> tuple[str, tuple[Array, Array], Array] | None:
    """`matmul` as one call of NumPy's; None where it takes more than that."""
    if not (a.size and b.size and out.size):  # the part of a rank that has none
        return None
    if a.ndim > 2 and b.ndim == 2 and a.flags.c_contiguous and out.flags.c_contiguous:
        a, out = a.reshape(-1, a.shape[-1]), out.reshape(-1, out.shape[-1])
    return _one_product(xp, a, b, out)


def _one_product(
    xp: Namespace, a: Array | None, b: Array | None, out: Array | None
) -> tuple[str, tuple[Array, Array], Array] | None:
    if xp is not np or a is None or b is None or out is None or not out.size:
        return None
    if not a.dtype == b.dtype == out.dtype or is_half(out.dtype):
        return None
    return ("matmul", (a, b), out) if is_blas_ready(a) and is_blas_ready(b) else None


@dataclass(frozen=True, slots=True)
class _Pair:
    """How to contract two operands as one batched matmul; the numbers are dims.

    Attributes:
        swapped: whether the second operand is the left one, ``a`` below: the one without the last index of
            the result, so that the product has this index last, as the result.
        sum_a, sum_b: dims that only this operand has, summed first.
        order_a, order_b: dims of the operands in the order of the matmul.
        rows_a, rows_b: number of dims of the operands that become their rows.
        shape_a, shape_b, shape: of the matmul.
        order_out, shape_out: of the result.
    """

    swapped: bool
    sum_a: tuple[int, ...]
    sum_b: tuple[int, ...]
    order_a: tuple[int, ...]
    order_b: tuple[int, ...]
    rows_a: int
    rows_b: int
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    shape: tuple[int, ...]
    order_out: tuple[int, ...]
    shape_out: tuple[int, ...]


Names = tuple[str, ...]


@lru_cache(maxsize=4096)
def _parse(spec: str) -> tuple[tuple[Names, ...], Names]:
    """Operands' and result's index names of ``spec``."""
    left, arrow, right = spec.partition("->")
    if not arrow:
        raise GraphError(f"einsum {spec!r}: no '->'; write the result's indices, as in 'm k, k n -> m n'")
    terms = [t.strip() for t in (*left.split(","), right)]
    spaced = any(" " in t for t in terms)
    names = [tuple(t.split() if spaced else t) for t in terms]
    in_operands = {n for term in names[:-1] for n in term}
    for n in names[-1]:
        if n not in in_operands or names[-1].count(n) > 1:
            raise GraphError(
                f"einsum {spec!r}: result index {n} must be once in the result and in some operand"
            )
    return tuple(names[:-1]), names[-1]


@lru_cache(maxsize=4096)
def _plan_pair(a: Names, b: Names, out: Names, shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> _Pair:
    """Sort the indices of a contraction into batch, left, right and summed ones."""
    sizes = dict(zip(a, shape_a, strict=True)) | dict(zip(b, shape_b, strict=True))
    swapped = bool(out) and out[-1] not in b
    if swapped:
        a, b = b, a
    sum_a = tuple(i for i, n in enumerate(a) if n not in b and n not in out)
    sum_b = tuple(i for i, n in enumerate(b) if n not in a and n not in out)
    a = tuple(n for n in a if n in b or n in out)
    b = tuple(n for n in b if n in a or n in out)
    batch = tuple(n for n in out if n in a and n in b)
    left = tuple(n for n in out if n in a and n not in b)
    right = tuple(n for n in out if n in b and n not in a)
    summed = tuple(n for n in a if n in b and n not in out)

    def size(names: Names) -> int:
        return prod(sizes[n] for n in names)

    heads = tuple(sizes[n] for n in batch)
    made = batch + left + right
    return _Pair(
        swapped,
        sum_a,
        sum_b,
        tuple(a.index(n) for n in batch + left + summed),
        tuple(b.index(n) for n in batch + summed + right),
        len(left),
        len(summed),
        (*heads, size(left), size(summed)),
        (*heads, size(summed), size(right)),
        (*heads, size(left), size(right)),
        tuple(out.index(n) for n in made),
        tuple(sizes[n] for n in out),
    )


def _contract(xp: Namespace, a: Array, b: Array, plan: _Pair, out: Array | None) -> Array:
    """Run a `_Pair`: into a view of the result where its dims merge, else by a copy."""
    if plan.swapped:
        a, b = b, a
    if plan.sum_a:
        a = a.sum(axis=plan.sum_a)
    if plan.sum_b:
        b = b.sum(axis=plan.sum_b)
    dtype = a.dtype if a.dtype == b.dtype else np.result_type(a.dtype, b.dtype)
    left = _matrices(a, plan.order_a, plan.rows_a, plan.shape_a)
    right = _matrices(b, plan.order_b, plan.rows_b, plan.shape_b)
    y = empty(xp, out, plan.shape_out, dtype)
    turned = y.transpose(plan.order_out)
    target = _merged(turned, plan.shape) if xp is np else turned.reshape(plan.shape)
    if target is not None and (xp is np or xp.may_share_memory(target, y)):
        multiply_into(xp, left, right, target)
    else:
        turned[...] = xp.matmul(left, right).reshape(turned.shape)
    return store(xp, y, out)


def _matrices(x: Array, order: tuple[int, ...], rows: int, shape: tuple[int, ...]) -> Array:
    """``x`` as matrices that BLAS can read: a view, or a copy in which its last dim stays the last where rows
    or columns end with it.

    Args:
        order: dims of the batch, of the rows and of the columns.
        rows: number of dims of the rows.
        shape: of the result, where the dims of the rows are one, and those of the columns.
    """
    if not isinstance(x, np.ndarray):
        return x.transpose(order).reshape(shape)
    merged = _merged(x.transpose(order), shape)
    if merged is not None:
        return blas_ready(merged)
    heads, last = len(shape) - 2, x.ndim - 1
    middle = heads + rows
    if rows and order[middle - 1] == last:
        turned = x.transpose(order[:heads] + order[middle:] + order[heads:middle])
        return turned.reshape((*shape[:-2], shape[-1], shape[-2])).swapaxes(-1, -2)
    return x.transpose(order).reshape(shape)


@lru_cache(maxsize=1024)
def _path(spec: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, int], ...]:
    """Greedy order of pairwise contractions, as positions in the shrinking list of operands."""
    terms, out = _parse(spec)
    letters = dict(zip(sorted({n for t in terms for n in t}), ascii_letters, strict=False))
    plain = ",".join("".join(letters[n] for n in t) for t in terms)
    plain += "->" + "".join(letters[n] for n in out)
    shells = [np.broadcast_to(np.float32(0), s) for s in shapes]
    steps = np.einsum_path(plain, *shells, optimize="greedy")[0][1:]
    count, pairs = len(shapes), []
    for step in steps:
        # Where an order gains nothing NumPy leaves several operands to one step: take them two by two.
        pairs.append((min(step), max(step)) if len(step) == 2 else (count - 2, count - 1))
        count -= 1
    pairs += [(count - 2 - i, count - 1 - i) for i in range(count - 1)]
    return tuple(pairs)


@computed_in_f32(0)
def einsum(xp: Namespace, *operands: Array, spec: str, out: Array | None = None) -> Array:
    """Sum of products over the indices that are not in the result.

    Args:
        operands: one or more arrays.
        spec: "m k, k n -> m n" (names, apart by spaces) or "mk,kn->mn" (letters).

    Raises:
        GraphError: the spec is malformed or does not fit the operands.
    """
    terms, result = _parse(spec)
    shapes = tuple(tuple(o.shape) for o in operands)
    if _check(spec, terms, shapes):
        return store(xp, _general(xp, terms, result, operands), out)
    if len(operands) == 1:
        return _single(xp, operands[0], terms[0], result, out)
    names, arrays = list(terms), list(operands)
    path: Sequence[tuple[int, int]] = ((0, 1),) if len(arrays) == 2 else _path(spec, shapes)
    for i, j in path:
        b, a = arrays.pop(j), arrays.pop(i)
        names_b, names_a = names.pop(j), names.pop(i)
        last = not arrays
        remaining = {n for t in (*names, result) for n in t}
        product = result if last else tuple(dict.fromkeys(n for n in names_a + names_b if n in remaining))
        plan = _plan_pair(names_a, names_b, product, tuple(a.shape), tuple(b.shape))
        arrays.append(_contract(xp, a, b, plan, out if last else None))
        names.append(product)
    return arrays[0]


def einsum_direct(
    xp: Namespace, *operands: Array, spec: str, out: Array, wide: bool = False
) -> tuple[str, tuple[Array, Array], Array] | None:
    """`einsum` as one call of NumPy's matmul on views; None where it takes more than that."""
    terms, result = _parse(spec)
    shapes = tuple(tuple(o.shape) for o in operands)
    if len(operands) != 2 or _check(spec, terms, shapes):
        return None
    plan = _plan_pair(*terms, result, *shapes)
    if plan.sum_a or plan.sum_b:
        return None
    a, b = operands[::-1] if plan.swapped else operands
    left = _merged(a.transpose(plan.order_a), plan.shape_a)
    right = _merged(b.transpose(plan.order_b), plan.shape_b)
    return _one_product(xp, left, right, _merged(out.transpose(plan.order_out), plan.shape))


def einsum_add(
    xp: Namespace,
    *operands: Array,
    spec: str,
    out: Array,
    scale: float = 1.0,
    fresh: bool = False,
    wide: bool = False,
) -> Array:
    """out = scale * einsum where ``fresh``, else out + scale * einsum; one BLAS call for a matrix product."""
    terms, result = _parse(spec)
    shapes = tuple(tuple(o.shape) for o in operands)
    if xp is np and len(operands) == 2 and not _check(spec, terms, shapes):
        plan = _plan_pair(*terms, result, *shapes)
        target = _merged(out.transpose(plan.order_out), plan.shape)
        if len(plan.shape) == 2 and not plan.sum_a and not plan.sum_b and target is not None:
            a, b = operands[::-1] if plan.swapped else operands
            left = _matrices(a, plan.order_a, plan.rows_a, plan.shape_a)
            right = _matrices(b, plan.order_b, plan.rows_b, plan.shape_b)
            if add_product(left, right, scale, 0.0 if fresh else 1.0, target):
                return out
    y = einsum(xp, *operands, spec=spec, wide=wide)
    y *= y.dtype.type(scale)
    if fresh:
        return store(xp, y, out)
    return xp.add(out, y, out=out)


@lru_cache(maxsize=4096)
def _check(spec: str, terms: tuple[Names, ...], shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Refuse operands that do not fit the spec; return whether an index is twice in one operand."""
    if len(terms) != len(shapes):
        raise GraphError(f"einsum {spec!r}: describes {len(terms)} operands but got {len(shapes)}")
    sizes: dict[str, int] = {}
    for i, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        if len(term) != len(shape):
            raise GraphError(f"einsum {spec!r}: operand {i} has {len(shape)} dims but {len(term)} indices")
        for name, size in zip(term, shape, strict=True):
            if sizes.setdefault(name, size) != size:
                raise GraphError(
                    f"einsum {spec!r}: index {name} is {sizes[name]} before but {size} in operand {i}"
                )
    return any(len(set(term)) < len(term) for term in terms)


def _single(xp: Namespace, x: Array, names: Names, result: Names, out: Array | None) -> Array:
    """Sum and transpose of one operand."""
    gone = tuple(i for i, n in enumerate(names) if n not in result)
    remaining = [n for n in names if n in result]
    y = x.sum(axis=gone) if gone else x
    return store(xp, xp.ascontiguousarray(y.transpose([remaining.index(n) for n in result])), out)


def _general(xp: Namespace, terms: tuple[Names, ...], result: Names, operands: tuple[Array, ...]) -> Array:
    """An index twice in one operand (a diagonal): the array library's own einsum."""
    letters = dict(zip(sorted({n for t in terms for n in t}), ascii_letters, strict=False))
    plain = ",".join("".join(letters[n] for n in t) for t in terms)
    return xp.einsum(plain + "->" + "".join(letters[n] for n in result), *operands)


def matmul_workspace(a: Array, b: Array) -> int:
    """Bytes that `matmul` allocates on NumPy: copies of what BLAS cannot read."""
    return sum(x.nbytes for x in (a, b) if not is_blas_ready(x))


def einsum_workspace(*operands: Array, spec: str, adds: bool = False) -> int:
    """Bytes that `einsum`, or `einsum_add`, allocates on NumPy: copies, and products between two steps."""
    terms, result = _parse(spec)
    if len(operands) == 1:
        return _single_workspace(operands[0], terms[0], result)
    names, shells = list(terms), list(operands)
    shapes = tuple(tuple(o.shape) for o in operands)
    alive = most = 0
    for i, j in ((0, 1),) if len(shells) == 2 else _path(spec, shapes):
        b, a = shells.pop(j), shells.pop(i)
        names_b, names_a = names.pop(j), names.pop(i)
        remaining = {n for t in (*names, result) for n in t}
        product = tuple(dict.fromkeys(n for n in names_a + names_b if n in remaining)) if shells else result
        plan = _plan_pair(names_a, names_b, product, tuple(a.shape), tuple(b.shape))
        made = _shell(plan.shape_out, a.dtype)
        direct = len(plan.shape) == 2 and not plan.sum_a and not plan.sum_b
        nbytes = made.nbytes if shells or (adds and not direct) else 0
        most = max(most, alive + nbytes + _pair_workspace(a, b, plan, made))
        alive += nbytes - sum(x.nbytes for x in (a, b) if not any(x is o for o in operands))
        shells.append(made)
        names.append(product)
    return most


@lru_cache(maxsize=4096)
def copied_elements(spec: str, shapes: tuple[tuple[int, ...], ...]) -> int:
    """Elements that `einsum` copies on NumPy, of contiguous operands: those that BLAS cannot read or write
    where they are, and products between two steps."""
    item = np.dtype(np.float32)
    return einsum_workspace(*(_shell(shape, item) for shape in shapes), spec=spec) // item.itemsize


def _pair_workspace(a: Array, b: Array, plan: _Pair, made: Array) -> int:
    """Bytes that one contraction allocates in addition to its operands and result."""
    nbytes = 0
    if plan.swapped:
        a, b = b, a
    for x, gone, order, shape in (
        (a, plan.sum_a, plan.order_a, plan.shape_a),
        (b, plan.sum_b, plan.order_b, plan.shape_b),
    ):
        if gone:
            x = _shell(tuple(n for d, n in enumerate(x.shape) if d not in gone), x.dtype)
            nbytes += x.nbytes
        merged = _merged(x.transpose(order), shape)
        nbytes += x.nbytes if merged is None or not is_blas_ready(merged) else 0
    return nbytes + (made.nbytes if _merged(made.transpose(plan.order_out), plan.shape) is None else 0)


def _single_workspace(x: Array, names: Names, result: Names) -> int:
    summed: int = prod(n for n, name in zip(x.shape, names, strict=True) if name in result) * x.itemsize
    remaining = tuple(n for n in names if n in result)
    return summed * ((len(remaining) < len(names)) + (remaining != result))


def _shell(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """A contiguous array as to its shape and strides, with no memory behind."""
    strides = [dtype.itemsize * prod(shape[d + 1 :]) for d in range(len(shape))]
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides, writeable=False)


def _merged(x: Array, shape: tuple[int, ...]) -> Array | None:
    """``x`` in another shape where that is a view, else None."""
    try:
        return x.reshape(shape, copy=False)
    except ValueError:
        return None
