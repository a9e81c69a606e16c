"""Roll call: have all ranks come to the same call of the engine?

A call on one rank only (`if rank == 0: engine.save(...)`) leaves that rank waiting for others that are
somewhere else for good. Every rank notes its calls, for which nothing is sent. A rank that has waited long
asks the others what their call of the same number is; they answer when they wait themselves or come to that
call. One that answers with another call shows that the ranks have parted, however slow the machine is; one
that does not answer may be busy, and proves nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from distgraph.errors import RuntimeFault

END: Final = "the end of the script"
LISTEN_SECONDS: Final = 0.1  # into a wait, when a rank starts to answer
ASK_SECONDS: Final = 1.0  # into a wait, when it asks
GRACE_SECONDS: Final = 0.5  # for more answers behind the first that differs
_REMEMBERED: Final = 256  # calls
_ASK, _TELL = 0, 1


class DepartedFault(RuntimeFault):
    """A rank waits for one that has come to the end of its script."""


def different_calls(ranks: Mapping[str, Sequence[int]], silent: Sequence[int] = ()) -> str:
    """Message of the error that ranks make different calls.

    Args:
        ranks: that are in each call.
        silent: ranks of which nothing is known.
    """
    parts = [f"{name} on {_ranks(who)}" for name, who in ranks.items()]
    parts += [f"nothing yet on {_ranks(silent)}"] if silent else []
    return (
        f"the ranks make different calls: {' but '.join(parts)}; calls of the engine are collective, so "
        "make each of them on every rank"
    )


class RollCall:
    """The calls of one rank of an MPI job.

    Args:
        mpi: the module mpi4py.MPI.
        comm: an intracommunicator of its own.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._rank, self._size = int(comm.Get_rank()), int(comm.Get_size())
        self._number = 0
        self._names: deque[str] = deque([""], maxlen=_REMEMBERED)  # the last is call `_number`
        self._asking: list[tuple[int, int]] = []  # (rank, number) that waits for an answer
        self._answers: dict[int, str] = {}  # rank -> its call of this number
        self._asked = False
        self._parted = 0.0  # when the first answer differed
        self._sends: list[Any] = []

    @property
    def call(self) -> str:
        """The call that this rank is in; empty before the first."""
        return self._names[-1]

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that were asked and have not come to this call."""
        others = (rank for rank in range(self._size) if rank != self._rank) if self._asked else ()
        return tuple(rank for rank in others if self._answers.get(rank) != self.call)

    def enter(self, call: str) -> None:
        """Note a call that every rank must make."""
        self._number += 1
        self._names.append(call)
        self._answers, self._asked, self._parted = {}, False, 0.0
        self._answer()

    def attend(self, waited: float) -> None:
        """Answer others and, after a long wait, ask them. Called again and again while this rank waits.

        Args:
            waited: seconds that the wait has lasted.

        Raises:
            RuntimeFault: the ranks have made different calls.
        """
        self._receive()
        if waited > ASK_SECONDS and not self._asked and self.call:
            self._asked = True
            for rank in range(self._size):
                if rank != self._rank:
                    self._send(rank, _ASK, str(self._number))
        now = time.monotonic()
        if all(name == self.call for name in self._answers.values()):
            return
        self._parted = self._parted or now
        if len(self._answers) == self._size - 1 or now - self._parted > GRACE_SECONDS:
            raise RuntimeFault(self._parting())

    def _parting(self) -> str:
        found: dict[str, list[int]] = defaultdict(list)
        for rank, name in sorted({**self._answers, self._rank: self.call}.items()):
            found[name].append(rank)
        silent = [r for r in range(self._size) if r != self._rank and r not in self._answers]
        return different_calls(found, silent)

    def _receive(self) -> None:
        status = self._mpi.Status()
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status):
            data = bytearray(status.Get_count(self._mpi.BYTE))
            source, tag = status.Get_source(), status.Get_tag()
            self._comm.Recv(data, source, tag)
            number, _, name = data.decode().partition(" ")
            if tag == _ASK:
                self._asking.append((source, int(number)))
            elif int(number) == self._number:
                self._answers[source] = name
        self._answer()

    def _answer(self) -> None:
        """Tell those who asked for a call that this rank has come to; the others have to wait."""
        early = [(rank, number) for rank, number in self._asking if number > self._number]
        for rank, number in self._asking:
            back = self._number - number
            if 0 <= back < len(self._names):
                self._send(rank, _TELL, f"{number} {self._names[-1 - back]}")
        self._asking = early

    def _send(self, rank: int, tag: int, text: str) -> None:
        self._sends = [request for request in self._sends if not request.Test()]
        self._sends.append(self._comm.Isend(bytearray(text.encode()), rank, tag))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
