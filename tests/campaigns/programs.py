"""Campaign: random programs through the user's API, in random layouts, against one rank at fp64 1e-9.

    python tests/campaigns/programs.py --trials 20000 --jobs 2
    python tests/campaigns/programs.py --part mpi4 --first 200 --trials 100
    python tests/campaigns/programs.py --part process --trial 155     # one trial, with its case and traceback
    python tests/campaigns/programs.py --case case.json                # a case from the list of failures

Every trial runs in a worker process (under MPI in a job of its own) with a time limit, so that one that hangs
is a failure and not the end. Failures are shrunk to small cases. The last line of the output is JSON:
trials, failures by kind, the largest relative error, and for each failure its part, number and smallest case.

The parts of a campaign: "process" (ranks are threads), "searched" (the plan comes from a search), and "mpi2",
"mpi3", "mpi4" (under mpiexec). Without --part the trials are spread over all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns.program_generator import Case, draw_case
from campaigns.program_trial import FAILURES, HUNG, INTERNAL, OK, REFUSED, SKIPPED, WRONG, shrink

PARTS = {"process": 0.92, "searched": 0.01, "mpi2": 0.03, "mpi3": 0.02, "mpi4": 0.02}
"""Part -> its share of the trials."""
RANKS = {"process": 8, "searched": 4, "mpi2": 2, "mpi3": 3, "mpi4": 4}
PER_WORKER = 400
"""Trials after which a worker is replaced, so that none grows without end."""


@dataclass(frozen=True)
class Trial:
    """A trial of a campaign: everything it takes to repeat it."""

    part: str
    seed: int
    number: int

    def case(self) -> Case:
        """What is trained."""
        return draw_case(self.seed, self.number, RANKS[self.part], self.part == "searched")


class Worker:
    """A process, or an MPI job, that runs one case after the other."""

    def __init__(self, part: str) -> None:
        self.part, self.count = part, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._errors: BinaryIO | None = None

    def run(self, case: Case, limit: float) -> dict[str, Any]:
        """The verdict on a case; "hung" where it takes more than `limit` seconds."""
        if self._process is None or self.count >= PER_WORKER:
            self.close()
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        self.count += 1
        start = time.monotonic()
        try:
            process.stdin.write(json.dumps(case.to_json()).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            line: bytes | None = b""
        else:
            line = self._line(limit)
        if not line:
            why = f"no answer in {limit:g} s" if line is None else f"the worker ended: {self._ending()}"
            self.close()
            return {"kind": HUNG if line is None else INTERNAL, "why": why, "error": 0.0, "seconds": limit}
        verdict: dict[str, Any] = json.loads(line)
        verdict["seconds"] = time.monotonic() - start
        in_ranks = self.part.startswith("mpi") or not verdict["why"].startswith("serial:")
        if verdict["kind"] in FAILURES and in_ranks:
            self.close()  # ranks may be left in the middle of something
        return verdict

    def close(self) -> None:
        """End the process and all that it started."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout, self._errors):
                assert stream is not None
                stream.close()
        self._process, self.count, self._rest = None, 0, b""

    def _ending(self) -> str:
        """Exit status of a worker that has ended, and what it said last."""
        assert self._process is not None
        assert self._errors is not None
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-400:].decode(errors="replace")
        return f"status {status}, {' '.join(said.split())}"

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
        if self.part.startswith("mpi"):
            launcher = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
            command = [launcher or "mpiexec", "-n", str(RANKS[self.part]), *command]
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "DISTGRAPH_TIMEOUT": "60"}
        environment |= {"DISTGRAPH_CACHE": "off", **os.environ}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )

    def _line(self, limit: float) -> bytes | None:
        """The next line; empty when the process ends, None when time is up."""
        assert self._process is not None
        assert self._process.stdout is not None
        handle, end = self._process.stdout.fileno(), time.monotonic() + limit
        while b"\n" not in self._rest:
            ready, _, _ = select.select([handle], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            read = os.read(handle, 1 << 16)
            if not read:
                return b""
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def serve() -> None:
    """Life of a worker: cases from stdin, verdicts to stdout. Under MPI all ranks run each case."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what programs print is no answer
    from campaigns.program_trial import References, run_trial

    references, communicator = References(), None
    if int(os.environ.get("PMI_SIZE", "1")) > 1:
        from mpi4py import MPI

        communicator = MPI.COMM_WORLD
    while True:
        line = sys.stdin.readline() if communicator is None or communicator.rank == 0 else ""
        if communicator is not None:
            line = communicator.bcast(line)
        if not line:
            return
        start = time.process_time()
        verdict = run_trial(Case.from_json(json.loads(line)), references).to_json()
        verdict["cpu"] = time.process_time() - start
        if communicator is not None and verdict["kind"] not in FAILURES:
            communicator.barrier()
        if communicator is None or communicator.rank == 0 or verdict["kind"] in FAILURES:
            answers.write(json.dumps(verdict) + "\n")
            answers.flush()
        if communicator is not None and verdict["kind"] in FAILURES:
            time.sleep(30)  # the parent ends the job as soon as it has read the line
            return


@dataclass
class Tally:
    """What came of the trials so far."""

    kinds: Counter[str] = field(default_factory=Counter)
    parts: dict[str, Counter[str]] = field(default_factory=dict)
    worst: float = 0.0
    slowest: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)
    refusals: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, trial: Trial, verdict: dict[str, Any], case: Case | None) -> None:
        """Count a trial; `case` is the smallest one that fails."""
        kind = verdict["kind"]
        self.kinds[kind] += 1
        self.parts.setdefault(trial.part, Counter())[kind] += 1
        self.slowest = max(self.slowest, verdict.get("cpu", 0.0))
        if kind == OK:
            self.worst = max(self.worst, verdict["error"])
        found = {"part": trial.part, "seed": trial.seed, "number": trial.number, "why": verdict["why"]}
        if kind in FAILURES:
            shown = None if case is None else case.to_json()
            self.failures.append(
                found | {"kind": kind, "case": shown, "trace": verdict.get("trace", "")[-1500:]}
            )
        elif kind in (REFUSED, SKIPPED):
            from campaigns.program_trial import Verdict, signature

            known = self.refusals.setdefault(signature(Verdict(kind, verdict["why"])), found | {"count": 0})
            known["count"] += 1

    def to_json(self) -> dict[str, Any]:
        """What is printed at the end."""
        return {
            "campaign": "programs", "trials": self.kinds.total(),
            "failed": sum(self.kinds[kind] for kind in FAILURES), "wrong": self.kinds[WRONG],
            "hung": self.kinds[HUNG], "internal": self.kinds[INTERNAL], "refused": self.kinds[REFUSED],
            "skipped": self.kinds[SKIPPED], "worst": self.worst, "slowest": round(self.slowest, 1),
            "parts": {part: dict(counts) for part, counts in self.parts.items()},
            "refusals": sorted(self.refusals.values(), key=lambda each: -each["count"]),
            "failures": self.failures,
        }  # fmt: skip


def campaign(options: argparse.Namespace) -> Tally:
    """Run all trials, on as many workers as are asked for; an MPI job counts as all of them."""
    tally, lock, start = Tally(), threading.Lock(), time.monotonic()
    for part, trials in _parts(options):
        tasks: queue.SimpleQueue[Trial] = queue.SimpleQueue()
        for trial in trials:
            tasks.put(trial)

        def work(part: str = part, tasks: queue.SimpleQueue[Trial] = tasks) -> None:
            worker = Worker(part)
            try:
                while options.seconds is None or time.monotonic() - start < options.seconds:
                    try:
                        trial = tasks.get_nowait()
                    except queue.Empty:
                        return
                    _judge(trial, worker, tally, lock, options)
            finally:
                worker.close()

        jobs = 1 if part.startswith("mpi") else options.jobs
        threads = [threading.Thread(target=work) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return tally


def _judge(
    trial: Trial, worker: Worker, tally: Tally, lock: threading.Lock, options: argparse.Namespace
) -> None:
    case = trial.case()
    verdict = worker.run(case, options.limit)
    with lock:
        shrunk = len(tally.failures) < options.shrink
    failed = verdict["kind"] in FAILURES
    smallest = None
    if failed:
        print(f"{trial}: {verdict['kind']}: {verdict['why'][:300]}", file=sys.stderr, flush=True)
        smallest = smaller(case, verdict, worker, options.limit) if shrunk else case
    with lock:
        tally.add(trial, verdict, smallest)
        total = tally.kinds.total()
        if total % 500 == 0:
            print(f"{total} trials: {dict(tally.kinds)}", file=sys.stderr, flush=True)


def smaller(case: Case, verdict: dict[str, Any], worker: Worker, limit: float) -> Case:
    """The smallest case found that fails in the same way; of one that fails now and then, in three runs."""
    from campaigns.program_trial import Verdict, signature

    def told(found: dict[str, Any]) -> str:
        return signature(Verdict(found["kind"], found["why"]))

    def fails(other: Case) -> bool:
        runs = 3 if verdict["kind"] == WRONG else 1
        return any(told(worker.run(other, limit)) == told(verdict) for _ in range(runs))

    return shrink(case, fails)


def _parts(options: argparse.Namespace) -> Iterator[tuple[str, list[Trial]]]:
    numbers = range(options.first, options.first + options.trials)
    if options.part is not None:
        yield options.part, [Trial(options.part, options.seed, n) for n in numbers]
        return
    for part, share in PARTS.items():
        count = round(share * options.trials)
        yield part, [Trial(part, options.seed, n) for n in numbers[:count]]


def _alone(options: argparse.Namespace) -> None:
    """One trial or case, with all there is to say about it."""
    part = options.part or "process"
    if options.case is not None:
        case = Case.from_json(json.loads(Path(options.case).read_text()))
    else:
        case = Trial(part, options.seed, options.trial).case()
    print(json.dumps(case.to_json()))
    worker = Worker(part)
    try:
        verdict = worker.run(case, options.limit)
    finally:
        worker.close()
    print(verdict.pop("trace", ""))
    print(json.dumps(verdict))


def main() -> int:
    """The command. Returns 1 where a trial failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial of each part")
    parser.add_argument("--jobs", type=int, default=1, help="workers at a time")
    parser.add_argument("--part", choices=list(PARTS), help="one part alone")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one trial")
    parser.add_argument("--seconds", type=float, help="begin no trial after so many seconds")
    parser.add_argument("--shrink", type=int, default=12, help="failures that are made small")
    parser.add_argument("--trial", type=int, help="run this trial alone")
    parser.add_argument("--case", help="run the case in this file alone")
    parser.add_argument("--output", type=Path, help="write the result there, too")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve()
        return 0
    if options.trial is not None or options.case is not None:
        _alone(options)
        return 0
    result = campaign(options).to_json()
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(result["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
