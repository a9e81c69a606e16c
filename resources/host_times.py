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

from dataclasses import dataclass, fields

from distgraph.resources.units import Seconds
from distgraph.serialization.documents import documented


@documented(complete=False)
@dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds of the host. A time that is not stated is None, and counts as zero.

    Attributes:
        op: to issue one op or collective while the device runs earlier ones.
        task: once per run of a task, while the device waits.
        micro_batch: once per micro-batch on every stage, while the device waits.
        step: once per step, while the device waits.
        message: for which the device computes nothing at each end of a message to another mesh. None if other
            hardware moves messages. A device with this number, such as a CPU, moves all bytes inside its
            machine itself: it packs what it sends, and computes nothing while a collective progresses
            (`busy_seconds`).
    """

    op: Seconds | None = None
    task: Seconds | None = None
    micro_batch: Seconds | None = None
    step: Seconds | None = None
    message: Seconds | None = None

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


def busy_seconds(seconds: float, measured: float | None, *, moved_by_devices: bool) -> float:
    """The part of a communication for which its devices themselves are busy and cannot compute.

    Args:
        seconds: of the communication.
        measured: that part, if a table states it (`MeasuredTable.busy`).
        moved_by_devices: whether all its devices are in one machine and move messages themselves.
    """
    if measured is not None:
        return min(seconds, measured)
    return seconds if moved_by_devices else 0.0
