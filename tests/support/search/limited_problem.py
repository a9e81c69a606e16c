"""The intra-operator problem of a formulation within a limit on memory, from its bytes and lifetimes."""

from __future__ import annotations

from dataclasses import replace

from distgraph.passes.search.intra_op.formulate import Formulation
from distgraph.passes.search.solver.problem import Problem, Use


def limited(formulation: Formulation, limit: float) -> Problem:
    """The problem whose choices use at most `limit` bytes of a rank at a time, copies without node aside."""
    terms, end = formulation.cost_terms, len(formulation.graph.ops) + 1
    uses: list[list[Use]] = []
    for fixed, activations in zip(terms.fixed, terms.activations, strict=True):
        persistent = fixed + activations
        uses.append([Use(0, end, persistent)] if persistent.any() else [])
    for number, lifetime in enumerate(formulation.lifetimes.of):
        stored = formulation.term_builder.storage_bytes(number) if lifetime.kind == "temporary" else None
        if stored is not None:
            uses[stored[0]].append(Use(lifetime.start, lifetime.stop, stored[1]))
    return replace(formulation.problem, uses=tuple(map(tuple, uses)), limit=limit)
