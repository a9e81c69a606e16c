"""CUDA source to PTX by NVRTC, which needs no GPU: the library of the wheel `nvidia-cuda-nvrtc-cu12`."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path


class CudaSourceError(Exception):
    """The source does not compile; the message is the log of the compiler."""


def library_path() -> Path | None:
    """The library of the wheel; None if the wheel is not installed."""
    try:
        found = find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        return None
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for path in sorted(Path(folder).glob("lib/libnvrtc.so*")):
            return path
    return None


@cache
def _library() -> ctypes.CDLL:
    path = library_path()
    if path is None:
        raise RuntimeError("NVRTC is not installed; install it with: pip install nvidia-cuda-nvrtc-cu12")
    return ctypes.CDLL(str(path))


def _check(result: int, call: str) -> None:
    if result:
        raise RuntimeError(f"{call} of NVRTC returned {result}")


def ptx(source: str, architecture: str) -> str:
    """PTX of a source for a virtual architecture such as "compute_80".

    Raises:
        CudaSourceError: the source does not compile.
        RuntimeError: NVRTC is not installed, or refuses the architecture.
    """
    return _compile(source, architecture, "PTX")


def resources(source: str, architecture: str) -> dict[str, int]:
    """What the machine code of a kernel needs on an architecture such as "sm_80".

    Returns:
        Registers of a thread, bytes of shared memory of a block (smem), and bytes of registers that a thread
        writes to memory (stores).

    Raises:
        CudaSourceError: the source does not compile, or needs more shared memory than a block has.
        RuntimeError: as `ptx`.
    """
    log = _compile(source, architecture, "ProgramLog", b"--ptxas-options=-v")
    amounts = {"smem": 0, "stores": 0, "registers": 0}
    for amount, what in re.findall(r"(\d+) (?:bytes )?(?:spill )?(registers|smem|stores)", log):
        amounts[what] = int(amount)
    return amounts


def _compile(source: str, architecture: str, wanted: str, *more: bytes) -> str:
    """A text that NVRTC has after it has compiled a source: "PTX" or "ProgramLog"."""
    library, program = _library(), ctypes.c_void_p()
    created = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", 0, None, None)
    _check(created, "nvrtcCreateProgram")
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", *more]
        pointers = (ctypes.c_char_p * len(options))(*options)
        if library.nvrtcCompileProgram(program, len(options), pointers):
            raise CudaSourceError(f"for {architecture}: {_text(program, 'ProgramLog')}")
        return _text(program, wanted)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: ctypes.c_void_p, what: str) -> str:
    library, size = _library(), ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
    return buffer.value.decode()
