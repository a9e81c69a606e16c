"""StateArray: a leaf of the state of a distributed training step, which stays on its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distgraph.errors import RuntimeFault
from distgraph.ir.dtypes import to_numpy


class StateSource:
    """Where the current state of a step is; `gather` returns the whole array of a name.

    Attributes:
        version: number of the current state; older ones were used up.
    """

    def __init__(self, gather: Callable[[str], np.ndarray]) -> None:
        self.gather = gather
        self.version = 0

    def advance(self) -> int:
        """A new version, which is the current one."""
        self.version += 1
        return self.version


class StateArray:
    """A leaf of the state; `numpy.asarray` gathers it from the ranks, which is collective.

    Attributes:
        source: where it is.
        name: of the parameter or state.
        shape: of the whole array.
        dtype: NumPy dtype.
    """

    def __init__(
        self, source: StateSource, name: str, shape: tuple[int, ...], dtype: str, version: int
    ) -> None:
        self.source, self.name, self.shape, self.dtype = source, name, shape, np.dtype(to_numpy(dtype))
        self._version = version

    def check_current(self) -> None:
        """Raises RuntimeFault where a later step has used the array up."""
        if self._version != self.source.version:
            raise RuntimeFault(
                f"leaf {self.name} of a state was used up by the step after it; go on with the state "
                "that the step "
                "returned, take numpy.asarray of a leaf before, or use parallelize(donate=False)"
            )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole array. Raises RuntimeFault as `check_current`."""
        self.check_current()
        array = self.source.gather(self.name)
        return array if dtype is None else array.astype(dtype)

    def __repr__(self) -> str:
        return f"StateArray({self.name}: {self.dtype}{list(self.shape)})"
