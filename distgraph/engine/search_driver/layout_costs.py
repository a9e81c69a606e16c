"""Layout costs: what layers cost on the meshes of the search space.

*In:* a program, a cluster. *Out:* for a micro-batch count, a sub-mesh, a shape and a memory multiplier the
costs of every layer (`Variant`), without and with recomputation. *Invariant:* deterministic; every trace,
formulation and solution is made once.

A problem is solved for the first micro-batch count that needs a shape. For counts near it the choice is
carried over (`passes.search.intra_op.warm_start`) where ops have the same options: its costs are those of the
layouts under the other count, and hardly above the best. So are the costs of layers that are recomputed. What
becomes a candidate in the end is solved for its own count (`solve_separately`).

Memory multipliers make a Pareto front of seconds and bytes: at 0 layouts are the fastest; as the multiplier
rises, what is stored is split over more axes (ZeRO). Multipliers above 0 are tried only where the layers, put
on as many stages as there are sub-meshes of this size, would not fit. Where one of these stages does not fit
in the fastest layouts, the fastest ones are solved for within the memory of a device, too (`MemoryLimit`).
The three kinds (`VariantKind`) are solved apart, because most shapes need only the fastest layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import numpy as np

from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.op_positions import layers_by_first_ops
from distgraph.engine.search_driver.layout_variants import (
    LayoutQuery,
    Solutions,
    SolvingProcesses,
    Variant,
    VariantKey,
    VariantKind,
)
from distgraph.engine.search_driver.search_space import Shape, devices_for, pools_of, shapes_of
from distgraph.errors import InfeasibleError
from distgraph.ir.gc_pause import collector_paused
from distgraph.passes.search.inter_op.schedule_costs import Border
from distgraph.passes.search.inter_op.submesh_placement import Pool, SubMesh
from distgraph.passes.search.intra_op.cost_model import CostModel
from distgraph.passes.search.intra_op.decision_nodes import options_with_axes
from distgraph.passes.search.intra_op.formulate import Formulation, Profile, formulate
from distgraph.passes.search.intra_op.memory_limit import MemoryLimit
from distgraph.passes.search.intra_op.restrictions import BATCH_AXIS, Restriction, restricted, restriction_of
from distgraph.passes.search.intra_op.solve_layouts import solve_with_limit
from distgraph.passes.search.intra_op.warm_start import Ints, corresponding_ops, transfer_choice
from distgraph.passes.search.layering.layer_sequence import cluster_layers, layering
from distgraph.passes.search.layering.layered_graph import LayeredGraph
from distgraph.passes.serial.loops.flatten import flat_layers, flatten
from distgraph.plan.capabilities import ANY, Capabilities
from distgraph.plan.constraints import FREE, SearchConstraints
from distgraph.plan.pipeline_schedules import schedule_policy, searched_schedules
from distgraph.resources import Cluster, CollectiveCost, shared_cost
from distgraph.resources.runtimes.runtime_model import RuntimeModel

MEMORY_MULTIPLIERS = (0.0, 0.3, 3.0)
"""Seconds that a rank's whole memory costs, in steps of the layouts that are fastest."""
_REACH = 4
"""The ratio of two micro-batch counts up to which a choice is carried over from one to the other."""
SERIAL_SECONDS = 0.1
"""Seconds after which several processes take part: forking one takes a fifth of that."""
_SMALLER = 1.02
"""A variant is one of its own where the one before needs this many times its memory."""


