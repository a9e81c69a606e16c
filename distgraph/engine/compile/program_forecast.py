"""The forecast of an engine's program, and of a script's: `Engine.forecast`, `distgraph forecast script.py`.

Nothing runs and no parameter is made: the program is compiled for a cluster, and timed there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from distgraph.engine.compile.compile import compile_program
from distgraph.engine.compile.compile_request import Training
from distgraph.engine.compile.program_summary import PlanView
from distgraph.engine.compile.strategy_passes import strategy_pipeline
from distgraph.errors import DistGraphError, ResourceError
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.pass_pipeline import run_passes
from distgraph.passes.pass_registry import PassContext
from distgraph.resources import Cluster, RankMapping
from distgraph.resources.mesh_communication import MeshCommunication
from distgraph.runtime.execute.measured_timeline import MeasuredTimeline
from distgraph.runtime.forecast.forecast import Forecast, forecast, out_of_memory
from distgraph.runtime.program.build import Build, build
from distgraph.runtime.report.chrome_trace import write_trace
from distgraph.runtime.report.html_report import Subject, load_plotly, report


def beforehand(
    html: str | Path | None = None, measured: MeasuredTimeline | str | Path | None = None
) -> MeasuredTimeline | None:
    """What `Forecasted.write` needs, while there is no forecast yet: the measured timeline, read.

    Raises:
        RuntimeFault: plotly, which a report needs, is not installed; the timeline cannot be read.
    """
    if html is not None:
        load_plotly()
    return MeasuredTimeline.read(measured) if isinstance(measured, (str, Path)) else measured


@dataclass(frozen=True)
class Forecasted:
    """A forecast with what it is of. Print it.

    Attributes:
        training: the program.
        cluster: where it is to run.
        build: the compiled program.
        mapping: device of every rank.
        forecast: of a step.
    """

    training: Training
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
            html, trace: paths.
            measured: a measured timeline to show beside the forecast (see `beforehand`).

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
        mode, ranks = self.training.mode, len(self.build.ranks)
        title = f"forecast of {mode} on {self.cluster.name}, {ranks} rank{'s' * (ranks > 1)}"
        tensors = PlanView(self.build, mode, self.mapping).tensors
        report(
            self.forecast, html, Subject(title, self.build, self.cluster, tensors, self.beside(), measured)
        )

    def beside(self) -> dict[str, Forecast | str]:
        """The same training as plain data parallelism on the same devices; in words where that cannot be."""
        ranks = self.build.ranks
        if len(ranks) == 1:
            return {}
        mesh = ProcessMesh(np.asarray(ranks), ["dp"])
        name = f"plain data parallel (dp={mesh.size})"
        if self.training.size < mesh.size:
            return {name: f"there is none: the batch has {self.training.size} samples, fewer than ranks"}
        devices = self.forecast.devices
        try:
            training = self.training
            serial = training.recipe.trace(training.mode, training.blocks(1), {})
            completed: Graph = run_passes(
                plain(serial, mesh), ("complete",), PassContext(mesh=mesh), verified=False
            )
            passes = strategy_pipeline(training.recipe.strategy)
            price = MeshCommunication(self.cluster, devices).price
            built = build(completed, price=price, passes=passes)
            return {name: forecast(built, self.cluster, devices)}
        except DistGraphError as error:
            return {name: f"there is none: {error}"}

    def __str__(self) -> str:
        short = [str(each) for each in out_of_memory(self.forecast, self.cluster)]
        fits = [f"out of memory: {text}" for text in short] or ["fits every device"]
        return "\n".join([f"cluster {self.cluster.name} ({self.cluster.source})", str(self.forecast), *fits])


def forecast_training(
    training: Training, cluster: Cluster, built: tuple[Build, RankMapping | None] | None = None
) -> Forecasted:
    """Compile a program for a cluster, unless it is compiled already, and forecast a step.

    Raises:
        GraphError, ShardingError: the program or its annotations do not fit.
        ResourceError: the meshes need more devices than the cluster has, or it lacks a number that a cost
            needs.
    """
    if built is None:
        built = compile_program(training, cluster)
    program, mapping = built
    found = forecast(program, cluster, mapping, trace=True)
    return Forecasted(training, cluster, program, mapping, found)


def plain(serial: Graph, mesh: ProcessMesh) -> Graph:
    """A serial program without its annotations, every input split along its first dim."""
    ops = [replace(op, kind="identity", attrs={}) if op.kind == "reshard" else op for op in serial.ops]
    origin = Origin("user", "plain data parallelism")
    attrs = {
        op.name: DistAttr(mesh, ShardSpec.of([mesh.axes[0], *[None] * (len(op.result.shape) - 1)]), origin)
        for op in serial.sources("input")
        if op.result.shape
    }
    return serial.with_ops(ops, attrs=attrs, placements={})


def cluster_for(given: Cluster | None, own: Cluster | None, way_out: str) -> Cluster:
    """The cluster to forecast for. Raises ResourceError when there is none."""
    cluster = own if given is None else given
    if cluster is None:
        raise ResourceError(
            f"forecast: the engine has no cluster, so there are no devices to forecast for; give it one with "
            f"Engine(cluster=...) or {way_out}"
        )
    return cluster
