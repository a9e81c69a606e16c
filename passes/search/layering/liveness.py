"""How long every value of a folded train graph holds memory, as the runtime's storage plan would have it.

*In:* a `Fold`. *Out:* a `Lifetime` for every folded value. *Invariant:* memory behind views is counted once.

    fixed      the whole step: parameters, states, inputs, sums of gradients, what is loaded once
    held       the whole step too, once for every micro-batch in flight: what the backward part reads of the
               forward part (the runtime gives it buffers of its own, see `runtime.memory`)
    temporary  from where it is made until it is read last; positions in the graph
    none       views, results computed in place, scalars

Of equal layers the last stands for all: when it runs, what all of them hold is there.
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

Kind = Literal["fixed", "held", "temporary", "none"]
_KEEPS_ORDER = ("identity", "stop_gradient", "accumulate", "reshard", "reshape")


@dataclass(frozen=True, slots=True)
class Lifetime:
    """When a value holds memory: start <= time < stop where it is temporary."""

    kind: Kind
    start: int = 0
    stop: int = 0


NONE = Lifetime("none")


class Lifetimes:
    """Lifetimes of the values of one folded graph; `roots` are the values whose memory others are seen in."""

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
        """Whether a value is the memory of its op's operand (as long as its layout is that one's)."""
        value = self.fold.values[number]
        made = self.fold.ops[value.producer]
        if not lookup(made.op.kind).view or value.leaves or is_source(made.op):
            return False
        if made.op.kind == "accumulate" and self.micro > 1:
            return False
        return made.op.kind != "reshape" or self._is_contiguous(made.operands[0])

    def adds(self, number: int) -> bool:
        """Whether a value is computed right into the sum over micro-batches."""
        value = self.fold.values[number]
        made = self.fold.ops[value.producer]
        readers = [self.fold.ops[reader].op.kind for reader in value.readers]
        declared = lookup(made.op.kind)
        return (
            self.micro > 1
            and readers == ["accumulate"]
            and declared.adds is not None
            and len(made.results) == 1
        )

    def _root(self, number: int, seen: set[int]) -> int:
        if number in seen or not self.is_view(number):
            return number
        return self._root(self.fold.ops[self.fold.values[number].producer].operands[0], seen | {number})

    def _is_contiguous(self, number: int) -> bool:
        if number not in self._contiguous:
            self._contiguous[number] = True  # also where the search comes back to it
            made = self.fold.ops[self.fold.values[number].producer]
            if lookup(made.op.kind).view and not is_source(made.op):
                keeps = made.op.kind in _KEEPS_ORDER
                self._contiguous[number] = made.op.kind == "reshape" or (
                    keeps and self._is_contiguous(made.operands[0])
                )
        return self._contiguous[number]

    def _classify(self) -> None:
        taken: set[int] = set()  # roots whose memory is counted already
        for number, value in enumerate(self.fold.values):
            if self._is_kept(value) and self.roots[number] not in taken:
                home = number
                root = self.fold.values[self.roots[number]]
                if root.value.nbytes < value.value.nbytes:
                    home = self.roots[number]  # a broadcast view
                taken.add(self.roots[number])
                if self.fold.values[home].value.shape:
                    kind: Kind = "held" if self._is_held(value) else "fixed"
                    self.of[home] = Lifetime(kind)
        for number, value in enumerate(self.fold.values):
            if self.roots[number] == number and number not in taken and value.value.shape:
                self.of[number] = self._temporary(number)

    def _is_held(self, value: FoldedValue) -> bool:
        made = self.fold.ops[value.producer]
        if made.part != FORWARD or not value.per_micro or is_source(made.op):
            return False
        return any(self.fold.ops[reader].part == BACKWARD for reader in value.readers)

    def _is_kept(self, value: FoldedValue) -> bool:
        made = self.fold.ops[value.producer]
        if is_source(made.op) or made.op.kind == "accumulate" or value.leaves or self._is_held(value):
            return True
        return made.part == LOAD and any(self.fold.ops[reader].part != LOAD for reader in value.readers)

    def _temporary(self, number: int) -> Lifetime:
        value = self.fold.values[number]
        made = self.fold.ops[value.producer]
        if value.replaces >= 0 or self.adds(number):
            return NONE
        stop, last = self._last_use(value.value.name, made.part)
        start = made.time
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
