"""Faults of disk and network at random moments: `python tests/campaigns/faults.py --trials 60 --seed 0`.

A trial trains a small program and, at a random moment, fills the disk of its checkpoint, makes that
read-only, removes the folder, or takes down, interrupts or disturbs the link between two machines
(`benchmarks.support.machines`). It checks:

* a fault that ends the job ends it within a limit, on all machines, with an error that says what happened;
  one that passes does not change a single loss;
* no process is left;
* training that goes on with the checkpoint gives the losses of an undisturbed run, bit for bit.

Root only: file systems are mounted and network namespaces made, all of them removed behind. It prints one
JSON object: campaign, trials, failed, worst (the longest end in seconds), and what failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaigns.kills import (
    LIMIT,
    PROGRAM,
    SETTINGS,
    TOKEN,
    Forked,
    job_processes,
    source_path,
    undisturbed,
    wait_for,
)
from campaigns.trained_program import EPOCHS, STEPS, train

from benchmarks.support.machines import Network, machines, missing

DISK: Final = ("full", "read-only", "removed")
RATE: Final = "400mbit"
NETWORK: Final = ("down", "interrupted", "lossy")


@dataclass(frozen=True, slots=True)
class Trial:
    """What is done to a job.

    Attributes:
        fault: one of DISK or NETWORK.
        ranks: of the job.
        step: behind which.
        amount: KiB of a full disk, seconds of an interruption, Mbit/s of a link that loses what comes faster.
    """

    fault: str
    ranks: int
    step: int
    amount: float

    def __str__(self) -> str:
        return f"{self.fault} ({self.amount:.3g}) after step {self.step} of {self.ranks} ranks"


def draw(rng: random.Random, faults: Sequence[str]) -> Trial:
    """A random trial."""
    fault = rng.choice(faults)
    amount = {
        "full": rng.uniform(40, 600),
        "interrupted": rng.uniform(0.1, 2.0),
        "lossy": rng.uniform(2, 50),
    }.get(fault, 0.0)
    ranks = rng.choice((1, 2)) if fault in DISK else 2
    return Trial(fault, ranks, rng.randint(1, 20), amount)


def no_mounts() -> str | None:
    """Why no file system can be mounted here; None where one can."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "none", folder]
        if (
            shutil.which("mount") is None
            or subprocess.run(command, capture_output=True, check=False).returncode
        ):
            return "file systems can not be mounted here"
        subprocess.run(["umount", folder], check=True)
    return None


@contextmanager
def disk(folder: Path, kibibytes: float) -> Iterator[Path]:
    """A file system of so many KiB."""
    path = folder / "disk"
    path.mkdir()
    size = f"size={int(kibibytes)}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(path)], check=True)
    try:
        yield path
    finally:
        for mounted in (path, folder / "side"):
            while mounted.is_mount():
                subprocess.run(["umount", "-l", str(mounted)], check=True)


def on_disk(trial: Trial, folder: Path) -> tuple[list[str], float]:
    """A fault of the disk. Returns what is wrong, and the seconds from the fault to the end of the job."""
    with disk(folder, trial.amount if trial.fault == "full" else 65536) as path:
        checkpoint = path / "checkpoint"
        job = Forked(trial.ranks, folder, checkpoint)
        try:
            wait_for("step", trial.step, folder, job)
            begun = time.monotonic()
            if trial.fault == "read-only":  # by another mount on top: files are open for writing on this one
                (folder / "side").mkdir()
                side = str(folder / "side")
                subprocess.run(["mount", "--bind", str(path), side], check=True)
                subprocess.run(["mount", "-o", "remount,bind,ro", side], check=True)
                subprocess.run(["mount", "--bind", side, str(path)], check=True)
            steps = (folder / "phases").read_text().splitlines().count("step")
            if trial.fault == "removed":
                shutil.rmtree(checkpoint, ignore_errors=True)
            code = job.wait(LIMIT)
        finally:
            if job.poll() is None:
                job.kill()
                job.wait()
        seconds = time.monotonic() - begun
        said = (folder / "out").read_text(errors="replace")
        wrong = []
        if code and not ("RuntimeFault" in said and "checkpoint" in said):
            wrong.append(f"exit code {code} without an error of the checkpoint: {said[-500:]}")
        if code == 0 and trial.fault == "read-only" and steps < EPOCHS * STEPS:  # one is saved after the last
            wrong.append("a checkpoint that could not be written was no error")
        if checkpoint.exists():
            shutil.copytree(checkpoint, folder / "checkpoint")
    return wrong + resumed(trial, folder), seconds


