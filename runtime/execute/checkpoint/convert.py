"""Conversion of a checkpoint to one safetensors file, and back.

The file holds whole tensors under their names, readable by every reader of safetensors; the kinds and the
state of training are texts in its metadata. A file without them becomes a checkpoint of parameters at step 0.
A file of weights only has neither the state of training nor the states of an optimiser, whose names are those
of their parameters with a suffix.

A checkpoint made from a file belongs to a training of its own: `run` in its index is new. So pruning never
deletes an original because its copy stays.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError, safe_open

from distgraph.errors import RuntimeFault
from distgraph.ir.dtypes import NAMES
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.runtime.execute.checkpoint import files
from distgraph.runtime.execute.checkpoint.index import plain
from distgraph.runtime.execute.checkpoint.index_schema import TensorEntry, Training
from distgraph.runtime.execute.checkpoint.resharding import Checkpoint
from distgraph.runtime.execute.checkpoint.shards import write_blocks
from distgraph.runtime.execute.checkpoint.writing import SavedTensor, write_checkpoint
from distgraph.runtime.execute.process_group import InProcessWorld
from distgraph.serialization.atomic_files import check_writable
from distgraph.serialization.documents import parse_json
from distgraph.serialization.models import validate

_TRAINING: Final = "distgraph training"
_KINDS: Final = "distgraph kinds"


def convert(source: Path, target: Path, weights_only: bool = False) -> None:
    """Convert a checkpoint folder to one file, or one file to a checkpoint folder.

    Args:
        source: folder of a checkpoint, or a safetensors file.
        target: file or folder to write.
        weights_only: write the parameters and buffers of the model only, to a file.

    Raises:
        RuntimeFault: the source is neither or is damaged, the target exists or cannot be written, or only the
            weights are to be written to a folder.
    """
    if target.exists() or target.is_symlink():
        raise RuntimeFault(f"convert: {target} exists already; choose another name, or delete it first")
    if source.is_dir():
        _to_file(source, target, weights_only)
    elif source.is_file() and weights_only:
        raise RuntimeFault(
            f"convert: --weights-only makes a file of a checkpoint but {source} is a file, which becomes a "
            "checkpoint; leave the option out, and load with states=False to read parameters only"
        )
    elif source.is_file():
        _to_folder(source, target)
    else:
        raise RuntimeFault(f"convert: {source} is no checkpoint and no safetensors file; give one of these")


def _to_file(source: Path, target: Path, weights_only: bool) -> None:
    checkpoint = Checkpoint.open(source)
    check_writable(target, RuntimeFault)
    contents = checkpoint.contents
    tensors = _weights(contents.tensors) if weights_only else contents.tensors
    metadata = {_KINDS: json.dumps({name: entry.kind for name, entry in tensors.items()})}
    if not weights_only:
        training = {name: getattr(contents, name) for name in Training.model_fields}
        metadata[_TRAINING] = json.dumps(plain(training))
    shapes = {name: (tuple(entry.shape), entry.dtype) for name, entry in tensors.items()}
    draft = target.parent / f".{target.name[:32]}.{secrets.token_hex(8)}.tmp"
    try:
        write_blocks(draft, shapes, checkpoint.read, metadata)
        files.replace(draft, target)
        files.flush_names(target.absolute().parent)
    except OSError as error:
        files.remove(draft)
        raise RuntimeFault(f"convert: {target} cannot be written: {error}; choose another place") from None
    except BaseException:
        files.remove(draft)
        raise


def _weights(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The parameters and buffers of a model: without the states, which are named "parameter.state"."""
    parameters = {name for name, entry in tensors.items() if entry.kind == "param"}
    return {n: entry for n, entry in tensors.items() if n.rpartition(".")[0] not in parameters}


def _to_folder(source: Path, target: Path) -> None:
    try:
        with safe_open(source, "np") as opened:
            names = list(opened.keys())
            placed, training = _described(source, opened, names)

            def block(name: str, rank: int) -> np.ndarray:
                array: np.ndarray = opened.get_tensor(name)
                return array

            training["run"] = secrets.token_hex(8)
            write_checkpoint(target, InProcessWorld(1), placed, block, training)
    except (OSError, SafetensorError) as error:
        raise RuntimeFault(
            f"convert: {source} cannot be read: {error}; give a whole safetensors file"
        ) from None


def _described(source: Path, opened: Any, names: list[str]) -> tuple[dict[str, SavedTensor], dict[str, Any]]:
    """The tensors of a file, and the state of training in its metadata."""
    metadata: dict[str, str] = opened.metadata() or {}
    training: dict[str, Any] = {}
    if _TRAINING in metadata:
        where = f"{source}: metadata of training"
        document = parse_json(metadata[_TRAINING], where, RuntimeFault)
        training = validate(
            Training, document, where, RuntimeFault, "docs/running/checkpoints.md"
        ).model_dump()
    kinds = parse_json(metadata.get(_KINDS, "{}"), f"{source}: metadata of kinds", RuntimeFault)
    mesh, placed = ProcessMesh.grid(all=1), {}
    for name in names:
        part = opened.get_slice(name)
        shape, dtype = tuple(part.get_shape()), str(part.get_dtype()).lower()
        if dtype not in NAMES:
            raise RuntimeFault(
                f"convert: {source}: tensor {name} is {dtype} but a checkpoint has {', '.join(NAMES)}; "
                f"convert it first"
            )
        kind = kinds.get(name, "param") if isinstance(kinds, dict) else "param"
        spec = ShardSpec.of([None] * len(shape))
        placed[name] = SavedTensor(
            "state" if kind == "state" else "param", shape, dtype, DistAttr(mesh, spec)
        )
    return placed, training
