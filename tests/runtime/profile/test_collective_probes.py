"""Messages between ranks that a profile times: groups, every collective, and runs behind computation."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from operator import itemgetter
from statistics import median
from typing import Any

import numpy as np
import pytest
from support.devices.measured_machines import works_of
from support.programs.forecasts import machines

from distgraph.resources import local_cluster
from distgraph.resources.cluster import Compute, MatmulRate
from distgraph.runtime.profile import collective_probes
from distgraph.runtime.profile.collective_probes import (
    KINDS,
    MESSAGE_WORK,
    Pattern,
    _prepare,
    axis_groups,
    measure,
    patterns,
)
from distgraph.runtime.profile.evaluation import evaluate
from distgraph.runtime.profile.shared_cores import CoreSharing, RunTime
from distgraph.runtime.transport.inprocess import connect


def test_groups_of_every_mesh_axis() -> None:
    groups = axis_groups(6)
    assert ((0, 1, 2, 3, 4, 5),) in groups
    assert ((0, 2, 4), (1, 3, 5)) in groups
    assert ((0, 1), (2, 3), (4, 5)) in groups
    assert ((0, 3), (1, 4), (2, 5)) in groups
    assert ((0, 1, 2), (3, 4, 5)) in groups


@pytest.mark.parametrize("machines", [(0, 0, 0), (0, 1, 2)])
@pytest.mark.parametrize("shared", [False, True])
def test_every_collective_runs_on_every_pattern(shared: bool, machines: tuple[int, ...]) -> None:
    """What can be awaited later is timed twice: on shared cores alone, between machines beside products."""
    transports = connect(3)
    chosen = [p for p in patterns(3, shared=shared, machines=machines) if p.nbytes <= 4096]
    assert {p.kind for p in chosen} == {*KINDS, MESSAGE_WORK}
    assert len({p.name for p in chosen}) == len(chosen)
    again = {*KINDS} - {"send", "broadcast"}
    assert {p.kind for p in chosen if p.overlapped} == (again if machines[1] else set())
    plain = {p.kind for p in chosen if not p.work and not p.overlapped and p.kind != MESSAGE_WORK}
    assert plain == ({*KINDS} if not shared else set() if machines[1] else again)

    def rank(at: int) -> list[RunTime]:
        cores = CoreSharing((2.0 if shared else 1.0,) * 3)
        return [measure(transports[at], pattern, 2, cores) for pattern in chosen]

    with ThreadPoolExecutor(3) as pool:
        by_rank = list(pool.map(rank, range(3)))
    for pattern, *taken in zip(chosen, *by_rank, strict=True):
        members = {r for group in pattern.groups for r in group}
        assert all((own.seconds > 0) == (r in members) for r, own in enumerate(taken)), pattern.name
        behind = shared and not pattern.overlapped and pattern.kind != MESSAGE_WORK
        assert all(bool(own.alone) == behind for own in taken), pattern.name
        beside = pattern.overlapped
        assert all(bool(own.beside) == (beside and r in members) for r, own in enumerate(taken)), pattern.name


@pytest.mark.parametrize("overlapped", [False, True])
def test_ranks_of_unequal_machines_make_equally_many_runs(
    overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has no quota, the other half of a core in periods of 100 ms; both compute equally long."""
    transports, groups = connect(2), ((0, 1),)
    given: list[tuple[int, float]] = []

    def behind(
        start: object, sent: object, repeats: int, trips: int, seconds: float, *rest: object
    ) -> RunTime:
        given.append((repeats, seconds))
        return RunTime(1.0)

    def beside(start: object, sent: object, repeats: int, seconds: float, *rest: object) -> RunTime:
        return behind(start, sent, repeats, 1, seconds)

    monkeypatch.setattr(collective_probes, "behind_work", behind)
    monkeypatch.setattr(collective_probes, "under_work", beside)

    def rank(at: int) -> None:
        cores = CoreSharing((1.0, 2.0), period=(0.0, 0.1)[at], machines=(0, 1))
        measure(transports[at], Pattern("all_reduce", groups, 1024, 0.002, overlapped), 20, cores)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))
    (runs, seconds), (other_runs, other_seconds) = sorted(given, key=itemgetter(1), reverse=True)
    assert runs == other_runs
    assert seconds == pytest.approx(2 * other_seconds)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"send"}))
