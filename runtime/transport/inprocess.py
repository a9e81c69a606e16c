"""Ranks as threads of one process: the transport behind `python train.py` with no launcher.

The ranks see each other's arrays, so a collective is a *meeting*: each member leaves its buffers and goes
on; the last one to arrive does the whole work, by group position, and wakes the others. No member depends on
another one's waits, and nothing is copied but the result. A message goes from the sender's buffer straight
into the receiver's, by whichever of the two comes second.

Arrays on a GPU that the ranks share: the one who does the work first makes its stream wait for what the
others' streams had been given when they came, and who waits for the result makes its stream wait for that
work (`Order`).
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from distgraph.errors import RuntimeFault
from distgraph.runtime.transport.transport import (
    Array,
    Group,
    Order,
    Request,
    check_counts,
    check_reduction,
    flat,
    position_in,
    reduce_in_order,
    stretches,
    time_limit,
)
from distgraph.runtime.transport.watchdog import Place, report

Result = TypeVar("Result")
_Work = Callable[[list[Any]], None]


@dataclass(slots=True)
class _Failure:
    rank: int
    error: BaseException


class _Finish(threading.Event):
    """Set when the work is done, or on a GPU launched: then `mark` is where it ends."""

    mark: Any = None


@dataclass(slots=True)
class _Meeting:
    """One collective: what each member brought, and the event that ends it."""

    what: str
    terms: object
    brought: dict[int, Any] = field(default_factory=dict)
    finished: _Finish = field(default_factory=_Finish)
    marks: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class _Post:
    """A send or a receive that waits for its counterpart."""

    buffer: Array
    finished: _Finish = field(default_factory=_Finish)
    mark: Any = None


class _World:
    """What the ranks share. The lock guards the tables; copies and reductions happen outside it."""

    def __init__(self, size: int, limit: float) -> None:
        self.size = size
        self.limit = limit
        self.lock = threading.Lock()
        self.meetings: dict[tuple[Group, int], _Meeting] = {}
        self.posts: dict[tuple[int, int, int], tuple[deque[_Post], deque[_Post]]] = {}
        self.waiting: set[threading.Event] = set()
        self.places = {rank: Place() for rank in range(size)}
        self.failure: _Failure | None = None
        self.last_progress = time.monotonic()

    def finish(self, event: threading.Event) -> None:
        self.last_progress = time.monotonic()
        event.set()

    def fail(self, rank: int, error: BaseException) -> None:
        """Record the first failure and wake every waiting rank."""
        with self.lock:
            if self.failure is None:
                self.failure = _Failure(rank, error)
            for event in self.waiting:
                event.set()

    def raise_failure(self, rank: int) -> None:
        failure = self.failure
        if failure is not None:
            raise RuntimeFault(_describe(failure) + f"; rank {rank} stops too") from failure.error


def _describe(failure: _Failure) -> str:
    return f"rank {failure.rank} failed: {type(failure.error).__name__}: {failure.error}"


class _InProcessRequest:
    __slots__ = ("_event", "_transport", "_what")

    def __init__(self, transport: InProcessTransport, event: _Finish, what: str) -> None:
        self._transport, self._event, self._what = transport, event, what

    def done(self) -> bool:
        self._transport.progress()
        return self._event.is_set()

    def wait(self) -> None:
        world = self._transport._world
        if not self._event.is_set() or world.failure is not None:
            with world.lock:
                world.waiting.add(self._event)
            place = self._transport.place
            place.waiting = self._what
            try:
                self._block()
                place.waiting = ""
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
        while True:
            idle = time.monotonic() - max(begun, world.last_progress)
            if self._event.wait(max(world.limit - idle, 0.0)):
                break
            if time.monotonic() - max(begun, world.last_progress) >= world.limit:
                raise RuntimeFault(
                    f"rank {rank}: {self._what} made no progress in {world.limit:g} s; look for a rank "
                    "that does not take part, or raise DISTGRAPH_TIMEOUT"
                    + report({other: str(place) for other, place in world.places.items()})
                )
        world.raise_failure(rank)


class InProcessTransport:
    """One rank of a world of threads; see the protocol `Transport`. Made by `connect`."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._meetings_held: dict[Group, int] = {}
        self._order: Order | None = None

    def order_by(self, order: Order) -> None:
        """From now on arrays are those of a GPU, and this rank's work is ordered by `order`."""
        self._order = order

    @property
    def place(self) -> Place:
        return self._world.places[self._rank]

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._world.size

    def all_reduce(self, buffer: Array, op: str, group: Group) -> Request:
        check_reduction(op, buffer.dtype, "all_reduce")
        mine = flat(buffer, "all_reduce")

        def work(brought: list[Array]) -> None:
            reduce_in_order(brought, op, brought[0])
            for other in brought[1:]:
                other[...] = brought[0]

        return self._meet(f"all_reduce({op})", group, (op, mine.size, mine.dtype), mine, work)

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int], group: Group) -> Request:
        check_counts("all_gather", recv.size, counts, group)
        self._check_own("all_gather", send.size, counts, group)
        places = stretches(counts)

        def work(brought: list[tuple[Array, Array]]) -> None:
            for _, target in brought:
                for (source, _), place in zip(brought, places, strict=True):
                    target[place] = source

        pair = (flat(send, "all_gather"), flat(recv, "all_gather"))
        return self._meet("all_gather", group, (tuple(counts), recv.dtype), pair, work)

    def reduce_scatter(
        self, send: Array, recv: Array, counts: Sequence[int], op: str, group: Group
    ) -> Request:
        check_reduction(op, send.dtype, "reduce_scatter")
        check_counts("reduce_scatter", send.size, counts, group)
        self._check_own("reduce_scatter", recv.size, counts, group)
        places = stretches(counts)

        def work(brought: list[tuple[Array, Array]]) -> None:
            for (_, target), place in zip(brought, places, strict=True):
                reduce_in_order([source[place] for source, _ in brought], op, target)

        pair = (flat(send, "reduce_scatter"), flat(recv, "reduce_scatter"))
        return self._meet(f"reduce_scatter({op})", group, (op, tuple(counts), send.dtype), pair, work)

    def all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Request:
        check_counts("all_to_all", send.size, send_counts, group)
        check_counts("all_to_all", recv.size, recv_counts, group)

        def work(brought: list[tuple[Array, Array, list[slice], list[slice]]]) -> None:
            for i, (_, target, _, into) in enumerate(brought):
                for j, (source, _, out_of, _) in enumerate(brought):
                    have, want = out_of[i].stop - out_of[i].start, into[j].stop - into[j].start
                    if have != want:
                        raise RuntimeFault(
                            f"all_to_all: rank {group[j]} sends {have} elements to rank {group[i]}, which "
                            f"expects {want}; the ranks run different programs"
                        )
                    target[into[j]] = source[out_of[i]]

        item = (
            flat(send, "all_to_all"),
            flat(recv, "all_to_all"),
            stretches(send_counts),
            stretches(recv_counts),
        )
        return self._meet("all_to_all", group, send.dtype, item, work)

    def broadcast(self, buffer: Array, root: int, group: Group) -> Request:
        first = position_in(group, root, "broadcast")
        mine = flat(buffer, "broadcast")

        def work(brought: list[Array]) -> None:
            for position, target in enumerate(brought):
                if position != first:
                    target[...] = brought[first]

        return self._meet("broadcast", group, (root, mine.size, mine.dtype), mine, work)

    def send(self, buffer: Array, dest: int, tag: int) -> Request:
        what = f"{self.place.message(tag)}send to rank {dest} (tag {tag})"
        return self._post(0, (self.rank, dest, tag), flat(buffer, "send"), what)

    def recv(self, buffer: Array, source: int, tag: int) -> Request:
        what = f"{self.place.message(tag)}recv from rank {source} (tag {tag})"
        return self._post(1, (source, self.rank, tag), flat(buffer, "recv"), what)

    def barrier(self, group: Group | None = None) -> None:
        self._meet("barrier", self._everyone() if group is None else group, None, None, lambda _: None).wait()

    def gather_objects(self, obj: Any, root: int = 0) -> list[Any] | None:
        gathered: list[Any] = []

        def work(brought: list[tuple[Any, list[Any]]]) -> None:
            brought[root][1].extend(item for item, _ in brought)

        self._meet("gather_objects", self._everyone(), root, (obj, gathered), work).wait()
        return gathered if self.rank == root else None

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        box: list[Any] = []

        def work(brought: list[tuple[Any, list[Any]]]) -> None:
            for _, target in brought:
                target.append(brought[root][0])

        self._meet("broadcast_object", self._everyone(), root, (obj, box), work).wait()
        return box[0]

    def progress(self) -> None:
        self._world.raise_failure(self.rank)

    def abort(self, error: BaseException) -> None:
        self._world.fail(self.rank, error)

    def close(self) -> None:
        self._meetings_held.clear()

    def _everyone(self) -> Group:
        return tuple(range(self.size))

    def _check_own(self, what: str, have: int, counts: Sequence[int], group: Group) -> None:
        want = counts[position_in(group, self.rank, what)]
        if have != want:
            raise RuntimeFault(f"{what}: rank {self.rank} holds {have} elements but its count is {want}")

    def _meet(self, what: str, group: Group, terms: object, item: Any, work: _Work) -> Request:
        """Join the next meeting of `group`; the last to arrive does the `work` on what all brought."""
        self.progress()
        position = position_in(group, self.rank, what)
        number = self._meetings_held.get(group, 0)
        self._meetings_held[group] = number + 1
        world, key = self._world, (group, number)
        mark = None if self._order is None else self._order.mark()
        with world.lock:
            meeting = world.meetings.setdefault(key, _Meeting(what, terms))
            meeting.brought[position] = item
            if mark is not None:
                meeting.marks.append(mark)
            last = len(meeting.brought) == len(group)
            if last:
                del world.meetings[key]
        if (meeting.what, meeting.terms) != (what, terms):
            raise RuntimeFault(
                f"collective {number} of group {group}: rank {self.rank} started {what} {terms} but another "
                f"member {meeting.what} {meeting.terms}; the ranks run different programs"
            )
        if last:
            with self._in_order(meeting.marks, meeting.finished):
                work([meeting.brought[i] for i in range(len(group))])
            world.finish(meeting.finished)
        return _InProcessRequest(self, meeting.finished, f"{what} in group {group}")

    @contextmanager
    def _in_order(self, marks: Sequence[Any], *finished: _Finish) -> Iterator[None]:
        """Work inside happens after the marks, and `finished` says where it ends."""
        order = self._order
        if order is None:
            yield
            return
        for mark in marks:
            order.after(mark)
        yield
        end = order.mark()
        for each in finished:
            each.mark = end

    def _post(self, side: int, key: tuple[int, int, int], buffer: Array, what: str) -> Request:
        """Post a send (side 0) or a receive (side 1); copy at once when the counterpart is there already."""
        self.progress()
        peer = key[1] if side == 0 else key[0]
        if not 0 <= peer < self.size:
            raise RuntimeFault(f"{what}: there are only {self.size} ranks")
        world, mine = self._world, _Post(buffer)
        if self._order is not None:
            mine.mark = self._order.mark()
        with world.lock:
            queues = world.posts.setdefault(key, (deque(), deque()))
            other = queues[1 - side].popleft() if queues[1 - side] else None
            if other is None:
                queues[side].append(mine)
            elif not queues[1 - side]:
                del world.posts[key]
        if other is not None:
            source, target = (mine, other) if side == 0 else (other, mine)
            if (source.buffer.size, source.buffer.dtype) != (target.buffer.size, target.buffer.dtype):
                raise RuntimeFault(
                    f"{what}: {source.buffer.size} x {source.buffer.dtype} are sent but "
                    f"{target.buffer.size} x {target.buffer.dtype} expected; the ranks run different programs"
                )
            with self._in_order(
                [other.mark] if other.mark is not None else [], other.finished, mine.finished
            ):
                target.buffer[...] = source.buffer
            world.finish(other.finished)
            world.finish(mine.finished)
        return _InProcessRequest(self, mine.finished, what)


