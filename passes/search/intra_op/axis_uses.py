"""Strategies under which every axis of a mesh has one use: one splits the batch, the others other dims.

*In:* a `Fold` and the axis of the batch. *Out:* the strategies of an op that keep to it. *Invariant:* an op
keeps its strategy that splits nothing, and ops that read no samples, such as updates, keep all: how
parameters and states are stored over the axis of the batch (ZeRO) stays free.

The indices of samples are those that dim 0 of the inputs has, and what the index rules make of them: a dim
carries samples if its major index does. Layers are folded, so that a value may be read before the op that
stands for its producer; the indices are therefore computed as a fixpoint.

    ids "b s", table "v d"  ->  x "b s d"  ->  "(b s) d"     dp may split b, and nothing else
"""

from __future__ import annotations

from dataclasses import dataclass

from distgraph.errors import ShardingError
from distgraph.ir.graph import SOURCES
from distgraph.ir.op_registry import rule_of
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.passes.search.intra_op.strategies import Specs, Strategies
from distgraph.passes.search.layering.layer_folding import Fold


@dataclass(frozen=True, eq=False)
class AxisUses:
    """One use for every axis of a mesh.

    Attributes:
        fold: the graph.
        batch_axis: the axis that splits samples, and nothing else.
        indices: folded op -> the indices of its rule that count samples; absent where it reads none.
        dims: folded value -> its dims of samples; absent where it has none.
    """

    fold: Fold
    batch_axis: str
    indices: dict[int, frozenset[str]]
    dims: dict[int, frozenset[int]]

    def strategies(self, op: int, every: Strategies) -> Strategies:
        """Those strategies of a folded op that keep to one use of every axis.

        Raises:
            ShardingError: there is none, since the user laid the op out otherwise.
        """
        if op not in self.indices:
            return every
        numbers = [
            number for number, (axes, _) in enumerate(every.options) if self._keeps(axes, self.indices[op])
        ]
        if not numbers:
            shown = ", ".join(str(spec) for spec in every.result_specs[0][:1])
            raise ShardingError(
                f"{self.fold.ops[op].op} is laid out as {shown}, {self._expected()}; take the annotation "
                f"out, or search for another runtime"
            )
        return every if len(numbers) == len(every.options) else every.subset(numbers)

    def inputs(self, specs: Specs) -> list[ShardSpec]:
        """The layouts of an input whose samples are split over the axis of the batch; all where none is."""
        split = [s for s in specs if not s.dims or (s.dims[0] == (self.batch_axis,) and not any(s.dims[1:]))]
        return split or list(specs)

    def check_annotation(self, value: int, attr: DistAttr) -> None:
        """Refuse the annotation of a folded value that gives an axis another use.

        Raises:
            ShardingError: it splits samples over another axis, or other dims over that of the batch.
        """
        if value not in self.dims:
            return
        axes = tuple((str(dim), split) for dim, split in enumerate(attr.spec.dims))
        if not self._keeps(axes, frozenset(map(str, self.dims[value]))):
            raise ShardingError(
                f"%{self.fold.values[value].value.name} ({attr.origin.where}): annotated as {attr.spec}, "
                f"{self._expected()}; change the annotation, or search for another runtime"
            )

    def _keeps(self, axes: tuple[tuple[str, tuple[str, ...]], ...], samples: frozenset[str]) -> bool:
        return all((axis == self.batch_axis) == (index in samples) for index, split in axes for axis in split)

    def _expected(self) -> str:
        return (
            f"but the runtime that is to execute the plan has one use for an axis: {self.batch_axis} splits "
            f"samples, and other axes other dims"
        )


def axis_uses(fold: Fold, batch_axis: str) -> AxisUses:
    """The ops and values of a folded graph that have dims of samples."""
    dims: dict[int, frozenset[int]] = {
        number: frozenset({0})
        for number, value in enumerate(fold.values)
        if fold.ops[value.producer].op.kind == "input" and value.value.shape
    }
    indices: dict[int, frozenset[str]] = {}
    changed = True
    while changed:
        changed = False
        for number, op in enumerate(fold.ops):
            if op.op.kind in SOURCES or not any(operand in dims for operand in op.operands):
                continue
            rule = rule_of(op.op)
            terms = tuple(zip(op.operands, rule.operands, strict=True))
            read = frozenset(term[d][0] for value, term in terms for d in dims.get(value, ()) if term[d])
            indices[number] = read
            for value, term in zip(op.results, rule.results, strict=True):
                carried = frozenset(d for d, dim in enumerate(term) if dim and dim[0] in read)
                if carried - dims.get(value, frozenset()):
                    dims[value] = dims.get(value, frozenset()) | carried
                    changed = True
    return AxisUses(fold, batch_axis, indices, dims)
