"""Machines made of network namespaces: ranks fill them in order, links are limited, and nothing is left."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.support import machines as support
from benchmarks.support.machines import (
    NETWORK,
    MachinesInUseError,
    Network,
    launch_environment,
    machines,
    missing,
)

SCRIPT = """
import socket
from mpi4py import MPI
from distgraph.runtime.transport.core_binding import cpu_quota
place = f"rank {MPI.COMM_WORLD.Get_rank()} on {socket.gethostname()}"
print(f"{place} with {cpu_quota()[1]:g} cores\\n", end="", flush=True)
"""


def output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@contextmanager
def up(count: int, rate: str | None = None, cpu: Sequence[float] = ()) -> Iterator[Network]:
    """Machines; the test is skipped while another process, such as a benchmark, has machines up."""
    try:
        network = machines(count, rate, cpu, wait_seconds=10)
        entered = network.__enter__()
    except MachinesInUseError as error:
        pytest.skip(str(error))
    with ExitStack() as stack:
        stack.push(network)
        yield entered


@pytest.mark.skipif(missing() != "", reason=missing() or "machines can be made")
def test_ranks_fill_machines_in_order_know_their_cores_and_the_network_is_removed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with up(2, rate="80mbit", cpu=(1.0, 0.5)) as network:
        lines = network.run(4, [sys.executable, str(script)]).stdout.splitlines()
        assert "rate 80Mbit" in output("ip", "netns", "exec", "dgm1", "tc", "qdisc", "show", "dev", "eth0")
        with pytest.raises(ValueError, match="3 ranks cannot be shared equally by 2 machines"):
            network.command(3, ["true"])
    hosts = sorted(line for line in lines if line.startswith("rank"))
    places = ["rank 0 on m0", "rank 1 on m0", "rank 2 on m1", "rank 3 on m1"]
    assert hosts == [f"{place} with {1 if 'm0' in place else 0.5} cores" for place in places]
    assert "dgm" not in output("ip", "netns", "list")


@pytest.mark.parametrize(
    ("shares", "cores"),
    [
        ((1.0, 0.5, 0.25), [4, 7, 7]),
        ((0.5, 0.5, 0.5, 0.5), [4, 4, 7, 7]),
        ((0.9, 0.9), [4, 7]),
        ((0.5, 2.0, 0.5, 0.5), [4, None, 4, 7]),
        ((1.0, 1.0, 0.25), [4, 7, None]),
        ((0.0, 0.0), [None, None]),
    ],
)
def test_machines_that_fill_a_core_share_it(
    shares: Sequence[float], cores: Sequence[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 4})
    monkeypatch.setattr(support, "_share", lambda machine: shares[machine])
    assert [support._own_core(machine) for machine in range(len(shares))] == cores


@pytest.mark.skipif(missing() != "", reason=missing() or "machines can be made")
def test_input_and_output_of_commands_pass_through_the_network() -> None:
    """As with ssh: a command behind a link that is down is not heard of, and does not hear of the end."""
    script = "read word; echo $word from $(hostname); read word; exit 3"
    with up(1) as network:
        command = [
            launch_environment()["HYDRA_LAUNCHER_EXEC"],
            f"{NETWORK}.1",
            f"sh -c {shlex.quote(script)}",
        ]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        for cut in (False, True):
            with subprocess.Popen(command, **pipes, text=True, bufsize=1) as process:  # type: ignore[call-overload]
                process.stdin.write("word\n")
                assert process.stdout.readline() == "word from m0\n"
                if cut:
                    network.link(0, "down")
                    network.kill(0)
                    assert process.poll() is None
                    process.kill()
                else:
                    process.stdin.write("end\n")
                    assert process.wait(100) == 3


@pytest.mark.skipif(missing() != "", reason=missing() or "machines can be made")
def test_machine_answers_at_once_when_its_link_is_up_again() -> None:
    """Also where it looked for an address while the link was down: that look-up fails three seconds later."""
    command = [launch_environment()["HYDRA_LAUNCHER_EXEC"], f"{NETWORK}.1", "hostname"]
    connect = ["ip", "netns", "exec", "dgm0", "bash", "-c", f"exec <>/dev/tcp/{NETWORK}.254/9"]
    with up(1, "400mbit") as network:
        assert output(*command) == "m0\n"
        network.link(0, "down")
        with subprocess.Popen(connect, stderr=subprocess.DEVNULL):
            time.sleep(2.5)
            network.link(0, "up")
            assert output(*command) == "m0\n"


@pytest.mark.skipif(missing() != "", reason=missing() or "machines can be made")
def test_command_of_a_machine_that_cannot_connect_ends_at_once() -> None:
    with up(1):
        output("ip", "-n", "dgm0", "link", "set", "eth0", "down")
        starter = launch_environment()["HYDRA_LAUNCHER_EXEC"]
        result = subprocess.run(
            [starter, f"{NETWORK}.1", "hostname"], capture_output=True, text=True, timeout=5, check=False
        )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == "the machine did not connect"


@pytest.mark.skipif(missing() != "", reason=missing() or "machines can be made")
def test_machines_that_a_killed_process_left_are_removed() -> None:
    """Those of a larger number too, but no namespace of another name."""
    with up(1):
        output("ip", "netns", "add", "dgm7")
        output("ip", "link", "add", "dgv7", "type", "veth", "peer", "name", "eth0", "netns", "dgm7")
        output("ip", "netns", "add", "dgmother")
    try:
        spaces = output("ip", "netns", "list").split()
        assert "dgmother" in spaces
        assert "dgm7" not in spaces
        assert "dgv7" not in output("ip", "link", "show")
    finally:
        output("ip", "netns", "del", "dgmother")


@pytest.mark.skipif(missing() != "", reason=missing() or "machines can be made")
def test_a_second_user_learns_who_has_machines_up() -> None:
    with (
        up(1),
        pytest.raises(MachinesInUseError, match=rf"process {os.getpid()} .* 0.2 seconds .*; wait until"),
        machines(1, wait_seconds=0.2),
    ):
        pass
