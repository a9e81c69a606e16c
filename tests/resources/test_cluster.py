from __future__ import annotations

import dataclasses
import json
import pickle

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.files.clusters import boxes, cluster_of, machine, single

from distgraph.errors import ResourceError
from distgraph.resources import (
    Cluster,
    Requirement,
    describe,
    load_cluster,
    load_paddle,
    map_ranks,
    shipped_clusters,
)
from distgraph.resources.collective_cost import CollectiveCost
from distgraph.resources.routing import Router


def hops(cluster: Cluster, source: int, target: int) -> list[tuple[str, str]]:
    """A route as nodes, checked to be connected and to lead from source to target."""
    router = Router(cluster)
    at, steps = cluster.devices[source].node, []
    for directed in router.route(source, target):
        link = router.link(directed)
        start, end = (link.target, link.source) if directed % 2 else (link.source, link.target)
        assert start == at
        steps.append((start, end))
        at = end
    assert at == cluster.devices[target].node
    return steps


def test_devices_are_numbered_machine_by_machine():
    cluster = boxes([3, 2])
    assert [device.index for device in cluster.devices] == list(range(5))
    assert [(device.machine, device.local) for device in cluster.devices] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
    ]
    assert cluster.machine_of(4).devices == (3, 4)


def test_device_meshes_group_by_type():
    cluster = load_cluster("gpu2_xpu2")
    gpus, xpus = cluster.device_meshes
    assert (gpus.type, len(gpus.devices), gpus.machines) == ("gpu", 16, (0, 1))
    assert (xpus.type, len(xpus.devices), xpus.machines) == ("xpu", 16, (2, 3))
    assert xpus.models == ("Kunlun-R300",)


def test_two_device_types_in_one_machine():
    mixed = [
        {"count": 2, "type": "gpu", "model": "G", "memory": "16 GiB"},
        {"count": 1, "type": "xpu", "model": "X", "memory": "8 GiB"},
    ]
    cluster = cluster_of({"name": "mixed", "machines": [machine(1, "m", devices=mixed)]})
    assert [device.type for device in cluster.devices] == ["gpu", "gpu", "xpu"]
    assert [mesh.type for mesh in cluster.device_meshes] == ["gpu", "xpu"]
    assert cluster.devices[2].origin == "machines[0].devices[1]"


@pytest.mark.parametrize("name", shipped_clusters())
def test_graph_has_every_part_and_is_connected(name):
    cluster = load_cluster(name)
    graph = cluster.graph
    roles = [role for _, role in graph.nodes(data="role")]
    assert roles.count("device") == len(cluster.devices)
    assert roles.count("nic") == sum(len(found.nics) for found in cluster.machines)
    assert graph.number_of_edges() == len(cluster.links)
    assert nx.is_connected(graph)
    assert all(data["bandwidth"] > 0 and data["latency"] >= 0 for _, _, data in graph.edges(data=True))


def test_graph_carries_the_numbers():
    graph = load_cluster("p3_16xlarge_x8").graph
    assert graph.edges["p3_0/gpu0", "p3_0/gpu3"]["bandwidth"] == 2 * 22.55e9
    assert graph.edges["p3_0/nic0", "net/switch0_0"]["bandwidth"] == 25e9 / 8
    assert graph.nodes["p3_7/gpu7"]["memory"] == 16 * 2**30
    assert graph.nodes["p3_7/gpu7"]["peak"]["f16"] == 125e12


