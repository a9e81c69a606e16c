"""Reading a checkpoint under any mesh and any number of ranks; each rank reads only the blocks that it needs.

The index is verified by its checksum and its schema when it is opened, a block page by page when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from distgraph.errors import RuntimeFault
from distgraph.ir.dtypes import to_numpy
from distgraph.runtime.execute.checkpoint import files
from distgraph.runtime.execute.checkpoint.folder import check_path
from distgraph.runtime.execute.checkpoint.index import fingerprint, read_index
from distgraph.runtime.execute.checkpoint.shards import DamagedError, StoredBlock

if TYPE_CHECKING:
    from distgraph.runtime.execute.checkpoint.index_schema import BlockEntry, Index

Slices = tuple[slice, ...]

_MOST_NAMED = 4  # tensors of a damaged file that a message names


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint to read from."""

    path: Path
    contents: Index
    index: dict[str, Any]

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Read the index. Raises RuntimeFault where there is none, it is damaged, or inconsistent."""
        path = check_path(directory)
        contents = read_index(path)
        return cls(path, contents, contents.model_dump())

    @property
    def tensors(self) -> dict[str, dict[str, Any]]:
        """Name -> kind, shape, dtype, shards."""
        tensors: dict[str, dict[str, Any]] = self.index["tensors"]
        return tensors

    def read(self, name: str, where: Slices | None = None) -> np.ndarray:
        """A block of a tensor, by default all of it. Reads only the pages that hold it.

        Raises:
            RuntimeFault: there is no such tensor, or a file is missing or damaged.
        """
        tensor = self.contents.tensors.get(name)
        if tensor is None:
            raise RuntimeFault(
                f"checkpoint {self.path} has no tensor {name}; it has {', '.join(self.tensors) or 'none'}"
            )
        where = tuple(slice(0, n) for n in tensor.shape) if where is None else where
        out = np.empty([s.stop - s.start for s in where], to_numpy(tensor.dtype))
        for shard in tensor.shards:
            common = [
                (max(s.start, begin), min(s.stop, begin + size))
                for s, begin, size in zip(where, shard.start, shard.shape, strict=True)
            ]
            if all(a < b for a, b in common):
                target = tuple(
                    slice(a - s.start, b - s.start) for (a, b), s in zip(common, where, strict=True)
                )
                source = tuple(
                    slice(a - begin, b - begin) for (a, b), begin in zip(common, shard.start, strict=True)
                )
                self._copy(name, shard, source, out[target] if target else out)
        return out

    def missing(self) -> list[str]:
        """Texts about files that are missing or of another size, found without reading them."""
        problems: list[str] = []
        for name in self.contents.files:
            try:
                with files.opened(self.path / name) as descriptor:
                    self._check_size(name, descriptor)
            except DamagedError as error:
                problems.append(f"{self.path / name} is damaged: {error}")
            except OSError as error:
                problems.append(f"{self.path / name} cannot be read: {error.strerror or error}")
        return problems

    def verify(self, part: int = 0, parts: int = 1) -> list[str]:
        """Compare the files with their checksums. Returns texts about damage, with file, tensor and bytes.

        Args:
            part: number of the share of the files to verify, where several processes verify one each.
            parts: number of shares.
        """
        problems: list[str] = []
        blocks: dict[str, list[tuple[str, BlockEntry]]] = {name: [] for name in self.contents.files}
        for tensor, entry in self.contents.tensors.items():
            for shard in entry.shards:
                blocks[shard.file].append((tensor, shard))
        for number, name in enumerate(self.contents.files):
            if number % parts == part:
                problems += self._verify_file(name, blocks[name])
        return problems

    def check(self, expected: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """Compare the parameters with those of a model, name -> (shape, dtype).

        Raises:
            RuntimeFault: names the first parameter that differs, with both types.
        """
        unused = set(self.contents.unused)
        for name, (shape, dtype) in expected.items():
            tensor = self.contents.tensors.get(name)
            expected_type = f"{dtype}{list(shape)}"
            if tensor is None and name not in unused:
                raise self._mismatch(
                    f"parameter {name} is {expected_type} in the model but not in the checkpoint"
                )
            if tensor is not None and (tuple(tensor.shape), tensor.dtype) != (tuple(shape), dtype):
                stored_type = f"{tensor.dtype}{tensor.shape}"
                raise self._mismatch(
                    f"parameter {name} is {expected_type} in the model but {stored_type} in the checkpoint"
                )
        for name, tensor in self.contents.tensors.items():
            if tensor.kind == "param" and name not in expected:
                stored_type = f"{tensor.dtype}{tensor.shape}"
                raise self._mismatch(
                    f"parameter {name} is {stored_type} in the checkpoint but not in the model"
                )
        kinds = {name: entry.kind for name, entry in self.contents.tensors.items()}
        model = fingerprint({n: (d, s) for n, (s, d) in expected.items() if kinds.get(n) == "param"})
        if model != self.contents.fingerprint:
            raise self._mismatch(
                f"its fingerprint is {self.contents.fingerprint} but that of the model {model}"
            )

    def _copy(self, name: str, shard: BlockEntry, source: Slices, out: np.ndarray) -> None:
        path = self.path / shard.file
        try:
            with files.opened(path) as descriptor:
                self._check_size(shard.file, descriptor)
                self._block(name, shard).read_into(descriptor, source, out)
        except DamagedError as error:
            raise RuntimeFault(
                f"checkpoint {path} is damaged: tensor {name}: {error}; use another checkpoint"
            ) from None
        except OSError as error:
            raise RuntimeFault(
                f"checkpoint {path} cannot be read: tensor {name}: {error.strerror or error}; use another "
                "checkpoint"
            ) from None

    def _block(self, name: str, shard: BlockEntry) -> StoredBlock:
        dtype = self.contents.tensors[name].dtype
        return StoredBlock(tuple(shard.shape), dtype, shard.begin, tuple(shard.checksums))

    def _check_size(self, file: str, descriptor: int) -> None:
        size, expected = files.size(descriptor), self.contents.files[file].bytes
        if size != expected:
            raise DamagedError(f"the file has {size} bytes but was written with {expected}")

    def _verify_file(self, file: str, blocks: list[tuple[str, BlockEntry]]) -> list[str]:
        path, entry = self.path / file, self.contents.files[file]
        problems: list[str] = []
        try:
            with files.opened(path) as descriptor:
                self._check_size(file, descriptor)
                header = files.read(descriptor, 0, entry.header)
                checksum = files.checksum(header)
                if checksum != entry.checksum:
                    raise DamagedError(
                        f"header, bytes 0 to {entry.header - 1}, has checksum {checksum} but was written "
                        f"with {entry.checksum}"
                    )
                for tensor, shard in sorted(blocks, key=lambda block: block[1].begin):
                    try:
                        self._block(tensor, shard).verify(descriptor)
                    except DamagedError as error:
                        problems.append(f"{path} is damaged: tensor {tensor}: {error}")
            self._compare(path, dict(blocks))
        except DamagedError as error:
            problems.append(f"{path} is damaged: {error}; it has {_named(blocks)}")
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror or error}; it has {_named(blocks)}")
        except SafetensorError as error:
            problems.append(f"{path} cannot be read: {error}; it has {_named(blocks)}")
        return problems

    def _compare(self, path: Path, blocks: Mapping[str, BlockEntry]) -> None:
        """Check that readers of safetensors read from a file what the index states. Raises DamagedError."""
        with safe_open(path, "np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            types = {name: (slice_.get_dtype(), list(slice_.get_shape())) for name, slice_ in slices.items()}
        expected = {n: (self.contents.tensors[n].dtype.upper(), list(b.shape)) for n, b in blocks.items()}
        for name in sorted(types.keys() | expected.keys()):
            if types.get(name) != expected.get(name):
                raise DamagedError(
                    f"tensor {name}: header says {types.get(name)} but the index {expected.get(name)}"
                )

    def _mismatch(self, difference: str) -> RuntimeFault:
        return RuntimeFault(
            f"checkpoint {self.path} is of another model: {difference}; load it into the model that wrote it"
        )


def _named(blocks: Sequence[tuple[str, BlockEntry]]) -> str:
    """The tensors of which a file has blocks, in words."""
    names = [name for name, _ in blocks]
    others = len(names) - _MOST_NAMED
    text = ", ".join(names[:_MOST_NAMED])
    return (
        f"tensors {text} and {others} others" if others > 0 else f"tensors {text}" if names else "no tensor"
    )
