"""What kernels declare to allocate, against what NumPy reports to tracemalloc while they run."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.ops.workspace_cases import FAMILIES, Case
from threadpoolctl import threadpool_limits

from distgraph import ops  # registers every op
from distgraph.array_api.trace import trace
from distgraph.errors import GraphError
from distgraph.ir.dtypes import short, to_numpy
from distgraph.ir.graph import SOURCES, Value
from distgraph.ir.op_registry import REGISTRY, infer_results, lookup, workspace

pytest.importorskip("numba")  # plain NumPy takes more: see distgraph.kernels.workspace

FREE = 256 * 1024
"""Bytes that need no declaration: a few temporaries below `FUSED_MIN_SIZE` elements, and Python's objects."""
LAID_OUT = {k for k in REGISTRY if k.startswith("loop.")}
ONE_NUMBER = {"fold_key"}
OPAQUE = {"opaque", "opaque_gradient"}  # what functions of others allocate is an estimate
WITHOUT = {k for k, d in REGISTRY.items() if d.view or d.cost == "comm"} | set(SOURCES) | LAID_OUT
WITHOUT |= ONE_NUMBER | OPAQUE


def halved(case: Case) -> Case:
    """The case in float16."""

    def narrow(x: Any) -> Any:
        return x.astype(np.float16) if x.dtype == np.float32 else x

    attrs = {k: "f16" if k == "dtype" and v == "f32" else v for k, v in case.attrs.items()}
    return Case(case.kind, tuple(map(narrow, case.operands)), attrs, f"{case.note} f16")


def measured(case: Case, results: list[Value]) -> int:
    """Most bytes that one run of a kernel holds at once beside its operands and results."""
    kernel = lookup(case.kind).kernel
    blocks = [np.empty(value.shape, to_numpy(value.dtype)) for value in results]
    out = blocks[0] if len(blocks) == 1 else tuple(blocks)

    def run() -> None:
        kernel(np, *case.operands, out=out, **case.attrs)

    run()  # compiles, imports, fills caches
    tracemalloc.start()
    try:
        run()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of BLAS that wait for cores which others use would take longer than the products."""
    with threadpool_limits(1):
        yield


def mismatch(case: Case) -> str:
    """In words where declared and measured differ; "" where they agree."""
    operands = [Value(f"v{i}", x.shape, short(x.dtype)) for i, x in enumerate(case.operands)]
    results = [Value(f"r{i}", *made) for i, made in enumerate(infer_results(case.kind, operands, case.attrs))]
    declared = workspace(case.kind, case.operands, case.attrs, results, adds=False)
    found = measured(case, results)
    # the f32 copy of a half-precision result may be made after a temporary is gone
    most = (1.4 if case.note.endswith("f16") else 1.1) * found + FREE
    agree = declared <= most and found <= 1.1 * declared + FREE
    return "" if agree else f"{case.kind} {case.note}: declared {declared} but measured {found}"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_kernels_allocate_what_they_declare(family: Callable[[], Iterator[Case]]) -> None:
    wrong = []
    for case in family():
        wrong.append(mismatch(case))
        if getattr(lookup(case.kind).kernel, "widens", False):
            wrong.append(mismatch(halved(case)))
    assert [text for text in wrong if text] == []


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_ranks_whose_blocks_are_empty_have_a_workspace_too(family: Callable[[], Iterator[Case]]) -> None:
    """A rank may have no samples, which are the first dim of what has as many as the first operand."""
    for case in family():
        samples = case.operands[0].shape[0] if case.operands and case.operands[0].ndim else None
        blocks = [x[:0] if x.ndim and x.shape[0] == samples else x for x in case.operands]
        operands = [Value(f"v{i}", x.shape, short(x.dtype)) for i, x in enumerate(blocks)]
        try:
            made = infer_results(case.kind, operands, case.attrs)
        except GraphError:  # not every first dim is one of samples
            continue
        results = [Value(f"r{i}", *value) for i, value in enumerate(made)]
        assert workspace(case.kind, blocks, case.attrs, results, adds=False) >= 0


def test_every_kernel_has_a_case() -> None:
    kinds = {case.kind for family in FAMILIES for case in family()}
    assert set(REGISTRY) - WITHOUT - kinds == {"while_loop", "scan"}  # have a test of their own


def test_a_while_loop_allocates_what_one_turn_makes() -> None:
    def program(x: Any, times: Any) -> Any:
        return ops.while_loop(
            lambda y, t: ops.reduce("sum", t) > 0, lambda y, t: (ops.tanh(y) * 0.5, t - 1), (x, times)
        )

    graph = trace(program, ((512, 1024), "f32"), ((1,), "i64"))
    (op,) = [op for op in graph.ops if op.kind == "while_loop"]
    case = Case("while_loop", (np.ones((512, 1024), np.float32), np.array([3])), dict(op.attrs))
    declared = workspace("while_loop", case.operands, case.attrs, op.results, adds=False)
    assert measured(case, list(op.results)) <= 1.1 * declared + FREE


def test_an_einsum_that_is_added_needs_a_buffer_only_where_blas_cannot_add() -> None:
    """One matrix product is added by BLAS; a batch of them is made first."""
    x, y = np.ones((8, 64, 128), np.float32), np.ones((8, 64, 256), np.float32)
    for spec, wanted in (("bsm,bsn->mn", 0), ("ebm,ebn->emn", 4 * 8 * 128 * 256)):
        assert workspace("einsum", (x, y), {"spec": spec}, [], adds=True) == wanted
        assert workspace("einsum", (x, y), {"spec": spec}, [], adds=False) == 0
