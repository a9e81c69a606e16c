"""Discovery of a cluster: what hosts have, and how fast their links are, as a resource file.

Every rank reports its host (`runtime/launch/host_probe.py`: cores, memory, GPUs by NVML). The first two ranks
of a host measure the link inside it; the first ranks of two hosts measure the network, one pair of hosts at a
time. Rank 0 writes the file. Compute rates are not measured: `distgraph profile --cluster FILE` adds them.

A link is measured by messages there and back, of which the fastest count: half of the time of small ones is
the latency, and the bytes of large ones over the rest of half of their time are the bandwidth. A network card
has the bandwidth of its fastest pair.
"""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from distgraph.errors import ResourceError
from distgraph.resources import load_cluster
from distgraph.runtime.launch.host_probe import HostFacts, probe
from distgraph.runtime.launch.mpi_rank import current_transport
from distgraph.serialization.atomic_files import write_atomically

_SMALL, _LARGE = 8, 1 << 20  # bytes of a message
_ROUNDS: Final = 20
_LARGE_ROUNDS: Final = 4
_ATTACHED: Final = 1e-7  # seconds from a device to its network card: part of the measured latency
_ORIGIN: Final = "measured; distgraph discover"


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """A measured link: seconds of an empty message in one direction, and bytes per second."""

    latency: float
    bandwidth: float


def measure_hosts() -> tuple[list[HostFacts], dict[int, LinkSpeed], dict[int, LinkSpeed]]:
    """Facts and links of the hosts of this job. Collective; the same on every rank.

    Returns:
        Hosts in the order of their first ranks; by the number of a host the link inside it, where it has two
        ranks, and the fastest link to another host, where there are several.
    """
    transport = current_transport()
    if transport is None:
        return [probe()], {}, {}
    host_facts: list[HostFacts] = transport.broadcast_object(transport.gather_objects(probe(), 0), 0)
    names = list(dict.fromkeys(facts.host for facts in host_facts))
    ranks = [[rank for rank, facts in enumerate(host_facts) if facts.host == name] for name in names]
    inside = {
        number: _link(transport, members[0], members[1])
        for number, members in enumerate(ranks)
        if len(members) > 1
    }
    outside: dict[int, LinkSpeed] = {}
    for here, there in itertools.combinations(range(len(names)), 2):
        link = _link(transport, ranks[here][0], ranks[there][0])
        for number in (here, there):
            before = outside.get(number)
            if before is None or link.bandwidth > before.bandwidth:
                outside[number] = link
    return [host_facts[members[0]] for members in ranks], inside, outside


def describe_ranks(path: Path) -> bool:
    """Write a resource file with a machine for each host of this job, with one CPU device for each rank.

    Collective. Every host gets the file; its numbers are missing, except for memory.

    Args:
        path: of the file.

    Returns:
        Whether there are several hosts; no file is written for one.

    Raises:
        ResourceError: ranks of a host do not follow each other, so that they are no consecutive devices.
    """
    transport = current_transport()
    assert transport is not None
    host_facts: list[HostFacts] = transport.broadcast_object(transport.gather_objects(probe(), 0), 0)
    groups = [list(group) for _, group in itertools.groupby(host_facts, key=lambda facts: facts.host)]
    names = [group[0].host for group in groups]
    if len(names) == 1:
        return False
    if len({*names}) < len(names):
        raise ResourceError(
            f"profile: ranks run on hosts {', '.join(facts.host for facts in host_facts)} but the ranks of a "
            "host must be consecutive; start them host by host, or give a file with --cluster"
        )
    hosts = [replace(group[0], cores=len(group), gpus=()) for group in groups]
    if transport.rank in itertools.accumulate(map(len, groups[:-1]), initial=0):
        write_atomically(path, description(_word(path.stem.partition(".")[0]), hosts, {}, {}), ResourceError)
    transport.barrier()
    return True


