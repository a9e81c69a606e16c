"""A public call with arguments that fit, and how it takes others in their place."""

from __future__ import annotations

import inspect
import signal
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from distgraph.errors import DistGraphError

SECONDS = 20
WRONG: dict[str, Any] = {
    "None": None,
    "text": "zz",
    "empty text": "",
    "3": 3,
    "0": 0,
    "-1": -1,
    "10**30": 10**30,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "bytes": b"q",
    "empty list": [],
    "list of text": ["x"],
    "list of None": [None],
    "list of fractions": [1.5],
    "nested list": [[1]],
    "range": range(3),
    "set": {1},
    "empty dict": {},
    "dict of text": {"a": "b"},
    "function": lambda *args, **kwargs: 0,
    "complex": 1j,
    "-10**30": -(10**30),
    "object": object(),
    "class": int,
    "array": np.zeros(3, "f4"),
    "True": True,
}


@dataclass(frozen=True)
class PublicCall:
    """A call of the public interface.

    Attributes:
        call: takes all of `arguments` by name, and does with them what a user would do next.
        owner: the function or class whose annotations say what the arguments are.
        arguments: that fit, by name.
    """

    call: Callable[..., Any]
    owner: Any
    arguments: Mapping[str, Any]

    def outcome(self, argument: str, wrong: Any) -> str:
        """What a wrong argument leads to: "", or what is not right about it."""
        given = self.arguments[argument]
        if type(wrong) is type(given) and not isinstance(wrong, (np.ndarray, list, dict)) and wrong == given:
            return ""
        try:
            with _limit():
                self.call(**{**self.arguments, argument: wrong})
        except DistGraphError as error:
            return "" if len(str(error)) < 2000 else f"a message of {len(str(error))} characters"
        except TimeoutError:
            return f"no end within {SECONDS} s"
        except Exception as error:  # noqa: BLE001 (whatever it is, it is what the test looks for)
            last = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__} at {last.filename.rsplit('/', 1)[-1]}:{last.lineno}: {error}"
        return "" if self._allows(argument, wrong) else "accepted, though the annotation excludes it"

    def _allows(self, argument: str, wrong: Any) -> bool:
        hint = self.hints().get(argument, Any)
        return _fits(hint, wrong) or (isinstance(wrong, (list, range)) and _fits(hint, tuple(wrong)))

    def hints(self) -> dict[str, Any]:
        """Annotations by name."""
        owner = self.owner
        if isinstance(owner, type) and not is_dataclass(owner):
            owner = owner.__init__  # type: ignore[misc]
        return _hints_of(owner)


@cache
def _hints_of(owner: Any) -> dict[str, Any]:
    if isinstance(owner, type):
        return typing.get_type_hints(owner, include_extras=True)
    given = {name: hint for name, hint in owner.__annotations__.items() if name != "return"}
    named = SimpleNamespace(__annotations__=given)
    return typing.get_type_hints(named, inspect.unwrap(owner).__globals__, include_extras=True)


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True, strict=True))
    except PydanticUserError:  # of a model, which has a configuration of its own
        return TypeAdapter(hint)


def _fits(hint: Any, value: Any) -> bool:
    """Whether pydantic takes a value for an annotation as it is."""
    try:
        _adapter(hint).validate_python(value)
    except ValidationError:
        return False
    return True


@contextmanager
def _limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
