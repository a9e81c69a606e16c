"""Which logical rank each MPI process becomes, and what it is bound to.

Ranks of a program are placed by a plan: rank 2 beside rank 0 on one machine, ranks 1 and 3 on another. MPI
numbers its processes host by host. `distgraph run` starts them where the plan wants them and states the order
in DISTGRAPH_PLACEMENT; every process compares the host that it is on with the one that was checked for it.
Where something else has started the processes, as plain mpiexec, those of one host become the ranks that the
plan places on one machine, and rank 0 says so.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from distgraph.errors import RuntimeFault
from distgraph.ir.range_notation import parse_spans, spans
from distgraph.plan.placement import PlacedRanks, ranks_by_machine
from distgraph.runtime.job.job_files import PLAN_VARIABLE
from distgraph.runtime.launch.host_assignment import HostAssignment, assign_hosts
from distgraph.runtime.launch.hosts import Host
from distgraph.runtime.transport.process_arrangement import Arrangement

_MOST_BYTES: Final = 1 << 26
PLACEMENT_VARIABLE: Final = "DISTGRAPH_PLACEMENT"
"""Environment variable by which `distgraph run` states the ranks of each host, in the order of processes."""


def placement_text(assignment: HostAssignment, host_names: Mapping[str, str]) -> str:
    """Value of DISTGRAPH_PLACEMENT; `host_names` are those that hosts report, by their names in the list."""
    hosts = [
        [host_names[host.name], spans(ranks)]
        for host, ranks in zip(assignment.hosts, assignment.ranks, strict=True)
    ]
    return json.dumps({"hosts": hosts, "machines": dict(assignment.machines)})


def arrange(comm: Any, environ: Mapping[str, str] = os.environ) -> Arrangement:
    """What this process is in its job. Collective over `comm`, all processes of the job in MPI's order.

    Raises:
        RuntimeFault: processes have different plans, or a process is on another host than was planned.
    """
    path = environ.get(PLAN_VARIABLE, "")
    text = _read(path)
    everyone: list[tuple[str, str]] = comm.allgather((socket.gethostname(), sha256(text).hexdigest()))
    other = next((rank for rank, (_, digest) in enumerate(everyone) if digest != everyone[0][1]), None)
    if other is not None:
        raise RuntimeFault(
            f"processes 0 and {other} have different plans in {PLAN_VARIABLE}; a job has one plan: give all "
            "of them the same file"
        )
    placement = placement_in(text)
    hosts, process = [host for host, _ in everyone], int(comm.Get_rank())
    given = environ.get(PLACEMENT_VARIABLE)
    if given:
        order, notes = _checked_order(json.loads(given)["hosts"], hosts), tuple[str, ...]()
    else:
        order, notes = remapped(hosts, placement, path)
    rank = order[process]
    part = next((part for part in placement if rank in part.ranks), None)
    if part is None or _mixed(order, hosts, placement):
        return Arrangement(rank, notes=notes)
    number = part.devices[part.ranks.index(rank)]
    return Arrangement(rank, (number, part.count), part.type, notes)


def placement_in(text: bytes) -> tuple[PlacedRanks, ...]:
    """The placement in the file of a plan, or none where it is malformed: the engine says what is wrong.

    `Plan.load` would import what a rank without an engine does not need.
    """
    try:
        return tuple(
            PlacedRanks(**part | {name: parse_spans(part[name]) for name in ("ranks", "devices")})
            for part in json.loads(text or b"{}").get("placement", ())
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes() if path and Path(path).stat().st_size <= _MOST_BYTES else b""
    except OSError:  # as above
        return b""


def remapped(
    hosts: Sequence[str], placement: Sequence[PlacedRanks], plan: str
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Rank of each process, so that ranks which a plan places on one machine are on one host, and notes."""
    count, identity = len(hosts), tuple(range(len(hosts)))
    machines = ranks_by_machine(placement)
    names = list(dict.fromkeys(hosts))
    if len(names) == 1 or not placement or max(max(ranks) for ranks in machines.values()) >= count:
        notes = (f"note: plan {plan} is for {len(machines)} machines but all ranks run on {names[0]}",)
        return identity, notes if len(names) == 1 < len(machines) else ()
    try:
        slots = [Host(name, hosts.count(name)) for name in names]
        assignment = assign_hosts(count, slots, placement, f"plan {plan}")
        of_host = {host.name: ranks for host, ranks in zip(assignment.hosts, assignment.ranks, strict=True)}
    except RuntimeFault:
        of_host = _nearest(hosts, machines)
    queues = {name: iter(of_host[name]) for name in names}
    order = tuple(next(queues[host]) for host in hosts)
    return order, _notes(order, hosts, machines, plan)


