"""The index of a checkpoint: its text, and the checks of its content.

In: the text of `index.json`. Out: an `index_schema.Index`, in which the blocks of every tensor tile it, every
block is in one of the files of the folder, and the files hold nothing but blocks. So reading any index needs
no more memory than its text and the files that it names.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from xxhash import xxh3_128_hexdigest

from distgraph.errors import RuntimeFault
from distgraph.ir.dtypes import itemsize
from distgraph.runtime.execute.checkpoint import files
from distgraph.runtime.execute.checkpoint.files import SHARD
from distgraph.runtime.execute.checkpoint.lock import LOCK, living_holder
from distgraph.serialization.documents import check_data, refuse, shown_path

if TYPE_CHECKING:
    from distgraph.runtime.execute.checkpoint.index_schema import Index, TensorEntry

INDEX: Final = "index.json"
DRAFT: Final = f".{INDEX}."
"""Begin of the name of an unfinished index."""
FORMAT: Final = "distgraph checkpoint 2"
MOST_INDEX_BYTES: Final = 1 << 30
"""Largest size of an index. With pages of 4 MiB it suffices for more than 100 TB of parameters."""
_CHECKSUM: Final = "checksum"
_SEE: Final = "docs/running/checkpoints.md"


def fingerprint(parameters: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    """Hash of the names, dtypes and shapes of the parameters, equal for equal models."""
    lines = [f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in sorted(parameters.items())]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def is_draft(name: str) -> bool:
    """Whether a file name is that of an unfinished index."""
    return name.startswith(DRAFT) and name.endswith(".tmp")


def to_text(document: Mapping[str, Any]) -> str:
    """The text of an index, with its checksum; a line for each file and tensor."""
    content = plain(document)
    lines = [f" {json.dumps(_CHECKSUM)}: {json.dumps(content_checksum(content))}"]
    for key, value in content.items():
        if isinstance(value, dict) and value:
            inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def content_checksum(document: Mapping[str, Any]) -> str:
    """Checksum of the content of an index, independent of its whitespace and without its own checksum."""
    content = {key: value for key, value in document.items() if key != _CHECKSUM}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxh3_128_hexdigest(text.encode())


def plain(value: Any) -> Any:
    """A copy of a document in which numbers that JSON does not have are texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def read_index(folder: Path) -> Index:
    """The index of a checkpoint.

    Raises:
        RuntimeFault: there is none, or it cannot be read, is damaged, of another format or inconsistent.
    """
    path = folder / INDEX
    try:
        with files.opened(path) as descriptor:
            length = files.size(descriptor)
            if length > MOST_INDEX_BYTES:
                raise RuntimeFault(
                    f"checkpoint {path} has {length} bytes but an index has {MOST_INDEX_BYTES} at most; use "
                    f"another checkpoint"
                )
            text = bytes(files.read(descriptor, 0, length)).decode()
        document = json.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        raise _without_index(folder) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RuntimeFault(
            f"checkpoint {shown_path(path)} cannot be read: {reason}; use another checkpoint"
        ) from None
    check_data(document, f"checkpoint {path}", RuntimeFault, MOST_INDEX_BYTES)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        given = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise RuntimeFault(
            f"checkpoint {path}: expected format {FORMAT!r}, found {str(given)[:60]!r}; load it with the "
            f"version of distgraph that wrote it"
        )
    if document.get(_CHECKSUM) != content_checksum(document):
        raise RuntimeFault(
            f"checkpoint {path} is damaged: its content has checksum {content_checksum(document)} but was "
            f"written with {str(document.get(_CHECKSUM))[:60]}; use another checkpoint"
        )
    content = {key: value for key, value in document.items() if key != _CHECKSUM}
    return check_index(content, f"checkpoint {path}")


