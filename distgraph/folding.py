"""Names and numbers of repeated things in short: `blocks.{0..95}.weight`, `0-3, 7`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)

_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]*)(?![^.])")  # a part between dots that is a number
# a range stands between dots, or behind a word as in "layer {0..3}"
_RANGE = re.compile(r"(?<![^. ])\{([0-9]+)\.\.([0-9]+)\}(?![^.])")
_LITERAL = re.compile(r"(?<![^. ])\{+[0-9]+\.\.[0-9]+\}(?![^.])")  # part of a name that looks like a range
_ESCAPED = re.compile(r"(?<![^. ])\{(\{+[0-9]+\.\.[0-9]+\})(?![^.])")


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers in short; inverse of `parse_spans`. Others are listed one by one.

    Example:
        >>> spans([0, 1, 2, 7]), spans([2, 1]), spans([])
        ('0-2, 7', '2, 1', '')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def parse_spans(text: str) -> tuple[int, ...]:
    """Inverse of `spans`. Raises ValueError.

    Example:
        >>> parse_spans("0-2, 7")
        (0, 1, 2, 7)
    """
    found: list[int] = []
    for part in text.split(","):
        if not part.strip():
            continue
        first, dash, last = part.partition("-")
        found.extend(range(int(first), int(last if dash else first) + 1))
    return tuple(found)


def fold(table: Mapping[str, Item]) -> dict[str, Item]:
    """A table by name with the names of repeated layers in one, where all they have is equal.

    One number of a name is folded, the first that differs; order is that of first appearance. A part of a
    name that looks like a range gets one brace more.

    Example:
        >>> fold({"b.0.w": 1, "b.0.v": 2, "b.1.w": 1, "b.1.v": 2, "c.{0..9}": 3})
        {'b.{0..1}.w': 1, 'b.{0..1}.v': 2, 'c.{{0..9}': 3}
    """
    folded = [(_LITERAL.sub(r"{\g<0>", name), item) for name, item in table.items()]
    deepest = max((len(_NUMBER.findall(name)) for name in table), default=0)
    for place in range(deepest):
        folded = _fold_number(folded, place)
    return dict(folded)


def unfold(pattern: str) -> tuple[str, ...]:
    """Every name that a folded one stands for.

    Example:
        >>> unfold("b.{8..10}.w"), unfold("c.{{0..9}")
        (('b.8.w', 'b.9.w', 'b.10.w'), ('c.{0..9}',))
    """
    pieces = _RANGE.split(pattern)
    texts = [_ESCAPED.sub(r"\1", text) for text in pieces[::3]]
    ranges = zip(pieces[1::3], pieces[2::3], strict=True)
    numbers = itertools.product(*(range(int(a), int(b) + 1) for a, b in ranges))
    return tuple(
        "".join(itertools.chain(*itertools.zip_longest(texts, map(str, each), fillvalue="")))
        for each in numbers
    )


def _fold_number(rows: Sequence[tuple[str, Item]], place: int) -> list[tuple[str, Item]]:
    """Fold number `place` of all names, counted from the left, ranges included."""
    groups: dict[tuple[str, str | None, Item], list[int]] = {}
    for name, item in rows:
        number = _at(name, place)
        if number is None:
            groups[name, None, item] = []
        else:
            groups.setdefault((name[: number.start()], name[number.end() :], item), []).append(int(number[0]))
    folded = []
    for (head, tail, item), numbers in groups.items():
        texts = [f"{{{run}}}" if ".." in run else run for run in _runs(numbers)] or [""]
        folded += [(f"{head}{text}{tail or ''}", item) for text in texts]
    return folded


def _at(name: str, place: int) -> re.Match[str] | None:
    found = list(re.finditer(rf"{_RANGE.pattern}|{_NUMBER.pattern}", name))
    return found[place] if place < len(found) and not found[place][0].startswith("{") else None


def _runs(numbers: Iterable[int]) -> list[str]:
    listed = sorted(numbers)
    parts = spans(listed).split(", ") if listed else []
    return [part.replace("-", "..") for part in parts]
