"""Loops: ops that hold their body as a graph, and how values pass between a loop and its body.

    %h, %s, %y = scan(%h0, %xs, %w) {body={graph ...}, length=8, carried=1, sequences=1, sums=1}

The body is the graph of one turn. Its sources are named after their part:

    carry0, carry1, ...   states: what a turn hands to the next one; updates of the body are the new values
    x0, x1, ...           inputs: the items of sequences along their first dim, one for each turn
    fixed0, ...           inputs: tensors that are the same in all turns
    turn                  input, i64[]: the position of the turn in the sequences

Its outputs are first those that are stacked along a new first dim, one for each `y0, y1, ...`, then those
that are summed over the turns, `sum0, sum1, ...`. A loop has the operands (carries, sequences, fixed ones),
and the results (last carries, sums, stacked ones). A `while_loop` also has a condition: a graph over the same
sources with one bool scalar as its output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from distgraph.errors import GraphError
from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.op_registry import lookup
from distgraph.ir.sharding_spec import ShardSpec

CARRY, ITEM, FIXED, TURN = "carry", "x", "fixed", "turn"
STACKED, SUMMED = "y", "sum"


@dataclass(frozen=True, slots=True)
class Loop:
    """View of an op as a loop; see the module."""

    op: Op

    @property
    def body(self) -> Graph:
        """The graph of one turn."""
        graph: Graph = self.op.attrs["body"]
        return graph

    @property
    def condition(self) -> Graph | None:
        """The graph that decides whether there is another turn; None for a number of turns that is known."""
        return self.op.attrs.get("condition")

    @property
    def carried(self) -> int:
        """Number of values that turns hand on."""
        return int(self.op.attrs["carried"])

    @property
    def sequences(self) -> int:
        """Number of operands of which each turn reads one item."""
        return int(self.op.attrs.get("sequences", 0))

    @property
    def sums(self) -> int:
        """Number of results that are sums over the turns."""
        return int(self.op.attrs.get("sums", 0))

    @property
    def turns(self) -> int:
        """Number of turns; for a loop with a condition the number that forecasts assume."""
        return int(self.op.attrs["length" if self.condition is None else "turns"])

    @property
    def reverse(self) -> bool:
        """Whether the last item comes first."""
        return bool(self.op.attrs.get("reverse", False))

    @property
    def order(self) -> range:
        """Positions of the turns in the sequences, in the order in which they run."""
        return range(self.turns - 1, -1, -1) if self.reverse else range(self.turns)

    @property
    def operand_names(self) -> tuple[str, ...]:
        """Name of the source of the body that gets each operand."""
        fixed = self.carried + self.sequences
        return tuple(
            f"{CARRY}{n}"
            if n < self.carried
            else f"{ITEM}{n - self.carried}"
            if n < fixed
            else f"{FIXED}{n - fixed}"
            for n in range(len(self.op.operands))
        )

    @property
    def carries(self) -> tuple[tuple[Value, Value], ...]:
        """(value that a turn begins with, value that it ends with) of all carries."""
        sources, new = source_values(self.body), dict(self.body.updates)
        begins = (sources[f"{CARRY}{n}"] for n in range(self.carried))
        return tuple((value, new[value.name]) for value in begins)

    @property
    def stacked(self) -> tuple[Value, ...]:
        """Values of the body that are stacked."""
        return tuple(value for label, value in self.body.outputs if not label.startswith(SUMMED))

    @property
    def summed(self) -> tuple[Value, ...]:
        """Values of the body that are summed over the turns."""
        return tuple(value for label, value in self.body.outputs if label.startswith(SUMMED))

    @property
    def result_values(self) -> tuple[Value, ...]:
        """The value of the body that each result is made of."""
        return (*(begin for begin, _ in self.carries), *self.summed, *self.stacked)

    def boundary(self) -> tuple[tuple[ShardSpec, ...], tuple[ShardSpec, ...]]:
        """Layouts in which the loop reads its operands and leaves its results: those of its body.

        A body that is not completed reads and leaves whole tensors.
        """
        sources, layouts = source_values(self.body), self.body.attrs
        operands, results = [], []
        for value, name in zip(self.op.operands, self.operand_names, strict=True):
            attr = layouts.get(sources[name].name)
            spec = ShardSpec(((),) * len(sources[name].shape)) if attr is None else attr.spec
            operands.append(spec if len(spec.dims) == len(value.shape) else stacked_spec(spec))
        for value, inner in zip(self.op.results, self.result_values, strict=True):
            attr = layouts.get(inner.name)
            spec = ShardSpec(((),) * len(inner.shape)) if attr is None else attr.spec
            results.append(spec if len(spec.dims) == len(value.shape) else stacked_spec(spec))
        return tuple(operands), tuple(results)


def stacked_spec(spec: ShardSpec) -> ShardSpec:
    """The layout of items, with a first dim of turns that is not split."""
    return ShardSpec(((), *spec.dims), spec.partial)


def source_values(body: Graph) -> dict[str, Value]:
    """Name of a source of a body -> its value."""
    return {str(op.attrs["name"]): op.result for op in body.sources("state", "input", "param")}


def check_body(loop: Loop) -> None:
    """Check that operands fit the body of a loop.

    Raises:
        GraphError: an operand has another type than the body reads, or a carry changes its type.
    """
    kind, sources = loop.op.kind, source_values(loop.body)
    for value, name in zip(loop.op.operands, loop.operand_names, strict=True):
        inner = sources.get(name)
        if inner is None:
            raise GraphError(f"body of {kind} has no source {name!r} for operand %{value.name}")
        shape = value.shape
        if name.startswith(ITEM):
            if shape[:1] != (loop.turns,):
                raise GraphError(
                    f"operand %{value.name} is {value.type} but {kind} has {loop.turns} turns; the first dim "
                    "of a sequence must be the number of turns"
                )
            shape = shape[1:]
        if (shape, value.dtype) != (inner.shape, inner.dtype):
            raise GraphError(
                f"operand %{value.name} of {kind} is {value.type} but its body reads {name} as {inner.type}"
            )
    for begin, end in loop.carries:
        if begin.type != end.type:
            raise GraphError(f"body of {kind} begins with {begin.type} but hands on {end.type}")
    condition = loop.condition
    if condition is not None and [value.type for _, value in condition.outputs] != ["bool[]"]:
        types = ", ".join(value.type for _, value in condition.outputs)
        raise GraphError(f"condition of {kind} returns {types} but must return one bool scalar")


def with_bodies(op: Op, change: Callable[[Graph], Graph]) -> Op:
    """An op with other bodies; an op that has none as it is."""
    bodies = {name: change(op.attrs[name]) for name in lookup(op.kind).bodies}
    return replace(op, attrs={**op.attrs, **bodies}) if bodies else op
