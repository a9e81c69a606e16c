"""Costs of a choice by layer: seconds of every part of a step, bytes of persistent and scratch memory.

*In:* a folded graph, its nodes, an option for each node. *Out:* `Profile`. *Invariant:* a layout that several
ops read is made once, as `reshard` does. The sum over layers is the objective of the problem, or less where
ops share a copy that has no node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from distgraph.ir.dtypes import itemsize
from distgraph.ir.float_arrays import Floats
from distgraph.ir.graph import SOURCES
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.redistribution.planner import block_volume
from distgraph.passes.search.intra_op.chosen_layouts import Profile
from distgraph.passes.search.intra_op.cost_model import CostModel
from distgraph.passes.search.intra_op.cost_terms import seconds_of
from distgraph.passes.search.intra_op.decision_nodes import Nodes
from distgraph.passes.search.intra_op.decode import ValueSpecs
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


class LayerCosts:
    """Adds up the costs of one choice by layer."""

    def __init__(
        self,
        fold: Fold,
        nodes: Nodes,
        lifetimes: Lifetimes,
        mesh: ProcessMesh,
        cost_model: CostModel,
        choice: Sequence[int],
    ) -> None:
        self.fold, self.nodes, self.lifetimes = fold, nodes, lifetimes
        self.mesh, self.cost_model = mesh, cost_model
        self.choice = choice
        self.specs = ValueSpecs(fold, nodes, choice)
        self.totals = Profile(*(np.zeros(fold.layers + 1) for _ in fields(Profile)))
        self.scratch = np.zeros(len(fold.graph.ops) + 2)  # changes of the bytes in use, by time

    def profile(self) -> Profile:
        """The costs of all ops, values and changes of layout."""
        for number, op in enumerate(self.fold.ops):
            if number in self.nodes.of_op:
                strategies, option = self.nodes.strategies(number), self.choice[self.nodes.of_op[number]]
                seconds = seconds_of(self.lifetimes, self.cost_model, op, strategies, self.mesh)
                self._add(self._part(op), op.layers, seconds[option])
        for number, value in enumerate(self.fold.values):
            self._add_changes(number, value)
            self._add_bytes(number, value)
        used = np.cumsum(self.scratch)
        for op in self.fold.ops:
            np.maximum.at(self.totals.temporary, op.layers, used[op.time])
        return self.totals

    def _part(self, op: FoldedOp) -> Floats:
        """The seconds by layer of the part of the step that an op runs in."""
        if op.part == FORWARD:
            return self.totals.forward
        return self.totals.backward if op.part == BACKWARD else self.totals.step

    @staticmethod
    def _add(totals: Floats, layers: Ints, amount: float) -> None:
        if amount:
            np.add.at(totals, layers, amount)

    # seconds

    def _seconds(self, value: FoldedValue, source: ShardSpec, target: ShardSpec) -> float:
        if source == target:
            return 0.0
        return self.cost_model.change_seconds_of(
            value.value.shape, value.value.dtype, self.mesh, source, target
        )

    def _add_changes(self, number: int, value: FoldedValue) -> None:
        """Seconds of the changes of layout from the producer to storage, and from storage to the readers."""
        produced, stored = self.specs.produced(value), self.specs.stored(number)
        no_node = number not in self.nodes.of_value and value.replaces < 0
        for pattern in value.patterns:
            if produced is not None and value.replaces < 0:
                self._add_change_to_storage(value, pattern, self._seconds(value, produced, stored), no_node)
            available = {stored}
            for place, (reader, positions) in enumerate(pattern.readers):
                for spec in [self.specs.read(reader, position) for position in positions]:
                    if spec not in available:
                        available.add(spec)
                        layers = pattern.producer_layers, pattern.reader_layers[place]
                        seconds = self._seconds(value, stored, spec)
                        self._add_change_to_reader(value, *layers, self.fold.ops[reader], seconds)
        if value.replaces >= 0:
            self._add_update(number, value, produced, stored)

    def _add_change_to_storage(
        self, value: FoldedValue, pattern: Pattern, seconds: float, no_node: bool
    ) -> None:
        """The change from the produced layout; without a storage node it happens on the way to the reader."""
        producer = self.fold.ops[value.producer]
        if no_node and len(pattern.readers) == 1:
            reader = self.fold.ops[pattern.readers[0][0]]
            layers = pattern.producer_layers, pattern.reader_layers[0]
            self._add_change_to_reader(value, *layers, reader, seconds)
            return
        gradient = self.fold.is_gradient(value)
        part = self._part(producer) if value.per_micro and not gradient else self.totals.step
        self._add(part, pattern.producer_layers, seconds)
        if gradient:
            self._add(self.totals.gradients, pattern.producer_layers, seconds)

    def _add_change_to_reader(
        self, value: FoldedValue, producers: Ints, readers: Ints, reader: FoldedOp, seconds: float
    ) -> None:
        """A change of layout before a read; it counts at the border where the reader is in another layer.

        `producers` and `readers` are their layers, for every member; `seconds` are those of one member.
        """
        gradient = self.fold.is_gradient(value)
        if gradient or not value.per_micro:
            self._add(self.totals.step, readers, seconds)
            if gradient:
                self._add(self.totals.gradients, readers, seconds)
            return
        crosses = (producers != readers) & (producers >= 0) & (readers >= 0)
        self._add(self.totals.border, np.minimum(producers, readers)[crosses], seconds)
        self._add(self._part(reader), readers[~crosses], seconds)

    def _add_update(
        self, number: int, value: FoldedValue, produced: ShardSpec | None, stored: ShardSpec
    ) -> None:
        """The changes that bring the new value of a parameter to the layout of the parameter."""
        source = stored if number in self.nodes.of_value else produced
        if source is None:
            return
        layers = self.fold.ops[value.producer].layers
        self._add(self.totals.step, layers, self._seconds(value, source, self.specs.stored(value.replaces)))
        if number in self.nodes.of_value and produced is not None:
            self._add(self.totals.step, layers, self._seconds(value, produced, stored))

    # bytes

    def _bytes(self, value: FoldedValue, spec: ShardSpec) -> float:
        if self.mesh.weights:
            return float(self.cost_model.nbytes(value.value, (spec,), self.mesh)[0])
        return float(itemsize(value.value.dtype) * block_volume(value.value.shape, self.mesh, spec))

    def _add_bytes(self, number: int, value: FoldedValue) -> None:
        """Bytes of a value in its storage layout, and of its copies."""
        lifetime, producer = self.lifetimes.of[number], self.fold.ops[value.producer]
        if lifetime.kind == "none":
            return
        produced = self.specs.produced(value)
        summed = producer.op.kind == "accumulate"
        storage = produced if summed and produced is not None else self.specs.stored(number)
        nbytes = self._bytes(value, storage)
        if lifetime.kind == "temporary":
            self._add_scratch(lifetime.start, lifetime.stop, nbytes)
        else:
            totals = self.totals.fixed if lifetime.kind == "fixed" else self.totals.activations
            copies = self.fold.graph.micro_batches if producer.op.kind == "input" else 1
            self._add(totals, producer.layers, copies * nbytes)
        self._add_copy_bytes(value, storage)

    def _add_copy_bytes(self, value: FoldedValue, storage: ShardSpec) -> None:
        """Bytes of the other layouts in which a value is read.

        A copy that the forward and the backward part read lasts from one to the other. What depends on no
        micro-batch, such as a parameter in the layout of its update, is copied when a step begins, and stays.
        Any other copy is scratch memory.
        """
        readers: dict[ShardSpec, list[FoldedOp]] = {}
        for reader, positions in value.counts:
            for position in positions:
                readers.setdefault(self.specs.read(reader, position), []).append(self.fold.ops[reader])
        producer = self.fold.ops[value.producer]
        for spec, ops in readers.items():
            if spec == storage:
                continue
            nbytes = self._bytes(value, spec)
            if nbytes == self._bytes(value, storage) and storage.partial:
                continue  # the reduction is computed in place
            if not self._seconds(value, storage, spec):
                continue  # a slice is a view
            parts = {op.part for op in ops}
            summed = producer.op.kind == "accumulate"  # the final sum is copied once, for the update
            loaded = not value.per_micro and (parts & {FORWARD, BACKWARD} or producer.op.kind in SOURCES)
            if summed or loaded:
                self._add(self.totals.fixed, producer.layers, nbytes)
            elif value.per_micro and producer.part == FORWARD and BACKWARD in parts and FORWARD in parts:
                self._add(self.totals.activations, producer.layers, nbytes)
            elif producer.op.kind not in SOURCES:
                times = [op.time for op in ops]
                self._add_scratch(min(times), max(times) + 1, nbytes)

    def _add_scratch(self, start: int, stop: int, nbytes: float) -> None:
        self.scratch[start] += nbytes
        self.scratch[stop] -= nbytes