@pytest.mark.parametrize(
    "name", ["p3_16xlarge_x8", "mixed_a100_v100", "gpu2_xpu2", "tpu_v4_16x16", "dgx_a100_pod"]
)
def test_routes_are_shortest_paths_of_the_graph(name):
    cluster = load_cluster(name)
    count = len(cluster.devices)
    nics = {nic for found in cluster.machines for nic in found.nics}
    for source, target in [(0, 1), (1, 0), (0, 7), (2, 5), (3, count - 1), (count - 1, 0), (count // 2, 9)]:
        steps = hops(cluster, source, target)
        here, there = cluster.devices[source], cluster.devices[target]
        graph = cluster.graph
        if here.machine == there.machine:  # a machine's own traffic keeps off its NIC, and off other devices
            graph = graph.subgraph(set(graph) - nics)
            others = {device.node for device in cluster.devices} - {here.node, there.node}
            alone = graph.subgraph(set(graph) - others)
            graph = alone if nx.has_path(alone, here.node, there.node) else graph
        if name == "dgx_a100_pod" and here.machine != there.machine:
            expected = 4  # device, its own NIC, switch, the other's NIC, device
        else:
            expected = nx.shortest_path_length(graph, here.node, there.node)
        assert len(steps) == expected


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), data=st.data())
def test_torus_routes_are_shortest(shape, data):
    count = 1
    for length in shape:
        count *= length
    if count < 2:
        return
    cluster = single(count, {"topology": "torus", "shape": shape})
    source, target = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, count - 1))
    expected = nx.shortest_path_length(
        cluster.graph, cluster.devices[source].node, cluster.devices[target].node
    )
    assert len(hops(cluster, source, target)) == expected


def test_pod_torus_wraps_and_blocks():
    cluster = load_cluster("tpu_v4_16x16")
    # Host 0 holds the 2 x 2 corner: chips 0, 1 in the first row, 2, 3 in the second; host 1 is to its right.
    assert cluster.network.members[0] == 0
    assert cluster.network.members[1] == 1
    assert cluster.network.members[2] == 4
    assert cluster.network.members[16] == 2
    assert len(hops(cluster, 0, cluster.network.members[15])) == 1
    assert len(hops(cluster, 0, cluster.network.members[8 * 16 + 8])) == 16
    assert all(degree == 4 for _, degree in cluster.graph.degree())


def test_ring_of_two_has_one_link():
    assert len(single(2, {"topology": "ring"}).links) == 1
    assert len(single(3, {"topology": "ring"}).links) == 3
    assert len(single(6, {"topology": "torus", "shape": [2, 3]}).links) == 3 + 2 * 3


def test_tree_with_oversubscription():
    network = {"topology": "tree", "levels": [{"children": 2, "oversubscription": 4, "latency": "3 us"}]}
    cluster = boxes([1, 1, 1, 1], network)
    graph = cluster.graph
    assert graph.edges["net/switch0_0", "net/switch1_0"]["bandwidth"] == 2 * 10e9 / 4
    assert graph.edges["net/switch0_0", "net/switch1_0"]["latency"] == pytest.approx(3e-6)
    assert len(hops(cluster, 0, 1)) == 4
    assert len(hops(cluster, 0, 2)) == 6


def test_pcie_pairs_share_a_host_bridge():
    cluster = single(4, {"topology": "pcie_pairs", "host_bandwidth": "8 GB/s"})
    assert hops(cluster, 0, 1) == [("m/gpu0", "m/pcie0"), ("m/pcie0", "m/gpu1")]
    assert [end for _, end in hops(cluster, 1, 2)] == ["m/pcie0", "m/host", "m/pcie1", "m/gpu2"]


LINKED = {
    "topology": "links",
    "bandwidth": "25 GB/s",
    "latency": "1 us",
    "links": [[0, 1, 2], [1, 2], [2, 3]],
}
HOST = {"kind": "pcie", "bandwidth": "12 GB/s", "latency": "2 us"}


