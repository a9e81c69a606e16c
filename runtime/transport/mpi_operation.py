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

    Attributes:
        far: whether it has peers on other machines, so that it is advanced while the rank computes.
    """

    __slots__ = (
        "_failure",
        "_need",
        "_steps",
        "_taken",
        "_transport",
        "far",
        "finished",
        "previous",
        "requests",
        "what",
    )

    def __init__(
        self,
        transport: MpiTransport,
        what: str,
        steps: Steps,
        previous: Operation | None,
        need: Need,
        *,
        far: bool,
    ) -> None:
        self._transport, self.what, self._steps, self.previous = transport, what, steps, previous
        self._need, self.far = need, far
        self.requests: list[Any] = []
        self._taken = 0
        self._failure: BaseException | None = None
        self.finished = False

    def advance(self) -> bool:
        """Take every step that can be taken now, with the lock of the transport.

        Returns: whether the operation is finished.

        Raises:
            RuntimeFault: a step failed, now or before.
        """
        if self._failure is not None:
            raise self._failure
        try:
            while not self.finished and self._take_step():
                pass
        except Exception as error:
            self._failure = error
            raise
        return self.finished

    def _take_step(self) -> bool:
        """Take the next step if it can be taken now; returns whether it could."""
        if self.requests:
            if not self._transport.test_all(self.requests, self.what):
                return False
            self.requests = []  # a test of complete ones would count as progress while another is waited for
        while self.previous is not None and self.previous.finished:
            self.previous = self.previous.previous  # which may have more steps, and not be finished
        if self.previous is not None and self.previous._taken <= self._taken:
            return False
        self._taken += 1
        try:
            self.requests = next(self._steps)
        except StopIteration:
            self.requests = []
            self.finished = True
        return True

    @property
    def ended(self) -> bool:
        """Whether it is finished or has failed."""
        return self.finished or self._failure is not None

    def done(self) -> bool:
        if not self.finished:
            with self._transport.lock:
                if not self._advance_or_forget():
                    self._transport.tested()
        return self.finished

    def wait(self) -> None:
        if not self.finished:
            with self._transport.lock:
                if not self._advance_or_forget():
                    self._transport.poll(self._advance_or_forget, self.what, self._need)

    def _advance_or_forget(self) -> bool:
        """As `advance`; an operation that fails tells the rank so here, and no other call does."""
        try:
            return self.advance()
        except Exception:
            self._transport.forget(self)
            raise
