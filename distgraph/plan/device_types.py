"""Device types: the kind of device of every rank of a job, from meshes, the plan and the strategy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from distgraph.errors import ResourceError
from distgraph.plan.placement import PlacedRanks
from distgraph.plan.strategy import DEVICES

DEVICE_TYPES = ["gpu", "xpu", "cpu", "tpu", "npu"]
"""Types of devices that a resource file may name; `register_device_type` adds to them."""


def register_device_type(name: str) -> None:
    """Declare a type of device for resource files.

    Raises:
        ResourceError: there is one of this name.
    """
    if name in DEVICE_TYPES:
        raise ResourceError(f"device type {name} is declared twice; choose another name")
    DEVICE_TYPES.append(name)


def device_types(
    size: int,
    ranks: Collection[int],
    needed: Mapping[int, str],
    device: str | None,
    placement: Sequence[PlacedRanks] = (),
) -> tuple[str, ...]:
    """Type of the device of every rank.

    It is what the meshes of the rank need, else `device`, else what the plan places the rank on, else "cpu".
    A plan for one type of device also runs on the host, as long as no mesh of the program needs a type.

    Args:
        size: number of ranks of the job.
        ranks: those that programs use; the others are idle.
        needed: rank -> type that its meshes need.
        device: that of the strategy; None where it says none.
        placement: that of the plan; empty without one.

    Raises:
        ResourceError: meshes, plan and strategy contradict one another, or distgraph cannot run a rank on a
            device of its type.
    """
    placed = {rank: part for part in placement for rank in part.ranks}
    follows_plan = bool(needed) or len({part.type for part in placement}) > 1
    types = []
    for rank in range(size):
        part = placed.get(rank)
        _check(rank, needed.get(rank), device, part)
        default = part.type if part is not None and follows_plan else "cpu"
        types.append(needed.get(rank) or device or default)
    if device is not None and ranks and device not in {types[rank] for rank in ranks}:
        raise ResourceError(
            f"Strategy(device={device!r}) but the meshes of all ranks need devices of another type: rank "
            f"{min(ranks)} a {types[min(ranks)]} device; leave device out of Strategy, or device_type out of "
            "the meshes"
        )
    for rank, kind in enumerate(types):
        if kind not in DEVICES:
            raise ResourceError(
                f"rank {rank} needs a {kind} device but ranks run on {', '.join(DEVICES)}; declare it with "
                "register_device (docs/extending.md), or run all ranks on the host with "
                'Strategy(device="cpu") and meshes without a device_type'
            )
    return tuple(types)


def _check(rank: int, needed: str | None, device: str | None, part: PlacedRanks | None) -> None:
    """Raise ResourceError if what a plan says of a rank contradicts its meshes or the strategy."""
    if part is None:
        return
    where = f"the plan places rank {rank} on a {part.type} device of {part.machine}"
    if needed not in (None, part.type):
        raise ResourceError(
            f"{where} but its meshes need a {needed} device; change the device_type of the meshes, or make a "
            "plan for them"
        )
    if device not in (None, part.type):
        raise ResourceError(
            f"{where} but Strategy(device={device!r}); leave device out, or make a plan for {device} devices"
        )
