"""What a profile measures of ranks that share CPU cores, and of the work of the host."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from distgraph.resources.host_times import HostTimes
from distgraph.runtime.profile import shared_cores
from distgraph.runtime.profile.shared_cores import (
    CoreSharing,
    RunTime,
    behind_work,
    host_times,
    runs_in_quota,
    under_work,
)
from distgraph.runtime.transport.inprocess import connect


def meet() -> None:
    """Return at once, as the ranks of a job of one rank meet."""


def behind(alone: tuple[float, float], message: tuple[float, float]) -> RunTime:
    """One run with begins and ends of the computation without the message, and with it."""
    return RunTime(message[1] - message[0], (alone,), (message,))


def test_a_message_behind_work_takes_what_it_adds() -> None:
    """Of ranks of one machine, the first to begin and the last to end count; never nothing or less.

    Rank 1 gets the core when rank 0 has computed: both compute for 4 s. Rank 2 has no message.
    """
    found = [
        behind((0.0, 2.0), (10.0, 16.0)),
        behind((2.0, 4.0), (12.0, 17.0)),
        behind((0.0, 3.0), (10.0, 19.0)),
    ]
    assert CoreSharing((2.0, 2.0, 2.0)).added_seconds(found, [(0, 1)]) == 3.0
    early = [behind((0.0, 2.0), (10.0, 11.0)), behind((1.0, 3.0), (11.0, 12.0))]
    assert 0 < CoreSharing((2.0,) * 2).added_seconds(early) < 1e-5
    once = behind_work(Slept, None, 3, 1, 0.002, meet)
    assert CoreSharing().added_seconds([once]) > 0.015
    there_and_back = behind_work(Slept, None, 3, 2, 0.002, meet)
    assert 0.007 < CoreSharing().added_seconds([there_and_back]) < CoreSharing().added_seconds([once])
    assert CoreSharing((1.0,) * 2).added_seconds([RunTime(3.0), RunTime(5.0)]) == 5.0


def test_waiting_for_a_slower_machine_is_not_part_of_a_message() -> None:
    """The ranks of the second machine compute for 12 s, half as fast as those of the first; clocks differ."""
    cores = CoreSharing((2.0, 2.0, 4.0, 4.0), machines=(0, 0, 2, 2))
    first, second = (0.0, 6.0), (100.0, 112.0)
    across = [behind(first, (7.0, 20.0)), behind(first, (7.0, 20.5))]
    across += [behind(second, (113.0, 126.0)), behind(second, (113.0, 126.5))]
    assert cores.added_seconds(across) == 1.5
    inside = [behind(first, (7.0, 14.0)), behind(first, (7.0, 15.0))]
    inside += [behind(second, (113.0, 125.5)), behind(second, (113.0, 125.5))]
    assert cores.added_seconds(inside, [(0, 1), (2, 3)]) == 2.0


def test_all_ranks_begin_a_message_together() -> None:
    """Rank 1 arrives 0.2 s late; this is no part of a message of 20 ms."""
    transports = connect(2)

    def rank(number: int) -> RunTime:
        transport = transports[number]
        time.sleep(0.2 * number)

        def start() -> Any:
            return SimpleNamespace(wait=lambda: (time.sleep(0.02), transport.barrier()))

        return behind_work(start, None, 2, 1, 0.001, transport.barrier)

    with ThreadPoolExecutor(2) as pool:
        added = CoreSharing((2.0, 2.0)).added_seconds(list(pool.map(rank, range(2))))
    assert 0.015 < added < 0.08


def test_runs_use_up_at_most_half_of_a_quota() -> None:
    assert runs_in_quota(10, 0.1, 0.009) == 5
    assert runs_in_quota(3, 0.1, 0.009) == 3
    assert runs_in_quota(10, 0.1, 0.2) == 1
    assert runs_in_quota(10, 0.0, 0.2) == 10
    assert runs_in_quota(10, 0.1, 0.0) == 10


def test_noise_of_products_is_not_part_of_a_message_beside_them() -> None:
    """In each run another rank is late, for whom the other one waits; the message itself takes no time.

    The last rank is in no group. In the second case the message lengthens products by 0.25 and 0.75 s, and
    each rank waits for at least 1 s; in the third one group waits for 1 s, the other one for 2 s.
    """
    late = [RunTime(0.0, beside=((3.0, 0.0), (-1.0, 4.0), (-1.0, 4.0)))]
    late += [RunTime(0.0, beside=((-1.0, 4.0), (3.0, 0.0), (1.0, 2.0))), RunTime(0.0)]
    cores = CoreSharing((1.0, 1.0, 2.0), machines=(0, 1, 2))
    assert 0 < cores.added_seconds(late, [(0, 1)]) < 1e-5
    slow = [RunTime(0.0, beside=((0.25, 1.0), (0.25, 5.0))), RunTime(0.0, beside=((0.75, 5.0), (0.75, 1.0)))]
    assert cores.added_seconds([*slow, RunTime(0.0)], [(0, 1)]) == 1.5
    waiting = [RunTime(0.0, beside=((0.0, wait),)) for wait in (1.0, 2.0, 1.0, 3.0)]
    assert CoreSharing((1.0,) * 4).added_seconds(waiting, [(0, 2), (1, 3)]) == 2.0


def test_a_rank_that_computes_last_is_not_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """What uses up the quota after a message is computed by one rank of two, with all of their core."""
    clock = SimpleNamespace(wall=0.0, processor=0.0, ranks=2)

    def product() -> None:
        clock.processor += 1e-4
        clock.wall += clock.ranks * 1e-4

    def wait() -> None:
        clock.wall += 0.03
        clock.ranks = 1

    clocks = {"perf_counter": lambda: clock.wall, "thread_time": lambda: clock.processor}
    monkeypatch.setattr(shared_cores, "time", SimpleNamespace(**clocks))
    monkeypatch.setattr(shared_cores, "_product", lambda: product)
    last = under_work(lambda: SimpleNamespace(wait=wait), None, 1, 0.02, meet, 0.01)
    assert last.beside == (pytest.approx((0.0, 0.03), abs=1e-3),)


class Slept:
    """A message that takes 20 ms, all of it after the wait for it has begun."""

    def wait(self) -> None:
        time.sleep(0.02)


def test_a_message_beside_products_takes_what_they_do_not_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of a clock that only products and messages move: 2 of 3 ms of a product are the processor's."""
    now = {"wall": 0.0, "processor": 0.0}
    clocks = {"perf_counter": lambda: now["wall"], "thread_time": lambda: now["processor"]}
    monkeypatch.setattr(shared_cores, "time", SimpleNamespace(**clocks))

    def product() -> None:
        now["wall"] += 3e-3
        now["processor"] += 2e-3

    def message(seconds: float, *, alone: bool) -> Any:
        """Moved by other hardware from its start on, or only while it is waited for."""

        def start() -> Any:
            begun = now["wall"]

            def wait() -> None:
                now["wall"] = max(now["wall"], (begun if alone else now["wall"]) + seconds)

            return SimpleNamespace(wait=wait)

        return start

    monkeypatch.setattr(shared_cores, "_product", lambda: product)
    added = CoreSharing((1.0,)).added_seconds  # the share that others leave is measured, not assumed
    assert added([under_work(message(1.0, alone=False), None, 3, 1.2, meet)]) == pytest.approx(1.0)
    assert added([under_work(message(1.0, alone=True), None, 3, 1.2, meet)]) < 1e-5
    assert added([under_work(message(2.0, alone=True), None, 3, 1.2, meet)]) == pytest.approx(0.2)
    assert under_work(None, None, 1, 1.2, meet) == RunTime(0.0)


