"""What a profile measures of ranks that share CPU cores, and of the work of the host."""

from __future__ import annotations

import time
from functools import partial

import pytest

from distgraph.resources.host_times import HostTimes
from distgraph.runtime.profile.shared_cores import CoreSharing, RunTime, behind_work, host_times


def test_a_message_behind_work_takes_what_it_adds() -> None:
    """Two ranks a core: the slowest takes 9 s, of which both works take 2 x 3 s; never nothing or less."""
    found = [RunTime(9.0, 2.0), RunTime(8.0, 4.0), RunTime(0.0, 3.0)]
    assert CoreSharing((2.0, 2.0, 2.0)).added_seconds(found) == 3.0
    assert CoreSharing((2.0, 1.0, 2.0)).added_seconds(found) == 5.0  # the second has a core of its own
    assert 0 < CoreSharing((4.0, 4.0, 4.0)).added_seconds(found) < 1e-5
    once = behind_work(partial(time.sleep, 0.02), None, 3, 1, 0.002)
    assert CoreSharing().added_seconds([once]) >= 0.02
    there_and_back = behind_work(partial(time.sleep, 0.02), None, 3, 2, 0.002)
    assert CoreSharing().added_seconds([there_and_back]) >= 0.01
    assert there_and_back.work < once.work


def test_a_store_names_how_ranks_share_cores() -> None:
    assert str(CoreSharing.of(None)) == ""
    assert str(CoreSharing((2.0, 2.0))) == "2 ranks a core"
    assert str(CoreSharing((1.5, 1.5, 1.5), bound=True)) == "1.5 ranks a core, each on one"


def test_steps_with_few_and_many_tasks_tell_what_each_costs() -> None:
    found = host_times([(4, 100e-6 + 4 * 12e-6), (34, 100e-6 + 34 * 12e-6)], 3e-6)
    assert (found.step, found.task) == (pytest.approx(100e-6, rel=0.01), pytest.approx(12e-6, rel=0.01))
    assert (found.message, found.op, found.micro_batch) == (3e-6, None, None)
    disturbed = host_times([(4, 50e-6), (34, 40e-6)], None)
    assert disturbed.task == pytest.approx(0.0, abs=1e-9)  # never below
    assert host_times((), None) == HostTimes()
