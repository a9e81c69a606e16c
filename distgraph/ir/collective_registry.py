"""The collective registry: a collective is declared once, and all else is derived from its declaration.

    register_collective(Collective("all_gather", layout_after=..., steps=..., sent=..., traffic="ring", ...))

A declaration says what the collective means (the layout of a tensor before and after it; the values of the
tensor never change), which steps of a redistribution it offers, how many bytes a rank sends, and what a rank
passes to its transport. Two further declarations use the same name and belong to other rooms: the cost of the
collective on a cluster (`distgraph.resources.collective_algorithms.register_algorithms`) and the call that
runs it (`distgraph.runtime.transport.collectives.register_call`). `distgraph.ir.collectives` declares the
built-in collectives.

Every collective that changes layouts is also an op of the graph, `comm.<name>`, which is the identity on the
global tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np

from distgraph.errors import GraphError
from distgraph.ir.graph import Op, Value
from distgraph.ir.index_rule import Rule, make_rule
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import REGISTRY, Attrs, Shape, Shapes, View, Windows, define
from distgraph.ir.sharding_spec import DistAttr, ShardSpec

Dims = tuple[tuple[str, ...], ...]
Traffic = Literal["ring", "pairs", "tiles", "none"]
ResultMemory = Literal["new", "operand", "part", "replaced"]
Fusible = Literal["", "block", "pieces"]
SplitRule = Literal["", "leads_to", "worth_scattering", "worth_slicing"]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a redistribution: a collective that leads from one layout of a tensor to the next.

    Attributes:
        kind: name of the collective.
        axes: mesh axes of the group, major to minor: `mesh.group(rank, axes)` lists its ranks in the order of
            the blocks. For a permute, whose partners are in `tiles_between`, all axes that change place.
        dim: dim that is sliced, gathered or scattered; for all_to_all the dim that gives the axes away.
        to_dim: for all_to_all, the dim that gets the axes.
        reduction: sum, max, min or prod, where the kind reduces or masks.
        source: layout before.
        target: layout after.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int | None
    to_dim: int | None
    reduction: str | None
    source: ShardSpec
    target: ShardSpec

    @property
    def local(self) -> bool:
        """True when nothing is sent."""
        return COLLECTIVES[self.kind].local

    def __str__(self) -> str:
        where = "" if self.dim is None else f" dim {self.dim}"
        where += "" if self.to_dim is None else f"->{self.to_dim}"
        what = ", ".join(self.axes) + ("" if self.reduction in (None, "sum") else f":{self.reduction}")
        return f"{self.kind}({what}){where}: {self.source} -> {self.target}"


class StepAttrs(NamedTuple):
    """Attributes of a collective op in the graph; see `Step`."""

    axes: tuple[str, ...]
    dim: int = 0
    to_dim: int = 0
    reduction: str = "sum"


class BlockSizes(NamedTuple):
    """Elements of the largest blocks of a step; numbers, or arrays with one entry a step.

    Attributes:
        before, after: the block of a rank before and after the step.
        piece: the part of the block before the step that one member of the group gets.
        members: ranks in the group.
    """

    before: Any
    after: Any
    piece: Any
    members: Any


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two numbers, or of each pair of entries of two arrays."""
    return np.minimum(a, b) if isinstance(a, np.ndarray) else min(a, b)


def larger(a: Any, b: Any) -> Any:
    """The larger of two numbers, or of each pair of entries of two arrays."""
    return np.maximum(a, b) if isinstance(a, np.ndarray) else max(a, b)


@dataclass(frozen=True, slots=True)
class RankCall:
    """A collective op as one rank runs it: what `Collective.arguments` sees.

    Attributes:
        op: the op of the graph.
        source, target: layouts of its operand and its result.
        rank: the rank.
        group: ranks that take part, in the order of their blocks.
    """

    op: Op
    source: DistAttr
    target: DistAttr
    rank: int
    group: tuple[int, ...]

    def lengths(self, layout: DistAttr, dim: int) -> tuple[int, ...]:
        """Length of a dim on every member of the group."""
        return _lengths(layout.mesh, self.group, layout.spec.dims[dim], self.op.result.shape[dim])


