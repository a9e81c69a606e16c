"""CUDA kernels in which the threads of a block work together, such as on one row of a matrix.

The source of a kernel is the same for all dtypes. Every array has a type of its own, called ``x_t`` for the
array ``x``; `load` reads any floating-point type, `store` writes any, and all arithmetic is of the type
``A``: double if an operand is float64, else float. So half precision is read and written as it is stored,
and computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from distgraph.kernels._common import Array, Namespace, check_bfloat16, is_half, outputs, store
from distgraph.kernels.cuda.device_functions import DEVICE_FUNCTIONS

Result: TypeAlias = tuple[Sequence[int], Any]
"""Shape and dtype of a result."""

FLOATS = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}
"""Floating-point dtypes and their names in a source."""

INTEGERS = {
    "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long",
    "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned int",
    "uint64": "unsigned long long",
}  # fmt: skip
"""Integer dtypes and their names in a source."""

WARP = 32
"""Threads of a warp; the size of a block is a multiple."""

_ELEMENTS_OF_A_THREAD = 4
"""Elements of a row for each thread, up to the largest block; longer rows have more for each."""
MOST_BLOCKS = (1 << 31) - 1
"""Largest size of a grid."""

_MOST_ELEMENTS = 1 << 30

_SCALARS = {"int": np.int32, "long long": np.int64}


@dataclass(frozen=True, slots=True)
class BlockKernel:
    """The source of a ``cupy.RawKernel``.

    CuPy compiles it at its first call, for each combination of dtypes and constants, and caches it on disk.

    Attributes:
        name: of the kernel.
        inputs, outputs: names of arrays, C-contiguous, separated by spaces. The argument of array ``x`` is a
            pointer to elements of type ``x_t``.
        scalars: declarations of further arguments, of types int, long long and ``A``, separated by ", ".
        body: of the kernel.
        functions: device functions of the kernel.
        constants: names of integers that are given at compile time.
        threads: most threads of a block.
    """

    name: str
    inputs: str
    outputs: str
    scalars: str
    body: str
    functions: str = ""
    constants: tuple[str, ...] = ()
    threads: int = 1024

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of all arrays, inputs first."""
        return (*self.inputs.split(), *self.outputs.split())

    @property
    def entry(self) -> str:
        """The name of the kernel in the source."""
        return f"distgraph_{self.name}"

    def source(self, dtypes: Sequence[str], constants: Sequence[int] = ()) -> str:
        """The complete source for the dtypes of the arrays, by name, and the values of the constants."""
        of_inputs = dtypes[: len(self.inputs.split())]
        types = {name: (FLOATS | INTEGERS)[d] for name, d in zip(self.arrays, dtypes, strict=True)}
        lines = [f"typedef {'double' if 'float64' in of_inputs else 'float'} A;", DEVICE_FUNCTIONS]
        lines += [f"typedef {kind} {name}_t;" for name, kind in types.items()]
        values = zip(self.constants, constants, strict=True)
        lines += [f"constexpr int {name} = {value};" for name, value in values]
        parameters = [f"const {name}_t* {name}" for name in self.inputs.split()]
        parameters += [f"{name}_t* {name}" for name in self.outputs.split()]
        parameters += [f"const {declared}" for declared in self.scalars.split(", ")]
        head = f'extern "C" __global__ void __launch_bounds__({self.threads}) {self.entry}'
        lines += [self.functions, f"{head}({', '.join(parameters)}) {{{self.body}}}", ""]
        return "\n".join(lines)

    def numbers(self, scalars: Sequence[float], compute: Any) -> list[Any]:
        """The scalars in their declared types; ``compute`` is the dtype of ``A``."""
        types = [declared.rsplit(" ", 1)[0] for declared in self.scalars.split(", ")]
        return [_SCALARS.get(kind, compute.type)(s) for kind, s in zip(types, scalars, strict=True)]


