"""Transfer: from a layout on one mesh to a layout on another, each element sent as seldom as can be.

*In:* shape, item size, source and target `DistAttr`; sizes, shapes and ranks of the meshes may differ or
overlap. *Out:* a `Transfer`: steps on the source mesh, tiles from rank to rank, steps on the target mesh.
*Invariant:* the tiles of a rank cover its landing block once; no tile carries a value that is still partial.

    [x, _] on x=4 (machine A)  ->  [_, _] on h=2, d=4 (machines B, C)
    tiles    each of the 8 ranks gets another eighth: landing [h*d, _]
    after    all_gather(h, d) dim 0: [h*d, _] -> [_, _]

Replicas at the far side would get the same bytes over the same slow links. So the tensor lands spread over
the axes of the target mesh that replicate it, and an all_gather inside that mesh fills the rest. Which
spread: the one with the fewest bytes between machines, then the lowest price, then the fewest tiles. The
all_gather at the far side: Zheng et al., "Alpa", OSDI 2022, cross-mesh resharding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from distgraph.ir.collective_registry import Dims, Step, cached_until_registration, selections
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.passes.redistribution.cost_lower_bound import received
from distgraph.passes.redistribution.layout_equivalence import Change
from distgraph.passes.redistribution.planner import (
    BYTE_PRICES,
    Price,
    Priced,
    mesh_alike,
    price_bound,
    priced,
    redistribute,
    wire_price,
)
from distgraph.passes.redistribution.tiles import (
    Tile,
    assign,
    busiest,
    moved,
    needs,
    renumbered,
    tiles_between,
)


@dataclass(frozen=True, slots=True)
class Transfer:
    """How a value goes from mesh to mesh.

    Args:
        before: steps on the source mesh; they finish pending reductions.
        source: layout after them, from which the tiles are cut.
        tiles: who sends what to whom. Where source and target rank are the same it is a local copy.
        landing: layout on the target mesh once the tiles are there.
        after: steps on the target mesh, from the landing to the requested layout.
    """

    before: tuple[Step, ...]
    source: DistAttr
    tiles: tuple[Tile, ...]
    landing: DistAttr
    after: tuple[Step, ...]

    def __str__(self) -> str:
        lines = [f"before  {step}" for step in self.before]
        sent = [str(tile) for tile in self.tiles if not tile.local]
        lines.append(f"tiles   {self.source} -> {self.landing}: {'; '.join(sent) or 'local copies only'}")
        return "\n".join(lines + [f"after   {step}" for step in self.after])


def transfer(
    shape: tuple[int, ...], itemsize: int, source: DistAttr, target: DistAttr, price: Price = wire_price
) -> Transfer:
    """The cheapest transfer: fewest bytes from ranks outside the target mesh, then the lowest price, then the
    fewest messages.

    A rank in both meshes takes from itself what it has, then from the holder that has least to send.

    Args:
        shape: global shape.
        itemsize: bytes of an element.
        source: mesh and layout now.
        target: mesh and layout wanted.
        price: as for `redistribute`; the tiles are priced as a permute of what the busiest rank sends or
            receives.

    Raises:
        ShardingError: a spec does not fit the shape or its mesh.

    Example:
        >>> a, b = ProcessMesh.grid(x=2), ProcessMesh.grid(2, y=2)
        >>> spec = ShardSpec.parse
        >>> print(transfer((4, 4), 4, DistAttr(a, spec("[x, _]")), DistAttr(b, spec("[_, _]"))))
        tiles   [x, _] on mesh(x=2) -> [y, _] on mesh(y=2; 2..3): 0->2 [0:2, 0:4]; 1->3 [2:4, 0:4]
        after   all_gather(y) dim 0: [y, _] -> [_, _]
    """
    # equal pairs of stages of a pipeline share one plan
    first, second, ranks = renumbered(source, target)
    plan = _plan(tuple(shape), itemsize, first, second, _price_of(price, source, target, first, second))
    start, landing = DistAttr(source.mesh, plan.source.spec), DistAttr(target.mesh, plan.landing.spec)
    return Transfer(plan.before, start, moved(plan.tiles, ranks), landing, plan.after)


def transfer_cost(
    shape: tuple[int, ...], itemsize: int, source: DistAttr, target: DistAttr, price: Price = wire_price
) -> float:
    """Price of `transfer`, cached: steps before, busiest rank of the tiles, steps after."""
    return choose(shape, itemsize, source, target, price).cost


@dataclass(frozen=True, slots=True)
class Choice:
    """The cheapest transfer, and what it takes to find.

    Args:
        cost: its price.
        start: layout that is sent.
        landing: layout that is received.
        ways: pairs of such layouts whose tiles were looked at.
        redistributions: changes of layout on either mesh that were priced, each once.
    """

    cost: float
    start: ShardSpec
    landing: ShardSpec
    ways: int
    redistributions: tuple[Priced, ...]


def choose(
    shape: tuple[int, ...], itemsize: int, source: DistAttr, target: DistAttr, price: Price = wire_price
) -> Choice:
    """Price of `transfer`, cached, with what it takes to find; arguments as there."""
    first, second, _ = renumbered(source, target)
    price = _price_of(price, source, target, first, second)
    return _choice(tuple(shape), itemsize, first, second, price)


def _choice(
    shape: tuple[int, ...], itemsize: int, source: DistAttr, target: DistAttr, price: Price
) -> Choice:
    """As `choose`, for ranks that are numbered from 0."""
    if source.mesh == target.mesh:
        direct = priced(shape, itemsize, source.mesh, source.spec, target.spec, price)
        return Choice(direct.cost, target.spec, target.spec, 0, (direct,))
    return _choose(shape, itemsize, source, target, price)


@dataclass(frozen=True, slots=True)
class _PriceElsewhere:
    """A price on meshes with other numbers of ranks: equal for pairs of stages with equal prices.

    Attributes:
        price: by the numbers of the job.
        meshes: pairs of a mesh with other numbers and one with the prices of the mesh that it stands for.
    """

    price: Price
    meshes: tuple[tuple[ProcessMesh, ProcessMesh], ...]

    def __call__(
        self, kind: str, sent: float, group_size: int, mesh: ProcessMesh, axes: tuple[str, ...]
    ) -> float:
        return self.price(
            kind, sent, group_size, next(at for given, at in self.meshes if given == mesh), axes
        )


def _price_of(price: Price, source: DistAttr, target: DistAttr, first: DistAttr, second: DistAttr) -> Price:
    """The price between two layouts, for the same layouts `first` and `second` with ranks from 0 on."""
    if price in BYTE_PRICES:
        return price  # it does not depend on who the ranks are
    pairs = (first.mesh, mesh_alike(price, source.mesh)), (second.mesh, mesh_alike(price, target.mesh))
    return _PriceElsewhere(price, pairs)


@dataclass(frozen=True, slots=True)
class _Way:
    """Tiles between two layouts in numbers.

    Attributes:
        crossing: elements that enter the target mesh from ranks outside it.
        busiest: most elements that one rank sends or receives.
        messages: pieces that are sent.
    """

    crossing: int
    busiest: int
    messages: int


@cached_until_registration(maxsize=1 << 14)
def _plan(
    shape: tuple[int, ...], itemsize: int, source: DistAttr, target: DistAttr, price: Price
) -> Transfer:
    source.spec.check(shape, source.mesh, "source of a transfer")
    target.spec.check(shape, target.mesh, "target of a transfer")
    chosen = _choice(shape, itemsize, source, target, price)
    start, landing = DistAttr(source.mesh, chosen.start), DistAttr(target.mesh, chosen.landing)
    before = redistribute(shape, itemsize, source.mesh, source.spec, start.spec, price)
    after = redistribute(shape, itemsize, target.mesh, landing.spec, target.spec, price)
    return Transfer(before, start, tiles_between(shape, start, landing), landing, after)


@cached_until_registration(maxsize=1 << 16)
def _choose(
    shape: tuple[int, ...], itemsize: int, source: DistAttr, target: DistAttr, price: Price
) -> Choice:
    """The cheapest transfer between two meshes."""
    source.spec.check(shape, source.mesh, "source of a transfer")
    target.spec.check(shape, target.mesh, "target of a transfer")
    ranks = len({*source.mesh.members, *target.mesh.members})
    # on the same ranks nothing crosses, and a bound of the bytes says which tiles need not be looked at
    bounded = price in BYTE_PRICES and source.mesh.rank_set == target.mesh.rank_set

    def least(*layouts: DistAttr) -> float:
        pairs = itertools.pairwise(layouts) if bounded else ()
        return sum(price_bound(price, itemsize * received(shape, *pair)) for pair in pairs)

    def moved_within(mesh: ProcessMesh, before: ShardSpec, after: ShardSpec) -> float:
        redistribution = priced(shape, itemsize, mesh, before, after, price)
        redistributions.setdefault(redistribution.change, redistribution)
        return redistribution.cost

    redistributions: dict[Change, Priced] = {}
    ways = 0
    best: tuple[tuple[int, float, int, int, int], ShardSpec, ShardSpec] | None = None
    starts = [(DistAttr(source.mesh, spec), i) for i, spec in enumerate(_finished(source))]
    landings = [(DistAttr(target.mesh, spec), i) for i, spec in enumerate(_landings(target))]
    for bound, first, (start, _) in sorted((least(source, s[0], target), s[1], s) for s in starts):
        if best is not None and bounded and bound > best[0][1]:
            break
        before = moved_within(source.mesh, source.spec, start.spec)
        ranked = sorted((before + least(start, end[0], target), end[1], end) for end in landings)
        for bound, second, (landing, _) in ranked:
            if best is not None and bounded and bound > best[0][1]:
                break
            way = _way(shape, *renumbered(start, landing)[:2])
            ways += 1
            after = moved_within(target.mesh, landing.spec, target.spec)
            most = itemsize * way.busiest
            hop = price("permute", float(most), ranks, target.mesh, target.mesh.axes) if most else 0.0
            cost = (way.crossing, before + hop + after, way.messages, first, second)
            if best is None or cost < best[0]:
                best = cost, start.spec, landing.spec
    assert best is not None  # both loops have at least one turn
    return Choice(best[0][1], best[1], best[2], ways, tuple(redistributions.values()))


@cached_until_registration(maxsize=1 << 14)
def _way(shape: tuple[int, ...], start: DistAttr, landing: DistAttr) -> _Way:
    """What tiles between two layouts come to."""
    tiles = assign(needs(shape, start, landing))
    crossing = sum(tile.volume for tile in tiles if tile.source_rank not in landing.mesh)
    return _Way(crossing, busiest(tiles), sum(not tile.local for tile in tiles))


def _finished(source: DistAttr) -> Iterator[ShardSpec]:
    """Layouts with nothing pending: reduced in place, or scattered so that more ranks send less each."""
    pending = tuple(axis for axis, _ in source.spec.partial)
    return (ShardSpec(dims) for dims in _spreads(source.spec.dims, pending))


def _landings(target: DistAttr) -> Iterator[ShardSpec]:
    """The layout wanted, and finer ones that one dim splits over axes that would hold replicas."""
    mesh, dims = target.mesh, target.spec.dims
    idle = tuple(a for a in mesh.axes if mesh.axis_size(a) > 1 and not any(a in dim for dim in dims))
    return (ShardSpec(finer) for finer in _spreads(dims, idle))


def _spreads(dims: Dims, axes: tuple[str, ...]) -> Iterator[Dims]:
    yield dims
    for dim, others in enumerate(dims):
        for more in selections(axes):
            yield (*dims[:dim], others + more, *dims[dim + 1 :])
