"""What layers cost on the meshes of a space: traces, formulations, solved choices, each made once.

*In:* a program, a cluster. *Out:* for a number of micro-batches, a sub-mesh, a shape and a price of memory
the costs of every layer (`Variant`), without and with recomputation. *Invariant:* deterministic; nothing is
solved twice.

A problem is solved for the first number of micro-batches that asks for a shape. For those near it the choice
is carried over (`passes.search.transfer`) where ops have the same options: its costs are those of the layouts
under the other number, and hardly above the best. So are the costs of layers that are computed again. What is
proposed in the end is solved for itself (`settle`).

The price of memory makes a front: at 0 layouts are the fastest; as it rises, what is stored is split over
more axes (ZeRO). Prices above 0 are tried only where the layers, put on as many stages as there are
sub-meshes of this size, would not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from distgraph.engine.compile.compile_request import Training
from distgraph.engine.compile.op_paths import cut
from distgraph.engine.search.restrictions import Restriction, restricted
from distgraph.engine.search.search_space import Shape, devices_for
from distgraph.engine.search.worker_pool import parallel_map
from distgraph.errors import InfeasibleError
from distgraph.ir.gc_pause import collector_paused
from distgraph.ir.graph import Graph
from distgraph.passes.search.inter_op.submesh_placement import Pool, SubMesh
from distgraph.passes.search.intra_op.cost_model import Prices
from distgraph.passes.search.intra_op.formulate import Formulation, Profile, formulate
from distgraph.passes.search.intra_op.solution_cache import solve_cached
from distgraph.passes.search.intra_op.warm_start import Ints, transferred, twins
from distgraph.passes.search.layering.layer_folding import Fold, fold
from distgraph.passes.search.layering.layer_sequence import Layer, Layering, cluster_layers, layering
from distgraph.passes.search.solver.problem import Problem, Solution
from distgraph.resources import Cluster, CollectiveCost, shared_cost

MEMORY_PRICES = (0.0, 0.3, 3.0)
"""Seconds that a rank's whole memory costs, in steps of the layouts that are fastest."""
SOLVE_SECONDS = 2.0
GAP = 1e-3
_FAR, _PATIENCE = 0.1, 5.0  # a solution this far from its bound gets so many times as long
_REACH = 4  # times as many micro-batches, or as few, to which a choice is carried over
_ALONE = 0.3  # seconds after which shapes are solved in several processes
_REPLANNED = 1.02  # a variant is one of its own where it saves 2 % of the memory of the one before


