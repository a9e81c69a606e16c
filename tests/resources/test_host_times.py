"""Times of the host: which stand in a resource file, which a runtime model replaces, what they add up to."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.files.clusters import cluster_of
from support.programs.forecasts import document

from distgraph.errors import ResourceError
from distgraph.resources import load_cluster
from distgraph.resources.host_times import HostTimes, busy_seconds, busy_share
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
    """Inside a machine for all the time if all of them do, between machines for the largest stated part."""
    moves, other = HostTimes(message=0.0), HostTimes(op=1.0)
    assert moves.moves_messages
    assert not other.moves_messages
    assert (busy_share([moves, moves], one_machine=True), busy_share([moves, other], one_machine=True)) == (
        1,
        0,
    )
    assert busy_share([moves, other], one_machine=False) == 0
    parts = [HostTimes(network_busy=0.25), HostTimes(network_busy=0.75), moves]
    assert (busy_share(parts, one_machine=False), busy_share(parts, one_machine=True)) == (0.75, 0)
    assert [busy_seconds(3.0, None, share) for share in (0.0, 0.5, 1.0)] == [0.0, 1.5, 3.0]
    assert busy_seconds(3.0, 2.0, 0.0) == 2.0
    assert busy_seconds(3.0, 4.0, 1.0) == 3.0


def test_the_section_of_a_resource_file() -> None:
    described = document(2)
    described["machines"][0]["devices"]["compute"]["host"] = {
        "op": "3 us",
        "message": "0 s",
        "network_busy": 0.5,
    }
    assert cluster_of(described).devices[1].compute.host == HostTimes(3e-6, message=0.0, network_busy=0.5)
    for wrong in ({"issue": "3 us"}, {"network_busy": 1.5}, {"network_busy": "3 us"}):
        described["machines"][0]["devices"]["compute"]["host"] = wrong
        with pytest.raises(ResourceError, match=r"machines\[0\]\.devices\.compute\.host"):
            cluster_of(described)


def test_numbers_of_the_section_have_an_origin_each() -> None:
    cluster = load_cluster("vtrain_a100")
    assert cluster.devices[0].compute.host == HostTimes(op=37.9e-6)
    assert str(cluster.origin_of("machines[0].devices.compute.host.op")).startswith("fitted within 0.89%")


@pytest.mark.parametrize(("name", "stated"), [("message", "1 us"), ("network_busy", "0.5")])
def test_a_runtime_does_not_move_messages(tmp_path: Path, name: str, stated: str) -> None:
    path = tmp_path / "mine.yaml"
    source = f"sources: {{host.{name}: {{kind: guess, about: a}}}}"
    path.write_text(f"name: mine\nabout: a test\nhost: {{{name}: {stated}}}\n{source}\n")
    with pytest.raises(ResourceError, match=f"no {name}: who moves messages is a matter of the hardware"):
        load_runtime(str(path))
