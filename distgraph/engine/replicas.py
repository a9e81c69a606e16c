"""Comparison of replicas on several ranks, which finds devices that compute or store wrong values.

Replicated parameters and states are computed by every rank that stores them, from the same numbers in the
same order, so their bits are equal. Ranks exchange a checksum of 64 bits for each block that has a replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from xxhash import xxh3_64_intdigest

from distgraph.engine.parameter_store import Memory, Record
from distgraph.runtime.execute.process_group import World

_MOST_SHOWN = 4
Bounds = tuple[tuple[int, int], ...]


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


def different_replicas(memory: Memory, world: World) -> str:
    """Text of the differences between ranks that store the same block; "" if there are none. Collective."""
    replicated = replicas(memory.records)

    def work(rank: int) -> dict[str, int]:
        return {
            name: _checksum(memory.block(name, rank))
            for name, groups in replicated.items()
            if any(rank in group for group in groups)
        }

    sums = world.gather(world.run(work))
    differ = [
        (name, group)
        for name, groups in replicated.items()
        for group in groups
        if len({sums[rank][name] for rank in group}) > 1
    ]
    if not differ:
        return ""
    name, group = differ[0]
    names = [f"{memory.records[each].kind} {each}" for each in dict.fromkeys(each for each, _ in differ)]
    others_text = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return (
        f"copies of {', '.join(names[:_MOST_SHOWN])}{others_text} differ between ranks: "
        f"{_parties(sums, name, group)}"
    )


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


def _checksum(block: np.ndarray) -> int:
    return xxh3_64_intdigest(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
