"""A contraction whose operands and result are stored in known layouts, and the ops that compute it.

*In:* an op C = A B of a completed graph. *Out:* its dataflow, and a list of ops that leave the same value in
the same layout. *Invariant:* every op emitted has its layout, and a meaning on whole tensors.

The letters of the contraction are of three groups: `m` those of A and C, `k` those of A and B, `n` those of B
and C. On a mesh of axes x and y, with at most one letter of a group split, by one axis, the stored layouts
give the dataflow, which says what stays in place (Nam et al., "MeshSlice", 2025, figure 1):

    OS   A [m:x, k:y]   B [k:x, n:y]   C [m:x, n:y]   C stays, slices along k
    LS   A [m:x, k:y]   B [k:y, n:x]   C [m:x, n:y]   A stays, slices along n
    RS   A [m:y, k:x]   B [k:x, n:y]   C [m:x, n:y]   B stays, slices along m
    AG   A [m:y, k]     B [k, n:y]     C [m, n:y]     one axis: A is gathered, slices along m
         A [m, k:y]     B [k, n:y]     C [m, n:y]     one axis: A is gathered, slices along k
    SC   A [m, k:y]     B [k:y, n]     C [m:y, n]     one axis: C is scattered, slices along m

AG and SC also with A and B exchanged; they are OS, LS and RS where the other axis has one rank. The backward
contractions of a forward one in OS are in LS (dA = dC B^T) and RS (dB = A^T dC), and so on: no operand is
transposed, and the same matrix stays in place.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distgraph.errors import ShardingError
from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import infer_results, rule_of
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.ops.contraction import parse_einsum

Axes = Mapping[str, str | None]
"""Group "m", "k" or "n" -> mesh axis that splits one of its letters."""


@dataclass(frozen=True, slots=True)
class Dataflow:
    """What stays in place, and what is gathered and scattered.

    Attributes:
        name: OS, LS, RS, AG or SC.
        group: "m", "k" or "n": its split letter is sliced.
        computed: layout of every partial product.
        reduced: axis over which the partial products are summed; None in OS and AG.
    """

    name: str
    group: str
    computed: Axes
    reduced: str | None = None


@dataclass(slots=True)
class Product:
    """A contraction and the ops that are to compute it.

    Attributes:
        op: the contraction.
        letters: those of A, B and C, one for each dim.
        mesh: where it is computed.
        specs: stored layouts of A, B and C.
        split: for A, B and C the axis of each group.
        split_letter: group -> its letter that is split.
        flow: the dataflow.
        ops, attrs: emitted ops, and layouts of their results.
    """

    op: Op
    letters: tuple[str, str, str]
    mesh: ProcessMesh
    specs: tuple[ShardSpec, ShardSpec, ShardSpec]
    split: tuple[Axes, Axes, Axes]
    split_letter: Mapping[str, str]
    flow: Dataflow
    ops: list[Op] = field(default_factory=list)
    attrs: dict[str, DistAttr] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        """The op, as messages name it."""
        return str(self.op)

    @property
    def spec(self) -> str:
        """The contraction in einsum's notation."""
        return f"{self.letters[0]},{self.letters[1]}->{self.letters[2]}"

    @property
    def sliced(self) -> str:
        """The letter that is sliced."""
        return self.split_letter[self.flow.group]

    def parts(self, axis: str | None) -> int:
        """Ranks along an axis; 1 without one."""
        return 1 if axis is None else self.mesh.axis_size(axis)

    def length(self, letter: str) -> int:
        """Length of a letter's dim."""
        values = (*self.op.operands, self.op.result)
        return next(
            value.shape[term.index(letter)]
            for term, value in zip(self.letters, values, strict=True)
            if letter in term
        )

    # ------------------------------------------------------------------ emitting ops

    def layout(self, letters: str, axes: Mapping[str, str], partial: str | None = None) -> DistAttr:
        """A layout of a tensor with these letters: letter -> axis."""
        dims = tuple((axes[letter],) if letter in axes else () for letter in letters)
        summed = () if partial is None else ((partial, "sum"),)
        return DistAttr(self.mesh, ShardSpec(dims, summed), Origin("op", f"%{self.op.name}"))

    def computed_axes(self) -> dict[str, str]:
        """Letter -> axis of the partial products."""
        return {
            self.split_letter[group]: axis for group, axis in self.flow.computed.items() if axis is not None
        }

    def emit(
        self,
        kind: str,
        operands: Sequence[Value],
        attr: DistAttr,
        computed: OpLayout,
        name: str = "",
        **attrs: Any,
    ) -> Value:
        """Add an op.

        Args:
            kind: of the op.
            operands: of the op.
            attr: layout in which its result is stored.
            computed: how it is computed.
            name: end of the name of its result; empty for the result of the contraction itself.
            attrs: of the op.
        """
        ((shape, dtype),) = infer_results(kind, operands, attrs)
        value = Value(f"{self.op.name}.{name}" if name else self.op.name, tuple(shape), dtype)
        op = self.op
        self.ops.append(
            Op(kind, tuple(operands), (value,), attrs, op.role, op.scope, op.source, op.link, computed)
        )
        self.attrs[value.name] = attr
        return value

    def follow(self, kind: str, operands: Sequence[Value], attr: DistAttr, name: str, **attrs: Any) -> Value:
        """Add an op computed where its result is stored: each axis splits the first index of its dim.

        What is partial in the result is partial in all operands.
        """
        ((shape, dtype),) = infer_results(kind, operands, attrs)
        rule = rule_of(Op(kind, tuple(operands), (Value("", tuple(shape), dtype),), attrs))
        axes = sorted(
            (term[0], split) for term, split in zip(rule.results[0], attr.spec.dims, strict=True) if split
        )
        partial = tuple((axis, 0) for axis, _ in attr.spec.partial if kind != "reshard")
        return self.emit(kind, operands, attr, OpLayout(attr.mesh, tuple(axes), partial), name, **attrs)

    def reshard(self, value: Value, attr: DistAttr, name: str) -> Value:
        """Add a change of layout, which starts here and is awaited where its result is read."""
        return self.follow("reshard", [value], attr, name)

    def multiply(self, left: Value, right: Value, name: str, total: Value | None = None) -> Value:
        """Add a partial product in the layout of the dataflow, added to a total where there is one."""
        axes = self.computed_axes()
        attr = self.layout(self.letters[2], axes, self.flow.reduced)
        computed = OpLayout(self.mesh, tuple(sorted((letter, (axis,)) for letter, axis in axes.items())))
        operands = [left, right] if total is None else [total, left, right]
        kind = "einsum" if total is None else "einsum_add"
        return self.emit(kind, operands, attr, computed, name, spec=self.spec)


