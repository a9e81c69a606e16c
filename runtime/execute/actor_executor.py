"""The executor of actors: a rank runs what its mesh decides from what has arrived.

The first rank of each mesh, its leader, drives the actors of the mesh (`schedule/actor_group.py`) by real
events, and sends its decisions to the other ranks, which carry them out in the same order; so all agree on
the order of collectives. `program/actor_limits.py` has the reasons why no order runs out of buffers or waits
for ever.

    event                              how the leader learns of it
    data have arrived                  its own receives are complete, tested without waiting; where it
                                       receives nothing of an edge, a signal from the leader of the source
    a buffer at a receiver is free     a signal from the leader of the receiver that its receives are posted
    a task of its mesh has finished    it has run it

A signal is a message of one number between two leaders, and a decision one of a few numbers from a leader to
each rank of its mesh: receives to post, then the task to run. A mesh of one rank sends no decisions, and a
program of no more micro-batches than may be alive no signals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from distgraph.passes.partition import RankProgram
from distgraph.runtime.schedule.actor_group import ActorPlan, GroupActors, Instance, Pair
from distgraph.runtime.transport.collectives import Handle
from distgraph.runtime.transport.transport import Request, Transport

_FIRST_TAG: Final = (1 << 28) - 2 - (1 << 20)
"""Tags of decisions and signals start here, above those of the messages of programs."""
_NOTHING: Final = -1

Act = Callable[[str, int], None]
"""Runs a task, or posts its receives, for one micro-batch."""


class ActorExecutor:
    """Runs the tasks of one rank, except updates, as its mesh decides.

    Args:
        plan: the plan of all actors.
        program: the program of the rank.
        pending: (value, micro-batch) -> handle of a started receive.
        transport: of the program; None where there is one rank.
        control: for decisions and signals, which are host arrays; may be `transport`.
    """

    def __init__(
        self,
        plan: ActorPlan,
        program: RankProgram,
        pending: Mapping[tuple[str, int], Handle],
        transport: Transport | None,
        control: Transport | None,
    ) -> None:
        self._plan, self._rank, self._pending = plan, program.rank, pending
        self._transport, self._control = transport, control
        self._names = [task.name for task in plan.graph.tasks]
        self._number = {name: number for number, name in enumerate(self._names)}
        self._micro = plan.graph.micro_batches
        place = next((i for i, ranks in enumerate(plan.groups) if program.rank in ranks), None)
        self._group = place
        self._ranks = () if place is None else plan.groups[place]
        task_names = () if place is None else plan.tasks_of(place)
        self._runs = sum(plan.graph.instances(plan.graph.task(name)) for name in task_names)
        crossing = [(e.source, e.target) for e in plan.graph.edges if plan.crossing(e)]
        self._edge_number = {edge: number for number, edge in enumerate(crossing)}
        self._incoming = [edge for edge in crossing if edge[1] in task_names]
        self._unseen_out = [e for e in crossing if e[0] in task_names and e in plan.unseen]
        self._width = 1 + len({target for _, target in self._incoming})  # numbers of a decision
        self._received: dict[Pair, list[str]] = {edge: [] for edge in self._incoming}
        for task in program.tasks:
            for local in task.ops if task.name in task_names else ():
                if local.mode == "recv" and local.attrs["recvs"]:
                    edge = program.parts.transfers[local.op.name]
                    self._received[edge].append(local.op.result.name)
        self._credits_out = self._credits_of(task_names)
        self._sent: list[tuple[Request, np.ndarray]] = []
        self._signals: list[_Signal] = []

    def _credits_of(self, task_names: tuple[str, ...]) -> dict[str, list[tuple[int, int]]]:
        """Receiving task of this mesh -> (leader of senders, for how many micro-batches it gets signals)."""
        plan, credits = self._plan, dict[str, list[tuple[int, int]]]()
        for target in sorted({target for _, target in self._incoming}):
            senders = sorted({plan.group_of[s] for s, t in self._incoming if t == target})
            counts = ((plan.groups[group][0], plan.credits(target, group)) for group in senders)
            credits[target] = [(leader, count) for leader, count in counts if count > 0]
        return credits

    def run(self, run: Act, post: Act) -> None:
        """Run all tasks of the step but the updates.

        Raises:
            RuntimeFault: another rank failed, or nothing moved for the transport's time limit.
        """
        if self._group is None:
            return
        if self._rank == self._ranks[0]:
            self._lead(GroupActors(self._plan, self._group), run, post)
        else:
            self._follow(run, post)
        for request, _ in self._sent:
            self._wait(request.done, "a decision or signal to be received")
        self._sent.clear()

    # -- the leader --------------------------------------------------------------------------------

    def _lead(self, actors: GroupActors, run: Act, post: Act) -> None:
        arrived = dict.fromkeys(self._incoming, 0)
        self._signals = self._expected_signals(actors, arrived)
        unannounced: list[Instance] = []  # receives that the other ranks do not know of yet
        while not actors.all_finished:
            for name, micro in actors.new_posts():
                post(name, micro)
                unannounced.append((name, micro))
                for leader, count in self._credits_out[name]:
                    if micro < count:
                        self._send(leader, self._credit_tag(name), micro)
            self._events(actors, arrived)
            chosen = actors.choose()
            if chosen is None:
                self._tell(unannounced, None)
                self._wait(lambda: self._events(actors, arrived), actors.waiting())
                continue
            self._tell(unannounced, chosen)
            run(*chosen)
            actors.finished()
            self._announce(*chosen)

    def _events(self, actors: GroupActors, arrived: dict[Pair, int]) -> bool:
        """Deliver what has happened. Returns whether something has."""
        some = False
        for signal in self._signals:
            some |= signal.deliver()
        for edge, names in self._received.items():
            source, target = edge
            while names and arrived[edge] < actors.posted[target]:
                micro = arrived[edge]
                if not all(self._pending[name, micro].done() for name in names):
                    break
                arrived[edge] = micro + 1
                actors.arrived(source, target, micro)
                some = True
        return some

    def _expected_signals(self, actors: GroupActors, arrived: dict[Pair, int]) -> list[_Signal]:
        """The signals that this leader gets in a step, in the order of their streams."""
        plan, control, signals = self._plan, self._control, list[_Signal]()
        assert self._group is not None
        for target in sorted({target for _, target in plan.limits.across}):
            count = plan.credits(target, self._group) if plan.group_of[target] != self._group else 0
            if count > 0:
                leader, tag = plan.ranks_of(target)[0], self._credit_tag(target)
                signals.append(_Signal(control, leader, tag, count, _Posted(actors, target)))
        for edge in self._incoming:
            if edge in plan.unseen:
                source, target = edge
                count = min(plan.graph.instances(plan.graph.task(name)) for name in edge)
                leader, tag = plan.ranks_of(source)[0], self._arrival_tag(edge)
                signals.append(_Signal(control, leader, tag, count, _Arrived(actors, edge)))
        return signals

    def _tell(self, posts: list[Instance], chosen: Instance | None) -> None:
        """Send a decision to the other ranks of the mesh, and forget the posts."""
        followers, room = self._ranks[1:], self._width - 1
        while followers and (posts or chosen is not None):
            now, posts[:room] = posts[:room], []
            decision = np.full(self._width, _NOTHING, np.int64)
            decision[1 : 1 + len(now)] = [self._code(instance) for instance in now]
            if not posts and chosen is not None:
                decision[0], chosen = self._code(chosen), None
            for rank in followers:
                self._send_array(rank, _FIRST_TAG, decision)
        posts.clear()

    def _announce(self, name: str, micro: int) -> None:
        """Tell the leaders that cannot see it that what this task sends is under way."""
        for edge in self._unseen_out:
            source, target = edge
            once = self._plan.graph.instances(self._plan.graph.task(target)) == 1
            last = micro == self._plan.graph.instances(self._plan.graph.task(source)) - 1
            if source == name and (last or not once):
                self._send(self._plan.ranks_of(target)[0], self._arrival_tag(edge), 0 if once else micro)

    # -- the other ranks ---------------------------------------------------------------------------

    def _follow(self, run: Act, post: Act) -> None:
        assert self._control is not None
        decision = np.empty(self._width, np.int64)
        left = self._runs
        while left:
            request = self._control.recv(decision, self._ranks[0], _FIRST_TAG)
            self._wait(request.done, f"a decision of rank {self._ranks[0]}")
            codes = decision.tolist()
            for code in codes[1:]:
                if code != _NOTHING:
                    post(*self._instance(code))
            if codes[0] != _NOTHING:
                run(*self._instance(codes[0]))
                left -= 1

    # -- messages ----------------------------------------------------------------------------------

    def _code(self, instance: Instance) -> int:
        return self._number[instance[0]] * self._micro + instance[1]

    def _instance(self, code: int) -> Instance:
        number, micro = divmod(code, self._micro)
        return self._names[number], micro

    def _credit_tag(self, target: str) -> int:
        return _FIRST_TAG + 1 + self._number[target]

    def _arrival_tag(self, edge: Pair) -> int:
        return _FIRST_TAG + 1 + len(self._names) + self._edge_number[edge]

    def _send(self, rank: int, tag: int, number: int) -> None:
        self._send_array(rank, tag, np.array([number], np.int64))

    def _send_array(self, rank: int, tag: int, numbers: np.ndarray) -> None:
        assert self._control is not None
        self._sent.append((self._control.send(numbers, rank, tag), numbers))

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        if not ready():
            assert self._transport is not None, f"one rank waits for {what}"
            self._transport.poll(ready, what)


class _Posted:
    """Delivers that a task elsewhere has posted its receives."""

    def __init__(self, actors: GroupActors, target: str) -> None:
        self._actors, self._target = actors, target

    def __call__(self, micro: int) -> bool:
        self._actors.receives_posted(self._target, micro)
        return True


class _Arrived:
    """Delivers that data are under way; False while the receives of these data have not been posted here."""

    def __init__(self, actors: GroupActors, edge: Pair) -> None:
        self._actors, self._edge = actors, edge

    def __call__(self, micro: int) -> bool:
        if micro >= self._actors.posted[self._edge[1]]:
            return False
        self._actors.arrived(*self._edge, micro)
        return True


class _Signal:
    """Signals of one kind from one leader, in the order of micro-batches.

    Args:
        control: receives them.
        source: the leader.
        tag: their tag.
        count: how many come in a step.
        deliver: what is done with the number of a signal; returns whether that was possible already.
    """

    def __init__(
        self, control: Transport | None, source: int, tag: int, count: int, deliver: Callable[[int], bool]
    ) -> None:
        assert control is not None
        self._control, self._source, self._tag, self._count = control, source, tag, count
        self._deliver = deliver
        self._number = np.empty(1, np.int64)
        self._request: Request | None = None
        self._receive()

    def _receive(self) -> None:
        self._request = None
        if self._count:
            self._count -= 1
            self._request = self._control.recv(self._number, self._source, self._tag)

    def deliver(self) -> bool:
        """Deliver the signals that have arrived. Returns whether there was one."""
        some = False
        while self._request is not None and self._request.done() and self._deliver(int(self._number[0])):
            some = True
            self._receive()
        return some
