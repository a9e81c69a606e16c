"""Writing a checkpoint: every rank writes its blocks, then rank 0 writes the index.

Every distinct block is written once, by one of the ranks that hold it. The files of a new checkpoint have new
names and are on disk before the index is replaced by an atomic rename; the old files are deleted when that is
on disk. So after a crash, a full disk or a failing rank the previous checkpoint is complete. All ranks must
have access to the directory.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

import distgraph
from distgraph.errors import NonFiniteError, RuntimeFault
from distgraph.ir.sharding_spec import DistAttr
from distgraph.runtime.execute.checkpoint import files
from distgraph.runtime.execute.checkpoint.files import SHARD
from distgraph.runtime.execute.checkpoint.folder import check_folder
from distgraph.runtime.execute.checkpoint.index import (
    DRAFT,
    FORMAT,
    INDEX,
    check_index,
    fingerprint,
    is_draft,
    plain,
    to_text,
)
from distgraph.runtime.execute.checkpoint.lock import LOCK, hold, release, writing
from distgraph.runtime.execute.checkpoint.shards import BlockFile, Fault, RefusedError, write_blocks
from distgraph.runtime.execute.process_group import World
from distgraph.serialization.documents import shown_path

Slices = tuple[slice, ...]
Block = Callable[[str, int], np.ndarray]
"""(name, local rank) -> block of the tensor."""
_RESERVED: Final = "__metadata__"
DONE: Final = ""
"""Error of a `commit` without one."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor to be saved: its kind, type and layout."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    attr: DistAttr


def owned(tensors: Mapping[str, SavedTensor], rank: int) -> dict[str, Slices]:
    """Name -> block that a rank writes. Every distinct block is owned by one of its holders, in turn."""
    blocks: dict[str, Slices] = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        mesh, spec = tensor.attr.mesh, tensor.attr.spec
        if rank not in mesh:
            continue
        bounds = spec.bounds(tensor.shape, mesh, rank)
        holders = [other for other in mesh.members if spec.bounds(tensor.shape, mesh, other) == bounds]
        empty = any(stop == start for start, stop in bounds)
        if holders[number % len(holders)] == rank and not empty:
            blocks[name] = tuple(slice(start, stop) for start, stop in bounds)
    return blocks


def write_checkpoint(
    directory: str | Path,
    world: World,
    tensors: Mapping[str, SavedTensor],
    block: Block,
    training: Mapping[str, Any],
    fault: Fault | None = None,
) -> None:
    """Write a checkpoint. Collective: every process calls it.

    Args:
        directory: made if it does not exist; a checkpoint in it is replaced when the new one is complete.
        world: the ranks.
        tensors: name -> type and layout, for all tensors to be saved.
        block: (name, local rank) -> block of the tensor.
        training: state of training: step, epoch, seed, ...; see `index_schema.Index`.
        fault: checks the values when they are written, on the rank that writes them; a text refuses them.

    Raises:
        NonFiniteError: on every process: `fault` refuses values of any rank; the previous checkpoint is
            complete.
        RuntimeFault: on every process: the directory cannot be written, another job writes it, or any rank
            could not write; the previous checkpoint is complete.
    """
    check_names(tensors)
    with contextlib.ExitStack() as stack:
        path = on_rank_0(world, lambda: prepare(directory, stack))
        _write(path, world, tensors, block, training, fault)


def check_names(tensors: Mapping[str, SavedTensor]) -> None:
    """Raises RuntimeFault where a tensor has a name that safetensors files use."""
    if _RESERVED in tensors:
        raise RuntimeFault(f"checkpoint cannot hold a tensor named {_RESERVED}; give it another name")


def reserve(directory: str | Path, world: World, lock: bool = True) -> None:
    """Check now whether a checkpoint can be written later. Collective.

    Args:
        directory: directory of the checkpoint; made and locked if `lock`.
        world: the ranks.
        lock: False where this job may never write the directory.

    Raises:
        RuntimeFault: on every process: it cannot be written, or another job writes it.
    """

    def work() -> Path:
        return prepare(directory) if lock else check_folder(directory)

    on_rank_0(world, work)


