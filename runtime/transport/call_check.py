"""Call check: whether all ranks have made the same calls of the engine.

A call on one rank only (`if rank == 0: engine.save(...)`) would make that rank wait for the others forever.
Every rank numbers and records its calls, without sending anything. A rank that has waited long asks the
others for their call of the same number. They answer when they wait themselves or make that call. An answer
with another call proves that the ranks make different calls, however slow the machine is. A rank that does
not answer may be busy, which proves nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from distgraph.errors import RuntimeFault

END: Final = "the end of the script"
LISTEN_SECONDS: Final = 0.1  # of a wait, after which a rank starts to answer
ASK_SECONDS: Final = 1.0  # of a wait, after which it asks
GRACE_SECONDS: Final = 0.5  # for more answers after the first one that differs
_RECORDED: Final = 256  # calls
_QUESTION, _ANSWER = 0, 1  # tags


class DepartedFault(RuntimeFault):
    """A rank waits for another one that has reached the end of its script."""


def different_calls(ranks: Mapping[str, Sequence[int]], silent: Sequence[int] = ()) -> str:
    """Text of the error that ranks make different calls."""
    parts = [f"{name} on {_ranks(who)}" for name, who in ranks.items()]
    parts += [f"nothing yet on {_ranks(silent)}"] if silent else []
    return (
        f"the ranks make different calls: {' but '.join(parts)}; calls of the engine are collective, so "
        "make each of them on every rank"
    )


class CallCheck:
    """Records the calls of one rank of an MPI job and compares them with those of the others.

    Args:
        mpi: the module mpi4py.MPI.
        comm: an intracommunicator that is used for nothing else.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._rank, self._size = int(comm.Get_rank()), int(comm.Get_size())
        self._number = 0
        self._names: deque[str] = deque([""], maxlen=_RECORDED)  # the last is call `_number`
        self._questions: list[tuple[int, int]] = []  # (rank, number) that waits for an answer
        self._answers: dict[int, str] = {}  # rank -> its call of number `_number`
        self._asked = False
        self._first_difference = 0.0  # time of the first answer that differs
        self._sends: list[Any] = []

    @property
    def call(self) -> str:
        """The call that this rank is in; empty before the first."""
        return self._names[-1]

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that were asked and have not reached this call."""
        others = (rank for rank in range(self._size) if rank != self._rank) if self._asked else ()
        return tuple(rank for rank in others if self._answers.get(rank) != self.call)

    def enter(self, call: str) -> None:
        """Record a call that every rank must make."""
        self._number += 1
        self._names.append(call)
        self._answers, self._asked, self._first_difference = {}, False, 0.0
        self._answer()

    def verify(self, waited: float) -> None:
        """Answer other ranks and, after a long wait, ask them. Called repeatedly while this rank waits.

        Args:
            waited: seconds since the wait began.

        Raises:
            RuntimeFault: the ranks have made different calls.
        """
        self._receive()
        if waited > ASK_SECONDS and not self._asked and self.call:
            self._asked = True
            for rank in range(self._size):
                if rank != self._rank:
                    self._send(rank, _QUESTION, str(self._number))
        now = time.monotonic()
        if all(name == self.call for name in self._answers.values()):
            return
        self._first_difference = self._first_difference or now
        if len(self._answers) == self._size - 1 or now - self._first_difference > GRACE_SECONDS:
            raise RuntimeFault(self._difference())

    def discard(self) -> None:
        """Receive questions and answers when no rank waits any more: MPI reports what nobody reads."""
        status = self._mpi.Status()
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status):
            data = bytearray(status.Get_count(self._mpi.BYTE))
            self._comm.Recv(data, status.Get_source(), status.Get_tag())

    def _difference(self) -> str:
        ranks_of_call: dict[str, list[int]] = defaultdict(list)
        for rank, name in sorted({**self._answers, self._rank: self.call}.items()):
            ranks_of_call[name].append(rank)
        silent = [r for r in range(self._size) if r != self._rank and r not in self._answers]
        return different_calls(ranks_of_call, silent)

    def _receive(self) -> None:
        status = self._mpi.Status()
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status):
            data = bytearray(status.Get_count(self._mpi.BYTE))
            source, tag = status.Get_source(), status.Get_tag()
            self._comm.Recv(data, source, tag)
            number, _, name = data.decode().partition(" ")
            if tag == _QUESTION:
                self._questions.append((source, int(number)))
            elif int(number) == self._number:
                self._answers[source] = name
        self._answer()

    def _answer(self) -> None:
        """Answer the questions about calls that this rank has reached; keep the others."""
        later = [(rank, number) for rank, number in self._questions if number > self._number]
        for rank, number in self._questions:
            back = self._number - number
            if 0 <= back < len(self._names):
                self._send(rank, _ANSWER, f"{number} {self._names[-1 - back]}")
        self._questions = later

    def _send(self, rank: int, tag: int, text: str) -> None:
        self._sends = [request for request in self._sends if not request.Test()]
        self._sends.append(self._comm.Isend(bytearray(text.encode()), rank, tag))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
