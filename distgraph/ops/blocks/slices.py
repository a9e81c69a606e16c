"""Ops of distributed matrix products: slices of a dim in strided blocks, and products added to a sum.

A dim of length n is seen as (n / (slices * block), slices, block); a slice takes one position in the middle.
So a shard of the dim holds the same share of every slice, and the slice of a sharded tensor is the tensor of
the slices of its shards (Nam et al., "MeshSlice", 2025, section 3.1.2 and algorithm 2). Where a shard has one
block of each slice, `block_slice` copies nothing: the result is a part of the operand.

If slices * block is the whole dim, a slice is a panel (SUMMA), and the dim may be split between panels. Then
one rank along the axes stores the panel. `block_slice` is a sum over the panels in which all others are zero,
so that its result is partial; `block_insert` and `block_expand` read the panel on the rank that stores it.

The passes of `distgraph/passes/matmul_algorithms/` make these ops after the backward part, so they have no
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from distgraph.errors import GraphError
from distgraph.ir.graph import Op, Value
from distgraph.ir.index_rule import Rule, Term, make_rule
from distgraph.ir.op_registry import Attrs, Local, Shape, Shapes, define
from distgraph.kernels import matmul as kernels
from distgraph.kernels import workspace
from distgraph.kernels._common import Array, Namespace, store
from distgraph.ops.blocks.ring import check_total
from distgraph.ops.contraction import einsum_rule, infer_einsum


def _split(shape: Shape, attrs: Attrs) -> tuple[int, int, int]:
    """(groups, slices, block) of the sliced dim of a whole tensor."""
    dim, slices, block = attrs["dim"], attrs["slices"], attrs["block"]
    if not 0 <= dim < len(shape) or not 0 <= attrs["index"] < slices or shape[dim] % (slices * block):
        raise GraphError(
            f"slice {attrs['index']} of {slices} in blocks of {block} along dim {dim} does not fit shape "
            f"{shape}; the length must be a multiple of slices x block"
        )
    return shape[dim] // (slices * block), slices, block


def _terms(whole: Shape, attrs: Attrs) -> tuple[Term, Term, dict[str, int], set[str]]:
    """Terms of the whole tensor and of a slice of it, the sizes of their indices, and those never split."""
    groups, slices, block = _split(whole, attrs)
    dim = attrs["dim"]
    plain = tuple((f"i{d}",) for d in range(len(whole)))
    sizes = {f"i{d}": n for d, n in enumerate(whole) if d != dim} | {"s": slices, "b": block}
    leading: tuple[str, ...] = ()
    if groups > 1:
        leading, sizes["g"] = ("g",), groups
    return (
        (*plain[:dim], (*leading, "s", "b"), *plain[dim + 1 :]),
        (*plain[:dim], (*leading, "b"), *plain[dim + 1 :]),
        sizes,
        {"s", "b"} if leading else {"b"},
    )


def _localize(attrs: Attrs, local: Local) -> Attrs:
    """The panels of this rank: an index outside of them is that of another rank's panel."""
    if local.layout.parts("s") == 1:
        return attrs
    start, stop = local.bounds("s")
    return {**attrs, "index": attrs["index"] - start, "slices": stop - start}


def _root(op: Op) -> tuple[tuple[str, ...], int] | None:
    """Mesh axes that split the panels, and the position along them of the ranks that have this one."""
    if op.layout is None or op.layout.parts("s") == 1:
        return None
    blocks = op.layout.mesh.blocks(op.attrs["slices"], op.layout.of("s"))
    position = next(i for i, (start, stop) in enumerate(blocks) if start <= op.attrs["index"] < stop)
    return op.layout.of("s"), position


def _slice_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    whole, part, sizes, unsplit = _terms(shapes[0], attrs)
    return make_rule("block_slice", (whole,), (part,), sizes, unsplit)


def _seen(x: Array, dim: int, slices: int, block: int) -> Array:
    """A view [..., groups, slices, block, ...] of an array with a sliced dim."""
    groups = x.shape[dim] // (slices * block)
    return x.reshape(*x.shape[:dim], groups, slices, block, *x.shape[dim + 1 :])


