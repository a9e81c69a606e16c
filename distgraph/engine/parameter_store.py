"""Memory of an engine: the blocks of parameters and states of this process, shared by all its programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from distgraph.errors import GraphError, RuntimeFault, first_of
from distgraph.errors.arguments import array_of
from distgraph.ir.dtypes import to_numpy
from distgraph.ir.graph import Graph
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.nn import Parameter
from distgraph.nn.initializers import Init, materialize
from distgraph.nn.parameter import Settings
from distgraph.runtime.execute.device import Device, Host
from distgraph.runtime.execute.process_group import World

Reader = Callable[[str, tuple[int, ...], str, tuple[slice, ...]], np.ndarray | None]
"""(name, global shape, dtype, block) -> the block from a checkpoint, or None where it has no such tensor."""


_HOST = Host(None)


@dataclass(frozen=True, slots=True)
class Record:
    """Description of one parameter or state: kind, shape, dtype, initialisation and layout."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    init: Init
    attr: DistAttr


class Memory:
    """Blocks by rank and name, in the memory of the rank's device.

    Args:
        seed: of the initial values.
        parameters: parameters and buffers of the model by name, once they were traced; some have arrays.

    Attributes:
        devices: rank -> device, for running ranks; blocks of other ranks are created on the host.
        damaged: reason why the blocks are unusable; empty otherwise.
        equal_step: the last training step after which the copies on several ranks were compared and equal;
            None where they have not been since they were created or loaded.
    """

    def __init__(self, seed: int, parameters: Mapping[str, Parameter] | None = None) -> None:
        self.seed = seed
        self.parameters = {} if parameters is None else parameters
        self.records: dict[str, Record] = {}
        self.caches: dict[str, Record] = {}  # keys and values of generation, in no checkpoint
        self.reader: Reader | None = None
        self.devices: dict[int, Device] = {}
        self.damaged = ""
        self.equal_step: int | None = None
        self._blocks: dict[int, dict[str, Any]] = {}
        self._compared: set[str] = set()  # names whose arrays were compared between processes
        self._compiled: dict[str, tuple[Parameter, Settings]] = {}  # by name, as programs were compiled
        self._changes = -1  # `Parameter.changes` when the settings were last compared

    @property
    def layouts(self) -> dict[str, DistAttr]:
        """Name -> layout of every parameter and state."""
        return {name: record.attr for name, record in self.records.items()}

    def adopt(self, graph: Graph) -> None:
        """Add the parameters and states of a completed program.

        Raises:
            GraphError: one of them has another shape or dtype than in an earlier program.
        """
        for op in graph.sources("param", "state"):
            name, value, attr = str(op.attrs["name"]), op.result, graph.attrs[op.name]
            records = self.caches if "transient" in op.attrs else self.records
            existing = records.get(name)
            if name in self.parameters and name not in self._compiled:
                self._compiled[name] = self.parameters[name], self.parameters[name].settings
            if existing is None:
                init = tuple(op.attrs.get("init", ("zeros",)))
                attr = DistAttr(attr.mesh, ShardSpec(attr.spec.dims), attr.origin)
                records[name] = Record(op.kind, value.shape, value.dtype, init, attr)
            elif (existing.shape, existing.dtype) != (value.shape, value.dtype):
                raise GraphError(
                    f"{op.kind} {name} is {value.type} but was {existing.dtype}{list(existing.shape)} in an "
                    f"earlier program; "
                    "shapes of parameters must not depend on the batch"
                )

    def check_unchanged(self, trained: bool) -> None:
        """Raises GraphError when a parameter has other settings than when a program was compiled for it.

        A program keeps the settings that it was compiled with, one for another batch size takes new ones.

        Args:
            trained: False for a program that is compiled and does not train: it does not depend on whether
                a parameter is trainable, which may have changed for another engine of the same model.
        """
        changes = Parameter.changes
        if changes != self._changes:
            for name, (parameter, before) in self._compiled.items():
                now = parameter.settings
                if not (now if trained else now._replace(trainable=before.trainable)).same(before):
                    raise GraphError(_changed(name, before, now))
            self._changes = changes if trained else self._changes

    def take_value(self, name: str) -> None:
        """From now on, compare with the array that the parameter of a name starts from at present."""
        if name in self._compiled:
            parameter, before = self._compiled[name]
            self._compiled[name] = parameter, before._replace(init=parameter.init, value=parameter.value)

    def given(self, graph: Graph) -> dict[str, np.ndarray]:
        """Name -> array of every tensor of a program that starts from one, and of no program before."""
        sources = graph.sources("param", "state")
        names = [str(op.attrs["name"]) for op in sources if "given" in op.attrs.get("init", ())]
        fresh = [name for name in names if name not in self._compared and self.reader is None]
        self._compared.update(names)
        values = {name: self.parameters[name].value for name in fresh if name in self.parameters}
        return {name: value for name, value in values.items() if value is not None}

    def drop_caches(self) -> None:
        """Free the keys and values of generation."""
        for blocks in self._blocks.values():
            for name in self.caches:
                blocks.pop(name, None)
        self.caches.clear()

    def check_present(self) -> None:
        """Raises RuntimeFault when no program has been compiled, or the blocks are damaged."""
        if not self.records:
            lacks = "has no parameters yet"
            if self.reader is not None:
                lacks = "has loaded a checkpoint but no program is compiled yet that holds its parameters"
            raise RuntimeFault(f"engine {lacks}; call prepare(batch), fit or predict first")
        self.check_whole()

    def check_whole(self) -> None:
        """Raises RuntimeFault when the blocks are damaged."""
        if self.damaged:
            raise RuntimeFault(
                f"parameters and states are damaged: {self.damaged}; load a checkpoint to go on"
            )

    def move(self, rank: int, device: Device) -> None:
        """Give a rank its device, and move its present blocks there. Called on the thread of the rank."""
        before, blocks = self._device(rank), self._blocks.get(rank, {})
        if blocks and type(before) is not type(device):
            with before.working():
                on_host = {name: np.array(before.to_host(block)) for name, block in blocks.items()}
            with device.working():
                blocks.update({name: device.asarray(block) for name, block in on_host.items()})
        self.devices[rank] = device

    def local(self, graph: Graph, rank: int) -> dict[str, Any]:
        """Value name -> block of this rank on its device, for a program; initialised or read at first use."""
        blocks = self._blocks.setdefault(rank, {})
        values = {}
        for op in graph.sources("param", "state"):
            name = str(op.attrs["name"])
            record = self.records.get(name) or self.caches[name]
            if rank in record.attr.mesh:
                if name not in blocks:
                    blocks[name] = self._make(name, record, rank)
                values[op.name] = blocks[name]
        return values

    def block(self, name: str, rank: int) -> np.ndarray:
        """Block of a rank that stores one, as a host array; initialised or read at first use."""
        blocks, device = self._blocks.setdefault(rank, {}), self._device(rank)
        with device.working():
            if name not in blocks:
                blocks[name] = self._make(name, self.records[name], rank)
            return device.to_host(blocks[name])

    def overwrite(self, name: str, rank: int, values: np.ndarray) -> None:
        """Replace the numbers of the block that a rank stores."""
        device, blocks, record = self._device(rank), self._blocks.setdefault(rank, {}), self.records[name]
        with device.working():
            if name not in blocks:
                blocks[name] = self._make(name, record, rank)
            blocks[name][...] = device.asarray(values.astype(to_numpy(record.dtype)))

    def reload(self, rank: int, reader: Reader) -> None:
        """Overwrite the present blocks of a rank with those of a checkpoint."""
        device = self._device(rank)
        for name, block in self._blocks.get(rank, {}).items():
            if name in self.caches:
                continue
            record = self.records[name]
            stored = self._stored(reader, name, record, rank)
            with device.working():
                block[...] = self._initial(name, record, rank) if stored is None else device.asarray(stored)

    def _device(self, rank: int) -> Device:
        return self.devices.get(rank, _HOST)

    def _make(self, name: str, record: Record, rank: int) -> Any:
        if self.reader is not None and name not in self.caches:
            stored = self._stored(self.reader, name, record, rank)
            if stored is not None:
                return self._device(rank).asarray(stored)
        return self._initial(name, record, rank)

    def _stored(self, reader: Reader, name: str, record: Record, rank: int) -> np.ndarray | None:
        """Block of a checkpoint, or None; a missing master copy is read from its parameter."""
        index = record.attr.spec.slices(record.shape, record.attr.mesh, rank)
        values = reader(name, record.shape, record.dtype, index)
        if values is None and record.init[0] == "like":
            values = reader(record.init[1], record.shape, self.records[record.init[1]].dtype, index)
        return None if values is None else values.astype(to_numpy(record.dtype), copy=False)

    def _initial(self, name: str, record: Record, rank: int) -> Any:
        source = self.parameters.get(record.init[1] if record.init[0] == "like" else name)
        if record.init[-1] == "given" and source is not None and source.value is not None:
            index = record.attr.spec.slices(record.shape, record.attr.mesh, rank)
            block = np.array(source.value[index], dtype=to_numpy(record.dtype))
            return self._device(rank).asarray(block)
        bounds = record.attr.spec.bounds(record.shape, record.attr.mesh, rank)
        starts, local = tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)
        xp = self._device(rank).xp
        return materialize(record.init, name, self.seed, record.shape, starts, local, record.dtype, xp)


