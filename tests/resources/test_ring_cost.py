"""Collectives along the axes of a torus of devices with measured numbers (`network.rings`)."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from support.files.clusters import cluster_of, machine
from support.paths import ROOT
from typer.testing import CliRunner

from distgraph.cli.application import app
from distgraph.errors import ResourceError
from distgraph.resources import CollectiveCost, load_cluster, with_torus_shape

GATHER = {
    "collective": "all_gather",
    "launch": "13 us",
    "step": "5 us",
    "bandwidth": ["27.5 GB/s", "79.8 GB/s"],
}
SCATTER = {
    "collective": "reduce_scatter",
    "launch": "26 us",
    "step": "5 us",
    "bandwidth": ["37.5 GB/s", "63.2 GB/s"],
}
SEND = {"collective": "send", "launch": "50 us", "step": "0 us", "bandwidth": ["38.8 GB/s", "35.2 GB/s"]}
BROADCAST, REDUCE = GATHER | {"collective": "broadcast"}, SCATTER | {"collective": "reduce"}
RINGS = [GATHER, SCATTER, SEND, BROADCAST, REDUCE]


def document(shape: list[int], rings: list[dict[str, Any]]) -> dict[str, Any]:
    """A torus of hosts with one device each, device i at place i."""
    entry = {**machine(1, "h"), "count": int(np.prod(shape))}
    del entry["inside"], entry["nics"]
    network = {"topology": "torus", "over": "devices", "shape": shape, "rings": copy.deepcopy(rings)}
    return {
        "name": "pod",
        "launch": "10 us",
        "machines": [entry],
        "network": network | {"bandwidth": "50 GB/s", "latency": "1 us"},
    }


def costs(shape: list[int], rings: list[dict[str, Any]] = RINGS) -> CollectiveCost:
    return CollectiveCost(cluster_of(document(shape, rings)))


ROW, COLUMN = (0, 1, 2, 3, 4, 5), (0, 6, 12, 18)  # of a torus of 4 x 6
SIZE = 24e6


@pytest.mark.parametrize(
    ("kind", "group", "seconds"),
    [
        ("all_gather", ROW, 13e-6 + 5 * (5e-6 + SIZE / 6 / 79.8e9)),
        ("all_gather", COLUMN, 13e-6 + 3 * (5e-6 + SIZE / 4 / 27.5e9)),
        ("reduce_scatter", ROW, 26e-6 + 5 * (5e-6 + SIZE / 6 / 63.2e9)),
        ("reduce_scatter", COLUMN, 26e-6 + 3 * (5e-6 + SIZE / 4 / 37.5e9)),
        ("all_reduce", ROW, 39e-6 + 5 * (10e-6 + SIZE / 6 / 63.2e9 + SIZE / 6 / 79.8e9)),
        ("all_gather", (7, 8, 9), 13e-6 + 2 * (5e-6 + SIZE / 3 / 79.8e9)),
        ("all_gather", (11, 6), 13e-6 + 5e-6 + SIZE / 2 / 79.8e9),  # the last and the first of a row
        ("all_gather", (18, 0, 6), 13e-6 + 2 * (5e-6 + SIZE / 3 / 27.5e9)),
        ("send", (0, 1), 50e-6 + SIZE / 35.2e9),
        ("send", (0, 2), 50e-6 + SIZE / 35.2e9),
        ("send", (6, 0), 50e-6 + SIZE / 38.8e9),
        ("permute", COLUMN, 50e-6 + SIZE / 38.8e9),
    ],
)
def test_rings_by_hand(kind, group, seconds):
    found = costs([4, 6]).estimate(kind, group, SIZE)
    assert (found.algorithm, found.seconds) == ("axis", pytest.approx(seconds, rel=1e-12))
    assert found.bottleneck is not None
    assert found.bottleneck.kind == "link"


@pytest.mark.parametrize(
    ("kind", "launch", "speeds"),
    [("broadcast", 13e-6, (27.5e9, 79.8e9)), ("reduce", 26e-6, (37.5e9, 63.2e9))],
)
@pytest.mark.parametrize("size", [1.0, 3.0, 5e4, 24e6, 3e9])
def test_pipelines_have_the_best_whole_number_of_packets(kind, launch, speeds, size):
    cost = costs([4, 6])
    for group, speed in ((COLUMN, speeds[0]), (ROW, speeds[1])):
        members = len(group)
        packets = np.arange(1, max(2, min(size, 20_000) + 1))
        every = launch + (packets + members - 1) * (5e-6 + size / packets / speed)
        assert cost.time(kind, group, size) == pytest.approx(every.min(), rel=1e-12)
    sizes = np.array([0.0, size, 2 * size])
    each = [cost.time(kind, ROW, float(number)) for number in sizes]
    assert cost.times(kind, ROW, sizes) == pytest.approx(np.array(each))


def test_without_a_step_packets_are_single_bytes():
    free = costs([1, 4], [BROADCAST | {"step": "0 s"}])
    assert free.time("broadcast", (0, 1, 2, 3), 1e6) == pytest.approx(13e-6 + (1e6 + 3) / 79.8e9)


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("all_gather", (0, 1, 7)),  # no block
        ("all_gather", (0, 1, 2, 6, 7, 9)),
        ("broadcast", (0, 1, 6, 7)),  # packets go along one axis
        ("reduce", tuple(range(24))),
        ("all_to_all", ROW),  # no numbers
    ],
)
def test_other_groups_are_priced_by_links(kind, group):
    plain, rings = costs([4, 6], []), costs([4, 6])
    assert rings.lines(kind, group) == plain.lines(kind, group)


@pytest.mark.parametrize("group", [(0, 2, 4), (4, 0, 2), (1, 4), (0, 3, 5)])
def test_devices_apart_are_a_ring(group):
    seconds = 13e-6 + (len(group) - 1) * (5e-6 + SIZE / len(group) / 79.8e9)
    assert costs([4, 6]).time("all_gather", group, SIZE) == pytest.approx(seconds)


def test_interleaved_rings_share_their_links():
    cost = costs([4, 6])
    shared = 13e-6 + 2 * (5e-6 + SIZE / 3 / (79.8e9 / 2))
    assert cost.time("all_gather", (0, 2, 4), SIZE, [(1, 3, 5)]) == pytest.approx(shared)
    third = 13e-6 + 5e-6 + SIZE / 2 / (79.8e9 / 3)
    assert cost.time("all_gather", (0, 3), SIZE, [(1, 4), (2, 5)]) <= third
    columns = [(6, 8, 10), (7, 9, 11), (12, 14, 16)]
    alone = cost.time("all_gather", (0, 2, 4), SIZE)
    assert cost.time("all_gather", (0, 2, 4), SIZE, columns) == alone


def test_blocks_take_the_better_order_of_axes_or_both_at_once():
    cost = costs([4, 6])
    rows_first = 3 / 24 / 27.5e9 + 5 / 6 / 79.8e9  # 1/24 of the bytes 3 times, then 1/6 of them 5 times
    cols_first = 5 / 24 / 79.8e9 + 3 / 4 / 27.5e9
    both = max(3 / 24 / 27.5e9, 5 / 24 / 79.8e9) / 2 + max(5 / 6 / 79.8e9, 3 / 4 / 27.5e9) / 2
    one_by_one, at_once = 26e-6 + 8 * 5e-6, 26e-6 + 2 * 5 * 5e-6
    every = tuple(range(24))
    found = [(line.algorithm, line.alpha, line.beta) for line in cost.lines("all_gather", every)]
    assert found == [
        ("axes", pytest.approx(one_by_one), pytest.approx(cols_first)),
        ("axes", pytest.approx(one_by_one), pytest.approx(rows_first)),
        ("axes at once", pytest.approx(at_once), pytest.approx(both)),
    ]
    assert cost.time("all_gather", every, 1.0) == pytest.approx(one_by_one)
    least = min(one_by_one + rows_first * 1e9, at_once + both * 1e9)
    assert cost.estimate("all_gather", every, 1e9).seconds == pytest.approx(least)
    pair = cost.lines("all_reduce", (0, 1, 6, 7))[0]
    assert pair.launch == pytest.approx(2 * (13e-6 + 26e-6))
    assert pair.alpha == pytest.approx(2 * (13e-6 + 26e-6) + 2 * 2 * 5e-6)


def test_a_block_of_every_second_column_is_slower_beside_the_other():
    cost = costs([4, 6])
    even = tuple(6 * row + at for row in range(4) for at in (0, 2, 4))
    odd = tuple(device + 1 for device in even)
    alone, beside = cost.lines("all_gather", even), cost.lines("all_gather", even, (odd,))
    rows, cols = 3 / 4 / 27.5e9, 2 / 12 / 79.8e9  # cols first: only the rows' links are shared
    assert alone[0].beta == pytest.approx(rows + cols)
    assert beside[0].beta == pytest.approx(rows + 2 * cols)


@pytest.mark.parametrize(
    ("kind", "group", "size"),
    [
        ("all_reduce", ROW, 24e6),
        ("broadcast", ROW, 5e4),
        ("reduce", COLUMN, 3e9),
        ("all_gather", (0, 1, 6, 7), 8.0),
    ],
)
def test_the_parts_of_a_cost_add_up(kind, group, size):
    for line in costs([4, 6]).lines(kind, group):
        launch, latency, transfer = line.parts(size)
        assert launch + latency + transfer == pytest.approx(float(line.seconds(size)), rel=1e-12)
        assert launch >= 13e-6
        assert latency / 5e-6 == pytest.approx(round(latency / 5e-6))


def test_a_collective_without_numbers_is_priced_by_links():
    only = costs([4, 6], [GATHER])
    assert only.lines("all_reduce", ROW) == costs([4, 6], []).lines("all_reduce", ROW)
    assert only.estimate("all_gather", ROW, SIZE).algorithm == "axis"


def test_other_rows_do_not_slow_a_row_and_rings_over_the_same_links_do():
    cost = costs([4, 6])
    alone = cost.time("all_gather", (0, 1, 2), SIZE)
    rows = [tuple(range(6 * row, 6 * row + 6)) for row in range(1, 4)]
    assert cost.time("all_gather", ROW, SIZE, rows) == cost.time("all_gather", ROW, SIZE)
    assert cost.time("all_gather", (0, 1, 2), SIZE, [(3, 4, 5), COLUMN]) == alone
    shared = 13e-6 + 2 * (5e-6 + SIZE / 3 / (79.8e9 / 2))
    assert cost.time("all_gather", (0, 1, 2), SIZE, [(1, 2, 3)]) == pytest.approx(shared)
    assert cost.time("all_gather", (0, 1, 2), SIZE, [(0, 2, 4)]) == pytest.approx(shared)


def test_exchanges_along_axes():
    cost = costs([4, 6])
    shift = {(6 * row + at, 6 * row + (at + 1) % 6): SIZE for row in range(4) for at in range(6)}
    assert cost.exchange(shift) == pytest.approx(50e-6 + SIZE / 35.2e9)
    skew = {(6 * row + at, 6 * row + (at + row) % 6): SIZE for row in range(3) for at in range(6)}
    assert cost.exchange(skew) == pytest.approx(50e-6 + 2 * SIZE / 35.2e9)  # two rows away: two on each link
    both = {(0, 1): SIZE, (0, 6): SIZE}
    assert cost.exchange(both) == pytest.approx(50e-6 + SIZE / 35.2e9)
    assert cost.exchange({(0, 7): SIZE}) == pytest.approx(50e-6 + SIZE / 35.2e9)  # along both axes
    assert cost.exchange({(0, 7): SIZE, (1, 7): SIZE}) == pytest.approx(50e-6 + SIZE / 35.2e9)
    assert cost.exchange({(0, 7): SIZE, (6, 7): SIZE}) == pytest.approx(50e-6 + SIZE / (35.2e9 / 2))
    assert cost.exchange({}) == 0.0


def test_a_ring_network_has_one_axis():
    rings = [GATHER | {"bandwidth": ["10 GB/s"]}]
    entry = document([5], rings)
    entry["network"] |= {"topology": "ring"}
    del entry["network"]["shape"]
    cost = CollectiveCost(cluster_of(entry))
    assert cost.time("all_gather", range(5), 5e6) == pytest.approx(13e-6 + 4 * (5e-6 + 1e6 / 10e9))


MISTAKES = [
    (
        [GATHER | {"bandwidth": ["1 GB/s"]}],
        "network: expected rings with a bandwidth for each of the 2 axes, but all_gather has 1, got ",
    ),
    (
        [GATHER, SEND, GATHER],
        "network: expected rings with one entry for each collective, but all_gather has two, got ",
    ),
    (
        [GATHER | {"collective": "all_reduce"}],
        (
            "network.rings[0].collective: expected one of 'all_gather', 'reduce_scatter', 'broadcast', "
            "'reduce' or 'send', got \"all_reduce\""
        ),
    ),
    (
        [GATHER | {"bandwidth": ["1 us", "1 GB/s"]}],
        'network.rings[0].bandwidth[0]: expected a bandwidth such as "25 Gbit/s", got "1 us"',
    ),
    (
        [GATHER | {"launch": 13}],
        'network.rings[0].launch: expected a time such as "2 us", got 13',
    ),
    ([{**GATHER, "latency": "1 us"}], "network.rings[0].latency: unknown field; check its spelling"),
]


@pytest.mark.parametrize(("rings", "message"), MISTAKES)
def test_mistakes_in_rings(rings, message):
    with pytest.raises(ResourceError) as caught:
        cluster_of(document([2, 3], rings), "resources/files/x.yaml")
    assert str(caught.value).startswith(f"resources/files/x.yaml: {message}")


def test_rings_need_a_network_of_devices():
    entry = document([2, 3], [GATHER])
    entry["network"] = {"topology": "torus", "shape": [2, 3], "rings": [GATHER]}
    with pytest.raises(ResourceError, match='network: expected rings only with over "devices", got '):
        cluster_of(entry)


def test_a_block_of_the_torus_has_rings_along_both_axes():
    cluster = load_cluster("tpu_v4_16x16")
    devices = np.array(cluster.network.corner_block((4, 4))).reshape(4, 4)
    assert devices[0].tolist() == [0, 1, 4, 5]
    cost = CollectiveCost(cluster)
    row, column = tuple(devices[0].tolist()), tuple(devices[:, 0].tolist())
    assert cost.time("all_gather", row, 4e6) == pytest.approx(13e-6 + 3 * (5e-6 + 1e6 / 79.8e9))
    assert cost.time("reduce_scatter", column, 4e6) == pytest.approx(26e-6 + 3 * (5e-6 + 1e6 / 37.5e9))
    for shape in ((17, 1), (4,), (0, 4)):
        with pytest.raises(
            ResourceError, match=r"block .*: does not fit in the network, which is 16 x 16; give"
        ):
            cluster.network.corner_block(shape)


@pytest.mark.parametrize(
    ("shape", "rows", "links"),
    [
        ((32, 8), [0, 1, 4, 5, 8, 9, 12, 13], 512),
        ((4, 64), [*range(0, 128, 4)], 512),
        ((4, 4), [0, 1, 4, 5], 32),
        ((1, 256), [*range(256)], 256),
        ((128, 2), [0, 1], 384),
    ],
)
def test_a_torus_of_another_shape(shape, rows, links):
    cluster = with_torus_shape(load_cluster("tpu_v4_16x16"), shape)
    devices = np.array(cluster.network.members).reshape(shape)
    assert (
        sorted(devices.ravel().tolist())
        == list(range(shape[0] * shape[1]))
        == list(range(len(cluster.devices)))
    )
    row = devices[0].tolist()
    assert row[: len(rows)] == rows if shape != (4, 64) else row[::2] == rows
    assert len(cluster.links) == links
    for machine_ in cluster.machines:  # its devices are a block
        places = np.argwhere(np.isin(devices, machine_.devices))
        assert np.prod(np.ptp(places, axis=0) + 1) == 4
    cost = CollectiveCost(cluster)
    for group, launch, speed in ((row, 13e-6, 79.8e9), (devices[:, 0].tolist(), 13e-6, 27.5e9)):
        if len(group) > 1:
            want = launch + (len(group) - 1) * (5e-6 + SIZE / len(group) / speed)
            assert cost.time("all_gather", group, SIZE) == pytest.approx(want)


@pytest.mark.parametrize(
    ("cluster", "shape", "message"),
    [
        (
            "dgx_a100_pod",
            (2, 2),
            "cluster dgx_a100_pod: its network is no torus of devices .switch over machines",
        ),
        (
            "tpu_v4_16x16",
            (32, 16),
            "its torus is 16 x 16, and 32 x 16 does not fit; give 2 lengths from 1 up",
        ),
        ("tpu_v4_16x16", (4, 4, 4), "and 4 x 4 x 4 does not fit; give 2 lengths from 1 up, of at most 256"),
        ("tpu_v4_16x16", (0, 4), r"shape of with_torus_shape is \(0, 4\) but"),
        ("tpu_v4_16x16", (3, 6), "a torus 3 x 6 has no blocks of the 4 devices of a machine"),
    ],
)
def test_shapes_that_no_torus_has(cluster, shape, message):
    with pytest.raises(ResourceError, match=message):
        with_torus_shape(load_cluster(cluster), shape)


def test_only_a_torus_of_devices_is_reconfigurable():
    entry = document([5], [])
    entry["network"] |= {"topology": "ring", "reconfigurable": True}
    del entry["network"]["shape"]
    with pytest.raises(
        ResourceError, match='network: expected reconfigurable only with topology torus and over "d'
    ):
        cluster_of(entry)
    assert not cluster_of(document([2, 3], [])).network.reconfigurable


def test_the_numbers_of_the_shipped_torus():
    cluster = load_cluster("tpu_v4_16x16")
    assert cluster.flops(0, "bf16") == 266e12
    assert cluster.devices[0].compute.slice_block == 8
    assert {ring.collective: ring.launch for ring in cluster.network.rings} == pytest.approx(
        {"all_gather": 13e-6, "reduce_scatter": 26e-6, "broadcast": 13e-6, "reduce": 26e-6, "send": 50e-6}
    )


def test_a_slice_block_is_at_least_one_row():
    entry = document([2, 2], [])
    entry["machines"][0]["devices"]["compute"] = {"slice_block": 0}
    with pytest.raises(ResourceError, match=r"compute\.slice_block: expected a number greater than 0, got 0"):
        cluster_of(entry)


def test_the_command_prints_the_rings():
    result = CliRunner().invoke(app, ["cluster", "tpu_v4_16x16"])
    assert result.exit_code == 0
    line = "  ring all_gather: launch 13 us, step 5 us, 27.5 GB/s along axis 0, 79.8 GB/s along axis 1"
    assert line in result.output.splitlines()
    assert result.output.count("\n  ring ") == 5


def test_the_example_of_the_documentation_is_the_shipped_one():
    text = (ROOT / "docs" / "planning" / "resources.md").read_text()
    shipped = (ROOT / "resources" / "files" / "tpu_v4_16x16.yaml").read_text()
    example = text.split("  rings:\n")[1].split("```")[0]
    assert len(example.splitlines()) == 2
    assert all(line in shipped.splitlines() for line in example.splitlines())
