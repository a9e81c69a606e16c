"""Which numbers of micro-batches are tried, in which order.

*In:* the numbers there are, the best row of stages for each that was tried. *Out:* the next one. *Invariant:*
none comes twice; where there are few, all come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from distgraph.engine.search.candidate import Proposal

_ROUNDS = 4  # micro-batches a stage of the longest pipeline, about which the search begins
FEW = 8
"""Numbers of micro-batches that are all tried, in all shapes."""


def best_count(rows: Mapping[int, Proposal]) -> int:
    """Micro-batches of the best row by estimate."""
    return min(rows, key=lambda m: rows[m].estimate)


def least(rows: Mapping[int, Proposal]) -> float:
    """Seconds of the best row by estimate; infinite without any."""
    return min((row.estimate for row in rows.values()), default=math.inf)


def climb(
    counts: Sequence[int], stages: int, rows: Mapping[int, Proposal], expired: Callable[[], bool]
) -> Iterator[int]:
    """Numbers of micro-batches, towards that of the best row.

    From four times as many as a pipeline may have stages on, with which the longest one stands still for
    a fifth of a step; where nothing fits there, from the next smaller micro-batches that do. From there to
    more, else to fewer, in growing strides as long as that is better; last to what lies beside the best. Then
    all others, where there are few: a pipeline likes many, what is no pipeline few, and both may be best of
    their kind.

    Args:
        counts: falling.
        stages: of the longest pipeline.
        rows: by micro-batches; whoever tries a number adds its row before asking for the next.
        expired: whether only a first row is still wanted.
    """
    start = min(range(len(counts)), key=lambda i: abs(math.log(counts[i] / (_ROUNDS * stages))))
    tried: set[int] = set()
    order = [*range(start, -1, -1), *range(start + 1, len(counts))]
    for number in order:
        tried.add(number)
        yield counts[number]
        if rows or expired():
            break
    stride = {-1: 1, 1: 1}  # towards more, towards fewer
    while rows and not expired():
        at, before = counts.index(best_count(rows)), least(rows)
        near = [(way, at + way * size) for way in stride for size in (stride[way], 1)]
        ahead = [(way, n) for way, n in near if 0 <= n < len(counts) and n not in tried]
        if not ahead:
            break
        way, number = ahead[0]
        tried.add(number)
        yield counts[number]
        stride[way] = 2 * stride[way] if least(rows) < before else 1
    for number in order if len(counts) <= FEW else ():
        if expired():
            return
        if number not in tried:
            tried.add(number)
            yield counts[number]
