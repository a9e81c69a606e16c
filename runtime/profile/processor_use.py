"""What other programs use of the processors of the ranks while a profile measures.

*In:* readings of all ranks of a job before and after a span of time.
*Out:* `OtherUse`: the host where other programs used most, and which share of its processors.
*Invariant:* all times come from counters of the kernel, and none from a measurement that the profile makes.

On each machine the processors count that any of its ranks may run on. Their time that was neither idle nor
spent on interrupts, less the processor time of the ranks, is what other programs used. Linux counts idle time
exactly (in steps of 10 ms), but busy time by samples at the ticks of a clock, and samples misjudge ranks that
use their quota at the start of every period. Time that a hypervisor gave to other machines is not idle, so it
counts as well. Interrupts, which deliver the messages of the ranks, do not. Ranks of several hosts under one
kernel, such as containers, belong to one machine; `boot_id` tells.

Where a control group limits the ranks, other programs in the same group use up its quota: what the group has
used (`cpu.stat` or `cpuacct.usage`), less the ranks in it, is compared with the quota. How often a group was
throttled says nothing of others, since ranks that compute without a break are throttled in every period.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from distgraph.runtime.transport.core_binding import cpu_quota
from distgraph.runtime.transport.transport import Transport

MOST_OTHER_USE: Final = 0.05
"""Share of the processors that other programs may use beside an undisturbed measurement."""
WINDOW_SECONDS: Final = 1.0
"""Least seconds between two readings: in less, the steps of the counters would hide what others use."""
_STAT: Final = Path("/proc/stat")
_KERNEL: Final = Path("/proc/sys/kernel/random/boot_id")
_FREE: Final = (3, 4, 5, 6)  # columns of /proc/stat: idle, iowait, irq, softirq
_STEP: Final = 0.01  # seconds by which the idle time of a processor may be off


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of one rank and its machine at one moment. All are seconds but `cores`.

    Attributes:
        host: name of the rank's host.
        kernel: identifies the running kernel; equal on hosts that share it.
        clock: time of the reading.
        own: processor time of the rank.
        free: processor -> time idle or in interrupts, of the processors that the rank may run on; empty where
            it cannot be read.
        group: folder of the control group that limits the rank most; "" without a limit.
        cores: processors that this group may use.
        group_used: processor time of all programs of the group; None where it cannot be read.
    """

    host: str
    kernel: str
    clock: float
    own: float
    free: Mapping[int, float] = field(default_factory=dict)
    group: str = ""
    cores: float = 1.0
    group_used: float | None = None


