"""Ranks as threads of one process: the transport behind `python train.py` with no launcher.

The ranks share memory. Each member of a collective contributes its buffers and goes on; the last one to start
the collective does the whole work, in the order of the group, and wakes the members that wait. So no member
depends on the waits of another one, and nothing but the result is copied. A message is copied from the
sender's buffer to the receiver's by the one of the two ranks that comes second.

With arrays on a GPU that the ranks share, the rank that does the work makes its stream wait for the work that
the streams of the others had at their start of the collective, and a rank that waits for the result makes its
stream wait for that work (`Order`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from distgraph.errors import RuntimeFault
from distgraph.runtime.transport.transport import (
    Array,
    Group,
    Order,
    Request,
    check_counts,
    check_own,
    check_reduction,
    flat,
    position_in,
    reduce_in_order,
    stretches,
    time_limit,
)
from distgraph.runtime.transport.watchdog import Activity, report

_Work = Callable[[list[Any]], None]


@dataclass(slots=True)
class _Failure:
    rank: int
    error: BaseException


class _Finished(threading.Event):
    """Set when the work is done. On a GPU it is set when the work is launched; `mark` is its end."""

    mark: Any = None


@dataclass(slots=True)
class _Collective:
    """A started collective: the contributions by position in the group, and the event that ends it."""

    what: str
    signature: object
    contributions: dict[int, Any] = field(default_factory=dict)
    finished: _Finished = field(default_factory=_Finished)
    marks: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class _Post:
    """A send or a receive whose counterpart has not been posted yet."""

    buffer: Array
    finished: _Finished = field(default_factory=_Finished)
    mark: Any = None


class _World:
    """State that the ranks share. The lock protects the tables; copies and reductions happen outside it."""

    def __init__(self, size: int, limit: float) -> None:
        self.size = size
        self.limit = limit
        self.lock = threading.Lock()
        self.collectives: dict[tuple[Group, int], _Collective] = {}
        self.posts: dict[tuple[int, int, int], tuple[deque[_Post], deque[_Post]]] = {}
        self.waiting: set[threading.Event] = set()
        self.activities = {rank: Activity() for rank in range(size)}
        self.failure: _Failure | None = None
        self.last_progress = time.monotonic()
        self.changed = threading.Condition()
        self.changes = 0  # counted while there are watchers: ranks in `poll`
        self.watchers = 0

    def finish(self, event: threading.Event) -> None:
        self.last_progress = time.monotonic()
        event.set()
        if self.watchers:
            self.notify()

    def notify(self) -> None:
        """Wake the ranks in `poll`."""
        with self.changed:
            self.changes += 1
            self.changed.notify_all()

    def fail(self, rank: int, error: BaseException) -> None:
        """Record the first failure and wake every waiting rank."""
        with self.lock:
            if self.failure is None:
                self.failure = _Failure(rank, error)
            for event in self.waiting:
                event.set()
        self.notify()

    def raise_failure(self, rank: int) -> None:
        failure = self.failure
        if failure is not None:
            cause = f"rank {failure.rank} failed: {type(failure.error).__name__}: {failure.error}"
            raise RuntimeFault(f"{cause}; rank {rank} stops too") from failure.error

    def seconds_left(self, rank: int, what: str, begun: float) -> float:
        """Seconds until a wait that began at `begun` has made no progress for the time limit.

        Raises:
            RuntimeFault: it has.
        """
        left = self.limit - (time.monotonic() - max(begun, self.last_progress))
        if left <= 0:
            raise RuntimeFault(
                f"rank {rank}: {what} made no progress in {self.limit:g} s; look for a rank "
                "that does not take part, or raise DISTGRAPH_TIMEOUT"
                + report({other: str(activity) for other, activity in self.activities.items()})
            )
        return left


class _InProcessRequest:
    __slots__ = ("_event", "_transport", "_what")

    def __init__(self, transport: InProcessTransport, event: _Finished, what: str) -> None:
        self._transport, self._event, self._what = transport, event, what

    def done(self) -> bool:
        self._transport.progress()
        return self._event.is_set()

    def wait(self) -> None:
        world = self._transport._world
        if not self._event.is_set() or world.failure is not None:
            with world.lock:
                world.waiting.add(self._event)
            activity = self._transport.activity
            activity.waiting = self._what
            try:
                self._block()
                activity.waiting = ""
            finally:
                with world.lock:
                    world.waiting.discard(self._event)
        order = self._transport._order
        if order is not None and self._event.mark is not None:
            order.after(self._event.mark)

    def _block(self) -> None:
        world, rank = self._transport._world, self._transport.rank
        world.raise_failure(rank)
        begun = time.monotonic()
        while not self._event.wait(world.seconds_left(rank, self._what, begun)):
            pass
        world.raise_failure(rank)


class InProcessTransport:
    """One of several ranks that are threads of this process; see `Transport`. Made by `connect`."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._collectives_started: dict[Group, int] = {}
        self._order: Order | None = None

    def order_by(self, order: Order) -> None:
        """Order this rank's work on a GPU by `order`; from now on its arrays are on that GPU."""
        self._order = order

    @property
    def activity(self) -> Activity:
        return self._world.activities[self._rank]

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._world.size

    def all_reduce(self, buffer: Array, op: str, group: Group) -> Request:
        check_reduction(op, buffer.dtype, "all_reduce")
        mine = flat(buffer, "all_reduce")

        def work(contributions: list[Array]) -> None:
            reduce_in_order(contributions, op, contributions[0])
            for other in contributions[1:]:
                other[...] = contributions[0]

        return self._start(f"all_reduce({op})", group, (op, mine.size, mine.dtype), mine, work)

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int], group: Group) -> Request:
        check_counts("all_gather", recv.size, counts, group)
        check_own("all_gather", send.size, counts, group, self.rank)
        places = stretches(counts)

        def work(contributions: list[tuple[Array, Array]]) -> None:
            for _, target in contributions:
                for (source, _), place in zip(contributions, places, strict=True):
                    target[place] = source

        pair = (flat(send, "all_gather"), flat(recv, "all_gather"))
        return self._start("all_gather", group, (tuple(counts), recv.dtype), pair, work)

    def reduce_scatter(
        self, send: Array, recv: Array, counts: Sequence[int], op: str, group: Group
    ) -> Request:
        check_reduction(op, send.dtype, "reduce_scatter")
        check_counts("reduce_scatter", send.size, counts, group)
        check_own("reduce_scatter", recv.size, counts, group, self.rank)
        places = stretches(counts)

        def work(contributions: list[tuple[Array, Array]]) -> None:
            for (_, target), place in zip(contributions, places, strict=True):
                reduce_in_order([source[place] for source, _ in contributions], op, target)

        pair = (flat(send, "reduce_scatter"), flat(recv, "reduce_scatter"))
        return self._start(f"reduce_scatter({op})", group, (op, tuple(counts), send.dtype), pair, work)

    def all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Request:
        check_counts("all_to_all", send.size, send_counts, group)
        check_counts("all_to_all", recv.size, recv_counts, group)

        def work(contributions: list[tuple[Array, Array, list[slice], list[slice]]]) -> None:
            for i, (_, target, _, into) in enumerate(contributions):
                for j, (source, _, out_of, _) in enumerate(contributions):
                    sent, expected = out_of[i].stop - out_of[i].start, into[j].stop - into[j].start
                    if sent != expected:
                        raise RuntimeFault(
                            f"all_to_all: rank {group[j]} sends {sent} elements to rank {group[i]}, which "
                            f"expects {expected}; the ranks run different programs"
                        )
                    target[into[j]] = source[out_of[i]]

        item = (
            flat(send, "all_to_all"),
            flat(recv, "all_to_all"),
            stretches(send_counts),
            stretches(recv_counts),
        )
        return self._start("all_to_all", group, send.dtype, item, work)

    def broadcast(self, buffer: Array, root: int, group: Group) -> Request:
        first = position_in(group, root, "broadcast")
        mine = flat(buffer, "broadcast")

        def work(contributions: list[Array]) -> None:
            for position, target in enumerate(contributions):
                if position != first:
                    target[...] = contributions[first]

        return self._start("broadcast", group, (root, mine.size, mine.dtype), mine, work)

    def send(self, buffer: Array, dest: int, tag: int) -> Request:
        what = f"{self.activity.message_text(tag)}send to rank {dest} (tag {tag})"
        return self._post(0, (self.rank, dest, tag), flat(buffer, "send"), what)

    def recv(self, buffer: Array, source: int, tag: int) -> Request:
        what = f"{self.activity.message_text(tag)}recv from rank {source} (tag {tag})"
        return self._post(1, (source, self.rank, tag), flat(buffer, "recv"), what)

    def barrier(self, group: Group | None = None) -> None:
        self._start(
            "barrier", self._everyone() if group is None else group, None, None, lambda _: None
        ).wait()

    def gather_objects(self, obj: Any, root: int = 0) -> list[Any] | None:
        gathered: list[Any] = []

        def work(contributions: list[tuple[Any, list[Any]]]) -> None:
            contributions[root][1].extend(item for item, _ in contributions)

        self._start("gather_objects", self._everyone(), root, (obj, gathered), work).wait()
        return gathered if self.rank == root else None

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        box: list[Any] = []

        def work(contributions: list[tuple[Any, list[Any]]]) -> None:
            for _, target in contributions:
                target.append(contributions[root][0])

        self._start("broadcast_object", self._everyone(), root, (obj, box), work).wait()
        return box[0]

    def progress(self) -> None:
        self._world.raise_failure(self.rank)

    def poll(self, ready: Callable[[], bool], what: str) -> None:
        world, activity, begun = self._world, self.activity, time.monotonic()
        with world.changed:
            world.watchers += 1
        activity.waiting = what
        try:
            while True:
                world.raise_failure(self.rank)
                changes = world.changes  # what happens from here on is not missed
                if ready():
                    break
                left = world.seconds_left(self.rank, what, begun)
                with world.changed:
                    if world.changes == changes:
                        world.changed.wait(left)
            activity.waiting = ""
        finally:
            with world.changed:
                world.watchers -= 1

    def abort(self, error: BaseException) -> None:
        self._world.fail(self.rank, error)

    def close(self) -> None:
        self._collectives_started.clear()

    def _everyone(self) -> Group:
        return tuple(range(self.size))

    def _start(self, what: str, group: Group, signature: object, contribution: Any, work: _Work) -> Request:
        """Take part in the next collective of a group; the last member does the `work`.

        Args:
            what: name of the collective.
            group: its members.
            signature: facts that must be equal on all members.
            contribution: buffers of this member.
            work: called with the contributions in the order of the group.
        """
        self.progress()
        position = position_in(group, self.rank, what)
        number = self._collectives_started.get(group, 0)
        self._collectives_started[group] = number + 1
        world, key = self._world, (group, number)
        mark = None if self._order is None else self._order.mark()
        with world.lock:
            collective = world.collectives.setdefault(key, _Collective(what, signature))
            collective.contributions[position] = contribution
            if mark is not None:
                collective.marks.append(mark)
            last = len(collective.contributions) == len(group)
            if last:
                del world.collectives[key]
        if (collective.what, collective.signature) != (what, signature):
            raise RuntimeFault(
                f"collective {number} of group {group}: rank {self.rank} started {what} {signature} but "
                f"another member {collective.what} {collective.signature}; the ranks run different programs"
            )
        if last:
            with self._in_order(collective.marks, collective.finished):
                work([collective.contributions[i] for i in range(len(group))])
            world.finish(collective.finished)
        return _InProcessRequest(self, collective.finished, f"{what} in group {group}")

    @contextmanager
    def _in_order(self, marks: Sequence[Any], *finished: _Finished) -> Iterator[None]:
        """Order the GPU work of the body after the events `marks`, and record its end in `finished`."""
        order = self._order
        if order is None:
            yield
            return
        for mark in marks:
            order.after(mark)
        yield
        end = order.mark()
        for event in finished:
            event.mark = end

    def _post(self, side: int, key: tuple[int, int, int], buffer: Array, what: str) -> Request:
        """Post a send (side 0) or a receive (side 1); copy at once when the counterpart is there already."""
        self.progress()
        peer = key[1] if side == 0 else key[0]
        if not 0 <= peer < self.size:
            raise RuntimeFault(f"{what}: there are only {self.size} ranks")
        world, post = self._world, _Post(buffer)
        if self._order is not None:
            post.mark = self._order.mark()
        with world.lock:
            queues = world.posts.setdefault(key, (deque(), deque()))
            counterpart = queues[1 - side].popleft() if queues[1 - side] else None
            if counterpart is None:
                queues[side].append(post)
            elif not queues[1 - side]:
                del world.posts[key]
        if counterpart is not None:
            source, target = (post, counterpart) if side == 0 else (counterpart, post)
            if (source.buffer.size, source.buffer.dtype) != (target.buffer.size, target.buffer.dtype):
                raise RuntimeFault(
                    f"{what}: {source.buffer.size} x {source.buffer.dtype} are sent but "
                    f"{target.buffer.size} x {target.buffer.dtype} expected; the ranks run different programs"
                )
            with self._in_order(
                [counterpart.mark] if counterpart.mark is not None else [],
                counterpart.finished,
                post.finished,
            ):
                target.buffer[...] = source.buffer
            world.finish(counterpart.finished)
            world.finish(post.finished)
        return _InProcessRequest(self, post.finished, what)


def connect(size: int, *, limit: float | None = None) -> list[InProcessTransport]:
    """Transports of `size` ranks of this process, in rank order, each to be used by its own thread.

    Args:
        limit: seconds without progress before a wait gives up; default DISTGRAPH_TIMEOUT or 60.

    Raises:
        RuntimeFault: `size` is below 1, or the limit is no positive number.
    """
    if size < 1:
        raise RuntimeFault(f"in-process transport: got {size} ranks, expected at least 1")
    world = _World(size, time_limit(limit))
    return [InProcessTransport(world, rank) for rank in range(size)]
