"""Binding ranks to CPU cores where several ranks of a machine share each core."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from distgraph.runtime.transport.cpu_quota import cpu_quota


class CoreBinding:
    """The cores of this machine and the ranks that compute on them. Making one is collective.

    Args:
        comm: mpi4py communicator of the ranks of this machine.

    Attributes:
        bound: whether `bind` has bound this rank to one core.
    """

    def __init__(self, comm: Any) -> None:
        self._position, self._cores = int(comm.Get_rank()), comm.allgather(os.sched_getaffinity(0))
        self._quotas = dict(comm.allgather(cpu_quota()))
        self.bound = False

    @property
    def share(self) -> float:
        """Ranks per core of this machine, at least 1, over all cores that any of the ranks may use.

        Control groups may grant less than whole cores (see `cpu_quota`): a rank that may use half of a core
        computes as slowly as two ranks on one.
        """
        cores = min(len(set().union(*self._cores)), sum(self._quotas.values()))
        return max(1.0, len(self._cores) / cores)

    def bind(self) -> None:
        """Bind this rank to one core where equally many ranks share each; neighbouring ranks share a core.

        Without binding, the kernel places the ranks anew in every job, and the time of a message depends on
        which ranks share a core. A measured profile holds for a later job only with the same placement.
        Nothing changes where the ranks were placed by somebody else, or with `DISTGRAPH_BIND=0`.
        """
        cores, ranks = sorted(self._cores[0]), len(self._cores)
        placed = any(cores_of_rank != self._cores[0] for cores_of_rank in self._cores)
        if placed or self.share == 1 or ranks % len(cores) or os.environ.get("DISTGRAPH_BIND") == "0":
            return
        with contextlib.suppress(OSError):  # not allowed here
            os.sched_setaffinity(0, {cores[self._position * len(cores) // ranks]})
            self.bound = True
