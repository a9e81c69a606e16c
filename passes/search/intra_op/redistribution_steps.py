"""Single steps between all layouts of a tensor, for all goals at once, as arrays.

*In:* a shape and a mesh. *Out:* `Steps` in copies of the layouts, one copy for every goal and set of axes in
use. *Invariant:* the steps of a copy are those of `Space.steps` for its goal, with the bytes of `step_bytes`.

The steps of `Space.steps` for dims that every axis divides and a goal that excludes no step are cached by the
number of dims and the names of the axes. Steps that a shape or a goal excludes are masked. Permutes depend on
the goal in more ways and are enumerated as pairs of layouts. A set of axes is a bit mask, an order of axes is
an index in a table of all orders.
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
from distgraph.ir.float_arrays import Floats
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec

Ints = NDArray[np.intp]
Flags = NDArray[np.bool_]
Names = NDArray[np.str_]
Axes = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _StepTable:
    """All layouts with a number of dims on given axes, and all steps but permutes for even blocks.

    Attributes:
        states: every layout, those with partial sums included.
        orders: every order of some of the axes, the empty order first.
        bits: [orders] the axes of each order.
        begins: [orders, orders] whether the second order begins with the first.
        common: [orders, orders] index of the longest order with which both begin.
        permutes: [orders, orders, orders] whether a permute may take a dim that is split by the first order
            to the second, if the goal splits it by the third. The second is the third, or the third followed
            by axes that a later all_gather removes: in their present order if the first has the same axes,
            else in the order of the mesh.
        dims: [states, dims] index of the order that splits a dim.
        partial: [states] axes over which a layout is partial.
        kinds: (kind, axes) of steps; no axes where nothing is sent.
        steps: [5, steps] the layouts before and after, the kind, the axes that move, and the dim that they
            split afterwards (0 if none).
    """

    states: tuple[ShardSpec, ...]
    orders: tuple[Axes, ...]
    bits: Ints
    begins: Flags
    common: Ints
    permutes: Flags
    dims: Ints
    partial: Ints
    kinds: tuple[tuple[str, Axes], ...]
    steps: Ints


@cached_until_registration(maxsize=256)
def _step_table(ndim: int, axes: Axes) -> _StepTable:
    states, orders = tuple(_states(ndim, axes)), ((), *selections(axes))
    number = {order: i for i, order in enumerate(orders)}
    bits = np.array([_bits(order, axes) for order in orders])
    begins = np.array([[b[: len(a)] == a for b in orders] for a in orders])
    ordered = np.array([[_in_order(b[len(a) :], axes) for b in orders] for a in orders])
    same_axes = begins.T[:, None] & (bits[:, None] == bits)[:, :, None]  # [before, after, goal]
    unchanged = np.eye(len(orders), dtype=np.bool_)[:, :, None]
    kinds, steps = _all_steps(states, axes)
    return _StepTable(
        states,
        orders,
        bits,
        begins,
        np.array([[number[_common_start(a, b)] for b in orders] for a in orders]),
        np.where(same_axes, unchanged, (begins & ordered).T),
        np.array([number[dim] for state in states for dim in state.dims], np.intp).reshape(len(states), ndim),
        np.array([_bits((axis for axis, _ in state.partial), axes) for state in states]),
        kinds,
        steps,
    )


def _in_order(subset: Axes, axes: Axes) -> bool:
    return subset == tuple(axis for axis in axes if axis in subset)


def _common_start(a: Axes, b: Axes) -> Axes:
    return next(a[:n] for n in range(len(a), -1, -1) if a[:n] == b[:n])


def _bits(subset: Iterable[str], axes: Axes) -> int:
    return sum(1 << axes.index(axis) for axis in subset)


def _states(ndim: int, axes: Axes) -> Iterator[ShardSpec]:
    """Every layout: each axis splits a dim, is partial or is unused; the axes of a dim come in all orders."""
    for roles in itertools.product(range(ndim + 2), repeat=len(axes)):
        split = [tuple(a for a, role in zip(axes, roles, strict=True) if role == dim) for dim in range(ndim)]
        partial = tuple((a, "sum") for a, role in zip(axes, roles, strict=True) if role == ndim + 1)
        for dims in itertools.product(*(itertools.permutations(d) for d in split)):
            yield ShardSpec(tuple(dims), partial)


def _all_steps(states: tuple[ShardSpec, ...], axes: Axes) -> tuple[tuple[tuple[str, Axes], ...], Ints]:
    """Kinds and steps of a table: `Space.steps` for dims that all axes divide and a goal partial over all."""
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


class LayoutTable:
    """The layouts of one shape on one mesh, as arrays.

    Args:
        sizes: of the dims.
        mesh: the mesh.
        even: whether every dim is divisible by all numbers of parts up to its size. Then layouts that split a
            dim into more parts than it has elements are left out, because shapes with one representative
            differ in those.

    Attributes:
        table: steps of all layouts with this number of dims.
        states: the layouts.
        chosen: [states] their indices in the table.
        dims: [states, dims] index of the order that splits a dim.
        split: [states, dims] the axes that split a dim.
        partial: [states] the axes over which a layout is partial.
        placed: [states] the axes that split some dim.
        used: [states] `placed` and `partial` together.
        length: [states, dims] length of the longest block.
        volume: [states] elements of the longest block.
        elements: elements of the tensor.
        count: [sets of axes] product of their sizes.
        nests: [dims, orders, orders] whether one order begins with the other, and each block of the longer
            order is inside a block of the shorter one.
        stuck: [states, states] whether two layouts share the first axes of a dim, but blocks of either are
            not inside the blocks over these shared axes.
    """

    def __init__(self, sizes: tuple[int, ...], mesh: ProcessMesh, *, even: bool) -> None:
        axes = tuple(axis for axis in mesh.axes if mesh.axis_size(axis) > 1)
        self.table = table = _step_table(len(sizes), axes)
        self.axes, self.sizes = axes, np.array(sizes, dtype=np.intp)
        self.count = np.array([mesh.count(_names(bits, axes)) for bits in range(1 << len(axes))])
        empty_blocks = np.any(self.count[table.bits[table.dims]] > np.maximum(1, self.sizes), axis=1)
        self.chosen = np.flatnonzero(~(empty_blocks & even))
        self.states = tuple(table.states[i] for i in self.chosen)
        self.dims, self.partial = table.dims[self.chosen], table.partial[self.chosen]
        self.split = table.bits[self.dims]
        self.placed = np.bitwise_or.reduce(self.split, axis=1)
        self.used = self.placed | self.partial
        self.length = -(-self.sizes // self.count[self.split])
        self.elements = max(1, math.prod(sizes))
        self.volume = np.prod(self.length, axis=1, dtype=np.float64)
        self.nests = np.array([self._nests(size, mesh) for size in sizes]).reshape(-1, *table.begins.shape)
        self.stuck = np.zeros((len(self.dims),) * 2, dtype=np.bool_) if even else self._stuck()

    def _nests(self, size: int, mesh: ProcessMesh) -> Flags:
        space = Space((size,), mesh, self.axes, ShardSpec(((),)), wide=True)
        nested = self.table.begins.copy()
        for short, long in np.argwhere(nested):
            nested[short, long] = space.nests(0, self.table.orders[long], len(self.table.orders[short]))
        either: Flags = nested | nested.T
        return either

    def _stuck(self) -> Flags:
        shared = self.table.common[self.dims[:, None], self.dims]
        dims = np.arange(len(self.sizes))
        nested = self.nests[dims, shared, self.dims[:, None]] & self.nests[dims, shared, self.dims]
        stuck: Flags = ~np.all(nested, axis=2)
        return stuck


def _names(bits: int, axes: Axes) -> Axes:
    return tuple(axis for i, axis in enumerate(axes) if bits >> i & 1)


@dataclass(frozen=True, eq=False)
class GoalCopies:
    """The copies of the layouts, one for every goal, set of axes in use and flag whether detours count.

    Attributes:
        goal: [copies] index of the goal.
        working: [copies] the axes in use.
        wide: [copies] whether detours count.
        vertex_of: [states, states] see `StepGraph`.
    """

    goal: Ints
    working: Ints
    wide: Flags
    vertex_of: Ints


def goal_copies(layouts: LayoutTable) -> GoalCopies:
    """The copies that all pairs of layouts need.

    Goals that differ only by an exchange of dims of equal size share a copy. Detours count, as in the
    planner, where the axes of a dim at both ends together do not divide its size.
    """
    states = np.arange(len(layouts.states))
    exchanged = _with_sorted_goal(layouts)
    working = layouts.used[:, None] | layouts.used
    both = layouts.split[:, None] | layouts.split
    wide = np.any(layouts.sizes % layouts.count[both], axis=2)
    shape = len(states), len(layouts.count), 2
    goals = np.broadcast_to(exchanged[states, states], wide.shape)
    key = np.ravel_multi_index((goals, working, wide * 1), shape)
    keys, copy = np.unique(key.ravel(), return_inverse=True)
    goal, working, wide = np.unravel_index(keys, shape)
    return GoalCopies(goal, working, wide == 1, copy.reshape(key.shape) * len(states) + exchanged)


def _with_sorted_goal(layouts: LayoutTable) -> Ints:
    """[states, goals] index of a layout after the exchange of equal dims that sorts the dims of the goal."""
    count, ndim = layouts.dims.shape
    order = np.lexsort((layouts.dims, np.broadcast_to(layouts.sizes, (count, ndim))), axis=1)
    exchanged = np.empty_like(order)
    exchanged[:, np.argsort(layouts.sizes, kind="stable")] = order
    radix = len(layouts.table.orders) ** np.arange(ndim)
    codes = (layouts.dims @ radix << len(layouts.axes)) | layouts.partial
    after_exchange = (layouts.dims[:, exchanged] @ radix << len(layouts.axes)) | layouts.partial[:, None]
    position = np.argsort(codes)
    return position[np.searchsorted(codes, after_exchange, sorter=position)]


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps in copies of the layouts.

    Attributes:
        copy: [steps] the copy in which a step is.
        source, target: [steps] the layouts before and after.
        cost_index: [steps] see `StepGraph`.
        kinds: see `StepGraph`.
    """

    copy: Ints
    source: Ints
    target: Ints
    cost_index: Ints
    kinds: tuple[tuple[str, Axes, Floats], ...]


