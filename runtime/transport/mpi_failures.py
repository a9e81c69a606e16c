"""Failures of an MPI job: how a failing rank informs the others, and how each of them ends."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any, Final, NoReturn

from distgraph.errors import RuntimeFault
from distgraph.runtime.job.deadline import end_mpiexec
from distgraph.runtime.job.job_files import (
    FAILURE_REPORT_SECONDS,
    REPORTED,
    exit_code,
    observed_failure,
    reported_ranks,
)
from distgraph.runtime.job.losses import elastic_folder, read_losses, report_seconds
from distgraph.runtime.job.processes import shared_memory
from distgraph.runtime.transport.call_check import DepartedFault
from distgraph.runtime.transport.departed_ranks import Departures

_FAILURE, _ACKNOWLEDGE = 0, 1  # tags of the control communicator
_JOB_LOOK_SECONDS: Final = 0.01
_LOSS_LOOK_SECONDS: Final = 0.1
_FOLLOW_SECONDS: Final = 0.5  # in which the failing rank prints its error first


class JobFailures:
    """Sends the failure of this rank to the others, and receives theirs.

    Args:
        mpi: the module mpi4py.MPI.
        control: the control communicator.
        departures: of this rank.
        job: directory in which the launcher's supervisors record the first failure; None without a launcher.
    """

    def __init__(self, mpi: Any, control: Any, departures: Departures, job: Path | None) -> None:
        self._mpi, self._control, self._departures, self._job = mpi, control, departures, job
        self._rank, self._size = int(control.Get_rank()), int(control.Get_size())
        self._failure: tuple[int | None, str] | None = None  # (rank that waits for an answer, error)
        self._code = 0  # exit code of the rank that failed; 0 where it takes over that of a departed rank
        self._status = mpi.Status()  # of the probe that every start makes
        self._looked = time.monotonic()
        self._sends: list[Any] = []

    @property
    def elsewhere(self) -> bool:
        """Whether another rank failed first, as far as this rank knows."""
        return self._failure is not None

    def check(self) -> None:
        """Raise `RuntimeFault` if another rank has failed."""
        if self._failure is None:
            self._failure = self._received() or self._recorded()
        if self._failure is not None:
            raise RuntimeFault(f"{self._failure[1]}; rank {self._rank} stops too")

    def _received(self) -> tuple[int, str] | None:
        """The failure that another rank has sent."""
        status = self._status
        if not self._control.Iprobe(self._mpi.ANY_SOURCE, _FAILURE, status):
            return None
        message = bytearray(status.Get_count(self._mpi.BYTE))
        self._control.Recv(message, status.Get_source(), _FAILURE)
        self._code = message[0]
        return status.Get_source(), message[1:].decode()

    def _recorded(self) -> tuple[None, str] | None:
        """The failure that the launcher or a supervisor saw, of a rank that could not send it."""
        if self._job is None or time.monotonic() - self._looked < _JOB_LOOK_SECONDS:
            return None
        self._looked = time.monotonic()
        text = observed_failure(self._job)
        return None if text is None else (None, text)

    def abort(self, error: BaseException) -> NoReturn:
        """Send an error to the other ranks, wait for their failure reports, and end this process."""
        sys.stdout.flush()
        sys.stderr.flush()
        deadline = time.monotonic() + report_seconds()
        if self._failure is not None and self._job is None:  # mpiexec may take the code of any rank
            self.follow(self._code, _FOLLOW_SECONDS)
        if self._failure is not None:  # the launcher ends this process
            self.follow(1, report_seconds())
        code = 0 if isinstance(error, DepartedFault) else exit_code(error) & 255
        message = bytearray([code])
        message += f"rank {self._rank} failed: {type(error).__name__}: {error}".encode()
        others = [rank for rank in range(self._size) if rank != self._rank]
        sends = [self._control.Isend(message, rank, _FAILURE) for rank in others]
        silent, looked = set(others) - self._gone(), time.monotonic()
        while silent and time.monotonic() < deadline:
            silent -= {rank for rank in silent if self._has_answered(rank)}
            if time.monotonic() - looked > _LOSS_LOOK_SECONDS:
                silent, looked = silent - self._gone(), time.monotonic()
            time.sleep(0.005)
        del sends
        self._note_report()
        time.sleep(
            0.1
        )  # the launcher must read the others' output from its pipes before it sees this rank end
        self.end(self._code_of_departed() if isinstance(error, DepartedFault) else exit_code(error))

    def _gone(self) -> set[int | None]:
        """Ranks that do not answer any more: an elastic job has lost them, or they have reported already.

        A rank that learned of a killed rank from its supervisor does not answer this one, which may have
        failed because of the killed rank, too.
        """
        folder = elastic_folder()
        lost = set() if folder is None else {loss.rank for loss in read_losses(folder)}
        return lost if self._job is None else lost | reported_ranks(self._job)

    def follow(self, code: int, seconds: float) -> NoReturn:
        """Acknowledge the failure of another rank, and end this process.

        Args:
            code: exit code. mpiexec combines those of all ranks, so the failing rank takes this one over if
                it can.
            seconds: time in which the failing rank may end the job.
        """
        until = time.monotonic() + seconds
        if self._failure is not None and self._failure[0] is not None:
            self._sends = [self._control.Isend(bytearray([code & 255]), self._failure[0], _ACKNOWLEDGE)]
        self._note_report()
        while time.monotonic() < until:
            self._control.Iprobe(self._mpi.ANY_SOURCE, _FAILURE)
            time.sleep(0.01)
        self.end(code)

    def _note_report(self) -> None:
        """Note for the supervisor of a killed rank that this one has said why it stops.

        A rank that fails by itself may have failed because of the killed one, before its supervisor saw that:
        MPI refuses to read the memory of a process that has gone.
        """
        if self._job is not None:
            with contextlib.suppress(OSError):  # the launcher has removed the folder
                (self._job / f"{REPORTED}.{self._rank}").touch()

    def _code_of_departed(self) -> int:
        """Exit code of the ranks that have departed, as they sent it; 1 if it would mean success."""
        codes = [1]
        for rank in self._departures.departed:
            if self._control.Iprobe(rank, _ACKNOWLEDGE):
                code = bytearray(1)
                self._control.Recv(code, rank, _ACKNOWLEDGE)
                codes.append(code[0])
        return codes[-1] or 1

    def end(self, code: int) -> NoReturn:
        """End this process without waiting for other ranks, and remove its shared memory files."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self._job is None:
            end_mpiexec(FAILURE_REPORT_SECONDS)
        for path in shared_memory():
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108 - the others have it mapped
        os._exit(code)

    def _has_answered(self, rank: int) -> bool:
        """Whether a rank has acknowledged the failure of this one, or has failed by itself."""
        return any(self._control.Iprobe(rank, tag) for tag in (_ACKNOWLEDGE, _FAILURE))
