"""An operation of the MPI transport that has been started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distgraph.runtime.transport.departed_ranks import Need
from distgraph.runtime.transport.mpi_collectives import Steps

if TYPE_CHECKING:
    from distgraph.runtime.transport.mpi import MpiTransport


class WithStatus:
    """An MPI request together with the status object that receives its result."""

    __slots__ = ("request", "status")

    def __init__(self, request: Any, status: Any) -> None:
        self.request, self.status = request, status


class Operation:
    """A started operation; its steps are a generator that yields the MPI requests each next step waits for.

    The operations of one group take their steps in the order in which they were started, so that messages
    with equal tags match in order.
    """

    __slots__ = (
        "_failure",
        "_need",
        "_steps",
        "_taken",
        "_transport",
        "finished",
        "previous",
        "requests",
        "what",
    )

    def __init__(
        self, transport: MpiTransport, what: str, steps: Steps, previous: Operation | None, need: Need
    ) -> None:
        self._transport, self.what, self._steps, self.previous = transport, what, steps, previous
        self._need = need
        self.requests: list[Any] = []
        self._taken = 0
        self._failure: BaseException | None = None
        self.finished = False

    def advance(self) -> bool:
        """Take every step that can be taken now, with the lock of the transport.

        Returns: whether the operation is finished.

        Raises:
            RuntimeFault: a step failed, now or while the rank computed.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        while not self.finished:
            if self.requests and not self._transport.test_all(self.requests, self.what):
                return False
            if self.previous is not None:
                if not self.previous.finished and self.previous._taken <= self._taken:
                    return False
                if self.previous.finished:
                    self.previous = None
            self._taken += 1
            try:
                self.requests = next(self._steps)
            except StopIteration:
                self.requests = []
                self.finished = True
        return True

    def advance_beside(self) -> bool:
        """As `advance`, beside a computation of the rank: an error is raised when the rank advances it."""
        if self._failure is None:
            try:
                return self.advance()
            except Exception as error:  # noqa: BLE001 - of whatever kind, it belongs to the rank
                self._failure = error
        return False

    def done(self) -> bool:
        if not self.finished:
            with self._transport.lock:
                if not self.advance():
                    self._transport.tested()
        return self.finished

    def wait(self) -> None:
        if not self.finished:
            with self._transport.lock:
                if not self.advance():
                    self._transport.poll(self.advance, self.what, self._need)