def steps(layouts: LayoutTable, copies: GoalCopies) -> Steps:
    """All steps but permutes."""
    table = layouts.table
    number = np.full(len(table.states), -1)
    number[layouts.chosen] = np.arange(len(layouts.chosen))
    source, target = number[table.steps[:2]]
    dims = np.arange(len(layouts.sizes))
    nested = np.all(layouts.nests[dims, layouts.dims[source], layouts.dims[target]], axis=1)
    legal = np.flatnonzero(nested & (source >= 0) & (target >= 0))
    source, target, kind, axes, dim = source[legal], target[legal], *table.steps[2:, legal]
    name = np.array([kind for kind, _ in table.kinds] or [""])[kind]
    used = layouts.used[source] | layouts.used[target]
    included = (used & ~copies.working[:, None] == 0) & (source != copies.goal[:, None])
    masked = layouts.partial[target] & ~layouts.partial[source]
    included &= masked & ~layouts.partial[copies.goal, None] == 0
    rule = np.array([COLLECTIVES[kind].split_rule for kind, _ in table.kinds] or [""])[kind]
    splitting = np.flatnonzero(rule != "")
    included[:, splitting] &= _leads_to_goal(
        layouts, copies, *(array[splitting] for array in (source, rule, axes, dim))
    )
    copy, step = np.nonzero(included)
    fractions = _sent_fractions(layouts, source, target, name, axes, dim)
    kinds, cost_index = _cost_kinds(table.kinds, kind, fractions)
    return Steps(copy, source[step], target[step], cost_index[step], kinds)


