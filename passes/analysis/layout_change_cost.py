"""The cost of a value: its changes of layout from the producer to storage, and from storage to the readers.

In:   indices of layouts: of the one in which a value is produced and of those in which it is read.
Out:  the least cost of the changes of layout, with the cheapest layout for storage; or a lower bound of it.
Invariant: a bound is never above the cost. Both are computed once for all values of one kind.
"""

from __future__ import annotations

from typing import NamedTuple

from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import Windows
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.passes.analysis.redistribution_cost import Read, copy_cost, window_cost
from distgraph.passes.redistribution.cost_lower_bound import received
from distgraph.passes.redistribution.cross_mesh import choose
from distgraph.passes.redistribution.layout_equivalence import Change
from distgraph.passes.redistribution.planner import BYTE_PRICES, Price, Priced, price_bound, priced
from distgraph.passes.reshard import fetches

Key = tuple[int, int, tuple[int, ...]]  # kind of a value, layout of the producer, layouts of the readers
_PRICED, _WAY = 20, 12  # work of a cost, and of a division into tiles between layouts of different meshes
_ROUNDING = 1e-6  # bytes by which a sum of bounds may exceed the sum of the costs


class ValueKind(NamedTuple):
    """The properties on which the cost of a value depends.

    Attributes:
        shape: global shape.
        size: bytes of an element.
        pinned: the user's layout, or None.
        leaves: whether it is an output of the graph.
        source: whether a source produces it.
    """

    shape: tuple[int, ...]
    size: int
    pinned: DistAttr | None
    leaves: bool
    source: bool


class LayoutNumbers:
    """Indices of layouts and the windows that ops read of them.

    Attributes:
        reads: [indices] the layout and the windows.
        split: [indices] number of parts into which the layout splits a value.
    """

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.split: list[int] = []
        self._number: dict[Read, int] = {}

    def number(self, attr: DistAttr, windows: Windows = ()) -> int:
        """Index of a layout; a new layout gets a new index."""
        read = attr, windows
        number = self._number.get(read)
        if number is None:
            number = self._number[read] = len(self.reads)
            self.reads.append(read)
            self.split.append(attr.mesh.count(a for dim in attr.spec.dims for a in dim))
        return number


