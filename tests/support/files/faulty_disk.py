"""The module `os` with faults: a process that dies at its n-th operation on files, a disk that is full or
broken, and what is left on disk when the power goes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CHANGES = ("open", "write", "fsync", "close", "replace", "unlink", "mkdir", "rmdir")


class Crash(BaseException):
    """The process is gone: nothing that it would do after this happens."""


class FaultyOs:
    """`os` for one folder, in the place of `distgraph.runtime.execute.checkpoint.files.os`.

    Operations that fail do nothing, but a write that fails writes half. A file whose content was not flushed
    is empty after the power went; names that were not flushed are there or not, in any combination.

    Args:
        folder: whose files are followed.
        at: number of the operation that fails, from 0; None for none.
        error: what it raises, from then on if `lasting`; a Crash lasts in any case.
    """

    def __init__(self, folder: Path, at: int | None, error: BaseException, lasting: bool = False) -> None:
        self.folder, self.at, self.error = folder, at, error
        self.lasting = lasting or isinstance(error, Crash)
        self.count = 0
        self.failed = ""  # the operation that did
        self._numbers = itertools.count()
        self._paths: dict[int, Path] = {}  # by descriptor
        self._names: dict[str, int] = {}
        self._durable: dict[int, bytes] = {}
        self._log: list[dict[str, int | None]] = []  # changes of names since they were flushed
        for path in folder.iterdir() if folder.is_dir() else ():
            self._names[path.name] = number = next(self._numbers)
            self._durable[number] = path.read_bytes()
        self._flushed = dict(self._names)

    def __getattr__(self, name: str) -> Any:
        if name not in _CHANGES:
            return getattr(os, name)

        def call(*args: Any) -> Any:
            number, self.count = self.count, self.count + 1
            fails = self.at is not None and (number == self.at or (number > self.at and self.lasting))
            if fails:
                self.failed = self.failed or f"{name} {args[0]}"
                if name == "write" and len(args[1]) > 1 and number == self.at:
                    os.write(args[0], args[1][: len(args[1]) // 2])
                if name == "close" and not isinstance(self.error, Crash):
                    os.close(args[0])
                raise self.error
            return getattr(self, f"_do_{name}")(*args)

        return call

    def states(self) -> Iterator[dict[str, bytes]]:
        """What the folder may hold when the power goes now."""
        changes = self._log
        subsets = (
            range(1 << len(changes)) if len(changes) <= 6 else [(1 << n) - 1 for n in range(len(changes) + 1)]
        )
        for subset in subsets:
            names: dict[str, int | None] = dict(self._flushed)
            for position, change in enumerate(changes):
                if subset >> position & 1:
                    names |= change
            yield {n: self._durable.get(number, b"") for n, number in names.items() if number is not None}

    def _change(self, names: dict[str, int | None]) -> None:
        self._log.append(names)
        for name, number in names.items():
            if number is None:
                self._names.pop(name, None)
            else:
                self._names[name] = number

    def _do_open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        path = Path(path)
        descriptor = os.open(path, flags, mode)
        if flags & os.O_CREAT and path.parent == self.folder and path.name not in self._names:
            self._change({path.name: next(self._numbers)})
        self._paths[descriptor] = path
        return descriptor

    def _do_write(self, descriptor: int, data: Any) -> int:
        return os.write(descriptor, data)

    def _do_fsync(self, descriptor: int) -> None:
        path = self._paths[descriptor]
        if path == self.folder:
            self._flushed, self._log = dict(self._names), []
        elif path.parent == self.folder:
            self._durable[self._names[path.name]] = path.read_bytes()

    def _do_close(self, descriptor: int) -> None:
        os.close(descriptor)
        del self._paths[descriptor]

    def _do_replace(self, draft: Any, target: Any) -> None:
        os.replace(draft, target)  # noqa: PTH105
        self._change({Path(target).name: self._names[Path(draft).name], Path(draft).name: None})

    def _do_unlink(self, path: Any) -> None:
        os.unlink(path)  # noqa: PTH108
        self._change({Path(path).name: None})

    def _do_mkdir(self, path: Any) -> None:
        os.mkdir(path)  # noqa: PTH102

    def _do_rmdir(self, path: Any) -> None:
        os.rmdir(path)  # noqa: PTH106
