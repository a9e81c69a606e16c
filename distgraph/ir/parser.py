"""Graph text to graph: the inverse of `print_graph`.

    parse_graph(print_graph(graph)) == graph

for a graph at any stage (`distgraph.ir.printer` describes the text form). An error message shows the line
with the faulty part underlined.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn

import lark
import numpy as np
from lark import Token, Transformer, v_args

from distgraph.errors import DistGraphError, GraphError, ShardingError
from distgraph.ir.dtypes import is_float, to_numpy
from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.printer import draw, print_graph, print_op
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.serialization.documents import MOST_BYTES, MOST_DEPTH, MOST_NUMBER

__all__ = ["parse_graph", "print_graph", "print_op"]

_FIRST_MESH = "m0"
_Axis = tuple[str, int, tuple[int, ...]]  # name, size, weights where there are any


MOST_CHARACTERS: Final = MOST_BYTES
"""Longest graph text; a graph of 100,000 ops has about 20 MiB."""
MOST_RANKS: Final = 1 << 20
"""Most ranks of a mesh, and one more than the largest rank: a cluster has at most 65,536 devices."""
_MOST_SIZE: Final = 2**63  # a size or a number of an attribute is a 64-bit integer
_MOST_AXES: Final = 32  # of a mesh: NumPy's arrays have 64 dims at most
_BRACKETS = re.compile(r'"(?:\\.|[^"\\])*"|#[^\n]*|[\[({]|[\])}]', re.DOTALL)


def parse_graph(text: str, file: str = "graph text") -> Graph:
    """Graph of a text.

    Args:
        text: as `print_graph` writes it.
        file: name of its file, for messages.

    Raises:
        GraphError: malformed text, an unknown value or mesh, a name defined twice, a number beyond its limit,
            attributes nested more than 64 deep; the message has file, line and column, and draws the line.

    Example:
        >>> text = 'graph @g %x : f32[2] = input {name="x"} data %y : f32[2] = negative(%x) forward'
        >>> parse_graph(text + ' output "y" = %y').outputs
        (('y', Value(name='y', shape=(2,), dtype='f32')),)
    """
    _check_size(text, file)
    try:
        tree = _parser().parse(text)
    except lark.exceptions.UnexpectedInput as error:
        raise GraphError(f"{file}, {_syntax(text, error)}") from None
    try:
        graph = _Reader().transform(tree)
    except lark.exceptions.VisitError as error:
        if isinstance(error.orig_exc, _TextError):
            token, message = error.orig_exc.token, error.orig_exc.message
            where = _located(text, token.line or 1, token.column or 1, len(token), message)
            raise GraphError(f"{file}, {where}") from None
        if isinstance(error.orig_exc, DistGraphError):
            raise GraphError(f"{file}: {error.orig_exc}") from None
        raise error.orig_exc from None
    assert isinstance(graph, Graph)
    return graph


def _check_size(text: str, file: str) -> None:
    """Refuse a text that is too long, or nested too deep for the functions that walk through it."""
    if len(text) > MOST_CHARACTERS:
        raise GraphError(
            f"{file}: has {len(text)} characters, more than the limit of {MOST_CHARACTERS}; give another file"
        )
    depth = 0
    for match in _BRACKETS.finditer(text):
        sign = match[0]
        depth += (sign in "[({") - (sign in "])}")
        if depth > MOST_DEPTH:
            line = text.count("\n", 0, match.start()) + 1
            column = match.start() - text.rfind("\n", 0, match.start())
            where = _located(text, line, column, 1, f"brackets are nested more than {MOST_DEPTH} deep")
            raise GraphError(f"{file}, {where}")


@cache
def _parser() -> lark.Lark:
    grammar = (Path(__file__).parent / "grammar.lark").read_text(encoding="ascii")
    return lark.Lark(grammar, parser="lalr", start="graph", maybe_placeholders=True)


def _syntax(text: str, error: lark.exceptions.UnexpectedInput) -> str:
    lines = text.split("\n")
    if isinstance(error, lark.exceptions.UnexpectedToken):
        expected = error.accepts or error.expected
        if error.token.type == "$END":
            last = max((i for i, line in enumerate(lines, 1) if line.strip()), default=1)
            return _located(
                text, last, len(lines[last - 1]) + 1, 1, f"text ends here; expected {_alternatives(expected)}"
            )
        actual, width = f"found {str(error.token)!r}", len(error.token)
    else:
        assert isinstance(error, lark.exceptions.UnexpectedCharacters)
        expected, width = error.allowed, 1
        actual = f"found {lines[error.line - 1][error.column - 1]!r}"
    return _located(text, error.line, error.column, width, f"{actual}, expected {_alternatives(expected)}")


_READABLE = {
    "MESH": "@mesh",
    "VALUE": "%value",
    "KIND": "an op kind",
    "WORD": "a word",
    "NAME": "a name",
    "ROLE": "data, forward, backward or optimize",
    "DTYPE": "a dtype",
    "NUMBER": "a number",
    "INT": "a whole number",
    "STRING": '"a string"',
    "$END": "the end",
}


def _alternatives(terminals: Any) -> str:
    patterns = {terminal.name: terminal.pattern.value for terminal in _parser().terminals}
    names = sorted({_READABLE.get(t, patterns.get(t, t).replace("\\", "")) for t in terminals})
    return " or ".join(names)


def _located(text: str, line: int, column: int, width: int, message: str) -> str:
    shown = text.split("\n")[line - 1]
    return f"line {line}, column {column}: {message}\n{draw(shown, column - 1, width)}"


class _TextError(Exception):
    """Error in text that is well formed but means no valid graph, with the token that is at fault."""

    def __init__(self, token: Token, message: str) -> None:
        super().__init__(message)
        self.token = token
        self.message = message


def _refuse(token: Token, message: str) -> NoReturn:
    raise _TextError(token, message)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The spec that follows a type; its mesh is resolved when the graph is assembled."""

    spec: ShardSpec
    mesh: Token | None
    token: Token


