"""Documents from outside: JSON files read within limits, checked against models, and written.

All readers of distgraph use the same functions: `read_json` (or `parse_json`) returns plain data that is
bounded in size, depth and magnitude, `models.validate` makes a model of it, and `refuse` reports a mistake
that is only visible from several parts. All three raise the caller's error, with file and path in the
document:

    plan.json: stages[1].mesh: expected a text, got 5
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from distgraph.errors import DistGraphError

Step = str | int

MOST_BYTES: Final = 64 << 20
"""Of a file: the plan of a graph of 100,000 ops without a repeated layer has about 20 MiB."""
MOST_ITEMS: Final = 4_000_000
"""Of a document, entries of its objects and lists: as many as `MOST_BYTES` hold at 16 bytes each."""
MOST_DEPTH: Final = 64
"""Of a document, objects and lists inside each other: no format of distgraph has more than 12."""
MOST_NUMBER: Final = 10**40
"""Magnitude of a number: above every 128-bit integer (seeds), far below the largest float64 (2e308)."""
_MOST_SHOWN: Final = 60  # characters of what stands in the file, in a message


def read_bytes(path: str | Path, error: type[DistGraphError], most: int = MOST_BYTES) -> bytes:
    """The content of a file of at most `most` bytes.

    Raises:
        error: it cannot be read, or is larger.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as reason:  # ValueError: a path with a NUL character
        message = getattr(reason, "strerror", None) or reason
        raise error(f"{shown_path(path)}: cannot be read: {message}; give the path of a file") from None
    if len(data) > most:
        raise error(
            f"{path}: cannot be read: it has more than {most} bytes, the limit for such a file; give another "
            "one"
        )
    return data


def read_text(path: str | Path, error: type[DistGraphError], most: int = MOST_BYTES) -> str:
    """The content of a text file. Raises `error`: as `read_bytes`, or it is no UTF-8."""
    return decode(read_bytes(path, error, most), str(path), error)


