"""Devices of the library in resource files, and where numbers come from."""

from __future__ import annotations

from typing import Any

import pytest
from support.files.clusters import cluster_of, machine

from distgraph.errors import ResourceError
from distgraph.resources import Cluster
from distgraph.resources.schema import library_devices
from distgraph.resources.units import Origin

WHERE = "machines[0].devices"


def one_machine(devices: Any, **fields: Any) -> Cluster:
    return cluster_of({"name": "x", "machines": [machine(1, "m", devices=devices)], **fields})


@pytest.mark.parametrize("name", library_devices())
def test_every_device_of_the_library_can_be_named_and_states_all_its_origins(name):
    cluster = one_machine({"count": 2, "type": name})
    (device, _) = cluster.devices
    assert (device.model, device.machine) == (name, 0)
    assert device.compute.launch is not None
    assert device.compute.memory_efficiency is not None
    assert device.compute.lookup_efficiency is not None
    assert set(device.compute.matmul) == set(device.peak)
    numbers = ["memory", "memory_bandwidth", "compute.launch", "compute.memory_efficiency"]
    numbers += [f"peak.{dtype}" for dtype in device.peak]
    numbers += [f"compute.matmul.{dtype}" for dtype in device.compute.matmul]
    for number in numbers:
        origin = cluster.origin_of(f"{device.origin}.{number}")
        assert origin is not None, number
        assert origin.kind in ("data sheet", "published", "fitted", "guess")
        if origin.kind == "guess":
            assert origin.error is not None
            assert origin.error >= 0.25, number
        if number.startswith(("memory", "peak")) and number != "peak.f32":
            assert origin.kind == "data sheet"


def test_a_guess_is_stated_with_a_wider_error_than_what_was_measured_of_the_same_device():
    for name in library_devices():
        cluster = one_machine({"type": name})
        origins = [origin for path, origin in cluster.origins.items() if ".compute.matmul" in path]
        known = [origin.error for origin in origins if origin.kind in ("published", "measured")]
        guessed = [origin.error for origin in origins if origin.kind == "guess"]
        assert all(min(guessed, default=1) > error for error in known if error is not None), name


def test_fields_of_the_file_replace_those_of_the_library_one_by_one():
    given = {
        "type": "H100-SXM5-80GB",
        "memory": "94 GB",
        "peak": {"f8": "1 PFLOP/s"},
        "compute": {"launch": "9 us", "matmul": {"bf16": {"efficiency": 0.5, "half": [0, 0, 0]}}},
        "origin": {"memory": "data sheet", "compute": "measured within 3%; here"},
    }
    cluster, plain = one_machine(given), one_machine({"type": "H100-SXM5-80GB"})
    (device,), (library,) = cluster.devices, plain.devices
    assert (device.type, device.model, device.memory) == ("gpu", "H100-SXM5-80GB", 94e9)
    assert device.peak == {**library.peak, "f8": 1e15}
    assert (device.compute.launch, device.compute.lookup_efficiency) == (9e-6, 0.3)
    assert device.compute.matmul["bf16"].efficiency == 0.5
    assert device.compute.matmul["f32"] == library.compute.matmul["f32"]
    assert str(cluster.origin_of(f"{WHERE}.compute.launch")) == "measured within 3%; here"
    assert cluster.origin_of(f"{WHERE}.memory_bandwidth") == plain.origin_of(f"{WHERE}.memory_bandwidth")
    assert cluster.origin_of(f"{WHERE}.peak.f8") is None  # the file gives another rate without its origin


def test_one_origin_for_all_is_of_the_numbers_that_the_file_states():
    cluster = one_machine({"type": "TPU-v4", "memory": "16 GiB", "origin": "measured"})
    assert cluster.origin_of(f"{WHERE}.memory") == Origin("measured")
    peak = cluster.origin_of(f"{WHERE}.peak.bf16")
    assert peak is not None
    assert peak.kind == "data sheet"


def test_origins_of_launch_links_and_tables():
    table = {"collective": "all_reduce", "machines": 1, "devices_per_machine": 1, "sizes": ["1 MiB"]}
    entry = machine(2, "m", inside={"topology": "full", "bandwidth": "1 GB/s", "origin": "data sheet; v2"})
    entry["nics"]["attach"]["origin"] = {"latency": "guess within 20%"}
    cluster = cluster_of(
        {
            "name": "x",
            "launch": "1 us",
            "origin": "published",
            "machines": [entry],
            "measured": [{**table, "times": ["1 us"], "origin": "measured"}],
        }
    )
    assert cluster.origin_of("launch") == Origin("published")
    assert cluster.origin_of("machines[0].inside.bandwidth") == Origin("data sheet", None, "v2")
    assert cluster.origin_of("machines[0].nics.attach.latency") == Origin("guess", 0.2)
    assert cluster.origin_of("machines[0].nics.attach.bandwidth") is None
    assert cluster.origin_of("measured[0]") == Origin("measured")


@pytest.mark.parametrize(
    "text", ["data sheet", "fitted within 2.4%; a, b", "guess within 50%", "measured; x"]
)
def test_origins_are_written_as_they_are_read(text):
    assert str(Origin.parse(text)) == text


FORM = 'an origin such as "data sheet" or "guess within 50%; as of the A100" (docs/planning/resources.md)'


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"origin": "guess"}, f'{WHERE}.origin: expected {FORM}, got "guess"'),
        ({"origin": {"memory": "rumour"}}, f'{WHERE}.origin.memory: expected {FORM}, got "rumour"'),
        ({"origin": "data sheet, 2 %"}, f"{WHERE}.origin: expected {FORM}"),
        (
            {"origin": {"compute.lunch": "measured"}},
            f"{WHERE}: expected origin of numbers that are stated (memory, peak.f32), not of compute.lunch",
        ),
        ({"origin": ["measured"]}, f"{WHERE}.origin: expected a mapping, got"),
        ({"type": "A100"}, f"{WHERE}.type: expected one of 'gpu', 'xpu', 'cpu', 'tpu' or 'npu', or a device"),
        ({"type": "TPU-v4", "compute": 3}, f"{WHERE}.compute: expected a mapping of fields, got 3"),
        ({"type": "TPU-v4", "peak": {"bf16": "fast"}}, f"{WHERE}.peak.bf16: expected a compute rate"),
        ({"type": "TPU-v4", "origin": 7}, f"{WHERE}.origin: expected a mapping, got 7"),
    ],
)
def test_mistakes(fields, message):
    given = {"type": "gpu", "model": "G", "memory": "1 GiB", "peak": {"f32": "1 TFLOP/s"}, **fields}
    with pytest.raises(ResourceError) as caught:
        one_machine(given)
    assert f"test.yaml: {message}" in str(caught.value)


def test_origin_of_a_link_that_states_no_such_number():
    entry = machine(2, "m", inside={"topology": "full", "origin": {"latency": "data sheet"}})
    with pytest.raises(
        ResourceError, match=r"inside: expected origin of numbers that are stated \(none\), not of"
    ):
        cluster_of({"name": "x", "machines": [entry]})
