"""Process groups: the ranks of a program, as one process that drives some of them sees them.

Without a launcher, one process drives all ranks, each on a thread that lives as long as the world; a world of
one rank needs no thread. Under MPI every process drives its own rank and all of them run the same script. So
all decisions of the engine depend on values that are equal on all processes; `share` and `gather` distribute
such values.
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
from distgraph.runtime.transport.mpi import MpiTransport
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
        """Whether a failure has ended these ranks, so that a new world may replace this one."""

    def transport(self, rank: int) -> Transport | None:
        """The transport of a local rank; None in a world of one rank."""

    def run(self, work: Callable[[int], Result]) -> dict[int, Result]:
        """Call `work(rank)` on every local rank at the same time; results by rank.

        Raises:
            RuntimeFault: a rank failed; its own exception is the cause.
        """

    def share(self, value: Any, owner: int) -> Any:
        """Broadcast a small picklable value from the process that drives rank `owner` to every process."""

    def gather(self, values: dict[int, Any]) -> dict[int, Any]:
        """Gather picklable values: given those of the local ranks, return those of all ranks, by rank."""

    def close(self) -> None:
        """End the ranks' threads."""

    @property
    def is_chief(self) -> bool:
        """Whether this process drives rank 0, which prints."""


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
        self._running = 0  # ranks that have not returned
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
        return self._transports[rank] if self._transports else None

    def run(self, work: Callable[[int], Result]) -> dict[int, Result]:
        if self._failed is not None:
            raise RuntimeFault(
                f"the ranks are stopping: {self._failed}; make a new Engine and load a checkpoint"
            )
        if not self._transports:
            return {0: work(0)}
        results: dict[int, Result] = {}
        first: tuple[int, BaseException] | None = None
        self._running = self.size
        try:
            for tasks in self._tasks:
                tasks.put(work)
            while self._running:
                rank, result, error = self._done.get()
                self._running -= 1
                results[rank] = result
                if error is not None and (first is None or _follows(first[1])):
                    first = rank, error
        except BaseException as error:  # Ctrl-C ends the ranks too
            self._failed = f"{type(error).__name__} in the main thread"
            self._transports[0].abort(error)
            self._wait_for_ranks()
            raise
        if first is not None:
            rank, failure = first
            self._failed = f"rank {rank} failed: {type(failure).__name__}: {failure}"
            if isinstance(failure, RuntimeFault):
                raise failure
            raise RuntimeFault(f"rank {rank} failed: {type(failure).__name__}: {failure}") from failure
        return dict(sorted(results.items()))

    def _wait_for_ranks(self) -> None:
        """Wait for ranks that are stopping, because they use memory of this process.

        After Ctrl-C, which comes at any moment, it may be unknown which of them have returned. So each rank
        is given one more function, which runs after all that it was given before.
        """
        deadline = time.monotonic() + time_limit(None)
        for tasks in self._tasks:
            reached = threading.Event()
            tasks.put(lambda rank, reached=reached: reached.set())
            if not reached.wait(max(0.0, deadline - time.monotonic())):
                return
        self._running = 0

    @property
    def ended(self) -> bool:
        return self._failed is not None and not self._running

    def share(self, value: Any, owner: int) -> Any:
        return value

    def gather(self, values: dict[int, Any]) -> dict[int, Any]:
        return values

    def close(self) -> None:
        self._finalizer()

    @property
    def is_chief(self) -> bool:
        return True


def _follows(error: BaseException) -> bool:
    """Whether an error means that a rank stopped only because another one had failed."""
    return isinstance(error, RuntimeFault) and error.__cause__ is not None


def _serve(
    transport: Transport,
    tasks: queue.SimpleQueue[Any],
    done: queue.SimpleQueue[tuple[int, Any, BaseException | None]],
) -> None:
    """Body of a rank's thread: run the functions in the queue until it holds None."""
    while (work := tasks.get()) is not None:
        try:
            done.put((transport.rank, work(transport.rank), None))
        except BaseException as error:  # noqa: BLE001 - the driving thread raises it again
            transport.abort(error)
            done.put((transport.rank, None, error))
        del work  # a function that has run must not keep its engine alive


def _share_cores(ranks: int) -> Any:
    """Limit the BLAS threads of every rank to its share of the cores."""
    cores = len(os.sched_getaffinity(0))
    return ThreadpoolController().limit(limits=max(1, cores // ranks))


def _end(tasks: list[queue.SimpleQueue[Any]], limits: Any) -> None:
    for queue_of_rank in tasks:
        queue_of_rank.put(None)
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
        return self._transport

    def run(self, work: Callable[[int], Result]) -> dict[int, Result]:
        """See `World`. An exception is raised unchanged; uncaught, it ends all ranks."""
        rank = self._transport.rank
        return {rank: work(rank)}

    def share(self, value: Any, owner: int) -> Any:
        return self._transport.broadcast_object(value, owner)

    def gather(self, values: dict[int, Any]) -> dict[int, Any]:
        parts = self._transport.gather_objects(values, 0)
        merged = {rank: value for part in parts or () for rank, value in part.items()}
        gathered: dict[int, Any] = self._transport.broadcast_object(merged, 0)
        return gathered

    def close(self) -> None:
        """See `World`. The transport serves the whole process and stays."""

    @property
    def is_chief(self) -> bool:
        return self._transport.rank == 0


def job_transport() -> MpiTransport | None:
    """The transport between the processes of an MPI job; None where this process is alone."""
    return current_transport() if ranks_of_job() > 1 else None


def is_chief() -> bool:
    """Whether this process prints: it is rank 0 of an MPI job, or not part of one."""
    transport = job_transport()
    return transport is None or transport.rank == 0


def enter(call: str) -> None:
    """Record a call that every process must make, such as "engine.save()"; see `transport/call_check.py`.

    A process that waits long and learns that another one is in a different call raises RuntimeFault.
    """
    transport = job_transport()
    if transport is not None:
        transport.enter(call)


@dataclass(frozen=True, slots=True)
class TransportKind:
    """A kind of transport between ranks; see `register_transport`."""

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
    """The world of this process: a registered one, MPI where a launcher started several, else threads.

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
