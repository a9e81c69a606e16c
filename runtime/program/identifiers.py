"""Identifiers, literals and comments of generated Python: no text of a user is ever code.

Names of values, parameters and inputs are any text. An identifier takes from such a name its ASCII letters
and digits, for the reader, and a number that no other identifier of the module has; so it differs from names
that Unicode normalisation makes equal, from Python's keywords and from the names of the generator.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Hashable, Iterable

_LONGEST = 40
_NOT_IDENTIFIER = re.compile(r"[^A-Za-z0-9_]+")


class Identifiers:
    """All identifiers of one generated module, each of them once.

    Args:
        reserved: identifiers that the generated text uses itself.

    Example:
        >>> names = Identifiers(["m"])
        >>> names.of("a", "fc1.weight"), names.of("b", "fc1 weight"), names.of("a", "fc1.weight")
        ('fc1_weight_1', 'fc1_weight_2', 'fc1_weight_1')
        >>> names.once("m"), names.once("add"), names.once("add")
        ('m_3', 'add', 'add_4')
    """

    def __init__(self, reserved: Iterable[str]) -> None:
        self._taken = {*reserved, *keyword.kwlist, *keyword.softkwlist, *dir(builtins)}
        self._identifiers: dict[Hashable, str] = {}
        self._count = 0

    def of(self, key: Hashable, hint: str) -> str:
        """The identifier of a key: always the same one for the same key, always with a number."""
        if key not in self._identifiers:
            self._identifiers[key] = self._numbered(_cleaned(hint))
        return self._identifiers[key]

    def once(self, hint: str) -> str:
        """A new identifier: the hint itself where it is free."""
        text = _cleaned(hint)
        if text in self._taken:
            return self._numbered(text)
        self._taken.add(text)
        return text

    def _numbered(self, text: str) -> str:
        while True:
            self._count += 1
            name = f"{text}_{self._count}"
            if name not in self._taken:
                self._taken.add(name)
                return name


def literal(text: str) -> str:
    """A Python literal of a text, in ASCII."""
    return ascii(str(text))


def commented(text: str) -> str:
    """A text for a comment: unchanged where it is printable ASCII, else as a literal."""
    return text if text.isascii() and text.isprintable() else literal(text)


def _cleaned(hint: str) -> str:
    text = _NOT_IDENTIFIER.sub("_", str(hint)[: 4 * _LONGEST]).strip("_")[:_LONGEST]
    return text if text[:1].isalpha() else f"v{text}"