@lru_cache(maxsize=4096)
def _lengths(mesh: ProcessMesh, group: tuple[int, ...], axes: tuple[str, ...], size: int) -> tuple[int, ...]:
    """Length of a dim on every member of a group; every member asks for all, for each of equal layers."""
    bounds = (mesh.block(size, axes, mesh.index(member, axes)) for member in group)
    return tuple(stop - start for start, stop in bounds)


LayoutAfter = Callable[[ShardSpec, StepAttrs], ShardSpec | None]
StepGenerator = Callable[["Space", ShardSpec], Iterator[Step]]


@dataclass(frozen=True, slots=True)
class Collective:
    """Declaration of a collective.

    Attributes:
        name: its name; the op in printed graphs is `comm.<name>`.
        sent: elements that one rank sends, from the sizes of blocks; never negative.
        traffic: who sends to whom. "ring": each member of the group sends to the next. "pairs": each member
            sends equally much to every other. "tiles": ranks exchange pieces of blocks that follow from the
            two layouts. "none": nothing is sent, the rank changes its own block.
        layout_after: layout of the tensor after the collective, from the one before and the attributes of the
            op; None where they do not fit. Absent for a collective that is no change of layout in the graph.
        steps: the steps that the collective offers on the way from one layout to another. Generators may be
            shared by several collectives.
        split_rule: of a collective whose steps split a dim over further axes: the method of `Space` that
            decides whether such a step may lead to the goal.
        growth: the block after has the size of the block before times (members of the group) ** growth. The
            size by which costs are stated is that of the larger of the two.
        tie_break: fraction of a byte, the same for all sizes, that decides between steps that send equally
            many bytes.
        ordered: whether the bytes on links depend on the order of the group.
        parameters: names of the attributes of a rank that its transport call takes between the operand and
            `out`, in order, such as ("dim", "group").
        arguments: returns those attributes for one rank, without "group"; of a collective that sends nothing,
            the attributes of the rank's part of it ("slices", or "keep" and "reduction").
        packed: "operand" or "result" -> the attribute that names a dim. That block is copied into contiguous
            memory unless all dims before it have length 1.
        result_memory: where the result is written. "new": in newly allocated memory. "operand": in the memory
            of the operand, if nothing else reads it. "part": also where it is in the operand.
            "replaced": also in that of the parameter it replaces.
        view: whether the result aliases the operand's memory (see `OpDef.view`); only where nothing is sent.
        fusible: whether and how one message may carry several tensors, in an op with several operands and one
            result for each of them. "block": the transport gets one flat block of memory. "pieces": the call
            `<name>_pieces` packs for each member its pieces of all tensors; the op has the attribute `dims`
            in place of `dim`, with one entry for each tensor (see `of_one_tensor`).
    """

    name: str
    sent: Callable[[BlockSizes], Any]
    traffic: Traffic
    layout_after: LayoutAfter | None = None
    steps: StepGenerator | None = None
    split_rule: SplitRule = ""
    growth: int = 0
    tie_break: float = 1e-3
    ordered: bool = True
    parameters: tuple[str, ...] = ("group",)
    arguments: Callable[[RankCall], Attrs] | None = None
    packed: Mapping[str, str] = field(default_factory=dict)
    result_memory: ResultMemory = "new"
    view: View = ""
    fusible: Fusible = ""

    @property
    def local(self) -> bool:
        """True when nothing is sent."""
        return self.traffic == "none"

    @property
    def grouped(self) -> bool:
        """True when all ranks of a group call the transport together."""
        return self.traffic in ("ring", "pairs")

    def sent_share(self, members: int) -> float:
        """Bytes that one rank sends for every byte of the collective's size, in a group of some members."""
        if members == 1:
            return 0.0
        before = 1 if self.growth > 0 else members
        after = before * members if self.growth > 0 else 1 if self.growth < 0 else before
        share: float = self.sent(BlockSizes(before, after, 1, members)) / members
        return share


