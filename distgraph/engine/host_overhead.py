"""Host overhead of a step: the time outside its tasks, in Python that feeds and dispatches them.

*In:* numbers of micro-batches. *Out:* seconds of a step of a tiny model, without those of its tasks.
*Invariant:* the timed code is `Engine.run` with the generated tasks; only a clock is read around each task.
All ranks of a job train the model data parallel, since they run all measurements together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from distgraph import nn, optim
from distgraph.engine.engine import Engine
from distgraph.ir.mesh import ProcessMesh
from distgraph.plan.strategy import Strategy
from distgraph.runtime.execute.worker import Worker
from distgraph.runtime.job.job_files import ranks_of_job
from distgraph.runtime.program.compiled_task import CompiledTask

MICRO_BATCHES: Final = (1, 16)
_STEPS: Final = 20


@dataclass(slots=True)
class Overhead:
    """Steps of a tiny model in `count` micro-batches. See `distgraph.runtime.profile.profiler.HostProbe`."""

    micro_batches: int
    _engine: Engine | None = None
    _runs: list[float] = field(default_factory=list)  # seconds of the tasks of the present step

    @property
    def name(self) -> str:
        """Name of the measurement, unique among all."""
        return f"host/{self.micro_batches}"

    def run(self) -> tuple[int, float]:
        """Number of tasks of a step on a rank, and seconds outside of them: the median over some steps."""
        ranks = ranks_of_job()
        size = self.micro_batches * ranks
        batch = np.zeros((size, 2), np.float32), np.zeros(size, np.int32)
        if self._engine is None:
            self._engine = self._made(ranks, batch)
        outside = []
        for _ in range(_STEPS):
            self._runs.clear()
            begin = time.perf_counter()
            self._engine.run(batch)
            outside.append(time.perf_counter() - begin - sum(self._runs))
        return len(self._runs), statistics.median(outside)

    def _made(self, ranks: int, batch: tuple[np.ndarray, np.ndarray]) -> Engine:
        strategy = Strategy(
            mesh=ProcessMesh.grid(dp=ranks), batch_axis="dp", micro_batches=self.micro_batches
        )
        engine = Engine(nn.Linear(2, 2), nn.CrossEntropy(), optim.SGD(lr=1e-3), strategy=strategy)
        engine.run(batch)
        for worker in engine._session.first_program("training program").workers.values():
            self._watch(worker)
        return engine

    def _watch(self, worker: Worker) -> None:
        def timed(function: Callable[[int], None]) -> Callable[[int], None]:
            def run(micro: int) -> None:
                begin = time.perf_counter()
                function(micro)
                self._runs.append(time.perf_counter() - begin)

            return run

        def watched(task: CompiledTask) -> CompiledTask:
            return replace(task, body=timed(task.body), last=timed(task.last))

        worker.tasks.update({name: watched(task) for name, task in worker.tasks.items()})


def overheads() -> tuple[Overhead, ...]:
    """A measurement for each number of micro-batches, to separate the cost of a step from that of a task."""
    return tuple(map(Overhead, MICRO_BATCHES))
