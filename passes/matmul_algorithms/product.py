"""A contraction whose operands and result are stored in known layouts, and the ops that compute it.

*In:* an op C = A B of a completed graph. *Out:* its dataflow, and a list of ops that leave the same value in
the same layout. *Invariant:* every op emitted has its layout, and a meaning on whole tensors.

The dataflow follows from the layouts (`stored_dataflow.py`). Mesh axes that take no part in it are those of
data parallelism (`data_axes.py`): a contraction on the others is computed at each of their positions.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distgraph.errors import ShardingError
from distgraph.ir.collective_registry import EACH_MICRO_BATCH
from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import infer_results, rule_of
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.ops.contraction import parse_einsum
from distgraph.passes.matmul_algorithms.data_axes import DataAxes, Letters, data_axes
from distgraph.passes.matmul_algorithms.layer_products import divisors, nearest_multiples
from distgraph.passes.matmul_algorithms.stored_dataflow import Axes, Dataflow, dataflow_of, groups_of

Partial = tuple[tuple[str, str], ...]
"""Axes over which a tensor is still to be reduced, each with the reduction, as in `ShardSpec.partial`."""


@dataclass(slots=True)
class Product:
    """A contraction and the ops that are to compute it.

    Attributes:
        op: the contraction, on tensors in which data axes have letters of their own.
        letters: those of A, B and C, one for each dim.
        mesh: where it is computed.
        specs: stored layouts of A, B and C.
        split: for A, B and C the axis of each group.
        split_letter: group -> its letter that is split.
        flow: the dataflow.
        data: letter -> axes of data parallelism that split it, and nothing else does.
        whole: the contraction of the graph.
        stored: layout of its result.
        summed: leading dims of the result over which it is summed behind the algorithm.
        ops, attrs: emitted ops, and layouts of their results.
    """

    op: Op
    letters: Letters
    mesh: ProcessMesh
    specs: tuple[ShardSpec, ShardSpec, ShardSpec]
    split: tuple[Axes, Axes, Axes]
    split_letter: Mapping[str, str]
    flow: Dataflow
    data: Mapping[str, tuple[str, ...]]
    whole: Op
    stored: DistAttr
    summed: int = 0
    ops: list[Op] = field(default_factory=list)
    attrs: dict[str, DistAttr] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        """The op, as messages name it."""
        return str(self.whole)

    @property
    def sizes(self) -> list[int]:
        """Ranks along the axes of the dataflow, in the order of the mesh."""
        used = {axis for split in self.split for axis in split.values()}
        return [self.mesh.axis_size(axis) for axis in self.mesh.axes if axis in used]

    @property
    def origin(self) -> Origin:
        """That of the layouts of the emitted ops."""
        return Origin("op", f"%{self.whole.name}")

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
        """A layout of a tensor with these letters, which data axes split too: letter -> axis."""
        dims = tuple(
            (*self.data.get(letter, ()), *((axes[letter],) if letter in axes else ())) for letter in letters
        )
        summed = () if partial is None else ((partial, "sum"),)
        return DistAttr(self.mesh, ShardSpec(dims, summed), self.origin)

    def stored_on(self, mesh: ProcessMesh, which: int) -> DistAttr:
        """The stored layout of A, B or C (0, 1 or 2) on its ranks in the order of a mesh."""
        return DistAttr(mesh, self.specs[which], self.origin)

    def stored_axes(self, which: int) -> dict[str, str]:
        """Letter -> axis of the stored A, B or C, without data axes."""
        return {
            self.split_letter[group]: axis for group, axis in self.split[which].items() if axis is not None
        }

    def computed(self, axes: Mapping[str, tuple[str, ...]], mesh: ProcessMesh, prefix: str = "") -> OpLayout:
        """How an op is computed: index -> axes, and each letter with data axes, behind a prefix, by these."""
        split = {f"{prefix}{letter}": data for letter, data in self.data.items()}
        return OpLayout(mesh, tuple(sorted({**axes, **split}.items())))

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
        """Add an op; `name` ends the name of its result, and is empty for the result of the contraction."""
        ((shape, dtype),) = infer_results(kind, operands, attrs)
        value = Value(f"{self.op.name}.{name}" if name else self.op.name, tuple(shape), dtype)
        op = self.op
        self.ops.append(
            replace(op, kind=kind, operands=tuple(operands), results=(value,), attrs=attrs, layout=computed)
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

    def move(self, value: Value, attr: DistAttr, name: str) -> Value:
        """The same, to a neighbour: in every micro-batch under the product before it, even of a parameter."""
        return self.follow("reshard", [value], attr, name, **{EACH_MICRO_BATCH: True})

    def multiply(self, left: Value, right: Value, name: str, total: Value | None = None) -> Value:
        """Add a partial product in the layout of the dataflow, added to a total where there is one."""
        axes = self.computed_axes()
        attr = self.layout(self.letters[2], axes, self.flow.reduced)
        computed = self.computed({letter: (axis,) for letter, axis in axes.items()}, self.mesh)
        operands = [left, right] if total is None else [total, left, right]
        kind = "einsum" if total is None else "einsum_add"
        return self.emit(kind, operands, attr, computed, name, spec=self.spec)

    # ------------------------------------------------------------------ data axes

    def separate(self, data: DataAxes) -> None:
        """Give data axes letters of their own: reshape the operands, before the algorithm."""
        if not data.axes:
            return
        left, right, made = self.letters
        self.letters = data.letters(left), data.letters(right), data.summed + data.letters(made)
        self.data, self.summed = data.split(), len(data.summed)
        operands = list(self.whole.operands)
        for which, term in enumerate((left, right)):
            shape = data.shape(term, operands[which].shape)
            if shape != operands[which].shape:
                attr = self.layout(self.letters[which], self.stored_axes(which))
                operands[which] = self._rearrange(
                    "reshape", operands[which], attr, f"{'ab'[which]}.apart", shape=shape
                )
        specs = [self.layout(self.letters[which], self.stored_axes(which)).spec for which in range(3)]
        self.specs = specs[0], specs[1], specs[2]
        if data.renamed:
            counts = (data.counts[letter] for letter in data.renamed if letter not in made)
            shape = (*counts, *data.shape(made, self.whole.result.shape))
            result = Value(f"{self.whole.name}.apart", shape, self.whole.result.dtype)
            attrs = {"spec": self.spec}
            self.op = replace(
                self.whole, kind="einsum", operands=tuple(operands), results=(result,), attrs=attrs
            )

    def partial(self) -> Partial:
        """The sums over data axes that the result still needs behind the algorithm."""
        return tuple((axis, "sum") for letter in self.letters[2][: self.summed] for axis in self.data[letter])

    def join(self, *, reduced: bool = True) -> None:
        """Leave the result as the graph has it, behind the algorithm: summed over data axes, reshaped.

        Args:
            reduced: whether ranks along data axes sum their parts here; otherwise the reader does.
        """
        if self.op is self.whole:
            return
        value, partial = self.op.result, self.partial()
        summed, self.op, shape = self.summed, self.whole, self.whole.result.shape
        joins, last = value.shape[summed:] != shape, "" if not reduced else "joined" if summed else ""
        if summed:
            dims = self.attrs[value.name].spec.dims[summed:]
            attr = replace(self.stored, spec=ShardSpec(dims, partial))
            name = "partial" if joins or reduced else ""
            value = self._rearrange(
                "reduce_sum", value, attr, name, dims=tuple(range(summed)), keepdims=False
            )
        if joins:
            attr = replace(self.stored, spec=ShardSpec(self.stored.spec.dims, partial))
            value = self._rearrange("reshape", value, attr, last, shape=shape)
        if summed and reduced:
            self.reshard(value, self.stored, "")

    def _rearrange(self, kind: str, value: Value, attr: DistAttr, name: str, **attrs: Any) -> Value:
        """Add a reshape, or a sum over leading dims: every rank has the same part before and behind it."""
        ((shape, dtype),) = infer_results(kind, [value], attrs)
        rule = rule_of(Op(kind, (value,), (Value("", tuple(shape), dtype),), attrs))
        terms, dims, passed = rule.results[0], attr.spec.dims, attr.spec.partial
        if len(value.shape) > len(shape):
            spec = self.attrs[value.name].spec
            terms, dims, passed = rule.operands[0], spec.dims, spec.partial
        axes = tuple(sorted((term[0], split) for term, split in zip(terms, dims, strict=True) if split))
        computed = OpLayout(self.mesh, axes, tuple((axis, 0) for axis, _ in passed))
        return self.emit(kind, [value], attr, computed, name, **attrs)


def product_of(graph: Graph, op: Op, algorithm: object) -> Product:
    """A contraction of a completed graph with its dataflow; `algorithm` is named in messages.

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
    used = [
        [tuple(axis for axis in dim if mesh.axis_size(axis) > 1) for dim in attr.spec.dims]
        for attr in layouts
    ]
    data = data_axes(op, letters, used, mesh, algorithm)
    split, split_letter = _split(op, letters, used, data, f"algorithm {algorithm}", stored)
    flow = dataflow_of(*split)
    if flow is None:
        raise ShardingError(
            f"{op}: algorithm {algorithm} needs layouts of one dataflow, such as A [x, y], B [x, y], "
            f"C [x, y] for OS or A [x, y], B [y, x], C [x, y] for LS on mesh axes x and y, got {stored} on "
            f"{mesh}; "
            f"dg.shard_op(..., algorithm=, dataflow=) pins them"
        )
    specs = tuple(attr.spec for attr in layouts)
    product = Product(op, letters, mesh, specs, split, split_letter, flow, {}, op, layouts[2])  # type: ignore[arg-type]
    product.separate(data)
    return product


