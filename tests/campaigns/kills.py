"""Kills at random moments: `python tests/campaigns/kills.py --trials 200 --seed 0`.

A trial trains a small program in one process, under `distgraph run` or under plain mpiexec, sends a signal to
one of the processes of the job at a random moment of its start, of a step, of a save or of an evaluation, and
checks:

* the job ends within a limit, with the exit code that docs/running/jobs.md promises, and says what happened;
* no process, no temporary file is left;
* training that goes on with the checkpoint gives the losses of an undisturbed run, bit for bit.

It prints one JSON object: campaign, trials, failed, worst (the longest end in seconds), and what failed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaigns.trained_program import train

from distgraph.runtime.launch.mpiexec import find_mpiexec

PROGRAM: Final = Path(__file__).with_name("trained_program.py")
TOKEN: Final = "DISTGRAPH_CAMPAIGN"
LIMIT: Final = 100.0
"""Seconds in which every disturbed job must have ended; the limits inside are a tenth of it."""
SETTINGS: Final = {"DISTGRAPH_HEARTBEAT": "5", "DISTGRAPH_TIMEOUT": "10", "PYTHONUNBUFFERED": "1"}
PHASES: Final = ("start", "step", "save", "evaluate")
SIGNALS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)
TARGETS: Final = {
    "in-process": ("process",),
    "run": ("rank", "supervisor", "proxy", "mpiexec", "launcher"),
    "mpiexec": ("rank", "proxy", "mpiexec"),
}
PYTHON_STARTS: Final = "Fatal Python error: init_import_site"
"""What Python says about Ctrl-C while it starts itself; it then ends with 1, before a line of the program."""
LAUNCH: Final = "from distgraph.cli.entry import main; main()"


@dataclass(frozen=True, slots=True)
class Trial:
    """What is done to a job.

    Attributes:
        how: in-process, run (by the launcher) or mpiexec.
        ranks: of the job.
        target: kind of the process that gets the signal.
        number: the signal.
        phase: at which; `event` says after how many events of that kind.
        delay: seconds behind it.
    """

    how: str
    ranks: int
    target: str
    number: signal.Signals
    phase: str
    event: int
    delay: float

    def __str__(self) -> str:
        return (
            f"{self.number.name} to {self.target} of {self.how} with {self.ranks} ranks "
            f"{self.delay:.3f} s after {self.phase} {self.event}"
        )


def draw(rng: random.Random, hows: Sequence[str], widths: Sequence[int]) -> Trial:
    """A random trial that makes sense."""
    while True:
        how, number = rng.choice(hows), rng.choice(SIGNALS)
        target = rng.choice(TARGETS[how])
        alone = how == "in-process" and number == signal.SIGSTOP  # nobody is there to notice
        own = how == "mpiexec" and number == signal.SIGSTOP and target != "rank"  # mpiexec is not ours
        if not alone and not own:
            break
    phase = rng.choice(PHASES)
    last = {"start": 1, "step": 24, "save": 8, "evaluate": 3}[phase]
    longest = 1.5 if phase == "start" else 0.03
    ranks = rng.choice((1, 2) if how == "in-process" else widths)
    return Trial(how, ranks, target, number, phase, rng.randint(1, last), rng.uniform(0, longest))


@functools.lru_cache
def undisturbed(ranks: int) -> tuple[float, ...]:
    """Losses of all steps of a run that nothing happens to."""
    with tempfile.TemporaryDirectory() as folder:
        return tuple(train(Path(folder), ranks))


def expected_codes(trial: Trial, started: bool) -> set[int]:
    """Exit codes that are right where the job did not end before the signal."""
    number = int(trial.number)
    if trial.target in ("process", "launcher") and (trial.number == signal.SIGKILL or not started):
        return {-number, 128 + number}  # Python has not started, or nothing can be done
    if trial.target == "process":
        return {-number, 128 + number}
    if trial.how == "mpiexec":
        return set(range(-64, 256)) - {0}
    if trial.number == signal.SIGSTOP:
        return {1}
    if trial.number == signal.SIGINT and trial.target in ("supervisor", "proxy", "mpiexec"):
        return {0}
    return set(range(1, 256)) if trial.target == "proxy" else {128 + number}


def job_processes(token: str) -> dict[int, tuple[str, int]]:
    """Processes of a trial that run: number -> command line, parent."""
    found = {}
    mark = f"{TOKEN}={token}".encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if state != "Z":
                    found[int(entry.name)] = command, int(parent)
        except OSError:
            continue
    return found


def find_target(trial: Trial, token: str, root: int, rng: random.Random) -> int | None:
    """Number of a process of the kind that is to get the signal; None while there is none."""
    if trial.target in ("process", "launcher"):
        return root
    processes = job_processes(token)
    named = {pid for pid, (command, _) in processes.items() if "hydra_pmi_proxy" in command}
    # A child of a proxy has its command, too, until it executes its own.
    proxies = {pid for pid in named if processes[pid][1] not in named}
    below = {pid for pid, (_, parent) in processes.items() if parent in proxies}
    kinds = {
        "proxy": proxies,
        "mpiexec": {parent for pid, (_, parent) in processes.items() if pid in proxies},
        "supervisor": below,
        "rank": {pid for pid, (_, parent) in processes.items() if parent in below},
    }
    if trial.how == "mpiexec":
        kinds["rank"] = below
    choice = sorted(kinds[trial.target])
    return rng.choice(choice) if choice else None


class Forked:
    """A copy of this process that trains: what `subprocess.Popen` offers, without loading everything anew."""

    def __init__(self, ranks: int, folder: Path, checkpoint: Path | None = None) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                with (folder / "out").open("wb") as out:
                    os.dup2(out.fileno(), 1)
                    os.dup2(out.fileno(), 2)
                train(folder, ranks, checkpoint)
                os.write(1, b"trained")
                code = 0
            except Exception:  # noqa: BLE001 - as Python does at the end of a script
                os.write(2, traceback.format_exc().encode())
            except KeyboardInterrupt:  # as Python does at the end of a script
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
            finally:
                os._exit(code)

    def kill(self) -> None:
        """Send SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, limit: float = LIMIT) -> int:
        """Exit code, or subprocess.TimeoutExpired."""
        deadline = time.monotonic() + limit
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked", limit)
            time.sleep(0.003)
        assert self.returncode is not None
        return self.returncode