def product_of(graph: Graph, op: Op, algorithm: object) -> Product:
    """A contraction with its dataflow.

    Args:
        graph: completed.
        op: the contraction.
        algorithm: that is to compute it, for messages.

    Raises:
        ShardingError: it has no letters of one of the groups, or its layouts are those of no dataflow.
    """
    values = (*op.operands, op.result)
    letters = _letters(op, algorithm)
    layouts = [graph.attrs[value.name] for value in values]
    mesh = layouts[2].mesh
    stored = ", ".join(f"{name} {attr.spec}" for name, attr in zip("ABC", layouts, strict=True))
    if len(values) != 3 or any(attr.mesh != mesh or attr.spec.partial for attr in layouts):
        raise ShardingError(
            f"{op}: algorithm {algorithm} needs operands and result on one mesh, without partial sums, got "
            f"{stored}; annotate them with dg.shard_op(..., in_specs=, out_specs=)"
        )
    groups = _groups(*letters)
    split: list[dict[str, str | None]] = []
    split_letter: dict[str, str] = {}
    for term, attr in zip(letters, layouts, strict=True):
        axes: dict[str, str | None] = {"m": None, "k": None, "n": None}
        for letter, dim in zip(term, attr.spec.dims, strict=True):
            used = tuple(axis for axis in dim if mesh.axis_size(axis) > 1)
            if not used:
                continue
            group = groups[letter]
            if len(used) > 1 or axes[group] is not None or split_letter.setdefault(group, letter) != letter:
                raise ShardingError(
                    f"{op}: algorithm {algorithm} needs one split dim in each of m, k and n, by one axis, "
                    f"got {stored}; split another dim with dg.shard_op(..., in_specs=, out_specs=)"
                )
            axes[group] = used[0]
        split.append(axes)
    flow = _dataflow(*split)
    if flow is None:
        raise ShardingError(
            f"{op}: algorithm {algorithm} needs layouts of one dataflow, such as A [x, y], B [x, y], "
            f"C [x, y] for OS or A [x, y], B [y, x], C [x, y] for LS on mesh axes x and y, got {stored} on "
            f"{mesh}; "
            f"dg.shard_op(..., algorithm=, dataflow=) pins them"
        )
    specs = tuple(attr.spec for attr in layouts)
    return Product(op, letters, mesh, specs, tuple(split), split_letter, flow)  # type: ignore[arg-type]


