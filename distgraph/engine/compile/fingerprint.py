"""What a plan is for: a serial training graph, known again by its fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from distgraph.ir.graph import Graph
from distgraph.ir.printer import attr_text
from distgraph.nn import Module
from distgraph.plan.plan import Program

_FREE = ("init", "salt")  # what a parameter starts from, and the key of a random op: no matter for layouts


def program_of(model: Callable[..., Any], serial: Graph) -> Program:
    """What a serial training graph of a model is, in short."""
    name = type(model).__name__ if isinstance(model, Module) else getattr(model, "__name__", "model")
    inputs = {
        str(op.attrs["name"]): op.result.type for op in serial.sources("input") if op.result.shape
    }  # numbers such as the learning rate are not of the batch
    parameters = sum(op.result.size for op in serial.sources("param"))
    return Program(name=name, fingerprint=fingerprint(serial), parameters=parameters, inputs=inputs)


def fingerprint(serial: Graph) -> str:
    """SHA-256 of what a graph computes: kinds, attributes, shapes and who reads whom.

    Names of values, scopes, source lines, layouts, initial values and keys of random ops are no part of it.
    """
    found = hashlib.sha256()
    number: dict[str, int] = {}
    for op in serial.ops:
        attrs = {key: value for key, value in op.attrs.items() if key not in _FREE}
        operands = [number[value.name] for value in op.operands]
        types = [value.type for value in op.results]
        for value in op.results:
            number[value.name] = len(number)
        found.update(f"{op.kind} {op.role} {_attrs(attrs)} {operands} {types}\n".encode())
    ends = [(label, number[value.name]) for label, value in serial.outputs]
    ends += [(f"{number[old]}", number[value.name]) for old, value in serial.updates]
    found.update(str(ends).encode())
    return found.hexdigest()


def _attrs(attrs: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={attr_text(_bare(value))}" for key, value in sorted(attrs.items()))


def _bare(value: Any) -> Any:
    """A subgraph without source lines; anything else as it is."""
    if not isinstance(value, Graph):
        return value
    ops = (
        replace(op, source="", attrs={key: _bare(each) for key, each in op.attrs.items()}) for op in value.ops
    )
    return value.with_ops(ops)
