"""Random numbers: reproducible anywhere, independent of sharding, and statistically sound on one fixed
seed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import scipy.stats

from distgraph.errors import GraphError
from distgraph.kernels import _jit
from distgraph.kernels import random as rnd

SEED = 20240607
COUNT = 1 << 18
MASK = (1 << 64) - 1


@pytest.fixture(params=["numba", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both implementations on the CPU."""
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "numba", None)
    else:
        pytest.importorskip("numba")
    _jit.has_numba.cache_clear()
    yield request.param
    _jit.has_numba.cache_clear()


def splitmix64(state: int, count: int) -> list[int]:
    """The published generator, one number after another."""
    numbers = []
    for _ in range(count):
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        numbers.append(z ^ (z >> 31))
        state = (state + 0x9E3779B97F4A7C15) & MASK
    return numbers


def test_bits_are_those_of_splitmix64(path: str) -> None:
    # First output of the reference program (Vigna, splitmix64.c) for seed 0; its state is advanced before
    # mixing.
    assert int(rnd.random_bits(np, 0x9E3779B97F4A7C15, shape=(1,))[0]) == 0xE220A8397B1DCDAF
    key = rnd.random_key(SEED)
    bits = rnd.random_bits(np, key, shape=(200, 100))
    assert bits.reshape(-1)[:500].tolist() == splitmix64(key, 500)
    far = rnd.random_bits(np, key, shape=(1 << 40, 1 << 20), starts=(1 << 39, 5), local_shape=(1, 2))
    assert far[0].tolist() == splitmix64((key + (((1 << 59) + 5) * 0x9E3779B97F4A7C15)) & MASK, 2)


SPLITS = [(1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 4), (3, 2, 1), (2, 3, 4)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("shape", [(5, 7, 9), (40, 50, 61)])
def test_shards_concatenate_to_the_global_numbers(
    shape: tuple[int, ...], split: tuple[int, ...], path: str
) -> None:
    key = rnd.random_key(SEED, "layer", 3)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    makers = {
        "bits": lambda **where: rnd.random_bits(np, key, **where),
        "uniform": lambda **where: rnd.random_uniform(np, key, **where),
        "normal": lambda **where: rnd.random_normal(np, key, **where),
    }
    wholes = {name: make(shape=shape) for name, make in makers.items()}
    dropped = rnd.dropout(np, x, key, rate=0.25, salt=8)
    blocks = [-(-n // k) for n, k in zip(shape, split, strict=True)]
    for place in product(*(range(k) for k in split)):
        starts = tuple(min(p * b, n) for p, b, n in zip(place, blocks, shape, strict=True))
        part = tuple(slice(s, s + b) for s, b in zip(starts, blocks, strict=True))
        local = x[part].shape
        for name, make in makers.items():
            got = make(shape=shape, starts=starts, local_shape=local)
            np.testing.assert_array_equal(got, wholes[name][part], err_msg=name)
        got = rnd.dropout(np, x[part], key, rate=0.25, salt=8, shape=shape, starts=starts)
        np.testing.assert_array_equal(got, dropped[part])


def test_uniform_bits_pass_chi_square_runs_and_correlation_tests() -> None:
    bits = rnd.random_bits(np, rnd.random_key(SEED, "quality"), shape=(COUNT,))
    for shift in range(0, 64, 8):
        counts = np.bincount(((bits >> np.uint64(shift)) & np.uint64(255)).astype(np.int64), minlength=256)
        assert scipy.stats.chisquare(counts).pvalue > 1e-4, f"byte at bit {shift}"
    for bit in range(64):
        flips = ((bits >> np.uint64(bit)) & np.uint64(1)).astype(np.int8)
        runs = np.count_nonzero(np.diff(flips)) + 1
        z = (runs - (COUNT + 1) / 2) / np.sqrt((COUNT - 1) / 4)  # Wald and Wolfowitz
        assert abs(z) < 4.5, f"runs of bit {bit}"
    unit = rnd.random_uniform(np, rnd.random_key(SEED, "quality"), shape=(COUNT,), dtype="float64")
    assert scipy.stats.kstest(unit, "uniform").pvalue > 1e-4
    for lag in (1, 2, 7, 64, 1000, 1024):
        assert abs(np.corrcoef(unit[:-lag], unit[lag:])[0, 1]) < 4.5 / np.sqrt(COUNT), f"lag {lag}"


def test_streams_of_near_keys_are_unrelated() -> None:
    streams = [
        rnd.random_uniform(np, rnd.random_key(SEED, salt, step), shape=(COUNT // 8,), dtype="float64")
        for salt, step in (("a", 0), ("a", 1), ("b", 0), (1, 0), (2, 0), ("", 0))
    ]
    streams.append(rnd.random_uniform(np, rnd.random_key(SEED), shape=(COUNT // 8,), dtype="float64", salt=1))
    correlation = np.corrcoef(streams) - np.eye(len(streams))
    assert np.abs(correlation).max() < 4.5 / np.sqrt(COUNT // 8)


def test_normal_numbers_are_normal() -> None:
    z = rnd.random_normal(np, rnd.random_key(SEED, "normal"), shape=(COUNT,), dtype="float64")
    assert scipy.stats.kstest(z, "norm").pvalue > 1e-4
    assert np.isfinite(z).all()
    assert abs(z[:-1] @ z[1:]) / COUNT < 4.5 / np.sqrt(COUNT)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_are_rounded_from_the_same_numbers(dtype: str) -> None:
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for make in (rnd.random_uniform, rnd.random_normal):
        wide = make(np, 5, shape=(64,), dtype="float64")
        got = make(np, 5, shape=(64,), dtype=kind)
        assert got.dtype == kind
        step = float(ml_dtypes.finfo(kind).eps)
        np.testing.assert_allclose(got.astype(np.float64), wide, rtol=step, atol=2.0**-24)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_dropout_keeps_the_share_and_the_mean(rate: float, path: str) -> None:
    x = np.ones((512, 512), np.float32)
    y = rnd.dropout(np, x, rnd.random_key(SEED, "dropout"), rate=rate)
    kept = np.count_nonzero(y)
    assert abs(kept - x.size * (1 - rate)) <= 4.5 * np.sqrt(x.size * rate * (1 - rate))
    np.testing.assert_array_equal(np.unique(y[y != 0]), np.float32(1 / (1 - rate)))


def test_a_shard_outside_the_array_is_refused() -> None:
    with pytest.raises(GraphError, match="not inside"):
        rnd.random_bits(np, 1, shape=(4, 6), starts=(2, 4), local_shape=(2, 3))
    with pytest.raises(GraphError, match="not inside"):
        rnd.random_bits(np, 1, shape=(4, 6), starts=(0,), local_shape=(2, 3))