COLLECTIVES: dict[str, Collective] = {}
"""Name -> declaration of every collective."""
_forget: list[Callable[[], None]] = []


def register_collective(collective: Collective) -> Collective:
    """Declare a collective, and its op where it is one.

    Raises:
        GraphError: the name is taken.
    """
    name = collective.name
    if name in COLLECTIVES:
        raise GraphError(f"collective {name} is declared twice; choose another name")
    if collective.layout_after is not None or collective.traffic == "tiles":
        define(op_kind(name), _own_indices, _no_kernel, infer=_same_types, linear=((0,),), cost="comm")
    COLLECTIVES[name] = collective
    _forget_plans()
    return collective


def unregister_collective(name: str) -> None:
    """Remove a collective, so that it can be declared again; an unknown name is ignored."""
    COLLECTIVES.pop(name, None)
    REGISTRY.pop(op_kind(name), None)
    _forget_plans()


def op_kind(name: str) -> str:
    """Kind of the op of a collective in the graph.

    >>> op_kind("all_gather")
    'comm.all_gather'
    """
    return f"comm.{name}"


def collective_of(kind: str) -> Collective | None:
    """The collective of an op kind, or of the mode of a rank's op; None for all other kinds."""
    prefix, _, name = kind.partition(".")
    return COLLECTIVES.get(name) if prefix == "comm" else None


def is_collective(op: Op) -> bool:
    """Whether an op is a collective, whose result has another layout than its operand."""
    return collective_of(op.kind) is not None


def of_one_tensor(op: Op, position: int) -> Op:
    """The collective of one of the tensors that an op sends in one message.

    >>> from distgraph.ir.graph import Value
    >>> x, y, a, b = (Value(name, (4, 4), "f32") for name in "xyab")
    >>> op = Op("comm.all_gather", (x, y), (a, b), {"axes": ("dp",), "dims": (0, 1)})
    >>> of_one_tensor(op, 1).result.name, of_one_tensor(op, 1).attrs
    ('b', {'axes': ('dp',), 'dim': 1})
    """
    if len(op.results) == 1:
        return op
    attrs = {name: value for name, value in op.attrs.items() if name != "dims"}
    if "dims" in op.attrs:
        attrs["dim"] = op.attrs["dims"][position]
    return replace(op, operands=(op.operands[position],), results=(op.results[position],), attrs=attrs)


EACH_MICRO_BATCH = "each_micro_batch"
"""Attribute of a collective that runs in every micro-batch although its operand stays the same."""


WIRE = "wire"
"""Attribute of an all_reduce or reduce_scatter: the narrower dtype in which its messages are sent."""
NARROWED = ("comm.all_reduce", "comm.reduce_scatter")
"""Kinds of ops that may have it."""


def wire_dtype(op: Op) -> str:
    """The dtype in which the messages of a collective are sent: that of its tensors, but for `WIRE`."""
    return str(op.attrs.get(WIRE, op.results[0].dtype))


def halo_windows(op: Op) -> Windows:
    """Windows that ranks hold of the result of an op: those of a halo exchange; none of any other op."""
    windows: Windows = op.attrs["windows"] if op.kind == "comm.halo" else ()
    return windows


