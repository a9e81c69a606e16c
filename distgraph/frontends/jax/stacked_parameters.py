"""Parameters of layers that a scan reads: a leaf [layers, ...] is stored as one parameter for each layer.

JAX stacks the parameters of equal layers along a first dim and scans over them. As one tensor they could not
be on the meshes of different pipeline stages, and the gradient of each layer would be padded to all layers.
So a leaf that only scans read, one item in each turn, becomes the parameters "name.0", "name.1", ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distgraph import ops
from distgraph.frontends.jax.control_flow import CALLS
from distgraph.nn.parameter import Parameter
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

_MOST_LAYERS = 128
"""Turns of the longest scan whose parameters are separated."""


@dataclass(frozen=True, slots=True)
class StackedParameters:
    """The parameters of all layers, which a scan reads one after the other.

    Attributes:
        layers: the parameter of each layer.
    """

    layers: tuple[Parameter, ...]

    def item(self, position: int) -> Tensor:
        """The tensor of one layer in the current trace."""
        return Trace.current().tensor(self.layers[position])

    def stacked(self) -> Tensor:
        """All layers as one tensor, for a primitive that reads them together."""
        return ops.stack([self.item(position) for position in range(len(self.layers))], 0)


def scanned_inputs(closed: Any) -> list[bool]:
    """For each input of a jaxpr whether only scans read it, one item of its first dim in each turn."""
    jaxpr = getattr(closed, "jaxpr", closed)
    return [_is_scanned(jaxpr, var) and _is_read(jaxpr, var) for var in jaxpr.invars]


def _is_read(jaxpr: Any, var: Any) -> bool:
    return any(_positions(eqn.invars, var) for eqn in jaxpr.eqns)


def _is_scanned(jaxpr: Any, var: Any) -> bool:
    """Whether nothing but scans reads a variable."""
    return not _positions(jaxpr.outvars, var) and all(
        _scans(eqn, position) for eqn in jaxpr.eqns for position in _positions(eqn.invars, var)
    )


def _positions(atoms: Sequence[Any], var: Any) -> list[int]:
    return [position for position, atom in enumerate(atoms) if atom is var]


def _scans(eqn: Any, position: int) -> bool:
    """Whether an equation scans over its operand at a position."""
    params = eqn.params
    if eqn.primitive.name == "scan":
        items = position >= params["num_consts"] + params["num_carry"]
        return bool(items and 1 < params["length"] <= _MOST_LAYERS)
    if eqn.primitive.name not in CALLS or eqn.primitive.name.startswith("custom_"):
        return False
    inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    jaxpr = getattr(inner, "jaxpr", inner)
    return _is_scanned(jaxpr, jaxpr.invars[position])
