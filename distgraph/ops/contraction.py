"""Contractions: matmul and einsum. Their definition gives the index rule; gradients are contractions too."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from distgraph.errors import GraphError
from distgraph.errors.arguments import checked_arguments
from distgraph.ir.graph import Op, Value
from distgraph.ir.index_rule import Rule, make_rule
from distgraph.ir.op_registry import WIDE, Attrs, GradientContext, Groups, Shape, Shapes, define
from distgraph.kernels import matmul as kernels
from distgraph.kernels import workspace
from distgraph.tracing.tensor import Tensor, emit_one, owning_trace

Terms = tuple[str, ...]


def _check_dtypes(operands: Sequence[Value]) -> str:
    dtype = operands[0].dtype
    for position, value in enumerate(operands[1:], 1):
        if value.dtype != dtype:
            raise GraphError(
                f"operand 0 is {operands[0].type} but operand {position} is {value.type}; a contraction "
                f"needs one dtype, cast one of them with .astype"
            )
    return dtype


def parse_einsum(spec: str) -> tuple[Terms, str]:
    """Terms of the operands and of the result. Raises GraphError when the spec is malformed."""
    left, arrow, right = spec.replace(" ", "").partition("->")
    terms = tuple(left.split(","))
    if not arrow:
        letters = [c for c in left if c not in ",."]
        right = "..." * ("..." in left) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    for term in (*terms, right):
        plain = term.replace("...", "")
        if not all(c in string.ascii_letters for c in plain):
            raise GraphError(f"einsum {spec!r}: {term!r} has something other than letters and one ellipsis")
        if len(set(plain)) != len(plain):
            raise GraphError(f"einsum {spec!r}: {term!r} repeats an index; take the diagonal first")
    missing = set(right.replace("...", "")) - {c for term in terms for c in term}
    if missing:
        raise GraphError(
            f"einsum {spec!r}: index {', '.join(sorted(missing))} of the result is in no operand"
        )
    return terms, right


def einsum_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    """Rule of an einsum: each letter is an index."""
    return _bound_einsum(attrs["spec"], shapes)


@lru_cache(maxsize=65536)
def _bound_einsum(spec: str, shapes: Shapes) -> Rule:
    terms, right = parse_einsum(spec)
    sizes = {
        c: n for term, shape in zip(terms, shapes, strict=True) for c, n in zip(term, shape, strict=True)
    }
    operands = tuple(tuple((c,) for c in term) for term in terms)
    return make_rule(spec, operands, (tuple((c,) for c in right),), sizes)


def _index_sizes(terms: Terms, operands: Sequence[Value]) -> dict[str, int]:
    sizes: dict[str, tuple[int, int]] = {}
    for position, (term, value) in enumerate(zip(terms, operands, strict=True)):
        if len(term) != len(value.shape):
            raise GraphError(f"operand {position} is {value.type} but {term!r} names {len(term)} dims")
        for letter, length in zip(term, value.shape, strict=True):
            size, first = sizes.setdefault(letter, (length, position))
            if size != length:
                raise GraphError(
                    f"index {letter} is {size} in operand {first} but {length} in operand {position}"
                )
    return {letter: length for letter, (length, _) in sizes.items()}


def infer_einsum(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    """Shape and dtype of an einsum. Raises GraphError when operands do not fit the spec."""
    terms, right = parse_einsum(attrs["spec"])
    if len(terms) != len(operands):
        raise GraphError(
            f"einsum {attrs['spec']!r} names {len(terms)} operands but {len(operands)} were given"
        )
    dtype = product_dtype(_check_dtypes(operands), attrs)
    sizes = _index_sizes(terms, operands)
    return [(tuple(sizes[letter] for letter in right), dtype)]


def contraction_flops(op: Op, rule: Rule) -> int:
    """2 x (operands - 1) for every point of the index space: one multiply and one add a pair."""
    return 2 * max(1, len(op.operands) - 1) * math.prod(rule.sizes.get(index, 1) for index in rule.indices)


def contraction_gradient(
    terms: Terms, right: str, operands: Sequence[Tensor], grad: Tensor, position: int
) -> Tensor:
    """Gradient of one operand of an einsum: the cotangent contracted with the other operands."""
    goal = terms[position]
    others = [(term, x) for i, (term, x) in enumerate(zip(terms, operands, strict=True)) if i != position]
    present = set(right).union(*(term for term, _ in others)) if others else set(right)
    target = "".join(letter for letter in goal if letter in present)
    spec = ",".join([right, *(term for term, _ in others)]) + "->" + target
    result = emit_one("einsum", grad, *(x for _, x in others), spec=spec)
    if target == goal:
        return result
    # an index that only this operand had was summed alone: its gradient is the same at every position
    like = operands[position].shape
    shape = tuple(n if letter in present else 1 for letter, n in zip(goal, like, strict=True))
    return emit_one("broadcast_to", emit_one("reshape", result, shape=shape), shape=like)


def _einsum_gradient(c: GradientContext) -> list[Tensor | None]:
    terms, right = parse_einsum(c.attrs["spec"])
    return [
        contraction_gradient(terms, right, c.operands, c.grad, i) if need else None
        for i, need in enumerate(c.needs)
    ]


def _each_alone(count: int, attrs: Attrs) -> Groups:
    return tuple((i,) for i in range(count))


define(
    "einsum",
    einsum_rule,
    kernels.einsum,
    infer=infer_einsum,
    gradient=_einsum_gradient,
    flops=contraction_flops,
    linear=_each_alone,
    cost="matmul",
    adds=kernels.einsum_add,
    direct=kernels.einsum_direct,
    workspace=workspace.einsum_workspace,
    copied=lambda op: kernels.copied_elements(op.attrs["spec"], tuple(v.shape for v in op.operands)),
    wide=True,
)


def _infer_matmul(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    left, right = operands
    dtype = product_dtype(_check_dtypes(operands), attrs)
    if len(left.shape) < 2 or len(right.shape) < 2:
        raise GraphError(f"operands {left.type} and {right.type} need two dims each; reshape the vector")
    if left.shape[-1] != right.shape[-2]:
        raise GraphError(
            f"index k is {left.shape[-1]} in the left operand but {right.shape[-2]} in the right"
        )
    batch = []
    first, second = left.shape[-3::-1], right.shape[-3::-1]
    for i in range(max(len(first), len(second))):
        a, b = (first[i] if i < len(first) else 1), (second[i] if i < len(second) else 1)
        if a != b and 1 not in (a, b):
            raise GraphError(f"batch dim {-3 - i} is {a} in the left operand but {b} in the right")
        batch.append(b if a == 1 else a)
    return [((*reversed(batch), left.shape[-2], right.shape[-1]), dtype)]


def _matmul_gradient(c: GradientContext) -> list[Tensor | None]:
    batch = string.ascii_uppercase[: c.grad.ndim - 2]
    lengths = dict(zip(batch, c.grad.shape, strict=False))
    terms, flat = [], []
    for x, tail in zip(c.operands, ("mk", "kn"), strict=True):
        letters = batch[len(batch) - (x.ndim - 2) :]
        matching = [(letter, n) for letter, n in zip(letters, x.shape, strict=False) if n == lengths[letter]]
        terms.append(
            "".join(letter for letter, _ in matching) + tail
        )  # without the dims along which it broadcasts
        flat.append(reshape_to(x, (*(n for _, n in matching), *x.shape[-2:])))
    return [
        reshape_to(contraction_gradient(tuple(terms), batch + "mn", flat, c.grad, i), x.shape)
        if need
        else None
        for i, (x, need) in enumerate(zip(c.operands, c.needs, strict=True))
    ]


def reshape_to(x: Tensor, shape: Shape) -> Tensor:
    """`x` itself when it has the shape already."""
    return x if x.shape == shape else emit_one("reshape", x, shape=shape)


define(
    "matmul",
    "... m k, ... k n -> ... m n",
    kernels.matmul,
    infer=_infer_matmul,
    gradient=_matmul_gradient,
    flops=contraction_flops,
    linear=((0,), (1,)),
    cost="matmul",
    workspace=workspace.matmul_workspace,
    direct=kernels.matmul_direct,
    wide=True,
)


def product_dtype(dtype: str, attrs: Attrs) -> str:
    """Dtype of the result of a product whose operands have one dtype."""
    return "f32" if attrs.get(WIDE) else dtype


def as_tensors(*operands: Any) -> list[Tensor]:
    """Operands (tensors, parameters, arrays) as tensors of one trace."""
    return owning_trace(operands).tensors(operands)


def matmul(x: Any, y: Any) -> Tensor:
    """Matrix product as in NumPy: leading dims broadcast, a vector is a row (left) or a column (right).

    Raises:
        GraphError: contracted lengths or dtypes differ, or an operand has no dims.
    """
    left, right = as_tensors(x, y)
    if not left.shape or not right.shape:
        raise GraphError(
            f"matmul of {left.value.type} and {right.value.type} needs at least one dim each; use *"
        )
    row, column = left.ndim == 1, right.ndim == 1
    if row:
        left = reshape_to(left, (1, *left.shape))
    if column:
        right = reshape_to(right, (*right.shape, 1))
    result = emit_one("matmul", left, right)
    shape = result.shape
    if row:
        shape = (*shape[:-2], shape[-1])
    if column:
        shape = shape[:-1]
    return reshape_to(result, shape)


@checked_arguments()
def einsum(spec: str, *operands: Any) -> Tensor:
    """Einstein summation in NumPy's notation, any number of operands, no index twice in one of them.

    Raises:
        GraphError: malformed spec, an index with two lengths, or dtypes that differ.

    Example:
        `einsum("bqhd,bkhd->bhqk", q, k)`
    """
    terms, right = parse_einsum(spec)
    tensors = as_tensors(*operands)
    if len(terms) != len(tensors):
        raise GraphError(f"einsum {spec!r} names {len(terms)} operands but {len(tensors)} were given")
    if "..." not in spec:
        return emit_one("einsum", *tensors, spec=",".join(terms) + "->" + right)
    free = [c for c in string.ascii_uppercase + string.ascii_lowercase if c not in spec]
    counts = [
        x.ndim - len(t.replace("...", "")) if "..." in t else 0 for t, x in zip(terms, tensors, strict=True)
    ]
    if min(counts) < 0 or max(counts) > len(free):
        raise GraphError(f"einsum {spec!r}: an operand has fewer dims than its term names")
    batch = "".join(free[: max(counts)])
    lengths = _ellipsis_lengths(terms, tensors, counts, batch)
    expanded, squeezed = [], []
    for term, x, count in zip(terms, tensors, counts, strict=True):
        before = term.find("...")
        batch_letters = batch[len(batch) - count :] if count else ""
        letters = term.replace("...", batch_letters)
        broadcast_dims = [d for d in range(before, before + count) if x.shape[d] != lengths[letters[d]]]
        expanded.append("".join(c for d, c in enumerate(letters) if d not in broadcast_dims))
        squeezed.append(reshape_to(x, tuple(n for d, n in enumerate(x.shape) if d not in broadcast_dims)))
    return emit_one("einsum", *squeezed, spec=",".join(expanded) + "->" + right.replace("...", batch))


def _ellipsis_lengths(terms: Terms, tensors: list[Tensor], counts: list[int], batch: str) -> dict[str, int]:
    lengths = dict.fromkeys(batch, 1)
    for term, x, count in zip(terms, tensors, counts, strict=True):
        start = term.find("...")
        for letter, n in zip(
            batch[len(batch) - count :] if count else "", x.shape[start : start + count], strict=True
        ):
            if n != 1 and lengths[letter] not in (1, n):
                raise GraphError(
                    f"einsum: dims under the ellipsis are {lengths[letter]} and {n} and do not broadcast"
                )
            lengths[letter] = max(n, lengths[letter])
    return lengths


def outer(x: Any, y: Any) -> Tensor:
    """Outer product of two tensors, flattened."""
    left, right = as_tensors(x, y)
    return emit_one(
        "einsum", reshape_to(left, (left.size,)), reshape_to(right, (right.size,)), spec="i,j->ij"
    )
