"""Steps with nan gradients on every rank of `mpiexec -n 2 python -m pytest tests/mpi`: one verdict."""

from __future__ import annotations

import numpy as np
import pytest
from support.programs.overflowing import Scales, batch, engine
from support.programs.training import LAYOUTS

import distgraph as dg
from distgraph import optim
from distgraph.errors import NonFiniteError
from distgraph.optim import Adam
from distgraph.runtime.launch.mpi_rank import current_transport

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


PART, PARTS = 20_000, 20
"""Elements of a gradient, and their number: so many that the ranks agree by a message, and that several
gradients are reduced as one, of which each rank reduces a part."""


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("position", [0, PART - 1, PART, 2 * PART - 1, PART * PARTS // 2, PART * PARTS - 1])
def test_no_element_of_a_reduced_gradient_is_left_out(zero: int, position: int) -> None:
    transport = current_transport()
    assert transport is not None
    mesh = dg.ProcessMesh.grid(dp=2)
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp", zero=zero, nonfinite="skip")
    trained = dg.Engine(Scales(PARTS, PART), optimizer=optim.SGD(lr=1e-12, momentum=0.9), strategy=strategy)
    good = np.full((2, PART * PARTS), 0.5, "f4")
    bad, large = good.copy(), good.copy()
    bad[:, position] = 0.0
    large[:, position] = 1e38  # the square of the gradient overflows
    trained.run(good)
    trained.run(good)
    trained.run(bad)
    assert trained.history.skipped == [3]
    trained.run(good)
    trained.run(large)
    assert trained.history.skipped == [3]
