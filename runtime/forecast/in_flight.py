"""Collectives that are under way at the end of a task, and that later tasks wait for or share links with.

*In:* what is under way at the end of a task.
*Out:* the same, some seconds later.

The task that updates parameters waits for the sums of gradients (`TaskForecast.late`), and what it sends
itself follows them on their links. A task that loads parameters starts to gather them, and the first op that
reads a gathered parameter waits for it, in whichever task that op is (`Storage.late`). So the first products
of a step run while later parameters are still being gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from distgraph.ir.graph import Op

Channel = tuple[str, tuple[int, ...], int]
"""Kind of the link that decides, ranks of the group, and a number where exchanges share no links."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Collectives that are under way; times in seconds from now.

    Attributes:
        ends: value -> time at which the collective that computes it ends.
        busy: value -> seconds for which the device still works for its collective.
        carriers: value -> channel of its collective.
        channels: channel -> time at which the next transfer on it may begin.
        latest: channel -> its last communication.
        served: channel -> time at which it was last free, and seconds of all transfers on it since then, as
            long as each takes by itself.
        transfers: value of a collective between machines -> when it began, and seconds for which the device
            works for it in all.
    """

    ends: Mapping[str, float] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)
    carriers: Mapping[str, Channel] = field(default_factory=dict)
    channels: Mapping[Channel, float] = field(default_factory=dict)
    latest: Mapping[Channel, Op] = field(default_factory=dict)
    served: Mapping[Channel, tuple[float, float]] = field(default_factory=dict)
    transfers: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def after(self, seconds: float) -> InFlight:
        """The same collectives some seconds later, before anything waits for them."""
        if not (self.ends or self.channels or self.transfers):
            return self
        channels = {channel: free - seconds for channel, free in self.channels.items() if free > seconds}
        return replace(
            self,
            ends={value: max(0.0, end - seconds) for value, end in self.ends.items()},
            channels=channels,
            latest={channel: self.latest[channel] for channel in channels},
            served={c: (self.served[c][0] - seconds, self.served[c][1]) for c in channels},
            transfers={value: (begun - seconds, work) for value, (begun, work) in self.transfers.items()},
        )

    def joined(self, other: InFlight) -> InFlight:
        """The channels of both, each as of that on which it becomes free later; no values to wait for."""
        both = [self, other]
        channels = self.channels.keys() | other.channels.keys()
        last = {c: max(both, key=lambda one: one.channels.get(c, 0.0)) for c in channels}
        return InFlight(
            channels={c: one.channels[c] for c, one in last.items()},
            latest={c: one.latest[c] for c, one in last.items()},
            served={c: one.served[c] for c, one in last.items()},
        )


NOTHING_IN_FLIGHT: Final = InFlight()


def work_due(transfer: tuple[float, float], end: float, left: float, clock: float) -> float:
    """Seconds of the work for a transfer that are due at a time: as much of it as of the transfer has passed.

    Args:
        transfer: when it began, and seconds of its work in all.
        end: when it ends.
        left: seconds of its work that are not done.
        clock: the time.

    Example:
        >>> work_due((1.0, 0.2), end=2.0, left=0.2, clock=1.5)
        0.1
    """
    begun, work = transfer
    if clock <= begun:
        return 0.0
    to_come = max(0.0, (end - clock) / (end - begun)) if end > begun else 0.0
    return max(0.0, left - work * to_come)