def test_what_is_written_before_a_run_is_what_it_sends(kind: str) -> None:
    """Rank 0 writes into its array; rank 1 sees it in what arrives, on the next run and not before."""
    transports, group = connect(2), (0, 1)

    def rank(at: int) -> list[float]:
        start, sent = _prepare(transports[at], Pattern(kind, (group,), 64), group)
        found = []
        for _ in range(2):
            start().wait()
            found.append(float(sum(cell.cell_contents.sum() for cell in start.__closure__ if array(cell))))
            if at == 0:
                sent += 1
        return found

    with ThreadPoolExecutor(2) as pool:
        _, (before, after) = pool.map(rank, range(2))
    assert before == 0
    assert after > 0


def array(cell: Any) -> bool:
    return isinstance(cell.cell_contents, np.ndarray)


def timed(kind: str, groups: Any, nbytes: int, seconds: list[float], **given: Any) -> dict[str, Any]:
    """The entry of a store for one pattern, with a round for each number of seconds."""
    pattern = Pattern(kind, groups, nbytes, **given)
    return {f"|{pattern.name}": {"message": asdict(pattern), "runs": [[each] for each in seconds]}}


def test_collectives_become_tables_of_their_groups() -> None:
    """By the median of the rounds; what products beside them did not hide is `busy`.

    The last size was not timed beside products, which hide the same part of it as of the size before.
    """
    runs: dict[str, Any] = {}
    rows = ((1024, 5e-4, 1e-4), (4096, 6e-4, 7e-4), (16384, 8e-4, 2e-4), (65536, 2e-3, None))
    for groups in (((0, 1), (2, 3)), ((0, 2), (1, 3))):
        factor = 1 + groups[0][1]
        for nbytes, seconds, busy in rows:
            runs |= timed("all_reduce", groups, nbytes, [seconds * factor, 1.0, 1e-9], work=2e-3)
            if busy is not None:
                runs |= timed("all_reduce", groups, nbytes, [busy * factor], overlapped=True)
    runs |= timed("all_reduce", ((0, 1), (2, 3)), 2**18, [1.0], overlapped=True)  # then time was over
    runs |= timed("all_gather", ((0, 1), (2, 3)), 1024, [1.0], overlapped=True)
    runs |= timed("reduce_scatter", ((0, 1), (2, 3)), 1024, [3e-4], work=2e-3)
    runs |= timed("reduce_scatter", ((0, 1), (2, 3)), 1024, [1e-4])
    runs |= timed("broadcast", ((0, 1, 2, 3),), 1024, [3e-4], work=2e-3)
    found = evaluate(local_cluster(4), json.loads(json.dumps(runs)), ranks=4)
    near, far, alone, all_four = found.tables
    assert (alone.times, alone.busy) == ((3e-4,), (1e-4,))
    assert (near.groups, near.sizes) == (((0, 1), (2, 3)), (1024, 4096, 16384, 65536))
    assert near.times == pytest.approx((1e-3, 1.2e-3, 1.6e-3, 4e-3))
    assert near.busy == pytest.approx((2e-4, 1.2e-3, 4e-4, 1e-3))
    assert (far.groups, far.times) == (((0, 2), (1, 3)), pytest.approx((1.5e-3, 1.8e-3, 2.4e-3, 6e-3)))
    assert (all_four.collective, all_four.busy) == ("broadcast", None)
    assert (all_four.machines, all_four.devices_per_machine) == (1, 4)


