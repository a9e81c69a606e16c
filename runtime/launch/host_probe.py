"""What a host has, as one line of JSON: `python -m distgraph.runtime.launch.host_probe SCRIPT`.

The launcher runs this on every host of a job before it starts ranks there. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from distgraph import __version__

_NAME_LENGTH = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU: product name and bytes of memory."""

    name: str
    memory: int


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host reports about itself.

    Attributes:
        host: its host name.
        cores: that a process may use.
        memory: bytes.
        processor: product name.
        gpus: by NVML; empty where there is no NVML.
        version: of distgraph.
        clock: seconds since 1970, when it answered.
        script: whether the script of the job exists there.
    """

    host: str
    cores: int
    memory: int
    processor: str
    gpus: tuple[GpuFacts, ...]
    version: str
    clock: float
    script: bool

    @classmethod
    def parse(cls, text: str) -> HostFacts:
        """Inverse of `text`.

        Raises:
            ValueError, KeyError, TypeError: the text is something else.
        """
        fields = json.loads(text)
        return cls(**fields | {"gpus": tuple(GpuFacts(**gpu) for gpu in fields["gpus"])})

    def text(self) -> str:
        """The facts as one line of JSON."""
        return json.dumps(asdict(self))


def probe(script: str = "") -> HostFacts:
    """The facts about this host.

    Args:
        script: path of the script of the job.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return HostFacts(
        socket.gethostname(),
        len(os.sched_getaffinity(0)),
        memory,
        _processor(),
        gpus(),
        __version__,
        time.time(),
        Path(script).is_file(),
    )


def gpus() -> tuple[GpuFacts, ...]:
    """The GPUs of this host, those in CUDA_VISIBLE_DEVICES where it lists numbers; empty without NVML."""
    with _nvml() as nvml:
        if nvml is None:
            return ()
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        devices = [_gpu(nvml, number) for number in range(count.value)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not all(part.strip().isdecimal() for part in visible.split(",") if part.strip()):
        return tuple(devices)
    numbers = [int(part) for part in visible.split(",") if part.strip()]
    return tuple(devices[number] for number in numbers if number < len(devices))


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _gpu(nvml: ctypes.CDLL, number: int) -> GpuFacts:
    handle, memory = ctypes.c_void_p(), _Memory()
    name = ctypes.create_string_buffer(_NAME_LENGTH)
    nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle))
    nvml.nvmlDeviceGetName(handle, name, _NAME_LENGTH)
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return GpuFacts(name.value.decode(errors="replace"), memory.total)


@contextmanager
def _nvml() -> Iterator[ctypes.CDLL | None]:
    """The library of NVIDIA's driver; None where there is none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2():
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


if __name__ == "__main__":
    sys.stdout.write(probe(sys.argv[1] if len(sys.argv) > 1 else "").text() + "\n")
