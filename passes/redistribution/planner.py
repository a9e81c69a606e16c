"""Redistribute: the cheapest sequence of collectives from one layout to another on the same mesh.

*In:* shape, item size, mesh, source and target spec. *Out:* a tuple of `Step`, each from one spec to the
next. *Invariant:* the steps chain; each is exact for these sizes, on blocks that do not divide evenly too.

    [_, _] partial(x) -> [_, y] on x=2, y=2
    slice(y) dim 1: [_, _] partial(x) -> [_, y] partial(x)
    all_reduce(x): [_, y] partial(x) -> [_, y]

A shortest path over specs: Dijkstra on the steps that collectives offer (`Space.steps`), states made as
they are needed, each step priced at its actual bytes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from distgraph.errors import ShardingError
from distgraph.ir.collective_registry import BlockSizes, Space, Step, cached_until_registration, with_dim
from distgraph.ir.collectives import COLLECTIVES
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.passes.redistribution.cost_lower_bound import received
from distgraph.passes.redistribution.layout_equivalence import Change, representative
from distgraph.passes.redistribution.tiles import without_unit_axes

Price = Callable[[str, float, int, ProcessMesh, tuple[str, ...]], float]
Cost = tuple[float, float, int]


class Priced(NamedTuple):
    """Price of a change of layout, and what it takes to find.

    Attributes:
        cost: the price.
        change: the change of layout that was searched: all of its class have its price.
        examined: steps between layouts that the search looks at, the same number wherever the price is known
            already.
    """

    cost: float
    change: Change
    examined: int


_COLLECTIVE = 16384.0  # bytes that could be sent in the time that starting one collective takes
_BELOW = 1 - 1e-9  # keeps a bound below what it bounds, whatever is rounded


def wire_price(kind: str, sent: float, group_size: int, mesh: ProcessMesh, axes: tuple[str, ...]) -> float:
    """Default price of a collective: the bytes that one rank sends, and a fraction of a byte for the step.

    The fraction (`Collective.tie_break`) is enough to prefer fewer steps among equals, permute to all_gather
    then slice, and all_to_all to permute; too little to change which sequence sends least.
    """
    return sent + COLLECTIVES[kind].tie_break


def latency_price(kind: str, sent: float, group_size: int, mesh: ProcessMesh, axes: tuple[str, ...]) -> float:
    """Bytes on the wire plus a fixed charge a collective, for programs that will really run."""
    return sent + _COLLECTIVE if sent else 0.0


# Prices that count bytes and collectives only, whatever the ranks and axes; with the charge for a collective.
BYTE_PRICES: Mapping[Price, float] = {wire_price: 0.0, latency_price: _COLLECTIVE}


def price_bound(price: Price, nbytes: float) -> float:
    """A lower bound of the cost to send `nbytes` bytes by collectives; 0 for a price that is not of bytes."""
    charge = BYTE_PRICES.get(price)
    return 0.0 if charge is None or not nbytes else (nbytes + charge) * _BELOW


def redistribute(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: ProcessMesh,
    source: ShardSpec,
    target: ShardSpec,
    price: Price = wire_price,
) -> tuple[Step, ...]:
    """The cheapest steps from `source` to `target`; among equals those of least memory, then the fewest.

    Args:
        shape: global shape.
        itemsize: bytes of an element.
        mesh: mesh of both specs.
        source: layout now.
        target: layout wanted.
        price: (kind, bytes one rank sends, group size, mesh, axes) -> cost of a collective, never negative,
            in any one unit. Not called for slice and mask, which are free.

    Returns:
        Steps whose specs chain from `source` to `target`; none when both put the same data on every rank.

    Raises:
        ShardingError: a spec does not fit the shape or the mesh.

    Example:
        >>> mesh = ProcessMesh.grid(x=2, y=2)
        >>> spec = ShardSpec.parse
        >>> [str(s) for s in redistribute((8, 8), 4, mesh, spec("[_, _] partial(x)"), spec("[x, _]"))]
        ['reduce_scatter(x) dim 0: [_, _] partial(x) -> [x, _]']
        >>> [str(s) for s in redistribute((8, 8), 4, mesh, spec("[x, _]"), spec("[_, x]"))]
        ['all_to_all(x) dim 0->1: [x, _] -> [_, x]']
    """
    return _shared_plan(tuple(shape), itemsize, mesh, source, target, price)[1]


def redistribute_cost(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: ProcessMesh,
    source: ShardSpec,
    target: ShardSpec,
    price: Price = wire_price,
) -> float:
    """Price of `redistribute`, cached; 0 when nothing is sent. Raises what `redistribute` raises."""
    return priced(shape, itemsize, mesh, source, target, price).cost


def step_bytes(step: Step, shape: tuple[int, ...], itemsize: int, mesh: ProcessMesh) -> float:
    """Bytes that one rank sends in a step: what its collective declares, on the largest blocks."""
    if step.local:
        return 0.0
    before, after = block_volume(shape, mesh, step.source), block_volume(shape, mesh, step.target)
    piece = after
    if step.to_dim is not None:
        dims = with_dim(step.source.dims, step.to_dim, step.target.dims[step.to_dim])
        piece = block_volume(shape, mesh, ShardSpec(dims))
    sizes = BlockSizes(before, after, piece, mesh.count(step.axes))
    return float(itemsize * COLLECTIVES[step.kind].sent(sizes))


def step_price(
    step: Step, shape: tuple[int, ...], itemsize: int, mesh: ProcessMesh, price: Price = wire_price
) -> float:
    """What `price` asks for a step; slice and mask are free."""
    if step.local:
        return 0.0
    return price(step.kind, step_bytes(step, shape, itemsize, mesh), mesh.count(step.axes), mesh, step.axes)


@lru_cache(maxsize=1 << 18)
def block_volume(shape: tuple[int, ...], mesh: ProcessMesh, spec: ShardSpec) -> int:
    """Elements of the largest block."""
    return math.prod(mesh.longest(size, axes) for size, axes in zip(shape, spec.dims, strict=True))


@cached_until_registration(maxsize=1 << 18)
def priced(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: ProcessMesh,
    source: ShardSpec,
    target: ShardSpec,
    price: Price,
) -> Priced:
    """Price of `redistribute`, cached, with the number of steps examined. Raises what that raises."""
    if price not in BYTE_PRICES:
        cost, _, examined = _shared_plan(shape, itemsize, mesh, source, target, price)
        return Priced(cost, (shape, mesh, source, target), examined)
    source.check(shape, mesh, "source of a redistribution")
    target.check(shape, mesh, "target of a redistribution")
    change = representative(shape, mesh, source, target)
    cost, examined = _cost_of_class(itemsize, *change, price)
    return Priced(cost, change, examined)


@cached_until_registration(maxsize=1 << 16)
def _cost_of_class(
    itemsize: int,
    shape: tuple[int, ...],
    mesh: ProcessMesh,
    source: ShardSpec,
    target: ShardSpec,
    price: Price,
) -> tuple[float, int]:
    """As `_plan`, without its steps: the search goes first where a lower bound is least (A*)."""
    start, goal, space = _space(shape, mesh, source, target)
    if start == goal:
        return 0.0, 0
    end = DistAttr(mesh, goal)

    def left(spec: ShardSpec) -> float:
        return price_bound(price, itemsize * received(shape, DistAttr(mesh, spec), end))

    cost, _, examined = cheapest_path(space, start, itemsize, price, left)
    return cost, examined


def mesh_alike(price: Price, mesh: ProcessMesh) -> ProcessMesh:
    """A mesh with the same axes and the same prices of all collectives: one for all equal stages of a
    pipeline, where the price is of an object that has such meshes."""
    alike = getattr(getattr(price, "__self__", None), "mesh_alike", None)
    return mesh if alike is None else alike(mesh)


def _shared_plan(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: ProcessMesh,
    source: ShardSpec,
    target: ShardSpec,
    price: Price,
) -> tuple[float, tuple[Step, ...], int]:
    """As `_plan`, made once for all meshes with the same prices."""
    try:
        return _plan(shape, itemsize, mesh_alike(price, mesh), source, target, price)
    except ShardingError:  # which names this mesh instead
        return _plan(shape, itemsize, mesh, source, target, price)


@cached_until_registration(maxsize=1 << 14)
def _plan(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: ProcessMesh,
    source: ShardSpec,
    target: ShardSpec,
    price: Price,
) -> tuple[float, tuple[Step, ...], int]:
    """Price and steps of the cheapest sequence, and the number of steps examined."""
    source.check(shape, mesh, "source of a redistribution")
    target.check(shape, mesh, "target of a redistribution")
    start, goal, space = _space(shape, mesh, source, target)
    if start == goal:
        return 0.0, (), 0
    cost, steps, examined = cheapest_path(space, start, itemsize, price)
    # the ends carry the requested specs: the same layout, with axes of size 1 named as there
    steps = (replace(steps[0], source=source), *steps[1:])
    return cost, (*steps[:-1], replace(steps[-1], target=target)), examined


def _space(
    shape: tuple[int, ...], mesh: ProcessMesh, source: ShardSpec, target: ShardSpec
) -> tuple[ShardSpec, ShardSpec, Space]:
    """Start and goal without axes of size 1, and the layouts between them."""
    start, goal = without_unit_axes(source, mesh), without_unit_axes(target, mesh)
    used = set(start.axes + goal.axes)
    working = tuple(axis for axis in mesh.axes if mesh.axis_size(axis) > 1 and axis in used)
    wide = not all(
        size % mesh.units(tuple({*before, *after})) == 0
        for size, before, after in zip(shape, start.dims, goal.dims, strict=True)
    )
    return start, goal, Space(shape, mesh, working, goal, wide)


def cheapest_path(
    space: Space,
    start: ShardSpec,
    itemsize: int,
    price: Price,
    left: Callable[[ShardSpec], float] = lambda spec: 0.0,
) -> tuple[float, tuple[Step, ...], int]:
    """Cost and steps of the cheapest path, and the number of steps examined.

    `left` is at most the cost from a layout to the goal.
    """
    best: dict[ShardSpec, Cost] = {start: (0.0, 0.0, 0)}
    came: dict[ShardSpec, Step] = {}
    volumes = {start: block_volume(space.shape, space.mesh, start)}
    lefts: dict[ShardSpec, float] = {}
    heap: list[tuple[Cost, int, ShardSpec, Cost]] = [((0.0, 0.0, 0), 0, start, (0.0, 0.0, 0))]
    order = itertools.count(1)
    endless, examined = (math.inf, 0.0, 0), 0
    while heap:
        _, _, spec, cost = heapq.heappop(heap)
        if spec == space.goal:
            return cost[0], _path(came, start, spec), examined
        if cost > best[spec]:
            continue
        for step in space.steps(spec):
            after = step.target
            examined += 1
            if after not in volumes:
                volumes[after] = block_volume(space.shape, space.mesh, after)
                lefts[after] = left(after)
            memory = itemsize * (volumes[spec] + volumes[after])
            least = (cost[0], max(cost[1], memory), cost[2] + 1)  # what it comes to if the step costs nothing
            if after in best and best[after] <= least:
                continue
            if cost[0] + lefts[after] > best.get(space.goal, endless)[0]:
                continue
            spent = step_price(step, space.shape, itemsize, space.mesh, price)
            total = (cost[0] + spent, *least[1:])
            if after not in best or total < best[after]:
                best[after] = total
                came[after] = step
                heapq.heappush(heap, ((total[0] + lefts[after], *least[1:]), next(order), after, total))
    raise AssertionError(f"{space.goal} is not reached from {start} on {space.mesh}")


def _path(came: dict[ShardSpec, Step], start: ShardSpec, spec: ShardSpec) -> tuple[Step, ...]:
    steps: list[Step] = []
    while spec != start:
        steps.append(came[spec])
        spec = came[spec].source
    return tuple(reversed(steps))
