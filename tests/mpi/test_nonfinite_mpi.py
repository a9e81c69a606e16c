"""Steps with nan gradients on every rank of `mpiexec -n 2 python -m pytest tests/mpi`: one verdict."""

from __future__ import annotations

import pytest
from support.programs.overflowing import batch, engine
from support.programs.training import LAYOUTS

from distgraph.errors import NonFiniteError
from distgraph.optim import Adam
from distgraph.runtime.launch.launch import current_transport

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow):RuntimeWarning"),
]


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2tp2", "serial"])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_one_verdict_on_every_rank(layout: str, policy: str) -> None:
    transport = current_transport()
    assert transport is not None
    first, second = LAYOUTS[layout]
    if first is not None and max(first.members + second.members) >= transport.size:
        pytest.skip(f"{layout} needs more than {transport.size} ranks")
    trained = engine(layout, policy, 2, optimizer=Adam(lr=0.01, clip_norm=1.0))
    trained.run(batch())
    records = trained.memory.records
    mine = [name for name, record in records.items() if transport.rank in record.attr.mesh]
    before = {name: trained.memory.block(name, transport.rank).tobytes() for name in mine}
    message = ""
    if policy == "raise":
        with pytest.raises(NonFiniteError) as caught:
            trained.run(batch("gradient"))
        message = str(caught.value)
    else:
        trained.run(batch("gradient"))
        assert trained.history.skipped == [2]
    assert {name: trained.memory.block(name, transport.rank).tobytes() for name in mine} == before
    losses = [trained.run(batch())["loss"]]
    gathered = transport.gather_objects((message, losses), 0)
    assert gathered is None or all(each == gathered[0] for each in gathered)
