"""The forecast of distgraph for measured runs of Megatron-DeepSpeed.

*In:* runs (`training_program`), values by name of a parameter. *Out:* seconds of a step of every run.
*Invariant:* seconds are those of `distgraph.runtime.forecast` for the program of the run, on the cluster and
under the runtime that the values describe, and nothing beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np

import distgraph as dg
from benchmarks.support.megatron.training_program import SINGLE_REDUCTIONS, Run, Shape, gpt_model
from distgraph import optim
from distgraph.engine.compile.train_graph import train_graph
from distgraph.passes.complete import complete
from distgraph.resources import Cluster
from distgraph.resources.cluster import MatmulRate
from distgraph.resources.host_times import HostTimes
from distgraph.resources.load import load_cluster
from distgraph.resources.runtimes.load_runtime import load_runtime
from distgraph.resources.runtimes.runtime_model import Messages, RuntimeModel
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.program.build import Build, build

CLUSTER = "vtrain_a100_pod"
Values = Mapping[str, float]


def run_build(run: Run) -> Build:
    """The compiled training step of a run: checkpointing runs the whole forward part of a block again."""
    shape = Shape(run.hidden, run.heads, run.sequence, run.micro, run.tp)
    per_stage = [run.layers // run.pp] * run.pp
    meshes = [dg.ProcessMesh.grid(i * run.dp * run.tp, dp=run.dp, tp=run.tp) for i in range(run.pp)]
    model = gpt_model(shape, per_stage, meshes)
    model.recompute = True
    batch = (((run.micro * run.dp, run.sequence), "i64"),) * 2
    graph = train_graph(model, batch, None, optim.Adam(), pruned=False)
    return build(complete(graph, meshes[0]), micro_batches=run.micro_batches, passes=SINGLE_REDUCTIONS)


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


def seconds_of_run(run: Run, values: Sequence[Values]) -> list[float]:
    """Seconds of a step of one run under each of some values."""
    program = run_build(run)
    return [forecast(program, cluster_of(each), runtime=runtime_of(each)).step_seconds for each in values]


def seconds_of(runs: Sequence[Run], values: Mapping[str, Sequence[Values]]) -> dict[str, np.ndarray]:
    """Name -> seconds of every run, each under its own values.

    Args:
        runs: what is forecast.
        values: name -> the values for every run.
    """
    columns: Iterable[tuple[Values, ...]] = zip(*values.values(), strict=True)
    with ProcessPoolExecutor(2) as pool:
        found = list(pool.map(seconds_of_run, runs, list(columns), chunksize=4))
    return {name: np.array([each[at] for each in found]) for at, name in enumerate(values)}