def _changed(name: str, before: Settings, now: Settings) -> str:
    """The error for a parameter whose settings have changed."""
    when = "when this engine compiled a program with it"
    anew = "save a checkpoint, make a new Engine of the changed model, and load the checkpoint"
    if now.trainable != before.trainable:
        return (
            f"parameter {name} has trainable={now.trainable} but had trainable={before.trainable} {when}; "
            f"set it back, or {anew}"
        )
    if now.annotation != before.annotation:
        return (
            f"parameter {name} is annotated {now.annotation or 'no layout'} but was annotated "
            f"{before.annotation or 'no layout'} {when}; annotate before the first call, or {anew}"
        )
    return (
        f"parameter {name} starts from another {'init' if now.value is before.value else 'array'} than "
        f"{when}; engine.assign({{{name!r}: array}}) changes the numbers that an engine has"
    )


def gather_tensors(world: World, memory: Memory, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Whole arrays of parameters and states, on every process; those that no program uses are left out.

    Raises:
        RuntimeFault: no program has been compiled yet.
    """
    memory.check_present()
    records = {name: memory.records[name] for name in names if name in memory.records}
    blocks = world.gather(
        {
            rank: {name: memory.block(name, rank) for name, r in records.items() if rank in r.attr.mesh}
            for rank in world.local
        }
    )
    arrays = {}
    for name, record in records.items():
        arrays[name] = np.empty(record.shape, to_numpy(record.dtype))
        for rank in record.attr.mesh.members:
            index = record.attr.spec.slices(record.shape, record.attr.mesh, rank)
            arrays[name][index] = blocks[rank][name]
    return arrays


def assign_tensors(world: World, memory: Memory, names: Iterable[str], arrays: Mapping[str, Any]) -> None:
    """Set parameters and buffers from whole arrays; where one does not fit, none is set.

    Raises:
        RuntimeFault: no program has been compiled yet.
        GraphError: there is no tensor of a name, or it has another shape or kind of numbers.
    """
    memory.check_present()
    stored = [name for name in names if name in memory.records]
    checked: dict[str, np.ndarray] = {}
    for name, given in arrays.items():
        if name not in stored:
            raise GraphError(
                f"engine has no parameter or buffer {name!r} to assign; it has {first_of(stored, 5)}"
            )
        array, record = array_of(name, given), memory.records[name]
        if array.shape != record.shape:
            raise GraphError(f"{name} has shape {record.shape} but is given an array of {array.shape}")
        if not np.can_cast(array.dtype, to_numpy(record.dtype), "same_kind"):
            raise GraphError(
                f"{name} is {record.dtype} but is given an array of {array.dtype}; convert it with .astype"
            )
        checked[name] = array
    world.run(lambda rank: _assign(memory, rank, checked))
    for name in checked:
        memory.take_value(name)


def _assign(memory: Memory, rank: int, arrays: Mapping[str, np.ndarray]) -> None:
    for name, record in memory.records.items():
        # a master copy of the optimiser starts from the numbers of its parameter, and follows it here too
        array = arrays.get(record.init[1] if record.init[0] == "like" else name)
        if array is not None and rank in record.attr.mesh:
            index = record.attr.spec.slices(record.shape, record.attr.mesh, rank)
            memory.overwrite(name, rank, array[index])
