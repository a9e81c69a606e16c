"""Patches of convolutions: as many elements as the kernels multiply, whatever channels are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distgraph import ops
from distgraph.ir.graph import Op
from distgraph.kernels import conv as kernels
from distgraph.passes.analysis.op_work import Work, work_of
from distgraph.passes.serial.backward import differentiate
from distgraph.tracing.tracer import Trace

CASES = {
    "plain 3 x 3": ((2, 4, 6, 8), (5, 4, 3, 3), {"padding": 1}),
    "more channels made": ((2, 4, 6, 8), (40, 4, 3, 3), {"padding": 1}),
    "strided": ((3, 4, 9, 8), (6, 4, 3, 2), {"stride": (2, 3)}),
    "dilated": ((3, 4, 9, 9), (6, 4, 3, 3), {"dilation": 2, "padding": 2}),
    "grouped": ((3, 8, 7, 5), (4, 2, 3, 3), {"groups": 4}),
    "one dim": ((3, 8, 17), (4, 8, 5), {"stride": 2}),
    "three dims": ((1, 2, 5, 6, 7), (4, 2, 2, 3, 4), {}),
    "1 x 1, strided": ((2, 4, 6, 8), (5, 4, 1, 1), {"stride": 2}),
    "1 x 1, padded": ((2, 4, 6, 8), (5, 4, 1, 1), {"padding": 1}),
}


def works_of(x: tuple[int, ...], w: tuple[int, ...], attrs: dict[str, Any]) -> dict[str, Work]:
    """Works of a convolution and of its gradients, by kind."""
    steps = Trace("train")
    with steps.activate():
        a, b = steps.source("input", "x", x, "f32"), steps.source("input", "w", w, "f32")
        differentiate(steps, ops.conv(a, b, **attrs).sum(), [a, b])

    def work(op: Op) -> Work:
        return work_of(op, [value.nbytes for value in op.operands])

    return {op.kind: work(op) for op in steps.ops if op.kind.startswith("conv")}


@pytest.mark.parametrize("name", CASES)
def test_as_many_as_the_kernel_multiplies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, attrs = CASES[name]
    multiplied: list[tuple[int, ...]] = []
    columns = kernels._columns

    def counted(*args: Any) -> Any:
        found = columns(*args)
        multiplied.append(found.shape)
        return found

    monkeypatch.setattr(kernels, "_columns", counted)
    made = kernels.conv(np, np.ones(x, "f4"), np.ones(w, "f4"), **attrs)
    elements = sum(int(np.prod(shape)) for shape in multiplied)
    found = works_of(x, w, attrs)
    assert found["conv"].patches == (elements, elements / made.shape[-1])
    assert {work.patches for work in found.values()} == {found["conv"].patches}


def test_an_input_that_is_its_own_patches_is_not_copied() -> None:
    found = works_of((2, 4, 6, 8), (5, 4, 1, 1), {})
    assert found["conv"].patches == (0.0, 0.0)
    assert found["conv_grad_input"].patches == (2 * 4 * 6 * 8, 2 * 4 * 6)  # added up all the same


def test_a_block_of_nothing_copies_nothing() -> None:
    assert works_of((0, 4, 6, 8), (5, 4, 3, 3), {})["conv"].patches == (0.0, 0.0)


@pytest.mark.parametrize("kind", ["conv", "conv_grad_input", "conv_grad_weight"])
def test_ranks_that_divide_samples_share_the_patches_and_those_that_divide_what_is_made_do_not(
    kind: str,
) -> None:
    cases = ((4, 4, 6, 8), (8, 4, 3, 3)), ((2, 4, 6, 8), (8, 4, 3, 3)), ((4, 4, 6, 8), (4, 4, 3, 3))
    whole, samples, made = (works_of(x, w, {"padding": 1})[kind] for x, w in cases)
    assert samples.patches == (whole.patches[0] / 2, whole.patches[1] / 2)
    assert made.patches == whole.patches
    assert samples.flops == made.flops == whole.flops / 2


def test_half_the_channels_made_are_half_the_flops_of_as_many_patches() -> None:
    whole, half = (works_of((2, 4, 6, 8), (made, 4, 3, 3), {"padding": 1})["conv"] for made in (8, 4))
    assert half.flops == whole.flops / 2
    assert half.patches == whole.patches
