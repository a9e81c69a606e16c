"""Threads as ranks: failures reach every rank, waits end, nothing is left behind, mistakes are named."""

from __future__ import annotations

import threading
import traceback
from typing import Any

import numpy as np
import pytest
from support.programs.rank_threads import run_ranks

from distgraph.errors import RuntimeFault
from distgraph.runtime.transport.inprocess import InProcessTransport, connect
from distgraph.runtime.transport.mpi import MpiTransport
from distgraph.runtime.transport.transport import Transport, time_limit

WAITS = {
    "collective": lambda t: t.all_reduce(np.zeros(3), "sum", (0, 1, 2)).wait(),
    "recv": lambda t: t.recv(np.zeros(3), 1, 0).wait(),
    "send": lambda t: t.send(np.zeros(3), 1, 0).wait(),
    "barrier": lambda t: t.barrier(),
    "gather_objects": lambda t: t.gather_objects(1),
    "broadcast_object": lambda t: t.broadcast_object(1, root=1),
}


def rank_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("rank-")}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_a_rank_that_raises_stops_the_others(wait: Any) -> None:
    seen: dict[int, str] = {}
    before = rank_threads()  # of engines that other tests have left to the garbage collector

    def program(transport: InProcessTransport) -> None:
        if transport.rank == 1:
            raise ValueError("bad batch")
        try:
            wait(transport)
        except RuntimeFault as error:
            seen[transport.rank] = str(error)
            raise

    with pytest.raises(RuntimeFault, match=r"^rank 1 failed: ValueError: bad batch$") as caught:
        run_ranks(3, program, limit=100)
    assert seen == {r: f"rank 1 failed: ValueError: bad batch; rank {r} stops too" for r in (0, 2)}
    assert rank_threads() <= before
    text = "".join(traceback.format_exception(caught.value))
    assert text.startswith("Traceback")
    assert text.index('raise ValueError("bad batch")') < text.index("RuntimeFault: rank 1 failed")


def test_a_rank_that_is_waiting_already_is_woken() -> None:
    """The failing rank raises only after the other one's receive is posted."""

    def program(transport: InProcessTransport) -> None:
        if transport.rank == 0:
            request = transport.recv(np.zeros(1), 1, 9)
            transport.barrier()
            request.wait()
        transport.barrier()
        raise KeyError("late")

    with pytest.raises(RuntimeFault, match="rank 1 failed: KeyError"):
        run_ranks(2, program, limit=100)


def test_results_in_rank_order() -> None:
    assert run_ranks(3, lambda t: (t.rank, t.size)) == [(0, 3), (1, 3), (2, 3)]


def test_a_wait_without_progress_ends() -> None:
    def program(transport: InProcessTransport) -> None:
        if transport.rank == 0:
            transport.recv(np.zeros(3), 1, 7).wait()

    with pytest.raises(RuntimeFault, match=r"rank 0: recv from rank 1 \(tag 7\) made no progress in 0.05 s"):
        run_ranks(2, program, limit=0.05)


def test_different_programs_are_refused() -> None:
    def program(transport: InProcessTransport) -> None:
        transport.all_reduce(np.zeros(3), "sum" if transport.rank else "max", (0, 1)).wait()

    with pytest.raises(RuntimeFault, match="the ranks run different programs"):
        run_ranks(2, program)


def test_a_message_of_another_length_is_refused() -> None:
    def program(transport: InProcessTransport) -> None:
        if transport.rank == 0:
            transport.send(np.zeros(3), 1, 0).wait()
        else:
            transport.recv(np.zeros(4), 0, 0).wait()

    with pytest.raises(RuntimeFault, match="3 x float64 are sent but 4 x float64 expected"):
        run_ranks(2, program)


def test_pieces_of_all_to_all_must_match() -> None:
    def program(transport: InProcessTransport) -> None:
        counts = [[1, 2], [1, 2]][transport.rank]
        transport.all_to_all(np.zeros(3), np.zeros(3), counts, [1, 2], (0, 1)).wait()

    with pytest.raises(RuntimeFault, match=r"rank \d sends \d elements to rank \d, which expects \d"):
        run_ranks(2, program)


def test_connected_transports_serve_threads_of_the_caller() -> None:
    first, second = connect(2)
    received = np.zeros(2)
    request = second.recv(received, 0, 1)
    assert not request.done()
    first.send(np.array([1.0, 2.0]), 1, 1).wait()
    assert request.done()
    assert received.tolist() == [1.0, 2.0]
    first.abort(OSError("gone"))
    with pytest.raises(RuntimeFault, match="rank 0 failed: OSError: gone; rank 1 stops too"):
        second.progress()


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_time_limits_that_are_no_positive_numbers_are_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTGRAPH_TIMEOUT", text)
    with pytest.raises(RuntimeFault, match="expected a positive number of seconds"):
        time_limit(None)


def test_time_limit_is_the_argument_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTGRAPH_TIMEOUT", "7.5")
    assert time_limit(None) == 7.5
    assert time_limit(3) == 3.0


def test_a_job_needs_a_rank() -> None:
    with pytest.raises(RuntimeFault, match="0 ranks"):
        connect(0)


def test_transports_follow_the_protocol() -> None:
    """Checked by mypy; at run time the names are there."""
    names = [name for name in vars(Transport) if not name.startswith("_")]
    for kind in (InProcessTransport, MpiTransport):
        assert [name for name in names if not hasattr(kind, name)] == []
