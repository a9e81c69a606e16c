"""Ranks of a machine that share CPU cores: how many share one, and binding each rank to one.

Control groups of Linux may limit the processor time of this process, as containers do: such ranks share what
the limit leaves (`cpu_quota`). A rank that waits leaves the quota to the others (`Waiting`).
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from distgraph.errors import RuntimeFault
from distgraph.errors.arguments import switch_of

_PROCESS: Final = Path("/proc/self/cgroup")
"""The control groups of the process, in lines `number:controllers:path`."""
_MOUNT: Final = Path("/sys/fs/cgroup")
"""Where the control groups are mounted."""
_POLLING_ALONE: Final = 0.02  # seconds for which a rank with a core of its own polls
_POLLING_SHARED: Final = 0.001
_POLLING_LIMITED: Final = 0.0001  # under a quota
_SHORTEST_NAP: Final = 0.0001  # seconds
_LONGEST_NAP: Final = 0.00025
_NAP_PART: Final = 1 / 32  # of the time without progress


class CoreBinding:
    """The cores of this machine and the ranks that compute on them. Making one is collective.

    Args:
        comm: mpi4py communicator of the ranks of this machine.

    Attributes:
        bound: whether `bind` has bound this rank.
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

    @property
    def limited(self) -> bool:
        """Whether control groups grant the ranks of this machine less than the cores that they may use."""
        return sum(self._quotas.values()) < len(set().union(*self._cores))

    def bind(self, device: tuple[int, int] | None = None) -> None:
        """Bind this rank to its cores.

        Where a plan places the rank on device k of n equal devices of this machine, it gets the k-th of n
        equal parts of the cores. Without a plan, ranks are bound only where equally many share each core:
        each to one core, neighbours to the same.

        Without binding, the kernel places the ranks anew in every job, and the time of a message depends on
        which ranks share a core. A measured profile holds for a later job only with the same placement.
        Nothing changes where the ranks were placed by somebody else, or with `DISTGRAPH_BIND=0`.

        Args:
            device: k and n, where a plan says.
        """
        cores, ranks = sorted(self._cores[0]), len(self._cores)
        placed = any(cores_of_rank != self._cores[0] for cores_of_rank in self._cores)
        if not switch_of("DISTGRAPH_BIND", RuntimeFault, default=True) or placed:
            return
        if device is None and (self.share == 1 or ranks % len(cores)):
            return
        number, count = device or (self._position, ranks)
        first = number * len(cores) // count
        with contextlib.suppress(OSError):  # not allowed here
            os.sched_setaffinity(0, cores[first : max(first + 1, (number + 1) * len(cores) // count)])
            self.bound = True


@dataclass(frozen=True, slots=True)
class Waiting:
    """How a rank spends the time in which it waits for others.

    Polling has the shortest latency, and a message that MPI copies through buffers between processes moves
    with every poll. On shared cores polling takes little from the ranks that are waited for, because it
    yields the core. Under a quota it uses up the quota all the same: such ranks poll less.

    Attributes:
        polling_seconds: for which a wait polls before it sleeps between polls.
        polls_per_nap: polls between two sleeps.
        growing: whether sleeps become longer in a long wait.
    """

    polling_seconds: float
    polls_per_nap: int = 16
    growing: bool = False

    @classmethod
    def of(cls, binding: CoreBinding) -> Waiting:
        """How the ranks of a machine wait."""
        if binding.share > 1 and binding.limited:
            return cls(_POLLING_LIMITED, polls_per_nap=4, growing=True)
        return cls(_POLLING_SHARED if binding.share > 1 else _POLLING_ALONE)

    def nap_seconds(self, idle: float) -> float:
        """Seconds to sleep after `idle` seconds without progress."""
        return min(max(_SHORTEST_NAP, _NAP_PART * idle), _LONGEST_NAP) if self.growing else _SHORTEST_NAP


def cpu_quota() -> tuple[str, float]:
    """The control group with the tightest limit, and the limit in cores (seconds of CPU per second).

    Both versions of control groups are read: `cpu.max` of version 2, `cpu.cfs_quota_us` and
    `cpu.cfs_period_us` of version 1, in the group of the process and in all groups around it.

    Returns: path of the group's folder and cores; `("", inf)` without a limit.
    """
    tightest = "", math.inf
    for folder, top in _folders():
        for group in (folder, *folder.parents):
            cores = _cores(group)
            if cores < tightest[1]:
                tightest = str(group), cores
            if group == top:
                break
    return tightest


def quota_period(group: str) -> float:
    """Seconds of the period in which a control group may use its quota once; 0.0 where none is stated."""
    text = _read(Path(group) / "cpu.max").strip().partition(" ")[2]
    text = text or _read(Path(group) / "cpu.cfs_period_us").strip()
    return float(text) / 1e6 if text else 0.0


def _folders() -> list[tuple[Path, Path]]:
    """Folders of the process's groups that may limit processor time, each with the root of its hierarchy."""
    folders = []
    for line in _read(_PROCESS).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folders.append((_MOUNT / path.lstrip("/"), _MOUNT))
        elif "cpu" in controllers.split(","):
            root = next((_MOUNT / name for name in (controllers, "cpu") if (_MOUNT / name).is_dir()), _MOUNT)
            folders.append((root / path.lstrip("/"), root))
    return folders


def _cores(group: Path) -> float:
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = (_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if quota in ("", "max") or not period or float(quota) <= 0:
        return math.inf
    return float(quota) / float(period)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no control groups, or another version of them
        return ""