def _split(
    op: Op,
    letters: Letters,
    used: Sequence[Sequence[tuple[str, ...]]],
    data: DataAxes,
    subject: str,
    stored: str,
) -> tuple[tuple[Axes, Axes, Axes], dict[str, str]]:
    """For A, B and C the axis of each group, and the letter of each group that is split, but by data axes."""
    groups = groups_of(*letters)
    split: list[Axes] = []
    split_letter: dict[str, str] = {}
    for term, dims in zip(letters, used, strict=True):
        axes: dict[str, str | None] = {"m": None, "k": None, "n": None}
        for letter, dim in zip(term, dims, strict=True):
            others = tuple(axis for axis in dim if axis not in data.axes.get(letter, ()))
            if not others:
                continue
            group = groups[letter]
            conflict = axes.get(group, letter) is not None or split_letter.setdefault(group, letter) != letter
            if len(others) > 1 or conflict:
                raise ShardingError(
                    f"{op}: {subject} needs one split dim in each of m, k and n, by one axis, "
                    f"got {stored}; split another dim with dg.shard_op(..., in_specs=, out_specs=)"
                )
            axes[group] = others[0]
        split.append(axes)
    return (split[0], split[1], split[2]), split_letter


def _letters(op: Op, algorithm: object) -> Letters:
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


