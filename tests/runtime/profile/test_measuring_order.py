"""The order in which a profile measures: sizes of messages are covered before anything is refined."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distgraph.runtime.profile.collective_probes import Pattern, coarse_to_fine, patterns
from distgraph.runtime.profile.measuring_order import MeasuringOrder

MIB = 2**20


def simulated(
    limit: float, ranks: int, rate: float, machines: tuple[int, ...] = ()
) -> tuple[dict[str, list[float]], MeasuringOrder]:
    """Times at which each message is measured, on links of a rate in bytes a second, and the order.

    Messages take 1 ms and their bytes; measuring one takes 0.1 s or two of them, beside products three.
    """
    chosen = {p.name: p for p in patterns(ranks, 2.0**26, shared=True, machines=machines or range(ranks))}
    order, elapsed, ends = MeasuringOrder(limit, chosen), 0.0, {name: list[float]() for name in chosen}
    for round_ in range(8):
        for name, pattern in chosen.items():
            if not order.has_time(name, round_, limit - elapsed):
                continue
            seconds = 1e-3 + pattern.nbytes / rate
            duration = max(0.1, (3 if pattern.overlapped else 2) * seconds)
            elapsed += duration
            order.note(name, duration, seconds)
            ends[name].append(elapsed)
    assert elapsed <= limit
    return ends, order


def largest(ends: dict[str, list[float]], chosen: Callable[[Pattern], bool], order: MeasuringOrder) -> int:
    """The least over the series of the largest size that was measured."""
    sizes: dict[object, int] = {}
    for name, times in ends.items():
        pattern = order.patterns[name]
        if chosen(pattern) and times:
            series = pattern.kind, pattern.groups, pattern.overlapped
            sizes[series] = max(sizes.get(series, 0), pattern.nbytes)
    return min(sizes.values())


def test_sizes_are_halved_from_coarse_to_fine() -> None:
    assert coarse_to_fine([]) == []
    assert coarse_to_fine([1, 2]) == [1, 2]
    sizes = [p.nbytes for p in patterns(2, 2.0**26) if p.kind == "all_reduce"]
    assert sizes == [2**power for power in (10, 14, 18, 22, 26, 24, 20, 16, 12)]


@pytest.mark.parametrize(("limit", "expected"), [(15.0, 4 * MIB), (50.0, 16 * MIB), (150.0, 64 * MIB)])
def test_every_time_limit_covers_a_range_of_sizes(limit: float, expected: int) -> None:
    """On a link of 400 Mbit/s, which needs 1.3 s for 64 MiB; messages beside products have 16 MiB at most."""
    ends, order = simulated(limit, 2, 50e6)
    assert largest(ends, lambda p: p.kind != "attend" and not p.overlapped, order) == expected
    assert largest(ends, lambda p: p.overlapped, order) == min(expected, 16 * MIB)


def test_the_range_is_covered_before_a_second_round() -> None:
    ends, order = simulated(100.0, 2, 50e6)
    again = min(times[1] for times in ends.values() if len(times) > 1)
    firsts = {name: times[0] for name, times in ends.items() if times}
    assert all(time < again for name, time in firsts.items() if order.patterns[name].nbytes <= 16 * MIB)
    short = [times for name, times in ends.items() if order.patterns[name].nbytes <= MIB]
    assert min(map(len, short)) >= 3


def test_a_slow_series_does_not_take_the_time_of_others() -> None:
    """Within the machines messages are short: their large sizes are measured, whatever those between take."""
    ends, order = simulated(60.0, 4, 50e6, (0, 0, 1, 1))
    assert largest(ends, lambda p: p.kind != "attend", order) >= MIB
    assert all(ends.values()) or any(p.nbytes > MIB for n, p in order.patterns.items() if not ends[n])


def test_a_long_item_is_repeated_after_three_rounds_of_others() -> None:
    order = MeasuringOrder(10.0, {})
    assert order.has_time("long", 0, 5.0)
    order.note("long", 0.2, None)
    order.note("short", 0.05, None)
    assert [order.has_time("long", round_, 5.0) for round_ in range(4)] == [False, False, False, True]
    assert [order.has_time("short", round_, 5.0) for round_ in range(4)] == [True] * 4
    assert not order.has_time("long", 3, 0.2)


def test_what_an_earlier_run_measured_is_no_first_measurement() -> None:
    pattern = Pattern("all_reduce", ((0, 1),), 64 * MIB)
    order = MeasuringOrder(10.0, {pattern.name: pattern})
    order.note(pattern.name, None, 1.3)
    assert order.expected_seconds(pattern.name) == 0.0  # not known in this run
    larger = Pattern("all_reduce", ((0, 1),), 256 * MIB)
    order.patterns[larger.name] = larger
    assert order.expected_seconds(larger.name) == pytest.approx(2 * 4 * 1.3)
    assert not order.has_time(larger.name, 0, 10.0)
