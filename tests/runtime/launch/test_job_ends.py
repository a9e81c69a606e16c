"""Ends of a job that nobody asked for: a process is stopped, signals to the launcher, a rank that leaves."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distgraph.errors import RuntimeFault
from distgraph.runtime.job.heartbeat import Silence, heartbeat_limit, interval
from distgraph.runtime.job.processes import Process, write_processes
from distgraph.runtime.launch import launch as launcher
from distgraph.runtime.launch import monitor as monitor_module
from distgraph.runtime.launch.monitor import Monitor, Signals

needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")

PREAMBLE = """
import os, signal, sys
import numpy as np
from distgraph.runtime.launch.mpi_rank import current_transport
t = current_transport()
rank, everyone = t.rank, tuple(range(t.size))
t.barrier()
"""
TELLS = 'print("pid", rank, os.getpid(), flush=True)'
WAITS = f"{PREAMBLE}{TELLS}\nt.recv(np.zeros(1), rank, 4).wait()\n"  # for a message that nobody sends

STOPS_WHILE_IT_SENDS = f"""{PREAMBLE}{TELLS}
import pathlib, time
poll, announced = t.poll, pathlib.Path(__file__).with_name("announced")

def stop(ready, what, need=None):
    until = time.monotonic() + 0.5  # in which the message is announced; rank 0 does not receive it yet
    while time.monotonic() < until:
        assert not ready()
    announced.touch()
    os.kill(os.getpid(), signal.SIGSTOP)
    poll(ready, what, need)

if rank == 1:
    t.poll = stop
while rank == 0 and not announced.exists():
    t.progress()
