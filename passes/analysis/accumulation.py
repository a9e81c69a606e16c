"""How a value of one micro-batch becomes that of the whole batch: a mean, a sum, or a concatenation.

The forward part is traced for a micro-batch and for the whole batch. Its ops are the same; shapes and
constants that differ tell what depends on the number of samples. A value has an exponent k if that of n times
as many samples is n ** k times the mean of those of the parts: 0 for a mean over the samples (a sum, times a
constant that falls with their number), 1 for a sum. Linear ops keep it; products add exponents.

A value whose shape grows is the rows of the parts one behind the other only if every op before it computes a
row from the same row of its operands, which the index rules tell. Other values that grow couple samples.

The body of a loop is examined in the same way, from what its operands are. A carry must be the same at the
end of a turn as at its beginning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distgraph.ir.dtypes import is_float
from distgraph.ir.graph import Graph, Op
from distgraph.ir.loops import ITEM, Loop, source_values
from distgraph.ir.matmul_algorithm import CONTRACTIONS
from distgraph.ir.op_registry import linear_groups, lookup, rule_of

SUMS = frozenset({"reduce_sum", *CONTRACTIONS})
"""Ops that sum over a dim that their result does not have."""


_OF_LOOPS = ("length", "turns", "reverse", "carried", "sequences", "sums")


@dataclass(frozen=True, slots=True)
class Growth:
    """How a value depends on the samples.

    Attributes:
        kind: "fixed" (not at all, but for a factor), "rows" (a row for each sample, times a factor), "linear"
            (a sum over the samples, times a factor) or "other".
        power: exponent of the number of samples.
        dim: of rows, the dim along which those of the parts follow each other.
    """

    kind: str
    power: float = 0.0
    dim: int = 0


FIXED, OTHER = Growth("fixed"), Growth("other")


def growths(
    small: Graph, large: Graph, factor: int, given: Mapping[str, Growth] | None = None
) -> Mapping[str, Growth]:
    """Name of a value of the small graph -> how it depends on the samples.

    Args:
        small: forward part for some number of samples.
        large: the same for `factor` times as many.
        factor: from 2 up.
        given: name of a source -> how it depends on the samples, where this is known.
    """
    growth_of: dict[str, Growth] = {}
    pairs = _pairs(small, large)
    if pairs is None:
        return {value.name: OTHER for op in small.ops for value in op.results}
    for op, other in pairs:
        for value, wide in zip(op.operands, other.operands, strict=False):
            made, like = small.producers[value.name], large.producers[wide.name]
            if made.kind == "constant":  # which it is paired with depends on the reader
                growth_of[value.name] = _constant(made, like, factor) if like.kind == "constant" else OTHER
        if op.name in (given or {}):
            growth_of[op.name] = (given or {})[op.name]
            continue
        if lookup(op.kind).bodies:
            growth_of |= zip((v.name for v in op.results), _looped(op, other, growth_of, factor), strict=True)
            continue
        for number, (value, wide) in enumerate(zip(op.results, other.results, strict=True)):
            if value.shape != wide.shape:
                growth_of[value.name] = _grown(op, other, number, growth_of, factor)
            elif not op.operands:
                growth_of[value.name] = _source(op, other, factor)
            else:
                growth_of[value.name] = _result(op, other, growth_of)
    unread = {value.name: FIXED for op in small.ops for value in op.results if value.name not in growth_of}
    return growth_of | unread


def _pairs(small: Graph, large: Graph) -> list[tuple[Op, Op]] | None:
    """Ops of both graphs, in order; None where they differ.

    Equal constants are one op, and a number of samples may be equal to another constant of one graph: where
    their numbers differ, constants are paired by the ops that read them only.
    """
    for ignored in ("", "constant"):
        left, right = ([op for op in graph.ops if op.kind != ignored] for graph in (small, large))
        if [op.kind for op in left] == [op.kind for op in right]:
            return list(zip(left, right, strict=True))
    return None


def _constant(op: Op, other: Op, factor: int) -> Growth:
    same = op.result.shape == other.result.shape
    return _source(op, other, factor) if same else _grown(op, other, 0, {}, factor)


def _grown(op: Op, other: Op, number: int, growth_of: Mapping[str, Growth], factor: int) -> Growth:
    """A result whose shape depends on the samples: rows, or other where samples are coupled."""
    before, after = op.results[number].shape, other.results[number].shape
    dims = [d for d, (n, m) in enumerate(zip(before, after, strict=False)) if n != m]
    if len(before) != len(after) or len(dims) != 1 or after[dims[0]] != factor * before[dims[0]]:
        return OTHER
    (dim,) = dims
    if not op.operands:
        return _grown_source(op, other, dim, factor)
    operands = [growth_of[value.name] for value in op.operands]
    if any(g.kind in ("other", "linear") for g in operands) or attributes_differ(op, other, dim):
        return OTHER
    power = _power(op, operands)
    return (
        OTHER if power is None or not _row_wise(other, number, dim, operands) else Growth("rows", power, dim)
    )


def _grown_source(op: Op, other: Op, dim: int, factor: int) -> Growth:
    """A source or constant with a row for each sample: the rows must be equal, whichever the sample."""
    if op.kind == "input":
        return Growth("rows", 0, dim)
    if op.kind == "iota":
        return OTHER if op.attrs["dim"] == dim else Growth("rows", 0, dim)
    if op.kind not in ("constant", "full"):
        return OTHER
    rows = []
    for each in (op, other):
        value = np.broadcast_to(np.asarray(each.attrs["value"]), each.results[0].shape)
        rows.append(value.take([0], dim))
        if not np.array_equal(value, np.broadcast_to(rows[-1], value.shape)):
            return OTHER
    scale = _factor(rows[0], rows[1], factor)
    return Growth("rows", scale.power, dim) if scale.kind == "fixed" else OTHER


def _row_wise(op: Op, number: int, dim: int, operands: Sequence[Growth]) -> bool:
    """Whether each row of a result, along a dim, depends on the same row of the operands only.

    Args:
        op: of the trace with more samples: an index of length 1 would not be in its rule.
        number, dim: of the result.
        operands: fixed, or rows.
    """
    rows = [(i, g.dim) for i, g in enumerate(operands) if g.kind == "rows"]
    if op.kind == "reshape":  # the elements of the samples are the minor part from that dim on
        leading = math.prod(op.results[number].shape[:dim])
        return all(math.prod(op.operands[i].shape[:d]) == leading for i, d in rows)
    rule = rule_of(op)
    indices = rule.results[number][dim]
    if len(indices) != 1 or indices[0] in rule.whole | rule.located | rule.sliding | frozenset(rule.joint):
        return False
    return _carried_by(op, indices[0], rows) and sum(indices[0] in term for term in rule.results[number]) == 1


def _carried_by(op: Op, index: str, rows: Sequence[tuple[int, int]]) -> bool:
    """Whether the dims of the samples of the operands are an index, and no other dims of operands have it."""
    rule = rule_of(op)
    carriers = [(tensor, dim) for is_result, tensor, dim in rule.dims_of(index) if not is_result]
    return carriers == list(rows) and all(rule.operands[i][d] == (index,) for i, d in rows)


def _power(op: Op, operands: Sequence[Growth]) -> float | None:
    """Exponent of a row-wise result; None where it has none."""
    powers = [g.power for g in operands]
    if not any(powers):
        return 0
    if op.kind == "divide":
        return powers[0] - powers[1]
    if op.kind in ("multiply", *CONTRACTIONS):
        return sum(powers)
    for group in linear_groups(op):
        inside = {power for i, power in enumerate(powers) if i in group}
        if len(inside) == 1 and not any(power for i, power in enumerate(powers) if i not in group):
            return inside.pop()
    return None


def _source(op: Op, other: Op, factor: int) -> Growth:
    """A source or constant: a factor where its numbers are a power of the number of samples."""
    before, after = op.attrs.get("value"), other.attrs.get("value")
    if op.kind == "input" or before is None:
        return FIXED
    return _factor(np.asarray(before), np.asarray(after), factor)


def _factor(before: np.ndarray, after: np.ndarray, factor: int) -> Growth:
    if np.array_equal(before, after):
        return FIXED
    ratios = np.asarray(after, float) / np.where(before == 0, np.nan, before)
    first = float(ratios.flat[0])
    if not np.allclose(ratios, first, rtol=1e-6) or not first > 0:
        return OTHER
    return Growth("fixed", round(math.log(first, factor), 6))


def _result(op: Op, other: Op, growth_of: Mapping[str, Growth]) -> Growth:
    operands = [growth_of[value.name] for value in op.operands]
    if any(g.kind == "other" for g in operands) or attributes_differ(op, other):
        return OTHER
    if all(g == FIXED for g in operands):
        return FIXED
    if any(g.kind == "rows" for g in operands):
        return _summed(op, other, operands)
    if op.kind == "divide" and operands[1].kind == "fixed":
        return Growth(operands[0].kind, operands[0].power - operands[1].power)
    if op.kind == "cast" and is_float(op.result.dtype):
        return operands[0]
    for group in linear_groups(op):
        inside = [g for i, g in enumerate(operands) if i in group]
        outside = [g for i, g in enumerate(operands) if i not in group]
        if all(g.kind == "fixed" for g in outside) and len({g.power for g in inside}) == 1:
            kind = "linear" if any(g.kind == "linear" for g in inside) else "fixed"
            return Growth(kind, inside[0].power + sum(g.power for g in outside))
    return OTHER


def _looped(op: Op, other: Op, growth_of: Mapping[str, Growth], factor: int) -> list[Growth]:
    """The results of a loop; all are other where what turns hand on changes, or samples decide on turns."""
    loop, wide = Loop(op), Loop(other)
    coupled = [OTHER] * len(op.results)
    if any(op.attrs.get(key) != other.attrs.get(key) for key in _OF_LOOPS):
        return coupled
    sources = source_values(loop.body)
    given = {
        sources[name].name: _item(growth_of[value.name]) if name.startswith(ITEM) else growth_of[value.name]
        for value, name in zip(op.operands, loop.operand_names, strict=True)
    }
    for _ in range(loop.carried + 1):  # a number that turns add to is a sum from the second one on
        inner = growths(loop.body, wide.body, factor, given)
        changed = {b.name: inner[e.name] for b, e in loop.carries if inner[e.name] != given[b.name]}
        if not changed:
            break
        if any(g.kind != "linear" or g.power or given[name] != FIXED for name, g in changed.items()):
            return coupled
        given |= changed
    else:
        return coupled
    if loop.condition is not None and wide.condition is not None:
        named = {value.name: name for name, value in sources.items()}
        decides = source_values(loop.condition)
        begins = {decides[n].name: given[name] for name, n in named.items() if name in given and n in decides}
        ((_, decision),) = loop.condition.outputs
        if growths(loop.condition, wide.condition, factor, begins)[decision.name] != FIXED:
            return coupled
    last = loop.carried + loop.sums
    return [
        _stacked(inner[value.name]) if number >= last else inner[value.name]
        for number, value in enumerate(loop.result_values)
    ]


def _item(sequence: Growth) -> Growth:
    """One item of a sequence, whose first dim are the turns; other where these are the samples."""
    if sequence.kind != "rows":
        return sequence
    return replace(sequence, dim=sequence.dim - 1) if sequence.dim else OTHER


def _stacked(item: Growth) -> Growth:
    return replace(item, dim=item.dim + 1) if item.kind == "rows" else item


def _summed(op: Op, other: Op, operands: Sequence[Growth]) -> Growth:
    """A result without rows of operands with rows: linear where the op sums over the samples once."""
    rows = [(i, g.dim) for i, g in enumerate(operands) if g.kind == "rows"]
    if op.kind not in SUMS or any(g.kind == "linear" for g in operands):
        return OTHER
    indices = rule_of(other).operands[rows[0][0]][rows[0][1]]
    if len(indices) != 1 or indices[0] not in rule_of(other).reduced(0):
        return OTHER
    power = sum(g.power for g in operands)
    return Growth("linear", 1 + power) if _carried_by(other, indices[0], rows) else OTHER


def attributes_differ(op: Op, other: Op, dim: int | None = None) -> bool:
    """Whether attributes of two ops of one kind differ, other than in the length of a dim."""
    for key in {*op.attrs, *other.attrs} - {"salt"}:
        before, after = op.attrs.get(key), other.attrs.get(key)
        if key in ("shape", "sizes", "stops") and dim is not None and before and after:
            before, after = (tuple(n for d, n in enumerate(each) if d != dim) for each in (before, after))
        if repr(before) != repr(after):
            return True
    return False
