"""The resource file round-trips with what was measured, and keeps the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from distgraph.errors import ResourceError
from distgraph.resources import ComputeCost, load_cluster
from distgraph.resources.cluster import Compute, MatmulRate, MeasuredTable, OpTable
from distgraph.runtime.profile.cost_fitting import (
    ComputeFit,
    LinkFit,
)
from distgraph.runtime.profile.resource_writer import Measured, write_measured

SOURCE = """# Two machines of ours.
# Second line.
name: ours
about: kept as it is
machines:
  - count: 2
    name: box
    devices: {count: 2, type: cpu, model: C, memory: 3 GiB, peak: {f64: 1 TFLOP/s}}
    inside: {topology: full, bandwidth: 1 GB/s}
    nics:
      {bandwidth: 10 Gbit/s, latency: 5 us, origin: data sheet, attach: {bandwidth: 12 GB/s, latency: 1 us}}
network: {topology: switch, kind: ethernet}
measured:
  - {collective: all_reduce, machines: 1, devices_per_machine: 2, sizes: [1 KiB], times: [1 s]}
  - {collective: all_gather, machines: 2, devices_per_machine: 2, sizes: [1 KiB], times: [2 s]}
"""


def numbers() -> Measured:
    ops = {
        "gelu": {"f32": OpTable(bytes=(1024.0, 3000.0), times=(2e-6, 3e-6), error=0.07)},
        "attention": {"f32": OpTable(flops=(1e6, 1.23e9), times=(2e-5, 3e-3), error=0.01)},
        "conv": {"f32": OpTable(error=0.02, launch=2e-5, rates=(1.25e-11, 1.5e-9, 3e-9))},
        "einsum": {"f32": OpTable(launch=9e-6)},
    }
    rates = {"f32": MatmulRate(1.0, (8.0, 4.0, 2.0), {"efficiency": 0.05}, 5e-10)}
    compute = Compute(1.5e-6, 0.75, 0.25, rates, ops, {"launch": 0.11})
    links = LinkFit(
        7e-6,
        {"machines[0].inside": 2.5e-6, "machines[0].nics": 8e-6},
        {"machines[0].inside": 6e9},
        {"latency": 0.031, "bandwidth": 0.25},
    )
    table = MeasuredTable(
        "all_reduce", 1, 2, (1024, 5000), (3e-6, 4e-6), groups=((0, 1), (2, 3)), busy=(1e-6, 2e-6)
    )
    fitted = ComputeFit(compute, 3e10, {"f32": 9.5e10})
    return Measured({"machines[0].devices": fitted}, links, (table,))


def test_written_file_loads_with_what_was_measured_and_keeps_the_rest(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(SOURCE)
    output = tmp_path / "new.yaml"
    write_measured(str(output), str(tmp_path / "ours.yaml"), 4, numbers())
    cluster = load_cluster(output)
    before = load_cluster(tmp_path / "ours.yaml")
    assert [d.node for d in cluster.devices] == [d.node for d in before.devices]
    for device in cluster.devices:
        given = numbers().compute["machines[0].devices"].compute
        assert (device.compute.launch, device.compute.lookup_efficiency) == (given.launch, 0.25)
        assert device.compute.matmul == given.matmul
        assert device.compute.matmul["f32"].error == {"efficiency": 0.05}
        assert device.compute.error == {"launch": 0.11}
        for op, tables in given.ops.items():
            read, table = device.compute.ops[op]["f32"], tables["f32"]
            assert (read.unit, read.work, read.error) == (table.unit, table.work, table.error)
            assert read.rates == pytest.approx(table.rates) if table.rates else read.rates is None
            assert read.times == pytest.approx(table.times)
            assert read.launch == pytest.approx(table.launch) if table.launch else read.launch is None
        assert device.memory_bandwidth == 3e10
        assert dict(device.peak) == {"f64": 1e12}
        assert dict(device.measured) == {"f32": 9.5e10}
    by_origin = {link.origin: link for link in cluster.links}
    inside, cable = by_origin["machines[0].inside"], by_origin["machines[0].nics"]
    assert (inside.bandwidth, inside.latency) == (6e9, pytest.approx(2.5e-6))
    assert (cable.bandwidth, cable.latency) == (1.25e9, pytest.approx(8e-6))
    assert cluster.launch == pytest.approx(7e-6)
    assert cluster.measured[0] == before.measured[1]  # another shape
    assert cluster.measured[1] == numbers().tables[0]  # in place of the old one
    assert len(cluster.measured) == 2
    text = output.read_text()
    assert text.startswith("# Two machines of ours.\n# Second line.\n")
    assert [str(cluster.origin_of(path)) for path in ("launch", "machines[0].inside.bandwidth")] == [
        "measured within 3.1%; distgraph profile",
        "measured within 25%; distgraph profile",
    ]
    for path in ("machines[0].devices.compute.launch", "machines[0].devices.memory_bandwidth", "measured[1]"):
        assert str(cluster.origin_of(path)) == "measured; distgraph profile"
    assert cluster.origin_of("machines[0].devices.memory") is None
    assert str(cluster.origin_of("machines[0].nics.bandwidth")) == "data sheet"
    assert str(cluster.origin_of("machines[0].nics.latency")) == "measured within 3.1%; distgraph profile"
    assert yaml.safe_load(text)["about"] == "kept as it is"


def test_new_tables_replace_those_of_the_same_groups(tmp_path: Path) -> None:
    """In whatever order they stand; those of other groups stay."""
    document = yaml.safe_load(SOURCE)
    same, other = ([[2, 3], [1, 0]], [[0, 1]])
    table = document["measured"][0]
    document["measured"] = [{**table, "groups": same}, {**table, "groups": other}, table]
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(document))
    write_measured(str(tmp_path / "new.yaml"), str(tmp_path / "ours.yaml"), 4, numbers())
    kept, new = load_cluster(tmp_path / "new.yaml").measured
    assert (kept.groups, kept.times) == (((0, 1),), (1.0,))
    assert new == numbers().tables[0]


def test_profile_of_a_written_file_changes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(SOURCE)
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    write_measured(str(first), str(tmp_path / "ours.yaml"), 4, numbers())
    write_measured(str(second), str(first), 4, numbers())
    left, right = yaml.safe_load(first.read_text()), yaml.safe_load(second.read_text())
    assert left == right


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("launch", "compute.launch: missing"),
        ("memory_bandwidth", "memory_bandwidth: missing"),
        ("lookup_efficiency", "compute.lookup_efficiency: missing"),
        ("matmul", "compute.matmul.f32: missing"),
    ],
)
def test_missing_number_is_named_with_the_way_to_get_it(missing: str, words: str, tmp_path: Path) -> None:
    entry = {
        "count": 1, "type": "cpu", "model": "C", "memory": "1 GiB", "memory_bandwidth": "1 GB/s",
        "measured": {"f32": "1 GFLOP/s"},
        "compute": {
            "launch": "1 us", "memory_efficiency": 1.0, "lookup_efficiency": 1.0,
            "matmul": {"f32": {"efficiency": 1.0, "half": [1, 1, 1]}},
        },
    }  # fmt: skip
    for place in (entry, entry["compute"]):
        assert isinstance(place, dict)
        place.pop(missing, None)
    path = tmp_path / "partial.yaml"
    path.write_text(yaml.safe_dump({"name": "partial", "machines": [{"devices": entry}]}))
    cost = ComputeCost(load_cluster(path))
    kind = {"memory_bandwidth": "memory", "lookup_efficiency": "lookup"}.get(missing, missing)
    with pytest.raises(ResourceError) as caught:
        cost.time(0, kind, 8.0, 8.0, "f32", (1, 2, 2, 1))
    assert str(path) in str(caught.value)
    assert f"machines[0].devices.{words}" in str(caught.value)
    assert "distgraph profile" in str(caught.value)
