from __future__ import annotations

import csv
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.files.clusters import DEVICE, boxes, cluster_of, machine, single
from support.paths import DATA

from distgraph.errors import ResourceError
from distgraph.resources import CollectiveCost, MeasuredTable, load_cluster, wire_bytes
from distgraph.resources.collective_algorithms import packed_rings, priced_kinds

GB = 1e9
LAUNCH = 10e-6


def lines(cost: CollectiveCost, kind: str, group) -> dict[str, tuple[float, float]]:
    return {line.algorithm: (line.alpha, line.beta) for line in cost.lines(kind, tuple(group))}


def line(alpha: float, beta: float):
    return (pytest.approx(alpha, rel=1e-9), pytest.approx(beta, rel=1e-9))


# Worked by hand. In `single` every link has 100 GB/s and 1 us.


@pytest.mark.parametrize(
    ("kind", "steps", "share"),
    [
        ("all_reduce", 2 * 2, 2 * 2 / 3),
        ("all_gather", 2, 2 / 3),
        ("reduce_scatter", 2, 2 / 3),
        ("all_to_all", 2, 2 / 3),
        ("broadcast", 2, 1.0),
        ("permute", 1, 1.0),
    ],
)
def test_three_devices_on_a_switch(kind, steps, share):
    found = lines(CollectiveCost(single(3, {"topology": "full"})), kind, range(3))
    plain = found.get("ring") or found.get("pairwise") or found["direct"]
    assert plain == line(LAUNCH + steps * 2e-6, share / (100 * GB))


def test_a_physical_ring_uses_both_directions():
    cost = CollectiveCost(single(5, {"topology": "ring"}))
    assert lines(cost, "all_gather", range(5))["ring"] == line(LAUNCH + 4e-6, (4 / 5) / 2 / (100 * GB))
    # Each sends 1/5 to each other: two forward (one and two hops), two backward: 1 + 2 fifths on each
    # direction.
    assert lines(cost, "all_to_all", range(5))["pairwise"] == line(LAUNCH + 4 * 2e-6, 3 / 5 / (100 * GB))


def test_a_group_of_distant_neighbours_crosses_the_devices_between():
    cost = CollectiveCost(single(6, {"topology": "ring"}))
    near = cost.time("all_reduce", (0, 1), 1e9)
    assert cost.time("all_reduce", (0, 3), 1e9) == pytest.approx(near + 2 * 2e-6)  # three hops instead of one
    assert cost.time("all_reduce", (0, 1), 1e9, concurrent=[(1, 2)]) == pytest.approx(near)
    assert cost.time("send", (0, 2), 1e9, concurrent=[(1, 2)]) == pytest.approx(
        LAUNCH + 2e-6 + 2 * 1e9 / (100 * GB)
    )


def test_pcie_pairs_meet_at_the_host_bridge():
    cost = CollectiveCost(single(4, {"topology": "pcie_pairs", "host_bandwidth": "8 GB/s"}))
    # 0 -> 1 and 2 -> 3 stay below their switches; 1 -> 2 and 3 -> 0 each take one switch's way up.
    assert lines(cost, "permute", range(4))["direct"] == line(LAUNCH + 4e-6, 1 / (8 * GB))
    assert lines(cost, "permute", (0, 2, 1, 3))["direct"] == line(LAUNCH + 4e-6, 2 / (8 * GB))
    assert lines(cost, "permute", (0, 1))["direct"] == line(LAUNCH + 2e-6, 1 / (100 * GB))


def test_ring_packing_uses_every_lane():
    # 0 - 1 double, 1 - 2 double, 0 - 2 single: rings 012 and 021 over one lane each way; the second lanes
    # have no ring.
    cluster = single(3, {"topology": "links", "links": [[0, 1, 2], [1, 2, 2], [0, 2]]})
    found = lines(CollectiveCost(cluster), "all_reduce", range(3))
    assert found["rings"] == line(LAUNCH + 4e-6, (4 / 3) / 2 / (100 * GB))
    # Fully joined four: three pairs of opposite rings, each device's three links all busy.
    full = single(4, {"topology": "links", "links": [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]})
    found = lines(CollectiveCost(full), "all_gather", range(4))
    assert found["rings"] == line(LAUNCH + 3e-6, (3 / 4) / 3 / (100 * GB))


