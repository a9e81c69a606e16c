"""What other programs use of the processors: from given counters, and beside a real busy process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from distgraph.runtime.profile import processor_use
from distgraph.runtime.profile.processor_use import (
    MOST_OTHER_USE,
    OtherUse,
    ProcessorWatch,
    Reading,
    other_use,
    read_counters,
)
from distgraph.runtime.transport.inprocess import connect


def later(
    before: Reading, seconds: float, own: float, free: float, group_used: float | None = None
) -> Reading:
    """A reading some seconds later: processor time of the rank, free time of each processor."""
    return replace(
        before,
        clock=before.clock + seconds,
        own=before.own + own,
        free={processor: each + free for processor, each in before.free.items()},
        group_used=group_used,
    )


def use(*pairs: tuple[Reading, Reading]) -> OtherUse:
    return other_use([first for first, _ in pairs], [last for _, last in pairs])


ONE = Reading("a", "kernel 1", 100.0, 7.0, {0: 50.0, 1: 60.0})


def test_what_ranks_do_not_use_is_used_by_others() -> None:
    """Two processors for 10 s: 20 s, of which 8 were free and 10 the rank's; 10 ms of each are the steps."""
    found = use((ONE, later(ONE, 10.0, 10.0, 4.0)))
    assert found.host == "a"
    assert found.share == pytest.approx((20 - 8 - 10 - 0.02) / 20)
    assert found.disturbs
    quiet = use((ONE, later(ONE, 10.0, 10.0, 4.9)))
    assert not quiet.disturbs
    assert use((ONE, later(ONE, 10.0, 13.0, 4.0))).share == 0.0  # the counters have steps


def test_ranks_of_hosts_under_one_kernel_are_no_others() -> None:
    """Containers of one machine: each sees all of its processors, and the ranks of both use them."""
    two = replace(ONE, host="b")
    pairs = [(each, later(each, 10.0, 9.9, 0.0)) for each in (ONE, two)]
    assert use(*pairs).share == pytest.approx(0.009)
    assert use(*pairs).host == "a, b"
    apart = replace(two, kernel="kernel 2")
    assert use(pairs[0], (apart, later(apart, 10.0, 9.9, 0.0))).share == pytest.approx(0.504)


def test_the_most_disturbed_machine_counts() -> None:
    two = replace(ONE, host="b", kernel="kernel 2", free={3: 1.0})
    quiet, busy = (ONE, later(ONE, 10.0, 10.0, 5.0)), (two, later(two, 10.0, 6.0, 0.0))
    assert use(quiet, busy) == OtherUse("b", pytest.approx(0.399))
    unseen = (replace(ONE, free={}, kernel="3", host="c"),) * 2
    assert use(quiet, unseen) == OtherUse("c", None)
    assert not use(quiet, unseen).disturbs
    assert use(quiet, busy, unseen).host == "b"


def test_others_in_the_control_group_use_up_its_quota() -> None:
    """Half a core for 10 s: two ranks used 1 s each, all programs of the group 4 s, so others 2 of 5 s."""
    limited = replace(ONE, group="/group", cores=0.5, group_used=0.0)
    pair = (limited, later(limited, 10.0, 1.0, 9.0, group_used=4.0))
    assert use(pair, pair).share == pytest.approx((2.0 - 0.01) / 5)
    unknown = (replace(limited, group_used=None), later(limited, 10.0, 1.0, 9.0))
    assert use(unknown, unknown).share == 0.0  # then the machine alone is known


def test_only_processors_of_the_rank_count() -> None:
    text = "cpu 9 9 9 9 9 9 9 9\ncpu0 5 0 5 100 20 3 2 7 0 0\ncpu1 0 0 0 900 0 0 0 0\nintr 5 6\n\n"
    ticks = os.sysconf("SC_CLK_TCK")
    assert processor_use._free_seconds(text, {0}) == {0: 125 / ticks}
    assert processor_use._free_seconds("", {0}) == {}


@pytest.mark.parametrize(
    ("name", "text"), [("cpu.stat", "nr_periods 4\nusage_usec 1500000\n"), ("cpuacct.usage", "1500000000\n")]
)
def test_use_of_a_control_group(tmp_path: Path, name: str, text: str) -> None:
    assert processor_use._group_seconds(tmp_path) is None
    (tmp_path / name).write_text(text)
    assert processor_use._group_seconds(tmp_path) == 1.5


def test_counters_that_cannot_be_read_are_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processor_use, "_STAT", tmp_path / "none")
    watch = ProcessorWatch(None)
    assert watch.close() == OtherUse(read_counters().host, None)


def test_the_first_rank_knows_for_all() -> None:
    transports = connect(1)
    watch = ProcessorWatch(transports[0])
    assert not watch.is_due
    assert watch.close() is not None


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc/stat of Linux")
def test_a_busy_process_is_noticed() -> None:
    """On one processor, of which a child uses what this process leaves: at least half, however loaded it is.

    This process sleeps, so that others on the machine can only add to what the child uses.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
            try:
                watch = ProcessorWatch(None)
                while not watch.is_due:
                    time.sleep(0.01)
                found = watch.close()
            finally:
                child.kill()
    finally:
        os.sched_setaffinity(0, allowed)
    assert found is not None
    assert found.share is not None
    assert found.share > 0.5 > MOST_OTHER_USE
    assert found.disturbs
