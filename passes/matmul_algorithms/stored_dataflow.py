"""Dataflows of a contraction C = A B: what stays in place, and what moves, in its stored layouts.

The letters of the contraction are of three groups: `m` those of A and C, `k` those of A and B, `n` those of B
and C. On a mesh of axes x and y, with at most one letter of a group split, by one axis, the stored layouts
give the dataflow, which says what stays in place (Nam et al., "MeshSlice", 2025, figure 1):

    OS   A [m:x, k:y]   B [k:x, n:y]   C [m:x, n:y]   C stays, slices along k
    LS   A [m:x, k:y]   B [k:y, n:x]   C [m:x, n:y]   A stays, slices along n
    RS   A [m:y, k:x]   B [k:x, n:y]   C [m:x, n:y]   B stays, slices along m
    AG   A [m:y, k]     B [k, n:y]     C [m, n:y]     one axis: A is gathered, slices along m
         A [m, k:y]     B [k, n:y]     C [m, n:y]     one axis: A is gathered, slices along k
    SC   A [m, k:y]     B [k:y, n]     C [m:y, n]     one axis: C is scattered, slices along m

AG and SC also with A and B exchanged; they are OS, LS and RS where the other axis has one rank. The backward
contractions of a forward one in OS are in LS (dA = dC B^T) and RS (dB = A^T dC), and so on: no operand is
transposed, and the same matrix stays in place. Further mesh axes are those of data parallelism
(`data_axes.py`): a contraction on x and y is computed at each of their positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Axes = Mapping[str, str | None]
"""Group "m", "k" or "n" -> mesh axis that splits one of its letters."""


@dataclass(frozen=True, slots=True)
class Dataflow:
    """What stays in place, and what is gathered and scattered.

    Attributes:
        name: OS, LS, RS, AG or SC.
        group: "m", "k" or "n": its split letter is sliced.
        computed: layout of every partial product.
        reduced: axis over which the partial products are summed; None in OS and AG.
    """

    name: str
    group: str
    computed: Axes
    reduced: str | None = None


def groups_of(left: str, right: str, result: str) -> dict[str, str]:
    """Letter -> group. A letter of all three is none of a matrix product."""
    groups = {}
    for letter in dict.fromkeys(left + right + result):
        present = (letter in left, letter in right, letter in result)
        groups[letter] = {(True, False, True): "m", (True, True, False): "k", (False, True, True): "n"}.get(
            present, "batch"
        )
    return groups


def dataflow_of(a: Axes, b: Axes, c: Axes) -> Dataflow | None:
    """The dataflow of stored layouts; None where they are those of none."""
    x, y = c["m"], c["n"]
    if x is not None and y is not None:
        if (a["m"], b["n"]) == (x, y) and (a["k"], b["k"]) == (y, x):
            return Dataflow("OS", "k", {"m": x, "n": y})
        if (a["m"], a["k"], b["k"], b["n"]) == (x, y, y, x):
            return Dataflow("LS", "n", {"m": x, "k": y}, y)
        if (b["k"], b["n"], a["k"], a["m"]) == (x, y, x, y):
            return Dataflow("RS", "m", {"k": x, "n": y}, x)
        return None
    given = (a["m"], a["k"], b["k"], b["n"], x, y)
    match given:
        case (str(axis), None, None, str(other), None, str(last)) if axis == other == last:
            return Dataflow("AG", "m", {"m": None, "n": axis})
        case (str(axis), None, None, str(other), str(last), None) if axis == other == last:
            return Dataflow("AG", "n", {"m": axis, "n": None})
        case (None, str(axis), None, str(other), None, str(last)) if axis == other == last:
            return Dataflow("AG", "k", {"n": axis})
        case (str(axis), None, str(other), None, str(last), None) if axis == other == last:
            return Dataflow("AG", "k", {"m": axis})
        case (None, str(axis), str(other), None, str(last), None) if axis == other == last:
            return Dataflow("SC", "m", {"k": axis}, axis)
        case (None, str(axis), str(other), None, None, str(last)) if axis == other == last:
            return Dataflow("SC", "n", {"k": axis}, axis)
    return None
