"""The strategies of an op: every layout that its index rule allows, all axes of the mesh together.

*In:* an op and a mesh. *Out:* `Strategies`: for every option the axes that split each index, the operands
through which partial sums pass, and the layouts of results and operands. *Invariant:* the options are those
of `index_rule.choices`; nothing is specific to a kind of op. Ops with equal rules share one `Strategies`
object, whatever their names and sizes are.

Two restrictions, and no others, remove options. An axis of one rank splits nothing. A partial sum passes
through a contraction only where the result is smaller than the operand: elsewhere reducing it before the
contraction costs no more, and then the contraction can be split over the axis.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.graph import Op
from distgraph.ir.index_rule import OpLayout, Rule, choices, operand_spec, result_spec
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import linear_groups, lookup, rule_of
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.search.intra_op.redistribution_cost_table import representative

Ints = NDArray[np.int64]
Axes = tuple[tuple[str, tuple[str, ...]], ...]
Specs = tuple[ShardSpec, ...]
_NO_OPTIONS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Strategies:
    """Options of an op, as arrays over options.

    Attributes:
        options: (axes, partial) of the layout of every option (see `OpLayout`).
        result_specs: for every result, its layout under every option.
        operand_specs: for every operand, the layout in which every option reads it.
    """

    options: tuple[tuple[Axes, tuple[tuple[str, int], ...]], ...]
    result_specs: tuple[Specs, ...]
    operand_specs: tuple[Specs, ...]

    def layout(self, mesh: ProcessMesh, option: int) -> OpLayout:
        """How the op is computed under an option."""
        return OpLayout(mesh, *self.options[option])

    def layouts(self, mesh: ProcessMesh) -> tuple[OpLayout, ...]:
        """How the op is computed under every option."""
        return tuple(OpLayout(mesh, *option) for option in self.options)

    def subset(self, numbers: Sequence[int]) -> Strategies:
        """The options with some numbers."""
        return Strategies(
            tuple(self.options[i] for i in numbers),
            tuple(tuple(specs[i] for i in numbers) for specs in self.result_specs),
            tuple(tuple(specs[i] for i in numbers) for specs in self.operand_specs),
        )

    def result_parts(self, mesh: ProcessMesh, result: int) -> Ints:
        """The number of parts [options, dims] that a result is split into."""
        return self.parts(mesh)[len(self.operand_specs) + result]

    def parts(self, mesh: ProcessMesh) -> tuple[Ints, ...]:
        """The numbers of parts [options, dims] that each operand, then each result, is split into."""
        if mesh.shape not in self._parts:
            self._parts[mesh.shape] = tuple(
                parts_of(specs, mesh) for specs in (*self.operand_specs, *self.result_specs)
            )
        return self._parts[mesh.shape]

    def options_reading(self, position: int, spec: ShardSpec) -> Ints:
        """The options that read the operand at a position in a layout."""
        if position not in self._options_by_spec:
            by_spec: dict[ShardSpec, list[int]] = {}
            for option, needed_spec in enumerate(self.operand_specs[position]):
                by_spec.setdefault(needed_spec, []).append(option)
            self._options_by_spec[position] = {
                key: np.array(options, dtype=np.int64) for key, options in by_spec.items()
            }
        return self._options_by_spec[position].get(spec, _NO_OPTIONS)

    @cached_property
    def _options_by_spec(self) -> dict[int, dict[ShardSpec, Ints]]:
        return {}

    @cached_property
    def _parts(self) -> dict[tuple[int, ...], tuple[Ints, ...]]:
        return {}


def parts_of(specs: Specs, mesh: ProcessMesh) -> Ints:
    """The numbers of parts [specs, dims] that layouts split a tensor into."""
    ndim = len(specs[0].dims) if specs else 0
    counts = np.array([_counts(spec.dims, mesh) for spec in specs], dtype=np.int64)
    return counts.reshape(len(specs), ndim)


@lru_cache(maxsize=1 << 14)
def _counts(dims: tuple[tuple[str, ...], ...], mesh: ProcessMesh) -> tuple[int, ...]:
    return tuple(mesh.count(axes) for axes in dims)


def local_bytes(shape: tuple[int, ...], size: int, parts: Ints) -> NDArray[np.float64]:
    """Bytes [layouts] of the largest block of a tensor; `size` bytes an element, `parts` as of `parts_of`."""
    return block_bytes(even_blocks(shape, parts), size)


def block_bytes(blocks: Ints, size: int) -> NDArray[np.float64]:
    """Bytes [layouts] of blocks with given lengths [layouts, dims] and a given size of an element."""
    nbytes: NDArray[np.float64] = size * blocks.prod(axis=1, dtype=np.float64)
    return nbytes


def even_blocks(shape: tuple[int, ...], parts: Ints) -> Ints:
    """Lengths [layouts, dims] of the largest block of a tensor; parts as in `local_bytes`."""
    lengths: Ints = -(-np.array(shape, dtype=np.int64) // parts)
    return lengths


def blocks_of_rank(shape: tuple[int, ...], specs: Specs, mesh: ProcessMesh, rank: int) -> Ints:
    """Lengths [layouts, dims] of the block that one rank of a mesh with weights stores."""
    lengths = [spec.local_shape(shape, mesh, rank) for spec in specs]
    return np.array(lengths, dtype=np.int64).reshape(len(specs), len(shape))


_CACHE: dict[Hashable, Strategies] = {}


def strategies_of(op: Op, mesh: ProcessMesh) -> Strategies:
    """Every legal way to compute an op on a mesh."""
    rule = rule_of(op)
    linear, reduction = linear_groups(op), lookup(op.kind).reduction
    passing = tuple(number for number, group in enumerate(linear) if _partials_pass(op, group))
    key = (
        rule.operands,
        rule.results,
        rule.whole,
        tuple(rule.joint.items()),
        tuple((i, _size_class(rule, i, mesh)) for i in rule.indices),
        linear,
        passing,
        reduction,
        mesh.axes,
        mesh.shape,
        tuple(mesh.weights.items()),
    )
    if key not in _CACHE:
        _CACHE[key] = _enumerate(rule, mesh, linear, passing, reduction)
    return _CACHE[key]


def _partials_pass(op: Op, group: tuple[int, ...]) -> bool:
    """Whether partial operands of a linear group may stay partial through an op."""
    if lookup(op.kind).cost != "matmul":
        return True
    return sum(v.nbytes for v in op.results) < sum(op.operands[i].nbytes for i in group)


def _size_class(rule: Rule, index: str, mesh: ProcessMesh) -> int:
    """A key that is equal for sizes of an index for which the same layouts are legal."""
    size = rule.sizes[index]
    return size if index in rule.composite or mesh.weights else representative(size, mesh)


def _enumerate(
    rule: Rule,
    mesh: ProcessMesh,
    linear: tuple[tuple[int, ...], ...],
    passing: tuple[int, ...],
    reduction: str,
) -> Strategies:
    layouts = [
        OpLayout(mesh, layout.axes, tuple((axis, passing[group]) for axis, group in layout.partial))
        for layout in choices(rule, mesh, [linear[group] for group in passing])
        if layout == layout.without_unit_axes
    ]
    return strategies_in(layouts, rule, linear, reduction)


def strategies_in(
    layouts: Sequence[OpLayout], rule: Rule, linear: tuple[tuple[int, ...], ...], reduction: str
) -> Strategies:
    """Some layouts of an op as its strategies, by its rule, linear groups and reduction."""
    return Strategies(
        tuple((layout.axes, layout.partial) for layout in layouts),
        tuple(
            tuple(result_spec(rule, i, layout, reduction) for layout in layouts)
            for i in range(len(rule.results))
        ),
        tuple(
            tuple(operand_spec(rule, i, layout, linear) for layout in layouts)
            for i in range(len(rule.operands))
        ),
    )
