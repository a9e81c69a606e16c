"""Steps of pipelines under both executors, on the ranks of an MPI job, some stages and messages being late.

Started by `benchmarks/machines.py` under mpiexec. The work of a stage is a pause of some milliseconds besides
a small layer, so that ranks which share cores do not disturb each other. Both executors get the same delays.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.runtime.launch.mpi_rank import current_transport
from distgraph.runtime.transport.transport import Request, Transport
from distgraph.runtime.transport.watchdog import MESSAGE_TAGS

WIDTH, CLASSES, SAMPLES, MICRO = 16, 4, 64, 8
FORWARD, BACKWARD = 1.5e-3, 3e-3  # seconds of a stage
SCENARIOS = ("even", "slow stage", "late messages", "stopped rank")
STOPPED = 0.2
EXECUTORS = ("static", "actors")
grid = dg.ProcessMesh.grid


class Row(nn.Module):
    """A layer on each mesh, one after the other."""

    def __init__(self, meshes: Sequence[dg.ProcessMesh]) -> None:
        self.layers = [nn.Linear(WIDTH, WIDTH) for _ in meshes]
        self.head, self._meshes = nn.Linear(WIDTH, CLASSES), meshes

    def forward(self, x: Any) -> Any:
        for mesh, layer in zip(self._meshes, self.layers, strict=True):
            with dg.on(mesh):
                x = ops.tanh(layer(x))
        with dg.on(self._meshes[-1]):
            return self.head(x)


class Branches(nn.Module):
    """A layer on the first mesh, one on each other, and a sum on the first."""

    def __init__(self, meshes: Sequence[dg.ProcessMesh]) -> None:
        self.layers = [nn.Linear(WIDTH, WIDTH) for _ in meshes]
        self.head, self._meshes = nn.Linear(WIDTH, CLASSES), [*meshes, meshes[0]]

    def forward(self, x: Any) -> Any:
        with dg.on(self._meshes[0]):
            x = ops.tanh(self.layers[0](x))
        made = []
        for mesh, layer in zip(self._meshes[1:-1], self.layers[1:], strict=True):
            with dg.on(mesh):
                made.append(ops.tanh(layer(x)))
        with dg.on(self._meshes[0]):
            return self.head(sum(made[1:], made[0]))


PROGRAMS: dict[str, tuple[type[Row] | type[Branches], str]] = {
    "1f1b": (Row, "1f1b"),
    "eager-1f1b": (Row, "eager-1f1b"),
    "branches": (Branches, "1f1b"),
    "branches, eager-1f1b": (Branches, "eager-1f1b"),
}


class Delays:
    """The delays of one step, equal for both executors.

    Args:
        scenario: of `SCENARIOS`.
        pair: number of the step.
        ranks: in all.
    """

    def __init__(self, scenario: str, pair: int, ranks: int) -> None:
        draw = random.Random(pair)
        self.scenario, self.pair = scenario, pair
        self.slow, self.stopped = draw.randrange(ranks), (draw.randrange(ranks), draw.randrange(MICRO))

    def task(self, rank: int, kind: str, micro: int) -> float:
        """Seconds of a task besides its own work."""
        if self.scenario == "slow stage" and rank == self.slow:
            return random.Random(f"{self.pair} {kind} {micro}").random() * 2 * (FORWARD + BACKWARD)
        stops = self.scenario == "stopped rank" and (rank, micro) == self.stopped and kind == "forward"
        return STOPPED if stops else 0.0

    def message(self, source: int, tag: int) -> float:
        """Seconds for which a message is late."""
        if self.scenario != "late messages":
            return 0.0
        return random.Random(f"{self.pair} {source} {tag}").random() * 3 * (FORWARD + BACKWARD)


class LateRequest:
    """A receive that is complete some time after its message was sent. See `Request`."""

    def __init__(self, request: Request, stamp: Request, sent: np.ndarray, seconds: float) -> None:
        self._request, self._stamp, self._sent, self._seconds = request, stamp, sent, seconds

    def done(self) -> bool:
        here = self._request.done() and self._stamp.done()
        return here and time.monotonic() >= float(self._sent[0]) + self._seconds

    def wait(self) -> None:
        self._request.wait()
        self._stamp.wait()
        time.sleep(max(0.0, float(self._sent[0]) + self._seconds - time.monotonic()))


class LateTransport:
    """A transport whose messages arrive late. With each goes the time at which it was sent."""

    def __init__(self, transport: Transport, run: Run) -> None:
        self._transport, self._run = transport, run
        self._stamps: list[tuple[Request, np.ndarray]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, buffer: Any, dest: int, tag: int) -> Request:
        sent = np.array([time.monotonic()])  # ranks of one machine read one clock
        self._stamps = [(request, stamp) for request, stamp in self._stamps if not request.done()]
        self._stamps.append((self._transport.send(sent, dest, tag - MESSAGE_TAGS), sent))
        return self._transport.send(buffer, dest, tag)

    def recv(self, buffer: Any, source: int, tag: int) -> LateRequest:
        sent = np.zeros(1)
        stamp = self._transport.recv(sent, source, tag - MESSAGE_TAGS)
        seconds = self._run.delays.message(source, tag)
        return LateRequest(self._transport.recv(buffer, source, tag), stamp, sent, seconds)


class Run:
    """One program under one executor.

    Attributes:
        delays: of the next step.
    """

    def __init__(self, name: str, executor: str, transport: Any) -> None:
        kind, schedule = PROGRAMS[name]
        meshes = [grid(rank, a=1) for rank in range(transport.size)]
        strategy = dg.Strategy(schedule=schedule, micro_batches=MICRO, executor=executor)
        last = meshes[-1] if kind is Row else meshes[0]

        def loss(logits: Any, labels: Any) -> Any:
            with dg.on(last):
                return nn.CrossEntropy()(logits, labels)

        self.engine = dg.Engine(kind(meshes), loss, optim.Adam(lr=1e-2), strategy=strategy, seed=1)
        rng = np.random.default_rng(0)
        x = rng.normal(size=(SAMPLES, WIDTH)).astype("f4")
        self.batch = x, rng.integers(0, CLASSES, SAMPLES).astype("i4")
        self.delays = Delays("even", 0, transport.size)
        self.losses = [self.step()]
        (compiled,) = self.engine._session.programs.values()
        (worker,) = compiled.workers.values()
        late = LateTransport(transport, self)
        for task in list(worker.tasks.values()):
            work = {"forward": FORWARD, "backward": BACKWARD}.get(name_of_kind(task.name), 0.0)
            task.scope["comm"] = late
            worker.tasks[task.name] = replace(
                task,
                body=self._slow(task.body, task.name, work, transport.rank),
                last=self._slow(task.last, task.name, work, transport.rank),
            )

    def _slow(self, run: Callable[[int], None], name: str, work: float, rank: int) -> Callable[[int], None]:
        def slowed(m: int) -> None:
            run(m)
            time.sleep(work + (self.delays.task(rank, name_of_kind(name), m) if work else 0.0))

        return slowed

    def step(self) -> float:
        """One step; its loss."""
        return float(self.engine.run(self.batch)["loss"])


def name_of_kind(task: str) -> str:
    """The kind of a task by its name."""
    return task.split(".")[0]


def measure(name: str, scenario: str, pairs: int, transport: Any) -> dict[str, Any]:
    """Seconds of the steps under actors over those under the recorded order, in turns."""
    runs = {executor: Run(name, executor, transport) for executor in EXECUTORS}
    seconds: dict[str, list[float]] = {executor: [] for executor in EXECUTORS}
    for pair in range(-2, pairs):
        for executor in EXECUTORS if pair % 2 else reversed(EXECUTORS):
            run = runs[executor]
            run.delays = Delays(scenario, pair, transport.size)
            transport.barrier()
            start = time.perf_counter()
            run.losses.append(run.step())
            transport.barrier()
            if pair >= 0:
                seconds[executor].append(time.perf_counter() - start)
    if runs["static"].losses != runs["actors"].losses:
        raise SystemExit(f"{name}: the losses of the executors differ; nothing to compare")
    for run in runs.values():
        run.engine.close()
    ratios = [a / b for a, b in zip(seconds["actors"], seconds["static"], strict=True)]
    return {"program": name, "scenario": scenario, "static": seconds["static"], "ratios": ratios}


def main() -> None:
    """Measure the programs and scenarios that are named; rank 0 prints JSON."""
    transport = current_transport()
    assert transport is not None
    pairs, programs = int(sys.argv[1]), sys.argv[2:] or list(PROGRAMS)
    rows = [measure(name, s, pairs, transport) for name in programs for s in SCENARIOS]
    if transport.rank == 0:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
