"""Hosts of a job: where they are named, which rank gets which, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from distgraph.errors import RuntimeFault
from distgraph.plan.placement import PlacedRanks
from distgraph.runtime.launch import host_check, launch_hosts
from distgraph.runtime.launch.host_assignment import HostAssignment, assign_hosts
from distgraph.runtime.launch.host_check import RemoteShell, ask_hosts, check_hosts
from distgraph.runtime.launch.host_probe import GpuFacts, HostFacts, probe
from distgraph.runtime.launch.hosts import Host, hosts_from_environment, parse_hosts, read_hostfile
from distgraph.runtime.launch.launch_hosts import mpiexec_command, srun_command
from distgraph.runtime.launch.process_placement import placement_in, remapped

GIB = 1 << 30


def host_of(assignment: HostAssignment) -> dict[int, str]:
    hosts = zip(assignment.hosts, assignment.ranks, strict=True)
    return {rank: host.name for host, ranks in hosts for rank in ranks}


def part(
    machine: str, ranks: Sequence[int], kind: str = "cpu", memory: int = GIB, count: int = 2
) -> PlacedRanks:
    return PlacedRanks(
        machine=machine,
        type=kind,
        model="share",
        memory=memory,
        count=4,
        ranks=tuple(ranks),
        devices=tuple(range(len(ranks))),
    )


CROSSED = (part("m0", [0, 2]), part("m1", [1, 3]))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:4,b:4", (Host("a", 4), Host("b", 4))),
        ("a, 10.0.0.2:2,[fe80::1]:3", (Host("a", 1), Host("10.0.0.2", 2), Host("[fe80::1]", 3))),
    ],
)
def test_host_lists(text: str, hosts: tuple[Host, ...]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a:0", "a:b", "a,,b", "-oProxyCommand=x:1", "a b", "a:1000000"])
def test_malformed_host_lists(text: str) -> None:
    with pytest.raises(RuntimeFault, match="--hosts: expected"):
        parse_hosts(text)


def test_hostfiles(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two kinds\na:2\nb slots=3 max_slots=4  # Open MPI\nc\na\n")
    assert read_hostfile(path) == (Host("a", 2), Host("b", 3), Host("c", 1), Host("a", 1))
    path.write_text("a\nb slots=many\n")
    with pytest.raises(
        RuntimeFault, match=r"hosts:2: expected a host and its slots such as a:4, got 'b slots"
    ):
        read_hostfile(path)
    with pytest.raises(RuntimeFault, match=r"hostfile .*none cannot be read"):
        read_hostfile(tmp_path / "none")


def test_hosts_of_batch_systems(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("x\nx\ny\n")
    for name in ("PBS_NODEFILE", "OMPI_MCA_orte_default_hostfile", "HYDRA_HOST_FILE"):
        assert hosts_from_environment({name: str(path)}) == (Host("x", 1), Host("x", 1), Host("y", 1))
    slurm = {"SLURM_JOB_NODELIST": "n[08-10,12]-ib,login", "SLURM_TASKS_PER_NODE": "4(x3),2(x2)"}
    assert hosts_from_environment(slurm) == (
        Host("n08-ib", 4), Host("n09-ib", 4), Host("n10-ib", 4), Host("n12-ib", 2), Host("login", 2)
    )  # fmt: skip
    assert hosts_from_environment({}) == ()
    with pytest.raises(RuntimeFault, match="is for 2 nodes but SLURM_JOB_NODELIST has 1"):
        hosts_from_environment({"SLURM_JOB_NODELIST": "a", "SLURM_TASKS_PER_NODE": "1,2"})
    with pytest.raises(RuntimeFault, match=r"SLURM_JOB_NODELIST: expected a list such as n\[01-04,7\]"):
        hosts_from_environment({"SLURM_JOB_NODELIST": "n[3-1]"})


def test_ranks_follow_the_slots_without_a_plan() -> None:
    assignment = assign_hosts(4, parse_hosts("b,a,b,a"))
    assert assignment.hosts == (Host("b", 2), Host("a", 2))
    assert assignment.ranks == ((0, 2), (1, 3))
    assert assignment.order == (0, 2, 1, 3)


def test_machines_of_a_plan_are_hosts_of_their_name() -> None:
    assignment = assign_hosts(5, parse_hosts("m1.site:2,other:1,m0:2"), CROSSED)
    assert host_of(assignment) == {0: "m0", 1: "m1.site", 2: "m0", 3: "m1.site", 4: "other"}
    reported = assign_hosts(
        4, parse_hosts("10.0.0.2:2,10.0.0.1:2"), CROSSED, aliases={"10.0.0.2": "m1", "10.0.0.1": "m0"}
    )
    assert host_of(reported) == {0: "10.0.0.1", 1: "10.0.0.2", 2: "10.0.0.1", 3: "10.0.0.2"}


def test_equal_machines_go_where_the_slots_suffice_and_others_in_order() -> None:
    uneven = (part("m0", [0]), part("m1", [1, 2, 3]))
    assert host_of(assign_hosts(4, parse_hosts("a:1,b:3"), uneven)) == {0: "a", 1: "b", 2: "b", 3: "b"}
    assert host_of(assign_hosts(4, parse_hosts("a:3,b:1"), uneven)) == {0: "b", 1: "a", 2: "a", 3: "a"}
    mixed = (part("m0", [0], memory=2 * GIB), part("m1", [1]))
    assert host_of(assign_hosts(2, parse_hosts("a:2,b:2"), mixed)) == {0: "a", 1: "b"}


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("a:2,b:1", "4 ranks need 4 slots but hosts a:2,b:1 have 3; rank 3 has none"),
        ("m0:2,x:2", "places rank 1 on machine m1, which is not among hosts m0, x"),
        ("a:4", "places ranks on 2 machines but there are 1 hosts; rank 1 on machine m1 has none"),
        ("a:3,b:1", r"places ranks 1, 3 on machine m1 but host b has 1 slots; rank 3 has none; give it 2"),
    ],
)
def test_hosts_that_do_not_fit(hosts: str, message: str) -> None:
    with pytest.raises(RuntimeFault, match=message):
        assign_hosts(4, parse_hosts(hosts), CROSSED)


def facts(**changes: object) -> HostFacts:
    return replace(probe(__file__), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("placement", "found", "message"),
    [
        (CROSSED, {"script": False}, "does not exist on host m0 of rank 0"),
        (CROSSED, {"version": "0"}, "host m0 of rank 0 has distgraph 0 but the launcher has"),
        ((part("m0", [0, 1], "gpu"),), {"gpus": ()}, "host m0 has no GPU; rank 0 needs GPU 0"),
        (
            (part("m0", [0, 1], "gpu"),),
            {"gpus": (GpuFacts("A", 8 * GIB),)},
            "host m0 has 1 GPUs; rank 1 needs GPU 1",
        ),
        (
            (part("m0", [0], "gpu", 16 * GIB),),
            {"gpus": (GpuFacts("A", 8 * GIB),)},
            "with 16 GiB memory but GPU 0 of host m0, A, has 8 GiB; rank 0 needs more",
        ),
        ((part("m0", [0, 1], memory=4 * GIB),), {"memory": GIB}, "4 GiB memory each but host m0 has 1 GiB"),
    ],
)
def test_hosts_that_lack_something(
    placement: tuple[PlacedRanks, ...], found: dict[str, object], message: str
) -> None:
    hosts = parse_hosts("m0:2,m1:2")
    count = 1 + max(rank for each in placement for rank in each.ranks)
    assignment = assign_hosts(count, hosts, placement)
    with pytest.raises(RuntimeFault, match=message):
        check_hosts(assignment, placement, "s.py", {"m0": facts(**found), "m1": facts()})


def shell(folder: Path, body: str) -> RemoteShell:
    path = folder / "shell"
    path.write_text(f"#!/bin/sh\nhost=$1; shift\n{body}\n")
    path.chmod(0o755)
    return RemoteShell(str(path))


def test_hosts_are_asked(tmp_path: Path) -> None:
    found = ask_hosts(["far"], __file__, os.environ, shell(tmp_path, 'exec sh -c "$*"'))["far"]
    assert found == replace(probe(__file__), clock=found.clock, cores=found.cores)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            'echo "no route to host" >&2; exit 255',
            "host far cannot be reached .*: no route to host",
        ),
        ("sleep 60", "host far has not answered by shell in 0 s"),
        (
            f"""exec sh -c "$*" | {sys.executable} -c 'import json, sys
