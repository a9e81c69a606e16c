"""A plan of two stages, made by hand, and its file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import distgraph as dg
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.plan.placement import PlacedRanks
from distgraph.plan.plan import (
    Computed,
    Decision,
    Estimate,
    Layer,
    LayerOps,
    Plan,
    Program,
    Rest,
    SearchRecord,
    Stage,
    Stored,
)


def plan_of(layers: int = 6, **changes: Any) -> Plan:
    """Two stages, every layer with the same ops and two parameters."""
    half = layers // 2
    mesh = dg.ProcessMesh.grid(dp=2, tp=2)
    ops = LayerOps(
        ("1", "1.3"),
        (("1.2", 0), ("4", 1)),
        (
            Computed("matmul", (("m", ("dp",)), ("n", ("tp",))), (), (ShardSpec.of(["dp", "tp"]),)),
            Computed("add", (), (("tp", 0),), (ShardSpec.of([None], {"tp": "sum"}),), 1, (0,)),
        ),
    )
    tensors = {"x": Stored("input", 0, ShardSpec.of(["dp", None]))}
    for i in range(layers):
        tensors[f"blocks.{i}.weight"] = Stored("param", int(i >= half), ShardSpec.of([None, "tp"]))
        tensors[f"blocks.{i}.weight.m"] = Stored("state", int(i >= half), ShardSpec.of([("dp", "tp"), None]))
    made = Plan(
        program=Program(name="Net", fingerprint="0af3", parameters=100, inputs={"x": "f32[4, 8]"}),
        cluster="pod",
        batch=16,
        micro_batches=4,
        schedule="1f1b",
        layers=tuple(Layer(first=str(10 * i), scope=f"blocks.{i}") for i in range(layers)),
        stages=(
            Stage(mesh=mesh, first=0, last=half, devices=(3, 2, 1, 0)),
            Stage(mesh=dg.ProcessMesh.grid(4, dp=2, tp=2), first=half, last=layers, devices=(4, 5, 6, 7)),
        ),
        placement=(
            PlacedRanks(
                machine="m0", type="gpu", model="A", memory=1 << 34, count=8, ranks=(0, 2), devices=(5, 1)
            ),
            PlacedRanks(
                machine="m1",
                type="cpu",
                model="B",
                memory=1 << 33,
                count=6,
                ranks=(1, 3, 4, 5, 6, 7),
                devices=(0, 1, 2, 3, 4, 5),
            ),
        ),
        recompute=(0, 1, 4),
        tensors=tensors,
        ops=(ops,) * layers,
        rest=Rest(("9",), (("8", 0),), (("7", Computed("constant", results=(ShardSpec(()),), stage=1)),)),
        forecast=Estimate(seconds=0.25, memory=(1 << 30, 1 << 29)),
        baselines={"dp=8": 0.5, "tp=8": "too large"},
        search=SearchRecord(
            mode="auto", status="feasible", bound=0.2, gap=0.25, seconds=3.0, settings={"seconds": 30.0}
        ),
        decisions={
            f"blocks.{{0..{layers - 1}}}.weight": Decision(
                chosen="[_, tp]",
                terms={"compute": 0.1, "all_reduce": 0.02},
                runner_up="[tp, _]",
                runner_up_seconds=0.3,
                note="a note",
            ),
            "micro_batches": Decision(chosen="4", runner_up="8", note="not forecast: out of time"),
        },
    )
    return replace(made, **changes)
