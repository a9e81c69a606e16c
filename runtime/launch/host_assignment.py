"""Which host runs each rank of a job: the machines of a plan are assigned to the hosts that there are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from distgraph.errors import RuntimeFault
from distgraph.ir.range_notation import spans
from distgraph.plan.placement import PlacedRanks, ranks_by_machine
from distgraph.runtime.launch.hosts import Host, merged, short_name


@dataclass(frozen=True, slots=True)
class HostAssignment:
    """The host of every rank.

    Attributes:
        hosts: the hosts that are used, with the number of ranks that run there, in the order of the list.
        ranks: for each of them its ranks, ascending.
        machines: machine of the plan -> host; empty without a placement.
    """

    hosts: tuple[Host, ...]
    ranks: tuple[tuple[int, ...], ...]
    machines: Mapping[str, str]

    @property
    def order(self) -> tuple[int, ...]:
        """Rank of each process, where the processes fill the hosts one after the other."""
        return tuple(itertools.chain.from_iterable(self.ranks))


def assign_hosts(
    count: int,
    hosts: Sequence[Host],
    placement: Sequence[PlacedRanks] = (),
    plan: str = "the plan",
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> HostAssignment:
    """Assign ranks to hosts.

    Without a placement rank i gets slot i of the list. With one, the ranks of a machine of the plan run on
    the host of its name; where no host has the name of a machine, on hosts in the order of the list, or, if
    the machines of the plan are equal, on the hosts whose slots suffice. Ranks that the plan does not place
    get the slots that are left.

    Args:
        count: number of ranks.
        hosts: the list of hosts and slots.
        placement: of the plan.
        plan: name of the plan, for messages.
        aliases: name that a host reports itself, by its name in the list.

    Raises:
        RuntimeFault: fewer slots than ranks, in all or on a host; a machine of the plan has no host.
    """
    check_slots(count, hosts)
    each = merged(hosts)
    machines = _machines(placement, each, plan, aliases) if placement else {}
    by_host: dict[str, list[int]] = {host.name: [] for host in each}
    for machine, ranks in ranks_by_machine(placement).items():
        by_host[machines[machine]] += ranks
    placed = {rank for ranks in by_host.values() for rank in ranks}
    slots = iter([host.name for host in hosts for _ in range(host.slots)])
    capacity = {host.name: host.slots for host in each}
    for rank in (rank for rank in range(count) if rank not in placed):
        name = next(name for name in slots if not placement or len(by_host[name]) < capacity[name])
        by_host[name].append(rank)
    used = [host for host in each if by_host[host.name]]
    return HostAssignment(
        tuple(Host(host.name, len(by_host[host.name])) for host in used),
        tuple(tuple(sorted(by_host[host.name])) for host in used),
        machines,
    )


def check_slots(count: int, hosts: Sequence[Host]) -> None:
    """Raise RuntimeFault if hosts have fewer slots than a job has ranks."""
    total = sum(host.slots for host in hosts)
    if total < count:
        named = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise RuntimeFault(
            f"run: {count} ranks need {count} slots but hosts {named} have {total}; rank {total} has none; "
            "give more hosts or slots"
        )


def _machines(
    placement: Sequence[PlacedRanks], hosts: Sequence[Host], plan: str, aliases: Mapping[str, str]
) -> dict[str, str]:
    """Host of each machine of a placement; every host serves one machine at most."""
    ranks = ranks_by_machine(placement)
    names = {alias: name for name, reported in aliases.items() for alias in (reported, short_name(reported))}
    names |= {alias: host.name for host in hosts for alias in (short_name(host.name), host.name)}
    assigned = {machine: names[machine] for machine in ranks if machine in names}
    absent = [machine for machine in ranks if machine not in assigned]
    if assigned and absent:
        raise RuntimeFault(
            f"run: {plan} places rank {ranks[absent[0]][0]} on machine {absent[0]}, which is not among hosts "
            f"{', '.join(host.name for host in hosts)}; correct the list of hosts"
        )
    if not assigned:
        assigned = _in_order(placement, hosts, plan)
    slots = {host.name: host.slots for host in hosts}
    for machine, members in ranks.items():
        host = assigned[machine]
        if slots[host] < len(members):
            raise RuntimeFault(
                f"run: {plan} places ranks {spans(members)} on machine {machine} but host {host} has "
                f"{slots[host]} slots; rank {members[slots[host]]} has none; give it {len(members)} slots"
            )
    return assigned


def _in_order(placement: Sequence[PlacedRanks], hosts: Sequence[Host], plan: str) -> dict[str, str]:
    """Hosts for machines of other names: the k-th for the k-th, or any that fits if all are equal."""
    ranks = ranks_by_machine(placement)
    if len(ranks) > len(hosts):
        machine = list(ranks)[len(hosts)]
        raise RuntimeFault(
            f"run: {plan} places ranks on {len(ranks)} machines but there are {len(hosts)} hosts; rank "
            f"{ranks[machine][0]} on machine {machine} has none; give more hosts"
        )
    kinds: dict[str, set[tuple[str, str, int, int]]] = {}
    for part in placement:
        kinds.setdefault(part.machine, set()).add((part.type, part.model, part.memory, part.count))
    if any(kind != next(iter(kinds.values())) for kind in kinds.values()):
        return dict(zip(ranks, (host.name for host in hosts), strict=False))
    free, assigned = list(hosts), {}
    for machine in sorted(ranks, key=lambda machine: -len(ranks[machine])):
        fits = [host for host in free if host.slots >= len(ranks[machine])]
        host = fits[0] if fits else max(free, key=lambda host: host.slots)
        free.remove(host)
        assigned[machine] = host.name
    return assigned
