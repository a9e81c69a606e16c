"""The thread that lets messages go on while a rank computes: when it looks at them, and when it rests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distgraph.runtime.transport.progress_thread import ProgressThread

Start = Callable[[Callable[[], bool]], tuple[ProgressThread, Any]]


@pytest.fixture
def started() -> Iterator[Start]:
    threads = []

    def start(advance: Callable[[], bool]) -> tuple[ProgressThread, Any]:
        lock = threading.RLock()
        threads.append(ProgressThread(advance, lock))
        return threads[-1], lock

    yield start
    for thread in threads:
        thread.stop()


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_it_looks_at_messages_until_none_is_left(started: Start) -> None:
    left = [50]

    def advance() -> bool:
        left[0] -= 1
        return left[0] > 0

    thread, _ = started(advance)
    assert left == [50]  # nothing before it is woken
    thread.wake()
    wait_for(lambda: left[0] < 0)
    before = 1
    while before != left[0]:  # it rests after some looks in vain
        before = left[0]
        time.sleep(0.2)
    thread.wake()
    wait_for(lambda: left[0] < before)


def test_it_leaves_messages_to_a_rank_that_waits(started: Start) -> None:
    looks: list[int] = []

    def advance() -> bool:
        looks.append(threading.get_ident())
        return True

    thread, lock = started(advance)
    with lock:  # as the rank holds it in every call of the transport
        thread.wake()
        time.sleep(0.1)
        assert not looks
    wait_for(lambda: len(looks) > 2)
    assert set(looks) != {threading.get_ident()}


def test_it_ends(started: Start) -> None:
    looks: list[None] = []

    def advance() -> bool:
        looks.append(None)
        return True

    thread, _ = started(advance)
    thread.wake()
    wait_for(lambda: len(looks) > 2)
    thread.stop()
    count = len(looks)
    thread.wake()  # of a message that is started at the end of a job
    time.sleep(0.05)
    assert len(looks) == count
    assert "distgraph-progress" not in [t.name for t in threading.enumerate()]
