"""Probes of ops: small programs whose ops are timed one by one on a device.

*In:* shapes.
*Out:* for every op of a small program its `Work` and its seconds.
*Invariant:* the timed code is the generated program with its buffers, so that each op finds caches and
interpreter in the state that they have in training. Clocks are read between lines; nothing else is added. A
short op is timed by the wall clock, because reading the CPU clock takes as long as a short op; a long op is
timed by the CPU clock, which excludes the time slices of other programs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from distgraph import nn, ops
from distgraph.array_api.trace import trace
from distgraph.ir.dtypes import is_float, to_numpy
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.optim import SGD, Adam, AdamW, Optimizer
from distgraph.passes.partition import LocalOp
from distgraph.passes.pass_pipeline import pipeline, run_passes
from distgraph.passes.pass_registry import PassContext
from distgraph.passes.serial.backward import differentiate
from distgraph.resources import Cluster, ComputeCost
from distgraph.runtime.execute.worker import Worker
from distgraph.runtime.forecast.op_cost import NOTHING, OpCost, Work
from distgraph.runtime.program.build import build
from distgraph.runtime.program.compiled_task import CompiledTask
from distgraph.tracing.tensor import Tensor, emit_one
from distgraph.tracing.tracer import Trace

_LINE: Final = re.compile(r"  # %([^,\s]+)")  # the comment of a line names its results
MATMUL_SHAPES: Final = (
    *((n, n, n) for n in (8, 32, 64, 128, 256, 512, 1024)),
    *((4096, 32, 32), (32, 4096, 32), (32, 32, 4096), (2048, 128, 512), (512, 2048, 128), (128, 512, 2048)),
    *((8, 1024, 1024), (1024, 8, 1024), (1024, 1024, 8), (1000, 10, 64), (64, 1000, 10), (200, 72, 16)),
)
"""m, n, k: square, tall, wide, flat and thin."""
IMAGE_SHAPES: Final = (
    (2, 8, 8),
    (8, 16, 8),
    (8, 32, 8),
    (32, 32, 8),
    (4, 32, 32),
    (16, 64, 16),
    (64, 64, 16),
    (64, 128, 16),
)
"""Batch, channels and edge of images: convolutions of 5e3 to 6e8 FLOP."""
TEXT_SHAPES: Final = ((1, 16, 32), (4, 32, 64), (8, 64, 128), (16, 64, 128), (32, 64, 128), (8, 64, 256))
"""Batch, length and width of texts."""
CLOCKS: Final = (time.perf_counter, time.thread_time)
"""Wall clock and CPU clock."""
_SHORT_OP: Final = 1e-4  # seconds up to which an op is timed by the wall clock
_MICRO: Final = 4  # micro-batches of the probes with several
STREAM_SIZES: Final = tuple(2**power for power in range(8, 25, 2))
"""Elements: 1 KiB to 64 MiB of f32."""


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


def probes() -> tuple[Probe, ...]:
    """All programs that a profile runs, quick ones first."""
    programs = []
    for dtype in ("f32", "f64"):
        small = [shape for shape in MATMUL_SHAPES if np.prod(shape) <= 2**22]
        large = [shape for shape in MATMUL_SHAPES if np.prod(shape) > 2**22]
        programs.append(Probe(f"matmul/{dtype}/small", partial(_products, dtype, small)))
        named = {f"matmul/{dtype}/{'x'.join(map(str, shape))}": shape for shape in large}
        programs += [Probe(name, partial(_products, dtype, [shape])) for name, shape in named.items()]
    for batch, length, width in TEXT_SHAPES:
        programs.append(
            Probe(f"transformer/{batch}x{length}x{width}", partial(_transformer, batch, length, width))
        )
    for batch, channels, edge in IMAGE_SHAPES:
        name = f"convolution/{batch}x{channels}x{edge}"
        programs.append(Probe(name, partial(_convolution, batch, channels, edge)))
    for batch, width in ((8, 64), (8, 128), (24, 256), (64, 512)):
        programs.append(Probe(f"perceptron/{batch}x{width}", partial(_perceptron, batch, width)))
    programs += [
        Probe("transformer/micro", partial(_transformer, 4, 32, 64), _MICRO),
        Probe("convolution/micro", partial(_convolution, 8, 32, 8), _MICRO),
        Probe("perceptron/micro", partial(_perceptron, 24, 256), _MICRO),
    ]
    programs += [Probe(f"stream/{size}", partial(_streams, size)) for size in STREAM_SIZES]
    return tuple(programs)


def _products(dtype: str, shapes: Sequence[tuple[int, int, int]]) -> Graph:
    inputs = [((m, k), dtype) for m, _, k in shapes] + [((k, n), dtype) for _, n, k in shapes]

    def program(*tensors: Tensor) -> Any:
        half = len(shapes)
        return tuple(ops.matmul(a, b) for a, b in zip(tensors[:half], tensors[half:], strict=True))

    return trace(program, *inputs, name="matmul")


def _streams(size: int) -> Graph:
    """Elementwise ops and lookups on `size` elements."""
    width = min(size // 16, 256)  # 16 rows at least: ids go up to 9
    rows = size // width

    def program(x: Tensor, y: Tensor, ids: Tensor) -> Any:
        return x + y, x * y, ops.relu(x), ops.embedding(x, ids)

    return trace(program, ((rows, width), "f32"), ((rows, width), "f32"), ((rows,), "i32"), name="stream")


class _LanguageModel(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        self.token, self.place = nn.Embedding(256, width), nn.Parameter((length, width))
        self.block = nn.TransformerBlock(width, max(1, width // 32), dropout=0.1)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.block(self.token(text) + self.place)))
        return logits


class _ImageModel(nn.Module):
    def __init__(self, channels: int, edge: int) -> None:
        self.first = nn.Conv2d(1, channels // 2, 3, padding=1)
        self.second = nn.Conv2d(channels // 2, channels, 3, padding=1)
        self.third = nn.Conv2d(channels, channels // 8, 3, padding=1)  # as many patches for few FLOPs
        self.pool, self.dropout = nn.MaxPool2d(2), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(channels // 8 * (edge // 4) ** 2, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(ops.relu(self.first(images)))
        x = self.pool(ops.relu(self.third(ops.relu(self.second(x)))))
        logits: Tensor = self.down(self.dropout(ops.relu(self.up(nn.Flatten()(x)))))
        return logits


def _transformer(batch: int, length: int, width: int) -> Graph:
    text = ((batch, length), "i32")
    return _training(_LanguageModel(length, width), (text, text), AdamW(clip_norm=1.0))


def _convolution(batch: int, channels: int, edge: int) -> Graph:
    images = ((batch, 1, edge, edge), "f32")
    return _training(_ImageModel(channels, edge), (images, ((batch,), "i32")), Adam())


def _perceptron(batch: int, width: int) -> Graph:
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)
    )
    return _training(model, (((batch, 64), "f32"), ((batch,), "i32")), SGD(lr=1e-3, momentum=0.9))


def _training(model: nn.Module, batch: Sequence[tuple[tuple[int, ...], str]], optimizer: Optimizer) -> Graph:
    """One step of training: forward, backward, update."""
    steps = Trace("train")
    steps.training = True
    nn.module.name_tree(model)
    with steps.activate():
        x, target = (
            steps.source("input", name, *kind) for name, kind in zip(("x", "target"), batch, strict=True)
        )
        loss = nn.CrossEntropy()(model(x), target)
        parameters = [Tensor(op.result, steps) for op in steps.ops if op.kind == "param"]
        gradients = differentiate(steps, loss, parameters)
        with steps.within(role="backward"):
            pairs = [(p, emit_one("accumulate", g)) for p, g in zip(parameters, gradients, strict=True)]
        optimizer.update(steps, pairs)
        traced = steps.finish({"loss": emit_one("accumulate", loss)})
        graph: Graph = run_passes(traced, pipeline().reaching("serial"), verified=False)
        return graph


class PreparedProbe:
    """A probe compiled in this process.

    Args:
        probe: the program.
        cluster: any cluster; only its first device is used.
    """

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
        locals_ = {v.name: local for task in program.tasks for local in task.ops for v in local.op.results}
        self._seconds: dict[str, list[float]] = {}
        self._tasks = dict(self._worker.tasks)
        self._works = _works(locals_, cost)
        self.nbytes = sum(value.nbytes for op in program.graph.ops for value in op.results)
        self._worker.step(self._feeds)  # compiles kernels
        self._use_cpu_clock(set())
        self._worker.step(self._feeds)
        self._use_cpu_clock({name for name, spans in self._seconds.items() if np.mean(spans) > _SHORT_OP})
        self.ops = tuple(name for name in self._works if name in self._seconds)

    def _use_cpu_clock(self, long: Set[str]) -> None:
        """Time these ops by the CPU clock and all others by the wall clock."""
        stamped = {name: _with_clocks(task, self._seconds, long) for name, task in self._tasks.items()}
        self._worker.tasks.update(stamped)

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
            runs.append([np.mean(self._seconds[name]) for name in self.ops])
        return [float(median) for median in np.median(runs, axis=0)]


def _works(locals_: dict[str, LocalOp], cost: OpCost) -> dict[str, Work]:
    """Works of all ops but the accumulation over micro-batches, which the first micro-batch does not run."""
    works = {}
    for name, local in locals_.items():
        if local.op.results[0].name == name and local.mode != "accumulate":
            work = cost.work(local)
            if work is not NOTHING:
                works[name] = work
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
