"""What another framework needs to know of a program: what is stored, and what passes between its modules.

Frameworks name a tensor by its parameter's path and an activation by the module that makes it; a graph names
values. `surface_of` reads the first from the second: the ops that carry a module's path as their scope are
that module, what they read from outside enters it, and what others read of theirs leaves it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distgraph.errors import GraphError
from distgraph.ir.graph import Graph, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.name_ranges import fold
from distgraph.ir.op_registry import operand_layout, result_layout
from distgraph.ir.sharding_spec import ShardSpec

MATRICES = ("matmul", "embedding")  # kinds of ops that are a module of one matrix, or table, in frameworks
_WORDS = ("inherited", "joined", "loose")
_HELD = ("param", "state", "constant")
_SPEC = r"(\[[^\]]*\](?: partial\([^)]*\))?)"
_READ = re.compile(rf"(\w+)(\[[^\]]*\]) as {_SPEC} by ([\w.]*) ?([0-9]{{0,9}})( shared)?")
_NUMBER = re.compile(r"[0-9]{1,18}")
_FLOW = re.compile(rf"(\[[^\]]*\]) {_SPEC} as {_SPEC}(?: from {_SPEC})?((?: \w+)*)")
_PART = re.compile(r"@([0-9]{1,9})( again)? in: (.*?) ?out: (.*?)(?: moved: (.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Read:
    """How an input or a parameter is read first.

    Attributes:
        dtype, shape: of the whole tensor; of an input, of one micro-batch.
        used: layout in which its first reader computes with it; it may be stored otherwise.
        reader: kind of that op; empty where nothing reads it.
        operand: number of the tensor among the op's operands.
        shared: code of several modules reads it: a table that is the matrix of the logits too.
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
        return cls(dtype, _shape(shape), ShardSpec.parse(used), reader, int(operand or 0), bool(shared))


@dataclass(frozen=True, slots=True)
class Flow:
    """An activation that crosses the border of a module.

    Attributes:
        shape: of one micro-batch.
        spec: how it is stored.
        used: how the first reader behind the border computes with it.
        made: how the code that makes it leaves it, before it is stored; None for as stored, or where that
            code is a module of one matrix, which leaves it so.
        inherited: of one that enters: it enters the enclosing module too, unchanged.
        joined: on its way between two modules it passes code of no module, which reads a parameter itself.
        loose: of one that leaves: its first reader is no module but the code around.
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
        known = (words or "").split()
        source = None if made is None else ShardSpec.parse(made)
        specs = ShardSpec.parse(spec), ShardSpec.parse(used), source
        return cls(_shape(shape), *specs, *(word in known for word in _WORDS))


@dataclass(frozen=True, slots=True)
class Part:
    """A module.

    Attributes:
        stage: number of the stage that computes its first op.
        enters, leaves: activations, in the order of their first readers.
        moved: activations that its own code has to lay out anew: how it has them, and is to have them.
        again: whether it, and not only some module inside, is computed again in the backward part.
    """

    stage: int
    enters: tuple[Flow, ...]
    leaves: tuple[Flow, ...]
    moved: tuple[Flow, ...] = ()
    again: bool = False

    def __str__(self) -> str:
        sides = {"in": self.enters, "out": self.leaves, **({"moved": self.moved} if self.moved else {})}
        texts = (f" {side}: {'; '.join(map(str, flows))}" for side, flows in sides.items())
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
        return cls(int(match[1]), enters, leaves, moved, bool(match[2]))


@dataclass(frozen=True, slots=True)
class Surface:
    """What of a program has a name outside of it.

    Attributes:
        tensors: name of an input or parameter -> how it is read first, in program order; states lie in the
            shape of their parameter.
        modules: path -> its borders, in program order; a module stands before those inside it.
    """

    tensors: Mapping[str, Read] = field(default_factory=dict)
    modules: Mapping[str, Part] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The form in a plan file, equal layers in one entry."""
        return {
            "tensors": fold({name: str(read) for name, read in self.tensors.items()}),
            "modules": fold({path: str(part) for path, part in self.modules.items()}),
        }


