"""Times of the host: what the processor that runs a rank's Python costs, besides the device that computes.

A host issues ops to an accelerator, or is the device itself: a CPU, perhaps with several ranks on each core.
The section `compute.host` of a device in a resource file states its times; the section `host` of a runtime
model replaces some of them. Nothing else in the package knows these numbers: the forecast asks `HostTimes`.

    machines:
      - devices:
          compute:
            host: {op: 30 us, step: 90 us}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated

from distgraph.resources.units import Seconds
from distgraph.serialization.fields import Limits, documented


@documented(complete=False)
@dataclass(frozen=True, slots=True)
class HostTimes:
    """Times of the host. One that is not stated is None, and counts as zero. All are seconds but the last.

    Attributes:
        op: to issue one op or collective while the device runs earlier ones.
        task: once per run of a task, while the device waits.
        micro_batch: once per micro-batch on every stage, while the device waits.
        step: once per step, while the device waits.
        message: for which the device computes nothing at each end of a message to another mesh. None if other
            hardware moves messages. A device with this number, such as a CPU, moves all bytes inside its
            machine itself: it packs what it sends, and computes nothing while a collective progresses
            (`busy_seconds`).
        network_busy: the part of the seconds of a message between machines, 0 to 1, that no computation of
            the device hides: it works for the message itself, or the message waits until it does. None where
            other hardware moves messages between machines while the device computes.
    """

    op: Seconds | None = None
    task: Seconds | None = None
    micro_batch: Seconds | None = None
    step: Seconds | None = None
    message: Seconds | None = None
    network_busy: Annotated[float, Limits(ge=0, le=1, strict=True)] | None = None

    @property
    def moves_messages(self) -> bool:
        """Whether the device moves messages itself."""
        return self.message is not None

    def replaced_by(self, others: HostTimes) -> HostTimes:
        """The times that `others` states, and those of this host where it states none."""
        stated = {field.name: getattr(others, field.name) for field in fields(HostTimes)}
        return HostTimes(**{n: getattr(self, n) if t is None else t for n, t in stated.items()})

    def issued(self, ops: int) -> float:
        """Seconds from the start of a task after which the host has issued `ops` ops."""
        return ops * (self.op or 0.0)

    def end_of_task(self, computed: float, ops: int, *, micro_batch: bool) -> float:
        """When the next task can start, in seconds from the start of this one.

        Args:
            computed: when the device has computed all ops.
            ops: number of ops of the task.
            micro_batch: whether the work per micro-batch belongs to this task.
        """
        end = max(computed, self.issued(ops)) + (self.task or 0.0)
        return end + (self.micro_batch or 0.0) if micro_batch else end

    def ends_of_messages(self, messages: int) -> float:
        """Seconds for which the device computes nothing at the ends of `messages` messages."""
        return messages * (self.message or 0.0)


def busy_share(hosts: Sequence[HostTimes], *, one_machine: bool) -> float:
    """The part of a communication for which its devices cannot compute, where no table states it.

    Inside a machine that is all of it if the devices move messages themselves, and nothing otherwise.

    Args:
        hosts: of the devices.
        one_machine: whether all devices are in one machine.
    """
    if one_machine:
        return float(all(host.moves_messages for host in hosts))
    return max((host.network_busy or 0.0 for host in hosts), default=0.0)


def busy_seconds(seconds: float, measured: float | None, share: float) -> float:
    """The part of a communication for which its devices themselves are busy and cannot compute.

    Args:
        seconds: of the communication.
        measured: that part in seconds, if a table states it (`MeasuredTable.busy`).
        share: that part otherwise, 0 to 1; see `busy_share`.
    """
    return share * seconds if measured is None else min(seconds, measured)
