"""The forecast of a program: `Engine.forecast` and `distgraph forecast script.py`.

The program is compiled for a cluster and its step is simulated. It does not run, and no parameter is
allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from distgraph.engine.compile.compile import compile_program
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.program_summary import PlanView
from distgraph.engine.compile.strategy_passes import strategy_pipeline
from distgraph.errors import DistGraphError, ResourceError
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.pass_pipeline import run_passes
from distgraph.passes.pass_registry import PassContext
from distgraph.resources import Cluster, RankMapping, load_cluster
from distgraph.resources.mesh_communication import MeshCommunication
from distgraph.resources.runtimes.runtime_model import RuntimeModel
from distgraph.runtime.execute.measured_timeline import MeasuredTimeline
from distgraph.runtime.forecast.forecast import Forecast, forecast, out_of_memory
from distgraph.runtime.program.build import Build, build
from distgraph.runtime.report.chrome_trace import write_trace
from distgraph.runtime.report.comparison import comparison_text
from distgraph.runtime.report.html_report import Subject, load_plotly, report


def check_outputs(
    html: str | Path | None = None, measured: MeasuredTimeline | str | Path | None = None
) -> MeasuredTimeline | None:
    """Check what `ProgramForecast.write` needs before the forecast is computed; reads the measured timeline.

    Raises:
        RuntimeFault: plotly, which a report needs, is not installed; the timeline cannot be read.
    """
    if html is not None:
        load_plotly()
    return MeasuredTimeline.read(measured) if isinstance(measured, (str, Path)) else measured


@dataclass(frozen=True)
class ProgramForecast:
    """The forecast of a compiled program. Print it."""

    request: CompileRequest
    cluster: Cluster
    build: Build
    mapping: RankMapping | None
    forecast: Forecast

    def write(
        self,
        html: str | Path | None = None,
        trace: str | Path | None = None,
        measured: MeasuredTimeline | None = None,
    ) -> None:
        """Write a report, a Chrome trace, or both.

        Args:
            html: path of the report.
            trace: path of the Chrome trace.
            measured: a measured timeline to show next to the forecast (see `check_outputs`).

        Raises:
            RuntimeFault: plotly is not installed; a file cannot be written; the timeline is of another
                program.
        """
        if measured is not None:
            measured.check(self.forecast.timeline.graph)
        if trace is not None:
            write_trace(self.forecast, trace, measured)
        if html is None:
            return
        mode, ranks = self.request.mode, len(self.build.ranks)
        title = f"forecast of {mode} on {self.cluster.name}, {ranks} rank{'s' * (ranks > 1)}"
        tensors = PlanView(self.build, mode, self.mapping).tensors
        report(
            self.forecast,
            html,
            Subject(title, self.build, self.cluster, tensors, self.data_parallel_baseline(), measured),
        )

    def compared_with(self, measured: MeasuredTimeline) -> str:
        """The forecast and a measured timeline as a table. Raises RuntimeFault: it is of another program."""
        measured.check(self.forecast.timeline.graph)
        return comparison_text(self.forecast, measured)

    def data_parallel_baseline(self) -> dict[str, Forecast | str]:
        """Name -> forecast of plain data parallelism on the same devices, or the reason why there is none."""
        ranks = self.build.ranks
        if len(ranks) == 1:
            return {}
        mesh = ProcessMesh(np.asarray(ranks), ["dp"])
        name = f"plain data parallel (dp={mesh.size})"
        if self.request.size < mesh.size:
            return {name: f"there is none: the batch has {self.request.size} samples, fewer than ranks"}
        devices = self.forecast.devices
        try:
            request = self.request
            serial = request.training_spec.trace(request.mode, request.blocks(1), {})
            completed: Graph = run_passes(
                with_data_parallel_inputs(serial, mesh), ("complete",), PassContext(mesh=mesh), verified=False
            )
            passes = strategy_pipeline(request.training_spec.strategy)
            price = MeshCommunication(self.cluster, devices).price
            built = build(completed, price=price, passes=passes)
            return {name: forecast(built, self.cluster, devices, runtime=self.forecast.runtime)}
        except DistGraphError as error:
            return {name: f"there is none: {error}"}

    def __str__(self) -> str:
        shortages = out_of_memory(self.forecast, self.cluster)
        fits = [f"out of memory: {shortage}" for shortage in shortages] or ["fits every device"]
        return "\n".join([f"cluster {self.cluster.name} ({self.cluster.source})", str(self.forecast), *fits])


def forecast_training(
    request: CompileRequest,
    cluster: Cluster,
    built: tuple[Build, RankMapping | None] | None = None,
    runtime: RuntimeModel | str | None = None,
) -> ProgramForecast:
    """Compile a program for a cluster (unless `built` is given) and forecast a step.

    Args:
        request: the program.
        cluster: what it is to run on.
        built: the compiled program with the device of every rank.
        runtime: what executes it, see `forecast`.

    Raises:
        GraphError, ShardingError: the program or its annotations do not fit.
        ResourceError: the meshes need more devices than the cluster has, or it lacks a number that a cost
            needs; there is no such runtime.
    """
    if built is None:
        built = compile_program(request, cluster)
    program, mapping = built
    step = forecast(program, cluster, mapping, runtime=runtime, trace=True)
    return ProgramForecast(request, cluster, program, mapping, step)


def forecast_of(
    request: CompileRequest,
    built: tuple[Build, RankMapping | None],
    of_engine: Cluster | None,
    cluster: Cluster | str | Path | None,
    runtime: RuntimeModel | str | None,
    html: str | Path | None,
    trace: str | Path | None,
    measured: MeasuredTimeline | str | Path | None,
) -> Forecast:
    """What `Engine.forecast` returns and writes.

    Args:
        request: the program.
        built: the program as it was compiled for the cluster of the engine.
        of_engine: that cluster.
        cluster, runtime, html, trace, measured: the arguments of `Engine.forecast`.
    """
    timeline = check_outputs(html, measured)
    chosen = load_cluster(cluster) if isinstance(cluster, (str, Path)) else cluster
    chosen = cluster_for(chosen, of_engine, "forecast(cluster=...)")
    result = forecast_training(request, chosen, built if chosen is of_engine else None, runtime)
    result.write(html, trace, timeline)
    return result.forecast


def with_data_parallel_inputs(serial: Graph, mesh: ProcessMesh, length: int | None = None) -> Graph:
    """A serial graph without its annotations, and with every input split along its first dim.

    Args:
        serial: the graph.
        mesh: its first axis splits the first dim.
        length: of the sequences, which the second axis splits where it is the length of the second dim.
    """
    ops = [replace(op, kind="identity", attrs={}) if op.kind == "reshard" else op for op in serial.ops]
    origin = Origin("user", "plain data parallelism")
    attrs = {}
    for op in serial.sources("input"):
        shape = op.result.shape
        split = [mesh.axes[0], *[None] * (len(shape) - 1)]
        if len(shape) > 1 and shape[1] == length:
            split[1] = mesh.axes[1]
        if shape:
            attrs[op.name] = DistAttr(mesh, ShardSpec.of(split), origin)
    return serial.with_ops(ops, attrs=attrs, placements={}, axis_attrs={}, op_axes={})


def cluster_for(requested: Cluster | None, of_engine: Cluster | None, way_out: str) -> Cluster:
    """The cluster to forecast for. Raises ResourceError if there is none."""
    cluster = of_engine if requested is None else requested
    if cluster is None:
        raise ResourceError(
            f"forecast: the engine has no cluster, so there are no devices to forecast for; give it one with "
            f"Engine(cluster=...) or {way_out}"
        )
    return cluster
