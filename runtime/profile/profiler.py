"""`distgraph profile`: what the machines of a job can do, measured, as a resource file.

*In:* a resource file (or none: this machine), ranks, seconds.
*Out:* the same file with measured numbers and the error of the fit beside each.
*Invariant:* rank i measures device i, and all ranks measure the same item at the same time, because they
share caches, memory and links in training as well. Each round measures every item once, so that a slow minute
of the machine affects every number a little and none completely. In every round the slowest rank of a kind of
device counts, because the ranks of a step wait for each other. What other programs use of the processors is
read at least once a second (`processor_use`), and a measurement that they disturbed is repeated in a later
round. Measurements are saved to a JSON file next to the output while the profile runs, and a later run
continues from it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from threadpoolctl import threadpool_limits

from distgraph.errors import ResourceError, RuntimeFault
from distgraph.resources import Cluster, load_cluster, local_cluster
from distgraph.runtime.execute.blas_kernels import blas_kernels
from distgraph.runtime.launch.launch import launch
from distgraph.runtime.launch.mpi_rank import current_transport, ranks_of_job
from distgraph.runtime.profile import collective_probes
from distgraph.runtime.profile.discovery import describe_ranks
from distgraph.runtime.profile.evaluation import evaluate
from distgraph.runtime.profile.measurements import read_measurements, undisturbed_rounds
from distgraph.runtime.profile.measuring_order import MeasuringOrder
from distgraph.runtime.profile.op_probes import PreparedProbe
from distgraph.runtime.profile.probe_programs import probes
from distgraph.runtime.profile.processor_use import OtherUse, ProcessorWatch
from distgraph.runtime.profile.resource_writer import write_measured
from distgraph.runtime.profile.shared_cores import CoreSharing, HostProbe, HostProbes
from distgraph.runtime.transport.mpi import MpiTransport
from distgraph.serialization.atomic_files import check_writable, write_atomically
from distgraph.serialization.documents import refuse, shown

_REPEATS: Final = 15
_SAVE_SECONDS: Final = 1.0
_ATTEMPTS: Final = 2  # rounds in all, as a multiple of those that are wanted undisturbed
_FORMAT: Final = 14  # of the store
_CLOSE: Final = -1  # in place of the position of an item: the window of the measurements ends
_CACHED_BYTES: Final = 32 * 2**20  # a larger program is compiled again for every run
_SCRIPT: Final = """from distgraph.runtime.profile.profiler import rank_main
from {module} import {name}
rank_main({name})
"""
_TERMINAL: Final = "DISTGRAPH_PROFILE_TERMINAL"


@dataclass(frozen=True, slots=True)
class Request:
    """Options of a profile.

    Attributes:
        output: resource file to write; see `store_path` for the file of the measurements.
        source: resource file or shipped name whose numbers are replaced; "" for the hosts of the ranks.
        ranks: number of ranks of the job.
        seconds: time limit.
        repeats: number of rounds beside which other programs use little of the processors.
        fresh: whether to discard earlier measurements.
    """

    output: str
    source: str = ""
    ranks: int = 1
    seconds: float = 120.0
    repeats: int = _REPEATS
    fresh: bool = False

    @property
    def store_path(self) -> Path:
        """Path of the file of the measurements."""
        return Path(self.output).with_suffix(".measurements.json")

    def cluster(self) -> Cluster:
        """The cluster without measured numbers.

        Raises:
            ResourceError: fewer devices than ranks, or a device that NumPy does not run on.
        """
        cluster = load_cluster(self.source) if self.source else local_cluster(self.ranks)
        if self.ranks > len(cluster.devices):
            raise ResourceError(
                f"profile: {self.ranks} ranks but cluster {cluster.name} has {len(cluster.devices)} devices; "
                "start one rank a device, or describe more devices"
            )
        for device in cluster.devices[: self.ranks]:
            if device.type != "cpu":
                raise ResourceError(
                    f"profile: {cluster.source}: {device.origin} is a {device.type}, but programs run on "
                    "CPUs here; give a file that describes this machine's CPUs, or leave --cluster out"
                )
        return cluster


def profile(request: Request, host: HostProbes = tuple) -> int:
    """Measure, fit and write; starts the ranks where there are several and a launcher has not done so.

    Args:
        request: what is to be measured.
        host: creates the probes of the host work of a step; by default none.

    Returns: exit code of the ranks.

    Raises:
        ResourceError: the file does not fit the ranks, or the seconds did not suffice for a fit.
        RuntimeFault: the file cannot be written; no MPI for several ranks.
    """
    check_writable(request.output, RuntimeFault)
    given = ranks_of_job()
    if given > 1:
        if request.ranks not in (1, given):
            raise RuntimeFault(f"profile: -n {request.ranks} inside a job of {given} ranks; leave -n out")
        source, hosts = request.source, Path(request.output).with_suffix(".hosts.yaml")
        if not source and describe_ranks(hosts):
            source = str(hosts)
        return _rank(Request(**(asdict(request) | {"ranks": given, "source": source})), host)
    request.cluster()  # raises its errors once, before ranks start
    if request.ranks == 1:
        return _rank(request, host)
    with tempfile.TemporaryDirectory(prefix="distgraph-profile-") as folder:
        script = Path(folder) / "profile.py"
        text = _SCRIPT.format(module=host.__module__, name=host.__name__)
        script.write_text(text, encoding="utf-8")
        seen = {_TERMINAL: "1"} if sys.stderr.isatty() else {}
        code = launch(
            request.ranks,
            [str(script), json.dumps(asdict(request))],
            env={**_one_thread(), **os.environ, **seen},
        )
    if code == 130 and request.store_path.is_file():
        Console(stderr=True).print(
            f"profile: kept in {request.store_path}; the same command goes on from there",
            highlight=False,
            soft_wrap=True,
        )
    return code


def _one_thread() -> dict[str, str]:
    return dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def rank_main(host: HostProbes) -> None:
    """One rank of a job that `profile` started."""
    _rank(Request(**json.loads(sys.argv[1])), host)


def _rank(request: Request, host: HostProbes) -> int:
    cluster, transport = request.cluster(), current_transport()
    leads, cores = transport is None or transport.rank == 0, CoreSharing.of(transport)
    store = Store.open(request, str(cores)) if leads else Store({}, None)
    if transport is not None:
        store.runs = transport.broadcast_object(store.runs, 0)
    with threadpool_limits(1):
        _Profile(request, cluster, transport, store, cores, host()).run()
    if leads:
        measured = evaluate(cluster, store.runs, request.ranks, cores, blas_kernels())
        write_measured(request.output, request.source, request.ranks, measured)
        for line in (*measured.warnings(), f"profile: {request.output} written; {measured.summary()}"):
            Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


def _format_header(header: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {shown(value)}" for name, value in header.items())


@dataclass(slots=True)
class Store:
    """Measurements: key -> subject (works, tasks or message), seconds of every round (runs), and what other
    programs used of the processors beside each (others)."""

    runs: dict[str, dict[str, Any]]
    path: Path | None
    header: Mapping[str, Any] | None = None
    saved: float = 0.0

    @classmethod
    def open(cls, request: Request, places: str = "") -> Store:
        """The measurements of an earlier run of the same request, or an empty store.

        Args:
            request: options of the profile.
            places: how ranks share cores, which affects the cost of messages.

        Raises:
            ResourceError: the file holds something else.
        """
        header = {
            "source": request.source,
            "ranks": request.ranks,
            "places": places,
            "blas": blas_kernels(),
            "format": _FORMAT,
        }
        if request.fresh or not request.store_path.is_file():
            return cls({}, request.store_path, header)
        stored, runs = read_measurements(request.store_path, _FORMAT)
        if stored != header:
            raise ResourceError(
                f"{request.store_path}: measurements of {_format_header(stored)} but this is "
                f"{_format_header(header)}; use another output, or --fresh"
            )
        origins = {device.origin for device in request.cluster().devices[: request.ranks]}
        for key, entry in runs.items():
            if "message" not in entry and key.partition("|")[0] not in origins:
                expected = f"devices of {request.source or 'this machine'}, {', '.join(sorted(origins))}"
                refuse(ResourceError, str(request.store_path), ["runs", key], expected)
        return cls(runs, request.store_path, header)

    def add(self, key: str, about: Mapping[str, Any], seconds: Sequence[float], others: OtherUse) -> None:
        """One more round of one key."""
        entry = self.runs.setdefault(key, {**about, "runs": [], "others": []})
        entry["runs"].append(list(seconds))
        entry["others"].append(asdict(others))
        if time.monotonic() - self.saved > _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the file, whole or not at all."""
        if self.path is None:
            return
        text = json.dumps({"header": self.header, "runs": self.runs})
        write_atomically(self.path, text, ResourceError, durable=False)
        self.saved = time.monotonic()


