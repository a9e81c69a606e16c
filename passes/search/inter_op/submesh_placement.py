"""Submesh placement: the sub-meshes that pools of equal machines offer, and the devices of each stage.

*In:* pools, the number of devices that each stage uses of each pool. *Out:* device numbers by stage.
*Invariant:* a stage that needs at most the devices of one machine is in one machine; a larger stage has whole
machines, adjacent ones if there are any.

Stages are placed in the order of the pipeline if each then starts at a multiple of its size in its machine,
so that consecutive stages are adjacent. Otherwise larger stages are placed first, and equal ones in the order
of the pipeline (Zheng et al., Alpa, OSDI 2022, section 5.2). This always succeeds if every size divides the
next larger one and the size of the machines, and the pool has enough devices: the free devices of a machine
remain a multiple of the size that is placed (appendix A for powers of two). Other sizes are packed by search.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from distgraph.errors import ResourceError


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal machines.

    Attributes:
        name: name of the pool in messages.
        machines: device numbers of each machine, all of one length.

    Raises:
        ResourceError: there are no machines, or their sizes differ.
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
    """The number of devices of each pool that a stage uses; several pools if it spans unequal devices."""

    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of devices."""
        return sum(self.sizes)

    def __str__(self) -> str:
        return " + ".join(f"{n} of pool {i}" for i, n in enumerate(self.sizes) if n)


def pool_sizes(pool: Pool, machines: Iterable[int] | None = None) -> tuple[int, ...]:
    """Sizes of the sub-meshes of a pool: the divisors of a machine, and numbers of whole machines.

    Args:
        pool: the pool.
        machines: allowed numbers of whole machines, in addition to one; None for any number.

    Example:
        >>> pool_sizes(Pool.grid("a", 3, 6))
        (1, 2, 3, 6, 12, 18)
    """
    inside = [n for n in range(1, pool.machine + 1) if pool.machine % n == 0]
    counts = range(2, len(pool.machines) + 1) if machines is None else sorted(set(machines) - {1})
    return (*inside, *(n * pool.machine for n in counts if n <= len(pool.machines)))


def submeshes(pools: Sequence[Pool], machines: Iterable[int] | None = None) -> tuple[SubMesh, ...]:
    """Sub-meshes inside one pool each, see `pool_sizes`."""
    counts = None if machines is None else tuple(machines)
    return tuple(
        SubMesh(tuple(size if j == i else 0 for j in range(len(pools))))
        for i, pool in enumerate(pools)
        for size in pool_sizes(pool, counts)
    )


