"""Which devices a stage gets: sub-meshes that a pool of equal machines offers, and where chosen ones lie.

*In:* pools, the devices that each stage takes of each pool. *Out:* device numbers by stage.
*Invariant:* a stage that takes no more devices than a machine has lies in one machine; one that takes more
takes whole machines, next to each other where there are such.

Stages lie one after the other where each then starts at a multiple of its size in its machine, so that
neighbours in the pipeline are neighbours. Otherwise the larger ones are placed first, equal ones in the order
of the pipeline (Zheng et al., Alpa, OSDI 2022, section 5.2). Where every size divides the next larger one and
the size of the machines this always succeeds while the sum is not above the devices of the pool: what is free
in a machine stays a multiple of the size that is placed (appendix A for powers of two). Other sizes are
packed by search.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from distgraph.errors import ResourceError

__all__ = ["Pool", "SubMesh", "chains", "place", "pool_sizes", "spanning", "submeshes"]


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal machines.

    Attributes:
        name: for people.
        machines: device numbers of each, all of one length.

    Raises:
        ResourceError: there are none, or their sizes differ.
    """

    name: str
    machines: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        sizes = {len(machine) for machine in self.machines}
        if len(sizes) != 1 or 0 in sizes:
            raise ResourceError(
                f"pool {self.name} has machines of {sorted(sizes)} devices; make a pool of each size"
            )

    @classmethod
    def grid(cls, name: str, machines: int, devices: int, start: int = 0) -> Pool:
        """Machines with consecutive device numbers."""
        firsts = range(start, start + machines * devices, devices)
        return cls(name, tuple(tuple(range(first, first + devices)) for first in firsts))

    @property
    def machine(self) -> int:
        """Devices of a machine."""
        return len(self.machines[0])

    @property
    def size(self) -> int:
        """Devices of all machines."""
        return len(self.machines) * self.machine


