"""The check before the update of a training step: are the loss and all gradients finite?

It happens on every rank after all tasks but the optimize tasks, so parameters and states are still those of
before the step. Each rank reads its blocks of the gradients once (their sum of squares is finite unless one
of them is not, or the sum overflows, which an exact look tells apart). Ranks then agree on one number, where
they do not hold the same gradients anyway.

Invariant: every rank of a program comes to the same verdict in the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distgraph.ir.dtypes import is_float
from distgraph.ir.graph import SOURCES
from distgraph.passes.partition import RankProgram
from distgraph.passes.split_tasks import Parts
from distgraph.runtime.program.codegen import Arena
from distgraph.runtime.program.memory_plan import Storage
from distgraph.runtime.schedule.task import UPDATES
from distgraph.runtime.transport.transport import Transport


@dataclass(frozen=True, slots=True)
class Guard:
    """What the check of one rank needs to know beyond its program.

    Attributes:
        values: value name -> what it is, such as "gradient of fc1.weight"; see `checked_values`.
        ranks: all ranks of the program.
        control: transport for host arrays over which the ranks agree; None where each of them comes to the
            same verdict by itself.
        blocks: whether the update is left out when the check fails.
    """

    values: Mapping[str, str]
    ranks: tuple[int, ...]
    control: Transport | None
    blocks: bool


def checked_values(parts: Parts) -> dict[str, str]:
    """Values that decide whether a step counts: the loss, and what optimize tasks read of other tasks.

    Returns:
        value name -> what it is, in program order.
    """
    graph = parts.graph
    update = {op.name for part in parts.tasks if part.kind == UPDATES for op in part.body}
    made = {value.name for op in graph.ops if op.name in update for value in op.results}
    read = {v.name for op in graph.ops if op.name in update for v in op.operands} - made
    read |= {value.name for label, value in graph.outputs if label == "loss"}
    sources = {op.name: str(op.attrs["name"]) for op in graph.sources("param")}
    for op in (op for part in parts.tasks if part.kind == UPDATES for op in part.body):
        from_others = parts.phase[op.results[0].name] == 2 and not made.issuperset(
            v.name for v in op.operands
        )
        assert op.kind != "comm.transfer" or not from_others, f"%{op.name} would be sent but not received"
    found = {}
    for op in graph.ops:
        for value in op.results if op.kind not in SOURCES else ():
            if value.name in read and is_float(value.dtype) and parts.phase[value.name] == 2:
                named = sources.get(op.link or "")
                found[value.name] = f"gradient of {named}" if named else f"%{value.name}"
    found.update(
        (value.name, "loss") for label, value in graph.outputs if value.name in found and label == "loss"
    )
    return found


def same_everywhere(parts: Parts, values: Mapping[str, str], ranks: Sequence[int]) -> bool:
    """Whether every rank holds all of every value, so that all of them see the same numbers."""
    everyone = frozenset(ranks)
    attrs = [parts.graph.attrs[name] for name in values]
    return all(
        attr.mesh.rank_set == everyone and not any(attr.spec.dims) and not attr.spec.partial for attr in attrs
    )


class FiniteCheck:
    """The check of one rank, bound to its memory.

    Args:
        guard: what is checked, and with whom.
        program, storage, arena: of the rank's worker.
        xp: array namespace, NumPy or CuPy.

    Attributes:
        passed: verdict of the last check, the same on every rank.
        found: what was not finite in this rank's blocks at the last check: name -> (values that are not
            finite, values in the block).
    """

    def __init__(self, guard: Guard, program: RankProgram, storage: Storage, arena: Arena, xp: Any) -> None:
        self.guard, self._xp = guard, xp
        self.passed = True
        self.found: dict[str, tuple[int, int]] = {}
        self._blocks: list[tuple[str, Any, Any]] = []  # what it is, its array, that to be squared and summed
        for name, label in guard.values.items():
            if name in program.types and name in storage.slots:
                root = storage.slots[name].root
                self._blocks.append((label, arena.fixed[root], _squarable(arena.fixed[root])))

    def look(self) -> Any:
        """Whether the local blocks of the step under way seem finite: a number of the device that is not
        waited for. Collectives that end in them have been waited for."""
        if self._xp is np:
            return all(_is_finite(np, block, flat) for _, block, flat in self._blocks)
        verdict = self._xp.ones((), bool)
        for _, block, flat in self._blocks:
            sound = (
                self._xp.isfinite(block).all()
                if flat is None
                else self._xp.isfinite(self._xp.dot(flat, flat))
            )
            verdict &= sound
        return verdict

    def conclude(self, finite: bool) -> bool:
        """Agree on the verdict, given what `look` returned; whether all is finite, on all ranks."""
        if not finite and self._xp is not np:  # a sum of squares may overflow
            finite = all(bool(self._xp.isfinite(block).all()) for _, block, _ in self._blocks)
        self.passed, self.found = self._agreed(finite), {}
        if not self.passed:
            for label, block, _ in self._blocks:
                count = int(self._xp.count_nonzero(~self._xp.isfinite(block)))
                if count:
                    self.found[label] = (count, int(block.size))
        return self.passed

    def _agreed(self, finite: bool) -> bool:
        control = self.guard.control
        if control is None:
            return finite
        verdict = np.array([0.0 if finite else 1.0], "f4")
        control.all_reduce(verdict, "max", self.guard.ranks).wait()
        return bool(verdict[0] == 0.0)


def all_finite(xp: Any, block: Any) -> bool:
    """Whether no element is nan or infinite. One pass over an f32 or f64 block that is finite.

    Example:
        >>> all_finite(np, np.array([1.0, -2.0])), all_finite(np, np.array([1.0, np.inf]))
        (True, False)
        >>> all_finite(np, np.full(4, 1e38, "f4"))  # the sum of squares overflows
        True
    """
    return _is_finite(xp, block, _squarable(block))


def _squarable(block: Any) -> Any:
    """The block as a vector whose sum of squares takes one pass; None where that overflows too easily."""
    fits = block.dtype.name in ("float32", "float64") and block.flags.c_contiguous and block.size
    return block.reshape(-1) if fits else None


def _is_finite(xp: Any, block: Any, flat: Any) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):  # that is what is looked for
        if flat is not None and math.isfinite(xp.dot(flat, flat)):
            return True
    return bool(xp.isfinite(block).all())
