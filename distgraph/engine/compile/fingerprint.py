"""The fingerprint of a serial training graph, by which a plan recognises its program."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from distgraph.ir.graph import Graph
from distgraph.ir.printer import attr_text
from distgraph.nn import Module
from distgraph.plan.plan import Program

_IGNORED = ("init", "salt")  # initial values and keys of random ops, which do not affect layouts


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
    return ", ".join(f"{key}={attr_text(_without_sources(value))}" for key, value in sorted(attrs.items()))


def _without_sources(value: Any) -> Any:
    """A subgraph without its source lines; any other value unchanged."""
    if not isinstance(value, Graph):
        return value
    ops = (
        replace(op, source="", attrs={key: _without_sources(each) for key, each in op.attrs.items()})
        for op in value.ops
    )
    return value.with_ops(ops)