@dataclass(frozen=True, slots=True)
class SubMesh:
    """Devices for a stage: how many of each pool; more than one pool where a stage spans unequal devices."""

    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Devices."""
        return sum(self.sizes)

    def __str__(self) -> str:
        return " + ".join(f"{n} of pool {i}" for i, n in enumerate(self.sizes) if n)


def pool_sizes(pool: Pool, machines: Iterable[int] | None = None) -> tuple[int, ...]:
    """Sizes of the sub-meshes of a pool: the divisors of a machine, and numbers of whole machines.

    Args:
        pool: the pool.
        machines: how many whole machines, beside one; None for any number.

    Example:
        >>> pool_sizes(Pool.grid("a", 3, 6))
        (1, 2, 3, 6, 12, 18)
    """
    inside = [n for n in range(1, pool.machine + 1) if pool.machine % n == 0]
    counts = range(2, len(pool.machines) + 1) if machines is None else sorted(set(machines) - {1})
    return (*inside, *(n * pool.machine for n in counts if n <= len(pool.machines)))


def submeshes(pools: Sequence[Pool], machines: Iterable[int] | None = None) -> tuple[SubMesh, ...]:
    """Sub-meshes that lie in one pool each, see `pool_sizes`."""
    counts = None if machines is None else tuple(machines)
    return tuple(
        SubMesh(tuple(size if j == i else 0 for j in range(len(pools))))
        for i, pool in enumerate(pools)
        for size in pool_sizes(pool, counts)
    )


def spanning(pools: Sequence[Pool]) -> tuple[SubMesh, ...]:
    """Sub-meshes across pools: some pools whole, or equal fractions of them in whole machines.

    Example:
        >>> [str(s) for s in spanning([Pool.grid("a", 2, 8), Pool.grid("b", 2, 4, 16)])]
        ['16 of pool 0 + 8 of pool 1', '8 of pool 0 + 4 of pool 1']
    """
    found = []
    for count in range(2, len(pools) + 1):
        for chosen in combinations(range(len(pools)), count):
            most = math.gcd(*(len(pools[i].machines) for i in chosen))
            for parts in (n for n in range(1, most + 1) if most % n == 0):
                sizes = (pool.size // parts if i in chosen else 0 for i, pool in enumerate(pools))
                found.append(SubMesh(tuple(sizes)))
    return tuple(found)


def chains(sizes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """The largest sets of sizes in which each divides the next.

    Example:
        >>> chains([1, 2, 3, 6])
        ((1, 2, 6), (1, 3, 6))
    """
    ordered = sorted(set(sizes))
    found: list[tuple[int, ...]] = []

    def grow(chain: tuple[int, ...], rest: list[int]) -> None:
        after = [n for n in rest if not chain or n % chain[-1] == 0]
        least = [n for n in after if not any(n != d and n % d == 0 for d in after)]
        if not after:
            found.append(chain)
        for n in least:
            grow((*chain, n), [x for x in after if x > n])

    grow((), ordered)
    return tuple(found)


def place(pools: Sequence[Pool], stages: Sequence[SubMesh]) -> tuple[tuple[int, ...], ...] | None:
    """Device numbers of every stage, machine by machine; None where the stages cannot be placed.

    Args:
        pools: see `Pool`.
        stages: sub-meshes in the order of the pipeline; sizes beyond a machine are whole machines.

    Example:
        >>> place([Pool.grid("a", 2, 4)], [SubMesh((2,)), SubMesh((4,)), SubMesh((2,))])
        ((4, 5), (0, 1, 2, 3), (6, 7))
    """
    devices: list[list[int]] = [[] for _ in stages]
    for number, pool in enumerate(pools):
        wanted = [stage.sizes[number] for stage in stages]
        found = _place(pool, wanted)
        if found is None:
            return None
        for own, more in zip(devices, found, strict=True):
            own += more
    return tuple(tuple(own) for own in devices)


def _place(pool: Pool, wanted: Sequence[int]) -> list[list[int]] | None:
    """Device numbers of every stage in one pool."""
    return _in_order(pool, wanted) or _by_size(pool, wanted)


def _in_order(pool: Pool, wanted: Sequence[int]) -> list[list[int]] | None:
    """One after the other; None where one would not start at a multiple of its size, or leave its machine."""
    devices = [d for machine in pool.machines for d in machine]
    found, start = [], 0
    for size in wanted:
        inside = start % pool.machine
        fits = inside % size == 0 and inside + size <= pool.machine if 0 < size < pool.machine else not inside
        if size and (not fits or start + size > pool.size or (size > pool.machine and size % pool.machine)):
            return None
        found.append(devices[start : start + size])
        start += size
    return found


def _by_size(pool: Pool, wanted: Sequence[int]) -> list[list[int]] | None:
    """The largest first, equal ones in order."""
    found: list[list[int]] = [[] for _ in wanted]
    machine, used = pool.machine, 0
    large = sorted((i for i, n in enumerate(wanted) if n >= machine), key=lambda i: -wanted[i])
    for i in large:
        count = wanted[i] // machine
        if wanted[i] % machine or used + count > len(pool.machines):
            return None
        found[i] = [d for row in pool.machines[used : used + count] for d in row]
        used += count
    small = sorted((i for i, n in enumerate(wanted) if 0 < n < machine), key=lambda i: -wanted[i])
    free = [machine] * (len(pool.machines) - used)
    packed = _pack([wanted[i] for i in small], free)
    if packed is None:
        return None
    taken = [0] * len(free)
    for i, at in zip(small, packed, strict=True):
        found[i] = list(pool.machines[used + at][taken[at] : taken[at] + wanted[i]])
        taken[at] += wanted[i]
    return found


def _pack(sizes: Sequence[int], free: list[int]) -> list[int] | None:
    """Machine of each size (falling): first fit, else depth-first search over machines that differ."""
    if sum(sizes) > sum(free):
        return None
    left, found = list(free), []
    for size in sizes:
        at = next((i for i, room in enumerate(left) if room >= size), None)
        if at is None:
            divides = all(a % b == 0 for a, b in pairwise(sizes))
            return None if divides and all(room % sizes[0] == 0 for room in free) else _search(sizes, free)
        left[at] -= size
        found.append(at)
    return found


def _search(sizes: Sequence[int], free: list[int]) -> list[int] | None:
    """Machine of each size by depth-first search; equal remainders are tried once."""
    dead: set[tuple[int, tuple[int, ...]]] = set()
    left, found = list(free), []

    def descend(number: int) -> bool:
        if number == len(sizes):
            return True
        state = (number, tuple(sorted(left)))
        if state in dead:
            return False
        for room in sorted({r for r in left if r >= sizes[number]}):
            at = left.index(room)
            left[at] -= sizes[number]
            found.append(at)
            if descend(number + 1):
                return True
            left[at] += sizes[number]
            found.pop()
        dead.add(state)
        return False

    return found if descend(0) else None
