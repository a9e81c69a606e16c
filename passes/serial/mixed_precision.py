"""Mixed precision: products in 16 bits, everything sensitive in f32 (Micikevicius et al., ICLR 2018).

In:   a serial graph in f32 (parts in other types stay as they are), and a `MixedPrecision`.
Out:  the same program with casts, in which matmuls, convolutions, attention and embeddings, and what follows
      them, are computed in 16 bits.
Invariant: parameters, states, updates and outputs have their types, and so has every gradient that is
      accumulated and reduced: the product that makes it leaves its result in f32 (attribute `wide`).

    %h = matmul(%x, %w)                     %x.bf16 = cast(%x)
    %l = cross_entropy(%h, %t)      ->      %w.bf16 = cast(%w)
    ...                                     %h = matmul(%x.bf16, %w.bf16)     # bf16
    %dw = einsum(%x, %g)                    %h.f32.0 = cast(%h)
                                            %l = cross_entropy(%h.f32.0, %t)
                                            ...
                                            %dw = einsum(%x.bf16, %g.bf16, wide=true)     # f32

`PRODUCTS` and all ops with the cost of a matmul are computed in 16 bits, `FOLLOWING` ops if an operand is in
16 bits, unless a constant operand does not fit the type; all others (softmax, norms, losses, reductions,
exponentials) in f32. `MixedPrecision.allow` and `deny` change that.

A narrow copy of a value is made once, next to its producer, so that a transfer to another mesh, or the gather
of a parameter that is stored in parts, moves 16 bits. A wide copy is made where it is read, in the forward
and in the backward part anew, so that only the 16-bit value is kept in between. The gradient of a 16-bit
value is in 16 bits too, whatever computes it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from distgraph.errors import GraphError
from distgraph.ir.dtypes import is_normal
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import REGISTRY, WIDE, infer_results, lookup
from distgraph.passes.pass_registry import PassContext, register_pass

PRODUCTS = ("embedding",)
"""Ops computed in 16 bits, in addition to those with the cost of a matmul."""

FOLLOWING = (
    "add", "subtract", "multiply", "negative", "absolute", "sign", "where", "maximum", "minimum", "identity",
    "stop_gradient", "relu", "relu_grad", "gelu", "gelu_grad", "silu", "silu_grad", "sigmoid", "sigmoid_grad",
    "tanh", "tanh_grad", "dropout", "max_pool", "max_pool_grad", "transpose", "broadcast_to", "reshape",
    "slice", "flip", "dynamic_slice", "dynamic_update_slice", "pad", "concat", "roll", "take", "greater",
    "greater_equal", "less", "less_equal",
)  # fmt: skip
"""Ops computed in 16 bits if an operand is in 16 bits."""

_SAME_GRADIENT = ("add", "reshape", "transpose", "broadcast_to", "identity")
"""Ops of the backward part between the product that makes a gradient of a parameter and its accumulation."""

_LINEAR = ("pad", "slice", "concat", "negative")
"""Such ops too, and products with a constant, if nothing else reads what they read."""


@register_pass("mixed_precision", stage="serial", after=("dead_code_elimination",))
def mixed_precision(graph: Graph, context: PassContext) -> Graph:
    """Compute products in 16 bits, with casts around them."""
    casts = _Casts(graph, context.precision.half)
    kinds = _Kinds.of(graph, context)
    gradients = _parameter_gradients(graph)
    computed = 0
    for op in graph.ops:
        narrow = kinds.narrow(op, casts)
        final = op.results[0].name in gradients
        if narrow and final and not (op.kind in kinds.products and lookup(op.kind).wide):
            narrow = False
        computed += narrow and op.kind in kinds.products
        casts.rewrite(op, narrow, wide=final)
    if not computed:
        raise GraphError(
            f"precision of Strategy is {context.precision.dtype!r} but no op of @{graph.name} is computed in "
            f"it: the program has no product in f32, or deny names all that it has; leave precision out, or "
            f"take ops out of deny"
        )
    return casts.finish()


@dataclass(frozen=True, slots=True)
class _Kinds:
    """The kinds of ops that are computed in 16 bits, and those that follow their operands."""

    products: frozenset[str]
    following: frozenset[str]

    @staticmethod
    def of(graph: Graph, context: PassContext) -> _Kinds:
        """The kinds of a graph under the lists of `MixedPrecision`."""
        allow, deny = context.precision.allow, context.precision.deny
        for name, listed in (("allow", allow), ("deny", deny)):
            for kind in listed:
                if kind not in REGISTRY:
                    near = difflib.get_close_matches(kind, REGISTRY, 1)
                    raise GraphError(
                        f"{name} of MixedPrecision names op {kind!r}, which does not exist"
                        f"{f'; did you mean {near[0]!r}?' if near else ''}"
                    )
        present = {op.kind for op in graph.ops}
        products = {kind for kind in present if lookup(kind).cost == "matmul"}
        return _Kinds(
            frozenset(products.union(PRODUCTS, allow).difference(deny)),
            frozenset(FOLLOWING).difference(deny, allow),
        )

    def narrow(self, op: Op, casts: _Casts) -> bool:
        """Whether an op is computed in 16 bits."""
        if op.kind in SOURCES or op.role == "optimize":
            return False
        if op.kind in self.products:
            summed = op.kind == "einsum" and len(op.operands) == 1
            return not summed and any(v.dtype == "f32" for v in op.operands)
        return op.kind in self.following and casts.some_narrow(op)


@dataclass(slots=True)
class _Casts:
    """The program so far.

    Attributes:
        graph: as it was.
        half: the 16-bit dtype.
        ops: the new program; narrow copies that stand behind earlier ops are in `behind`.
        current: name -> value of that name in the new program.
        narrowed: name -> its narrow copy.
        widened: (name, role, scope) -> the wide copy for these readers.
        behind: name of an op -> casts that stand behind it.
        placements: of casts.
    """

    graph: Graph
    half: str
    ops: list[Op] = field(default_factory=list)
    current: dict[str, Value] = field(default_factory=dict)
    narrowed: dict[str, Value] = field(default_factory=dict)
    widened: dict[tuple[str, str, str], Value] = field(default_factory=dict)
    behind: dict[str, list[Op]] = field(default_factory=dict)
    placements: dict[str, ProcessMesh] = field(default_factory=dict)

    def some_narrow(self, op: Op) -> bool:
        """Whether an operand is in 16 bits, and every number among the operands fits them."""
        values = [v for v in op.operands if v.dtype == "f32"]
        return any(self.current[v.name].dtype == self.half for v in values) and all(
            number is None or is_normal(number, self.half) for number in map(self._number, values)
        )

    def rewrite(self, op: Op, narrow: bool, *, wide: bool) -> None:
        """Add an op with operands in 16 bits (`narrow`) or in f32; `wide` results are in f32 in any case."""
        read = self._narrow if narrow else self._wide
        operands = tuple(read(v, op) if v.dtype == "f32" else self.current[v.name] for v in op.operands)
        attrs = {**op.attrs, WIDE: True} if narrow and wide else op.attrs
        results = op.results
        if narrow:
            inferred = infer_results(op.kind, operands, attrs)
            results = tuple(replace(v, dtype=d) for v, (_, d) in zip(results, inferred, strict=True))
        self.ops.append(replace(op, operands=operands, results=results, attrs=attrs))
        self.current.update((value.name, value) for value in results)
        if op.role == "backward" and not wide:
            for value in results:
                if value.dtype == "f32" and self._is_gradient_of_narrow(op, value):
                    self.current[value.name] = self._narrow(value, op)

    def _is_gradient_of_narrow(self, op: Op, value: Value) -> bool:
        """Whether a result of a backward op has the shape of a 16-bit operand of its forward op."""
        forward = self.graph.producers.get(op.link)
        operands = () if forward is None else forward.operands
        return any(self.current[v.name].dtype == self.half and v.shape == value.shape for v in operands)

    def finish(self) -> Graph:
        """The new program, with outputs and updates in their types."""
        outputs = tuple((label, self._end(value)) for label, value in self.graph.outputs)
        updates = tuple((name, self._end(value)) for name, value in self.graph.updates)
        ops = [each for op in self.ops for each in (op, *self.behind.get(op.name, ()))]
        placements = {**self.graph.placements, **self.placements}
        return self.graph.with_ops(ops, outputs=outputs, updates=updates, placements=placements)

    def _end(self, value: Value) -> Value:
        """A value that leaves the program, in its type."""
        return value if value.dtype != "f32" else self._wide(value, self.graph.producers[value.name])

    def _number(self, value: Value) -> float | None:
        """The number that a constant is; None for any other value."""
        producer = self.graph.producers[value.name]
        return float(producer.attrs["value"]) if producer.kind == "constant" and not value.shape else None

    def _narrow(self, value: Value, reader: Op) -> Value:
        """A value in 16 bits."""
        current = self.current[value.name]
        if current.dtype == self.half:
            return current
        if value.name not in self.narrowed:
            producer = self.graph.producers[value.name]
            copy = replace(value, name=self._fresh(f"{value.name}.{self.half}"), dtype=self.half)
            self.narrowed[value.name] = copy
            if self._number(value) is not None:
                self.ops.append(replace(producer, results=(copy,)))
            elif producer.kind in SOURCES:  # its mesh is that of its first reader
                self._cast(value, copy, reader, self.ops)
            else:
                self._cast(value, copy, producer, self.behind.setdefault(producer.name, []))
        return self.narrowed[value.name]

    def _wide(self, value: Value, reader: Op) -> Value:
        """A value in f32."""
        current = self.current[value.name]
        if current.dtype == "f32":
            return current
        key = value.name, reader.role, reader.scope
        if key not in self.widened:
            name = self._fresh(f"{value.name}.f32.{len(self.widened)}")
            self.widened[key] = replace(value, name=name, dtype="f32")
            self._cast(current, self.widened[key], reader, self.ops)
        return self.widened[key]

    def _cast(self, source: Value, target: Value, neighbour: Op, ops: list[Op]) -> None:
        """Add a cast that belongs where an op is: to its role, module and mesh."""
        ops.append(
            replace(
                neighbour,
                kind="cast",
                operands=(source,),
                results=(target,),
                attrs={"dtype": target.dtype},
            )
        )
        mesh = self.graph.placements.get(neighbour.name)
        if mesh is not None:
            self.placements[target.name] = mesh

    def _fresh(self, name: str) -> str:
        """A name that no value of the graph has."""
        while name in self.graph.values:
            name += "_"
        return name


def _parameter_gradients(graph: Graph) -> frozenset[str]:
    """Names of values that are a gradient of a parameter in one micro-batch, or a term or part of one."""
    gradients: set[str] = set()

    def passes_on(user: Op, kinds: Sequence[str]) -> bool:
        if user.role != "backward" or user.kind == "accumulate":
            return user.role == "backward"
        passes = user.kind in kinds or (kinds is not _SAME_GRADIENT and _is_scaling(graph, user))
        return passes and not gradients.isdisjoint(_names(user.results))

    for op in reversed(graph.ops):
        for value in op.results:
            users = graph.users.get(value.name, ())
            if any(passes_on(user, _SAME_GRADIENT) for user in users) or (
                users and all(passes_on(user, (*_SAME_GRADIENT, *_LINEAR)) for user in users)
            ):
                gradients.add(value.name)
    return frozenset(gradients)


def _is_scaling(graph: Graph, op: Op) -> bool:
    """Whether an op is a product with a constant, or a quotient by one."""
    constant = [graph.producers[value.name].kind == "constant" for value in op.operands]
    return (op.kind == "multiply" and any(constant)) or (op.kind == "divide" and constant[1])


def _names(values: Sequence[Value]) -> Iterable[str]:
    return (value.name for value in values)
