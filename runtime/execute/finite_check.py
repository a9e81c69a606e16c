"""The finite check: whether the loss and all gradients of a training step are finite, before its update.

It runs on every rank after all tasks but the optimize tasks, so parameters and states are not yet changed.
Of a block that several ranks hold, each of them reads an equal part, so that data parallel training reads a
gradient once and not once a rank. The sum of squares is finite if all elements are, unless it overflows, in
which case every element is tested. Then the ranks agree on one verdict, unless all of them hold the same
gradients and these are so small that a message takes longer than reading them.

Invariant: every rank of a program has the same verdict in the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distgraph.ir.collective_registry import is_collective
from distgraph.ir.dtypes import is_float
from distgraph.ir.graph import SOURCES
from distgraph.ir.sharding_spec import DistAttr
from distgraph.passes.partition import RankProgram
from distgraph.passes.split_tasks import Parts
from distgraph.runtime.program.compiled_task import Arena
from distgraph.runtime.program.storage import Storage
from distgraph.runtime.schedule.task import UPDATES
from distgraph.runtime.transport.transport import Transport

_READ_ALONE = 1 << 20
"""Bytes that a rank reads sooner than a message of a few bytes arrives from another machine (some 50 us)."""


@dataclass(frozen=True, slots=True)
class Guard:
    """The settings of the check on one rank.

    Attributes:
        values: value name -> its description, such as "gradient of fc1.weight"; see `checked_values`.
        ranks: all ranks of the program.
        control: transport for host arrays over which the ranks agree; None where each of them reads all of
            the same values, and so has the same verdict by itself.
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


def needs_no_message(parts: Parts, values: Mapping[str, str], ranks: Sequence[int]) -> bool:
    """Whether every rank holds a full copy of every value, and reads all sooner than a message arrives."""
    everyone = frozenset(ranks)
    attrs = [parts.graph.attrs[name] for name in values]
    same = all(
        attr.mesh.rank_set == everyone and not any(attr.spec.dims) and not attr.spec.partial for attr in attrs
    )
    size = sum(parts.graph.values[name].nbytes for name in values)
    return same and (len(everyone) == 1 or size <= _READ_ALONE)


class FiniteCheck:
    """The finite check of one rank, bound to its memory.

    Attributes:
        passed: verdict of the last check, the same on every rank.
        nonfinite: description of each value that was not finite at the last check -> (number of elements of
            this rank's block that are not finite, number of its elements).
    """

    def __init__(self, guard: Guard, program: RankProgram, storage: Storage, arena: Arena, xp: Any) -> None:
        self.guard, self._xp = guard, xp
        self.passed = True
        self.nonfinite: dict[str, tuple[int, int]] = {}
        self._blocks: list[tuple[str, Any]] = []  # description, block of this rank
        # block, what this rank reads of it, whether as a sum of squares
        self._parts: list[tuple[str, Any, bool]] = []
        for name, label in guard.values.items():
            if name in program.types and name in storage.slots:
                root, block = storage.slots[name].root, _block(name, program, storage, arena)
                self._blocks.append((label, block))
                flat = _squarable(block)
                whole = block.size == math.prod(program.types[name][0])  # the block has no other values
                if flat is not None and whole and guard.control is not None:
                    number, copies = _share(program.graph.attrs[name], program.rank)
                    flat = flat[flat.size * number // copies : flat.size * (number + 1) // copies]
                self._parts.append((root, block, False) if flat is None else (root, flat, True))

    def local_verdict(self, wait_for: Callable[[str], None]) -> Any:
        """Whether what this rank reads seems finite, as a number on the device; no host waits for it.

        Args:
            wait_for: waits for the collectives that write a block, given its name.
        """
        verdict: Any = True if self._xp is np else self._xp.ones((), bool)
        if self._xp is np:
            with np.errstate(over="ignore", invalid="ignore"):  # overflow is expected and handled
                for root, part, squarable in self._parts:
                    wait_for(root)
                    verdict = verdict and _is_finite(np, part, squarable)
            return verdict
        for root, part, squarable in self._parts:
            wait_for(root)
            if squarable:
                verdict = self._xp.isfinite(self._xp.dot(part, part)) & verdict
            else:
                verdict = self._xp.isfinite(part).all() & verdict
        return verdict

    def agree(self, finite: bool) -> bool:
        """Agree with the other ranks. Returns whether all values are finite on all ranks."""
        if not finite and self._xp is not np:  # a sum of squares may overflow
            finite = all(bool(self._xp.isfinite(part).all()) for _, part, _ in self._parts)
        self.passed, self.nonfinite = self._verdict_of_all(finite), {}
        if not self.passed:
            for label, block in self._blocks:
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
    flat = _squarable(block)
    with np.errstate(over="ignore", invalid="ignore"):
        return _is_finite(xp, block, False) if flat is None else _is_finite(xp, flat, True)


def _block(name: str, program: RankProgram, storage: Storage, arena: Arena) -> Any:
    """The memory of a value, or of the value that it is a view of; a part may be cut from another part."""
    part = storage.parts.get(name)
    if part is None:
        return arena.fixed[storage.slots[name].root]
    return _block(part.whole, program, storage, arena).reshape(program.types[part.whole][0])[part.where]


def _squarable(block: Any) -> Any:
    """The block as a vector whose sum of squares is computed in one pass; None where it may overflow."""
    fits = block.dtype.name in ("float32", "float64") and block.flags.c_contiguous and block.size
    return block.reshape(-1) if fits else None


def _share(attr: DistAttr, rank: int) -> tuple[int, int]:
    """Number of this rank among those that hold the same block of a value, and how many these are."""
    copied = [axis for axis in attr.mesh.axes if axis not in attr.spec.axes]
    return attr.mesh.index(rank, copied), attr.mesh.count(copied)


def _is_finite(xp: Any, part: Any, squarable: bool) -> bool:
    if squarable and math.isfinite(xp.dot(part, part)):
        return True
    return bool(xp.isfinite(part).all())
