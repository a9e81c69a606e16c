"""Tracing: runs Python code once on symbolic tensors and records a serial graph."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from distgraph.errors import GraphError, ShardingError
from distgraph.errors.arguments import check_unmasked, shown
from distgraph.ir.dtypes import is_float, promote, short, to_numpy
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import freeze, infer_results, lookup
from distgraph.ir.sharding_spec import AxisAttr, DistAttr, OpAxes
from distgraph.tracing.tensor import ACTIVE, Tensor, current_trace

_PACKAGE = str(Path(__file__).resolve().parents[1])
_ROOT = str(Path(__file__).resolve().parents[2])
_INTERNAL = (*(f"{_ROOT}/{folder}/" for folder in ("passes", "runtime", "resources")), _PACKAGE)


class Trace:
    """The graph under construction. Tensors refer to their trace; parameters use `Trace.current()`."""

    def __init__(self, name: str = "main", prefix: str = "") -> None:
        self.name = name
        self.prefix = prefix
        self.ops: list[Op] = []
        self.attrs: dict[str, DistAttr] = {}
        self.axis_attrs: dict[str, AxisAttr] = {}  # annotations without a mesh
        self.op_axes: dict[str, OpAxes] = {}
        self.mirrored: set[str] = set()  # annotated values whose gradients have the same layout
        self.outputs: list[tuple[str, Value]] = []
        self.updates: list[tuple[str, Value]] = []
        self.update_role = "optimize"
        self.role = "forward"
        self.scope = ""
        self.link = ""
        self.where = ""
        self.task = ""  # name of the user's task that is being traced
        self.tasks: dict[str, str] = {}  # op name -> its task
        self.placement: ProcessMesh | None = None
        self.placements: dict[str, ProcessMesh] = {}
        self.unplaced_boundary = ""  # see `Graph`
        self.boundaries: list[int] = []  # numbers of ops before each border of layers
        self.algorithm: MatmulAlgorithm | None = None
        self.weight_layout: DistAttr | None = None
        self.algorithms: dict[str, MatmulAlgorithm] = {}
        self.block = 0  # number of the recomputed block that is being traced; 0 = none
        self.blocks = 0
        self.recomputed: dict[str, int] = {}
        self.training = True
        self.numbers: dict[str, Any] | None = None  # of values, in an eager trace
        self.parameters: dict[str, Any] = {}  # name -> parameter object
        self._names: set[str] = set()
        self._count = 0
        self._constants: dict[Any, Tensor] = {}
        self._sources: dict[tuple[str, str], Tensor] = {}
        self._salts: dict[str, int] = {}

    @staticmethod
    def current() -> Trace:
        """The innermost active trace. Raises GraphError outside of one."""
        return current_trace()

    @staticmethod
    def active() -> bool:
        """True inside a trace."""
        return ACTIVE.get() is not None

    @staticmethod
    def continuing(graph: Graph) -> Trace:
        """A trace to which more ops of a graph can be appended."""
        trace = Trace(graph.name)
        trace.ops, trace._names = list(graph.ops), set(graph.values)
        trace.attrs, trace.axis_attrs = dict(graph.attrs), dict(graph.axis_attrs)
        trace.tasks = {op.name: op.task for op in graph.ops if op.task}
        return trace

    def is_inside(self, other: Trace) -> bool:
        """Whether this is the body of a loop in another trace."""
        return False

    def replace_op(self, position: int, op: Op) -> None:
        """Put another op, with more results, in the place of one."""
        self._names.update(value.name for value in op.results)
        self.ops[position] = op

    @contextmanager
    def activate(self) -> Iterator[Trace]:
        """Make this the current trace."""
        token = ACTIVE.set(self)
        try:
            yield self
        finally:
            ACTIVE.reset(token)

    @contextmanager
    def _setting(self, **attributes: Any) -> Iterator[None]:
        """Attributes have these values inside."""
        before = {name: getattr(self, name) for name in attributes}
        self.__dict__.update(attributes)
        try:
            yield
        finally:
            self.__dict__.update(before)

    def within(self, *, role: str | None = None, scope: str | None = None) -> AbstractContextManager[None]:
        """Ops emitted inside carry this role and this scope (appended to the present one)."""
        inner = f"{self.scope}.{scope}" if self.scope and scope else scope or self.scope
        return self._setting(role=role or self.role, scope=inner)

    def begin_stage(self, mesh: ProcessMesh) -> None:
        """Compute later forward ops on `mesh`."""
        if not (self.attrs or self.placements) and any(op.kind not in SOURCES for op in self.ops):
            self.unplaced_boundary = self.unplaced_boundary or caller()
        self.placement = mesh

    def on_behalf_of(
        self, link: str, scope: str, where: str, task: str | None = None
    ) -> AbstractContextManager[None]:
        """Ops emitted inside belong to another op or parameter: its name, its scope, its source line, and its
        task, by default that of the op with this name."""
        named = self.tasks.get(link, self.task) if task is None else task
        return self._setting(link=link, scope=scope, where=where, task=named)

    def recomputing(self) -> AbstractContextManager[None]:
        """Results of ops emitted inside are recomputed in the backward part instead of staying in memory."""
        self.blocks += 1
        return self._setting(block=self.block or self.blocks)

    def recompute(self, blocks: Sequence[Sequence[str]]) -> None:
        """Recompute ops of this trace in the backward part, those of a block together.

        Ops that belong to a block already stay in it.
        """
        for names in blocks:
            self.blocks += 1
            for name in names:
                self.recomputed.setdefault(name, self.blocks)

    def on(self, mesh: ProcessMesh) -> AbstractContextManager[None]:
        """Ops emitted inside are computed on this mesh."""
        return self._setting(placement=mesh)

    def naming(self, task: str) -> AbstractContextManager[None]:
        """Ops emitted inside belong to a task of the user."""
        return self._setting(task=task)

    def computing_by(
        self, algorithm: MatmulAlgorithm, weight: DistAttr | None = None
    ) -> AbstractContextManager[None]:
        """Contractions emitted inside are computed by a distributed algorithm; `weight` is the layout to
        which their operands that are parameter matrices are pinned, None for no pin."""
        return self._setting(algorithm=algorithm, weight_layout=weight)

    def _compute_by_algorithm(self, op: Op) -> None:
        assert self.algorithm is not None
        self.algorithms[op.name] = self.algorithm
        parameters = {each.name for each in self.ops if each.kind == "param"}
        for value in op.operands:
            if self.weight_layout is not None and value.name in parameters and len(value.shape) == 2:
                self.annotate(value, self.weight_layout)

    def fresh(self, hint: str = "") -> str:
        """A value name not yet used."""
        if hint and hint not in self._names:
            self._names.add(hint)
            return hint
        while True:
            name = f"{hint}.{self._count}" if hint else f"{self.prefix}{self._count}"
            self._count += 1
            if name not in self._names:
                self._names.add(name)
                return name

    def salt(self) -> int:
        """A number for a random op that depends only on its module and its position among those of it."""
        number = self._salts[self.scope] = self._salts.get(self.scope, -1) + 1
        return stable_hash(f"{self.scope}#{number}")

    def source(self, kind: str, name: str, shape: Sequence[int], dtype: str, **attrs: Any) -> Tensor:
        """A tensor that comes from outside: input, param or state; the same name gives the same tensor.

        Raises:
            GraphError: the name is no text, or belongs to a source of another kind, shape or dtype.
        """
        key, lengths = (kind, name), tuple(int(n) for n in shape)
        self._check_source(kind, name, f"{short(dtype)}[{', '.join(map(str, lengths))}]", lengths)
        if key not in self._sources:
            value = Value(self.fresh(name), lengths, short(dtype))
            role = "data" if kind == "input" else "forward"
            op = Op(kind, (), (value,), {"name": name, **attrs}, role, self.scope, caller())
            self.ops.append(op)
            if self.task:  # that of the first reader, for the update
                self.tasks[value.name] = self.task
            self._sources[key] = Tensor(value, self)
        return self._sources[key]

    def _check_source(self, kind: str, name: Any, type_: str, shape: tuple[int, ...]) -> None:
        check_name(kind, name)
        existing = self._sources.get((kind, name))
        if existing is not None and existing.value.type != type_:
            raise GraphError(
                f"{kind} {name!r} is {type_} but another {kind} of that name {existing.value.type}; rename "
                f"one"
            )
        if kind == "input" and not shape:
            return
        for other in ("input", "param", "state"):
            clashing = self._sources.get((other, name))
            if other != kind and clashing is not None and (clashing.shape or other != "input"):
                raise GraphError(
                    f"{kind} {name!r} has the name of {'an' if other == 'input' else 'a'} {other}, but plans "
                    f"and checkpoints know them by name; rename one"
                )

    def constant(self, data: Any, dtype: str | None = None) -> Tensor:
        """A constant from a number or a small array; equal ones are shared."""
        check_unmasked("constant", data)
        try:
            array = np.asarray(data, dtype=None if dtype is None else to_numpy(short(dtype)))
        except OverflowError:
            raise GraphError(
                f"constant {shown(data)} does not fit in {short(dtype)}; use a number of its range, or cast"
            ) from None
        except ValueError as reason:
            raise GraphError(
                f"constant {shown(data)} is no array: {reason}; give lists of equal length"
            ) from None
        if dtype is None and array.dtype == np.float64 and not isinstance(data, (np.ndarray, np.generic)):
            array = array.astype(np.float32)
        name = short(array.dtype)
        payload = (
            array.item() if array.ndim == 0 and name != "bf16" else float(array) if array.ndim == 0 else array
        )
        key = (freeze(payload), repr(payload) if array.ndim == 0 else "", name)
        if key not in self._constants:
            value = Value(self.fresh(), tuple(array.shape), name)
            self.ops.append(Op("constant", (), (value,), {"value": payload}, self.role, self.scope, caller()))
            self._constants[key] = Tensor(value, self)
        return self._constants[key]

    def emit(
        self, kind: str, operands: Sequence[Any], attrs: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, ...]:
        """Append an op; operands are tensors, parameters, numbers or arrays. Raises GraphError if unfit."""
        attrs = attrs or {}
        values = tuple(t.value for t in self.tensors(operands))
        where = self.where or caller()
        try:
            inferred = infer_results(kind, values, attrs)
        except GraphError as error:
            shown = f"{kind}({', '.join(f'%{v.name} {v.type}' for v in values)})"
            raise GraphError(f"{shown} ({where}): {error}") from None
        results = tuple(Value(self.fresh(), tuple(shape), dtype) for shape, dtype in inferred)
        self.ops.append(
            Op(kind, values, results, dict(attrs), self.role, self.scope, where, self.link, task=self.task)
        )
        if self.task:
            self.tasks[results[0].name] = self.task
        if self.placement is not None and self.role not in ("backward", "optimize"):
            # a pipeline_boundary lasts to the end of the forward part; gradients go where their forward op is
            self.placements[results[0].name] = self.placement
        if self.algorithm is not None and self.algorithm.computes(kind) and self.role == "forward":
            self._compute_by_algorithm(self.ops[-1])
        if self.block:
            self.recomputed[results[0].name] = self.block
        return tuple(Tensor(value, self) for value in results)

    def tensors(self, operands: Sequence[Any]) -> list[Tensor]:
        """Operands as tensors of this trace; plain numbers get the common dtype of the other operands.

        A number that this dtype has no place for, such as 2 for bool or 0.5 for integers, gets i64 or f32.
        """
        tensors: list[Any] = [
            self.tensor(x) if not isinstance(x, (bool, int, float)) else x for x in operands
        ]
        dtypes = [t.dtype for t in tensors if isinstance(t, Tensor)]
        common = dtypes[0] if dtypes else None
        for dtype in dtypes[1:]:
            common = promote(common or dtype, dtype)
        for position, x in enumerate(tensors):
            if isinstance(x, bool):
                tensors[position] = self.constant(x, "bool")
            elif isinstance(x, int):
                tensors[position] = self.constant(x, "i64" if common == "bool" else common)
            elif isinstance(x, float):
                whole = common is not None and not is_float(common)
                tensors[position] = self.constant(x, "f32" if whole else common)
        return tensors

    def tensor(self, x: Any) -> Tensor:
        """One operand as a tensor of this trace. Raises GraphError for a tensor of another trace."""
        if isinstance(x, Tensor):
            if x.trace is not self:
                raise GraphError(
                    f"%{x.value.name} belongs to trace {x.trace.name!r} but is used in {self.name!r}"
                )
            return x
        if hasattr(x, "__distgraph_tensor__"):
            tensor: Tensor = x.__distgraph_tensor__(self)
            return tensor
        return self.constant(x)

    def annotate(self, value: Value, attr: DistAttr) -> None:
        """Pin the layout of a value. Raises ShardingError when it does not fit or contradicts another."""
        attr.spec.check(value.shape, attr.mesh, f"%{value.name} {value.type} ({attr.origin.where})")
        self._check_annotated_once(value, attr)
        self.attrs[value.name] = attr

    def annotate_axes(self, value: Value, attr: AxisAttr) -> None:
        """Pin the layout of a value on whichever mesh stores it. Raises ShardingError as `annotate`."""
        attr.spec.check_dims(value.shape, f"%{value.name} {value.type} ({attr.origin.where})")
        self._check_annotated_once(value, attr)
        self.axis_attrs[value.name] = attr

    def _check_annotated_once(self, value: Value, attr: DistAttr | AxisAttr) -> None:
        if attr.spec.partial and any(value == tensor.value for tensor in self._sources.values()):
            raise ShardingError(
                f"%{value.name} is annotated {attr} ({attr.origin.where}) but is stored and cannot be "
                f"partial; annotate a tensor that is computed from it"
            )
        befores = (self.attrs.get(value.name), self.axis_attrs.get(value.name))
        for before in (before for before in befores if before is not None):
            if before != attr and not (type(before) is not type(attr) and before.spec == attr.spec):
                raise ShardingError(
                    f"%{value.name} is annotated {attr} ({attr.origin.where}) but was annotated {before} "
                    f"({before.origin.where}); remove one, or use dg.reshard for a second layout"
                )

    def _separate_updates(self) -> None:
        """Copy what is stored, or a view of it, before it is the new value of something else.

        All updates of a step read the values of before, of which one may replace another.
        """
        stored = {t.value.name: t.value.name for (kind, _), t in self._sources.items() if kind != "input"}
        for op in self.ops if self.updates else ():
            if op.operands and op.operands[0].name in stored and lookup(op.kind).view:
                stored |= {value.name: stored[op.operands[0].name] for value in op.results}
        for number, (old, new) in enumerate(self.updates):
            if stored.get(new.name, old) != old:
                with self.within(role=self.update_role):
                    (copy,) = self.emit("identity", (Tensor(new, self),))
                self.updates[number] = (old, copy.value)

    def finish(self, outputs: Mapping[str, Tensor] | None = None) -> Graph:
        """The graph built so far. Raises GraphError when an output is no tensor of this trace."""
        self._separate_updates()
        labelled = [(label, self.tensor(t).value) for label, t in (outputs or {}).items()]
        return Graph(
            self.name,
            tuple(self.ops),
            tuple(self.outputs + labelled),
            tuple(self.updates),
            dict(self.attrs),
            placements=dict(self.placements),
            algorithms=dict(self.algorithms),
            layer_starts=self._layer_starts(),
            unplaced_boundary=self.unplaced_boundary,
            axis_attrs=dict(self.axis_attrs),
            op_axes=dict(self.op_axes),
        )

    def _layer_starts(self) -> tuple[str, ...]:
        """The first forward op behind each marked border; a border with no op before it marks nothing."""
        forward = [n for n, op in enumerate(self.ops) if op.role == "forward" and op.kind not in SOURCES]
        behind = (next((n for n in forward if n >= border), None) for border in self.boundaries)
        starts = dict.fromkeys(n for n in behind if n is not None and n != forward[0])
        return tuple(self.ops[n].name for n in starts)


def check_name(subject: str, name: Any) -> None:
    """Raises GraphError where a name cannot be written to files."""
    if not isinstance(name, str) or "\0" in name or any("\ud800" <= sign <= "\udfff" for sign in name):
        raise GraphError(
            f"name of {subject} is {name!a} but must be a text without NUL and unpaired surrogates; give it "
            "another"
        )


def caller() -> str:
    """file:line of the nearest frame outside distgraph."""
    frame, _ = _user_frame()
    return "" if frame is None else f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


def user_stack_level() -> int:
    """The `stacklevel` with which a function warns at the nearest line outside distgraph."""
    return _user_frame()[1]


def _user_frame() -> tuple[Any, int]:
    """The nearest frame outside distgraph, None where there is none, and its distance from the function that
    asks one of the two above, whose own is 1."""
    frame: Any = sys._getframe(2)
    level = 1
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_INTERNAL) and not path.startswith("<"):
            break
        frame, level = frame.f_back, level + 1
    return frame, level


def stable_hash(text: str) -> int:
    """63-bit FNV-1a hash of a string: the same on every machine and in every run."""
    state = 0xCBF29CE484222325
    for byte in text.encode():
        state = ((state ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return state >> 1