t.gather_objects(bytes(10**8))
"""


class Job:
    """A launcher in a process of its own, and the processes of rank 0 and of those that started it."""

    def __init__(self, script: str, ranks: int, folder: Path, **env: str) -> None:
        path = folder / "script.py"
        path.write_text(textwrap.dedent(script))
        code = (
            "from distgraph.runtime.launch.launch import launch; "
            f"raise SystemExit(launch({ranks}, [{str(path)!r}]))"
        )
        (folder / "tmp").mkdir()
        self.directory = folder / "tmp"
        self.launcher = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.directory), **env},
        )
        assert self.launcher.stdout is not None
        lines = [self.launcher.stdout.readline().split() for _ in range(ranks)]
        self.ranks = {int(rank): int(pid) for _, rank, pid in lines}
        self.processes = {"launcher": self.launcher.pid}
        for name in ("supervisor", "proxy", "mpiexec"):
            below = list(self.processes.values())[-1] if name != "supervisor" else self.ranks[0]
            self.processes[name] = parent(below)
        self.processes["rank"] = self.ranks[0]
        everybody = {*self.processes.values(), *self.ranks.values(), *map(parent, self.ranks.values())}
        self.watches = {Process.of(pid): os.pidfd_open(pid) for pid in everybody}

    def await_watched(self) -> None:
        """Until the launcher watches the supervisors of all ranks."""
        wanted = {parent(pid) for pid in self.ranks.values()}
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            watched = set()
            for path in Path(f"/proc/{self.launcher.pid}/fdinfo").iterdir():
                with contextlib.suppress(OSError):
                    lines = (line.split() for line in path.read_text().splitlines())
                    watched |= {int(line[1]) for line in lines if line[0] == "Pid:"}
            if wanted <= watched:
                return
        pytest.fail("the launcher does not watch its supervisors")

    def end(self) -> tuple[int, str]:
        """Exit code and standard error; nothing is left of the job."""
        _, errors = self.launcher.communicate(timeout=60)
        for process, watch in self.watches.items():
            assert process is not None
            ready, _, _ = select.select([watch], [], [], 10)
            assert ready, f"process {process} is left"
            os.close(watch)
        assert list(self.directory.iterdir()) == []
        return self.launcher.returncode, errors


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@needs_mpi
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("supervisor", "supervisor of rank 0 (process {pid}) is stopped since 2 s"),
        ("proxy", "hydra_pmi_proxy (process {pid}) is stopped since 2 s"),
        ("mpiexec", "mpiexec"),
        ("rank", "rank 0 (process {pid}) is stopped"),
    ],
)
def test_a_stopped_process_ends_the_job(tmp_path: Path, name: str, text: str) -> None:
    job = Job(WAITS, 2, tmp_path, DISTGRAPH_HEARTBEAT="2", DISTGRAPH_TIMEOUT="2" if name == "rank" else "100")
    pid = job.processes[name]
    os.kill(pid, signal.SIGSTOP)
    code, errors = job.end()
    assert code == 1
    assert text.format(pid=pid) in errors, errors
    assert "stopped" in errors


@needs_mpi
def test_a_rank_that_stops_while_it_sends_a_large_object_ends_the_job(tmp_path: Path) -> None:
    """Between machines, which these settings imitate, the receiver needs the sender until all has arrived."""
    network = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "all"}
    job = Job(STOPS_WHILE_IT_SENDS, 2, tmp_path, DISTGRAPH_HEARTBEAT="100", DISTGRAPH_TIMEOUT="2", **network)
    code, errors = job.end()
    assert code == 1
    assert "rank 0: object from rank 1 made no progress in 2 s" in errors, errors


@needs_mpi
def test_a_stopped_launcher_ends_the_ranks(tmp_path: Path) -> None:
    job = Job(WAITS, 2, tmp_path, DISTGRAPH_HEARTBEAT="1")
    os.kill(job.launcher.pid, signal.SIGSTOP)
    for process, watch in job.watches.items():
        assert process is not None
        if process.pid in job.ranks.values():
            assert select.select([watch], [], [], 30)[0]
    os.kill(job.launcher.pid, signal.SIGCONT)
    code, errors = job.end()
    assert code == 1
    assert f"launcher (process {job.launcher.pid}) is stopped since 1 s, all 2 ranks are stopped" in errors


@needs_mpi
@pytest.mark.parametrize("name", ["launcher", "supervisor", "proxy", "mpiexec"])
def test_a_killed_process_leaves_no_other(tmp_path: Path, name: str) -> None:
    job = Job(WAITS, 2, tmp_path)
    job.await_watched()
    os.kill(job.processes[name], signal.SIGKILL)
    code, errors = job.end()
    assert code != 0
    if name == "supervisor":
        assert code == 128 + signal.SIGKILL
        known = re.fullmatch(  # mpiexec may have killed the other before the launcher looked
            "error: supervisor of rank (0|0 or 1) was killed by SIGKILL, all 2 ranks are stopped\n", errors
        )
        assert known, errors
    elif name != "launcher":
        assert errors.count("error: ") == 1


class Kills(Signals):
    """Instead of sleeping, first let the monitor find its processes, then kill some, then end mpiexec."""

    def __init__(self, killed: list[subprocess.Popen[bytes]], mpiexec: subprocess.Popen[bytes]) -> None:
        super().__init__()
        self.rounds = iter([[], killed, [mpiexec]])

    def sleep(self, seconds: float, *watched: int) -> None:
        for process in next(self.rounds):
            process.kill()
            process.wait()


@pytest.mark.parametrize("killed", [[0], [1], [0, 1], [2, 1]])
def test_the_monitor_names_all_supervisors_that_may_have_ended_first(
    tmp_path: Path, killed: list[int]
) -> None:
    with contextlib.ExitStack() as stack:
        *supervisors, mpiexec = [stack.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(4)]
        stack.callback(lambda: [process.kill() for process in (*supervisors, mpiexec)])
        for rank, process in enumerate(supervisors):
            write_processes(tmp_path / f"supervisor.{rank}", [process.pid])
        monitor = Monitor(mpiexec.pid, tmp_path, len(supervisors), {})
        assert monitor.watch(Kills([supervisors[rank] for rank in killed], mpiexec)) is None
        assert monitor.lost == sorted(killed)


@pytest.mark.parametrize(("code", "lost"), [("137", []), ("1", []), (None, [1])])
def test_the_launcher_ends_a_job_whose_mpiexec_does_not_notice_the_end_of_a_rank(
    tmp_path: Path, code: str | None, lost: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPICH's mpiexec misses it now and then; the other ranks would wait until their time limit."""
    monkeypatch.setattr(monitor_module, "_OVERDUE", 1.0)
    with contextlib.ExitStack() as stack:
        *supervisors, mpiexec = [stack.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(4)]
        stack.callback(lambda: [process.kill() for process in (*supervisors, mpiexec)])
        for rank, process in enumerate(supervisors):
            write_processes(tmp_path / f"supervisor.{rank}", [process.pid])
        monitor = Monitor(mpiexec.pid, tmp_path, len(supervisors), {})
        (tmp_path / "closed.0").write_text("0")  # it has come to the end of its script
        supervisors[0].kill()
        if code is not None:
            (tmp_path / "closed.1").write_text(code)
        threading.Timer(0.1, supervisors[1].kill).start()
        with Signals() as signals:
            assert monitor.watch(signals) is None
        assert mpiexec.poll() is None
        assert (monitor.overdue, monitor.lost) == (True, lost)


