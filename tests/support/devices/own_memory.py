"""A kind of device as a program would declare it: memory of its own, arrays that do not mix with those of the
host or of the stand-in for CuPy, no streams, and no transport between two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.special
from support.devices import fake_device
from support.devices.fake_cupy import on_device

from distgraph.passes.partition import RankProgram
from distgraph.runtime.transport.staging import Done, StagedTransport
from distgraph.runtime.transport.transport import Array, Group, Transport


class Copies:
    """Copies that have ended when they return. See `distgraph.runtime.transport.staging.Copies`.

    Attributes:
        counts: number of copies in each direction.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def host_buffer(self, nbytes: int) -> np.ndarray[Any, Any]:
        return np.empty(nbytes, np.uint8)

    def read(self, block: Array, host: np.ndarray[Any, Any]) -> Done:
        self.counts["read"] += 1
        block.get(out=host)
        return lambda: True

    def write(self, host: np.ndarray[Any, Any], block: Array) -> Done:
        self.counts["write"] += 1
        block.set(host)
        return lambda: True


def namespace() -> Any:
    """Array functions for arrays in the memory of these devices."""
    _, xp = fake_device.namespace(fake_device.Hardware(1))
    functions = {name: on_device(xp, getattr(scipy.special, name)) for name in ("erf", "ndtri")}
    xp.special = SimpleNamespace(**functions)
    return xp


class OwnMemory:
    """See `distgraph.runtime.execute.device.Device`.

    Attributes:
        ranks: those with such a device.
        copies: of its messages.
    """

    def __init__(self, xp: Any, control: Transport | None, ranks: Group) -> None:
        self.xp, self.ranks, self.copies = xp, ranks, Copies()
        self.transport: Transport | None = None if control is None else StagedTransport(control, self.copies)

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self, program: RankProgram | None) -> None:
        pass

    def asarray(self, block: np.ndarray) -> Array:
        return self.xp.asarray(block)

    def to_host(self, block: Array) -> np.ndarray:
        host: np.ndarray = block.get()
        return host

    def inlet(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        return self.asarray

    def fetch(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        return {label: self._fetched(output) for label, output in outputs.items()}

    def _fetched(self, output: Any) -> Any:
        if isinstance(output, list):
            return [self._fetched(block) for block in output]
        return self.to_host(output) if isinstance(output, self.xp.ndarray) else np.asarray(output)

    def close(self) -> None:
        pass
