"""Loading a checkpoint into an engine: the whole checkpoint is verified before the engine changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distgraph.engine.agreement import compare
from distgraph.engine.executable import Compiled
from distgraph.engine.history import History, Means
from distgraph.engine.parameter_store import Reader, Record
from distgraph.errors import RuntimeFault
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.runtime.execute.checkpoint import Checkpoint, SavedTensor
from distgraph.runtime.execute.process_group import World, is_chief
from distgraph.tracing.tracer import user_stack_level

if TYPE_CHECKING:
    from distgraph.engine.engine import Engine

_MOST_NAMED = 4


def verify_files(checkpoint: Checkpoint, world: World) -> None:
    """Compare all files with their checksums, each rank a share of them. Collective.

    Raises:
        RuntimeFault: on every process: names the first file, tensor and bytes that are damaged; or processes
            have different checkpoints.
    """
    index = checkpoint.index
    compare("engine.load()", {"checkpoint": f"step {index['step']} of run {index['run']}"})
    shares = world.gather(world.run(lambda rank: checkpoint.verify(rank, world.size)))
    wrong = [message for _, share in sorted(shares.items()) for message in share]
    if wrong:
        others = f"; {len(wrong) - 1} more of its parts are damaged" if len(wrong) > 1 else ""
        raise RuntimeFault(f"checkpoint {wrong[0]}{others}; use another checkpoint")


def check_records(
    checkpoint: Checkpoint, records: Mapping[str, Record], states: bool, model: Set[str]
) -> None:
    """Check that a checkpoint has the parameters and states of an engine.

    Args:
        checkpoint: to read from.
        records: parameters and states of the engine.
        states: whether the states of the optimiser are read, too.
        model: names of the parameters and buffers of the model.

    Raises:
        RuntimeFault: one is missing, or has another shape or dtype.
    """
    for name, record in records.items():
        if states or _is_of_model(name, records, model):
            _check_type(checkpoint, name, record.shape, record.dtype, records)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The checkpoint that an engine continues from; values that no program has used yet are read from it.

    Attributes:
        checkpoint: to read from.
        states: whether those of the optimiser are read, too.
        model: names of the parameters and buffers of the model; empty for a function.
        records: parameters and states of the programs of the engine so far.
    """

    checkpoint: Checkpoint
    states: bool
    model: frozenset[str]
    records: Mapping[str, Record]

    @property
    def reader(self) -> Reader:
        """Reader of its blocks, for `Memory`."""
        return reader_of(self.checkpoint, self.states, self.model, self.records)

    def unread(self, records: Mapping[str, Record]) -> dict[str, SavedTensor]:
        """Tensors that an engine with these records has not read yet, stored whole on rank 0."""
        mesh, unread = ProcessMesh.grid(all=1), {}
        for name, entry in self.checkpoint.contents.tensors.items():
            if name not in records and (self.states or name in self.model or entry.kind == "param"):
                attr = DistAttr(mesh, ShardSpec.of([None] * len(entry.shape)))
                unread[name] = SavedTensor(entry.kind, tuple(entry.shape), entry.dtype, attr)
        return unread

    def after_saving(self, path: str | Path) -> Loaded:
        """The checkpoint, reopened if another was saved to the same path."""
        if Path(path).resolve() != self.checkpoint.path.resolve():
            return self
        return Loaded(Checkpoint.open(path), self.states, self.model, self.records)

    def warn_unread(self, optimizer: object, frozen: Collection[str]) -> None:
        """Warn of states that no program has read once training has been compiled: they are dropped.

        Args:
            optimizer: of the engine, which goes on without them.
            frozen: names of parameters that are not trained, whose states no optimiser reads.
        """
        tensors = self.checkpoint.contents.tensors
        trained = tensors.keys() - frozen
        unread = [
            name
            for name, entry in tensors.items()
            if entry.kind == "state" and name not in self.records and name not in self.model
            if name.rpartition(".")[0] in trained  # others are no states of the optimiser
        ]
        if not self.states or not unread or not is_chief():
            return
        others = f" and {len(unread) - _MOST_NAMED} more" if len(unread) > _MOST_NAMED else ""
        warnings.warn(
            f"checkpoint {self.checkpoint.path} has {', '.join(unread[:_MOST_NAMED])}{others}, which "
            f"training by {type(optimizer).__name__} does not read; train with the optimiser that wrote "
            "them, or load the checkpoint with states=False to start the optimiser anew",
            UserWarning,
            stacklevel=user_stack_level(),
        )


