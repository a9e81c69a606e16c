"""Times of the host: which stand in a resource file, which a runtime model replaces, what they add up to."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.files.clusters import cluster_of
from support.programs.forecasts import document

from distgraph.errors import ResourceError
from distgraph.resources import load_cluster
from distgraph.resources.host_times import HostTimes, busy_seconds
from distgraph.resources.runtimes.load_runtime import load_runtime


def test_a_runtime_replaces_the_times_that_it_states() -> None:
    hardware = HostTimes(op=1.0, step=2.0, message=3.0)
    assert hardware.replaced_by(HostTimes(op=5.0, micro_batch=0.0)) == HostTimes(5.0, None, 0.0, 2.0, 3.0)
    assert hardware.replaced_by(HostTimes(step=0.0)).step == 0.0


def test_a_task_waits_for_its_host() -> None:
    host = HostTimes(op=2.0, task=0.5, micro_batch=0.25)
    assert host.end_of_task(9.0, 3, micro_batch=False) == 9.5
    assert host.end_of_task(5.0, 3, micro_batch=True) == 6.75
    assert HostTimes().end_of_task(5.0, 3, micro_batch=True) == 5.0
    assert (HostTimes(message=2.0).ends_of_messages(3), HostTimes().ends_of_messages(3)) == (6.0, 0.0)


def test_devices_that_move_messages_are_busy_with_them() -> None:
    assert HostTimes(message=0.0).moves_messages
    assert not HostTimes(op=1.0).moves_messages
    assert busy_seconds(3.0, None, moved_by_devices=True) == 3.0
    assert busy_seconds(3.0, None, moved_by_devices=False) == 0.0
    assert busy_seconds(3.0, 2.0, moved_by_devices=False) == 2.0
    assert busy_seconds(3.0, 4.0, moved_by_devices=True) == 3.0


def test_the_section_of_a_resource_file() -> None:
    described = document(2)
    described["machines"][0]["devices"]["compute"]["host"] = {"op": "3 us", "message": "0 s"}
    assert cluster_of(described).devices[1].compute.host == HostTimes(op=3e-6, message=0.0)
    described["machines"][0]["devices"]["compute"]["host"] = {"issue": "3 us"}
    with pytest.raises(ResourceError, match=r"machines\[0\]\.devices\.compute\.host"):
        cluster_of(described)


def test_numbers_of_the_section_have_an_origin_each() -> None:
    cluster = load_cluster("vtrain_a100")
    assert cluster.devices[0].compute.host == HostTimes(op=37.9e-6)
    assert str(cluster.origin_of("machines[0].devices.compute.host.op")).startswith("fitted within 0.89%")


def test_a_runtime_does_not_move_messages(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    source = "sources: {host.message: {kind: guess, about: a}}"
    path.write_text(f"name: mine\nabout: a test\nhost: {{message: 1 us}}\n{source}\n")
    with pytest.raises(ResourceError, match="who moves messages is a matter of the hardware"):
        load_runtime(str(path))