def _nearest(hosts: Sequence[str], machines: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Ranks of each host where the plan does not fit: most ranks first, on the emptiest host."""
    free = {host: hosts.count(host) for host in dict.fromkeys(hosts)}
    ranks_of: dict[str, list[int]] = {host: [] for host in free}
    placed = {rank for ranks in machines.values() for rank in ranks}
    waiting = [rank for rank in range(len(hosts)) if rank not in placed]
    for ranks in sorted(machines.values(), key=lambda ranks: -len(ranks)):
        host = max(free, key=lambda host: free[host])
        fitting = ranks[: free[host]]
        waiting += ranks[len(fitting) :]
        ranks_of[host] += fitting
        free[host] -= len(fitting)
    for rank in sorted(waiting):
        host = next(host for host, left in free.items() if left)
        ranks_of[host].append(rank)
        free[host] -= 1
    return {host: tuple(sorted(ranks)) for host, ranks in ranks_of.items()}


def _notes(
    order: Sequence[int], hosts: Sequence[str], machines: Mapping[str, tuple[int, ...]], plan: str
) -> tuple[str, ...]:
    """That ranks have other numbers than their processes, and which ranks are not where they are planned."""
    host_of = dict(zip(order, hosts, strict=True))
    notes = []
    if list(order) != sorted(order):
        where = "; ".join(
            f"{host}: {spans(sorted(rank for rank in order if host_of[rank] == host))}"
            for host in dict.fromkeys(hosts)
        )
        notes.append(f"note: ranks are mapped to the processes as plan {plan} places them: {where}")
    for machine, ranks in machines.items():
        used = list(dict.fromkeys(host_of[rank] for rank in ranks))
        if len(used) > 1:
            notes.append(
                f"note: plan {plan} places ranks {spans(ranks)} on one machine, {machine}, but they run on "
                f"{', '.join(used)}; start {len(ranks)} processes on one host"
            )
    return tuple(notes)


def _checked_order(planned: Sequence[Sequence[str]], hosts: Sequence[str]) -> tuple[int, ...]:
    """Rank of each process of a job that the launcher has placed.

    Raises:
        RuntimeFault: a process is on another host than the launcher has checked for it.
    """
    pairs = [(name, rank) for name, ranks in planned for rank in parse_spans(ranks)]
    if len(pairs) != len(hosts):
        raise RuntimeFault(
            f"the launcher placed {len(pairs)} ranks but {len(hosts)} processes were started; start the job "
            "with distgraph run"
        )
    for (name, rank), host in zip(pairs, hosts, strict=True):
        if name != host:
            raise RuntimeFault(
                f"rank {rank} was planned on host {name} but was started on {host}; correct the list of hosts"
            )
    return tuple(rank for _, rank in pairs)


def _mixed(order: Sequence[int], hosts: Sequence[str], placement: Sequence[PlacedRanks]) -> bool:
    """Whether some host runs ranks of several machines of the plan, or of none."""
    machine_of = {rank: part.machine for part in placement for rank in part.ranks}
    pairs = {(host, machine_of.get(rank, "")) for rank, host in zip(order, hosts, strict=True)}
    return len(pairs) > len(set(hosts)) or any(not machine for _, machine in pairs)
