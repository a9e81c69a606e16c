"""Restrictions of the search: the uniform plans that every answer is compared with.

*In:* a formulation. *Out:* its problem without what a restriction forbids. *Invariant:* ops stay free; what
is fixed is where inputs, parameters and states are stored, and the rest follows from the costs.

    "none"    nothing is forbidden
    "uniform" inputs are split over dp along the batch, parameters not over dp
    "zero1"   besides, states may be split over dp;   without it they are sharded as their parameters
    "zero3"   besides, parameters may be too
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

import numpy as np

from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.search.intra_op.decision_nodes import ValueNode
from distgraph.passes.search.intra_op.formulate import Formulation
from distgraph.passes.search.solver.problem import Problem

Restriction = Literal["none", "uniform", "zero1", "zero3"]
BATCH_AXIS = "dp"
RESTRICTION_NAMES: Final[dict[Restriction, str]] = {
    "none": "uniform stages, layouts free",
    "uniform": "uniform, without ZeRO",
    "zero1": "uniform, ZeRO-1",
    "zero3": "uniform, ZeRO-3",
}
"""How baselines are called; docs/planning/plan.md explains the names."""


def restriction_of(zero: int | None) -> Restriction:
    """The restriction under which dp splits what `SearchConstraints.zero` allows."""
    by_zero: dict[int | None, Restriction] = {None: "none", 0: "uniform", 1: "zero1", 2: "zero1", 3: "zero3"}
    return by_zero[zero]


def zero_of(restriction: Restriction) -> int:
    """What dp may split under a restriction, as a number of `SearchConstraints.zero`; 4 for anything."""
    return {"uniform": 0, "zero1": 1, "zero3": 3, "none": 4}[restriction]


def restricted(formulation: Formulation, restriction: Restriction) -> Problem:
    """The problem with forbidden ways to store made infinitely dear."""
    problem = formulation.problem
    if restriction == "none":
        return problem
    costs = list(problem.costs)
    for number, node in enumerate(formulation.nodes.all):
        if not isinstance(node, ValueNode) or node.number in formulation.nodes.pinned:
            continue
        value = formulation.fold.values[node.number]
        kind = formulation.fold.ops[value.producer].op.kind
        batch = (BATCH_AXIS,) if formulation.mesh.sizes.get(BATCH_AXIS, 1) > 1 else ()
        allowed = np.array([_allowed(kind, spec, batch, restriction) for spec, _ in node.options])
        if allowed.any():
            costs[number] = np.where(allowed, costs[number], np.inf)
    return replace(problem, costs=tuple(costs))


def _allowed(kind: str, spec: ShardSpec, batch: tuple[str, ...], restriction: Restriction) -> bool:
    over = [BATCH_AXIS in dim for dim in spec.dims]
    if kind == "input":
        return not spec.dims or (spec.dims[0] == batch and not any(spec.dims[1:]))
    if kind == "param":
        return restriction == "zero3" or not any(over)
    if kind == "state":
        return restriction in ("zero1", "zero3") or not any(over)
    return True