def test_ring_packing_needs_direct_links():
    cost = CollectiveCost(single(4, {"topology": "links", "links": [[0, 1], [1, 2], [2, 3]]}))
    assert packed_rings(cost.router, (0, 1, 2, 3)) is None
    assert lines(cost, "all_gather", range(4))["ring"] == line(LAUNCH + 9e-6, (3 / 4) / (100 * GB))


# Two machines of two devices: inside 100 GB/s and 2 us; across 20 GB/s to the NIC, 10 GB/s cable, 14 us.

ACROSS = 2 * (2e-6 + 5e-6)


def test_ranks_of_a_machine_share_its_nic():
    cost = CollectiveCost(boxes([2, 2]))
    one = LAUNCH + ACROSS + 1e9 / (10 * GB)
    assert cost.time("send", (0, 2), 1e9) == pytest.approx(one)
    assert cost.time("send", (0, 2), 1e9, concurrent=[(1, 3)]) == pytest.approx(one + 1e9 / (10 * GB))
    # Two devices of a machine each send a quarter to each of two devices of the other: all of the size on the
    # cable.
    assert lines(cost, "all_to_all", range(4))["pairwise"] == line(LAUNCH + 3 * ACROSS, 1 / (10 * GB))


def test_two_nics_do_not_share():
    cost = CollectiveCost(boxes([2, 2], nics={**machine(1, "m")["nics"], "count": 2}))
    assert cost.time("send", (0, 2), 1e9, concurrent=[(1, 3)]) == cost.time("send", (0, 2), 1e9)
    plain = CollectiveCost(boxes([2, 2]))
    many = lines(cost, "all_gather", range(4))
    assert many["rails"][1] == pytest.approx(lines(plain, "all_gather", range(4))["ring"][1] / 2)


def test_all_reduce_across_machines():
    found = lines(CollectiveCost(boxes([2, 2])), "all_reduce", range(4))
    assert found["ring"] == line(LAUNCH + 6 * ACROSS, 1.5 / (10 * GB))
    # Half the bytes inside, then two rails of half the bytes share the cable, then half inside again.
    inside = 0.5 / (100 * GB)
    assert found["hierarchical"] == line(LAUNCH + 2e-6 + 2 * ACROSS + 2e-6, 2 * inside + 1.0 / (10 * GB))
    # One edge between the heads carries each half of the bytes up and down; then one device further inside.
    assert found["tree"] == line(LAUNCH + 2 * 2 * ACROSS, 1.0 / (10 * GB))


def test_hierarchical_gather_and_scatter_mirror_each_other():
    cost = CollectiveCost(boxes([3, 3]))
    gather, scatter = (
        lines(cost, kind, range(6))["hierarchical"] for kind in ("all_gather", "reduce_scatter")
    )
    assert gather == line(*scatter)
    # A third of the bytes per rail, half of that sent, three rails on the cable; then 2/3 inside.
    assert gather == line(LAUNCH + ACROSS + 2 * 2e-6, 0.5 / (10 * GB) + (2 / 3) / (100 * GB))


def test_uneven_machines_have_no_hierarchy():
    found = lines(CollectiveCost(boxes([1, 3])), "all_reduce", range(4))
    assert "hierarchical" not in found
    assert found["ring"] == line(LAUNCH + 6 * ACROSS, 1.5 / (10 * GB))


def test_oversubscribed_tree():
    network = {"topology": "tree", "levels": [{"children": 2, "oversubscription": 4, "latency": "3 us"}]}
    cost = CollectiveCost(boxes([1, 1, 1, 1], network))
    assert cost.time("send", (0, 1), 1e9) == pytest.approx(LAUNCH + ACROSS + 1e9 / (10 * GB))
    up = cost.estimate("send", (0, 2), 1e9)
    assert up.seconds == pytest.approx(LAUNCH + ACROSS + 6e-6 + 1e9 / (5 * GB))
    assert up.bottleneck.source == "net/switch0_0"
    assert cost.time("send", (0, 2), 1e9, concurrent=[(1, 3)]) == pytest.approx(up.seconds + 1e9 / (5 * GB))


def torus_of_hosts(shape: list[int]) -> CollectiveCost:
    entry = {**machine(1, "h"), "count": shape[0] * shape[1]}
    del entry["inside"], entry["nics"]
    network = {
        "topology": "torus",
        "over": "devices",
        "shape": shape,
        "bandwidth": "50 GB/s",
        "latency": "1 us",
    }
    return CollectiveCost(
        cluster_of({"name": "pod", "launch": "10 us", "machines": [entry], "network": network})
    )


