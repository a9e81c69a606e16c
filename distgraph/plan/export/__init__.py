"""Export of plans to the terms of other frameworks. See docs/export.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distgraph.errors import GraphError
from distgraph.plan.export.jax import export_jax
from distgraph.plan.export.megatron import export_megatron
from distgraph.plan.export.module_interface import Surface, surface_of
from distgraph.plan.export.result import Export
from distgraph.plan.export.torch import export_torch

if TYPE_CHECKING:
    from distgraph.plan.plan import Plan

__all__ = ["EXPORTERS", "Export", "Surface", "export", "surface_of"]

EXPORTERS = {"jax": export_jax, "torch": export_torch, "megatron": export_megatron}


def export(plan: Plan, framework: str) -> Export:
    """A plan in the terms of another framework.

    Args:
        plan: with a surface.
        framework: "jax", "torch" or "megatron".

    Raises:
        GraphError: the framework is unknown, or the plan has no surface.
        ShardingError: the framework cannot express the plan.
    """
    if framework not in EXPORTERS:
        raise GraphError(f"framework {framework!r} is unknown; a plan is exported to {', '.join(EXPORTERS)}")
    return EXPORTERS[framework](plan)
