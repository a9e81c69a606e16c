"""The interface of modules that exports need: stored tensors, and activations that cross module borders.

Frameworks name a tensor by the path of its parameter and an activation by the module that computes it; a
graph names values. `surface_of` derives the first from the second: a module consists of the ops with its path
as their scope; values that they read from outside enter it, and their results that others read leave it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from distgraph.errors import GraphError
from distgraph.ir.graph import Graph, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import operand_layout, result_layout
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.serialization.fields import documented, documented_as_text

Parsed = TypeVar("Parsed")

MATRICES = ("matmul", "embedding")  # kinds of ops that are a module of one matrix, or table, in frameworks
_WORDS = ("inherited", "joined", "loose")
_HELD = ("param", "state", "constant")
_SPEC = r"(\[[^\]]*\](?: partial\([^)]*\))?)"
_READ = re.compile(rf"(\w+)(\[[^\]]*\]) as {_SPEC} by (?:([\w.]+) ([0-9]{{1,9}}))?( shared)?")
_NUMBER = re.compile(r"[0-9]{1,18}")
_FLOW = re.compile(rf"(\[[^\]]*\]) {_SPEC} as {_SPEC}(?: from {_SPEC})?((?: \w+)*)")
_PART = re.compile(r"@([0-9]{1,9})( again)? in: (.*?) ?out: (.*?)(?: moved: (.*))?", re.DOTALL)


@documented_as_text('a tensor such as "f32[8, 4] as [_, tp] by matmul 1"')
@dataclass(frozen=True, slots=True)
class Read:
    """The first read of an input or a parameter.

    Attributes:
        dtype, shape: of the whole tensor; of an input, of one micro-batch.
        used: layout in which its first reader uses it; it may be stored in another.
        reader: kind of that op; empty where nothing reads it.
        operand: position of the tensor among the op's operands.
        shared: whether several modules read it, such as a table that is also the matrix of the logits.
    """

    dtype: str
    shape: tuple[int, ...]
    used: ShardSpec
    reader: str = ""
    operand: int = 0
    shared: bool = False

    def __str__(self) -> str:
        by = f"{self.reader} {self.operand}" if self.reader else ""
        return f"{self.dtype}{list(self.shape)} as {self.used} by {by}{' shared' * self.shared}"

    @classmethod
    def parse(cls, text: str) -> Read:
        """Inverse of `str`. Raises ValueError or ShardingError."""
        match = _READ.fullmatch(text)
        if match is None:
            raise ValueError(text)
        dtype, shape, used, reader, operand, shared = match.groups()
        layout, position = ShardSpec.parse(used), int(operand or 0)
        return _as_written(cls(dtype, _shape(shape), layout, reader or "", position, bool(shared)), text)


@dataclass(frozen=True, slots=True)
class Flow:
    """An activation that crosses the border of a module.

    Attributes:
        shape: of one micro-batch.
        spec: layout in which it is stored.
        used: layout in which the first reader on the other side of the border uses it.
        made: layout in which its op computes it, before it is stored; None if that is `spec`, or if the op
            belongs to a module of one matrix.
        inherited: for an entering activation: it also enters the enclosing module, unchanged.
        joined: between two modules it passes code that belongs to no module and reads a parameter.
        loose: for a leaving activation: its first reader is the enclosing code, not a module.
    """

    shape: tuple[int, ...]
    spec: ShardSpec
    used: ShardSpec
    made: ShardSpec | None = None
    inherited: bool = False
    joined: bool = False
    loose: bool = False

    def __str__(self) -> str:
        words = " inherited" * self.inherited + " joined" * self.joined + " loose" * self.loose
        made = "" if self.made is None else f" from {self.made}"
        return f"{list(self.shape)} {self.spec} as {self.used}{made}{words}"

    @classmethod
    def parse(cls, text: str) -> Flow:
        """Inverse of `str`. Raises ValueError or ShardingError."""
        match = _FLOW.fullmatch(text)
        if match is None:
            raise ValueError(text)
        shape, spec, used, made, words = match.groups()
        present = (words or "").split()
        source = None if made is None else ShardSpec.parse(made)
        specs = ShardSpec.parse(spec), ShardSpec.parse(used), source
        return cls(_shape(shape), *specs, *(word in present for word in _WORDS))


@documented_as_text('a module such as "@0 in: [2, 4] [dp, _] as [dp, _] out: ..."')
@dataclass(frozen=True, slots=True)
class Part:
    """The interface of one module.

    Attributes:
        stage: number of the stage that computes its first op.
        enters, leaves: activations, in the order of their first readers.
        moved: activations that the code of the module itself has to reshard, with both layouts.
        again: whether the whole module, not only one inside it, is recomputed in the backward part.
    """

    stage: int
    enters: tuple[Flow, ...]
    leaves: tuple[Flow, ...]
    moved: tuple[Flow, ...] = ()
    again: bool = False

    def __str__(self) -> str:
        directions = {"in": self.enters, "out": self.leaves, **({"moved": self.moved} if self.moved else {})}
        texts = (f" {side}: {'; '.join(map(str, flows))}" for side, flows in directions.items())
        return f"@{self.stage}{' again' * self.again}{''.join(texts)}"

    @classmethod
    def parse(cls, text: str) -> Part:
        """Inverse of `str`. Raises ValueError or ShardingError."""
        match = _PART.fullmatch(text)
        if match is None:
            raise ValueError(text)
        enters, leaves, moved = (
            tuple(Flow.parse(flow.strip()) for flow in (text.split(";") if text else ()))
            for text in match.groups()[2:]
        )
        return _as_written(cls(int(match[1]), enters, leaves, moved, bool(match[2])), text)


@documented()
@dataclass(frozen=True, slots=True)
class Surface:
    """The interface of a program: tensors and modules by the names that users know.

    Attributes:
        tensors: name of an input or parameter -> its first read, in program order; states have the shape of
            their parameter.
        modules: path -> its interface, in program order; a module comes before those inside it.
    """

    tensors: Mapping[str, Read] = field(default_factory=dict)
    modules: Mapping[str, Part] = field(default_factory=dict)


def surface_of(graph: Graph, meshes: Sequence[ProcessMesh]) -> Surface:
    """The surface of a completed training graph with stages on these meshes.

    Raises:
        GraphError: a value has no layout.
    """
    missing = next((name for name in graph.values if name not in graph.attrs), None)
    if missing is not None:
        raise GraphError(
            f"%{missing} of @{graph.name} has no layout but only a completed graph has a surface; complete "
            "it first"
        )
    tensors = {
        str(op.attrs["name"]): _read(graph, op) for op in graph.sources("input", "param") if op.result.shape
    }
    return Surface(tensors, dict(_Borders(graph, meshes).parts()))


def _read(graph: Graph, op: Op) -> Read:
    value = op.result
    users = [user for user in graph.users[op.name] if user.kind != "reshard"]
    if not users:
        return Read(value.dtype, value.shape, graph.attrs[op.name].spec)
    user, scopes = users[0], {user.scope for user in users if user.role == "forward"}
    operand = next(i for i, v in enumerate(user.operands) if v.name == value.name)
    used = _used(user, operand, graph.attrs[op.name].spec)
    return Read(value.dtype, value.shape, used, user.kind, operand, len(scopes) > 1)


def _used(op: Op, operand: int, stored: ShardSpec) -> ShardSpec:
    return stored if op.layout is None else operand_layout(op, operand)


class _Borders:
    """Collects the activations that cross the borders of modules: value -> flow, for every module."""

    def __init__(self, graph: Graph, meshes: Sequence[ProcessMesh]) -> None:
        self.graph = graph
        self.forward = [op for op in graph.ops if op.role == "forward" and op.operands and op.layout]
        self.scopes = {op.scope for op in self.forward}
        self.stage = {mesh: number for number, mesh in reversed([*enumerate(meshes)])}
        self.matrices = {op.scope for op in self.forward if op.kind in MATRICES and self._reads_parameter(op)}
        self.enters: dict[str, dict[str, Flow]] = {}
        self.leaves: dict[str, dict[str, Flow]] = {}
        self.moved: dict[str, dict[str, Flow]] = {}

    def parts(self) -> Iterator[tuple[str, Part]]:
        """(path, module) in program order."""
        stages: dict[str, int] = {}
        for op in self.forward:
            assert op.layout is not None
            for path in self._modules(op.scope):
                stages.setdefault(path, self.stage[op.layout.mesh])
            for operand in range(len(op.operands)):
                self._cross(op, operand)
        again = self._again()
        for path, stage in stages.items():
            tables = (side.get(path, {}) for side in (self.enters, self.leaves, self.moved))
            enters, leaves, moved = (tuple(table.values()) for table in tables)
            yield path, Part(stage, enters, leaves, moved, path in again)

    def _again(self) -> frozenset[str]:
        """Outermost modules that are recomputed: no value inside them is stored for the backward part."""
        copied, stored = set[str](), set[str]()
        makers = {value.name: op for op in self.forward for value in op.results}
        stands_for: dict[str, str] = {}
        for op in self.graph.ops:
            if op.role != "backward":
                continue
            original = makers.get(op.link)
            if original is not None and _is_copy(op, original, stands_for):
                stands_for |= {a.name: b.name for a, b in zip(op.results, original.results, strict=True)}
                copied |= set(self._modules(original.scope))
            for name in (v.name for v in op.operands if v.name in makers):
                modules = self._modules(makers[name].scope)
                stored |= {path for path in modules if name not in self.leaves.get(path, {})}
        again = copied - stored
        return frozenset(path for path in again if not again & set(prefixes(path)[:-1]))

    def _modules(self, scope: str) -> list[str]:
        return [path for path in prefixes(scope) if path in self.scopes]

    def _cross(self, op: Op, operand: int) -> None:
        """Record one read at every border that it crosses; explicit reshards of the value are skipped."""
        name = self._unmoved(op.operands[operand].name)
        maker = self.graph.producers[name]
        if maker.kind in _HELD or op.kind == "reshard":
            return
        stored = self.graph.attrs[name].spec
        value = self.graph.values[name]
        flow = Flow(value.shape, stored, _used(op, operand, stored), self._made(maker, name))
        readers, makers = self._modules(op.scope), self._modules(maker.scope)
        for path in readers:
            if path not in makers:
                joined = not maker.scope and self._reads_parameter(maker)
                inherited = any(name in self.enters.get(around, {}) for around in prefixes(path)[:-1])
                entered = replace(flow, joined=joined, inherited=inherited)
                self.enters.setdefault(path, {}).setdefault(name, entered)
        for path in makers:
            if path not in readers:
                joined = not op.scope and self._reads_parameter(op)
                loose = all(around in makers for around in readers)
                leaving = replace(flow, joined=joined, loose=loose)
                self.leaves.setdefault(path, {}).setdefault(name, leaving)
        self._note_move(op, name, flow, readers, makers)

    def _note_move(self, op: Op, name: str, flow: Flow, readers: list[str], makers: list[str]) -> None:
        """Record a read by the code of a module itself in another layout than that of the arriving value."""
        if flow.made is not None and flow.made.partial and makers:
            reduced = Flow(flow.shape, flow.made, flow.spec)
            self.moved.setdefault(makers[-1], {}).setdefault(name, reduced)
        if op.scope not in readers:
            return
        reaches = flow.made or flow.spec
        if op.scope not in makers:
            reaches = self.enters[op.scope][name].used
        elif makers[-1] in self.matrices and makers[-1] != op.scope:
            reaches = self.leaves[makers[len(readers)]][name].used
        if reaches != flow.used:
            self.moved.setdefault(op.scope, {}).setdefault(name, Flow(flow.shape, reaches, flow.used))

    def _made(self, maker: Op, name: str) -> ShardSpec | None:
        if maker.layout is None or not maker.operands or maker.scope in self.matrices:
            return None
        result = next(i for i, value in enumerate(maker.results) if value.name == name)
        made = result_layout(maker, result)
        return None if made == self.graph.attrs[name].spec else made

    def _unmoved(self, name: str) -> str:
        maker = self.graph.producers[name]
        while maker.kind == "reshard":
            name = maker.operands[0].name
            maker = self.graph.producers[name]
        return name

    def _reads_parameter(self, op: Op) -> bool:
        return any(self.graph.producers[self._unmoved(v.name)].kind == "param" for v in op.operands)


def _is_copy(op: Op, original: Op, stands_for: Mapping[str, str]) -> bool:
    """Whether an op of the backward part recomputes a forward op, from its operands or copies of them."""
    names = [stands_for.get(value.name, value.name) for value in op.operands]
    return op.kind == original.kind and names == [value.name for value in original.operands]


def prefixes(path: str) -> list[str]:
    """Paths of the enclosing modules of a module, outermost first, and of the module itself.

    Example:
        >>> prefixes("blocks.0.attn")
        ['blocks', 'blocks.0', 'blocks.0.attn']
    """
    names = path.split(".") if path else []
    return [".".join(names[: i + 1]) for i in range(len(names))]


def in_order(paths: Iterable[str]) -> list[str]:
    """Paths in program order: layer numbers ascend, and names are in the order of first appearance.

    Example:
        >>> in_order(["b.0.norm", "b.1.norm", "b.0.attn", "b.1.attn", "b.1", "head"])
        ['b.0.norm', 'b.0.attn', 'b.1', 'b.1.norm', 'b.1.attn', 'head']
    """
    first: dict[tuple[str, str], int] = {}

    def key(path: str) -> list[tuple[int, int]]:
        parent, positions = "", []
        for name in path.split("."):
            counted = _NUMBER.fullmatch(name) is not None
            number = first.setdefault((parent, "*" if counted else name), len(first))
            positions.append((number, int(name) if counted else 0))
            parent = f"{parent}.{'*' if counted else name}"
        return positions

    return sorted(paths, key=key)


def _as_written(value: Parsed, text: str) -> Parsed:
    """A value that was read from a text.

    Raises:
        ValueError: the value is written in another way, such as without a zero before a number. Spaces may
            differ.
    """
    if "".join(str(value).split()) != "".join(text.split()):
        raise ValueError(text)
    return value


def _shape(text: str) -> tuple[int, ...]:
    inner = text[1:-1].strip()
    numbers = [number.strip() for number in inner.split(",")] if inner else []
    if not all(_NUMBER.fullmatch(number) for number in numbers):
        raise ValueError(text)
    return tuple(map(int, numbers))
