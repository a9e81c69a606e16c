"""The built-in collectives; `g` is the number of ranks in the group.

    kind            what it does                                    bytes that one rank sends
    slice           keeps a part of its own block                   0
    mask            replicated -> partial: keeps the value where    0
                    the axes are at 0, the identity of the
                    reduction elsewhere (max, min: all keep it)
    all_gather      undoes trailing axes of a dim                   (g-1)/g x block after
    reduce_scatter  partial axes become trailing axes of a dim      (g-1)/g x block before
    all_reduce      partial axes become replicated                  2(g-1)/g x block before
    all_to_all      trailing axes of one dim move to another's end  (g-1)/g x block before
    permute         any exchange of tiles (`tiles.tiles_between`)   the larger of block before and after
    halo, transfer  tiles of neighbours; tiles between two meshes   their tiles
    broadcast       partial axes become replicated, where all but   the block
                    one rank of the group (the root) have zeros
    reduce          partial axes become replicated, but only the    the block
                    root has the sum
    send            block of one rank to another                    the block

What has a root is only read where it is: see `OpDef.root` and the verifier.

An all_reduce, reduce_scatter or all_gather may have several operands, which one message carries:
`%a, %b = comm.all_reduce(%x, %y)`. The dims that an all_gather or a reduce_scatter works on are then in the
attribute `dims`, one for each operand.

The largest rank's block counts; where a group's blocks are uneven, a rank sends up to g-1 of the largest of
them, but never more than all there is.

*Invariant:* every step is exact. Blocks are ceil(n / parts) long, so the four blocks of 5 over x*y (2, 2, 1,
0) do not nest in the two over x (3, 2): a step along trailing axes is made only where the blocks nest; where
they do not, a permute, or an all_gather of the whole dim and a slice, takes its place. Axes with weights
count as their units.

Reductions over several axes apply in the order of `spec.partial`, the first innermost. Equal ones commute and
are done by one collective; an axis with an unequal one before it waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from distgraph.ir.collective_registry import (
    COLLECTIVES,
    BlockSizes,
    Collective,
    Dims,
    RankCall,
    Space,
    Step,
    StepAttrs,
    collective_of,
    larger,
    register_collective,
    selections,
    smaller,
    with_dim,
)
from distgraph.ir.op_registry import Attrs
from distgraph.ir.sharding_spec import ShardSpec

__all__ = ["COLLECTIVES", "collective_of"]

# ---------------------------------------------------------------------- layouts before and after


def _gathered(spec: ShardSpec, attrs: StepAttrs) -> ShardSpec | None:
    keep = len(spec.dims[attrs.dim]) - len(attrs.axes)
    if keep < 0 or spec.dims[attrs.dim][keep:] != attrs.axes:
        return None
    return ShardSpec(with_dim(spec.dims, attrs.dim, spec.dims[attrs.dim][:keep]), spec.partial)


def _sliced(spec: ShardSpec, attrs: StepAttrs) -> ShardSpec | None:
    if set(attrs.axes) & set(spec.axes):
        return None
    return ShardSpec(with_dim(spec.dims, attrs.dim, spec.dims[attrs.dim] + attrs.axes), spec.partial)


def _reduced(spec: ShardSpec, attrs: StepAttrs) -> ShardSpec | None:
    if any(spec.reduction(axis) != attrs.reduction for axis in attrs.axes):
        return None
    return ShardSpec(spec.dims, tuple((a, kind) for a, kind in spec.partial if a not in attrs.axes))


def _scattered(spec: ShardSpec, attrs: StepAttrs) -> ShardSpec | None:
    reduced = _reduced(spec, attrs)
    return None if reduced is None else _sliced(reduced, attrs)


def _exchanged(spec: ShardSpec, attrs: StepAttrs) -> ShardSpec | None:
    gathered = _gathered(spec, attrs)
    return None if gathered is None else _sliced(gathered, StepAttrs(attrs.axes, attrs.to_dim))


def _masked(spec: ShardSpec, attrs: StepAttrs) -> ShardSpec | None:
    if set(attrs.axes) & set(spec.axes):
        return None
    return ShardSpec(spec.dims, spec.partial + tuple((axis, attrs.reduction) for axis in attrs.axes))


# ---------------------------------------------------------------------- steps


def _gathers(space: Space, spec: ShardSpec) -> Iterator[Step]:
    for dim, axes in enumerate(spec.dims):
        for keep in range(len(axes)):
            if space.nests(dim, axes, keep):
                after = ShardSpec(with_dim(spec.dims, dim, axes[:keep]), spec.partial)
                yield Step("all_gather", axes[keep:], dim, None, None, spec, after)


def _slices(space: Space, spec: ShardSpec) -> Iterator[Step]:
    unused = space.unused(spec)
    if not unused:
        return
    for dim, axes in enumerate(spec.dims):
        for selection in selections(unused):
            if space.worth_slicing(spec, dim, selection) and space.nests(dim, axes + selection, len(axes)):
                after = ShardSpec(with_dim(spec.dims, dim, axes + selection), spec.partial)
                yield Step("slice", selection, dim, None, None, spec, after)


def _all_to_alls(space: Space, spec: ShardSpec) -> Iterator[Step]:
    for dim, axes in enumerate(spec.dims):
        for keep in range(len(axes)):
            if not space.nests(dim, axes, keep):
                continue
            for to_dim, others in enumerate(spec.dims):
                grown = others + axes[keep:]
                if to_dim == dim or not space.leads_to(axes[keep:], to_dim):
                    continue
                if space.nests(to_dim, grown, len(others)):
                    dims = with_dim(with_dim(spec.dims, dim, axes[:keep]), to_dim, grown)
                    after = ShardSpec(dims, spec.partial)
                    yield Step("all_to_all", axes[keep:], dim, to_dim, None, spec, after)


def _reductions(space: Space, spec: ShardSpec) -> Iterator[Step]:
    """The steps of all_reduce and reduce_scatter."""
    if not spec.partial:
        return
    kind = spec.partial[0][1]
    ready = tuple(axis for axis, _ in itertools.takewhile(lambda pair: pair[1] == kind, spec.partial))
    for axes in selections(tuple(axis for axis in space.mesh.axes if axis in ready)):
        left = tuple(pair for pair in spec.partial if pair[0] not in axes)
        if axes == tuple(axis for axis in space.mesh.axes if axis in axes):
            yield Step("all_reduce", axes, None, None, kind, spec, ShardSpec(spec.dims, left))
        for dim, others in enumerate(spec.dims):
            if space.worth_scattering(dim, axes) and space.nests(dim, others + axes, len(others)):
                after = ShardSpec(with_dim(spec.dims, dim, others + axes), left)
                yield Step("reduce_scatter", axes, dim, None, kind, spec, after)


def _masks(space: Space, spec: ShardSpec) -> Iterator[Step]:
    unused = space.unused(spec)
    missing = [(axis, kind) for axis, kind in space.goal.partial if axis in unused]
    for kind in dict.fromkeys(kind for _, kind in missing):
        axes = tuple(axis for axis, other in missing if other == kind)
        for count in range(1, len(axes) + 1):
            for selection in itertools.combinations(axes, count):
                partial = spec.partial + tuple((axis, kind) for axis in selection)
                after = ShardSpec(spec.dims, partial)
                if kind != "prod" or not _sums_ones(after):
                    yield Step("mask", selection, None, None, kind, spec, after)


def _sums_ones(spec: ShardSpec) -> bool:
    """True when a partial sum is reduced before a partial product: the sum would add the ones of a mask."""
    kinds = [kind for _, kind in spec.partial]
    return "prod" in kinds and "sum" in kinds[: len(kinds) - kinds[::-1].index("prod")]


def _permutes(space: Space, spec: ShardSpec) -> Iterator[Step]:
    """Permutes to the dims of the goal, or to a refinement of them whose further axes a gather removes later.

    The number of parts stays the same, so that every tile moves as a whole; only where blocks do not nest
    does a permute lead to the goal with another number of parts. The order of the further axes does not
    matter: it is their present order where a dim has the same axes, and that of the mesh elsewhere.
    """
    partial = {axis for axis, _ in spec.partial}
    if not any(space.goal.dims):
        return
    if partial and any(axis in partial for dim in space.goal.dims for axis in dim):
        return
    parts = space.mesh.count(axis for dim in spec.dims for axis in dim)
    spare = tuple(
        axis
        for axis in space.working
        if axis not in partial and not any(axis in dim for dim in space.goal.dims)
    )
    for refined in refinements(space.goal.dims, spare):
        dims = _in_present_order(spec.dims, refined, space.goal.dims)
        if dims == spec.dims:
            continue
        same_count = space.mesh.count(axis for dim in dims for axis in dim) == parts
        if same_count or (dims == space.goal.dims and _stuck(space, spec.dims)):
            pairs = zip(spec.dims, dims, strict=True)
            moved = {axis for before, after in pairs if before != after for axis in before + after}
            axes = tuple(axis for axis in space.mesh.axes if axis in moved)
            yield Step("permute", axes, None, None, None, spec, ShardSpec(dims, spec.partial))


def _in_present_order(present: Dims, refined: Dims, goal: Dims) -> Dims:
    """The refinement of a goal, with the present order of axes on each dim that already has the same axes."""
    return tuple(
        before if before[: len(wanted_prefix)] == wanted_prefix and set(before) == set(after) else after
        for before, after, wanted_prefix in zip(present, refined, goal, strict=True)
    )


def _stuck(space: Space, dims: Dims) -> bool:
    """True when a dim keeps some axes and the blocks on either side do not nest in the blocks over these."""
    for dim, (before, after) in enumerate(zip(dims, space.goal.dims, strict=True)):
        same = 0
        while before[same : same + 1] == after[same : same + 1] != ():
            same += 1
        if not (space.nests(dim, before, same) and space.nests(dim, after, same)):
            return True
    return False


@lru_cache(maxsize=65536)
def refinements(dims: Dims, spare: tuple[str, ...]) -> tuple[Dims, ...]:
    """All ways to append some of the spare axes to the axes that already split the dims, in a fixed order."""
    refined = []
    for places in itertools.product(range(len(dims) + 1), repeat=len(spare)):
        added = [[axis for axis, p in zip(spare, places, strict=True) if p == d] for d in range(len(dims))]
        refined.append(tuple(axes + tuple(suffix) for axes, suffix in zip(dims, added, strict=True)))
    return tuple(refined)


# ---------------------------------------------------------------------- bytes that one rank sends


def _nothing(sizes: BlockSizes) -> Any:
    return 0


def _passed_on(sizes: BlockSizes) -> Any:
    """Elements a rank sends in a ring all_gather: its own block and those it forwards, (g - 1) in all."""
    return smaller(sizes.after, (sizes.members - 1) * sizes.before)


def _pieces_of_others(sizes: BlockSizes) -> Any:
    return smaller(sizes.before, (sizes.members - 1) * sizes.piece)


def _larger_block(sizes: BlockSizes) -> Any:
    return larger(sizes.before, sizes.after)


# ---------------------------------------------------------------------- arguments of the transport call


def _gather_arguments(call: RankCall) -> Attrs:
    dim = call.op.attrs["dim"]
    return {"dim": dim, "sizes": call.lengths(call.source, dim)}


def _scatter_arguments(call: RankCall) -> Attrs:
    dim = call.op.attrs["dim"]
    return {"dim": dim, "sizes": call.lengths(call.target, dim), "reduction": call.op.attrs["reduction"]}


def _exchange_arguments(call: RankCall) -> Attrs:
    split, concat = call.op.attrs["to_dim"], call.op.attrs["dim"]
    return {
        "split_dim": split,
        "split_sizes": call.lengths(call.target, split),
        "concat_dim": concat,
        "concat_sizes": call.lengths(call.source, concat),
    }


def _own_part(call: RankCall) -> Attrs:
    (inner, outer) = (
        layout.spec.bounds(call.op.result.shape, layout.mesh, call.rank)
        for layout in (call.target, call.source)
    )
    return {"slices": tuple(slice(b - a, e - a) for (a, _), (b, e) in zip(outer, inner, strict=True))}


def _keeps(call: RankCall) -> Attrs:
    reduction = call.op.attrs["reduction"]
    first = call.source.mesh.index(call.rank, call.op.attrs["axes"]) == 0
    return {"keep": first or reduction in ("max", "min"), "reduction": reduction}


def _broadcast_arguments(call: RankCall) -> Attrs:
    return {"root": call.group[call.op.attrs["root"]]}


# ---------------------------------------------------------------------- declarations
# The order decides ties: of equally cheap redistributions, the one whose steps are tried first is chosen.

for _collective in (
    Collective(
        "all_gather",
        _passed_on,
        "ring",
        layout_after=_gathered,
        steps=_gathers,
        growth=1,
        tie_break=1.5e-3,
        ordered=False,
        parameters=("dim", "sizes", "group"),
        arguments=_gather_arguments,
        packed={"result": "dim"},
        result_memory="replaced",
        fusible="pieces",
    ),
    Collective(
        "all_to_all",
        _pieces_of_others,
        "pairs",
        layout_after=_exchanged,
        steps=_all_to_alls,
        split_rule="leads_to",
        parameters=("split_dim", "split_sizes", "concat_dim", "concat_sizes", "group"),
        arguments=_exchange_arguments,
        packed={"operand": "split_dim", "result": "concat_dim"},
    ),
    Collective(
        "slice",
        _nothing,
        "none",
        layout_after=_sliced,
        steps=_slices,
        split_rule="worth_slicing",
        growth=-1,
        arguments=_own_part,
        view="strided",
    ),
    Collective("mask", _nothing, "none", layout_after=_masked, steps=_masks, arguments=_keeps, view="same"),
    Collective(
        "all_reduce",
        lambda sizes: 2 * sizes.before * (sizes.members - 1) / sizes.members,
        "ring",
        layout_after=_reduced,
        steps=_reductions,
        ordered=False,
        parameters=("group", "reduction"),
        arguments=lambda call: {"reduction": call.op.attrs["reduction"]},
        result_memory="operand",
        fusible="block",
    ),
    Collective(
        "reduce_scatter",
        _pieces_of_others,
        "ring",
        layout_after=_scattered,
        steps=_reductions,
        split_rule="worth_scattering",
        growth=-1,
        ordered=False,
        parameters=("dim", "sizes", "reduction", "group"),
        arguments=_scatter_arguments,
        packed={"operand": "dim"},
        result_memory="part",
        fusible="pieces",
    ),
    Collective("permute", _larger_block, "tiles", steps=_permutes, tie_break=1.25e-3),
    Collective("halo", _larger_block, "tiles"),
    Collective("transfer", _larger_block, "tiles"),
    Collective(
        "broadcast",
        _larger_block,
        "ring",
        layout_after=_reduced,
        ordered=False,
        parameters=("root", "group"),
        arguments=_broadcast_arguments,
        result_memory="operand",
    ),
    Collective(
        "reduce",
        _larger_block,
        "ring",
        layout_after=_reduced,
        ordered=False,
        parameters=("root", "reduction", "group"),
        arguments=lambda call: {**_broadcast_arguments(call), "reduction": call.op.attrs["reduction"]},
    ),
    Collective("send", _larger_block, "pairs"),
):
    register_collective(_collective)
