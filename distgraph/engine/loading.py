"""Loading a checkpoint into an engine: all of it is verified before anything of the engine changes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from distgraph.engine.memory import Reader, Record
from distgraph.errors import RuntimeFault
from distgraph.runtime.checkpoint import Checkpoint
from distgraph.runtime.world import World


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
    checkpoint: Checkpoint, records: Mapping[str, Record], states: bool, model: set[str]
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


def reader_of(checkpoint: Checkpoint, states: bool, model: set[str]) -> Reader:
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