def on_network(trial: Trial, folder: Path, net: Network, token: str) -> tuple[list[str], float]:
    """A fault of the network. Returns what is wrong, and the seconds from the fault to the end of the job."""
    script = [sys.executable, str(PROGRAM), str(folder), str(trial.ranks)]
    env = os.environ | SETTINGS | {TOKEN: token, "PYTHONPATH": source_path()}
    env |= {"UCX_TLS": "posix,sysv,tcp,self", "UCX_NET_DEVICES": "all"}
    with (folder / "out").open("wb") as out:
        command = net.command(trial.ranks, script)
        job = subprocess.Popen(command, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        wait_for("step", trial.step, folder, job)
        begun = time.monotonic()
        disturb(trial, net)
        try:
            code = job.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return [f"not ended after {LIMIT:g} s: {sorted(job_processes(token).values())}"], LIMIT
        while (left := job_processes(token)) and time.monotonic() < begun + LIMIT:
            time.sleep(0.05)
        seconds = time.monotonic() - begun
    finally:
        for pid in job_processes(token):
            os.kill(pid, 9)
        job.wait()
    said = (folder / "out").read_text(errors="replace")
    wrong = [f"left behind: {sorted(left.values())}"] if left else []
    if code and "error: rank" not in said:
        wrong.append(f"exit code {code} without a word: {said[-500:]}")
    if code and trial.fault != "down":
        wrong.append(f"a fault that passes ended the job: {said[-500:]}")
    return wrong + resumed(trial, folder), seconds


def disturb(trial: Trial, net: Network) -> None:
    """Do it to the link of the second machine."""
    if trial.fault == "lossy":
        net.lose_messages(1, f"{trial.amount:.1f}mbit")
        return
    net.link(1, "down")
    if trial.fault == "interrupted":
        time.sleep(trial.amount)
        net.link(1, "up")


def resumed(trial: Trial, folder: Path) -> list[str]:
    """Go on with the checkpoint and compare with a run that nothing happened to."""
    try:
        losses = tuple(train(folder, trial.ranks))
    except Exception as error:  # noqa: BLE001 - what is wrong is what a trial is for
        return [f"does not resume: {type(error).__name__}: {error}"]
    return [] if losses == undisturbed(trial.ranks) else ["other losses after resuming"]


def run(trial: Trial) -> tuple[list[str], float]:
    """Do a trial. Returns what is wrong, and the seconds from the fault to the end of the job."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        if trial.fault in DISK:
            return on_disk(trial, folder)
        with machines(2, RATE) as net:
            return on_network(trial, folder, net, f"{os.getpid()}.{folder.name}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def campaign(trials: int, seed: int, faults: Sequence[str] = DISK + NETWORK) -> dict[str, object]:
    """Do trials; the result as it is printed."""
    failures: list[str] = []
    worst, where = 0.0, ""
    kinds: Counter[str] = Counter()
    for number in range(trials):
        trial = draw(random.Random(f"faults {seed} {number}"), faults)
        kinds[trial.fault] += 1
        wrong, seconds = run(trial)
        failures += [f"{number}: {trial}: {text}" for text in wrong]
        if seconds > worst:
            worst, where = seconds, str(trial)
        if sys.stderr.isatty() or wrong:
            print(f"{number}: {trial}: {seconds:.1f} s {wrong or 'ok'}", file=sys.stderr, flush=True)
    return {
        "campaign": "faults",
        "trials": trials,
        "seed": seed,
        "failed": len({text.partition(":")[0] for text in failures}),
        "worst": {"seconds": round(worst, 1), "trial": where},
        "kinds": dict(sorted(kinds.items())),
        "failures": failures,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", nargs="+", default=[*DISK, *NETWORK], choices=[*DISK, *NETWORK])
    given = parser.parse_args()
    reason = no_mounts() or missing()
    if reason:
        print(f"faults: {reason}", file=sys.stderr)
        sys.exit(2)
    result = campaign(given.trials, given.seed, given.faults)
    print(json.dumps(result, indent=1))
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
