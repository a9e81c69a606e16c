"""Single steps between all layouts of a tensor on the way to every goal at once, as arrays.

*In:* a shape and a mesh. *Out:* `Steps` in copies of the layouts, one copy for every goal and set of axes in
use. *Invariant:* the steps of `Space.steps` for that goal, the bytes of `step_bytes`.

What `Space.steps` gives where every dim takes all axes, to a goal that leaves nothing out, is remembered
for a number of dims and names of axes; what a shape or a goal rules out is masked. Permutes depend on the
goal in more ways: they are found among pairs of layouts. Sets of axes are bits, orders of axes are numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.collective_registry import BlockSizes, Space, cached_until_registration, selections
from distgraph.ir.collectives import COLLECTIVES
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Flags = NDArray[np.bool_]
Names = NDArray[np.str_]
Axes = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Table:
    """Layouts with a number of dims on some axes, and all steps but permutes if all blocks are even.

    Attributes:
        states: every layout with sums pending.
        orders: every order of some of the axes, none first; bits: the axes of each.
        begins: [orders, orders] whether the second begins with the first.
        common: [orders, orders] the longest order that both begin with.
        permutes: [orders, orders, orders] whether a permute leads a dim that the first splits to the second
            on the way to the third: to this one, or with axes behind it that a gather takes off again, in
            the present order if there are the same, else in that of the mesh.
        dims: [states, dims] the order that splits a dim; pending: [states] axes with sums pending.
        kinds: (kind, axes) of steps, without axes where nothing is sent.
        steps: [5, steps] layouts before and after, kind, axes that move, dim at whose end they arrive or 0.
    """

    states: tuple[ShardSpec, ...]
    orders: tuple[Axes, ...]
    bits: Ints
    begins: Flags
    common: Ints
    permutes: Flags
    dims: Ints
    pending: Ints
    kinds: tuple[tuple[str, Axes], ...]
    steps: Ints


@cached_until_registration(maxsize=256)
def _table(ndim: int, axes: Axes) -> _Table:
    states, orders = tuple(_states(ndim, axes)), ((), *selections(axes))
    number = {order: i for i, order in enumerate(orders)}
    bits = np.array([_bits(order, axes) for order in orders])
    begins = np.array([[b[: len(a)] == a for b in orders] for a in orders])
    ordered = np.array([[_in_order(b[len(a) :], axes) for b in orders] for a in orders])
    stays = begins.T[:, None] & (bits[:, None] == bits)[:, :, None]  # [before, after, goal]
    same = np.eye(len(orders), dtype=np.bool_)[:, :, None]
    kinds, steps = _whole(states, axes)
    return _Table(
        states,
        orders,
        bits,
        begins,
        np.array([[number[_common(a, b)] for b in orders] for a in orders]),
        np.where(stays, same, (begins & ordered).T),
        np.array([number[dim] for state in states for dim in state.dims], np.intp).reshape(len(states), ndim),
        np.array([_bits((axis for axis, _ in state.partial), axes) for state in states]),
        kinds,
        steps,
    )


def _in_order(some: Axes, axes: Axes) -> bool:
    return some == tuple(axis for axis in axes if axis in some)


def _common(a: Axes, b: Axes) -> Axes:
    return next(a[:n] for n in range(len(a), -1, -1) if a[:n] == b[:n])


def _bits(some: Iterable[str], axes: Axes) -> int:
    return sum(1 << axes.index(axis) for axis in some)


def _states(ndim: int, axes: Axes) -> Iterator[ShardSpec]:
    """Every layout: each axis on a dim, pending or unused; all orders of the axes of a dim."""
    for places in itertools.product(range(ndim + 2), repeat=len(axes)):
        split = [tuple(a for a, p in zip(axes, places, strict=True) if p == dim) for dim in range(ndim)]
        partial = tuple((a, "sum") for a, p in zip(axes, places, strict=True) if p == ndim + 1)
        for dims in itertools.product(*(itertools.permutations(d) for d in split)):
            yield ShardSpec(tuple(dims), partial)


def _whole(states: tuple[ShardSpec, ...], axes: Axes) -> tuple[tuple[tuple[str, Axes], ...], Ints]:
    """Kinds and steps of a table: `Space.steps` where every dim takes all axes, the goal has all partial."""
    ndim, number = len(states[0].dims), {state: i for i, state in enumerate(states)}
    goal = ShardSpec(((),) * ndim, tuple((axis, "sum") for axis in axes))
    mesh = ProcessMesh.grid(**dict.fromkeys(axes, 2) or {"none": 1})
    space = Space((mesh.size,) * ndim, mesh, axes, goal, wide=True)
    kinds: dict[tuple[str, Axes], int] = {}
    steps = [
        (
            number[step.source],
            number[step.target],
            kinds.setdefault((step.kind, () if step.local else step.axes), len(kinds)),
            _bits(step.axes, axes),
            (step.dim if step.to_dim is None else step.to_dim) or 0,
        )
        for state in states
        for step in space.steps(state)
    ]
    return tuple(kinds), np.array(steps, dtype=np.intp).reshape(-1, 5).T


class Layouts:
    """The layouts of a shape.

    Args:
        even: whether all dims divide by all counts of parts that are no larger. Then no dim has more parts
            than positions: sizes that are cut alike differ beyond.

    Attributes:
        states: the layouts.
        chosen: their numbers in the table.
        dims: [states, dims] order that splits a dim; split: its axes.
        pending: [states] axes with sums pending; placed: axes on dims; used: both.
        length: [states, dims] of the longest block; volume: [states] its elements; elements: of the tensor.
        count: [sets of axes] product of their sizes.
        nests: [dims, orders, orders] whether one order begins with the other and blocks lie in the other's.
        stuck: [states, states] whether a dim keeps some axes and the blocks of either do not nest in those
            over these.
    """

    def __init__(self, sizes: tuple[int, ...], mesh: ProcessMesh, *, even: bool) -> None:
        axes = tuple(axis for axis in mesh.axes if mesh.axis_size(axis) > 1)
        self.table = table = _table(len(sizes), axes)
        self.axes, self.sizes = axes, np.array(sizes, dtype=np.intp)
        self.count = np.array([mesh.count(_names(some, axes)) for some in range(1 << len(axes))])
        short = np.any(self.count[table.bits[table.dims]] > np.maximum(1, self.sizes), axis=1)
        self.chosen = np.flatnonzero(~(short & even))
        self.states = tuple(table.states[i] for i in self.chosen)
        self.dims, self.pending = table.dims[self.chosen], table.pending[self.chosen]
        self.split = table.bits[self.dims]
        self.placed = np.bitwise_or.reduce(self.split, axis=1)
        self.used = self.placed | self.pending
        self.length = -(-self.sizes // self.count[self.split])
        self.elements = max(1, math.prod(sizes))
        self.volume = np.prod(self.length, axis=1, dtype=np.float64)
        self.nests = np.array([self._nests(size, mesh) for size in sizes]).reshape(-1, *table.begins.shape)
        self.stuck = np.zeros((len(self.dims),) * 2, dtype=np.bool_) if even else self._stuck()

    def _nests(self, size: int, mesh: ProcessMesh) -> Flags:
        space = Space((size,), mesh, self.axes, ShardSpec(((),)), wide=True)
        found = self.table.begins.copy()
        for short, long in np.argwhere(found):
            found[short, long] = space.nests(0, self.table.orders[long], len(self.table.orders[short]))
        either: Flags = found | found.T
        return either

    def _stuck(self) -> Flags:
        kept = self.table.common[self.dims[:, None], self.dims]
        dims = np.arange(len(self.sizes))
        nest = self.nests[dims, kept, self.dims[:, None]] & self.nests[dims, kept, self.dims]
        found: Flags = ~np.all(nest, axis=2)
        return found


def _names(bits: int, axes: Axes) -> Axes:
    return tuple(axis for i, axis in enumerate(axes) if bits >> i & 1)


@dataclass(frozen=True, eq=False)
class Copies:
    """The copies of the layouts: goal, axes in use and whether detours count, one of each a copy.

    Attributes:
        goal, working, wide: [copies].
        where: [states, states] see `Routes`.
    """

    goal: Ints
    working: Ints
    wide: Flags
    where: Ints


def copies_of(layouts: Layouts) -> Copies:
    """The copies that pairs of layouts need; those of goals that differ in an exchange of dims of one size
    alone are one. `redistribute` looks at detours where a dim does not divide over the axes at both ends."""
    states = np.arange(len(layouts.states))
    alike = _alike(layouts)
    working = layouts.used[:, None] | layouts.used
    both = layouts.split[:, None] | layouts.split
    wide = np.any(layouts.sizes % layouts.count[both], axis=2)
    shape = len(states), len(layouts.count), 2
    key = np.ravel_multi_index((np.broadcast_to(alike[states, states], wide.shape), working, wide * 1), shape)
    found, copy = np.unique(key.ravel(), return_inverse=True)
    goal, working, wide = np.unravel_index(found, shape)
    return Copies(goal, working, wide == 1, copy.reshape(key.shape) * len(states) + alike)


def _alike(layouts: Layouts) -> Ints:
    """[states, goals] a layout once dims of one size change places, so that those of the goal are sorted."""
    count, ndim = layouts.dims.shape
    order = np.lexsort((layouts.dims, np.broadcast_to(layouts.sizes, (count, ndim))), axis=1)
    exchanged = np.empty_like(order)
    exchanged[:, np.argsort(layouts.sizes, kind="stable")] = order
    radix = len(layouts.table.orders) ** np.arange(ndim)
    codes = (layouts.dims @ radix << len(layouts.axes)) | layouts.pending
    wanted = (layouts.dims[:, exchanged] @ radix << len(layouts.axes)) | layouts.pending[:, None]
    position = np.argsort(codes)
    return position[np.searchsorted(codes, wanted, sorter=position)]


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps in copies of the layouts.

    Attributes:
        copy: of every step; source, target: the layouts before and after.
        price: position of its kind and fraction; kinds: see `Routes`.
    """

    copy: Ints
    source: Ints
    target: Ints
    price: Ints
    kinds: tuple[tuple[str, Axes, Floats], ...]