def largest_block(product: Product, slices: int) -> int:
    """Adjacent rows or columns that can stay together in each of some slices; 1 where `check_slices`
    refuses these slices whatever the block is.

    On a mesh whose axes are equally long these are the slices of a shard as a whole, so that each is one run.
    """
    length, counts = product.length(product.sliced), _shard_counts(product)
    shared = math.gcd(*(length // count for count in counts))
    return 1 if length % math.lcm(*counts) or shared % slices else shared // slices


def _shard_counts(product: Product) -> list[int]:
    """The numbers of ranks that split the sliced dim of A, B or C; 1 where it is whole."""
    return sorted({product.parts(axes[product.flow.group]) for axes in product.split} | {1})


def check_slices(product: Product, slices: int, block: int) -> None:
    """Raise ShardingError unless every shard of the sliced dim divides by slices x block."""
    letter, group = product.sliced, product.flow.group
    length, unit = product.length(letter), slices * block
    counts = _shard_counts(product)
    parts = math.lcm(*counts)
    if length % parts == 0 and all(length // count % unit == 0 for count in counts):
        return
    near = nearest_multiples(length, parts * unit)
    sliced = f"{product.subject}: {slices} {'slice' if slices == 1 else 'slices'} in blocks of {block}"
    if length % parts:
        raise ShardingError(
            f"{sliced} on {' and '.join(map(str, counts[1:]))} ranks need a multiple of {parts * unit} in "
            f"dim {letter} but its length is {length}; use {near}"
        )
    shared, ways = math.gcd(*(length // count for count in counts)), [f"a length of {near}"]
    if shared % block == 0:
        ways.insert(0, f"slices {_nearest(divisors(shared // block), slices)}")
    elif shared % slices == 0:
        ways.insert(0, f"block {_nearest(divisors(shared // slices), block)}")
    shards = ", ".join(f"{length} / {count}" for count in counts)
    raise ShardingError(
        f"{sliced} need shards of {group} that are multiples of {unit}, got {shards}; use "
        f"{', or '.join(ways)}"
    )


def _nearest(legal: Sequence[int], given: int) -> str:
    """The three legal numbers nearest to a given one."""
    return " or ".join(map(str, sorted(sorted(legal, key=lambda each: abs(each - given))[:3])))