def _leads_to_goal(
    layouts: LayoutTable, copies: GoalCopies, source: Ints, rule: Names, axes: Ints, dim: Ints
) -> Flags:
    """[copies, steps] whether a step that splits a dim over further axes may lead to the goal.

    `rule` is `Collective.split_rule`, the name of the method of `Space` that decides the same for one step.
    """
    goal_axes, goal_split = layouts.placed[copies.goal, None], layouts.split[copies.goal][:, dim]
    order, goal_order = layouts.dims[source, dim], layouts.dims[copies.goal][:, dim]
    leads = axes & goal_split != 0
    off_path = (order != 0) & ~layouts.table.begins[order, goal_order]
    scatters = leads | (axes & goal_axes == 0)
    slices = (axes & ~goal_split == 0) | (off_path & (axes & ~goal_axes == 0))
    may_lead: Flags = copies.wide[:, None] | np.select(
        [rule == "leads_to", rule == "worth_scattering"], [leads, scatters], slices
    )
    return may_lead


def _sent_fractions(
    layouts: LayoutTable, source: Ints, target: Ints, name: Names, axes: Ints, dim: Ints
) -> Floats:
    """[steps] bytes that a rank sends, per byte of the tensor (`step_bytes`)."""
    before, after, group = layouts.volume[source], layouts.volume[target], layouts.count[axes]
    is_split_dim = np.arange(len(layouts.sizes)) == dim[:, None]
    piece = np.prod(
        np.where(is_split_dim, layouts.length[target], layouts.length[source]), axis=1, dtype=np.float64
    )
    sent = np.zeros(len(name))
    for kind in dict.fromkeys(name.tolist()):
        of_kind = name == kind
        sizes = BlockSizes(before[of_kind], after[of_kind], piece[of_kind], group[of_kind])
        sent[of_kind] = COLLECTIVES[kind].sent(sizes)
    return sent / layouts.elements


