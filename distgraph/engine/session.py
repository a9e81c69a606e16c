"""Session: the compiled programs of an engine, and the ranks that run them."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from distgraph.engine.agreement import agree_on_program, different_batches, run_together
from distgraph.engine.checkpoints.loading import Loaded
from distgraph.engine.compile.compile import compile_program
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.derived_programs import reference_of
from distgraph.engine.compile.dump import write
from distgraph.engine.compile.fingerprint import fingerprint
from distgraph.engine.compile.plan_apply import check_batch, layouts_of, with_plan_settings
from distgraph.engine.compile.program_warnings import warn_other_blas, warn_redundant_ranks
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.engine.data import Batch, Field
from distgraph.engine.executable import Compiled
from distgraph.engine.parameter_store import Memory
from distgraph.engine.replicas import CAUSES, different_replicas
from distgraph.errors import ResourceError, RuntimeFault
from distgraph.ir.graph import Graph
from distgraph.ir.sharding_spec import DistAttr
from distgraph.nn import Module
from distgraph.nn.module_settings import TracedSettings
from distgraph.plan.device_types import device_types
from distgraph.plan.plan import Plan
from distgraph.resources import Cluster
from distgraph.runtime.execute.device import missing_device, take_device
from distgraph.runtime.execute.process_group import World, make_world
from distgraph.runtime.execute.recorder import Recorder, StepRecords, contents

Key = tuple[str, int, tuple[tuple[str, Field], ...], int]
"""Mode, samples of a batch, fields of a sample, positions of a sequence in the mode generate."""


@dataclass(slots=True)
class Session:
    """Compiled programs by mode and shape; all of them use the same memory.

    Attributes:
        training_spec: model, loss, optimiser, strategy.
        cluster: gives the cost of collectives; None for the number of bytes sent.
        memory: blocks of parameters and states.
        plan: plan of the training program, given or searched.
        programs: (mode, batch size, fields) -> compiled program.
        world: the ranks, once a program has run.
        devices: type of the device of every rank of the world.
        loaded: the checkpoint whose states a training program has yet to read; None where there is none.
    """

    training_spec: TrainingSpec
    cluster: Cluster | None
    memory: Memory
    plan: Plan | None = None
    programs: dict[Key, Compiled] = field(default_factory=dict)
    world: World | None = None
    devices: tuple[str, ...] = ()
    loaded: Loaded | None = None
    _placed: int = 0  # programs whose ranks have devices
    _reference: Graph | None = None  # the planned training program, completed
    _layouts: dict[str, DistAttr] = field(default_factory=dict)  # of parameters and states, by the plan
    _traced: dict[str, tuple[CompileRequest, TracedSettings]] = field(default_factory=dict)  # by mode

    def __post_init__(self) -> None:
        if self.plan is not None:
            self.training_spec = with_plan_settings(self.training_spec, self.plan)

    def compile_request(self, mode: str, batch: Batch) -> CompileRequest:
        """The request to compile a program for batches like this one."""
        layouts = self.memory.layouts
        if self.plan is not None:
            if not self._layouts:
                self._layouts = layouts_of(self.plan)
            layouts = self._layouts | layouts
        return CompileRequest(self.training_spec, mode, len(batch), batch.fields(), layouts, self.plan)

    def program(self, mode: str, batch: Batch, sequence: int = 0) -> Compiled:
        """The program for batches like this one, compiled at first use.

        Args:
            mode: train, evaluate, predict or generate.
            batch: an example; in the mode generate, the tokens of a step.
            sequence: positions of a whole sequence, in the mode generate.

        Raises:
            RuntimeFault: the batch is empty.
            GraphError: a parameter, or a module of the traced model, has other settings than when an earlier
                program was compiled.
            GraphError, ShardingError, ResourceError: as `compile_program`; there is a plan for training
                batches of another size; a plan is to be searched but there is no cluster.
            InfeasibleError: no plan fits the cluster.
        """
        if len(batch) == 0:
            raise RuntimeFault("batch has 0 samples; there is nothing to do")
        fields = batch.fields()
        key = (mode, len(batch), tuple(fields.items()), sequence)
        self.memory.check_unchanged(trained=mode == "train" or key not in self.programs)
        if mode in self._traced:
            traced, settings = self._traced[mode]
            settings.check(lambda: fingerprint(traced.trace()))
        if key not in self.programs:
            if mode == "generate":
                self._keep_caches(len(batch), sequence)
            request = replace(self.compile_request(mode, batch), sequence=sequence)
            request = self._with_plan(request)
            build, mapping = compile_program(request, self.cluster, self._reference_of(request))
            self._traced.setdefault(mode, (request, TracedSettings(self.training_spec.modules())))
            self.memory.adopt(build.completed)
            if request.planned:
                self._reference = build.completed
            names = {name: field for field, name in self.training_spec.names(tuple(fields), mode).items()}
            self.programs[key] = Compiled(request, build, names, mapping)
        return self.programs[key]

    def first_program(self, purpose: str) -> Compiled:
        """A program, that of training before others. Raises RuntimeFault when nothing is compiled."""
        for mode in ("train", "evaluate", "predict"):
            for compiled in self.programs.values():
                if compiled.mode == mode:
                    return compiled
        raise RuntimeFault(f"engine has no {purpose} yet; call prepare(batch) or fit first")

    def take_plan(self, plan: Plan) -> None:
        """Train by a plan, before anything is compiled."""
        assert not self.programs, "a program has the layouts of another plan"
        self.plan, self.training_spec = plan, with_plan_settings(self.training_spec, plan)
        self._layouts = {}

    def expected(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of the parameters and buffers of model, loss and metrics, or of the programs of a
        function."""
        if isinstance(self.training_spec.model, Module):
            return {name: (p.shape, p.dtype) for name, p in self.training_spec.held_tensors().items()}
        return {name: (r.shape, r.dtype) for name, r in self.memory.records.items() if r.kind == "param"}

    def _keep_caches(self, size: int, sequence: int) -> None:
        """Drop generation for batches or sequences of other lengths, whose caches take memory."""
        for key in list(self.programs):
            if key[0] == "generate" and (key[1], key[3]) != (size, sequence):
                self.programs.pop(key).release()
                self.memory.drop_caches()

    def _with_plan(self, unplanned: CompileRequest) -> CompileRequest:
        """The request with the plan that the mode of the strategy requires; searched at first use."""
        request = unplanned
        if request.training_spec.strategy.searches:  # most programs search nothing
            from distgraph.engine.commands.plan_search import with_searched_plan  # noqa: PLC0415

            request = with_searched_plan(request, self.cluster)
        self.plan, self.training_spec = request.plan, request.training_spec
        whole = self._reference is not None and self.plan is not None and unplanned.size < self.plan.batch
        if request.mode == "train" and not whole and request.plan is not None:
            check_batch(request.plan, request.size)
        return request

    def _reference_of(self, request: CompileRequest) -> Graph | None:
        """The planned training program, whose layouts other programs follow; None without a plan."""
        if request.plan is not None and not request.planned and self._reference is None:
            self._reference = reference_of(request, request.plan)
        return self._reference

    def warn_unread(self) -> None:
        """Warn once of states of the loaded checkpoint that training does not read."""
        loaded, self.loaded = self.loaded, None
        if loaded is not None:
            spec = self.training_spec
            frozen = {name for name, parameter in spec.parameters.items() if not parameter.trainable}
            loaded.warn_unread(spec.optimizer, frozen)

    def ranks(self) -> World:
        """The world, with enough ranks for every program so far; a new one after a failure.

        Raises:
            ResourceError: the MPI job has fewer; meshes, plan and strategy contradict one another about
                devices; a rank has no device of its type.
        """
        meshes = dict.fromkeys(mesh for c in self.programs.values() for mesh in c.build.lowered.meshes)
        needed = max((max(mesh.members) + 1 for mesh in meshes), default=1)
        world = self.world
        stale = world is None or world.size < needed or world.ended
        if not stale and world is not None and self._placed != len(self.programs):
            stale = self._device_types(world.size) != self.devices
        if stale or world is None:
            self.close()
            world = make_world(needed, " and ".join(map(str, meshes)))
            self._take_devices(world)
        self._placed = len(self.programs)
        return world

    def _device_types(self, size: int) -> tuple[str, ...]:
        """Type of the device of every rank."""
        needed: dict[int, str] = {}
        ranks = {rank for compiled in self.programs.values() for rank in compiled.build.ranks}
        for compiled in self.programs.values():
            for rank, kind in compiled.build.device_types.items():
                if needed.setdefault(rank, kind) != kind:
                    raise ResourceError(
                        f"rank {rank} needs a {needed[rank]} device in one program of the engine and a "
                        f"{kind} device in another; give its meshes one device_type"
                    )
        placement = () if self.plan is None else self.plan.placement
        strategy = self.training_spec.strategy
        types = device_types(size, ranks, needed, strategy.device, placement)
        if strategy.cuda_graphs and "gpu" not in types:
            raise ResourceError(
                f"Strategy(cuda_graphs=True) but no rank has a GPU, ranks run on {', '.join({*types})}; use "
                'device="gpu", or leave cuda_graphs out'
            )
        return types

    def _take_devices(self, world: World) -> None:
        """Give every rank of a new world its device. Collective.

        Raises:
            ResourceError: on every process, when some rank has no device of its type.
        """
        try:
            types, here = self._device_types(world.size), platform.node()
            missing = world.gather({rank: (here, missing_device(types[rank])) for rank in world.local})
            for rank, (host, reason) in sorted(missing.items()):
                if reason:
                    raise ResourceError(f"rank {rank} on {host} is to run on a {types[rank]}: {reason}")

            def take(rank: int) -> None:
                self.memory.move(rank, take_device(types, rank, world.transport(rank)))

            world.run(take)
        except BaseException:
            world.close()
            raise
        self.world, self.devices = world, types

    def is_mixed(self, compiled: Compiled) -> bool:
        """Whether the ranks of a program have devices of several types."""
        return len({self.devices[rank] for rank in compiled.build.ranks}) > 1

    def close(self) -> None:
        """End the threads of the ranks and drop their compiled programs. The memory of the engine stays."""
        world, devices = self.world, self.memory.devices
        if world is not None:
            if set(self.devices) != {"cpu"}:
                with suppress(RuntimeFault):  # failed ranks have released their devices
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
    ) -> dict[str, Any]:
        """Run a program whose outputs are numbers, or arrays; every process gets them.

        Args:
            compiled, batch, scalars: program and inputs.
            recorders: local rank -> recorder of its tasks, for a recorded step.
        """
        world, watchers = self._ready(compiled, batch, scalars), recorders or {}
        arrays = [label for label, value in compiled.build.lowered.outputs if value.shape]

        def work(rank: int) -> tuple[dict[str, float], dict[str, list[np.ndarray]]]:
            outputs = dict(compiled.step(rank, batch, scalars, watchers.get(rank)))
            blocks = _copied({label: outputs.pop(label) for label in arrays if label in outputs})
            return {label: float(number) for label, number in outputs.items()}, blocks

        before = compiled.updates
        try:
            outputs = world.run(work)
        except BaseException as error:
            if compiled.updates != before:
                self.memory.damaged = (
                    f"a step stopped in the middle of its update ({type(error).__name__}: {error})"
                )
            raise
        one_process = len(world.local) == world.size
        everywhere = one_process or (
            compiled.everywhere
            and len(compiled.build.ranks) == world.size
            and not self.is_mixed(compiled)  # kinds of devices round differently
        )
        numbers: dict[str, Any] = {}
        for label, owner in compiled.owners.items():
            if label not in arrays:
                local: Any = outputs.get(owner, outputs[world.local[0]])[0].get(label)
                numbers[label] = local if everywhere else world.share(local, owner)
        if arrays:
            blocks = world.gather({rank: blocks for rank, (_, blocks) in outputs.items()})
            numbers.update(_assembled(compiled, blocks, arrays))
        return numbers

    def verify_replicas(
        self, step: int, compiled: Compiled | None = None, batch: Batch | None = None
    ) -> None:
        """Compare the replicas of parameters and states, if the strategy requires it. Collective.

        Args:
            step: that ended.
            compiled, batch: its program and what that read, which are compared first, as a possible cause.

        Raises:
            RuntimeFault: on every process, when copies differ; until a checkpoint is loaded nothing runs.
        """
        if self.training_spec.strategy.verify_replicas is None:
            return
        world = self.ranks()
        if compiled is not None and batch is not None:
            difference = different_batches(compiled, batch, world)
            if difference:
                self.memory.damaged = f"step {step} read a batch that differs between ranks: {difference}"
                raise RuntimeFault(self.memory.damaged)
        difference, equal = different_replicas(self.memory, world, self.devices), self.memory.equal_step
        if difference:
            before = f"all were equal after step {equal}"
            if equal is None:
                before = "nothing was compared since they were created or loaded"
            self.memory.damaged = f"after step {step} {difference}; {before}"
            raise RuntimeFault(f"{self.memory.damaged}; {CAUSES}")
        self.memory.equal_step = step

    def nonfinite(self, compiled: Compiled) -> Mapping[int, Mapping[str, tuple[int, int]]] | None:
        """Values of the last training step that were not finite, of all ranks, on every process.

        They are rank -> name -> (values that are not finite, values in the block). None where there are none.
        """
        world, local = self.ranks(), compiled.nonfinite()
        failed = local is not None
        if len(compiled.build.ranks) < world.size > len(world.local):  # some process has no part in the step
            failed = world.share(failed, compiled.build.ranks[0])
        return world.gather(local or {}) if failed else None

    def recorded(
        self,
        compiled: Compiled,
        batch: Batch,
        scalars: Mapping[str, Any],
        recordings: Sequence[StepRecords],
        number: int,
    ) -> dict[str, Any]:
        """As `numbers`, with the times of all tasks on all ranks added to recordings, as step `number`."""
        local = set(self.ranks().local) & set(compiled.build.ranks)
        recorders = {rank: Recorder() for rank in sorted(local)}
        numbers = self.numbers(compiled, batch, scalars, recorders)
        gather = self.ranks().gather
        ranks = gather(contents(recorders, gather))
        for recording in recordings:
            recording.add(compiled.build.task_graph, number, ranks)
        return numbers

    def arrays(self, compiled: Compiled, batch: Batch, scalars: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Run a program whose outputs are arrays, and assemble them from their blocks, on every process."""
        world = self._ready(compiled, batch, scalars)
        blocks = world.gather(world.run(lambda rank: _copied(compiled.step(rank, batch, scalars))))
        return _assembled(compiled, blocks, [label for label, _ in compiled.build.lowered.outputs])

    def _ready(self, compiled: Compiled, batch: Batch, scalars: Mapping[str, Any]) -> World:
        """The world, after compiling the program for every local rank.

        Raises:
            RuntimeFault: on every process, where processes give the first batch of the program other values.
        """
        self.memory.check_whole()
        world = self.ranks()
        if not compiled.ready:
            devices, mixed = self.memory.devices, self.is_mixed(compiled)
            given = self.memory.given(compiled.build.completed)
            agree_on_program(compiled, self.memory.seed, scalars, given)
            if compiled.mode == "train":
                warn_redundant_ranks(compiled.build, world, planned=self.plan is not None)
                warn_other_blas(self.cluster, world)
                self.warn_unread()
            programs = run_together(world, compiled.partition)

            def prepare(rank: int) -> None:
                control, program = world.transport(rank), programs[rank]
                compiled.prepare(rank, program, devices[rank], self.memory, control, mixed=mixed)

            run_together(world, prepare)
            if difference := different_batches(compiled, batch, world):
                raise RuntimeFault(f"the first run of the program to {compiled.mode}: {difference}")
            compiled.ready = True
            for rank, worker in sorted(compiled.workers.items()):
                write(f"{compiled.mode}.rank-{rank}.py", worker.source)
        return world


def _copied(outputs: Mapping[str, Any]) -> dict[str, list[np.ndarray]]:
    """Label -> copies of the blocks of an output: of every micro-batch, or one for the step."""
    lists = {label: got if isinstance(got, list) else [got] for label, got in outputs.items()}
    return {label: [np.array(block) for block in blocks] for label, blocks in lists.items()}


def _assembled(
    compiled: Compiled, blocks: Mapping[int, Mapping[str, list[np.ndarray]]], labels: Sequence[str]
) -> dict[str, np.ndarray]:
    """Label -> whole array of an output; those of micro-batches follow each other along the first dim."""
    graph = compiled.build.lowered
    outputs = {}
    for label, value in graph.outputs:
        if label not in labels:
            continue
        attr = graph.attrs[value.name]
        first, *others = attr.mesh.members
        parts = blocks[first][label]
        if others:
            parts = [np.empty(value.shape, block.dtype) for block in parts]
            for rank in attr.mesh.members:
                where = attr.spec.slices(value.shape, attr.mesh, rank)
                for part, block in zip(parts, blocks[rank][label], strict=True):
                    part[where] = block
        join = np.concatenate if value.shape else np.stack
        outputs[label] = parts[0] if len(parts) == 1 and value.shape else join(parts)
    return outputs