def steps(layouts: Layouts, copies: Copies) -> Steps:
    """All steps but permutes."""
    table = layouts.table
    number = np.full(len(table.states), -1)
    number[layouts.chosen] = np.arange(len(layouts.chosen))
    source, target = number[table.steps[:2]]
    dims = np.arange(len(layouts.sizes))
    nest = np.all(layouts.nests[dims, layouts.dims[source], layouts.dims[target]], axis=1)
    kept = np.flatnonzero(nest & (source >= 0) & (target >= 0))
    source, target, kind, axes, dim = source[kept], target[kept], *table.steps[2:, kept]
    name = np.array([kind for kind, _ in table.kinds] or [""])[kind]
    used = layouts.used[source] | layouts.used[target]
    taken = (used & ~copies.working[:, None] == 0) & (source != copies.goal[:, None])
    taken &= (name != "mask") | (axes & ~layouts.pending[copies.goal, None] == 0)
    arrive = np.flatnonzero(np.isin(name, ("all_to_all", "reduce_scatter", "slice")))
    taken[:, arrive] &= _worth(layouts, copies, *(each[arrive] for each in (source, name, axes, dim)))
    copy, step = np.nonzero(taken)
    kinds, price = _priced(table.kinds, kind, _shares(layouts, source, target, name, axes, dim))
    return Steps(copy, source[step], target[step], price[step], kinds)