def spanning(pools: Sequence[Pool]) -> tuple[SubMesh, ...]:
    """Sub-meshes that span several pools: all of their machines, or the same fraction of each.

    Example:
        >>> [str(s) for s in spanning([Pool.grid("a", 2, 8), Pool.grid("b", 2, 4, 16)])]
        ['16 of pool 0 + 8 of pool 1', '8 of pool 0 + 4 of pool 1']
    """
    spans = []
    for count in range(2, len(pools) + 1):
        for chosen in combinations(range(len(pools)), count):
            most = math.gcd(*(len(pools[i].machines) for i in chosen))
            for parts in (n for n in range(1, most + 1) if most % n == 0):
                sizes = (pool.size // parts if i in chosen else 0 for i, pool in enumerate(pools))
                spans.append(SubMesh(tuple(sizes)))
    return tuple(spans)


def chains(sizes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """The largest sets of sizes in which each divides the next.

    Example:
        >>> chains([1, 2, 3, 6])
        ((1, 2, 6), (1, 3, 6))
    """
    ordered = sorted(set(sizes))
    complete: list[tuple[int, ...]] = []

    def grow(chain: tuple[int, ...], rest: list[int]) -> None:
        after = [n for n in rest if not chain or n % chain[-1] == 0]
        least = [n for n in after if not any(n != d and n % d == 0 for d in after)]
        if not after:
            complete.append(chain)
        for n in least:
            grow((*chain, n), [x for x in after if x > n])

    grow((), ordered)
    return tuple(complete)


def place(pools: Sequence[Pool], stages: Sequence[SubMesh]) -> tuple[tuple[int, ...], ...] | None:
    """Device numbers of every stage; None if the stages cannot be placed.

    Args:
        pools: the pools.
        stages: sub-meshes in the order of the pipeline; sizes above that of a machine are whole machines.

    Example:
        >>> place([Pool.grid("a", 2, 4)], [SubMesh((2,)), SubMesh((4,)), SubMesh((2,))])
        ((4, 5), (0, 1, 2, 3), (6, 7))
    """
    devices: list[list[int]] = [[] for _ in stages]
    for number, pool in enumerate(pools):
        sizes = [stage.sizes[number] for stage in stages]
        placed = _place(pool, sizes)
        if placed is None:
            return None
        for of_stage, more in zip(devices, placed, strict=True):
            of_stage += more
    return tuple(tuple(of_stage) for of_stage in devices)


def _place(pool: Pool, sizes: Sequence[int]) -> list[list[int]] | None:
    """Device numbers of every stage in one pool."""
    return _in_order(pool, sizes) or _by_size(pool, sizes)


def _in_order(pool: Pool, sizes: Sequence[int]) -> list[list[int]] | None:
    """Stages in order; None if one would not start at a multiple of its size, or would span two machines."""
    devices = [d for machine in pool.machines for d in machine]
    placed, start = [], 0
    for size in sizes:
        inside = start % pool.machine
        fits = inside % size == 0 and inside + size <= pool.machine if 0 < size < pool.machine else not inside
        if size and (not fits or start + size > pool.size or (size > pool.machine and size % pool.machine)):
            return None
        placed.append(devices[start : start + size])
        start += size
    return placed


def _by_size(pool: Pool, sizes: Sequence[int]) -> list[list[int]] | None:
    """The largest stages first, equal ones in order."""
    placed: list[list[int]] = [[] for _ in sizes]
    machine, used = pool.machine, 0
    large = sorted((i for i, n in enumerate(sizes) if n >= machine), key=lambda i: -sizes[i])
    for i in large:
        count = sizes[i] // machine
        if sizes[i] % machine or used + count > len(pool.machines):
            return None
        placed[i] = [d for devices in pool.machines[used : used + count] for d in devices]
        used += count
    small = sorted((i for i, n in enumerate(sizes) if 0 < n < machine), key=lambda i: -sizes[i])
    free = [machine] * (len(pool.machines) - used)
    packed = _pack([sizes[i] for i in small], free)
    if packed is None:
        return None
    used_in = [0] * len(free)
    for i, number in zip(small, packed, strict=True):
        placed[i] = list(pool.machines[used + number][used_in[number] : used_in[number] + sizes[i]])
        used_in[number] += sizes[i]
    return placed


def _pack(sizes: Sequence[int], free: list[int]) -> list[int] | None:
    """Machine of each size (descending): first fit, else depth-first search over different remainders."""
    if sum(sizes) > sum(free):
        return None
    left, machines = list(free), []
    for size in sizes:
        machine = next((i for i, room in enumerate(left) if room >= size), None)
        if machine is None:
            divides = all(a % b == 0 for a, b in pairwise(sizes))
            return None if divides and all(room % sizes[0] == 0 for room in free) else _search(sizes, free)
        left[machine] -= size
        machines.append(machine)
    return machines


def _search(sizes: Sequence[int], free: list[int]) -> list[int] | None:
    """Machine of each size by depth-first search; equal remainders are tried once."""
    dead: set[tuple[int, tuple[int, ...]]] = set()
    left: list[int] = list(free)
    machines: list[int] = []

    def descend(number: int) -> bool:
        if number == len(sizes):
            return True
        state = (number, tuple(sorted(left)))
        if state in dead:
            return False
        for room in sorted({r for r in left if r >= sizes[number]}):
            machine = left.index(room)
            left[machine] -= sizes[number]
            machines.append(machine)
            if descend(number + 1):
                return True
            left[machine] += sizes[number]
            machines.pop()
        dead.add(state)
        return False

    return machines if descend(0) else None
