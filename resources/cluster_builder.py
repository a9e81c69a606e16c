"""Build a Cluster from a validated resource file: repeat machines, name nodes, generate links and network."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distgraph.errors import ResourceError
from distgraph.errors.arguments import Count, checked_arguments
from distgraph.resources.cluster import Cluster, Device, Link, Machine, MeasuredTable, Network, Switch
from distgraph.resources.topology import TreeLevel, Wire, Wiring, pcie_pairs, star, torus, tree

if TYPE_CHECKING:
    from distgraph.resources.schema import (
        InsideEntry,
        MachineEntry,
        MeasuredEntry,
        NetworkEntry,
        ResourceFile,
    )


def build_cluster(entry: ResourceFile, file: str) -> Cluster:
    """The cluster that a checked resource file describes.

    Raises:
        ResourceError: the file contradicts itself (torus shape against device count, a NIC too few).
    """
    machines: list[Machine] = []
    devices: list[Device] = []
    switches: list[Switch] = []
    links: list[Link] = []
    names = set[str]()
    for template, machine_entry in enumerate(entry.machines):
        origin = f"machines[{template}]"
        for copy in range(machine_entry.count):
            base = machine_entry.name or f"m{template}_"
            name = f"{base}{copy}" if machine_entry.count > 1 or machine_entry.name is None else base
            if name in names:
                raise ResourceError(
                    f"{file}: {origin}.name: {name} is the name of two machines; give them different names"
                )
            names.add(name)
            machine, new_devices, wiring = _build_machine(
                machine_entry, name, len(machines), len(devices), len(links), template, origin, file
            )
            machines.append(machine)
            devices.extend(new_devices)
            links.extend(wiring[0])
            switches.extend(Switch(node, machine.index) for node in wiring[1])
    network, (net_links, net_switches) = _build_network(entry, machines, devices, file)
    links.extend(net_links)
    switches.extend(Switch(node, None) for node in net_switches)
    tables = [_table(table, devices, f"{file}: measured[{i}]") for i, table in enumerate(entry.measured)]
    return Cluster(
        entry.name, file, tuple(machines), tuple(devices), tuple(switches), tuple(links), network,
        entry.launch, tuple(tables), entry.origins(), entry.errors,
    )  # fmt: skip


def _table(entry: MeasuredEntry, devices: list[Device], where: str) -> MeasuredTable:
    last = max((device for group in entry.groups or [] for device in group), default=0)
    if last >= len(devices):
        raise ResourceError(
            f"{where}.groups: device {last}, but the devices are 0 to {len(devices) - 1}; name others, or "
            "leave groups out where the table holds for any of its shape"
        )
    for group in entry.groups or []:
        device_counts = Counter(devices[device].machine for device in group)
        if len(device_counts) != entry.machines or set(device_counts.values()) != {entry.devices_per_machine}:
            raise ResourceError(
                f"{where}.groups: {group} has {sorted(device_counts.values())} devices on its machines, but "
                f"the table is for {entry.machines} with {entry.devices_per_machine} each; name others, or "
                "change that"
            )
    return MeasuredTable(
        entry.collective,
        entry.machines,
        entry.devices_per_machine,
        tuple(entry.sizes),
        tuple(entry.times),
        entry.model,
        None if entry.groups is None else tuple(map(tuple, entry.groups)),
        None if entry.busy is None else tuple(entry.busy),
    )


def _build_machine(
    entry: MachineEntry,
    name: str,
    index: int,
    first_device: int,
    first_link: int,
    template: int,
    origin: str,
    file: str,
) -> tuple[Machine, list[Device], Wiring]:
    devices: list[Device] = []
    for number, group in enumerate(entry.devices):
        where = f"{origin}.devices" + (f"[{number}]" if len(entry.devices) > 1 else "")
        for _ in range(group.count):
            local = len(devices)
            devices.append(
                Device(
                    first_device + local, f"{name}/{group.type}{local}", index, local, group.type,
                    group.model, group.memory, group.peak, group.measured,
                    group.memory_bandwidth, where, group.compute,
                )
            )  # fmt: skip
    nodes = [device.node for device in devices]
    links, switches = _inside(entry.inside, nodes, name, origin, file)
    nics, nic_of, attached = _nics(entry, nodes, name, f"{name}/host" in switches, origin, file)
    links += attached
    machine = Machine(
        index, name, tuple(device.index for device in devices), nics, nic_of, template, first_link, len(links)
    )
    return machine, devices, (links, switches)


def _nics(
    entry: MachineEntry, nodes: list[str], name: str, bridged: bool, origin: str, file: str
) -> tuple[tuple[str, ...], tuple[str | None, ...], list[Link]]:
    """The machine's NICs, the NIC of each device, and the links between them."""
    if entry.nics is None:
        return (), (None,) * len(nodes), []
    if entry.nics.count > len(nodes):
        raise ResourceError(
            f"{file}: {origin}.nics.count: {entry.nics.count} NICs for {len(nodes)} devices; "
            "give at most one NIC per device (sum the bandwidth of those that one device drives)"
        )
    nics = tuple(f"{name}/nic{number}" for number in range(entry.nics.count))
    nic_of = tuple(nics[local * len(nics) // len(nodes)] for local in range(len(nodes)))
    attach = entry.nics.attach
    wire = Wire(attach.kind, attach.bandwidth, attach.latency, f"{origin}.nics.attach")
    # With PCIe switches the NICs are attached to the host bridge, otherwise each device to its NIC.
    if bridged:
        return nics, nic_of, [wire.join(f"{name}/host", nic) for nic in nics]
    return nics, nic_of, [wire.join(node, nic) for node, nic in zip(nodes, nic_of, strict=True)]


def _inside(entry: InsideEntry | None, nodes: list[str], name: str, origin: str, file: str) -> Wiring:
    if entry is None:
        return [], []
    wire = Wire(entry.kind, entry.bandwidth, entry.latency, f"{origin}.inside")
    match entry.topology:
        case "full":
            return star(nodes, f"{name}/switch", wire)
        case "ring":
            return torus(nodes, (len(nodes),), wire)
        case "torus":
            shape = entry.shape or []
            _check_product(shape, len(nodes), "devices in the machine", f"{file}: {origin}.inside.shape")
            return torus(nodes, shape, wire)
        case "tree":
            return tree(nodes, [entry.bandwidth] * len(nodes), entry.levels or (), f"{name}/switch", wire)
        case "pcie_pairs":
            return pcie_pairs(nodes, f"{name}/", wire, entry.host_bandwidth or entry.bandwidth)
    links = []
    for number, pair in enumerate(entry.links or ()):
        if max(pair[:2]) >= len(nodes) or pair[0] == pair[1]:
            raise ResourceError(
                f"{file}: {origin}.inside.links[{number}]: expected two different devices below "
                f"{len(nodes)}, got {pair}"
            )
        links.append(wire.join(nodes[pair[0]], nodes[pair[1]], pair[2] if len(pair) == 3 else 1))
    if entry.host is None:
        return links, []
    bus = Wire(entry.host.kind, entry.host.bandwidth, entry.host.latency, f"{origin}.inside.host")
    bridged, switches = pcie_pairs(nodes, f"{name}/", bus, bus.bandwidth)
    return links + bridged, switches


def _check_product(shape: list[int], count: int, what: str, where: str) -> None:
    if math.prod(shape) != count:
        product = " x ".join(map(str, shape))
        raise ResourceError(
            f"{where}: {product} = {math.prod(shape)} places but {count} {what}; make them equal"
        )


def _build_network(
    entry: ResourceFile, machines: list[Machine], devices: list[Device], file: str
) -> tuple[Network, Wiring]:
    net = entry.network
    if net is None:
        if len(machines) > 1:
            raise ResourceError(
                f"{file}: network: missing, but there are {len(machines)} machines; say how they are joined"
            )
        return Network(), ([], [])
    if net.over == "devices":
        return _device_torus(net, entry, machines, devices, file)
    for machine in machines:
        if not machine.nics:
            raise ResourceError(
                f"{file}: machines[{machine.template}].nics: missing, but the network joins the "
                "machines' NICs; add nics"
            )
    cables = [entry.machines[machine.template].nics for machine in machines for _ in machine.nics]
    nodes = [nic for machine in machines for nic in machine.nics]
    if net.topology in ("switch", "tree"):
        tree_links, switches = tree(
            nodes, [cable.bandwidth if cable else None for cable in cables],
            _per_nic(net.levels or (), machines, file), "net/switch", Wire(net.kind, None, None, ""),
        )  # fmt: skip
        links = _with_cable_latency(tree_links, entry, machines)
        return Network(net.topology), (links, switches)
    shape = net.shape or [len(machines)]
    _check_product(shape, len(machines), "machines", f"{file}: network.shape")
    planes = {len(machine.nics) for machine in machines}
    if len(planes) > 1 or len({cable.bandwidth if cable else None for cable in cables}) > 1:
        raise ResourceError(
            f"{file}: network: a {net.topology} over machines needs equal nics on all of them; use a switch"
        )
    first = entry.machines[0].nics
    wire = Wire(
        net.kind, first.bandwidth if first else None, first.latency if first else None, "machines[0].nics"
    )
    links = []
    for plane in range(planes.pop()):
        links += torus([machine.nics[plane] for machine in machines], shape, wire)[0]
    members = tuple(machine.index for machine in machines)
    return Network(net.topology, "machines", tuple(shape), members), (links, [])


def _per_nic(levels: Sequence[TreeLevel], machines: list[Machine], file: str) -> Sequence[TreeLevel]:
    """The levels with the lowest one counted in NICs; a resource file counts it in machines."""
    if not levels:
        return levels
    counts = {len(machine.nics) for machine in machines}
    if len(counts) > 1:
        raise ResourceError(
            f"{file}: network.levels: the machines have {sorted(counts)} NICs, so a switch "
            "level would split one; "
            "give all machines equally many or use topology switch"
        )
    return [dataclasses.replace(levels[0], children=levels[0].children * counts.pop()), *levels[1:]]


def _with_cable_latency(links: list[Link], entry: ResourceFile, machines: list[Machine]) -> list[Link]:
    """Links whose lower end is a NIC, with the latency and the origin of its machine's nics entry."""
    template_of_nic = {nic: machine.template for machine in machines for nic in machine.nics}
    result = []
    for link in links:
        template = template_of_nic.get(link.source)
        if template is None:
            result.append(dataclasses.replace(link, origin="network.levels[]"))
            continue
        nics = entry.machines[template].nics
        latency = nics.latency if nics else None
        result.append(dataclasses.replace(link, latency=latency, origin=f"machines[{template}].nics"))
    return result


def _device_torus(
    net: NetworkEntry, entry: ResourceFile, machines: list[Machine], devices: list[Device], file: str
) -> tuple[Network, Wiring]:
    shape = net.shape or [len(devices)]
    _check_product(shape, len(devices), "devices", f"{file}: network.shape")
    block = net.block or [1] * (len(shape) - 1) + [len(machines[0].devices)]
    per_machine = {len(machine.devices) for machine in machines}
    fits = all(length % part == 0 for length, part in zip(shape, block, strict=True))
    if per_machine != {math.prod(block)} or not fits:
        raise ResourceError(
            f"{file}: network.block: expected a block of the torus {shape} that holds the "
            f"{sorted(per_machine)} devices of a machine, got {block}"
        )
    members = _torus_members(machines, shape, block)
    wire = Wire(net.kind, net.bandwidth, net.latency, "network")
    links, _ = torus([devices[member].node for member in members], shape, wire)
    if any(machine.inside is not None for machine in entry.machines):
        raise ResourceError(
            f"{file}: machines[].inside: the network joins the devices already; remove inside"
        )
    network = Network(
        net.topology, "devices", tuple(shape), tuple(members), tuple(net.rings), net.reconfigurable
    )
    return network, (links, [])


def _torus_members(machines: Sequence[Machine], shape: Sequence[int], block: Sequence[int]) -> list[int]:
    """Device at each position of a torus in which every machine holds a block."""
    members = [0] * math.prod(shape)
    grid = [length // part for length, part in zip(shape, block, strict=True)]
    for machine in machines:
        corner = _unravel(machine.index, grid)
        for local, device in enumerate(machine.devices):
            inner = _unravel(local, block)
            place = 0
            for length, part, outer, offset in zip(shape, block, corner, inner, strict=True):
                place = place * length + outer * part + offset
            members[place] = device
    return members


@checked_arguments(ResourceError)
def with_torus_shape(cluster: Cluster, shape: Sequence[Count]) -> Cluster:
    """The first machines of a cluster, their devices wired as a torus of another shape.

    Numbers of links and rings stay those of their axes. Every machine holds a block of the torus, as nearly
    cubic as divides the shape.

    Args:
        cluster: whose network is a torus of devices.
        shape: as many lengths as the torus has axes, of at most as many devices.

    Raises:
        ResourceError: another network; another number of axes; more devices than the cluster has, or a number
            or shape that blocks of its machines do not fill.

    Example:
        >>> from distgraph.resources.load import load_cluster
        >>> cluster = with_torus_shape(load_cluster("tpu_v4_16x16"), (32, 8))
        >>> cluster.network.shape, len(cluster.devices), len(cluster.links)
        ((32, 8), 256, 512)
    """
    network, requested = cluster.network, " x ".join(map(str, shape))
    if network.over != "devices" or network.topology != "torus":
        raise ResourceError(
            f"cluster {cluster.name}: its network is no torus of devices ({network.topology} over "
            f"{network.over}), so it has no shape {requested}; use a cluster with a torus"
        )
    size, present = math.prod(shape), " x ".join(map(str, network.shape))
    per_machine = len(cluster.machines[0].devices)
    if len(shape) != len(network.shape) or min(shape) < 1 or size > len(cluster.devices):
        raise ResourceError(
            f"cluster {cluster.name}: its torus is {present}, and {requested} does not fit; give "
            f"{len(network.shape)} lengths from 1 up, of at most {len(cluster.devices)} devices"
        )
    parts = [[part for part in range(1, per_machine + 1) if length % part == 0] for length in shape]
    blocks = [block for block in itertools.product(*parts) if math.prod(block) == per_machine]
    if not blocks:
        raise ResourceError(
            f"cluster {cluster.name}: a torus {requested} has no blocks of the {per_machine} devices of a "
            f"machine; give lengths whose divisors multiply to {per_machine}"
        )
    machines = cluster.machines[: size // per_machine]
    members = _torus_members(machines, shape, min(blocks, key=max))
    devices = cluster.devices[:size]
    wires = [Wire(link.kind, link.bandwidth, link.latency, link.origin) for link in cluster.links[:1]]
    wire = next(iter(wires), Wire("link", None, None, "network"))  # of one device there is no link
    links, _ = torus([devices[member].node for member in members], shape, wire)
    tables = [table for table in cluster.measured if table.groups is None]
    return dataclasses.replace(
        cluster,
        machines=machines,
        devices=devices,
        links=tuple(links),
        network=dataclasses.replace(network, shape=tuple(shape), members=tuple(members)),
        measured=tuple(tables),
    )


def _unravel(index: int, shape: Sequence[int]) -> list[int]:
    place = []
    for length in reversed(shape):
        index, coordinate = divmod(index, length)
        place.append(coordinate)
    return place[::-1]
