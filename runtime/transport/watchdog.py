"""What every rank waits for, told when a wait makes no progress within the time limit.

*In:* what the workers note as they go (two attributes a task), and what ranks ask each other over MPI once a
wait has run out of time. *Out:* one line for each rank: task, micro-batch, value, operation and peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

MESSAGE_TAGS: Final = 1 << 27
"""Tags of the messages of a rank program start here: number of the transfer x micro-batches + micro-batch."""
_ASK, _ANSWER = 8, 9  # tags of the control communicator
_ANSWER_SECONDS: Final = 1.0


class Place:
    """Where one rank is.

    Attributes:
        task, micro: that it runs; "" outside of any.
        waiting: what it waits for; "" while it does not.
        transfers: number of a transfer -> the value that it makes.
        micro_batches: of a step.
    """

    __slots__ = ("micro", "micro_batches", "task", "transfers", "waiting")

    def __init__(self) -> None:
        self.task, self.micro, self.waiting = "", 0, ""
        self.transfers: Mapping[int, str] = {}
        self.micro_batches = 1

    def message(self, tag: int) -> str:
        """The value and micro-batch of a message, as they go before its description; "" for another tag."""
        number, micro = divmod(tag - MESSAGE_TAGS, self.micro_batches)
        name = self.transfers.get(number)
        return "" if name is None else f"%{name} of micro-batch {micro}, "

    def __str__(self) -> str:
        where = f" in {self.task} of micro-batch {self.micro}" if self.task else ""
        return f"waits{where} for {self.waiting}" if self.waiting else f"does not wait{where}"


def report(places: Mapping[int, str]) -> str:
    """All ranks, one line each."""
    return "".join(f"\n  rank {rank} {text}" for rank, text in sorted(places.items()))


class Inquiry:
    """How a rank of an MPI job learns where the others are, when it has waited too long.

    Args:
        mpi: mpi4py's MPI module.
        comm: communicator with the two tags for itself.
        place: of this rank.
    """

    def __init__(self, mpi: Any, comm: Any, place: Place) -> None:
        self._mpi, self._comm, self._place = mpi, comm, place
        self._sends: list[Any] = []

    def answer(self) -> None:
        """Tell whoever asks; called by a rank that has been waiting for a while."""
        status = self._mpi.Status()
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _ASK, status):
            source = status.Get_source()
            self._comm.Recv(bytearray(1), source, _ASK)
            self._sends.append(self._comm.Isend(bytearray(str(self._place).encode()), source, _ANSWER))

    def ask(self) -> dict[int, str]:
        """Where every rank is; one that neither waits nor answers within a second is somewhere else."""
        own = int(self._comm.Get_rank())
        found = {own: str(self._place)}
        others = [rank for rank in range(int(self._comm.Get_size())) if rank != own]
        self._sends += [self._comm.Isend(bytearray(1), rank, _ASK) for rank in others]
        deadline = time.monotonic() + _ANSWER_SECONDS
        status = self._mpi.Status()
        while len(found) <= len(others) and time.monotonic() < deadline:
            self.answer()  # others may have run out of time as well
            if self._comm.Iprobe(self._mpi.ANY_SOURCE, _ANSWER, status):
                text = bytearray(status.Get_count(self._mpi.BYTE))
                self._comm.Recv(text, status.Get_source(), _ANSWER)
                found[status.Get_source()] = text.decode()
            else:
                time.sleep(0.001)
        return {
            rank: found.get(rank, "does not answer: it computes, or has stopped") for rank in (own, *others)
        }


def noted(place: Place, run: Callable[[str, int, Callable[[int], None]], None]) -> Callable[..., None]:
    """Runs a function of a task as `run` does, with the place noted."""

    def noting(name: str, micro: int, function: Callable[[int], None]) -> None:
        place.task, place.micro = name, micro
        run(name, micro, function)

    return noting
