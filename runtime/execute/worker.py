"""The worker of one rank: it allocates its memory, compiles its tasks and runs its training steps.

The worker runs tasks in the order that the schedule recorded, which is the same on all ranks of a mesh, and
starts the receives of the next task before it runs the present one; or it runs them as the actors of its
mesh decide (`actor_executor.py`), and then those that update parameters in the recorded order. It waits for
a collective only where its result is read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from distgraph.errors import OperandFault, RuntimeFault
from distgraph.ir.dtypes import to_numpy
from distgraph.ir.gc_pause import collector_paused
from distgraph.ir.graph import Value
from distgraph.passes.partition import RankProgram
from distgraph.runtime.execute.actor_executor import ActorExecutor
from distgraph.runtime.execute.buffer_check import BufferCheck, CheckedWriter, check_enabled
from distgraph.runtime.execute.finite_check import FiniteCheck, Guard
from distgraph.runtime.execute.recorder import Recorder
from distgraph.runtime.program.allocation import allocate
from distgraph.runtime.program.captured_parts import Captures, CapturingWriter
from distgraph.runtime.program.codegen import Writer
from distgraph.runtime.program.compiled_task import Arena, CompiledTask
from distgraph.runtime.program.loop_plan import plan_loops
from distgraph.runtime.program.loop_runner import build_loops
from distgraph.runtime.program.memory_plan import plan_storage
from distgraph.runtime.program.task_compiler import WriterType, compile_task, is_of_task, op_of
from distgraph.runtime.schedule.actor_group import ActorPlan
from distgraph.runtime.schedule.task import UPDATES
from distgraph.runtime.schedule.task_order import Schedule
from distgraph.runtime.transport.collectives import finish
from distgraph.runtime.transport.subnormal_numbers import FlushedToZero
from distgraph.runtime.transport.transport import Transport
from distgraph.runtime.transport.watchdog import Activity, recording

_VERDICT = "\0finite"  # no output has this label: names hold no NUL

_Order = tuple[tuple[str, int], ...]
"""(task, micro-batch), first to last."""

_Runner = Callable[[str, int, Callable[[int], None]], None]
"""Runs a function of a task for one micro-batch."""


def _run(name: str, micro: int, function: Callable[[int], None]) -> None:
    function(micro)


def _split_at_updates(order: _Order, program: RankProgram) -> tuple[_Order, _Order]:
    """The steps before the updates, and the updates. Only optimize tasks wait for optimize tasks."""
    updates = {task.name for task in program.tasks if task.kind == UPDATES}
    before = tuple(step for step in order if step[0] not in updates)
    after = tuple(step for step in order if step[0] in updates)
    assert (*before, *after) == order, "memory is planned for another order"
    return before, after


class Worker:
    """Runs the program of one rank.

    Args:
        program: the program of the rank.
        schedule: recorded order of all tasks.
        transport: connection to the other ranks; None for a program of one rank.
        xp: array namespace, NumPy or CuPy.
        sources: local blocks of parameters and states by value name; they are updated in place.
        guard: values that are checked to be finite before the update; None for no check.
        fetch: copies outputs to the host, with one wait for all of them; see `Device.fetch`.
        actors: the plan of all actors, to let them decide; None to follow the recorded order.
        control: transport for host arrays, by which actors send decisions; by default `transport`.
        graphs: runs parts of tasks as CUDA graphs; None to run every op by itself, as checked runs do.

    Attributes:
        check: the check of `guard`, with the verdict of the last step.
        updates: number of updates of parameters and states.
        updating: whether an update is in progress; True after a step that failed during its update.

    Raises:
        RuntimeFault: a parameter or state of the program is missing or has the wrong local shape;
            DISTGRAPH_CHECK is neither 0 nor 1.
    """

    @collector_paused()
    def __init__(
        self,
        program: RankProgram,
        schedule: Schedule,
        transport: Transport | None,
        xp: Any,
        sources: Mapping[str, Any],
        guard: Guard | None = None,
        *,
        fetch: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
        actors: ActorPlan | None = None,
        control: Transport | None = None,
        graphs: Captures | None = None,
    ) -> None:
        self.program, self.xp = program, xp
        self._transport, self._fetch = transport, fetch
        order = schedule.order(program.rank) if program.rank in schedule.ranks else ()
        self._order: _Order = order
        self._updates: _Order = ()
        if guard is not None or actors is not None:
            self._order, self._updates = _split_at_updates(order, program)
        self.storage = plan_storage(program, schedule, None if actors is None else actors.limits)
        self.arena = Arena({}, {}, {}, {}, {})
        self._actors = (
            None
            if actors is None
            else ActorExecutor(actors, program, self.arena.pending, transport, control or transport)
        )
        self.loops = plan_loops(program)
        self._allocate(sources)
        self.updates, self.updating = 0, False
        self._flushed = FlushedToZero()
        self.check = None if guard is None else FiniteCheck(guard, program, self.storage, self.arena, xp)
        self._buffers: BufferCheck | None = None
        if check_enabled():
            self._buffers = BufferCheck(program, self.storage, self.arena, order)
        self.tasks = self._compile_tasks(graphs)
        self._index_values()

    def _compile_tasks(self, graphs: Captures | None) -> dict[str, CompiledTask]:
        """The tasks as functions; with the check of buffers, those that it watches."""
        program, buffers = self.program, self._buffers
        writer: WriterType = Writer if graphs is None else functools.partial(CapturingWriter, graphs)
        if buffers is not None:
            writer = functools.partial(CheckedWriter, buffers)
        tasks = {
            task.name: compile_task(task, program, self.storage, self.arena, self._transport, self.xp, writer)
            for task in program.tasks
        }
        if buffers is None:
            return tasks
        return {name: buffers.filling_dead_buffers(task) for name, task in tasks.items()}

    def _index_values(self) -> None:
        """Where the values that a step asks for come from: outputs, transfers, collectives, tasks."""
        program = self.program
        self._transfers = {number: name for name, number in program.parts.numbers.items()}
        self._once = {task.name for task in program.tasks if not task.per_micro}
        self._outputs = [
            (label, value) for label, value in program.graph.outputs if value.name in program.types
        ]
        self._per_micro = [
            (label, value)
            for label, value in self._outputs
            if program.parts.phase[value.name] == 1 and program.graph.micro_batches > 1
        ]
        self._started_by = self.storage.started_by(program)
        self._collectives = {  # block -> collective that writes it
            self.storage.slots[value].root: op for value, op in self._started_by.items()
        }
        self._home = {
            v.name: t.name for t in program.tasks for o in t.ops if o.mode != "send" for v in o.op.results
        }

    def _allocate(self, sources: Mapping[str, Any]) -> None:
        program, xp = self.program, self.xp
        for op in program.graph.sources("param", "state"):
            name = op.result.name
            if name not in program.types:
                continue
            shape, dtype = program.types[name]
            block = sources.get(name)
            if block is None or tuple(block.shape) != shape or block.dtype != to_numpy(dtype):
                given = "nothing" if block is None else f"{block.dtype}{tuple(block.shape)}"
                raise RuntimeFault(
                    f"rank {program.rank} needs %{name} as {dtype}{shape} but was given {given}; "
                    "initialise or load it"
                )
            self.arena.fixed[name] = block
        scratch = xp.empty(self.storage.scratch, xp.uint8)
        allocate(program, self.storage, self.arena, xp, xp.zeros, scratch)
        size = max((plan.nbytes for plan in self.loops.values()), default=0)
        build_loops(self.loops, self.arena, xp.empty(size, xp.uint8), self._transport, xp)

    def step(self, feeds: Mapping[str, Any], recorder: Recorder | None = None) -> dict[str, Any]:
        """Run one step.

        Args:
            feeds: for every input of the rank its local blocks, one a micro-batch, or its number if it is a
                scalar.
            recorder: records the times of tasks and messages.

        Returns:
            label -> local block of every output on this rank as `fetch` gives it; a list with one block per
            micro-batch where the output is not accumulated. Valid until the next step. Parameters and
            states are unchanged where `check` failed and blocks the update.

        Raises:
            RuntimeFault: an input is missing; another rank failed; a wait ran out of time.
        """
        if self._buffers is not None:
            self._buffers.begin()
        activity = Activity() if self._transport is None else self._transport.activity
        activity.transfers, activity.micro_batches = self._transfers, self.program.graph.micro_batches
        with self._flushed:
            if recorder is None:
                outputs = self._step(feeds, recording(activity, _run), _run)
            else:
                with recorder.attached(self.tasks.values(), self._transport):
                    outputs = self._step(feeds, recording(activity, recorder.run), recorder.post)
        activity.task = ""
        if self._buffers is not None:
            self._buffers.end()
        return outputs

    def _step(self, feeds: Mapping[str, Any], run: _Runner, post: _Runner) -> dict[str, Any]:
        arena = self.arena
        arena.feeds.clear()
        arena.feeds.update(feeds)
        arena.pending.clear()
        last = self.program.graph.micro_batches - 1
        collected: dict[str, list[Any]] = {
            # no task produces an output that is an input itself
            label: [] if value.name in self._home else [self._block(value, m).copy() for m in range(last + 1)]
            for label, value in self._per_micro
        }
        if self._actors is None:
            self._run_tasks(self._order, collected, run, post)
        else:
            self._actors.run(
                lambda name, m: self._run_task(name, m, collected, run),
                lambda name, m: post(name, m, self.tasks[name].post),
            )
        outputs, counts = self._before_update(collected)
        self.updating = counts
        if counts:
            self._run_tasks(self._updates, collected, run, post)
        self._finish_pending()
        for buffers in arena.sends.values():
            for under_way in buffers:
                finish(under_way)
        if counts:
            self._commit()
            self.updates += 1
            self.updating = False
        rest = {label: block for label, block in self._results(collected).items() if label not in outputs}
        return {**outputs, **self._fetch(rest)} if rest or self.check is None else outputs

    def _before_update(self, collected: Mapping[str, list[Any]]) -> tuple[dict[str, Any], bool]:
        """The outputs that updates do not produce, and whether to run the updates.

        On a GPU the host waits once. On a processor, what has arrived is checked while the rest is under way.
        """
        if self.check is None:
            return {}, True
        verdict = self.check.local_verdict(self._wait_for)
        self._finish_pending()
        updates = {name for name, _ in self._updates}
        updated = {label for label, value in self._outputs if self._home.get(value.name) in updates}
        ready = {label: block for label, block in self._results(collected).items() if label not in updated}
        for label, value in self._outputs:
            if self.program.graph.producers[value.name].kind in ("param", "state"):
                ready[label] = ready[label].copy()  # the update will overwrite it
        outputs = self._fetch({**ready, _VERDICT: verdict})
        return outputs, self.check.agree(bool(outputs.pop(_VERDICT))) or not self.check.guard.blocks

    def _wait_for(self, block: str) -> None:
        """Wait for the collectives that write a block."""
        collective = self._collectives.get(block)
        for (name, _), handle in self.arena.pending.items():
            if name == collective:
                handle.wait()

    def _finish_pending(self) -> None:
        for handle in self.arena.pending.values():
            handle.wait()
        self.arena.pending.clear()

    def _results(self, collected: Mapping[str, list[Any]]) -> dict[str, Any]:
        """Blocks of all outputs, on the device."""
        whole = {label: self._block(value, 0) for label, value in self._outputs if label not in collected}
        return {**whole, **collected}

    def _run_tasks(
        self, order: _Order, collected: Mapping[str, list[Any]], run: _Runner, post: _Runner
    ) -> None:
        if order:
            post(*order[0], self.tasks[order[0][0]].post)
        for position, (name, m) in enumerate(order):
            if position + 1 < len(order):
                next_task, next_micro = order[position + 1]
                post(next_task, next_micro, self.tasks[next_task].post)
            self._run_task(name, m, collected, run)

    def _run_task(self, name: str, m: int, collected: Mapping[str, list[Any]], run: _Runner) -> None:
        """Run a task for one micro-batch, and copy the outputs that it makes for each."""
        arena, task = self.arena, self.tasks[name]
        last = m == self.program.graph.micro_batches - 1 or name in self._once
        try:
            run(name, m, task.last if last else task.body)
        except (OperandFault, ValueError) as error:
            if not isinstance(error, OperandFault) and not is_of_task(error):
                raise
            rank, op = op_of(error)
            raise (OperandFault(f"{rank}, op {op}: {error}") if op else error) from error
        for label, value in self._per_micro:
            if self._home.get(value.name) == name:
                started = (self._started_by.get(value.name, ""), m)
                if started in arena.pending:  # a collective leaves it
                    arena.pending[started].wait()
                collected[label].append(self._block(value, m).copy())

    def _block(self, value: Value, m: int) -> Any:
        if value.name in self.arena.fixed:
            return self.arena.fixed[value.name]
        if value.name in self.arena.rings:
            ring = self.arena.rings[value.name]
            return ring[m % len(ring)]
        op = self.program.graph.producers[value.name]
        if op.kind == "constant":
            return self.xp.asarray(self.program.constant(value.name), to_numpy(value.dtype))
        feed = self.arena.feeds[op.attrs["name"]]
        return feed if value.shape == () else feed[m]

    def _commit(self) -> None:
        """Parameters and states that were not updated in place take their new values."""
        for old, new in self.program.graph.updates:
            if old in self.arena.fixed and old not in self.storage.in_place:
                self.xp.copyto(self.arena.fixed[old], self._block(new, 0))

    @property
    def source(self) -> str:
        """Python text of all tasks."""
        return "\n\n".join(task.source for task in self.tasks.values())
