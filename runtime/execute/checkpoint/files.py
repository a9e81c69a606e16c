"""File operations of checkpoints; all of them use the module `os` as imported here.

A new file is created under an unpredictable name and only if nothing has that name, so that no existing link
or file is written to; its permissions are those that the umask gives. Reading never follows a link and
accepts only regular files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_hexdigest

PAGE: Final = 1 << 22
"""Bytes under one checksum: a part of a tensor is verified without reading all of it."""
SHARD: Final = re.compile(r"step-\d{8,20}-[0-9a-f]{8,16}\.rank-\d{5,10}\.safetensors", re.ASCII)
"""Names of the files with blocks; other files in the folder of a checkpoint are never changed."""
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_FOLDER_FLUSH: Final = (errno.EINVAL, errno.ENOTSUP)  # errors of file systems on which names need no flush


@contextlib.contextmanager
def created(path: Path) -> Iterator[int]:
    """Context with the descriptor of a new file to write; its content is on disk at the end.

    Raises:
        OSError: the file cannot be written, or something has that name.
    """
    descriptor = os.open(path, _NEW, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Context with the descriptor of a file to read. Raises OSError where it is no regular file or a link."""
    try:
        descriptor = os.open(path, _OLD)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a symbolic link, and links are not followed", str(path)) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def size(descriptor: int) -> int:
    """Bytes of an open file."""
    return os.fstat(descriptor).st_size


def write(descriptor: int, data: bytes | memoryview) -> None:
    """Write all bytes, with as many calls as necessary."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def read(descriptor: int, begin: int, count: int) -> memoryview:
    """Read `count` bytes of a file from byte `begin` on. Raises OSError where the file ends before."""
    data = bytearray(count)
    remaining, position = memoryview(data), begin
    while remaining:
        count_read = os.preadv(descriptor, [remaining], position)
        if not count_read:
            raise OSError(errno.EIO, f"the file ends at byte {position}")
        remaining, position = remaining[count_read:], position + count_read
    return memoryview(data)


def checksum(data: bytes | memoryview) -> str:
    """XXH3 of 64 bits, as 16 hexadecimal digits.

    It is not cryptographic: it detects damage, not forgery. It is several times faster than CRC-32 of zlib
    and than writing to disk (`benchmarks/HISTORY.md`).
    """
    return xxh3_64_hexdigest(data)


def replace(draft: Path, target: Path) -> None:
    """Rename a file to `target`, which is replaced atomically."""
    os.replace(draft, target)  # noqa: PTH105 - all operations go through os


def unlink(path: Path) -> None:
    """Delete a file that may not exist. Raises OSError where it cannot be deleted."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108


def remove(path: Path) -> None:
    """Delete a file if possible. An error is ignored, so that it does not hide an earlier one."""
    with contextlib.suppress(OSError):
        os.unlink(path)  # noqa: PTH108


def remove_folder(path: Path) -> None:
    """Delete a folder if it is empty, and if possible."""
    with contextlib.suppress(OSError):
        os.rmdir(path)  # noqa: PTH106


def make_folder(path: Path) -> None:
    """Make a folder and its parents where they are missing; they are on disk at the end. Raises OSError."""
    missing = []
    while not os.path.isdir(path):  # noqa: PTH112
        missing.append(path)
        if path.parent == path:
            break
        path = path.parent
    for folder in reversed(missing):
        with contextlib.suppress(
            FileExistsError
        ):  # another rank may make it too; if it is a file, the next call fails
            os.mkdir(folder)  # noqa: PTH102
        flush_names(folder.parent)
        flush_names(folder)


def flush_names(folder: Path) -> None:
    """Flush the names in a folder to disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_FLUSH:
            raise
    finally:
        os.close(descriptor)