def surface_of(graph: Graph, meshes: Sequence[ProcessMesh]) -> Surface:
    """The surface of a completed training graph.

    Args:
        graph: every value has a layout.
        meshes: those of the stages.

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
    """The search for what crosses the borders of modules: value -> flow, for every module."""

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
        """Outermost modules of which some op is computed again, and nothing that stays inside is kept."""
        copied, kept = set[str](), set[str]()
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
                inside = self._modules(makers[name].scope)
                kept |= {path for path in inside if name not in self.leaves.get(path, {})}
        again = copied - kept
        return frozenset(path for path in again if not again & set(prefixes(path)[:-1]))

    def _modules(self, scope: str) -> list[str]:
        return [path for path in prefixes(scope) if path in self.scopes]

    def _cross(self, op: Op, operand: int) -> None:
        """Note one read where it crosses borders, the value followed back through explicit reshards."""
        name = self._unmoved(op.operands[operand].name)
        maker = self.graph.producers[name]
        if maker.kind in _HELD or op.kind == "reshard":
            return
        stored = self.graph.attrs[name].spec
        value = self.graph.values[name]
        flow = Flow(value.shape, stored, _used(op, operand, stored), self._made(maker, name))
        inside, outside = self._modules(op.scope), self._modules(maker.scope)
        for path in inside:
            if path not in outside:
                joined = not maker.scope and self._reads_parameter(maker)
                inherited = any(name in self.enters.get(around, {}) for around in prefixes(path)[:-1])
                entered = replace(flow, joined=joined, inherited=inherited)
                self.enters.setdefault(path, {}).setdefault(name, entered)
        for path in outside:
            if path not in inside:
                joined = not op.scope and self._reads_parameter(op)
                loose = all(around in outside for around in inside)
                left = replace(flow, joined=joined, loose=loose)
                self.leaves.setdefault(path, {}).setdefault(name, left)
        self._note_move(op, name, flow, inside, outside)

    def _note_move(self, op: Op, name: str, flow: Flow, inside: list[str], outside: list[str]) -> None:
        """Note a read by a module's own code in another layout than the value reaches it in."""
        if flow.made is not None and flow.made.partial and outside:
            reduced = Flow(flow.shape, flow.made, flow.spec)
            self.moved.setdefault(outside[-1], {}).setdefault(name, reduced)
        if op.scope not in inside:
            return
        reaches = flow.made or flow.spec
        if op.scope not in outside:
            reaches = self.enters[op.scope][name].used
        elif outside[-1] in self.matrices and outside[-1] != op.scope:
            reaches = self.leaves[outside[len(inside)]][name].used
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
    """Whether an op of the backward part is a forward op again, on its operands or copies of them."""
    names = [stands_for.get(value.name, value.name) for value in op.operands]
    return op.kind == original.kind and names == [value.name for value in original.operands]


def prefixes(path: str) -> list[str]:
    """Modules around a module, itself last.

    Example:
        >>> prefixes("blocks.0.attn")
        ['blocks', 'blocks.0', 'blocks.0.attn']
    """
    names = path.split(".") if path else []
    return [".".join(names[: i + 1]) for i in range(len(names))]


def in_order(paths: Iterable[str]) -> list[str]:
    """Paths of folded layers in program order: numbers ascend, names stand as they first appeared.

    Example:
        >>> in_order(["b.0.norm", "b.1.norm", "b.0.attn", "b.1.attn", "b.1", "head"])
        ['b.0.norm', 'b.0.attn', 'b.1', 'b.1.norm', 'b.1.attn', 'head']
    """
    first: dict[tuple[str, str], int] = {}

    def key(path: str) -> list[tuple[int, int]]:
        parent, places = "", []
        for name in path.split("."):
            counted = _NUMBER.fullmatch(name) is not None
            number = first.setdefault((parent, "*" if counted else name), len(first))
            places.append((number, int(name) if counted else 0))
            parent = f"{parent}.{'*' if counted else name}"
        return places

    return sorted(paths, key=key)


def _shape(text: str) -> tuple[int, ...]:
    inner = text[1:-1].strip()
    numbers = [number.strip() for number in inner.split(",")] if inner else []
    if not all(_NUMBER.fullmatch(number) for number in numbers):
        raise ValueError(text)
    return tuple(map(int, numbers))