class ValueCosts:
    """Costs and lower bounds of values, each computed once.

    Args:
        kinds: the kinds of values.
        layouts: indices of the layouts; layouts for storage are added.
        price: cost of one collective.

    Attributes:
        work: work of all costs so far, see `layout_local_search.refine`.
    """

    def __init__(self, kinds: list[ValueKind], layouts: LayoutNumbers, price: Price) -> None:
        self.kinds, self.layouts, self.price = kinds, layouts, price
        self.bounded = price in BYTE_PRICES
        self.work = 0
        self._cheapest_of: dict[Key, tuple[float, int]] = {}
        self._ranked: dict[Key, list[tuple[float, int]]] = {}
        self._bounds: dict[tuple[int, int, int], float] = {}
        self._changes: dict[tuple[int, int, int], float] = {}
        self._examined: set[tuple[int, Change]] = set()
        self._windows: dict[tuple[int, int], float] = {}

    def cheapest(self, key: Key) -> tuple[float, int]:
        """Least cost of a value, and index of the layout in which it is stored then."""
        cheapest = self._cheapest_of.get(key)
        if cheapest is None:
            cheapest = self._cheapest_of[key] = self._search_storage(key)
        return cheapest

    def bound(self, key: Key) -> float:
        """Lower bound of the cost of a value; the cost itself if it has been computed."""
        cheapest = self._cheapest_of.get(key)
        return self._rank(key)[0][0] if cheapest is None else cheapest[0]

    def _search_storage(self, key: Key) -> tuple[float, int]:
        """The least cost over all layouts for storage, in the order of their bounds."""
        kind, produced, read = key
        best: tuple[float, str, int] | None = None
        for bound, stored in self._rank(key):
            if best is not None and bound > best[0] + _ROUNDING:
                break
            total = self._change_cost(kind, produced, stored) + self._read_cost(kind, stored, read)
            label = str(self.layouts.reads[stored][0])
            if best is None or (total, label) < best[:2]:
                best = (total, label, stored)
        assert best is not None
        return best[0], best[2]

    def _rank(self, key: Key) -> list[tuple[float, int]]:
        """(lower bound of the cost, layout for storage), in ascending order."""
        ranked = self._ranked.get(key)
        if ranked is None:
            kind, produced, read = key
            ranked = [
                (self._change_bound(kind, produced, stored) + self._read_bound(kind, stored, read), stored)
                for stored in self._storage_layouts(kind, produced, read)
            ]
            ranked.sort()
            self._ranked[key] = ranked
        return ranked

    def _storage_layouts(self, kind: int, produced: int, read: tuple[int, ...]) -> dict[int, None]:
        """Indices of the layouts in which a value may be stored."""
        value, made = self.kinds[kind], self.layouts.reads[produced][0]
        if value.pinned is not None:
            candidates = [value.pinned]
        elif value.source:
            candidates = [made]  # a source is stored in the layout in which it is loaded
        else:
            candidates = [made, DistAttr(made.mesh, made.spec.without_partial())]
            readers = (self.layouts.reads[number][0] for number in read)
            candidates += [attr for attr in readers if attr.mesh == made.mesh]
            if value.leaves:
                scattered = _scattered(made.spec, value.shape, made.mesh)
                candidates += [DistAttr(made.mesh, spec) for spec in scattered]
                candidates = [c for c in candidates if not c.spec.partial]
        return dict.fromkeys(map(self.layouts.number, candidates))

    # ------------------------------------------------------------------ prices

    def _change_cost(self, kind: int, source: int, target: int) -> float:
        """Cost of a change of layout, as `move_cost`."""
        if source == target:
            return 0.0
        cost = self._changes.get((kind, source, target))
        if cost is None:
            value, reads = self.kinds[kind], self.layouts.reads
            ends = reads[source][0], reads[target][0]
            cost = self._changes[kind, source, target] = self._plan_change(value, *ends)
        return cost

    def _plan_change(self, value: ValueKind, source: DistAttr, target: DistAttr) -> float:
        """Cost of a change of layout by the planner.

        Its work counts once for all changes of its class, whether or not the result was cached before.
        """
        self.work += _PRICED
        parts: tuple[Priced, ...]
        if source.mesh == target.mesh:
            parts = (priced(value.shape, value.size, source.mesh, source.spec, target.spec, self.price),)
            cost = parts[0].cost
        else:
            chosen = choose(value.shape, value.size, source, target, price=self.price)
            self.work += _WAY * chosen.ways
            cost, parts = chosen.cost, chosen.redistributions
        for part in parts:
            if (value.size, part.change) not in self._examined:
                self._examined.add((value.size, part.change))
                self.work += part.examined
        return cost

    def _read_cost(self, kind: int, stored: int, read: tuple[int, ...]) -> float:
        """Cost of all reads of a value: a change to each different layout, and the halos of windows."""
        value, held = self.kinds[kind], self.layouts.reads[stored][0]
        total, targets = 0.0, dict[int, None]()
        for number in read:
            attr, windows = self.layouts.reads[number]
            if windows:
                total += window_cost(value.shape, value.size, held, attr, windows, self.price)
                if fetches(held, attr):
                    total += copy_cost(value.shape, value.size, held, attr)
                    continue
            targets[self.layouts.number(attr) if windows else number] = None
        for number in targets:
            attr = self.layouts.reads[number][0]
            total += self._change_cost(kind, stored, number) + copy_cost(value.shape, value.size, held, attr)
        return total

    # ------------------------------------------------------------------ bounds

    def _change_bound(self, kind: int, source: int, target: int) -> float:
        """Lower bound of `_change_cost`; 0 if the price is not a sum of bytes and constant charges."""
        if source == target or not self.bounded:
            return 0.0
        bound = self._bounds.get((kind, source, target))
        if bound is None:
            value, reads = self.kinds[kind], self.layouts.reads
            least = value.size * received(value.shape, reads[source][0], reads[target][0])
            bound = self._bounds[kind, source, target] = price_bound(self.price, least)
        return bound

    def _read_bound(self, kind: int, stored: int, read: tuple[int, ...]) -> float:
        """Lower bound of `_read_cost`."""
        held, total, targets = self.layouts.reads[stored][0], 0.0, dict[int, None]()
        for number in read:
            attr, windows = self.layouts.reads[number]
            if windows:
                if fetches(held, attr):
                    continue
                total += self._window_cost(kind, number)
            targets[self.layouts.number(attr) if windows else number] = None
        return total + sum(self._change_bound(kind, stored, number) for number in targets)

    def _window_cost(self, kind: int, number: int) -> float:
        """Cost of the halos of a layout, unless they are fetched from another order of the ranks."""
        cost = self._windows.get((kind, number))
        if cost is None:
            value, (attr, windows) = self.kinds[kind], self.layouts.reads[number]
            cost = window_cost(value.shape, value.size, attr, attr, windows, self.price)
            self._windows[kind, number] = cost
        return cost


def _scattered(spec: ShardSpec, shape: tuple[int, ...], mesh: ProcessMesh) -> list[ShardSpec]:
    """Layouts in which each partial axis splits a dim, as after a reduce_scatter."""
    specs = [ShardSpec(spec.dims)]
    for axis, _ in spec.partial:
        extended = []
        for base in specs:
            for dim, axes in enumerate(base.dims):
                if shape[dim] % mesh.units((*axes, axis)) == 0:
                    extended.append(ShardSpec((*base.dims[:dim], (*axes, axis), *base.dims[dim + 1 :])))
        specs = extended or specs
    return specs
