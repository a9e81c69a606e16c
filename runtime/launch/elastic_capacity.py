"""The slots of an elastic job: those of its host list, less what was lost since the list was written."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from distgraph.errors import RuntimeFault
from distgraph.runtime.job.losses import Loss
from distgraph.runtime.launch.host_check import is_this_host
from distgraph.runtime.launch.hosts import Host, merged, read_hostfile

THIS_HOST = "localhost"


class Capacity:
    """Hosts and slots that a job may use now. Its methods may be called in several threads.

    Args:
        hosts: of the command line; empty for `ranks` slots of this machine.
        ranks: the most that are used.
        hostfile: file from which `hosts` were read and may be read again; "" for none.
    """

    def __init__(self, hosts: Iterable[Host], ranks: int, hostfile: str = "") -> None:
        self._listed = merged(list(hosts)) or (Host(THIS_HOST, ranks),)
        self._most = ranks
        self._hostfile = Path(hostfile) if hostfile else None
        self._seen = self._state()
        self._lost: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def local(self) -> bool:
        """Whether all hosts are this one."""
        return all(is_this_host(host.name) for host in self._listed)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Hosts with the slots that are left, without those that have none."""
        with self._lock:
            left = [replace(host, slots=host.slots - self._lost[host.name]) for host in self._listed]
        return tuple(host for host in left if host.slots > 0)

    @property
    def ranks(self) -> int:
        """Number of ranks that can be started."""
        return min(self._most, sum(host.slots for host in self.hosts))

    def lose(self, losses: Iterable[Loss]) -> None:
        """Take a slot away for each rank that was lost on a host that is known."""
        with self._lock:
            for loss in losses:
                alone = self._listed[0].name if len(self._listed) == 1 and loss.rank is not None else ""
                name = loss.host or alone
                if name in {host.name for host in self._listed}:
                    self._lost[name] += 1

    def lose_hosts(self, names: Iterable[str]) -> None:
        """Take all slots of hosts away."""
        with self._lock:
            for name in names:
                self._lost[name] = sum(host.slots for host in self._listed if host.name == name)

    def regain_hosts(self, names: Iterable[str]) -> None:
        """Give all slots of hosts back."""
        with self._lock:
            for name in names:
                self._lost.pop(name, None)

    def read_again(self) -> bool:
        """Read the hostfile again if it was written since; then everything in it is there again.

        Returns:
            whether it was written.

        Raises:
            RuntimeFault: it cannot be read; the hosts stay as they were.
        """
        state = self._state()
        if self._hostfile is None or state == self._seen:
            return False
        self._seen = state
        if state is None:
            raise RuntimeFault(f"hostfile {self._hostfile} has gone; the hosts stay as they were")
        listed = merged(read_hostfile(self._hostfile))
        with self._lock:
            self._listed = listed
            self._lost.clear()
        return True

    def _state(self) -> tuple[int, int] | None:
        """What changes when the hostfile is written."""
        if self._hostfile is None:
            return None
        try:
            status = self._hostfile.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size
