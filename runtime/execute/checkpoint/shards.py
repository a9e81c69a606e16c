"""Shards: safetensors files of blocks, written with a checksum for each page and read page by page.

The library `safetensors` writes a dict of arrays to a path. Here each block is fetched when it is written,
the checksums are computed while the bytes are written to a file that is certain to be new, and every page
that is read is verified. `Checkpoint.verify` also reads the files with the library.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from distgraph.ir.dtypes import itemsize, to_numpy
from distgraph.runtime.execute.checkpoint import files

_PIECE: Final = 1 << 26  # bytes of a block that are in memory at a time, apart from the result
_ALIGNMENT: Final = 8
_WORTH_A_THREAD: Final = 1 << 18
"""Bytes that take as long to check and to sum as another thread needs to begin, some 50 us."""
Fault = Callable[[str, np.ndarray], str]
"""(name, values of its block) -> reason why they must not be saved; empty for none."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class BlockFile:
    """The file that one rank has written.

    Attributes:
        name: name of the file; empty where the rank owns no block.
        bytes: size of the file.
        header: bytes before the first block.
        checksum: checksum of the header.
        begins: name of a tensor -> first byte of its block.
        checksums: name of a tensor -> checksums of the pages of its block.
    """

    name: str = ""
    bytes: int = 0
    header: int = 0
    checksum: str = ""
    begins: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, list[str]] = field(default_factory=dict)


class DamagedError(Exception):
    """Bytes differ from their checksum; the text names them."""


class RefusedError(Exception):
    """Values that must not be saved; the text names them."""


def write_blocks(
    path: Path,
    shapes: Mapping[str, tuple[tuple[int, ...], str]],
    block: Callable[[str], np.ndarray],
    metadata: Mapping[str, str],
    fault: Fault | None = None,
) -> BlockFile:
    """Write one file, which is on disk at the end.

    A page is checked and summed by another thread while it is written.

    Args:
        path: path of the file, which must not exist.
        shapes: name -> shape and dtype of its block.
        block: name -> the block.
        metadata: texts in the header.
        fault: (name, values of its block) -> reason why they must not be saved, empty for none. It is called
            with each page as a vector, and with the whole block if it refuses one.

    Raises:
        OSError: the file cannot be written.
        RefusedError: `fault` refuses values.
    """
    names = sorted(shapes, key=lambda name: (-itemsize(shapes[name][1]), name))
    header, begins, end = _header({name: shapes[name] for name in names}, metadata)
    checksums: dict[str, list[str]] = {}
    with files.created(path) as descriptor, ThreadPoolExecutor(1, "checksum") as thread:
        files.write(descriptor, header)
        for name in names:
            array = block(name)
            if (array.shape, array.dtype) != (shapes[name][0], to_numpy(shapes[name][1])):
                raise AssertionError(f"block of {name} is {array.dtype}{list(array.shape)}")
            values = np.ascontiguousarray(array).reshape(-1)
            checksums[name] = []
            step = files.PAGE // values.itemsize
            for start in range(0, values.size, step):
                part = values[start : start + step]
                page = memoryview(part.view(np.uint8).data)
                checksum = _started(thread, partial(_checksum, name, part, page, fault), page.nbytes)
                files.write(descriptor, page)
                if (page_sum := checksum()) is None:
                    assert fault is not None
                    raise RefusedError(fault(name, array))
                checksums[name].append(page_sum)
    return BlockFile(path.name, end, len(header), files.checksum(header), begins, checksums)


def _checksum(name: str, part: np.ndarray, page: memoryview, fault: Fault | None) -> str | None:
    """The checksum of a page; None where its values are refused."""
    return None if fault is not None and fault(name, part) else files.checksum(page)


def _started(thread: ThreadPoolExecutor, task: Callable[[], Result], size: int) -> Callable[[], Result]:
    """Begin a task on a page of some bytes in another thread. Returns how to wait for its result; the call
    does the task where a thread does not pay, or where none can begin because the interpreter ends."""
    if size < _WORTH_A_THREAD:
        return task
    with contextlib.suppress(RuntimeError):
        return thread.submit(task).result
    return task


def _header(
    shapes: Mapping[str, tuple[tuple[int, ...], str]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """Header of a file, first byte of each block, and bytes of the file."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset, offsets = 0, {}
    for name, (shape, dtype) in shapes.items():
        offsets[name] = offset
        end = offset + math.prod(shape) * itemsize(dtype)
        entries[name] = {"dtype": dtype.upper(), "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in offsets.items()}, len(header) + offset


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block in a file, as the index describes it.

    Attributes:
        shape: shape of the block.
        dtype: short name of its dtype.
        begin: its first byte in the file.
        checksums: checksums of its pages.
    """

    shape: tuple[int, ...]
    dtype: str
    begin: int
    checksums: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the block."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def read_into(self, descriptor: int, where: tuple[slice, ...], out: np.ndarray) -> None:
        """Copy a part of the block to `out`, and verify its pages.

        Raises:
            OSError: the file cannot be read.
            DamagedError: a page differs from its checksum.
        """
        if not self.shape:
            out[...] = self._elements(self._pages(descriptor, 0, self.bytes), 0, ())
            return
        row_bytes = itemsize(self.dtype) * math.prod(self.shape[1:])
        step = max(1, _PIECE // row_bytes)
        first, last = where[0].start, where[0].stop
        for start in range(first, last, step):
            stop = min(last, start + step)
            part = (slice(start, stop), *where[1:])
            begin, end = self._span(part)
            page = begin // files.PAGE * files.PAGE
            data = self._pages(descriptor, page, end)
            lengths = tuple(interval.stop - interval.start for interval in part)
            out[start - first : stop - first] = self._elements(data, begin - page, lengths)

    def verify(self, descriptor: int) -> None:
        """Compare the whole block with its checksums. Raises as `read_into`."""
        for begin in range(0, self.bytes, files.PAGE):
            self._pages(descriptor, begin, begin + 1)

    def _strides(self) -> tuple[int, ...]:
        sizes = [itemsize(self.dtype) * math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        return tuple(sizes)

    def _span(self, part: tuple[slice, ...]) -> tuple[int, int]:
        """First byte of a part of the block, and the end of its last byte."""
        strides = self._strides()
        begin = sum(interval.start * stride for interval, stride in zip(part, strides, strict=True))
        last = sum((interval.stop - 1) * stride for interval, stride in zip(part, strides, strict=True))
        return begin, last + itemsize(self.dtype)

    def _pages(self, descriptor: int, begin: int, end: int) -> memoryview:
        """Verified bytes from the page boundary `begin` to the end of the page of byte `end` - 1."""
        end = min(-(-end // files.PAGE) * files.PAGE, self.bytes)
        data = files.read(descriptor, self.begin + begin, end - begin)
        for start in range(begin, end, files.PAGE):
            stop = min(start + files.PAGE, end)
            checksum = files.checksum(data[start - begin : stop - begin])
            expected = self.checksums[start // files.PAGE]
            if checksum != expected:
                raise DamagedError(
                    f"bytes {self.begin + start} to {self.begin + stop - 1} have checksum {checksum} but "
                    f"were written with {expected}"
                )
        return data

    def _elements(self, data: memoryview, offset: int, lengths: tuple[int, ...]) -> np.ndarray:
        return np.ndarray(lengths, to_numpy(self.dtype), data, offset, self._strides())
