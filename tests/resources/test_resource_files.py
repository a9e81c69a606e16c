from __future__ import annotations

import copy
from dataclasses import fields

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.files.clusters import boxes, cluster_of, machine
from support.paths import ROOT

from distgraph.errors import ResourceError
from distgraph.resources import CollectiveCost, load_cluster, local_cluster, shipped_clusters, units
from distgraph.resources.cluster import Compute, MatmulRate, RingRate
from distgraph.resources.host_times import HostTimes
from distgraph.resources.schema import (
    DeviceEntry,
    InsideEntry,
    MachineEntry,
    MeasuredEntry,
    NetworkEntry,
    NicEntry,
    ResourceFile,
)
from distgraph.resources.topology import TreeLevel
from distgraph.resources.units import (
    BANDWIDTH,
    COMPUTE,
    LEAST,
    MOST,
    SIZE,
    TIME,
    WORK,
    format_bytes,
    format_si,
    parse,
)

DOCUMENT = {
    "name": "x",
    "launch": "10 us",
    "machines": [machine(2, "a"), machine(4, "b")],
    "network": {"topology": "switch"},
}


def test_a_file_by_path(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(DOCUMENT))
    cluster = load_cluster(path)
    assert [found.name for found in cluster.machines] == ["a", "b"]
    assert cluster.source == str(path)


def test_counts_repeat_devices_and_machines():
    entry = {**machine(3, "n"), "count": 4}
    cluster = cluster_of({"name": "x", "machines": [entry], "network": {"topology": "switch"}})
    assert [found.name for found in cluster.machines] == ["n0", "n1", "n2", "n3"]
    assert cluster.devices[7].node == "n2/gpu1"


def test_nics_are_dealt_to_devices_in_blocks():
    entry = machine(6, "m", nics={**machine(1, "m")["nics"], "count": 3})
    found = cluster_of({"name": "x", "machines": [entry]}).machines[0]
    assert found.nic_of == ("m/nic0", "m/nic0", "m/nic1", "m/nic1", "m/nic2", "m/nic2")


def change(path: list, value) -> dict:
    """The document with one place replaced, or removed where value is ..."""
    document = copy.deepcopy(DOCUMENT)
    here = document
    for step in path[:-1]:
        here = here[step]
    if value is ...:
        del here[path[-1]]
    else:
        here[path[-1]] = value
    return document


ONE, DEVICES, NET = ["machines", 1], ["machines", 1, "devices"], ["network"]
TABLE: dict[str, object] = {
    "collective": "all_reduce",
    "machines": 1,
    "devices_per_machine": 2,
    "sizes": ["1 MiB"],
    "times": ["1 us"],
}

