"""Which distributed algorithm computes a matrix product or attention: data that annotations, plans and passes
share.

The algorithms themselves are in `distgraph/passes/matmul_algorithms/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from distgraph.errors import ShardingError

CONTRACTIONS = ("matmul", "einsum")
"""Kinds of ops that an algorithm for matrix products may compute."""
ATTENTION = ("attention",)
"""Kinds of ops that an algorithm for attention may compute."""
ATTENTION_ALGORITHMS = ("ring",)
"""Names of the algorithms for attention; all others are for matrix products."""
_TEXT = re.compile(
    r"(?P<name>\w+)"
    r"(\((slices=(?P<slices>[0-9]{1,9})(, block=(?P<block>[0-9]{1,9}))?)?(, (?=ring))?"
    r"(ring=(?P<ring>\w+))?\))?"
)


@dataclass(frozen=True, slots=True)
class MatmulAlgorithm:
    """An algorithm for a contraction of two tensors, or for attention, on a mesh of several ranks.

    Attributes:
        name: of a registered algorithm: "collective", "summa", "cannon", "wang", "meshslice"; "ring" for
            attention.
        slices: parts into which "meshslice" cuts the product, so that the communication of one overlaps the
            computation of another. 1 for the others.
        block: adjacent rows or columns that stay together when a shard is sliced; None: as many as the
            shards allow, since a slice of few long runs is copied faster than one of many short ones.
        ring: mesh axis along which "wang" moves a matrix as a ring; None: that of the matrix that sends more
            bytes. None for the others.

    Raises:
        ShardingError: fewer than one slice, or a block without rows.

    Example:
        >>> str(MatmulAlgorithm("meshslice", slices=8, block=2))
        'meshslice(slices=8, block=2)'
    """

    name: str
    slices: int = 1
    block: int | None = None
    ring: str | None = None

    def __post_init__(self) -> None:
        for field in ("slices", "block"):
            number = getattr(self, field)
            if number is not None and number < 1:
                raise ShardingError(
                    f"algorithm {self.name}: {field} is {number} but must be a number from 1 up"
                )

    def computes(self, kind: str) -> bool:
        """Whether it computes ops of a kind.

        >>> MatmulAlgorithm("ring").computes("attention"), MatmulAlgorithm("wang").computes("attention")
        (True, False)
        """
        return kind in self.kinds

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of ops that it computes."""
        return ATTENTION if self.name in ATTENTION_ALGORITHMS else CONTRACTIONS

    def __str__(self) -> str:
        options = []
        if self.slices != 1 or self.block is not None:
            options.append(f"slices={self.slices}")
        if self.block is not None:
            options.append(f"block={self.block}")
        if self.ring is not None:
            options.append(f"ring={self.ring}")
        return f"{self.name}({', '.join(options)})" if options else self.name

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options that are not at their defaults.

        >>> MatmulAlgorithm("wang", ring="rows").options
        ('ring',)
        """
        given = {
            "slices": self.slices != 1,
            "block": self.block not in (None, 1),
            "ring": self.ring is not None,
        }
        return tuple(name for name, changed in given.items() if changed)

    @classmethod
    def parse(cls, text: str) -> MatmulAlgorithm:
        """Inverse of `str`. Raises ValueError or ShardingError.

        >>> MatmulAlgorithm.parse("wang(ring=rows)")
        MatmulAlgorithm(name='wang', slices=1, block=None, ring='rows')
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(text)
        block = None if match["block"] is None else int(match["block"])
        return cls(match["name"], int(match["slices"] or 1), block, match["ring"])
