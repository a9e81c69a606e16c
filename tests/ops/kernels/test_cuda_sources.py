"""Every CUDA source compiles for the GPUs of three generations, without a GPU.

An elementwise kernel is a body that CuPy puts into a loop over elements; here it is put into the same loop by
hand, for every dtype that the kernels are called with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

import pytest
from support.devices.nvrtc import CudaSourceError, library_path, ptx

from distgraph import kernels
from distgraph.kernels._cupy_elementwise import CudaKernel
from distgraph.kernels._elementwise import Fused

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


def sources() -> Iterator[CudaKernel]:
    """All CUDA sources of the package."""
    for module in iter_modules(kernels.__path__, f"{kernels.__name__}."):
        for value in vars(import_module(module.name)).values():
            if isinstance(value, CudaKernel):
                yield value
            elif isinstance(value, Fused):
                yield value.cuda


SOURCES = {source.name: source for source in sources()}


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
