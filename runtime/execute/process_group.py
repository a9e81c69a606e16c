"""Worlds: where the ranks of a program live, seen by the one process that drives them.

In-process, one process drives all ranks, each on a thread of its own that lives as long as the world; a world
of one rank needs no thread. Under MPI every process drives its own rank and all of them run the same script,
so whatever the engine decides, it decides from values that all processes know: `share` and `gather` are how
they come to know them.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from threadpoolctl import ThreadpoolController

from distgraph.errors import ResourceError, RuntimeFault
from distgraph.runtime.launch.mpi_rank import current_transport, ranks_of_job
from distgraph.runtime.transport.inprocess import connect
from distgraph.runtime.transport.transport import Transport, time_limit

Result = TypeVar("Result")


class World(Protocol):
    """The ranks of a job.

    Attributes:
        size: number of ranks.
        local: ranks that this process drives, ascending.
    """

    size: int
    local: tuple[int, ...]

    @property
    def ended(self) -> bool:
        """Whether a failure has ended these ranks and others may take their place."""

    def transport(self, rank: int) -> Transport | None:
        """Connection of a local rank; None in a world of one."""

    def run(self, work: Callable[[int], Result]) -> dict[int, Result]:
        """Call `work(rank)` on every local rank at the same time; results by rank.

        Raises:
            RuntimeFault: a rank failed; its own exception is the cause.
        """

    def share(self, value: Any, owner: int) -> Any:
        """The small picklable `value` of the process that drives rank `owner`, on every process."""

    def gather(self, values: dict[int, Any]) -> dict[int, Any]:
        """Picklable values of the local ranks -> those of all ranks, on every process."""

    def close(self) -> None:
        """End the ranks' threads."""

    @property
    def is_chief(self) -> bool:
        """Whether this process drives rank 0, the one that prints."""


class InProcessWorld:
    """Ranks as threads of this process. See `World`.

    Args:
        size: number of ranks.
        connect: number of ranks -> their transports, in rank order; by default those of this process.
    """

    def __init__(self, size: int, connect: Callable[[int], Sequence[Transport]] = connect) -> None:
        self.size = size
        self.local = tuple(range(size))
        self._transports = connect(size) if size > 1 else ()
        self._failed: str | None = None
        self._at_work = 0  # ranks that have not reported
        self._tasks: list[queue.SimpleQueue[Any]] = []
        self._done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        for transport in self._transports:
            tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._tasks.append(tasks)
            arguments = (transport, tasks, self._done)
            threading.Thread(
                target=_serve, args=arguments, name=f"rank-{transport.rank}", daemon=True
            ).start()
        self._limits = _share_cores(size) if size > 1 else None
        self._finalizer = weakref.finalize(self, _end, self._tasks, self._limits)

    def transport(self, rank: int) -> Transport | None:
        """See `World`."""
        return self._transports[rank] if self._transports else None

    def run(self, work: Callable[[int], Result]) -> dict[int, Result]:
        """See `World`."""
        if self._failed is not None:
            raise RuntimeFault(
                f"the ranks are stopping: {self._failed}; make a new Engine and load a checkpoint"
            )
        if not self._transports:
            return {0: work(0)}
        results: dict[int, Result] = {}
        first: tuple[int, BaseException] | None = None
        self._at_work = self.size
        try:
            for tasks in self._tasks:
                tasks.put(work)
            while self._at_work:
                rank, result, error = self._done.get()
                self._at_work -= 1
                results[rank] = result
                if error is not None and (first is None or _follows(first[1])):
                    first = rank, error
        except BaseException as error:  # Ctrl-C: take the ranks along
            self._failed = f"{type(error).__name__} in the main thread"
            self._transports[0].abort(error)
            self._await_ranks()
            raise
        if first is not None:
            rank, failure = first
            self._failed = f"rank {rank} failed: {type(failure).__name__}: {failure}"
            if isinstance(failure, RuntimeFault):
                raise failure
            raise RuntimeFault(f"rank {rank} failed: {type(failure).__name__}: {failure}") from failure
        return dict(sorted(results.items()))

    def _await_ranks(self) -> None:
        """Wait for ranks that have been told to stop: they use memory that is not theirs alone.

        Which of them have reported may be unknown, for Ctrl-C comes at any moment. So each gets one more
        piece of work, which is behind whatever it has been given.
        """
        deadline = time.monotonic() + time_limit(None)
        for tasks in self._tasks:
            reached = threading.Event()
            tasks.put(lambda rank, reached=reached: reached.set())
            if not reached.wait(max(0.0, deadline - time.monotonic())):
                return
        self._at_work = 0

    @property
    def ended(self) -> bool:
        """See `World`."""
        return self._failed is not None and not self._at_work

    def share(self, value: Any, owner: int) -> Any:
        """See `World`."""
        return value

    def gather(self, values: dict[int, Any]) -> dict[int, Any]:
        """See `World`."""
        return values

    def close(self) -> None:
        """See `World`."""
        self._finalizer()

    @property
    def is_chief(self) -> bool:
        """See `World`."""
        return True


