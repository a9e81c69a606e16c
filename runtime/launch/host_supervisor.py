"""The supervisor of a job on one host of several: `python -m distgraph.runtime.launch.host_supervisor ...`.

    launcher -> remote shell -> supervisor of a host (exchanges heartbeats with the launcher)
    launcher -> mpiexec -> remote shell -> proxy -> ranks of the host

The launcher starts one on each host of a job by the remote shell that also reaches the hosts otherwise. The
two send a short line to each other several times within their limits, through the input and the output of
the remote shell, so no port is opened. The supervisor runs no code of the user: ranks that compute for a long
time, with or without the interpreter lock, delay no heartbeat.

When the launcher closes its end, has gone, or has sent nothing for the limit, the supervisor kills what the
job has left on this host. So no rank remains on a host whose network is down. It does nothing before it has
heard from the launcher, because some remote shells pass no input on. Standard library only.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from distgraph.runtime.job.heartbeat import Silence
from distgraph.runtime.job.job_files import JOB
from distgraph.runtime.job.processes import Process, processes_with, shared_memory

_SIGN: Final = b"\x06"  # ACK, which no remote shell prints as a greeting
_HEARTBEAT: Final = _SIGN + b"\n"  # some remote shells pass on whole lines only
_PROXY: Final = "hydra_pmi_proxy"
_END_SECONDS: Final = 5.0


def supervisor_command(job: str, limit: float, interval: float) -> list[str]:
    """The command that starts a supervisor.

    Args:
        job: value of DISTGRAPH_JOB of the processes that it kills.
        limit: seconds without a heartbeat after which the launcher counts as gone.
        interval: seconds between two heartbeats.
    """
    return [sys.executable, "-m", "distgraph.runtime.launch.host_supervisor", job, str(limit), str(interval)]


def exchange_heartbeats(
    source: int, target: int, limit: float, interval: float, clock: Callable[[], float] = time.monotonic
) -> bool:
    """Send and receive heartbeats until the other side is silent or has gone.

    Args:
        source: descriptor from which heartbeats are read.
        target: descriptor to which they are written.
        limit: see `supervisor_command`.
        interval: see `supervisor_command`.
        clock: as of `Silence`.

    Returns:
        Whether there was a heartbeat at all.
    """
    heard = 0
    silence = Silence(lambda: heard, interval, clock)
    poll = select.poll()
    poll.register(source, select.POLLIN)
    os.set_blocking(target, False)
    while silence.seconds() <= limit:
        if poll.poll(interval * 1000):
            received = read_heartbeats(source)
            if received is None:
                break
            heard += received
        if heard and not send_heartbeat(target):
            break
    return heard > 0


def read_heartbeats(source: int) -> int | None:
    """Number of heartbeats that a readable descriptor has; None where its other end has gone."""
    try:
        received = os.read(source, 1 << 12)
    except OSError:  # a socket whose connection was reset
        return None
    return received.count(_SIGN) if received else None


def send_heartbeat(target: int) -> bool:
    """Write a heartbeat to a descriptor that does not block. Returns whether its other end is there."""
    try:
        os.write(target, _HEARTBEAT)
    except BlockingIOError:  # full, because nothing has been read for long
        return True
    except OSError:
        return False
    return True


def end_job(job: str) -> None:
    """Kill all processes of a job on this host, then its proxies, and remove what MPI leaves in memory."""
    deadline, files = time.monotonic() + _END_SECONDS, set[str]()
    while (processes := processes_with(JOB, job)) and time.monotonic() < deadline:
        parents = [Process.of(process.parent) for process in processes]
        proxies = [parent for parent in parents if parent is not None and parent.name == _PROXY]
        for process in processes:
            with suppress(OSError):
                files.update(shared_memory(process.pid))
        for process in dict.fromkeys([*processes, *proxies]):
            process.kill()
    for name in files:
        with suppress(OSError):
            Path(name).unlink()


def main(argv: Sequence[str]) -> None:
    """Command line; see `supervisor_command`."""
    job, limit, interval = argv
    if exchange_heartbeats(0, 1, float(limit), float(interval)):
        end_job(job)
    os._exit(0)  # nothing is left to be written, and the reader may have gone


if __name__ == "__main__":
    main(sys.argv[1:])
