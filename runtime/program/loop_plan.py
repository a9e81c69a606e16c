"""Memory plans of loops: each body has planned buffers of its own, in memory that all loops of a rank share.

*In:* the loops of a rank program. *Out:* a `LoopPlan` for each: storage of its bodies, and bytes.
*Invariant:* loops of one program run one after the other, so that they share one block of memory; that of the
loops inside of a body is placed after the buffers of the body.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from distgraph.ir.loops import Loop
from distgraph.passes.partition import LocalOp, RankProgram
from distgraph.runtime.program.memory_plan import planned
from distgraph.runtime.program.storage import Storage, nbytes

ALIGN = 64


def aligned(size: int) -> int:
    """Bytes that a buffer takes."""
    return -(-max(size, 1) // ALIGN) * ALIGN


@dataclass(frozen=True)
class BodyPlan:
    """Program and memory of one body on one rank.

    Attributes:
        program: its only task runs one turn.
        storage: of its values; carries are sources.
        loops: plans of the loops inside.
        owns_carries: whether the body has the buffers of the carries, as those of a condition are the body's.
    """

    program: RankProgram
    storage: Storage
    loops: dict[str, LoopPlan]
    owns_carries: bool

    @cached_property
    def carries(self) -> tuple[str, ...]:
        """Names of the values that a turn begins with."""
        return tuple(op.result.name for op in self.program.graph.sources("state"))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its buffers, without those of the loops inside."""
        fused = {name for names in self.storage.fused.values() for name in names}
        roots = {self.storage.slots[name].root for name in fused}
        owned = [
            name
            for name, slot in self.storage.slots.items()
            if slot.root == name and slot.kind == "persistent" and name not in roots
        ]
        owned += self.carries if self.owns_carries else ()
        blocks = [sum(nbytes(self.program, name) for name in names) for names in self.storage.fused.values()]
        sizes = [*blocks, *(nbytes(self.program, name) for name in owned), self.storage.scratch]
        return sum(map(aligned, sizes))


@dataclass(frozen=True)
class LoopPlan:
    """Programs and memory of a loop on one rank."""

    local: LocalOp
    bodies: dict[str, BodyPlan]

    @property
    def loop(self) -> Loop:
        """The loop."""
        return Loop(self.local.op)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the buffers of the bodies and of the loops inside."""
        inside = (plan.nbytes for body in self.bodies.values() for plan in body.loops.values())
        return sum(body.nbytes for body in self.bodies.values()) + max(inside, default=0)

    @property
    def copied(self) -> int:
        """Bytes that one turn leaves in stacks and sums, and hands on by a copy."""
        body = self.bodies["body"]
        program, outputs = body.program, [value.name for _, value in body.program.graph.outputs]
        moved = [new.name for old, new in program.graph.updates if old not in body.storage.in_place]
        return sum(nbytes(program, name) for name in (*outputs, *moved))


def plan_loop(local: LocalOp) -> LoopPlan:
    """The plan of one loop."""
    bodies = {
        name: BodyPlan(program, planned(program).storage, plan_loops(program), name == "body")
        for name, program in local.attrs["programs"].items()
    }
    return LoopPlan(local, bodies)


def plan_loops(program: RankProgram) -> dict[str, LoopPlan]:
    """Name of a loop of a program -> its plan."""
    return {local.op.name: plan_loop(local) for local in program.ops if local.mode == "loop"}