def _without_index(folder: Path) -> RuntimeFault:
    """The error of a folder without an index: no checkpoint, or one whose save has not ended."""
    begun, holder, shown = _begun(folder), living_holder(folder), shown_path(folder)
    if not begun and holder is None:
        return RuntimeFault(f"checkpoint {shown} has no {INDEX}; give the directory that engine.save wrote")
    several = ", ..." if begun[2:] else ""
    parts = f"{len(begun)} of the files of a save ({', '.join(begun[:2])}{several})" if begun else "no blocks"
    if holder is None:
        return RuntimeFault(
            f"{shown} has no {INDEX} and so no complete checkpoint: it has {parts}, and no living process "
            f"holds its {LOCK}, so the save was interrupted; load another checkpoint, or save again"
        )
    return RuntimeFault(
        f"{shown} has no {INDEX} and so no complete checkpoint yet: it has {parts}, and its {LOCK} is held "
        f"by {holder}, which may still write it; load it when that save has ended (engine.close() waits for "
        "it), or load another checkpoint"
    )


def _begun(folder: Path) -> list[str]:
    """Names of the files in a folder that belong to a save: blocks, and unfinished indices."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []
    return [shown_path(name) for name in names if SHARD.fullmatch(name) or is_draft(name)]


def check_index(document: Mapping[str, Any], where: str) -> Index:
    """A document without its checksum as an `Index`. Raises RuntimeFault where it is not valid."""
    from distgraph.runtime.execute.checkpoint.index_schema import Index  # noqa: PLC0415 (loads pydantic)
    from distgraph.serialization.models import validate  # noqa: PLC0415

    index = validate(Index, document, where, RuntimeFault, _SEE)
    _check(index, where)
    return index


def _check(index: Index, where: str) -> None:
    """Check facts that involve several fields. Raises RuntimeFault."""
    used: dict[str, list[tuple[int, int]]] = {name: [] for name in index.files}
    if index.page != files.PAGE:
        refuse(RuntimeFault, where, ["page"], str(files.PAGE), index.page)
    for name, tensor in index.tensors.items():
        _check_tiling(tensor, where, name)
        for number, block in enumerate(tensor.shards):
            path: list[str | int] = ["tensors", name, "shards", number]
            if block.file not in used:
                refuse(RuntimeFault, where, [*path, "file"], "one of files", block.file)
            length = math.prod(block.shape) * itemsize(tensor.dtype)
            pages = -(-length // index.page)
            if len(block.checksums) != pages:
                refuse(RuntimeFault, where, [*path, "checksums"], f"{pages} of them", len(block.checksums))
            used[block.file].append((block.begin, block.begin + length))
    for name, entry in index.files.items():
        ranges = [(0, entry.header), *sorted(used[name]), (entry.bytes, entry.bytes)]
        if any(stop != start for (_, stop), (start, _) in pairwise(ranges)):
            refuse(RuntimeFault, where, ["files", name], "a header and blocks without holes or overlaps")
    expected = fingerprint({n: (t.dtype, t.shape) for n, t in index.tensors.items() if t.kind == "param"})
    if index.fingerprint != expected:
        refuse(RuntimeFault, where, ["fingerprint"], f"that of its tensors, {expected}", index.fingerprint)


def _check_tiling(tensor: TensorEntry, where: str, name: str) -> None:
    """Check that the blocks of a tensor are the cells of a grid, each once."""
    path: list[str | int] = ["tensors", name, "shards"]
    rank = len(tensor.shape)
    for number, block in enumerate(tensor.shards):
        if len(block.start) != rank or len(block.shape) != rank:
            refuse(RuntimeFault, where, [*path, number], f"a block of {rank} dims", block.shape)
    if 0 in tensor.shape:
        if tensor.shards:
            refuse(RuntimeFault, where, path, "no blocks, as the tensor is empty", len(tensor.shards))
        return
    cells = 1
    for dim, length in enumerate(tensor.shape):
        cuts = sorted({(b.start[dim], b.start[dim] + b.shape[dim]) for b in tensor.shards})
        edges = [(0, 0), *cuts, (length, length)]
        if any(stop != start for (_, stop), (start, _) in pairwise(edges)):
            refuse(RuntimeFault, where, path, f"blocks that tile 0 to {length} of dim {dim}", cuts[:4])
        cells *= len(cuts)
    distinct = {tuple(block.start) for block in tensor.shards}
    if cells != len(tensor.shards) or len(distinct) != cells:
        refuse(RuntimeFault, where, path, f"{cells} blocks, each once", len(tensor.shards))
