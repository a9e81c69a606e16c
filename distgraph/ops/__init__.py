"""The ops: importing this package registers every family; its functions are what programs call."""

from distgraph.ops import distributed, elementwise, index, linear, reduction, shape, sorting, source, update
from distgraph.ops.activation import erf, gelu, relu, sigmoid, silu, tanh
from distgraph.ops.attention import attention
from distgraph.ops.compose import expand_dims, flip, getitem, repeat, roll, split, squeeze, stack, tile
from distgraph.ops.control import while_loop
from distgraph.ops.conv import avg_pool, conv, max_pool
from distgraph.ops.distributed import accumulate
from distgraph.ops.functions import (
    absolute,
    add,
    arccos,
    arcsin,
    arctan,
    arctan2,
    bitwise_and,
    bitwise_not,
    bitwise_or,
    bitwise_xor,
    cast,
    ceil,
    clip,
    cos,
    cosh,
    divide,
    equal,
    exp,
    expm1,
    floor,
    floor_divide,
    greater,
    greater_equal,
    hypot,
    identity,
    isfinite,
    isinf,
    isnan,
    left_shift,
    less,
    less_equal,
    log,
    log1p,
    log2,
    log10,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    multiply,
    negative,
    not_equal,
    power,
    reciprocal,
    remainder,
    right_shift,
    rint,
    rsqrt,
    sign,
    sin,
    sinh,
    sqrt,
    square,
    stop_gradient,
    subtract,
    tan,
    trunc,
    where,
)
from distgraph.ops.index import embedding, one_hot, pick, scatter_add, take, take_along
from distgraph.ops.linear import einsum, matmul, outer
from distgraph.ops.loss import cross_entropy
from distgraph.ops.normalize import layer_norm, log_softmax, rms_norm, softmax
from distgraph.ops.random import dropout, random_normal, random_uniform
from distgraph.ops.reduction import cumprod, cumsum, logsumexp, mean, norm, reduce, std, var
from distgraph.ops.registry import define, lookup
from distgraph.ops.shape import broadcast_to, concat, pad, reshape, transpose
from distgraph.ops.sorting import argmax, argmin, argsort, sort, top_k
from distgraph.ops.source import (
    arange,
    dynamic_slice,
    dynamic_update_slice,
    full,
    iota,
    ones,
    tril,
    triu,
    zeros,
)
from distgraph.tensor import ABOVE

ABOVE.update(
    getitem=getitem,
    matmul=matmul,
    mean=mean,
    reduce=reduce,
    reshape=reshape,
    transpose=transpose,
    var=var,
)

__all__ = [
    "absolute", "accumulate", "add", "arange", "arccos", "arcsin", "arctan", "arctan2", "argmax",
    "argmin", "argsort", "attention", "avg_pool", "bitwise_and", "bitwise_not", "bitwise_or",
    "bitwise_xor", "broadcast_to", "cast", "ceil", "clip", "concat", "conv", "cos", "cosh",
    "cross_entropy", "cumprod", "cumsum", "define", "distributed", "divide", "dropout", "dynamic_slice",
    "dynamic_update_slice", "einsum", "elementwise", "embedding", "equal", "erf", "exp", "expand_dims",
    "expm1", "flip", "floor", "floor_divide", "full", "gelu", "getitem", "greater", "greater_equal",
    "hypot", "identity", "index", "iota", "isfinite", "isinf", "isnan", "layer_norm", "left_shift",
    "less", "less_equal", "linear", "log", "log10", "log1p", "log2", "log_softmax", "logical_and",
    "logical_not", "logical_or", "logical_xor", "logsumexp", "lookup", "matmul", "max_pool", "maximum",
    "mean", "minimum", "multiply", "negative", "norm", "not_equal", "one_hot", "ones", "outer", "pad",
    "pick", "power", "random_normal", "random_uniform", "reciprocal", "reduce", "reduction", "relu",
    "remainder", "repeat", "reshape", "right_shift", "rint", "rms_norm", "roll", "rsqrt", "scatter_add",
    "shape", "sigmoid", "sign", "silu", "sin", "sinh", "softmax", "sort", "sorting", "source", "split",
    "sqrt", "square", "squeeze", "stack", "std", "stop_gradient", "subtract", "take", "take_along",
    "tan", "tanh", "tile", "top_k", "transpose", "tril", "triu", "trunc", "update", "var", "where",
    "while_loop", "zeros",
]  # fmt: skip