@needs_mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_a_supervisor_is_named(tmp_path: Path, number: signal.Signals) -> None:
    job = Job(WAITS, 2, tmp_path)
    os.kill(job.processes["supervisor"], number)
    text = f"error: supervisor of rank 0 was killed by {number.name}, all 2 ranks are stopped\n"
    assert job.end() == (128 + number, text)


@needs_mpi
@pytest.mark.parametrize(
    ("number", "text"), [(signal.SIGTERM, "terminated (SIGTERM)"), (signal.SIGHUP, "ended by SIGHUP")]
)
def test_a_signal_to_the_launcher_is_named(tmp_path: Path, number: signal.Signals, text: str) -> None:
    job = Job(WAITS, 2, tmp_path)
    job.launcher.send_signal(number)
    assert job.end() == (128 + number, f"error: {text}; all ranks are stopped\n")


@needs_mpi
def test_an_interrupt_lets_ranks_end_in_order(tmp_path: Path) -> None:
    """As Ctrl-C does in a single process: `finally` runs on every rank."""
    script = f"""{PREAMBLE}
try:
    {TELLS}
    t.recv(np.zeros(1), rank, 4).wait()
finally:
    open(os.path.join({str(tmp_path)!r}, f"finally.{{rank}}"), "w").close()
"""
    job = Job(script, 2, tmp_path)
    job.launcher.send_signal(signal.SIGINT)
    assert job.end() == (130, "error: interrupted; all ranks are stopped\n")
    assert sorted(path.name for path in tmp_path.glob("finally.*")) == ["finally.0", "finally.1"]


@needs_mpi
def test_ctrl_c_has_no_effect_below_the_launcher(tmp_path: Path) -> None:
    script = f"""{PREAMBLE}{TELLS}
while not os.path.exists({str(tmp_path / "go")!r}):
    __import__("select").select([], [], [], 0.01)
"""
    job = Job(script, 2, tmp_path)
    for name in ("supervisor", "proxy", "mpiexec"):
        os.kill(job.processes[name], signal.SIGINT)
    (tmp_path / "go").touch()
    assert job.end() == (0, "")


@needs_mpi
def test_a_second_interrupt_ends_ranks_that_do_not_listen(tmp_path: Path) -> None:
    script = f"""{PREAMBLE}{TELLS}
signal.signal(signal.SIGINT, lambda *_: print("heard", flush=True))
while not os.path.exists({str(tmp_path / "go")!r}):
    __import__("select").select([], [], [], 0.01)
print("deaf", flush=True)
t.recv(np.zeros(1), rank, 4).wait()
"""
    job = Job(script, 2, tmp_path)
    (tmp_path / "go").touch()  # lines of different ranks may overtake each other
    assert job.launcher.stdout is not None
    said = iter(job.launcher.stdout.readline, "")

    def wait_for(word: str) -> Iterator[str]:
        return (line for line in said if line.strip() == word)

    assert [next(wait_for("deaf")) for _ in range(2)]
    job.launcher.send_signal(signal.SIGINT)
    assert [next(wait_for("heard")) for _ in range(2)]
    job.launcher.send_signal(signal.SIGINT)
    assert job.end() == (130, "error: interrupted; all ranks are stopped\n")


@needs_mpi
def test_a_rank_that_ends_without_a_report_is_no_success(tmp_path: Path) -> None:
    """mpiexec stops all others and gives 0."""
    path, errors = tmp_path / "script.py", io.StringIO()
    path.write_text(f"{PREAMBLE}\nif rank == 1: os._exit(0)\nt.recv(np.zeros(1), rank, 4).wait()\n")
    assert launcher.launch(2, [str(path)], stderr=errors) == 1
    assert "rank 1 has ended without ending MPI" in errors.getvalue()


def plain(tmp_path: Path, script: str, ranks: int, **env: str) -> tuple[int, str]:
    """Exit code and standard error of a script under mpiexec."""
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [launcher.find_mpiexec(), "-n", str(ranks), sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **env},
    )
    return done.returncode, done.stderr


LEAVES = {
    "barrier": "t.barrier()",
    "collective": "t.all_reduce(np.zeros(10), 'sum', everyone).wait()",
    "recv": "t.recv(np.zeros(1), 1, 4).wait() if rank == 0 else t.barrier()",
    "send": "t.send(np.zeros(10_000_000), 1, 4).wait() if rank == 0 else t.barrier()",
    "objects": "t.broadcast_object(None, root=1)",
}