def test_devices_without_a_link_meet_at_the_host_and_only_without_one_forward_for_each_other():
    bridged = single(4, {**LINKED, "host": HOST})
    assert hops(bridged, 0, 1) == [("m/gpu0", "m/gpu1")]
    assert [end for _, end in hops(bridged, 0, 2)] == ["m/pcie0", "m/host", "m/pcie1", "m/gpu2"]
    # 12 GB/s a GPU, and 12 GB/s of a switch for both its GPUs: 0 to 2, 0 to 3 and 1 to 3, a quarter each.
    exchange = CollectiveCost(bridged).time("all_to_all", range(4), 12e9)
    assert exchange == pytest.approx(3 * 0.25, rel=1e-3)
    assert hops(single(4, LINKED), 0, 2) == [("m/gpu0", "m/gpu1"), ("m/gpu1", "m/gpu2")]


def test_a_host_stands_beside_links_only():
    with pytest.raises(ResourceError, match="host only with topology links, not ring"):
        single(4, {"topology": "ring", "host": HOST})


def test_machine_without_links_inside_says_so():
    entry = machine(2, "m")
    del entry["inside"], entry["nics"]
    cluster = cluster_of({"name": "apart", "launch": "1 us", "machines": [entry]})
    with pytest.raises(ResourceError, match=r"test\.yaml: nothing connects device 0 \(m/gpu0\) to device 1"):
        CollectiveCost(cluster).time("send", (0, 1), 8)


def test_flops_prefers_measured_and_names_what_is_missing():
    cluster = boxes([1], devices={**machine(1, "b")["devices"], "measured": {"f32": "7 TFLOP/s"}})
    assert cluster.flops(0, "f32") == 7e12
    with pytest.raises(
        ResourceError, match=r"test\.yaml: machines\[0\]\.devices\.peak\.bf16: missing, G states f32"
    ):
        cluster.flops(0, "bf16")


def test_unknown_and_repeated_devices_in_a_group():
    cluster = boxes([2])
    with pytest.raises(ResourceError, match="device 2 is not in cluster boxes, which has devices 0 to 1"):
        cluster.check_group((0, 2))
    with pytest.raises(ResourceError, match="device 1 appears twice"):
        cluster.check_group((1, 0, 1))


def test_cluster_is_immutable_and_survives_pickling():
    cluster = load_cluster("mixed_a100_v100")
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster.name = "other"
    assert len({cluster.devices[0], cluster.devices[1], cluster.devices[0]}) == 2


def paddle_document() -> dict:
    """Two machines of two GPUs, a CPU and a NIC each, as Paddle writes it: numbers as text, links twice."""
    machines = []
    for number in range(2):
        base = number * 4
        gpus = [
            {
                "global_id": base + i,
                "local_id": i,
                "type": "GPU",
                "model": " Tesla V100",
                "memory": "32",
                "sp_gflops": "15700",
                "dp_gflops": 7800,
            }
            for i in range(2)
        ]
        cpu = {
            "global_id": base + 2,
            "local_id": 0,
            "type": "CPU",
            "arch": "x86_64",
            "memory": "502",
            "sp_gflops": "150",
        }
        nic = {"global_id": base + 3, "local_id": 0, "type": "NIC", "width": 12.5, "ip": "10.0.0.1"}
        links = [
            {
                "source_global_id": base + a,
                "target_global_id": base + b,
                "type": "NVL",
                "bandwidth": 235.0,
                "latency": 2,
            }
            for a, b in ((0, 1), (1, 0))
        ]
        links += [
            {
                "source_global_id": base + a,
                "target_global_id": base + b,
                "type": "PHB",
                "bandwidth": 24.0,
                "latency": "1",
            }
            for a in range(3)
            for b in (2, 3)
            if a != b
        ]
        links.append(
            {
                "source_global_id": base + 3,
                "target_global_id": (base + 7) % 8,
                "type": "NET",
                "bandwidth": 12.5,
            }
        )
        machines.append(
            {
                "hostname": f"host{number}",
                "addr": "10.0.0.1",
                "port": "60009",
                "devices": [*gpus, cpu, nic],
                "links": links,
            }
        )
    return {"alpha_latency": {"base": {"ring": 8.4}}, "machines": machines}


def write(tmp_path, document) -> str:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(document))
    return str(path)