def test_torus_axes():
    cost = torus_of_hosts([4, 3])
    # Half the bytes scatter along 4 and then (a quarter of them) along 3, the other half the other way round:
    # per direction, first stage 1/2 * 3/4 / 2 on the long axis; second 1/2 * 1/3 * 3/4 / 2 on the long axis
    # against 1/2 * 1/4 * 2/3 / 2 on the short one. The busier axis decides each stage.
    first, second = 0.5 * 0.75 / 2, 0.5 / 3 * 0.75 / 2
    scatter = line(LAUNCH + 3e-6 + 3e-6, (first + second) / (50 * GB))
    assert lines(cost, "reduce_scatter", range(12))["torus"] == scatter
    assert lines(cost, "all_reduce", range(12))["torus"] == line(
        LAUNCH + 12e-6, 2 * (first + second) / (50 * GB)
    )


def test_one_axis_of_a_torus():
    cost = torus_of_hosts([4, 3])
    row, column = (0, 1, 2), (0, 3, 6, 9)
    assert lines(cost, "all_gather", row)["ring"] == line(LAUNCH + 2e-6, (2 / 3) / 2 / (50 * GB))
    assert lines(cost, "all_gather", column)["ring"] == line(LAUNCH + 3e-6, (3 / 4) / 2 / (50 * GB))
    rows = [(3, 4, 5), (6, 7, 8)]
    assert cost.time("all_gather", row, 1e8, concurrent=rows) == cost.time("all_gather", row, 1e8)
    assert "torus" not in lines(cost, "all_gather", (0, 1, 4))


def test_counted_all_to_all_equals_every_pair(monkeypatch):
    for cluster in (load_cluster("mixed_a100_v100"), boxes([3, 1, 2]), load_cluster("gpu2_xpu2")):
        group = tuple(range(1, len(cluster.devices)))
        (every,) = CollectiveCost(cluster).lines("all_to_all", group, ((0, len(group)),))
        monkeypatch.setattr("distgraph.resources.collective_cost._EXACT_PAIRS", 1)
        (counted,) = CollectiveCost(cluster).lines("all_to_all", group, ((0, len(group)),))
        monkeypatch.undo()
        assert counted.beta == pytest.approx(every.beta)
        assert counted.bottleneck == every.bottleneck


# Against measurements: NCCL all_reduce inside one machine.