def _link(transport: Any, first: int, second: int) -> LinkSpeed:
    """The link between two ranks. Collective over all ranks; the others wait."""
    seconds = [_there_and_back(transport, first, second, _SMALL) for _ in range(_ROUNDS)]
    long = [_there_and_back(transport, first, second, _LARGE) for _ in range(_LARGE_ROUNDS)]
    transport.barrier()
    latency = min(seconds) / 2
    speed = LinkSpeed(latency, _LARGE / max(min(long) / 2 - latency, 1e-9))
    shared: LinkSpeed = transport.broadcast_object(speed, first)
    return shared


def _there_and_back(transport: Any, first: int, second: int, size: int) -> float:
    """Seconds of a message from one rank to another and back; of no meaning on other ranks."""
    buffer, rank = np.zeros(size, np.uint8), transport.rank
    start = time.perf_counter()
    if rank == first:
        back = transport.recv(buffer, second, 1)
        transport.send(np.ones(size, np.uint8), second, 0).wait()
        back.wait()
    elif rank == second:
        transport.recv(buffer, first, 0).wait()
        transport.send(buffer, first, 1).wait()
    return max(time.perf_counter() - start, 1e-9)


def description(
    name: str, hosts: Sequence[HostFacts], inside: dict[int, LinkSpeed], outside: dict[int, LinkSpeed]
) -> str:
    """A resource file as text; arguments as `measure_hosts` returns them."""
    lines = [f"name: {name}", f"about: {len(hosts)} hosts, found by distgraph discover", "machines:"]
    for number, facts in enumerate(hosts):
        lines += _machine(facts, inside.get(number), outside.get(number), len(hosts) > 1)
    if len(hosts) > 1:
        lines.append("network: {topology: switch, kind: ethernet}")
    return "\n".join([*lines, ""])


def _machine(
    facts: HostFacts, inside: LinkSpeed | None, outside: LinkSpeed | None, joined: bool
) -> list[str]:
    lines = [f"  - name: {_word(facts.host)}", "    devices:"]
    if facts.gpus:
        for (model, memory), group in itertools.groupby((gpu.name, gpu.memory) for gpu in facts.gpus):
            lines.append(_devices(len(list(group)), "gpu", model, memory))
    else:
        lines.append(_devices(facts.cores, "cpu", facts.processor, facts.memory // facts.cores))
    if max(len(facts.gpus), 0 if facts.gpus else facts.cores) > 1:
        kind = "pcie" if facts.gpus else "shared_memory"
        numbers = "" if inside is None or facts.gpus else _numbers(inside.bandwidth, inside.latency / 2)
        lines.append(f"    inside: {{topology: full, kind: {kind}{numbers}}}")
    if joined:
        latency = 0.0 if outside is None else max(outside.latency / 2 - _ATTACHED, 0)
        cable = "" if outside is None else _numbers(outside.bandwidth, latency)
        attached = f"kind: memory, latency: {_ATTACHED * 1e6:g} us"
        if inside is not None:
            attached += f", bandwidth: {inside.bandwidth:.4g} B/s"
        lines.append(f"    nics: {{count: 1, kind: ethernet{cable}, attach: {{{attached}}}}}")
    return lines


def _devices(count: int, kind: str, model: str, memory: int) -> str:
    return f"      - {{count: {count}, type: {kind}, model: {_quoted(model)}, memory: {memory} B}}"


def _numbers(bandwidth: float, latency: float) -> str:
    return f", bandwidth: {bandwidth:.4g} B/s, latency: {latency * 1e6:.4g} us, origin: {_ORIGIN}"


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", text) or "host"


def _quoted(text: str) -> str:
    return '"' + re.sub(r"[^ -!#-\[\]-~]", "", text) + '"'


def discover_rank(output: Path) -> None:
    """Measure the hosts of this job; rank 0 writes the resource file.

    Raises:
        ResourceError: it cannot be written, or is not what it should be.
    """
    transport = current_transport()
    text = description(_word(output.stem), *measure_hosts())
    if transport is None or transport.rank == 0:
        write_atomically(output, text, ResourceError)
        load_cluster(output)


if __name__ == "__main__":
    discover_rank(Path(sys.argv[1]))
