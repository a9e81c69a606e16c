"""Liveness: how long every value of a folded train graph holds memory, as in the runtime's memory plan.

*In:* a `Fold`. *Out:* a `Lifetime` for every folded value. *Invariant:* memory behind views is counted once.

    fixed       the whole step: parameters, states, inputs, sums of gradients, values that are loaded once
    activation  the whole step, once for every micro-batch in flight: forward values that the backward part
                reads (the runtime gives them a ring of buffers, see `runtime.program.memory_plan`)
    temporary   from the op that produces the value to its last reader; times are positions in the graph
    none        no memory: views, results computed in place, scalars

The last of several equal layers represents all of them: when it runs, the activations of all are in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distgraph.ir.graph import Op
from distgraph.ir.op_registry import lookup
from distgraph.passes.search.layering.layer_folding import (
    BACKWARD,
    FORWARD,
    LOAD,
    STEP,
    Fold,
    FoldedValue,
    is_source,
)

Kind = Literal["fixed", "activation", "temporary", "none"]


@dataclass(frozen=True, slots=True)
class Lifetime:
    """When a value holds memory; a temporary value does at start <= time < stop."""

    kind: Kind
    start: int = 0
    stop: int = 0


NONE = Lifetime("none")


class Lifetimes:
    """Lifetimes of the values of one folded graph.

    Attributes:
        fold: the folded graph.
        micro: micro-batches in a step.
        roots: for every value the value whose memory it is stored in; itself unless it is a view.
        of: for every value its lifetime.
    """

    def __init__(self, fold: Fold) -> None:
        self.fold = fold
        self.micro = fold.graph.micro_batches
        self.roots: list[int] = list(range(len(fold.values)))
        self._contiguous: dict[int, bool] = {}
        for number in range(len(fold.values)):
            self.roots[number] = self._root(number, set())
        self.of: list[Lifetime] = [NONE] * len(fold.values)
        self._classify()

    def is_view(self, number: int) -> bool:
        """Whether a value is a view of its op's operand, provided that both have the same layout."""
        value = self.fold.values[number]
        producer = self.fold.ops[value.producer]
        if not lookup(producer.op.kind).view or value.leaves or is_source(producer.op):
            return False
        if producer.op.kind == "accumulate" and self.micro > 1:
            return False
        return lookup(producer.op.kind).view != "contiguous" or self._is_contiguous(producer.operands[0])

    def adds(self, number: int) -> bool:
        """Whether the op of a value adds its result directly to the sum over micro-batches."""
        value = self.fold.values[number]
        producer = self.fold.ops[value.producer]
        readers = [self.fold.ops[reader].op.kind for reader in value.readers]
        declared = lookup(producer.op.kind)
        return (
            self.micro > 1
            and readers == ["accumulate"]
            and declared.adds is not None
            and len(producer.results) == 1
        )

    def _root(self, number: int, seen: set[int]) -> int:
        if number in seen or not self.is_view(number):
            return number
        return self._root(self.fold.ops[self.fold.values[number].producer].operands[0], seen | {number})

    def _is_contiguous(self, number: int) -> bool:
        if number not in self._contiguous:
            self._contiguous[number] = True  # the answer for a cycle of updates
            producer = self.fold.ops[self.fold.values[number].producer]
            view = lookup(producer.op.kind).view
            if view and not is_source(producer.op):
                self._contiguous[number] = view == "contiguous" or (
                    view == "same" and self._is_contiguous(producer.operands[0])
                )
        return self._contiguous[number]

    def _classify(self) -> None:
        counted: set[int] = set()  # roots whose memory has been counted
        for number, value in enumerate(self.fold.values):
            if self._outlives_task(value) and self.roots[number] not in counted:
                home = number
                root = self.fold.values[self.roots[number]]
                if root.value.nbytes < value.value.nbytes:
                    home = self.roots[number]  # a broadcast view
                counted.add(self.roots[number])
                if self.fold.values[home].value.shape:
                    kind: Kind = "activation" if self._is_activation(value) else "fixed"
                    self.of[home] = Lifetime(kind)
        for number, value in enumerate(self.fold.values):
            if self.roots[number] == number and number not in counted and value.value.shape:
                self.of[number] = self._temporary(number)

    def _is_activation(self, value: FoldedValue) -> bool:
        """Whether the forward part computes a value that the backward part reads."""
        producer = self.fold.ops[value.producer]
        if producer.part != FORWARD or not value.per_micro or is_source(producer.op):
            return False
        return any(self.fold.ops[reader].part == BACKWARD for reader in value.readers)

    def _outlives_task(self, value: FoldedValue) -> bool:
        """Whether a value keeps its memory after the part of the step that computes it."""
        producer = self.fold.ops[value.producer]
        if is_source(producer.op) or producer.op.kind == "accumulate":
            return True
        if value.leaves or self._is_activation(value):
            return True
        return producer.part == LOAD and any(self.fold.ops[reader].part != LOAD for reader in value.readers)

    def _temporary(self, number: int) -> Lifetime:
        value = self.fold.values[number]
        producer = self.fold.ops[value.producer]
        if value.replaces >= 0 or self.adds(number):
            return NONE
        stop, last = self._last_use(value.value.name, producer.part)
        start = producer.time
        if last is None:
            return Lifetime("temporary", start, start + 1)
        inherits = any(
            position < len(last.operands) and last.operands[position].name == value.value.name
            for position in lookup(last.kind).inplace
        )
        same = last.results[0].shape == value.value.shape and last.results[0].dtype == value.value.dtype
        return Lifetime("temporary", start, max(start + 1, stop if inherits and same else stop + 1))

    def _last_use(self, name: str, part: int) -> tuple[int, Op | None]:
        """Position of the last op of a part that reads a value or a view of it, and the op."""
        graph, times = self.fold.graph, self.fold.times
        best: tuple[int, Op | None] = (-1, None)
        waiting = [name]
        while waiting:
            for user in graph.users[waiting.pop()]:
                if self.fold.parts[user.name] != part and part != STEP:
                    continue
                if times[user.name] > best[0]:
                    best = times[user.name], user
                if user.kind != "accumulate" and self.is_view(self.fold.place[user.name]):
                    waiting.append(user.name)
        return best
