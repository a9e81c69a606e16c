"""Bytes of a rank under an allocator that frees a value after its last reader (`Memory.planner: liveness`).

*In:* a rank program, its storage (which value is the memory of which), its order of tasks, the rules of the
runtime.
*Out:* `RankMemory` at the peak.
*Invariant:* a value counts from the op that computes it to the op that reads it last, and nothing is lost
between values. The runtime of distgraph needs more (`memory_forecast`): it shares scratch blocks of similar
size only, keeps what a collective reads until the collective is awaited, and has room for messages under
way.

New parameters and states are written over the old ones. Gradients that are reduced for the update are whole
until the backward part ends. Whole parameters that are gathered for a step are in memory while they are read.
With `Memory.fused`, values that elementwise ops pass on to each other inside a task are never in memory. With
`Memory.recomputed`, results of some ops on inputs are recomputed in the backward part.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import fields

from distgraph.ir.op_registry import lookup
from distgraph.passes.partition import LocalOp, LocalTask, RankProgram
from distgraph.resources.runtimes.runtime_model import Memory
from distgraph.runtime.forecast.memory_forecast import RankMemory
from distgraph.runtime.program.memory_plan import planned
from distgraph.runtime.program.storage import Storage, nbytes

STREAMS = ("memory", "lookup")
"""Classes of ops that a compiler fuses into chains."""
Order = Sequence[tuple[str, int]]


CATEGORIES = tuple(field.name for field in fields(RankMemory) if field.name != "rank")


def liveness_memory(program: RankProgram, storage: Storage, order: Order, rules: Memory) -> RankMemory:
    """Bytes of one rank at the peak: while micro-batches run, or while parameters are updated."""
    moments = _Ledger(program, storage, order, rules).moments()
    peak = max(moments, key=lambda each: sum(each.values()))
    return RankMemory(program.rank, **peak)


class _Ledger:
    def __init__(self, program: RankProgram, storage: Storage, order: Order, rules: Memory) -> None:
        if storage.parts:  # others keep what they have reduced and scattered in memory of its own
            storage = planned(program, in_parts=False).storage
        self.program, self.storage, self.order, self.rules = program, storage, order, rules
        self.alive: dict[tuple[str, frozenset[str]], int] = {}  # (writer, readers) -> micro-batches in flight
        self.producers = program.graph.producers
        self.tasks = {task.name: task for task in program.tasks}
        self.made: dict[str, tuple[str, int]] = {}
        self.read: dict[str, dict[str, int]] = {}  # root -> task -> last op that reads it
        self.stored: set[str] = set()
        self.first: dict[str, dict[str, int]] = {}  # root -> task -> first op that reads it
        for task in program.tasks:
            for number, local in enumerate(task.ops):
                self._visit(task.name, number, local)
        self.whole: set[str] = set()
        self.shards: set[str] = set()
        for task in program.tasks:
            self._reduced(task)
        updated = {new.name for _, new in program.graph.updates}
        self.over = {self._root(name) for name in updated if name in storage.slots}

    def _root(self, name: str) -> str:
        return self.storage.slots[name].root

    def _visit(self, task: str, number: int, local: LocalOp) -> None:
        operands = [v.name for v in local.op.operands if v.name in self.storage.slots]
        if local.mode == "recv":
            operands = []
        for name in operands:
            self.read.setdefault(self._root(name), {})[task] = number
            self.first.setdefault(self._root(name), {}).setdefault(task, number)
        results = [] if local.mode == "send" else [v.name for v in local.op.results]
        for name in results:
            if self._root(name) == name:
                self.made[name] = (task, number)
        if not (self.rules.fused and local.mode == "compute" and lookup(local.op.kind).cost in STREAMS):
            self.stored |= {self._root(name) for name in (*operands, *results)}

    def _reduced(self, task: LocalTask) -> None:
        """Gradients that a task reduces for the update, and what becomes of them."""
        for local in task.ops if task.per_micro else ():
            if local.mode in ("comm.reduce_scatter", "comm.all_reduce") and local.op.role == "backward":
                for operand, reduced in zip(local.op.operands, local.op.results, strict=True):
                    source, result = self._root(operand.name), self._root(reduced.name)
                    later = any(not self.tasks[other].per_micro for other in self.read.get(result, ()))
                    if later and source in self.made:
                        self.whole.add(source)
                        if result != source:
                            self.shards.add(result)

    def moments(self) -> tuple[dict[str, int], dict[str, int]]:
        """Category -> bytes while micro-batches run, and while parameters are updated."""
        sizes: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        micro = self.program.graph.micro_batches
        kinds = {"param": "parameters", "state": "states"}
        for name, slot in self.storage.slots.items():
            if slot.kind == "source" and slot.root == name:
                kind = self.producers[name].kind
                copies = micro if kind == "input" else 1
                sizes[kinds.get(kind, "inputs")] += nbytes(self.program, name) * copies
        running, updating = dict(sizes), dict(sizes)
        for name in self.made:
            if self._is_resident(name):
                self._place(name, running, updating)
        once = [task for task in self.program.tasks if not task.per_micro]
        loops = [task for task in self.program.tasks if task.per_micro]
        running["temporary"] = max((self._temporary(task) for task in loops), default=0)
        updating["temporary"] = max((self._temporary(task) for task in once), default=0)
        return running, updating

    def _is_resident(self, name: str) -> bool:
        """Whether a value outlives the run of the task that makes it."""
        if name in self.over or self.storage.slots[name].kind == "source":
            return False
        task, number = self.made[name]
        local = self.tasks[task].ops[number]
        added = local.mode == "accumulate" and self.program.graph.micro_batches > 1
        if name in self.whole and not added:
            return False
        return added or any(other != task for other in self.read.get(name, ()))

    def _place(self, name: str, running: dict[str, int], updating: dict[str, int]) -> None:
        task, number = self.made[name]
        local, size = self.tasks[task].ops[number], nbytes(self.program, name)
        phase = self.program.parts.phase[name]
        if phase == 0:  # whole parameters, gathered right before they are used: temporary
            return
        if name in self.whole or local.mode == "accumulate" or local.tail or phase == 2:
            updating["gradients"] += size
            if name not in self.shards:
                running["gradients"] += size
        elif not self._is_recomputed(name):
            category = "communication" if local.mode == "recv" else "activations"
            running[category] += size * self._in_flight(name)

    def _is_recomputed(self, name: str) -> bool:
        """Whether a value that depends on inputs only is recomputed where it is read."""
        producer = self.producers[name]
        inputs = all(self.producers[value.name].kind == "input" for value in producer.operands)
        return producer.kind in self.rules.recomputed and inputs

    def _in_flight(self, name: str) -> int:
        """Most micro-batches of which a value is alive at the same time."""
        key = self.made[name][0], frozenset(self.read.get(name, ()))
        if key not in self.alive:
            self.alive[key] = self._most_alive(*key)
        return self.alive[key]

    def _most_alive(self, first: str, readers: frozenset[str]) -> int:
        """Most micro-batches between a run of one task and the last of its readers."""
        place_of = {step: place for place, step in enumerate(self.order)}
        ends: list[int] = []
        most = 1
        for step, start in place_of.items():
            if step[0] != first:
                continue
            end = max(
                (place_of[task, step[1]] for task in readers if (task, step[1]) in place_of), default=start
            )
            while ends and ends[0] < start:
                heapq.heappop(ends)
            heapq.heappush(ends, end)
            most = max(most, len(ends))
        return most

    def _temporary(self, task: LocalTask) -> int:
        """Most bytes of what lives within one run of a task.

        With one micro-batch the gradients come one by one, and stay until the last is there.
        """
        born: dict[int, list[str]] = {}
        dying: dict[int, list[str]] = {}
        for name, (where, number) in self.made.items():
            position = self.read.get(name, {}).get(task.name, number)
            if self.program.parts.phase[name] == 0 and where != task.name:
                first = self.first.get(name, {}).get(task.name)
                if first is not None:
                    born.setdefault(first, []).append(name)
                    dying.setdefault(position, []).append(name)
            elif where == task.name and self._is_held(name):
                born.setdefault(number, []).append(name)
                end = len(task.ops) - 1 if name in self.whole else max(number, position)
                dying.setdefault(end, []).append(name)
        for number, local in enumerate(task.ops):
            self._add_gradient(task, number, local, born, dying)
        return self._sweep(task.ops, born, dying)

    def _add_gradient(
        self,
        task: LocalTask,
        number: int,
        local: LocalOp,
        born: dict[int, list[str]],
        dying: dict[int, list[str]],
    ) -> None:
        """The gradient of a convolution is whole before it is added to the sum; a product adds at once."""
        if local.mode != "accumulate" or self.program.graph.micro_batches == 1:
            return
        value = local.op.operands[0].name
        if self.producers[value].kind == "conv_grad_weight" and self._root(value) != value:
            position = next(
                n for n, each in enumerate(task.ops) if value in {v.name for v in each.op.results}
            )
            born.setdefault(position, []).append(value)
            dying.setdefault(number, []).append(value)

    def _is_held(self, name: str) -> bool:
        """Whether a value is in memory within the run of its task only."""
        if name in self.over or self.storage.slots[name].kind == "source":
            return False
        return not self._is_resident(name) and (name in self.stored or name in self.whole)

    def _sweep(
        self, ops: Sequence[LocalOp], born: Mapping[int, list[str]], dying: Mapping[int, list[str]]
    ) -> int:
        """An elementwise op writes its result over what it reads last."""
        now = top = 0
        for number, local in enumerate(ops):
            in_place = local.mode != "compute" or lookup(local.op.kind).cost in STREAMS
            freed = sum(nbytes(self.program, name) for name in dying.get(number, ()))
            made = sum(nbytes(self.program, name) for name in born.get(number, ()))
            top = max(top, now + made - min(freed, made) * in_place)
            now += made - freed
        return top
