"""Loops at run time: the task of a body runs once a turn, on buffers of its own.

    def body_last(m):                                 # one turn
        x0 = feeds['x0']
        matmul(carry0, feeds['fixed0'], out=h_3)
        ...

Before a turn the runner hands the items of the sequences to the task, and after it stacks and sums what the
turn leaves and makes its carries those of the next turn. Collectives in a body are started and awaited by
its task, as everywhere. All ranks of a loop run the same turns: a condition is computed from values that are
the same on all of them, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distgraph.errors import RuntimeFault
from distgraph.ir.dtypes import to_numpy
from distgraph.ir.loops import CARRY, ITEM, TURN
from distgraph.ops.control.structured_loops import MAX_TURNS
from distgraph.runtime.program.allocation import allocate
from distgraph.runtime.program.codegen import Writer
from distgraph.runtime.program.compiled_task import Arena
from distgraph.runtime.program.identifiers import literal
from distgraph.runtime.program.loop_plan import BodyPlan, LoopPlan, aligned
from distgraph.runtime.program.task_compiler import compile_task
from distgraph.runtime.transport.transport import Transport


class BodyWriter(Writer):
    """Writes a turn of a loop: inputs are handed over by the loop, for each turn anew."""

    def fetch_source(self, value: str, name: str) -> None:
        """Write the line that fetches an item, or a value that is the same in all turns."""
        op = self.program.graph.producers[value]
        if op.kind == "input":
            self.line(f"{name} = feeds[{literal(op.attrs['name'])}]")
        else:
            super().fetch_source(value, name)


def build_loops(
    plans: Mapping[str, LoopPlan], arena: Arena, memory: Any, transport: Transport | None, xp: Any
) -> None:
    """Compile the loops of a program for its arena, whose tasks run them.

    Args:
        plans: of the loops.
        arena: of the program.
        memory: bytes that they share.
        transport: connection to the other ranks.
        xp: array namespace.
    """
    for name, plan in plans.items():
        arena.loops[name] = LoopRunner(plan, memory, transport, xp).run


class _Pool:
    """Hands out parts of a block of memory."""

    def __init__(self, block: Any) -> None:
        self.block, self.used = block, 0

    def take(self, shape: Any, dtype: Any) -> Any:
        """A buffer, of memory that is written before it is read."""
        count = shape if isinstance(shape, int) else math.prod(shape)
        size = count * np.dtype(dtype).itemsize
        start, self.used = self.used, self.used + aligned(size)
        return self.block[start : start + size].view(dtype).reshape(shape)

    @property
    def rest(self) -> Any:
        """The memory that is left."""
        return self.block[self.used :]


class _Body:
    """A body with its buffers and its task."""

    def __init__(self, plan: BodyPlan, carries: Mapping[str, Any], pool: _Pool, xp: Any) -> None:
        self.plan, self.program, self.xp = plan, plan.program, xp
        self.arena = Arena({}, {}, {}, {}, {})
        names = {op.result.name: str(op.attrs["name"]) for op in self.program.graph.sources("state")}
        self.carries = dict(carries)
        for value, name in names.items():
            if name not in self.carries:
                shape, dtype = self.program.types[value]
                self.carries[name] = pool.take(shape, to_numpy(dtype))
            self.arena.fixed[value] = self.carries[name]
        scratch = pool.take(plan.storage.scratch, np.uint8)
        allocate(self.program, plan.storage, self.arena, xp, pool.take, scratch)
        self.sources = {op.result.name: str(op.attrs["name"]) for op in self.program.graph.sources("input")}

    def compile(self, memory: Any, transport: Transport | None) -> None:
        """Compile the task; `memory` is for the loops inside."""
        build_loops(self.plan.loops, self.arena, memory, transport, self.xp)
        (task,) = self.program.tasks
        storage = self.plan.storage
        self.task = compile_task(task, self.program, storage, self.arena, transport, self.xp, BodyWriter)

    def array(self, value: str) -> Any:
        """The present array of an output or of a new carry."""
        if value in self.sources:
            return self.arena.feeds[self.sources[value]]
        fixed, slots = self.arena.fixed, self.plan.storage.slots
        if value in fixed:
            return fixed[value]
        if value in slots and slots[value].root in fixed:
            return fixed[slots[value].root]
        op = self.program.graph.producers[value]
        return self.xp.asarray(self.program.constant(value), to_numpy(op.result.dtype))

    def hand_on(self) -> None:
        """Make the new carries those of the next turn."""
        for old, new in self.program.graph.updates:
            if old not in self.plan.storage.in_place:
                self.xp.copyto(self.arena.fixed[old], self.array(new.name))


class LoopRunner:
    """Runs one loop of a rank.

    Args:
        plan: of the loop.
        memory: bytes for its buffers, whose contents are not kept.
        transport: connection to the other ranks.
        xp: array namespace.
    """

    def __init__(self, plan: LoopPlan, memory: Any, transport: Transport | None, xp: Any) -> None:
        self.loop, self.xp = plan.loop, xp
        pool = _Pool(memory)
        self.body = _Body(plan.bodies["body"], {}, pool, xp)
        self.test: _Body | None = None
        if self.loop.condition is not None:
            self.test = _Body(plan.bodies["condition"], self.body.carries, pool, xp)
        for body in (self.body, self.test):
            if body is not None:
                body.compile(pool.rest, transport)
        graph = self.body.program.graph
        begins = {op.result.name for op in graph.sources("state")}
        outputs = [value.name for _, value in graph.outputs]
        count = len(self.loop.stacked)
        first = self.loop.carried + self.loop.sums
        self.stacked = [(name, first + n, name in begins) for n, name in enumerate(outputs[:count])]
        self.summed = [(name, self.loop.carried + n) for n, name in enumerate(outputs[count:])]
        self.names = self.loop.operand_names

    def run(self, m: int, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Run all turns for micro-batch `m`.

        Raises:
            RuntimeFault: the condition does not turn false.
        """
        given, copyto = dict(zip(self.names, operands, strict=True)), self.xp.copyto
        for name, buffer in self.body.carries.items():
            copyto(buffer, given[name])
        for body in (self.body, self.test):
            if body is not None:
                body.arena.feeds.update(given)
        if self.test is None:
            for number, turn in enumerate(self.loop.order):
                self.turn(m, turn, given, results, first=number == 0)
        else:
            self.repeat(m, given, results)
        for n in range(self.loop.carried):
            copyto(results[n], self.body.carries[f"{CARRY}{n}"])

    def repeat(self, m: int, given: Mapping[str, Any], results: Sequence[Any]) -> None:
        """Run turns while the condition holds."""
        assert self.test is not None
        ((_, go),) = self.test.program.graph.outputs
        for turn in range(MAX_TURNS):
            self.test.arena.feeds[TURN] = np.int64(turn)
            self.test.task.last(m)
            if not bool(self.test.array(go.name)):
                return
            self.turn(m, turn, given, results, first=turn == 0)
        raise RuntimeFault(
            f"while_loop ({self.loop.op.source}) ran {MAX_TURNS} turns without its condition turning false"
        )

    def turn(
        self, m: int, turn: int, given: Mapping[str, Any], results: Sequence[Any], *, first: bool
    ) -> None:
        """Run one turn."""
        body, copyto, feeds = self.body, self.xp.copyto, self.body.arena.feeds
        feeds[TURN] = np.int64(turn)
        for name, array in given.items():
            if name.startswith(ITEM):
                feeds[name] = array[turn, ...]
        for name, place, begins in self.stacked:
            if begins:  # the turn may write over it
                copyto(results[place][turn, ...], body.array(name))
        body.task.last(m)
        for name, place, begins in self.stacked:
            if not begins:
                copyto(results[place][turn, ...], body.array(name))
        for name, place in self.summed:
            if first:
                copyto(results[place], body.array(name))
            else:
                self.xp.add(results[place], body.array(name), out=results[place])
        body.hand_on()
