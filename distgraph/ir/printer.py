"""The text form of a graph: one line per op, layouts next to the types; it parses back to the same graph.

    graph @mlp micro_batches=4
      mesh m0 = (dp=2, tp=2) ranks 0..3
      %x  : f32[64, 128]  [dp, _]  = input {name="x"}                data at "train.py:9" by user "train.py:9"
      %w1 : f32[128, 512] [_, tp]  = param {name="fc1.weight"}       forward in "fc1" by user "train.py:12"
      %h  : f32[64, 512]  [dp, tp] = matmul(%x, %w1)  <m:dp, n:tp>   forward in "fc1" at "model.py:31"
      output "loss" = %l
      update %w1 = %w1.new

A type is followed by the spec and, if it is not the first mesh, `@m1`; `<m:dp, n:tp> on m1` says how the op
is computed. Then follow the role, `in` scope, `at` source, `of` the forward op it belongs to, `task` the
user's task, `by` who decided the layouts of the results. `place %h on m1` is a placement by the user, and
`algorithm %h "meshslice(slices=8, block=1)"` says by which distributed algorithm a contraction is computed.
Line breaks and spaces do not matter; `#` starts a comment. The grammar is `grammar.lark`, the parser
`distgraph.ir.parser`. Layouts that completion dropped (`Graph.lost`) are not part of the text.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.ir.dtypes import short
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin

if TYPE_CHECKING:
    from distgraph.ir.graph import Graph, Op, Value

_BARE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_WIDEST = (36, 24, 28, 72, 24, 0)  # per column; cells longer than this do not widen the column
_INDENT = "  "


def print_graph(graph: Graph) -> str:
    """Text of a graph at any stage. Raises GraphError for an attribute that has no text form."""
    return "\n".join(graph_lines(graph)) + "\n"


def graph_lines(graph: Graph) -> list[str]:
    """Lines of `print_graph`; an op that holds a subgraph is one entry of several lines."""
    return _Printer(graph).lines()


def op_cells(graph: Graph, op: Op) -> list[str]:
    """The line of one op in parts: name, type, layout (and further results), call, computation, the rest."""
    return _Printer(graph).cells(op)


def print_op(graph: Graph, op: Op) -> str:
    """The line of one op of a graph, without aligned columns."""
    return " ".join(cell for cell in op_cells(graph, op) if cell)


def mesh_text(mesh: ProcessMesh) -> str:
    """`(dp=2, tp=2) ranks 0..3`, with weights `(dp=3:1, tp=2) ranks 0..3`; other ranks are listed."""
    ranks = mesh.members
    consecutive = ranks == tuple(range(ranks[0], ranks[0] + len(ranks)))
    listed = f"{ranks[0]}..{ranks[-1]}" if consecutive else ", ".join(map(str, ranks))
    return f"({mesh.described}) ranks {listed}"


class _Printer:
    """State that all lines of one graph share: the names of its meshes and the types of its values."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        used = [attr.mesh for attr in graph.attrs.values()]
        used += [op.layout.mesh for op in graph.ops if op.layout is not None]
        used += graph.placements.values()
        self.meshes = {mesh: f"m{i}" for i, mesh in enumerate(dict.fromkeys(used))}
        self.values = graph.values

    def lines(self) -> list[str]:
        graph = self.graph
        head = f"graph @{name_text(graph.name)}"
        if graph.micro_batches != 1:
            head += f" micro_batches={graph.micro_batches}"
        lines = [head]
        lines += [f"{_INDENT}mesh {name} = {mesh_text(mesh)}" for mesh, name in self.meshes.items()]
        lines += [_INDENT + row for row in _aligned([self.cells(op) for op in graph.ops])]
        lines += [
            f"{_INDENT}place %{name_text(op)} on {self.meshes[mesh]}" for op, mesh in graph.placements.items()
        ]
        lines += [
            f"{_INDENT}algorithm %{name_text(op)} {json.dumps(str(algorithm))}"
            for op, algorithm in graph.algorithms.items()
        ]
        for name, attr in graph.attrs.items():
            if name not in self.values:  # of a value that a pass replaced
                lines.append(
                    f"{_INDENT}layout %{name_text(name)} {self.attr(attr)} by {origin_text(attr.origin)}"
                )
        lines += [
            f"{_INDENT}output {json.dumps(label)} = {self.use(value)}" for label, value in graph.outputs
        ]
        lines += [f"{_INDENT}update %{name_text(old)} = {self.use(new)}" for old, new in graph.updates]
        return lines

    def cells(self, op: Op) -> list[str]:
        first, *others = op.results
        more = "".join(f", %{name_text(v.name)} : {v.type} {self.stored(v)}".rstrip() for v in others)
        call = "= " + op.kind
        if op.operands:
            call += "(" + ", ".join(map(self.use, op.operands)) + ")"
        if op.attrs:
            call += " {" + ", ".join(f"{k}={attr_text(v)}" for k, v in op.attrs.items()) + "}"
        return [
            f"%{name_text(first.name)}",
            f": {first.type}",
            self.stored(first) + more,
            call,
            self.layout(op.layout),
            self.rest(op),
        ]

    def use(self, value: Value) -> str:
        """An operand; with its type where that differs from the type of its definition."""
        defined = self.values.get(value.name)
        return f"%{name_text(value.name)}" + ("" if defined == value else f" : {value.type}")

    def stored(self, value: Value) -> str:
        attr = self.graph.attrs.get(value.name)
        return "" if attr is None else self.attr(attr)

    def attr(self, attr: DistAttr) -> str:
        name = self.meshes[attr.mesh]
        return str(attr.spec) + ("" if name == "m0" else f" @{name}")

    def layout(self, layout: OpLayout | None) -> str:
        if layout is None:
            return ""
        parts = [f"{index}:{'*'.join(axes)}" for index, axes in layout.axes]
        parts += [f"partial {axis}:{group}" for axis, group in layout.partial]
        name = self.meshes[layout.mesh]
        return f"<{', '.join(parts)}>" + ("" if name == "m0" else f" on {name}")

    def rest(self, op: Op) -> str:
        parts = [op.role]
        parts += [f"in {json.dumps(op.scope)}"] if op.scope else []
        parts += [f"at {json.dumps(op.source)}"] if op.source else []
        parts += [f"of %{name_text(op.link)}"] if op.link else []
        parts += [f"task {json.dumps(op.task)}"] if op.task else []
        origins = [self.graph.attrs[v.name].origin for v in op.results if v.name in self.graph.attrs]
        if origins:
            parts.append("by " + ", ".join(map(origin_text, origins)))
        return " ".join(parts)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells in columns; a cell wider than `_WIDEST`, or of several lines, is left as it is."""
    if not rows:
        return []
    widths = [
        max((len(cell) for cell in column if len(cell) <= widest), default=0)
        for column, widest in zip(zip(*rows, strict=True), _WIDEST, strict=True)
    ]
    padded = (
        (cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width or cell) for row in rows
    )
    return [" ".join(row).rstrip() for row in padded]


def name_text(name: str) -> str:
    """A name, in quotes when it has unusual characters."""
    return name if _BARE.fullmatch(name) else json.dumps(name)


def origin_text(origin: Origin) -> str:
    """`user "train.py:12"`."""
    return name_text(origin.kind) + (f" {json.dumps(origin.where)}" if origin.where else "")


def attr_text(value: Any) -> str:
    """Text of an attribute. Raises GraphError for a type that has none."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)) and not isinstance(value, np.generic):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, np.generic):
        return f"{short(value.dtype)}({attr_text(value.item())})"
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return f'{short(value.dtype)}[{", ".join(map(str, value.shape))}] "{data}"'
    if isinstance(value, tuple):
        return "(" + ", ".join(map(attr_text, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(attr_text, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)}: {attr_text(v)}" for k, v in value.items()) + "}"
    if hasattr(value, "micro_batches"):  # a subgraph
        return "{\n" + _indented(graph_lines(value)) + "\n" + _INDENT + "}"
    raise GraphError(
        f"attribute {value!r} of type {type(value).__name__} has no text form; use numbers, strings, tuples, "
        "arrays or graphs"
    )


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(_INDENT * 2 + part for line in lines for part in line.split("\n"))


def draw(line: str, start: int, width: int) -> str:
    """A line with `^^^^` under a part of it; a long line is cut to the surroundings of that part."""
    left = max(0, start - 90)
    right = min(len(line), max(start + width, left) + 60)
    shown = ("..." if left else "") + line[left:right] + ("..." if right < len(line) else "")
    return f"{shown}\n{' ' * (start - left + (3 if left else 0))}{'^' * max(1, min(width, right - start))}"