@needs_mpi
@pytest.mark.parametrize("wait", LEAVES.values(), ids=LEAVES.keys())
def test_exit_of_one_rank_ends_plain_mpiexec_with_its_code(tmp_path: Path, wait: str) -> None:
    """Long before the time limit: what rank 0 waits for can not come any more."""
    script = f"{PREAMBLE}\nif rank == 1: sys.exit(4)\n{wait}\n"
    code, errors = plain(tmp_path, script, 2, DISTGRAPH_TIMEOUT="1000")
    assert code == 4
    assert "waits for rank 1, which has come to the end of the script" in errors


@needs_mpi
def test_exit_code_is_kept_while_a_process_of_the_script_holds_the_output_open(tmp_path: Path) -> None:
    """mpiexec's proxy then takes the signal, with which it kills the other ranks, for their exit codes."""
    script = f"""{PREAMBLE}
import subprocess
subprocess.Popen(["sleep", "1.5"], start_new_session=True)
if rank == 1: sys.exit(4)
t.barrier()
"""
    code, _ = plain(tmp_path, script, 2, DISTGRAPH_TIMEOUT="1000")
    assert code == 4


@needs_mpi
def test_a_rank_may_reach_the_end_first(tmp_path: Path) -> None:
    """The others go on with each other, and with what it has sent."""
    script = f"""{PREAMBLE}
others = (0, 2)
if rank == 1:
    t.send(np.ones(3), 0, 7)
else:
    for _ in range(3):
        t.recv(np.zeros(1), 2, 1).wait() if rank == 0 else (t.all_reduce(np.zeros(9), "sum", (2,)).wait(),
            __import__("select").select([], [], [], 0.2), t.send(np.zeros(1), 0, 1).wait())
        t.all_reduce(np.zeros(100), "sum", others).wait()
    if rank == 0:
        x = np.zeros(3)
        t.recv(x, 1, 7).wait()
        assert x.tolist() == [1, 1, 1]
"""
    assert plain(tmp_path, script, 3) == (0, "")


@needs_mpi
def test_an_interrupt_after_the_end_of_the_script_is_ignored(tmp_path: Path) -> None:
    script = f"""{PREAMBLE}
from distgraph.runtime.transport.mpi import MpiTransport
finalize = MpiTransport.finalize
def press(transport):
    os.kill(os.getpid(), signal.SIGINT)
    finalize(transport)
MpiTransport.finalize = press
"""
    assert plain(tmp_path, script, 2) == (0, "")


@needs_mpi
@pytest.mark.parametrize("start", ["", "from mpi4py import MPI"], ids=["no MPI", "MPI"])
def test_a_rank_that_never_starts(tmp_path: Path, start: str) -> None:
    """MPI, which takes all of a core while it waits, has a second instead of five more than the limit."""
    soon = "from distgraph.runtime.launch import mpi_rank\nmpi_rank.FAILURE_REPORT_SECONDS = 1.0\n"
    script = f"import os, sys\n{start}\nif os.environ['PMI_RANK'] == '1': sys.exit(4)\n{soon}{PREAMBLE}"
    code, errors = plain(tmp_path, script, 2, DISTGRAPH_TIMEOUT="0.5")
    assert code != 0
    assert "look for a rank that has ended before" in errors


def test_silence_counts_only_while_this_process_runs() -> None:
    now, sign = 0.0, 1

    def after(seconds: float) -> float:
        nonlocal now
        now += seconds
        return silence.seconds()

    silence = Silence(lambda: sign, 1.0, lambda: now)
    assert after(1.0) == 0.0
    assert after(1.0) == 1.0
    assert after(100.0) == 3.0  # this process stood still itself
    sign = 2
    assert after(1.0) == 0.0
    sign = None  # type: ignore[assignment]
    assert (after(1.0), after(0.5)) == (1.0, 1.5)


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_limit_that_is_no_positive_number_is_refused(given: str, tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeFault, match="DISTGRAPH_HEARTBEAT: expected a positive number of seconds, got "
    ):
        heartbeat_limit({"DISTGRAPH_HEARTBEAT": given})
    script = tmp_path / "script.py"
    script.touch()
    if importlib.util.find_spec("mpi4py"):
        with pytest.raises(RuntimeFault, match="DISTGRAPH_HEARTBEAT"):
            launcher.launch(2, [str(script)], env={"DISTGRAPH_HEARTBEAT": given})


def test_heartbeats_come_several_times_within_the_limit() -> None:
    assert (interval(30.0), interval(2.0)) == (1.0, 0.2)
