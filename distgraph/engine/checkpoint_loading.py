"""Loading a checkpoint into an engine: all of it is verified before anything of the engine changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distgraph.engine.executable import Compiled
from distgraph.engine.parameter_store import Reader, Record
from distgraph.errors import RuntimeFault
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.runtime.execute.checkpoint import Checkpoint, SavedTensor
from distgraph.runtime.execute.process_group import World


def verify_files(checkpoint: Checkpoint, world: World) -> None:
    """Compare all files with their checksums, each rank a share of them. Collective.

    Raises:
        RuntimeFault: on every process: names the first file, tensor and bytes that are damaged.
    """
    shares = world.gather(world.run(lambda rank: checkpoint.verify(rank, world.size)))
    wrong = [each for _, share in sorted(shares.items()) for each in share]
    if wrong:
        others = f"; {len(wrong) - 1} more of its parts are damaged" if len(wrong) > 1 else ""
        raise RuntimeFault(f"checkpoint {wrong[0]}{others}; use another checkpoint")


def check_records(
    checkpoint: Checkpoint, records: Mapping[str, Record], states: bool, model: Set[str]
) -> None:
    """Whether a checkpoint has what an engine holds.

    Args:
        checkpoint: to read from.
        records: parameters and states of the engine.
        states: whether those of the optimiser are read, too.
        model: names of the parameters and buffers of the model.

    Raises:
        RuntimeFault: it lacks one, or has one of another shape or dtype.
    """
    for name, record in records.items():
        if states or name in model:
            _check_type(checkpoint, name, record.shape, record.dtype)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The checkpoint that an engine goes on from; what no program has used yet is still in there.

    Attributes:
        checkpoint: to read from.
        states: whether those of the optimiser are read, too.
        model: names of the parameters and buffers of the model.
    """

    checkpoint: Checkpoint
    states: bool
    model: frozenset[str]

    @property
    def reader(self) -> Reader:
        """Blocks of it, for `Memory`."""
        return reader_of(self.checkpoint, self.states, self.model)

    def unread(self, records: Mapping[str, Record]) -> dict[str, SavedTensor]:
        """What an engine with these records has not taken from it yet, as whole tensors of rank 0."""
        mesh, found = ProcessMesh.grid(all=1), {}
        for name, entry in self.checkpoint.contents.tensors.items():
            if name not in records and (self.states or name in self.model):
                attr = DistAttr(mesh, ShardSpec.of([None] * len(entry.shape)))
                found[name] = SavedTensor(entry.kind, tuple(entry.shape), entry.dtype, attr)
        return found

    def after_saving(self, path: str | Path) -> Loaded:
        """The same, when something was saved, perhaps over it."""
        if Path(path).resolve() != self.checkpoint.path.resolve():
            return self
        return Loaded(Checkpoint.open(path), self.states, self.model)


def unread_of(
    loaded: Loaded | None, records: Mapping[str, Record], programs: Iterable[Compiled]
) -> dict[str, SavedTensor]:
    """What is still in the loaded checkpoint only. A training program has taken all that it needs: what it
    left there, such as states of another optimiser, is no part of the training any more."""
    if loaded is None or any(program.mode == "train" for program in programs):
        return {}
    return loaded.unread(records)


def blocks_of(
    loaded: Loaded | None, unread: Mapping[str, SavedTensor], block: Callable[[str, int], np.ndarray]
) -> Callable[[str, int], np.ndarray]:
    """(name, rank) -> what a checkpoint gets of it: from the loaded one, or from memory by `block`."""
    if loaded is None or not unread:
        return block
    return lambda name, rank: loaded.checkpoint.read(name) if name in unread else block(name, rank)


def reader_of(checkpoint: Checkpoint, states: bool, model: Set[str]) -> Reader:
    """Blocks from a checkpoint, for `Memory`; without `states` what is no part of the model starts anew."""

    def read(name: str, shape: tuple[int, ...], dtype: str, where: tuple[slice, ...]) -> np.ndarray | None:
        if not states and name not in model:
            return None
        _check_type(checkpoint, name, shape, dtype)
        return checkpoint.read(name, where)

    return read


def _check_type(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: str) -> None:
    tensor = checkpoint.contents.tensors.get(name)
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
