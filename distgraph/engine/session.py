"""Session: the compiled programs of an engine, and the ranks that run them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distgraph.engine.commands.plan_search import settled
from distgraph.engine.compile.compile import compile_program
from distgraph.engine.compile.compile_request import Training
from distgraph.engine.compile.derived_programs import reference_of
from distgraph.engine.compile.dump import write
from distgraph.engine.compile.plan_apply import check_batch, layouts_of, planned
from distgraph.engine.compile.training_spec import Recipe
from distgraph.engine.data import Batch, Field
from distgraph.engine.executable import Compiled
from distgraph.engine.parameter_store import Memory
from distgraph.engine.replicas import different_replicas
from distgraph.errors import RuntimeFault
from distgraph.ir.graph import Graph
from distgraph.ir.sharding_spec import DistAttr
from distgraph.plan.plan import Plan
from distgraph.resources import Cluster
from distgraph.runtime.execute.device import array_namespace, take_device
from distgraph.runtime.execute.process_group import World, make_world
from distgraph.runtime.execute.recorder import Recorder, Recording, contents

Key = tuple[str, int, tuple[tuple[str, Field], ...]]
"""Mode, samples of a batch, fields of a sample."""


@dataclass(slots=True)
class Session:
    """Programs by mode and shape; all of them work on the same memory.

    Attributes:
        recipe: model, loss, optimiser, strategy.
        cluster: prices collectives; None for bytes on the wire.
        memory: blocks of parameters and states.
        plan: of the training program, given or searched.
        programs: what has been compiled.
        world: the ranks, once something has run.
    """

    recipe: Recipe
    cluster: Cluster | None
    memory: Memory
    plan: Plan | None = None
    programs: dict[Key, Compiled] = field(default_factory=dict)
    world: World | None = None
    _reference: Graph | None = None  # the planned training program, completed
    _layouts: dict[str, DistAttr] = field(default_factory=dict)  # where the plan puts parameters and states

    def __post_init__(self) -> None:
        if self.plan is not None:
            self.recipe = planned(self.recipe, self.plan)

    def training(self, mode: str, batch: Batch) -> Training:
        """What a batch would be given to."""
        layouts = self.memory.layouts
        if self.plan is not None:
            if not self._layouts:
                self._layouts = layouts_of(self.plan)
            layouts = self._layouts | layouts
        return Training(self.recipe, mode, len(batch), batch.fields(), layouts, self.plan)

    def program(self, mode: str, batch: Batch) -> Compiled:
        """The program for batches like this one, compiled at first use.

        Raises:
            RuntimeFault: the batch is empty.
            GraphError, ShardingError, ResourceError: as `compile_program`; there is a plan for training
                batches of another size; a plan is to be searched but there is no cluster.
            InfeasibleError: no plan fits the cluster.
        """
        if len(batch) == 0:
            raise RuntimeFault("batch has 0 samples; there is nothing to do")
        fields = batch.fields()
        key = (mode, len(batch), tuple(fields.items()))
        if key not in self.programs:
            training = self._settled(self.training(mode, batch))
            build, mapping = compile_program(training, self.cluster, self._reference_of(training))
            self.memory.adopt(build.completed)
            if training.planned:
                self._reference = build.completed
            names = {name: field for field, name in self.recipe.names(tuple(fields), mode).items()}
            self.programs[key] = Compiled(training, build, names, mapping)
        return self.programs[key]

    def _settled(self, training: Training) -> Training:
        """With the plan that the strategy's mode asks for, searched at first use."""
        found = settled(training, self.cluster)
        self.plan, self.recipe = found.plan, found.recipe
        whole = self._reference is not None and self.plan is not None and training.size < self.plan.batch
        if found.mode == "train" and not whole and found.plan is not None:
            check_batch(found.plan, found.size)
        return found

    def _reference_of(self, training: Training) -> Graph | None:
        """The planned program, for those that follow it."""
        if training.plan is not None and not training.planned and self._reference is None:
            self._reference = reference_of(training, training.plan)
        return self._reference

    def ranks(self) -> World:
        """The world, with enough ranks for every program so far; a new one after a failure.

        Raises:
            ResourceError: the MPI job has fewer; the strategy's device is missing.
        """
        meshes = dict.fromkeys(mesh for c in self.programs.values() for mesh in c.build.lowered.meshes)
        needed = max((max(mesh.members) + 1 for mesh in meshes), default=1)
        if self.world is None or self.world.size < needed or self.world.ended:
            self.close()
            device = self.recipe.strategy.device
            array_namespace(device)  # what is missing is told before any rank starts
            world = make_world(needed, " and ".join(map(str, meshes)))
            self.memory.devices.update(world.run(lambda rank: take_device(device, world.transport(rank))))
            self.world = world
        return self.world

    def close(self) -> None:
        """End the ranks' threads; what they have compiled is tied to them and goes too. The memory stays."""
        world, devices = self.world, self.memory.devices
        if world is not None:
            if self.recipe.strategy.device != "cpu":
                with suppress(RuntimeFault):  # ranks that have failed hold nothing any more
                    world.run(lambda rank: devices[rank].close())
            world.close()
        self.world = None
        for compiled in self.programs.values():
            compiled.release()

    def numbers(
        self,
        compiled: Compiled,
        batch: Batch,
        scalars: Mapping[str, Any],
        recorders: Mapping[int, Recorder] | None = None,
    ) -> dict[str, float]:
        """Run a program whose outputs are numbers; every process gets them.

        Args:
            compiled, batch, scalars: program and inputs.
            recorders: of local ranks that take down what runs when.
        """
        world, watchers = self._ready(compiled), recorders or {}

        def work(rank: int) -> dict[str, float]:
            found = compiled.step(rank, batch, scalars, watchers.get(rank))
            return {label: float(number) for label, number in found.items()}

        before = compiled.updates
        try:
            found = world.run(work)
        except BaseException as error:
            if compiled.updates != before:
                self.memory.damaged = (
                    f"a step stopped in the middle of its update ({type(error).__name__}: {error})"
                )
            raise
        one_process = len(world.local) == world.size
        everywhere = one_process or (compiled.everywhere and len(compiled.build.ranks) == world.size)
        numbers: dict[str, float] = {}
        for label, owner in compiled.owners.items():
            local: Any = found.get(owner, found[world.local[0]]).get(label)
            numbers[label] = local if everywhere else world.share(local, owner)
        return numbers

    def verify_replicas(self, step: int) -> None:
        """Compare what several ranks hold alike, where the strategy says so. Collective.

        Args:
            step: number of the step after which it happens.

        Raises:
            RuntimeFault: on every process, when copies differ; until a checkpoint is loaded nothing runs.
        """
        if self.recipe.strategy.verify_replicas is None:
            return
        found = different_replicas(self.memory, self.ranks())
        if found:
            self.memory.damaged = f"after step {step} {found}"
            raise RuntimeFault(
                f"after step {step} {found}; a device or its memory is faulty: take it out of the job, and "
                f"load a checkpoint of before"
            )

    def nonfinite(self, compiled: Compiled) -> Mapping[int, Mapping[str, tuple[int, int]]] | None:
        """What was not finite in the training step that has just run, on all ranks and known to every
        process: rank -> name -> (values that are not finite, values in the block). None where all was finite.
        """
        world, found = self.ranks(), compiled.nonfinite()
        failed = found is not None
        if len(compiled.build.ranks) < world.size > len(world.local):  # some process has no part in the step
            failed = world.share(failed, compiled.build.ranks[0])
        return world.gather(found or {}) if failed else None

    def recorded(
        self,
        compiled: Compiled,
        batch: Batch,
        scalars: Mapping[str, Any],
        recording: Recording,
        number: int,
    ) -> dict[str, float]:
        """As `numbers`, with what ran when on every rank added to a recording, as step `number`."""
        local = set(self.ranks().local) & set(compiled.build.ranks)
        recorders = {rank: Recorder() for rank in sorted(local)}
        found = self.numbers(compiled, batch, scalars, recorders)
        gather = self.ranks().gather
        recording.add(compiled.build.task_graph, number, gather(contents(recorders, gather)))
        return found

    def arrays(self, compiled: Compiled, batch: Batch, scalars: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Run a program whose outputs are arrays, and put their blocks together, on every process."""
        world, graph = self._ready(compiled), compiled.build.lowered

        def work(rank: int) -> dict[str, list[np.ndarray]]:
            found = compiled.step(rank, batch, scalars)
            listed = {label: got if isinstance(got, list) else [got] for label, got in found.items()}
            return {label: [block.copy() for block in blocks] for label, blocks in listed.items()}

        found = world.gather(world.run(work))
        outputs = {}
        for label, value in graph.outputs:
            attr, parts = graph.attrs[value.name], []
            for m in range(compiled.micro_batches):
                part = np.empty(value.shape, found[attr.mesh.members[0]][label][0].dtype)
                for rank in attr.mesh.members:
                    part[attr.spec.slices(value.shape, attr.mesh, rank)] = found[rank][label][m]
                parts.append(part)
            outputs[label] = np.concatenate(parts) if value.shape else np.stack(parts)
        return outputs

    def _ready(self, compiled: Compiled) -> World:
        """The world, with what every local rank runs compiled."""
        self.memory.check_whole()
        world = self.ranks()
        if not compiled.ready:
            devices = self.memory.devices
            world.run(lambda rank: compiled.prepare(rank, devices[rank], self.memory, world.transport(rank)))
            compiled.ready = True
            for rank, worker in sorted(compiled.workers.items()):
                write(f"{compiled.mode}.rank-{rank}.py", worker.source)
        return world
