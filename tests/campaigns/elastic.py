"""Losses of ranks in elastic jobs: `python tests/campaigns/elastic.py --trials 50 --seed 0`.

A trial trains a small program on four ranks under `distgraph run --elastic`, disturbs it at a random moment,
and checks that the job goes on without the user:

* it ends with exit code 0 on the ranks that are left, with the losses and epochs of a serial run;
* the message names the rank that was lost, and from where training goes on;
* no process and no temporary file is left.

Disturbances: `kill` and `stop` (SIGSTOP) of one rank, `two` kills one after the other, `supervisor` and
`mpiexec` killed, `return` of a rank by writing the hostfile after a kill. With root: `machine`, one of two
machines (`benchmarks.support.machines`) of two ranks is lost with all its processes, and `machine-return`,
after which it comes back; `machine-cut` takes its link down first, so that nothing tells that it has ended.
`machine-silent` takes its link down and no more: its processes must end by themselves. `machine-stop` stops
all of its processes, which must end when they run again.

It prints one JSON object: campaign, trials, failed, recovery_seconds_max (from the signal to the end of the
first step after it; behind a stopped rank without the time in which it is noticed), all recoveries of each
kind, and what failed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaigns.elastic_program import EPOCHS, RANKS, STEPS, train
from campaigns.kills import LAUNCH, TOKEN, find_target, job_processes, kill_job, source_path
from campaigns.kills import Trial as Kill

from benchmarks.support.machines import NETWORK, Network, launch_environment, machines, missing

PROGRAM: Final = Path(__file__).with_name("elastic_program.py")
LIMIT: Final = 200.0
"""Seconds in which a job must have ended."""
HEARTBEAT: Final = 3.0
KINDS: Final = ("kill", "kill", "kill", "stop", "two", "supervisor", "mpiexec", "return")
MACHINES: Final = ("machine", "machine-cut", "machine-return", "machine-silent", "machine-stop")
SILENT: Final = ("machine-silent", "machine-stop")
"""Kinds after which processes of the machine may end later than the job, which does not hear of them."""
RATE: Final = "400mbit"
LAYOUTS: Final = (("dp:4",), ("dp:4",), ("dp:2", "tp:2"))
LAST: Final = EPOCHS * STEPS
HOSTS: Final = "".join(f"{NETWORK}.{number} slots=2\n" for number in (1, 2))
RETURN_PAUSE: Final = 0.5
"""Seconds of a step on what is left, where a machine comes back: longer than the launcher takes to look."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is done to a job.

    Attributes:
        kind: of the disturbance.
        layout: axes of the mesh.
        step: after which it comes.
        delay: seconds behind it.
    """

    kind: str
    layout: tuple[str, ...]
    step: int
    delay: float

    def __str__(self) -> str:
        return f"{self.kind} on {','.join(self.layout)} {self.delay:.3f} s after step {self.step}"


def draw(rng: random.Random, kinds: Sequence[str] = KINDS) -> Trial:
    """A random trial."""
    kind = rng.choice(list(kinds))
    layout = rng.choice(LAYOUTS if kind != "two" else LAYOUTS[:1])
    last = LAST // 3 if kind in ("two", "return", "machine-return") else LAST - 4
    return Trial(kind, layout, rng.randint(1, last), rng.uniform(0, 0.05))


@functools.lru_cache
def undisturbed() -> tuple[list[float], list[dict[str, float]]]:
    """Losses of all steps and means of all epochs of a serial run."""
    history = train(None, {"dp": 1})
    return history.losses, history.epochs


def steps(folder: Path) -> list[tuple[int, float]]:
    """Number and time of every step that has ended."""
    path = folder / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(number), float(seconds)) for number, seconds in (line.split() for line in lines)]


def wait_for(folder: Path, job: subprocess.Popen[bytes], step: int, since: float = 0.0) -> float:
    """The time of the first step from number `step` on that ends after a time; 0 if the job ends before."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        ended = job.poll() is not None
        found = [seconds for number, seconds in steps(folder) if number >= step and seconds > since]
        if found:
            return found[0]
        if ended:
            break
        time.sleep(0.005)
    return 0.0


