"""Fields of a strategy as text, such as "precision=bf16 zero=2 mesh=dp:2,tp:2", for the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distgraph.errors import ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.range_notation import parse_spans
from distgraph.plan.strategy import Strategy

_RECOMPUTED: Mapping[str, bool | str] = {"all": True, "none": False, "auto": "auto"}


def _mesh(text: str) -> ProcessMesh:
    """A mesh of consecutive ranks from "dp:2,tp:4"."""
    pairs = [part.split(":") for part in text.split(",")]
    sizes = dict(pairs)
    if len(sizes) < len(pairs):
        raise ValueError("an axis is there twice")
    return ProcessMesh.grid(**{axis: int(size) for axis, size in sizes.items()})


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _recomputed(text: str) -> bool | str | tuple[int, ...]:
    return _RECOMPUTED[text] if text in _RECOMPUTED else parse_spans(text)


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _precision(text: str) -> str | None:
    return None if text == "none" else text


FORMS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "mode": (str, "a mode"),
    "micro_batches": (int, "a number"),
    "schedule": (str, "the name of a schedule"),
    "stages": (int, "a number"),
    "borders": (parse_spans, "numbers of layers such as 4,8"),
    "layers": (int, "a number"),
    "recompute": (_recomputed, "all, none, auto, or numbers of layers such as 0-3,7"),
    "zero": (int, "a number"),
    "uniform": (_flag, "true or false"),
    "memory": (str, "a size such as 8GiB"),
    "devices": (int, "a number"),
    "seconds": (float, "a number"),
    "runtime": (str, "the name of a runtime"),
    "mesh": (_mesh, "axes and sizes such as dp:2,tp:4"),
    "batch_axis": (_names, "axes such as dp"),
    "refine": (str, "a policy"),
    "refine_budget": (int, "a number"),
    "device": (str, "a device"),
    "cuda_graphs": (_flag, "true or false"),
    "executor": (str, "static or actors"),
    "nonfinite": (str, "a policy"),
    "verify_replicas": (int, "a number"),
    "passes": (_names, "changes of passes such as -fuse_reductions,a=b"),
    "precision": (str, "bf16 or fp16"),
    "gradient_precision": (_precision, "bf16, or none"),
}
"""Field of `Strategy` -> how its text is read, and what the text must be."""


def strategy_fields(text: str) -> dict[str, Any]:
    """The fields that a text gives.

    Args:
        text: `field=value`, separated by blanks.

    Raises:
        ShardingError: a part is no `field=value`, there is no such field, it is given twice, or its value has
            another form; and what `Strategy` refuses by itself.

    Example:
        >>> strategy_fields("precision=bf16 recompute=0-2")
        {'precision': 'bf16', 'recompute': (0, 1, 2)}
    """
    fields: dict[str, Any] = {}
    for part in text.split():
        name, equals, value = part.partition("=")
        if not equals or name not in FORMS:
            raise ShardingError(
                f"strategy: {part!r} is no field of Strategy with a value; write field=value, with one of "
                f"{', '.join(FORMS)}"
            )
        if name in fields:
            raise ShardingError(f"strategy: {name} is given twice, also as {value!r}; leave one out")
        read, form = FORMS[name]
        try:
            fields[name] = read(value)
        except (ValueError, KeyError):
            raise ShardingError(f"strategy: {name} is {value!r} but must be {form}") from None
    return fields


def with_fields(strategy: Strategy, text: str) -> Strategy:
    """A strategy with the fields that a text gives in place of its own. Raises ShardingError: see
    `strategy_fields`, and what contradicts the other fields."""
    values = {name: getattr(strategy, name) for name in FORMS}
    return Strategy(**{**values, **strategy_fields(text)}) if text else strategy
