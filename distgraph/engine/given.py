"""The plan that an engine is given: by its caller, or by the command that runs the script."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from distgraph.engine.program import Recipe
from distgraph.plan import Plan

VARIABLE = "DISTGRAPH_PLAN"
"""Environment variable: path of a plan file for the engine that trains in this process."""

_GIVEN: ContextVar[Plan | None] = ContextVar("distgraph_plan", default=None)


def plan_for(recipe: Recipe, own: Plan | str | Path | None) -> Plan | None:
    """The plan of an engine: that of the command, where the engine trains, before its own.

    Raises:
        GraphError: as `Plan.load`.
    """
    if recipe.optimizer is not None:
        given = _GIVEN.get()
        path = os.environ.get(VARIABLE)
        if given is not None:
            return given
        if path:
            return Plan.load(path)
    return Plan.load(own) if isinstance(own, (str, Path)) else own


@contextmanager
def giving(plan: Plan | None) -> Iterator[None]:
    """Inside, engines that train have this plan; None changes nothing."""
    if plan is None:
        yield
        return
    token = _GIVEN.set(plan)
    try:
        yield
    finally:
        _GIVEN.reset(token)