def wait_for_restart(folder: Path, job: subprocess.Popen[bytes], restart: int = 1) -> float:
    """The time of the first step that ends after a restart of the job; 0 if the job ends before.

    A step that ranks had begun before the disturbance may end long after it: it says nothing of the restart.
    """
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        ended = job.poll() is not None
        if f"(restart {restart} of" in (folder / "out").read_text(errors="replace"):
            return wait_for(folder, job, 1, time.time())
        if ended:
            break
        time.sleep(0.005)
    return 0.0


def hit(target: str, number: signal.Signals, token: str, root: int, rng: random.Random) -> float:
    """Send a signal to a random process of a kind. Returns the time."""
    kill = Kill("run", 4, target, number, "step", 1, 0.0)
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        pid = find_target(kill, token, root, rng)
        if pid is not None:
            os.kill(pid, number)
            break
        time.sleep(0.01)
    return time.time()


def disturb_machine(
    trial: Trial, folder: Path, network: Network, job: subprocess.Popen[bytes], rng: random.Random
) -> float:
    """Lose a machine at random. Returns the recovery in seconds."""
    if not wait_for(folder, job, trial.step):
        return 0.0
    time.sleep(trial.delay)
    machine, at = rng.randrange(network.count), time.time()
    if trial.kind == "machine-stop":
        network.send_signal(machine, signal.SIGSTOP)
    else:
        if trial.kind != "machine-silent":
            if trial.kind == "machine-cut":
                network.link(machine, "down")
            network.kill(machine)
        network.link(machine, "down")
    again = wait_for_restart(folder, job)
    if trial.kind == "machine-stop":
        network.send_signal(machine, signal.SIGCONT)
    if trial.kind == "machine-return" and again:
        network.link(machine, "up")
        (folder / "hosts").write_text(HOSTS + "# again\n")
    return again - at


def disturb(
    trial: Trial, folder: Path, token: str, job: subprocess.Popen[bytes], rng: random.Random
) -> float:
    """Do what a trial says. Returns the longest recovery in seconds."""
    if not wait_for(folder, job, trial.step):
        return 0.0
    time.sleep(trial.delay)
    target = trial.kind if trial.kind in ("supervisor", "mpiexec") else "rank"
    number = signal.SIGSTOP if trial.kind == "stop" else signal.SIGKILL
    at = hit(target, number, token, job.pid, rng)
    again = wait_for_restart(folder, job)
    longest = again - at - (HEARTBEAT if trial.kind == "stop" else 0.0)
    if trial.kind == "two" and again:
        at = hit("rank", signal.SIGKILL, token, job.pid, rng)
        longest = max(longest, wait_for_restart(folder, job, 2) - at)
    if trial.kind == "return":
        (folder / "hosts").write_text("localhost slots=4\n# again\n")
    return longest


