"""The forecast of distgraph for measured runs of Megatron-DeepSpeed.

*In:* runs (`training_program`), values by name of a parameter. *Out:* the forecast of a step of every run.
*Invariant:* forecasts are those of `distgraph.runtime.forecast` for the program of the run, on the cluster
and under the runtime that the values describe, and nothing beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import distgraph as dg
from benchmarks.support.megatron.training_program import SINGLE_REDUCTIONS, Run, Shape, gpt_model
from distgraph import optim
from distgraph.engine.compile.train_graph import train_graph
from distgraph.ir.graph import Graph
from distgraph.passes.complete import complete
from distgraph.plan.forecast_errors import Uncertain
from distgraph.resources import Cluster
from distgraph.resources.cluster import MatmulRate
from distgraph.resources.host_times import HostTimes
from distgraph.resources.load import load_cluster
from distgraph.resources.runtimes.load_runtime import load_runtime
from distgraph.resources.runtimes.runtime_model import Messages, RuntimeModel
from distgraph.runtime.forecast.forecast import forecasts
from distgraph.runtime.profile.calibration.robust_fit import by_group
from distgraph.runtime.program.build import build

CLUSTER = "vtrain_a100_pod"
Values = Mapping[str, float]


Program = tuple[int, ...]
"""All of a run but its number of micro-batches."""


def program_of(run: Run) -> Program:
    """Runs with equal values differ in the number of micro-batches only."""
    return (run.hidden, run.heads, run.layers, run.sequence, run.micro, run.tp, run.dp, run.pp)


def completed(run: Run) -> Graph:
    """The training step of a run, of one micro-batch; the whole forward part of a block is recomputed."""
    shape = Shape(run.hidden, run.heads, run.sequence, run.micro, run.tp)
    per_stage = [run.layers // run.pp] * run.pp
    meshes = [dg.ProcessMesh.grid(i * run.dp * run.tp, dp=run.dp, tp=run.tp) for i in range(run.pp)]
    model = gpt_model(shape, per_stage, meshes)
    model.recompute = True
    batch = (((run.micro * run.dp, run.sequence), "i64"),) * 2
    return complete(train_graph(model, batch, None, optim.Adam(), pruned=False), meshes[0])


def cluster_of(values: Values) -> Cluster:
    """The machines of the measured runs with other numbers."""
    cluster = load_cluster(CLUSTER)
    device = cluster.devices[0]
    rate = MatmulRate(values["efficiency"], (values["half_m"], values["half_n"], values["half_k"]))
    compute = replace(
        device.compute,
        launch=values["launch"],
        memory_efficiency=values["memory_efficiency"],
        lookup_efficiency=values["lookup_efficiency"],
        matmul={**device.compute.matmul, "f16": rate},
    )
    peak = {**device.peak, "f16": values["peak"]}
    numbers = {
        "nvlink": (values["inside_bandwidth"], values["inside_latency"]),
        "infiniband": (values["network_bandwidth"], values["network_latency"]),
    }
    links = tuple(
        replace(link, bandwidth=numbers[link.kind][0], latency=numbers[link.kind][1])
        if link.kind in numbers
        else link
        for link in cluster.links
    )
    devices = tuple(
        replace(each, compute=compute, peak=peak, memory_bandwidth=values["memory_bandwidth"])
        for each in cluster.devices
    )
    return replace(cluster, devices=devices, links=links, launch=values["collective_launch"])


def runtime_of(values: Values) -> RuntimeModel:
    """Megatron-LM with the messages of DeepSpeed, which do not block."""
    megatron = load_runtime("megatron")
    return replace(
        megatron,
        messages=Messages(start=values["send_launch"]),
        kernels=replace(megatron.kernels, update_bytes=values["update_bytes"]),
        host=HostTimes(op=values["issue"], micro_batch=values["micro"], step=values["step"]),
    )


def forecasts_of(runs: Sequence[Run], values: Sequence[Sequence[Values]]) -> list[list[Uncertain]]:
    """For every run the seconds of a step with what they go to, under each of the run's values.

    The runs have one program (`program_of`), which is completed once.
    """
    graph = completed(runs[0])
    found = []
    for run, several in zip(runs, values, strict=True):
        program = build(graph, micro_batches=run.micro_batches, passes=SINGLE_REDUCTIONS)
        cases = [(cluster_of(each), runtime_of(each)) for each in several]
        found.append([forecast.uncertain for forecast in forecasts(program, cases)])
    return found


def forecast_runs(
    runs: Sequence[Run], values: Mapping[str, Sequence[Values]], workers: int = 2
) -> dict[str, list[Uncertain]]:
    """Name -> forecast of every run, each under its own values.

    Args:
        runs: what is forecast.
        values: name -> the values for every run.
        workers: processes.
    """
    programs = by_group([program_of(run) for run in runs])
    columns = list(zip(*values.values(), strict=True))
    found: dict[int, list[Uncertain]] = {}
    with ProcessPoolExecutor(workers) as pool:
        tasks = [([runs[at] for at in rows], [columns[at] for at in rows]) for rows in programs]
        for rows, several in zip(programs, pool.map(forecasts_of, *zip(*tasks, strict=True)), strict=True):
            found.update(zip(map(int, rows), several, strict=True))
    return {name: [found[at][place] for at in range(len(runs))] for place, name in enumerate(values)}
