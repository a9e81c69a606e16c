"""Plans on every rank of `mpiexec -n 2 python -m pytest -m mpi tests`; or 4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.programs.forecasts import machines
from support.programs.plan_cases import CASES, classifier, replace_spec

import distgraph as dg
from distgraph import nn
from distgraph.engine.commands import plan_search
from distgraph.errors import InfeasibleError
from distgraph.plan.plan import Plan
from distgraph.runtime.launch.mpi_rank import current_transport

pytestmark = pytest.mark.mpi


def fitting() -> Iterator[tuple[str, Plan]]:
    """Plans for at most as many ranks as there are."""
    transport = current_transport()
    assert transport is not None
    for name, case in CASES.items():
        engine = case.engine()
        engine.prepare(case.first())
        plan = engine.plan.portable
        if 1 < len(plan.ranks) <= transport.size:
            yield name, plan


def test_losses_are_those_of_one_rank() -> None:
    """Every process applies the plan for itself; the short last batch and evaluation follow it."""
    names = []
    for name, plan in fitting():
        case = CASES[name]
        rtol = 1e-5 if name == "narrow" else 1e-10
        x, y = case.data(20)
        serial = dg.Engine(case.make(False), nn.CrossEntropy(), replace_spec(case.optimizer), seed=3)
        planned = case.engine(plan)
        for engine in (serial, planned):
            engine.fit((x, y), batch_size=case.batch, valid_data=(x[:5], y[:5]), progress=False)
        np.testing.assert_allclose(planned.history.losses, serial.history.losses, rtol=rtol)
        np.testing.assert_allclose(planned.history["valid_loss"], serial.history["valid_loss"], rtol=rtol)
        names.append(name)
    assert {"dp", "tp", "pipeline"} <= set(names)


def test_rank_0_searches_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = current_transport()
    assert transport is not None
    case = CASES["dp"]
    wanted = case.engine()
    wanted.prepare(case.first())
    plan, asked = wanted.plan.portable, []

    def search(*given: Any) -> Plan:
        asked.append(given)
        if len(asked) > 1:
            raise InfeasibleError("nothing fits")
        return plan

    monkeypatch.setattr(plan_search, "search", search)

    def engine() -> dg.Engine:
        strategy, cluster = dg.Strategy(mode="auto"), machines(2)
        return dg.Engine(
            classifier()(False), nn.CrossEntropy(), case.optimizer, strategy=strategy, cluster=cluster
        )

    found = engine()
    found.fit(case.data(), batch_size=8, progress=False)
    assert found.plan.portable == plan
    with pytest.raises(InfeasibleError, match="nothing fits"):  # on every rank
        engine().prepare(case.first())
    assert len(asked) == (2 if transport.rank == 0 else 0)