print(json.dumps(json.load(sys.stdin) | {{"clock": 1e9}}))'""",
            "the clock of host far differs by .* s",
        ),
    ],
)
def test_hosts_that_do_not_answer(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_check, "ANSWER_SECONDS", 0.2 if "sleep" in body else 20.0)
    with pytest.raises(RuntimeFault, match=message):
        ask_hosts(["far"], "", os.environ, shell(tmp_path, body))


def test_no_remote_shell() -> None:
    with pytest.raises(RuntimeFault, match="/no/shell cannot be started"):
        ask_hosts(["far"], "", os.environ, RemoteShell("/no/shell"))


def test_commands(tmp_path: Path) -> None:
    assignment = assign_hosts(4, parse_hosts("b:2,a:2"), CROSSED, aliases={"a": "m0", "b": "m1"})
    ranks = ["python", "x.py"]
    mpiexec = mpiexec_command(assignment, ranks, RemoteShell())
    assert mpiexec[1:] == ["-launcher", "ssh", "-hosts", "b:2,a:2", "-n", "4", *ranks]
    assert mpiexec_command(assignment, ranks, RemoteShell("srun"))[1:3] == ["-launcher", "slurm"]
    assert mpiexec_command(assignment, ranks, RemoteShell("/x"))[1:5] == [
        "-launcher",
        "ssh",
        "-launcher-exec",
        "/x",
    ]
    command, variables = srun_command(assignment, ranks, tmp_path / "hosts")
    assert command == [
        "srun", "--ntasks=4", "--distribution=arbitrary", "--mpi=pmi2", "--cpu-bind=none",
        "--kill-on-bad-exit=1", *ranks,
    ]  # fmt: skip
    assert Path(variables["SLURM_HOSTFILE"]).read_text() == "b\nb\na\na\n"
    assert assignment.order == (1, 3, 0, 2)
    assert RemoteShell("srun").command("a", ["x"], {})[:2] == ["srun", "--overlap"]
    assert "BatchMode=yes" in RemoteShell().command("a", ["x"], {})


