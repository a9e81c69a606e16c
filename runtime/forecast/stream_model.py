"""Time of one task on one rank: a compute stream, and one communication stream for each group.

*In:* a rank program, its storage, the costs of its ops.
*Out:* `TaskTime`: seconds of one run of a task.
*Invariant:* a collective starts where the generated program starts it, after the earlier collectives of its
group have ended (their transfers, where `Overlap.startups` says so), and the compute stream waits for it
where the program waits (`Storage.waits`, `Storage.late`). The host delays a task, too (`HostTimes`): it ends
no earlier than its ops are issued, and a device that moves its messages itself computes nothing at each end
of a message to another mesh. Collectives of different groups that use the same links at the same time get
equal parts of their bandwidth, so that together they take about as long as one after the other; those along
different axes of a torus share none. Exchanges over the same links follow one another.

A device that works for its collectives itself (`Message.busy`) does that work while it waits for any of them,
the oldest first, and between machines, where a thread of the rank lets them go on, also during the transfer,
which delays what it computes. The rest is done when the program waits for the collective or the task ends.

    compute  | matmul | matmul |  wait  | add |            exposed = wait
    communicate       | all_reduce      |

Collectives that the last micro-batch starts for the optimize task (`late`), and those of a load task
(`InFlight`), overlap with the tasks that follow. Which collectives overlap with computation is a matter of
the runtime (`RuntimeModel.overlap`): the program waits for the others where they start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

from distgraph.ir.collective_registry import EACH_MICRO_BATCH
from distgraph.ir.graph import Op
from distgraph.passes.partition import LocalOp, LocalTask, RankProgram
from distgraph.resources.runtimes.load_runtime import default_runtime
from distgraph.resources.runtimes.runtime_model import Purpose, RuntimeModel
from distgraph.runtime.forecast.communication_cost import Message, TrafficCost
from distgraph.runtime.forecast.in_flight import NOTHING_IN_FLIGHT, Channel, InFlight, work_due
from distgraph.runtime.forecast.op_cost import NOTHING, OpCost, Work
from distgraph.runtime.forecast.task_time import Span, TaskTime, repeated
from distgraph.runtime.program.loop_plan import plan_loop
from distgraph.runtime.program.storage import Storage, is_started


@dataclass(frozen=True, slots=True)
class _PricedOp:
    """A local op with its costs, the values that it waits for and the number of ops that the host issues.

    `message` is None if it only computes; `loop` has the times of all turns of a loop.
    """

    local: LocalOp
    waits: tuple[str, ...]
    work: Work = NOTHING
    seconds: float = 0.0
    message: Message | None = None
    issued: int = 0
    loop: TaskTime | None = None


class Streams:
    """Simulates tasks of one rank, each from time 0.

    Args:
        program, storage: program and memory of the rank.
        ops: costs of its computations.
        traffic: costs of the communication of all ranks.
        runtime: what executes the program: which collectives overlap with computation, and host times;
            by default distgraph.
    """

    def __init__(
        self,
        program: RankProgram,
        storage: Storage,
        ops: OpCost,
        traffic: TrafficCost,
        runtime: RuntimeModel | None = None,
    ) -> None:
        self.program, self.storage, self.ops, self.traffic = program, storage, ops, traffic
        hardware = ops.cost.cluster.devices[ops.device]
        self.runtime = runtime or default_runtime(hardware.type)
        self.host = hardware.compute.host.replaced_by(self.runtime.host)
        updates = any(not task.per_micro and task.kind != "load" for task in program.tasks)
        self._reduces_at_end = updates and self.runtime.gradients.reduce == "end"
        self._priced_ops: dict[str, list[_PricedOp]] = {}

    def run(
        self,
        task: LocalTask,
        *,
        last: bool,
        pending: Mapping[str, float] | None = None,
        postponed: Sequence[LocalTask] = (),
        in_flight: InFlight = NOTHING_IN_FLIGHT,
        trace: bool = False,
        speed: float = 1.0,
    ) -> TaskTime:
        """One run of a task.

        Args:
            task: a task of the program.
            last: whether it is the run of the last micro-batch; always true for a task that runs once per
                step.
            pending: value -> seconds until the collective of another task that computes it ends.
            postponed: tasks whose reductions of gradients run before the ops of this one; see `postpones`.
            in_flight: collectives of earlier tasks that are under way when the task starts.
            trace: whether to list the spans.
            speed: how many times as fast as the resource file says the device computes.
        """
        last = last or not task.per_micro
        return _Run(self, task, last, dict(pending or {}), in_flight, trace, speed).time(postponed)

    def postpones(self, task: LocalTask) -> bool:
        """Whether the reductions of gradients in a task run after all micro-batches (`Gradients.reduce`)."""
        scatters = self.runtime.gradients.each_micro_batch and scatters_gradients(task)
        return self._reduces_at_end and task.per_micro and task.kind != "forward" and not scatters

    def hands_on(self, task: LocalTask) -> bool:
        """Whether later tasks wait for collectives of a task.

        Those are the gathers of the only load task of a rank that has some, if the runtime does not gather
        parameters where they are used (`Parameters.gather`).
        """
        late = self.storage.late
        if task.kind != "load" or not late[task.name] or self.runtime.parameters.gather == "use":
            return False
        return sum(bool(late[other.name]) for other in self.program.tasks if other.kind == "load") == 1

    def reductions(self, task: LocalTask) -> list[_PricedOp]:
        """The ops that reduce the gradients of a task; sends to other stages stay where they are."""
        return [step for step in self.steps(task) if step.local.tail and step.local.mode != "send"]

    def steps(self, task: LocalTask) -> list[_PricedOp]:
        """The ops of a task, priced once for all of its runs."""
        if task.name not in self._priced_ops:
            waits = self.storage.waits
            self._priced_ops[task.name] = [
                self._priced_op(local, waits.get((task.name, number), ()))
                for number, local in enumerate(task.ops)
            ]
        return self._priced_ops[task.name]

    def _priced_op(self, local: LocalOp, waits: tuple[str, ...]) -> _PricedOp:
        if local.mode == "send" or (is_started(local) and local.mode != "recv"):
            work, seconds = self.ops.of(local)
            return _PricedOp(local, waits, work, seconds, self._message_cost(self.program, local))
        if local.mode == "loop":
            return _PricedOp(local, waits, loop=self.loop_time(local))
        if self.ops.updated_at_once(local):
            return _PricedOp(local, waits)
        (work, seconds), (ops, more) = self.ops.of(local), self.ops.more(local)
        return _PricedOp(local, waits, work, seconds + more, None, (work.kind != "none") + ops)

    def loop_time(self, local: LocalOp) -> TaskTime:
        """Times of all turns of a loop, with the copies of what turns leave and hand on."""
        plan, times = plan_loop(local), []
        for body in plan.bodies.values():
            ops = self.ops.of_program(body.program, body.storage)
            streams = Streams(
                body.program, body.storage, ops, self.traffic.of_body(body.program.graph), self.runtime
            )
            (task,) = body.program.tasks
            times.append(streams.run(task, last=True))
        copies = Work("memory", nbytes=2 * plan.copied)
        seconds = self.ops.seconds(copies) if plan.copied else 0.0
        times.append(TaskTime(seconds, seconds, 0.0, 0.0, 0.0))
        return repeated(times, plan.loop.turns)

    def _message_cost(self, program: RankProgram, local: LocalOp) -> Message:
        if local.mode == "send":
            return self._sent(self.traffic.exchange(local.op))
        if local.mode == "exchange":
            return self.traffic.exchange(local.op)
        message = self.traffic.collective(program, local)
        seconds, ranks = message.seconds, len(local.attrs.get("group", ()))
        if self.runtime.gradients.scatter == "chain" and local.mode == "comm.reduce_scatter" and ranks > 1:
            seconds *= ranks / (ranks - 1)
        return replace(message, seconds=seconds, startup=message.startup * self.runtime.overlap.startups)

    def _sent(self, message: Message) -> Message:
        """A message between stages with the start of the runtime in place of that of the cluster."""
        start = self.runtime.messages.start
        if start is None or not message.link:
            return message
        launch = self.traffic.cluster.launch or 0.0
        return replace(message, seconds=max(0.0, message.seconds - launch) + start)

    def overlaps(self, task: LocalTask, local: LocalOp) -> bool:
        """Whether a collective of a task runs while the device computes."""
        return self.runtime.overlap.hides(self._purpose(task, local), local.mode.removeprefix("comm."))

    def _purpose(self, task: LocalTask, local: LocalOp) -> Purpose:
        """What a collective is for (see `RuntimeModel`)."""
        if task.per_micro:
            if local.op.attrs.get(EACH_MICRO_BATCH):
                return "parameters"
            return "gradients" if self._is_gradient(local.op) else "activations"
        gathers = task.kind == "load" or local.mode == "comm.all_gather"
        return "parameters" if gathers else "gradients"

    def _is_gradient(self, op: Op) -> bool:
        """Whether the result of a collective is a gradient of the step, or is added to one."""
        graph, phase = self.program.graph, self.program.parts.phase
        readers = graph.users[op.name]
        return phase[op.name] == 2 or (bool(readers) and all(r.kind == "accumulate" for r in readers))

    def with_messages_of(self, program: RankProgram, ops: Mapping[str, Op]) -> Streams:
        """The same tasks with the message costs of an equivalent rank (see `rank_equivalence`).

        Args:
            program: types of the values on the equivalent rank.
            ops: name of an op of this rank -> the corresponding op of the equivalent rank.
        """
        streams = copy(self)
        streams._priced_ops = {}
        for task in self.program.tasks:
            streams._priced_ops[task.name] = [
                step
                if step.message is None
                else replace(
                    step, message=self._message_cost(program, replace(step.local, op=ops[step.local.op.name]))
                )
                for step in self.steps(task)
            ]
        return streams


def scatters_gradients(task: LocalTask) -> bool:
    """Whether the last run of a task scatters the sums of gradients, so that a rank keeps a part of them."""
    return any(local.tail and local.mode == "comm.reduce_scatter" for local in task.ops)


class _Run:
    def __init__(
        self,
        streams: Streams,
        task: LocalTask,
        last: bool,
        pending: dict[str, float],
        in_flight: InFlight,
        trace: bool,
        speed: float = 1.0,
    ) -> None:
        self.streams, self.task, self.last, self.trace, self.speed = streams, task, last, trace, speed
        self.storage = streams.storage
        self.clock = self.exposed = self.compute = self.communication = self.flops = 0.0
        self.issued = 0  # ops and collectives that the host has handed to the device
        self.outgoing = 0.0  # time at which messages to other meshes have been sent
        # collectives under way, as in `InFlight`
        self.ends, self.busy = dict(in_flight.ends), dict(in_flight.busy)
        self.transfers, self.carrier = dict(in_flight.transfers), dict(in_flight.carriers)
        self.channels, self.latest = dict(in_flight.channels), dict(in_flight.latest)
        self.served = dict(in_flight.served)
        slots, producers = streams.storage.slots, streams.program.graph.producers
        self.foreign = {
            slots[value.name].root: name for name in in_flight.ends for value in producers[name].results
        }  # memory -> value of another task's collective
        self.pending = {
            slots[value.name].root: end for name, end in pending.items() for value in producers[name].results
        }
        self.sends: dict[str, float] = {}
        self.wire: dict[str, float] = {}
        self.linked: dict[str, float] = {}
        self.spans: list[Span] = []

    def time(self, postponed: Sequence[LocalTask] = ()) -> TaskTime:
        for task in postponed:
            self._reduce(self.streams.reductions(task))
        later = self.streams.postpones(self.task)
        for step in self.streams.steps(self.task):
            local = step.local
            if local.tail and (not self.last or (later and local.mode != "send")):
                continue
            self._wait_for(step.waits)
            if (self.pending or self.foreign) and local.mode != "recv":
                self._wait_for_other_tasks(local)
            self._execute(step)
        self._wait_for(self.storage.waits.get((self.task.name, len(self.task.ops)), ()))
        phase = self.streams.program.parts.phase
        late: dict[str, float] = {}
        for name in () if self.streams.hands_on(self.task) else self.storage.late[self.task.name]:
            if name in self.ends:
                if phase[name] == 2 and self.task.per_micro:
                    work = self.busy.pop(name)
                    self._wait(self.clock + work, work)
                    late[name] = self.ends[name]
                else:
                    self._receive(name)
        update = self.streams.ops.update(self.task) / self.speed
        self.clock += update
        self.compute += update
        forward = self.task.kind == "forward" and self.task.per_micro
        self.clock = self.streams.host.end_of_task(self.clock, self.issued, micro_batch=forward)
        remaining = {value: max(0.0, end - self.clock) for value, end in late.items()}
        return TaskTime(
            self.clock,
            self.compute,
            self.exposed,
            self.communication,
            self.flops,
            self.wire,
            self.linked,
            self.sends,
            remaining,
            self._in_flight(),
            tuple(self.spans),
        )

    def _in_flight(self) -> InFlight:
        """What is under way at the end of the task, for later tasks."""
        own = self.storage.late[self.task.name] if self.streams.hands_on(self.task) else ()
        names = {*self.foreign.values(), *own}
        ends = {name: end for name, end in self.ends.items() if name in names}
        busy = {name: self.busy[name] for name in ends}
        transfers = {name: self.transfers[name] for name in ends if name in self.transfers}
        carriers = {name: self.carrier[name] for name in ends}
        left = InFlight(ends, busy, carriers, self.channels, self.latest, self.served, transfers)
        return left.after(self.clock)

    def _reduce(self, reductions: Sequence[_PricedOp]) -> None:
        """Run the reductions of gradients of another task to their end."""
        for step in reductions:
            self._wait_for(step.waits)
            self._execute(step)
        self._wait_for(tuple(self.ends))

    def _wait_for_other_tasks(self, local: LocalOp) -> None:
        slots = self.storage.slots
        for root in [slots[value.name].root for value in local.op.operands if value.name in slots]:
            self._wait(self.pending.pop(root, 0.0))
            self._wait_for((self.foreign.pop(root, ""),))

    def _wait_for(self, values: tuple[str, ...]) -> None:
        for value in values:
            if value in self.ends:
                self._receive(value)

    def _receive(self, name: str) -> None:
        work = self.busy.pop(name)
        self.transfers.pop(name, None)
        self._wait(max(self.ends.pop(name), self.clock + work), work)

    def _wait(self, end: float, work: float = 0.0) -> None:
        """Wait until `end`; for `work` of these seconds the device works for the collective it waits for."""
        if end <= self.clock:
            return
        idle = end - self.clock - work
        for name, left in self.busy.items():
            done = min(left, max(0.0, idle))
            self.busy[name] -= done
            idle -= done
        self.exposed += end - self.clock
        self.clock = end

    def _work_during_transfers(self) -> None:
        """Do the work for transfers between machines that is due, which delays what follows."""
        for name, transfer in self.transfers.items():
            if left := self.busy.get(name):
                due = work_due(transfer, self.ends[name], left, self.clock)
                self.busy[name] -= due
                self.exposed += due
                self.clock += due

    def _execute(self, step: _PricedOp) -> None:
        local = step.local
        if step.loop is not None:
            self._run_loop(local, step.loop)
            return
        if step.message is not None:
            if step.seconds:
                seconds = step.seconds / self.speed
                self._record_span("compute", local, self.clock, seconds)
                self.clock += seconds
                self.compute += seconds
                self._work_during_transfers()
            send = self._send if local.mode == "send" else self._communicate
            send(local, step.message)
            return
        if local.mode == "recv":
            self._handle_messages(len(local.attrs["recvs"]))
        seconds = step.seconds
        self.issued += step.issued
        if local.mode == "accumulate" and self.last:
            scaling, more = self.streams.ops.scaling(local)
            seconds += more
            self.issued += scaling.kind != "none"
        seconds /= self.speed
        if seconds:
            self._record_span("compute", local, self.clock, seconds)
        self.clock += seconds
        self.compute += seconds
        self.flops += step.work.flops if step.work.kind == "matmul" else 0.0
        self._work_during_transfers()

    def _run_loop(self, local: LocalOp, loop: TaskTime) -> None:
        """All turns of a loop, which waits for its own collectives."""
        compute = loop.compute / self.speed
        seconds = loop.seconds - loop.compute + compute
        self._record_span("compute", local, self.clock, seconds)
        self.clock += seconds
        self.compute += compute
        self.exposed += loop.exposed
        self.communication += loop.communication
        self.flops += loop.flops
        for counted, more in ((self.wire, loop.wire), (self.linked, loop.linked)):
            for link, amount in more.items():
                counted[link] = counted.get(link, 0.0) + amount
        self._work_during_transfers()

    def _send(self, local: LocalOp, message: Message) -> None:
        self._count_traffic(message)
        start = max(self.clock, self.outgoing, self.streams.host.issued(self.issued))
        self.outgoing = self.sends[local.op.name] = start + message.seconds
        self._record_span("send", local, start, message.seconds)
        self._handle_messages(len(local.attrs["sends"]))

    def _handle_messages(self, messages: int) -> None:
        seconds = self.streams.host.ends_of_messages(messages)
        self._wait(self.clock + seconds, seconds)

    def _communicate(self, local: LocalOp, message: Message) -> None:
        self._count_traffic(message)
        self.issued += bool(message.link)
        name, channel = local.op.name, self._channel(local, message)
        free = self.channels.get(channel, 0.0)
        start = max(self.clock, free)
        end = start + message.seconds + self._share_links(local, message, channel, start)
        begun, work = self.served[channel] if free > self.clock else (start, 0.0)
        self.served[channel] = begun, work + message.transfer
        self.communication += message.seconds
        self.channels[channel], self.latest[channel] = end - message.startup, local.op
        self.ends[name], self.carrier[name], self.busy[name] = end, channel, message.busy
        if message.between and message.busy:
            self.transfers[name] = start, message.busy
        self._record_span("communicate", local, start, end - start)
        if not self.streams.overlaps(self.task, local):
            self.busy[name] = 0.0
            self._wait(end)

    def _channel(self, local: LocalOp, message: Message) -> Channel:
        """That of its group; of an exchange, that of earlier exchanges over some of the same links."""
        group: tuple[int, ...] = local.attrs.get("group", ())
        if group:
            return message.link, group, 0
        exchanges = [channel for channel in self.channels if channel[0] == message.link and not channel[1]]
        contending = (channel for channel in exchanges if self._contend(channel, message.link, local.op))
        number = 1 + max((number for _, _, number in exchanges), default=-1)
        return next(contending, (message.link, group, number))

    def _share_links(self, local: LocalOp, message: Message, channel: Channel, start: float) -> float:
        """Seconds by which other channels on its links delay a communication, which delays them likewise.

        All that are under way get equal parts of the bandwidth. Each of the others delays it by what is left
        of that one, at most by its own seconds, and is delayed by as much. Delays by others that share no
        links with each other are at the same time.
        """
        others: list[list[tuple[Channel, float]]] = []  # those in one list use links together
        for other, free in self.channels.items():
            if other == channel or free <= start or not self._contend(other, message.link, local.op):
                continue
            op = self.latest[other]
            sharing = (each for each in others if any(self._contend(c, message.link, op) for c, _ in each))
            together = next(sharing, None)
            if together is None:
                others.append(together := [])
            together.append((other, free))
        delays = [0.0]
        for together in others:
            delay = 0.0
            for other, free in together:
                begun, work = self.served[other]
                left = free - start if len(together) == 1 else work * (free - start) / (free - begun)
                shared = min(message.transfer, left)
                delay += shared
                self._delay(other, start, shared)
            delays.append(delay)
        return max(delays)

    def _contend(self, channel: Channel, link: str, op: Op) -> bool:
        """Whether a communication over one kind of link uses links of the last one on a channel."""
        return channel[0] == link and self.streams.traffic.share_links(self.latest[channel], op)

    def _delay(self, channel: Channel, after: float, seconds: float) -> None:
        """Delay the collectives in progress on a channel, because another group uses part of the link."""
        self.channels[channel] += seconds
        for name, end in self.ends.items():
            if end > after and self.carrier[name] == channel:
                self.ends[name] = end + seconds
                begun, work = self.transfers.get(name, (0.0, 0.0))
                if begun > after:
                    self.transfers[name] = begun + seconds, work

    def _count_traffic(self, message: Message) -> None:
        if message.link:
            self.wire[message.link] = self.wire.get(message.link, 0.0) + message.wire
            self.linked[message.link] = self.linked.get(message.link, 0.0) + message.seconds

    def _record_span(self, stream: str, local: LocalOp, start: float, seconds: float) -> None:
        if self.trace:
            self.spans.append(Span(stream, local.op.name, local.op.kind, local.op.scope, start, seconds))