@dataclass(frozen=True, eq=False)
class Traced:
    """A serial train graph, its layers, and which of them are computed again."""

    graph: Graph
    layers: tuple[Layer, ...]
    layering: Layering
    recompute: tuple[int, ...]

    @cached_property
    def fold(self) -> Fold:
        """Equal layers on top of each other."""
        return fold(self.graph, self.layering)

    @cached_property
    def crossing(self) -> np.ndarray:
        """Bytes [layers - 1] of one micro-batch that pass between a layer and later ones, both ways."""
        count, of = len(self.layers), self.layering.of
        change = np.zeros(count + 1)
        for op in self.graph.ops:
            if op.role not in ("forward", "backward"):
                continue
            home = of[op.name]
            for value in op.results:
                reached = [of[user.name] for user in self.graph.users[value.name]]
                reached = [layer for layer in reached if layer >= 0] + [home]
                low, high = min(reached), max(reached)
                if home >= 0 and high > low:
                    change[low] += value.nbytes
                    change[high] -= value.nbytes
        return np.cumsum(change)[: count - 1]


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to lay out the layers on a mesh of some shape.

    Attributes:
        micro_batches: in a step.
        submesh, shape: devices and logical mesh.
        memory_price: seconds a byte.
        restriction: what was forbidden.
        profile: costs by layer; recompute: the same where every layer is computed again.
        estimate: seconds of a step by the problem, and what memory costs.
        solved: whether layouts are the best for this number of micro-batches, not carried over from another.
    """

    micro_batches: int
    submesh: SubMesh
    shape: Shape
    memory_price: float
    restriction: Restriction
    profile: Profile
    recompute: Profile
    estimate: float
    solved: bool


def solved(problem: Problem) -> Solution:
    """Solve a problem of layouts.

    A few seconds are plenty, unless much of them goes by while the solver is compiled or the machine is busy:
    then the answer may be far from the best, and its bound tells so.
    """
    found = solve_cached(problem, seconds=SOLVE_SECONDS, gap=GAP)
    if found.status == "infeasible" or found.gap <= _FAR:
        return found
    return solve_cached(problem, seconds=_PATIENCE * SOLVE_SECONDS, gap=GAP)


Item = TypeVar("Item")
Result = TypeVar("Result")
StageKey = tuple[tuple[int, ...], Shape, float]
"""Devices, shape and price of memory of a stage."""
_Asked = tuple[int, SubMesh, Shape, Restriction, tuple[float, ...]]
_Key = tuple[int, SubMesh, Shape, Restriction, tuple[float, ...], bool]


@dataclass(frozen=True, slots=True)
class _Learned:
    """What is small and took long: choices, the prices of memory that they were found for, fronts."""

    choices: dict[object, tuple[tuple[int, ...], float]]
    bases: dict[object, dict[int, float]]
    variants: dict[_Key, tuple[Variant, ...]]

    def since(self, before: _Learned) -> _Learned:
        """What is new."""
        bases = {
            key: {m: price for m, price in own.items() if m not in before.bases.get(key, ())}
            for key, own in self.bases.items()
        }
        return _Learned(
            {key: choice for key, choice in self.choices.items() if key not in before.choices},
            {key: own for key, own in bases.items() if own},
            {key: front for key, front in self.variants.items() if key not in before.variants},
        )

    def copy(self) -> _Learned:
        """As it is now."""
        bases = {key: dict(own) for key, own in self.bases.items()}
        return _Learned(dict(self.choices), bases, dict(self.variants))

    def add(self, more: _Learned) -> None:
        """Know this, too."""
        self.choices.update(more.choices)
        self.variants.update(more.variants)
        for key, own in more.bases.items():
            self.bases.setdefault(key, {}).update(own)


@dataclass(eq=False)
class Oracle:
    """Traces and solves on demand.

    Args:
        training: the program.
        cluster: where it is to run.
        pools: of the cluster.
        expired: whether nothing new is to be begun.
        processes: that work for it at the same time (see `worker_pool`).
    """

    training: Training
    cluster: Cluster
    pools: tuple[Pool, ...]
    expired: Callable[[], bool] = lambda: False
    processes: int = 1
    _firsts: list[str] | None = None
    _traces: dict[tuple[int, tuple[int, ...]], Traced] = field(default_factory=dict)
    _prices: dict[tuple[int, ...], Prices] = field(default_factory=dict)
    _formulations: dict[object, Formulation] = field(default_factory=dict)
    _twins: dict[object, Ints | None] = field(default_factory=dict)
    _learned: _Learned = field(default_factory=lambda: _Learned({}, {}, {}))
    _settled: set[object] = field(default_factory=set)

    def together(
        self,
        work: Callable[[Item], Result],
        items: Sequence[Item],
        processes: int,
        *,
        alone: float = 0.0,
        packed: Callable[[Result], Result] = lambda result: result,
    ) -> list[Result]:
        """The results of `parallel_map`; what worker processes solve is known here, too."""
        known = self._learned.copy()

        def news(result: tuple[Result, _Learned | None]) -> tuple[Result, _Learned | None]:
            nonlocal known
            new, known = self._learned.since(known), self._learned.copy()
            return packed(result[0]), new

        done: list[tuple[Result, _Learned | None]] = parallel_map(
            lambda item: (work(item), None), items, processes, alone, news
        )
        for _, learned in done:
            if learned is not None:
                self._learned.add(learned)
        return [result for result, _ in done]

    def traced(self, micro_batches: int, recompute: Sequence[int] = ()) -> Traced:
        """The serial graph for a number of micro-batches, with some layers computed again."""
        key = micro_batches, tuple(recompute)
        if key not in self._traces:
            self._traces[key] = self._trace(micro_batches, tuple(recompute))
        return self._traces[key]

    @collector_paused()
    def _trace(self, micro_batches: int, recompute: tuple[int, ...]) -> Traced:
        fields = self.training.blocks(micro_batches)
        blocks: list[tuple[str, ...]] = []
        if recompute:
            layers = self.traced(micro_batches).layers
            blocks = [layers[number].ops for number in recompute]
        graph = self.training.recipe.trace("train", fields, self.training.layouts, recompute=blocks)
        graph = replace(graph, micro_batches=micro_batches)
        if self._firsts is None:
            self._firsts = [layer.ops[0] for layer in cluster_layers(graph)]
        layers = cut(graph, self._firsts)
        return Traced(graph, layers, layering(graph, layers), recompute)

    def everything(self, micro_batches: int) -> tuple[int, ...]:
        """Numbers of all layers."""
        return tuple(range(len(self.traced(micro_batches).layers)))

    @cached_property
    def collective(self) -> CollectiveCost:
        """Of single messages, wherever stages lie."""
        return shared_cost(self.cluster)

    def prices(self, devices: tuple[int, ...]) -> Prices:
        """Of ranks on these devices."""
        if devices not in self._prices:
            self._prices[devices] = Prices(self.cluster, devices)
        return self._prices[devices]

    def like(self, devices: tuple[int, ...]) -> tuple[int, ...]:
        """The devices that a stage of this size would have, were it alone: costs are known for those."""
        sizes = [len(set(devices) & {d for row in pool.machines for d in row}) for pool in self.pools]
        return devices_for(self.pools, SubMesh(tuple(sizes)))

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Number of the pool of every device."""
        found = {d: n for n, pool in enumerate(self.pools) for machine in pool.machines for d in machine}
        return tuple(found[device] for device in range(len(found)))

    def memory(self, submesh: SubMesh) -> float:
        """Bytes of the smallest device of a sub-mesh."""
        return min(self.cluster.devices[device].memory for device in devices_for(self.pools, submesh))

    def formulation(self, traced: Traced, devices: tuple[int, ...], shape: Shape) -> Formulation:
        """The problem of one mesh."""
        key = traced.graph.micro_batches, traced.recompute, devices, shape
        if key not in self._formulations:
            self._formulations[key] = formulate(
                traced.graph, shape.mesh(), self.prices(devices), traced.layering, folded=traced.fold
            )
        return self._formulations[key]

    def chosen(
        self, traced: Traced, devices: tuple[int, ...], shape: Shape, price: float, restriction: Restriction
    ) -> tuple[Formulation, tuple[int, ...], float]:
        """The formulation, its best choice and objective.

        Raises:
            InfeasibleError: none was found, as after Ctrl-C.
        """
        key = traced.graph.micro_batches, traced.recompute, devices, shape, price, restriction
        found = self.formulation(traced, devices, shape).priced(memory_price=price, live_micro_batches=1)
        if key not in self._learned.choices:
            problem = restricted(found, restriction)
            solution = solved(problem)
            if solution.choice is None:
                reason = solution.message or solution.status
                raise InfeasibleError(
                    f"{problem.name}: no layouts on {shape} were found ({reason}); take annotations out, or "
                    f"give the search more time"
                )
            self._learned.choices[key] = tuple(solution.choice), solution.objective
        return (found, *self._learned.choices[key])

    def decided(self, traced: Traced, stage: StageKey, restriction: Restriction) -> tuple[object, ...]:
        """The choice of `laid_out` where its problem is solved; else what it will be solved under. Where that
        is the same under two restrictions, so are the layouts of the stage."""
        if (traced.graph.micro_batches, (), *stage, restriction) not in self._learned.choices:
            return (restriction,)
        return self.laid_out(traced, *stage, restriction)[1]

    def laid_out(
        self, traced: Traced, devices: tuple[int, ...], shape: Shape, price: float, restriction: Restriction
    ) -> tuple[Formulation, tuple[int, ...]]:
        """The formulation and the choice that estimates are made of.

        What is computed again lies as it did the first time, so that a program holds what its estimate says:
        the fastest choice for itself may keep more.
        """
        if traced.recompute:
            plain = self.traced(traced.graph.micro_batches)
            source, choice, _ = self.chosen(plain, devices, shape, price, restriction)
            target = self.formulation(traced, devices, shape)
            again = self.carried_over(source, choice, target, traced, plain)
            if again is not None:
                return target.priced(memory_price=price, live_micro_batches=1), again
        found, choice, _ = self.chosen(traced, devices, shape, price, restriction)
        return found, choice

    def settle(self, micro_batches: int, submesh: SubMesh, shape: Shape) -> None:
        """From now on solve a shape for this number of micro-batches."""
        self._settled.add((micro_batches, submesh, shape))

    def known(self, micro_batches: int, submesh: SubMesh, shape: Shape, restriction: Restriction) -> bool:
        """Whether the front of a shape was made before."""
        key = micro_batches, submesh, shape, restriction, MEMORY_PRICES
        return any((*key, settled) in self._learned.variants for settled in (False, True))

    def look_up(
        self, micro_batches: int, shapes: Sequence[tuple[SubMesh, Shape]], restriction: Restriction
    ) -> None:
        """Make the fronts of some shapes at the same time: of the first, of others while there is time."""
        keys = [self._key((micro_batches, *pair, restriction, MEMORY_PRICES)) for pair in shapes]
        missing = [key for key in keys if key not in self._learned.variants]
        if not missing:
            return
        for layers in ((), self.everything(micro_batches)):
            _ = self.traced(micro_batches, layers).fold  # before processes are copied

        def make(number: int) -> None:
            if number == 0 or not self.expired():
                self._learned.variants[missing[number]] = tuple(self._front(*missing[number]))

        self.together(make, range(len(missing)), self.processes, alone=_ALONE)

    def variants(
        self,
        micro_batches: int,
        submesh: SubMesh,
        shape: Shape,
        restriction: Restriction,
        shares: Sequence[float] = MEMORY_PRICES,
    ) -> tuple[Variant, ...]:
        """The front of one shape, fastest first; of the given prices of memory."""
        key = self._key((micro_batches, submesh, shape, restriction, tuple(shares)))
        if key not in self._learned.variants:
            self._learned.variants[key] = tuple(self._front(*key))
        return self._learned.variants[key]

    def _key(self, asked: _Asked) -> _Key:
        """What `_front` is called with: that, and whether it is to be solved for itself."""
        micro_batches, submesh, shape, restriction, _ = asked
        return *asked, restriction != "none" or (micro_batches, submesh, shape) in self._settled

    @collector_paused()
    def _front(
        self,
        micro_batches: int,
        submesh: SubMesh,
        shape: Shape,
        restriction: Restriction,
        shares: Sequence[float],
        settled: bool,
    ) -> list[Variant]:
        devices = devices_for(self.pools, submesh)
        memory = self.memory(submesh)
        plain, again = self.traced(micro_batches), self.traced(micro_batches, self.everything(micro_batches))
        stages = max(1, len(self.cluster.devices) // submesh.size)
        found: list[Variant] = []
        fastest, held = 0.0, np.inf
        for share in shares:
            price = share * fastest / memory
            laid = None if settled else self._carried(plain, devices, shape, share, restriction)
            solved = laid is None
            a, choice, estimate = laid or self.chosen(plain, devices, shape, price, restriction)
            if solved and restriction == "none":
                self._learned.bases.setdefault((devices, shape, share), {})[micro_batches] = price
            profile = a.profile(choice)
            size = profile.nbytes(1)
            if size * _REPLANNED < held:
                recompute = self._again(a, choice, again, devices, shape, price, restriction)
                found.append(
                    Variant(
                        micro_batches,
                        submesh,
                        shape,
                        price,
                        restriction,
                        profile,
                        recompute,
                        estimate,
                        solved,
                    )
                )
                held = size
            fastest = fastest or estimate
            if profile.nbytes(stages) < memory * stages or self.expired():
                break
        return found

    def _carried(
        self, traced: Traced, devices: tuple[int, ...], shape: Shape, share: float, restriction: Restriction
    ) -> tuple[Formulation, tuple[int, ...], float] | None:
        """The choice for the nearest number of micro-batches that was solved and offers the same options."""
        here = traced.graph.micro_batches
        bases = self._learned.bases.get((devices, shape, share), {})
        near = [count for count in bases if max(count, here) <= _REACH * min(count, here)]
        for count in sorted(near, key=lambda count: abs(math.log(count / here))):
            other = self.traced(count)
            source, choice, _ = self.chosen(other, devices, shape, bases[count], restriction)
            target = self.formulation(traced, devices, shape)
            found = self.carried_over(source, choice, target, traced, other)
            if found is not None:
                return target, found, target.profile(found).seconds(here)
        return None

    def _again(
        self,
        plain: Formulation,
        choice: tuple[int, ...],
        again: Traced,
        devices: tuple[int, ...],
        shape: Shape,
        price: float,
        restriction: Restriction,
    ) -> Profile:
        """Costs by layer where each is computed again, in the layouts in which it was computed first."""
        target = self.formulation(again, devices, shape)
        other = self.carried_over(plain, choice, target, again, self.traced(again.graph.micro_batches))
        if other is None:
            _, other, _ = self.chosen(again, devices, shape, price, restriction)
        return target.profile(other)

    def carried_over(
        self,
        source: Formulation,
        choice: tuple[int, ...],
        target: Formulation,
        traced: Traced,
        other: Traced,
    ) -> tuple[int, ...] | None:
        """A choice for the source, of `other`, as one for the target; None where their options differ."""
        key = traced, other
        if key not in self._twins:
            self._twins[key] = twins(traced.fold, other.fold)
        twin = self._twins[key]
        return None if twin is None else transferred(source, choice, target, twin)
