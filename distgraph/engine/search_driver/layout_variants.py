"""What layouts are solved for, and what is made of the solutions: costs by layer, in a few variants a shape.

*In:* nothing: data only. *Out:* `LayoutQuery`, `Variant`, `Solutions`. *Invariant:* what passes between
processes is small, but took long to find.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distgraph.engine.search_driver.search_space import Shape
from distgraph.passes.search.inter_op.submesh_placement import SubMesh
from distgraph.passes.search.intra_op.chosen_layouts import Profile
from distgraph.passes.search.intra_op.memory_limit import MemoryLimit
from distgraph.passes.search.intra_op.restrictions import Restriction


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to lay out the layers on a mesh of some shape.

    Attributes:
        micro_batches: in a step.
        submesh, shape: devices and logical mesh.
        memory_multiplier: seconds a byte, as a Lagrange multiplier of the memory limit.
        restriction: what was forbidden.
        memory_limit: within which layouts were solved for; None without a limit.
        profile: costs by layer; recompute: the same where every layer is recomputed.
        estimate: the objective: seconds of a step, and what memory costs.
        solved: whether layouts were solved for this micro-batch count, not carried over from another.
    """

    micro_batches: int
    submesh: SubMesh
    shape: Shape
    memory_multiplier: float
    restriction: Restriction
    profile: Profile
    recompute: Profile
    estimate: float
    solved: bool
    memory_limit: MemoryLimit | None = None


VariantKind = Literal["fastest", "multipliers", "within memory"]
"""Which variants of a shape: the fastest, those of all memory multipliers, the fastest within a limit."""
VariantKey = tuple[int, SubMesh, Shape, Restriction, VariantKind, bool]
"""Micro-batch count, sub-mesh, shape, restriction, kind, and whether they are solved separately."""


@dataclass(frozen=True, slots=True)
class LayoutQuery:
    """What layouts of a stage are solved for; the memory multiplier is in seconds a byte."""

    devices: tuple[int, ...]
    shape: Shape
    memory_multiplier: float
    restriction: Restriction
    memory_limit: MemoryLimit | None = None


@dataclass(frozen=True, slots=True)
class Solutions:
    """What was solved, as one process sends it to another: small, but it took long.

    Attributes:
        choices: problem -> the best choice and its objective.
        bases: devices, shape and memory share -> micro-batch counts that were solved, with their multiplier.
        variants: of shapes.
    """

    choices: dict[object, tuple[tuple[int, ...], float]]
    bases: dict[object, dict[int, float]]
    variants: dict[VariantKey, tuple[Variant, ...]]

    def since(self, before: Solutions) -> Solutions:
        """What was solved after `before` was copied."""
        bases = {
            key: {m: multiplier for m, multiplier in counts.items() if m not in before.bases.get(key, ())}
            for key, counts in self.bases.items()
        }
        return Solutions(
            {key: choice for key, choice in self.choices.items() if key not in before.choices},
            {key: counts for key, counts in bases.items() if counts},
            {key: variants for key, variants in self.variants.items() if key not in before.variants},
        )

    def copy(self) -> Solutions:
        """A copy, to which nothing is added."""
        bases = {key: dict(counts) for key, counts in self.bases.items()}
        return Solutions(dict(self.choices), bases, dict(self.variants))

    def add(self, more: Solutions) -> None:
        """Add what another process solved."""
        self.choices.update(more.choices)
        self.variants.update(more.variants)
        for key, counts in more.bases.items():
            self.bases.setdefault(key, {}).update(counts)