@dataclass(frozen=True, slots=True)
class Item:
    """An item to measure. All ranks call `run`, which returns what to add to the store under each key.

    Attributes:
        name: unique name.
        run: see above.
        pattern: the message that is measured; None of all else.
    """

    name: str
    run: Callable[[], dict[str, tuple[dict[str, Any], list[float]]]]
    pattern: collective_probes.Pattern | None = None


class _Profile:
    def __init__(
        self,
        request: Request,
        cluster: Cluster,
        transport: MpiTransport | None,
        store: Store,
        cores: CoreSharing,
        host: Sequence[HostProbe],
    ) -> None:
        self.request, self.cluster, self.transport, self.store = request, cluster, transport, store
        self.cores, self.host = cores, host
        self.prepared_probes: dict[str, PreparedProbe] = {}
        self.order = MeasuringOrder(request.seconds, {})
        self.rounds = undisturbed_rounds(store.runs)
        self.pending: list[tuple[str, dict[str, Any], list[float]]] = []
        self.begin = time.monotonic()

    @property
    def rank(self) -> int:
        return 0 if self.transport is None else self.transport.rank

    def run(self) -> None:
        """Measure until every item has its repeats or the time limit is reached."""
        items = self.items()
        self.order = self.ordered(items)
        watch = ProcessorWatch(self.transport)
        with self.bar() as bar:
            task = bar.add_task("profile", total=len(items) * self.request.repeats)
            bar.update(task, completed=self.completed(items))
            chosen = self.choices(items)
            try:
                while (choice := self.agreed(lambda: self.next_choice(chosen, watch))) is not None:
                    if choice == _CLOSE:
                        self.keep(watch.close())
                        bar.update(task, completed=self.completed(items))
                        continue
                    bar.update(task, description=items[choice].name.split("/")[0].split(" ")[0])
                    self.measure(items[choice])
            finally:
                if self.transport is None:  # other ranks may have ended
                    self.keep(watch.close())
                self.store.save()

    def items(self) -> list[Item]:
        """All items, in the order in which a round measures them."""
        items = [Item(p.name, partial(self.host_work, p)) for p in self.host]
        items += [Item(p.name, partial(self.compute, p)) for p in probes()]
        if self.transport is not None:
            limit = self.cluster.devices[0].memory / 16  # two buffers of it, a few copies
            places = [device.machine for device in self.cluster.devices[: self.transport.size]]
            patterns = collective_probes.patterns(
                self.transport.size, limit, shared=self.cores.shared, machines=places
            )
            items += [Item(p.name, partial(self.message, p), p) for p in patterns]
        return items

    def ordered(self, items: Sequence[Item]) -> MeasuringOrder:
        """The order of the items, which knows what an earlier run has measured."""
        order = MeasuringOrder(
            self.request.seconds, {item.name: item.pattern for item in items if item.pattern is not None}
        )
        for key, entry in self.store.runs.items():
            seconds = statistics.median(run[0] for run in entry["runs"]) if "message" in entry else None
            order.note(key.partition("|")[2], None, seconds)
        return order

    def completed(self, items: Sequence[Item]) -> int:
        """Number of undisturbed rounds of all items, of those that are wanted."""
        return sum(min(self.rounds.get(item.name, 0), self.request.repeats) for item in items)

    def choices(self, items: Sequence[Item]) -> Iterator[int]:
        """Positions of the items to measure, as the first rank chooses them, and `_CLOSE` after every round.

        An item whose measurements were disturbed is measured again in later rounds, since what disturbs it
        mostly lasts for longer than the item. In every round, items that were never measured come first.
        """
        for round_ in range(_ATTEMPTS * self.request.repeats):
            needed = min(round_ + 1, self.request.repeats)
            for position, item in sorted(
                enumerate(items), key=lambda each: each[1].name in self.order.measured
            ):
                if self.rounds.get(item.name, 0) < needed and self.has_time(item, round_):
                    yield position
            yield _CLOSE

    def next_choice(self, chosen: Iterator[int], watch: ProcessorWatch) -> int | None:
        """The next of the choices, or `_CLOSE` if the window has lasted long enough; None at the end."""
        return _CLOSE if self.pending and watch.is_due else next(chosen, None)

    def agreed(self, choose: Callable[[], int | None]) -> int | None:
        """What the first rank chooses, on all ranks."""
        choice = choose() if self.rank == 0 else None
        return choice if self.transport is None else self.transport.broadcast_object(choice, 0)

    def has_time(self, item: Item, round_: int) -> bool:
        """Whether there is time for an item; see `MeasuringOrder`."""
        left = self.request.seconds - (time.monotonic() - self.begin)
        return self.order.has_time(item.name, round_, left)

    def measure(self, item: Item) -> None:
        begin = time.monotonic()
        measured = item.run()
        self.pending += [(f"{key}|{item.name}", about, seconds) for key, (about, seconds) in measured.items()]
        seconds = next(
            (seconds[0] for _, seconds in measured.values()), None
        )  # on the first rank, which chooses
        self.order.note(item.name, time.monotonic() - begin, None if item.pattern is None else seconds)

    def keep(self, others: OtherUse | None) -> None:
        """Store what was measured in a window, with what other programs used in it."""
        pending, self.pending = self.pending, []
        if others is not None:
            for key, about, seconds in pending:
                self.store.add(key, about, seconds, others)
            self.rounds |= undisturbed_rounds({key: self.store.runs[key] for key, _, _ in pending})

    def compute(self, probe: Any) -> dict[str, tuple[dict[str, Any], list[float]]]:
        """Measure one program on all ranks; the slowest rank of each kind of device counts."""
        timed = self.prepared_probes.get(probe.name)
        if timed is None:
            timed = PreparedProbe(probe, self.cluster)
            if timed.nbytes <= _CACHED_BYTES:
                self.prepared_probes[probe.name] = timed
        if self.transport is not None:
            self.transport.barrier()
        works = {"works": [asdict(work) for work in timed.works]}
        share = self.cores.shares[self.rank]
        return self.by_device(works, [seconds * share for seconds in timed.run()])

    def host_work(self, probe: HostProbe) -> dict[str, tuple[dict[str, Any], list[float]]]:
        """Measure the host work of a step; the slowest rank counts as in `compute`."""
        tasks, seconds = probe.run()
        return self.by_device({"tasks": tasks}, [seconds])

    def by_device(
        self, subject: dict[str, Any], seconds: list[float]
    ) -> dict[str, tuple[dict[str, Any], list[float]]]:
        """For every kind of device, the seconds of the rank with the largest sum."""
        gathered = [seconds] if self.transport is None else self.transport.gather_objects(seconds, 0)
        if gathered is None:
            return {}
        by_origin: dict[str, list[list[float]]] = {}
        for device, rank_seconds in zip(self.cluster.devices, gathered, strict=False):
            by_origin.setdefault(device.origin, []).append(rank_seconds)
        return {origin: (subject, max(ranks, key=sum)) for origin, ranks in by_origin.items()}

    def message(self, pattern: collective_probes.Pattern) -> dict[str, tuple[dict[str, Any], list[float]]]:
        """Measure one collective; the slowest group counts."""
        assert self.transport is not None
        repeats = 20 if pattern.nbytes <= 2**16 else 4 if pattern.nbytes <= 2**22 else 1
        run_time = collective_probes.measure(self.transport, pattern, repeats, self.cores)
        times = self.transport.gather_objects(run_time, 0)
        if times is None:
            return {}
        added = self.cores.added_seconds(times, pattern.groups)
        return {"": ({"message": asdict(pattern)}, [added])}

    def bar(self) -> Progress:
        """Progress bar on the first rank, disabled if it has no terminal."""
        seen = bool(os.environ.get(_TERMINAL)) or None
        columns = (
            TextColumn("{task.description:>14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        console = Console(stderr=True, force_terminal=seen)
        return Progress(
            *columns, console=console, transient=True, disable=self.rank > 0 or not console.is_terminal
        )
