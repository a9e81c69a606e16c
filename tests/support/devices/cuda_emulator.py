"""A namespace with `RawKernel` over NumPy arrays: the CUDA source is compiled as C++ and runs on the host.

It shows what a kernel computes, not how fast, and not what depends on the hardware: the order in which blocks
run, rounding of `exp`, conversion of float16 (see `cuda_emulation.h`).
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.devices.fake_device import Hardware

HEADER = Path(__file__).with_name("cuda_emulation.h")
GUARD = 256
"""Bytes before and after every array, which no kernel may write; as numbers they are NaN."""

COMPILER = shutil.which("g++") or shutil.which("clang++")

DEFINITIONS = """
#ifdef DISTGRAPH_HAS_FLOAT16
static float float_of(float16 x) { return float_of_bits(x.bits); }
static float16 float16_of(float x) { return float16{bits_of_float(x)}; }
#endif
static void entry() { emulation::call(%(name)s); }
extern "C" int launch(int blocks, int threads, int descending, void** values) {
    return emulation::launch<entry>(blocks, threads, descending, values);
}
"""


class RaceError(AssertionError):
    """The results of a kernel depend on the order in which its threads run."""


class DeadlockError(AssertionError):
    """Threads of a block wait at a barrier that the others do not reach."""


class GuardError(AssertionError):
    """A kernel has written outside of its arrays."""


def build(code: str, name: str, folder: Path) -> ctypes.CDLL:
    """The source as a library; compiled once for each source and folder."""
    assert COMPILER is not None
    text = f'#include "{HEADER}"\n{code}\n{DEFINITIONS % {"name": name}}'
    stem = folder / sha256(text.encode()).hexdigest()[:20]
    if not stem.with_suffix(".so").exists():
        stem.with_suffix(".cpp").write_text(text)
        command = [COMPILER, "-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", "-shared", "-fPIC"]
        command += ["-o", f"{stem}.so", f"{stem}.cpp"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
    return ctypes.CDLL(f"{stem}.so")


class Guarded:
    """Copies of arrays between guards; arrays at one address share a copy."""

    def __init__(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        self.arrays = {a.ctypes.data: a for a in arrays}
        self.buffers = {at: np.full(a.nbytes + 2 * GUARD, 0xFF, np.uint8) for at, a in self.arrays.items()}
        for at, a in self.arrays.items():
            self.inside(at)[...] = np.frombuffer(a.tobytes(), np.uint8)

    def inside(self, at: int) -> Any:
        return self.buffers[at][GUARD : GUARD + self.arrays[at].nbytes]

    def check(self, name: str) -> None:
        for at, buffer in self.buffers.items():
            outside = (buffer[:GUARD], buffer[GUARD + self.arrays[at].nbytes :])
            if not all((part == 0xFF).all() for part in outside):
                raise GuardError(f"{name} has written outside of its arrays")

    def equal(self, other: Guarded) -> bool:
        return all(np.array_equal(self.inside(at), other.inside(at)) for at in self.arrays)

    def copy_back(self) -> None:
        for at, a in self.arrays.items():
            a[...] = self.inside(at).view(a.dtype).reshape(a.shape)


def emulator(folder: Path) -> Any:
    """NumPy with a `RawKernel`.

    `launches` of the namespace counts the launches of each kernel, without the prefix of its name.

    Args:
        folder: for sources and libraries.
    """
    launches: Counter[str] = Counter()
    lock = Lock()  # a library is built once, and has one block at a time in its variables

    class RawKernel:
        def __init__(self, code: str, name: str) -> None:
            with lock:
                self.name, self.library = name, build(code, name, folder)

        def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
            assert len(grid) == len(block) == 1
            assert 0 < grid[0] < 1 << 31
            with lock:
                launches[self.name.removeprefix("distgraph_")] += 1
                ascending = self.run(grid[0], block[0], args, descending=False)
                if not ascending.equal(self.run(grid[0], block[0], args, descending=True)):
                    raise RaceError(
                        f"{self.name} computes other numbers with its threads in descending order"
                    )
                ascending.copy_back()

        def run(self, blocks: int, threads: int, args: tuple[Any, ...], *, descending: bool) -> Guarded:
            arrays = [a for a in args if isinstance(a, np.ndarray)]
            assert all(a.flags.c_contiguous for a in arrays)
            guarded = Guarded(arrays)
            storage = [
                np.array(guarded.inside(a.ctypes.data).ctypes.data if isinstance(a, np.ndarray) else a)
                for a in args
            ]
            pointers = (ctypes.c_void_p * len(storage))(*(s.ctypes.data for s in storage))
            if self.library.launch(blocks, threads, int(descending), pointers):
                raise DeadlockError(f"{self.name}: threads wait at a barrier that others do not reach")
            guarded.check(self.name)
            return guarded

    namespace = SimpleNamespace(**{name: getattr(np, name) for name in dir(np) if not name.startswith("__")})
    namespace.RawKernel, namespace.launches = RawKernel, launches
    return namespace


def on_stand_in(cupy: Any, hardware: Hardware, emulated: Any) -> type:
    """The `RawKernel` of an emulator for arrays of the stand-in for CuPy, which sees what a kernel accesses.

    Args:
        cupy: the stand-in.
        hardware: its streams.
        emulated: an `emulator`.
    """

    class RawKernel:
        def __init__(self, code: str, name: str) -> None:
            self.run = emulated.RawKernel(code, name)
            (parameters,) = re.findall(rf"{name}\((.*)\) \{{", code)
            self.writes = [not declared.startswith("const ") for declared in parameters.split(", ")]

        def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
            cupy.work(lambda: self.launch(grid, block, args))

        def launch(self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
            for a, writes in zip(args, self.writes, strict=True):
                if isinstance(a, cupy.ndarray):
                    hardware.touch(a.host, write=writes)
            self.run(grid, block, tuple(a.host if isinstance(a, cupy.ndarray) else a for a in args))

    return RawKernel
