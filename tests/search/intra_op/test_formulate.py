"""The formulation: as brute force on small graphs, as closed formulas say, never above other completions."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, reject, settings
from support.programs.random_programs import Program, programs
from support.programs.search_cases import MESHES, SLOW, cluster, cost_model, task
from support.search.search_brute import Brute, eliminate, every_spec

from distgraph import nn, ops, optim
from distgraph.engine.compile.train_graph import train_graph
from distgraph.errors import ShardingError
from distgraph.ir.graph import Graph, Value
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import operand_layout, result_layout
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.models import GPT, GPTConfig
from distgraph.passes.complete import complete
from distgraph.passes.layout_local_search import refine
from distgraph.passes.redistribution.planner import redistribute_cost
from distgraph.passes.search.intra_op.cost_model import CostModel
from distgraph.passes.search.intra_op.formulate import Formulation, Layouts, formulate
from distgraph.passes.search.intra_op.memory_limit import MemoryLimit, limited_nodes
from distgraph.passes.search.layering.layer_sequence import cluster_layers, layering
from distgraph.passes.search.solver import solve
from distgraph.passes.search.solver.problem import Problem
from distgraph.tracing.tracer import Trace

ONE = tuple((mesh,) for mesh in MESHES)
SLACK = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
parse = ShardSpec.parse


def layouts_of(completed: Graph) -> Layouts:
    """Those of a completed graph."""
    return Layouts({op.name: op.layout for op in completed.ops if op.layout is not None}, completed.attrs)


def best(formulation: Formulation) -> tuple[int, ...]:
    """The proved optimum."""
    found = solve(formulation.problem, seconds=30)
    assert found.status == "optimal"
    assert found.choice is not None
    return found.choice


def mesh_of(graph: Graph) -> ProcessMesh:
    return next(iter(graph.attrs.values())).mesh


# prices


def test_moves_cost_what_redistribute_finds() -> None:
    rng, found = random.Random(0), 0
    on_two = (*MESHES, ProcessMesh.grid(x=1, y=3), ProcessMesh.grid(x=2, y=1, z=2))
    for mesh in (*on_two, ProcessMesh.grid(x=2, y=2, z=2)):
        for _ in range(25 if mesh in on_two else 5):
            shape = tuple(rng.choice([1, 2, 3, 4, 5, 6, 8, 12, 64]) for _ in range(rng.randint(0, 3)))
            specs = tuple(every_layout(shape, mesh))
            matrix = cost_model().change_seconds(shape, "f32", mesh, specs, specs)
            for _ in range(20):
                i, j = rng.randrange(len(specs)), rng.randrange(len(specs))
                wanted = redistribute_cost(shape, 4, mesh, specs[i], specs[j], cost_model().price)
                assert matrix[i, j] == pytest.approx(wanted, rel=1e-9, abs=1e-15), (
                    f"{shape} {specs[i]} {specs[j]}"
                )
                found += matrix[i, j] > 0
    assert found > 500


def every_layout(shape: tuple[int, ...], mesh: ProcessMesh) -> list[ShardSpec]:
    """With and without sums pending; no axis of one rank, no more parts than positions."""
    axes = [axis for axis in mesh.axes if mesh.axis_size(axis) > 1]
    found = []
    for places in itertools.product(range(len(shape) + 2), repeat=len(axes)):
        pairs = list(zip(axes, places, strict=True))
        dims = tuple(tuple(a for a, p in pairs if p == dim) for dim in range(len(shape)))
        if all(mesh.count(d) <= n for d, n in zip(dims, shape, strict=True)):
            found.append(ShardSpec(dims, tuple((a, "sum") for a, p in pairs if p == len(shape) + 1)))
    return found


def test_an_axis_across_machines_is_dearer_than_one_inside() -> None:
    mesh = ProcessMesh.grid(dp=2, tp=4)
    cost = [
        cost_model().change_seconds_of((512, 512), "f32", mesh, parse(source), parse("[_, _]"))
        for source in ("[_, tp]", "[_, dp]")
    ]
    swapped = CostModel(cluster(), [0, 2, 4, 6, 1, 3, 5, 7])  # tp across the machines, dp inside
    other = [
        swapped.change_seconds_of((512, 512), "f32", mesh, parse(source), parse("[_, _]"))
        for source in ("[_, tp]", "[_, dp]")
    ]
    assert cost[0] < cost[1]
    assert other[0] > other[1]


# exact


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=max(200, settings.default.max_examples), suppress_health_check=SLACK)
@given(programs(ONE, train=False, micro=False, steps=4))
def test_equals_brute_force(program: Program) -> None:
    graph = replace(program.graph, micro_batches=1 + 2 * (len(program.graph.ops) % 2))
    brute = Brute(graph, mesh_of(graph), cost_model())
    assume(len(brute.ops) <= 7 and brute.size <= 30_000)
    formulation = formulate(graph, mesh_of(graph), cost_model())
    least = brute.least()
    assert eliminate(formulation.problem) == pytest.approx(least, rel=1e-9, abs=1e-15)
    choice = best(formulation)
    assert formulation.problem.objective(choice) == pytest.approx(least, rel=1e-9, abs=1e-15)
    assert formulation.profile(choice).seconds(graph.micro_batches) == pytest.approx(
        least, rel=1e-9, abs=1e-15
    )


@settings(max_examples=40, suppress_health_check=SLACK)
@given(programs(ONE, train=True, steps=3))
def test_no_completion_costs_less(program: Program) -> None:
    """Completed and refined graphs are choices of the problem, priced alike."""
    graph = replace(program.graph, micro_batches=len(program.feeds))
    completed = complete(graph)
    assume([op.name for op in completed.ops] == [op.name for op in graph.ops])
    formulation = formulate(graph, mesh_of(graph), cost_model(SLOW))
    objective = formulation.problem.objective(best(formulation))
    for other in (completed, refine(completed), refine(completed, cost_model(SLOW).price)):
        try:
            choice = formulation.encode(layouts_of(other))
        except ShardingError:  # annotated in more parts than there are positions
            reject()
        assert objective <= formulation.problem.objective(choice) * (1 + 1e-9)


@settings(max_examples=40, suppress_health_check=SLACK)
@given(programs(ONE, train=True, steps=3))
def test_profile_adds_up_to_the_objective_or_less(program: Program) -> None:
    graph = replace(program.graph, micro_batches=len(program.feeds))
    formulation = formulate(graph, mesh_of(graph), cost_model(SLOW))
    rng = np.random.default_rng(len(graph.ops))
    choice = tuple(int(rng.integers(len(costs))) for costs in formulation.problem.costs)
    seconds = formulation.profile(choice).seconds(graph.micro_batches)
    assert seconds <= formulation.problem.objective(choice) * (1 + 1e-9)
    assert formulation.problem.objective(formulation.encode(formulation.decode(choice))) == pytest.approx(
        min(
            formulation.problem.objective(choice),
            formulation.problem.objective(formulation.encode(formulation.decode(choice))),
        )
    )


# folding


def folded_and_whole(count: int, mesh: ProcessMesh, speed: float) -> tuple[float, float]:
    """Optimum of a GPT with equal layers laid out alike, and of one where every op is decided apart."""
    model = GPT(GPTConfig(hidden=32, layers=count, heads=4, vocabulary=64, sequence=16))
    graph = train_graph(model, (((8, 16), "i32"), ((8, 16), "i32")))
    layers = layering(graph, cluster_layers(graph))
    folded = formulate(graph, mesh, cost_model(speed), layers)
    whole = formulate(graph, mesh, cost_model(speed))
    assert len(folded.problem.costs) < (0.4 + 0.6 / count) * len(whole.problem.costs)
    choice = best(folded)
    objective = folded.problem.objective(choice)
    again = whole.encode(folded.decode(choice))
    assert whole.problem.objective(again) == pytest.approx(objective, rel=1e-9)
    return objective, whole.problem.objective(best(whole))


@pytest.mark.parametrize("speed", [SLOW, 1e-3])
@pytest.mark.parametrize("mesh", [ProcessMesh.grid(x=2), ProcessMesh.grid(x=2, y=2)], ids=str)
def test_folding_equal_layers_loses_next_to_nothing(mesh: ProcessMesh, speed: float) -> None:
    """The whole has the first and the last layer apart, where other ops read: what passes between layers is
    stored in one layout for all of them when they are folded."""
    folded, whole = folded_and_whole(3, mesh, speed)
    assert whole * (1 - 1e-9) <= folded <= whole * (1 + 1e-3)


def test_layers_of_a_profile_add_up() -> None:
    model = GPT(GPTConfig(hidden=32, layers=4, heads=4, vocabulary=64, sequence=16))
    graph = replace(train_graph(model, (((8, 16), "i32"), ((8, 16), "i32"))), micro_batches=4)
    layers = layering(graph, cluster_layers(graph))
    formulation = formulate(graph, ProcessMesh.grid(x=2, y=2), cost_model(SLOW), layers)
    profile = formulation.profile(best(formulation))
    blocks = [i for i, cls in enumerate(layers.classes) if layers.classes.count(cls) > 1]
    assert len(blocks) == 4
    assert len(profile.forward) == len(layers.layers) + 1
    for array in (profile.forward, profile.backward, profile.step, profile.activations):
        assert len({round(float(array[i]), 15) for i in blocks}) == 1
        assert array[blocks[0]] > 0
    assert np.all(profile.backward[blocks] > profile.forward[blocks])


# closed formulas


def product(rows: int, inner: int, columns: int) -> Graph:
    """A [rows, inner] split by rows times B [inner, columns] split by columns."""
    mesh, trace = ProcessMesh.grid(x=4), Trace("product")
    with trace.activate():
        a = trace.source("input", "a", (rows, inner), "f32")
        b = trace.source("input", "b", (inner, columns), "f32")
        for tensor, spec in ((a, "[x, _]"), (b, "[_, x]")):
            trace.annotate(tensor.value, DistAttr(mesh, parse(spec), Origin("user", "here")))
        return trace.finish({"y": ops.matmul(a, b)})


@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [
        (4096, 1024, 2048),
        (2048, 1024, 4096),
        (2200, 1024, 2000),
        (2000, 1024, 2200),
        (512, 65536, 512),
        (1024, 1024, 1024 + 512),
    ],
)
def test_a_product_gathers_its_smaller_operand_or_splits_the_sum(rows: int, inner: int, columns: int) -> None:
    """With n ranks: gather A, (n-1)/n of I K; gather B, (n-1)/n of K J; or hand 1/n of both out again and
    reduce_scatter the result, (n-1)/n (I K / n + K J / n + I J)."""
    graph = product(rows, inner, columns)
    formulation = formulate(graph, ProcessMesh.grid(x=4), cost_model(1e3))  # computing costs next to nothing
    found = formulation.decode(best(formulation)).ops[graph.ops[-1].name]
    sent = {
        "n": rows * inner,
        "m": inner * columns,
        "k": (rows * inner + inner * columns) / 4 + rows * columns,
    }
    assert [index for index, _ in found.axes] == [min(sent, key=lambda index: sent[index])]


def attention_block(batch: int, width: int) -> Graph:
    """Loss of one block over one-head-sized sequences."""
    block = nn.MultiHeadAttention(width, 8, bias=False)

    def loss(y: object, target: object) -> object:
        return ops.mean(ops.multiply(y, target))

    shape = ((batch, 16, width), "f32")
    return train_graph(block, (shape, shape), loss, optim.SGD(lr=0.1))


def planned(graph: Graph, mesh: ProcessMesh, how: str) -> Graph:
    """Data parallel, or heads split over all ranks with one sum behind them (Megatron-LM)."""
    attrs = {}
    for op in graph.sources("input", "param"):
        name, ndim = str(op.attrs["name"]), len(op.result.shape)
        dims: list[str | None] = [None] * ndim
        if how == "data" and op.kind == "input" and ndim:
            dims[0] = "x"
        if how == "tensor" and op.kind == "param":
            dims[0 if name.startswith("out") else 1] = "x"
        attrs[op.name] = DistAttr(mesh, ShardSpec.of(dims), Origin("user", how))
    return complete(replace(graph, attrs=attrs))


@pytest.mark.parametrize(
    ("batch", "width"), [(256, 256), (128, 256), (64, 256), (16, 256), (8, 256), (8, 512)]
)
def test_attention_switches_from_data_to_tensor_parallel(batch: int, width: int) -> None:
    """Data parallel sums the gradients of 4 h^2 weights once; tensor parallel sums what comes out, b s h
    numbers, and the gradient of what went in, which nobody asks for here: 2 h against b s / 2."""
    mesh = ProcessMesh.grid(x=4)
    graph = attention_block(batch, width)
    formulation = formulate(graph, mesh, cost_model(1e3))
    cost = {
        how: formulation.problem.objective(formulation.encode(layouts_of(planned(graph, mesh, how))))
        for how in ("data", "tensor")
    }
    launches = 50e-6  # of collectives, on either side
    gap = (4 * width * width - batch * 16 * width) * 4 * 1.5 / 100e9
    if abs(gap) > launches:
        assert (cost["data"] > cost["tensor"]) == (gap > 0)
    choice = best(formulation)
    assert formulation.problem.objective(choice) <= min(cost.values()) * (1 + 1e-9)


# memory


def test_states_are_split_as_memory_gets_dear() -> None:
    """ZeRO comes out of the problem by itself."""
    graph = task("mlp").graph()
    graph = replace(
        graph,
        attrs={
            op.name: DistAttr(
                MESHES[1], ShardSpec.of(["x"] + [None] * (len(op.result.shape) - 1)), Origin("user", "x")
            )
            for op in graph.sources("input")
            if op.result.shape
        },
    )
    plain = formulate(graph, MESHES[1], cost_model())
    held = []
    for price in (0.0, 1e-9, 1e-3):
        formulation = plain.with_memory(memory_multiplier=price)
        profile = formulation.profile(best(formulation))
        held.append(float(profile.fixed.sum() + profile.activations.sum()))
    assert held[0] > held[1] > held[2] or held[0] > held[2]
    states = [op for op in graph.sources("state") if len(op.result.shape) > 1]
    formulation = plain.with_memory(memory_multiplier=1e-3)
    layouts = formulation.decode(best(formulation))
    assert all("x" in layouts.values[op.name].spec.axes for op in states)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_a_limit_is_kept_and_costs_no_more_than_it_must(name: str) -> None:
    graph = task(name).graph()
    layers = layering(graph, cluster_layers(graph))
    free = formulate(graph, MESHES[1], cost_model(), layers)
    choice = best(free)
    peak = within(free, 1e12).peak(choice)[1]
    tight = within(free, 0.7 * peak)
    found = solve(tight, seconds=20)
    assert found.choice is not None
    assert tight.feasible(found.choice)
    assert found.objective >= free.problem.objective(choice) * (1 - 1e-9)
    assert tight.peak(found.choice)[1] <= 0.7 * peak * (1 + 1e-9)


def within(formulation: Formulation, limit: float) -> Problem:
    return limited_nodes(formulation, formulation.problem, MemoryLimit(limit))


def chain(sizes: tuple[int, ...]) -> Graph:
    """y = tanh(x w) v."""
    rows, width, inner, columns = sizes
    trace = Trace("chain")
    with trace.activate():
        x = trace.source("input", "x", (rows, width), "f32")
        w = trace.source("param", "w", (width, inner), "f32")
        v = trace.source("param", "v", (inner, columns), "f32")
        return trace.finish({"y": ops.matmul(ops.tanh(ops.matmul(x, w)), v)})


@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
@pytest.mark.parametrize("sizes", [(8, 4, 16, 4), (4, 16, 8, 12), (64, 4, 4, 8), (12, 8, 4, 6), (5, 7, 3, 9)])
def test_within_a_limit_equals_brute_force(sizes: tuple[int, ...], mesh: ProcessMesh) -> None:
    """Every layout of the three ops and every storage of what is kept; of the others one lives at a time."""
    graph = chain(sizes)
    brute = Brute(graph, mesh, cost_model(SLOW))
    first, tanh, last = brute.ops
    x, w, h, t, v, y = (graph.values[o.name] for o in (*first.operands, first, tanh, last.operands[1], last))

    def held(value: Value, spec: ShardSpec) -> int:
        return 4 * math.prod(-(-n // mesh.count(d)) for n, d in zip(value.shape, spec.dims, strict=True))

    found: list[tuple[float, float]] = []
    for a, b, c in itertools.product(*brute.layouts):
        computing = sum(brute.op_cost(op, o) for op, o in zip(brute.ops, (a, b, c), strict=True))
        made = [result_layout(op, 0, o) for op, o in zip(brute.ops, (a, b, c), strict=True)]
        passing = brute.move(h, made[0], operand_layout(tanh, 0, b)) + brute.move(
            t, made[1], operand_layout(last, 0, c)
        )
        scratch = max(held(h, made[0]), held(t, made[1]))
        kept = [
            [(brute.move(x, s, operand_layout(first, 0, a)), held(x, s)) for s in every_spec(x.shape, mesh)],
            [(brute.move(w, s, operand_layout(first, 1, a)), held(w, s)) for s in every_spec(w.shape, mesh)],
            [(brute.move(v, s, operand_layout(last, 1, c)), held(v, s)) for s in every_spec(v.shape, mesh)],
            [(brute.move(y, made[2], s), held(y, s)) for s in every_spec(y.shape, mesh)],
        ]
        for stored in itertools.product(*kept):
            seconds, nbytes = (sum(pair[i] for pair in stored) for i in range(2))
            found.append((computing + passing + seconds, scratch + nbytes))
    costs, peaks = np.array(found).T
    formulation = formulate(graph, mesh, cost_model(SLOW))
    fastest = peaks[costs <= costs.min() * (1 + 1e-12)].min()
    for limit in np.linspace(peaks.min(), fastest, 4):
        solved = solve(within(formulation, float(limit)), seconds=20)
        assert solved.status == "optimal"
        assert solved.objective == pytest.approx(costs[peaks <= limit + 1e-6].min(), rel=1e-9)
    assert solve(within(formulation, peaks.min() - 1), seconds=20).status == "infeasible"


# annotations


def test_annotations_that_contradict_each_other_are_both_named() -> None:
    graph = task("mlp").graph()
    first, second = (op for op in graph.sources("param") if len(op.result.shape) == 2)
    attrs = {
        first.name: DistAttr(ProcessMesh.grid(x=2), parse("[x, _]"), Origin("user", "train.py:12")),
        second.name: DistAttr(ProcessMesh.grid(x=4), parse("[_, x]"), Origin("user", "train.py:31")),
    }
    with pytest.raises(ShardingError, match=r"train\.py:31.*x=4.*train\.py:12.*x=2"):
        formulate(replace(graph, attrs=attrs), ProcessMesh.grid(x=2), cost_model())


def test_an_annotation_over_an_axis_that_the_mesh_lacks_is_named() -> None:
    graph = task("mlp").graph()
    first = next(op for op in graph.sources("param") if len(op.result.shape) == 2)
    attrs = {first.name: DistAttr(ProcessMesh.grid(tp=2), parse("[tp, _]"), Origin("user", "train.py:12"))}
    with pytest.raises(ShardingError, match=r"train\.py:12\).*tp=2.*mesh\(x=4\)"):
        formulate(replace(graph, attrs=attrs), ProcessMesh.grid(x=4), cost_model())


# explaining


def test_terms_say_what_a_change_costs() -> None:
    graph = task("mlp").graph(micro=2)
    formulation = formulate(graph, MESHES[2], cost_model(SLOW)).with_memory(memory_multiplier=1e-9)
    problem, choice = formulation.problem, best(formulation)
    objective = problem.objective(choice)
    for node in range(len(problem.costs)):
        terms = formulation.terms(choice, node)
        assert len(terms.options) == len(terms.fixed) == len(terms.followed) == len(problem.costs[node])
        assert terms.communication >= 0
        for option in range(len(terms.options)):
            changed = (*choice[:node], option, *choice[node + 1 :])
            assert objective + terms.fixed[option] == pytest.approx(problem.objective(changed), rel=1e-9)
            assert -1e-12 <= terms.followed[option] <= terms.fixed[option] + 1e-12
        if len(terms.options) > 1:
            assert terms.runner_up not in (None, terms.chosen)
