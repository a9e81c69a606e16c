"""What exports have in common, what JAX gets, and the command line."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from support.plans.exported import CASES, grid, plan_of
from support.plans.exported_plans import changed, pair
from typer.testing import CliRunner

import distgraph as dg
from distgraph import nn
from distgraph.cli import application
from distgraph.engine.compile.train_graph import train_graph
from distgraph.errors import GraphError, ShardingError
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.complete import complete
from distgraph.plan.export.module_interface import Flow, Part, Read, Surface, surface_of
from distgraph.plan.plan import Plan


def test_borders_of_modules_are_found_through_the_code_around_them() -> None:
    surface = plan_of("dp_tp").surface
    assert surface is not None
    attention = surface.modules["blocks.1.attn"]
    whole, split = ShardSpec.parse("[dp, _, _]"), ShardSpec.parse("[dp, _, tp]")
    assert attention.enters == (Flow((8, 8, 16), whole, whole),)
    assert surface.modules["blocks.1.attn.k"].enters == (Flow((8, 8, 16), whole, whole, inherited=True),)
    assert surface.modules["blocks.1.attn.k"].leaves == (Flow((8, 8, 16), split, split, loose=True),)
    assert surface.modules["tokens"].leaves[0].joined, "the positions are added by code of no module"
    assert surface.tensors["head.weight"] == Read("f32", (16, 24), ShardSpec.parse("[_, tp]"), "matmul", 1)
    assert not any(part.again for part in surface.modules.values())


def test_modules_that_are_computed_again_are_the_outermost_ones() -> None:
    surface = plan_of("recompute").surface
    assert surface is not None
    assert [path for path, part in surface.modules.items() if part.again] == ["blocks.0", "blocks.1"]


def test_a_module_inside_may_be_computed_again_alone() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            self.first, self.second, self.last = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

        def forward(self, x: object) -> object:
            return self.last(dg.recompute(self.second)(self.first(x)))

    mesh = grid(dp=2)
    graph = train_graph(Twice(), (((8, 4), "f32"), ((8, 4), "f32")), nn.MeanSquaredError())
    surface = surface_of(complete(graph, mesh), [mesh])
    again = [path for path, part in surface.modules.items() if part.again]
    assert again
    assert all(path.startswith("second") for path in again)


@pytest.mark.parametrize("name", ["dp_tp_zero1_sequence", "pp"])
def test_a_surface_survives_the_plan_file(name: str, tmp_path: Path) -> None:
    plan = plan_of(name)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.surface == plan.surface
    for framework in ("jax", "torch"):
        assert loaded.export(framework) == plan.export(framework)


def test_equal_layers_share_a_line_of_the_file() -> None:
    surface = json.loads(plan_of("tp").text())["surface"]
    assert "blocks.{0..1}.mlp.up.weight" in surface["tensors"]
    assert "blocks.{0..1}.attn.q" in surface["modules"]


@pytest.mark.parametrize("text", ["", "f32[4", "@1 in out", "[2] [dp as [_]"])
def test_malformed_texts_are_refused(text: str) -> None:
    for kind in (Read, Flow, Part):
        with pytest.raises((ValueError, ShardingError)):
            kind.parse(text)


def test_a_graph_without_layouts_has_no_surface() -> None:
    graph = train_graph(nn.Linear(4, 4), (((8, 4), "f32"), ((8, 4), "f32")), nn.MeanSquaredError())
    with pytest.raises(GraphError, match="only a completed graph has a surface"):
        surface_of(graph, [grid(dp=2)])


def test_the_plan_of_an_engine_is_exported_too() -> None:
    engine = dg.Engine(nn.Linear(4, 2), nn.MeanSquaredError(), dg.optim.Adam())
    plan = engine.prepare((np.zeros((8, 4), "f4"), np.zeros((8, 2), "f4")))
    assert plan.export("jax") == plan.portable.export("jax")


def test_bad_requests_say_the_way_out() -> None:
    with pytest.raises(GraphError, match=r"'keras' is unknown; .* jax, torch, megatron"):
        plan_of("dp").export("keras")
    with pytest.raises(GraphError, match="plan of GPT has no surface"):
        replace(plan_of("dp"), surface=None).export("jax")


def test_jax_gets_a_spec_for_every_tensor_and_module() -> None:
    data = plan_of("dp_tp").export("jax").data
    (stage,) = data["stages"]
    assert stage["mesh"] == {"axes": ["dp", "tp"], "shape": [2, 2], "ranks": [[0, 1], [2, 3]]}
    assert stage["parameters"]["blocks.0.mlp.down.weight"] == ["tp", None]
    assert stage["states"]["blocks.0.attn.q.bias.adam_v"] == ["tp"]
    assert stage["inputs"] == {"ids": ["dp", None], "target": ["dp", None]}
    assert stage["activations"]["blocks.1.mlp.up"] == ["dp", None, "tp"]
    assert stage["activations"]["blocks.1"] == ["dp", None, None]
    json.dumps(data)


def test_a_dim_split_over_two_axes_is_a_tuple() -> None:
    plan = changed(pair(dp=2, tp=2), {"down.weight": "[tp*dp, _]"})
    export = plan.export("jax")
    assert export.data["stages"][0]["parameters"]["down.weight"] == [["tp", "dp"], None]
    assert '"down.weight": P(("tp", "dp"), None)' in export.source


def test_a_dim_that_does_not_divide_is_kept_whole_and_said() -> None:
    export = pair(inner=9).export("jax")
    assert export.data["stages"][0]["parameters"]["up.weight"] == [None, None]
    assert export.data["stages"][0]["states"]["up.weight.adam_m"] == [None, None]
    (note,) = (note for note in export.notes if note.startswith("dim 1 of length 9"))
    assert "does not divide into 2 equal parts over tp" in note
    assert "up.weight, up.weight.adam_m" in note


def test_partial_activations_are_left_out_and_said() -> None:
    plan = pair()
    assert plan.surface is not None
    down = plan.surface.modules["down"]
    partial = replace(down.leaves[0], spec=ShardSpec.parse("[_, _] partial(tp)"))
    modules = {**plan.surface.modules, "down": replace(down, leaves=(partial,))}
    export = replace(plan, surface=Surface(plan.surface.tensors, modules)).export("jax")
    assert set(export.data["stages"][0]["activations"]) == {"up"}
    assert any("partial sums" in note and "down" in note for note in export.notes)


def test_constrain_refuses_names_that_the_plan_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = pair()
    assert plan.surface is not None
    down = plan.surface.modules["down"]
    partial = replace(down.leaves[0], spec=ShardSpec.parse("[_, _] partial(tp)"))
    modules = {**plan.surface.modules, "down": replace(down, leaves=(partial,))}
    source = replace(plan, surface=Surface(plan.surface.tensors, modules)).export("jax").source
    jax = MagicMock()
    jax.devices.return_value = list(range(8))
    jax.lax.with_sharding_constraint.side_effect = lambda x, sharding: ("laid out", x)
    for name in ("jax", "jax.sharding"):
        monkeypatch.setitem(sys.modules, name, jax)
    module: dict[str, Any] = {}
    exec(source, module)
    assert module["constrain"]("up", 3) == ("laid out", 3)
    assert module["constrain"]("down", 3) == 3  # left to XLA
    with pytest.raises(KeyError, match=r"plan has no activation 'upp'; it has up"):
        module["constrain"]("upp", 3)


def test_every_stage_has_its_own_specs() -> None:
    export = plan_of("dp_pp").export("jax")
    first, second = export.data["stages"]
    assert second["mesh"]["ranks"] == [2, 3]
    assert "tokens.weight" in first["parameters"]
    assert "tokens.weight" not in second["parameters"]
    assert "blocks.1" in second["activations"]
    assert "stages = (" in export.source
    assert "JAX has no pipeline" in export.notes[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_sources_are_python(name: str, framework: str, tmp_path: Path) -> None:
    export = plan_of(name).export(framework)
    ast.parse(export.source)
    export.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["notes"] == list(export.notes)
    export.save(tmp_path / "plan.py")
    assert (tmp_path / "plan.py").read_text() == str(export)


def test_the_command_line_writes_an_export(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "shardings.py"
    plan_of("dp_pp").save(plan)
    done = CliRunner().invoke(application.app, ["export", str(plan), "jax", "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert out.read_text() == plan_of("dp_pp").export("jax").source
    assert "not expressed: JAX has no pipeline" in done.stderr
    shown = CliRunner().invoke(application.app, ["export", str(plan), "megatron"])
    assert shown.stdout == plan_of("dp_pp").export("megatron").source


def test_the_command_line_says_what_is_wrong(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan_of("gpipe").save(plan)
    done = CliRunner().invoke(application.app, ["export", str(plan), "megatron"])
    assert done.exit_code != 0
    assert isinstance(done.exception, ShardingError)
