"""What is malformed in a plan file is told by its path."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.plans.plan_files import plan_of

from distgraph.errors import GraphError, ShardingError
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.plan.pipeline_schedules import schedule_names
from distgraph.plan.plan import (
    Computed,
    Plan,
)


def saved(tmp_path: Path, change: Any = None) -> Path:
    """A plan file, changed by `change(document)`."""
    path = tmp_path / "plan.json"
    document = json.loads(plan_of().text())
    if change is not None:
        change(document)
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="x"), "expected a plan"),
        (
            lambda d: d.update(version=99),
            r"plan has version 99 but this distgraph reads version 1; search again",
        ),
        (lambda d: d.pop("batch"), r"plan.json: batch: missing; add the field, see docs/planning/plan.md"),
        (lambda d: d.update(batch=0), r"plan.json: batch: expected a number from 1 up, got 0"),
        (lambda d: d.update(batch="many"), r'batch: expected a whole number, got "many"'),
        (
            lambda d: d.update(colour=1),
            "plan.json: colour: unknown field; check its spelling against",
        ),
        (
            lambda d: d["stages"][1].update(layers="4-5"),
            r"stages\[1\].layers: expected consecutive layers from 3 on",
        ),
        (lambda d: d["stages"].pop(), r"stages: expected stages that compute all 6 layers"),
        (
            lambda d: d["stages"][0].update(mesh="dp=two"),
            r'stages\[0\].mesh: expected a mesh such as "dp=2, tp=4"',
        ),
        (lambda d: d["stages"][0].update(ranks="0-2"), r"stages\[0\].ranks: expected 4 ranks"),
        (lambda d: d["stages"][0].update(ranks="0, 0, 1, 2"), r"stages\[0\].ranks: expected distinct ranks"),
        (lambda d: d["stages"][0].update(devices="1"), r"stages\[0\].devices: expected 4 devices"),
        (lambda d: d["placement"][0].update(ranks="2, 0"), r"placement\[0\].ranks: expected ascending ranks"),
        (lambda d: d["placement"][0].update(devices="5, 8"), r"placement\[0\].devices: expected 2 devices b"),
        (lambda d: d["placement"].pop(), r"placement: expected ranks 0-7, each once"),
        (lambda d: d["placement"][0].update(memory=0), r"placement\[0\].memory: expected a number from 1 up"),
        (
            lambda d: d.update(recompute="0-6"),
            r'recompute: expected numbers such as "0-7", at most 6',
        ),
        (lambda d: d["tensors"]["input"].update(x="dp"), r"tensors.input.x: expected a layout such as"),
        (
            lambda d: d["tensors"]["input"].update(x="[dp] @2"),
            r"tensors.input.x: expected a stage below 2",
        ),
        (lambda d: d["ops"][0]["ops"].append("matmul"), r"ops\[0\].ops\[2\]: expected an op such as"),
        (
            lambda d: d["ops"][0]["ops"].append("add @7 {} -> []"),
            r"ops\[0\].ops\[2\]: expected stages below 2",
        ),
        (lambda d: d["rest"].update(placed="8@2"), r"rest.placed: expected stages below 2"),
        (lambda d: d["ops"][0].update(layers="0-3"), r"ops: expected the ops of all 6 layers"),
        (
            lambda d: d.update(forecast={"seconds": "fast", "memory": []}),
            r"forecast.seconds: expected a number",
        ),
        (
            lambda d: d["stages"][0].update(layers="0-999999999"),
            r"layers: expected numbers .*, at most 6 layers",
        ),
        (
            lambda d: d["stages"][0].update(ranks="0-999999999"),
            r"ranks: expected numbers .*, at most 1048576",
        ),
        (lambda d: d["stages"][0].update(ranks="0, 1, 2, 99999999"), r"ranks: expected ranks below 1048576"),
        (lambda d: d["stages"][0].update(ranks="3-0"), r"stages\[0\].ranks: expected numbers such as"),
        (lambda d: d["stages"][0].update(mesh="dp=2, dp=2"), r"stages\[0\].mesh: expected a mesh"),
        (
            lambda d: d["stages"][0].update(mesh=f"a={2**32}, b={2**32}"),
            r"stages\[0\].mesh: expected a mesh such as",
        ),
        (
            lambda d: d["stages"][0].update(mesh=", ".join(f"a{i}=1" for i in range(65))),
            r"stages\[0\].mesh: expected a mesh such as",
        ),
        (
            lambda d: d["stages"][0].update(devices="1, 1, 2, 3"),
            r"stages\[0\].devices: expected 4 devices, as many as ranks",
        ),
        (
            lambda d: d["tensors"]["param"].update({"w.{0..999999999}": "[] @0"}),
            r"tensors.param\['w.\{0..999999999\}'\]: expected at most 1048576 names in all",
        ),
        (
            lambda d: d["tensors"]["param"].update({"w.{3..2}": "[] @0"}),
            r"tensors.param\['w.\{3..2\}'\]: expected at most",
        ),
        (
            lambda d: d["tensors"]["param"].update(x="[] @0"),
            r"tensors.param.x: expected names that are given once",
        ),
        (
            lambda d: d["tensors"]["input"].update(x="[ep] @0"),
            r"tensors.input.x: expected axes of stage 0, dp, tp",
        ),
        (
            lambda d: d["tensors"]["input"].update(x="[dp] @" + "9" * 5000),
            r"tensors.input.x: expected a layout such as",
        ),
        (
            lambda d: d["ops"].append(d["ops"][0]),
            r"ops\[1\].layers: expected numbers .*, at most 0 layers that",
        ),
        (
            lambda d: d["ops"][0].update(placed="4@1, 4@0"),
            r"ops\[0\].placed: expected ops that are given once",
        ),
        (
            lambda d: d.update(schedule="zigzag"),
            f"schedule: expected one of {', '.join(schedule_names())}, got",
        ),
        (lambda d: d["forecast"].update(memory=[1]), r"forecast.memory: expected 2 numbers, one a stage"),
        (lambda d: d["forecast"].update(seconds=0), r"forecast.seconds: expected a number greater than 0"),
        (
            lambda d: d["baselines"].update({"dp=8": -1}),
            r"baselines\['dp=8'\]: expected a number greater than 0",
        ),
        (
            lambda d: d["search"]["settings"].update(seconds=[]),
            r"search.settings.seconds: expected a text, a num",
        ),
        (
            lambda d: d.update(surface={"tensors": {}, "modules": {"": "@0 in: out: "}}),
            r"surface.modules\[''\]: expected a path that is not empty",
        ),
        (
            lambda d: d.update(surface={"tensors": {"y": "f32[2] as [_] by add 0"}, "modules": {}}),
            r"surface.tensors.y: expected names of inputs and parameters among tensors",
        ),
        (lambda d: d.update(version=True), r"plan.json: version: expected a whole number, got true"),
        (lambda d: d["program"].update(inputs=[]), r"program.inputs: expected a mapping"),
    ],
)
def test_malformed_files_are_told_by_path(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Plan.load(saved(tmp_path, change))


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"nowhere.json: cannot be read"):
        Plan.load(tmp_path / "nowhere.json")
    (tmp_path / "half.json").write_text(plan_of().text()[:200])
    with pytest.raises(GraphError, match=r"half.json:\d+:\d+: not JSON"):
        Plan.load(tmp_path / "half.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(GraphError, match=r"list.json: expected a plan"):
        Plan.load(tmp_path / "list.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GraphError, match=r"binary.json: cannot be read"):
        Plan.load(tmp_path / "binary.json")


def test_a_pattern_of_a_user_that_stands_for_too_much_is_told() -> None:
    with pytest.raises(
        GraphError, match=r"'blocks.\{0..999999999\}.weight' stands for no name, or for more than"
    ):
        plan_of().explain("blocks.{0..999999999}.weight")


def test_long_lines_of_a_plan_are_parsed_in_linear_time() -> None:
    """Patterns with two gaps took time that grows with the square of a line."""
    from distgraph.plan.export.module_interface import Part, Read

    lines = (
        (Read.parse, "f32[2] as [" + "] by " * 30_000),
        (Part.parse, "@0 in: " + "out: " * 30_000 + "\n"),
        (Computed.parse, "matmul {} -> " + "[]; " * 30_000),
        (ShardSpec.parse, "[" + ", ".join(f"a{i}" for i in range(30_000)) + "] x"),
    )
    for parse, line in lines:
        with pytest.raises((ValueError, ShardingError)):
            parse(line)
    assert len(ShardSpec.parse("[" + ", ".join(f"a{i}" for i in range(30_000)) + "]").dims) == 30_000


@pytest.mark.parametrize("by", ["matmul 1", "matmul 1 shared", "", " shared"])
def test_a_read_is_parsed_as_it_is_written(by: str) -> None:
    from distgraph.plan.export.module_interface import Read

    assert str(Read.parse(f"f32[8, 4] as [_, tp] by {by}")) == f"f32[8, 4] as [_, tp] by {by}"


@pytest.mark.parametrize("by", [" 1", "1", "matmul", " 1 shared"])
def test_a_read_without_an_op_or_its_operand_is_refused(by: str) -> None:
    from distgraph.plan.export.module_interface import Read

    with pytest.raises(ValueError, match=r"as .* by"):
        Read.parse(f"f32[8, 4] as [_, tp] by {by}")


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (False, "f32[08, 4] as [_, tp] by matmul 1"),
        (False, "f32[8, 4] as [_, tp] by matmul 01"),
        (True, "@1 in: [4, 6] [dp, _] as [dp, _] out: [04, 6] [dp, _] as [_, _]"),
        (True, "@01 in: [4, 6] [dp, _] as [dp, _] out: [4, 6] [dp, _] as [_, _]"),
        (True, "@1 in: [4, 6] [dp, _] as [dp, _] joined joined out: [4, 6] [dp, _] as [_, _]"),
        (True, "@1 in: [4, 6] [dp, _] as [dp, _] apart out: [4, 6] [dp, _] as [_, _]"),
    ],
)
def test_what_would_be_written_otherwise_is_refused(part: bool, text: str) -> None:
    from distgraph.plan.export.module_interface import Part, Read

    with pytest.raises(ValueError, match=re.escape(text)):
        (Part if part else Read).parse(text)


@pytest.mark.parametrize("text", ["accumulate {partial dp:00} -> [_]", "add {} -> [_] @01"])
def test_a_number_with_a_leading_zero_is_refused(text: str) -> None:
    assert str(Computed.parse(text.replace("0", "", 1))) == text.replace("0", "", 1)
    with pytest.raises(ValueError, match=r"^0"):
        Computed.parse(text)
