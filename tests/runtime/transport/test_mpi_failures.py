"""A rank that fails because another one was killed, before anybody has seen that."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distgraph.errors import RuntimeFault
from distgraph.runtime.job.job_files import TIMEOUT
from distgraph.runtime.job.losses import ELASTIC, Loss, record_loss
from distgraph.runtime.transport import mpi_failures
from distgraph.runtime.transport.mpi_failures import JobFailures


class Control:
    """The control communicator of rank 1 of 4: rank 0 was killed, the others acknowledge the failure."""

    def Get_rank(self) -> int:
        return 1

    def Get_size(self) -> int:
        return 4

    def Isend(self, message: bytearray, rank: int, tag: int) -> None:
        assert rank != 1

    def Iprobe(self, rank: int, tag: int) -> bool:
        return rank in (2, 3)


@pytest.fixture
def failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFailures:
    (tmp_path / "job").mkdir()
    (tmp_path / "elastic").mkdir()
    monkeypatch.setenv(ELASTIC, str(tmp_path / "elastic"))
    monkeypatch.setenv(TIMEOUT, "30")
    mpi: Any = SimpleNamespace(Status=SimpleNamespace, ANY_SOURCE=-1)
    departures: Any = SimpleNamespace(departed={})
    found = JobFailures(mpi, Control(), departures, tmp_path / "job")

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(found, "end", end)
    return found


def test_it_does_not_wait_for_a_rank_whose_loss_is_seen_later(failures: JobFailures, tmp_path: Path) -> None:
    threading.Timer(0.3, lambda: record_loss(Loss("rank 0 was killed by SIGKILL", 0))).start()
    begun = time.monotonic()
    with pytest.raises(SystemExit):
        failures.abort(RuntimeFault("MPI says 'No such process'"))
    assert 0.3 < time.monotonic() - begun < 20  # report_seconds() is 30
    assert (tmp_path / "job" / "reported.1").exists()  # the supervisor of rank 0 waits for this file


def test_it_does_not_wait_for_ranks_that_learned_of_the_loss_from_the_supervisor(
    failures: JobFailures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These do not acknowledge a failure that they have not received first; they note that they report."""
    monkeypatch.setattr(Control, "Iprobe", lambda *_: False)
    record_loss(Loss("rank 0 was killed by SIGKILL", 0))

    def report() -> None:
        for rank in (2, 3):
            (tmp_path / "job" / f"reported.{rank}").touch()

    threading.Timer(0.3, report).start()
    begun = time.monotonic()
    with pytest.raises(SystemExit):
        failures.abort(RuntimeFault("MPI says 'No such process'"))
    assert 0.3 < time.monotonic() - begun < 20


def test_a_rank_that_another_one_has_told_reports_too(
    failures: JobFailures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_failure", (2, "rank 2 failed: RuntimeFault: MPI says 'No such process'"))
    monkeypatch.setattr(mpi_failures, "report_seconds", lambda: 0.05)
    with pytest.raises(SystemExit):
        failures.abort(RuntimeFault("rank 1 stops too"))
    assert (tmp_path / "job" / "reported.1").exists()