def cached_until_registration(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`functools.lru_cache` for results that depend on the declared collectives.

    The cache is emptied whenever a collective is registered or unregistered.
    """

    def cached(function: Callable[P, R]) -> Callable[P, R]:
        cached_function = lru_cache(maxsize=maxsize)(function)
        _forget.append(cached_function.cache_clear)
        return cast("Callable[P, R]", cached_function)

    return cached


def _forget_plans() -> None:
    for clear in _forget:
        clear()


@lru_cache(maxsize=1)
def _step_generators() -> tuple[StepGenerator, ...]:
    """The distinct step generators of all declared collectives."""
    generators = (collective.steps for collective in COLLECTIVES.values())
    return tuple(dict.fromkeys(generator for generator in generators if generator is not None))


_forget.append(_step_generators.cache_clear)


def _same_types(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    return [(value.shape, value.dtype) for value in operands]


def _own_indices(shapes: Shapes, attrs: Attrs) -> Rule:
    """Every result has the indices of its operand, and no two operands share one."""
    return _indices_of(tuple(shapes))


@lru_cache(maxsize=65536)
def _indices_of(shapes: Shapes) -> Rule:
    numbers = itertools.count()
    terms = tuple(tuple((f"i{next(numbers)}",) for _ in shape) for shape in shapes)
    indices = (index for term in terms for (index,) in term)
    lengths = dict(zip(indices, itertools.chain(*shapes), strict=True))
    return make_rule("one result for each operand", terms, terms, lengths)


def _no_kernel(xp: Any, *arrays: Any, out: Any = None, **attrs: Any) -> Any:
    return arrays[0] if len(arrays) == 1 else arrays


@dataclass(frozen=True, slots=True)
class Space:
    """The search space of one redistribution: all that is constant during the search.

    Attributes:
        shape: global shape of the tensor.
        mesh: mesh on which the tensor is stored.
        working: mesh axes that may be used; axes of size 1 are left out.
        goal: the target layout.
        wide: whether steps that lead away from the goal are allowed too. Where all blocks nest, such steps
            are seldom on a cheapest path.
    """

    shape: tuple[int, ...]
    mesh: ProcessMesh
    working: tuple[str, ...]
    goal: ShardSpec
    wide: bool

    def steps(self, spec: ShardSpec) -> tuple[Step, ...]:
        """Every exact step out of a layout that can be on a cheapest path to the goal."""
        return _steps(self, spec)

    def unused(self, spec: ShardSpec) -> tuple[str, ...]:
        """Working axes that a layout does not use."""
        used = spec.axes
        return tuple(axis for axis in self.working if axis not in used)

    def nests(self, dim: int, axes: tuple[str, ...], keep: int) -> bool:
        """True when the blocks over `axes` lie inside those over the first `keep` of them."""
        if keep == 0 or keep == len(axes):
            return True
        return _nests(self.shape[dim], self.mesh.units(axes[:keep]), self.mesh.units(axes[keep:]))

    def leads_to(self, axes: tuple[str, ...], dim: int) -> bool:
        """True when the goal has one of the axes on this dim."""
        return self.wide or any(axis in self.goal.dims[dim] for axis in axes)

    def worth_scattering(self, dim: int, axes: tuple[str, ...]) -> bool:
        """True when the goal has one of the axes on this dim, or on no dim, so that any dim is as good."""
        return self.leads_to(axes, dim) or not any(axis in other for axis in axes for other in self.goal.dims)

    def worth_slicing(self, spec: ShardSpec, dim: int, axes: tuple[str, ...]) -> bool:
        """True when all axes belong on this dim, or can leave it together with others that must leave it."""
        if self.wide or all(axis in self.goal.dims[dim] for axis in axes):
            return True
        present = spec.dims[dim]
        if not present or present == self.goal.dims[dim][: len(present)]:
            return False
        return all(any(axis in other for other in self.goal.dims) for axis in axes)


@cached_until_registration(maxsize=1 << 12)
def _steps(space: Space, spec: ShardSpec) -> tuple[Step, ...]:
    """See `Space.steps`: paths from several layouts to one goal lead through the same layouts."""
    return tuple(step for generator in _step_generators() for step in generator(space, spec))


@lru_cache(maxsize=65536)
def _nests(size: int, parts: int, split: int) -> bool:
    block, small = -(-size // parts), -(-size // (parts * split))
    return all(min(size, i * block) == min(size, i * split * small) for i in range(parts))


def with_dim(dims: Dims, dim: int, axes: tuple[str, ...]) -> Dims:
    """The dims with the axes of one dim replaced."""
    return (*dims[:dim], axes, *dims[dim + 1 :])


@lru_cache(maxsize=1024)
def selections(axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """All ordered non-empty selections: `(x, y)` -> `(x,), (y,), (x, y), (y, x)`."""
    return tuple(
        selection for count in range(1, len(axes) + 1) for selection in itertools.permutations(axes, count)
    )