def connect(size: int, *, limit: float | None = None) -> list[InProcessTransport]:
    """Transports of `size` ranks of this process, in rank order, each to be used by its own thread.

    Args:
        limit: seconds without progress before a wait gives up; default DISTGRAPH_TIMEOUT or 60.

    Raises:
        RuntimeFault: `size` < 1 or a senseless limit.
    """
    if size < 1:
        raise RuntimeFault(f"in-process world of {size} ranks; it needs at least 1")
    world = _World(size, time_limit(limit))
    return [InProcessTransport(world, rank) for rank in range(size)]


def run_ranks(
    size: int, fn: Callable[[InProcessTransport], Result], *, limit: float | None = None
) -> list[Result]:
    """Run `fn(transport)` on `size` ranks, one thread each, and join them all.

    Returns: what each rank returned, in rank order.

    Raises:
        RuntimeFault: a rank raised. The message names the first to fail; its exception, with its traceback,
        is the
            `__cause__`, so Python prints it first. The other ranks stop at their next transport call.

    Example:
        >>> run_ranks(3, lambda t: t.broadcast_object(t.rank * 10, root=2))
        [20, 20, 20]
    """
    transports = connect(size, limit=limit)
    world = transports[0]._world
    results: list[Any] = [None] * size

    def body(transport: InProcessTransport) -> None:
        try:
            results[transport.rank] = fn(transport)
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it again
            transport.abort(error)

    threads = [
        threading.Thread(target=body, args=(t,), name=f"rank-{t.rank}", daemon=True) for t in transports
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C in the caller: take the ranks along
        world.fail(-1, error)
        for thread in threads:
            thread.join(world.limit)
        raise
    if world.failure is not None:
        raise RuntimeFault(_describe(world.failure)) from world.failure.error
    return results


def format_failure(fault: RuntimeFault) -> str:
    """Traceback of the rank that failed, then the house error in one line."""
    origin = "".join(traceback.format_exception(fault.__cause__)) if fault.__cause__ else ""
    return f"{origin}error: {fault}"
