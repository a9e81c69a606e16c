"""Training with a searched plan against the serial engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from support.programs.searched import Program

from distgraph.engine.commands.inspection import check_step
from distgraph.plan.plan import Plan


def trains_as_one_rank(program: Program, plan: Plan, model: Callable[[], object] | None = None) -> None:
    """Three steps in-process with the plan, against the serial engine; and `check`, value by value."""
    model = model or program.make
    serial, planned = program.engine(), program.engine(model(), plan=plan)
    request = planned._session.compile_request("train", program.first())
    report = check_step(request, planned._session.memory, program.first(), planned._scalars())
    assert report.ok, str(report)
    assert report.ranks == len(plan.ranks)
    planned = program.engine(model(), plan=plan)
    for engine in (serial, planned):
        engine.fit(program.data(3), batch_size=program.batch, shuffle=False, progress=False)
    assert planned.plan.build.ranks == plan.ranks
    np.testing.assert_allclose(planned.history.losses, serial.history.losses, rtol=1e-9)
