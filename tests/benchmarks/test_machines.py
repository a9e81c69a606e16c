"""Machines made of network namespaces: ranks fill them in order, links are limited, and nothing is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.support.machines import machines, missing

SCRIPT = """
import socket
from mpi4py import MPI
from distgraph.runtime.transport.core_binding import cpu_quota
place = f"rank {MPI.COMM_WORLD.Get_rank()} on {socket.gethostname()}"
print(f"{place} with {cpu_quota()[1]:g} cores\\n", end="", flush=True)
"""


def output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(missing() != "", reason=missing() or "machines can be made")
def test_ranks_fill_machines_in_order_know_their_cores_and_the_network_is_removed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with machines(2, rate="80mbit", cpu=(1.0, 0.5)) as network:
        lines = network.run(4, [sys.executable, str(script)]).stdout.splitlines()
        assert "rate 80Mbit" in output("ip", "netns", "exec", "dgm1", "tc", "qdisc", "show", "dev", "eth0")
        with pytest.raises(ValueError, match="3 ranks cannot be shared equally by 2 machines"):
            network.command(3, ["true"])
    hosts = sorted(line for line in lines if line.startswith("rank"))
    places = ["rank 0 on m0", "rank 1 on m0", "rank 2 on m1", "rank 3 on m1"]
    assert hosts == [f"{place} with {1 if 'm0' in place else 0.5} cores" for place in places]
    assert "dgm" not in output("ip", "netns", "list")