MISTAKES = [
    ([*DEVICES, "memory"], 80, 'machines[1].devices.memory: expected a size such as "80 GiB", got 80'),
    ([*DEVICES, "memory"], "80", 'machines[1].devices.memory: expected a size such as "80 GiB", got "80"'),
    (
        [*DEVICES, "memory"],
        "80 XiB",
        'machines[1].devices.memory: expected a size such as "80 GiB", got "80 XiB"',
    ),
    (
        [*DEVICES, "memory"],
        "80 us",
        'machines[1].devices.memory: expected a size such as "80 GiB", got "80 us"',
    ),
    (
        [*DEVICES, "memory"],
        "0 GiB",
        'machines[1].devices.memory: expected a size such as "80 GiB", greater than zero, got "0 GiB"',
    ),
    (
        [*DEVICES, "memory"],
        "-1 GiB",
        'machines[1].devices.memory: expected a size such as "80 GiB", greater than zero, got "-1 GiB"',
    ),
    (
        [*DEVICES, "memory"],
        ...,
        "machines[1].devices.memory: missing; add the field, see docs/planning/resources.md for its form",
    ),
    (
        [*DEVICES, "memroy"],
        "1 GiB",
        "machines[1].devices.memroy: unknown field; check its spelling against docs/planning/resources.md",
    ),
    (
        [*DEVICES, "type"],
        "abacus",
        "machines[1].devices.type: expected one of 'gpu', 'xpu', 'cpu', 'tpu' or 'npu', or a device of ",
    ),
    ([*DEVICES, "count"], 0, "machines[1].devices.count: expected a number greater than 0, got 0"),
    ([*DEVICES, "count"], "8", 'machines[1].devices.count: expected a whole number, got "8"'),
    (
        [*DEVICES, "peak", "f32"],
        "10 GB/s",
        'machines[1].devices.peak.f32: expected a compute rate such as "125 TFLOP/s", got "10 GB/s"',
    ),
    (
        [*DEVICES, "peak", "f31"],
        "10 TFLOP/s",
        (
            "machines[1].devices.peak.f31: expected one of 'f64', 'f32', 'tf32', 'f16', 'bf16', 'f8' or "
            "'i8', got \"10 TFLOP/s\""
        ),
    ),
    ([*ONE, "devices"], [], "machines[1].devices: expected 1 or more entries, got []"),
    ([*ONE, "devices"], 8, "machines[1].devices: expected a list, got 8"),
    (
        [*ONE, "inside", "bandwidth"],
        "25 Gb",
        'machines[1].inside.bandwidth: expected a bandwidth such as "25 Gbit/s", got "25 Gb"',
    ),
    (
        [*ONE, "inside", "latency"],
        2e-6,
        'machines[1].inside.latency: expected a time such as "2 us", got 2e-06',
    ),
    ([*ONE, "inside", "topology"], "torus", "machines[1].inside: expected shape with topology torus, got "),
    ([*ONE, "nics", "attach"], ..., "machines[1].nics.attach: missing; add the field"),
    (
        [*ONE, "nics", "count"],
        5,
        "machines[1].nics.count: 5 NICs for 4 devices; give at most one NIC per device",
    ),
    ([*ONE, "nics"], ..., "machines[1].nics: missing, but the network joins the machines' NICs; add nics"),
    ([*ONE, "name"], "a", "machines[1].name: a is the name of two machines"),
    (["network"], ..., "network: missing, but there are 2 machines; say how they are joined"),
    ([*NET, "topology"], "mesh", "network.topology: expected one of"),
    ([*NET, "bandwidth"], "1 GB/s", "network: expected bandwidth and latency of the cables under nics"),
    (
        ["network"],
        {"topology": "torus", "shape": [3, 2]},
        "network.shape: 3 x 2 = 6 places but 2 machines; make them equal",
    ),
    (["machines"], [], "machines: expected 1 or more entries, got []"),
    (["machines"], {"a": 1}, "machines: expected a list, got "),
    (["launch"], -3, 'launch: expected a time such as "2 us", got -3'),
    (
        ["measured"],
        [
            {
                "collective": "all_reduce",
                "machines": 1,
                "devices_per_machine": 2,
                "sizes": ["1 MiB"],
                "times": [],
            }
        ],
        "measured[0].times: expected 1 or more entries, got []",
    ),
    (
        ["measured"],
        [
            {
                "collective": "all_reduce",
                "machines": 1,
                "devices_per_machine": 2,
                "sizes": ["2 MiB", "1 MiB"],
                "times": ["1 us", "2 us"],
            }
        ],
        "measured[0]: expected sizes in increasing order, got ",
    ),
    (["measured"], [TABLE | {"busy": []}], "measured[0]: expected as many busy as sizes (1), not 0, got "),
    (
        ["measured"],
        [TABLE | {"groups": [[0, 1], [2]]}],
        "measured[0]: expected groups of 2 devices each, every device in one of them at most, got ",
    ),
    (
        ["measured"],
        [TABLE | {"groups": [[0, 1], [1, 2]]}],
        "measured[0]: expected groups of 2 devices each, every device in one of them at most, got ",
    ),
    (["measured"], [TABLE | {"groups": []}], "measured[0].groups: expected 1 or more entries, got []"),
    (
        ["measured"],
        [TABLE | {"groups": [[0, 1], [2, 99]]}],
        "measured[0].groups: device 99, but the devices are 0 to ",
    ),
    (
        ["measured"],
        [TABLE | {"machines": 2, "devices_per_machine": 1, "groups": [[0, 1]]}],
        "measured[0].groups: [0, 1] has [2] devices on its machines, but the table is for 2 with 1 each; ",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), MISTAKES, ids=[row[2][:50] for row in MISTAKES])
