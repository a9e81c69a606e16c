"""Layer clustering: a sequence of ops is split into contiguous parts with least traffic and uniform cost.

*In:* cost of every op, the values that pass between ops. *Out:* the positions of the cuts. *Invariant:* the
result is exact. No part costs more than the limit: (1 + delta) times the mean, or the least limit that some
partition satisfies, if that is larger.

Alpa (Zheng et al., OSDI 2022), section 5.2, "operator clustering"; the programme is written out in
`distgraph.passes.search.layering.layer_sequence`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from distgraph.ir.float_arrays import Floats

Read = tuple[int, tuple[int, ...], float]
"""A value: position of the op that produces it, ascending positions of the ops that read it, its bytes."""

_TIE = 1e-12  # relative difference below which two sums are equal


def balanced_cuts(
    cost: Sequence[float] | Floats,
    reads: Iterable[Read],
    count: int,
    delta: float,
    penalty: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Cuts of a sequence into `count` parts: least maximum traffic first, then most uniform cost.

    Args:
        cost: FLOP of each op (at least 0).
        reads: the values that pass between ops.
        count: parts, from 1 to the number of ops.
        delta: a part costs at most (1 + delta) times the mean.
        penalty: penalty of a cut before each op, which breaks ties.

    Returns:
        Start of every part but the first.
    """
    weights = np.asarray(cost, dtype=np.float64)
    total = np.concatenate([[0.0], np.cumsum(weights)])
    limit = max((1 + delta) * float(total[-1]) / count, _least_limit(total, count))
    last_reads = _last_reads(len(weights), reads)
    most = _least_traffic(total, last_reads, count, limit)
    return _most_uniform(total, last_reads, count, limit, most, penalty or [0.0] * len(weights))


def _least_limit(total: Floats, count: int) -> float:
    """Least possible maximum cost of a part over all partitions into at most `count` parts."""

    def parts(limit: float) -> tuple[int, float]:
        start, number, largest = 0, 0, 0.0
        while start < len(total) - 1 and number <= count:
            stop = int(np.searchsorted(total, total[start] + limit, side="right")) - 1
            if stop <= start:
                return count + 1, limit
            largest = max(largest, float(total[stop] - total[start]))
            start, number = stop, number + 1
        return number, largest

    low, high = float(total[-1]) / count, float(total[-1])
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            return high
        number, largest = parts(middle)
        low, high = (middle, high) if number > count else (low, min(middle, largest))


def _last_reads(size: int, reads: Iterable[Read]) -> list[list[tuple[int, int, float]]]:
    """For each op and value that it reads: (producer, position of the previous read, bytes)."""
    last_reads: list[list[tuple[int, int, float]]] = [[] for _ in range(size)]
    for producer, readers, nbytes in reads:
        before = producer
        for reader in readers:
            last_reads[reader].append((producer, before, nbytes))
            before = reader
    return last_reads


def _windows(
    total: Floats, last_reads: list[list[tuple[int, int, float]]], limit: float
) -> Iterator[tuple[int, int, Floats]]:
    """(k, low, C) for every end k (exclusive) of a part: a part from low + j to k reads C[j] bytes."""
    traffic = np.zeros(len(total) - 1)
    allowed = limit + _TIE * float(total[-1])
    for k, reads in enumerate(last_reads):
        for _, before, nbytes in reads:
            # a part that starts after the producer and includes an earlier reader has counted the value
            traffic[before + 1 : k + 1] += nbytes
        low = int(np.searchsorted(total, total[k + 1] - allowed, side="left"))
        low = min(low, k)
        yield k + 1, low, traffic[low : k + 1]


def _least_traffic(
    total: Floats, last_reads: list[list[tuple[int, int, float]]], count: int, limit: float
) -> float:
    """G(K, L)."""
    best = np.full((len(total), count + 1), np.inf)
    best[0, 0] = 0.0
    for k, low, traffic in _windows(total, last_reads, limit):
        best[k, 1:] = np.maximum(best[low:k, :-1], traffic[:, None]).min(axis=0)
    return float(best[-1, count])


def _most_uniform(
    total: Floats,
    last_reads: list[list[tuple[int, int, float]]],
    count: int,
    limit: float,
    most: float,
    penalty: Sequence[float],
) -> tuple[int, ...]:
    """Cuts of the partition with the least V(K, L) and, among those, the least penalty."""
    scale = max(float(total[-1]) / count, np.finfo(np.float64).tiny)
    shape = (len(total), count + 1)
    squares, ties, start = np.full(shape, np.inf), np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
    squares[0, 0] = ties[0, 0] = 0.0
    penalties = np.array([0.0, *penalty[1:]])
    for k, low, traffic in _windows(total, last_reads, limit):
        cost = ((total[k] - total[low:k]) / scale) ** 2
        sums = np.where(traffic <= most, cost, np.inf)[:, None] + squares[low:k, :-1]
        least = sums.min(axis=0)
        tied = np.where(sums <= least * (1 + _TIE), ties[low:k, :-1] + penalties[low:k, None], np.inf)
        chosen = tied.argmin(axis=0)
        columns = np.arange(count)
        squares[k, 1:], ties[k, 1:] = sums[chosen, columns], tied[chosen, columns]
        start[k, 1:] = chosen + low
    cuts, k = [], len(total) - 1
    for parts in range(count, 1, -1):
        k = int(start[k, parts])
        cuts.append(k)
    return tuple(reversed(cuts))
