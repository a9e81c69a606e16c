"""Probes of ops: small programs whose ops are timed one by one on a device.

*In:* programs (see `probe_programs`).
*Out:* for every op of a small program its `Work` and its seconds.
*Invariant:* the timed code is the generated program with its buffers, so that each op finds caches and
interpreter in the state that they have in training. Clocks are read between lines; nothing else is added. A
short op is timed by the wall clock, because reading the CPU clock takes as long as a short op; a long op is
timed by the CPU clock, which excludes the time slices of other programs. A short op that takes ten times as
long as the longest short op was interrupted, by another program or at the end of a quota, and does not count.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from distgraph.ir.dtypes import is_float, to_numpy
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.kernels._jit import has_numba
from distgraph.passes.partition import LocalOp
from distgraph.passes.pass_pipeline import run_passes
from distgraph.passes.pass_registry import PassContext
from distgraph.resources import Cluster, ComputeCost
from distgraph.runtime.execute.worker import Worker
from distgraph.runtime.forecast.op_cost import NOTHING, OpCost, Work
from distgraph.runtime.program.build import build
from distgraph.runtime.program.compiled_task import CompiledTask

_LINE: Final = re.compile(r"  # %([^,\s]+)(?: to %([^,\s]+))?")  # the comment of a line names its results
CLOCKS: Final = (time.perf_counter, time.thread_time)
"""Wall clock and CPU clock."""
_SHORT_OP: Final = 1e-4  # seconds up to which an op is timed by the wall clock
_INTERRUPTED: Final = 10 * _SHORT_OP  # seconds from which such an op was interrupted


@dataclass(frozen=True, slots=True)
class Probe:
    """A program to time op by op.

    Attributes:
        name: unique name.
        graph: traces the program.
        micro_batches: number of micro-batches of a step, whose gradients are added up.
    """

    name: str
    graph: Callable[[], Graph]
    micro_batches: int = 1


class PreparedProbe:
    """A probe compiled in this process; any cluster will do, only its first device is used."""

    def __init__(self, probe: Probe, cluster: Cluster) -> None:
        context = PassContext(mesh=ProcessMesh.grid(serial=1))
        completed: Graph = run_passes(probe.graph(), ("complete",), context, verified=False)
        compiled = build(completed, micro_batches=probe.micro_batches)
        program = compiled.program(0)
        random = np.random.default_rng(0)
        sources = {
            op.result.name: _block(random, op.result.shape, op.result.dtype, op.kind == "state")
            for op in program.graph.sources("param", "state")
        }
        self._worker = Worker(program, compiled.schedule, None, np, sources)
        self._feeds: dict[str, Any] = {}
        for op in program.graph.sources("input"):
            shape, dtype = op.result.shape, op.result.dtype
            blocks = [_block(random, shape, dtype, False) for _ in range(probe.micro_batches)]
            self._feeds[str(op.attrs["name"])] = blocks if shape else to_numpy(dtype).type(1)
        cost = OpCost(program, self._worker.storage, ComputeCost(cluster), 0)
        self._seconds: dict[str, list[float]] = {}
        self._lines: dict[str, tuple[str, float]] = {}  # result -> first one of its line, part of its time
        self._tasks = dict(self._worker.tasks)
        self._works = _works(program.makers(), cost)
        self.nbytes = sum(value.nbytes for op in program.graph.ops for value in op.results)
        self._worker.step(self._feeds)  # compiles kernels
        self._use_cpu_clock(set())
        self._worker.step(self._feeds)
        usual = {name: float(np.mean(spans)) for name, spans in self._seconds.items()}
        self._use_cpu_clock({name for name, seconds in usual.items() if seconds > _SHORT_OP})
        self.ops = tuple(name for name in self._works if name in self._lines)
        lines = (self._lines[name] for name in self.ops)
        self._usual = np.array([share * usual[first] for first, share in lines])

    def _use_cpu_clock(self, long: Set[str]) -> None:
        """Time these ops by the CPU clock and all others by the wall clock."""
        stamped = {name: _with_clocks(task, self._seconds, long) for name, task in self._tasks.items()}
        self._worker.tasks.update(stamped)
        for task in self._tasks.values():
            for first, last in _LINE.findall(task.source):
                self._lines.update(self._shares(first, last) if last else {first: (first, 1.0)})

    def _shares(self, first: str, last: str) -> dict[str, tuple[str, float]]:
        """Parts of the time of one call that runs several ops, such as updates: by their bytes."""
        names, works = list(self._works), self._works
        span = names[names.index(first) : names.index(last) + 1]
        nbytes = {name: works[name].nbytes for name in span if works[name].op == works[first].op}
        return {name: (first, size / sum(nbytes.values())) for name, size in nbytes.items()}

    @property
    def works(self) -> tuple[Work, ...]:
        """Works of the timed ops, in the order of `run`."""
        return tuple(self._works[name] for name in self.ops)

    def run(self, seconds: float = 0.02) -> list[float]:
        """Seconds of every op: the median over some runs of the program.

        Args:
            seconds: approximate time to run. The program runs once untimed to warm the caches, then one to
                ten times.
        """
        begin = time.perf_counter()
        self._worker.step(self._feeds)
        count = int(np.clip(seconds / (time.perf_counter() - begin), 1, 10))
        runs = []
        for _ in range(count):
            self._seconds.clear()
            self._worker.step(self._feeds)
            lines = (self._lines[name] for name in self.ops)
            runs.append([share * np.mean(self._seconds[first]) for first, share in lines])
        return medians(np.array(runs), self._usual)


def medians(runs: np.ndarray, usual: np.ndarray) -> list[float]:
    """Median seconds of every op, without those runs of short ops that were interrupted.

    Args:
        runs: seconds [runs, ops].
        usual: seconds [ops] before; at most `_SHORT_OP` of those that are timed by the wall clock. An op that
            was interrupted in every run takes these.
    """
    interrupted = (runs > _INTERRUPTED) & (usual <= _SHORT_OP)
    columns = [column[~cut] for column, cut in zip(runs.T, interrupted.T, strict=True)]
    return [float(np.median(c)) if c.size else float(u) for c, u in zip(columns, usual, strict=True)]


def _works(locals_: dict[str, LocalOp], cost: OpCost) -> dict[str, Work]:
    """Works of all ops but the accumulation over micro-batches, which the first micro-batch does not run."""
    works = {}
    for name, local in locals_.items():
        if local.op.results[0].name == name and local.mode != "accumulate":
            work = cost.work(local)
            if work is not NOTHING:
                works[name] = work if has_numba() else replace(work, tiles=(0.0, 0.0, 0.0))
    return works


def _block(random: np.random.Generator, shape: tuple[int, ...], dtype: str, zero: bool) -> Any:
    kind = to_numpy(dtype)
    if zero:
        return np.zeros(shape, kind)
    if is_float(dtype):
        return (0.1 * random.standard_normal(shape)).astype(kind)
    high = 2 if dtype == "bool" else 10  # classes, tokens: below the size of every table
    return random.integers(0, high, shape).astype(kind)


def _with_clocks(task: CompiledTask, seconds: dict[str, list[float]], long: Set[str]) -> CompiledTask:
    """The task with clocks between its lines, which append the seconds of each line under its first result.

    Args:
        task: generated task.
        seconds: first result of a line -> seconds of every run of it.
        long: first results of lines that are timed by the CPU clock.
    """
    clocks = dict(zip(("wall", "processor"), CLOCKS, strict=True))
    overhead = {name: _clock_seconds(clock) for name, clock in clocks.items()}

    def stamped(function: Callable[[int], None]) -> Callable[[int], None]:
        text, names = _clocked_source(task.source, function.__name__, long)
        reading = [overhead["processor" if name in long else "wall"] for name in names]

        def note(*spans: float) -> None:
            for name, span, less in zip(names, spans, reading, strict=True):
                seconds.setdefault(name, []).append(max(span - less, 1e-9))

        scope = {**task.scope, **clocks, "note": note}
        exec(compile(text, f"<timed {task.name}>", "exec"), scope)
        clocked: Callable[[int], None] = scope[function.__name__]
        return clocked

    return replace(task, body=stamped(task.body), last=stamped(task.last))


def _clocked_source(source: str, function: str, long: Set[str]) -> tuple[str, list[str]]:
    """Source of one function of a task with clocks, and the first result of every timed line."""
    rest = source.partition(f"def {function}(m):\n")[2]
    text, names = [f"def {function}(m):"], list[str]()
    for line in rest.split("\n\n\n")[0].rstrip().split("\n"):
        match = _LINE.search(line)
        if match is None:
            text.append(line)
            continue
        number, name = len(names), match.group(1)
        clock = "processor" if name in long else "wall"
        names.append(name)
        text += [f"    begin_{number} = {clock}()", line, f"    end_{number} = {clock}()"]
    text.append("    note(" + ", ".join(f"end_{i} - begin_{i}" for i in range(len(names))) + ")")
    return "\n".join(text), names


def _clock_seconds(clock: Callable[[], float]) -> float:
    """Seconds between two readings of a clock."""
    spans = []
    for _ in range(200):
        begin = clock()
        spans.append(clock() - begin)
    return float(np.median(spans))
