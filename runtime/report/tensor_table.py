"""A row of the table of tensors that reports and summaries show."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorRow:
    """An input, parameter, state or output of a program.

    Attributes:
        name, kind: of the tensor; input, param, state or output.
        type: dtype and shape.
        layout, mesh: its sharding, and the mesh on which it is stored.
        nbytes: bytes of its largest block.
        origin: who decided its layout.
    """

    name: str
    kind: str
    type: str
    layout: str
    mesh: str
    nbytes: int
    origin: str
