"""Layouts within the memory of a device: the intra-operator problem with the bytes that a stage may hold.

*In:* a formulation, a limit. *Out:* its problem with uses of memory, and a good choice that fits.
*Invariant:* bytes and lifetimes are those of the cost terms and of `Lifetimes`, as in the estimates of stages
and in the runtime's memory plan.

The problem lays out the whole program, a pipeline of p stages has about a p-th of it on each. With l
micro-batches in flight, a stage fits where

    (sum fixed + l sum activations) / p + scratch(t)  <=  limit     at every time t

so that the uses of the problem are fixed + l activations and p times scratch, within p times the limit.
Copies of values that have no node, which depend on two choices, are nodes of the problem within memory (see
`pair_uses`). It does not know copies in scratch memory; where the profile of its choice needs more than the
limit, it is solved again within as much less, by bisection where nothing is as small. Where that comes to no
choice, it is tried without the copies, too. Where the least uses of all nodes nearly reach the limit, hardly
any choice fits (`is_tight`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.intra_op.chosen_layouts import Profile
from distgraph.passes.search.intra_op.formulate import Formulation
from distgraph.passes.search.solver.pair_uses import with_pair_uses
from distgraph.passes.search.solver.problem import Problem, Solution, Use

__all__ = ["MemoryLimit", "is_tight", "limited", "limited_nodes", "solve_within"]

_ROUNDS = 4
"""How often a problem is solved within lower limits, at most, until copies in scratch memory fit, too."""
_LESS = 1e-6
"""Part by which a limit is at least below what the choice before it uses: so that it is not chosen again."""
_TIGHT = 0.97
"""Part of a limit from which the least uses of all nodes leave hardly any memory for copies."""
_NONE = Solution(None, math.inf, math.inf, math.inf, "infeasible", message="layouts take too much memory")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What one of several stages with about equal parts of a program may hold.

    Attributes:
        nbytes: of a device.
        stages: of the pipeline.
        live: micro-batches in flight on the stage that holds most.
    """

    nbytes: float
    stages: int = 1
    live: int = 1

    def needed(self, profile: Profile) -> float:
        """Bytes that a stage needs by the costs of layers."""
        held = float(profile.fixed.sum() + self.live * profile.activations.sum())
        return held / self.stages + float(profile.temporary.max(initial=0.0))


def limited(formulation: Formulation, problem: Problem, limit: MemoryLimit) -> Problem:
    """A problem of a formulation within a limit; nodes behind its own stand for copies without a node."""
    return _with_copies(formulation, limited_nodes(formulation, problem, limit), limit)


def _with_copies(formulation: Formulation, nodes: Problem, limit: MemoryLimit) -> Problem:
    """A problem with the uses of memory of its nodes, and nodes for copies without one."""
    terms, nbytes = formulation.cost_terms, dict[tuple[int, int], Floats]()
    for copies, count in ((terms.fixed_copies, 1), (terms.activation_copies, limit.live)):
        for edge, of_edge in copies.items():
            nbytes[edge] = nbytes.get(edge, 0.0) + count * of_edge
    return with_pair_uses(nodes, nbytes, 0, len(formulation.graph.ops) + 1)


def limited_nodes(formulation: Formulation, problem: Problem, limit: MemoryLimit) -> Problem:
    """A problem of a formulation with the uses of memory of its nodes and the limit."""
    terms, end = formulation.cost_terms, len(formulation.graph.ops) + 1
    uses: list[list[Use]] = []
    for fixed, activations in zip(terms.fixed, terms.activations, strict=True):
        persistent = fixed + limit.live * activations
        uses.append([Use(0, end, persistent)] if persistent.any() else [])
    for number, lifetime in enumerate(formulation.lifetimes.of):
        stored = formulation.term_builder.storage_bytes(number) if lifetime.kind == "temporary" else None
        if stored is not None:
            uses[stored[0]].append(Use(lifetime.start, lifetime.stop, limit.stages * stored[1]))
    return replace(problem, uses=tuple(map(tuple, uses)), limit=limit.stages * limit.nbytes)


def is_tight(formulation: Formulation, problem: Problem, limit: MemoryLimit) -> bool:
    """Whether hardly any choice keeps a limit, because the least uses of all nodes nearly reach it."""
    nodes = limited_nodes(formulation, problem, limit)
    return nodes.limit is not None and nodes.least_peak()[1] > _TIGHT * nodes.limit


def solve_within(
    formulation: Formulation,
    problem: Problem,
    limit: MemoryLimit,
    solve: Callable[[Problem], Solution],
    improve: Callable[[Problem, Solution], Solution],
) -> Solution:
    """A choice whose profile keeps a limit: the best of the few that are looked at.

    Args:
        formulation: of the problem.
        problem: of the formulation, with what is forbidden.
        limit: of a stage.
        solve: a solver; it is not called where the least uses of all nodes exceed the limit.
        improve: a solver that takes more time, for what is known of a problem; it is not called for choices
            of which the profile exceeds the limit.

    Returns:
        The solution of the problem that was solved last; without a choice where no profile keeps the limit.
    """
    nodes, count = limited_nodes(formulation, problem, limit), len(problem.costs)
    if not _may_fit(nodes):
        return _NONE  # copies only add to that
    within = _with_copies(formulation, nodes, limit)
    solution, tried = _lowered(formulation, within, limit, solve, improve)
    if solution.choice is None and tried > 1:
        solution, _ = _lowered(formulation, nodes, limit, solve, improve)
    return replace(solution, choice=solution.choice and solution.choice[:count])


def _lowered(
    formulation: Formulation,
    within: Problem,
    limit: MemoryLimit,
    solve: Callable[[Problem], Solution],
    improve: Callable[[Problem, Solution], Solution],
) -> tuple[Solution, int]:
    """A choice of a problem whose profile keeps a limit, by solving it within lower ones; and how often it
    was solved."""
    low, high, allowed = -math.inf, limit.nbytes, limit.nbytes
    for number in range(1, _ROUNDS + 1):
        lower = replace(within, limit=limit.stages * allowed)
        solution = _solved(lower, solve)
        excess = _excess(formulation, solution, limit)
        if excess <= 0 or solution.choice is None:
            better = improve(lower, solution)
            if excess > 0 or _excess(formulation, better, limit) <= 0:
                solution, excess = better, _excess(formulation, better, limit)
        if excess <= 0 or (solution.choice is None and allowed == limit.nbytes):
            return solution, number
        if solution.choice is None:
            low, below = allowed, -math.inf
        else:
            used = lower.peak(solution.choice)[1] / limit.stages
            high, below = allowed, min(allowed - excess, used * (1 - _LESS))
        allowed = max(below, (low + high) / 2)
    return _NONE, _ROUNDS


def _solved(problem: Problem, solve: Callable[[Problem], Solution]) -> Solution:
    return solve(problem) if _may_fit(problem) else _NONE


def _may_fit(problem: Problem) -> bool:
    """Whether the least uses of all nodes keep the limit of a problem."""
    return problem.limit is None or problem.least_peak()[1] <= problem.limit


def _excess(formulation: Formulation, solution: Solution, limit: MemoryLimit) -> float:
    """Bytes that the choice of a solution needs above a limit; infinite without a choice."""
    if solution.choice is None:
        return math.inf
    return limit.needed(formulation.profile(solution.choice)) - limit.nbytes
