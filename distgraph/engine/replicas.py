"""Comparison of replicas on several ranks, which notices that ranks compute or store different values.

Replicated parameters and states are computed by every rank that stores them, from the same numbers in the
same order, so their bits are equal on devices of one type. Ranks exchange a checksum of 64 bits for each
block that has a replica. Devices of different types round differently: between them the norms of the blocks
and a sum with fixed weights are compared, with a relative tolerance of the square root of the unit roundoff.
That notices wrong numbers, but not a wrong bit of low order.

A difference says which ranks disagree, not why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from distgraph.engine.parameter_store import Memory, Record
from distgraph.ir.dtypes import epsilon, short
from distgraph.runtime.execute.process_group import World

_MOST_SHOWN = 4
CAUSES = (
    "possible causes are other data or starting values on some ranks, libraries or processors that round "
    "differently, and a faulty device; load a checkpoint of before, give every rank the same data and "
    "software, and take out a device whose rank differs again"
)
"""What may be behind a difference, and the way out."""
Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """A block in few numbers.

    Attributes:
        checksum: of its bytes.
        size: number of its elements.
        total: sum of x[i] * cos(i) over the flat block x, in f64.
        norm: root of the sum of squares, in f64.
        roundoff: unit roundoff of its dtype; 0, as the two sums, for other numbers than floats, and where
            only checksums are compared.
    """

    checksum: int
    size: int
    total: float = 0.0
    norm: float = 0.0
    roundoff: float = 0.0

    def agrees(self, other: Summary) -> bool:
        """Whether two blocks may differ by rounding alone."""
        if self.checksum == other.checksum or not self.roundoff:
            return self.checksum == other.checksum
        limit = math.sqrt(self.roundoff) * max(self.norm, other.norm)  # of the norm of the difference
        totals = abs(self.total - other.total)
        return abs(self.norm - other.norm) <= limit and totals <= limit * math.sqrt(self.size)


def replicas(records: Mapping[str, Record]) -> dict[str, list[tuple[int, ...]]]:
    """Name of a parameter or state -> groups of several ranks that store the same block of it."""
    groups_of: dict[str, list[tuple[int, ...]]] = {}
    for name, record in records.items():
        holders: dict[Bounds, list[int]] = {}
        mesh, spec = record.attr.mesh, record.attr.spec
        for rank in mesh.members:
            holders.setdefault(tuple(spec.bounds(record.shape, mesh, rank)), []).append(rank)
        groups = [tuple(sorted(ranks)) for ranks in holders.values() if len(ranks) > 1]
        if groups:
            groups_of[name] = groups
    return groups_of


def different_replicas(memory: Memory, world: World, types: Sequence[str]) -> str:
    """Text of the differences between ranks that store the same block; "" if there are none. Collective.

    Args:
        memory: the blocks.
        world: all ranks.
        types: type of the device of every rank.
    """
    replicated, mixed = replicas(memory.records), len(set(types)) > 1

    def work(rank: int) -> dict[str, Summary]:
        return {
            name: _summary(memory.block(name, rank), mixed)
            for name, groups in replicated.items()
            if any(rank in group for group in groups)
        }

    summaries = world.gather(world.run(work))
    differ = [
        (name, part)
        for name, groups in replicated.items()
        for group in groups
        for part in _of_one_type(group, types)
        if len({summaries[rank][name].checksum for rank in part}) > 1
    ]
    if not differ:
        return _between_types(memory, replicated, summaries, types)
    sums = {rank: {name: s.checksum for name, s in of.items()} for rank, of in summaries.items()}
    name, group = differ[0]
    names = [f"{memory.records[each].kind} {each}" for each in dict.fromkeys(each for each, _ in differ)]
    others_text = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return (
        f"copies of {', '.join(names[:_MOST_SHOWN])}{others_text} differ between ranks: "
        f"{_parties(sums, name, group)}"
    )


def _of_one_type(group: Sequence[int], types: Sequence[str]) -> list[tuple[int, ...]]:
    """The ranks of a group by the type of their devices."""
    parts: dict[str, list[int]] = {}
    for rank in group:
        parts.setdefault(types[rank], []).append(rank)
    return [tuple(part) for part in parts.values()]


def _between_types(
    memory: Memory,
    replicated: Mapping[str, Sequence[tuple[int, ...]]],
    summaries: Mapping[int, Mapping[str, Summary]],
    types: Sequence[str],
) -> str:
    """Text of a difference between the replicas of different types of devices, each of which agrees."""
    for name, groups in replicated.items():
        for group in groups:
            first, *others = (part[0] for part in _of_one_type(group, types))
            for other in others:
                if not summaries[first][name].agrees(summaries[other][name]):
                    kind = memory.records[name].kind
                    return (
                        f"copies of {kind} {name} differ between rank {first} ({types[first]}) and rank "
                        f"{other} ({types[other]}) by more than rounding"
                    )
    return ""


def _parties(sums: Mapping[int, Mapping[str, int]], name: str, group: tuple[int, ...]) -> str:
    """Text that names the ranks with different checksums, and the majority where there is one."""
    parties: dict[int, list[int]] = {}
    for rank in group:
        parties.setdefault(sums[rank][name], []).append(rank)
    ordered = sorted(parties.values(), key=len, reverse=True)
    if 2 * len(ordered[0]) > len(group):
        wrong = sorted(rank for party in ordered[1:] for rank in party)
        return f"{_ranks(wrong)} against {_ranks(ordered[0])}, the majority"
    return f"{' against '.join(map(_ranks, sorted(ordered)))}, without a majority that could be right"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _summary(block: np.ndarray, mixed: bool) -> Summary:
    """A block in few numbers; the checksum alone where all ranks have devices of one type."""
    flat = np.ascontiguousarray(block).reshape(-1)
    checksum = xxh3_64_intdigest(flat.view(np.uint8).data)
    roundoff = epsilon(short(flat.dtype)) if mixed else 0.0
    if not roundoff:
        return Summary(checksum, flat.size)
    wide = flat.astype(np.float64)
    total = float(wide @ np.cos(np.arange(flat.size)))
    return Summary(checksum, flat.size, total, float(np.linalg.norm(wide)), roundoff)
