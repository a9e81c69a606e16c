"""Plans that exports are made of."""

from __future__ import annotations

from dataclasses import replace

from support.plans.exported import grid

import distgraph as dg
from distgraph import nn, ops
from distgraph.engine.compile.train_graph import train_graph
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.models import GShardMoE, MoEConfig, stages
from distgraph.passes.complete import complete
from distgraph.plan.export.module_interface import surface_of
from distgraph.plan.plan import Plan, Program, Stage, Stored


def plan_from(completed: Graph, *meshes: ProcessMesh, batch: int = 8, schedule: str = "1f1b") -> Plan:
    """A plan with what exports read."""
    tensors = {
        str(op.attrs["name"]): Stored(
            op.kind, meshes.index(completed.attrs[op.name].mesh), completed.attrs[op.name].spec
        )
        for op in completed.sources("input", "param", "state")
        if op.result.shape
    }
    return Plan(
        program=Program(name="model", fingerprint="", parameters=0, inputs={}),
        batch=batch,
        micro_batches=completed.micro_batches,
        schedule=schedule,
        layers=(),
        stages=tuple(Stage(mesh=mesh, first=0, last=0) for mesh in meshes),
        tensors=tensors,
        ops=(),
        surface=surface_of(completed, meshes),
    )


class Pair(nn.Module):
    """Column, then row; the activation between them belongs to the module itself."""

    def __init__(self, mesh: ProcessMesh, inner: int, sum_later: bool = False) -> None:
        self.up, self.down = nn.Linear(6, inner), nn.Linear(inner, 4, bias=False)
        dg.shard_tensor(self.up.weight, mesh, [None, "tp"])
        dg.shard_tensor(self.down.weight, mesh, ["tp", None])
        self.mesh = mesh

    def forward(self, x: object) -> object:
        return self.down(ops.relu(self.up(x)))


def pair(inner: int = 8, **sizes: int) -> Plan:
    mesh = grid(**(sizes or {"tp": 2}))
    graph = train_graph(
        Pair(mesh, inner), (((8, 6), "f32"), ((8, 4), "f32")), nn.MeanSquaredError(), dg.optim.Adam()
    )
    return plan_from(complete(graph, mesh), mesh)


def changed(plan: Plan, specs: dict[str, str]) -> Plan:
    """A plan with other layouts of some tensors."""
    tensors = {
        name: replace(at, spec=ShardSpec.parse(specs[name])) if name in specs else at
        for name, at in plan.tensors.items()
    }
    return replace(plan, tensors=tensors)


def moe() -> Plan:
    config = MoEConfig(hidden=8, layers=2, heads=2, experts=4, vocabulary=16, sequence=4, group=4)
    model, mesh = GShardMoE(config), grid(dp=2, tp=2)
    stages(model, [mesh])
    graph = train_graph(model, (((4, 4), "i32"), ((4, 4), "i32")))
    return plan_from(complete(graph, mesh), mesh, batch=4)


def arguments(plan: Plan) -> dict[str, object]:
    return dict(plan.export("megatron").data["arguments"])
