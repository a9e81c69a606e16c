"""Local search over layouts without annotations, for a completed graph that sends fewer bytes.

In:   a completed graph.
Out:  the same graph; some values and ops without annotations have another layout, with origin "search".
Invariant: annotations stay. No contraction is computed in fewer parts than by completion (unless its result
    is annotated), and no parameter or state is stored in fewer. The modelled cost never increases.
    Deterministic.

Completion decides by priority, one axis at a time, so layouts change at borders where two claims meet. The
search moves these borders. With P(v) the layout in which a value is produced, R(v) those in which it is read
(with the windows of ops) and S(v) the one in which it is stored,

    cost = sum over values of times(v) * (min over S of  wire(P -> S) + sum over distinct R of wire(S -> R))
         + epsilon * bytes touched per rank,

where times is the number of micro-batches for values inside the micro-batch part. An op may also be computed
on its ranks in another order, if an op with a sliding index then reads less from other ranks
(`halo.nearest`): for example, a reversal of a split dim sends nothing if its result is stored on the reversed
ranks. Moves are the best response of one op, and flood moves in the manner of Kernighan and Lin (1970): give
an op another layout, let the neighbours follow one by one whatever it costs, and keep the best prefix. A move
that fails is not repeated in equal situations (repeated layers).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import NamedTuple

from distgraph.ir.graph import Graph
from distgraph.ir.sharding_spec import Origin
from distgraph.ir.step_phases import multiplicity
from distgraph.passes.analysis.layout_change_cost import Key, ValueCosts
from distgraph.passes.analysis.layout_space import LayoutSpace, Place
from distgraph.passes.pass_registry import PassContext, register_pass
from distgraph.passes.redistribution.planner import Price, wire_price

BUDGET = 500_000  # work of one search, see `refine`
_GAIN = 0.5  # a move must save at least half a byte
_FLOOD = 40  # ops that one flood move may change
_ROUNDS = 6
_EQUAL = 1e-9  # bytes


class _Refiner:
    """Local search over the layouts of one graph; ops, values and layouts are represented by indices."""

    def __init__(self, graph: Graph, times: dict[str, int], price: Price, budget: float = math.inf) -> None:
        self.space = LayoutSpace(graph, times)
        self.nodes, self.edges = self.space.nodes, self.space.edges
        self.split = self.space.layouts.split
        self.values = ValueCosts(self.space.kinds, self.space.layouts, price)
        options = [node.options for node in self.nodes]
        # value -> (op, position of the value, layouts by option) of its producer, and of each of its readers
        self.producers = [(e.producer, e.position, options[e.producer].produced) for e in self.edges]
        self.readers = [[(op, at, options[op].read) for op, at in e.readers] for e in self.edges]
        self.failed: set[object] = set()
        self.budget = budget
        self.compared = 0  # options of ops that were compared
        self.choice = [0] * len(self.nodes)
        self.costs = [self.cost(i) for i in range(len(self.edges))]
        self.effects: dict[tuple[int, Place], list[tuple[int, ...]]] = {}
        self.responses: dict[object, tuple[float, int]] = {}

    # ------------------------------------------------------------------ costs

    def produced(self, value: int) -> int:
        """Layout in which a value is produced."""
        producer, position, layouts = self.producers[value]
        return layouts[self.choice[producer]][position]

    def key(self, value: int, read: set[int] | None = None) -> Key:
        """The key of a value under the current choices; `read` replaces the layouts in which it is read."""
        edge, choice = self.edges[value], self.choice
        if read is None:
            read = {layouts[choice[reader]][operand] for reader, operand, layouts in self.readers[value]}
        if edge.replaces >= 0:
            read.add(self.produced(edge.replaces))
        return edge.kind, self.produced(value), tuple(sorted(read))

    def stored(self, value: int) -> int:
        """Cheapest layout in which to store a value."""
        return self.values.cheapest(self.key(value))[1]

    def cost(self, value: int) -> float:
        """Cost of a value under the current choices."""
        edge = self.edges[value]
        key = self.key(value)
        return edge.times * self.values.cheapest(key)[0] + edge.touch / self.split[key[1]]

    def bound(self, value: int) -> float:
        """Lower bound of the cost of a value under the current choices."""
        edge = self.edges[value]
        key = self.key(value)
        return edge.times * self.values.bound(key) + edge.touch / self.split[key[1]]

    def moves(self, value: int) -> bool:
        """Whether the value is sent between ranks."""
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
        """Work of the search so far, see `refine`."""
        return self.compared + self.values.work

    @property
    def spent(self) -> bool:
        """Whether the budget is used up."""
        return self.work >= self.budget

    def best_response(self, number: int, through: int = -1, moved: Container[int] = ()) -> tuple[float, int]:
        """Option of one op with the least cost; of equal options the first.

        Args:
            number: the op.
            through: a value; only options under which it is not sent between the `moved` ops and this one
                count. -1 for all options.
            moved: ops that have changed their option.
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
        """(lower bound of the cost of all values around an op, option), in ascending order.

        The bound of a value is computed once for all options with equal layouts of the value.
        """
        node, present = self.nodes[number], self.choice[number]
        columns = []
        for value, effects in zip(node.around, self.effects_on(number), strict=True):
            bounds: dict[tuple[int, ...], float] = {}
            for option, effect in enumerate(effects):
                if effect not in bounds:
                    self.choice[number] = option
                    bounds[effect] = self.bound(value)
            columns.append([bounds[effect] for effect in effects])
        self.choice[number] = present
        options = sorted(
            (sum(column[option] for column in columns), option) for option in range(len(node.options.layouts))
        )
        self.compared += len(options)
        return options

    def effects_on(self, number: int) -> list[list[tuple[int, ...]]]:
        """For every value around an op and every option: the layouts in which the op leaves and reads it."""
        options, columns = self.nodes[number].options, []
        for place in self.space.places(number):
            effects = self.effects.get((options.number, place))
            if effects is None:
                results, operands = [i for i in place[:2] if i >= 0], place[2:]
                effects = self.effects[options.number, place] = [
                    (*(produced[i] for i in results), *(read[i] for i in operands))
                    for produced, read in zip(options.produced, options.read, strict=True)
                ]
            columns.append(effects)
        return columns

    def surroundings(self, number: int) -> object:
        """All that the best response of an op depends on; equal in repeated layers."""
        node, around = self.nodes[number], list[object]()
        for value, place in zip(node.around, self.space.places(number), strict=True):
            edge = self.edges[value]
            made = self.produced(value) if place[0] < 0 else -1
            replaced = self.produced(edge.replaces) if edge.replaces >= 0 > place[1] else -1
            read = {
                layouts[self.choice[reader]][operand]
                for reader, operand, layouts in self.readers[value]
                if reader != number
            }
            around.append((edge.kind, edge.times, place, made, replaced, *sorted(read)))
        return node.options.number, self.choice[number], *around

    def usual_response(self, number: int) -> tuple[float, int]:
        """`best_response` of an op to everything around it, computed once for all in equal surroundings."""
        key = self.surroundings(number)
        response = self.responses.get(key)
        if response is None:
            response = self.best_response(number)
            if not self.spent:
                self.responses[key] = response
            return response
        self.compared += len(self.nodes[number].options.layouts)
        return (0.0, self.choice[number]) if self.spent else response

    def total(self, values: Sequence[int], limit: float) -> float:
        """Total cost of some values; inf if it exceeds a limit."""
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
        """Whether no message carries the value between its ops and those in `moved` (others may follow)."""
        edge = self.edges[value]
        read = {
            layouts[self.choice[reader]][operand]
            for reader, operand, layouts in self.readers[value]
            if reader == end or reader in moved
        }
        if edge.producer != end and edge.producer not in moved:
            return len(read) < 2
        key = self.key(value, read)
        return edge.times * self.values.bound(key) <= _GAIN >= edge.times * self.values.cheapest(key)[0]

    def relax(self, numbers: list[int]) -> None:
        """Apply best responses until none saves anything."""
        queue = deque(numbers)
        queued = set(numbers)
        while queue and not self.spent:
            number = queue.popleft()
            queued.discard(number)
            node = self.nodes[number]
            if len(node.options.layouts) < 2 or not any(self.moves(v) for v in node.around):
                continue
            gain, option = self.usual_response(number)
            if gain < -_GAIN and option != self.choice[number]:
                self.set(number, option)
                for other in self.space.neighbours(number):
                    if other not in queued:
                        queued.add(other)
                        queue.append(other)

    def flood(self, number: int, option: int, worth: float) -> bool:
        """Give an op another option, let neighbours follow, and keep the best prefix if it saves anything."""
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
                if end in moved or len(self.nodes[end].options.layouts) < 2:
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
        """A key of an op and its neighbours that is equal in repeated layers."""
        near = (number, *self.space.neighbours(number))
        return tuple((self.nodes[n].kind, self.nodes[n].options.layouts[self.choice[n]]) for n in near)

    def try_op(self, number: int, value: int) -> bool:
        """Flood from one op of a border with each option that does not increase the cost of the border.

        The cost may stay equal: a value that two readers read in different layouts costs the same until both
        have changed.
        """
        node = self.nodes[number]
        if len(node.options.layouts) < 2:
            return False
        key = (self.situation(number), self.edges[value].kind)
        if key in self.failed:
            return False
        improved = False
        for option in range(len(node.options.layouts)):
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
        """Relax, then flood from every border, the most expensive first, until nothing saves anything."""
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
    """Reduce the communication of a completed graph.

    Args:
        graph: a completed graph.
        price: cost of one collective.
        budget: work after which the search ends with its current result: 1 for each layout of an op that is
            compared, 20 for each change of layout that is costed, 1 for each step that the planner of its
            collectives examines, and 12 for each division into tiles between two meshes. Work is counted, not
            timed, so that every rank and every run ends with the same layouts.
    """
    return refined(graph, price, budget).graph


class Refined(NamedTuple):
    """The result of a search: the remaining cost, the graph, and the work of the search (see `refine`)."""

    cost: float
    graph: Graph
    work: float


def refined(graph: Graph, price: Price = wire_price, budget: float = BUDGET) -> Refined:
    """`refine` with the remaining cost and the work."""
    refiner = _Refiner(graph, multiplicity(graph), price, budget)
    refiner.run()
    ops = [
        op.with_layout(node.options.layouts[option])
        for op, node, option in zip(graph.ops, refiner.nodes, refiner.choice, strict=True)
    ]
    attrs = {}
    for number, (name, attr) in enumerate((e.name, graph.attrs[e.name]) for e in refiner.edges):
        stored = refiner.space.layouts.reads[refiner.stored(number)][0]
        attrs[name] = (
            attr
            if stored == attr
            else replace(stored, origin=Origin("search", f"moves less than {attr.spec}"))
        )
    return Refined(sum(refiner.costs), graph.with_ops(ops, attrs=attrs), refiner.work)


@register_pass("layout_local_search", stage="completed")
def _run(graph: Graph, context: PassContext) -> Graph:
    """Search unannotated layouts that send fewer bytes."""
    return refine(graph, context.layout_price, context.search_budget or BUDGET)
