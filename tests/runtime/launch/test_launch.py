"""`launch`: output, exit codes, and that a rank which raises, exits or is killed takes all of them along."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from distgraph.errors import RuntimeFault
from distgraph.runtime.job.failure_report import FailureReport, read_reports, summary, write_report
from distgraph.runtime.launch import launch as launcher
from distgraph.runtime.launch import mpi_rank as rank_process

needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")

PREAMBLE = """
import os, signal, sys
import numpy as np
from distgraph.runtime.launch.mpi_rank import current_transport
t = current_transport()
rank, everyone = t.rank, tuple(range(t.size))
print("pid", os.getpid())
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def survivors(self) -> list[int]:
        """Ranks that still exist."""
        pids = [int(line.split()[1]) for line in self.out.splitlines() if line.startswith("pid ")]
        return [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than an entry that its parent has yet to collect."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start(tmp_path: Path, body: str, n: int = 3, preamble: str = PREAMBLE) -> Outcome:
    script = tmp_path / "script.py"
    script.write_text(preamble + textwrap.dedent(body))
    out, err = io.StringIO(), io.StringIO()
    code = launcher.launch(n, [str(script), "--flag", "two words"], stdout=out, stderr=err)
    return Outcome(code, out.getvalue(), err.getvalue())


@needs_mpi
def test_ranks_that_share_cores_stay_on_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours share a core, equally many each; not with DISTGRAPH_BIND=0, nor where they are uneven."""
    monkeypatch.delenv("DISTGRAPH_BIND", raising=False)
    before = os.sched_getaffinity(0)
    cores = sorted(before)[:2]
    body = """
    print("on", rank, sorted(os.sched_getaffinity(0)), t.binding.share)
    """

    def places(ranks: int) -> list[str]:
        outcome = start(tmp_path, body, ranks)
        assert outcome.code == 0, outcome.err
        return sorted(line for line in outcome.out.splitlines() if line.startswith("on "))

    os.sched_setaffinity(0, cores)
    try:
        count = len(cores)
        assert places(2 * count) == [f"on {r} {[cores[r // 2]]} 2.0" for r in range(2 * count)]
        if count > 1:
            assert places(count) == [f"on {r} {cores} 1.0" for r in range(count)]
            assert places(3) == [f"on {r} {cores} 1.5" for r in range(3)]
        monkeypatch.setenv("DISTGRAPH_BIND", "0")
        assert places(2 * count) == [f"on {r} {cores} 2.0" for r in range(2 * count)]
    finally:
        os.sched_setaffinity(0, before)


@needs_mpi
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_ranks_bound_by_the_caller_share_no_core(tmp_path: Path) -> None:
    body = """
    from distgraph.runtime.transport.mpi import MpiTransport
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[rank % 2 :][:1])
    placed = MpiTransport()
    placed.bind()
    print("on", placed.binding.share, placed.binding.bound, len(os.sched_getaffinity(0)))
    """
    outcome = start(tmp_path, body, 2)
    assert outcome.code == 0, outcome.err
    assert [line for line in outcome.out.splitlines() if line.startswith("on ")] == 2 * ["on 1.0 False 1"]


@needs_mpi
def test_arguments_output_and_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    outcome = start(
        tmp_path,
        """
        assert __name__ == "__main__" and sys.path[0] == os.path.dirname(__file__)
        print(rank, sys.argv[1:], os.environ["OMP_NUM_THREADS"], os.environ["OPENBLAS_NUM_THREADS"])
        print("to stderr", rank, file=sys.stderr)
        x = np.ones(5)
        t.all_reduce(x, "sum", everyone).wait()
        assert (x == t.size).all()
        """,
    )
    assert outcome.code == 0, outcome.err
    lines = sorted(line for line in outcome.out.splitlines() if not line.startswith("pid "))
    assert lines == [f"{rank} ['--flag', 'two words'] 1 2" for rank in range(3)]
    assert sorted(outcome.err.splitlines()) == [f"to stderr {rank}" for rank in range(3)]


WAITS = {
    "all_reduce": 't.all_reduce(np.zeros(100_000), "sum", everyone).wait()',
    "recv": "t.recv(np.zeros(10), 1, 4).wait()",
    "send": "t.send(np.zeros(10_000_000), 1, 4).wait()",
    "barrier": "t.barrier()",
    "objects": "t.gather_objects(3, root=2)",
    "end of script": "pass",
}


@needs_mpi
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_a_rank_that_raises(tmp_path: Path, wait: str) -> None:
    outcome = start(
        tmp_path,
        f"""
        t.barrier()
        if rank == 1:
            raise ValueError("bad batch")
        {wait}
        """,
    )
    assert outcome.code == 1
    trace, _, line = outcome.err.partition("error: ")
    assert 'raise ValueError("bad batch")' in trace
    assert line == "rank 1: ValueError: bad batch; ranks 0, 2 stop too\n"
    assert outcome.err.count("Traceback") == 1
    assert outcome.survivors == []


@needs_mpi
def test_a_user_mistake_has_no_traceback(tmp_path: Path) -> None:
    outcome = start(
        tmp_path,
        """
        from distgraph.errors import ShardingError
        if rank == 1:
            raise ShardingError("axis 'q' is unknown; the mesh has dp, tp")
        t.barrier()
        """,
        n=2,
    )
    assert outcome.code == 1
    assert outcome.err == "error: rank 1: axis 'q' is unknown; the mesh has dp, tp; rank 0 stops too\n"


@needs_mpi
def test_one_rank_needs_no_transport(tmp_path: Path) -> None:
    body = """
        from distgraph.runtime.launch.mpi_rank import current_transport
        assert current_transport() is None
        raise KeyError(7)
        """
    outcome = start(tmp_path, body, n=1, preamble="")
    assert outcome.code == 1
    assert "raise KeyError(7)" in outcome.err
    assert "error: KeyError: 7\n" in outcome.err


@needs_mpi
def test_in_process_ranks_of_a_script_that_raise(tmp_path: Path) -> None:
    """The traceback is that of the thread in which it began."""
    body = """
        from distgraph.runtime.execute.process_group import InProcessWorld
        world = InProcessWorld(2)
        def program(rank):
            if rank == 1:
                raise ValueError("bad batch")
            world.transport(rank).barrier()
        world.run(program)
        """
    outcome = start(tmp_path, body, n=1, preamble="")
    assert outcome.code == 1
    before, _, after = outcome.err.partition("error: rank 1 failed: ValueError")
    assert 'raise ValueError("bad batch")' in before
    assert after == ": bad batch\n"


@needs_mpi
def test_a_house_error_with_a_cause_has_no_traceback(tmp_path: Path) -> None:
    body = """
        from distgraph.errors import ResourceError
        try:
            open("/nowhere/x.yaml")
        except OSError as error:
            raise ResourceError("x.yaml: cannot be read; give the path of a resource file") from error
        """
    outcome = start(tmp_path, body, n=1, preamble="")
    assert (outcome.code, outcome.err) == (
        1,
        "error: x.yaml: cannot be read; give the path of a resource file\n",
    )


@needs_mpi
def test_all_ranks_raise_at_once(tmp_path: Path) -> None:
    outcome = start(tmp_path, "raise KeyError(rank)")
    assert outcome.code == 1
    assert outcome.err.count("Traceback") == 3
    assert sorted(line for line in outcome.err.splitlines() if line.startswith("error")) == [
        f"error: rank {rank}: KeyError: {rank}" for rank in range(3)
    ]
    assert outcome.survivors == []


@needs_mpi
@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("raise KeyError(7)", "KeyError: 7"),
        ("sys.exit('no data')", "no data"),
        ("from distgraph.errors import GraphError; raise GraphError('x is 3')", "x is 3"),
    ],
)
def test_the_same_mistake_on_all_ranks_is_printed_once(tmp_path: Path, body: str, line: str) -> None:
    outcome = start(tmp_path, body)
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1] == f"error: ranks 0-2: {line}"
    assert outcome.err.count("error: ") == 1
    assert outcome.err.count("Traceback") == ("KeyError" in body)


def test_reports_of_ranks_are_joined() -> None:
    def report(rank: int, text: str, trace: str = "", follows: bool = False) -> FailureReport:
        return FailureReport(rank, 0.0, text, trace, follows)

    torn = "ValueError: torn"
    assert summary([], 4) == ""
    assert summary([report(0, torn, "Traceback\n")], 1) == f"Traceback\nerror: {torn}\n"
    assert summary([report(3, "a"), report(1, "b"), report(0, "a"), report(2, "")], 4) == (
        "error: ranks 0, 3: a\nerror: rank 1: b\n"
    )
    same = [report(rank, torn, f"in line {rank // 2}\n") for rank in range(4)]
    assert summary(same, 4) == (f"in line 0\nerror: ranks 0-1: {torn}\nin line 1\nerror: ranks 2-3: {torn}\n")
    after = [report(rank, "rank 1 failed: ValueError: torn", follows=True) for rank in (3, 0)]
    assert summary([report(1, torn), *after], 4) == f"error: rank 1: {torn}; ranks 0, 3 stop too\n"
    assert summary(after, 4) == "error: rank 1 failed: ValueError: torn; ranks 0, 3 stop too\n"
    assert summary(after[:1], 4) == "error: rank 1 failed: ValueError: torn; rank 3 stops too\n"
    assert summary(after, 4, died=True) == ""


def test_reports_are_read_in_order_of_time(tmp_path: Path) -> None:
    for report in (FailureReport(0, 2.0, "second"), FailureReport(1, 1.0, "first", "Traceback\n")):
        write_report(tmp_path, report)
    assert [report.text for report in read_reports(tmp_path)] == ["first", "second"]
    assert read_reports(tmp_path)[0].traceback == "Traceback\n"


@needs_mpi
def test_exit_code_of_a_script(tmp_path: Path) -> None:
    outcome = start(tmp_path, "if rank == 2: sys.exit(7)\nt.barrier()")
    assert outcome.code == 7
    assert outcome.survivors == []


@needs_mpi
def test_mistake_before_the_first_transport_call(tmp_path: Path) -> None:
    outcome = start(tmp_path, "def", preamble="")
    assert outcome.code == 1
    assert "SyntaxError" in outcome.err


@needs_mpi
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_rank_that_is_killed(tmp_path: Path, name: str) -> None:
    outcome = start(
        tmp_path,
        f"""
        t.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.{name})
        t.all_reduce(np.zeros(100_000), "sum", everyone).wait()
        """,
    )
    number = signal.Signals[name]
    assert outcome.code == 128 + number
    assert f"error: rank 1 was killed by {name}, all 3 ranks are stopped" in outcome.err.splitlines()[-1]
    assert outcome.err.count("error: ") == 1
    assert "BAD TERMINATION" not in outcome.out + outcome.err
    assert outcome.survivors == []


@needs_mpi
def test_interrupt_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C at a job that hangs."""
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + "t.recv(np.zeros(1), rank, 4).wait()")
    command = (
        f"from distgraph.runtime.launch.launch import launch; raise SystemExit(launch(2, [{str(script)!r}]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    outcome = Outcome(process.returncode, "".join(lines) + out, err)
    assert outcome.code == 130
    assert outcome.err == "error: interrupted; all ranks are stopped\n"
    assert outcome.survivors == []


@needs_mpi
def test_plain_mpiexec_does_the_same(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + "if rank == 1: raise ValueError('bad batch')\nt.barrier()")
    command = [launcher.find_mpiexec(), "-n", "2", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    # mpiexec kills rank 0 when rank 1 goes, and gives the code of either: 1 or that of SIGKILL
    assert done.returncode in (1, signal.SIGKILL)
    assert "error: rank 1: ValueError: bad batch\n" in done.stderr
    assert "error: rank 1 failed: ValueError: bad batch; rank 0 stops too\n" in done.stderr


@needs_mpi
def test_plain_mpiexec_ends_with_an_error_if_the_failing_rank_is_slow_to_end(tmp_path: Path) -> None:
    body = """
import time
from distgraph.runtime.transport import mpi_failures
mpi_failures.FAILURE_REPORT_SECONDS = 1.0
if rank == 1:
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(90 * seconds)
    raise ValueError("bad batch")
t.barrier()
"""
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + body)
    command = [launcher.find_mpiexec(), "-n", "2", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0  # that of either rank, or of the signal that ends mpiexec
    assert "error: rank 1: ValueError: bad batch\n" in done.stderr


TRAINS = """
import distgraph as dg

if rank == 1 and "{when}" == "before":
    sys.exit(4)
strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp")
engine = dg.Engine(dg.nn.Linear(3, 1), dg.nn.MeanSquaredError(), dg.optim.SGD(0.1), strategy=strategy)
data = np.zeros((4, 3), "f4"), np.zeros((4, 1), "f4")
engine.fit(data, batch_size=4, progress=False)
if rank == 1:
    sys.exit(4)
engine.fit(data, batch_size=4, progress=False)
"""


@needs_mpi
@pytest.mark.parametrize("when", ["before", "between"])
def test_exit_of_one_rank_under_plain_mpiexec(tmp_path: Path, when: str) -> None:
    """Without a launcher an exit is like the end of the script: a barrier there takes no call for its own."""
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + TRAINS.format(when=when))
    command = [launcher.find_mpiexec(), "-n", "2", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4
    assert re.search(r"engine\.(fit|run)\(\) on rank 0 but the end of the script on rank 1", done.stderr)


@needs_mpi
def test_exit_of_all_ranks_under_plain_mpiexec(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + "t.barrier()\nsys.exit(7)")
    command = [launcher.find_mpiexec(), "-n", "2", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7
    assert "error" not in done.stderr


def test_mistakes_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFault, match="at least 1"):
        launcher.launch(0, ["x.py"])
    with pytest.raises(RuntimeFault, match=r"script '.*absent.py' does not exist"):
        launcher.launch(2, [str(tmp_path / "absent.py")])
    with pytest.raises(RuntimeFault, match="script '' does not exist"):
        launcher.launch(2, [])


def test_no_mpiexec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeFault, match="pip install"):
        launcher.find_mpiexec()


def test_alone_without_a_launcher() -> None:
    """In a process of its own: no MPI is loaded to find out that there is one rank."""
    code = (
        "import sys; from distgraph.runtime.launch.mpi_rank import current_transport;"
        "assert current_transport() is None; assert not [m for m in sys.modules if m.startswith('mpi4py')]"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "MPI"))}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=60)


def test_without_mpi4py_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    monkeypatch.setattr(rank_process, "_current", [])
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(RuntimeFault, match=r"mpi4py cannot be loaded .*; install it with"):
        rank_process.current_transport()
