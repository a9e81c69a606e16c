"""Graph text: what is printed parses back, at every stage; malformed text is drawn."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ops.graph_equality import same_graph
from support.programs.random_programs import MESHES, OVERLAPPING, PIPELINES, programs

from distgraph import ops
from distgraph.array_api.trace import trace
from distgraph.errors import GraphError
from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.parser import parse_graph, print_graph
from distgraph.ir.reference_interpreter import interpret
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.pass_pipeline import run_passes

ALL_MESHES = tuple((mesh,) for mesh in MESHES) + PIPELINES + OVERLAPPING
NAMES = st.text(min_size=1, max_size=8)


def round_trip(graph: Graph) -> Graph:
    text = print_graph(graph)
    parsed = parse_graph(text)
    assert print_graph(parsed) == text
    return parsed


def test_a_graph_without_ops_round_trips() -> None:
    assert round_trip(Graph("empty", (), {})).ops == ()


def test_an_index_that_no_axis_splits_is_read_as_one_that_is_left_out() -> None:
    text = """graph @g
  mesh m0 = (dp=2) ranks 0..1
  %x : f32[4, 2] [_, _] = input {name="x"} <AXES> data
  output "y" = %x
"""
    graph = parse_graph(text.replace("AXES", "z0:_"))
    assert round_trip(graph) == parse_graph(text.replace("AXES", ""))


@given(programs(ALL_MESHES, train=True))
def test_a_program_round_trips_at_every_stage(program):
    stages = [program.graph]
    run_passes(program.graph, ["complete", "reshard", "lower"], watch=lambda run: stages.append(run.after))
    assert len(stages) == 4
    for graph in stages:
        assert round_trip(graph) == graph


@given(st.data())
def test_any_fields_round_trip(data):
    name = st.text(max_size=6)
    mesh = ProcessMesh(np.array([[4, 2, 9]]), ["one", "tp"])
    x = Value(data.draw(NAMES), (3, 0), "bf16")
    y = Value(x.name + data.draw(NAMES), (), "bool")
    attrs = data.draw(
        st.dictionaries(st.from_regex(r"[a-z_]\w{0,5}", fullmatch=True), attributes, max_size=3)
    )
    spec = ShardSpec(((), ("tp", "one")), ())
    partial = ShardSpec((), (("one", "max"), ("tp", "sum")))
    graph = Graph(
        data.draw(NAMES),
        (
            Op("input", (), (x,), attrs, "data", data.draw(name), data.draw(name), ""),
            Op(
                "odd.kind_2",
                (x, x),
                (y,),
                {},
                "backward",
                "",
                "",
                x.name,
                OpLayout(mesh, (("i", ("tp",)),), (("one", 1),)),
            ),
        ),
        ((data.draw(name), y),),
        ((x.name, x),),
        {
            x.name: DistAttr(mesh, spec, Origin(data.draw(NAMES), data.draw(name))),
            y.name: DistAttr(ProcessMesh.grid(3, tp=2, one=1), partial),
            "stray value": DistAttr(mesh, ShardSpec(())),
        },
        data.draw(st.integers(1, 9)),
        {x.name: mesh},
    )
    parsed = round_trip(graph)
    assert parsed == graph
    assert [a.origin for a in parsed.attrs.values()] == [a.origin for a in graph.attrs.values()]


attributes = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)


def constant(value, **attrs) -> Graph:
    x = Value("x", (), "f32")
    return Graph("g", (Op("constant", (), (x,), {"value": value, **attrs}),))


@pytest.mark.parametrize("dtype", ["f64", "bf16", "f16", "i8", "u64", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_arrays_keep_dtype_shape_and_bits(dtype, shape):
    array_type = (
        np.dtype(ml_dtypes.bfloat16)
        if dtype == "bf16"
        else np.dtype({"f64": "f8", "f16": "f2", "i8": "i1", "u64": "u8", "bool": "?"}[dtype])
    )
    array = (np.arange(math.prod(shape)).reshape(shape) * 3 - 1).astype(array_type)
    found = round_trip(constant(array)).ops[0].attrs["value"]
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, -0.0, 1e-320, 1e300, 2**70, -3, True])
def test_numbers_keep_their_type_and_bits(number):
    found = round_trip(constant(number)).ops[0].attrs["value"]
    assert type(found) is type(number)
    assert repr(found) == repr(number)


def test_numpy_scalars_stay_numpy_scalars():
    found = round_trip(constant(np.float32(0.1), n=np.int64(7))).ops[0].attrs
    assert found["value"].dtype == np.float32
    assert found["value"] == np.float32(0.1)
    assert found["n"].dtype == np.int64


def test_an_attribute_without_text_form_is_refused():
    with pytest.raises(GraphError, match="has no text form"):
        print_graph(constant(object()))


def test_loops_carry_their_subgraphs():
    def program(x):
        return ops.while_loop(lambda n, p: p.max() < 9.0, lambda n, p: (n + 1, p * 2.0), (0, x))

    graph = trace(program, ((2, 3), "f32"))
    parsed = round_trip(graph)
    assert same_graph(parsed, graph)
    body = next(op for op in parsed.ops if op.kind == "while_loop").attrs["body"]
    assert [v.type for _, v in body.updates][1] == "f32[2, 3]"
    x = np.full((2, 3), 1.5, np.float32)
    assert np.array_equal(interpret(parsed, {"x0": x})[0]["y1"], np.full((2, 3), 12, np.float32))


def test_str_of_a_graph_is_its_text():
    graph = constant(1.0)
    assert str(graph) == print_graph(graph)


def test_comments_and_layout_of_the_text_do_not_matter():
    text = print_graph(constant(1.0))
    spread = "# a comment\n" + text.replace(" = ", "\n=  # here\n")
    assert same_graph(parse_graph(spread), parse_graph(text))


def test_an_equal_graph_is_the_same_and_a_changed_one_is_not():
    graph = constant(np.arange(3.0))
    assert same_graph(graph, constant(np.arange(3.0)))
    assert not same_graph(graph, constant(np.arange(3.0) + 1))
    assert not same_graph(graph, replace(graph, micro_batches=2))


MISTAKES = {
    "graph @g\n  %x : f32[2 = input data": ("line 2, column 14", "expected , or ]", "=", "^"),
    "graph @g\n  %y : f32[2] = exp(%z) forward": ("line 2, column 21", "%z is not defined", "%z", "^^"),
    "graph @g\n  %x : f32[] = full data\n  %x : f32[] = full data": ("line 3", "defined twice", "%x", "^^"),
    "graph @g\n  %x : f32[2] [dp] @m3 = full data": ("line 2", "mesh m3 is not defined", "@m3", "^^^"),
    "graph @g\n  mesh m0 = (a=2) ranks 0..2": ("line 2", "3 ranks but its axes make 2", "m0", "^^"),
    "graph @g\n  mesh m0 = (a=2) ranks 1, 1": ("line 2", "must be distinct", "m0", "^^"),
    'graph @g\n  %x : f32[] = full {v=f32[3] "AAA="} data': (
        "line 2", "array has 2 bytes", '"AAA="', "^^^^^^",
    ),
    'graph @g\n  %x : f32[] = full {v=f32[3] "!"} data': ("line 2", "array is no base64", '"!"', "^^^"),
    'graph @g\n  %x : f32[] = full {v="\\q"} data': ("line 2", "string is malformed", '"\\q"', "^^^^"),
    "graph @g\n  %x : f32[3] = ": ("line 2", "text ends here; expected an op kind", "", "^"),
    "graph @g\n  %x ! f32[3]": ("line 2, column 6", "found '!'", "!", "^"),
    "grph @g": ("line 1, column 1", "found 'grph', expected graph", "grph", "^^^^"),
    "": ("line 1", "text ends here; expected graph", "", "^"),
    "graph @g\n  mesh m0 = (dp=2) ranks 0..1\n  %x : f32[2] = full data by user": (
        "line 3", "0 layouts but says who decided 1", "full", "^^^^",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_drawn_on_its_line(text):
    where, message, part, carets = MISTAKES[text]
    with pytest.raises(GraphError) as raised:
        parse_graph(text)
    first, line, drawn = str(raised.value).split("\n")
    assert where in first
    assert message in first
    assert drawn.strip() == carets
    start = drawn.index("^")
    assert line[start : start + len(part)] == part


def graph_with(attr: str) -> str:
    return f"graph @g\n  %x : f32[] = constant {{value={attr}}} forward\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (graph_with("[" * 65 + "]" * 65), r"line 2, column \d+: brackets are nested more than 64 deep"),
        (graph_with("[" * 100_000), r"line 2, column \d+: brackets are nested more than 64 deep"),
        (graph_with("9" * 5000), r"line 2, column 32: expected a number within 1e\+40"),
        (graph_with("1e999"), r"line 2, column 32: expected a number of 64 bits, or inf"),
        (graph_with('f32("abc")'), r"line 2, column 32: expected a number of f32"),
        (graph_with("i32(1.5)"), r"line 2, column 32: expected a number of i32"),
        (graph_with("bool(2)"), r"line 2, column 32: expected a number of bool"),
        (graph_with("i8(300)"), r"line 2, column 32: 300 is no number of i8"),
        (graph_with('f32[4294967296, 4294967296] ""'), r"array has 0 bytes but f32\[4294967296, 42949"),
        (graph_with('f32[0] "\u03bc"'), r"array is no base64"),
        (graph_with("1, value=2"), r"line 2, column 35: attribute value is given twice"),
        (graph_with('{"a": 1, "a": 2}'), r'key "a" is given twice'),
        (
            "graph @g\n  mesh m0 = (a=1) ranks 0..999999999",
            r"line 2, column 28: expected a whole number from 0 to",
        ),
        (
            "graph @g\n  mesh m0 = (a=1) ranks " + "9" * 5000,
            r"line 2, column 25: expected a whole number from 0",
        ),
        (
            "graph @g\n  mesh m0 = (a=4294967296, b=4294967296) ranks 0",
            r"line 2, column 16: expected a whole number from 0 to 1048575",
        ),
        ("graph @g\n  mesh m0 = (a=1, a=1) ranks 0", r"line 2, column 8: mesh m0 has an axis twice"),
        (
            f"graph @g\n  mesh m0 = ({', '.join(f'a{i}=1' for i in range(65))}) ranks 0",
            "m0 has 65 axes, more",
        ),
        (f"graph @g\n  %x : f32[{'9' * 5000}] = input data", r"line 2, column 12: expected a whole number"),
        ("graph @g micro_batches=0", r"line 1, column 24: expected a whole number from 1 to"),
        (
            "graph @g\n  mesh m0 = (a=1) ranks 0\n  layout %x [] by user\n  layout %x [] by user",
            r"line 4, column 10: value %x has two layouts",
        ),
    ],
)
def test_graph_text_is_read_within_limits(text, message):
    with pytest.raises(GraphError, match=rf"^x.dg, {message}|^x.dg, .*{message}"):
        parse_graph(text, "x.dg")


def test_a_text_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr("distgraph.ir.parser.MOST_CHARACTERS", 9)
    with pytest.raises(GraphError, match=r"x.dg: has 10 characters, more than the limit of 9"):
        parse_graph("graph @gra", "x.dg")
