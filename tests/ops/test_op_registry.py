"""Every op: against NumPy, its gradient, every dtype, and every legal layout on five meshes."""

from __future__ import annotations

import pytest
from support.ops.op_checks import (
    check_decomposition,
    check_dtype,
    check_gradient,
    check_layouts,
    check_values,
    every,
)
from support.ops.op_samples import SAMPLES as PRIMITIVES
from support.ops.op_samples_fused import SAMPLES as FUSED
from support.ops.opaque_samples import SAMPLES as OPAQUE

from distgraph.ir.graph import SOURCES
from distgraph.ir.op_registry import REGISTRY

FED = set(SOURCES)  # data that the runtime brings in: nothing to compute
RUNTIME = {"accumulate", "reshard"} | {
    k for k in REGISTRY if k.startswith(("comm.", "loop."))
}  # the identity on one rank, and ops that are laid out but never run

SAMPLES = PRIMITIVES | FUSED | OPAQUE
CASES = list(every(SAMPLES))
IDS = [f"{kind}-{position}" for kind, position in CASES]


def test_every_op_has_a_sample() -> None:
    assert set(REGISTRY) - FED - RUNTIME - set(SAMPLES) == set()


@pytest.mark.parametrize(("kind", "position"), CASES, ids=IDS)
def test_values(kind: str, position: int) -> None:
    check_values(kind, SAMPLES[kind][position])


@pytest.mark.parametrize(("kind", "position"), CASES, ids=IDS)
def test_gradient(kind: str, position: int) -> None:
    check_gradient(kind, SAMPLES[kind][position])


@pytest.mark.parametrize(("kind", "position"), CASES, ids=IDS)
def test_dtypes(kind: str, position: int) -> None:
    sample = SAMPLES[kind][position]
    if any(a.dtype == float for a in sample.operands):
        for dtype in sample.dtypes:
            check_dtype(kind, sample, dtype)


@pytest.mark.parametrize(("kind", "position"), CASES, ids=IDS)
def test_every_layout(kind: str, position: int) -> None:
    assert check_layouts(kind, SAMPLES[kind][position]) >= 5


@pytest.mark.parametrize(("kind", "position"), CASES, ids=IDS)
def test_decomposition(kind: str, position: int) -> None:
    check_decomposition(kind, SAMPLES[kind][position])
