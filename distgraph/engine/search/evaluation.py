"""What the search keeps of a program that was forecast; itself it is large, and most are not the best.

*In:* a `Realized`. *Out:* its figures, what was decided in it, and a way back to it. *Invariant:* the way
back gives the same program, as building is deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from distgraph.engine.search.candidate import Proposal, Realized, realize
from distgraph.engine.search.layout_costs import Oracle


@dataclass(eq=False, slots=True)
class Judged:
    """A program by its forecast.

    Attributes:
        origin, proposal: as of `Realized`.
        seconds: of a step.
        filled: how many times its memory the fullest device needs; at most 1 where it fits.
        missing: bytes that the device lacks which lacks most.
        ops: of the program, once lowered.
        choices: what was decided for the whole program, as texts.
        program: itself, where it is at hand.
    """

    origin: str
    proposal: Proposal | None
    seconds: float
    filled: float
    missing: float
    ops: int
    choices: Mapping[str, str]
    program: Realized | None

    @property
    def fits(self) -> bool:
        """Whether every device has the memory."""
        return not self.missing

    def again(self, oracle: Oracle) -> Realized:
        """The program; built once more where it is not at hand."""
        if self.program is None:
            assert self.proposal is not None
            self.program = realize(self.proposal, oracle)
        return self.program

    def forget(self) -> None:
        """Let go of a program that its proposal leads back to."""
        if self.proposal is not None:
            self.program = None


def judged(found: Realized, *, rechosen: bool = False) -> Judged:
    """The figures of a program, with the program.

    Args:
        found: it.
        rechosen: whether its layouts are not those of its proposal, so that it must be kept.
    """
    short = found.shortages
    return Judged(
        found.origin,
        None if rechosen else found.proposal,
        found.seconds,
        max((s.needed / s.available for s in short), default=1.0),
        max((s.missing for s in short), default=0.0),
        len(found.build.lowered.ops),
        {
            "micro_batches": str(found.traced.graph.micro_batches),
            "stages": _stages(found),
            "recompute": f"{len(found.traced.recompute)} of {len(found.traced.layers)} layers",
            "schedule": found.build.policy,
        },
        found,
    )


def judge(proposal: Proposal, oracle: Oracle) -> Judged:
    """Build and forecast a proposal."""
    return judged(realize(proposal, oracle))


def light(found: Judged) -> Judged:
    """The same without the program, as it is sent from one process to another."""
    return replace(found, program=None)


def _stages(found: Realized) -> str:
    if found.proposal is None:
        meshes = dict.fromkeys(found.build.lowered.meshes)
        shapes = [" x ".join(f"{axis}={mesh.axis_size(axis)}" for axis in mesh.axes) for mesh in meshes]
        return f"layers 0-{len(found.traced.layers) - 1} on {', '.join(shapes)}"
    return "; ".join(map(str, found.proposal.stages))
