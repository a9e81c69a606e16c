"""Messages between ranks that a profile times: groups, every collective, and runs behind computation."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from distgraph.resources import local_cluster
from distgraph.runtime.profile.collective_probes import (
    KINDS,
    MESSAGE_WORK,
    Pattern,
    _prepare,
    axis_groups,
    measure,
    patterns,
)
from distgraph.runtime.profile.profiler import evaluate
from distgraph.runtime.profile.shared_cores import RunTime
from distgraph.runtime.transport.inprocess import connect


def test_groups_of_every_mesh_axis() -> None:
    groups = axis_groups(6)
    assert ((0, 1, 2, 3, 4, 5),) in groups
    assert ((0, 2, 4), (1, 3, 5)) in groups
    assert ((0, 1), (2, 3), (4, 5)) in groups
    assert ((0, 3), (1, 4), (2, 5)) in groups
    assert ((0, 1, 2), (3, 4, 5)) in groups


@pytest.mark.parametrize("shared", [False, True])
def test_every_collective_runs_on_every_pattern(shared: bool) -> None:
    transports = connect(3)
    chosen = [p for p in patterns(3, shared=shared) if p.nbytes <= 4096]
    assert {p.kind for p in chosen} == {*KINDS, MESSAGE_WORK}
    assert len({p.name for p in chosen}) == len(chosen)
    assert {(p.kind, p.work > 0) for p in chosen if p.kind in ("all_reduce", "send")} == (
        {("all_reduce", False), ("all_reduce", True), ("send", True)}
        if shared
        else {("all_reduce", False), ("send", False)}
    )

    def rank(at: int) -> list[RunTime]:
        return [measure(transports[at], pattern, 2, shared) for pattern in chosen]

    with ThreadPoolExecutor(3) as pool:
        by_rank = list(pool.map(rank, range(3)))
    for pattern, *taken in zip(chosen, *by_rank, strict=True):
        members = {r for group in pattern.groups for r in group}
        assert all((own.seconds > 0) == (r in members) for r, own in enumerate(taken)), pattern.name
        works = shared and pattern.kind != MESSAGE_WORK
        assert all((own.work > 0) == works for own in taken), pattern.name


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"send"}))
def test_what_is_written_before_a_run_is_what_it_sends(kind: str) -> None:
    """Rank 0 writes into its array; rank 1 sees it in what arrives, on the next run and not before."""
    transports, group = connect(2), (0, 1)

    def rank(at: int) -> list[float]:
        run, sent = _prepare(transports[at], Pattern(kind, (group,), 64), group)
        found = []
        for _ in range(2):
            run()
            found.append(float(sum(cell.cell_contents.sum() for cell in run.__closure__ if array(cell))))
            if at == 0:
                sent += 1
        return found

    with ThreadPoolExecutor(2) as pool:
        _, (before, after) = pool.map(rank, range(2))
    assert before == 0
    assert after > 0


def array(cell: Any) -> bool:
    return isinstance(cell.cell_contents, np.ndarray)


def test_collectives_become_tables_of_their_groups() -> None:
    """By the median of the rounds; where they were also timed behind work, that is the time."""
    runs = {}
    for groups in (((0, 1), (2, 3)), ((0, 2), (1, 3))):
        for nbytes, work, seconds in (
            (1024, 0.0, 1e-4),
            (4096, 0.0, 2e-4),
            (1024, 2e-3, 5e-4),
            (4096, 2e-3, 6e-4),
        ):
            pattern = Pattern("all_reduce", groups, nbytes, work)
            rounds = [[seconds * (1 + groups[0][1])], [1.0], [1e-9]]
            runs[f"|{pattern.name}"] = {"message": asdict(pattern), "runs": rounds}
    over = Pattern("all_reduce", ((0, 1), (2, 3)), 16384, 0.0)  # of what was to follow, time was over
    runs[f"|{over.name}"] = {"message": asdict(over), "runs": [[1.0]]}
    early = Pattern("all_gather", ((0, 1), (2, 3)), 1024, 0.0)
    runs[f"|{early.name}"] = {"message": asdict(early), "runs": [[1.0]]}
    alone = Pattern("broadcast", ((0, 1, 2, 3),), 1024, 2e-3)
    runs[f"|{alone.name}"] = {"message": asdict(alone), "runs": [[3e-4]]}
    found = evaluate(local_cluster(4), json.loads(json.dumps(runs)), ranks=4)
    near, far, all_four = found.tables
    assert (near.groups, near.sizes) == (((0, 1), (2, 3)), (1024, 4096))
    assert (near.times, near.busy) == (pytest.approx((1e-3, 1.2e-3)), pytest.approx((2e-4, 4e-4)))
    assert (far.groups, far.times) == (((0, 2), (1, 3)), pytest.approx((1.5e-3, 1.8e-3)))
    assert (all_four.collective, all_four.busy) == ("broadcast", None)
    assert (all_four.machines, all_four.devices_per_machine) == (1, 4)
