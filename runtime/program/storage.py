"""The storage of the values of a rank program: which memory each value uses.

Kinds of storage:
    source      parameters, states, inputs and constants: they exist before the step.
    persistent  one buffer for the whole step: read by another task, or an output.
    ring        like persistent, with one buffer for each micro-batch in flight.
    scratch     dead when its task ends; its memory is reused as soon as the value is dead (`memory_packing`).
    view        the memory of another value (its root) in another shape; recomputed where it is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from distgraph.ir.dtypes import itemsize
from distgraph.passes.partition import LocalOp, RankProgram

Place = tuple[str, int]
"""(task name, number of the op in the task)."""


class Part(NamedTuple):
    """Where a value is in the memory of another one: the other one's name, and slices of it."""

    whole: str
    where: tuple[slice, ...]


@dataclass(slots=True)
class Slot:
    """Storage of one value.

    Attributes:
        kind: source, persistent, ring, scratch or view.
        root: name of the value that owns the memory: itself, unless it is a view or reuses a buffer.
        contiguous: whether it is C-contiguous.
        offset: first byte of its scratch memory in that of the rank.
    """

    kind: str
    root: str
    contiguous: bool = True
    offset: int = 0


@dataclass(slots=True)
class Storage:
    """The storage plan of one rank.

    Attributes:
        slots: value name -> slot.
        scratch: bytes of the scratch memory, which all tasks share.
        rings: root name of a ring value -> number of buffers.
        waits: (task, op) -> results of collectives to wait for immediately before the op.
        late: task -> results of its collectives that another task or the end of the step waits for.
        in_place: updated param or state -> value that is computed directly in its memory.
        into: value that only an `accumulate` reads -> result of the `accumulate`, to which the value is
            added while it is computed.
        sent: roots of the memory that messages are sent from. These messages must have been sent before the
            memory is written.
        lives: root of a persistent or ring value -> tasks that use it, from the first to the last of which it
            is alive.
        fused: name of a collective of several tensors in one block -> its results, whose roots have one block
            of memory in this order: it is what the transport gets.
        parts: result of a reduce_scatter that has no memory of its own -> where it is in the operand; its
            root is that of the operand.
    """

    slots: dict[str, Slot]
    scratch: int = 0
    rings: dict[str, int] = field(default_factory=dict)
    waits: dict[Place, tuple[str, ...]] = field(default_factory=dict)
    late: dict[str, tuple[str, ...]] = field(default_factory=dict)
    in_place: dict[str, str] = field(default_factory=dict)
    into: dict[str, str] = field(default_factory=dict)
    sent: frozenset[str] = frozenset()
    lives: dict[str, frozenset[str]] = field(default_factory=dict)
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)

    def started_by(self, program: RankProgram) -> dict[str, str]:
        """Result of a collective -> name of the op that starts it, which is what tasks wait for."""
        started = (local.op for local in program.ops if is_started(local))
        return {value.name: op.name for op in started for value in op.results}


def nbytes(program: RankProgram, name: str) -> int:
    """Bytes of a value's local block."""
    return _block_bytes(*program.types[name])


@lru_cache(maxsize=4096)
def _block_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * itemsize(dtype)


def is_started(local: LocalOp) -> bool:
    """Whether an op starts communication that is waited for later."""
    declared = local.collective
    return local.mode in ("recv", "exchange") or (declared is not None and not declared.local)


def is_fused(local: LocalOp) -> bool:
    """Whether an op is a collective of several tensors."""
    return is_started(local) and len(local.op.results) > 1


def in_one_block(local: LocalOp) -> bool:
    """Whether an op is a collective of several tensors whose results have one block of memory."""
    declared = local.collective
    return is_fused(local) and declared is not None and declared.fusible == "block"
