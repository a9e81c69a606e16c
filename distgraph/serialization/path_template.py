"""Paths with `{epoch}` and `{step}` in them, such as "runs/{step:06d}"."""

from __future__ import annotations

import re
from pathlib import Path
from string import Formatter
from typing import Final

from distgraph.errors import RuntimeFault

FIELDS: Final = ("epoch", "step")
_WIDTH: Final = re.compile(r"0?\d{0,2}d?", re.ASCII)


class PathTemplate:
    """A path that may differ from epoch to epoch, or from step to step.

    Args:
        text: may hold `{epoch}` and `{step}`, with a width such as `{step:06d}`; a brace itself is doubled.
        owner: class that uses it, for messages.

    Attributes:
        fields: the fields in the text, such as "step".
        root: the folder above the first part with a field; the path itself where there is no field.

    Raises:
        RuntimeFault: it is no path, is empty, or its braces mean something else.

    Example:
        >>> path = PathTemplate("runs/{step:04d}", "ModelCheckpoint")
        >>> str(path.at(epoch=2, step=17)), str(path.root), path.fields
        ('runs/0017', 'runs', ('step',))
    """

    def __init__(self, text: str | Path, owner: str) -> None:
        if not isinstance(text, (str, Path)):
            raise RuntimeFault(f"{owner}: path is {text!r} but must be a text or a Path")
        if not str(text):
            raise RuntimeFault(f'{owner}: path "" cannot be written: it is no path; choose another')
        self.text = str(text)
        try:
            parts = list(Formatter().parse(self.text))
        except ValueError as error:
            raise self._mistake(owner, str(error)) from None
        for _, name, width, conversion in parts:
            if name is None:
                continue
            if name not in FIELDS:
                raise self._mistake(owner, f"it has {{{name}}}")
            if conversion or not _WIDTH.fullmatch(width or ""):
                raise self._mistake(owner, f"{{{name}}} takes a width such as 06d and nothing else")
        self.fields = tuple(name for name in FIELDS if name in {each[1] for each in parts})
        first = next((number for number, part in enumerate(parts) if part[1] is not None), len(parts))
        literal = "".join(part[0] for part in parts[: first + 1])
        whole = not self.fields or literal.endswith("/")
        self.root = Path(literal) if whole else Path(literal).parent
        self.depth = len(self.at(0, 0).parts) - len(self.root.parts)

    def at(self, epoch: int, step: int) -> Path:
        """The path at a point of training."""
        return Path(self.text.format(epoch=epoch, step=step))

    def _mistake(self, owner: str, why: str) -> RuntimeFault:
        return RuntimeFault(
            f"{owner}: path {self.text!r} cannot be filled in: {why}; {{epoch}} and {{step}} are replaced, "
            f"other braces are written {{{{ and }}}}"
        )
