"""Messages between stages that lie alike are priced once: the same seconds, bytes and link as priced anew."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import numpy as np
import pytest
from support.files.clusters import cluster_of, machine
from support.programs.forecasts import chain, machines

from distgraph.ir.graph import Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.redistribution.tiles import tiles_between
from distgraph.resources.cluster import Cluster
from distgraph.resources.collective_cost import CollectiveCost, shared_cost
from distgraph.resources.mesh_communication import MeshCommunication, representative_devices
from distgraph.runtime.forecast.communication_cost import Message, TrafficCost
from distgraph.runtime.program.build import Build

FAST = {"kind": "infiniband", "bandwidth": "30 GB/s", "latency": "3 us"}
ATTACH = {"kind": "pcie", "bandwidth": "20 GB/s", "latency": "2 us"}
NETWORKS: list[dict[str, Any]] = [
    {"topology": "switch", "kind": "ethernet"},
    {"topology": "tree", "kind": "ethernet", "levels": [{"children": 2, "oversubscription": 2}]},
]


def mixed(network: dict[str, Any]) -> Cluster:
    """Three kinds of machines: 4 x 4 devices in a ring, 3 x 2 on fast cables, 2 x 4 on PCIe switches."""
    ring = machine(4, "r", inside={"topology": "ring", "kind": "link", "bandwidth": "50 GB/s"})
    cables = machine(2, "f", nics={**FAST, "attach": ATTACH})
    pairs = machine(4, "p", inside={"topology": "pcie_pairs", "kind": "pcie", "bandwidth": "12 GB/s"})
    machines = [{**ring, "count": 4}, {**cables, "count": 3}, {**pairs, "count": 2}]
    for entry in machines:
        entry["inside"]["latency"] = "1 us"
    if network["topology"] == "tree":
        network = {**network, "levels": [{**network["levels"][0], "latency": "4 us"}]}
    return cluster_of({"name": "mixed", "launch": "10 us", "machines": machines, "network": network})


def row(stages: int, size: int, width: int) -> Build:
    """Layers on meshes of `size` x 2 ranks, transposed on every other one, with weights split on some."""
    meshes = [
        ProcessMesh.grid(2 * size * i, **({"dp": size, "tp": 2} if i % 3 else {"tp": 2, "dp": size}))
        for i in range(stages)
    ]
    weights = [[None, "tp"] if i % 2 else ["tp", None] for i in range(stages)]
    return chain(12, [width] * (stages + 1), meshes, 2, weights=weights)


def anew(build: Build, op: Op, cluster: Cluster, devices: list[int]) -> Message:
    """An exchange of tiles between the devices themselves, with costs that know nothing."""
    source, target = (build.lowered.attrs[value.name] for value in (op.operands[0], op.result))
    shape, placed = op.result.shape, dict[tuple[int, int], float]()
    for tile in tiles_between(shape, source, target):
        if not tile.local:
            pair = devices[tile.source_rank], devices[tile.target_rank]
            placed[pair] = placed.get(pair, 0.0) + 4 * tile.volume
    cost = CollectiveCost(cluster)
    largest = max(placed, key=lambda pair: placed[pair])
    links = [cost.router.link(directed) for directed in cost.router.route(*largest)]
    link = min(links, key=lambda link: link.bandwidth or 0.0).kind
    between = any(cluster.devices[a].machine != cluster.devices[b].machine for a, b in placed)
    return Message("send", cost.exchange(placed), sum(placed.values()), link, between=between)


@pytest.mark.parametrize("network", NETWORKS, ids=["switch", "tree"])
@pytest.mark.parametrize("width", [16, 15])
@pytest.mark.parametrize("seed", range(6))
def test_messages_cost_what_they_cost_priced_for_each_border_anew(
    network: dict[str, Any], width: int, seed: int
):
    cluster, random = mixed(network), np.random.default_rng(seed)
    stages, size = [(7, 2), (5, 3), (15, 1)][seed % 3]
    build = row(stages, size, width)
    devices = [int(device) for device in random.permutation(30)]
    if seed % 2:  # in order, but for a few
        devices = list(range(30))
        a, b = random.choice(30, 2, replace=False)
        devices[a], devices[b] = devices[b], devices[a]
    traffic = TrafficCost(build.lowered, cluster, devices)
    sent = [op for op in build.lowered.ops if op.kind in ("comm.transfer", "comm.permute")]
    assert len(sent) >= 2 * (stages - 1)
    for op in sent:
        assert traffic.exchange(op) == anew(build, op, cluster, devices)


def test_devices_that_send_themselves_are_at_work_for_their_part_of_an_exchange():
    build = row(2, 1, 16)
    sent = [op for op in build.lowered.ops if op.kind in ("comm.transfer", "comm.permute")]
    assert sent
    itself = {"message": "1 us"}
    for host, sizes, share in (
        (itself, [4], 1.0),
        (itself, [1, 1, 1, 1], 0.0),
        (itself | {"network_busy": 0.5}, [1, 1, 1, 1], 0.5),
        ({}, [4], 0.0),
    ):
        entries = [machine(size, f"m{i}") for i, size in enumerate(sizes)]
        for entry in entries:
            entry["devices"] |= {"compute": {"host": host}}
        document = {
            "name": "equal",
            "launch": "10 us",
            "machines": entries,
            "network": {"topology": "switch"},
        }
        traffic = TrafficCost(build.lowered, cluster_of(document), range(4))
        for found in map(traffic.exchange, sent):
            assert found.seconds > 0
            assert found.busy == share * found.seconds


def test_borders_that_lie_alike_are_priced_once(monkeypatch: pytest.MonkeyPatch):
    priced: list[int] = []
    exchange = CollectiveCost.exchange
    monkeypatch.setattr(CollectiveCost, "exchange", lambda *a: priced.append(len(a[1])) or exchange(*a))
    cluster = cluster_of(
        {
            "name": "equal",
            "launch": "10 us",
            "machines": [{**machine(4, "m"), "count": 8}],
            "network": {"topology": "switch"},
        }
    )
    meshes = [ProcessMesh.grid(4 * i, dp=2, tp=2) for i in range(8)]
    build = chain(12, [16] * 9, meshes, 2)
    traffic = TrafficCost(build.lowered, cluster, range(32))
    sent = [op for op in build.lowered.ops if op.kind == "comm.transfer"]
    assert {traffic.exchange(op).wire for op in sent} == {12 * 16 * 4}
    assert len(sent) == 14
    assert len(priced) == 2  # activations one way, gradients the other


@pytest.mark.parametrize("network", NETWORKS, ids=["switch", "tree"])
def test_representative_devices_send_each_other_over_links_of_the_same_kinds_and_speeds(
    network: dict[str, Any],
):
    cluster, random = mixed(network), np.random.default_rng(1)
    cost = CollectiveCost(cluster)

    def way(a: int, b: int) -> list[tuple[object, ...]]:
        links = (cost.router.link(directed) for directed in cost.router.route(a, b))
        return [(link.kind, link.bandwidth, link.latency) for link in links]

    for _ in range(40):
        devices = tuple(int(device) for device in random.permutation(30)[:8])
        others = representative_devices(cluster, devices)
        assert representative_devices(cluster, others) == others
        for (a, c), (b, d) in itertools.permutations(zip(devices, others, strict=True), 2):
            assert way(a, b) == way(c, d)
            one, other = (cluster.devices[a], cluster.devices[b]), (cluster.devices[c], cluster.devices[d])
            assert (one[0].machine == one[1].machine) == (other[0].machine == other[1].machine)


def test_costs_are_shared_while_somebody_has_them():
    cluster, other = (mixed(NETWORKS[0]) for _ in range(2))
    held = shared_cost(cluster)
    assert shared_cost(cluster) is held
    assert shared_cost(other) is not held
    left = weakref.ref(held)
    del held
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("devices", [range(6), [3, 4, 5, 0, 1, 2]])
def test_a_message_is_between_machines_where_its_slowest_group_is(devices: list[int]):
    """Two groups of three ranks on two machines of four: one of them is on both machines."""
    communication = MeshCommunication(machines(4, 4), devices)
    both, one = ProcessMesh.grid(tp=2, dp=3), ProcessMesh([[devices.index(0), devices.index(1)]], ["a", "dp"])
    _, slowest, between, _ = communication.estimate("all_reduce", both, ("dp",), 1e6)
    _, inside, apart, _ = communication.estimate("all_reduce", one, ("dp",), 1e6)
    assert between
    assert not apart
    assert slowest != inside
