"""Double recursion: the devices are divided by one prime after the other, and each time all ops by weight.

*In:* a serial graph, a mesh of any size. *Out:* the mesh, its axes divided where ops are cut differently, and
`Layouts` on it. *Invariant:* every cut leaves blocks of equal size; annotations hold;
deterministic.

MindSpore's symbolic planner (SAPP): a cluster is symmetric at every order, so that a cut into p parts can be
decided alone, with the shapes that earlier cuts left; and relative costs in elements suffice, for only their
order counts. Cutting index i of an op costs

    cost(i) = (1 - 1 / p) * sum of weight * elements of the tensors of the op without i

because these are held whole, or added up if they are results. Not to cut the op costs the same for all its
tensors. Values without the leading index of the first operand (the samples), and parameters, weigh a quarter:
their gradients are summed once a step. For a product A[I, K] B[K, J] and p = 2:

    cut I: J K / 2 * 0.25        cut J: I K / 2        cut K: I J / 2

A value that one op makes with one dim cut and another op reads with another costs (1 - 1 / p) of its
elements on the way, and as much for its gradient on the way back; whole on one side, only one of the two.
Ops are decided
by weight, the greatest cost that a cut of theirs can have, largest first, each towards what is decided: one
pass over the ops for every prime.

Sources, gradients and updates follow, along one axis after the other, as in `propagation`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from distgraph.errors import ShardingError
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.index_rule import OpLayout, Rule, Term, representable
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import rule_of
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.passes.redistribution.planner import Price, wire_price
from distgraph.passes.redistribution.tiles import without_unit_axes
from distgraph.passes.search.intra_op.chosen_layouts import Layouts
from distgraph.passes.search.modes.propagation import laid_out, spread

ONCE = 0.25
"""Weight of what is summed once a step, relative to what is sent for every micro-batch."""

Axes = tuple[tuple[str, tuple[str, ...]], ...]
Cut = str | None
"""The index of an op that is cut, or None."""


def recursive(
    graph: Graph, mesh: ProcessMesh, price: Price = wire_price, most_axes: int | None = None
) -> tuple[ProcessMesh, Layouts]:
    """Layouts by double recursion.

    Args:
        graph: serial; its annotations hold.
        mesh: where everything runs; the first axis is divided first.
        price: of one collective, for what follows the forward ops.
        most_axes: of the mesh, at most: between layouts on more, changes take minutes to find; None for any.

    Returns:
        the mesh, each axis divided into as few as tell the cuts apart, and layouts on it.

    Raises:
        ShardingError: an annotation does not fit the mesh, the mesh has weights, or there are too many axes.
    """
    primes = prime_mesh(mesh)
    singles = {axis: ProcessMesh.grid(**{axis: primes.sizes[axis]}) for axis in primes.axes}
    forward: dict[str, Mapping[str, OpLayout]] = {}
    search = _Recursion(graph, primes)
    for axis, single in singles.items():
        forward[axis] = search.divide(single)
        search.take(forward[axis], axis)
    _check_axes(graph, mesh, _parts(mesh, forward), most_axes)
    cuts, search = {}, _Recursion(graph, primes)
    for axis, single in singles.items():
        cuts[axis] = spread(_along(graph, mesh, single), single, price, forward[axis], search.allows)
        search.take(cuts[axis], axis)
    parts = _parts(mesh, cuts)
    _check_axes(graph, mesh, parts, most_axes)
    names = {
        axis: [axis] if len(runs) == 1 else [f"{axis}_{i}" for i in range(len(runs))]
        for axis, runs in parts.items()
    }
    shape = [primes.count(run) for axis in mesh.axes for run in parts[axis]]
    divided = ProcessMesh(mesh.ranks.reshape(shape), [name for axis in mesh.axes for name in names[axis]])
    joined = {
        prime: name
        for axis in mesh.axes
        for name, run in zip(names[axis], parts[axis], strict=True)
        for prime in run
    }
    ops = {op.name: _joined(search.layout(op), divided, joined) for op in graph.ops}
    return divided, laid_out(_renamed(graph, mesh, divided, names), divided, ops, price, "recursive")


def _check_axes(
    graph: Graph, mesh: ProcessMesh, parts: Mapping[str, Sequence[object]], most_axes: int | None
) -> None:
    """Raise where cuts, of all ops or of forward ops alone, tell more than `most_axes` axes apart."""
    if most_axes is not None and sum(map(len, parts.values())) > most_axes:
        raise ShardingError(
            f"graph @{graph.name}: double recursion cuts {mesh} along more axes than the {most_axes} "
            f"between which changes of layout are looked for; search in mode recursive, which takes minutes"
        )


def _parts(mesh: ProcessMesh, cuts: Mapping[str, Mapping[str, OpLayout]]) -> dict[str, list[tuple[str, ...]]]:
    """The axes into which the cuts divide each axis of a mesh, as runs of prime ones."""
    return {axis: _runs(_finer(mesh, axis), cuts) for axis in mesh.axes}


def _runs(axes: Sequence[str], cuts: Mapping[str, Mapping[str, OpLayout]]) -> list[tuple[str, ...]]:
    """Runs of adjacent axes along which all ops are cut in the same way."""

    def cut(axis: str) -> list[object]:
        layouts = cuts[axis].values()
        return [([index for index, _ in x.axes], [group for _, group in x.partial]) for x in layouts]

    return [tuple(run) for _, run in groupby(axes, key=cut)]


def _joined(layout: OpLayout, mesh: ProcessMesh, names: Mapping[str, str]) -> OpLayout:
    """A layout on joined axes."""
    axes = tuple((index, tuple(dict.fromkeys(names[a] for a in split))) for index, split in layout.axes)
    return OpLayout(mesh, axes, tuple(dict.fromkeys((names[a], group) for a, group in layout.partial)))


def _renamed(
    graph: Graph, mesh: ProcessMesh, finer: ProcessMesh, names: Mapping[str, Sequence[str]]
) -> Graph:
    """The graph with its annotations on the axes into which those of a mesh are divided.

    Axes that `finer` does not have split nothing there.
    """

    def renamed(attr: DistAttr) -> DistAttr:
        spec = without_unit_axes(attr.spec, attr.mesh)
        if not spec.axes:
            return DistAttr(finer, spec, attr.origin)
        if attr.mesh.sizes != mesh.sizes:
            raise ShardingError(
                f"annotation at {attr.origin.where} is on {attr.mesh} but the search divides {mesh}; search "
                f"the mesh that is annotated, or take the annotation out"
            )
        dims = tuple(tuple(a for axis in dim for a in names[axis] if a in finer.sizes) for dim in spec.dims)
        return DistAttr(finer, ShardSpec(dims), attr.origin)

    return graph.with_ops(graph.ops, attrs={name: renamed(attr) for name, attr in graph.attrs.items()})


def _along(graph: Graph, mesh: ProcessMesh, single: ProcessMesh) -> Graph:
    """The graph with its annotations on one prime axis alone."""
    return _renamed(graph, mesh, single, {axis: _finer(mesh, axis) for axis in mesh.axes})


def prime_factors(number: int) -> tuple[int, ...]:
    """Prime factors, falling.

    Example:
        >>> prime_factors(12), prime_factors(1)
        ((3, 2, 2), ())
    """
    factors, prime = [], 2
    while number > 1:
        while number % prime == 0:
            factors.append(prime)
            number //= prime
        prime += 1
    return tuple(reversed(factors))


def prime_mesh(mesh: ProcessMesh) -> ProcessMesh:
    """The same ranks with an axis for every prime factor; axes of prime size keep their names.

    Raises:
        ShardingError: the mesh has weights.

    Example:
        >>> prime_mesh(ProcessMesh.grid(dp=4, tp=3))
        mesh(dp_0=2, dp_1=2, tp=3)
    """
    if mesh.weights:
        raise ShardingError(
            f"{mesh} shares dims unevenly but double recursion halves them; search it with mode auto, or "
            f"take the weights off"
        )
    shape = [p for size in mesh.shape for p in (prime_factors(size) or (1,))]
    return ProcessMesh(mesh.ranks.reshape(shape), [a for axis in mesh.axes for a in _finer(mesh, axis)])


def _finer(mesh: ProcessMesh, axis: str) -> tuple[str, ...]:
    count = len(prime_factors(mesh.sizes[axis]))
    return (axis,) if count < 2 else tuple(f"{axis}_{i}" for i in range(count))


def cut_costs(
    op: Op, sizes: Mapping[str, int], prime: int, parameters: Iterable[str] = ()
) -> dict[Cut, float]:
    """Relative costs of the cuts of an op into `prime` parts.

    Args:
        op: the op.
        sizes: length of every index as far as it is cut already.
        prime: parts.
        parameters: names of values that are parameters.

    Returns:
        cost of every index that may be cut evenly, and of None.
    """
    rule, names = rule_of(op), frozenset(parameters)
    tensors = [
        *(
            (term, _elements(term, sizes, v), v.name in names)
            for term, v in zip(rule.operands, op.operands, strict=True)
        ),
        *((term, _elements(term, sizes, v), False) for term, v in zip(rule.results, op.results, strict=True)),
    ]
    leading = rule.operands[0][0][0] if rule.operands and rule.operands[0] and rule.operands[0][0] else None
    share = 1 - 1 / prime

    def cost(index: Cut) -> float:
        total = 0.0
        for number, (term, elements, parameter) in enumerate(tensors):
            if index is not None and any(index in dim for dim in term):
                continue
            once = index is not None and (parameter or (index == leading and number < len(op.operands)))
            total += elements * (ONCE if once else 1.0)
        return share * total

    even = [i for i in rule.indices if i not in rule.whole and sizes[i] % prime == 0 and sizes[i] >= prime]
    return {**{index: cost(index) for index in even}, None: cost(None)}


def _elements(term: Term, sizes: Mapping[str, int], value: Value) -> float:
    """Elements of a block."""
    return float(
        math.prod(
            math.prod(sizes[i] for i in dim) if dim else length
            for dim, length in zip(term, value.shape, strict=True)
        )
    )


@dataclass(frozen=True, slots=True)
class _End:
    """A tensor that an op shares with another: its term in the rules of both."""

    here: Term
    other: Op
    there: Term
    value: Value


class _Recursion:
    """Cuts so far, of all ops; those of forward ops are decided here."""

    def __init__(self, graph: Graph, mesh: ProcessMesh) -> None:
        self.mesh = mesh
        self.ops = [
            op for op in graph.ops if op.role == "forward" and op.kind not in SOURCES and op.kind != "reshard"
        ]
        self.parameters = frozenset(op.name for op in graph.sources("param"))
        self.rules = {op.name: rule_of(op) for op in graph.ops}
        self.sizes = {name: dict(rule.sizes) for name, rule in self.rules.items()}
        self.axes: dict[str, Axes] = dict.fromkeys(self.rules, ())
        self.partial: dict[str, tuple[tuple[str, int], ...]] = dict.fromkeys(self.rules, ())
        self.legal: dict[tuple[Rule, Axes, OpLayout], bool] = {}
        self.ends = self._ends()

    def _ends(self) -> dict[str, list[_End]]:
        """Tensors that each op shares with others: operands with their makers, results with their readers."""
        ends: dict[str, list[_End]] = {op.name: [] for op in self.ops}
        made = {v.name: (op, i) for op in self.ops for i, v in enumerate(op.results)}
        for op in self.ops:
            for i, value in enumerate(op.operands):
                if value.name not in made:
                    continue
                maker, place = made[value.name]
                read, result = rule_of(op).operands[i], rule_of(maker).results[place]
                ends[op.name].append(_End(read, maker, result, value))
                ends[maker.name].append(_End(result, op, read, value))
        return ends

    def divide(self, single: ProcessMesh) -> dict[str, OpLayout]:
        """Cut every forward op along one axis, or not, by falling weight."""
        (axis,), (prime,) = single.axes, single.shape
        costs = {op.name: self._allowed(op, single) for op in self.ops}
        cuts: dict[str, Cut] = {}
        for op in sorted(self.ops, key=lambda op: -_weight(costs[op.name])):
            options = costs[op.name]
            totals = {cut: options[cut] + self._moved(op, cut, cuts, prime) for cut in options}
            cuts[op.name] = min(totals, key=totals.__getitem__)
        return {
            name: OpLayout(single, () if cut is None or prime == 1 else ((cut, (axis,)),))
            for name, cut in cuts.items()
        }

    def _allowed(self, op: Op, single: ProcessMesh) -> dict[Cut, float]:
        """Costs of the cuts that leave plain blocks."""
        costs = cut_costs(op, self.sizes[op.name], single.size, self.parameters)
        return {
            cut: cost
            for cut, cost in costs.items()
            if cut is None or self.allows(op, OpLayout(single, ((cut, single.axes),)))
        }

    def allows(self, op: Op, layout: OpLayout) -> bool:
        """Whether a layout on one axis leaves plain blocks of equal size, alone and with the existing splits.

        Alone, because changes of layout are priced along one axis at a time.
        """
        rule, axes = self.rules[op.name], self.axes[op.name]
        key = rule, axes, layout
        if key not in self.legal:
            sizes = self.sizes[op.name]
            even = not any(sizes[index] % layout.mesh.count(split) for index, split in layout.axes)
            joint = OpLayout(self.mesh, _grown(axes, layout))
            self.legal[key] = even and representable(rule, layout) and representable(rule, joint)
        return self.legal[key]

    def take(self, layouts: Mapping[str, OpLayout], axis: str) -> None:
        """Cut ops along an axis."""
        for name, layout in layouts.items():
            self.axes[name] = _grown(self.axes[name], layout)
            self.partial[name] += layout.partial
            for index, _ in layout.axes:
                self.sizes[name][index] //= self.mesh.sizes[axis]

    def layout(self, op: Op) -> OpLayout:
        """The layout of an op, on axes of prime size."""
        return OpLayout(self.mesh, self.axes[op.name], self.partial[op.name])

    def _moved(self, op: Op, cut: Cut, cuts: Mapping[str, Cut], prime: int) -> float:
        """Elements that move between an op and those that are decided, there and back."""
        total = 0.0
        for end in self.ends[op.name]:
            if end.other.name not in cuts:
                continue
            here, there = _dim(end.here, cut), _dim(end.there, cuts[end.other.name])
            if here != there:
                ways = (here is not None) + (there is not None)
                total += ways * _elements(end.here, self.sizes[op.name], end.value)
        return (1 - 1 / prime) * total


def _grown(axes: Axes, layout: OpLayout) -> Axes:
    """Axes of the indices of an op, with those of one more layout."""
    grown = dict(axes)
    for index, split in layout.axes:
        grown[index] = (*grown.get(index, ()), *split)
    return tuple(sorted(grown.items()))


def _weight(costs: Mapping[Cut, float]) -> float:
    """The weight of an op: the greatest cost of a cut."""
    return max((cost for cut, cost in costs.items() if cut is not None), default=0.0)


def _dim(term: Term, cut: Cut) -> int | None:
    """The dim of a tensor that a cut divides."""
    if cut is None:
        return None
    return next((d for d, dim in enumerate(term) if cut in dim), None)
