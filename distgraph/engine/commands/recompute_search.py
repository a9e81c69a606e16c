"""Chooses the layers to recompute in a program in which nothing else is searched.

*In:* a program whose strategy says recompute="auto", a cluster. *Out:* numbers of layers, and why.
*Invariant:* the choice fits into memory by the forecast of the program itself, and no other choice that was
forecast and fits is faster.

The program is forecast without recomputation and, if it does not fit, with one layer of each kind recomputed.
Equal layers of one stage are of one kind. The differences are what a layer adds in seconds and saves in
bytes, from which `recompute_choice` chooses for one rank after the other; with a single stage no other choice
is better by these numbers. The choice is forecast. What its memory differs from the sum of the layers
corrects the sum, until a choice repeats.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from distgraph.engine.compile.compile import compile_program
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.plan_extract import layer_mesh
from distgraph.engine.search_driver.search_space import with_memory
from distgraph.errors import InfeasibleError
from distgraph.ir.range_notation import spans
from distgraph.passes.search.inter_op.recompute_choice import (
    RecomputedLayer,
    cheapest_layers,
    smallest_choices,
)
from distgraph.passes.search.layering.layer_sequence import cluster_layers, layering
from distgraph.plan.decisions import Decisions
from distgraph.plan.plan import Decision
from distgraph.resources import Cluster
from distgraph.resources.runtimes.runtime_model import Memory, RuntimeModel
from distgraph.resources.units import format_bytes
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.forecast.memory_forecast import RankMemory, Shortage, shortages
from distgraph.runtime.program.build import Build

_MOST_CORRECTIONS = 8
Choice = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EvaluatedChoice:
    """The forecast of the program with some layers recomputed.

    Attributes:
        seconds: of a step.
        memory: of the representative ranks.
        devices: device of every rank.
    """

    seconds: float
    memory: Mapping[int, RankMemory]
    devices: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max(memory.total for memory in self.memory.values())


@dataclass(eq=False, slots=True)
class RecomputeSearch:
    """The search for the layers to recompute.

    Args:
        request: the program, with recompute="auto" and, maybe, memory in its strategy.
        cluster: what it is to run on.
        runtime: what executes it; None for distgraph.

    Attributes:
        evaluated: choices that were forecast; they do not depend on the memory that is allowed.
        chosen: the answer.
        kinds: layer -> its kind: class of equal layers, and the run of layers of one mesh that it is in.
        ranks: layer -> ranks that compute it.
    """

    request: CompileRequest
    cluster: Cluster
    runtime: RuntimeModel | None = None
    evaluated: dict[Choice, EvaluatedChoice] = field(default_factory=dict)
    chosen: Choice = ()
    kinds: tuple[tuple[int, int], ...] = ()
    ranks: tuple[frozenset[int], ...] = ()
    _limited: Cluster = field(init=False)
    _layers: dict[int, list[RecomputedLayer]] = field(default_factory=dict)  # by rank
    _corrections: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._limited = with_memory(self.cluster, self.request.training_spec.strategy.constraints)

    def run(self) -> Iterator[str]:
        """Choose; yields what is begun.

        Raises:
            GraphError, ShardingError, ResourceError: the program does not fit together, or to the cluster.
            InfeasibleError: no choice fits into memory.
        """
        yield "forecast without recomputation"
        base = self.evaluate(())
        if self.fits(()):
            return
        yield f"forecasts with one of {len(self.kinds)} layers recomputed"
        self._measure_layers(base)
        for _ in range(_MOST_CORRECTIONS):
            choice = self._cheapest()
            if choice is None or choice in self.evaluated:
                break
            yield f"forecast with {self._counted(choice)} recomputed"
            self._correct(choice)
        if not any(map(self.fits, self.evaluated)):
            yield "forecasts with as little memory as possible"
            for choice in self._smallest():
                self.evaluate(choice)
        self.chosen = self._best()
        yield "the runner-up"
        for choice in self._one_more():
            self.evaluate(choice)
        self.chosen = self._best()

    @property
    def decided(self) -> CompileRequest:
        """The program with the layers that were chosen."""
        return self._with(self.chosen)

    def decision(self) -> Decision:
        """The choice as a decision of a plan, with its runner-up."""
        best, base = self.evaluated[self.chosen], self.evaluated[()]
        memory = f"the fullest rank needs {format_bytes(best.peak)} of {format_bytes(self._budget(best))}"
        others = {
            choice: each
            for choice, each in self.evaluated.items()
            if choice != self.chosen and self.fits(choice)
        }
        if not self.chosen:
            return Decision(chosen=self._counted(()), note=f"{memory} without recomputation")
        runner_up = min(others, key=lambda choice: others[choice].seconds, default=None)
        return Decision(
            chosen=self._counted(self.chosen),
            terms={"recomputation": best.seconds - base.seconds},
            runner_up="" if runner_up is None else self._counted(runner_up),
            runner_up_seconds=None if runner_up is None else others[runner_up].seconds,
            note=f"{memory}, {format_bytes(base.peak)} without recomputation; the runner-up is the fastest "
            f"other choice of {len(self.evaluated)} forecasts that fits",
        )

    def evaluate(self, choice: Choice) -> EvaluatedChoice:
        """The forecast of a choice, made once."""
        if choice not in self.evaluated:
            built, mapping = compile_program(self._with(choice), self.cluster)
            result = forecast(built, self.cluster, mapping, runtime=self.runtime)
            self.evaluated[choice] = EvaluatedChoice(result.step_seconds, result.memory, result.devices)
            if not self.kinds:
                self._find_kinds(built)
        return self.evaluated[choice]

    def fits(self, choice: Choice) -> bool:
        """Whether every rank has the memory for a choice that was forecast."""
        return not self._shortages(self.evaluated[choice])

    def _shortages(self, evaluated: EvaluatedChoice) -> tuple[Shortage, ...]:
        return shortages(evaluated.memory, self._limited, evaluated.devices, self._rules)

    @property
    def _rules(self) -> Memory:
        return Memory() if self.runtime is None else self.runtime.memory

    def _available(self, evaluated: EvaluatedChoice, rank: int) -> float:
        return self._rules.available(self._limited.devices[evaluated.devices[rank]].memory)

    def _with(self, choice: Choice) -> CompileRequest:
        spec = self.request.training_spec
        strategy = replace(spec.strategy, recompute=choice or None, memory=None)
        return replace(self.request, training_spec=replace(spec, strategy=strategy))

    def _find_kinds(self, built: Build) -> None:
        serial = self.request.trace()
        layers = cluster_layers(serial)
        mesh_of = {op.name: op.layout.mesh for op in built.completed.ops if op.layout is not None}
        meshes = [layer_mesh(layer, mesh_of) for layer in layers]
        runs = [0]
        for before, mesh in pairwise(meshes):
            runs.append(runs[-1] + (mesh != before))
        self.kinds = tuple(zip(layering(serial, layers).classes, runs, strict=True))
        self.ranks = tuple(frozenset(mesh.members) for mesh in meshes)

    def _measure_layers(self, base: EvaluatedChoice) -> None:
        """What each layer adds and saves on each rank, from a forecast of one layer of its kind."""
        firsts: dict[tuple[int, int], int] = {}
        for number, kind in enumerate(self.kinds):
            firsts.setdefault(kind, number)
        for number, kind in enumerate(self.kinds):
            one = self.evaluate((firsts[kind],))
            for rank, memory in one.memory.items():
                if rank in base.memory and rank in self.ranks[number]:
                    saved = _stored(base.memory[rank]) - _stored(memory)
                    seconds = max(0.0, one.seconds - base.seconds)
                    layer = RecomputedLayer(number, seconds, saved, memory.temporary)
                    self._layers.setdefault(rank, []).append(layer)
        self._corrections = dict.fromkeys(base.memory, 0.0)

    def _cheapest(self) -> Choice | None:
        """The layers that memory asks for, one rank after the other; None where a rank has no choice."""
        chosen: set[int] = set()
        base = self.evaluated[()]
        for rank in base.memory:
            stored, scratch, free = self._rank(rank, chosen)
            more = cheapest_layers(free, stored, scratch, self._available(base, rank))
            if more is None:
                return None
            chosen.update(more)
        return tuple(sorted(chosen))

    def _smallest(self) -> list[Choice]:
        """Choices of which one needs least memory by the sums."""
        by_rank = []
        for rank in self.evaluated[()].memory:
            _, scratch, layers = self._rank(rank, ())
            by_rank.append(smallest_choices(layers, scratch))
        levels = max(map(len, by_rank))
        unions = (
            {number for choices in by_rank for number in choices[min(level, len(choices) - 1)]}
            for level in range(levels)
        )
        return list(dict.fromkeys(tuple(sorted(union)) for union in unions))

    def _rank(self, rank: int, chosen: Collection[int]) -> tuple[float, float, list[RecomputedLayer]]:
        """Bytes that a rank stores, its scratch bytes, and its layers besides those that are chosen."""
        memory, layers = self.evaluated[()].memory[rank], self._layers.get(rank, [])
        inside = [layer for layer in layers if layer.number in chosen]
        stored = _stored(memory) + self._corrections[rank] - sum(layer.saved for layer in inside)
        scratch = max([memory.temporary, *(layer.scratch for layer in inside)])
        return stored, scratch, [layer for layer in layers if layer.number not in chosen]

    def _correct(self, choice: Choice) -> None:
        """Forecast a choice, and correct the sums by what its memory differs from them."""
        for rank, memory in self.evaluate(choice).memory.items():
            if rank in self._corrections:
                stored, scratch, _ = self._rank(rank, choice)
                self._corrections[rank] += memory.total - stored - scratch

    def _one_more(self) -> list[Choice]:
        """The choice with one more layer: that which adds least time."""
        layers = {layer.number: layer for of_rank in self._layers.values() for layer in of_rank}
        free = [layer for layer in layers.values() if layer.number not in self.chosen and layer.saved > 0]
        cheapest = min(free, key=lambda layer: (layer.seconds, layer.number), default=None)
        return [] if cheapest is None else [tuple(sorted((*self.chosen, cheapest.number)))]

    def _best(self) -> Choice:
        """The fastest choice that fits. Raises InfeasibleError: none does."""
        fitting = [choice for choice in self.evaluated if self.fits(choice)]
        if not fitting:
            raise InfeasibleError(self._infeasible())
        return min(fitting, key=lambda choice: (self.evaluated[choice].seconds, len(choice)))

    def _infeasible(self) -> str:
        short = {choice: self._shortages(each) for choice, each in self.evaluated.items()}
        choice = min(short, key=lambda choice: max(s.needed / s.available for s in short[choice]))
        nearest, worst = self.evaluated[choice], short[choice][0]
        parts = sorted(nearest.memory[worst.rank].categories.items(), key=lambda pair: -pair[1])
        takes = ", ".join(f"{format_bytes(size)} for {name}" for name, size in parts if size)
        which = f"with layers {spans(choice)} recomputed" if choice else "without recomputation"
        count = self.request.micro_batches
        return (
            f"recompute of Strategy is 'auto' but no choice of layers fits into "
            f"{format_bytes(worst.available)}: the smallest memory that recomputation reaches is "
            f"{format_bytes(nearest.peak)} a rank, {which} "
            f"({takes} on rank {worst.rank}); give memory={nearest.peak} or more, use more ranks, "
            f"Strategy(zero=1) to 3, or smaller micro-batches than {self.request.size // count} samples"
        )

    def _counted(self, choice: Sequence[int]) -> str:
        return Decisions(recompute=tuple(choice)).choices(len(self.kinds))["recompute"]

    def _budget(self, evaluated: EvaluatedChoice) -> float:
        """What the fullest rank may use."""
        return self._available(
            evaluated, max(evaluated.memory, key=lambda rank: evaluated.memory[rank].total)
        )


def _stored(memory: RankMemory) -> int:
    """Bytes of a rank besides scratch memory."""
    return memory.total - memory.temporary
