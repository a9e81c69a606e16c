"""MeshSlice and the collective algorithm: values, bytes, order of the ops, and wrong input."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from support.programs.matrix_products import FLOWS, MESHES, NARROW, Product, product
from support.programs.partitioned import run_partitioned

import distgraph as dg
from distgraph import ops
from distgraph.engine.commands.check import check as compare
from distgraph.errors import ShardingError
from distgraph.ir.graph import SOURCES, Graph
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.parser import parse_graph as parse
from distgraph.ir.reference_interpreter import interpret
from distgraph.ops.blocks import slices as slices_of_blocks
from distgraph.passes.complete import complete
from distgraph.passes.matmul_algorithms.distribute_matmuls import algorithm_of, distribute_matmuls
from distgraph.passes.matmul_algorithms.product import product_of
from distgraph.passes.pass_pipeline import run_passes
from distgraph.runtime.program.build import build
from distgraph.runtime.program.memory_plan import planned

SLICED = [(slices, block) for slices in (1, 2, 4) for block in (1, 2, 8)]


def check(case: Product) -> None:
    feeds, params = case.arrays()
    found, _, built = run_partitioned(case.completed(), [feeds], params)
    for name, expected in case.expected().items():
        (value,) = found[name]
        assert np.abs(value - expected).max() <= 1e-12 * max(1.0, np.abs(expected).max()), name
    for rank in built.ranks:
        assert built.program(rank).bytes_sent() == pytest.approx(case.moved_bytes())


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("mesh", MESHES)
def test_equals_the_serial_product_and_sends_what_the_dataflow_says(mesh: tuple[int, int], flow: str) -> None:
    check(product(*mesh, flow, "collective"))
    for slices, block in SLICED:
        check(product(*mesh, flow, "meshslice", slices, block))


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("slices", [2, 3])
def test_blocks_are_as_large_as_the_shards_allow(mesh: tuple[int, int], flow: str, slices: int) -> None:
    """Without a block, slices consist of runs that are as long as they can be, on any mesh."""
    case = replace(
        product(*mesh, flow, "meshslice", slices, 4), algorithm=MatmulAlgorithm("meshslice", slices)
    )
    check(case)
    rewritten = distribute_matmuls(case.completed())
    cut = [op for op in rewritten.ops if op.kind in ("block_slice", "block_expand", "block_insert")]
    whole = [op.result if op.kind == "block_expand" else op.operands[0] for op in cut]
    runs = {
        value.shape[op.attrs["dim"]] // (slices * op.attrs["block"])
        for op, value in zip(cut, whole, strict=True)
    }
    assert runs == {int(np.lcm(*mesh))}  # of each slice of the whole dim, such as one a rank


def test_a_length_that_slices_do_not_divide_is_refused_without_a_block_too() -> None:
    """The way out is what slices without a block need: 4 and 6 divide the shards, and 5 a length of 60."""
    case = Product(2, 4, "OS", MatmulAlgorithm("meshslice", 5), 48, 48, 48)
    completed = case.completed()
    expected = (
        "in blocks of 1 need shards of k that are multiples of 5, got 48 / 1, 48 / 2, 48 / 4; use slices "
    )
    with pytest.raises(ShardingError, match=re.escape(expected + "3 or 4 or 6, or a length of 40 or 60")):
        distribute_matmuls(completed)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("mesh", NARROW)
def test_a_mesh_axis_may_have_one_rank(mesh: tuple[int, int], flow: str) -> None:
    """Then one matrix moves along the other axis, and on one rank none does."""
    check(product(*mesh, flow, "collective"))
    check(product(*mesh, flow, "meshslice", 2, 2))


def test_every_stage_is_verified_and_means_the_same_on_whole_tensors() -> None:
    case = product(2, 4, "LS", "meshslice", 2, 2)
    completed, (feeds, params) = case.completed(pruned=False), case.arrays()
    assert parse(str(completed)) == completed
    rewritten = run_passes(completed, ["distribute_matmuls"])
    assert not rewritten.algorithms
    assert parse(str(rewritten)) == rewritten
    run_passes(rewritten, ["reshard", "lower"])
    outputs, _ = interpret(rewritten, feeds, params)
    for name, expected in case.expected().items():
        np.testing.assert_allclose(outputs[name], expected, rtol=0, atol=1e-11)


def test_communication_stands_before_the_product_that_hides_it() -> None:
    """The gathers of a slice are started before the product of the slice before it."""
    case = product(2, 4, "OS", "meshslice", 4)
    lowered = build(case.completed()).lowered
    name = next(op.name for op in lowered.ops if op.kind == "einsum").removesuffix(".sum0")
    order = [op.name.removeprefix(f"{name}.") for op in lowered.ops if op.name.startswith(name)]
    expected = ["a0", "a0.gathered", "b0", "b0.gathered"]
    for index in range(1, 4):
        expected += [f"{which}{index}{end}" for which in "ab" for end in ("", ".gathered")] + [
            f"sum{index - 1}"
        ]
    assert order == [*expected, name]


@pytest.mark.parametrize("flow", FLOWS)
def test_check_compares_every_slice_and_partial_product(flow: str) -> None:
    """`distgraph check` sees each op of the rewrite as an op with a meaning on whole tensors."""
    case = product(2, 4, flow, "meshslice", 2)
    graph, (feeds, params) = case.graph(), case.arrays()
    report = compare(case.completed(), feeds, params, graph)
    assert report.ok, str(report)
    assert report.ranks == 8
    kinds = {op.kind for op in report.graph.ops}
    assert {"block_slice", "einsum_add", "block_insert", "comm.all_gather", "comm.reduce_scatter"} <= kinds
    assert report.compared > sum(op.kind not in SOURCES for op in report.graph.ops)


@pytest.mark.parametrize(
    ("mesh", "flow", "right"),
    [
        *(((2, 4), flow, False) for flow in FLOWS),
        *(((2, 2), flow, True) for flow in FLOWS),
        ((4, 2), "OS", False),
        ((2, 8), "OS", False),
    ],
)
def test_contiguous_slices_are_right_on_a_square_mesh_alone(
    mesh: tuple[int, int], flow: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant that cuts slice s out of a shard in one piece multiplies columns with rows of others."""
    strided = slices_of_blocks._seen
    monkeypatch.setattr(
        slices_of_blocks, "_seen", lambda x, dim, slices, _: strided(x, dim, slices, x.shape[dim] // slices)
    )
    with nullcontext() if right else pytest.raises(AssertionError):
        check(product(*mesh, flow, "meshslice", 2))


@pytest.mark.parametrize(
    ("flow", "backward"), [("OS", ("LS", "RS")), ("LS", ("OS", "RS")), ("RS", ("LS", "OS"))]
)
def test_products_of_gradients_keep_the_matrix_in_place(flow: str, backward: tuple[str, str]) -> None:
    """Dataflows of dX and dW, whose operands the op may exchange; nothing is transposed or moved."""
    graph = product(2, 4, flow, "meshslice", 2).completed()
    found = {}
    for op in graph.ops:
        if (algorithm := algorithm_of(graph, op)) is not None:
            role = op.role if op.role == "forward" else f"d{_matrix(graph, op.name)}"
            found[role] = product_of(graph, op, algorithm)
    exchanged = {"OS": "OS", "LS": "RS", "RS": "LS"}
    assert {role: each.flow.name for role, each in found.items()} == {"forward": flow} | {
        role: name if found[role].flow.name == name else exchanged[name]
        for role, name in zip(("dx", "dw"), backward, strict=True)
    }
    kinds = {op.kind for op in graph.ops if op.kind not in SOURCES}
    assert "transpose" not in kinds
    changed = [op for op in graph.ops if op.kind == "reshard"]
    assert all(graph.attrs[op.name].spec == graph.attrs[op.operands[0].name].spec for op in changed)
    stays = {"OS": "y", "LS": "x", "RS": "w"}[flow]
    for each in found.values():
        names = [_matrix(graph, value.name) for value in (*each.whole.operands, each.whole.result)]
        in_place = {"OS": 2, "LS": 0, "RS": 1}[each.flow.name]
        assert names[in_place] == stays, (each.flow.name, names)


def _matrix(graph: Graph, name: str) -> str:
    """x, w or y: which matrix a value is, or is the gradient of."""
    shape, case = graph.values[name].shape, product(2, 4, "OS", "meshslice", 2)
    return {(case.m, case.k): "x", (case.k, case.n): "w", (case.m, case.n): "y"}[shape]


@pytest.mark.parametrize(
    ("first", "weight", "last", "sizes"),
    [
        (["tp", None], [None, "tp"], [None, "tp"], (16, 12, 8)),
        ([None, "tp"], ["tp", None], ["tp", None], (16, 12, 8)),
        ([None, "tp"], ["tp", None], [None, "tp"], (16, 12, 16)),
    ],
)
def test_one_axis_gathers_before_or_scatters_behind_the_product(
    first: list[str | None], weight: list[str | None], last: list[str | None], sizes: tuple[int, int, int]
) -> None:
    """Megatron's sequence parallel pairs: all_gather then product, product then reduce_scatter."""
    m, k, n = sizes
    mesh = dg.ProcessMesh.grid(tp=2)
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(m, k)), rng.normal(size=(k, n))

    def multiply(x: dg.Tensor, w: dg.Tensor) -> dg.Tensor:
        function = dg.shard_op(
            ops.matmul, mesh, in_specs=[first, weight], out_specs=last, algorithm="meshslice", slices=4
        )
        return function(x, w)

    graph = dg.trace(multiply, ((m, k), "f64"), ((k, n), "f64"), names=("x", "w"))
    completed = complete(graph, mesh)
    found, _, _ = run_partitioned(completed, [{"x": x, "w": w}], {})
    ((value,),) = found.values()
    np.testing.assert_allclose(value, x @ w, rtol=0, atol=1e-12)
    assert sum(op.kind == "einsum" for op in distribute_matmuls(completed).ops) == 4