def unread_of(
    loaded: Loaded | None, records: Mapping[str, Record], programs: Iterable[Compiled]
) -> dict[str, SavedTensor]:
    """Tensors that are still only in the loaded checkpoint, and must be copied when the engine is saved.

    There are none after a training program was compiled, which reads all tensors of the training: others,
    such as states of another optimiser, are dropped.
    """
    if loaded is None or any(program.mode == "train" for program in programs):
        return {}
    return loaded.unread(records)


def blocks_of(
    loaded: Loaded | None, unread: Mapping[str, SavedTensor], block: Callable[[str, int], np.ndarray]
) -> Callable[[str, int], np.ndarray]:
    """(name, rank) -> block to save: from the loaded checkpoint if unread, else from memory by `block`."""
    if loaded is None or not unread:
        return block
    return lambda name, rank: loaded.checkpoint.read(name) if name in unread else block(name, rank)


def restore_training(engine: Engine, index: Mapping[str, Any]) -> None:
    """Set where the training of an engine stands from the index of a checkpoint."""
    engine.step, engine.epoch, engine.position = index["step"], index["epoch"], index["position"]
    engine.seed = engine.memory.seed = index["seed"]
    engine.memory.equal_step = None
    skipped = index.get("skipped", ())  # older checkpoints know of none
    engine.history = History(list(index["losses"]), list(index["epochs"]), list(skipped))
    if engine._nonfinite.scale is not None:
        engine._nonfinite.scale.restore(index.get("loss_scale", ()))
    engine._means, engine._run = Means(*index["means"]), index["run"] or engine._run
    if any(program.mode == "train" for program in engine._session.programs.values()):
        engine._session.warn_unread()


def reader_of(checkpoint: Checkpoint, states: bool, model: Set[str], records: Mapping[str, Record]) -> Reader:
    """Reader of blocks of a checkpoint; without `states` it returns None for values outside the model."""

    def read(name: str, shape: tuple[int, ...], dtype: str, index: tuple[slice, ...]) -> np.ndarray | None:
        if not states and not _is_of_model(name, records, model):
            return None
        _check_type(checkpoint, name, shape, dtype, records)
        return checkpoint.read(name, index)

    return read


def _is_of_model(name: str, records: Mapping[str, Record], model: Set[str]) -> bool:
    """Whether a tensor is no state of the optimiser; of a function only programs know its parameters."""
    return name in model or (name in records and records[name].kind == "param")


def _check_type(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    records: Mapping[str, Record],
) -> None:
    tensors = checkpoint.contents.tensors
    tensor = tensors.get(name)
    if tensor is None and name in records and records[name].kind == "param":
        stored = [each for each, entry in tensors.items() if entry.kind == "param"]
        others = ", ..." if len(stored) > _MOST_NAMED else ""
        raise RuntimeFault(
            f"checkpoint {checkpoint.path} has no parameter {name}, which the program reads; its parameters "
            f"are {', '.join(stored[:_MOST_NAMED])}{others}; load it into the model that wrote it, or "
            "give the parameters these names"
        )
    if tensor is None:
        raise RuntimeFault(
            f"checkpoint {checkpoint.path} has no {name}; load it with states=False to start "
            f"the optimiser anew"
        )
    if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
        raise RuntimeFault(
            f"checkpoint {checkpoint.path}: {name} is {tensor.dtype}{tensor.shape} but the program has "
            f"{dtype}{list(shape)}"
        )
