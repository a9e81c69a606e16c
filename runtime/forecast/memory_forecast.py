"""Bytes of memory that a rank needs, by category, from the storage plan of its program.

*In:* a rank program and its storage.
*Out:* `RankMemory`.
*Invariant:* a category holds exactly the blocks that the worker allocates for it: sources, persistent
buffers, rings with one buffer for each micro-batch in flight, and scratch memory that values share. They live
for the whole step, so the peak is their sum plus the largest workspace of a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from distgraph.passes.partition import RankProgram
from distgraph.resources import Cluster
from distgraph.resources.runtimes.runtime_model import Memory
from distgraph.resources.units import format_bytes
from distgraph.runtime.program.storage import Storage, nbytes


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        parameters: blocks of parameters.
        gradients: sums over micro-batches, and values computed from them for the update.
        states: optimiser states.
        activations: values that forward tasks store for backward tasks, times the micro-batches in flight.
        temporary: scratch memory shared by all tasks, values that load tasks compute once per step, and the
            largest workspace of a kernel (see `kernel_workspace`).
        communication: values received from other meshes.
        inputs: inputs of all micro-batches of a step, and constants.
    """

    rank: int
    parameters: int = 0
    gradients: int = 0
    states: int = 0
    activations: int = 0
    temporary: int = 0
    communication: int = 0
    inputs: int = 0

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.categories.values())

    @property
    def categories(self) -> dict[str, int]:
        """Category -> bytes."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rank"}

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.categories.items() if size)
        return f"rank {self.rank}: {format_bytes(self.total)} ({parts})"


@dataclass(frozen=True, slots=True)
class Shortage:
    """A rank that needs more bytes than its device has."""

    rank: int
    device: int
    node: str
    needed: int
    available: float

    @property
    def missing(self) -> float:
        """Bytes by which the need exceeds the memory of the device."""
        return self.needed - self.available

    def __str__(self) -> str:
        return (
            f"rank {self.rank} needs {format_bytes(self.needed)} but device {self.device} ({self.node}) has "
            f"{format_bytes(self.available)}: {format_bytes(self.missing)} are missing"
        )


def rank_memory(
    program: RankProgram, storage: Storage, workspaces: Mapping[str, int] | None = None
) -> RankMemory:
    """Bytes of one rank by category.

    Args:
        program, storage: of the rank.
        workspaces: task -> bytes that its kernels allocate (`kernel_workspace.task_workspace`); none where
        not given.
    """
    sizes = {f.name: 0 for f in fields(RankMemory) if f.name != "rank"}
    sizes["temporary"] = storage.scratch + max((workspaces or {}).values(), default=0)
    producers, micro = program.graph.producers, program.graph.micro_batches
    for name, category in categories(program, storage).items():
        copies = micro if producers[name].kind == "input" else storage.rings.get(name, 1)
        sizes[category] += nbytes(program, name) * copies
    return RankMemory(program.rank, **sizes)


def with_overhead(memory: RankMemory, rules: Memory) -> RankMemory:
    """The bytes of a rank with what a runtime needs in addition to the tensors of the program."""
    lost = rules.fragmentation * (memory.activations + memory.temporary)
    return replace(memory, temporary=memory.temporary + round(rules.workspace + lost))


def categories(program: RankProgram, storage: Storage) -> dict[str, str]:
    """Value -> category, of every value that has its own memory outside of the scratch memory."""
    producers, phase = program.graph.producers, program.parts.phase
    received = program.received()
    kind = {"param": "parameters", "state": "states"}
    late = {slot.root for name, slot in storage.slots.items() if phase[name] == 2}
    category = {}
    for name, slot in storage.slots.items():
        if slot.root != name or slot.kind not in ("source", "persistent", "ring"):
            continue
        op = producers[name]
        if slot.kind == "source":
            category[name] = kind.get(op.kind, "inputs")
        elif name in received:
            category[name] = "communication"
        elif phase[name] == 0:
            category[name] = "temporary"
        elif name in late:
            category[name] = "states" if op.role == "optimize" else "gradients"
        else:
            category[name] = "activations"
    return category


def shortages(
    memory: Mapping[int, RankMemory], cluster: Cluster, devices: tuple[int, ...], rules: Memory
) -> tuple[Shortage, ...]:
    """The ranks that need more than their device has, the worst first.

    The `rules` of the runtime may take a part of the memory for itself.
    """
    short = []
    for rank, need in memory.items():
        device = cluster.devices[devices[rank]]
        available = rules.available(device.memory)
        if need.total > available:
            short.append(Shortage(rank, device.index, device.node, need.total, available))
    return tuple(sorted(short, key=lambda shortage: -shortage.missing))