def prepare(directory: str | Path, stack: contextlib.ExitStack | None = None) -> Path:
    """Make and lock a directory, for this process or, with a stack, for the present save."""
    path = check_folder(directory)
    if stack is not None and not path.is_dir():
        stack.callback(_remove_unused, path)
    try:
        files.make_folder(path)
    except OSError as error:
        folder, reason = error.filename or path, error.strerror or str(error)
        raise RuntimeFault(
            f"checkpoint {shown_path(path)} cannot be written: the folder {shown_path(folder)} cannot "
            f"be made: {reason}; choose another directory"
        ) from None
    if stack is None:
        hold(path)
    else:
        stack.enter_context(writing(path))
    return path


def _remove_unused(path: Path) -> None:
    """Delete a folder that holds nothing but its lock."""
    if path.is_dir() and [entry.name for entry in path.iterdir()] == [LOCK]:
        release(path)
        files.remove(path / LOCK)
        files.remove_folder(path)


def _write(
    path: Path,
    world: World,
    tensors: Mapping[str, SavedTensor],
    block: Block,
    training: Mapping[str, Any],
    fault: Fault | None,
) -> None:
    """`write_checkpoint` into a directory that exists and is locked."""
    tag = shared_tag(world, training)

    def work(rank: int) -> WrittenBlocks:
        return write_rank(path, tag, tensors, block, rank, fault)

    written: dict[int, WrittenBlocks] = world.gather(world.run(work))
    check_written(path, tag, world, written)
    result = None
    if world.is_chief:
        result = commit(path, tensors, written, training)
        if result == (DONE, True):
            delete_old(path, written)
    conclude(path, tag, world, world.share(result, 0))


def shared_tag(world: World, training: Mapping[str, Any]) -> str:
    """Begin of the names of the files of one save, with its step. Collective."""
    tag: str = world.share(f"step-{int(training.get('step', 0)):08d}-{secrets.token_hex(8)}", 0)
    return tag


def check_written(path: Path, tag: str, world: World, written: Mapping[int, WrittenBlocks]) -> None:
    """Remove the files of this process if a rank could not write its blocks.

    Args:
        path: folder of the checkpoint.
        tag: of the save.
        world: the ranks.
        written: result of every rank.

    Raises:
        NonFiniteError, RuntimeFault: as `write_checkpoint`.
    """
    refused = [f"{part.refused} on rank {rank}" for rank, part in sorted(written.items()) if part.refused]
    failures = [f"rank {rank}: {part.error}" for rank, part in sorted(written.items()) if part.error]
    if refused or failures:
        for rank in world.local:
            files.remove(path / _file(tag, rank))
    if refused:
        raise refusal(path, refused[0])
    if failures:
        raise _failed(path, failures[0])


def refusal(path: Path, why: str) -> NonFiniteError:
    """The error of a checkpoint whose values must not be saved."""
    return NonFiniteError(
        f"checkpoint {path} is not written: {why}; what is there stays as it is; load it, and lower lr or "
        f"look for nan in the data"
    )


def conclude(path: Path, tag: str, world: World, result: tuple[str, bool]) -> None:
    """Raise the error of `commit`, which every process knows, if there is one.

    Raises:
        RuntimeFault: as `write_checkpoint`.
    """
    error, in_place = result
    if error and not in_place:
        for rank in world.local:
            files.remove(path / _file(tag, rank))
        raise _failed(path, f"rank 0: {error}")
    if error:
        raise RuntimeFault(
            f"checkpoint {path} is in place but the disk does not confirm it: {error}; save once more"
        )


def _failed(path: Path, why: str) -> RuntimeFault:
    return RuntimeFault(
        f"checkpoint {path} could not be written: {why}; the previous one, if there was one, is whole"
    )


def on_rank_0(world: World, work: Callable[[], Path]) -> Path:
    """Call a function on rank 0. Collective; return its result, or raise its error, on every process."""
    path, error = Path(), ""
    if world.is_chief:
        try:
            path = work()
        except RuntimeFault as reason:
            error = str(reason)
    shared: tuple[Path, str] = world.share((path, error), 0)
    if shared[1]:
        raise RuntimeFault(shared[1])
    return shared[0]


