"""Human units to numbers and back: bytes, seconds, FLOP/s, bytes/s.

A number without a unit is refused: `80` may be GB, GiB or bytes, and the reader of a resource file must not
guess. `Origin` is the form in which a resource file says where a number comes from.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Annotated, Any, Final

from distgraph.serialization.fields import BeforeValidator, documented_as_text

_QUANTITY = re.compile(
    r"\s*(?P<number>[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)\s*(?P<unit>[A-Za-z]+\s*(/\s*[A-Za-z]+\s*)?)"
)


@dataclass(frozen=True, slots=True)
class Unit:
    """One kind of quantity: its name in messages, an example, and the unit of the parsed number."""

    name: str
    example: str
    base: str
    may_be_zero: bool = False

    @property
    def expectation(self) -> str:
        return f'a {self.name} such as "{self.example}"'


LEAST = 1e-24
MOST = 1e24
"""Of a quantity in its base unit: far from all hardware, and products of several are finite."""
_LONGEST = 60  # characters of a quantity: the pattern takes time that grows with the square of them

SIZE = Unit("size", "80 GiB", "byte")
BANDWIDTH = Unit("bandwidth", "25 Gbit/s", "byte / second")
TIME = Unit("time", "2 us", "second", may_be_zero=True)
WORK = Unit("amount of work", "2 GFLOP", "FLOP")
COMPUTE = Unit("compute rate", "125 TFLOP/s", "FLOP / second")


_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "m": 1e-3, "u": 1e-6, "n": 1e-9} | {
    prefix: 1024.0**power for power, prefix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), start=1)
}
_SYMBOLS = (
    ("B", "byte", 1.0), ("bit", "byte", 0.125), ("s", "second", 1.0), ("FLOP", "FLOP", 1.0),
    ("B/s", "byte / second", 1.0), ("bit/s", "byte / second", 0.125), ("FLOP/s", "FLOP / second", 1.0),
)  # fmt: skip
_FACTORS = {
    (prefix + symbol, base): multiple * factor
    for prefix, multiple in _PREFIXES.items()
    for symbol, base, factor in _SYMBOLS
}
"""(unit as it is written, base unit) -> factor, for the usual units. Pint reads all others: it takes longer
to load than all else of a resource file. The numbers are those of pint, bit for bit."""


@lru_cache(maxsize=1)
def _registry() -> Any:
    registry = import_module("pint").UnitRegistry()
    registry.define("FLOP = [flop]")
    return registry


def _in_base(quantity: re.Match[str], unit: Unit) -> float:
    """The number of a quantity in the base of the unit.

    Raises:
        ValueError: its unit is that of another quantity, or of none.
    """
    factor = _FACTORS.get(("".join(quantity["unit"].split()), unit.base))
    if factor is not None:
        return float(quantity["number"]) * factor
    errors = import_module("pint").errors
    try:
        return float(_registry().Quantity(quantity.string).to(unit.base).magnitude)
    except (errors.PintError, TypeError, AttributeError) as cause:
        raise ValueError(unit.expectation) from cause


@lru_cache(maxsize=4096)
def _parse_text(text: str, unit: Unit) -> float:
    quantity = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST else None
    if quantity is None:
        raise ValueError(unit.expectation)
    value = _in_base(quantity, unit)
    if not math.isfinite(value) or value < 0 or (value == 0 and not unit.may_be_zero):
        raise ValueError(unit.expectation + ("" if unit.may_be_zero else ", greater than zero"))
    if value and not LEAST <= value <= MOST:
        raise ValueError(f"{unit.expectation}, from {LEAST:g} to {MOST:g} {unit.base}")
    return value


def parse(value: object, unit: Unit) -> float:
    """A quantity in the unit's base (bytes, bytes/s, s, FLOP/s).

    Args:
        value: text such as "80 GiB"; anything else, a bare number included, is refused.
        unit: SIZE, BANDWIDTH, TIME or COMPUTE.
    Raises:
        ValueError: the text is not a quantity of that unit; the message is only the expectation.
    Example:
        >>> parse("25 Gbit/s", BANDWIDTH)
        3125000000.0
        >>> parse("80 GiB", SIZE) == 80 * 2**30
        True
    """
    if not isinstance(value, str):
        raise ValueError(unit.expectation)
    return _parse_text(value, unit)


def format_bytes(nbytes: float) -> str:
    """Binary prefixes, at most four digits: 1536 -> '1.5 KiB'."""
    for prefix in ("", "Ki", "Mi", "Gi", "Ti"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.4g} {prefix}B"
        nbytes /= 1024
    return f"{nbytes:.4g} PiB"


def format_si(value: float, unit: str) -> str:
    """Decimal prefixes: 3.125e9, 'B/s' -> '3.125 GB/s'; small numbers too: 2e-6, 's' -> '2 us'."""
    if value == 0:
        return f"0 {unit}"
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {prefix}{unit}"
    for factor, prefix in ((1e-3, "m"), (1e-6, "u")):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {prefix}{unit}"
    return f"{value / 1e-9:.4g} n{unit}"


def _parser(unit: Unit) -> BeforeValidator:
    return BeforeValidator(lambda value: parse(value, unit))


Size = Annotated[float, _parser(SIZE)]
Bandwidth = Annotated[float, _parser(BANDWIDTH)]
Seconds = Annotated[float, _parser(TIME)]
Work = Annotated[float, _parser(WORK)]
ComputeRate = Annotated[float, _parser(COMPUTE)]
"""Quantities of a resource file, in their base units."""


ORIGINS: Final = ("data sheet", "published", "measured", "fitted", "guess")
"""Kinds of origins: stated by the maker; measured by others and published; measured by `distgraph profile` or
by its authors; fitted to measured training steps; assumed."""
_ORIGIN = re.compile(rf"({'|'.join(ORIGINS)})(?: within (\d+(?:\.\d+)?)%)?(?:; (\S.*))?", re.DOTALL)


@documented_as_text(
    'an origin such as "data sheet" or "guess within 50%; as of the A100" (docs/planning/resources.md)'
)
@dataclass(frozen=True, slots=True)
class Origin:
    """Where a number of a resource file comes from.

    Attributes:
        kind: one of `ORIGINS`.
        error: expected relative error; None if not stated.
        source: publication, experiment or reason; "" if not stated.
    """

    kind: str
    error: float | None = None
    source: str = ""

    @classmethod
    def parse(cls, text: str) -> Origin:
        """An origin from its text: the kind, `within N%`, and after a semicolon the source.

        Raises:
            ValueError: the text has another form, or is a guess without an error.

        Example:
            >>> Origin.parse("guess within 50%; as of the A100")
            Origin(kind='guess', error=0.5, source='as of the A100')
        """
        match = _ORIGIN.fullmatch(text)
        if match is None or (match[1] == "guess" and match[2] is None):
            raise ValueError(text)
        return cls(match[1], None if match[2] is None else float(match[2]) / 100, match[3] or "")

    def __str__(self) -> str:
        within = "" if self.error is None else f" within {self.error * 100:g}%"
        return f"{self.kind}{within}" + (f"; {self.source}" if self.source else "")
