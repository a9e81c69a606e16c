"""Places in one piece of memory for blocks that are needed at different times.

*In:* blocks, each with its bytes and the time it is needed. *Out:* an offset for each, and the bytes of all.
*Invariant:* blocks that are needed at the same time do not overlap.

The problem is dynamic storage allocation, which is NP-hard. The largest blocks are placed first, each in the
smallest gap that fits between those that are needed at the same time (Pisarchyk and Lee, Efficient memory
management for deep neural net inference, 2020, section 5.2); most programs end at the most bytes that are
needed at any time, below which nothing is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distgraph.passes.split_tasks import Parts

_STRETCH, _LONG = 64, 8  # times that are looked up together; stretches beyond which a block is long
Places = NDArray[np.int64]


@dataclass(slots=True)
class Block:
    """Memory that is needed for some time.

    Attributes:
        nbytes: its size.
        start, stop: first and last time at which it is needed.
        offset: where it lies, once it is placed.
    """

    nbytes: int
    start: int
    stop: int
    offset: int = 0


def pack(blocks: Sequence[Block]) -> int:
    """Give every block its offset; returns the bytes of all of them together.

    Example:
        >>> blocks = [Block(64, 0, 1), Block(128, 1, 2), Block(64, 2, 3), Block(64, 0, 0)]
        >>> pack(blocks), [block.offset for block in blocks]
        (192, [128, 0, 128, 0])
    """
    placed = _Placed(blocks)
    for number in sorted(range(len(blocks)), key=lambda i: (-blocks[i].nbytes, blocks[i].start)):
        block = blocks[number]
        block.offset = _gap(block.nbytes, *placed.beside(block))
        placed.add(number, block)
    return _end(blocks)


def pack_once(parts: Parts, blocks: Sequence[Block]) -> int:
    """As `pack`, done once for all ranks of a program that need as large blocks at the same times."""
    key = tuple((block.nbytes, block.start, block.stop) for block in blocks)
    with parts.packing:
        if key not in parts.packed:
            pack(blocks)
            parts.packed[key] = tuple(block.offset for block in blocks)
        offsets = parts.packed[key]
    for block, offset in zip(blocks, offsets, strict=True):
        block.offset = offset
    return _end(blocks)


def _end(blocks: Sequence[Block]) -> int:
    """Bytes of all blocks together."""
    return max((block.offset + block.nbytes for block in blocks), default=0)


class _Placed:
    """Blocks that have a place, found again by the time at which they are needed.

    Blocks needed for short are kept by stretch of time; the few others are compared with each block.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        count = len(blocks)
        self.stop, self.low, self.high = (np.zeros(count, np.int64) for _ in range(3))
        self.start = np.full(count, np.iinfo(np.int64).max)  # not placed: beside nothing
        self.by_stretch: dict[int, _Numbers] = {}
        self.long = _Numbers()

    def add(self, number: int, block: Block) -> None:
        """Take a block that has been placed."""
        self.start[number], self.stop[number] = block.start, block.stop
        self.low[number], self.high[number] = block.offset, block.offset + block.nbytes
        stretches = _stretches(block)
        if len(stretches) > _LONG:
            self.long.append(number)
            return
        for stretch in stretches:
            self.by_stretch.setdefault(stretch, _Numbers()).append(number)

    def beside(self, block: Block) -> tuple[Places, Places]:
        """Begin and end in memory of the blocks that are needed at the same time; some of them repeatedly."""
        stretches = _stretches(block)
        if len(stretches) > _LONG:
            together = (self.start <= block.stop) & (block.start <= self.stop)
            return self.low[together], self.high[together]
        near = [self.by_stretch[s].all for s in stretches if s in self.by_stretch]
        numbers = np.concatenate([self.long.all, *near])
        numbers = numbers[(self.start[numbers] <= block.stop) & (block.start <= self.stop[numbers])]
        return self.low[numbers], self.high[numbers]


class _Numbers:
    """A row of numbers that grows, as an array."""

    __slots__ = ("_count", "_room")

    def __init__(self) -> None:
        self._room, self._count = np.empty(16, np.int64), 0

    @property
    def all(self) -> Places:
        """The numbers so far."""
        return self._room[: self._count]

    def append(self, number: int) -> None:
        """Put one more behind the others."""
        if self._count == len(self._room):
            self._room = np.concatenate([self._room, np.empty_like(self._room)])
        self._room[self._count] = number
        self._count += 1


def _stretches(block: Block) -> range:
    return range(block.start // _STRETCH, block.stop // _STRETCH + 1)


def _gap(nbytes: int, low: Places, high: Places) -> int:
    """Offset of the smallest gap between blocks that so many bytes fit into, else that behind them all."""
    if not len(low):
        return 0
    order = np.argsort(low, kind="stable")
    ends = np.maximum.accumulate(high[order])
    begins = np.concatenate(([0], ends[:-1]))
    gaps = low[order] - begins
    fitting = np.flatnonzero(gaps >= nbytes)
    return int(begins[fitting[gaps[fitting].argmin()]]) if len(fitting) else int(ends[-1])
