"""Seconds of steps of Megatron-DeepSpeed on a machine described by a few numbers, all measured runs at once.

*In:* runs, their bills. *Out:* `Costs.seconds(values)`: seconds of every run for values of the parameters.
*Invariant:* the forecast of distgraph without overlap, in closed form: an op costs what `ComputeCost` says,
a collective what `CollectiveCost` says (the same algorithms on the same links, their loads counted once,
because only bandwidths and latencies change while calibrating), a task the sum of its ops, a step the last
task of the schedule one forward, one backward. tests/benchmarks/test_calibration.py holds both against each
other.

What is in a task twice is summed once: all runs together are one sparse matrix (tasks of stages x distinct
ops), so that one evaluation of some hundred runs takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

import distgraph as dg
from benchmarks.support.megatron.training_program import KINDS, Bills, Message, Run, Shape, model_bills
from distgraph.resources import Cluster
from distgraph.resources.collective_algorithms import algorithms
from distgraph.resources.collective_cost import CollectiveCost
from distgraph.resources.mesh_communication import MeshCommunication
from distgraph.runtime.forecast.op_cost import Work

STAGES = ("first", "middle", "last")
Array = np.ndarray
Values = Mapping[str, float]
LINKS = ("nvlink", "infiniband")


@dataclass(frozen=True, slots=True)
class Form:
    """One algorithm: by stage of it steps x hops on each kind of link, and the most bytes on one link of a
    kind."""

    hops: Array
    load: Array

    def seconds(self, nbytes: Array, values: Values) -> Array:
        """Without the launch."""
        latency = np.array([values["inside_latency"], values["network_latency"]])
        rate = np.array([values["inside_bandwidth"], values["network_bandwidth"]])
        return (self.hops @ latency).sum() + nbytes * (self.load / rate).max(axis=1).sum()


class Costs:
    """Closed form of some runs.

    Args:
        runs: what is to be forecast.
        cluster: machines of 8 GPUs; only its topology is read.
        plain: the graphs as distgraph runs them, see `model_bills`.
    """

    def __init__(self, runs: Sequence[Run], cluster: Cluster, plain: bool = False) -> None:
        self.runs, self.cluster, self.plain = tuple(runs), cluster, plain
        self._traffic = CollectiveCost(cluster)
        self._column: dict[object, int] = {}
        self._pattern: dict[object, int] = {}
        self._forms: list[list[Form]] = []
        self._groups: list[tuple[str, tuple[int, ...]]] = []
        entries: list[tuple[int, int, float]] = []
        for number, run in enumerate(self.runs):
            for place, stage in enumerate(STAGES):
                bills = self._bills(run, stage)
                for at, kind in enumerate(KINDS):
                    row = (number * len(STAGES) + place) * len(KINDS) + at
                    entries += [(row, self._at(item, run), count) for item, count in bills[kind].items()]
        rows, columns, counts = (np.array(list(part)) for part in zip(*entries, strict=True))
        shape = (len(self.runs) * len(STAGES) * len(KINDS), len(self._column))
        self._counts = csr_array((counts.astype(float), (rows, columns)), shape=shape)
        self._ops = np.asarray(self._counts.sum(axis=1)).reshape(-1, len(STAGES), len(KINDS))
        self._tabulate()
        self._sizes = np.array([[r.pp, r.micro_batches] for r in self.runs])
        self._crossing = [self._borders(run) for run in self.runs]

    def _bills(self, run: Run, stage: str) -> dict[str, dict[Work | Message, float]]:
        model = model_bills(Shape(run.hidden, run.heads, run.sequence, run.micro, run.tp), self.plain)
        rest: Bills = model.only if run.pp == 1 else getattr(model, stage)
        layers = run.layers / run.pp
        found = {}
        for kind in KINDS:
            bill = {item: layers * count for item, count in model.block[kind].items()}
            for item, count in rest[kind].items():
                bill[item] = bill.get(item, 0.0) + count
            found[kind] = bill
        return found

    def _at(self, item: Work | Message, run: Run) -> int:
        """Column of an op; that of a collective depends on the groups too."""
        key: object = item
        if isinstance(item, Message):
            key = (item.kind, item.nbytes, self._group(item, run))
        return self._column.setdefault(key, len(self._column))

    def _group(self, message: Message, run: Run) -> int:
        """Number of the pattern of groups on the machines; -1 for a group of one."""
        if (run.tp if message.axis == "tp" else run.dp) == 1:
            return -1
        key = (message.axis, message.kind, run.tp, run.dp)
        if key not in self._pattern:
            mesh = dg.ProcessMesh.grid(dp=run.dp, tp=run.tp)
            (groups,) = MeshCommunication(self.cluster).patterns(mesh, (message.axis,))
            self._forms.append(self._lines(message.kind, groups))
            self._groups.append((message.kind, groups[0]))
            self._pattern[key] = len(self._forms) - 1
        return self._pattern[key]

    def _lines(self, kind: str, groups: tuple[tuple[int, ...], ...]) -> list[Form]:
        router = self._traffic.router
        found = [algorithms(router, kind, group) for group in groups]
        lines = []
        for name, stages in found[0].items():
            chosen = [stages, *(other.get(name) or next(iter(other.values())) for other in found[1:])]
            hops, loads = [], []
            for at, own in enumerate(stages):
                load: dict[int, float] = {}
                for other in chosen:
                    for source, target, share in other[at].flows if at < len(other) else ():
                        for directed in router.route(source, target):
                            load[directed] = load.get(directed, 0.0) + share
                hops.append([own.steps * most for most in self._most_hops(own.flows)])
                loads.append(self._most(load))
            lines.append(Form(np.array(hops, float), np.array(loads, float)))
        return lines

    def _most_hops(self, flows: Sequence[tuple[int, int, float]]) -> tuple[int, int]:
        routes = {self._traffic.router.route(a, b) for a, b, _ in flows}
        kinds = [[self._traffic.router.link(link).kind for link in links] for links in routes]
        counted = [(k.count(LINKS[0]), k.count(LINKS[1])) for k in kinds]
        return max(counted, key=lambda pair: (pair[1], pair[0]))

    def _most(self, load: Mapping[int, float]) -> list[float]:
        most = dict.fromkeys(LINKS, 0.0)
        for directed, share in load.items():
            kind = self._traffic.router.link(directed).kind
            if kind in most:
                most[kind] = max(most[kind], share)
        return list(most.values())

    def _tabulate(self) -> None:
        """Works and messages as arrays in order of their columns."""
        works = [(c, k) for k, c in self._column.items() if isinstance(k, Work)]
        self._work_at = np.array([c for c, _ in works])
        self._flops = np.array([k.flops for _, k in works])
        self._bytes = np.array([k.nbytes for _, k in works])
        self._dims = np.array([k.dims[1:] for _, k in works], float)
        kinds = np.array([k.kind for _, k in works])
        self._is = {kind: kinds == kind for kind in ("matmul", "memory", "lookup", "launch", "update")}
        self._by_form: dict[int, tuple[Array, Array]] = {}
        for form in range(-1, len(self._forms)):
            found = [(c, k[1]) for k, c in self._column.items() if isinstance(k, tuple) and k[2] == form]  # type: ignore[index]
            if found:
                at, sizes = zip(*found, strict=True)
                self._by_form[form] = (np.array(at), np.array(sizes, float))
        self._measured: dict[int, Array] = {}
        for form, (_, sizes) in self._by_form.items():
            if form >= 0:
                kind, group = self._groups[form]
                found = [self._traffic.estimate(kind, group, size) for size in sizes]
                if found[0].algorithm == "measured":
                    self._measured[form] = np.array([each.seconds for each in found])

    def _borders(self, run: Run) -> list[bool]:
        """Whether each border of two stages lies between machines."""
        each, size = run.tp * run.dp, 8
        return [(stage + 1) * each // size > stage * each // size for stage in range(run.pp - 1)]

    def prices(self, values: Values) -> tuple[Array, Array]:
        """Seconds of every column, and which of them are ops that a host issues."""
        price = np.zeros(len(self._column))
        reached = values["peak"] * values["efficiency"]
        rate = reached * np.ones(len(self._flops))
        for at, name in enumerate(("half_m", "half_n", "half_k")):
            rate = rate * self._dims[:, at] / (self._dims[:, at] + values[name])
        memory = self._bytes / (values["memory_bandwidth"] * values["memory_efficiency"])
        lookup = self._bytes / (values["memory_bandwidth"] * values["lookup_efficiency"])
        moving = np.where(self._is["lookup"], lookup, np.where(self._is["launch"], 0.0, memory))
        arithmetic = np.where(self._is["matmul"], self._flops / rate, 0.0)
        price[self._work_at] = values["launch"] + np.maximum(arithmetic, moving)
        issued = np.ones(len(self._column))
        update = self._work_at[self._is["update"]]
        price[update] = values["update_bytes"] / (values["memory_bandwidth"] * values["memory_efficiency"])
        issued[update] = 0.0
        for form, (columns, sizes) in self._by_form.items():
            if form < 0:
                issued[columns] = 0.0
                continue
            if form in self._measured:
                price[columns] = self._measured[form]
                continue
            lines = [line.seconds(sizes, values) for line in self._forms[form]]
            price[columns] = values["collective_launch"] + np.min(lines, axis=0)
        return price, issued

    def tasks(self, values: Values) -> Array:
        """Seconds of every task [run, stage, kind]: at least as long as the host needs to issue it.

        The reduction of gradients (tail) is what it adds to backward as distgraph runs it (`plain`); in the
        runtime model of Megatron-LM it is part of the optimize task.
        """
        price, issued = self.prices(values)
        shape = (len(self.runs), len(STAGES), len(KINDS))
        device = (self._counts @ price).reshape(shape)
        host = values["issue"] * (self._counts @ issued).reshape(shape)
        backward, tail, optimize = (KINDS.index(kind) for kind in ("backward", "tail", "optimize"))
        for each in (device, host):
            if self.plain:
                each[:, :, tail] += each[:, :, backward]
            else:
                each[:, :, optimize] += each[:, :, tail]
                each[:, :, tail] = 0.0
        found = np.maximum(device, host)
        found[:, :, tail] -= found[:, :, backward] if self.plain else 0.0
        return found

    def seconds(self, values: Values) -> Array:
        """Seconds of a step of every run."""
        tasks = self.tasks(values)
        load, forward, backward, tail, optimize = np.moveaxis(tasks, 2, 0)
        forward = forward + values.get("micro", 0.0)
        found = np.empty(len(self.runs))
        for at, run in enumerate(self.runs):
            times = np.array([load[at], forward[at], backward[at], tail[at], optimize[at]])
            end = one_forward_one_backward(run.pp, run.micro_batches, times, self._transfer(at, values))
            found[at] = end + values.get("step", 0.0)
        return found

    def _transfer(self, at: int, values: Values) -> Array:
        """Seconds from stage to stage: a part of the hidden states a rank."""
        run = self.runs[at]
        size = 2 * run.micro * run.sequence * run.hidden / run.tp
        inside = size / values["inside_bandwidth"] + 2 * values["inside_latency"]
        each_nic = min(2, run.tp * run.dp)
        between = each_nic * size / values["network_bandwidth"] + 2 * values["network_latency"]
        return values["send_launch"] + np.where(self._crossing[at], between, inside)


def one_forward_one_backward(stages: int, micro: int, times: Array, transfer: Array) -> float:
    """End of a step: tasks in the order of the schedule one forward, one backward, each as early as its
    data allows.

    Args:
        stages, micro: numbers of stages and of micro-batches.
        times: seconds [5, 3] on the first, on a middle and on the last stage: loading, forward, backward,
            what comes on top of the last backward before its result is sent on, what comes after it.
        transfer: seconds [stages - 1] of a message between neighbours.
    """
    if stages == 1:
        load, forward, backward, held, once = times[:, 0]
        return float(load + micro * (forward + backward) + held + once)
    place = np.array([0, *[1] * (stages - 2), 2])
    return float(_pipeline(stages, micro, times[:, place], transfer))


def _run(stages: int, micro: int, times: Array, transfer: Array) -> float:
    load, forward, backward, held, once = times
    ready_f = np.full((stages, micro), np.inf)
    ready_b = np.full((stages, micro), np.inf)
    ready_f[0] = 0.0
    clock = load.copy()
    done_f = np.zeros(stages, np.int64)
    done_b = np.zeros(stages, np.int64)
    left = 2 * stages * micro
    while left > 0:
        for s in range(stages):
            while True:
                f, b = done_f[s], done_b[s]
                if f < micro and f - b < stages - s:  # the schedule's turn: forward until so many are alive
                    if not np.isfinite(ready_f[s, f]):
                        break
                    clock[s] = max(clock[s], ready_f[s, f]) + forward[s]
                    if s + 1 < stages:
                        ready_f[s + 1, f] = clock[s] + transfer[s]
                    else:
                        ready_b[s, f] = clock[s]
                    done_f[s] += 1
                elif b < f and np.isfinite(ready_b[s, b]):
                    clock[s] = max(clock[s], ready_b[s, b]) + backward[s]
                    if b == micro - 1:
                        clock[s] += held[s]
                    if s > 0:
                        ready_b[s - 1, b] = clock[s] + transfer[s - 1]
                    done_b[s] += 1
                else:
                    break
                left -= 1
    return np.max(clock + once)


try:
    from numba import njit

    _pipeline = njit(_run)
except ImportError:  # the same without a compiler, a hundred times slower
    _pipeline = _run