def permutes(layouts: LayoutTable, copies: GoalCopies) -> Steps:
    """Permutes to the dims of the goal, or to these split over more axes (see `distgraph.ir.collectives`)."""
    table, dims, goal = layouts.table, layouts.dims, copies.goal
    refined = np.all(table.begins[dims[goal][:, None], dims], axis=2)
    refined &= (layouts.used & ~copies.working[:, None] == 0) & (layouts.placed[goal, None] != 0)
    copy, target = np.nonzero(refined)
    goal_of = goal[copy]
    same_count = layouts.count[layouts.placed[target, None]] == layouts.count[layouts.placed]
    reaches_goal = np.all(dims[target] == dims[goal_of], axis=1)
    included = same_count | (reaches_goal[:, None] & layouts.stuck[goal_of])
    included &= layouts.used & ~copies.working[copy, None] == 0
    included &= layouts.partial == layouts.partial[target, None]
    for dim in range(dims.shape[1]):
        included &= table.permutes[dims[:, dim], dims[target, None, dim], dims[goal_of, None, dim]]
    states = np.arange(len(dims))
    included &= (states != goal_of[:, None]) & (states != target[:, None])
    pair, source = np.nonzero(included)
    copy, target = copy[pair], target[pair]
    moved = np.where(dims[source] != dims[target], layouts.split[source] | layouts.split[target], 0)
    axes = np.bitwise_or.reduce(moved, axis=1)
    before, after = layouts.volume[source], layouts.volume[target]
    sent = COLLECTIVES["permute"].sent(BlockSizes(before, after, after, layouts.count[axes]))
    names = [("permute", _names(bits, layouts.axes)) for bits in range(len(layouts.count))]
    kinds, cost_index = _cost_kinds(names, axes, sent / layouts.elements)
    return Steps(copy, source, target, cost_index, kinds)


def _cost_kinds(
    names: Sequence[tuple[str, Axes]], kind: Ints, fraction: Floats
) -> tuple[tuple[tuple[str, Axes, Floats], ...], Ints]:
    """The different fractions of each kind of step, and for every step the index of its kind and fraction."""
    fractions, inverse = np.unique(fraction, return_inverse=True)
    pairs, cost_index = np.unique(kind * len(fractions) + inverse, return_inverse=True)
    kind_of, index = np.divmod(pairs, max(1, len(fractions)))
    kinds = tuple((*names[number], fractions[index[kind_of == number]]) for number in np.unique(kind_of))
    return kinds, cost_index
