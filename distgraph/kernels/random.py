"""Random numbers as a function of (key, position): the same under any sharding and on any device.

Element i (row-major position in the *global* array) of the stream ``key`` is::

    bits(key, i) = mix(key + i * 0x9E3779B97F4A7C15)      modulo 2^64
    mix(z): z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;  z = (z ^ z >> 27) * 0x94D049BB133111EB;  z ^ z >> 31

that is, SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) read at any place; ``key`` is itself a hash, so two
streams start far apart. A shard is described by the global ``shape``, its ``starts`` in each dim and its
``local_shape``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any
from zlib import crc32

import numpy as np

from distgraph.errors import GraphError
from distgraph.kernels._common import (
    Array,
    Namespace,
    computed_in_f32,
    empty,
    flat,
    has_cuda,
    special_functions,
    store,
)
from distgraph.kernels._elementwise import LOOP_BLOCK, copy
from distgraph.kernels._jit import FUSED_MIN_SIZE, has_numba, inlined, jit, pays
from distgraph.kernels.cuda.elementwise_kernel import CudaKernel

_WORD = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LOOP_GOLDEN = np.uint64(_GOLDEN)
_LOOP_MIX_1, _LOOP_MIX_2 = np.uint64(_MIX_1), np.uint64(_MIX_2)
_S30, _S27, _S31, _S32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)


def _mix(z: int) -> int:
    """The mixing function of SplitMix64 on one Python int."""
    z = ((z ^ (z >> 30)) * _MIX_1) & _WORD
    z = ((z ^ (z >> 27)) * _MIX_2) & _WORD
    return z ^ (z >> 31)


def random_key(seed: int, salt: int | str = 0, step: int = 0) -> int:
    """The key of one stream, in [0, 2^64).

    Args:
        seed: of the run.
        salt: what the numbers are for, such as a parameter's name or an op's number.
        step: of the training.

    Example:
        >>> random_key(1, "fc1.weight") == random_key(1, "fc2.weight")
        False
    """
    if isinstance(salt, str):
        data = salt.encode()
        salt = crc32(data) << 32 | crc32(data[::-1] + b"#")
    key = 0
    for part in (seed, salt, step):
        key = _mix((key + (int(part) & _WORD) + _GOLDEN) & _WORD)
    return key


def fold_key(key: Any, salt: int | str) -> int:
    """A key that depends on ``key`` (an int or a 0-d array) and ``salt``; ``key`` itself for salt 0."""
    return int(key) & _WORD if salt == 0 else random_key(int(key), salt)


def _runs(
    xp: Namespace, shape: Sequence[int], starts: Sequence[int] | None, local: Sequence[int]
) -> tuple[Array, int]:
    """The global positions of a shard as runs: (first position of each run as uint64 [runs], length of a
    run).

    Raises:
        GraphError: the shard is not within ``shape``.
    """
    starts = tuple(starts) if starts is not None else (0,) * len(shape)
    fits = len(shape) == len(starts) == len(local)
    if not fits or any(s < 0 or s + n > g for g, s, n in zip(shape, starts, local, strict=True) if n):
        raise GraphError(
            f"random: shard {tuple(local)} at {starts} is not inside {tuple(shape)}; check the starts"
        )
    run, dim = 1, len(shape)
    first = 0
    while dim > 0:  # trailing dims that lie whole in the shard, and the one before them, make one run
        dim -= 1
        stride = prod(shape[dim + 1 :])
        run *= local[dim]
        first += starts[dim] * stride
        if local[dim] != shape[dim]:
            break
    offsets = xp.full((1,) * max(dim, 1), first, dtype=np.uint64)
    for outer in range(dim):
        stride = prod(shape[outer + 1 :])
        along = xp.arange(starts[outer], starts[outer] + local[outer], dtype=np.uint64) * np.uint64(stride)
        offsets = offsets + along.reshape([-1 if d == outer else 1 for d in range(dim)])
    return offsets.reshape(-1), run


@inlined
def _hash(z: Any) -> Any:
    z = (z ^ (z >> _S30)) * _LOOP_MIX_1
    z = (z ^ (z >> _S27)) * _LOOP_MIX_2
    return z ^ (z >> _S31)


@jit
def _random_bits_loop(key: Any, offsets: Any, run: Any, bits: Any) -> None:
    """bits[i * run + j] = hash(key, offsets[i] + j), all uint64."""
    for i in range(offsets.size):
        part = bits[i * run : (i + 1) * run]
        state = key + offsets[i] * _LOOP_GOLDEN
        for j in range(part.size):
            part[j] = _hash(state + np.uint64(j) * _LOOP_GOLDEN)


_CUDA_HASH = """
__device__ unsigned long long distgraph_hash(unsigned long long z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}
"""
_CUDA_STATE = "key + (offsets[i / run] + (unsigned long long)(i % run)) * 0x9E3779B97F4A7C15ULL"
_RANDOM_BITS_CUDA = CudaKernel(
    "random_bits",
    "uint64 key, raw uint64 offsets, int64 run",
    "uint64 bits",
    f"bits = distgraph_hash({_CUDA_STATE});",
    _CUDA_HASH,
)


def _words(xp: Namespace, key: int, offsets: Array, run: int) -> Array:
    """uint64 [runs * run] hashes."""
    size = int(offsets.size) * run
    if xp is not np and size == 0:
        return xp.empty(0, np.uint64)
    if has_cuda(xp):
        return _RANDOM_BITS_CUDA(np.uint64(key), offsets, run, size=size)
    if xp is np and size >= FUSED_MIN_SIZE and has_numba():
        words = np.empty(size, np.uint64)
        _random_bits_loop(np.uint64(key), offsets, run, words)
        return words
    inner = xp.arange(run, dtype=np.uint64)
    return _hash_in_place((offsets[:, None] + inner).reshape(-1), key)


def _hash_in_place(z: Array, key: int) -> Array:
    """Positions to hashes, in one buffer and one temporary."""
    z *= np.uint64(_GOLDEN)
    z += np.uint64(key)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        z ^= z >> np.uint64(shift)
        if factor != 1:
            z *= np.uint64(factor)
    return z


def _local(shape: Sequence[int], local_shape: Sequence[int] | None, out: Array | None) -> tuple[int, ...]:
    if local_shape is not None:
        return tuple(local_shape)
    return tuple(out.shape) if out is not None else tuple(shape)


def random_bits(
    xp: Namespace,
    key: Any,
    *,
    shape: Sequence[int],
    starts: Sequence[int] | None = None,
    local_shape: Sequence[int] | None = None,
    salt: int | str = 0,
) -> Array:
    """Uniform bits of the shard, uint64. Identical on every device.

    Args:
        key: of the stream, from `random_key`; an int or a 0-d array.
        shape: of the global array.
        starts: of this shard in each dim; zeros where not given.
        local_shape: of this shard; ``shape`` where not given.
        salt: tells streams of one key apart.

    Raises:
        GraphError: the shard is not within ``shape``.
    """
    local = tuple(shape if local_shape is None else local_shape)
    return _words(xp, fold_key(key, salt), *_runs(xp, shape, starts, local)).reshape(local)


def random_uniform(
    xp: Namespace,
    key: Any,
    *,
    shape: Sequence[int],
    starts: Sequence[int] | None = None,
    local_shape: Sequence[int] | None = None,
    salt: int | str = 0,
    dtype: Any = "float32",
    out: Array | None = None,
) -> Array:
    """Uniform in [0, 1): the upper 24 bits / 2^24, or for float64 the upper 53 bits / 2^53, so 1 is never
    drawn.

    Half-precision types round to nearest and may give 1. Arguments as `random_bits`.
    """
    bits = random_bits(
        xp, key, shape=shape, starts=starts, local_shape=_local(shape, local_shape, out), salt=salt
    )
    kind = np.dtype(dtype if out is None else out.dtype)
    digits, wide = (53, np.float64) if kind == np.float64 else (24, np.float32)
    values = xp.asarray(bits >> np.uint64(64 - digits)).astype(wide)  # of no dims NumPy makes a number
    values *= wide(2.0**-digits)
    return store(xp, values, out, kind)


def random_normal(
    xp: Namespace,
    key: Any,
    *,
    shape: Sequence[int],
    starts: Sequence[int] | None = None,
    local_shape: Sequence[int] | None = None,
    salt: int | str = 0,
    dtype: Any = "float32",
    out: Array | None = None,
) -> Array:
    """Standard normal: the inverse distribution function at (the upper 52 bits + 1/2) / 2^52, in float64,
    rounded once.

    Within 8.2 of 0, symmetric. Identical under any sharding; NumPy and CuPy agree to rounding. Arguments as
    `random_bits`.
    """
    bits = random_bits(
        xp, key, shape=shape, starts=starts, local_shape=_local(shape, local_shape, out), salt=salt
    )
    uniform = xp.asarray(bits >> np.uint64(12)).astype(np.float64)  # of no dims NumPy makes a number
    uniform += 0.5
    uniform *= 2.0**-52
    ndtri = special_functions(xp).ndtri
    return store(xp, ndtri(uniform, out=uniform), out, np.dtype(dtype if out is None else out.dtype))


@jit
def _dropout_loop(x: Any, key: Any, offsets: Any, run: Any, threshold: Any, scale: Any, y: Any) -> None:
    """y = x * scale where the upper half of hash(key, global index) reaches ``threshold``, else 0."""
    scratch = np.empty(min(LOOP_BLOCK, run), x.dtype)
    for i in range(offsets.size):
        for start in range(i * run, (i + 1) * run, LOOP_BLOCK):
            stop = min(start + LOOP_BLOCK, (i + 1) * run)
            part = x[start:stop]
            state = key + (offsets[i] + np.uint64(start - i * run)) * _LOOP_GOLDEN
            for j in range(part.size):
                high = _hash(state + np.uint64(j) * _LOOP_GOLDEN) >> _S32
                scratch[j] = part[j] * scale if high >= threshold else x.dtype.type(0.0)
            copy(scratch[: part.size], y[start:stop])


_DROPOUT_CUDA = CudaKernel(
    "dropout",
    "T x, uint64 key, raw uint64 offsets, int64 run, uint64 threshold, T scale",
    "T y",
    f"y = (distgraph_hash({_CUDA_STATE}) >> 32) >= threshold ? x * scale : T(0);",
    _CUDA_HASH,
)


@computed_in_f32(0)
def dropout(
    xp: Namespace,
    x: Array,
    key: Any,
    *,
    rate: float,
    shape: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
    salt: int | str = 0,
    out: Array | None = None,
) -> Array:
    """y = x / (1 - rate) where the upper 32 random bits reach rate * 2^32, else 0; applied to dy it is the
    gradient.

    Args:
        x: this shard.
        key: of the stream, from `random_key`; an int or a 0-d array.
        rate: share that is dropped, in [0, 1).
        shape, starts: of the global array and of this shard in it; x is the whole where not given.
        salt: tells the dropouts of one step apart.

    Raises:
        GraphError: the rate is outside [0, 1), or the shard is not within ``shape``.
    """
    if not 0 <= rate < 1:
        raise GraphError(f"dropout: rate is {rate} but must be in [0, 1)")
    offsets, run = _runs(xp, x.shape if shape is None else shape, starts, x.shape)
    word = fold_key(key, salt)
    threshold = min(round(rate * 2**32), 2**32 - 1)
    scale = x.dtype.type(1 / (1 - rate))
    y = empty(xp, out, x.shape, x.dtype)
    if has_cuda(xp):
        if x.size:
            contiguous = xp.ascontiguousarray(x).reshape(-1)
            numbers = (np.uint64(word), offsets, run, np.uint64(threshold), scale)
            _DROPOUT_CUDA(contiguous, *numbers, y.reshape(-1))
        return store(xp, y, out)
    if pays(xp, x, np.float32, np.float64):
        _dropout_loop(flat(x), np.uint64(word), offsets, run, np.uint64(threshold), scale, y.reshape(-1))
        return store(xp, y, out)
    keep = (_words(xp, word, offsets, run) >= np.uint64(threshold << 32)).reshape(x.shape)
    return store(xp, xp.where(keep, x * scale, x.dtype.type(0)), out)
