"""Checkpoints: safetensors files that every rank writes, and one index that makes them count.

    ckpt/index.json                                    what there is: tensors, their shards, the state of
    training ckpt/step-00000120-5f2c.rank-00003.safetensors     the blocks that rank 3 owns, each under its
    tensor's name

Every distinct block is written once, by one of the ranks that hold it. The files of a new checkpoint have new
names and are on disk before the index is replaced, in one atomic rename; the old files go after it. So a
crash, a full disk or a failing rank leaves the previous checkpoint whole. The directory must be one that all
ranks see.

Reading takes any mesh and any number of ranks: each asks for the block it wants and only that is read.
Without distgraph, `safetensors.numpy.load_file` reads a file, and the index says where in its tensor each
block belongs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from distgraph.dtypes import to_numpy
from distgraph.errors import RuntimeFault
from distgraph.runtime.world import World
from distgraph.spec import DistAttr

INDEX: Final = "index.json"
FORMAT: Final = "distgraph checkpoint 1"
Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """One tensor to be saved: what it is and where it lies."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    attr: DistAttr


def owned(tensors: Mapping[str, Placed], rank: int) -> dict[str, Slices]:
    """Blocks that a rank writes: every distinct block has one owner; the owners take turns among its
    replicas."""
    mine: dict[str, Slices] = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        mesh, spec = tensor.attr.mesh, tensor.attr.spec
        if rank not in mesh:
            continue
        bounds = spec.bounds(tensor.shape, mesh, rank)
        holders = [other for other in mesh.members if spec.bounds(tensor.shape, mesh, other) == bounds]
        empty = any(stop == start for start, stop in bounds)
        if holders[number % len(holders)] == rank and not empty:
            mine[name] = tuple(slice(start, stop) for start, stop in bounds)
    return mine


def fingerprint(tensors: Mapping[str, Placed]) -> str:
    """Hash of the names, shapes and dtypes of the parameters: equal for equal models."""
    lines = [f"{n} {t.dtype} {list(t.shape)}" for n, t in sorted(tensors.items()) if t.kind == "param"]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def write_checkpoint(
    directory: str | Path,
    world: World,
    tensors: Mapping[str, Placed],
    block: Callable[[str, int], np.ndarray],
    training: Mapping[str, Any],
) -> None:
    """Write a checkpoint. Collective: every process calls it.

    Args:
        directory: made if need be; a checkpoint that is there is replaced once the new one is complete.
        world: the ranks.
        tensors: name -> what it is and where it lies, for everything to be saved.
        block: (name, local rank) -> its block.
        training: whatever else JSON can hold: step, epoch, seed, ...

    Raises:
        RuntimeFault: on every process, when any rank could not write; the previous checkpoint is whole.
    """
    path = Path(directory)
    tag = world.share(f"step-{int(training.get('step', 0)):08d}-{os.urandom(4).hex()}", 0)

    def work(rank: int) -> _Written:
        return _write_blocks(path / f"{tag}.rank-{rank:05d}.safetensors", owned(tensors, rank), block, rank)

    written = world.gather(world.run(work))
    failures = [f"rank {rank}: {part.error}" for rank, part in sorted(written.items()) if part.error]
    if not failures:
        error = _commit(path, tensors, list(written.values()), training) if world.is_chief else ""
        error = world.share(error, 0)
        failures = [f"rank 0: {error}"] if error else []
    if failures:
        for rank in world.local:
            _remove(path / f"{tag}.rank-{rank:05d}.safetensors")
        raise RuntimeFault(
            f"checkpoint {path} could not be written: {failures[0]}; the previous one, if there was one, "
            f"is whole"
        )


@dataclass(frozen=True, slots=True)
class _Written:
    """What one rank has written, or why it has not."""

    file: str = ""
    shards: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)  # name -> start, shape
    error: str = ""


def _write_blocks(
    path: Path, blocks: Mapping[str, Slices], block: Callable[[str, int], np.ndarray], rank: int
) -> _Written:
    if not blocks:
        return _Written()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.ascontiguousarray(block(name, rank)) for name in blocks}
        save_file(arrays, path, {"format": FORMAT, "rank": str(rank)})
        _flush(path)
    except (OSError, SafetensorError) as error:
        _remove(path)
        return _Written(error=f"{path.name}: {error}")
    shards = {n: ([s.start for s in where], [s.stop - s.start for s in where]) for n, where in blocks.items()}
    return _Written(path.name, shards)


