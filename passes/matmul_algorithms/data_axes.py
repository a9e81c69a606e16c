"""Mesh axes that take no part in a distributed algorithm: those of data parallelism.

*In:* the letters of a contraction C = A B and the stored layouts of its tensors. *Out:* for each letter the
mesh axes that split it in the two tensors that have it (or in all three) and do not split the third. On every
position along such an axis the algorithm computes a contraction of its own on the other axes. *Invariant:* a
letter that another axis splits too becomes two letters, of which the first has the data axes alone, so that
an algorithm never sees a dim that is split by more than one axis. A letter of A and B becomes two in any
case, and C has the first one, which is summed over behind the algorithm: that is the sum of a weight's
gradient over all samples. A gradient that is only accumulated is summed behind the accumulation, once a step.

    "mk,kn->mn"      A [m: dp*x, k: y]        B [k: x, n: y]           C [m: dp*x, n: y]
    "Dmk,kn->Dmn"    A [D: dp, m: x, k: y]    B [k: x, n: y]           C [D: dp, m: x, n: y]    OS on x and y
    "mk,kn->mn"      A [m: y, k: dp*x]        B [k: dp*x, n: y]        C [m: x, n: y]
    "Dmk,Dkn->Dmn"   A [m: y, D: dp, k: x]    B [D: dp, k: x, n: y]    C [D: dp, m: x, n: y]    RS on x and y
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distgraph.errors import ShardingError
from distgraph.ir.graph import Op
from distgraph.ir.mesh import ProcessMesh

Letters = tuple[str, str, str]
"""Those of A, B and C, one for each dim."""
Dims = Sequence[Sequence[tuple[str, ...]]]
"""For A, B and C and each dim the axes of more than one rank that split it."""


@dataclass(frozen=True, slots=True)
class DataAxes:
    """The data axes of a contraction.

    Attributes:
        axes: letter -> the data axes that split it, major to minor.
        renamed: letter that another axis splits too, or that is not in C -> a letter of its own for its data
            axes, before it.
        counts: such a letter -> the number of ranks along its data axes.
        result: letters of C.
    """

    axes: Mapping[str, tuple[str, ...]]
    renamed: Mapping[str, str]
    counts: Mapping[str, int]
    result: str

    @property
    def summed(self) -> str:
        """Letters that the result has in front, over which it is then summed."""
        return "".join(self.renamed[letter] for letter in self.renamed if letter not in self.result)

    def letters(self, term: str) -> str:
        """The letters of an operand, or behind the summed ones of the result."""
        return "".join(self.renamed.get(letter, "") + letter for letter in term)

    def shape(self, term: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the same tensor."""
        sizes: list[int] = []
        for letter, length in zip(term, shape, strict=True):
            count = self.counts.get(letter)
            sizes += [length] if count is None else [count, length // count]
        return tuple(sizes)

    def split(self) -> dict[str, tuple[str, ...]]:
        """Letter -> data axes, in letters of their own."""
        return {self.renamed.get(letter, letter): axes for letter, axes in self.axes.items()}


def data_axes(op: Op, letters: Letters, dims: Dims, mesh: ProcessMesh, algorithm: object) -> DataAxes:
    """The data axes of a contraction, from the axes that split its operands and its result.

    Raises:
        ShardingError: in a dim that another axis splits too, a data axis is not the major one, or does not
            divide the length.
    """
    axes = {}
    for letter in dict.fromkeys("".join(letters)):
        having = [
            split[term.index(letter)] for term, split in zip(letters, dims, strict=True) if letter in term
        ]
        others = [split for term, split in zip(letters, dims, strict=True) if letter not in term]
        elsewhere = {axis for split in others for dim in split for axis in dim}
        shared = tuple(a for a in having[0] if a not in elsewhere and all(a in dim for dim in having[1:]))
        if shared and len(having) > 1:
            axes[letter] = shared
    unused = iter(sorted(set(string.ascii_uppercase) - set("".join(letters))))
    renamed, counts = {}, {}
    values = (*op.operands, op.result)
    for value, term, split in zip(values, letters, dims, strict=True):
        for letter, length, dim in zip(term, value.shape, split, strict=True):
            if letter not in axes or (dim == axes[letter] and letter in letters[2]):
                continue
            _check(op, mesh, algorithm, (letter, length, axes[letter], dim))
            if letter not in renamed:
                renamed[letter], counts[letter] = next(unused), mesh.count(axes[letter])
    return DataAxes(axes, renamed, counts, letters[2])


def _check(
    op: Op, mesh: ProcessMesh, algorithm: object, split: tuple[str, int, tuple[str, ...], tuple[str, ...]]
) -> None:
    letter, length, axes, dim = split
    if dim[: len(axes)] != axes:
        rest = tuple(axis for axis in dim if axis not in axes)
        raise ShardingError(
            f"{op}: algorithm {algorithm} needs axes of data parallelism before the others of a dim but "
            f"{letter} is split by {', '.join(dim)}; annotate it with ({', '.join((*axes, *rest))})"
        )
    parts = mesh.count(axes)
    if length % parts or any(axis in mesh.weights for axis in axes):
        near = sorted({max(1, length // parts) * parts, -(-length // parts) * parts})
        raise ShardingError(
            f"{op}: algorithm {algorithm} needs equal shards of {letter} on {parts} ranks along "
            f"{', '.join(axes)} but its length is {length} on {mesh}; use "
            f"{' or '.join(map(str, near))} and axes without weights"
        )
