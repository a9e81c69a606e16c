"""What may be chosen on a cluster: pools of equal machines, shapes of a stage's mesh, micro-batch counts.

*In:* a cluster, the size of a batch, constraints. *Out:* `Pool`s, `Shape`s, numbers. *Invariant:*
deterministic; all devices that may be used are always among the sub-meshes, one device too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import numpy as np

from distgraph.errors import ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.search.inter_op.submesh_placement import Pool, SubMesh, place, spanning, submeshes
from distgraph.plan.constraints import SearchConstraints
from distgraph.resources import Cluster
from distgraph.resources.units import SIZE, parse

_DATA, _TENSOR = "dp", "tp"
_WIDEST = 8
"""Devices of a machine along the inner axis where machines have more: wider ones are tried as one axis."""
_MOST_SHARES = 4
"""Pools of more machines give a stage a divisor of their number, or a part of a prime number."""
FEW_COUNTS = 8
"""Where there are no more micro-batch counts than these, all are tried, in all shapes."""
_MOST_DIVISORS = 8
"""Of more of these, some are left out."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A logical mesh for a stage.

    Attributes:
        axes: name and size of every axis, major to minor; the minor one lies inside machines where it fits.
        samples: of a micro-batch, for each position along the major axis; none where all have equally many.
    """

    axes: tuple[tuple[str, int], ...]
    samples: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Ranks."""
        return int(np.prod([size for _, size in self.axes]))

    def mesh(self, start: int = 0) -> ProcessMesh:
        """A mesh of this shape on consecutive ranks; always the same object."""
        return _mesh(self, start)

    @property
    def parts_of_batch(self) -> int:
        """Ranks along the axis of the batch."""
        return dict(self.axes).get(_DATA, 1)

    def has(self, axes: Collection[str]) -> bool:
        """Whether each of these axes has more than one rank."""
        wide = {name for name, size in self.axes if size > 1}
        return wide.issuperset(axes)

    def __str__(self) -> str:
        sizes = [f"{name}={size}" for name, size in self.axes]
        if self.samples:
            runs = (f"{len(list(run))} of {size}" for size, run in groupby(self.samples))
            sizes[0] += f" ({', '.join(runs)} samples)"
        return " x ".join(sizes)


@lru_cache(maxsize=4096)
def _mesh(shape: Shape, start: int) -> ProcessMesh:
    names = [name for name, _ in shape.axes]
    ranks = np.arange(start, start + shape.size).reshape([size for _, size in shape.axes])
    return ProcessMesh(ranks, names, {names[0]: shape.samples} if shape.samples else None)


def with_memory(cluster: Cluster, constraints: SearchConstraints) -> Cluster:
    """The cluster with no more memory in a device than constraints allow.

    Raises:
        ShardingError: the memory is no size, as "8" without a unit.
    """
    memory = constraints.memory
    if memory is None:
        return cluster
    try:
        limit = parse(memory, SIZE) if isinstance(memory, str) else float(memory)
    except ValueError as error:
        raise ShardingError(f"memory of the search is {memory!r} but must be {error}") from None
    devices = (replace(device, memory=min(device.memory, limit)) for device in cluster.devices)
    return replace(cluster, devices=tuple(devices))


def check_constraints(constraints: SearchConstraints, size: int, layers: int, cluster: Cluster) -> None:
    """Refuse constraints that no plan of a program on a cluster keeps.

    Raises:
        ShardingError: names the constraint and what there is.
    """
    count, stages, available = constraints.micro_batches, constraints.stage_count, len(cluster.devices)
    if count is not None and size % count:
        parts = ", ".join(map(str, _divisors(size)))
        raise ShardingError(
            f"micro_batches of the search is {count} but a batch of {size} samples is cut into equal parts; "
            f"take one of {parts}"
        )
    if constraints.devices is not None and constraints.devices > available:
        raise ShardingError(
            f"devices of the search is {constraints.devices} but cluster {cluster.name} has {available}; "
            f"take fewer, or a larger cluster"
        )
    used = constraints.devices or available
    for limit, what in ((layers, "layers"), (used, "devices")):
        if stages is not None and stages > limit:
            raise ShardingError(
                f"stages of the search is {stages} but there are {limit} {what}; every stage has one or more"
            )
    for name in ("borders", "recompute"):
        given = getattr(constraints, name)
        if isinstance(given, tuple) and given and max(given) >= layers:
            raise ShardingError(
                f"{name} of the search names layer {max(given)} but the program has layers 0 to "
                f"{layers - 1}; distgraph plan prints them"
            )


def pools_of(cluster: Cluster, count: int | None = None) -> tuple[Pool, ...]:
    """Devices of one type and model in machines that have equally many of them.

    Args:
        cluster: any, also one whose machines hold devices of different types.
        count: only this number of devices, the first ones; None for all.
    """
    pools: dict[tuple[str, str, float, int], list[tuple[int, ...]]] = {}
    last = len(cluster.devices) if count is None else count
    for machine in cluster.machines:
        kinds: dict[tuple[str, str, float], list[int]] = {}
        for device in (cluster.devices[number] for number in machine.devices if number < last):
            kinds.setdefault((device.type, device.model, device.memory), []).append(device.index)
        for kind, devices in kinds.items():
            pools.setdefault((*kind, len(devices)), []).append(tuple(devices))
    return tuple(Pool(key[1] or key[0], tuple(machines)) for key, machines in pools.items())


