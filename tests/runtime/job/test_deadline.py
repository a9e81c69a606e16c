"""The time limit of calls that cannot be interrupted: it ends the process and says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distgraph.runtime.job.job_files import JOB_DIRECTORY, Failure, record_failure_in, recorded_failure

GUARDED = """
import time
from distgraph.runtime.job.deadline import deadline
with deadline({seconds}, "MPI has not started"):
    time.sleep({body})
print("ended")
"""


def guarded(job: Path | None, seconds: float, body: float) -> subprocess.CompletedProcess[str]:
    """A process of rank 1 whose call takes `body` seconds; its job is in a directory, if it has one."""
    environ = {name: value for name, value in os.environ.items() if name != JOB_DIRECTORY} | {"PMI_RANK": "1"}
    environ |= {} if job is None else {JOB_DIRECTORY: str(job)}
    script = GUARDED.format(seconds=seconds, body=body)
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)


def test_a_call_within_the_limit(tmp_path: Path) -> None:
    assert guarded(tmp_path, 30, 0.3).stdout == "ended\n"
    assert list(tmp_path.iterdir()) == []


def test_the_limit_is_the_failure_of_the_job(tmp_path: Path) -> None:
    done = guarded(tmp_path, 0.3, 60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGKILL, "", "")
    assert recorded_failure(tmp_path) == Failure(1, "MPI has not started", observed=True)
    assert not (tmp_path / "follower.1").exists()


def test_without_a_launcher_the_limit_is_an_error_message() -> None:
    done = guarded(None, 0.3, 60)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    assert done.stderr == "error: MPI has not started\n"


@pytest.mark.parametrize("body", [0.1, 60])
def test_a_call_that_would_wait_for_a_failed_rank(body: float, tmp_path: Path) -> None:
    """It ends long before the limit, and is no failure of its own; a call that ends by itself goes on."""
    first = Failure(143, "supervisor of rank 0 was killed by SIGTERM", observed=True)
    record_failure_in(tmp_path, first)
    begun = time.monotonic()
    done = guarded(tmp_path, 300, body)
    assert time.monotonic() < begun + 30
    assert done.returncode == (0 if body < 1 else -signal.SIGKILL)
    assert (tmp_path / "follower.1").exists() == (body > 1)
    assert recorded_failure(tmp_path) == first
