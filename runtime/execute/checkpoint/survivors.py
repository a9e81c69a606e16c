"""Checkpoints from the memory of the ranks that are left when other ranks of a job are lost.

Every rank that is left writes all blocks that it stores, each to a file of its own, and a list of them. No
rank waits for another one: each may be lost at any moment. Then one process chooses, of every block, the
file of one rank, and writes an index: a folder with these files is a checkpoint like any other. Ranks may be
at different steps, because a rank that has all messages of a step can complete it without the others. The
last step whose blocks together cover every tensor is taken.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.runtime.execute.checkpoint import files
from distgraph.runtime.execute.checkpoint.index import FORMAT, plain
from distgraph.runtime.execute.checkpoint.shards import BlockFile, write_blocks
from distgraph.runtime.execute.checkpoint.writing import DONE, SavedTensor, WrittenBlocks, commit

_LIST: Final = "blocks.rank-"


@dataclass(frozen=True, slots=True)
class _Block:
    """One block that a rank has written: tensor, bounds in it, and its file."""

    name: str
    bounds: tuple[tuple[int, int], ...]
    file: BlockFile


def write_survivor(
    folder: Path,
    rank: int,
    tensors: Mapping[str, SavedTensor],
    block: Callable[[str, int], np.ndarray],
    training: Mapping[str, Any],
) -> None:
    """Write all blocks that a rank stores. Not collective.

    Args:
        folder: made if it does not exist; the same for all ranks, and for no other loss.
        rank, tensors, block, training: as for `write_checkpoint`.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    blocks = []
    for name, tensor in tensors.items():
        if rank not in tensor.attr.mesh:
            continue
        bounds = tuple(tensor.attr.spec.bounds(tensor.shape, tensor.attr.mesh, rank))
        if any(start == stop for start, stop in bounds):
            continue
        path = folder / f"step-{training['step']:08d}-{secrets.token_hex(8)}.rank-{rank:05d}.safetensors"
        shapes = {name: (tuple(stop - start for start, stop in bounds), tensor.dtype)}
        metadata = {"format": FORMAT, "rank": str(rank), "file": path.name}
        file = write_blocks(path, shapes, lambda name: block(name, rank), metadata)
        blocks.append(_Block(name, bounds, file))
    types = {name: [tensor.kind, tensor.shape, tensor.dtype] for name, tensor in tensors.items()}
    content = {"training": training, "tensors": types, "blocks": [asdict(each) for each in blocks]}
    draft = folder / f"draft.{rank}"
    draft.write_text(json.dumps(plain(content)))
    files.replace(draft, folder / f"{_LIST}{rank:05d}")


def assemble(folder: Path) -> tuple[int, tuple[int, ...]] | None:
    """Make a checkpoint of what the ranks that were left have written to a folder.

    Returns:
        Its step, and the ranks whose blocks it has; None where no step has all blocks of all tensors.
    """
    read = {int(path.name.removeprefix(_LIST)): _read(path) for path in sorted(folder.glob(f"{_LIST}*"))}
    lists = {rank: content for rank, content in read.items() if content is not None}
    steps = sorted({content["training"]["step"] for content in lists.values()}, reverse=True)
    for step in steps:
        ranks = [rank for rank, content in lists.items() if content["training"]["step"] == step]
        used = _commit(folder, {rank: lists[rank] for rank in ranks})
        if used:
            _delete_others(folder, used.values())
            return step, tuple(sorted(used))
    return None


def _read(path: Path) -> dict[str, Any] | None:
    """The list of a rank; None where it is damaged, as after a loss of its host or file system."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        content["blocks"] = [
            _Block(each["name"], tuple(map(tuple, each["bounds"])), BlockFile(**each["file"]))
            for each in content["blocks"]
        ]
        content["training"]["step"] = int(content["training"]["step"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return content


def _commit(folder: Path, lists: Mapping[int, Mapping[str, Any]]) -> dict[int, list[_Block]]:
    """Write an index of the blocks of ranks at one step, each distinct block once.

    Returns:
        The blocks of every rank that the index names; empty where they do not cover every tensor.
    """
    tensors: dict[str, SavedTensor] = {}
    chosen: dict[tuple[str, tuple[tuple[int, int], ...]], tuple[int, _Block]] = {}
    for rank, content in lists.items():
        for name, (kind, shape, dtype) in content["tensors"].items():
            whole = DistAttr(ProcessMesh.grid(all=1), ShardSpec.of([None] * len(shape)))
            tensors.setdefault(name, SavedTensor(kind, tuple(shape), dtype, whole))
        for block in content["blocks"]:
            chosen.setdefault((block.name, block.bounds), (rank, block))
    written = {
        number: WrittenBlocks({block.name: tuple(slice(*bound) for bound in block.bounds)}, block.file)
        for number, (_, block) in enumerate(chosen.values())
    }
    result = commit(folder, tensors, written, next(iter(lists.values()))["training"])
    used: dict[int, list[_Block]] = {}
    for rank, block in chosen.values() if result == (DONE, True) else ():
        used.setdefault(rank, []).append(block)
    return used


def _delete_others(folder: Path, used: Iterable[Sequence[_Block]]) -> None:
    """Delete the blocks that the index does not name, and the lists."""
    keep = {block.file.name for blocks in used for block in blocks}
    for path in folder.iterdir():
        if path.name.startswith(_LIST) or (path.suffix == ".safetensors" and path.name not in keep):
            files.remove(path)
