"""The settings of modules, and the error where they have changed since a program was traced.

A setting is an attribute that holds no parameter: a rate, a number of heads, an activation, another module. A
trace uses its value once, so an assignment after the trace has no effect on the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from distgraph.errors import GraphError
from distgraph.errors.arguments import shown
from distgraph.nn.module import Module, assigned_settings
from distgraph.nn.parameter import Parameter

_PLAIN = (bool, int, float, complex, str, bytes)


@dataclass(frozen=True, slots=True)
class Setting:
    """An attribute of a module and its value at some time.

    Attributes:
        path: of the module, and the name of the attribute.
        module: the module.
        name: of the attribute.
        value: what it was.
    """

    path: str
    module: Module
    name: str
    value: Any

    @property
    def now(self) -> Any:
        """The value that the module has now; None if it has no such attribute any more."""
        return vars(self.module).get(self.name)

    @property
    def changed(self) -> bool:
        """Whether another value was assigned. Numbers and texts count by value, other objects by identity."""
        return not _same(self.value, self.now)


class TracedSettings:
    """The settings of modules when a program was traced.

    Args:
        modules: the modules at the top; those below them count too.
    """

    def __init__(self, modules: Iterable[Module]) -> None:
        self._assigned = assigned_settings()
        self._settings = [
            Setting(f"{path}.{name}" if path else name, module, name, value)
            for top in modules
            for path, module in top.named_modules()
            for name, value in vars(module).items()
            if name != "_path" and not isinstance(value, Parameter)
        ]

    def check(self, trace: Callable[[], str]) -> None:
        """Raises GraphError when settings have changed, and a trace is another one than with those before.

        An attribute that `forward` does not read, such as a counter, may change.

        Args:
            trace: traces the program and returns its fingerprint.
        """
        if self._assigned == assigned_settings():
            return
        changed = [setting for setting in self._settings if setting.changed]
        if changed:
            now = trace()
            with _restored(changed):
                before = trace()
            if now != before and trace() == now:  # else each trace differs, as with numbers of np.random
                raise GraphError(_differing([s for s in changed if _matters(s, trace, now)] or changed))
        self._assigned = assigned_settings()


def _matters(setting: Setting, trace: Callable[[], str], now: str) -> bool:
    """Whether the trace is another one with the former value of this setting alone."""
    with _restored([setting]):
        return trace() != now


@contextmanager
def _restored(settings: Iterable[Setting]) -> Iterator[None]:
    """Gives attributes the values that they had; afterwards those that they have now."""
    present = [(setting, setting.name in vars(setting.module), setting.now) for setting in settings]
    for setting in settings:
        vars(setting.module)[setting.name] = setting.value
    try:
        yield
    finally:
        for setting, exists, value in present:
            if exists:
                vars(setting.module)[setting.name] = value
            else:
                del vars(setting.module)[setting.name]


def _same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return type(first) is type(second) and isinstance(first, _PLAIN) and bool(first == second)


def _differing(settings: list[Setting]) -> str:
    """The error for settings that have changed."""
    some = "; ".join(map(_difference, settings[:3]))
    rest = f", and {len(settings) - 3} more" if len(settings) > 3 else ""
    return (
        f"model has other settings than when this engine traced it: {some}{rest}; the program keeps those it "
        "was traced with. Set them back, or save a checkpoint, make a new Engine of the changed model, and "
        "load the checkpoint"
    )


def _difference(setting: Setting) -> str:
    before, now = shown(setting.value), shown(setting.now)
    change = "is another object" if before == now else f"was {before} and is {now}"
    return f"{setting.path} {change}"