@dataclass(frozen=True, slots=True)
class OtherUse:
    """What other programs used while something was measured.

    Attributes:
        host: where they used most, or where it could not be read; several names where hosts share a kernel.
        share: of the processors (or of the quota) that the ranks there may use, 0 to 1; None if unknown.
    """

    host: str
    share: float | None

    @property
    def disturbs(self) -> bool:
        """Whether it is known to be more than `MOST_OTHER_USE`."""
        return self.share is not None and self.share > MOST_OTHER_USE


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Measurements that could not be made without other programs beside them.

    Attributes:
        host: where other programs used most in most of these measurements.
        share: of the processors there, in the least disturbed round of each, on average.
        disturbed: number of measurements that were disturbed in every round.
        unknown: number of those for which the counters could not be read.
        measurements: number of all.
    """

    host: str
    share: float
    disturbed: int
    unknown: int
    measurements: int

    @property
    def error(self) -> float:
        """Relative error that the disturbed measurements add to numbers that are fitted to all."""
        return self.share * self.disturbed / self.measurements

    def __str__(self) -> str:
        parts = []
        if self.disturbed:
            parts.append(
                f"other programs used {self.share:.0%} of the processors of {self.host} during "
                f"{self.disturbed} of {self.measurements} measurements"
            )
        if self.unknown:
            parts.append(
                f"use by other programs could not be read on {self.host} during {self.unknown} of "
                f"{self.measurements} measurements"
            )
        return ", ".join(parts)


def read_counters() -> Reading:
    """The counters of this rank and its machine now."""
    group, cores = cpu_quota()
    free = _free_seconds(_text(_STAT), os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else {}
    return Reading(
        host=socket.gethostname(),
        kernel=_text(_KERNEL).strip() or socket.gethostname(),
        clock=time.monotonic(),
        own=time.process_time(),
        free=free,
        group=group,
        cores=cores if group else 1.0,
        group_used=_group_seconds(Path(group)) if group else None,
    )


def other_use(before: Sequence[Reading], after: Sequence[Reading]) -> OtherUse:
    """What other programs used between two readings of all ranks, on the machine where they used most.

    A machine whose counters cannot be read makes the share unknown, unless another one is disturbed.
    """
    pairs = list(zip(before, after, strict=True))
    uses = [
        _machine_use([pair for pair in pairs if pair[0].kernel == kernel])
        for kernel in dict.fromkeys(reading.kernel for reading in before)
    ]
    groups = dict.fromkeys((reading.host, reading.group) for reading in before if reading.group)
    uses += [
        use
        for key in groups
        if (use := _group_use([p for p in pairs if (p[0].host, p[0].group) == key])).share is not None
    ]
    most = max(uses, key=lambda use: use.share or 0.0)
    unknown = next((use for use in uses if use.share is None), None)
    return most if most.disturbs or unknown is None else unknown


class ProcessorWatch:
    """Reads the counters of all ranks at the start and at the end of every window of a profile.

    Making one is collective, as is `close`.

    Args:
        transport: of the ranks; None for one rank.
    """

    def __init__(self, transport: Transport | None) -> None:
        self._transport = transport
        self._before = self._read()

    @property
    def is_due(self) -> bool:
        """Whether the window has lasted long enough to be closed; known to the first rank."""
        return time.monotonic() - self._before[0].clock > WINDOW_SECONDS

    def close(self) -> OtherUse | None:
        """What other programs used since the last call, on the first rank; None on others."""
        before, self._before = self._before, self._read()
        return other_use(before, self._before) if self._before else None

    def _read(self) -> list[Reading]:
        """Readings of all ranks on the first rank; none on others."""
        own = read_counters()
        return [own] if self._transport is None else self._transport.gather_objects(own, 0) or []


def _machine_use(pairs: Sequence[tuple[Reading, Reading]]) -> OtherUse:
    """Of the ranks under one kernel."""
    hosts = ", ".join(dict.fromkeys(first.host for first, _ in pairs))
    if not all(first.free and last.free for first, last in pairs):
        return OtherUse(hosts, None)
    elapsed, used = dict[int, float](), dict[int, float]()
    for first, last in pairs:
        for processor in first.free.keys() & last.free.keys():
            elapsed[processor] = last.clock - first.clock
            used[processor] = elapsed[processor] - (last.free[processor] - first.free[processor])
    own = sum(last.own - first.own for first, last in pairs)
    return OtherUse(hosts, _share(sum(used.values()) - own - _STEP * len(used), sum(elapsed.values())))


def _group_use(pairs: Sequence[tuple[Reading, Reading]]) -> OtherUse:
    """Of the ranks in one control group with a quota."""
    first, last = pairs[0]
    if first.group_used is None or last.group_used is None:
        return OtherUse(first.host, None)
    own = sum(end.own - begin.own for begin, end in pairs)
    available = first.cores * (last.clock - first.clock)
    return OtherUse(first.host, _share(last.group_used - first.group_used - own - _STEP, available))


def _share(used: float, available: float) -> float:
    return min(1.0, max(0.0, used / available)) if available > 0 else 0.0


def _free_seconds(text: str, processors: set[int]) -> dict[int, float]:
    """Processor -> seconds idle or in interrupts, from the text of /proc/stat."""
    ticks = os.sysconf("SC_CLK_TCK")
    free = {}
    for line in text.splitlines():
        name, *columns = line.split() or [""]
        number = name.removeprefix("cpu")
        if name != number and number.isdigit() and int(number) in processors and len(columns) > max(_FREE):
            free[int(number)] = sum(int(columns[column]) for column in _FREE) / ticks
    return free


def _group_seconds(group: Path) -> float | None:
    """Processor seconds of a control group, of version 2 or 1."""
    for line in _text(group / "cpu.stat").splitlines():
        name, _, number = line.partition(" ")
        if name == "usage_usec":
            return int(number) / 1e6
    nanoseconds = _text(group / "cpuacct.usage").strip()
    return int(nanoseconds) / 1e9 if nanoseconds else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