def run(trial: Trial, rng: random.Random) -> tuple[list[str], float, str]:
    """Do a trial. Returns what is wrong, the longest recovery in seconds, and what the job said."""
    token = f"{os.getpid()}.{rng.getrandbits(48):x}"
    folder = Path(tempfile.mkdtemp(prefix="elastic-"))
    (folder / "tmp").mkdir()
    several = trial.kind in MACHINES
    (folder / "hosts").write_text(HOSTS if several else "localhost slots=4\n")
    env = (launch_environment() if several else dict(os.environ)) | {
        TOKEN: token,
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": source_path(),
        "DISTGRAPH_HEARTBEAT": str(HEARTBEAT),
        "DISTGRAPH_TIMEOUT": "30",
    }
    if trial.kind == "machine-return":
        env["ELASTIC_PAUSE"] = str(RETURN_PAUSE)
    command = [sys.executable, "-c", LAUNCH, "run", "--elastic", "-n", str(RANKS)]
    command += ["--hostfile", str(folder / "hosts"), str(PROGRAM), str(folder), *trial.layout]
    try:
        with machines(2, RATE) if several else nullcontext() as network:
            with (folder / "out").open("wb") as out:
                streams = {"stdout": out, "stderr": out, "stdin": subprocess.DEVNULL}
                job = subprocess.Popen(command, env=env, cwd=folder, **streams)  # type: ignore[call-overload]
            try:
                if network is None:
                    seconds = disturb(trial, folder, token, job, rng)
                else:
                    seconds = disturb_machine(trial, folder, network, job, rng)
                wrong = _ended(trial, folder, token, job)
            finally:
                kill_job(token, job)
        said = (folder / "out").read_text(errors="replace")
        left = [path.name for path in (folder / "tmp").iterdir()]
        left += [path.name for path in Path("/dev/shm").glob(f"distgraph-elastic-{job.pid}-*")]
        left += [path.name for path in folder.glob(".distgraph-elastic-*")]
        return [*wrong, *([f"files left: {left}"] if left else [])], seconds, said
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ended(trial: Trial, folder: Path, token: str, job: subprocess.Popen[bytes]) -> list[str]:
    """What is wrong with the end of a job."""
    try:
        code = job.wait(LIMIT)
    except subprocess.TimeoutExpired:
        return [f"not ended after {LIMIT:g} s: {sorted(job_processes(token).values())}"]
    said = (folder / "out").read_text(errors="replace")
    if code != 0:
        return [f"exit code {code}: {said[-800:]}"]
    wrong = []
    losses, epochs = json.loads((folder / "losses").read_text())
    expected = undisturbed()
    if len(losses) != LAST or not np.allclose(losses, expected[0], rtol=1e-9, atol=0):
        wrong.append(f"other losses, {len(losses)} of them: {said[-800:]}")
    if len(epochs) != EPOCHS or any(
        abs(one[name] - other[name]) > 1e-9
        for one, other in zip(epochs, expected[1], strict=True)
        for name in other
    ):
        wrong.append(f"other means of epochs: {epochs}")
    restarts = said.count("(restart ")
    if restarts < (2 if trial.kind == "two" else 1) or "training goes on" not in said:
        wrong.append(f"{restarts} restarts: {said[-800:]}")
    if trial.kind in MACHINES and "training goes on on 2 ranks" not in said:
        wrong.append(f"not on the ranks of the machine that is left: {said[-800:]}")
    if trial.kind in (*SILENT, "machine-cut") and "has not answered for" not in said:
        wrong.append(f"the silence of the machine was not noticed: {said[-800:]}")
    if trial.kind == "machine-return" and "training goes on on 4 ranks" not in said:
        wrong.append(f"the machine was not taken in again: {said[-800:]}")
    deadline = time.monotonic() + (0.2 if trial.kind not in SILENT else LIMIT)
    while job_processes(token) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left := job_processes(token):
        wrong.append(f"left behind: {sorted(left.values())}")
    return wrong


def campaign(trials: int, seed: int, kinds: Sequence[str] = KINDS, first: int = 0) -> dict[str, object]:
    """Do trials; the result as it is printed."""
    failures: list[str] = []
    drawn, sources = Counter[str](), Counter[str]()
    recoveries: dict[str, list[float]] = {}
    for number in range(first, first + trials):
        rng = random.Random(f"elastic {seed} {number}")
        trial = draw(rng, kinds)
        drawn[trial.kind] += 1
        wrong, seconds, said = run(trial, rng)
        sources["memory"] += said.count("from the memory of")
        sources["checkpoint"] += said.count(", from checkpoint")
        failures += [f"{number}: {trial}: {text}" for text in wrong]
        recoveries.setdefault(trial.kind, []).append(round(seconds, 1))
        print(f"{number}: {trial}: {seconds:.1f} s {wrong or 'ok'}", file=sys.stderr, flush=True)
    return {
        "campaign": "elastic",
        "trials": trials,
        "seed": seed,
        "first": first,
        "failed": len({text.partition(":")[0] for text in failures}),
        "recovery_seconds_max": max(itertools.chain.from_iterable(recoveries.values()), default=0.0),
        "recovery_seconds": dict(sorted(recoveries.items())),
        "kinds": dict(sorted(drawn.items())),
        "resumed_from": dict(sources),
        "failures": failures,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=sorted({*KINDS, *MACHINES}))
    given = parser.parse_args()
    reason = missing() if set(given.kinds) & set(MACHINES) else ""
    if reason:
        print(f"elastic: {reason}", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    result = campaign(given.trials, given.seed, given.kinds, given.first)
    print(json.dumps(result, indent=1))
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
