"""Meshes with weights: dims shared unevenly between ranks, for devices of unequal speed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.programs.equivalence import Case, Layout, batches, layouts
from support.programs.partitioned import assert_same, run_partitioned, run_serial
from support.programs.random_programs import Program, programs

from distgraph.errors import ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.parser import parse_graph
from distgraph.ir.printer import print_graph
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.complete import complete
from distgraph.passes.search.modes.recursive import prime_mesh
from distgraph.plan.plan import Layer, LayerOps, Plan, Stage
from distgraph.plan.plan import Program as PlanProgram

grid = ProcessMesh.grid
UNEVEN = (
    grid(x=2).weighted(x=(3, 1)),
    grid(x=3).weighted(x=(1, 2, 1)),
    grid(x=2, y=2).weighted(x=(1, 3)),
    grid(x=2, y=2).weighted(y=(2, 1)),
    grid(x=2, y=3).weighted(x=(2, 1), y=(1, 1, 2)),
)
PIPELINES = (
    (grid(x=2).weighted(x=(3, 1)), grid(2, x=2)),
    (grid(x=3).weighted(x=(1, 2, 1)), grid(x=3)),
    (grid(x=1), grid(1, x=3).weighted(x=(3, 2, 1))),
    (grid(x=2).weighted(x=(3, 1)), grid(x=2).weighted(x=(1, 3))),
)
checked = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    max_examples=max(40, settings.default.max_examples),
    report_multiple_bugs=False,
)
weights = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(weights, weights, st.integers(0, 60))
def test_parts_are_runs_of_the_units_of_an_even_split(first: list[int], second: list[int], size: int) -> None:
    mesh = grid(x=len(first), y=len(second)).weighted(x=first, y=second)
    shares = [a * b for a in first for b in second]
    common = math.gcd(*first) * math.gcd(*second)
    even = grid(u=sum(shares) // common)
    owner = np.repeat(np.arange(len(shares)), np.array(shares) // common)
    found = mesh.blocks(size, ("x", "y"))
    for unit, block in enumerate(even.blocks(size, ("u",))):
        assert found[owner[unit]][0] <= block[0]
        assert block[1] <= found[owner[unit]][1]
    assert [p for start, stop in found for p in range(start, stop)] == list(range(size))
    assert mesh.longest(size, ("x", "y")) == max(stop - start for start, stop in found)


@given(weights, st.integers(1, 20))
def test_a_dim_that_divides_is_shared_as_the_weights_say(own: list[int], times: int) -> None:
    mesh = grid(x=len(own)).weighted(x=own)
    lengths = [stop - start for start, stop in mesh.blocks(times * sum(own), ("x",))]
    assert lengths == [times * weight for weight in own]


def test_weights_are_part_of_a_mesh() -> None:
    mesh = grid(dp=3, tp=2).weighted(dp=(6, 2, 4))
    assert mesh.weights == {"dp": (3, 1, 2)}
    assert mesh != grid(dp=3, tp=2)
    assert mesh == grid(dp=3, tp=2).weighted(dp=(3, 1, 2), tp=(5, 5))
    assert mesh[1:3].weights == {"dp": (1, 2)}
    assert mesh["tp", 0].weights == {"dp": (3, 1, 2)}
    assert mesh["dp", 0].weights == {}
    assert mesh[1:2].weights == {}
    assert mesh.reordered(("dp",), (2, 0, 1)).weights == {"dp": (3, 1, 2)}
    assert str(mesh) == "mesh(dp=3:1:2, tp=2)"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dp": (1, 2, 3)}, "must be 2 whole numbers"),
        ({"dp": (1, 0)}, r"dp of weighted is \(1, 0\) but must be"),
        ({"dp": (1, 0.5)}, r"dp of weighted is \(1, 0.5\) but must be"),
        ({"tp": (1, 2)}, "weights of axis 'tp', but the mesh has dp"),
    ],
)
def test_weights_that_fit_no_axis_are_refused(given: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(ShardingError, match=said):
        grid(dp=2).weighted(**given)


def test_files_carry_weights() -> None:
    mesh = grid(4, dp=2, tp=2).weighted(dp=(3, 1))
    stage = Stage(mesh=mesh, first=0, last=2, devices=(3, 2, 1, 0))
    plan = Plan(
        program=PlanProgram(name="Net", fingerprint="0", parameters=1, inputs={}), batch=4, micro_batches=1,
        schedule="1f1b", layers=(Layer(first="0"), Layer(first="1")), stages=(stage,), tensors={},
        ops=(LayerOps(),) * 2,
    )  # fmt: skip
    assert Plan.parse(plan.text()).stages == (stage,)


@checked
@given(programs(tuple((mesh,) for mesh in UNEVEN), train=True))
def test_training(program: Program) -> None:
    check(program)


@checked
@given(programs(PIPELINES, train=True, steps=2))
def test_pipeline(program: Program) -> None:
    check(program)


def check(program: Program) -> None:
    """The same numbers as one rank, and the same text after a round trip."""
    completed = complete(program.graph, UNEVEN[0])
    text = print_graph(completed)
    assert print_graph(parse_graph(text)) == text
    expected, updates = run_serial(program.graph, program.feeds, program.params)
    found, new, _ = run_partitioned(completed, program.feeds, program.params)
    assert_same(found, expected, 1e-10)
    assert_same({k: [v] for k, v in new.items()}, {k: [v] for k, v in updates.items()}, 1e-10)


def test_double_recursion_refuses_weights() -> None:
    with pytest.raises(ShardingError, match=r"dp=2:1.*but double recursion halves"):
        prime_mesh(grid(dp=2).weighted(dp=(2, 1)))


def test_a_checkpoint_of_uneven_blocks_loads_anywhere(tmp_path: Path) -> None:
    """Parameters and states split 5:2:1 go on as those of one rank."""
    uneven = next(layout for layout in layouts("gpt") if layout.name == "dp_5_2_1_zero")
    data = batches("gpt", "f64", 16)
    first, serial, resumed = (Case("gpt", layout).engine() for layout in (uneven, Layout("serial"), uneven))
    first.run(data[0])
    first.save(tmp_path / "uneven")
    serial.run(data[1])
    serial.load(tmp_path / "uneven")
    after = serial.run(data[1])["loss"]
    serial.save(tmp_path / "serial")
    assert first.run(data[1])["loss"] == pytest.approx(after, rel=1e-10)
    resumed.run(data[0])
    resumed.load(tmp_path / "serial")
    assert resumed.run(data[2])["loss"] == pytest.approx(first.run(data[2])["loss"], rel=1e-10)


def test_a_merged_dim_keeps_the_parts_of_its_major_index() -> None:
    mesh = grid(dp=2).weighted(dp=(3, 1))
    rows, merged = ShardSpec.of(["dp", None]), ShardSpec.of(["dp"])
    assert rows.bounds((8, 5), mesh, 1) == ((6, 8), (0, 5))
    assert merged.bounds((40,), mesh, 1) == ((30, 40),)
