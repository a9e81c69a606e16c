"""What an op declares about itself decides how it is completed, copied to meshes, stored and priced.

The ops of these tests are declared outside of the package, so that no list of names in it can know them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.programs.partitioned import assert_same, run_partitioned, run_serial
from support.programs.small_graphs import pin

from distgraph import ops
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import REGISTRY, define
from distgraph.kernels._common import store
from distgraph.passes.analysis.op_work import work_of
from distgraph.passes.complete import complete
from distgraph.runtime.program.build import Build, build
from distgraph.runtime.program.memory_plan import plan_storage
from distgraph.tracing.tensor import emit_one
from distgraph.tracing.tracer import Trace

MESH = ProcessMesh.grid(x=2, y=3)


@pytest.fixture
def declare() -> Iterator[Callable[..., None]]:
    """`define` for the time of one test."""
    names: list[str] = []

    def declare(name: str, rule: Any, kernel: Any, **fields: Any) -> None:
        define(name, rule, kernel, **fields)
        names.append(name)

    yield declare
    for name in names:
        del REGISTRY[name]


def copying(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that writes what a function of the operands returns."""

    def kernel(xp: Any, *arrays: Any, out: Any = None, **attrs: Any) -> Any:
        return store(xp, xp.ascontiguousarray(function(*arrays)), out)

    return kernel


def test_dims_and_patches_of_a_product_are_its_own(declare: Callable[..., None]) -> None:
    trace = Trace("t")
    for name, fields in (
        ("gram", {"matmul_dims": lambda op: (3, 4, 4, 5), "patches": lambda op: (60.0, 12.0)}),
        ("plain", {}),
        ("biased", {"factors": (1, 2)}),
    ):
        rule = "m n, m k, k n -> m n" if name == "biased" else "m k, k n -> m n"
        declare(name, rule, None, cost="matmul", flops=1, **fields)
        with trace.activate():
            shapes = [(4, 7)] * (name == "biased") + [(4, 5), (5, 7)]
            emit_one(name, *(trace.source("input", f"{name}{i}", s, "f32") for i, s in enumerate(shapes)))
    works = {op.kind: work_of(op, [80, 140]) for op in trace.ops if op.kind in REGISTRY and op.operands}
    assert (works["gram"].dims, works["gram"].patches) == ((3, 4, 4, 5), (60.0, 12.0))
    assert (works["plain"].dims, works["plain"].patches) == ((1, 4, 7, 5), (0.0, 0.0))
    assert works["biased"].dims == (1, 4, 7, 5)


@pytest.mark.parametrize("one_hot", [False, True])
def test_axes_pass_a_product_with_a_one_hot_matrix_first(declare: Callable[..., None], one_hot: bool) -> None:
    declare("table_rows", "v d, k d -> v d", copying(lambda x, y: x), infer=_first, one_hot=one_hot)
    trace = Trace("t")
    with trace.activate():
        turned = trace.source("param", "turned", (6, 6), "f32")
        table = trace.source("param", "table", (6, 6), "f32")
        other = trace.source("param", "other", (2, 6), "f32")
        for tensor, spec in ((turned, "[x, _]"), (table, "[x, _]")):
            pin(trace, tensor, spec, "train.py:1", MESH)
        total = ops.transpose(turned) + emit_one("table_rows", table, other)
    completed = complete(trace.finish({"total": total}))
    assert str(completed.attrs[total.value.name].spec) == ("[x, _]" if one_hot else "[_, x]")


def _first(operands: Any, attrs: Any) -> Any:
    return [(operands[0].shape, operands[0].dtype)]


@pytest.mark.parametrize("anywhere", [False, True])
def test_a_source_that_every_mesh_can_produce_is_not_sent(
    declare: Callable[..., None], anywhere: bool
) -> None:
    def sevens(xp: Any, out: Any = None) -> Any:
        return store(xp, xp.full((6,), 7.0, np.float32), out)

    declare("sevens", "-> ...", sevens, infer=lambda operands, attrs: [((6,), "f32")], anywhere=anywhere)
    trace = Trace("t")
    with trace.activate():
        x = trace.source("input", "x", (4, 6), "f32")
        pin(trace, x, "[x, _]", "train.py:1", ProcessMesh.grid(0, x=2))
        seven = emit_one("sevens")
        first = x + seven
        moved = ops.tanh(first)
        pin(trace, moved, "[x, _]", "train.py:2", ProcessMesh.grid(2, x=2))
        total = moved * seven
    completed = complete(trace.finish({"total": total}))
    assert sum(op.kind == "sevens" for op in completed.ops) == (2 if anywhere else 1)


@pytest.mark.parametrize(
    ("view", "kernel", "slots"),
    [
        ("same", lambda xp, x, out=None: x, ("view", "view")),
        ("strided", lambda xp, x, out=None: x[:, ::-1], ("view", "scratch")),
        ("", copying(lambda x: x[:, ::-1]), ("scratch", "view")),
    ],
)
def test_a_view_has_no_memory_of_its_own(
    declare: Callable[..., None], view: str, kernel: Any, slots: tuple[str, str]
) -> None:
    declare("turn", "i j! -> i j!", kernel, infer=_first, view=view, linear=((0,),))
    trace = Trace("t")
    with trace.activate():
        x = trace.source("input", "x", (6, 4), "f32")
        pin(trace, x, "[x, _]", "train.py:1", MESH)
        turned = emit_one("turn", ops.tanh(x))
        flat = ops.reshape(turned, (24,))  # a view of a contiguous operand, a copy of any other
        total = ops.exp(flat)
    graph = complete(trace.finish({"total": total}))
    assert _slots(build(graph), turned.value.name, flat.value.name) == slots
    feeds = [{"x": np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)}]
    found, _, _ = run_partitioned(graph, feeds, {})
    assert_same(found, run_serial(graph, feeds, {})[0], 0.0)


def _slots(built: Build, *names: str) -> tuple[str, ...]:
    storage = plan_storage(built.program(0), built.schedule)
    return tuple(storage.slots[name].kind for name in names)
