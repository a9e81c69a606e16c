r"""Formulates the intra-operator problem of a train graph on one mesh, and decodes a choice to layouts.

*In:* a serial train graph, a mesh, the seconds on its devices (`CostModel`), and which layers are equal.
*Out:* a `Formulation`: the problem, and the layouts that its choices stand for. *Invariant:* every choice
without a forbidden cost decodes to legal layouts. The objective is at least the time of a step in which all
ops and changes of layout run one after the other, and equal to it where no two readers share a copy that has
no node.

Nodes are ops, with all layouts of their rules, and values whose storage is a decision of its own (see
`decision_nodes`). With n the number of equal layers, m the number of micro-batches for everything that runs
once for each and 1 otherwise, lambda the memory multiplier, l the layout of an op with results in P(l) and
operands in R(l), S and C the layouts of a value and its copy, and t(A -> B) the seconds of a change of
layout,

    c(op; l)             = n m seconds(op, l)
    c(value; S, C)       = n m t(S -> C) + n lambda bytes(S, C)     persistent bytes only
    c(op, value)         = n m t(P(l) -> S)                         the op produces the value
    c(value, op)         = n m sum over different R(l) of t(S -> R) the op reads the value; 0 where R is C
    c(op, op')           = n m t(P(l) -> R(l'))                     a value with one reader
    c(op, parameter)     = n   t(P(l) -> S)                         the new value of a parameter

Gradients leave the micro-batch part through `accumulate`, which is linear: a partial operand stays partial
and is reduced once a step. ZeRO needs no code of its own: it is an S that is finer than the layouts in which
ops read the parameter. A reduce_scatter is an S that is split over the axis of the partial sum.

The memory multiplier also counts copies that have no node: a copy of a parameter lasts for the step, and a
copy of an activation that both parts read lasts until the backward part (counted where the forward part may
read the same layout, an upper bound). `profile` counts all copies.

Lifetimes are those of the runtime (see `liveness`); activations count for one micro-batch.

Source: Zheng et al., Alpa (OSDI 2022), section 4. Storage layouts that differ from those of producer and
readers, and the whole step in one problem, are not in that paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.search.intra_op.alternatives import Decision, Neighbourhoods
from distgraph.passes.search.intra_op.axis_uses import axis_uses
from distgraph.passes.search.intra_op.chosen_layouts import Layouts, Profile
from distgraph.passes.search.intra_op.cost_model import CostModel
from distgraph.passes.search.intra_op.cost_terms import TermBuilder, Terms
from distgraph.passes.search.intra_op.decision_nodes import Node, Nodes, OpNode, nodes_of
from distgraph.passes.search.intra_op.decode import decode_choice, encode_layouts
from distgraph.passes.search.intra_op.layer_costs import LayerCosts
from distgraph.passes.search.layering.layer_folding import Fold, fold
from distgraph.passes.search.layering.layer_sequence import Layering
from distgraph.passes.search.layering.liveness import Lifetimes
from distgraph.passes.search.solver.problem import Problem

__all__ = ["Decision", "Formulation", "Layouts", "Profile", "formulate"]


@dataclass(frozen=True, eq=False)
class Formulation:
    """The problem of one mesh, and the layouts that its choices stand for.

    Attributes:
        graph, mesh: the arguments of `formulate`.
        cost_model: seconds of ops and changes of layout.
        fold, nodes, lifetimes, term_builder: what the problem is computed from; its node i is `nodes.all[i]`.
        memory_multiplier: seconds that a byte costs if it is occupied for the whole step.
    """

    graph: Graph
    mesh: ProcessMesh
    cost_model: CostModel = field(repr=False)
    fold: Fold = field(repr=False)
    nodes: Nodes = field(repr=False)
    lifetimes: Lifetimes = field(repr=False)
    term_builder: TermBuilder = field(repr=False)
    memory_multiplier: float = 0.0

    @cached_property
    def problem(self) -> Problem:
        """The problem for `solver.solve`; costs in seconds of a step, plus `memory_multiplier` a byte.

        It is computed on first use: the profile of a choice needs far fewer costs.
        """
        return _problem(self.fold, self.nodes, self.cost_terms, self.memory_multiplier)

    @property
    def cost_terms(self) -> Terms:
        """The terms of the problem before they are added up."""
        return self.term_builder.terms

    def decode(self, choice: Sequence[int]) -> Layouts:
        """Layouts of every op and value under a choice [nodes]."""
        return decode_choice(self.fold, self.nodes, self.mesh, choice)

    def encode(self, layouts: Layouts) -> tuple[int, ...]:
        """The choice that decodes to given layouts, such as those of a completed graph.

        Raises:
            ShardingError: a layout is not among the options; those of decomposed ops never are.
        """
        return encode_layouts(self.fold, self.nodes, self.mesh, layouts)

    def profile(self, choice: Sequence[int]) -> Profile:
        """Costs by layer under a choice."""
        costs = LayerCosts(self.fold, self.nodes, self.lifetimes, self.mesh, self.cost_model, choice)
        return costs.profile()

    def terms(self, choice: Sequence[int], node: int) -> Decision:
        """The costs of one node under a choice, and the costs of its other options."""
        neighbourhoods, decided, terms = Neighbourhoods(self.problem), self.nodes.all[node], self.cost_terms
        option = choice[node]
        moving = sum(float(costs[option, choice[other]]) for other, costs in neighbourhoods.edges[node])
        nbytes = terms.fixed[node] + terms.activations[node]
        return Decision(
            option,
            decided.texts(self.mesh) if isinstance(decided, OpNode) else decided.texts(),
            float(terms.compute[node][option]),
            float(terms.copying[node][option]) + moving,
            float(nbytes[option]),
            neighbourhoods.fixed(choice, node),
            neighbourhoods.followed(choice, node),
        )

    def with_memory(self, *, memory_multiplier: float) -> Formulation:
        """This formulation with another memory multiplier; the cost terms are reused."""
        return replace(self, memory_multiplier=memory_multiplier)


def formulate(
    graph: Graph,
    mesh: ProcessMesh,
    cost_model: CostModel,
    layering: Layering | None = None,
    *,
    folded: Fold | None = None,
    batch_axis: str | None = None,
) -> Formulation:
    """Formulate the search for layouts on one mesh.

    Args:
        graph: a serial train graph of one micro-batch; annotations are constraints.
        mesh: the mesh that computes the whole graph; axes of one rank split nothing.
        cost_model: seconds of ops and changes of layout on the devices of the ranks.
        layering: the layers; equal layers get equal layouts. None decides every op separately.
        folded: the fold of this graph and layering, if the caller has it.
        batch_axis: the axis that splits samples and nothing else, where every axis has one use (see
            `axis_uses`); None where any axis may split anything.

    Raises:
        ShardingError: annotations do not fit the mesh or the uses of its axes, or contradict each other.
        ResourceError: the resource file has no number that a cost needs.
    """
    folded = fold(graph, layering) if folded is None else folded
    lifetimes = Lifetimes(folded)
    nodes = nodes_of(folded, mesh, lifetimes, axis_uses(folded, batch_axis) if batch_axis else None)
    return Formulation(
        graph,
        mesh,
        cost_model,
        folded,
        nodes,
        lifetimes,
        TermBuilder(folded, nodes, lifetimes, mesh, cost_model),
    )


def _problem(folded: Fold, nodes: Nodes, terms: Terms, multiplier: float) -> Problem:
    """Add up the terms."""
    costs = tuple(
        compute + copying + multiplier * (fixed + activations)
        for compute, copying, fixed, activations in zip(
            terms.compute, terms.copying, terms.fixed, terms.activations, strict=True
        )
    )
    labels = tuple(_label(folded, node) for node in nodes.all)
    edge_costs = dict(terms.edges)
    for copies in (terms.fixed_copies, terms.activation_copies) if multiplier else ():
        for edge, nbytes in copies.items():
            edge_costs[edge] = edge_costs[edge] + multiplier * nbytes
    return Problem(folded.graph.name, costs, tuple(edge_costs), tuple(edge_costs.values()), labels=labels)


def _label(folded: Fold, node: Node) -> str:
    if isinstance(node, OpNode):
        op = folded.ops[node.number]
        return f"{op.op.kind} %{op.op.name}{_repeats(op.members)}"
    value = folded.values[node.number]
    return f"storage of %{value.value.name}{_repeats(value.members)}"


def _repeats(members: Sequence[str]) -> str:
    return f" and {len(members) - 1} equal" if len(members) > 1 else ""
