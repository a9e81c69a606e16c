"""Checks of arguments by their annotations, at the public call that gets them.

A wrong argument would otherwise be an exception inside of a library later, or have no effect. Annotations are
read as users mean them: an `int` is an integer of Python or NumPy and no bool, a `float` any real number, a
`Sequence` no text; `Any` and type variables take everything.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np

from distgraph.errors import DistGraphError, GraphError

T = TypeVar("T")
_MOST = 2**63 - 1  # of an integer of 64 bits
_GREATEST = float(np.finfo(np.float64).max)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Range of a number, for `Annotated`. It never contains nan, and an infinite number only where `most` is.

    Attributes:
        least, most: the smallest and the greatest number, inclusive.
        above, below: exclusive limits.
    """

    least: float = -_GREATEST
    above: float | None = None
    below: float | None = None
    most: float = _GREATEST

    def hold(self, number: Any) -> bool:
        """Whether a number is in the range."""
        number = number.item() if isinstance(number, np.generic) else number  # f32 cannot hold the bounds
        return bool(
            self.least <= number <= self.most
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        sides = (
            f"of at least {_in_full(self.least)}" if self.least != -_GREATEST else "",
            f"above {self.above:g}" if self.above is not None else "",
            f"below {self.below:g}" if self.below is not None else "",
            f"at most {_in_full(self.most)}" if self.most not in (_MOST, _GREATEST, math.inf) else "",
        )
        return " and ".join(filter(None, sides))


def _in_full(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


Count = Annotated[int, Bounds(least=1, most=_MOST)]
"""How many, one or more."""
Size = Annotated[int, Bounds(least=0, most=_MOST)]
"""How many, none allowed: the length of a dim, a number of layers."""
Finite = Annotated[float, Bounds()]
"""A number that is neither nan nor infinite."""
Positive = Annotated[float, Bounds(above=0)]
"""A finite number above 0."""
NonNegative = Annotated[float, Bounds(least=0)]
"""A finite number of at least 0."""
Share = Annotated[float, Bounds(least=0, most=1)]
"""A part of one."""
Rate = Annotated[float, Bounds(least=0, below=1)]
"""The share of something that is left out."""

CHECKED_LATER = "checked by the function that is called"
"""In `Annotated`: the function checks the argument itself, in words of its own."""


def is_integer(number: object) -> bool:
    """Whether an object is a whole number of Python or NumPy, and no bool."""
    if type(number) is int:  # nearly all are
        return True
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def is_number(number: object) -> bool:
    """Whether an object is a real number of Python, NumPy or ml_dtypes, and no bool."""
    value = number.item() if isinstance(number, np.generic) else number
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_count(subject: str, number: Any, error: type[DistGraphError], least: int = 1) -> None:
    """Raise an error where a number is no whole number, or below the least."""
    if not is_integer(number) or number < least:
        raise error(f"{subject} is {number!r} but must be a number from {least} up")


def shown(argument: Any) -> str:
    """A wrong argument in words, for an error."""
    if isinstance(argument, type):
        return f"the class {argument.__name__}"
    if isinstance(argument, int) and abs(argument) > _MOST:
        return f"an integer {'beyond' if argument > 0 else 'below -'}{' ' * (argument > 0)}{_MOST}"
    if argument is None or isinstance(argument, (str, int, float, np.number)):
        text = repr(argument.item() if isinstance(argument, np.number) else argument)
        return text if len(text) <= 80 else f"{text[:76]}...{text[0]}"
    if isinstance(argument, (list, tuple)) and len(argument) <= 4:
        items = ", ".join(map(shown, argument))
        return f"[{items}]" if isinstance(argument, list) else f"({items}{',' * (len(argument) == 1)})"
    if isinstance(argument, np.ndarray):
        return f"an array of shape {argument.shape}"
    article = "an" if type(argument).__name__[0].lower() in "aeiou" else "a"
    return f"{article} {type(argument).__name__}"


def check_takes(
    subject: str,
    name: str,
    function: Callable[..., Any],
    count: int,
    error: type[DistGraphError] = GraphError,
) -> None:
    """Raise an error where a function cannot be called with a number of arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except ValueError:  # some builtins have no signature; the call will tell
        return
    except TypeError:
        given = f"{count} argument{'s' if count != 1 else ''}"
        raise error(f"{name} of {subject} is called with {given} but does not take them; add them") from None


def array_of(subject: str, value: Any, error: type[DistGraphError] = GraphError) -> np.ndarray:
    """A value as an array. Raises an error where it is none, as rows of different lengths, or is masked."""
    check_unmasked(subject, value, error)
    try:
        return np.asarray(value)
    except ValueError as reason:
        raise error(f"{subject} is no array: {reason}; give an array, or lists of equal length") from None


def check_unmasked(subject: str, value: object, error: type[DistGraphError] = GraphError) -> None:
    """Raise an error where a value is an array of NumPy with a mask, whose masked elements would be used."""
    masked = sys.modules.get("numpy.ma")  # without it there is no such array
    if masked is not None and isinstance(value, masked.MaskedArray) and masked.is_masked(value):
        raise error(f"{subject} is a masked array but masks are not kept; fill it, such as x.filled(0)")


def switch_of(variable: str, error: type[DistGraphError], default: bool = False) -> bool:
    """Whether an environment variable is 1; `default` where it is not set.

    Raises:
        error: it is neither 0 nor 1.
    """
    text = os.environ.get(variable, "")
    if text not in ("", "0", "1"):
        raise error(f"environment variable {variable} is {text!r} but must be 0 or 1; change or unset it")
    return text == "1" if text else default


def checked_arguments(error: type[DistGraphError] = GraphError) -> Callable[[T], T]:
    """Decorator of a function, or of a class for its constructor: arguments have the types of annotations.

    Args:
        error: what a wrong argument raises.

    Example:
        >>> @checked_arguments()
        ... def repeated(text: str, count: Count = 2) -> str:
        ...     return text * count
        >>> repeated("ab", 1.5)
        Traceback (most recent call last):
        distgraph.errors.GraphError: count of repeated is 1.5 but must be an integer of at least 1
    """

    def decorate(target: Any) -> Any:
        if isinstance(target, type):
            constructor: Any = target.__init__  # type: ignore[misc]
            target.__init__ = _checked(constructor, target.__name__, error)  # type: ignore[misc]
            return target
        return _checked(target, target.__name__, error)

    return decorate


def check_argument(
    subject: str, name: str, argument: Any, hint: Any, error: type[DistGraphError] = GraphError
) -> None:
    """Raise an error where an argument has not the type of an annotation."""
    _raise_unless(_check(hint), subject, name, argument, error)


def check_fields(instance: Any, error: type[DistGraphError] = GraphError, subject: str = "") -> None:
    """Raise an error where a field of a dataclass has not the type of its annotation; for `__post_init__`.

    Args:
        instance: the dataclass.
        error: what a wrong field raises.
        subject: what the user called, by default the class.
    """
    kind: Any = type(instance)
    checks = _checks_of_class(kind)
    for field in fields(instance):
        check = checks.get(field.name, _ANYTHING)
        _raise_unless(check, subject or kind.__name__, field.name, getattr(instance, field.name), error)


def _checked(function: Any, subject: str, error: type[DistGraphError]) -> Any:
    code = inspect.unwrap(function).__code__
    names = code.co_varnames[: code.co_argcount]
    checks: dict[str, Check] = {}
    by_position: list[tuple[int, Callable[[Any], bool]]] = []  # of what is given by position, what is checked
    is_constructor = function.__name__ == "__init__"

    @functools.wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        if not checks:
            checks.update(_checks_of(function))
            by_position[:] = [(i, checks[name].holds) for i, name in enumerate(names) if name in checks]
        given = len(args)
        for position, holds in by_position:
            if position < given and not holds(args[position]):
                refuse(args, kwargs)
        for name, argument in kwargs.items():
            if not checks.get(name, _ANYTHING).holds(argument):
                refuse(args, kwargs)
        return function(*args, **kwargs)

    def refuse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        owner = type(args[0]).__name__ if is_constructor else subject
        for name, argument in (*zip(names, args, strict=False), *kwargs.items()):
            _raise_unless(checks.get(name, _ANYTHING), owner, name, argument, error)

    return checking


def _raise_unless(check: Check, subject: str, name: str, argument: Any, error: type[DistGraphError]) -> None:
    if not check.holds(argument):
        raise error(f"{name} of {subject} is {shown(argument)} but must be {check.words}")


@dataclass(frozen=True, slots=True)
class Check:
    """What an annotation asks of an argument: a predicate, and the words for it in an error."""

    holds: Callable[[Any], bool]
    words: str


def _checks_of(owner: Any) -> dict[str, Check]:
    """Name -> check of the annotations of a function, or of the fields that classes of distgraph declare.

    What a function returns is not evaluated: its type may be one that is imported for type checkers only.
    """
    hints: dict[str, Any] = {}
    if isinstance(owner, type):
        for base in reversed(owner.__mro__):
            if base.__module__.startswith("distgraph."):
                hints |= typing.get_type_hints(base, include_extras=True)
    else:
        given = {name: hint for name, hint in owner.__annotations__.items() if name != "return"}
        home = inspect.unwrap(owner).__globals__
        named = types.SimpleNamespace(__annotations__=given)
        hints = typing.get_type_hints(named, home, include_extras=True)
    checks = {name: _check(hint) for name, hint in hints.items()}
    return {name: check for name, check in checks.items() if check is not _ANYTHING} or {"": _ANYTHING}


@functools.cache
def _checks_of_class(owner: type) -> dict[str, Check]:
    return _checks_of(owner)


_ANYTHING = Check(lambda _: True, "anything")
_PLAIN = {
    int: Check(is_integer, "an integer"),
    float: Check(is_number, "a number"),
    bool: Check(lambda x: isinstance(x, (bool, np.bool_)), "True or False"),
    str: Check(lambda x: isinstance(x, str), "text"),
    Path: Check(lambda x: isinstance(x, Path), "a path"),
    type(None): Check(lambda x: x is None, "None"),
}


@functools.cache
def _check(hint: Any) -> Check:
    """The check of an annotation."""
    if hint is Any:
        return _ANYTHING
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _ANYTHING if CHECKED_LATER in parts else _bounded(_check(parts[0]), parts[1:])
    if origin in (typing.Union, types.UnionType):
        return _any_of([_check(part) for part in parts])
    if origin is typing.Literal:
        words = _listed([repr(part) for part in parts])
        return Check(lambda x: any(type(x) is type(part) and x == part for part in parts), words)
    kind = origin or hint
    if kind is Callable:
        return Check(lambda x: callable(x) and not isinstance(x, type), "a function")
    if kind is tuple and parts and parts[-1] is not Ellipsis:
        return _fields([_check(part) for part in parts])
    if kind in (Sequence, list, tuple):
        return _items(_check(parts[0]) if parts else _ANYTHING)
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return _mapping([_check(part) for part in parts] or [_ANYTHING] * 2)
    if kind in (Iterable, AbstractSet):
        return Check(lambda x: isinstance(x, kind) and not isinstance(x, (str, bytes)), "a collection")
    if isinstance(kind, type) and kind is not object:
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        return Check(lambda x: isinstance(x, kind), f"{article} {kind.__name__}")
    return _ANYTHING


def _bounded(base: Check, bounds: Sequence[Any]) -> Check:
    bounds = [bound for bound in bounds if isinstance(bound, Bounds)]
    limits = " and ".join(filter(None, map(str, bounds)))
    words = f"{base.words} {limits}" if limits else base.words.replace("a ", "a finite ", 1)
    is_closed = all(bound.above is None and bound.below is None for bound in bounds)
    is_range = is_closed and base in (_PLAIN[int], _PLAIN[float])
    least = max((bound.least for bound in bounds), default=-math.inf)
    most = min((bound.most for bound in bounds), default=math.inf)

    def holds(argument: Any) -> bool:
        if is_range and type(argument) is int:  # nearly all are
            return least <= argument <= most
        return base.holds(argument) and all(bound.hold(argument) for bound in bounds)

    return Check(holds, words)


def _any_of(checks: Sequence[Check]) -> Check:
    if _ANYTHING in checks:
        return _ANYTHING
    words = list(dict.fromkeys(check.words for check in checks))
    return Check(lambda x: any(check.holds(x) for check in checks), _listed(words))


def _listed(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _is_sequence(argument: Any) -> bool:
    if type(argument) in (tuple, list):  # nearly all are
        return True
    if isinstance(argument, np.ndarray):
        return argument.ndim > 0
    return isinstance(argument, Sequence) and not isinstance(argument, (str, bytes, bytearray))


def _items(item: Check) -> Check:
    if item is _ANYTHING:
        return Check(_is_sequence, "a list")
    holds = item.holds
    return Check(lambda x: _is_sequence(x) and all(map(holds, x)), f"a list (each item: {item.words})")


def _fields(checks: Sequence[Check]) -> Check:
    def holds(argument: Any) -> bool:
        if not _is_sequence(argument) or len(argument) != len(checks):
            return False
        return all(check.holds(x) for check, x in zip(checks, argument, strict=True))

    return Check(holds, f"a tuple of {', '.join(check.words for check in checks)}")


def _mapping(checks: Sequence[Check]) -> Check:
    def holds(argument: Any) -> bool:
        return isinstance(argument, Mapping) and all(
            checks[0].holds(key) and checks[1].holds(value) for key, value in argument.items()
        )

    words = "a dict" if checks[1] is _ANYTHING else f"a dict (each value: {checks[1].words})"
    return Check(holds, words)
