"""The forecast: seconds of a training step and bytes of memory of every rank, before anything runs.

*In:* a `Build`, a cluster, a device for every rank, the model of a runtime.
*Out:* a `Forecast`.
*Invariant:* the forecast times what the runtime runs: the tasks of the rank programs, op by op on their
streams (see `stream_model`), in the order of the build's schedule, under the actors of the runtime (see
`simulate`), with messages between stages that follow one another on the links that they share, on ranks that
compute faster while others of their cores wait (`core_contention`). Another runtime than distgraph's runs the
same tasks in the same order; what is special about it is in its `RuntimeModel`.

Ranks that run the same tasks are represented by one of them if all their blocks have one size. Otherwise the
ranks at the corners of their mesh are timed and the slowest decides; `Forecast.exact` tells the two cases
apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distgraph.errors import ResourceError
from distgraph.ir.graph import Op
from distgraph.passes.partition import RankProgram
from distgraph.plan.forecast_errors import ForecastErrors, Interval, Uncertain
from distgraph.resources import Cluster, ComputeCost, RankMapping
from distgraph.resources.runtimes.load_runtime import default_runtime, load_runtime
from distgraph.resources.runtimes.runtime_model import Memory, RuntimeModel
from distgraph.resources.units import format_bytes, format_si
from distgraph.runtime.forecast import core_contention
from distgraph.runtime.forecast.communication_cost import TrafficCost
from distgraph.runtime.forecast.forecast_error_shares import errors_of, step_shares
from distgraph.runtime.forecast.liveness_memory import liveness_memory
from distgraph.runtime.forecast.memory_forecast import (
    RankMemory,
    Shortage,
    rank_memory,
    shortages,
    with_overhead,
)
from distgraph.runtime.forecast.op_cost import OpCost, Work
from distgraph.runtime.forecast.program_structure import ProgramStructure, Representative, TimedRank
from distgraph.runtime.forecast.rank_equivalence import (
    RankClass,
    representative_ranks,
)
from distgraph.runtime.forecast.rank_tasks import time_tasks
from distgraph.runtime.forecast.stream_model import Streams
from distgraph.runtime.forecast.task_forecast import (
    TaskForecast,
    gathering,
    sent_bytes,
    waiting,
)
from distgraph.runtime.forecast.task_time import TaskTime
from distgraph.runtime.program.build import Build
from distgraph.runtime.program.kernel_workspace import task_workspace
from distgraph.runtime.program.ring_buffer_sizes import rank_clocks
from distgraph.runtime.program.storage import Storage
from distgraph.runtime.schedule.simulate import Timeline, simulate
from distgraph.runtime.schedule.task import Ring


@dataclass(frozen=True)
class Forecast:
    """Forecast of the time and memory of one training step.

    Attributes:
        step_seconds: the timeline, and the work of the slowest host before and after it.
        tasks: forecasts by name of the task.
        timeline: task runs of all ranks.
        transfers: (source task, target task) -> seconds from the end of the source until its data arrives
            over free links. The timeline has what messages wait for links that others use.
        memory: representative rank -> peak memory by category.
        ranks: representative rank -> the ranks that it represents.
        devices: device number of every rank.
        exact: False if ranks differ and the slowest corner of a mesh represents the others.
        traffic: kind of the bottleneck link -> bytes that all ranks send over it in a step.
        workspaces: representative rank -> task -> bytes that its kernels allocate while they run.
        runtime: what executes the program; None for distgraph.
        errors: of the forecast, by kind; see `uncertain`.
        shares: kind -> part of the step that it takes.
    """

    step_seconds: float
    tasks: Mapping[str, TaskForecast]
    timeline: Timeline
    transfers: Mapping[tuple[str, str], float]
    memory: Mapping[int, RankMemory]
    ranks: Mapping[int, tuple[int, ...]]
    devices: tuple[int, ...]
    exact: bool
    traffic: Mapping[str, float]
    workspaces: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    runtime: RuntimeModel | None = None
    errors: ForecastErrors = field(default_factory=ForecastErrors)
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def uncertain(self) -> Uncertain:
        """The seconds of the step with their interval, for comparison with another forecast."""
        return Uncertain(self.step_seconds, self.shares, self.errors)

    @property
    def memory_interval(self) -> Interval:
        """Bytes that hold the measured peak of the fullest rank with a probability of 80 %."""
        return Interval.around(self.peak_memory, self.errors.memory)

    def _per_rank(self, field: str) -> dict[int, float]:
        """Sum of a field of `TaskTime` over a step, by first rank of a column."""
        totals = {}
        micro = self.timeline.graph.micro_batches
        for ranks in self.timeline.columns:
            total = 0.0
            for task in self.timeline.graph.tasks:
                if ranks[0] in task.ranks:
                    times = self.tasks[task.name]
                    total += getattr(times.last, field)
                    total += (micro - 1) * getattr(times.body, field) if task.per_micro else 0.0
            totals[ranks[0]] = total
        return totals

    @property
    def compute_seconds(self) -> dict[int, float]:
        """First rank of every column of the timeline -> seconds of computation."""
        return self._per_rank("compute")

    @property
    def exposed_seconds(self) -> dict[int, float]:
        """First rank of every column of the timeline -> seconds waiting for collectives inside its tasks."""
        return self._per_rank("exposed")

    @property
    def flops(self) -> dict[int, float]:
        """First rank of every column of the timeline -> FLOP of its contractions in a step."""
        return self._per_rank("flops")

    @property
    def total_flops(self) -> float:
        """Floating point operations of all contractions on all ranks in a step."""
        sizes = {ranks[0]: len(ranks) for ranks in self.timeline.columns}
        return sum(sizes[rank] * count for rank, count in self.flops.items())

    @property
    def bubble(self) -> float:
        """Fraction of the step in which the mean rank runs no task."""
        busy = self.timeline.busy()
        return 1.0 - sum(busy.values()) / (len(busy) * self.step_seconds) if self.step_seconds else 0.0

    @property
    def peak_memory(self) -> float:
        """Bytes of the rank that needs most."""
        return max(memory.total for memory in self.memory.values())

    @property
    def _peak_text(self) -> str:
        """The peak of the fullest rank with its interval, and the least of another one."""
        least, most = (of(self.memory.values(), key=lambda each: each.total) for of in (min, max))
        held = self.memory_interval
        peak = f"{format_bytes(most.total)} ({format_bytes(held.low)} to {format_bytes(held.high)})"
        if least.total == most.total:
            return peak
        return f"{peak} on rank {most.rank}, least {format_bytes(least.total)} on rank {least.rank}"

    @property
    def _kind(self) -> str:
        """Which ranks are equal."""
        if not self.exact:
            return "ranks differ: the slowest corner of every mesh decides"
        if len(self.memory) == 1:
            return "all ranks equal"
        return "ranks with the same tasks and device equal"

    def __str__(self) -> str:
        runtime = "" if self.runtime is None else f" under {self.runtime.name}"
        head = f"step{runtime} {format_si(self.step_seconds, 's')} ({self.uncertain.interval})"
        lines = [
            f"{head}, bubble {self.bubble:.1%}, peak memory {self._peak_text} ({self._kind})",
            f"intervals hold 80 % of measured steps: {self.errors}",
            f"{'task':<18}{'stage':>6}{'seconds':>12}{'last':>12}{'compute':>12}{'exposed':>12}",
        ]
        for task in self.tasks.values():
            numbers = (task.body.seconds, task.last.seconds, task.body.compute, task.body.exposed)
            cells = "".join(f"{format_si(number, 's'):>12}" for number in numbers)
            lines.append(f"{task.name:<18}{task.stage:>6}{cells}")
        for (source, target), seconds in self.transfers.items():
            lines.append(f"{source} -> {target}: {format_si(seconds, 's')}")
        lines += [f"over {link}: {format_bytes(size)} a step" for link, size in self.traffic.items()]
        return "\n".join([*lines, *(str(memory) for memory in self.memory.values())])


def forecast(
    build: Build,
    cluster: Cluster,
    mapping: RankMapping | Sequence[int] | None = None,
    *,
    runtime: RuntimeModel | str | None = None,
    trace: bool = False,
) -> Forecast:
    """Forecast one step.

    Args:
        build: the compiled program.
        cluster: what it is to run on.
        mapping: device of every rank; rank i on device i by default.
        runtime: what executes the program: a model, the name of one, or the path of its file (see
            docs/planning/runtimes.md); by default distgraph.
        trace: also list what runs on which stream inside every task, for pictures (`TaskTime.spans`).

    Raises:
        ResourceError: too few devices, a number that a cost needs is not in the resource file, or there is no
            such runtime.
    """
    if isinstance(runtime, str):
        runtime = load_runtime(runtime)
    return next(forecasts(build, [(cluster, runtime)], mapping, trace=trace))


def forecasts(
    build: Build,
    cases: Iterable[tuple[Cluster, RuntimeModel | None]],
    mapping: RankMapping | Sequence[int] | None = None,
    *,
    trace: bool = False,
) -> Iterator[Forecast]:
    """Forecast one step with several versions of the numbers of a cluster and of a runtime.

    What depends on the program alone is computed once, which is three quarters of a forecast.

    Args:
        build: the compiled program.
        cases: clusters with the same devices and links, and what executes the program.
        mapping, trace: as for `forecast`.

    Raises:
        ResourceError: as `forecast`.
    """
    structure = ProgramStructure(build)
    for cluster, runtime in cases:
        yield StepForecaster(structure, cluster, _devices(build, cluster, mapping), runtime, trace).run()


def _devices(build: Build, cluster: Cluster, mapping: RankMapping | Sequence[int] | None) -> tuple[int, ...]:
    count = max(build.ranks) + 1
    if isinstance(mapping, RankMapping):
        mapping = mapping.devices
    devices = tuple(range(count)) if mapping is None else tuple(mapping)
    available = len(cluster.devices)
    if len(devices) < count or max(devices) >= available or len(set(devices)) < len(devices):
        raise ResourceError(
            f"the program has {count} ranks but cluster {cluster.name} has {available} devices and the map "
            f"names {len(set(devices))} different ones; use smaller meshes, another resource file or mapping"
        )
    return devices


class StepForecaster:
    """Times the tasks of ranks; arguments as those of `forecasts`, for one case."""

    def __init__(
        self,
        structure: ProgramStructure,
        cluster: Cluster,
        devices: tuple[int, ...],
        runtime: RuntimeModel | None,
        trace: bool,
    ) -> None:
        self.structure, self.build = structure, structure.build
        self.cluster, self.devices = cluster, devices
        self.runtime, self.trace = runtime, trace
        self.traffic = TrafficCost(self.build.lowered, cluster, devices)
        self.compute = ComputeCost(cluster)
        self.op_costs: dict[object, tuple[Work, float]] = {}
        self.representatives: dict[Hashable, Representative] = {}
        self.times: dict[str, list[TaskForecast]] = {}
        self.timed: dict[int, TimedRank] = {}
        self.speeds: core_contention.Speeds = {}
        self.represented: dict[int, tuple[int, ...]] = {}  # those of its column on devices of its kind
        self.memory: dict[int, RankMemory] = {}
        self.workspaces: dict[int, dict[str, int]] = {}
        self.ranks: dict[int, tuple[int, ...]] = {}
        self.rings: set[Ring] = set()

    def run(self) -> Forecast:
        exact, uneven = True, self.structure.uneven
        for column in self.build.schedule.columns:
            chosen, even = representative_ranks(self.build, column.ranks, uneven, self.cluster, self.devices)
            exact = exact and even
            for rank in chosen:
                self.ranks[rank] = column.ranks if len(chosen) == 1 else (rank,)
                self.represented[rank] = tuple(r for r in column.ranks if self.kind(r) == self.kind(rank))
                self.time_rank(rank)
        tasks, transfers, timeline = self.simulated()
        running = {r: self.devices[r] for column in self.build.schedule.columns for r in column.ranks}
        groups = core_contention.core_groups(self.cluster, running)
        for _ in range(core_contention.MOST_TURNS if groups else 0):
            self.speeds = core_contention.core_speeds(tasks, timeline, groups)
            self.times, before = {}, timeline.makespan
            for timed in self.timed.values():
                self.time_tasks(timed)
            tasks, transfers, timeline = self.simulated()
            if abs(timeline.makespan - before) <= core_contention.SETTLED * before:
                break
        micro = self.build.task_graph.micro_batches
        products = {work.dtype for work, _ in self.op_costs.values() if work.kind == "matmul"}
        errors = errors_of(self.cluster, self.devices, self.runtime_of(self.devices[0]), products)
        return Forecast(
            timeline.makespan + max(map(self.host_seconds, set(self.devices))),
            tasks,
            timeline,
            transfers,
            self.memory,
            self.ranks,
            self.devices,
            exact,
            sent_bytes((tasks[part.name], micro if part.per_micro else 1) for part in self.build.parts.tasks),
            self.workspaces,
            self.runtime,
            errors,
            self.shares(tasks, timeline),
        )

    def simulated(self) -> tuple[dict[str, TaskForecast], dict[tuple[str, str], float], Timeline]:
        """Tasks on their slowest ranks, the seconds of messages between them, and the timeline."""
        tasks = {part.name: self.slowest(part.name) for part in self.build.parts.tasks}
        transfers, links = self.transfers(), self.links()
        if self.runtime is not None and self.runtime.parameters.gather == "use":
            tasks = gathering(tasks)
        if self.runtime is not None and self.runtime.messages.blocking:
            tasks, transfers, links = waiting(tasks, transfers), {}, {}
        timeline = simulate(
            self.build.task_graph,
            {n: t.body.seconds for n, t in tasks.items()},
            policy=self.build.policy,
            order=self.build.schedule.orders(),
            transfer=transfers,
            last={n: t.last.seconds for n, t in tasks.items()},
            rings=self.rings,
            links=links,
        )
        return tasks, transfers, timeline

    def shares(self, tasks: Mapping[str, TaskForecast], timeline: Timeline) -> dict[str, float]:
        """What the step goes to on the ranks whose tasks take longest."""
        micro, runs_of = timeline.graph.micro_batches, dict[int, list[tuple[TaskTime, int]]]()
        for ranks in timeline.columns:
            runs = runs_of.setdefault(ranks[0], [])
            for task in timeline.graph.tasks:
                if ranks[0] in task.ranks:
                    times = tasks[task.name]
                    runs += [(times.last, 1), (times.body, (micro - 1) * task.per_micro)]
        longest = max(runs_of.values(), key=lambda runs: sum(time.seconds * count for time, count in runs))
        return step_shares(longest, self.cluster.kinds_between)

    def runtime_of(self, device: int) -> RuntimeModel:
        """What executes the program of a device."""
        return self.runtime or default_runtime(self.cluster.devices[device].type)

    def kind(self, rank: int) -> tuple[str, str]:
        """Of the device of a rank: its model, and its place in the resource file."""
        device = self.cluster.devices[self.devices[rank]]
        return device.model, device.origin

    def host_seconds(self, device: int) -> float:
        """Work of the host of a device once per step."""
        host = self.cluster.devices[device].compute.host
        return host.replaced_by(self.runtime_of(device).host).step or 0.0

    def slowest(self, name: str) -> TaskForecast:
        """The task on the rank whose last micro-batch is slowest, with the longest body of all ranks."""
        slowest = max(self.times[name], key=lambda time: time.last.seconds)
        return replace(slowest, body=max((t.body for t in self.times[name]), key=lambda body: body.seconds))

    def time_rank(self, rank: int) -> None:
        """Time every task of one rank: op costs of its representative, its own messages and order."""
        rank_class = self.structure.rank_classes.of(rank)
        model = self.representative(rank, rank_class)
        task_pairs = zip(rank_class.tasks, model.rank_class.tasks, strict=True)
        task_names = {part.name: other.name for part, other in task_pairs}  # -> of the representative
        if model.workspace is not None:
            self.workspaces[rank] = {name: model.workspace[other] for name, other in task_names.items()}
        value_names = dict(zip(rank_class.names, model.rank_class.names, strict=True))
        clocks = rank_clocks(self.build.schedule, self.build.parts, rank).renamed(task_names, value_names)
        storage = model.plan.under(clocks)
        tasks_here = {other: name for name, other in task_names.items()}
        values_here = {other: name for name, other in value_names.items()}
        for writer, transfer, depth, posting in model.plan.sent_rings(storage):
            receiver = self.build.parts.transfers[values_here[transfer]][1]
            self.rings.add(Ring(tasks_here[writer], receiver, depth, posting))
        self.memory[rank] = self.memory_of(rank, model, storage, task_names)
        streams = self.streams(model, rank, rank_class)
        self.timed[rank] = TimedRank(rank, model.program, streams, task_names, values_here)
        self.time_tasks(self.timed[rank])

    def memory_of(
        self, rank: int, model: Representative, storage: Storage, task_names: Mapping[str, str]
    ) -> RankMemory:
        """Memory of a rank, computed once for a program; `task_names` are those of the representative."""
        rules = self.runtime_of(self.devices[rank]).memory
        key = rank, model.program.rank, rules
        if key not in self.structure.memory:
            if rules.planner == "liveness":
                steps = [(task_names[name], micro) for name, micro in self.build.schedule.order(rank)]
                memory = liveness_memory(model.program, storage, steps, rules)
            else:
                memory = rank_memory(model.program, storage, model.workspace)
            self.structure.memory[key] = replace(with_overhead(memory, rules), rank=rank)
        return self.structure.memory[key]

    def time_tasks(self, timed: TimedRank) -> None:
        """Time the tasks of a rank in their order, for a micro-batch in the middle and for the last one."""
        speeds = {name: self.speed(name, timed.rank) for name in timed.task_names}
        for times in time_tasks(self.build, timed, speeds, trace=self.trace):
            self.times.setdefault(times.name, []).append(times)

    def speed(self, task: str, rank: int) -> float:
        """How many times as fast as stated a rank computes in a task: as the slowest that it represents."""
        return min(self.speeds.get((task, each), 1.0) for each in self.represented.get(rank, (rank,)))

    def representative(self, rank: int, rank_class: RankClass) -> Representative:
        """The first rank of the class on the same kind of device; with `trace`, the rank itself."""
        device = self.cluster.devices[self.devices[rank]]
        key = (rank_class.key, device.type, device.model, device.origin, rank if self.trace else None)
        if key not in self.representatives:
            program, plan = self.structure.plan(rank)
            runtime = self.runtime_of(device.index)
            number, costs = self.devices[rank], self.op_costs
            ops = OpCost(program, plan.storage, self.compute, number, costs, runtime.kernels)
            streams = Streams(program, plan.storage, ops, self.traffic, runtime)
            workspace = task_workspace(program, plan.storage) if runtime.memory.kernels else None
            self.representatives[key] = Representative(rank_class, program, plan, streams, workspace)
        return self.representatives[key]

    def streams(self, model: Representative, rank: int, rank_class: RankClass) -> Streams:
        """The streams of a rank: those of its representative, with the costs of the rank's own messages."""
        if rank == model.program.rank:
            return model.streams
        names = zip(model.rank_class.names, rank_class.names, strict=True)
        types = {here: model.program.types[name] for name, here in names if name in model.program.types}
        tasks = zip(model.rank_class.tasks, rank_class.tasks, strict=True)
        ops = {
            op.name: corresponding
            for other, task in tasks
            for op, corresponding in zip(other.body, task.body, strict=True)
        }
        return model.streams.with_messages_of(RankProgram(rank, (), types, self.build.parts), ops)

    def sent(self) -> Iterator[tuple[str, str, Op]]:
        """Source task, target task and op of every transfer between two tasks."""
        ends: dict[str, list[str]] = {}
        ops: dict[str, Op] = {}
        for part in self.build.parts.tasks:
            for op in part.body:
                if op.kind == "comm.transfer":
                    ends.setdefault(op.name, []).append(part.name)
                    ops[op.name] = op
        sender = {sent: name for name, times in self.times.items() for t in times for sent in t.last.sends}
        for sent, names in ends.items():
            for target in names:
                if sent in sender and target != sender[sent]:
                    yield sender[sent], target, ops[sent]

    def transfers(self) -> dict[tuple[str, str], float]:
        """(source task, target task) -> seconds from the end of the source until its data arrives."""
        delays: dict[tuple[str, str], float] = {}
        per_micro = {part.name: part.per_micro for part in self.build.parts.tasks}
        for source, target, op in self.sent():
            for task in self.times[source]:
                time = task.body if per_micro[target] and op.name in task.body.sends else task.last
                delay = max(0.0, time.sends[op.name] - time.seconds)
                delays[source, target] = max(delays.get((source, target), 0.0), delay)
        return delays

    def links(self) -> dict[tuple[str, str], dict[int, float]]:
        """(source task, target task) -> directed link -> seconds for which a message occupies it."""
        occupied: dict[tuple[str, str], dict[int, float]] = {}
        for source, target, op in self.sent():
            links = occupied.setdefault((source, target), {})
            for link, seconds in self.traffic.link_seconds(op).items():
                links[link] = links.get(link, 0.0) + seconds
        return occupied


def out_of_memory(forecast: Forecast, cluster: Cluster) -> tuple[Shortage, ...]:
    """Ranks that need more memory than their device has, the worst first; empty when the program fits."""
    rules = Memory() if forecast.runtime is None else forecast.runtime.memory
    return shortages(forecast.memory, cluster, forecast.devices, rules)
