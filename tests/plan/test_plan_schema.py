"""Plans as files: what is written is read again and stays small; a file that cannot be written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans.plan_files import plan_of

import distgraph as dg
from distgraph.errors import GraphError, ShardingError
from distgraph.ir.range_notation import fold, parse_spans, spans, unfold
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.plan import plan_components, schema
from distgraph.plan.plan import (
    Computed,
    LayerOps,
    Rest,
    Stored,
)

AXES = st.lists(st.sampled_from(["dp", "tp", "ep"]), unique=True, min_size=1, max_size=2).map(tuple)
SPECS = st.builds(
    lambda dims, pending: ShardSpec(tuple(dims), pending),
    st.sampled_from([[], [()], [("dp",), ()], [(), ("tp", "dp")]]),
    st.sampled_from([(), (("ep", "sum"),), (("ep", "max"),)]),
)


@st.composite
def computed(draw: st.DrawFn) -> Computed:
    """Any line of a plan."""
    splits = st.tuples(st.sampled_from("mnk"), AXES)
    results = tuple(draw(st.lists(SPECS, min_size=1, max_size=3)))
    stage = st.none() | st.integers(0, 20)
    stored = tuple(draw(st.lists(stage, min_size=len(results), max_size=len(results))))
    return Computed(
        draw(st.sampled_from(["matmul", "add", "comm.slice"])),
        tuple(draw(st.lists(splits, max_size=2))),
        tuple(draw(st.lists(st.tuples(st.sampled_from(["tp", "ep"]), st.integers(0, 2)), max_size=1))),
        results,
        draw(stage),
        stored if any(kept is not None for kept in stored) else (),
    )


def test_round_trip(tmp_path: Path) -> None:
    plan = plan_of()
    plan.save(tmp_path / "plan.json")
    again = dg.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert list(again.tensors) == [
        "x", *(f"blocks.{i}.weight" for i in range(6)), *(f"blocks.{i}.weight.m" for i in range(6))
    ]  # fmt: skip
    assert again.text() == plan.text() == (tmp_path / "plan.json").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]  # nothing temporary is left


@given(computed())
def test_ops_read_as_they_print(op: Computed) -> None:
    assert Computed.parse(str(op)) == op


PLACED = st.lists(st.tuples(st.sampled_from(["3", "12.1"]), st.integers(0, 20)), max_size=2).map(tuple)
DECOMPOSED = st.lists(st.sampled_from(["3", "12.1"]), max_size=2).map(tuple)


@given(DECOMPOSED, PLACED, st.lists(computed(), max_size=3))
def test_sections_read_as_they_print(
    decomposed: tuple[str, ...], placed: tuple[tuple[str, int], ...], ops: list[Computed]
) -> None:
    layer = LayerOps(decomposed, placed, tuple(ops))
    rest = Rest(decomposed, placed, tuple((f"57.{number}", op) for number, op in enumerate(ops)))
    assert LayerOps.parse(str(layer)) == layer
    assert Rest.parse(str(rest)) == rest


@given(st.lists(st.integers(0, 30)))
def test_spans_are_read_as_written(numbers: list[int]) -> None:
    assert parse_spans(spans(numbers)) == tuple(numbers)


@given(
    st.dictionaries(
        st.from_regex(r"(a|b\.[0-3]|b\.[0-9]{1,2}\.c\.[0-2]|[0-2]\.w|12)", fullmatch=True), st.integers(0, 2)
    )
)
def test_folded_names_unfold(table: dict[str, int]) -> None:
    folded = fold(table)
    assert {name: item for pattern, item in folded.items() for name in unfold(pattern)} == table
    assert sum(len(unfold(pattern)) for pattern in folded) == len(table)


def test_more_layers_are_not_more_lines_of_ops() -> None:
    """Only the list of layers grows with them."""
    few, many = plan_of(6).text().splitlines(), plan_of(96).text().splitlines()
    assert len(many) - len(few) == 90


def test_one_changed_layout_is_one_changed_line() -> None:
    plan = plan_of()
    tensors = {**plan.tensors, "x": Stored("input", 0, ShardSpec.of([None, None]))}
    before, after = plan.text().splitlines(), replace(plan, tensors=tensors).text().splitlines()
    assert [(a, b) for a, b in zip(before, after, strict=True) if a != b] == [
        ('   "x": "[dp, _] @0"', '   "x": "[_, _] @0"')
    ]


def test_a_plan_is_written_with_the_fields_that_are_read() -> None:
    assert tuple(schema.PlanFile.model_fields) == plan_components.FIELDS


def test_a_plan_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="cannot be written"):
        plan_of().save(tmp_path / "missing" / "plan.json")


@pytest.mark.parametrize(
    "text", ["[_,, tp]", "[,]", "[dp,] partial(tp)", "[dp] partial()", "[dp] partial(tp:)"]
)
def test_a_layout_with_an_empty_part_is_none(text: str) -> None:
    """What was left out between two commas was passed over in silence."""
    with pytest.raises(ShardingError):
        ShardSpec.parse(text)