def test_mistakes_name_file_path_expected_and_found(path, value, message):
    with pytest.raises(ResourceError) as caught:
        cluster_of(change(path, value), "resources/files/x.yaml")
    assert str(caught.value).startswith(f"resources/files/x.yaml: {message}")
    assert caught.value.__cause__ is None


def test_all_mistakes_of_a_file_are_reported_at_once():
    document = change([*DEVICES, "memory"], 80)
    document["machines"][0]["inside"]["latency"] = "fast"
    with pytest.raises(ResourceError) as caught:
        cluster_of(document)
    assert str(caught.value).splitlines() == [
        'test.yaml: machines[0].inside.latency: expected a time such as "2 us", got "fast"',
        'test.yaml: machines[1].devices.memory: expected a size such as "80 GiB", got 80',
    ]


def test_a_list_of_devices_keeps_its_index_in_the_path():
    document = change(
        [*ONE, "devices"], [DOCUMENT["machines"][1]["devices"], {"type": "xpu", "model": "X", "memory": 1}]
    )
    with pytest.raises(ResourceError, match=r"machines\[1\]\.devices\[1\]\.memory: expected a size"):
        cluster_of(document)


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (
            {"topology": "links", "links": [[0, 4]]},
            r"inside\.links\[0\]: expected two different devices below 4",
        ),
        (
            {"topology": "links", "links": [[1, 1]]},
            r"inside\.links\[0\]: expected two different devices below 4",
        ),
        ({"topology": "links", "links": [[0]]}, r"inside: expected links as \[device, device\]"),
        (
            {"topology": "torus", "shape": [3, 1]},
            r"inside\.shape: 3 x 1 = 3 places but 4 devices in the machine",
        ),
        ({"topology": "ring", "shape": [4]}, r"inside: expected shape only with topology torus, not ring"),
    ],
)
def test_topologies_that_do_not_fit(inside, message):
    with pytest.raises(ResourceError, match=message):
        cluster_of(change([*ONE, "inside"], inside))


def test_device_torus_that_does_not_fit():
    torus = {"topology": "torus", "over": "devices", "shape": [4, 3], "block": [2, 2], "bandwidth": "1 GB/s"}
    entry = {**machine(4, "h"), "count": 3}
    del entry["inside"], entry["nics"]
    with pytest.raises(ResourceError, match=r"network\.block: expected a block of the torus \[4, 3\]"):
        cluster_of({"name": "x", "machines": [entry], "network": torus})
    entry["inside"] = machine(1, "h")["inside"]
    with pytest.raises(ResourceError, match="the network joins the devices already; remove inside"):
        cluster_of({"name": "x", "machines": [entry], "network": {**torus, "block": [4, 1]}})


def test_files_that_are_no_yaml(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("name: x\nmachines: [")
    with pytest.raises(ResourceError, match=r"x\.yaml:\d+:\d+: not YAML"):
        load_cluster(path)
    path.write_text("- just a list")
    with pytest.raises(ResourceError, match=r'x\.yaml: expected a mapping of fields, got \["just a list"\]'):
        load_cluster(path)
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ResourceError, match=r"x\.yaml: cannot be read: byte 0 is not UTF-8"):
        load_cluster(path)


def test_unknown_name_lists_what_there_is():
    with pytest.raises(
        ResourceError, match=r"nonesuch: neither a file nor a shipped cluster; shipped are .*local"
    ):
        load_cluster("nonesuch")


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("80 GiB", SIZE, 80 * 2**30),
        ("16GB", SIZE, 16e9),
        ("25 Gbit/s", BANDWIDTH, 3.125e9),
        ("1.5e2 MB / s", BANDWIDTH, 1.5e8),
        ("2 us", TIME, 2e-6),
        ("0 s", TIME, 0.0),
        ("125 TFLOP/s", COMPUTE, 1.25e14),
    ],
)
def test_units(text, unit, value):
    assert parse(text, unit) == pytest.approx(value, rel=1e-12)