def test_processes_become_the_ranks_of_their_host() -> None:
    """Given by something else: those of one host are the ranks that the plan places on one machine."""
    order, notes = remapped(["a", "a", "b", "b"], CROSSED, "p.json")
    assert order == (0, 2, 1, 3)
    assert notes == ("note: ranks are mapped to the processes as plan p.json places them: a: 0, 2; b: 1, 3",)
    assert remapped(["m1", "m0", "m1", "m0"], CROSSED, "p.json")[0] == (1, 0, 3, 2)
    assert remapped(["a", "b", "a", "b"], CROSSED, "p.json") == ((0, 1, 2, 3), ())


def test_processes_that_the_plan_does_not_fit() -> None:
    order, notes = remapped(["a", "a", "a", "b"], CROSSED, "p.json")
    assert sorted(order) == [0, 1, 2, 3]
    assert {order[process] for process in range(3)} >= {0, 2}
    assert notes[-1].startswith(
        "note: plan p.json places ranks 1, 3 on one machine, m1, but they run on a, b"
    )
    order, notes = remapped(["a"] * 4, CROSSED, "p.json")
    assert order == (0, 1, 2, 3)
    assert notes == ("note: plan p.json is for 2 machines but all ranks run on a",)
    assert remapped(["a", "b"], CROSSED, "p.json") == ((0, 1), ())  # fewer than ranks: the engine says so


def test_placement_of_a_file_that_is_no_plan() -> None:
    entry = {
        "machine": "m",
        "type": "cpu",
        "model": "x",
        "memory": 1,
        "count": 2,
        "ranks": "0-1",
        "devices": "0-1",
    }
    assert placement_in(json.dumps({"placement": [entry]}).encode())[0].ranks == (0, 1)
    for text in (b"", b"[]", b"{", b'{"placement": [{}]}', b'{"placement": 3}'):
        assert placement_in(text) == ()


def test_unknown_launcher() -> None:
    with pytest.raises(RuntimeFault, match="launcher is 'make' but must be one of mpiexec, srun"):
        launch_hosts.launch_on_hosts(1, [__file__], parse_hosts("a"), launcher="make")