def _worth(layouts: Layouts, copies: Copies, source: Ints, name: Names, axes: Ints, dim: Ints) -> Flags:
    """[copies, steps] whether axes arrive on a dim on the way to a goal: `Space.leads_to` of all_to_all,
    `worth_scattering` and `worth_slicing`."""
    anywhere, there = layouts.placed[copies.goal, None], layouts.split[copies.goal][:, dim]
    here, aim = layouts.dims[source, dim], layouts.dims[copies.goal][:, dim]
    leads = axes & there != 0
    strays = (here != 0) & ~layouts.table.begins[here, aim]
    scatters = leads | (axes & anywhere == 0)
    slices = (axes & ~there == 0) | (strays & (axes & ~anywhere == 0))
    found: Flags = copies.wide[:, None] | np.select(
        [name == "all_to_all", name == "reduce_scatter"], [leads, scatters], slices
    )
    return found


def _shares(layouts: Layouts, source: Ints, target: Ints, name: Names, axes: Ints, dim: Ints) -> Floats:
    """Bytes that a rank sends in every step, a byte of the tensor (`step_bytes`)."""
    before, after, group = layouts.volume[source], layouts.volume[target], layouts.count[axes]
    arrives = np.arange(len(layouts.sizes)) == dim[:, None]
    piece = np.prod(
        np.where(arrives, layouts.length[target], layouts.length[source]), axis=1, dtype=np.float64
    )
    sent = np.zeros(len(name))
    for kind in dict.fromkeys(name.tolist()):
        some = name == kind
        sizes = BlockSizes(before[some], after[some], piece[some], group[some])
        sent[some] = COLLECTIVES[kind].sent(sizes)
    return sent / layouts.elements


