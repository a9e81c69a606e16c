"""A wait without progress ends with what every rank waits for."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from support.pipelines.forwarding import feeds, params, read_in_backward
from support.programs.partitioned import run_rank
from support.programs.rank_threads import run_ranks

from distgraph.errors import RuntimeFault
from distgraph.passes.complete import complete
from distgraph.runtime.program.build import build
from distgraph.runtime.program.memory_plan import StoragePlan, plan_storage


def test_the_report_names_what_every_rank_waits_for() -> None:
    """The middle of five stages does not take part."""
    graph, mesh = read_in_backward(5, 0, 1)
    built = build(complete(graph, mesh), micro_batches=6, policy="gpipe")
    with pytest.raises(RuntimeFault, match=r"made no progress in 0.3 s") as caught:
        run_ranks(5, lambda t: t.rank != 2 and run_rank(built, t, feeds(6), params()), limit=0.3, waiting=4)
    lines = str(caught.value).splitlines()[1:]
    message = r"%\S+ of micro-batch \d, (send|recv) \w+ rank \d"
    where = rf"waits in (forward|backward)\.s\d of micro-batch \d for {message}"
    assert len(lines) == 5, caught.value
    for rank, line in enumerate(lines):
        assert re.match(rf"  rank {rank} ({'does not wait' if rank == 2 else where})", line)


@pytest.mark.parametrize(("policy", "sender"), [("gpipe", 0), ("1f1b", 1)])
def test_ring_in_which_a_rank_would_wait_for_ever_is_refused_before_the_run(
    policy: str, sender: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring of one buffer where the receiver posts its receive in the backward part."""
    monkeypatch.setattr(StoragePlan, "_send_depths", lambda *_: (1, 1))
    graph, mesh = read_in_backward(5, sender, 2)
    built = build(complete(graph, mesh), micro_batches=6, policy=policy)
    with pytest.raises(
        RuntimeFault, match=rf"rank {sender}: forward.s{sender}\S* of micro-batch \d writes again"
    ):
        plan_storage(built.program(sender), built.schedule)


def test_rank_that_does_not_take_part_is_named() -> None:
    def body(transport: Any) -> None:
        if transport.rank == 0:
            transport.all_reduce(np.ones(3), "sum", (0, 1)).wait()
        else:
            transport.recv(np.ones(3), 2, 5).wait()

    with pytest.raises(RuntimeFault) as caught:
        run_ranks(3, lambda t: body(t) if t.rank < 2 else None, limit=0.2, waiting=2)
    text = str(caught.value)
    assert "rank 0 waits for all_reduce(sum) in group (0, 1)" in text
    assert "rank 1 waits for recv from rank 2 (tag 5)" in text
    assert "rank 2 does not wait" in text
