r"""From a train graph and a mesh to the intra-operator problem, and back from a choice to layouts.

*In:* a serial train graph, a mesh whose ranks lie on devices (`Prices`), which layers are equal. *Out:* a
`Formulation`: the problem, and what its choices mean. *Invariant:* every choice without a forbidden cost
decodes to layouts that `complete`d graphs may have; the objective is at least the seconds of a step of all
ops and all changes of layout, one after the other, and exactly that where no two readers share a copy that
has no node.

Nodes are ops with all layouts of their rules, and values that are stored apart (see `nodes`). With m the
micro-batches for what runs once each and 1 for the rest, n the equal layers on top of each other,

    c(op, l)        = n m seconds(op, l)
    c(value, S, C)  = n m move(S -> C) + n lam bytes(S, C)          bytes of what is fixed or held
    c(op - value)   = n m move(made(l) -> S)                        where the op makes it
    c(value - op)   = n m sum over different R of move(S -> R)      where it reads it; 0 where R is C
    c(op - op)      = n m move(made(l) -> needed(l'))               of a value that only one op reads
    c(op - param)   = n   move(made(l) -> S)                        of the new value of a parameter

Gradients end the micro-batch part through `accumulate`, which is linear: where it takes pending sums they are
reduced behind it, once a step. ZeRO is S finer than what the ops read, partial results with reduce_scatter
are S split over the axis of the sum: nothing is written for either.

To these the price of memory adds what reading holds: a copy of a parameter stays for the step, one of an
activation that both parts read stays for the backward part (R of the backward reader, where the forward part
may want it: a bound). The limit does not see copies without a node; `profile` counts all of them.

Memory over time is that of the runtime (see `lifetimes`); what is held counts once for every live
micro-batch.

Source: Zheng et al., Alpa (OSDI 2022), section 4; the store apart from production and use, and the rest of
the step inside the problem, are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from distgraph.errors import GraphError
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.search.intra_op.alternatives import Decision, Neighbourhoods
from distgraph.passes.search.intra_op.chosen_layouts import Layouts, Profile
from distgraph.passes.search.intra_op.cost_model import Prices
from distgraph.passes.search.intra_op.cost_terms import Assembly, Terms
from distgraph.passes.search.intra_op.decision_nodes import Node, Nodes, OpNode, nodes_of
from distgraph.passes.search.intra_op.decode import decoded, encoded
from distgraph.passes.search.intra_op.layer_costs import Account
from distgraph.passes.search.layering.layer_folding import Fold, fold
from distgraph.passes.search.layering.layer_sequence import Layering
from distgraph.passes.search.layering.liveness import Lifetimes
from distgraph.passes.search.solver.problem import Problem, Use

__all__ = ["Decision", "Formulation", "Layouts", "Profile", "formulate"]


@dataclass(frozen=True, eq=False)
class Formulation:
    """The problem of one mesh, and what its choices mean.

    Attributes:
        graph, mesh: what was formulated.
        prices: seconds.
        fold, nodes, lifetimes, assembly: what the problem is made of; its node i is `nodes.all[i]`.
        memory_limit, memory_multiplier, live_micro_batches: as given.
    """

    graph: Graph
    mesh: ProcessMesh
    prices: Prices = field(repr=False)
    fold: Fold = field(repr=False)
    nodes: Nodes = field(repr=False)
    lifetimes: Lifetimes = field(repr=False)
    assembly: Assembly = field(repr=False)
    memory_limit: float | None = None
    memory_multiplier: float = 0.0
    live_micro_batches: int = 1

    @cached_property
    def problem(self) -> Problem:
        """What `intra.solve` takes; costs in seconds of a step, plus `memory_multiplier` a byte.

        Made when first asked for: the profile of a choice needs far fewer prices.
        """
        limit, price, live = self.memory_limit, self.memory_multiplier, self.live_micro_batches
        return _problem(self.fold, self.nodes, self.parts, limit, price, live)

    @property
    def parts(self) -> Terms:
        """The terms of the problem before they are added up."""
        return self.assembly.terms

    def decode(self, choice: Sequence[int]) -> Layouts:
        """Layouts of every op and value under a choice [nodes]."""
        return decoded(self.fold, self.nodes, self.mesh, choice)

    def encode(self, layouts: Layouts) -> tuple[int, ...]:
        """The choice that decodes to some layouts, such as a completed graph's.

        Raises:
            ShardingError: they are not among the options, as layouts of decomposed ops are not.
        """
        return encoded(self.fold, self.nodes, self.mesh, layouts)

    def profile(self, choice: Sequence[int]) -> Profile:
        """Costs by layer under a choice."""
        account = Account(self.fold, self.nodes, self.lifetimes, self.mesh, self.prices, choice)
        return account.profile()

    def terms(self, choice: Sequence[int], node: int) -> Decision:
        """What one node costs under a choice, and what its other options would."""
        around, found = Neighbourhoods(self.problem), self.nodes.all[node]
        at = choice[node]
        seconds: dict[str, float] = {}
        for other, costs in around.edges[node]:
            label, cost = self.problem.label(other), float(costs[at, choice[other]])
            if cost:
                seconds[label] = seconds.get(label, 0.0) + cost
        held = self.parts.fixed[node] + self.live_micro_batches * self.parts.held[node]
        return Decision(
            self.problem.label(node),
            at,
            found.texts(self.mesh) if isinstance(found, OpNode) else found.texts(),
            float(self.parts.compute[node][at]),
            float(self.parts.copying[node][at]) + sum(seconds.values()),
            seconds,
            float(held[at]),
            around.fixed(choice, node),
            around.followed(choice, node),
        )

    def node_of(self, name: str) -> int:
        """The node of a value's storage, else of the op that makes it.

        Raises:
            GraphError: nothing of this name is decided.
        """
        value = self.fold.place.get(name.removeprefix("%"))
        if value is not None:
            producer = self.fold.values[value].producer
            node = self.nodes.of_value.get(value, self.nodes.of_op.get(producer))
            if node is not None:
                return node
        raise GraphError(f"graph @{self.graph.name}: nothing is decided about %{name.removeprefix('%')}")

    def priced(
        self,
        *,
        memory_limit: float | None = None,
        memory_multiplier: float = 0.0,
        live_micro_batches: int = 1,
    ) -> Formulation:
        """The same with another limit on memory and another price of it; costs nothing but additions."""
        return replace(
            self,
            memory_limit=memory_limit,
            memory_multiplier=memory_multiplier,
            live_micro_batches=live_micro_batches,
        )


def formulate(
    graph: Graph,
    mesh: ProcessMesh,
    prices: Prices,
    layering: Layering | None = None,
    *,
    memory_limit: float | None = None,
    memory_multiplier: float = 0.0,
    live_micro_batches: int = 1,
    folded: Fold | None = None,
) -> Formulation:
    """Formulate the search for layouts on one mesh.

    Args:
        graph: a serial train graph of one micro-batch; annotations are constraints.
        mesh: where all of it is to run; axes of one rank split nothing.
        prices: seconds; also knows the device of every rank.
        layering: layers, equal ones of which get equal layouts; None to decide every op apart.
        memory_limit: bytes that a rank may use; None for no limit.
        memory_multiplier: seconds that a byte costs which is held for the whole step.
        live_micro_batches: micro-batches whose activations are held at the same time.
        folded: of this graph and layering, where it is known.

    Raises:
        ShardingError: annotations that do not fit the mesh or each other.
        ResourceError: a number that a price needs is not in the resource file.
    """
    folded = fold(graph, layering) if folded is None else folded
    lifetimes = Lifetimes(folded)
    nodes = nodes_of(folded, mesh, lifetimes)
    return Formulation(
        graph,
        mesh,
        prices,
        folded,
        nodes,
        lifetimes,
        Assembly(folded, nodes, lifetimes, mesh, prices),
        memory_limit,
        memory_multiplier,
        live_micro_batches,
    )


def _problem(
    folded: Fold,
    nodes: Nodes,
    terms: Terms,
    limit: float | None,
    price: float,
    live: int,
) -> Problem:
    """Add up the terms."""
    costs = tuple(
        compute + copying + price * (fixed + live * held)
        for compute, copying, fixed, held in zip(
            terms.compute, terms.copying, terms.fixed, terms.held, strict=True
        )
    )
    uses: tuple[tuple[Use, ...], ...] = ()
    if limit is not None:
        uses = tuple(_uses(terms, node, live, len(folded.graph.ops) + 1) for node in range(len(costs)))
    labels = tuple(_label(folded, node) for node in nodes.all)
    edge_costs = dict(terms.edges)
    for copies, each in ((terms.fixed_copies, price), (terms.held_copies, price * live)):
        for edge, nbytes in copies.items() if price else ():
            edge_costs[edge] = edge_costs[edge] + each * nbytes
    return Problem(
        folded.graph.name, costs, tuple(edge_costs), tuple(edge_costs.values()), uses, limit, labels
    )


def _uses(terms: Terms, node: int, live: int, end: int) -> tuple[Use, ...]:
    whole = terms.fixed[node] + live * terms.held[node]
    found = [Use(0, end, whole)] if whole.any() else []
    return (*found, *(Use(start, stop, amounts) for start, stop, amounts in terms.temporary[node]))


def _label(folded: Fold, node: Node) -> str:
    if isinstance(node, OpNode):
        op = folded.ops[node.number]
        return f"{op.op.kind} %{op.op.name}{_repeats(op.members)}"
    value = folded.values[node.number]
    return f"storage of %{value.value.name}{_repeats(value.members)}"


def _repeats(members: Sequence[str]) -> str:
    return f" and {len(members) - 1} equal" if len(members) > 1 else ""
