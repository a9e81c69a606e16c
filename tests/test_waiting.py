"""A wait without progress ends with what every rank waits for."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from forwarding import feeds, params, read_in_backward
from partitioned import run_rank

from distgraph.errors import RuntimeFault
from distgraph.passes.complete import complete
from distgraph.runtime.build import build
from distgraph.runtime.inprocess import run_ranks
from distgraph.runtime.storage import StoragePlan


def test_every_rank_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of one buffer: a stage waits to write what a later stage receives in its backward part only."""
    monkeypatch.setattr(StoragePlan, "_under_way", lambda *_: (1, 1))
    graph, mesh = read_in_backward(5, 0, 1)
    built = build(complete(graph, mesh), micro_batches=6, policy="gpipe")
    with pytest.raises(RuntimeFault, match=r"made no progress in 0.3 s") as caught:
        run_ranks(5, lambda t: run_rank(built, t, feeds(6), params()), limit=0.3)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 5, caught.value
    message = r"%\S+ of micro-batch \d, (send|recv) \w+ rank \d"
    where = rf"waits in (forward|backward)\.s\d of micro-batch \d for {message}"
    for rank, line in enumerate(lines):
        assert line.startswith(f"  rank {rank} ")

    assert re.search(f"rank 0 {where}", lines[0])
    assert re.search(f"rank 1 {where}", lines[1])


def test_rank_that_does_not_take_part_is_told_apart() -> None:
    def body(transport: Any) -> None:
        if transport.rank == 0:
            transport.all_reduce(np.ones(3), "sum", (0, 1)).wait()
        else:
            transport.recv(np.ones(3), 2, 5).wait()

    with pytest.raises(RuntimeFault) as caught:
        run_ranks(3, lambda t: body(t) if t.rank < 2 else None, limit=0.2)
    text = str(caught.value)
    assert "rank 0 waits for all_reduce(sum) in group (0, 1)" in text
    assert "rank 1 waits for recv from rank 2 (tag 5)" in text
    assert "rank 2 does not wait" in text
