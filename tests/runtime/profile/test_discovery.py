"""`distgraph discover`: the resource file of the hosts at hand."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.files.command_line import invoke

from benchmarks.support import machines
from distgraph.errors import ResourceError
from distgraph.resources import load_cluster
from distgraph.runtime.launch.host_probe import GpuFacts, HostFacts, probe
from distgraph.runtime.profile import discovery
from distgraph.runtime.profile.discovery import LinkSpeed, description

GIB = 1 << 30


def test_hosts_become_machines(tmp_path: Path) -> None:
    gpus = (GpuFacts('A"100\n', 40 * GIB), GpuFacts('A"100\n', 40 * GIB), GpuFacts("T4", 16 * GIB))
    hosts = [
        replace(probe(), host="a.site", gpus=gpus),
        replace(probe(), host="b", cores=4, memory=8 * GIB, gpus=(), processor="x"),
        replace(probe(), host="c", cores=1, memory=2 * GIB, gpus=()),
    ]
    text = description(
        "lab", hosts, {1: LinkSpeed(2e-6, 4e9)}, {0: LinkSpeed(5e-5, 1e9), 1: LinkSpeed(5e-5, 5e8)}
    )
    path = tmp_path / "lab.yaml"
    path.write_text(text)
    cluster = load_cluster(path)
    assert [machine.name for machine in cluster.machines] == ["a_site", "b", "c"]
    assert [(device.type, device.memory) for device in cluster.devices] == [
        ("gpu", 40 * GIB), ("gpu", 40 * GIB), ("gpu", 16 * GIB), *[("cpu", 2 * GIB)] * 5,
    ]  # fmt: skip
    fastest = {link.bandwidth for link in cluster.links if link.kind == "ethernet"}
    assert fastest == {1e9, 5e8, None}
    inside = next(link for link in cluster.links if link.kind == "shared_memory")
    assert (inside.bandwidth, inside.latency) == (4e9, 1e-6)
    assert str(cluster.origin_of("machines[1].inside.bandwidth").kind) == "measured"


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_machines_are_discovered(tmp_path: Path) -> None:
    """Two machines at 400 Mbit/s: a file with both, and with links slower between than inside."""
    reason = machines.missing()
    if reason:
        pytest.skip(reason)
    path = tmp_path / "here.yaml"
    env = {**os.environ, "UCX_TLS": "posix,sysv,tcp,self", "UCX_NET_DEVICES": "all"}
    command = [sys.executable, "-m", "distgraph", "discover", "-o", str(path)]
    with machines.machines(2, "400mbit") as network:
        subprocess.run(network.command(4, command), env=env, capture_output=True, timeout=100, check=True)
    cluster = load_cluster(path)
    assert [machine.name for machine in cluster.machines] == ["m0", "m1"]
    speed = {link.kind: link.bandwidth or 0.0 for link in cluster.links}
    assert 1e5 < speed["ethernet"] < 60e6  # bytes/s of 50e6 and what a burst adds
    assert speed["shared_memory"] > 0


class Job:
    """Transport of one rank of a job on given hosts."""

    def __init__(self, rank: int, hosts: list[str]) -> None:
        self.rank, self.hosts = rank, hosts

    def gather_objects(self, value: HostFacts, root: int) -> list[HostFacts]:
        return [replace(value, host=host) for host in self.hosts]

    def broadcast_object(self, value: list[HostFacts], root: int) -> list[HostFacts]:
        return value

    def barrier(self) -> None: ...


def test_a_profile_describes_the_hosts_of_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lab.hosts.yaml"

    def described(rank: int, *hosts: str) -> bool:
        monkeypatch.setattr(discovery, "current_transport", lambda: Job(rank, list(hosts)))
        return discovery.describe_ranks(path)

    assert not described(0, "a", "a")
    assert described(1, "a", "a", "b")
    assert not path.exists()  # the first rank of a host writes
    assert described(2, "a", "a", "b")
    cluster = load_cluster(path)
    assert [(machine.name, len(machine.devices)) for machine in cluster.machines] == [("a", 2), ("b", 1)]
    with pytest.raises(ResourceError, match="ranks run on hosts a, b, a but the ranks of a host must be"):
        described(0, "a", "b", "a")


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    code, out = invoke("discover", "-o", str(tmp_path / "no" / "here.yaml"))
    assert (code, "no/here.yaml" in out) == (1, True), out