def _commit(
    path: Path, tensors: Mapping[str, Placed], written: Sequence[_Written], training: Mapping[str, Any]
) -> str:
    """Write the index and put it in place; then remove files that it does not name. Returns what went
    wrong."""
    index = {
        "format": FORMAT,
        **training,
        "fingerprint": fingerprint(tensors),
        "tensors": {
            name: {
                "kind": tensor.kind,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "shards": [
                    {"file": part.file, "start": part.shards[name][0], "shape": part.shards[name][1]}
                    for part in written
                    if name in part.shards
                ],
            }
            for name, tensor in sorted(tensors.items())
        },
    }
    draft = path / f"{INDEX}.draft"
    try:
        path.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(index, indent=1))
        _flush(draft)
        draft.replace(path / INDEX)
        _flush(path)
    except OSError as error:
        _remove(draft)
        return f"{draft.name}: {error}"
    files = {part.file for part in written}
    for old in path.glob("step-*.rank-*.safetensors"):
        if old.name not in files:
            _remove(old)
    return ""


def _remove(path: Path) -> None:
    """Delete a file if that can be done; whatever stands in the way is not what the user has to hear of."""
    with contextlib.suppress(OSError):
        path.unlink()


def _flush(path: Path) -> None:
    """Return when a file, or a directory's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint to read from.

    Attributes:
        path: of the directory.
        index: the parsed index.
    """

    path: Path
    index: dict[str, Any]

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Read the index. Raises RuntimeFault where there is none, or it makes no sense."""
        path = Path(directory)
        try:
            index = json.loads((path / INDEX).read_text())
        except FileNotFoundError:
            raise RuntimeFault(
                f"checkpoint {path} has no {INDEX}; give the directory that engine.save wrote"
            ) from None
        except (OSError, ValueError) as error:
            raise RuntimeFault(
                f"checkpoint {path / INDEX} cannot be read: {error}; use another checkpoint"
            ) from None
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            found = index.get("format") if isinstance(index, dict) else type(index).__name__
            raise RuntimeFault(f"checkpoint {path / INDEX}: expected format {FORMAT!r}, found {found!r}")
        return cls(path, index)

    @property
    def tensors(self) -> dict[str, dict[str, Any]]:
        """Name -> kind, shape, dtype, shards."""
        found: dict[str, dict[str, Any]] = self.index["tensors"]
        return found

    def read(self, name: str, where: Slices | None = None) -> np.ndarray:
        """A block of a tensor, the whole by default; reads no more than that.

        Raises:
            RuntimeFault: there is no such tensor, or a file is missing, damaged or does not cover the block.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise RuntimeFault(
                f"checkpoint {self.path} has no tensor {name}; it has {', '.join(self.tensors) or 'none'}"
            )
        where = tuple(slice(0, n) for n in tensor["shape"]) if where is None else where
        out = np.empty([s.stop - s.start for s in where], to_numpy(tensor["dtype"]))
        covered = 0
        for shard in tensor["shards"]:
            common = [
                (max(s.start, begin), min(s.stop, begin + size))
                for s, begin, size in zip(where, shard["start"], shard["shape"], strict=True)
            ]
            if all(a < b for a, b in common):
                target = tuple(
                    slice(a - s.start, b - s.start) for (a, b), s in zip(common, where, strict=True)
                )
                source = tuple(
                    slice(a - begin, b - begin) for (a, b), begin in zip(common, shard["start"], strict=True)
                )
                out[target] = self._shard(shard["file"], name, source)
                covered += out[target].size
        if covered != out.size:
            raise RuntimeFault(
                f"checkpoint {self.path}: shards of {name} hold {covered} of the {out.size} elements of a "
                f"block; it is damaged"
            )
        return out

    def _shard(self, file: str, name: str, where: Slices) -> np.ndarray:
        try:
            with safe_open(self.path / file, "np") as opened:
                found: np.ndarray = opened.get_slice(name)[where] if where else opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise RuntimeFault(
                f"checkpoint {self.path / file} cannot be read: {error}; use another checkpoint"
            ) from None
        return found

    def check(self, expected: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """Compare the parameters with those of a model, name -> (shape, dtype).

        Raises:
            RuntimeFault: names the first parameter that differs, with both types.
        """
        unused = set(self.index.get("unused", ()))
        for name, (shape, dtype) in expected.items():
            tensor = self.tensors.get(name)
            wanted = f"{dtype}{list(shape)}"
            if tensor is None and name not in unused:
                raise self._other(f"parameter {name} is {wanted} in the model but not in the checkpoint")
            if tensor is not None and (tuple(tensor["shape"]), tensor["dtype"]) != (tuple(shape), dtype):
                found = f"{tensor['dtype']}{tensor['shape']}"
                raise self._other(f"parameter {name} is {wanted} in the model but {found} in the checkpoint")
        for name, tensor in self.tensors.items():
            if tensor["kind"] == "param" and name not in expected:
                found = f"{tensor['dtype']}{tensor['shape']}"
                raise self._other(f"parameter {name} is {found} in the checkpoint but not in the model")

    def _other(self, difference: str) -> RuntimeFault:
        return RuntimeFault(
            f"checkpoint {self.path} is of another model: {difference}; load it into the model that wrote it"
        )
