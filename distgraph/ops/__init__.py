"""The ops: importing this package registers every family; the functions are what programs and modules call."""

from distgraph.ops import distributed, elementwise, linear, reduction, shape
from distgraph.ops.compose import expand_dims, flip, getitem, repeat, roll, split, squeeze, stack, take, tile
from distgraph.ops.distributed import accumulate
from distgraph.ops.linear import einsum, matmul, outer
from distgraph.ops.reduction import cumprod, cumsum, logsumexp, mean, norm, reduce, std, var
from distgraph.ops.registry import define, lookup
from distgraph.ops.shape import broadcast_to, concat, pad, reshape, transpose

__all__ = [
    "accumulate", "broadcast_to", "concat", "cumprod", "cumsum", "define", "distributed", "einsum", "elementwise",
    "expand_dims", "flip", "getitem", "linear", "logsumexp", "lookup", "matmul", "mean", "norm", "outer", "pad",
    "reduce", "reduction", "repeat", "reshape", "roll", "shape", "split", "squeeze", "stack", "std", "take", "tile",
    "transpose", "var",
]
