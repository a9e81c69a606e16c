"""The cases of `collective_cases` on every rank of `mpiexec -n 2 python -m pytest tests/mpi`; or 4."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.devices import collective_cases as cases
from support.programs.rank_threads import run_ranks

from distgraph.errors import RuntimeFault
from distgraph.runtime.launch.mpi_rank import current_transport
from distgraph.runtime.transport.call_check import ASK_SECONDS, GRACE_SECONDS, LISTEN_SECONDS, CallCheck
from distgraph.runtime.transport.mpi import MpiTransport
from distgraph.runtime.transport.mpi_operation import Operation
from distgraph.runtime.transport.transport import Transport

pytestmark = pytest.mark.mpi


@pytest.fixture
def transport() -> MpiTransport:
    found = current_transport()
    assert found is not None
    found.barrier()
    return found


@pytest.mark.parametrize("case", cases.PLAIN, ids=lambda case: case.__name__)
def test_plain(transport: MpiTransport, case: Callable[[Any], None]) -> None:
    case(transport)


@pytest.mark.parametrize("case", cases.TYPED, ids=lambda case: case.__name__)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_moving(transport: MpiTransport, case: Callable[[Any, str], None], dtype: str) -> None:
    case(transport, dtype)


@pytest.mark.parametrize("case", cases.REDUCING, ids=lambda case: case.__name__)
@pytest.mark.parametrize(("dtype", "op"), cases.reductions())
def test_reducing(
    transport: MpiTransport, case: Callable[[Any, str, str], None], dtype: str, op: str
) -> None:
    case(transport, dtype, op)


def test_same_bits_as_threads(transport: MpiTransport) -> None:
    """Sums of values of very different size depend on the order; processes and threads use the same."""

    def total(t: Transport) -> Any:
        x = np.random.default_rng(t.rank).standard_normal(50_000) * 10.0 ** np.arange(50_000).clip(max=17)
        t.all_reduce(x, "sum", tuple(range(t.size))).wait()
        return x

    mine = total(transport)
    for other in run_ranks(transport.size, total):
        np.testing.assert_array_equal(mine, other)


def test_a_message_of_another_length_is_refused(transport: MpiTransport) -> None:
    if transport.rank == 0:
        transport.send(np.zeros(3), 1, 5).wait()
    if transport.rank == 1:
        with pytest.raises(RuntimeFault, match=r"got 24 bytes; the ranks run different programs"):
            transport.recv(np.zeros(4), 0, 5).wait()


def test_long_messages_between_machines_go_in_parts(
    transport: MpiTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if each rank were on a machine of its own; both directions at once, and of another length."""
    monkeypatch.setattr(transport._exchange, "_machine_of", tuple(range(transport.size)))
    everyone, size = tuple(range(transport.size)), 300_001
    mine = np.arange(size, dtype=np.float64) + transport.rank
    gathered = np.zeros(size * transport.size)
    transport.all_gather(mine, gathered, [size] * transport.size, everyone).wait()
    for rank, part in enumerate(gathered.reshape(transport.size, size)):
        np.testing.assert_array_equal(part, mine - transport.rank + rank)
    if transport.rank < 2:
        other, arrived = 1 - transport.rank, np.zeros(size)
        requests = [transport.recv(arrived, other, 6), transport.send(mine, other, 6)]
        for request in requests:
            request.wait()
        np.testing.assert_array_equal(arrived, mine - transport.rank + other)
    if transport.rank == 0:
        transport.send(mine[: size // 2], 1, 7).wait()
    if transport.rank == 1:
        with pytest.raises(RuntimeFault, match=r"got 400000 bytes as a part of 800003; the ranks run"):
            transport.recv(np.zeros(300_001), 0, 7).wait()


def test_a_wait_for_an_operation_behind_another_one_has_a_limit(
    transport: MpiTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages of both have arrived here, but a step of the first waits for the second rank."""
    pair = (0, 1)
    if transport.rank < 2:
        first, second = np.ones(4_000_000, np.float32), np.ones(10, np.float32)
        transport.barrier(pair)
        if transport.rank == 0:
            monkeypatch.setattr(transport, "_limit", 1.0)
            time.sleep(0.5)
        requests = [transport.all_reduce(x, "sum", pair) for x in (first, second)]
        if transport.rank == 1:
            time.sleep(4)
            requests[0].wait()
        else:
            with pytest.raises(RuntimeFault, match="progress"):
                requests[0].wait()
            monkeypatch.undo()
            requests[0].wait()
        requests[1].wait()
        assert (first == 2).all()
        assert (second == 2).all()
    transport.barrier()


def wait_beside(happened: Callable[[], bool]) -> None:
    """Sleep, as a rank that computes, without a call of the transport."""
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_messages_between_machines_go_on_while_a_rank_computes(
    transport: MpiTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if each rank were on a machine of its own; every sum has two steps, the second begun beside."""
    monkeypatch.setattr(transport, "_unaided", frozenset())
    everyone = tuple(range(transport.size))
    buffers = [np.full(300_001, transport.rank + number, np.float32) for number in range(3)]
    sums = [transport.all_reduce(buffer, "sum", everyone) for buffer in buffers]
    assert all(isinstance(request, Operation) for request in sums)
    wait_beside(lambda: all(request.finished for request in sums))  # type: ignore[attr-defined]
    for number, (request, buffer) in enumerate(zip(sums, buffers, strict=True)):
        request.wait()
        np.testing.assert_array_equal(buffer, sum(rank + number for rank in everyone))


def test_an_error_beside_a_computation_is_raised_when_the_rank_waits(
    transport: MpiTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_unaided", frozenset())
    if transport.rank == 0:
        time.sleep(0.05)  # the receive has begun
        transport.send(np.zeros(3), 1, 5).wait()
    if transport.rank == 1:
        request = transport.recv(np.zeros(4), 0, 5)
        assert isinstance(request, Operation)
        wait_beside(lambda: request._failure is not None)
        with pytest.raises(RuntimeFault, match=r"got 24 bytes; the ranks run different programs"):
            request.wait()


def test_a_wait_without_progress_ends(transport: MpiTransport) -> None:
    """A transport of its own, whose last rank does not take part."""
    other = MpiTransport(limit=0.2)
    if other.rank != other.size - 1:
        with pytest.raises(RuntimeFault, match=r"made no progress in 0.2 s"):
            other.recv(np.zeros(4), other.size - 1, 5).wait()


def test_a_wait_without_progress_reports_what_every_rank_waits_for(transport: MpiTransport) -> None:
    """Each waits for the next; the first to run out of time asks the others, which still wait."""
    other = MpiTransport(limit=0.5)
    other.activity.task, other.activity.micro = "forward.s0", other.rank
    with pytest.raises(RuntimeFault, match=r"made no progress in 0.5 s") as caught:
        other.recv(np.zeros(4), (other.rank + 1) % other.size, 5).wait()
    reports = transport.gather_objects(str(caught.value))
    if reports is not None:
        lines = [
            f"rank {rank} waits in forward.s0 of micro-batch {rank} for recv from rank {peer} "
            for rank, peer in enumerate((*range(1, other.size), 0))
        ]
        assert any(all(line in report for line in lines) for report in reports), reports


def test_questions_that_nobody_answers_are_read_at_the_end(transport: MpiTransport) -> None:
    comm, mpi = transport._calls.Dup(), transport._mpi
    check = CallCheck(mpi, comm)
    check.enter("engine.fit()")
    if transport.rank == 0:
        check.verify(ASK_SECONDS + 1)
    else:
        transport.poll(lambda: bool(comm.Iprobe(0, mpi.ANY_TAG)), "question")
    check.discard()
    assert not comm.Iprobe(mpi.ANY_SOURCE, mpi.ANY_TAG)
    transport.barrier()


def call_difference(transport: MpiTransport, calls: list[str], early: int = 0) -> str:
    """The error of this rank's call check where every rank makes its own call, all of them in a long wait.

    The first `early` ranks have asked before the others come to the call.
    """
    comm = transport._calls.Dup()
    check = CallCheck(transport._mpi, comm)
    check.enter("engine.fit()")
    if transport.rank < early:
        check.enter(calls[transport.rank])
        check.verify(ASK_SECONDS + 1)
    transport.barrier()
    if transport.rank >= early:
        check.verify(LISTEN_SECONDS)  # it has not come to what the others ask for
        check.enter(calls[transport.rank])
    message, begun = "", time.monotonic()
    try:
        while time.monotonic() < begun + 3 * GRACE_SECONDS:
            check.verify(ASK_SECONDS + 1)
    except RuntimeFault as error:
        message = str(error)
    while time.monotonic() < begun + 3 * GRACE_SECONDS:
        check._receive()  # those that ask later still get their answers
    comm.Free()
    return message


@pytest.mark.parametrize("early", [0, 1])
def test_ranks_in_different_calls_are_named(transport: MpiTransport, early: int) -> None:
    others = range(1, transport.size)
    calls = ["engine.save()", *("engine.run()" for _ in others)]
    wanted = f"engine.save() on rank 0 but engine.run() on rank{'s' * (len(others) > 1)} "
    wanted += ", ".join(map(str, others))
    assert wanted in call_difference(transport, calls, early)


@pytest.mark.parametrize("early", [0, 1])
def test_ranks_in_one_call_wait_for_each_other(transport: MpiTransport, early: int) -> None:
    assert call_difference(transport, ["engine.save()"] * transport.size, early) == ""