@given(
    st.one_of(
        st.integers(0, 10**6).map(str), st.floats(1e-3, 1e6).map(repr), st.floats(0, 99).map("{:.4g}".format)
    ),
    st.sampled_from(sorted(units._FACTORS)),
)
def test_usual_units_are_what_pint_takes_them_for(number, unit):
    symbol, base = unit
    kind = next(kind for kind in (SIZE, BANDWIDTH, TIME, WORK, COMPUTE) if kind.base == base)
    text = f"{number} {symbol}"
    expected = float(units._registry().Quantity(text).to(base).magnitude)
    if LEAST <= expected <= MOST:
        assert parse(text, kind) == expected  # the same bits: forecasts and plans depend on them


@pytest.mark.parametrize(
    "text", ["", "GiB", "1 2 GiB", "1 GiB + 1 GiB", "nan GiB", "1 GiB/s/s", "os.system", "1e999 GiB"]
)
def test_texts_that_are_no_size(text):
    with pytest.raises(ValueError, match="a size such as"):
        parse(text, SIZE)


@given(st.floats(1e-9, 1e15))
def test_formatted_numbers_parse_back(value):
    assert parse(format_si(value, "B/s"), BANDWIDTH) == pytest.approx(value, rel=1e-3)
    if value >= 1:
        assert parse(format_bytes(value), SIZE) == pytest.approx(value, rel=1e-3)


def test_local_cluster_has_a_device_per_rank_that_share_the_machine(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    shipped = load_cluster("local")
    two, eight = local_cluster(2), local_cluster(8)
    assert [len(two.devices), len(eight.devices)] == [2, 8]
    assert two.flops(0, "f32") == shipped.flops(0, "f32")
    assert eight.flops(7, "f32") == pytest.approx(shipped.flops(0, "f32") / 2)
    assert sum(device.memory for device in eight.devices) == sum(device.memory for device in shipped.devices)
    assert len(eight.links) == 8
    with pytest.raises(ResourceError, match="ranks of local_cluster is 0 but"):
        local_cluster(0)


def test_rows_of_measured_tables_reach_the_cluster():
    (table,) = load_cluster("dgx_a100_pod").measured
    assert (table.collective, table.machines, table.devices_per_machine) == ("all_reduce", 1, 8)
    assert (table.sizes[0], table.times[0]) == (2**20, pytest.approx(92.79e-6))
    assert boxes([2]).measured == ()


def test_the_worked_example_of_the_documentation():
    text = (ROOT / "docs" / "planning" / "resources.md").read_text()
    example = text.split("```yaml\n")[1].split("```")[0]
    cluster = cluster_of(yaml.safe_load(example))
    assert [len(found.devices) for found in cluster.machines] == [4, 4, 2]
    assert cluster.devices[8].node == "xpu/xpu0"
    message = CollectiveCost(cluster).time("send", (0, 8), 1e9)
    assert message == pytest.approx(15e-6 + 12e-6 + 1e9 / (25e9 / 8))
    assert cluster.flops(0, "f16") == 250e12


def test_the_documentation_names_every_field_and_every_shipped_cluster():
    text = (ROOT / "docs" / "planning" / "resources.md").read_text()
    entries = [
        ResourceFile,
        MachineEntry,
        DeviceEntry,
        InsideEntry,
        NicEntry,
        NetworkEntry,
        MeasuredEntry,
    ]
    named = {field for entry in entries for field in entry.model_fields} | set(shipped_clusters())
    named |= {
        each.name for kind in (Compute, HostTimes, MatmulRate, RingRate, TreeLevel) for each in fields(kind)
    }
    assert [name for name in sorted(named) if f"`{name}`" not in text] == []
