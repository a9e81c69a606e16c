"""Where the window of a convolution or of a pooling lies over its input, padding, and blocks of samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from distgraph.errors import GraphError
from distgraph.kernels._common import Array, Namespace

_CACHE_COLUMNS = 1 << 18
"""Elements of the im2col block on a CPU: 1 MiB of float32, a second-level cache."""
_DEVICE_COLUMNS = 1 << 28
"""The same on a GPU: 1 GiB of float32."""

ALL = slice(None)

Pads = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Window:
    """Where a kernel lies over its input: sizes, per spatial dim."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Pads
    dilation: tuple[int, ...]
    input: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def plain(self) -> bool:
        """A 1 x 1 kernel that moves by one: the input is its own im2col."""
        return prod(self.kernel) == 1 and prod(self.stride) == 1 and not any(a or b for a, b in self.padding)


def window_of(
    what: str,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int] | int = 1,
    padding: Sequence[Sequence[int]] | int = 0,
    dilation: Sequence[int] | int = 1,
) -> Window:
    """Check and complete the attributes of a convolution or a pooling; one number stands for all spatial
    dims.

    Raises:
        GraphError: wrong number of dims, or the window does not fit in the padded input.
    """
    n = len(size)
    strides = (stride,) * n if isinstance(stride, int) else tuple(stride)
    dilations = (dilation,) * n if isinstance(dilation, int) else tuple(dilation)
    pads: Pads = (
        ((padding, padding),) * n if isinstance(padding, int) else tuple((p[0], p[1]) for p in padding)
    )
    if not len(kernel) == len(strides) == len(dilations) == len(pads) == n:
        raise GraphError(
            f"{what}: input has {n} spatial dims but window {tuple(kernel)}, stride {strides}, "
            f"padding {pads}, dilation {dilations}; give one entry for each dim"
        )
    out = tuple(
        (i + a + b - d * (k - 1) - 1) // s + 1
        for i, k, s, (a, b), d in zip(size, kernel, strides, pads, dilations, strict=True)
    )
    if min(out, default=1) < 1:
        raise GraphError(
            f"{what}: window {tuple(kernel)} does not fit in input {tuple(size)} with padding {pads}"
        )
    return Window(tuple(kernel), strides, pads, dilations, tuple(size), out)


def padded(xp: Namespace, x: Array, window: Window, value: float = 0.0) -> Array:
    """``x`` with its spatial dims padded; ``x`` itself where there is nothing to pad."""
    if not any(a or b for a, b in window.padding):
        return x
    wide = xp.full((*x.shape[:2], *padded_size(window)), value, x.dtype)  # `xp.pad` does the same, slower
    wide[inside(window)] = x
    return wide


def spread(xp: Namespace, dx: Array, window: Window) -> Array:
    """Zeros of the shape of a block of inputs with its padding: ``dx`` itself where there is none."""
    if any(a or b for a, b in window.padding):
        return xp.zeros((*dx.shape[:2], *padded_size(window)), dx.dtype)
    dx[...] = 0
    return dx


def gather(dx: Array, wide: Array, window: Window) -> None:
    """dx = ``wide``, made by `spread`, without its padding."""
    if wide is not dx:
        dx[...] = wide[inside(window)]


def padded_size(window: Window) -> tuple[int, ...]:
    """Lengths of the spatial dims of the input with its padding."""
    return tuple(i + a + b for i, (a, b) in zip(window.input, window.padding, strict=True))


def inside(window: Window) -> tuple[slice, ...]:
    """Index of the input in itself padded."""
    return ALL, ALL, *(slice(a, a + i) for i, (a, _) in zip(window.input, window.padding, strict=True))


@lru_cache(maxsize=1024)
def positions(window: Window) -> tuple[tuple[tuple[int, ...], tuple[slice, ...]], ...]:
    """Each place in the window, with the slices of the padded input that it meets over all outputs."""
    spaced = tuple(zip(window.dilation, window.output, window.stride, strict=True))
    return tuple(
        (
            place,
            tuple(
                slice(p * d, p * d + (o - 1) * s + 1, s) for p, (d, o, s) in zip(place, spaced, strict=True)
            ),
        )
        for place in product(*(range(k) for k in window.kernel))
    )


def block_samples(samples: int, area: int, budget: int = _CACHE_COLUMNS) -> int:
    """Samples of a block whose temporaries, ``area`` elements a sample, fit the budget; at least one."""
    return max(1, min(samples, budget // max(1, area)))


def blocks(xp: Namespace, samples: int, area: int) -> Iterator[slice]:
    """Blocks of samples, see `block_samples`: only they are padded, spread out and multiplied at once."""
    step = block_samples(samples, area, _CACHE_COLUMNS if xp is np else _DEVICE_COLUMNS)
    for n in range(0, samples, step):
        yield slice(n, min(n + step, samples))
