"""Range notation: `0-3, 7` for numbers, `blocks.{0..95}.weight` for the names of repeated layers."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from distgraph.errors import GraphError

Item = TypeVar("Item", bound=Hashable)

MOST_NAMES = 1 << 20
"""Numbers or names that a short form may stand for: as many as a model of 100,000 layers has parameters."""
_SPAN = re.compile(r"\s*([0-9]{1,18})(?:\s*-\s*([0-9]{1,18}))?\s*")

_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,17})(?![^.])")  # a part between dots that is a number
# a range stands between dots, or behind a word as in "layer {0..3}"
_RANGE = re.compile(r"(?<![^. ])\{([0-9]{1,18})\.\.([0-9]{1,18})\}(?![^.])")
_LITERAL = re.compile(r"(?<![^. ])\{+[0-9]+\.\.[0-9]+\}(?![^.])")  # part of a name that looks like a range
_ESCAPED = re.compile(r"(?<![^. ])\{(\{+[0-9]+\.\.[0-9]+\})(?![^.])")


def spans(numbers: Iterable[int]) -> str:
    """Text of numbers in which ascending consecutive ones are joined to ranges; inverse of `parse_spans`.

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


def parse_spans(text: str, most: int = MOST_NAMES) -> tuple[int, ...]:
    """Inverse of `spans`.

    Raises:
        ValueError: the text is malformed, a range descends, or there are more than `most` numbers.

    Example:
        >>> parse_spans("0-2, 7")
        (0, 1, 2, 7)
    """
    numbers: list[int] = []
    for part in text.split(",") if text.strip() else ():
        match = _SPAN.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is no number and no range such as 0-7")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first or len(numbers) + last + 1 - first > most:
            raise ValueError(f"{part!r} stands for no numbers, or for more than {most}")
        numbers.extend(range(first, last + 1))
    return tuple(numbers)


def fold(table: Mapping[str, Item]) -> dict[str, Item]:
    """Joins the entries of repeated layers whose values are equal: `b.0` and `b.1` become `b.{0..1}`.

    In each name only the first number that differs becomes a range. The order is that of first appearance. A
    part of a name that already looks like a range is escaped with one more brace.

    Example:
        >>> fold({"b.0.w": 1, "b.0.v": 2, "b.1.w": 1, "b.1.v": 2, "c.{0..9}": 3})
        {'b.{0..1}.w': 1, 'b.{0..1}.v': 2, 'c.{{0..9}': 3}
    """
    folded = [(_LITERAL.sub(r"{\g<0>", name), item) for name, item in table.items()]
    most_numbers = max((len(_NUMBER.findall(name)) for name in table), default=0)
    for position in range(most_numbers):
        folded = _fold_number(folded, position)
    return dict(folded)


def unfold(pattern: str, most: int = MOST_NAMES) -> tuple[str, ...]:
    """Every name that a pattern made by `fold` matches.

    Raises:
        GraphError: the pattern matches more than `most` names, or a range descends.

    Example:
        >>> unfold("b.{8..10}.w"), unfold("c.{{0..9}")
        (('b.8.w', 'b.9.w', 'b.10.w'), ('c.{0..9}',))
    """
    pieces = _RANGE.split(pattern)
    texts = [_ESCAPED.sub(r"\1", text) for text in pieces[::3]]
    ranges = [range(int(a), int(b) + 1) for a, b in zip(pieces[1::3], pieces[2::3], strict=True)]
    if not 0 < math.prod(map(len, ranges)) <= most:
        raise GraphError(f"{pattern[:60]!r} stands for no name, or for more than {most}; name fewer at once")
    numbers = itertools.product(*ranges)
    return tuple(
        "".join(itertools.chain(*itertools.zip_longest(texts, map(str, choice), fillvalue="")))
        for choice in numbers
    )


def _fold_number(items: Sequence[tuple[str, Item]], position: int) -> list[tuple[str, Item]]:
    """Joins names that differ only in their number at `position`, counted from the left, ranges included."""
    groups: dict[tuple[str, str | None, Item], list[int]] = {}
    for name, item in items:
        number = _number_at(name, position)
        if number is None:
            groups[name, None, item] = []
        else:
            groups.setdefault((name[: number.start()], name[number.end() :], item), []).append(int(number[0]))
    folded = []
    for (head, tail, item), numbers in groups.items():
        texts = [f"{{{run}}}" if ".." in run else run for run in _runs(numbers)] or [""]
        folded += [(f"{head}{text}{tail or ''}", item) for text in texts]
    return folded


def _number_at(name: str, position: int) -> re.Match[str] | None:
    matches = list(re.finditer(rf"{_RANGE.pattern}|{_NUMBER.pattern}", name))
    return matches[position] if position < len(matches) and not matches[position][0].startswith("{") else None


def _runs(numbers: Iterable[int]) -> list[str]:
    ascending = sorted(numbers)
    parts = spans(ascending).split(", ") if ascending else []
    return [part.replace("-", "..") for part in parts]
