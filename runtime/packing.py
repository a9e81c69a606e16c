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

_STRETCH = 64  # times that are looked up together


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
    placed: dict[int, list[int]] = {}  # stretch of time -> numbers of the blocks that are needed in it
    for number in sorted(range(len(blocks)), key=lambda i: (-blocks[i].nbytes, blocks[i].start)):
        block = blocks[number]
        stretches = range(block.start // _STRETCH, block.stop // _STRETCH + 1)
        near = {other for stretch in stretches for other in placed.get(stretch, ())}
        block.offset = _gap(block, [blocks[other] for other in near])
        for stretch in stretches:
            placed.setdefault(stretch, []).append(number)
    return max((block.offset + block.nbytes for block in blocks), default=0)


def _gap(block: Block, placed: Sequence[Block]) -> int:
    """Offset of the smallest gap that a block fits into, else that behind all it must not overlap."""
    others = sorted(
        (other.offset, other.offset + other.nbytes)
        for other in placed
        if other.start <= block.stop and block.start <= other.stop
    )
    end, found, least = 0, -1, 0
    for low, high in others:
        if low - end >= block.nbytes and (found < 0 or low - end < least):
            found, least = end, low - end
        end = max(end, high)
    return end if found < 0 else found