@dataclass(eq=False)
class LayoutCosts:
    """Costs of layouts: traces and solves on demand, and keeps what it has made.

    Args:
        request: the program.
        cluster: where it is to run.
        pools: of the cluster.
        expired: whether nothing new is to be begun.
        processes: that solve at the same time (see `worker_pool`).
        runtime: what executes the plan in forecasts; None for distgraph.
        constraints: of the search.
        firsts: first op of each layer; None for the layers that `cluster_layers` finds.

    Attributes:
        solving: the processes, and what they have solved.
        transfers: devices of two stages and bytes between them -> see `stage_search`.
    """

    request: CompileRequest
    cluster: Cluster
    pools: tuple[Pool, ...]
    expired: Callable[[], bool] = lambda: False
    processes: int = 1
    runtime: RuntimeModel | None = None
    constraints: SearchConstraints = FREE
    firsts: list[str] | None = None
    _traces: dict[tuple[int, tuple[int, ...]], LayeredGraph] = field(default_factory=dict)
    _cost_models: dict[tuple[int, ...], CostModel] = field(default_factory=dict)
    _formulations: dict[object, Formulation] = field(default_factory=dict)
    _corresponding_ops: dict[object, Ints | None] = field(default_factory=dict)
    _solved_separately: set[object] = field(default_factory=set)
    solving: SolvingProcesses = field(default_factory=SolvingProcesses)
    transfers: dict[object, tuple[float, Border]] = field(default_factory=dict)

    def for_cluster(self, cluster: Cluster) -> LayoutCosts:
        """Costs of the same program on another cluster of as many devices, with the same traces."""
        return LayoutCosts(
            self.request,
            cluster,
            pools_of(cluster, len(self.devices)),
            self.expired,
            self.processes,
            self.runtime,
            self.constraints,
            self.firsts,
            self._traces,
        )

    @property
    def _solutions(self) -> Solutions:
        return self.solving.solutions

    def layered_graph(self, micro_batches: int, recompute: Sequence[int] = ()) -> LayeredGraph:
        """The serial graph for a micro-batch count, with some layers recomputed."""
        key = micro_batches, tuple(recompute)
        if key not in self._traces:
            self._traces[key] = self._trace(micro_batches, tuple(recompute))
        return self._traces[key]

    @collector_paused()
    def _trace(self, micro_batches: int, recompute: tuple[int, ...]) -> LayeredGraph:
        fields = self.request.blocks(micro_batches)
        blocks: list[tuple[str, ...]] = []
        if recompute:
            layers = self.layered_graph(micro_batches).layers
            blocks = [layers[number].ops for number in recompute]
        graph = self.request.training_spec.trace("train", fields, self.request.layouts, recompute=blocks)
        graph = replace(graph, micro_batches=micro_batches)
        flat = flatten(graph)
        if self.firsts is None:
            layers = cluster_layers(graph, self.constraints.layers)
            self.firsts = [names[0] for names in flat_layers(flat, [layer.ops for layer in layers])]
        layers = layers_by_first_ops(flat, self.firsts)
        return LayeredGraph(flat, layers, layering(flat, layers), recompute)

    @property
    def reference_graph(self) -> LayeredGraph:
        """The serial graph for the micro-batch count that is given, or else for the batch as a whole."""
        return self.layered_graph(self.constraints.start.micro_batches)

    def all_layers(self, micro_batches: int) -> tuple[int, ...]:
        """Numbers of all layers."""
        return tuple(range(len(self.layered_graph(micro_batches).layers)))

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Devices that may be used: the first ones of the cluster."""
        return tuple(range(sum(pool.size for pool in self.pools)))

    @cached_property
    def named_axes(self) -> dict[str, str]:
        """Axis -> where an annotation without a mesh names it; every mesh of the search has these. None where
        there is one device, which splits nothing."""
        graph = self.reference_graph.graph
        axes = {axis: attr.origin.where for attr in graph.axis_attrs.values() for axis in attr.spec.axes}
        for given in graph.op_axes.values():
            axes |= {axis: given.origin.where for _, split in given.axes for axis in split}
        return axes if len(self.devices) > 1 else {}

    def shapes(self, micro_batches: int, pool: Pool, size: int) -> tuple[Shape, ...]:
        """Logical meshes for `size` devices of a pool on which annotations without a mesh hold."""
        shapes = shapes_of(pool, size, self.named_axes, tensor_alone=self.one_use)
        return tuple(shape for shape in shapes if self.allows(micro_batches, shape))

    def allows(self, micro_batches: int, shape: Shape) -> bool:
        """Whether annotations without a mesh hold on meshes of a shape, and the runtime executes it."""
        if not shape.has(self.named_axes):
            return False
        if self.one_use and (shape.samples or self.request.size // micro_batches % shape.parts_of_batch):
            return False
        graph, mesh = self.layered_graph(micro_batches).graph, shape.mesh()
        given = ((graph.producers[name], axes) for name, axes in graph.op_axes.items())
        return all(options_with_axes(op, mesh, axes) for op, axes in given)

    @property
    def one_use(self) -> bool:
        """Whether every axis of a mesh splits either samples or other dims."""
        return self.capabilities.axes == "one_use"

    @property
    def runtime_name(self) -> str:
        """Of what executes the plan."""
        return "distgraph" if self.runtime is None else self.runtime.name

    @property
    def capabilities(self) -> Capabilities:
        """What the runtime executes of a plan."""
        return ANY if self.runtime is None else self.runtime.executes

    @property
    def schedules(self) -> tuple[str, ...]:
        """Names of the schedules to try."""
        return self.constraints.among("schedule", self.capabilities.among(searched_schedules()))

    @cached_property
    def restriction(self) -> Restriction:
        """What layouts keep to in any case."""
        return restriction_of(self.constraints.zero)

    @cached_property
    def collective(self) -> CollectiveCost:
        """Costs of single messages between any devices."""
        return shared_cost(self.cluster)

    def cost_model(self, devices: tuple[int, ...]) -> CostModel:
        """Costs of layouts for ranks on some devices."""
        if devices not in self._cost_models:
            self._cost_models[devices] = CostModel(self.cluster, devices)
        return self._cost_models[devices]

    def reference_devices(self, devices: tuple[int, ...]) -> tuple[int, ...]:
        """The devices that a stage of this size would have, were it alone: costs are solved for those."""
        return devices_for(self.pools, self.submesh(devices))

    def submesh(self, devices: Sequence[int]) -> SubMesh:
        """Devices of each pool among some devices."""
        numbers = [self.pool_numbers[device] for device in devices]
        return SubMesh(tuple(numbers.count(pool) for pool in range(len(self.pools))))

    @cached_property
    def pool_numbers(self) -> tuple[int, ...]:
        """Number of the pool of every device."""
        numbers = {d: n for n, pool in enumerate(self.pools) for machine in pool.machines for d in machine}
        return tuple(numbers[device] for device in range(len(numbers)))

    def memory(self, submesh: SubMesh) -> float:
        """Bytes of the smallest device of a sub-mesh."""
        return min(self.cluster.devices[device].memory for device in devices_for(self.pools, submesh))

    def memory_limit(self, micro_batches: int, submesh: SubMesh, slack: float = 1.0) -> MemoryLimit:
        """What a stage may hold, were all stages as large, under the schedule that holds least."""
        layers, given = len(self.all_layers(micro_batches)), self.constraints.stage_count
        stages = max(1, min(len(self.devices) // submesh.size, layers, given or layers))
        policies = [schedule_policy(name) for name in self.schedules]
        live = min(policy.in_flight(0, stages, micro_batches) for policy in policies)
        return MemoryLimit(slack * self.memory(submesh), stages, live)

    def formulation(self, layered: LayeredGraph, devices: tuple[int, ...], shape: Shape) -> Formulation:
        """The problem of laying a graph out on one mesh."""
        key = layered.graph.micro_batches, layered.recompute, devices, shape
        if key not in self._formulations:
            self._formulations[key] = formulate(
                layered.graph,
                shape.mesh(),
                self.cost_model(devices),
                layered.layering,
                folded=layered.fold,
                batch_axis=BATCH_AXIS if self.one_use else None,
            )
        return self._formulations[key]

    def solve(self, layered: LayeredGraph, query: LayoutQuery) -> tuple[Formulation, tuple[int, ...], float]:
        """The formulation, its best choice and objective.

        Raises:
            InfeasibleError: none was found, as after Ctrl-C.
        """
        key = layered.graph.micro_batches, layered.recompute, query
        formulation = self.formulation(layered, query.devices, query.shape)
        formulation = formulation.with_memory(memory_multiplier=query.memory_multiplier)
        if key not in self._solutions.choices:
            problem = restricted(formulation, query.restriction)
            solution = solve_with_limit(formulation, problem, query.memory_limit)
            if solution.choice is None:
                reason = solution.message or solution.status
                raise InfeasibleError(
                    f"{problem.name}: no layouts on {query.shape} were found ({reason}); take annotations "
                    f"out, or give the search more time"
                )
            self._solutions.choices[key] = tuple(solution.choice), solution.objective
        return (formulation, *self._solutions.choices[key])

    def layout_key(self, layered: LayeredGraph, query: LayoutQuery) -> tuple[object, ...]:
        """A key that is the same under two restrictions only where the layouts of the stage are the same: the
        choice of `stage_layouts` where its problem is solved, else the restriction."""
        if (layered.graph.micro_batches, (), query) not in self._solutions.choices:
            return (query.restriction,)
        return self.stage_layouts(layered, query)[1]

    def stage_layouts(self, layered: LayeredGraph, query: LayoutQuery) -> tuple[Formulation, tuple[int, ...]]:
        """The formulation and the choice that estimates are made of.

        What is recomputed has the layouts of the first time, so that a program holds what its estimate says:
        the fastest choice for the recomputed graph may keep more.
        """
        if layered.recompute:
            plain = self.layered_graph(layered.graph.micro_batches)
            source, choice, _ = self.solve(plain, query)
            target = self.formulation(layered, query.devices, query.shape)
            again = self.carried_over(source, choice, target, layered, plain)
            if again is not None:
                return target.with_memory(memory_multiplier=query.memory_multiplier), again
        return self.solve(layered, query)[:2]

    def solve_separately(self, micro_batches: int, submesh: SubMesh, shape: Shape) -> None:
        """From now on solve a shape for this micro-batch count; do not carry choices over to it."""
        self._solved_separately.add((micro_batches, submesh, shape))

    def has_variants(
        self,
        micro_batches: int,
        submesh: SubMesh,
        shape: Shape,
        restriction: Restriction,
        kind: VariantKind = "fastest",
    ) -> bool:
        """Whether a kind of variants of a shape was solved before; the fastest is one of all multipliers."""
        kinds = {kind, "multipliers"} if kind == "fastest" else {kind}
        keys = product([(micro_batches, submesh, shape, restriction)], kinds, (False, True))
        return any(
            (*of_shape, each, separately) in self._solutions.variants for of_shape, each, separately in keys
        )

    def prepare_variants(
        self,
        micro_batches: int,
        shapes: Sequence[tuple[SubMesh, Shape]],
        restriction: Restriction,
        kinds: Sequence[VariantKind] = ("multipliers", "within memory"),
    ) -> None:
        """Solve some kinds of variants of some shapes: of the first, of others while there is time; several
        processes solve the largest of the others first, so that none waits long for the last one."""
        keys = [[self._key(kind, micro_batches, *pair, restriction) for kind in kinds] for pair in shapes]
        missing = [
            of_shape for of_shape in keys if any(key not in self._solutions.variants for key in of_shape)
        ]
        if not missing:
            return
        for layers in ((), self.all_layers(micro_batches)):
            _ = self.layered_graph(micro_batches, layers).fold  # before processes are forked

        def make(of_shape: list[VariantKey]) -> None:
            if of_shape is missing[0] or not self.expired():
                for key in of_shape:
                    self._solved_variants(key)

        if self.processes > 1:
            missing[1:] = sorted(missing[1:], key=lambda of_shape: -len(of_shape[0][2].axes))
        self.solving.parallel_map(make, missing, self.processes, serial_seconds=SERIAL_SECONDS)

    def variants(
        self, micro_batches: int, submesh: SubMesh, shape: Shape, restriction: Restriction
    ) -> tuple[Variant, ...]:
        """The variants of one shape, fastest first, for memory multipliers as in `MEMORY_MULTIPLIERS`."""
        return self._solved_variants(self._key("multipliers", micro_batches, submesh, shape, restriction))

    def fastest(
        self, micro_batches: int, submesh: SubMesh, shape: Shape, restriction: Restriction
    ) -> Variant:
        """The first of the variants of one shape; the others are not solved for it."""
        key = self._key("multipliers", micro_batches, submesh, shape, restriction)
        if key not in self._solutions.variants:
            key = self._key("fastest", micro_batches, submesh, shape, restriction)
        return self._solved_variants(key)[0]

    def variants_within_memory(
        self, micro_batches: int, submesh: SubMesh, shape: Shape, restriction: Restriction
    ) -> tuple[Variant, ...]:
        """The fastest layouts of a shape within `memory_limit`, where the fastest of all exceed it."""
        return self._solved_variants(self._key("within memory", micro_batches, submesh, shape, restriction))

    def _solved_variants(self, key: VariantKey) -> tuple[Variant, ...]:
        if key not in self._solutions.variants:
            within_memory = key[4] == "within memory"
            if within_memory and self.expired():
                return ()
            solve = self._solve_within_memory if within_memory else self._solve_variants
            self._solutions.variants[key] = solve(key)
        return self._solutions.variants[key]

    def _key(
        self, kind: VariantKind, micro_batches: int, submesh: SubMesh, shape: Shape, restriction: Restriction
    ) -> VariantKey:
        separately = restriction != "none" or (micro_batches, submesh, shape) in self._solved_separately
        return micro_batches, submesh, shape, restriction, kind, separately

    @collector_paused()
    def _solve_variants(self, key: VariantKey) -> tuple[Variant, ...]:
        micro_batches, submesh, shape, restriction, kind, separately = key
        devices = devices_for(self.pools, submesh)
        memory = self.memory(submesh)
        plain = self.layered_graph(micro_batches)
        again = self.layered_graph(micro_batches, self.all_layers(micro_batches))
        stages = max(1, len(self.devices) // submesh.size)
        variants: list[Variant] = []
        fastest, held = 0.0, np.inf
        for share in MEMORY_MULTIPLIERS[: 1 if kind == "fastest" else None]:
            query = LayoutQuery(devices, shape, share * fastest / memory, restriction)
            laid = None if separately else self._carried(plain, query, share)
            solved = laid is None
            a, choice, estimate = laid or self.solve(plain, query)
            multiplier = query.memory_multiplier
            if solved and restriction == "none":
                self._solutions.bases.setdefault((devices, shape, share), {})[micro_batches] = multiplier
            profile = a.profile(choice)
            size = profile.nbytes(1)
            if size * _SMALLER < held:
                costs = profile, self._again(a, choice, again, query), estimate, solved
                variants.append(Variant(micro_batches, submesh, shape, multiplier, restriction, *costs))
                held = size
            fastest = fastest or estimate
            if profile.nbytes(stages) < memory * stages or self.expired():
                break
        return tuple(variants)

    def _solve_within_memory(self, key: VariantKey) -> tuple[Variant, ...]:
        limit = self.memory_limit(*key[:2])
        fits = limit.needed(self.fastest(*key[:4]).profile) <= limit.nbytes
        return () if fits else self.limited_variants(*key[:4], limit)

    @collector_paused()
    def limited_variants(
        self, micro_batches: int, submesh: SubMesh, shape: Shape, restriction: Restriction, limit: MemoryLimit
    ) -> tuple[Variant, ...]:
        """The fastest layouts of a shape within a limit, solved for this micro-batch count; none where no
        layouts keep it."""
        query = LayoutQuery(devices_for(self.pools, submesh), shape, 0.0, restriction, limit)
        plain = self.layered_graph(micro_batches)
        again = self.layered_graph(micro_batches, self.all_layers(micro_batches))
        try:
            formulation, choice, estimate = self.solve(plain, query)
            costs = formulation.profile(choice), self._again(formulation, choice, again, query), estimate
        except InfeasibleError:
            return ()
        return (Variant(micro_batches, submesh, shape, 0.0, restriction, *costs, True, limit),)

    def _carried(
        self, layered: LayeredGraph, query: LayoutQuery, share: float
    ) -> tuple[Formulation, tuple[int, ...], float] | None:
        """The choice for the nearest micro-batch count that was solved and has the same options."""
        here = layered.graph.micro_batches
        bases = self._solutions.bases.get((query.devices, query.shape, share), {})
        if here in bases:
            return None  # it was solved
        near = [count for count in bases if max(count, here) <= _REACH * min(count, here)]
        for count in sorted(near, key=lambda count: abs(math.log(count / here))):
            other = self.layered_graph(count)
            source, choice, _ = self.solve(other, replace(query, memory_multiplier=bases[count]))
            target = self.formulation(layered, query.devices, query.shape)
            carried = self.carried_over(source, choice, target, layered, other)
            if carried is not None:
                return target, carried, target.profile(carried).seconds(here)
        return None

    def _again(
        self, plain: Formulation, choice: tuple[int, ...], again: LayeredGraph, query: LayoutQuery
    ) -> Profile:
        """Costs by layer where each is recomputed, in the layouts in which it was computed first."""
        target = self.formulation(again, query.devices, query.shape)
        other = self.carried_over(plain, choice, target, again, self.layered_graph(again.graph.micro_batches))
        if other is None:
            _, other, _ = self.solve(again, query)
        return target.profile(other)

    def carried_over(
        self,
        source: Formulation,
        choice: tuple[int, ...],
        target: Formulation,
        layered: LayeredGraph,
        other: LayeredGraph,
    ) -> tuple[int, ...] | None:
        """A choice for the source, of `other`, as one for the target; None where their options differ."""
        key = layered, other
        if key not in self._corresponding_ops:
            self._corresponding_ops[key] = corresponding_ops(layered.fold, other.fold)
        corresponding = self._corresponding_ops[key]
        return None if corresponding is None else transfer_choice(source, choice, target, corresponding)
