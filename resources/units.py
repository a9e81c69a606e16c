"""Human units to numbers and back: bytes, seconds, FLOP/s, bytes/s.

A number without a unit is refused: `80` may be GB, GiB or bytes, and the reader of a resource file must not
guess.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

import pint

_QUANTITY = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*[A-Za-z]+\s*(/\s*[A-Za-z]+\s*)?")


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


@lru_cache(maxsize=1)
def _registry() -> pint.UnitRegistry[float]:
    registry: pint.UnitRegistry[float] = pint.UnitRegistry()
    registry.define("FLOP = [flop]")
    return registry


@lru_cache(maxsize=4096)
def _parse_text(text: str, unit: Unit) -> float:
    if len(text) > _LONGEST or not _QUANTITY.fullmatch(text):
        raise ValueError(unit.expectation)
    try:
        value = float(_registry().Quantity(text).to(unit.base).magnitude)
    except (pint.errors.PintError, TypeError, AttributeError) as cause:
        raise ValueError(unit.expectation) from cause
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