class Quota:
    """Clocks of a rank that may compute for 5 ms of every 10 ms, and whose products take 1 ms."""

    def __init__(self) -> None:
        self.wall, self.processor, self.left = 0.0, 0.0, 5

    def product(self) -> None:
        if not self.left:
            self.wait(0.0)
        self.left -= 1
        self.processor += 1e-3
        self.wall += 1e-3

    def wait(self, seconds: float) -> None:
        """Without computing, at least to the next period if nothing is left."""
        period = int(self.wall / 1e-2 + 1e-6)
        self.wall = max(self.wall + seconds, 0.0 if self.left else (period + 1) * 1e-2)
        if int(self.wall / 1e-2 + 1e-6) > period:
            self.left = 5


@pytest.mark.parametrize("before", range(5))
def test_a_quota_does_not_change_what_a_message_adds(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    """Wherever in a period the runs begin, 30 ms of waiting add 30 ms."""
    clock = Quota()
    clocks = {"perf_counter": lambda: clock.wall, "thread_time": lambda: clock.processor}
    monkeypatch.setattr(shared_cores, "time", SimpleNamespace(**clocks))
    monkeypatch.setattr(shared_cores, "_product", lambda: clock.product)
    for _ in range(before):
        clock.product()
    added = CoreSharing((2.0,), period=0.01).added_seconds

    def start() -> Any:
        return SimpleNamespace(wait=lambda: clock.wait(0.03))

    runs = runs_in_quota(4, 0.01, 2 * 0.002)
    assert added([behind_work(start, None, runs, 1, 0.002, meet, 0.01)]) == pytest.approx(0.03, abs=0.001)
    assert added([under_work(start, None, 4, 0.02, meet, 0.01)]) == pytest.approx(0.03, abs=0.003)


def test_a_store_names_how_ranks_share_cores() -> None:
    assert str(CoreSharing.of(None)) == ""
    assert str(CoreSharing((2.0, 2.0))) == "2 ranks a core"
    assert str(CoreSharing((2.0, 2.0, 4.0), machines=(0, 0, 2))) == "2, 4 ranks a core"
    assert str(CoreSharing((1.5, 1.5, 1.5), bound=True)) == "1.5 ranks a core, each on one"


def test_steps_with_few_and_many_tasks_tell_what_each_costs() -> None:
    found = host_times([(4, 100e-6 + 4 * 12e-6), (34, 100e-6 + 34 * 12e-6)], 3e-6)
    assert (found.step, found.task) == (pytest.approx(100e-6, rel=0.01), pytest.approx(12e-6, rel=0.01))
    assert (found.message, found.op, found.micro_batch) == (3e-6, None, None)
    disturbed = host_times([(4, 50e-6), (34, 40e-6)], None)
    assert disturbed.task == pytest.approx(0.0, abs=1e-9)  # never below
    assert host_times((), None) == HostTimes()
    assert host_times((), 1e-6, 0.5) == HostTimes(message=1e-6, network_busy=0.5)
