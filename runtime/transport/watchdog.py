"""The report that is printed when a wait makes no progress within the time limit: what every rank waits for.

*In:* the activity that each worker records (two attributes a task), which MPI ranks request from each other
once a wait has reached its limit. *Out:* one line for each rank: task, micro-batch, value, operation, peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

MESSAGE_TAGS: Final = 1 << 27
"""Tags of the messages of a rank program start here: number of the transfer x micro-batches + micro-batch."""
NO_ANSWER: Final = "does not answer: it computes, or has stopped"
_ASK, _ANSWER = 8, 9  # tags of the control communicator
_ANSWER_SECONDS: Final = 1.0


class Activity:
    """What one rank is doing.

    Attributes:
        task, micro: the task that it runs and its micro-batch; "" while it runs none.
        waiting: the operation that it waits for; "" while it waits for none.
        transfers: number of a transfer -> the value that it makes.
        micro_batches: number of micro-batches of a step.
    """

    __slots__ = ("micro", "micro_batches", "task", "transfers", "waiting")

    def __init__(self) -> None:
        self.task, self.micro, self.waiting = "", 0, ""
        self.transfers: Mapping[int, str] = {}
        self.micro_batches = 1

    def message_text(self, tag: int) -> str:
        """Text of the value and micro-batch of a message, to begin its description; "" for another tag."""
        number, micro = divmod(tag - MESSAGE_TAGS, self.micro_batches)
        name = self.transfers.get(number)
        return "" if name is None else f"%{name} of micro-batch {micro}, "

    def __str__(self) -> str:
        where = f" in {self.task} of micro-batch {self.micro}" if self.task else ""
        return f"waits{where} for {self.waiting}" if self.waiting else f"does not wait{where}"


def report(activities: Mapping[int, str]) -> str:
    """Text of the activities of all ranks, one line each."""
    return "".join(f"\n  rank {rank} {text}" for rank, text in sorted(activities.items()))


class ActivityRequest:
    """Asks the other ranks of an MPI job for their activity after a wait that was too long.

    Args:
        mpi: mpi4py's MPI module.
        comm: communicator on which the two tags are used for nothing else.
        activity: that of this rank.
    """

    def __init__(self, mpi: Any, comm: Any, activity: Activity) -> None:
        self._mpi, self._comm, self._activity = mpi, comm, activity
        self._sends: list[Any] = []

    def answer(self) -> None:
        """Send this rank's activity to the ranks that asked; called while this rank waits."""
        status = self._mpi.Status()
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _ASK, status):
            source = status.Get_source()
            self._comm.Recv(bytearray(1), source, _ASK)
            self._sends.append(self._comm.Isend(bytearray(str(self._activity).encode()), source, _ANSWER))

    def ask(self) -> dict[int, str]:
        """The activity of every rank. A rank that does not answer within a second computes or has stopped."""
        this_rank = int(self._comm.Get_rank())
        answers = {this_rank: str(self._activity)}
        others = [rank for rank in range(int(self._comm.Get_size())) if rank != this_rank]
        self._sends += [self._comm.Isend(bytearray(1), rank, _ASK) for rank in others]
        deadline = time.monotonic() + _ANSWER_SECONDS
        status = self._mpi.Status()
        while len(answers) <= len(others) and time.monotonic() < deadline:
            self.answer()  # others may have run out of time as well
            if self._comm.Iprobe(self._mpi.ANY_SOURCE, _ANSWER, status):
                text = bytearray(status.Get_count(self._mpi.BYTE))
                self._comm.Recv(text, status.Get_source(), _ANSWER)
                answers[status.Get_source()] = text.decode()
            else:
                time.sleep(0.001)
        return {rank: answers.get(rank, NO_ANSWER) for rank in (this_rank, *others)}


def recording(
    activity: Activity, run: Callable[[str, int, Callable[[int], None]], None]
) -> Callable[..., None]:
    """A function that runs a function of a task as `run` does, and records the task in `activity`."""

    def run_recorded(name: str, micro: int, function: Callable[[int], None]) -> None:
        activity.task, activity.micro = name, micro
        run(name, micro, function)

    return run_recorded