def measured(device: str, gpus: int) -> dict[int, float]:
    with (DATA / "nccl_all_reduce.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["device"], row["gpus"]) == (device, str(gpus))]
    return {int(row["bytes"]): float(row["nanoseconds"]) * 1e-9 for row in rows}


@pytest.mark.parametrize(("gpus", "error"), [(2, 0.02), (4, 0.08), (8, 0.02)])
def test_v100_wiring_explains_the_measured_bandwidths(gpus, error):
    """One lane's bandwidth and the wiring of the machine give the bandwidths of 4 and of 8 GPUs."""
    cluster = dataclasses.replace(load_cluster("p3_16xlarge_x8"), measured=())
    cost = CollectiveCost(cluster)
    for size, seconds in measured("v100", gpus).items():
        if size >= 2**28:
            assert cost.time("all_reduce", range(gpus), size) == pytest.approx(seconds, rel=error)
        elif size >= 2**25:
            assert cost.time("all_reduce", range(gpus), size) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize("gpus", [4, 8])
def test_a100_asymptote(gpus):
    cost = CollectiveCost(dataclasses.replace(load_cluster("dgx_a100_pod"), measured=()))
    assert cost.time("all_reduce", range(gpus), 2**30) == pytest.approx(
        measured("a100", gpus)[2**30], rel=0.05
    )


def test_the_measured_table_of_the_file_wins_for_its_shape():
    cost = CollectiveCost(load_cluster("dgx_a100_pod"))
    table = measured("a100", 8)
    found = cost.estimate("all_reduce", range(8, 16), 2**26)
    assert (found.seconds, found.algorithm) == (pytest.approx(table[2**26], rel=1e-4), "measured")
    assert cost.estimate("all_reduce", range(4), 2**26).algorithm != "measured"
    assert cost.estimate("all_reduce", range(4, 12), 2**26).algorithm != "measured"
    assert cost.estimate("all_gather", range(8), 2**26).algorithm != "measured"
    beside = cost.estimate("all_reduce", range(8), 2**26, concurrent=[range(8, 16)])
    assert beside.algorithm == "measured"  # another machine, no link in common
    shared = cost.estimate("all_reduce", range(8), 2**26, concurrent=[range(4, 12)])
    assert shared.algorithm != "measured"


def test_tables_interpolate_rise_and_extrapolate():
    table = MeasuredTable("send", 1, 2, (1000.0, 2000.0, 3000.0), (3.0, 5.0, 4.0))
    cost = CollectiveCost(boxes([2, 2]), tables=[table])
    at = {size: cost.time("send", (0, 1), size) for size in (0, 1000, 1500, 2000, 3000, 6000)}
    # 5 then 4 is no rising curve; the nearest one has 4.5 twice.
    assert at == pytest.approx({0: 3.0, 1000: 3.0, 1500: 3.75, 2000: 4.5, 3000: 4.5, 6000: 9.0})
    assert cost.estimate("send", (0, 2), 1000).algorithm == "direct"
    other = dataclasses.replace(table, model="another")
    assert CollectiveCost(boxes([2, 2]), tables=[other]).estimate("send", (0, 1), 1000).algorithm == "direct"


def placed(seconds: float, *groups: tuple[int, ...], **fields: object) -> MeasuredTable:
    return MeasuredTable(
        "all_reduce", 1, len(groups[0]), (100.0, 200.0), (seconds, 2 * seconds), None, groups, **fields
    )


def test_tables_of_groups_hold_for_these_groups_at_once():
    """Whatever the order of groups and members; less of them cost no more; others are worked out."""
    near, far = placed(3.0, (0, 1), (2, 3)), placed(5.0, (0, 2), (1, 3))
    cost = CollectiveCost(boxes([4]), tables=[near, far])

    def seconds(*groups: tuple[int, ...]) -> float:
        return cost.time("all_reduce", groups[0], 150, groups[1:])

    assert seconds((0, 1), (2, 3)) == seconds((3, 2), (1, 0)) == 4.5
    assert seconds((0, 2), (1, 3)) == seconds((1, 3), (0, 2)) == 7.5
    assert seconds((0, 1)) == seconds((2, 3)) == 4.5
    for other in ([(0, 3), (1, 2)], [(0, 3)], [(0, 1), (0, 2)], [(0, 1, 2, 3)]):
        assert seconds(*other) < 1
    assert cost.time("all_gather", (0, 1), 150, [(2, 3)]) < 1
    anywhere = dataclasses.replace(near, groups=None, times=(1.0, 1.0))
    cost = CollectiveCost(boxes([4]), tables=[near, far, anywhere])
    assert (seconds((0, 1), (2, 3)), seconds((0, 1)), seconds((0, 3))) == (4.5, 1.0, 1.0)


def test_devices_that_move_their_messages_are_at_work_for_them():
    """All the time where a table does not say for how long; devices whose messages others move never are."""
    given = [placed(3.0, (0, 1), (2, 3), busy=(1.0, 8.0)), placed(5.0, (0, 2), (1, 3))]
    message = {**DEVICE, "compute": {"host": {"message": "1 us"}}}
    for device, known in ((DEVICE, False), (message, True)):
        cost = CollectiveCost(boxes([4], devices={**device, "count": 4}), tables=given)
        found = cost.estimate("all_reduce", (0, 1), 150, [(2, 3)])
        assert (found.seconds, found.busy) == (4.5, 4.5)
        found = cost.estimate("all_reduce", (0, 1), 100, [(2, 3)])
        assert (found.seconds, found.busy) == (3.0, 1.0)
        found = cost.estimate("all_reduce", (0, 2), 150, [(1, 3)])
        assert (found.seconds, found.busy) == (7.5, 7.5 * known)
        found = cost.estimate("all_reduce", (0, 3), 150)
        assert found.seconds > 0
        assert found.busy == found.seconds * known


@pytest.mark.parametrize("part", [None, 0.75])
def test_between_machines_devices_are_busy_for_the_stated_part(part: float | None):
    """None stated: other hardware moves the bytes. Of an exchange, inside and between, the larger counts."""
    host = {"message": "1 us"} | ({} if part is None else {"network_busy": part})
    cost = CollectiveCost(boxes([2, 2], devices={**DEVICE, "compute": {"host": host}, "count": 2}))
    inside, between = (cost.estimate("all_reduce", group, 2**20) for group in ((0, 1), (0, 2)))
    assert inside.busy == inside.seconds
    assert between.busy == (part or 0.0) * between.seconds
    near, far = {(0, 1): 2.0**24, (3, 2): 2.0**24}, {(0, 2): 2.0**24, (3, 1): 2.0**24}
    assert cost.exchange_busy(near) == cost.exchange(near)
    assert cost.exchange_busy(far) == (part or 0.0) * cost.exchange(far)
    assert cost.exchange_busy(near | far) == max(cost.exchange(near), (part or 0.0) * cost.exchange(far))
    assert cost.exchange_busy({}) == 0


def test_tables_of_groups_are_of_their_model_and_order():
    alike = dataclasses.replace(placed(3.0, (0, 1), (2, 3)), model="G")
    other = dataclasses.replace(alike, model="another", times=(7.0, 7.0))
    cost = CollectiveCost(boxes([4]), tables=[other, alike])
    assert cost.time("all_reduce", (0, 1), 100, [(2, 3)]) == 3.0
    ring = MeasuredTable("permute", 1, 4, (100.0,), (3.0,), None, ((0, 1, 2, 3),))
    cost = CollectiveCost(boxes([4]), tables=[ring])
    assert cost.time("permute", (0, 1, 2, 3), 100) == 3.0
    assert cost.time("permute", (0, 2, 1, 3), 100) < 1


def test_messages_round_measured_rings_cost_what_was_measured():
    """All of one size; other messages are worked out."""
    pairs = dataclasses.replace(placed(3.0, (0, 1), (2, 3), busy=(1.0, 8.0)), collective="permute")
    ring = MeasuredTable("permute", 1, 4, (100.0,), (7.0,), None, ((0, 1, 2, 3),))
    cost = CollectiveCost(boxes([4]), tables=[pairs, ring])
    both_ways = {(3, 2): 150.0, (2, 3): 150.0, (0, 1): 150.0, (1, 0): 150.0}
    assert (cost.exchange(both_ways), cost.exchange_busy(both_ways)) == (4.5, 4.5)
    assert cost.exchange({(rank, (rank + 1) % 4): 100.0 for rank in range(4)}) == 7.0
    around = {(rank, (rank - 1) % 4): 100.0 for rank in range(4)}
    one_way = {(0, 1): 150.0, (2, 3): 150.0}
    for others in (around, one_way, both_ways | {(0, 1): 140.0}, both_ways | {(0, 2): 150.0}, {(0, 0): 1.0}):
        assert cost.exchange(others) < 1


def test_many_sizes_at_once_cost_what_each_does():
    cost = CollectiveCost(boxes([4]), tables=[placed(3.0, (0, 1), (2, 3))])
    sizes = np.array([[0.0, 100.0], [170.0, 900.0]])
    for groups in ([(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0,)]):
        each = [[cost.time("all_reduce", groups[0], size, groups[1:]) for size in row] for row in sizes]
        assert cost.times("all_reduce", groups[0], sizes, tuple(groups[1:])) == pytest.approx(np.array(each))
    with pytest.raises(ResourceError, match="a size is not negative"):
        cost.times("all_reduce", (0, 1), -sizes, [(2, 3)])
    with pytest.raises(ResourceError, match="nonsense"):
        cost.times("nonsense", (0,), sizes)


# Properties.

CLUSTERS = ["p3_16xlarge_x8", "mixed_a100_v100", "gpu2_xpu2", "dgx_a100_pod"]
COSTS = {name: CollectiveCost(load_cluster(name)) for name in CLUSTERS}
BIG_KINDS = [kind for kind in priced_kinds() if kind != "send"]


@st.composite
def cost_and_group(draw):
    cost = COSTS[draw(st.sampled_from(CLUSTERS))]
    devices = st.integers(0, min(len(cost.cluster.devices), 40) - 1)
    return cost, tuple(draw(st.lists(devices, min_size=2, max_size=12, unique=True)))


@given(cost_and_group(), st.sampled_from(BIG_KINDS), st.integers(0, 2**32), st.integers(0, 2**32))
def test_more_bytes_never_take_less_time(found, kind, a, b):
    cost, group = found
    less, more = sorted((a, b))
    assert 0 < cost.time(kind, group, less) <= cost.time(kind, group, more)


@given(
    cost_and_group(),
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
    st.randoms(),
)
def test_order_of_the_group_does_not_matter(found, kind, random):
    cost, group = found
    shuffled = list(group)
    random.shuffle(shuffled)
    assert cost.time(kind, shuffled, 2**24) == pytest.approx(cost.time(kind, group, 2**24), rel=1e-12)


@given(cost_and_group(), st.sampled_from(["all_gather", "reduce_scatter", "all_to_all"]))
def test_no_faster_than_the_links_of_a_device(found, kind):
    """Whatever the algorithm, a device receives (or sends) what the others hold: (g - 1) / g of the size."""
    cost, group = found
    size = 1e9
    graph = cost.cluster.graph
    widest = max(
        sum(data["bandwidth"] for _, _, data in graph.edges(cost.cluster.devices[device].node, data=True))
        for device in group
    )
    assert cost.time(kind, group, size) >= wire_bytes(kind, len(group), size) / widest


@given(cost_and_group(), st.sampled_from(BIG_KINDS))
def test_company_never_makes_it_faster(found, kind):
    cost, group = found
    others = tuple(device for device in range(len(cost.cluster.devices)) if device not in group)[: len(group)]
    alone = min(line.beta for line in cost.lines(kind, group))
    together = min(line.beta for line in cost.lines(kind, group, (others,)))
    assert together >= alone * (1 - 1e-12)


@given(st.integers(1, 1000), st.floats(0, 1e15))
def test_wire_bytes(size, nbytes):
    share = (size - 1) / size
    assert wire_bytes("all_reduce", size, nbytes) == pytest.approx(2 * share * nbytes)
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert wire_bytes(kind, size, nbytes) == pytest.approx(share * nbytes)
    for kind in ("permute", "send", "broadcast"):
        assert wire_bytes(kind, size, nbytes) == (nbytes if size > 1 else 0)


def test_a_group_of_one_costs_nothing():
    assert CollectiveCost(boxes([2])).time("all_reduce", (1,), 1e9) == 0.0


# Mistakes.


def without(path: list[str]) -> CollectiveCost:
    document = {
        "name": "x",
        "launch": "10 us",
        "machines": [machine(2, "a"), machine(2, "b")],
        "network": {"topology": "switch"},
    }
    here = document
    for step in path[:-1]:
        here = here["machines"][0] if step == "machines" else here[step]
    del here[path[-1]]
    return CollectiveCost(cluster_of(document))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            ["launch"],
            r"test\.yaml: launch: missing, needed to price all_reduce; add the seconds that starting",
        ),
        (
            ["machines", "inside", "bandwidth"],
            (
                r"machines\[0\]\.inside\.bandwidth: missing, needed to price all_reduce over nvlink "
                r'a/gpu\d - a/switch; add bandwidth such as "25 GB/s", or run distgraph profile'
            ),
        ),
        (["machines", "inside", "latency"], r"machines\[0\]\.inside\.latency: missing"),
        (["machines", "nics", "bandwidth"], r"machines\[0\]\.nics\.bandwidth: missing"),
        (["machines", "nics", "latency"], r"machines\[0\]\.nics\.latency: missing"),
        (["machines", "nics", "attach", "bandwidth"], r"machines\[0\]\.nics\.attach\.bandwidth: missing"),
        (["machines", "nics", "attach", "latency"], r"machines\[0\]\.nics\.attach\.latency: missing"),
    ],
)
def test_a_missing_number_is_named_never_assumed(path, message):
    with pytest.raises(ResourceError, match=message):
        without(path).time("all_reduce", range(4), 1e6)


def test_numbers_that_a_group_does_not_need_may_be_missing():
    assert without(["machines", "nics", "bandwidth"]).time("all_reduce", (0, 1), 1e6) > 0


@pytest.mark.parametrize(
    ("kind", "group", "size", "message"),
    [
        ("scan", (0, 1), 1, "collective scan: unknown; use one of all_reduce"),
        ("send", (0, 1, 2), 1, "send: needs 2 devices, source and target, got 3"),
        ("all_reduce", (), 1, "all_reduce: needs at least 1 device, got 0"),
        ("all_reduce", (0, 1), -1, "all_reduce: a size is not negative, got -1 bytes"),
        ("all_reduce", (0, 1), float("nan"), "all_reduce: a size is not negative, got nan bytes"),
        ("all_reduce", (0, 9), 1, "device 9 is not in cluster boxes"),
    ],
)
def test_calls_that_make_no_sense(kind, group, size, message):
    with pytest.raises(ResourceError, match=message):
        CollectiveCost(boxes([2, 2])).time(kind, group, size)