def _follows(error: BaseException) -> bool:
    """Whether a rank stopped only because another one had failed."""
    return isinstance(error, RuntimeFault) and error.__cause__ is not None


def _serve(
    transport: Transport,
    tasks: queue.SimpleQueue[Any],
    done: queue.SimpleQueue[tuple[int, Any, BaseException | None]],
) -> None:
    """Life of a rank's thread: run what comes, until None comes."""
    while (work := tasks.get()) is not None:
        try:
            done.put((transport.rank, work(transport.rank), None))
        except BaseException as error:  # noqa: BLE001 - the driving thread raises it again
            transport.abort(error)
            done.put((transport.rank, None, error))
        del work  # what a rank has run must not keep its engine alive


def _share_cores(ranks: int) -> Any:
    """Give every rank's BLAS its share of the cores."""
    cores = len(os.sched_getaffinity(0))
    return ThreadpoolController().limit(limits=max(1, cores // ranks))


def _end(tasks: list[queue.SimpleQueue[Any]], limits: Any) -> None:
    for each in tasks:
        each.put(None)
    if limits is not None:
        limits.restore_original_limits()


class MpiWorld:
    """This process is one rank of an MPI job. See `World`."""

    ended = False  # a failure ends the process

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.size = transport.size
        self.local: tuple[int, ...] = (transport.rank,)

    def transport(self, rank: int) -> Transport | None:
        """See `World`."""
        return self._transport

    def run(self, work: Callable[[int], Result]) -> dict[int, Result]:
        """See `World`. An exception goes up as it is: nobody catches it, and it ends all ranks."""
        rank = self._transport.rank
        return {rank: work(rank)}

    def share(self, value: Any, owner: int) -> Any:
        """See `World`."""
        return self._transport.broadcast_object(value, owner)

    def gather(self, values: dict[int, Any]) -> dict[int, Any]:
        """See `World`."""
        parts = self._transport.gather_objects(values, 0)
        merged = {rank: value for part in parts or () for rank, value in part.items()}
        found: dict[int, Any] = self._transport.broadcast_object(merged, 0)
        return found

    def close(self) -> None:
        """See `World`. The transport serves the whole process and stays."""

    @property
    def is_chief(self) -> bool:
        """See `World`."""
        return self._transport.rank == 0


def is_chief() -> bool:
    """Whether this process prints: rank 0 of an MPI job, or alone."""
    transport = current_transport() if ranks_of_job() > 1 else None
    return transport is None or transport.rank == 0


def enter(call: str) -> None:
    """Note a call that every process must make, such as "engine.save()"; see
    `distgraph.runtime.transport.call_check`.

    One process drives all ranks, or every process makes the same calls: one that waits long and learns that
    another is in a different call raises RuntimeFault.
    """
    transport = current_transport() if ranks_of_job() > 1 else None
    if transport is not None:
        transport.enter(call)


@dataclass(frozen=True, slots=True)
class TransportKind:
    """A kind of transport between ranks.

    Attributes:
        name: its name.
        applies: whether this process is to use it.
        make: (number of ranks that the program needs, the meshes in words) -> the world of this process.
    """

    name: str
    applies: Callable[[], bool]
    make: Callable[[int, str], World]


_TRANSPORTS: dict[str, TransportKind] = {}


def register_transport(
    name: str, make: Callable[[int, str], World], applies: Callable[[], bool] = lambda: True
) -> None:
    """Declare a transport. Of those that apply, programs use the one that was declared last.

    Args:
        name: its name.
        make: (number of ranks that the program needs, the meshes in words) -> the world of this process, such
            as `InProcessWorld(ranks, connect)` or `MpiWorld(transport)`.
        applies: whether this process is to use it, such as whether its launcher has started the process.

    Raises:
        RuntimeFault: the name is taken.
    """
    if name in _TRANSPORTS:
        raise RuntimeFault(f"transport {name} is declared twice; choose another name")
    _TRANSPORTS[name] = TransportKind(name, applies, make)


def make_world(ranks: int, meshes: str) -> World:
    """The world of this process: MPI where a launcher started several, else threads, or what is registered.

    Args:
        ranks: how many the program needs.
        meshes: the meshes in words, for the error.

    Raises:
        ResourceError: the job has fewer ranks.
    """
    kinds = reversed(list(_TRANSPORTS.values()))
    return next(kind for kind in kinds if kind.applies()).make(ranks, meshes)


def _mpi_world(ranks: int, meshes: str) -> World:
    transport = current_transport()
    assert transport is not None
    if ranks > transport.size:
        raise ResourceError(
            f"{meshes} needs {ranks} ranks but the MPI job has {transport.size}; start it with distgraph run "
            f"-n {ranks}, or use a smaller mesh"
        )
    return MpiWorld(transport)


register_transport("threads", lambda ranks, meshes: InProcessWorld(ranks))
register_transport("mpi", _mpi_world, lambda: ranks_of_job() > 1)
