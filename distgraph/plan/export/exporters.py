"""The frameworks that plans are exported to. Loaded by the first export."""

from __future__ import annotations

from distgraph.plan.export.jax import export_jax
from distgraph.plan.export.megatron import export_megatron
from distgraph.plan.export.torch import export_torch

EXPORTERS = {"jax": export_jax, "torch": export_torch, "megatron": export_megatron}
