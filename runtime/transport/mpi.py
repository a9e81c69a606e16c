"""Ranks as processes: the MPI transport (mpi4py), host arrays.

Collectives are written out as non-blocking sends and receives, driven on whenever the rank starts or waits
for anything. Three reasons:

* Order. Contributions are added by position in the group, so the bits equal those of the in-process
  transport, and 16-bit floats travel as 16 bits but are accumulated in f32 (MPI has no type for either).
* Deadlock. There are no communicators per group, whose creation blocks: groups that overlap in any way may
  be used in any order. Messages of a group carry a tag made from its members.
* Speed. MPICH 5.0.2 (ch4:ucx), 2 ranks on 2 cores, 4 MiB f32, medians. One all_reduce: Allreduce 379 us,
  Iallreduce 375 us, Ialltoall + add + Iallgather 423 us, this exchange in bare mpi4py 287 us.
  Eight of them, each started behind two products of 0.5 GFLOP, all waited for at the end:

      products alone                              80.2 ms      another run, on a busy machine: 170 ms
      Allreduce behind each                       86.3 ms      333 ms
      Iallreduce, Waitall                         92.4 ms      210 ms
      this exchange, hand-written mpi4py          86.1 ms      183 ms
      this transport                              86.2 ms      (1.002 of hand-written)

  So what counts is to be able to wait late: ranks of unequal speed need not meet 8 times. A progress thread
  (blocking Allreduce, or this exchange, in a second thread) did not help where ranks = cores, for it takes
  the core or the interpreter lock from BLAS: 163 and 179 ms against 162 ms without, on the quiet machine.
  The price is latency: 4 bytes take 10 us from start to result, in MPI's Allreduce 3 us.

Waiting polls with `sched_yield`: where there are more ranks than cores a bare spin costs 5 to 20 ms per
message (4 ranks on 2 cores), a yielding one tens of us.

A failing rank tells the others over a communicator of its own, waits for their last words, then leaves with
exit code 1; whatever launched the ranks ends those that did not listen.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from distgraph.errors import RuntimeFault, installing
from distgraph.runtime.job.deadline import end_mpiexec
from distgraph.runtime.job.job_files import FAILURE_REPORT_SECONDS, exit_code, observed_failure
from distgraph.runtime.job.processes import is_stopped, shared_memory
from distgraph.runtime.transport.call_check import (
    END,
    LISTEN_SECONDS,
    DepartedFault,
    RollCall,
    different_calls,
)
from distgraph.runtime.transport.departure import Departures, Need
from distgraph.runtime.transport.mpi_collectives import TAG_BITS, Exchange, Steps, octets
from distgraph.runtime.transport.mpi_operation import Operation, WithStatus
from distgraph.runtime.transport.transport import (
    Array,
    Group,
    Request,
    check_counts,
    check_reduction,
    flat,
    position_in,
    stretches,
    time_limit,
)
from distgraph.runtime.transport.watchdog import Inquiry, Place, report

_FAILURE, _ACKNOWLEDGE, _OBJECT = 0, 1, 2  # tags of the control communicator
_JOB_LOOK_SECONDS: Final = 0.01


class MpiTransport:
    """One rank of an MPI job; see `distgraph.runtime.transport.transport.Transport`.

    Making one is collective over `comm`: every rank must.

    Args:
        comm: an mpi4py intracommunicator; default `MPI.COMM_WORLD`.
        limit: seconds without progress before a wait gives up; default DISTGRAPH_TIMEOUT or 60.
        job: directory in which the launcher's supervisors record the first failure (see
        `distgraph.runtime.launch.mpi_rank`).

    Raises:
        RuntimeFault: mpi4py is not installed, or finds no MPI library.
    """

    def __init__(self, comm: Any = None, *, limit: float | None = None, job: Path | None = None) -> None:
        self._mpi = _load_mpi()
        self._limit = time_limit(limit)
        world = self._mpi.COMM_WORLD if comm is None else comm
        # The rank to answer to, where it can listen, and what happened.
        self._failure: tuple[int | None, str] | None = None
        self._meet_first(world)
        self._messages, self._collectives, self._control = world.Dup(), world.Dup(), world.Dup()
        self._where = Place()
        self._inquiry = Inquiry(self._mpi, self._control, self._where)
        self._calls = world.Dup()
        self._roll = RollCall(self._mpi, self._calls)
        self._departures = Departures(self._mpi, self._control)
        self._status = self._mpi.Status()  # of the probe that every start makes
        self._exchange = Exchange(self._collectives)
        self._rank, self._size = int(world.Get_rank()), int(world.Get_size())
        self._everyone: Group = tuple(range(self._size))
        self._latest: dict[Group, Operation] = {}
        self._pending: list[Operation] = []
        self._sends: list[Any] = []  # messages about the end
        self._job = job
        self._looked = time.monotonic()
        self._last_progress = time.monotonic()
        here = world.Split_type(self._mpi.COMM_TYPE_SHARED)
        self._place, self._cores = int(here.Get_rank()), here.allgather(os.sched_getaffinity(0))
        self._processes = here.allgather((self._rank, os.getpid()))  # of this machine
        here.Free()
        self.bound = False
        # With a core per rank a long wait may spin; with fewer the rank that is waited for wants the core.
        self._patience = 0.001 if self.share > 1 else 0.02

    @property
    def place(self) -> Place:
        return self._where

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def share(self) -> float:
        """Ranks that a core of this machine computes in turns, from 1 up, wherever each of them may run."""
        return max(1.0, len(self._cores) / len(set().union(*self._cores)))

    def bind(self) -> None:
        """Keep this rank on one core where equally many ranks share each, neighbours on the same.

        Left alone, the kernel places ranks anew in every job, and which of them share a core decides what
        they pay for messages: an all_reduce of 1 MiB by two pairs at once takes 0.4 ms where each pair has a
        core, 0.4 to 1.6 ms across two cores. What a profile has measured holds for a later job only where
        the places are the same. Nothing changes where somebody else has placed ranks, or with
        `DISTGRAPH_BIND=0`. `bound` tells.
        """
        cores, ranks = sorted(self._cores[0]), len(self._cores)
        placed = any(own != self._cores[0] for own in self._cores)
        if placed or self.share == 1 or ranks % len(cores) or os.environ.get("DISTGRAPH_BIND") == "0":
            return
        with contextlib.suppress(OSError):  # not allowed here
            os.sched_setaffinity(0, {cores[self._place * len(cores) // ranks]})
            self.bound = True

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(self, buffer: Array, op: str, group: Group) -> Request:
        check_reduction(op, buffer.dtype, "all_reduce")
        steps = self._exchange.all_reduce(flat(buffer, "all_reduce"), op, group)
        return self._start_collective(f"all_reduce({op}) of {buffer.nbytes} bytes", steps, group)

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int], group: Group) -> Request:
        check_counts("all_gather", recv.size, counts, group)
        self._check_own("all_gather", send.size, counts, group)
        steps = self._exchange.all_gather(flat(send, "all_gather"), flat(recv, "all_gather"), counts, group)
        return self._start_collective(f"all_gather of {recv.nbytes} bytes", steps, group)

    def reduce_scatter(
        self, send: Array, recv: Array, counts: Sequence[int], op: str, group: Group
    ) -> Request:
        check_reduction(op, send.dtype, "reduce_scatter")
        check_counts("reduce_scatter", send.size, counts, group)
        self._check_own("reduce_scatter", recv.size, counts, group)
        source, target = flat(send, "reduce_scatter"), flat(recv, "reduce_scatter")
        steps = self._exchange.reduce_scatter(source, target, counts, op, group)
        return self._start_collective(f"reduce_scatter({op}) of {send.nbytes} bytes", steps, group)

    def all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Request:
        check_counts("all_to_all", send.size, send_counts, group)
        check_counts("all_to_all", recv.size, recv_counts, group)
        me = position_in(group, self.rank, "all_to_all")
        if send_counts[me] != recv_counts[me]:
            raise RuntimeFault(
                f"all_to_all: rank {self.rank} keeps {send_counts[me]} elements, expects {recv_counts[me]}"
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
        data = octets(flat(buffer, "send"))

        def steps() -> Steps:
            yield [self._messages.Isend(data, dest, tag)]

        need = self._departures.message("send", "recv", dest)
        return self._start(
            f"{self._where.message(tag)}send to rank {dest} (tag {tag}, {data.size} bytes)", steps(), need
        )

    def recv(self, buffer: Array, source: int, tag: int) -> Request:
        self._check_peer("recv", source, tag)
        data, target = octets(flat(buffer, "recv")), buffer
        what = f"{self._where.message(tag)}recv from rank {source} (tag {tag}, {data.size} bytes)"

        def steps() -> Steps:
            status = self._mpi.Status()
            request = self._messages.Irecv(data, source, tag)
            yield [WithStatus(request, status)]
            if status.Get_count(self._mpi.BYTE) != target.nbytes:
                raise RuntimeFault(
                    f"rank {self.rank}: {what} got {status.Get_count(self._mpi.BYTE)} bytes; "
                    "the ranks run different programs"
                )

        return self._start(what, steps(), self._departures.message("recv", "send", source))

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
        """Note a call that all ranks must make, such as "engine.save()"; see `RollCall`."""
        self._roll.enter(call)

    def leave(self) -> None:
        """Come to the end: tell the others, and wait until all of them do so, too."""
        self.enter(END)
        self._sends = self._departures.tell()
        request = self._control.Ibarrier()
        self.poll(lambda: self.test_all([request, *self._sends], "end"), "end")
        self._sends = []

    # -- progress, failure, end --------------------------------------------------------------------

    def progress(self) -> None:
        """Drive everything under way without blocking; raise if another rank failed."""
        self.check_failure()
        if self._pending:
            self._pending = [operation for operation in self._pending if not operation.advance()]

    def check_failure(self) -> None:
        """Raise `RuntimeFault` if another rank has failed."""
        if self._failure is None:
            self._failure = self._failure_told() or self._failure_recorded()
        if self._failure is not None:
            raise RuntimeFault(f"{self._failure[1]}; rank {self.rank} stops too")

    def _failure_told(self) -> tuple[int, str] | None:
        """What a failing rank has sent."""
        status = self._status
        if not self._control.Iprobe(self._mpi.ANY_SOURCE, _FAILURE, status):
            return None
        text = bytearray(status.Get_count(self._mpi.BYTE))
        self._control.Recv(text, status.Get_source(), _FAILURE)
        return status.Get_source(), text.decode()

    def _failure_recorded(self) -> tuple[None, str] | None:
        """What the launcher or a supervisor saw of a rank that could not send; one that raised sends."""
        if self._job is None or time.monotonic() - self._looked < _JOB_LOOK_SECONDS:
            return None
        self._looked = time.monotonic()
        text = observed_failure(self._job)
        return None if text is None else (None, text)

    def poll(self, ready: Callable[[], bool], what: str, need: Need | None = None) -> None:
        """Drive everything until `ready()`; the wait under every wait of this transport.

        Args:
            ready: whether the wait is over.
            what: it is for, in words.
            need: what another rank has to do for it.

        Raises:
            RuntimeFault: another rank failed, has left or is in another call; or the time limit.
        """
        begun = time.monotonic()
        polls = 0
        while not ready():
            polls += 1
            if polls % 16 == 0:
                self.progress()
                now = time.monotonic()
                if now - begun > LISTEN_SECONDS:
                    self._where.waiting = what
                    self._inquiry.answer()
                    self._check_departed(what, need)
                    self._roll.attend(now - begun)
                if now - max(begun, self._last_progress) > self._limit:
                    raise RuntimeFault(self._no_progress(what))
                if now - begun > self._patience:
                    time.sleep(1e-4)
            os.sched_yield()
        self._where.waiting = ""

    def _check_departed(self, what: str, need: Need | None) -> None:
        """Raise `DepartedFault` if a rank that has left was to take part in what this one waits for."""
        rank = self._departures.absent(need)
        if rank is None:
            return
        if self._roll.call:
            raise DepartedFault(different_calls({self._roll.call: [self._rank], END: [rank]}))
        raise DepartedFault(
            f"rank {self._rank}: {what} waits for rank {rank}, which has come to {END}; make the same calls "
            "on every rank"
        )

    def _no_progress(self, what: str) -> str:
        missing = ", ".join(map(str, self._roll.missing))
        absent = f"; not come to {self._roll.call}: rank {missing}" if missing else ""
        said = f"rank {self.rank}: {what} made no progress in {self._limit:g} s{absent}"
        stopped = [
            f"rank {rank} (process {pid}) is stopped" for rank, pid in self._processes if is_stopped(pid)
        ]
        if stopped:
            return f"{said}; {', '.join(stopped)}"
        advice = "look for a rank that does not take part, or raise DISTGRAPH_TIMEOUT"
        self._where.waiting = what
        return f"{said}; {advice}{report(self._inquiry.ask())}"

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
        """Whether this rank has learnt that another one failed first."""
        return self._failure is not None

    def abort(self, error: BaseException) -> NoReturn:
        """Tell the other ranks, give them a moment for their last words, and end this process."""
        sys.stdout.flush()
        sys.stderr.flush()
        deadline = time.monotonic() + FAILURE_REPORT_SECONDS
        if self._failure is not None:  # another rank was first; it, or the launcher, ends us
            self.follow(1, FAILURE_REPORT_SECONDS)
        text = bytearray(f"rank {self.rank} failed: {type(error).__name__}: {error}".encode())
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [self._control.Isend(text, rank, _FAILURE) for rank in others]
        silent = set(others)
        while silent and time.monotonic() < deadline:
            silent -= {rank for rank in silent if self._has_answered(rank)}
            time.sleep(0.005)
        del sends
        time.sleep(0.1)  # what the others wrote is in pipes that the launcher must read before it sees us go
        self.end(self._code_of_departed() if isinstance(error, DepartedFault) else exit_code(error))

    def follow(self, code: int, seconds: float) -> NoReturn:
        """Tell the rank that failed first that this one has heard of it, and end.

        Args:
            code: exit code; mpiexec mixes those of all ranks, so the other one takes it over if it can.
            seconds: to wait for the other one to end the job.
        """
        until = time.monotonic() + seconds
        if self._failure is not None and self._failure[0] is not None:
            self._sends = [self._control.Isend(bytearray([code & 255]), self._failure[0], _ACKNOWLEDGE)]
        elif self._job is not None:
            (self._job / f"reported.{self.rank}").touch()
        while time.monotonic() < until:
            self._control.Iprobe(self._mpi.ANY_SOURCE, _FAILURE)
            time.sleep(0.01)
        self.end(code)

    def _code_of_departed(self) -> int:
        """Exit code of ranks that have left, as they told it; 1 where it would be a success."""
        codes = [1]
        for rank in self._departures.left:
            if self._control.Iprobe(rank, _ACKNOWLEDGE):
                told = bytearray(1)
                self._control.Recv(told, rank, _ACKNOWLEDGE)
                codes.append(told[0])
        return codes[-1] or 1

    def end(self, code: int) -> NoReturn:
        """End this process without waiting for anybody, and leave no shared memory behind."""
        sys.stdout.flush()
        sys.stderr.flush()
        if code and self._job is None:
            end_mpiexec(FAILURE_REPORT_SECONDS)
        for path in shared_memory():
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108 - the others have it mapped
        os._exit(code)

    def finalize(self) -> None:
        """End MPI; collective."""
        if not self._mpi.Is_finalized():
            self._mpi.Finalize()

    def close(self) -> None:
        """Give up what is still expected and free the communicators; collective."""
        for operation in self._pending:
            for request in operation.requests:
                (request.request if isinstance(request, WithStatus) else request).Cancel()
        self._pending.clear()
        for comm in (self._messages, self._collectives, self._control, self._calls):
            if comm != self._mpi.COMM_NULL:
                comm.Free()

    def _meet_first(self, world: Any) -> None:
        """Wait, within the time limit, until all ranks are here, before calls of MPI that have no limit."""
        request, deadline = world.Ibarrier(), time.monotonic() + self._limit
        while not request.Test():
            if time.monotonic() > deadline:
                raise RuntimeFault(
                    f"rank {world.Get_rank()}: not all ranks have come to distgraph in {self._limit:g} s; "
                    "look for a rank that has ended before, or raise DISTGRAPH_TIMEOUT"
                )
            time.sleep(1e-4)

    # -- bookkeeping -------------------------------------------------------------------------------

    def _start(self, what: str, steps: Steps, need: Need, previous: Operation | None = None) -> Operation:
        self.progress()
        operation = Operation(self, what, steps, previous, need)
        if not operation.advance():
            self._pending.append(operation)
        return operation

    def _start_collective(self, what: str, steps: Steps, group: Group) -> Operation:
        need, previous = self._departures.collective(group), self._latest.get(group)
        self._latest[group] = self._start(what, steps, need, previous)
        return self._latest[group]

    def _check_own(self, what: str, have: int, counts: Sequence[int], group: Group) -> None:
        want = counts[position_in(group, self.rank, what)]
        if have != want:
            raise RuntimeFault(f"{what}: rank {self.rank} holds {have} elements but its count is {want}")

    def _check_peer(self, what: str, peer: int, tag: int) -> None:
        if not 0 <= peer < self.size:
            raise RuntimeFault(f"{what}: rank {peer} is not one of the {self.size} ranks")
        if not 0 <= tag < 1 << TAG_BITS:
            raise RuntimeFault(f"{what}: tag {tag} is not in 0 .. 2**{TAG_BITS} - 1")

    def _send_object(self, obj: Any, dest: int) -> None:
        request = self._control.Isend(bytearray(pickle.dumps(obj)), dest, _OBJECT)
        need = self._departures.message("object", "received object", dest)
        self.poll(lambda: self.test_all([request], "object"), f"object for rank {dest}", need)

    def _receive_object(self, source: int) -> Any:
        status = self._mpi.Status()
        need = self._departures.message("received object", "object", source)
        what = f"object from rank {source}"
        self.poll(lambda: bool(self._control.Iprobe(source, _OBJECT, status)), what, need)
        data = bytearray(status.Get_count(self._mpi.BYTE))
        self._control.Recv(data, source, _OBJECT)
        self._last_progress = time.monotonic()
        return pickle.loads(bytes(data))

    def _has_answered(self, rank: int) -> bool:
        """Whether `rank` has acknowledged our failure, or failed by itself."""
        return any(self._control.Iprobe(rank, tag) for tag in (_ACKNOWLEDGE, _FAILURE))


def _load_mpi() -> Any:
    """mpi4py's MPI module; importing it initialises MPI, so it is done when a transport is made."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise RuntimeFault(
            f"mpi transport: mpi4py cannot be loaded ({error}); install it with: {installing('mpi')}"
        ) from error