def permutes(layouts: Layouts, copies: Copies) -> Steps:
    """Exchanges to the dims of the goal or to these with more axes, see `distgraph.ir.collectives`."""
    table, dims, goal = layouts.table, layouts.dims, copies.goal
    refined = np.all(table.begins[dims[goal][:, None], dims], axis=2)
    refined &= (layouts.used & ~copies.working[:, None] == 0) & (layouts.placed[goal, None] != 0)
    copy, target = np.nonzero(refined)
    aim = goal[copy]
    even = layouts.count[layouts.placed[target, None]] == layouts.count[layouts.placed]
    straight = np.all(dims[target] == dims[aim], axis=1)
    taken = even | (straight[:, None] & layouts.stuck[aim])
    taken &= layouts.used & ~copies.working[copy, None] == 0
    taken &= layouts.pending == layouts.pending[target, None]
    for dim in range(dims.shape[1]):
        taken &= table.permutes[dims[:, dim], dims[target, None, dim], dims[aim, None, dim]]
    states = np.arange(len(dims))
    taken &= (states != aim[:, None]) & (states != target[:, None])
    row, source = np.nonzero(taken)
    copy, target = copy[row], target[row]
    moved = np.where(dims[source] != dims[target], layouts.split[source] | layouts.split[target], 0)
    axes = np.bitwise_or.reduce(moved, axis=1)
    before, after = layouts.volume[source], layouts.volume[target]
    sent = COLLECTIVES["permute"].sent(BlockSizes(before, after, after, layouts.count[axes]))
    names = [("permute", _names(some, layouts.axes)) for some in range(len(layouts.count))]
    kinds, price = _priced(names, axes, sent / layouts.elements)
    return Steps(copy, source, target, price, kinds)


def _priced(
    names: Sequence[tuple[str, Axes]], kind: Ints, share: Floats
) -> tuple[tuple[tuple[str, Axes, Floats], ...], Ints]:
    """Kinds with their fractions, and the position of that of every step."""
    shares, which = np.unique(share, return_inverse=True)
    found, price = np.unique(kind * len(shares) + which, return_inverse=True)
    each, which = np.divmod(found, max(1, len(shares)))
    kinds = tuple((*names[number], shares[which[each == number]]) for number in np.unique(each))
    return kinds, price