Job = subprocess.Popen[bytes] | Forked


def source_path() -> str:
    """PYTHONPATH with which a job imports this clone."""
    return os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])


def kill_job(token: str, process: Job) -> None:
    """Kill all processes of a trial, and wait for the first."""
    for pid in job_processes(token):
        _send(pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
    process.wait()


@contextmanager
def started(trial: Trial, folder: Path, token: str) -> Iterator[Job]:
    """A job that trains; nothing of it is left behind, whatever happened."""
    script = [str(PROGRAM), str(folder), str(trial.ranks)]
    command = {
        "in-process": [sys.executable, *script],
        "run": [sys.executable, "-c", LAUNCH, "run", "-n", str(trial.ranks), *script],
        "mpiexec": [find_mpiexec(), "-n", str(trial.ranks), sys.executable, *script],
    }[trial.how]
    (folder / "tmp").mkdir()
    env = os.environ | SETTINGS | {TOKEN: token, "TMPDIR": str(folder / "tmp")}
    env["PYTHONPATH"] = source_path()
    process: Job
    if trial.how == "in-process" and trial.phase != "start":
        process = Forked(trial.ranks, folder)
    else:
        with (folder / "out").open("wb") as out:
            process = subprocess.Popen(command, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        kill_job(token, process)


def wait_for(phase: str, event: int, folder: Path, job: Job) -> bool:
    """Wait until a job has come to a phase so many times; False where it has ended before."""
    path = folder / "phases"
    while job.poll() is None:
        words = path.read_text().splitlines() if path.exists() else []
        if words.count(phase) >= event:
            return True
        time.sleep(0.003)
    return False


def run(trial: Trial, rng: random.Random) -> tuple[list[str], float]:
    """Do a trial. Returns what is wrong, and the seconds from the signal to the end of the job."""
    token = f"{os.getpid()}.{rng.getrandbits(48):x}"
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        with started(trial, folder, token) as process:
            target = None
            if trial.phase == "start" or wait_for(trial.phase, trial.event, folder, process):
                while (
                    target := find_target(trial, token, process.pid, rng)
                ) is None and process.poll() is None:
                    time.sleep(0.003)
                time.sleep(trial.delay)
            begun = time.monotonic()
            sent = target is not None and _send(target, trial.number)
            if sent and trial.target == "launcher" and trial.number == signal.SIGSTOP:
                _wait_until_gone(token, process.pid)
                _send(process.pid, signal.SIGCONT)
            wrong = _ended(trial, folder, process, token, sent)
            seconds = time.monotonic() - begun
        return wrong + _resumed(trial, folder), seconds if sent else 0.0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _wait_until_gone(token: str, root: int) -> None:
    """Until the job has no process but its launcher, or the limit."""
    deadline = time.monotonic() + LIMIT / 2
    while set(job_processes(token)) - {root} and time.monotonic() < deadline:
        time.sleep(0.05)


def _ended(trial: Trial, folder: Path, process: Job, token: str, sent: bool) -> list[str]:
    """What is wrong with the end of a job: when, how, and what is left."""
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        return [f"not ended after {LIMIT:g} s: {sorted(job_processes(token).values())}"]
    wrong: list[str] = []
    deadline = time.monotonic() + LIMIT / 4
    while (left := job_processes(token)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        wrong.append(f"left behind: {sorted(left.values())}")
    files = sorted(path.name for path in (folder / "tmp").iterdir())
    if files:
        wrong.append(f"temporary files left: {files}")
    said = (folder / "out").read_text(errors="replace")
    if in_start_of_python(trial, code, said):
        return wrong
    begun = (folder / "phases").exists()
    if trial.number == signal.SIGINT and trial.how == "run" and "Traceback" in said:
        wrong.append(f"traceback after Ctrl-C: {said[-500:]}")
    finished = said.count("trained") >= (1 if trial.how == "in-process" else trial.ranks)
    codes = expected_codes(trial, begun) if sent else {0}
    if code not in codes and not (finished and code == 0):
        wrong.append(f"exit code {code}, expected one of {sorted(codes)[:4]}: {said[-500:]}")
    if trial.how == "run" and code and trial.number != signal.SIGKILL and begun and "error: " not in said:
        wrong.append(f"says nothing: {said[-500:]}")
    return wrong


def in_start_of_python(trial: Trial, code: int, said: str) -> bool:
    """Whether Ctrl-C came to the first process before Python had loaded its own modules; noted on stderr."""
    own = trial.number == signal.SIGINT and trial.target in ("process", "launcher") and code == 1
    if own and said.startswith(PYTHON_STARTS):
        print(f"{trial}: Python itself was still starting", file=sys.stderr, flush=True)
    return own and said.startswith(PYTHON_STARTS)


def _resumed(trial: Trial, folder: Path) -> list[str]:
    """Go on with the checkpoint and compare with a run that nothing happened to."""
    try:
        losses = tuple(train(folder, trial.ranks))
    except Exception as error:  # noqa: BLE001 - what is wrong is what a trial is for
        return [f"does not resume: {type(error).__name__}: {error}"]
    return [] if losses == undisturbed(trial.ranks) else ["other losses after resuming"]


def campaign(
    trials: int,
    seed: int,
    hows: Sequence[str] = tuple(TARGETS),
    widths: Sequence[int] = (2, 4),
    first: int = 0,
) -> dict[str, object]:
    """Do trials; the result as it is printed."""
    failures: list[str] = []
    worst, where = 0.0, ""
    kinds: Counter[str] = Counter()
    for number in range(first, first + trials):
        rng = random.Random(f"kills {seed} {number}")
        trial = draw(rng, hows, widths)
        kinds[f"{trial.number.name} {trial.target}"] += 1
        wrong, seconds = run(trial, rng)
        failures += [f"{number}: {trial}: {text}" for text in wrong]
        if seconds > worst:
            worst, where = seconds, str(trial)
        if sys.stderr.isatty() or wrong:
            print(f"{number}: {trial}: {seconds:.1f} s {wrong or 'ok'}", file=sys.stderr, flush=True)
    return {
        "campaign": "kills",
        "trials": trials,
        "seed": seed,
        "first": first,
        "failed": len({text.partition(":")[0] for text in failures}),
        "worst": {"seconds": round(worst, 1), "trial": where},
        "kinds": dict(sorted(kinds.items())),
        "failures": failures,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--how", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    given = parser.parse_args()
    # a shell lets its background jobs ignore SIGINT, and the jobs of the trials would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    result = campaign(given.trials, given.seed, given.how, given.ranks, given.first)
    print(json.dumps(result, indent=1))
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
