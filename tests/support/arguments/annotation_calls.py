"""Public annotations, meshes, specs, clusters, and functions of graphs, with arguments that fit."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.arguments.public_call import PublicCall

import distgraph as dg
from distgraph import nn, ops, resources

TP, GRID = dg.ProcessMesh.grid(tp=2), dg.ProcessMesh.grid(r=2, c=2)
X, W = ((4, 6), "f32"), ((6, 4), "f32")


def _shard_tensor(**arguments: Any) -> None:
    dg.shard_tensor(nn.Linear(6, 4).weight, **arguments)


def _shard_op(**arguments: Any) -> None:
    dg.trace(dg.shard_op(ops.matmul, **arguments), X, W)


def _product(**arguments: Any) -> None:
    square = ((8, 8), "f32")
    dg.trace(dg.shard_op(ops.matmul, GRID, **arguments), square, square)


def _on(mesh: Any) -> None:
    def twice(x: Any) -> Any:
        with dg.on(mesh):
            return x * 2

    dg.trace(twice, X)


def _task(name: Any) -> None:
    def twice(x: Any) -> Any:
        with dg.task(name):
            return x * 2

    dg.trace(twice, X)


def _eager(**arguments: Any) -> None:
    with dg.eager(**arguments):
        dg.numpy.ones((2,))


def _parallelized(**arguments: Any) -> None:
    def step(state: Any, batch: Any) -> Any:
        loss, gradient = dg.value_and_grad(lambda w: dg.numpy.mean(batch @ w))(state)
        return state - gradient, {"loss": loss}

    dg.parallelize(step, **arguments)(np.ones((6, 3), "f4"), np.ones((4, 6), "f4"))


def annotation_calls() -> dict[str, PublicCall]:
    """All calls by name."""
    pinned = {"mesh": TP, "dims": [None, "tp"]}
    options = {"algorithm": "meshslice", "dataflow": "OS", "slices": 2, "block": 2, "ring": None}
    parallel = {"devices": 1, "micro_batches": None, "stages": None, "layers": "auto", "cluster": None}
    graph = dg.trace(lambda x: x * 2, X)
    return {
        "shard_tensor": PublicCall(
            _shard_tensor, dg.shard_tensor, {**pinned, "partial": (), "gradient": False}
        ),
        "shard_tensor by axes": PublicCall(_shard_tensor, dg.shard_tensor, {"axes": [None, "tp"]}),
        "shard_op": PublicCall(
            _shard_op,
            dg.shard_op,
            {"mesh": TP, "in_specs": [[None, None], [None, "tp"]], "out_specs": [None, "tp"]},
        ),
        "shard_op with an algorithm": PublicCall(_product, dg.shard_op, options),
        "reshard": PublicCall(
            lambda **given: dg.trace(lambda x: dg.reshard(x, **given), X), dg.reshard, pinned
        ),
        "on": PublicCall(_on, dg.on, {"mesh": TP}),
        "task": PublicCall(_task, dg.task, {"name": "a"}),
        "pipeline_boundary": PublicCall(
            lambda mesh: dg.trace(lambda x: dg.pipeline_boundary(x, mesh), X),
            dg.pipeline_boundary,
            {"mesh": TP},
        ),
        "recompute": PublicCall(
            lambda function: dg.trace(dg.recompute(function), X),
            dg.recompute,
            {"function": ops.erf},
        ),
        "trace": PublicCall(
            lambda **given: dg.trace(lambda x: x, X, **given), dg.trace, {"name": "main", "names": ["a"]}
        ),
        "complete": PublicCall(dg.complete, dg.complete, {"graph": graph, "default": TP, "policy": "data"}),
        "grad": PublicCall(dg.grad, dg.grad, {"function": ops.erf, "has_aux": False}),
        "value_and_grad": PublicCall(
            dg.value_and_grad, dg.value_and_grad, {"function": ops.erf, "has_aux": False}
        ),
        "eager": PublicCall(_eager, dg.eager, {"seed": 0, "training": False, "show": False}),
        "parallelize": PublicCall(
            _parallelized,
            dg.parallelize,
            {"method": "data_parallel", **parallel, "donate": True, "plan": None, "strategy": None},
        ),
    }


def _queries(mesh: Any, spec: Any) -> dict[str, PublicCall]:
    """What a mesh and a spec say about ranks and blocks."""
    axes, block = {"axes": ["tp"]}, {"size": 8, "axes": ["tp"]}
    split, place = spec.of([None, "tp"]), {"shape": [4, 8], "mesh": TP, "rank": 1}
    arguments: dict[str, dict[str, Any]] = {
        "count": axes,
        "borders": axes,
        "units": axes,
        "block": {**block, "position": 1},
        "blocks": block,
        "longest": block,
        "coordinates": {"rank": 1},
        "index": {"rank": 1, **axes},
        "group": {"rank": 1, **axes},
        "groups": axes,
        "is_repeated_in": {"other": GRID},
        "device_type_of": {"rank": 1},
        "renumbered": {"ranks": [3, 4]},
    }
    made = {f"ProcessMesh.{name}": (TP, mesh, name, given) for name, given in arguments.items()}
    made |= {
        "ShardSpec.replicated": (spec, spec, "replicated", {"ndim": 2}),
        "ShardSpec.check": (split, spec, "check", {"shape": [4, 8], "mesh": TP}),
        "ShardSpec.check_dims": (split, spec, "check_dims", {"shape": [4, 8], "subject": "x"}),
        "ShardSpec.check_axes": (split, spec, "check_axes", {"where": "x"}),
        "ShardSpec.reduction": (split, spec, "reduction", {"axis": "tp"}),
        "ShardSpec.local_shape": (split, spec, "local_shape", place),
        "ShardSpec.bounds": (split, spec, "bounds", place),
        "ShardSpec.slices": (split, spec, "slices", place),
    }
    return {
        name: PublicCall(getattr(owner, method), getattr(kind, method), given)
        for name, (owner, kind, method, given) in made.items()
    }


def mesh_calls() -> dict[str, PublicCall]:
    """Calls of meshes and specs; not the queries that a compiler makes for every rank and tensor."""
    mesh, spec = dg.ProcessMesh, dg.ShardSpec
    square = {"ranks": [[0, 1], [2, 3]], "axes": ["a", "b"], "weights": None, "device_type": None}
    return {
        "ProcessMesh": PublicCall(mesh, mesh, {**square, "memory": None}),
        "ProcessMesh.grid": PublicCall(
            lambda start, a: mesh.grid(start, a=a), mesh.grid, {"start": 0, "a": 2}
        ),
        "ProcessMesh.reshape": PublicCall(lambda a: TP.reshape(a=a), mesh.reshape, {"a": 2}),
        "ProcessMesh.weighted": PublicCall(lambda tp: TP.weighted(tp=tp), mesh.weighted, {"tp": (1, 2)}),
        "ProcessMesh.requiring": PublicCall(
            TP.requiring, mesh.requiring, {"device_type": "gpu", "memory": "8GiB"}
        ),
        "ProcessMesh.repeated": PublicCall(TP.repeated, mesh.repeated, {"count": 2}),
        "ProcessMesh.reordered": PublicCall(TP.reordered, mesh.reordered, {"axes": ["tp"], "order": [1, 0]}),
        "ProcessMesh.contains": PublicCall(TP.contains, mesh.contains, {"other": TP}),
        **_queries(mesh, spec),
        "ProcessMesh.axis_size": PublicCall(TP.axis_size, mesh.axis_size, {"axis": "tp"}),
        "ShardSpec.of": PublicCall(
            spec.of, spec.of, {"dims": [None, "tp"], "partial": {"dp": "sum"}, "where": "w"}
        ),
        "ShardSpec.parse": PublicCall(spec.parse, spec.parse, {"text": "[_, tp]"}),
        "MixedPrecision": PublicCall(
            dg.MixedPrecision,
            dg.MixedPrecision,
            {"dtype": "fp16", "allow": (), "deny": (), "loss_scale": 65536.0, "growth_interval": 2000}
            | {"growth": 2.0, "backoff": 0.5},
        ),
    }


def cluster_calls() -> dict[str, PublicCall]:
    """All calls by name."""
    pod = dg.load_cluster("tpu_v4_16x16")
    tuned = {"layers": {"a": (2048, 1024, 1024)}, "cluster": pod, "devices": 16, "dtype": "bf16"}
    mapped = {"ranks": 2, "volume": {(0, 1): 1e6}, "cluster": pod, "requirements": resources.Requirement()}
    functions = {
        "load_cluster": (dg.load_cluster, {"name_or_path": "local"}),
        "tune_mesh2d": (dg.tune_mesh2d, {**tuned, "algorithm": "meshslice", "meshes": None}),
        "resources.local_cluster": (resources.local_cluster, {"ranks": 2}),
        "resources.register_cluster": (
            resources.register_cluster,
            {"name": "of test_arguments", "make": lambda: pod},
        ),
        "resources.with_torus_shape": (resources.with_torus_shape, {"cluster": pod, "shape": (8, 32)}),
        "resources.map_ranks": (resources.map_ranks, {**mapped, "objective": "bytes"}),
        "resources.describe": (resources.describe, {"cluster": pod}),
        "resources.summarize": (resources.summarize, {"cluster": pod}),
        "Cluster.flops": (pod.flops, {"device": 0, "dtype": "bf16"}),
        "Cluster.machine_of": (pod.machine_of, {"device": 0}),
        "Cluster.check_group": (pod.check_group, {"group": [0, 1]}),
    }
    return {name: PublicCall(function, function, given) for name, (function, given) in functions.items()}
