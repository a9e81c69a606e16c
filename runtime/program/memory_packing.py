"""Packing blocks that are needed at different times into one piece of memory.

*In:* blocks, each with its bytes and the time it is needed. *Out:* an offset for each, and the total bytes.
*Invariant:* blocks that are needed at the same time do not overlap.

The problem is dynamic storage allocation, which is NP-hard. The largest blocks are placed first, each in the
smallest gap that fits between those that are needed at the same time (Pisarchyk and Lee, Efficient memory
management for deep neural net inference, 2020, section 5.2); for most programs the total equals the most
bytes that are needed at any time, which is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distgraph.passes.split_tasks import Parts

_INTERVAL, _LONG = 64, 8  # length of an interval of time; number of intervals above which a block is long
Offsets = NDArray[np.int64]


@dataclass(slots=True)
class Block:
    """Memory that is needed for some time.

    Attributes:
        nbytes: its size.
        start, stop: first and last time at which it is needed.
        offset: its first byte, once it is placed.
    """

    nbytes: int
    start: int
    stop: int
    offset: int = 0


def pack(blocks: Sequence[Block]) -> int:
    """Give every block its offset. Returns the total bytes.

    Example:
        >>> blocks = [Block(64, 0, 1), Block(128, 1, 2), Block(64, 2, 3), Block(64, 0, 0)]
        >>> pack(blocks), [block.offset for block in blocks]
        (192, [128, 0, 128, 0])
    """
    index = _BlockIndex(blocks)
    for number in sorted(range(len(blocks)), key=lambda i: (-blocks[i].nbytes, blocks[i].start)):
        block = blocks[number]
        block.offset = _gap(block.nbytes, *index.simultaneous(block))
        index.add(number, block)
    return _end(blocks)


def pack_once(parts: Parts, blocks: Sequence[Block]) -> int:
    """As `pack`, computed once for all ranks of a program whose blocks are equal."""
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
    """End of the last block in memory."""
    return max((block.offset + block.nbytes for block in blocks), default=0)


class _BlockIndex:
    """Index of the placed blocks by the time at which they are needed.

    Short blocks are listed by interval of time; the few long ones are compared with each block.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        count = len(blocks)
        self.stop, self.low, self.high = (np.zeros(count, np.int64) for _ in range(3))
        self.start = np.full(count, np.iinfo(np.int64).max)  # not placed: overlaps no time
        self.by_interval: dict[int, _Numbers] = {}
        self.long = _Numbers()

    def add(self, number: int, block: Block) -> None:
        """Add a block that has been placed."""
        self.start[number], self.stop[number] = block.start, block.stop
        self.low[number], self.high[number] = block.offset, block.offset + block.nbytes
        intervals = _intervals(block)
        if len(intervals) > _LONG:
            self.long.append(number)
            return
        for interval in intervals:
            self.by_interval.setdefault(interval, _Numbers()).append(number)

    def simultaneous(self, block: Block) -> tuple[Offsets, Offsets]:
        """Begins and ends of the placed blocks that are needed at the same time; some several times."""
        intervals = _intervals(block)
        if len(intervals) > _LONG:
            together = (self.start <= block.stop) & (block.start <= self.stop)
            return self.low[together], self.high[together]
        candidates = [self.by_interval[s].all for s in intervals if s in self.by_interval]
        numbers = np.concatenate([self.long.all, *candidates])
        numbers = numbers[(self.start[numbers] <= block.stop) & (block.start <= self.stop[numbers])]
        return self.low[numbers], self.high[numbers]


class _Numbers:
    """A growing array of numbers."""

    __slots__ = ("_count", "_memory")

    def __init__(self) -> None:
        self._memory, self._count = np.empty(16, np.int64), 0

    @property
    def all(self) -> Offsets:
        """The numbers so far."""
        return self._memory[: self._count]

    def append(self, number: int) -> None:
        """Append a number."""
        if self._count == len(self._memory):
            self._memory = np.concatenate([self._memory, np.empty_like(self._memory)])
        self._memory[self._count] = number
        self._count += 1


def _intervals(block: Block) -> range:
    return range(block.start // _INTERVAL, block.stop // _INTERVAL + 1)


def _gap(nbytes: int, low: Offsets, high: Offsets) -> int:
    """Offset of the smallest gap of at least `nbytes` between blocks, else the end of the last block."""
    if not len(low):
        return 0
    order = np.argsort(low, kind="stable")
    ends = np.maximum.accumulate(high[order])
    begins = np.concatenate(([0], ends[:-1]))
    gaps = low[order] - begins
    fitting = np.flatnonzero(gaps >= nbytes)
    return int(begins[fitting[gaps[fitting].argmin()]]) if len(fitting) else int(ends[-1])