def test_wrong_input_is_refused() -> None:
    mesh = dg.ProcessMesh.grid(rows=2, cols=4)
    with pytest.raises(ShardingError, match=r"needs a mesh of two axes but mesh.* has 1"):
        dg.shard_op(ops.matmul, dg.ProcessMesh.grid(tp=4), algorithm="meshslice", dataflow="OS")
    with pytest.raises(ShardingError, match="there is no algorithm; name one"):
        dg.shard_op(ops.matmul, mesh, dataflow="OS")
    with pytest.raises(ShardingError, match="dataflow 'XS' does not exist; it is one of OS, LS, RS"):
        dg.shard_op(ops.matmul, mesh, algorithm="meshslice", dataflow="XS")
    with pytest.raises(ShardingError, match="slices of shard_op is 0 but must be an integer of at least 1"):
        dg.shard_op(ops.matmul, mesh, algorithm="meshslice", slices=0)
    case = Product(2, 4, "OS", MatmulAlgorithm("meshslice", 5, 2), 48, 48, 48)
    message = r"5 slices in blocks of 2 need shards of k that are multiples of 10, .* use slices 2 or 3 or 6"
    with pytest.raises(ShardingError, match=message):
        distribute_matmuls(case.completed())
    for length, slices, block, way in (
        (48, 5, 1, "use slices 3 or 4 or 6, or a length of 40 or 60"),
        (40, 2, 8, "use block 1 or 5, or a length of 64"),
        (42, 2, 1, "use 40 or 48"),
        (42, 1, 1, "use 40 or 44"),
        (40, 3, 4, "use a length of 48"),
    ):
        case = Product(2, 4, "OS", MatmulAlgorithm("meshslice", slices, block), 48, length, 48)
        with pytest.raises(ShardingError, match=f"; {way}$"):
            distribute_matmuls(case.completed())
    unknown = Product(2, 4, "OS", MatmulAlgorithm("strassen"), 48, 48, 48)
    alone = Product(1, 1, "OS", MatmulAlgorithm("strassen"), 48, 48, 48)
    for case in (unknown, alone):
        with pytest.raises(
            ShardingError, match="algorithm 'strassen' for matrix products does not exist; the alg"
        ):
            distribute_matmuls(case.completed())


@pytest.mark.parametrize("flow", FLOWS)
def test_a_slice_is_gathered_when_the_one_before_has_arrived(flow: str) -> None:
    """Both would share the links: the product of the first one would begin later, and no other one sooner."""
    feeds, params = (case := product(2, 4, flow, "meshslice", 4, 1)).arrays()
    built = run_partitioned(case.completed(), [feeds], params)[2]
    gathers = 0
    for rank in built.ranks:
        program = built.program(rank)
        waits = planned(program).storage.waits
        for task in program.tasks:
            arrived: set[str] = set()
            started: list[tuple[str, str, int]] = []  # gather, its product, number of its slice
            for number, local in enumerate(task.ops):
                arrived.update(waits.get((task.name, number), ()))
                if match := re.fullmatch(r"(.*)\.[ab](\d)\.gathered", local.op.name):
                    here = match[1], int(match[2])
                    earlier = {name for name, of, index in started if of == here[0] and index < here[1]}
                    assert earlier <= arrived
                    started.append((local.op.name, *here))
                    gathers += here[1] > 0
    assert gathers
