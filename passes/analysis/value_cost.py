"""What a value costs: the moves from where it is made to where it is read, kept where that is cheapest.

In:   numbers of layouts: of the one in which a value is made and of those in which it is read.
Out:  the least price of the moves between, with the layout to keep the value in; or a lower bound of it.
Invariant: a bound is never above the price. Both are found once for values of one kind.
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

Key = tuple[int, int, tuple[int, ...]]  # kind of a value, layout of the maker, layouts of the readers
_PRICED, _WAY = 20, 12  # work of any price, and of the tiles between two layouts of different meshes
_ROUNDING = 1e-6  # bytes by which a sum of bounds may be above that of the prices


class ValueKind(NamedTuple):
    """What values have in common that cost the same to move.

    Attributes:
        shape: global shape.
        size: bytes of an element.
        pinned: the user's layout, or None.
        leaves: whether it is an output of the graph.
        source: whether it comes from outside.
    """

    shape: tuple[int, ...]
    size: int
    pinned: DistAttr | None
    leaves: bool
    source: bool


class LayoutNumbers:
    """Layouts, with the windows that ops read of them, by number.

    Attributes:
        reads: the layout and the windows of every number.
        split: into how many parts each cuts a value.
    """

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.split: list[int] = []
        self._number: dict[Read, int] = {}

    def number(self, attr: DistAttr, windows: Windows = ()) -> int:
        """Number of a layout, a new one for a new layout."""
        read = attr, windows
        found = self._number.get(read)
        if found is None:
            found = self._number[read] = len(self.reads)
            self.reads.append(read)
            self.split.append(attr.mesh.count(a for dim in attr.spec.dims for a in dim))
        return found


class ValueCosts:
    """Prices and lower bounds of what is read of values, each found once.

    Args:
        kinds: of the values, by number.
        layouts: numbers of the layouts; those of layouts to keep values in join them.
        price: of one collective.

    Attributes:
        work: what the prices found so far have taken to find, see `refine.BUDGET`.
    """

    def __init__(self, kinds: list[ValueKind], layouts: LayoutNumbers, price: Price) -> None:
        self.kinds, self.layouts, self.price = kinds, layouts, price
        self.bounded = price in BYTE_PRICES
        self.work = 0
        self._found: dict[Key, tuple[float, int]] = {}
        self._ranked: dict[Key, list[tuple[float, int]]] = {}
        self._bounds: dict[tuple[int, int, int], float] = {}
        self._moves: dict[tuple[int, int, int], float] = {}
        self._examined: set[tuple[int, Change]] = set()
        self._windows: dict[tuple[int, int], float] = {}

    def cheapest(self, key: Key) -> tuple[float, int]:
        """Least price of the moves of a value, and number of the layout to keep it in."""
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._cheapest(key)
        return found

    def bound(self, key: Key) -> float:
        """At most the price of `cheapest`, and the price itself where it is known."""
        found = self._found.get(key)
        return self._rank(key)[0][0] if found is None else found[0]

    def _cheapest(self, key: Key) -> tuple[float, int]:
        kind, made, wanted = key
        best: tuple[float, str, int] | None = None
        for bound, kept in self._rank(key):
            if best is not None and bound > best[0] + _ROUNDING:
                break
            total = self._move(kind, made, kept) + self._reads(kind, kept, wanted)
            label = str(self.layouts.reads[kept][0])
            if best is None or (total, label) < best[:2]:
                best = (total, label, kept)
        assert best is not None
        return best[0], best[2]

    def _rank(self, key: Key) -> list[tuple[float, int]]:
        """Layouts to keep a value in, the least bound first."""
        ranked = self._ranked.get(key)
        if ranked is None:
            kind, made, wanted = key
            ranked = [
                (self._bound(kind, made, kept) + self._reads_bound(kind, kept, wanted), kept)
                for kept in self._candidates(kind, made, wanted)
            ]
            ranked.sort()
            self._ranked[key] = ranked
        return ranked

    def _candidates(self, kind: int, made: int, wanted: tuple[int, ...]) -> dict[int, None]:
        value, here = self.kinds[kind], self.layouts.reads[made][0]
        if value.pinned is not None:
            candidates = [value.pinned]
        elif value.source:
            candidates = [here]  # what comes from outside is kept as it is loaded
        else:
            candidates = [here, DistAttr(here.mesh, here.spec.without_partial())]
            readers = (self.layouts.reads[w][0] for w in wanted)
            candidates += [attr for attr in readers if attr.mesh == here.mesh]
            if value.leaves:
                spread = _scattered(here.spec, value.shape, here.mesh)
                candidates += [DistAttr(here.mesh, spec) for spec in spread]
                candidates = [c for c in candidates if not c.spec.partial]
        return dict.fromkeys(map(self.layouts.number, candidates))

    # ------------------------------------------------------------------ prices

    def _move(self, kind: int, source: int, target: int) -> float:
        """As `move_cost`."""
        if source == target:
            return 0.0
        found = self._moves.get((kind, source, target))
        if found is None:
            value, reads = self.kinds[kind], self.layouts.reads
            ends = reads[source][0], reads[target][0]
            found = self._moves[kind, source, target] = self._search(value, *ends)
        return found

    def _search(self, value: ValueKind, source: DistAttr, target: DistAttr) -> float:
        """Price of a change of layout.

        Its work counts once for all changes of its class, whether or not the process has made it before.
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

    def _reads(self, kind: int, kept: int, wanted: tuple[int, ...]) -> float:
        """Price of all reads of a value: layouts that it is moved to once each, and windows of them."""
        value, held = self.kinds[kind], self.layouts.reads[kept][0]
        total, moved = 0.0, dict[int, None]()
        for number in wanted:
            attr, windows = self.layouts.reads[number]
            if windows:
                total += window_cost(value.shape, value.size, held, attr, windows, self.price)
                if fetches(held, attr):
                    total += copy_cost(value.shape, value.size, held, attr)
                    continue
            moved[self.layouts.number(attr)] = None
        for number in moved:
            attr = self.layouts.reads[number][0]
            total += self._move(kind, kept, number) + copy_cost(value.shape, value.size, held, attr)
        return total

    # ------------------------------------------------------------------ bounds

    def _bound(self, kind: int, source: int, target: int) -> float:
        """At most what `_move` gives; 0 under a price that is no sum of bytes and charges."""
        if source == target or not self.bounded:
            return 0.0
        found = self._bounds.get((kind, source, target))
        if found is None:
            value, reads = self.kinds[kind], self.layouts.reads
            least = value.size * received(value.shape, reads[source][0], reads[target][0])
            found = self._bounds[kind, source, target] = price_bound(self.price, least)
        return found

    def _reads_bound(self, kind: int, kept: int, wanted: tuple[int, ...]) -> float:
        held, total, moved = self.layouts.reads[kept][0], 0.0, dict[int, None]()
        for number in wanted:
            attr, windows = self.layouts.reads[number]
            if windows:
                if fetches(held, attr):
                    continue
                total += self._window(kind, number)
            moved[self.layouts.number(attr)] = None
        return total + sum(self._bound(kind, kept, number) for number in moved)

    def _window(self, kind: int, number: int) -> float:
        """Price of the windows of a layout where they are not fetched from another order of the ranks."""
        found = self._windows.get((kind, number))
        if found is None:
            value, (attr, windows) = self.kinds[kind], self.layouts.reads[number]
            found = window_cost(value.shape, value.size, attr, attr, windows, self.price)
            self._windows[kind, number] = found
        return found


def _scattered(spec: ShardSpec, shape: tuple[int, ...], mesh: ProcessMesh) -> list[ShardSpec]:
    """Layouts in which the pending axes split one dim each."""
    found = [ShardSpec(spec.dims)]
    for axis, _ in spec.partial:
        grown = []
        for base in found:
            for dim, axes in enumerate(base.dims):
                if shape[dim] % mesh.units((*axes, axis)) == 0:
                    grown.append(ShardSpec((*base.dims[:dim], (*axes, axis), *base.dims[dim + 1 :])))
        found = grown or found
    return found
