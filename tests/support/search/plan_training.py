"""Training with a searched plan against the serial engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from support.programs.searched import Program

from distgraph.engine.commands.inspection import check_step
from distgraph.plan.plan import Plan


@cache
def serial_losses(program: Program) -> list[float]:
    """Of three steps on one rank."""
    serial = program.engine()
    serial.fit(program.data(3), batch_size=program.batch, shuffle=False, progress=False)
    return serial.history.losses


def trains_as_one_rank(program: Program, plan: Plan, model: Callable[[], object] | None = None) -> None:
    """Three steps in-process with the plan, against the serial engine; and `check`, value by value."""
    model = model or program.make
    planned = program.engine(model(), plan=plan)
    request = planned._session.compile_request("train", program.first())
    report = check_step(request, planned._session.memory, program.first(), planned._scalars())
    assert report.ok, str(report)
    assert report.ranks == len(plan.ranks)
    planned = program.engine(model(), plan=plan)
    planned.fit(program.data(3), batch_size=program.batch, shuffle=False, progress=False)
    assert planned.plan.build.ranks == plan.ranks
    np.testing.assert_allclose(planned.history.losses, serial_losses(program), rtol=1e-9)
