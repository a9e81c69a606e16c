"""Export of plans to the terms of other frameworks. See docs/planning/export.md."""

from __future__ import annotations

from distgraph.plan.export.jax import export_jax
from distgraph.plan.export.megatron import export_megatron
from distgraph.plan.export.module_interface import Surface, surface_of
from distgraph.plan.export.result import Export
from distgraph.plan.export.torch import export_torch

__all__ = ["EXPORTERS", "Export", "Surface", "surface_of"]

EXPORTERS = {"jax": export_jax, "torch": export_torch, "megatron": export_megatron}
