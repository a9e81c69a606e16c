"""The finite check: whether the loss and all gradients of a training step are finite, before its update.

It runs on every rank after all tasks but the optimize tasks, so parameters and states are not yet changed.
Each rank reads its blocks of the gradients once: the sum of squares is finite if all elements are, unless it
overflows, in which case every element is tested. Then the ranks agree on one verdict, unless all of them hold
the same gradients anyway.

Invariant: every rank of a program has the same verdict in the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distgraph.ir.collective_registry import is_collective
from distgraph.ir.dtypes import is_float
from distgraph.ir.graph import SOURCES
from distgraph.passes.partition import RankProgram
from distgraph.passes.split_tasks import Parts
from distgraph.runtime.program.compiled_task import Arena
from distgraph.runtime.program.storage import Storage
from distgraph.runtime.schedule.task import UPDATES
from distgraph.runtime.transport.transport import Transport


@dataclass(frozen=True, slots=True)
class Guard:
    """The settings of the check on one rank.

    Attributes:
        values: value name -> its description, such as "gradient of fc1.weight"; see `checked_values`.
        ranks: all ranks of the program.
        control: transport for host arrays over which the ranks agree; None where each of them has the same
            verdict by itself.
        blocks: whether the update is omitted when the check fails.
    """

    values: Mapping[str, str]
    ranks: tuple[int, ...]
    control: Transport | None
    blocks: bool


def checked_values(parts: Parts) -> dict[str, str]:
    """The values to check: the loss, and the values of other tasks that optimize tasks read.

    Returns:
        value name -> its description, in program order.
    """
    graph = parts.graph
    update = {op.name for part in parts.tasks if part.kind == UPDATES for op in part.body}
    updated = {value.name for op in graph.ops if op.name in update for value in op.results}
    read = {v.name for op in graph.ops if op.name in update for v in op.operands} - updated
    read |= {value.name for label, value in graph.outputs if label == "loss"}
    sources = {op.name: str(op.attrs["name"]) for op in graph.sources("param")}
    for op in (op for part in parts.tasks if part.kind == UPDATES for op in part.body):
        from_others = parts.phase[op.results[0].name] == 2 and not updated.issuperset(
            v.name for v in op.operands
        )
        assert op.kind != "comm.transfer" or not from_others, f"%{op.name} would be sent but not received"
    labels: dict[str, str] = {}
    places: dict[str, int] = {}  # that of its op; of a fused reduction, of what is reduced
    number = {op.name: position for position, op in enumerate(graph.ops)}
    for op in (op for op in graph.ops if op.kind not in SOURCES):
        fused = is_collective(op) and len(op.results) > 1
        makers = [graph.producers[v.name] for v in op.operands] if fused else [op] * len(op.results)
        for value, maker in zip(op.results, makers, strict=True):
            if value.name in read and is_float(value.dtype) and parts.phase[value.name] == 2:
                parameter = sources.get(maker.link or "")
                labels[value.name] = f"gradient of {parameter}" if parameter else f"%{value.name}"
                places[value.name] = number[maker.name]
    labels = {name: labels[name] for name in sorted(labels, key=places.__getitem__)}
    labels.update(
        (value.name, "loss") for label, value in graph.outputs if value.name in labels and label == "loss"
    )
    return labels


def same_everywhere(parts: Parts, values: Mapping[str, str], ranks: Sequence[int]) -> bool:
    """Whether every rank holds a full copy of every value, so that all ranks have the same numbers."""
    everyone = frozenset(ranks)
    attrs = [parts.graph.attrs[name] for name in values]
    return all(
        attr.mesh.rank_set == everyone and not any(attr.spec.dims) and not attr.spec.partial for attr in attrs
    )


class FiniteCheck:
    """The finite check of one rank, bound to its memory.

    Args:
        guard: its settings.
        program, storage, arena: those of the rank's worker.
        xp: array namespace, NumPy or CuPy.

    Attributes:
        passed: verdict of the last check, the same on every rank.
        nonfinite: description of each value that was not finite at the last check -> (number of elements of
            this rank's block that are not finite, number of its elements).
    """

    def __init__(self, guard: Guard, program: RankProgram, storage: Storage, arena: Arena, xp: Any) -> None:
        self.guard, self._xp = guard, xp
        self.passed = True
        self.nonfinite: dict[str, tuple[int, int]] = {}
        self._blocks: list[tuple[str, Any, Any]] = []  # description, array, vector for the sum of squares
        for name, label in guard.values.items():
            if name in program.types and name in storage.slots:
                root = storage.slots[name].root
                self._blocks.append((label, arena.fixed[root], _squarable(arena.fixed[root])))

    def local_verdict(self) -> Any:
        """Whether the local blocks seem finite, as a number on the device that the host does not wait for.

        Collectives that write these blocks must have been waited for.
        """
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

    def agree(self, finite: bool) -> bool:
        """Agree with the other ranks. Returns whether all values are finite on all ranks.

        Args:
            finite: the result of `local_verdict`.
        """
        if not finite and self._xp is not np:  # a sum of squares may overflow
            finite = all(bool(self._xp.isfinite(block).all()) for _, block, _ in self._blocks)
        self.passed, self.nonfinite = self._verdict_of_all(finite), {}
        if not self.passed:
            for label, block, _ in self._blocks:
                count = int(self._xp.count_nonzero(~self._xp.isfinite(block)))
                if count:
                    self.nonfinite[label] = (count, int(block.size))
        return self.passed

    def _verdict_of_all(self, finite: bool) -> bool:
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
    """The block as a vector whose sum of squares is computed in one pass; None where it may overflow."""
    fits = block.dtype.name in ("float32", "float64") and block.flags.c_contiguous and block.size
    return block.reshape(-1) if fits else None


def _is_finite(xp: Any, block: Any, flat: Any) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):  # overflow is expected and handled
        if flat is not None and math.isfinite(xp.dot(flat, flat)):
            return True
    return bool(xp.isfinite(block).all())
