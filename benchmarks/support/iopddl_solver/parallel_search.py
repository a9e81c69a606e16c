"""What searches beside the tree: a second process over neighbourhoods, and SCIP once little is left."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from benchmarks.support.iopddl_solver.branch_and_bound import Best
from benchmarks.support.iopddl_solver.search_process import Job, Task, Worker
from benchmarks.support.iopddl_solver.subproblem import Mask, Subproblem, shrink
from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.solver.scip_model import missing_scip

__all__ = ["Team"]

_EXACT = 20_000  # permitted pairs of strategies up to which SCIP is given the whole network
_POLL = 0.05  # seconds between looks at what SCIP has found, while nothing else is done


class Team:
    """The processes of one search and what they know from each other.

    Attributes:
        bound: a lower bound on every choice, from SCIP.
    """

    def __init__(
        self, flat: Subproblem, vectors: Floats, prices: Floats, best: Best, threads: int, seed: int
    ) -> None:
        self.flat, self.vectors, self.prices, self.best = flat, vectors, prices, best
        self.threads, self.seed = threads, seed
        self.bound = -math.inf
        self._workers: list[Worker] = []
        self._failures = dict.fromkeys([missing_scip()])
        self._asked_scip = bool(missing_scip())
        self._told = math.inf
        self._small: Subproblem | None = None

    def exchange(self, permitted: Mask, seconds: float) -> None:
        """Start the second process, where there may be one and none runs; hear and tell what is new."""
        if self.threads > 1 and not self._workers and seconds > 1.0:
            self._start("neighbourhoods", self.flat, self.vectors, self.prices, permitted, seconds)
        for worker in list(self._workers):
            self._hear(worker, 0.0)
        if self.best.choice is not None and self.best.objective < self._told:
            self._told = self.best.objective
            for worker in self._workers:
                if worker.task == "neighbourhoods":
                    worker.tell((self.best.choice, self.best.objective))

    def exact(self, permitted: Mask, seconds: float, turn: Callable[[], float]) -> None:
        """Give SCIP what is permitted, once and where that is little; with one core, wait a turn for it."""
        if self._asked_scip or self.best.choice is None:
            return
        mask = permitted.copy()
        mask[self.flat.first[:-1] + self.best.choice] = True
        small, vectors, prices = shrink(self.flat, mask, self.vectors, self.prices)
        if np.isfinite(small.table).sum() > _EXACT:
            return
        self._asked_scip, self._small = True, small
        own = turn() if self.threads == 1 else seconds
        worker = self._start("exact", small, vectors, prices, np.ones(len(small.cost), dtype=bool), own)
        while self.threads == 1 and worker in self._workers and turn() > 0:
            self._hear(worker, _POLL)

    def close(self) -> str:
        """End all processes; what went wrong with them."""
        for worker in list(self._workers):
            self._retire(worker)
        return "; ".join(filter(None, self._failures))

    def _start(
        self, task: Task, flat: Subproblem, vectors: Floats, prices: Floats, permitted: Mask, seconds: float
    ) -> Worker:
        best = self.best
        assert best.choice is not None
        choice = flat.locate(best.choice) if task == "exact" else best.choice
        job = Job(task, flat, vectors, prices, permitted, choice, best.objective, seconds, self.seed)
        worker = Worker(job)
        self._workers.append(worker)
        return worker

    def _hear(self, worker: Worker, seconds: float) -> None:
        """Take what a process has found; let it go when it has ended."""
        for found in worker.hear(seconds):
            if worker.task == "exact" and self._small is not None:
                if found.choice is not None:
                    self.best.see(self.flat, self._small.expand(found.choice))
                self.bound = max(self.bound, min(found.bound, self.best.objective))
                self._retire(worker)
                return
            if found.choice is not None:
                self.best.see(self.flat, found.choice)
        if worker.failure:
            self._retire(worker)

    def _retire(self, worker: Worker) -> None:
        self._failures[worker.failure] = None
        worker.close()
        self._workers.remove(worker)
