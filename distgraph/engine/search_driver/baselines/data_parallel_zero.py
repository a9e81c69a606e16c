"""Data parallelism with ZeRO: its level, its micro-batches and the layers that are recomputed.

*In:* the state of a search. *Out:* evaluations of programs, each of them a baseline, on all devices and on
those of each kind. *Invariant:* what is built takes a share of the seconds of the search at most, counted in
ops, so that the answer does not depend on the clock. There is no such limit as long as no program fits.

The highest level needs the least memory. It is forecast first, with as few micro-batches as fit; lower
levels send less, and are forecast where what they hold besides may fit. Numbers of micro-batches that do not
fit are tried with equal layers recomputed, if they would be faster than the best program: two forecasts, with
none and with all of these layers, give the seconds that a layer adds and the bytes that it saves. From these
follow how many layers each number of micro-batches needs, and the seconds of a step. Those with the best
estimates are built, and corrected by their forecasts.

No program is built that takes longer than the best one for its messages alone.

Source: Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from distgraph.engine.search_driver.candidate import BuiltCandidate
from distgraph.engine.search_driver.evaluations import Evaluation, evaluation_of
from distgraph.engine.search_driver.fixed_mesh_search import data_parallel
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.search_state import FORECASTS, SECONDS_PER_OP, Event, SearchState
from distgraph.passes.search.layering.layered_graph import LayeredGraph
from distgraph.plan.decisions import Decisions

_SHARE = 1 / 3
"""Of the seconds of a search that these programs may take, once there is a program that fits."""
_NARROWEST = 2
"""Bytes of an element of a parameter or gradient that is sent, at least: it may be cast before."""
_CORRECTIONS = 3
"""Programs with recomputed layers that are built for one number of micro-batches, at most."""
_BUILT_COUNTS = 2
"""Numbers of micro-batches for which they are built, at most."""

Forecasts = Generator[Event, None, Evaluation | None]


def groups_of_devices(state: SearchState) -> dict[str, tuple[int, ...]]:
    """Name of plain data parallelism -> its devices: all of them, and those of each kind where there are
    several kinds."""
    groups = {"data parallel": state.layout_costs.devices}
    for pool in state.layout_costs.pools:
        if 1 < pool.size < len(state.layout_costs.devices):
            devices = tuple(device for machine in pool.machines for device in machine)
            name = f"data parallel, {pool.size} x {pool.name}"
            count = len(pool.machines)
            groups[f"{name}, {count} machine{'s' * (count > 1)}" if name in groups else name] = devices
    return groups


def evaluate_data_parallel_zero(state: SearchState) -> Iterator[Event]:
    """Levels of ZeRO with data parallelism on all devices, and on those of each kind.

    Where plain data parallelism fits, the lowest and the highest level are forecast: the lowest gathers
    parameters after the update, the highest while layers are computed. Nothing is built twice, or where a
    program of one stage breaks a constraint or annotations name axes.
    """
    most = state.constraints.zero
    levels = range(1, (3 if most is None else most) + 1)
    if not levels or state.zero_evaluated or state.single_stage_breaks() or state.layout_costs.named_axes:
        return
    state.zero_evaluated = True
    built_ops = _BuiltOps()
    for number, (name, devices) in enumerate(groups_of_devices(state).items()):
        if number and state.expired():
            return
        yield from _levels(_Programs(state, name, devices, built_ops), levels)


def _levels(programs: _Programs, levels: Sequence[int]) -> Iterator[Event]:
    """The levels of ZeRO on some devices that may gain or fit."""
    state = programs.state
    if not programs.has_samples(state.constraints.start.micro_batches):
        levels = levels[:1]  # no level changes that
    if any(e.origin == programs.name and e.fits for e in state.evaluations.all):
        for level in dict.fromkeys((levels[0], levels[-1])):
            yield from programs.with_fewest_micro_batches(level)
        return
    highest = yield from programs.with_fewest_micro_batches(levels[-1])
    if highest is None:
        return
    yield from programs.with_recomputed_layers(levels[-1])
    if not highest.fits:
        return
    for level in levels[:-1]:
        if programs.may_fit(level, highest):
            lower = yield from programs.with_fewest_micro_batches(level)
            if lower is not None and lower.fits and lower.seconds <= highest.seconds:
                return


@dataclass(eq=False)
class _BuiltOps:
    """How many ops the programs of a search had that were built here."""

    count: int = 0


@dataclass(eq=False)
class _Programs:
    """Programs of data parallelism with ZeRO on some devices, as long as there is work left for them.

    Attributes:
        state: of the search.
        name: of plain data parallelism on these devices.
        devices: each gets an equal share of the samples.
        built_ops: of the programs on other devices, too.
        plain: micro-batch count -> the forecast without recomputation of the level that was looked at last.
    """

    state: SearchState
    name: str
    devices: tuple[int, ...]
    built_ops: _BuiltOps
    plain: dict[int, Evaluation] = field(default_factory=dict)

    def _made(self, decisions: Decisions) -> Evaluation | str:
        """The evaluation of a program, or why there is none."""
        build = partial(_built, devices=self.devices, decisions=decisions, name=self._name(decisions))
        program = build(self.state.layout_costs)
        return program if isinstance(program, str) else replace(evaluation_of(program), rebuild=build)

    def _name(self, decisions: Decisions) -> str:
        return f"{self.name}, ZeRO-{decisions.zero}"

    def with_fewest_micro_batches(self, level: int) -> Forecasts:
        """Programs of a level with more micro-batches until one fits, or each device has one sample; the last
        one."""
        start, last = self.state.constraints.start, None
        decisions = replace(start, zero=level)
        self.plain = {}
        for _ in range(FORECASTS):
            evaluation = yield from self._forecast(decisions)
            if evaluation is None:
                break
            last = self.plain[decisions.micro_batches] = evaluation
            if evaluation.fits or self.state.expired():
                break
            counts = sorted(n for n in self.state.pipelines.counts if n > decisions.micro_batches)
            more = [n for n in counts if self.has_samples(n)]
            if not more:
                break
            needed = decisions.micro_batches * evaluation.memory_ratio
            decisions = replace(decisions, micro_batches=next((n for n in more if n >= needed), more[-1]))
        return last

    def with_recomputed_layers(self, level: int) -> Iterator[Event]:
        """Programs of a level that fit with some of their layers recomputed, for the best numbers of
        micro-batches by estimates, of those that do not fit otherwise."""
        constraints, layout_costs = self.state.constraints, self.state.layout_costs
        unfit = {n: each for n, each in self.plain.items() if not each.fits}
        if not unfit:
            return
        count = max(unfit)
        layered = layout_costs.layered_graph(count)
        if constraints.recomputed(len(layered.layers)) is not None:
            return  # given
        best, plain = self.state.best, unfit[count]
        if best is not None and min(each.seconds for each in unfit.values()) >= best.seconds:
            return  # recomputation only adds to that
        equal, every = _equal_layers(layered), tuple(range(len(layered.layers)))
        decisions = replace(constraints.start, zero=level, micro_batches=count)
        for layers in dict.fromkeys((equal, every)):
            least = yield from self._forecast(replace(decisions, recompute=layers))
            if least is None:
                return
            if least.fits:
                break
        else:
            return
        saved = (plain.memory - least.memory) / len(layers)
        added = max(0.0, (least.seconds - plain.seconds) / len(layers))
        choices = [self._estimated(n, saved * count / n, added, len(layers)) for n in unfit]
        for seconds, n, number in sorted(choice for choice in choices if choice is not None)[:_BUILT_COUNTS]:
            if self.state.best is None or seconds < self.state.best.seconds:
                given = replace(decisions, micro_batches=n)
                yield from self._corrected(given, layers, number, saved * count / n)

    def may_fit(self, level: int, highest: Evaluation) -> bool:
        """Whether a lower level may fit, which holds parameters whole, in what the highest level leaves."""
        graph, memory = self.state.layout_costs.reference_graph.graph, self.state.layout_costs.cluster.devices
        whole = sum(op.result.nbytes for op in graph.sources("param")) if level < 3 else 0
        more = whole * (1 - 1 / len(self.devices))
        return highest.memory + more <= min(memory[device].memory for device in self.devices)

    def _estimated(self, count: int, saved: float, added: float, most: int) -> tuple[float, int, int] | None:
        """Seconds, micro-batch count and number of recomputed layers; None where these are too many."""
        plain = self.plain[count]
        number = math.ceil(_excess(plain) / saved) if saved > 0 else most + 1
        return None if number > most else (plain.seconds + number * added, count, number)

    def _corrected(
        self, decisions: Decisions, layers: tuple[int, ...], number: int, saved: float
    ) -> Iterator[Event]:
        """The program with the first `number` of some layers recomputed, then with more until it fits, or
        with fewer as long as it does."""
        available, tried = _available(self.plain[decisions.micro_batches]), dict[int, bool]()
        for _ in range(_CORRECTIONS):
            evaluation = yield from self._forecast(replace(decisions, recompute=layers[:number]))
            if evaluation is None:
                return
            tried[number] = evaluation.fits
            beyond = (evaluation.memory - available) / saved
            number += math.ceil(beyond) if evaluation.fits else max(1, math.ceil(beyond))
            few = max((n for n, fits in tried.items() if not fits), default=0)
            number = min(max(number, few + 1), len(layers))
            if number in tried or self.state.expired():
                return

    def _forecast(self, decisions: Decisions) -> Forecasts:
        """The evaluation of a program, recorded; None where there is none, or nothing is left to build it."""
        state, name = self.state, self._name(decisions)
        if reason := self._not_built(decisions):
            state.evaluations.baselines.setdefault(name, reason)
            return None
        yield Event(name)
        evaluation = state.evaluations.once((name, decisions), partial(self._made, decisions))
        if isinstance(evaluation, str):
            state.evaluations.baselines.setdefault(name, evaluation)
            return None
        self.built_ops.count += self._ops(decisions)
        yield state.record(evaluation)
        return evaluation

    def _not_built(self, decisions: Decisions) -> str:
        """Why a program is not built: messages that take longer than the best program, or too much work."""
        state = self.state
        if state.best is None or not self.has_samples(decisions.micro_batches):
            return ""
        if _message_seconds(state, self.devices, decisions) > state.best.seconds:
            return "left out: messages alone take longer than the best program"
        ops = self.built_ops.count + self._ops(decisions)
        if ops * SECONDS_PER_OP > _SHARE * state.seconds:
            return f"left out: there is no time for it in {state.seconds:g} s"
        return ""

    def _ops(self, decisions: Decisions) -> int:
        """Of the serial graph without recomputation, which is there already."""
        return len(self.state.layout_costs.layered_graph(decisions.micro_batches).graph.ops)

    def has_samples(self, count: int) -> bool:
        """Whether every device has a sample of each of `count` micro-batches."""
        samples = self.state.request.size // count
        return samples >= len(self.devices) and self.state.pipelines.is_batch(count)


def _built(
    layout_costs: LayoutCosts, *, devices: tuple[int, ...], decisions: Decisions, name: str
) -> BuiltCandidate | str:
    return data_parallel(layout_costs, devices, name, decisions=decisions)


def _equal_layers(layered: LayeredGraph) -> tuple[int, ...]:
    """Layers of the class that has most; all of them where no two are equal."""
    classes = layered.layering.classes
    ((kind, count),) = Counter(classes).most_common(1)
    return tuple(n for n, each in enumerate(classes) if each == kind or count == 1)


def _available(evaluation: Evaluation) -> float:
    """Bytes that a device has, by the forecast of a program that does not fit."""
    return evaluation.memory / evaluation.memory_ratio


def _excess(evaluation: Evaluation) -> float:
    """Bytes that a program needs besides those that a device has."""
    return evaluation.memory - _available(evaluation)


def _message_seconds(state: SearchState, devices: tuple[int, ...], decisions: Decisions) -> float:
    """Of the messages that a level sends at least: from level 2 on, gradients in every micro-batch; at level
    3, parameters before each of its two parts, too."""
    layout_costs = state.layout_costs
    graph = layout_costs.layered_graph(state.constraints.start.micro_batches).graph
    params = [op.result for op in graph.sources("param")]
    sent = sum(min(v.nbytes, _NARROWEST * math.prod(v.shape)) for v in params)
    collectives = ["reduce_scatter"] * (decisions.zero >= 2) + ["all_gather"] * 2 * (decisions.zero >= 3)
    return decisions.micro_batches * sum(
        layout_costs.collective.time(kind, devices, sent) for kind in collectives
    )
