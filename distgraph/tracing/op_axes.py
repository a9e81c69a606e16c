"""Axes of an op: which mesh axis splits which index of its rule, on whichever mesh it is computed.

*In:* a function that computes one op, its tensors, index -> axes. *Out:* the layout of each tensor of the
call. *Invariant:* a dim that is made of several indices is split by the axes of its first. A dim of one
position has no index, so that axes given to its index split nothing.

    matmul "m k, k n -> m n" with {"m": "dp", "k": "tp"}:  operands [dp, tp] and [tp, _]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distgraph.errors import ShardingError
from distgraph.ir.op_registry import rule_of
from distgraph.ir.sharding_spec import Dim, OpAxes, Origin, ShardSpec, UserDim
from distgraph.tracing.op_counts import only_op
from distgraph.tracing.tensor import Tensor

IndexAxes = Mapping[str, UserDim]


def laid_out_op(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    axes: IndexAxes,
    where: str,
) -> tuple[OpAxes, tuple[tuple[Dim, ...], ...]]:
    """The axes of the op that a call computes, and for every tensor of the call the axes of each dim.

    Args:
        function: computes one op.
        args, kwargs: of the call.
        axes: index -> the axis that splits it, None, or a tuple of axes (major to minor).
        where: source line, for messages.

    Raises:
        ShardingError: the call computes several ops or none; an index is unknown, is needed whole or is not
            the first of its dim; an axis is used twice.
    """
    op, numbers = only_op(function, args, kwargs, where, "axes")
    rule = rule_of(op)
    spec = ShardSpec.of(list(axes.values()), where=f"shard_op ({where})")
    dims_by_axis = dict(zip(axes, spec.dims, strict=True))
    firsts = {term[0] for terms in (rule.operands, rule.results) for dims in terms for term in dims if term}
    has_unit_dim = any(not dim for dims in rule.operands for dim in dims)  # of one position: no index
    for index, split in dims_by_axis.items():
        if index not in rule.indices and not has_unit_dim:
            raise ShardingError(
                f"shard_op ({where}): {op.kind} has no index {index!r}; its indices are "
                f"{', '.join(rule.indices)}"
            )
        if index in rule.indices and split and (index in rule.whole or index not in firsts):
            raise ShardingError(
                f"shard_op ({where}): axes split index {index} over {'*'.join(split)} but {op.kind} needs it "
                f"whole; leave it out"
            )
    tensors = [a for a in args if isinstance(a, Tensor)]
    layouts: list[tuple[Dim, ...]] = [((),) * tensor.ndim for tensor in tensors]
    for value, term in zip(op.operands, rule.operands, strict=True):
        if value.name in numbers:
            layouts[numbers[value.name]] = tuple(dims_by_axis.get(dim[0], ()) if dim else () for dim in term)
    used = tuple(sorted((index, dims) for index, dims in dims_by_axis.items() if dims and index in firsts))
    return OpAxes(used, Origin("user", where)), tuple(layouts)