def test_paddle_cluster_json(tmp_path):
    cluster = load_cluster(write(tmp_path, paddle_document()))
    assert [device.node for device in cluster.devices] == [
        "machine0/gpu0",
        "machine0/gpu1",
        "machine1/gpu4",
        "machine1/gpu5",
    ]
    first = cluster.devices[0]
    assert (first.type, first.model, first.memory) == ("gpu", "Tesla V100", 32e9)
    assert first.peak == {"f32": 15.7e12, "f64": 7.8e12}
    assert cluster.graph.edges["machine0/gpu0", "machine0/gpu1"]["bandwidth"] == 235e9
    assert cluster.graph.edges["machine0/gpu0", "machine0/gpu1"]["latency"] == 2e-6
    assert [end for _, end in hops(cluster, 0, 3)] == ["machine0/nic3", "machine1/nic7", "machine1/gpu5"]
    mapping = map_ranks(4, {(0, 2): 10.0, (1, 3): 10.0}, cluster, Requirement(type="gpu"))
    assert (mapping.cost, mapping.identity_cost) == (0, 20)


def test_paddle_numbers_that_are_not_stated_are_asked_for(tmp_path):
    cluster = load_paddle(write(tmp_path, paddle_document()))
    cluster = dataclasses.replace(cluster, launch=1e-5)
    with pytest.raises(
        ResourceError, match=r"machines\[0\]\.links\[\d+\]\.latency: missing, needed to price send"
    ):
        CollectiveCost(cluster).time("send", (0, 2), 8)
    inside = CollectiveCost(cluster).time("send", (0, 1), 235e9)
    assert inside == pytest.approx(1e-5 + 2e-6 + 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d["machines"][1]["devices"][0].update(memory="lots"),
            r'machines\[1\]\.devices\[0\]\.memory: expected a number, got "lots"',
        ),
        (lambda d: d["machines"][0]["devices"][1].update(global_id=0), "global_id 0 is also machine0/gpu0"),
        (
            lambda d: d["machines"][0]["links"][0].update(target_global_id=99),
            r"machines\[0\]\.links\[0\]: global_id 99 is not a device",
        ),
        (lambda d: d.pop("machines"), "machines: missing"),
        (lambda d: d["machines"][0].update(devices=[{"global_id": 9, "type": "NIC"}]), "no GPU, XPU"),
    ],
)
def test_malformed_paddle_json(tmp_path, change, message):
    document = paddle_document()
    change(document)
    with pytest.raises(ResourceError, match=message):
        load_paddle(write(tmp_path, document))


def test_paddle_json_that_is_no_json_or_no_file(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text('{"machines": [')
    with pytest.raises(ResourceError, match="not JSON"):
        load_paddle(path)
    with pytest.raises(ResourceError, match="cannot be read"):
        load_paddle(tmp_path / "absent.json")


def test_each_gpu_of_a_hybrid_cube_mesh_has_four_neighbours_and_three_others_over_the_host():
    cluster = load_cluster("p3_16xlarge_x8")
    for a in range(8):
        lengths = sorted(len(hops(cluster, a, b)) for b in range(8) if b != a)
        assert lengths == [1, 1, 1, 1, 4, 4, 4]


def test_describe_groups_devices_and_links_and_says_what_is_not_stated():
    entry = machine(2, "m")
    del entry["inside"]["latency"]
    text = describe(cluster_of({"name": "x", "machines": [entry]}))
    assert text.splitlines() == [
        "cluster x (test.yaml): 2 devices in 1 machines",
        "  mesh gpu: 2 x G, 16 GiB, memory not stated, peak f32 10 TFLOP/s",
        "  2 x nvlink: 100 GB/s, not stated",
        "  2 x link: 20 GB/s, 2 us",
    ]
    assert "mesh xpu: 16 x Kunlun-R300" in describe(load_cluster("gpu2_xpu2"))
