"""How a value of one micro-batch becomes that of the whole batch: a mean, a sum, or a concatenation.

The forward part is traced for two numbers of samples. Its ops are the same; shapes and constants that differ
tell what depends on the number. A value has an exponent k if that of n times as many samples is n ** k times
the mean of those of the parts: 0 for a mean over the samples (a sum, times a constant that falls with their
number), 1 for a sum. Linear ops keep it; products add exponents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from distgraph.ir.graph import Graph, Op
from distgraph.ir.matmul_algorithm import CONTRACTIONS
from distgraph.ir.op_registry import linear_groups

SUMS = frozenset({"reduce_sum", *CONTRACTIONS})
"""Ops that sum over a dim that their result does not have."""
FACTOR = 2
"""Samples of the second trace for each of the first."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How a value depends on the samples.

    Attributes:
        kind: "fixed" (not at all, but for a factor), "rows" (a dim is the samples), "linear" (a sum over the
            samples, times a factor) or "other".
        power: exponent of the number of samples.
    """

    kind: str
    power: float = 0.0


FIXED, ROWS, OTHER = Growth("fixed"), Growth("rows"), Growth("other")


def growths(small: Graph, large: Graph) -> Mapping[str, Growth]:
    """Name of a value of the small graph -> how it depends on the samples.

    Args:
        small: forward part for some number of samples.
        large: the same for `FACTOR` times as many.
    """
    found: dict[str, Growth] = {}
    if [op.kind for op in small.ops] != [op.kind for op in large.ops]:
        return {value.name: OTHER for op in small.ops for value in op.results}
    for op, other in zip(small.ops, large.ops, strict=True):
        for value, wide in zip(op.results, other.results, strict=True):
            if value.shape != wide.shape:
                found[value.name] = ROWS
            elif not op.operands:
                found[value.name] = _source(op, other)
            else:
                found[value.name] = _result(op, other, found)
    return found


def _source(op: Op, other: Op) -> Growth:
    """A source or constant: a factor where its numbers are a power of the number of samples."""
    before, after = op.attrs.get("value"), other.attrs.get("value")
    if op.kind == "input" or before is None or np.array_equal(np.asarray(before), np.asarray(after)):
        return FIXED
    ratios = np.asarray(after, float) / np.where(np.asarray(before) == 0, np.nan, before)
    first = float(ratios.flat[0])
    if not np.allclose(ratios, first, rtol=1e-6) or not first > 0:
        return OTHER
    return Growth("fixed", round(math.log(first, FACTOR), 6))


def _result(op: Op, other: Op, found: Mapping[str, Growth]) -> Growth:
    operands = [found[value.name] for value in op.operands]
    if any(g.kind == "other" for g in operands) or _attributes_differ(op, other):
        return OTHER
    if all(g == FIXED for g in operands):
        return FIXED
    if op.kind == "divide" and operands[1].kind == "fixed":
        return Growth(operands[0].kind, operands[0].power - operands[1].power)
    if any(g.kind == "rows" for g in operands):
        sums = op.kind in SUMS and all(g.kind in ("rows", "fixed") for g in operands)
        return Growth("linear", 1 + sum(g.power for g in operands if g.kind == "fixed")) if sums else OTHER
    for group in linear_groups(op):
        inside = [g for i, g in enumerate(operands) if i in group]
        outside = [g for i, g in enumerate(operands) if i not in group]
        if all(g.kind == "fixed" for g in outside) and len({g.power for g in inside}) == 1:
            kind = "linear" if any(g.kind == "linear" for g in inside) else "fixed"
            return Growth(kind, inside[0].power + sum(g.power for g in outside))
    return OTHER


def _attributes_differ(op: Op, other: Op) -> bool:
    """Whether attributes other than shapes depend on the number of samples."""
    ignored = ("shape", "sizes", "salt", "starts", "stops", "limits")
    keys = {*op.attrs, *other.attrs} - set(ignored)
    return any(repr(op.attrs.get(key)) != repr(other.attrs.get(key)) for key in keys)
