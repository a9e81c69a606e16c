"""Compiled loops of convolutions without copies of windows, against sums over windows in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from distgraph.kernels import _jit, conv
from distgraph.kernels.windows import vector_tiles, window_products
from distgraph.kernels.windows.window import Window, window_of

pytest.importorskip("numba")

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "same size": ((3, 5, 9, 7), (16, 5, 3, 3), {"padding": 1}),
    "no padding": ((2, 4, 9, 8), (9, 4, 2, 3), {}),
    "padding on one side": ((2, 3, 8, 9), (8, 3, 3, 2), {"padding": ((0, 2), (1, 0))}),
    "steps of two and three": ((2, 3, 14, 17), (12, 3, 3, 4), {"stride": (2, 3), "padding": 1}),
    "dilated": ((2, 3, 13, 12), (10, 3, 3, 3), {"dilation": (2, 3), "padding": 2}),
    "groups": ((2, 6, 9, 7), (36, 2, 3, 3), {"groups": 3, "padding": 1}),
    "several vectors, the last one of one output": ((2, 4, 6, 5), (33, 4, 3, 3), {"padding": 1}),
    "more terms than are added at once": ((1, 70, 9, 8), (8, 70, 2, 2), {}),
    "one dim": ((4, 6, 40), (11, 6, 5), {"padding": 2}),
    "three dims": ((2, 3, 5, 6, 7), (8, 3, 2, 3, 2), {"padding": ((1, 0), (0, 1), (1, 1))}),
}


def operands(name: str) -> tuple[Any, Any, Window, int]:
    """x, w, the window and the number of groups of a case."""
    x, w, attrs = CASES[name]
    random = np.random.default_rng(5)
    steps = {key: value for key, value in attrs.items() if key != "groups"}
    made = (random.standard_normal(shape).astype(np.float32) for shape in (x, w))
    return *made, window_of("conv", x[2:], w[2:], **steps), attrs.get("groups", 1)


def windows(x: Any, window: Window, groups: int) -> Any:
    """The elements of all windows in float64, [n, groups, c / groups, place, output]."""
    pads = [(0, 0), (0, 0), *window.padding]
    wide = np.pad(x.astype(np.float64), pads)
    spaced = list(zip(window.dilation, window.stride, window.output, strict=True))

    def at(place: tuple[int, ...]) -> Any:
        along = zip(place, spaced, strict=True)
        return wide[(..., *(slice(k * d, k * d + (o - 1) * s + 1, s) for k, (d, s, o) in along))]

    met = [at(place) for place in np.ndindex(window.kernel)]
    return np.stack(met, axis=2).reshape(len(x), groups, x.shape[1] // groups, len(met), -1)


def convolution(x: Any, w: Any, window: Window, groups: int) -> Any:
    kernel = w.astype(np.float64).reshape(groups, len(w) // groups, w.shape[1], -1)
    return np.einsum("ngckp,gock->ngop", windows(x, window, groups), kernel).reshape(
        len(x), len(w), *window.output
    )


@pytest.mark.parametrize("name", CASES)
def test_convolutions_are_sums_over_windows(name: str) -> None:
    x, w, window, groups = operands(name)
    y = np.full((len(x), len(w), *window.output), np.nan, np.float32)
    window_products.convolve(x, w, window, groups, y)
    np.testing.assert_allclose(y, convolution(x, w, window, groups), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_kernels_are_sums_over_windows(name: str) -> None:
    x, w, window, groups = operands(name)
    shape = (len(x), len(w), *window.output)
    dy = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    dw = np.full_like(w, np.nan)
    window_products.kernel_gradient(x, dy, window, groups, dw)
    changes = dy.astype(np.float64).reshape(len(x), groups, len(w) // groups, -1)
    expected = np.einsum("ngckp,ngop->gock", windows(x, window, groups), changes).reshape(w.shape)
    np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_tiles_are_those_of_the_loops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of `_multiply` has tiles of six rows by sixteen lanes, with up to 256 terms at once."""
    x, w, window, groups = operands(name)
    y = np.empty((len(x), len(w), *window.output), np.float32)
    calls: list[tuple[int, int, int]] = []

    def noted(x: Any, second: Any, starts: Any, taps: Any, *rest: Any) -> None:
        vectors = -(-len(w) // groups // 16)
        calls.append((x.shape[0] * groups * vectors, starts.size // 6, taps.size))

    monkeypatch.setattr(window_products, "_convolve_block", noted)
    monkeypatch.setattr(window_products, "_gradient_of_block", noted)
    for loop, count, first, last in (
        (window_products.convolve, window_products.convolution_tiles, w, y),
        (window_products.kernel_gradient, window_products.gradient_tiles, y, np.empty_like(w)),
    ):
        calls.clear()
        loop(x, first, window, groups, last)
        flops, copied, tiles = count(window, x.shape, w.shape, groups)
        assert flops == sum(2 * times * rows * 6 * 16 * terms for times, rows, terms in calls)
        assert tiles == sum(times * rows * -(-terms // 256) for times, rows, terms in calls)
        assert copied >= w.size


def test_blocks_of_samples_leave_no_trace_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, window, groups = operands("same size")
    whole, parts = (np.empty((len(x), len(w), *window.output), np.float32) for _ in range(2))
    window_products.convolve(x, w, window, groups, whole)
    monkeypatch.setattr(window_products, "padded_samples", lambda *_: 2)
    window_products.convolve(x, w, window, groups, parts)
    np.testing.assert_array_equal(whole, parts)


def test_a_nan_reaches_the_outputs_whose_windows_have_it_and_no_others() -> None:
    x, w, window, groups = operands("same size")
    x[1, 2, 4, 3] = np.nan
    y = np.empty((len(x), len(w), *window.output), np.float32)
    window_products.convolve(x, w, window, groups, y)
    hit = np.zeros(y.shape, bool)
    hit[1, :, 3:6, 2:5] = True
    np.testing.assert_array_equal(np.isnan(y), hit)


def test_operands_that_are_not_contiguous_are_read_as_they_are() -> None:
    x, w, window, groups = operands("no padding")
    turned_x, turned_w = (np.asfortranarray(a) for a in (x, w))
    y, z = (np.empty((len(x), len(w), *window.output), np.float32) for _ in range(2))
    window_products.convolve(x, w, window, groups, y)
    window_products.convolve(turned_x, turned_w, window, groups, z)
    np.testing.assert_array_equal(y, z)


@pytest.mark.parametrize("kernel", ["conv", "conv_grad_input", "conv_grad_weight"])
def test_kernels_agree_with_copies_of_windows(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random, attrs = np.random.default_rng(9), {"padding": ((2, 1), (0, 2)), "groups": 2}
    x, w = (random.standard_normal(shape).astype(np.float32) for shape in ((12, 18, 13, 11), (20, 9, 3, 3)))
    dy = random.standard_normal(conv.conv(np, x, w, **attrs).shape).astype(np.float32)
    calls: dict[str, Callable[[], Any]] = {
        "conv": lambda: conv.conv(np, x, w, **attrs),
        "conv_grad_input": lambda: conv.conv_grad_input(np, dy, w, input_shape=x.shape, **attrs),
        "conv_grad_weight": lambda: conv.conv_grad_weight(np, x, dy, kernel_shape=w.shape, **attrs),
    }
    used: list[bool] = []
    decide = conv.multiplies_windows

    def recorded(*args: Any) -> bool:
        used.append(decide(*args))
        return used[-1]

    monkeypatch.setattr(conv, "multiplies_windows", recorded)
    by_loops = calls[kernel]()
    assert all(used)
    monkeypatch.setattr(conv, "multiplies_windows", lambda *_: False)
    np.testing.assert_allclose(by_loops, calls[kernel](), rtol=1e-4, atol=1e-3)


def test_the_loops_take_full_vectors_of_float32_on_numpy_with_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = np.zeros((8, 16, 20, 20), np.float32), (16, 16, 3, 3)
    window = window_of("conv", x.shape[2:], w[2:], padding=1)

    def used(x: Any = x, w: tuple[int, ...] = w, window: Window = window, groups: int = 1) -> bool:
        return window_products.multiplies_windows(np, (x, x), window, w, groups)

    assert used()
    assert not used(x.astype(np.float64))
    assert not used(w=(16, 1, 3, 3), groups=16)  # one output of a group
    assert not used(x[:1], window=window_of("conv", (5, 5), w[2:], padding=1))  # few windows
    assert not used(window=window_of("conv", x.shape[2:], (1, 1)))  # the input is its own windows
    assert not window_products.multiplies_windows(object(), (x, x), window, w, 1)
    monkeypatch.setattr(window_products, "has_numba", lambda: False)
    assert not used()


_add_products, _transpose_tile = vector_tiles.add_products, vector_tiles.transpose_tile


@_jit.jit
def _products(x: Any, starts: Any, first: int, taps: Any, weights: Any, sums: Any) -> None:
    _add_products(x, starts, first, taps, weights, sums)


@_jit.jit
def _transposition(x: Any, row: int, column: int, y: Any) -> None:
    _transpose_tile(x, row, column, y)


@pytest.mark.parametrize("terms", [0, 1, 7])
def test_products_of_a_tile_mean_what_its_function_says(terms: int) -> None:
    random = np.random.default_rng(11)
    rows, lanes = vector_tiles.TILE_ROWS + 3, vector_tiles.LANES
    x = random.standard_normal(40).astype(np.float32)
    starts, taps = random.integers(20, size=rows), random.integers(20, size=terms)
    weights = random.standard_normal((terms, lanes)).astype(np.float32)
    computed = random.standard_normal((rows, lanes)).astype(np.float32)
    expected = computed.copy()
    _products(x, starts, 2, taps, weights, computed)
    vector_tiles.add_products._function(x, starts, 2, taps, weights, expected)
    np.testing.assert_allclose(computed, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(computed[[0, 1, -1]], expected[[0, 1, -1]])  # rows outside of the tile


def test_a_transposed_tile_means_what_its_function_says() -> None:
    lanes = vector_tiles.LANES
    x = np.arange((lanes + 2) * (lanes + 5), dtype=np.float32).reshape(lanes + 2, lanes + 5)
    computed, expected = (np.zeros((lanes + 4, lanes + 3), np.float32) for _ in range(2))
    _transposition(x, 2, 3, computed)
    vector_tiles.transpose_tile._function(x, 2, 3, expected)
    assert not expected[:3].any()
    np.testing.assert_array_equal(computed, expected)