def submeshes_of(pools: Sequence[Pool]) -> tuple[SubMesh, ...]:
    """What a stage may take: divisors of a machine, numbers of machines, and machines of several pools."""
    counts: set[int] = set()
    for pool in pools:
        machines = len(pool.machines)
        every = range(2, machines + 1)
        counts |= set(every) if machines <= _MOST_SHARES else set(_shares(machines))
    return (*submeshes(pools, sorted(counts)), *spanning(pools))


def _shares(machines: int) -> tuple[int, ...]:
    """Divisors of a number of machines from 2 up: all of few, of many those at least twice apart, and it.

    A prime number has two and three nearly equal parts, of which a pipeline of all machines is made.

    Example:
        >>> _shares(12), _shares(384), _shares(11)
        ((2, 3, 4, 6, 12), (2, 4, 8, 16, 32, 64, 128, 384), (3, 4, 5, 6, 11))
    """
    divisors = [n for n in range(2, machines + 1) if machines % n == 0]
    if divisors == [machines]:
        parts = {part for count in (2, 3) for part in (machines // count, -(-machines // count))}
        return (*sorted(part for part in parts if part > 1), machines)
    if len(divisors) <= _MOST_DIVISORS:
        return tuple(divisors)
    spread = [divisors[0]]
    for number in divisors[1:]:
        if number >= 2 * spread[-1]:
            spread.append(number)
    return tuple(dict.fromkeys((*spread, machines)))


def shapes_of(
    pool: Pool, size: int, named: Collection[str] = (), *, tensor_alone: bool = False
) -> tuple[Shape, ...]:
    """Logical meshes of one and two axes for `size` devices of a pool.

    One axis is one that any op may use for anything. Of two, the major one is called dp and the minor one tp,
    after what they mostly turn out to be; no op is bound by these names, unless annotations name axes: then
    every shape has these, and a machine may be one axis tp. It may where that axis is to stand alone for what
    does not split the batch (`tensor_alone`), too.

    Example:
        >>> [str(shape) for shape in shapes_of(Pool.grid("a", 2, 4), 8)]
        ['dp=8', 'dp=2 x tp=4', 'dp=4 x tp=2']
        >>> [str(shape) for shape in shapes_of(Pool.grid("a", 2, 4), 4, ["tp"])]
        ['dp=2 x tp=2', 'tp=4']
    """
    inner = min(size, pool.machine)
    minors = [
        n for n in range(2, min(inner, max(_WIDEST, 1)) + 1) if size % n == 0 and inner % n == 0 and n < size
    ]
    shapes = [Shape(((_DATA, size),)), *(Shape(((_DATA, size // n), (_TENSOR, n))) for n in reversed(minors))]
    if (named or tensor_alone) and 1 < size <= pool.machine:
        shapes.append(Shape(((_TENSOR, size),)))
    return tuple(shape for shape in shapes if shape.has(named))


def check_axes(axes: Mapping[str, str]) -> None:
    """Refuse axes of annotations that no mesh of the search has.

    Args:
        axes: name -> where an annotation without a mesh names it.

    Raises:
        ShardingError: names the axis and those that there are.
    """
    unknown = next((axis for axis in axes if axis not in (_DATA, _TENSOR)), None)
    if unknown is not None:
        raise ShardingError(
            f"annotation ({axes[unknown]}) names axis {unknown!r} but the meshes that mode auto makes have "
            f"the axes {_DATA} and {_TENSOR}; use these, or give the annotation a mesh"
        )


def devices_for(pools: Sequence[Pool], submesh: SubMesh) -> tuple[int, ...]:
    """Devices that a stage of this size would have, were it alone."""
    placed = place(pools, [submesh])
    assert placed is not None  # sub-meshes come from the pools
    return placed[0]


def micro_batch_counts(size: int) -> tuple[int, ...]:
    """Numbers of micro-batches that divide a batch: all of few, of many those about twice apart; falling.

    Example:
        >>> micro_batch_counts(12), micro_batch_counts(1024)[:4]
        ((12, 6, 4, 3, 2, 1), (1024, 512, 256, 128))
    """
    divisors = _divisors(size)
    return tuple(divisors if len(divisors) <= _MOST_DIVISORS else _spread(divisors))


def adjacent_counts(size: int, count: int) -> tuple[int, ...]:
    """The next numbers of micro-batches above and below one that divide a batch, where there are any.

    Example:
        >>> adjacent_counts(1536, 48), adjacent_counts(1024, 1024)
        ((64, 32), (512,))
    """
    divisors = _divisors(size)
    index = divisors.index(count)
    return divisors[max(0, index - 1) : index] + divisors[index + 1 : index + 2]


def _divisors(size: int) -> tuple[int, ...]:
    """All of them, falling."""
    return tuple(n for n in range(size, 0, -1) if size % n == 0)


def _spread(falling: Iterable[int]) -> Iterable[int]:
    last = 0
    for number in falling:
        if not last or number * 2 <= last or number == 1:
            last = number
            yield number