def _file(tag: str, rank: int) -> str:
    return f"{tag}.rank-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class WrittenBlocks:
    """The blocks that one rank has written, or its error."""

    blocks: dict[str, Slices]
    file: BlockFile = field(default_factory=BlockFile)
    error: str = ""
    refused: str = ""


def write_rank(
    folder: Path,
    tag: str,
    tensors: Mapping[str, SavedTensor],
    block: Block,
    rank: int,
    fault: Fault | None = None,
) -> WrittenBlocks:
    """Write the blocks that a rank owns to its file of a save."""
    path, blocks = folder / _file(tag, rank), owned(tensors, rank)
    if not blocks:
        return WrittenBlocks({})
    shapes = {n: (tuple(s.stop - s.start for s in where), tensors[n].dtype) for n, where in blocks.items()}
    try:
        metadata = {"format": FORMAT, "rank": str(rank), "file": path.name}
        file = write_blocks(path, shapes, lambda name: block(name, rank), metadata, fault)
        files.flush_names(path.parent)
    except RefusedError as refusal:
        files.remove(path)
        return WrittenBlocks({}, refused=str(refusal))
    except (OSError, RuntimeFault) as error:
        files.remove(path)
        return WrittenBlocks({}, error=f"{path.name}: {error}")
    except BaseException:
        files.remove(path)
        raise
    return WrittenBlocks(blocks, file)


def commit(
    path: Path,
    tensors: Mapping[str, SavedTensor],
    written: Mapping[int, WrittenBlocks],
    training: Mapping[str, Any],
) -> tuple[str, bool]:
    """Write the index and put it in place.

    Returns:
        The error, empty for none, and whether the new index is in place.
    """
    parts = [part for _, part in sorted(written.items()) if part.file.name]
    document = plain(_document(tensors, parts, training))
    try:
        check_index(document, INDEX)  # so that it can be read again
    except RuntimeFault as error:
        return str(error), False
    draft, in_place = path / f"{DRAFT}{secrets.token_hex(8)}.tmp", False
    try:
        with files.created(draft) as descriptor:
            files.write(descriptor, to_text(document).encode())
        files.flush_names(path)  # the names of the blocks before the index that refers to them
        files.replace(draft, path / INDEX)
        in_place = True
        files.flush_names(path)
    except OSError as error:
        if not in_place:
            files.remove(draft)
        return f"{INDEX}: {error}", in_place
    return DONE, True


def delete_old(path: Path, written: Mapping[int, WrittenBlocks]) -> None:
    """Delete the files of earlier saves, after `commit`."""
    keep = {part.file.name for part in written.values()}
    for old in path.iterdir():
        shard = SHARD.fullmatch(old.name) and old.name not in keep
        if shard or is_draft(old.name):
            files.remove(old)


def _document(
    tensors: Mapping[str, SavedTensor], parts: Sequence[WrittenBlocks], training: Mapping[str, Any]
) -> dict[str, Any]:
    """The index as data, see `index_schema.Index`."""
    entries: dict[str, Any] = {
        name: {"kind": tensor.kind, "shape": list(tensor.shape), "dtype": tensor.dtype, "shards": []}
        for name, tensor in sorted(tensors.items())
    }
    for part in parts:
        for name, where in part.blocks.items():
            shard = {
                "file": part.file.name,
                "start": [s.start for s in where],
                "shape": [s.stop - s.start for s in where],
                "begin": part.file.begins[name],
                "checksums": part.file.checksums[name],
            }
            entries[name]["shards"].append(shard)
    return {
        "format": FORMAT,
        "distgraph": distgraph.__version__,
        "run": "", "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": 0, "epoch": 0, "position": 0, "seed": 0,
        "unused": [], "losses": [], "epochs": [], "means": [{}, 0], "skipped": [],
        **training,
        "page": files.PAGE,
        "fingerprint": fingerprint(
            {name: (t.dtype, t.shape) for name, t in tensors.items() if t.kind == "param"}
        ),
        "files": {
            p.file.name: {"bytes": p.file.bytes, "header": p.file.header, "checksum": p.file.checksum}
            for p in parts
        },
        "tensors": entries,
    }  # fmt: skip
