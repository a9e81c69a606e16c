"""Probes time every op that costs, with the kernels that training calls."""

from __future__ import annotations

import ast
from functools import partial
from itertools import count

import numpy as np
import pytest
from support.paths import BENCHMARKS, ROOT

from distgraph.ir.op_registry import flops as flops_of
from distgraph.passes.analysis.op_work import work_of
from distgraph.resources import load_cluster
from distgraph.runtime.profile import op_probes as probing
from distgraph.runtime.profile import probe_programs as programs
from distgraph.runtime.profile.op_probes import PreparedProbe, medians
from distgraph.runtime.profile.probe_programs import probes


def test_probe_times_every_op_that_costs() -> None:
    probe = next(p for p in probes() if p.name.startswith("perceptron"))
    timed = PreparedProbe(probe, load_cluster("local"))
    seconds = timed.run(0.0)
    assert len(seconds) == len(timed.works) > 20
    assert all(s > 0 for s in seconds)
    ops = [work.op for work in timed.works]
    assert ops.count("momentum") == 6  # a weight and a bias of each of three layers
    assert {"matmul", "einsum", "relu", "relu_grad", "cross_entropy_grad"} <= set(ops)
    first = timed.works[ops.index("matmul")]
    assert first.dims == (1, 24, 112, 56)
    assert first.flops == 2 * 24 * 112 * 56


def test_probe_of_micro_batches_meets_the_kernels_that_add() -> None:
    """Every op once, the mean over the micro-batches; gradients of weights are added up as they are made."""
    probe = next(p for p in probes() if p.name == "perceptron/micro")
    timed = PreparedProbe(probe, load_cluster("local"))
    seconds = timed.run(0.0)
    ops = [work.op for work in timed.works]
    assert len(set(timed.ops)) == len(seconds) == len(ops)
    assert ops.count("einsum+=") == 3  # the weights of three layers
    assert ops.count("einsum") == 2  # the inputs of two of them
    assert all(s > 1e-7 for s, op in zip(seconds, ops, strict=True) if op != "momentum")


@pytest.mark.parametrize(("wall", "taken"), [(1e-3, 2e-4), (5e-5, 5e-5)])
def test_long_ops_take_their_cpu_time_and_short_ones_wall_time(
    wall: float, taken: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks that go on by so much whenever they are read, that of the processor by 0.2 ms."""
    clocks = tuple(partial(next, count(0.0, step)) for step in (wall, 2e-4))
    monkeypatch.setattr(probing, "CLOCKS", clocks)
    monkeypatch.setattr(probing, "_clock_seconds", lambda clock: 0.0)
    probe = next(probe for probe in probes() if probe.name == "perceptron/24x112")
    timed = PreparedProbe(probe, load_cluster("local"))
    seconds, updates = [], []
    for work, each in zip(timed.works, timed.run(), strict=True):
        (updates if work.op == "momentum" else seconds).append(each)
    assert seconds == pytest.approx([taken] * len(seconds))
    assert sum(updates) == pytest.approx(taken)  # one call updates all tensors
    nbytes = [work.nbytes for work in timed.works if work.op == "momentum"]
    assert updates == pytest.approx([taken * size / sum(nbytes) for size in nbytes])


def test_convolutions_are_met_at_sizes_that_train() -> None:
    """What starting one costs hides the rates of small ones."""
    graphs = [probe.graph() for probe in probes() if probe.name.startswith("convolution")]
    flops = [flops_of(op) for graph in graphs for op in graph.ops if op.kind == "conv"]
    assert min(flops) < 1e6
    assert max(flops) > 1e8


def test_no_probe_has_a_length_of_a_benchmark_or_of_a_tutorial() -> None:
    """From 48 on: shorter ones, such as batches and channels of images, are in every program."""
    files = [
        *(ROOT / "tutorials").glob("*.py"),
        *(BENCHMARKS / n for n in ("own_forecast.py", "support/measured_plans.py")),
    ]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    written = {node.value for node in nodes if isinstance(node, ast.Constant) and type(node.value) is int}
    grids = {*programs.LENGTHS, *programs.STREAM_SIZES}
    shapes = (probe.name.partition("/")[2].split("x") for probe in probes())
    grids |= {int(part) for shape in shapes for part in shape if part.isdigit()}
    assert {length for length in grids if length >= 48} & written == set()
    assert {128, 256, 512} <= written


def test_every_class_of_ops_is_met_with_little_and_with_much_work() -> None:
    kinds: dict[str, list[int]] = {}
    for probe in probes():
        if probe.name.startswith(("selection", "residual/10x24x20", "transformer/20x12x24")):
            for op in probe.graph().ops:
                kinds.setdefault(op.kind, []).append(sum(value.nbytes for value in op.operands))
    ordering = {"sort", "argsort", "top_k", "cumsum", "argmax"}
    moving = {"scatter_add", "take", "one_hot", "pick", "concat", "pad", "transpose"}
    assert ordering | moving | {"reduce_sum", "reduce_max", "conv", "attention", "embedding"} <= set(kinds)
    assert all(max(kinds[kind]) > 1e3 * min(kinds[kind]) for kind in ordering | {"scatter_add", "reduce_max"})


def test_contractions_that_copy_and_short_rows_are_met_on_three_scales() -> None:
    copied, rows = [], dict[str, list[float]]()
    for probe in probes():
        kind = probe.name.partition("/")[0]
        for op in probe.graph().ops if kind in ("contraction", "rows") else ():
            if op.kind == "einsum":
                copied.append(work_of(op, [0, 0]).copied)
            elif op.operands and op.operands[0].shape[1:]:
                rows.setdefault(op.kind, []).append(op.operands[0].size / op.operands[0].shape[-1] ** 2)
    assert min(copied) > 0
    assert max(copied) > 100 * min(copied)
    assert {"softmax", "softmax_grad", "argmax", "cumsum", "reduce_sum", "reduce_max"} <= set(rows)
    assert all(max(ratios) > 500 and min(ratios) > 4 for ratios in rows.values())


def test_an_interrupted_short_op_does_not_count() -> None:
    """The first op is short, so 5 ms are an interruption; without another run it takes as long as before."""
    usual = np.array([2e-5, 3e-3])
    assert medians(np.array([[5e-3, 6e-3], [3e-5, 6e-3]]), usual) == [3e-5, 6e-3]
    assert medians(np.array([[5e-3, 6e-3]]), usual) == [2e-5, 6e-3]


@pytest.mark.parametrize(
    "probe", [p for p in probes() if p.name.startswith("slices/")][:2], ids=lambda p: p.name
)
def test_parts_of_matrices_are_copied_between_products(probe: probing.Probe) -> None:
    """In more than one block, since one block would be a view; the last copy is into the value before it."""
    timed = PreparedProbe(probe, load_cluster("local"))
    kinds = [work.op for work in timed.works]
    assert kinds == ["matmul", "block_slice", "matmul", "block_expand", "matmul", "block_insert"]
    rows, width = map(int, probe.name.partition("/")[2].split("x"))
    half = 4 * rows * width // 2
    copied = {work.op: work.nbytes for work in timed.works if work.op != "matmul"}
    assert copied == {"block_slice": 2 * half, "block_expand": 3 * half, "block_insert": 2 * half}
    assert all(seconds > 0 for seconds in timed.run(0.0))
