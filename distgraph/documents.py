"""Reading a JSON document whose mistakes are told by file and path, and writing one that is easy to compare.

plan.json: stages[1].mesh: expected a text, found 5
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from distgraph.errors import DistGraphError

Parsed = TypeVar("Parsed")


class Node:
    """A part of a document that knows where it stands.

    Args:
        value: what stands there.
        file: the file, for messages.
        path: of this part in it.
        error: what is raised.
    """

    def __init__(self, value: Any, file: str, path: str, error: type[DistGraphError]) -> None:
        self.value = value
        self.file = file
        self.path = path
        self.error = error

    @classmethod
    def load(cls, path: str | Path, error: type[DistGraphError]) -> Node:
        """The whole of a JSON file. Raises `error` when it cannot be read or is no JSON object."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as reason:
            raise error(f"{path}: cannot be read: {reason}; give the path of a file") from None
        return cls.parse(text, str(path), error)

    @classmethod
    def parse(cls, text: str, file: str, error: type[DistGraphError]) -> Node:
        """The whole of a text. Raises `error` when it is no JSON object."""
        try:
            value = json.loads(text)
        except json.JSONDecodeError as reason:
            raise error(
                f"{file}:{reason.lineno}:{reason.colno}: not JSON: {reason.msg}; mend the line"
            ) from None
        node = cls(value, file, "", error)
        node._mapping()
        return node

    def refuse(self, expected: str) -> NoReturn:
        """Raise: something else was expected here."""
        shown = json.dumps(self.value, default=str)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        where = f"{self.file}: {self.path}" if self.path else self.file
        raise self.error(f"{where}: expected {expected}, found {shown}")

    def __getitem__(self, key: str) -> Node:
        """A field. Raises where it is missing."""
        found = self.get(key)
        if found is None:
            where = f"{self.file}: {self.path}" if self.path else self.file
            known = ", ".join(self._mapping()) or "nothing"
            raise self.error(f"{where}: expected a field {key!r}, found {known}")
        return found

    def get(self, key: str) -> Node | None:
        """A field, or None where it is missing."""
        mapping = self._mapping()
        return self._at(mapping[key], f"{self.path}.{key}" if self.path else key) if key in mapping else None

    def items(self) -> Iterator[tuple[str, Node]]:
        """Fields of an object."""
        for key, value in self._mapping().items():
            yield key, self._at(value, f"{self.path}[{key!r}]")

    def only(self, *known: str) -> Node:
        """Refuse fields that nobody knows; returns the node itself."""
        for key in self._mapping():
            if key not in known:
                self._at(key, f"{self.path}.{key}" if self.path else key).refuse(f"one of {', '.join(known)}")
        return self

    def list(self) -> list[Node]:
        """Entries of a list."""
        if not isinstance(self.value, list):
            self.refuse("a list")
        return [self._at(value, f"{self.path}[{i}]") for i, value in enumerate(self.value)]

    def text(self) -> str:
        """A text."""
        if not isinstance(self.value, str):
            self.refuse("a text")
        return self.value

    def number(self) -> float:
        """A number."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            self.refuse("a number")
        return float(self.value)

    def count(self, least: int = 0) -> int:
        """A whole number from `least` up."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < least:
            self.refuse(f"a whole number from {least} up")
        return int(self.value)

    def scalar(self) -> str | int | float | bool | None:
        """A text, a number, true, false or null."""
        if isinstance(self.value, (list, dict)):
            self.refuse("a text, a number, true, false or null")
        found: str | int | float | bool | None = self.value
        return found

    def read(self, parse: Callable[[str], Parsed], expected: str) -> Parsed:
        """A text that `parse` understands, which raises ValueError or a house error otherwise."""
        try:
            return parse(self.text())
        except (ValueError, DistGraphError):
            self.refuse(expected)

    def _mapping(self) -> Mapping[str, Any]:
        if not isinstance(self.value, dict):
            self.refuse("an object { }")
        return self.value

    def _at(self, value: Any, path: str) -> Node:
        return Node(value, self.file, path, self.error)


class Record(dict[str, Any]):
    """An object that is written on one line."""


def dumps(document: Mapping[str, Any]) -> str:
    """JSON with one item a line, `Record`s on one line each, keys in the order given; ends in a line break.

    Example:
        >>> print(dumps({"a": [1, 2], "b": Record(c=3, d="e"), "f": {}}), end="")
        {
         "a": [
          1,
          2
         ],
         "b": {"c": 3, "d": "e"},
         "f": {}
        }
    """
    return _dump(document, "") + "\n"


def _dump(node: Any, indent: str) -> str:
    if isinstance(node, float) and not math.isfinite(node):
        raise ValueError(f"{node} has no JSON form")
    if isinstance(node, Record) or not isinstance(node, (Mapping, list, tuple)) or not node:
        return json.dumps(node)
    inner = indent + " "
    if isinstance(node, Mapping):
        body = [f"{inner}{json.dumps(key)}: {_dump(value, inner)}" for key, value in node.items()]
        return "{\n" + ",\n".join(body) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _dump(value, inner) for value in node) + f"\n{indent}]"


def check_writable(path: str | Path, error: type[DistGraphError]) -> None:
    """Refuse a place where `write_atomically` could not write, before the work whose result goes there.

    Raises:
        error: there is no such folder, it takes no new files, or the path is a folder itself.
    """
    target = Path(path)
    reasons = (
        (target.is_dir(), "it is a folder"),
        (not target.parent.is_dir(), f"{target.parent} is no folder"),
        (not os.access(target.parent, os.W_OK | os.X_OK), f"{target.parent} takes no new files"),
    )
    for fails, reason in reasons:
        if fails:
            raise error(f"{path}: cannot be written: {reason}; choose another place")


def write_atomically(path: str | Path, text: str, error: type[DistGraphError]) -> None:
    """Write a file so that readers see the old one or the new one, never a part. Raises `error`."""
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            Path(name).chmod(0o666 & ~mask)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as reason:
        raise error(f"{path}: cannot be written: {reason.strerror or reason}; choose another place") from None