def _letters(op: Op, algorithm: object) -> tuple[str, str, str]:
    if op.kind == "einsum":
        terms, right = parse_einsum(op.attrs["spec"])
        if len(terms) != 2:
            raise ShardingError(
                f"{op}: algorithm {algorithm} is for a contraction of two tensors but this has {len(terms)}; "
                f"contract two at a time"
            )
        return terms[0], terms[1], right
    left, right_operand = op.operands
    batch = string.ascii_uppercase[: max(len(left.shape), len(right_operand.shape)) - 2]
    if len(right_operand.shape) > 2:
        raise ShardingError(
            f"{op}: algorithm {algorithm} is for a product with one matrix but the right operand is "
            f"{right_operand.type}; use the batch dims as a mesh axis of their own"
        )
    return f"{batch}mk", "kn", f"{batch}mn"


def _groups(left: str, right: str, result: str) -> dict[str, str]:
    """Letter -> group. A letter of all three is none of a matrix product."""
    groups = {}
    for letter in dict.fromkeys(left + right + result):
        present = (letter in left, letter in right, letter in result)
        groups[letter] = {(True, False, True): "m", (True, True, False): "k", (False, True, True): "n"}.get(
            present, "batch"
        )
    return groups


def _dataflow(a: Axes, b: Axes, c: Axes) -> Dataflow | None:
    """The dataflow of stored layouts; None where they are those of none."""
    x, y = c["m"], c["n"]
    if x is not None and y is not None:
        if (a["m"], b["n"]) == (x, y) and (a["k"], b["k"]) == (y, x):
            return Dataflow("OS", "k", {"m": x, "n": y})
        if (a["m"], a["k"], b["k"], b["n"]) == (x, y, y, x):
            return Dataflow("LS", "n", {"m": x, "k": y}, y)
        if (b["k"], b["n"], a["k"], a["m"]) == (x, y, x, y):
            return Dataflow("RS", "m", {"k": x, "n": y}, x)
        return None
    given = (a["m"], a["k"], b["k"], b["n"], x, y)
    match given:
        case (str(axis), None, None, str(other), None, str(last)) if axis == other == last:
            return Dataflow("AG", "m", {"m": None, "n": axis})
        case (str(axis), None, None, str(other), str(last), None) if axis == other == last:
            return Dataflow("AG", "n", {"m": axis, "n": None})
        case (None, str(axis), None, str(other), None, str(last)) if axis == other == last:
            return Dataflow("AG", "k", {"n": axis})
        case (str(axis), None, str(other), None, str(last), None) if axis == other == last:
            return Dataflow("AG", "k", {"m": axis})
        case (None, str(axis), str(other), None, str(last), None) if axis == other == last:
            return Dataflow("SC", "m", {"k": axis}, axis)
        case (None, str(axis), str(other), None, None, str(last)) if axis == other == last:
            return Dataflow("SC", "n", {"k": axis}, axis)
    return None


def check_slices(product: Product, slices: int, block: int) -> None:
    """Raise ShardingError unless every shard of the sliced dim divides by slices x block."""
    letter, group = product.sliced, product.flow.group
    length, unit = product.length(letter), slices * block
    counts = sorted({product.parts(axes[group]) for axes in product.split} | {1})
    local = [length // count for count in counts if length % count == 0]
    if len(local) < len(counts) or any(size % unit for size in local):
        shared = math.gcd(*(length // count if length % count == 0 else 1 for count in counts))
        legal = [s for s in range(1, shared + 1) if shared % (s * block) == 0]
        near = sorted(sorted(legal, key=lambda s: abs(s - slices))[:3])
        shards = ", ".join(f"{length} / {count}" for count in counts)
        raise ShardingError(
            f"{product.subject}: {slices} slices in blocks of {block} need shards of {group} that are "
            f"multiples of {unit}, got {shards}; use "
            + (f"slices {' or '.join(map(str, near))}" if near else f"a block that divides {shared}")
        )