def decode(data: bytes, file: str, error: type[DistGraphError]) -> str:
    """The text of a file. Raises `error`: it is no UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as reason:
        raise error(
            f"{file}: cannot be read: byte {reason.start} is not UTF-8; write the file as UTF-8 text"
        ) from None


def read_json(path: str | Path, error: type[DistGraphError], most: int = MOST_BYTES) -> Any:
    """The plain data in a JSON file. Raises `error`: as `read_text` and `parse_json`."""
    items = max(MOST_ITEMS, most // 16)
    return parse_json(read_text(path, error, most), str(path), error, items)


def parse_json(text: str, file: str, error: type[DistGraphError], items: int = MOST_ITEMS) -> Any:
    """The plain data in a JSON text, within the limits of `check_data`.

    Raises:
        error: it is no JSON (line and column), a key is given twice, or a limit is passed (path).

    Example:
        >>> parse_json('{"a": [1, 2.5, null]}', "a.json", DistGraphError)
        {'a': [1, 2.5, None]}
        >>> parse_json('{"a": [1, NaN]}', "a.json", DistGraphError)
        Traceback (most recent call last):
        distgraph.errors.DistGraphError: a.json: a[1]: expected a number within 1e+40, got NaN
    """
    try:
        document = json.loads(text, object_pairs_hook=_object, parse_int=_whole)
    except json.JSONDecodeError as reason:
        position = f"{file}:{reason.lineno}:{reason.colno}"
        raise error(f"{position}: not JSON: {reason.msg}; fix the line") from None
    except RecursionError:
        raise error(f"{file}: {_TOO_DEEP}") from None
    check_data(document, file, error, items)
    return document


class _Doubled(dict[str, Any]):
    """A mapping of a document in which `key` is given twice; `check_data` refuses it."""

    key: str = ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) == len(pairs):
        return mapping
    result, keys = _Doubled(mapping), set[str]()
    for key, _ in pairs:
        if key in keys:
            result.key = key
            break
        keys.add(key)
    return result


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= len(str(MOST_NUMBER)) else math.inf


_TOO_DEEP: Final = f"objects and lists are nested more than {MOST_DEPTH} deep; write it flatter"


def check_data(document: object, file: str, error: type[DistGraphError], items: int = MOST_ITEMS) -> None:
    """Refuse plain data that is too large or too deep, or has values that no format of distgraph has.

    Data that occurs several times (YAML aliases) counts each time.

    Args:
        document: dicts, lists, texts, numbers, truth values and None, as a parser makes them.
        file: where it comes from, for messages.
        error: what is raised.
        items: entries that its objects and lists may have together.

    Raises:
        error: more than `items` entries or `MOST_DEPTH` levels, a key given twice, a number that is NaN or
            beyond `MOST_NUMBER`, a text with a NUL character or half of a surrogate pair.
    """
    stack: list[tuple[object, int, Any]] = [(document, 0, None)]
    counted = 0
    while stack:
        value, depth, path = stack.pop()
        children: Iterator[tuple[Any, Any]]
        if isinstance(value, dict):
            if isinstance(value, _Doubled):
                refuse(error, file, _steps(path), f"each key once, but {shown(value.key)} is given twice")
            for key in value:
                if isinstance(key, str) and not _is_text(key):
                    refuse(error, file, _steps(path), "keys without NUL and unpaired surrogates", key)
            children = iter(value.items())
        elif isinstance(value, list):
            children = iter(enumerate(value))
        else:
            _check_scalar(value, file, error, path)
            continue
        counted += len(value)
        if counted > items:
            raise error(f"{file}: has more than {items} entries, the limit for such a file; give another one")
        if depth >= MOST_DEPTH:
            raise error(f"{file}: {_TOO_DEEP}")
        for key, child in children:
            if isinstance(child, (dict, list)):
                stack.append((child, depth + 1, (path, key)))
            else:
                _check_scalar(child, file, error, (path, key))


def _check_scalar(value: object, file: str, error: type[DistGraphError], path: Any) -> None:
    kind = type(value)
    if kind is str:
        if not _is_text(str(value)):
            refuse(error, file, _steps(path), "a text without NUL and unpaired surrogates", value)
    elif (kind is float or kind is int) and not -MOST_NUMBER < value < MOST_NUMBER:  # type: ignore[operator]
        refuse(error, file, _steps(path), f"a number within {float(MOST_NUMBER):g}", value)


def _is_text(text: str) -> bool:
    if "\0" in text:
        return False
    return text.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in text)


def _steps(path: Any) -> list[Step]:
    """The steps of a path that `check_data` represents as nested pairs (path before, step)."""
    steps: list[Step] = []
    while path is not None:
        path, step = path
        steps.append(step if isinstance(step, int) else str(step))
    return steps[::-1]


_ABSENT: Final = object()


def refuse(
    error: type[DistGraphError], file: str, path: Sequence[Step], expected: str, got: object = _ABSENT
) -> NoReturn:
    """Raise `error` with a message that names file, path, expected form and, where given, actual value."""
    subject = f"{file}: {path_text(path)}" if path else file
    actual = "" if got is _ABSENT else f", got {shown(got)}"
    raise error(f"{subject}: expected {expected}{actual}")


def path_text(path: Sequence[Step]) -> str:
    """A path in a document as messages show it.

    Example:
        >>> path_text(["stages", 1, "mesh"]), path_text(["tensors", "param", "blocks.0.weight"])
        ('stages[1].mesh', "tensors.param['blocks.0.weight']")
    """
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step.isidentifier() and step.isascii() and len(step) <= _MOST_SHOWN:
            text += f".{step}" if text else step
        else:
            text += f"[{_cut(ascii(step[: 2 * _MOST_SHOWN]))}]"
    return text


def shown(value: object) -> str:
    """A value of a document for messages: JSON in ASCII, truncated where it is long."""
    text = ""
    for piece in json.JSONEncoder(default=lambda other: _cut(str(other))).iterencode(_short(value)):
        text += piece
        if len(text) > _MOST_SHOWN:
            break
    return _cut(text)


def shown_path(path: str | Path) -> str:
    """A path for messages, with unprintable characters escaped."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


def _short(value: object) -> object:
    if isinstance(value, str):
        return value[: 2 * _MOST_SHOWN]
    if isinstance(value, int) and abs(value) >= MOST_NUMBER:
        return math.inf if value > 0 else -math.inf  # Python writes no int of more than 4300 digits
    return value


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


class Record(dict[str, Any]):
    """A mapping that `dumps` writes on one line."""


def plain(value: Any) -> Any:
    """The form of a value in documents: fields of an entry, the text of what has a text form, else itself."""
    if isinstance(value, Mapping):
        kind = Record if isinstance(value, Record) else dict
        return kind((key, plain(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if hasattr(value, "parse"):
        return str(value)
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


def dumps(document: Mapping[str, Any]) -> str:
    """JSON text with one item a line and each `Record` on one line, in the given order of keys.

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
