"""Ranks as processes: the MPI transport (mpi4py), host arrays.

Collectives are written as non-blocking sends and receives, which make progress whenever the rank starts or
waits for any operation, and between machines also while it computes (`ProgressThread`). The reasons:

* Order. Contributions are added by position in the group, so the bits equal those of the in-process
  transport, and 16-bit floats are sent as 16 bits but accumulated in f32 (MPI has no type for either).
* Deadlock. Making an MPI communicator for a group blocks. Without communicators per group, groups that
  overlap in any way may be used in any order. Messages of a group carry a tag made from its members.
* Speed. Ranks of unequal speed need not wait for each other at every collective. The latency is above that of
  MPI's own collectives (`benchmarks/HISTORY.md` has the figures).

A waiting rank polls with `sched_yield`: where there are more ranks than cores, polling without it delays
every message by milliseconds. After a while it sleeps between polls (`core_binding.Waiting`).

MPI must allow calls from several threads (MPI_THREAD_MULTIPLE); mpi4py asks for that. Without it, messages
move only while the rank calls the transport.

A failing rank informs the others over a communicator of its own, waits for their failure reports and ends
with exit code 1. The launcher ends the ranks that did not react.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from distgraph.errors import RuntimeFault, installing
from distgraph.runtime.job.losses import Loss, record_loss
from distgraph.runtime.job.processes import is_stopped
from distgraph.runtime.transport.call_check import (
    END,
    LISTEN_SECONDS,
    CallCheck,
    DepartedFault,
    different_calls,
)
from distgraph.runtime.transport.core_binding import CoreBinding, Waiting
from distgraph.runtime.transport.departed_ranks import Departures, Need
from distgraph.runtime.transport.mpi_collectives import TAG_BITS, Exchange, Steps
from distgraph.runtime.transport.mpi_failures import JobFailures
from distgraph.runtime.transport.mpi_operation import Operation, WithStatus
from distgraph.runtime.transport.process_arrangement import Arrangement
from distgraph.runtime.transport.progress_thread import ProgressThread
from distgraph.runtime.transport.transport import (
    Array,
    Group,
    Request,
    check_counts,
    check_own,
    check_reduction,
    flat,
    position_in,
    stretches,
    time_limit,
)
from distgraph.runtime.transport.watchdog import NO_ANSWER, Activity, ActivityRequest, report

_OBJECT: Final = 2  # tag on the control communicator


class MpiTransport:
    """One rank of an MPI job; see `distgraph.runtime.transport.transport.Transport`.

    Making one is collective over all ranks of `MPI.COMM_WORLD`.

    Args:
        limit: seconds without progress before a wait gives up; default DISTGRAPH_TIMEOUT or 60.
        job: directory in which the launcher's supervisors record the first failure (see `job_files.py`).
        arrange: (communicator of all processes) -> what this process is in the job, above all its rank; by
            default MPI's own numbers are the ranks. Collective.

    Attributes:
        arrangement: what `arrange` returned.

    Raises:
        RuntimeFault: mpi4py is not installed, or finds no MPI library.
    """

    def __init__(
        self,
        *,
        limit: float | None = None,
        job: Path | None = None,
        arrange: Callable[[Any], Arrangement] | None = None,
    ) -> None:
        self._mpi = _load_mpi()
        self._limit = time_limit(limit)
        world = self._mpi.COMM_WORLD
        self._wait_for_all_ranks(world)
        self.arrangement = Arrangement(int(world.Get_rank())) if arrange is None else arrange(world)
        if arrange is not None:
            world = world.Split(0, self.arrangement.rank)
        self._messages, self._collectives, self._control = world.Dup(), world.Dup(), world.Dup()
        self._activity = Activity()
        self._activities = ActivityRequest(self._mpi, self._control, self._activity)
        self._calls = world.Dup()
        self._call_check = CallCheck(self._mpi, self._calls)
        self._departures = Departures(self._mpi, self._control)
        self._failures = JobFailures(self._mpi, self._control, self._departures, job)
        self._rank, self._size = int(world.Get_rank()), int(world.Get_size())
        self._everyone: Group = tuple(range(self._size))
        self._latest: dict[Group, Operation] = {}
        self._pending: list[Operation] = []
        self._tests = 0
        self.lock = threading.RLock()
        self._thread = ProgressThread(self._advance_beside, self.lock)
        self._last_progress = time.monotonic()
        machine = world.Split_type(self._mpi.COMM_TYPE_SHARED)
        self.binding = CoreBinding(machine)
        self._processes = machine.allgather((self._rank, os.getpid()))  # of this machine
        machine.Free()
        self._near = frozenset(self.machine_ranks)
        self._exchange = Exchange(self._collectives, world.allgather(min(self._near)))
        threads = self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE
        self._unaided = self._near if threads else frozenset(self._everyone)  # peers
        self._waiting = Waiting.of(self.binding)

    @property
    def activity(self) -> Activity:
        return self._activity

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def machine_ranks(self) -> Group:
        """The ranks on the machine of this rank, which is one of them."""
        return tuple(rank for rank, _ in self._processes)

    def bind(self) -> None:
        """Bind this rank to its cores, where they are planned or shared; see `CoreBinding.bind`."""
        self.binding.bind(self.arrangement.share if self.arrangement.device_type == "cpu" else None)

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(self, buffer: Array, op: str, group: Group) -> Request:
        check_reduction(op, buffer.dtype, "all_reduce")
        steps = self._exchange.all_reduce(flat(buffer, "all_reduce"), op, group)
        return self._start_collective(f"all_reduce({op}) of {buffer.nbytes} bytes", steps, group)

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int], group: Group) -> Request:
        check_counts("all_gather", recv.size, counts, group)
        check_own("all_gather", send.size, counts, group, self.rank)
        steps = self._exchange.all_gather(flat(send, "all_gather"), flat(recv, "all_gather"), counts, group)
        return self._start_collective(f"all_gather of {recv.nbytes} bytes", steps, group)

    def reduce_scatter(
        self, send: Array, recv: Array, counts: Sequence[int], op: str, group: Group
    ) -> Request:
        check_reduction(op, send.dtype, "reduce_scatter")
        check_counts("reduce_scatter", send.size, counts, group)
        check_own("reduce_scatter", recv.size, counts, group, self.rank)
        source, target = flat(send, "reduce_scatter"), flat(recv, "reduce_scatter")
        steps = self._exchange.reduce_scatter(source, target, counts, op, group)
        return self._start_collective(f"reduce_scatter({op}) of {send.nbytes} bytes", steps, group)

    def all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Request:
        check_counts("all_to_all", send.size, send_counts, group)
        check_counts("all_to_all", recv.size, recv_counts, group)
        position = position_in(group, self.rank, "all_to_all")
        if send_counts[position] != recv_counts[position]:
            raise RuntimeFault(
                f"all_to_all: rank {self.rank} sends itself {send_counts[position]} elements but expects "
                f"{recv_counts[position]}; the counts for itself must be equal"
            )
        source, target = flat(send, "all_to_all"), flat(recv, "all_to_all")
        steps = self._exchange.all_to_all(
            source, target, stretches(send_counts), stretches(recv_counts), group
        )
        return self._start_collective(f"all_to_all of {send.nbytes} bytes", steps, group)

    def broadcast(self, buffer: Array, root: int, group: Group) -> Request:
        position_in(group, root, "broadcast")
        steps = self._exchange.broadcast(flat(buffer, "broadcast"), root, group)
        return self._start_collective(f"broadcast of {buffer.nbytes} bytes from rank {root}", steps, group)

    # -- messages ----------------------------------------------------------------------------------

    def send(self, buffer: Array, dest: int, tag: int) -> Request:
        self._check_peer("send", dest, tag)
        data = flat(buffer, "send")

        def steps() -> Steps:
            yield [self._messages.Isend(part, dest, tag) for part in self._exchange.parts(data, dest)]

        need = self._departures.message("send", "recv", dest)
        return self._start(
            f"{self._activity.message_text(tag)}send to rank {dest} (tag {tag}, {data.nbytes} bytes)",
            steps(),
            need,
            (dest,),
        )

    def recv(self, buffer: Array, source: int, tag: int) -> Request:
        self._check_peer("recv", source, tag)
        data = flat(buffer, "recv")
        what = f"{self._activity.message_text(tag)}recv from rank {source} (tag {tag}, {data.nbytes} bytes)"

        def steps() -> Steps:
            expected = self._exchange.parts(data, source)
            requests = [self._messages.Irecv(part, source, tag) for part in expected]
            for part, request in zip(expected, requests, strict=True):
                status = self._mpi.Status()
                yield [WithStatus(request, status)]
                if (received := status.Get_count(self._mpi.BYTE)) != part.size:
                    here = "" if len(expected) == 1 else f" as a part of {part.size}"
                    text = f"rank {self.rank}: {what} got {received} bytes{here}"
                    raise RuntimeFault(f"{text}; the ranks run different programs")

        return self._start(what, steps(), self._departures.message("recv", "send", source), (source,))

    def barrier(self, group: Group | None = None) -> None:
        members = self._everyone if group is None else group
        marks = np.zeros(len(members), np.uint8)
        mark = marks[position_in(members, self.rank, "barrier") :][:1].copy()
        steps = self._exchange.all_gather(mark, marks, [1] * len(members), members)
        self._start_collective("barrier", steps, members).wait()

    def gather_objects(self, obj: Any, root: int = 0) -> list[Any] | None:
        if self.rank != root:
            self._send_object(obj, root)
            return None
        return [obj if rank == root else self._receive_object(rank) for rank in range(self.size)]

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        if self.rank != root:
            return self._receive_object(root)
        for rank in range(self.size):
            if rank != root:
                self._send_object(obj, rank)
        return obj

    def enter(self, call: str) -> None:
        """Record a call that all ranks must make, such as "engine.save()"; see `CallCheck`."""
        self._call_check.enter(call)

    def leave(self) -> None:
        """Announce that this rank has reached the end of its script, and wait until all ranks have."""
        self.enter(END)
        self.progress()
        requests = [self._control.Ibarrier(), *self._departures.announce()]
        self.poll(lambda: self.test_all(requests, "end") and self._departures.all_received(), "end")
        self._call_check.discard()
        self._thread.stop()

    # -- progress, failure, end --------------------------------------------------------------------

    def progress(self) -> None:
        """Let all started operations make progress without blocking; raise if another rank failed."""
        with self.lock:
            self._failures.check()
            for failed in self._advance_all():
                self.forget(failed)
                failed.advance()  # raises its error

    def _advance_all(self) -> list[Operation]:
        """Advance all started operations and forget those that are finished. Returns those that failed."""
        for operation in self._pending:
            with contextlib.suppress(Exception):  # the operation keeps it
                operation.advance()
        self._pending = [operation for operation in self._pending if not operation.finished]
        return [operation for operation in self._pending if operation.ended]

    def _advance_beside(self) -> bool:
        """Advance all started operations while the rank computes. Returns whether it helps to go on."""
        self._advance_all()
        return any(operation.far and not operation.ended for operation in self._pending)

    def forget(self, operation: Operation) -> None:
        """Advance an operation no more."""
        self._pending = [other for other in self._pending if other is not operation]

    def tested(self) -> None:
        """Note a test of an operation that is not complete: every 16th makes all others go on."""
        self._tests += 1
        if self._tests % 16 == 0:
            self.progress()

    def poll(self, ready: Callable[[], bool], what: str, need: Need | None = None) -> None:
        """Wait until `ready()`, while all started operations make progress. All waits come here.

        Args:
            ready: whether the wait is over.
            what: text of the operation that is waited for.
            need: what another rank has to do for it.

        Raises:
            RuntimeFault: another rank failed, has departed or is in another call, or the time limit passed.
        """
        begun = time.monotonic()
        polls, polls_per_nap = 0, 16
        while not ready():
            polls += 1
            if polls % polls_per_nap == 0:
                now = time.monotonic()
                if now - begun > self._waiting.polling_seconds:
                    polls_per_nap = self._waiting.polls_per_nap
                    time.sleep(self._waiting.nap_seconds(now - max(begun, self._last_progress)))
                self.progress()
                if now - begun > LISTEN_SECONDS:
                    self._activity.waiting = what
                    self._activities.answer()
                    self._check_departed(what, need)
                    self._call_check.verify(now - begun)
                if now - max(begun, self._last_progress) > self._limit:
                    raise RuntimeFault(self._no_progress(what))
            os.sched_yield()
        self._activity.waiting = ""

    def _check_departed(self, what: str, need: Need | None) -> None:
        """Raise `DepartedFault` if this rank waits for an operation of a rank that has departed."""
        rank = self._departures.missing_rank(need)
        if rank is None:
            return
        if self._call_check.call:
            raise DepartedFault(different_calls({self._call_check.call: [self._rank], END: [rank]}))
        raise DepartedFault(
            f"rank {self._rank}: {what} waits for rank {rank}, which has come to {END}; make the same calls "
            "on every rank"
        )

    def _no_progress(self, what: str) -> str:
        missing = ", ".join(map(str, self._call_check.missing))
        absent = f"; not in {self._call_check.call}: rank {missing}" if missing else ""
        error = f"rank {self.rank}: {what} made no progress in {self._limit:g} s{absent}"
        stopped = {
            rank: f"rank {rank} (process {pid}) is stopped"
            for rank, pid in self._processes
            if is_stopped(pid)
        }
        if stopped:
            for rank, text in stopped.items():
                record_loss(Loss(text, rank))
            return f"{error}; {', '.join(stopped.values())}"
        advice = "look for a rank that does not take part, or raise DISTGRAPH_TIMEOUT"
        self._activity.waiting = what
        activities = self._activities.ask()
        for rank, text in activities.items():
            if text == NO_ANSWER:
                record_loss(Loss(f"rank {rank} has not answered for {self._limit:g} s", rank))
        return f"{error}; {advice}{report(activities)}"

    def test_all(self, requests: list[Any], what: str) -> bool:
        """Whether all MPI requests are complete; a failure of MPI becomes a `RuntimeFault`."""
        try:
            if isinstance(requests[0], WithStatus):
                complete = requests[0].request.Test(requests[0].status)
            else:
                complete = self._mpi.Request.Testall(requests)
        except self._mpi.Exception as error:
            raise RuntimeFault(
                f"rank {self.rank}: {what}: MPI says {error.Get_error_string()!r}; "
                "the ranks run different programs"
            ) from error
        if complete:
            self._last_progress = time.monotonic()
        return bool(complete)

    @property
    def failed_elsewhere(self) -> bool:
        """Whether another rank failed first, as far as this rank knows."""
        return self._failures.elsewhere

    def abort(self, error: BaseException) -> NoReturn:
        """Send an error to the other ranks and end this process; see `JobFailures.abort`."""
        self._failures.abort(error)

    def follow(self, code: int, seconds: float) -> NoReturn:
        """Acknowledge the failure of another rank and end this process; see `JobFailures.follow`."""
        self._failures.follow(code, seconds)

    def finalize(self) -> None:
        """End MPI; collective."""
        self._thread.stop()
        if not self._mpi.Is_finalized():
            self._mpi.Finalize()

    def close(self) -> None:
        """Cancel unfinished operations and free the communicators; collective."""
        self._thread.stop()
        for operation in self._pending:
            for request in operation.requests:
                (request.request if isinstance(request, WithStatus) else request).Cancel()
        self._pending.clear()
        for comm in (self._messages, self._collectives, self._control, self._calls):
            if comm != self._mpi.COMM_NULL:
                comm.Free()

    def _wait_for_all_ranks(self, world: Any) -> None:
        """Wait for all ranks, with the time limit, before calls of MPI that have none."""
        request, deadline = world.Ibarrier(), time.monotonic() + self._limit
        while not request.Test():
            if time.monotonic() > deadline:
                raise RuntimeFault(
                    f"rank {world.Get_rank()}: not all ranks have started distgraph in {self._limit:g} s; "
                    "look for a rank that has ended before, or raise DISTGRAPH_TIMEOUT"
                )
            time.sleep(1e-4)

    # -- bookkeeping -------------------------------------------------------------------------------

    def _start(
        self, what: str, steps: Steps, need: Need, peers: Group, previous: Operation | None = None
    ) -> Operation:
        """Start an operation with peers; the thread helps those that are on other machines."""
        with self.lock:
            self.progress()
            far = not self._unaided.issuperset(peers)
            operation = Operation(self, what, steps, previous, need, far=far)
            if not operation.advance():
                self._pending.append(operation)
                if far:
                    self._thread.wake()
        return operation

    def _start_collective(self, what: str, steps: Steps, group: Group) -> Operation:
        need, previous = self._departures.collective(group), self._latest.get(group)
        self._latest[group] = self._start(what, steps, need, group, previous)
        return self._latest[group]

    def _check_peer(self, what: str, peer: int, tag: int) -> None:
        if not 0 <= peer < self.size:
            raise RuntimeFault(f"{what}: rank {peer} is not one of the {self.size} ranks")
        if not 0 <= tag < 1 << TAG_BITS:
            raise RuntimeFault(f"{what}: tag {tag} is not in 0 .. 2**{TAG_BITS} - 1")

    def _send_object(self, obj: Any, dest: int) -> None:
        labelled = (self._call_check.call, obj)
        request = self._control.Isend(bytearray(pickle.dumps(labelled)), dest, _OBJECT)
        need = self._departures.message("object", "received object", dest)
        self.poll(lambda: self.test_all([request], "object"), f"object for rank {dest}", need)

    def _receive_object(self, source: int) -> Any:
        status = self._mpi.Status()
        need = self._departures.message("received object", "object", source)
        what = f"object from rank {source}"
        self.poll(lambda: bool(self._control.Iprobe(source, _OBJECT, status)), what, need)
        data = bytearray(status.Get_count(self._mpi.BYTE))
        request = self._control.Irecv(data, source, _OBJECT)  # a large object may still stop on its way
        self.poll(lambda: self.test_all([request], what), what, need)
        call, obj = pickle.loads(bytes(data))
        if call != self._call_check.call:
            raise RuntimeFault(
                different_calls({self._call_check.call or "none": [self.rank], call or "none": [source]})
            )
        return obj


def _load_mpi() -> Any:
    """The module mpi4py.MPI. Importing it initialises MPI, so it is imported when a transport is made."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise RuntimeFault(
            f"mpi transport: mpi4py cannot be loaded ({error}); install it with: {installing('mpi')}"
        ) from error