def test_what_no_computation_hides_of_messages_between_machines() -> None:
    """The median over the tables of groups of several machines, from 64 KiB on; for every kind of device.

    Messages of 64 KiB and more are on the line 0.1 ms + half of their time, but for one, and one that took
    longer than any products beside it.
    """
    compute = Compute(2e-6, 0.5, 0.5, {"f32": MatmulRate(0.5, (10.0, 10.0, 10.0))})
    samples = works_of(compute, 20e9, {"f32": 2e11})
    works = {"works": [asdict(work) for work, _ in samples], "runs": [[seconds for _, seconds in samples]]}
    origins = ("machines[0].devices", "machines[1].devices")
    runs: dict[str, Any] = {f"{origin}|all": works for origin in origins}
    for groups, inside in ((((0, 2), (1, 3)), False), (((0, 1), (2, 3)), True)):
        for nbytes in (2**10, 2**16, 2**18, 2**20, 2**22, 2**28):
            seconds = 1e-4 + nbytes * 1e-9
            busy = {2**10: 1e-5, 2**20: 5e-3, 2**28: seconds}.get(nbytes, 1e-4 + 0.5 * seconds)
            runs |= timed("all_gather", groups, nbytes, [seconds])
            runs |= timed("all_gather", groups, nbytes, [seconds if inside else busy], overlapped=True)
    found = evaluate(machines(2, 2), json.loads(json.dumps(runs)), ranks=4)
    hosts = [found.compute[origin].compute.host for origin in origins]
    across = next(table for table in found.tables if table.machines == 2)
    on_line = [min(seconds, 1e-4 + 0.5 * seconds) for seconds in across.times[1:]]
    assert across.busy == pytest.approx([1e-5, *on_line], rel=0.03)
    part = median(busy / seconds for busy, seconds in zip(across.busy[1:], across.times[1:], strict=True))
    assert [host.network_busy for host in hosts] == [pytest.approx(part)] * 2
    inside = {key: entry for key, entry in runs.items() if "0-2" not in key}
    found = evaluate(machines(2, 2), json.loads(json.dumps(inside)), ranks=4)
    assert found.compute[origins[0]].compute.host.network_busy is None


def test_a_message_uses_a_link_for_no_less_a_byte_than_the_largest_ones() -> None:
    """Behind computation, between machines: the link takes 1 ns a byte by most of the largest messages.

    The permute of 4 MiB, the largest of its kind, appears to take half of that, and the reduce_scatter takes
    three times as long for reasons of its own. Inside a machine, and without computation, times are as
    measured.
    """
    runs: dict[str, Any] = {}
    across, inside = ((0, 2), (1, 3)), ((0, 1), (2, 3))
    seconds = {2**16: 1e-5, 2**20: 1e-3, 2**24: 2**24 * 1e-9}
    for kind in ("all_gather", "all_to_all"):
        for nbytes, taken in seconds.items():
            runs |= timed(kind, across, nbytes, [taken], work=2e-3)
    runs |= timed("all_gather", inside, 2**16, [1e-7], work=2e-3)
    runs |= timed("all_gather", inside, 2**24, [1e-2], work=2e-3)
    runs |= timed("permute", across, 2**22, [2 * 2**22 * 0.5e-9], work=2e-3)
    runs |= timed("reduce_scatter", across, 2**24, [3 * 2**24 * 1e-9], work=2e-3)
    runs |= timed("send", ((0, 2),), 2**24, [2**24 * 1e-9], work=2e-3)
    found = evaluate(machines(2, 2), json.loads(json.dumps(runs)), ranks=4)
    tables = {(table.collective, table.machines): table for table in found.tables}
    bound = pytest.approx([2**16 * 1e-9, 2**20 * 1e-9, 2**24 * 1e-9], rel=0.05)
    assert tables["all_gather", 2].times == bound
    assert tables["all_to_all", 2].times == bound
    assert tables["permute", 2].times == pytest.approx([2 * 2**22 * 1e-9], rel=0.05)
    assert tables["reduce_scatter", 2].times == pytest.approx([3 * 2**24 * 1e-9])
    assert tables["all_gather", 1].times == pytest.approx([1e-7, 1e-2])
    alone = timed("all_gather", across, 2**16, [1e-5]) | timed("all_gather", across, 2**24, [2**24 * 1e-9])
    (table,) = evaluate(machines(2, 2), json.loads(json.dumps(alone)), ranks=4).tables
    assert table.times == pytest.approx([1e-5, 2**24 * 1e-9])


def test_a_bad_round_of_one_size_does_not_make_a_message_easy_to_hide() -> None:
    """Nothing can be hidden, but one of six measurements beside products says that all of it can.

    It changes the line by a part of the error from which a measurement counts as disturbed, 0.1 %.
    """
    runs: dict[str, Any] = {}
    for groups in (((0, 2), (1, 3)), ((0, 3), (1, 2))):
        for nbytes in (2**18, 2**20, 2**22):
            busy = 1e-5 if (groups[0][1], nbytes) == (2, 2**20) else nbytes * 1e-9
            runs |= timed("all_gather", groups, nbytes, [nbytes * 1e-9])
            runs |= timed("all_gather", groups, nbytes, [busy], overlapped=True)
    found = evaluate(machines(2, 2), json.loads(json.dumps(runs)), ranks=4)
    assert all(table.busy == pytest.approx(table.times, rel=1e-3) for table in found.tables)
