"""The placement of a plan: the machine and the device of every rank, as data that needs no cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRanks:
    """The ranks of a plan on equal devices of one machine.

    Attributes:
        machine: name of the machine in the resource file.
        type: type of the devices, such as "cpu" or "gpu".
        model: product name of the devices.
        memory: bytes of each device.
        count: number of devices of this type in the machine, used or not.
        ranks: the ranks, ascending.
        devices: for each rank, the number of its device among the `count` of the machine.
    """

    machine: str
    type: str
    model: str
    memory: int
    count: int
    ranks: tuple[int, ...]
    devices: tuple[int, ...]


def ranks_by_machine(placement: Iterable[PlacedRanks]) -> dict[str, tuple[int, ...]]:
    """Ranks on each machine, ascending, by the name of the machine, in the order of the machines."""
    ranks: dict[str, list[int]] = {}
    for part in placement:
        ranks.setdefault(part.machine, []).extend(part.ranks)
    return {machine: tuple(sorted(members)) for machine, members in ranks.items()}
