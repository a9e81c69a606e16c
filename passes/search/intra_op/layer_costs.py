"""What a choice costs by layer: seconds of every part of a step, bytes held and scratch memory.

*In:* a formulation's parts and an option for each node. *Out:* `Profile`. *Invariant:* layouts that several
ops read are made once, as `reshard` does; the sums over layers are the objective of the problem, or less
where ops share a copy that has no node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import SOURCES
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.redistribution.planner import block_volume
from distgraph.passes.search.intra_op.chosen_layouts import Profile
from distgraph.passes.search.intra_op.cost_model import Prices
from distgraph.passes.search.intra_op.cost_terms import seconds_of
from distgraph.passes.search.intra_op.decision_nodes import Nodes, OpNode
from distgraph.passes.search.intra_op.decode import Reading
from distgraph.passes.search.layering.layer_folding import (
    BACKWARD,
    FORWARD,
    Fold,
    FoldedOp,
    FoldedValue,
    Ints,
    Pattern,
)
from distgraph.passes.search.layering.liveness import Lifetimes

Floats = NDArray[np.float64]


@dataclass(slots=True)
class _Tally:
    """Arrays by layer; the last entry is that of no layer."""

    forward: Floats
    backward: Floats
    step: Floats
    border: Floats
    fixed: Floats
    activations: Floats
    temporary: Floats

    @staticmethod
    def of(layers: int) -> _Tally:
        return _Tally(*(np.zeros(layers + 1) for _ in range(7)))


class Account:
    """Adds up one choice."""

    def __init__(
        self,
        fold: Fold,
        nodes: Nodes,
        lifetimes: Lifetimes,
        mesh: ProcessMesh,
        prices: Prices,
        choice: Sequence[int],
    ) -> None:
        self.fold, self.nodes, self.lifetimes, self.mesh, self.prices = fold, nodes, lifetimes, mesh, prices
        self.choice = choice
        self.reading = Reading(fold, nodes, choice)
        self.tally = _Tally.of(fold.layers)
        self.scratch = np.zeros(len(fold.graph.ops) + 2)  # changes over time

    def profile(self) -> Profile:
        """All of it."""
        for number, op in enumerate(self.fold.ops):
            node = self.nodes.of_op.get(number)
            if node is not None:
                found = self.nodes.all[node]
                assert isinstance(found, OpNode)
                one = seconds_of(self.lifetimes, self.prices, op, found.strategies, self.mesh)
                self._add(self._part(op), op.layers, one[self.choice[node]])
        for number, value in enumerate(self.fold.values):
            self._move(number, value)
            self._hold(number, value)
        used = np.cumsum(self.scratch)
        for op in self.fold.ops:
            np.maximum.at(self.tally.temporary, op.layers, used[op.time])
        t = self.tally
        return Profile(t.forward, t.backward, t.step, t.border, t.fixed, t.activations, t.temporary)

    def _part(self, op: FoldedOp) -> Floats:
        if op.part == FORWARD:
            return self.tally.forward
        return self.tally.backward if op.part == BACKWARD else self.tally.step

    @staticmethod
    def _add(where: Floats, layers: Ints, amount: float) -> None:
        if amount:
            np.add.at(where, layers, amount)

    # seconds

    def _seconds(self, value: FoldedValue, source: ShardSpec, target: ShardSpec) -> float:
        if source == target:
            return 0.0
        return self.prices.move_seconds(value.value.shape, value.value.dtype, self.mesh, source, target)

    def _move(self, number: int, value: FoldedValue) -> None:
        made, stored = self.reading.made(value), self.reading.stored(number)
        alone = number not in self.nodes.of_value and value.replaces < 0
        for pattern in value.patterns:
            if made is not None and value.replaces < 0:
                self._make(value, pattern, self._seconds(value, made, stored), alone)
            done = {stored}
            for place, (reader, positions) in enumerate(pattern.readers):
                for needed in [self.reading.needed(reader, position) for position in positions]:
                    if needed not in done:
                        done.add(needed)
                        seconds = self._seconds(value, stored, needed)
                        self._cross(value, pattern.made, pattern.read[place], self.fold.ops[reader], seconds)
        if value.replaces >= 0:
            self._replace(number, value, made, stored)

    def _make(self, value: FoldedValue, pattern: Pattern, seconds: float, alone: bool) -> None:
        producer = self.fold.ops[value.producer]
        if alone and len(pattern.readers) == 1:
            reader = self.fold.ops[pattern.readers[0][0]]
            self._cross(value, pattern.made, pattern.read[0], reader, seconds)
            return
        part = self._part(producer) if value.per_micro else self.tally.step
        self._add(part, pattern.made, seconds)

    def _cross(self, value: FoldedValue, made: Ints, read: Ints, reader: FoldedOp, seconds: float) -> None:
        """A move on the way to a reader: at the border where that is in another layer."""
        if not value.per_micro:
            self._add(self.tally.step, read, seconds)
            return
        apart = (made != read) & (made >= 0) & (read >= 0)
        self._add(self.tally.border, np.minimum(made, read)[apart], seconds)
        self._add(self._part(reader), read[~apart], seconds)

    def _replace(self, number: int, value: FoldedValue, made: ShardSpec | None, stored: ShardSpec) -> None:
        """The new value of a parameter, to where the old one lies."""
        source = stored if number in self.nodes.of_value else made
        if source is None:
            return
        layers = self.fold.ops[value.producer].layers
        self._add(self.tally.step, layers, self._seconds(value, source, self.reading.stored(value.replaces)))
        if number in self.nodes.of_value and made is not None:
            self._add(self.tally.step, layers, self._seconds(value, made, stored))

    # bytes

    def _bytes(self, value: FoldedValue, spec: ShardSpec) -> float:
        if self.mesh.weights:
            return float(self.prices.nbytes(value.value, (spec,), self.mesh)[0])
        return float(itemsize(value.value.dtype) * block_volume(value.value.shape, self.mesh, spec))

    def _hold(self, number: int, value: FoldedValue) -> None:
        lifetime, producer = self.lifetimes.of[number], self.fold.ops[value.producer]
        if lifetime.kind == "none":
            return
        made = self.reading.made(value)
        summed = producer.op.kind == "accumulate"
        home = made if summed and made is not None else self.reading.stored(number)
        nbytes = self._bytes(value, home)
        if lifetime.kind == "temporary":
            self._scratch(lifetime.start, lifetime.stop, nbytes)
        else:
            where = self.tally.fixed if lifetime.kind == "fixed" else self.tally.activations
            times = self.fold.graph.micro_batches if producer.op.kind == "input" else 1
            self._add(where, producer.layers, times * nbytes)
        self._hold_copies(number, value, home)

    def _hold_copies(self, number: int, value: FoldedValue, home: ShardSpec) -> None:
        """Other layouts in which a value is read: kept where both parts of the step need them."""
        readers: dict[ShardSpec, list[FoldedOp]] = {}
        for reader, positions in value.counts:
            for position in positions:
                readers.setdefault(self.reading.needed(reader, position), []).append(self.fold.ops[reader])
        producer = self.fold.ops[value.producer]
        for spec, ops in readers.items():
            if spec == home:
                continue
            nbytes = self._bytes(value, spec)
            if nbytes == self._bytes(value, home) and home.partial:
                continue  # a sum is taken in place
            if not self._seconds(value, home, spec):
                continue  # a part of what is there is a view of it
            parts = {op.part for op in ops}
            summed = producer.op.kind == "accumulate"  # its copy is made behind the last sum, for the update
            if summed or (not value.per_micro and parts & {FORWARD, BACKWARD}):
                self._add(self.tally.fixed, producer.layers, nbytes)
            elif value.per_micro and producer.part == FORWARD and BACKWARD in parts and FORWARD in parts:
                self._add(self.tally.activations, producer.layers, nbytes)
            elif producer.op.kind not in SOURCES:
                times = [op.time for op in ops]
                self._scratch(min(times), max(times) + 1, nbytes)

    def _scratch(self, start: int, stop: int, nbytes: float) -> None:
        self.scratch[start] += nbytes
        self.scratch[stop] -= nbytes
