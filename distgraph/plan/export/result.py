"""The result of an export, and functions that the exporters share."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distgraph.errors import GraphError
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.serialization.atomic_files import write_atomically

if TYPE_CHECKING:
    from distgraph.plan.export.module_interface import Surface
    from distgraph.plan.plan import Plan

_MOST_NAMES = 4  # of a list in a message


@dataclass(frozen=True, slots=True)
class Export:
    """A plan in the terms of another framework. Print it for the source.

    Attributes:
        framework: "jax", "torch" or "megatron".
        data: the same as JSON: dicts, lists, texts, numbers.
        source: text of a Python module; a plan for Megatron-LM is a shell's list of arguments.
        notes: properties of the plan that the framework, or its usual interface, does not express, one each.
    """

    framework: str
    data: Mapping[str, Any]
    source: str
    notes: tuple[str, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write the data where the name ends in .json, otherwise the source.

        Raises:
            GraphError: it cannot be written there.
        """
        as_data = str(path).endswith(".json")
        text = json.dumps({**self.data, "notes": list(self.notes)}, indent=1) + "\n"
        write_atomically(path, text if as_data else self.source, GraphError)

    def __str__(self) -> str:
        return self.source


def surface(plan: Plan) -> Surface:
    """The surface of a plan. Raises GraphError where it has none."""
    interface: Surface | None = plan.surface
    if interface is None:
        raise GraphError(
            f"plan of {plan.program.name} has no surface but an export needs shapes and modules; make the "
            "plan from its program again"
        )
    return interface


def dims(spec: ShardSpec) -> list[Any]:
    """A spec as JSON: for each dim None, an axis, or a list of axes."""
    return [None if not dim else dim[0] if len(dim) == 1 else list(dim) for dim in spec.dims]


def mesh_data(mesh: ProcessMesh) -> dict[str, Any]:
    """A mesh as JSON."""
    return {"axes": list(mesh.axes), "shape": list(mesh.shape), "ranks": mesh.ranks.tolist()}


def data_axes(plan: Plan, stage: int) -> tuple[str, ...]:
    """Axes of a stage's mesh that split the leading dim of an input of the program or of a module."""
    mesh = plan.stages[stage].mesh
    specs = [t.spec for t in plan.tensors.values() if t.kind == "input" and t.stage == stage]
    specs += [f.spec for p in surface(plan).modules.values() if p.stage == stage for f in p.enters]
    leading = {axis for spec in specs if spec.dims for axis in spec.dims[0]}
    return tuple(axis for axis in mesh.axes if axis in leading and mesh.axis_size(axis) > 1)


def owner(state: str) -> str:
    """Name of the parameter of an optimiser's state."""
    return state.rpartition(".")[0]


def header(plan: Plan, what: str, notes: Sequence[str]) -> str:
    """Docstring of an emitted module."""
    lines = [f"{what} of {plan.program.name}, exported from a distgraph plan."]
    lines += ["", "Not expressed:"] if notes else []
    lines += [line for note in notes for line in textwrap.wrap(f"- {note}", 100, subsequent_indent="  ")]
    body = "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")
    shown = "".join(c if c == "\n" or (c.isascii() and c.isprintable()) else ascii(c)[1:-1] for c in body)
    return f'"""{shown}\n"""\n\n'


def quoted(text: str) -> str:
    """A Python literal of a text, in ASCII."""
    plain = all(ord(character) < 0x10000 for character in text)  # others are two escapes in JSON
    return json.dumps(text) if plain else ascii(text)


def quoted_list(texts: Iterable[str]) -> str:
    """A Python literal of a list of texts."""
    return f"[{', '.join(map(quoted, texts))}]"


def literal(name: str, items: Iterable[tuple[str, str]], indent: str = "") -> str:
    """`name = {...}`, one item a line; the values are Python expressions."""
    body = "".join(f"{indent}    {quoted(key)}: {value},\n" for key, value in items)
    return f"{name} = {{\n{body}{indent}}}" if body else f"{name} = {{}}"


def listed(names: Sequence[str]) -> str:
    """Text of a list of names, with at most four of them."""
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"