@cache
def compiled(
    raw_kernel: Any, kernel: BlockKernel, dtypes: tuple[str, ...], constants: tuple[int, ...]
) -> Any:
    """The ``cupy.RawKernel`` of a source; ``raw_kernel`` is that class."""
    return raw_kernel(kernel.source(dtypes, constants), kernel.entry)


def compute_dtype(*operands: Array) -> Any:
    """The dtype of ``A``: float64 if an operand has it, else float32."""
    return np.dtype(np.float64 if any(x.dtype == np.float64 for x in operands) else np.float32)


def result_dtype(operand: Array, wide: bool) -> Any:
    """The dtype of a result that follows ``operand``: float32 for half precision if it is not rounded."""
    return np.dtype(np.float32) if wide and is_half(operand.dtype) else operand.dtype


def takes(xp: Namespace, *operands: Array) -> bool:
    """Whether the kernels take these operands of floating-point type.

    Each is an array of the device with an element or more. float64 does not mix with others: the array
    functions have rules for that.

    Raises:
        RuntimeFault: bfloat16 with a CuPy that is too old for it.
    """
    if not all(isinstance(x, xp.ndarray) and x.size and x.dtype.name in FLOATS for x in operands):
        return False
    for x in operands:
        check_bfloat16(xp, x.dtype)
    return len({x.dtype == np.float64 for x in operands}) == 1


def launch(
    kernel: BlockKernel,
    xp: Namespace,
    operands: Sequence[Array],
    results: Sequence[Result],
    scalars: Sequence[float],
    out: Any = None,
    *,
    blocks: int,
    threads: int,
    constants: tuple[int, ...] = (),
) -> Any:
    """Run a kernel on the current stream.

    Args:
        kernel: its source.
        xp: a namespace with ``RawKernel``.
        operands: the inputs; those that are not C-contiguous are copied.
        results: shapes and dtypes of the outputs.
        scalars: further arguments, in the order of their declarations.
        out: an array for one result, a tuple for several, of which any may be None.
        blocks: number of blocks.
        threads: of each block.
        constants: values of the constants of the kernel.

    Returns:
        The result, or a tuple of several.
    """
    given = (out,) if len(results) == 1 else outputs(out, len(results))
    made = [
        o if _is_writable(o) else xp.empty(tuple(shape), dtype)
        for o, (shape, dtype) in zip(given, results, strict=True)
    ]
    arrays = [*(xp.ascontiguousarray(x) for x in operands), *made]
    run = compiled(xp.RawKernel, kernel, tuple(a.dtype.name for a in arrays), constants)
    run((blocks,), (threads,), (*arrays, *kernel.numbers(scalars, compute_dtype(*operands))))
    stored = tuple(store(xp, m, o) for m, o in zip(made, given, strict=True))
    return stored[0] if len(stored) == 1 else stored


def _is_writable(out: Array | None) -> bool:
    """Whether a kernel can write its result into ``out`` directly."""
    return out is not None and out.dtype.name in FLOATS and out.flags.c_contiguous


def launch_rows(
    kernel: BlockKernel,
    xp: Namespace,
    operands: Sequence[Array],
    results: Sequence[Result],
    scalars: Sequence[float] = (),
    out: Any = None,
) -> Any:
    """`launch` with one block for each row of the first operand, that is of its last dim.

    The scalars of the kernel are the number of elements of a row and then ``scalars``. Returns None where
    there are more rows, or a row is longer, than a kernel counts.
    """
    rows, width = row_count(operands[0])
    if rows > MOST_BLOCKS or width > _MOST_ELEMENTS:
        return None
    threads = threads_of(width, kernel)
    return launch(kernel, xp, operands, results, (width, *scalars), out, blocks=rows, threads=threads)


def row_count(x: Array) -> tuple[int, int]:
    """Number of rows of a non-empty array, and elements of a row."""
    return x.size // x.shape[-1], x.shape[-1]


def threads_of(width: int, kernel: BlockKernel) -> int:
    """Threads of a block that works on a row of ``width`` elements."""
    warps = -(-width // (_ELEMENTS_OF_A_THREAD * WARP))
    return min(kernel.threads, WARP * max(1, warps))
