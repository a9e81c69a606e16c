"""A second process that searches beside the first: neighbourhoods of its own, or the exact model in SCIP.

The process reads one pickled `Job` from its standard input, then better choices that others have found, and
writes the better choices that it finds as pickled `Found`. SCIP runs nowhere else, so nothing that happens to
it ends the search.
"""

from __future__ import annotations

import math
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import BinaryIO, Literal

import numpy as np

from benchmarks.support.iopddl_solver.branch_and_bound import Best
from benchmarks.support.iopddl_solver.large_neighbourhood import Neighbourhoods
from benchmarks.support.iopddl_solver.subproblem import Mask, PartDual, Subproblem
from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.solver.flat_problem import Ints
from distgraph.passes.search.solver.scip_model import ExactModel

__all__ = ["Found", "Job", "Task", "Worker"]

_PROGRAM = "from benchmarks.support.iopddl_solver.search_process import main; main()"
Task = Literal["neighbourhoods", "exact"]


@dataclass(frozen=True, slots=True)
class Job:
    """What a second process is to do, for how long, and from where it starts."""

    task: Task
    flat: Subproblem
    vectors: Floats
    prices: Floats
    permitted: Mask
    choice: Ints
    objective: float
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class Found:
    """A better choice [nodes], or None; a lower bound on all choices; whether the search came to its end."""

    choice: Ints | None
    bound: float
    ended: bool


class Worker:
    """A running second process.

    Attributes:
        task: what it does.
    """

    def __init__(self, job: Job) -> None:
        self.task = job.task
        self._found: queue.Queue[Found] = queue.Queue()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # an interrupt is for the first process
        )
        threading.Thread(target=self._receive, daemon=True).start()
        self.tell(job)

    def tell(self, message: Job | tuple[Ints, float]) -> None:
        """Send the job, or a better choice and its objective; a process that is gone hears nothing."""
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except OSError:
            return

    def hear(self, seconds: float = 0.0) -> list[Found]:
        """What it has found since the last call, after waiting for the first up to some seconds."""
        heard: list[Found] = []
        while True:
            try:
                heard.append(self._found.get(timeout=seconds) if seconds > 0 else self._found.get_nowait())
            except queue.Empty:
                return heard
            seconds = 0.0

    @property
    def failure(self) -> str:
        """Why the process stopped before its end; empty while it runs or when it ended well."""
        code = self._process.poll()
        if not code:
            return ""
        what = "SCIP (pyscipopt)" if self.task == "exact" else "the second process"
        return f"{what} stopped with exit code {code}; the search went on without it"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                continue

    def _receive(self) -> None:
        assert self._process.stdout is not None
        try:
            while True:
                self._found.put(pickle.load(self._process.stdout))
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            return


def main() -> None:
    """Do the job on standard input; only what it finds goes to standard output."""
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    job: Job = pickle.load(sys.stdin.buffer)
    if job.task == "exact":
        _send(pipe, _exact(job))
    else:
        _neighbourhoods(job, pipe)


def _exact(job: Job) -> Found:
    until = time.perf_counter() + job.seconds
    best = Best(job.objective)
    model = ExactModel(PartDual(job.flat, job.vectors, job.prices), best.cutoff, 0.0)
    bound = model.solve(lambda: until - time.perf_counter(), lambda choice: best.see(job.flat, choice))
    choice = None if best.choice is None else job.flat.locate(best.choice)
    return Found(choice, bound, math.isinf(bound))


def _neighbourhoods(job: Job, pipe: BinaryIO) -> None:
    until = time.perf_counter() + job.seconds
    news: queue.Queue[tuple[Ints, float]] = queue.Queue()
    threading.Thread(target=_listen, args=(news,), daemon=True).start()

    def tell(best: Best) -> None:
        _send(pipe, Found(best.choice, -np.inf, False))

    best = Best(job.objective, choice=job.choice, told=tell)
    search = Neighbourhoods(job.flat, best, job.vectors, job.prices, np.random.default_rng(job.seed))
    while time.perf_counter() < until:
        search.improve(job.permitted, lambda: until - time.perf_counter())
        while not news.empty():
            choice, objective = news.get()
            if objective < best.objective:
                best.choice, best.objective = choice, objective


def _listen(news: queue.Queue[tuple[Ints, float]]) -> None:
    """Put better choices of others into a queue; end the process when the first one is gone."""
    while True:
        try:
            news.put(pickle.load(sys.stdin.buffer))
        except EOFError:
            os._exit(0)


def _send(pipe: BinaryIO, found: Found) -> None:
    pickle.dump(found, pipe)
    pipe.flush()
