"""Forecasts that reports are made of."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from support.programs.forecasts import chain, machines

from distgraph.ir.mesh import ProcessMesh
from distgraph.runtime.forecast.forecast import Forecast, forecast
from distgraph.runtime.program.build import Build

grid = ProcessMesh.grid
PLOTLY = pytest.mark.skipif(find_spec("plotly") is None, reason="plotly is not installed")
TENSOR = [[None, "tp"], ["tp", None]] * 2


def pipe(micro: int = 5, rows: int = 12, inner: int = 60) -> Build:
    """Two stages of two by three ranks, two layers each, split by tensor."""
    meshes = [grid(0, dp=2, tp=3)] * 2 + [grid(6, dp=2, tp=3)] * 2
    return chain(rows, [40, inner, 20, inner, 10], meshes, micro, weights=TENSOR)


def traced(build: Build, *sizes: int) -> Forecast:
    return forecast(build, machines(*sizes), trace=True)
