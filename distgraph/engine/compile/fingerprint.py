"""The fingerprint of a serial training graph, by which a plan recognises its program."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from distgraph.ir.graph import Graph
from distgraph.ir.printer import attr_text
from distgraph.nn import Module
from distgraph.passes.serial.loops.flatten import HELD, RESULTS, flatten
from distgraph.plan.plan import Program

_IGNORED = ("init", "salt", RESULTS)  # initial values, keys of random ops, names: they do not affect layouts


def program_of(model: Callable[..., Any], serial: Graph) -> Program:
    """The `Program` component of a plan: name, fingerprint, parameters and inputs of a model."""
    name = type(model).__name__ if isinstance(model, Module) else getattr(model, "__name__", "model")
    inputs = {
        str(op.attrs["name"]): op.result.type for op in serial.sources("input") if op.result.shape
    }  # scalars such as the learning rate are no part of a batch
    parameters = sum(op.result.size for op in serial.sources("param"))
    return Program(name=name, fingerprint=fingerprint(serial), parameters=parameters, inputs=inputs)


def fingerprint(serial: Graph) -> str:
    """SHA-256 of what a graph computes: kinds, attributes, types and operands of its ops, in order.

    Names of values, scopes, source lines, layouts, initial values and keys of random ops do not count.
    """
    hashed = hashlib.sha256()
    number: dict[str, int] = {}
    serial = flatten(serial)
    for op in serial.ops:
        attrs = {key: value for key, value in op.attrs.items() if key not in _IGNORED}
        operands = [number[value.name] for value in op.operands]
        types = [value.type for value in op.results]
        for value in op.results:
            number[value.name] = len(number)
        hashed.update(f"{op.kind} {op.role} {_attrs(attrs)} {operands} {types}\n".encode())
    ends = [(label, number[value.name]) for label, value in serial.outputs]
    ends += [(f"{number[old]}", number[value.name]) for old, value in serial.updates]
    hashed.update(str(ends).encode())
    return hashed.hexdigest()


def _attrs(attrs: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}={attr_text(_without_bodies(key, value))}" for key, value in sorted(attrs.items())
    )


def _without_bodies(key: str, value: Any) -> Any:
    """The attributes of a flat loop without its bodies, whose ops are in the flat program."""
    if key != HELD:
        return value
    return {name: each for name, each in value.items() if isinstance(each, (bool, int))}