def _slice_kernel(
    xp: Namespace, x: Array, *, dim: int, index: int, slices: int, block: int, out: Array | None = None
) -> Array:
    if not 0 <= index < slices:
        y = xp.empty((*x.shape[:dim], block, *x.shape[dim + 1 :]), x.dtype) if out is None else out
        y[...] = 0
        return y
    part = _seen(x, dim, slices, block)[(slice(None),) * (dim + 1) + (index,)]
    shape = (*x.shape[:dim], x.shape[dim] // slices, *x.shape[dim + 1 :])
    if out is not None:
        _seen(out, dim, 1, block)[(slice(None),) * (dim + 1) + (0,)] = part
        return out
    return part.copy().reshape(shape)


def _slice_part(attrs: Attrs, shape: Shape) -> tuple[slice, ...] | None:
    """Where a slice of one block is in its operand; None of several blocks, and of another rank's panel."""
    dim, index, block = attrs["dim"], attrs["index"], attrs["block"]
    if shape[dim] != attrs["slices"] * block or not 0 <= index < attrs["slices"]:
        return None
    return (*(slice(None),) * dim, slice(index * block, (index + 1) * block))


define(
    "block_slice",
    _slice_rule,
    _slice_kernel,
    linear=((0,),),
    part=_slice_part,
    traffic=lambda op: 2 * op.result.nbytes,
    localize=_localize,
    root=_root,
    every_micro_batch=True,  # a gathered slice lives until its product, not for the whole step
)


def _expand_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    dim = attrs["dim"]
    shape = (*shapes[0][:dim], shapes[0][dim] * attrs["slices"], *shapes[0][dim + 1 :])
    whole, part, sizes, unsplit = _terms(shape, attrs)
    return make_rule("block_expand", (part,), (whole,), sizes, unsplit)


def _place(target: Array, x: Array, dim: int, index: int, slices: int, block: int) -> Array:
    if not 0 <= index < slices:
        return target
    _seen(target, dim, slices, block)[(slice(None),) * (dim + 1) + (index,)] = _seen(x, dim, 1, block)[
        (slice(None),) * (dim + 1) + (0,)
    ]
    return target


def _expand_kernel(
    xp: Namespace, x: Array, *, dim: int, index: int, slices: int, block: int, out: Array | None = None
) -> Array:
    if out is None:
        out = xp.zeros((*x.shape[:dim], x.shape[dim] * slices, *x.shape[dim + 1 :]), x.dtype)
    elif slices > 1 or index:
        out[...] = 0
    return _place(out, x, dim, index, slices, block)


define("block_expand", _expand_rule, _expand_kernel, linear=((0,),), localize=_localize, root=_root)


def _insert_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    whole, part, sizes, unsplit = _terms(shapes[0], attrs)
    return make_rule("block_insert", (whole, part), (whole,), sizes, unsplit)


def _insert_kernel(
    xp: Namespace,
    x: Array,
    part: Array,
    *,
    dim: int,
    index: int,
    slices: int,
    block: int,
    out: Array | None = None,
) -> Array:
    return _place(store(xp, x, out) if out is not None else x.copy(), part, dim, index, slices, block)


define(
    "block_insert",
    _insert_rule,
    _insert_kernel,
    infer=lambda operands, attrs: [(operands[0].shape, operands[0].dtype)],
    linear=((0, 1),),
    inplace=(0,),
    traffic=lambda op: 2 * op.operands[1].nbytes,
    localize=_localize,
    root=_root,
)


def _add_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    product = einsum_rule(shapes[1:], attrs)
    summed = {
        index for index in product.indices if index not in {i for dim in product.results[0] for i in dim}
    }
    terms = (product.results[0], *product.operands)
    return make_rule(attrs["spec"], terms, product.results, product.sizes, summed)


def _add_infer(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    made = infer_einsum(operands[1:], attrs)
    check_total(operands, made[0])
    return made


def _add_kernel(xp: Namespace, total: Array, *operands: Array, spec: str, out: Array | None = None) -> Array:
    result = store(xp, total, out) if out is not None else total.copy()
    return kernels.einsum_add(xp, *operands, spec=spec, out=result)


def _add_workspace(total: Array, *operands: Array, spec: str) -> int:
    return workspace.einsum_workspace(*operands, spec=spec, adds=True)


define(
    "einsum_add",
    _add_rule,
    _add_kernel,
    infer=_add_infer,
    flops=lambda op, rule: 2 * math.prod(rule.sizes.get(index, 1) for index in rule.indices),
    inplace=(0,),
    cost="matmul",
    factors=(1, 2),
    workspace=_add_workspace,
)
