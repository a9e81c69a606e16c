"""The forecast of an engine's program, and of a script's: `Engine.forecast`, `distgraph forecast script.py`.

Nothing runs and no parameter is made: the program is compiled for a cluster, and timed there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from distgraph.data import Batch, Field
from distgraph.engine.compiler import compile_program
from distgraph.engine.plan import Plan
from distgraph.engine.price import price_on
from distgraph.engine.program import Recipe
from distgraph.engine.script import Seen, run_until_seen
from distgraph.engine.session import equal_parts
from distgraph.errors import DistGraphError, ResourceError
from distgraph.graph import Graph
from distgraph.mesh import ProcessMesh
from distgraph.passes.complete import complete
from distgraph.resources import Cluster, RankMapping, load_cluster
from distgraph.runtime.build import Build, build
from distgraph.runtime.forecast import Forecast, forecast, out_of_memory
from distgraph.runtime.report import Subject, report
from distgraph.runtime.trace_events import write_trace
from distgraph.spec import DistAttr, Origin, ShardSpec


@dataclass(frozen=True)
class Training:
    """A program that is to be forecast.

    Attributes:
        recipe: model, loss, optimiser, strategy.
        mode: train, evaluate or predict.
        size: samples of a batch.
        fields: shape and dtype of a sample.
        layouts: where parameters lie already.
    """

    recipe: Recipe
    mode: str
    size: int
    fields: Mapping[str, Field]
    layouts: Mapping[str, DistAttr]

    def blocks(self, micro_batches: int) -> dict[str, Field]:
        """Shape and dtype of a micro-batch."""
        count = self.size // micro_batches
        return {name: ((count, *shape), dtype) for name, (shape, dtype) in self.fields.items()}


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

    def write(self, html: str | Path | None, trace: str | Path | None) -> None:
        """Write a report, a Chrome trace, or both.

        Raises:
            RuntimeFault: plotly is not installed, or a file cannot be written.
        """
        if trace is not None:
            write_trace(self.forecast, trace)
        if html is None:
            return
        mode, ranks = self.training.mode, len(self.build.ranks)
        title = f"forecast of {mode} on {self.cluster.name}, {ranks} rank{'s' * (ranks > 1)}"
        tensors = Plan(self.build, mode, self.mapping).tensors
        report(self.forecast, html, Subject(title, self.build, self.cluster, tensors, self.beside()))

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
            completed = complete(plain(serial, mesh), mesh)
            built = build(completed, price=price_on(self.cluster, devices))
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
        micro = equal_parts(training.size, training.recipe.strategy.micro_batches)
        blocks = training.blocks(micro)
        built = compile_program(training.recipe, training.mode, blocks, micro, training.layouts, cluster)
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


# Forecasting a script

WANTED: ContextVar[tuple[Cluster | None] | None] = ContextVar("distgraph_forecast", default=None)
"""Set while a script is run for a forecast: the cluster, or None for that of its engine."""


def propose(training: Training, own: Cluster | None) -> None:
    """Called by an engine before it compiles: does nothing unless a script is being forecast."""
    wanted = WANTED.get()
    if wanted is not None:
        raise Seen(forecast_training(training, cluster_for(wanted[0], own, "distgraph forecast --cluster")))


def training_of(recipe: Recipe, mode: str, batch: Batch, layouts: Mapping[str, DistAttr]) -> Training:
    """What a batch would be given to."""
    return Training(recipe, mode, len(batch), batch.fields(), layouts)


def cluster_for(given: Cluster | None, own: Cluster | None, way_out: str) -> Cluster:
    """The cluster to forecast for. Raises ResourceError when there is none."""
    cluster = own if given is None else given
    if cluster is None:
        raise ResourceError(
            f"forecast: the engine has no cluster, so there are no devices to forecast for; give it one with "
            f"Engine(cluster=...) or {way_out}"
        )
    return cluster


def forecast_script(path: str | Path, argv: Sequence[str] = (), cluster: str | None = None) -> Forecasted:
    """Run a script up to its first program, and forecast that in place of running it.

    Args:
        path: of the script.
        argv: its arguments.
        cluster: resource file or name of a shipped one; that of the script's engine by default.

    Raises:
        GraphError: there is no such file, or the script ends, exits or raises without a training step.
        ResourceError: there is no cluster, it is too small, or lacks a number that a cost needs.
    """
    token = WANTED.set((None if cluster is None else load_cluster(cluster),))
    try:
        found: Forecasted = run_until_seen(path, argv, "forecast", "there is nothing to forecast")
    finally:
        WANTED.reset(token)
    return found
