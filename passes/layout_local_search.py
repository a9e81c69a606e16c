"""Move layouts that nobody pinned where that lowers the bytes on the wire.

In:   a completed graph.
Out:  the same graph; some unpinned values and ops have another layout, with origin "search".
Invariant: annotations stay; no contraction is computed with fewer parts than completion gave it (unless its
      result itself is annotated), no parameter or state is stored in fewer; the modelled cost never rises;
      deterministic.

Completion decides by priority, one axis at a time, and so leaves borders where two claims meet. Here the
borders move. With P(v) the layout in which a value is made, R(v) those in which it is read (with the windows
that ops read of it) and S(v) the one in which it is kept,

    cost = sum over values of times(v) * (min over S of  wire(P -> S) + sum over distinct R of wire(S -> R))
         + epsilon * bytes touched per rank,

where times is the number of micro-batches for values inside the micro-batch part. An op may also be computed
on its ranks in another order, where an op that slides reads less from others under it (`halo.nearest`): a
reversal of a split dim leaves its result on the ranks reversed, and sends nothing. Moves: best response of
one op, and flood moves in the manner of Kernighan and Lin (1970): give an op another layout, let the
neighbours follow one by one whatever it costs, keep the best prefix. Situations that look alike (repeated
layers) are tried once when they fail.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import NamedTuple

from distgraph.ir.graph import Graph
from distgraph.ir.sharding_spec import Origin
from distgraph.passes.analysis.layout_space import LayoutSpace
from distgraph.passes.analysis.redistribution_cost import multiplicity
from distgraph.passes.analysis.value_cost import Key, ValueCosts
from distgraph.passes.pass_registry import PassContext, register_pass
from distgraph.passes.redistribution.planner import Price, wire_price

BUDGET = 500_000  # work of one search, see `refine`
_GAIN = 0.5  # a move must save at least half a byte
_FLOOD = 40  # ops that one move may carry along
_ROUNDS = 6
_EQUAL = 1e-9  # bytes


class _Refiner:
    """Local search over the layouts of one graph; ops, values and layouts are numbers."""

    def __init__(self, graph: Graph, times: dict[str, int], price: Price, budget: float = math.inf) -> None:
        self.space = LayoutSpace(graph, times)
        self.nodes, self.edges = self.space.nodes, self.space.edges
        self.split = self.space.layouts.split
        self.values = ValueCosts(self.space.kinds, self.space.layouts, price)
        self.failed: set[object] = set()
        self.budget = budget
        self.compared = 0  # options of ops
        self.choice = [node.options.index(op.layout) for node, op in zip(self.nodes, graph.ops, strict=True)]  # type: ignore[arg-type]
        self.costs = [self.cost(i) for i in range(len(self.edges))]

    # ------------------------------------------------------------------ costs

    def made(self, value: int) -> int:
        """Layout in which a value is made."""
        edge = self.edges[value]
        return self.nodes[edge.producer].made[self.choice[edge.producer]][edge.position]

    def key(self, value: int, wanted: set[int] | None = None) -> Key:
        """Where a value is made and where it is read (or wanted) under the present choices."""
        edge = self.edges[value]
        made = self.nodes[edge.producer].made[self.choice[edge.producer]][edge.position]
        if wanted is None:
            wanted = {self.nodes[reader].need[self.choice[reader]][place] for reader, place in edge.readers}
        if edge.like >= 0:
            wanted.add(self.made(edge.like))
        return edge.kind, made, tuple(sorted(wanted))

    def kept(self, value: int) -> int:
        """Layout to keep a value in."""
        return self.values.cheapest(self.key(value))[1]

    def cost(self, value: int) -> float:
        """Cost of a value under the present choices."""
        edge = self.edges[value]
        key = self.key(value)
        return edge.times * self.values.cheapest(key)[0] + edge.touch / self.split[key[1]]

    def bound(self, value: int) -> float:
        """At most the cost of a value under the present choices."""
        edge = self.edges[value]
        key = self.key(value)
        return edge.times * self.values.bound(key) + edge.touch / self.split[key[1]]

    def moves(self, value: int) -> bool:
        """True when the value costs something on the wire."""
        return self.costs[value] > self.edges[value].touch + _GAIN

    def set(self, node: int, option: int) -> float:
        """Give an op another option; returns the change of the total."""
        change = 0.0
        self.choice[node] = option
        for value in self.nodes[node].around:
            cost = self.cost(value)
            change += cost - self.costs[value]
            self.costs[value] = cost
        return change

    # ------------------------------------------------------------------ moves

    @property
    def work(self) -> float:
        """What the search has taken so far, see `refine`."""
        return self.compared + self.values.work

    @property
    def spent(self) -> bool:
        """Whether the budget is used up."""
        return self.work >= self.budget

    def best_response(self, number: int, through: int = -1, moved: Container[int] = ()) -> tuple[float, int]:
        """Option of one op with the least cost; the first of equal ones.

        `through`: only options under which this value costs nothing to move between `moved` ops and this one.
        """
        node, present = self.nodes[number], self.choice[number]
        before = sum(self.costs[v] for v in node.around)
        best, best_option = (math.inf, present) if through >= 0 else (0.0, present)
        for bound, option in self.ranked(number):
            if bound >= before + best + _EQUAL * (1.0 + before) or self.spent:
                break
            if through < 0 and option == present:
                continue
            self.choice[number] = option
            if through >= 0 and not self.agrees(through, number, moved):
                continue
            total = self.total(node.around, before + best) - before
            equal = abs(total - best) <= _EQUAL and option < best_option
            if total < best - _EQUAL or (equal and (through >= 0 or best_option != present)):
                best, best_option = total, option
        self.choice[number] = present
        return (best, best_option) if best < math.inf else (0.0, present)

    def ranked(self, number: int) -> list[tuple[float, int]]:
        """Options of an op, each with a bound of the cost of all values around it, the least first."""
        node, present = self.nodes[number], self.choice[number]
        found = []
        for option in range(len(node.options)):
            self.choice[number] = option
            found.append((sum(map(self.bound, node.around)), option))
        self.choice[number] = present
        found.sort()
        self.compared += len(found)
        return found

    def total(self, values: Sequence[int], limit: float) -> float:
        """What some values cost together; inf where that is known to be above a limit."""
        costs = list(map(self.bound, values))
        least = sum(costs)
        for i, value in enumerate(values):
            least -= costs[i]
            costs[i] = self.cost(value)
            least += costs[i]
            if least > limit + _EQUAL * (1.0 + limit):
                return math.inf
        return sum(costs)

    def agrees(self, value: int, end: int, moved: Container[int]) -> bool:
        """True when a value moves for nothing between one of its ends and those in `moved`; the others may
        still follow."""
        edge = self.edges[value]
        wanted = {
            self.nodes[r].need[self.choice[r]][place] for r, place in edge.readers if r == end or r in moved
        }
        if edge.producer != end and edge.producer not in moved:
            return len(wanted) < 2
        key = self.key(value, wanted)
        return edge.times * self.values.bound(key) <= _GAIN >= edge.times * self.values.cheapest(key)[0]

    def relax(self, numbers: list[int]) -> None:
        """Best responses until none helps."""
        queue = deque(numbers)
        queued = set(numbers)
        while queue and not self.spent:
            number = queue.popleft()
            queued.discard(number)
            node = self.nodes[number]
            if len(node.options) < 2 or not any(self.moves(v) for v in node.around):
                continue
            gain, option = self.best_response(number)
            if gain < -_GAIN and option != self.choice[number]:
                self.set(number, option)
                for other in node.neighbours:
                    if other not in queued:
                        queued.add(other)
                        queue.append(other)

    def flood(self, number: int, option: int, worth: float) -> bool:
        """Give an op another option and let neighbours follow; keep the best prefix if it saves anything."""
        journal = [(number, self.choice[number])]
        total = self.set(number, option)
        best, best_length = (total, 1) if total < -_GAIN else (-_GAIN, 0)
        moved = {number}
        frontier = deque(self.nodes[number].around)
        while frontier and len(journal) < _FLOOD and total < 4 * worth and not self.spent:
            value = frontier.popleft()
            if not self.moves(value):
                continue
            edge = self.edges[value]
            for end in (edge.producer, *(reader for reader, _ in edge.readers)):
                if end in moved or len(self.nodes[end].options) < 2:
                    continue
                _, response = self.best_response(end, value, moved)
                if response == self.choice[end]:
                    continue
                journal.append((end, self.choice[end]))
                moved.add(end)
                total += self.set(end, response)
                frontier.extend(v for v in self.nodes[end].around if v != value)
                if total < best:
                    best, best_length = total, len(journal)
        for end, before in reversed(journal[best_length:]):
            self.set(end, before)
        return best_length > 0

    def situation(self, number: int) -> object:
        """What an op and its neighbours look like, so that repeated layers are recognised."""
        near = (number, *self.nodes[number].neighbours)
        return tuple((self.nodes[n].kind, self.nodes[n].options[self.choice[n]]) for n in near)

    def try_op(self, number: int, value: int) -> bool:
        """Flood from one end of a border with each option that does not raise the cost of the border.

        It may stay: a value that two readers want in different layouts costs the same until both have moved.
        """
        node = self.nodes[number]
        if len(node.options) < 2:
            return False
        key = (self.situation(number), self.edges[value].kind)
        if key in self.failed:
            return False
        improved = False
        for option in range(len(node.options)):
            if self.spent:
                return improved
            worth = self.costs[value]
            present, self.choice[number] = self.choice[number], option
            promising = self.bound(value) <= worth + _GAIN and self.cost(value) <= worth + _GAIN
            self.choice[number] = present
            if option != present and promising:
                improved |= self.flood(number, option, worth)
        if not improved:
            self.failed.add(key)
        return improved

    def run(self) -> None:
        """Relax, then flood from every border, dearest first, until nothing helps."""
        everything = list(range(len(self.nodes)))
        self.relax(everything)
        for _ in range(_ROUNDS):
            borders = sorted(
                (v for v in range(len(self.edges)) if self.moves(v)), key=lambda v: (-self.costs[v], v)
            )
            improved = False
            for value in borders:
                edge = self.edges[value]
                for end in dict.fromkeys((edge.producer, *(reader for reader, _ in edge.readers))):
                    improved |= self.try_op(end, value)
            if not improved or self.spent:
                return
            self.relax(everything)


def refine(graph: Graph, price: Price = wire_price, budget: float = BUDGET) -> Graph:
    """Lower what a completed graph spends on communication.

    Args:
        graph: a completed graph.
        price: cost of one collective.
        budget: work after which the search ends with what it has found: 1 for each layout of an op that is
            compared, 20 for each change of layout priced, 1 for each step that the search for its collectives
            examines, and 12 for each way to cut it into tiles between two meshes. Counted, not timed, so that
            every rank and every run ends with the same layouts.
    """
    return refined(graph, price, budget).graph


class Refined(NamedTuple):
    """A graph with other layouts, the cost that is left, and the work that this took (see `refine`)."""

    cost: float
    graph: Graph
    work: float


def refined(graph: Graph, price: Price = wire_price, budget: float = BUDGET) -> Refined:
    """As `refine`, with the cost that is left."""
    refiner = _Refiner(graph, multiplicity(graph), price, budget)
    refiner.run()
    ops = [
        replace(op, layout=node.options[option])
        for op, node, option in zip(graph.ops, refiner.nodes, refiner.choice, strict=True)
    ]
    attrs = {}
    for number, (name, attr) in enumerate((e.name, graph.attrs[e.name]) for e in refiner.edges):
        kept = refiner.space.layouts.reads[refiner.kept(number)][0]
        attrs[name] = (
            attr if kept == attr else replace(kept, origin=Origin("search", f"moves less than {attr.spec}"))
        )
    return Refined(sum(refiner.costs), graph.with_ops(ops, attrs=attrs), refiner.work)


@register_pass("layout_local_search", stage="completed")
def _run(graph: Graph, context: PassContext) -> Graph:
    """Search unannotated layouts that send fewer bytes."""
    return refine(graph, context.layout_price, context.search_budget or BUDGET)
