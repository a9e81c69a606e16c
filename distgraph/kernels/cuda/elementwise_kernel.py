"""Elementwise CUDA kernels on CuPy, one pass over memory, declared next to the NumPy form of their op."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """The source of a ``cupy.ElementwiseKernel``, a template over dtypes such as ``T``.

    CuPy compiles it at its first call and caches it on disk. It is called as ``kernel(*inputs, *outputs)``,
    or as ``kernel(*inputs, size=n)`` to allocate the outputs.
    """

    name: str
    inputs: str
    outputs: str
    body: str
    preamble: str = ""

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        return compiled(self)(*arrays, **options)


@cache
def compiled(kernel: CudaKernel) -> Any:
    """The ``cupy.ElementwiseKernel`` of a source."""
    cupy = import_module("cupy")
    return cupy.ElementwiseKernel(
        kernel.inputs, kernel.outputs, kernel.body, f"distgraph_{kernel.name}", preamble=kernel.preamble
    )