@dataclass(frozen=True, slots=True)
class _Use:
    token: Token
    type: tuple[str, tuple[int, ...]] | None


@dataclass(frozen=True, slots=True)
class _OpText:
    results: tuple[tuple[Token, tuple[str, tuple[int, ...]], _Stored | None], ...]
    kind: Token
    operands: tuple[_Use, ...]
    attrs: dict[str, Any]
    computed: tuple[Any, ...] | None
    role: str
    scope: str
    source: str
    link: str
    task: str
    origins: tuple[Origin, ...]


def _whole(token: Token, below: int = _MOST_SIZE, least: int = 0) -> int:
    """The whole number of a token; refused outside `least` to `below - 1`."""
    digits = str(token)
    if len(digits) > 20 or not least <= int(digits) < below:
        _refuse(token, f"expected a whole number from {least} to {below - 1}")
    return int(digits)


def _distinct(what: str, keys: Sequence[Token]) -> None:
    """Refuse a key that is given twice: one of its values would be lost."""
    previous = set[str]()
    for key in keys:
        if key in previous:
            _refuse(key, f"{what} {key} is given twice")
        previous.add(str(key))


def _name(token: Token) -> str:
    """`%x`, `@m1` or `%"odd name"` without the sign and the quotes."""
    body = str(token)[1:]
    return _string(token, body) if body.startswith('"') else body


def _string(token: Token, body: str | None = None) -> str:
    try:
        value: str = json.loads(str(token) if body is None else body, strict=False)
    except json.JSONDecodeError as error:
        _refuse(token, f"string is malformed: {error.msg}")
    return value


