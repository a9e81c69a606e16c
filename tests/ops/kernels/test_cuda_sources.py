"""Every CUDA source compiles for the GPUs of three generations, without a GPU.

An elementwise kernel is a body that CuPy puts into a loop over elements; here it is put into the same loop by
hand, for every dtype that the kernels are called with. The source of a block kernel is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pkgutil import walk_packages

import pytest
from support.devices.nvrtc import CudaSourceError, library_path, ptx, resources

from distgraph import kernels
from distgraph.kernels._elementwise import Fused
from distgraph.kernels.cuda.block_kernel import BlockKernel
from distgraph.kernels.cuda.elementwise_kernel import CudaKernel
from distgraph.kernels.cuda.flash_attention import MOST_COLUMNS

ARCHITECTURES = ("compute_70", "compute_80", "compute_90")
TYPES = {"uint64": "unsigned long long", "int64": "long long"}
WRAPPER = """
%(preamble)s
typedef %(dtype)s T;
extern "C" __global__ void distgraph_%(name)s(%(parameters)s, const long long n) {
    const long long step = (long long)blockDim.x * gridDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        %(elements)s
        %(body)s;
    }
}
"""

pytestmark = pytest.mark.skipif(
    library_path() is None, reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12"
)


def members() -> Iterator[object]:
    """Everything that the modules of the kernels declare."""
    for module in walk_packages(kernels.__path__, f"{kernels.__name__}."):
        yield from vars(import_module(module.name)).values()


def sources() -> Iterator[CudaKernel]:
    """The CUDA sources of elementwise kernels."""
    for value in members():
        if isinstance(value, CudaKernel):
            yield value
        elif isinstance(value, Fused):
            yield value.cuda


SOURCES = {source.name: source for source in sources()}
BLOCK_KERNELS = {value.name: value for value in members() if isinstance(value, BlockKernel)}
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPUTED = ("delta", "parts", "parts_w", "parts_b")
"""Arrays between two launches, in the dtype of the arithmetic."""


def program(kernel: CudaKernel, dtype: str) -> str:
    """The source in a loop over elements."""
    parameters, elements = [], []
    for text, constant in ((kernel.inputs, "const "), (kernel.outputs, "")):
        for declared in text.split(", "):
            words = declared.split()
            raw, (kind, name) = words[0] == "raw", words[-2:]
            kind = TYPES.get(kind, kind)
            parameters.append(f"{constant}{kind}* {name if raw else name + '_all'}")
            elements += [] if raw else [f"{constant}{kind}& {name} = {name}_all[i];"]
    filled = {"preamble": kernel.preamble, "dtype": dtype, "name": kernel.name, "body": kernel.body}
    declared = re.sub(r"\bT\*", f"{dtype}*", ", ".join(parameters))
    return WRAPPER % {**filled, "parameters": declared, "elements": "\n        ".join(elements)}


def test_the_sources_are_found() -> None:
    assert {"adam", "dropout", "random_bits", "gelu", "gelu_grad", "silu"} <= set(SOURCES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float", "double"])
@pytest.mark.parametrize("name", SOURCES)
def test_a_source_compiles(name: str, dtype: str, architecture: str) -> None:
    compiled = ptx(program(SOURCES[name], dtype), architecture)
    assert f".visible .entry distgraph_{name}(" in compiled
    assert f".target sm_{architecture.removeprefix('compute_')}" in compiled


def test_float_kernels_do_not_compute_in_double() -> None:
    """A literal such as 0.5 would make every operation of a float kernel one of 64 bits."""
    for name, source in SOURCES.items():
        compiled = ptx(program(source, "float"), "compute_80")
        assert not re.search(r"\.f64\b", compiled), f"{name} computes in double"


def test_a_wrong_source_is_refused() -> None:
    source = SOURCES["adam"]
    with pytest.raises(CudaSourceError, match='identifier "epsilon" is undefined'):
        ptx(program(replace(source, body=source.body.replace("eps", "epsilon")), "float"), "compute_80")


def block_program(kernel: BlockKernel, dtype: str, constants: tuple[int, int] = (4, 8)) -> str:
    """The source with all operands of a dtype; of attention for heads of 64 and 128 elements."""
    computed = "float64" if dtype == "float64" else "float32"
    special = {"labels": "int64"} | dict.fromkeys(COMPUTED, computed)
    dtypes = [special.get(name, dtype) for name in kernel.arrays]
    return kernel.source(dtypes, constants[: len(kernel.constants)])


def test_the_sources_of_blocks_are_found() -> None:
    names = {
        "softmax",
        "log_softmax_grad",
        "layer_norm_grad",
        "rms_norm",
        "cross_entropy",
        "attention_grad_kv",
    }
    assert names <= set(BLOCK_KERNELS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", BLOCK_KERNELS)
def test_a_source_of_blocks_compiles(name: str, dtype: str, architecture: str) -> None:
    compiled = ptx(block_program(BLOCK_KERNELS[name], dtype), architecture)
    assert f".visible .entry distgraph_{name}(" in compiled
    assert f".target sm_{architecture.removeprefix('compute_')}" in compiled
    assert ".local" not in compiled, "an array of a thread is in memory instead of registers"
    if dtype != "float64":
        assert not re.search(r"\.f64\b", compiled), f"{name} computes in double"


@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_machine_code_of_attention_fits(dtype: str, architecture: str) -> None:
    """A block has 48 KiB of shared memory without opting in to more. The largest heads need few registers
    beyond the 255 of a thread."""
    columns = MOST_COLUMNS // 16
    for name in ("attention", "attention_grad_q", "attention_grad_kv"):
        needed = resources(block_program(BLOCK_KERNELS[name], dtype, (columns, columns)), architecture)
        assert 0 < needed["smem"] <= 48 << 10
        assert 0 < needed["registers"] <= 255
        assert needed["stores"] < 64


def test_arrays_in_memory_and_too_much_shared_memory_are_noticed() -> None:
    source = block_program(BLOCK_KERNELS["attention"], "float32")
    assert ".local" in ptx(source.replace('_Pragma("unroll")', '_Pragma("unroll 1")'), "compute_80")
    with pytest.raises(CudaSourceError, match="57728 bytes smem"):
        resources(source.replace("A slice[SLICE]", "A slice[4 * SLICE]"), "sm_80")