@v_args(inline=True)
class _Reader(Transformer[Token, Any]):
    """Builds a graph from the parse tree, bottom up; each method is named after a rule of the grammar."""

    def graph(self, name: Token, micro: Token | None, *statements: tuple[str, Any]) -> Graph:
        count = 1 if micro is None else _whole(micro, least=1)
        return _assemble(_name(name), count, statements)

    def mesh(self, name: Token, sizes: Any, ranks: Sequence[int]) -> tuple[str, Any]:
        axes, shape = [axis for axis, *_ in sizes], [size for _, size, _ in sizes]
        weights = {axis: axis_weights for axis, _, axis_weights in sizes if axis_weights}
        if math.prod(shape) != len(ranks):
            _refuse(name, f"mesh {name} has {len(ranks)} ranks but its axes make {math.prod(shape)}")
        if len(shape) > _MOST_AXES:
            _refuse(name, f"mesh {name} has {len(shape)} axes, more than {_MOST_AXES}")
        if len({*axes}) != len(axes):
            _refuse(name, f"mesh {name} has an axis twice")
        try:
            return "mesh", (name, ProcessMesh(np.array(ranks).reshape(shape), axes, weights))
        except DistGraphError as error:
            _refuse(name, str(error))

    def children(self, *children: Any) -> tuple[Any, ...]:
        return children

    sizes = results = partials = children

    def size(self, axis: Token, *counts: Token) -> _Axis:
        numbers = tuple(_whole(count, MOST_RANKS) for count in counts)
        return (str(axis), len(numbers), numbers) if len(numbers) > 1 else (str(axis), numbers[0], ())

    def span(self, first: Token, last: Token) -> list[int]:
        return list(range(_whole(first, MOST_RANKS), _whole(last, MOST_RANKS) + 1))

    def listed(self, *ranks: Token) -> list[int]:
        return [_whole(rank, MOST_RANKS) for rank in ranks]

    def place(self, op: Token, mesh: Token) -> tuple[str, Any]:
        return "place", (op, mesh)

    def algorithm(self, op: Token, text: Token) -> tuple[str, Any]:
        try:
            return "algorithm", (op, MatmulAlgorithm.parse(_string(text)))
        except (ValueError, ShardingError):
            _refuse(text, f'algorithm {text} is not one such as "meshslice(slices=8, block=1)"')

    def stray(self, value: Token, spec: Any, mesh: Token | None, origin: Origin) -> tuple[str, Any]:
        return "stray", (value, _Stored(spec, mesh, value), origin)

    def output(self, label: Token, use: _Use) -> tuple[str, Any]:
        return "output", (_string(label), use)

    def update(self, old: Token, use: _Use) -> tuple[str, Any]:
        return "update", (_name(old), use)

    def op(self, *parts: Any) -> tuple[str, Any]:
        results, kind, operands, attrs, computed, role, *tail = parts
        return "op", _OpText(results, kind, operands, attrs or {}, computed, str(role), *tail)

    def result(self, name: Token, type_: Any, spec: ShardSpec | None, mesh: Token | None) -> Any:
        return name, type_, None if spec is None else _Stored(spec, mesh, name)

    def operands(self, *uses: _Use | None) -> tuple[_Use, ...]:
        return tuple(use for use in uses if use is not None)

    def use(self, name: Token, type_: Any) -> _Use:
        return _Use(name, type_)

    def scope(self, text: Token | None) -> str:
        return "" if text is None else _string(text)

    source = task = scope

    def link(self, value: Token | None) -> str:
        return "" if value is None else _name(value)

    def origins(self, *origins: Origin | None) -> tuple[Origin, ...]:
        return tuple(origin for origin in origins if origin is not None)

    def origin(self, kind: Token, where: Token | None) -> Origin:
        word = _string(kind) if kind.type == "STRING" else str(kind)
        return Origin(word, "" if where is None else _string(where))

    def type(self, dtype: Token, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        return str(dtype), shape

    def numbers(self, *numbers: Token | None) -> tuple[int, ...]:
        return tuple(_whole(n) for n in numbers if n is not None)

    def spec(self, dims: Any, partials: Any) -> ShardSpec:
        return ShardSpec(dims, partials or ())

    def dims(self, *dims: Any) -> tuple[tuple[str, ...], ...]:
        return tuple(dim for dim in dims if dim is not None)

    def dim(self, *axes: Token) -> tuple[str, ...]:
        return () if len(axes) == 1 and axes[0] == "_" else tuple(map(str, axes))

    def partial(self, axis: Token, reduction: Token | None) -> tuple[str, str]:
        return str(axis), str(reduction or "sum")

    def computed(self, splits: Any, mesh: Token | None) -> tuple[Any, ...]:
        return tuple(splits), mesh

    def splits(self, *splits: Any) -> list[Any]:
        return [split for split in splits if split is not None]

    def index_split(self, index: Token, axes: tuple[str, ...]) -> tuple[str, Any] | None:
        return ("index", (str(index), axes)) if axes else None  # an index that no axis splits is left out

    def group_split(self, axis: Token, group: Token) -> tuple[str, Any]:
        return "partial", (str(axis), _whole(group))

    def attrs(self, *attrs: tuple[Token, Any]) -> dict[str, Any]:
        _distinct("attribute", [key for key, _ in attrs])
        return {str(key): value for key, value in attrs}

    def attr(self, key: Token, value: Any) -> tuple[Token, Any]:
        return key, value

    entry = attr

    def none(self) -> None:
        return None

    def true(self) -> bool:
        return True

    def false(self) -> bool:
        return False

    def number(self, text: Token) -> int | float:
        if text.removeprefix("-").isdigit():
            if len(text) > len(str(MOST_NUMBER)):
                _refuse(text, f"expected a number within {float(MOST_NUMBER):g}")
            return int(text)
        value = float(text)
        if math.isinf(value) and "inf" not in text:
            _refuse(text, "expected a number of 64 bits, or inf")
        return value

    def string(self, text: Token) -> str:
        return _string(text)

    def array(self, dtype: Token, shape: tuple[int, ...], data: Token) -> Any:
        array_type = to_numpy(str(dtype))
        try:
            raw = base64.b64decode(_string(data), validate=True)
        except ValueError as error:  # binascii.Error, and a text that is not ASCII
            _refuse(data, f"array is no base64: {error}")
        if len(raw) != math.prod(shape) * array_type.itemsize or len(shape) > 2 * _MOST_AXES:
            _refuse(data, f"array has {len(raw)} bytes but {dtype}{list(shape)} needs another number")
        return np.frombuffer(raw, array_type).reshape(shape).copy()

    def scalar(self, dtype: Token, value: Any) -> Any:
        kind = to_numpy(str(dtype))
        fits = isinstance(value, (int, float)) if is_float(str(dtype)) else type(value) is int
        if not (isinstance(value, bool) if dtype == "bool" else fits and not isinstance(value, bool)):
            _refuse(dtype, f"expected a number of {dtype}")
        try:
            return kind.type(value)
        except OverflowError:
            _refuse(dtype, f"{value} is no number of {dtype}")

    def tuple(self, *values: Any) -> Any:
        return values

    def list(self, *values: Any) -> Any:
        return [*values]

    def dict(self, *entries: Any) -> Any:
        _distinct("key", [key for key, _ in entries])
        return {_string(key): value for key, value in entries}


def _assemble(name: str, micro_batches: int, statements: Sequence[tuple[str, Any]]) -> Graph:
    meshes: dict[str, ProcessMesh] = {}
    values: dict[str, Value] = {}
    attrs: dict[str, DistAttr] = {}
    ops: list[Op] = []
    placements: dict[str, ProcessMesh] = {}
    algorithms: dict[str, MatmulAlgorithm] = {}
    ends: dict[str, list[tuple[str, Value]]] = {"output": [], "update": []}
    for kind, content in statements:
        if kind == "mesh":
            token, mesh = content
            if token in meshes:
                _refuse(token, f"mesh {token} is defined twice")
            meshes[str(token)] = mesh
        elif kind == "op":
            ops.append(_op(content, meshes, values, attrs))
        elif kind == "place":
            token, mesh_token = content
            if _name(token) in placements:
                _refuse(token, f"value {token} is placed twice")
            placements[_name(token)] = _mesh(meshes, mesh_token, mesh_token)
        elif kind == "algorithm":
            token, algorithm = content
            if _name(token) in algorithms:
                _refuse(token, f"value {token} has two algorithms")
            algorithms[_name(token)] = algorithm
        elif kind == "stray":
            token, stored, origin = content
            if _name(token) in attrs:
                _refuse(token, f"value {token} has two layouts")
            attrs[_name(token)] = DistAttr(_mesh(meshes, stored.mesh, stored.token), stored.spec, origin)
        else:
            label, use = content
            ends[kind].append((label, _operand(values, use)))
    return Graph(
        name,
        tuple(ops),
        tuple(ends["output"]),
        tuple(ends["update"]),
        attrs,
        micro_batches,
        placements,
        algorithms=algorithms,
    )


def _op(
    text: _OpText, meshes: dict[str, ProcessMesh], values: dict[str, Value], attrs: dict[str, DistAttr]
) -> Op:
    operands = tuple(_operand(values, use) for use in text.operands)
    results, origins = [], list(text.origins)
    stored = sum(1 for _, _, s in text.results if s is not None)
    if origins and len(origins) != stored:
        _refuse(text.kind, f"op has {stored} layouts but says who decided {len(origins)}")
    for token, (dtype, shape), layout in text.results:
        value = Value(_name(token), shape, dtype)
        if value.name in values:
            _refuse(token, f"value {token} is defined twice")
        values[value.name] = value
        results.append(value)
        if layout is not None:
            origin = origins.pop(0) if origins else Origin("default")
            attrs[value.name] = DistAttr(_mesh(meshes, layout.mesh, token), layout.spec, origin)
    computed = None
    if text.computed is not None:
        splits, mesh = text.computed
        axes = tuple(content for kind, content in splits if kind == "index")
        partial = tuple(content for kind, content in splits if kind == "partial")
        computed = OpLayout(_mesh(meshes, mesh, text.kind), axes, partial)
    return Op(
        str(text.kind),
        operands,
        tuple(results),
        text.attrs,
        text.role,
        text.scope,
        text.source,
        text.link,
        computed,
        text.task,
    )


def _operand(values: dict[str, Value], use: _Use) -> Value:
    name = _name(use.token)
    if use.type is not None:
        return Value(name, use.type[1], use.type[0])
    if name not in values:
        _refuse(use.token, f"value {use.token} is not defined above")
    return values[name]


def _mesh(meshes: dict[str, ProcessMesh], token: Token | None, blamed: Token) -> ProcessMesh:
    name = _FIRST_MESH if token is None else _name(token) if token.type == "MESH" else str(token)
    if name not in meshes:
        defined = ", ".join(meshes) or "none"
        _refuse(token or blamed, f"mesh {name} is not defined above; the meshes are {defined}")
    return meshes[name]
