"""The ops: importing this package registers every family; its functions are what programs call."""

import distgraph.ir.collectives  # noqa: F401 - declares their ops
from distgraph.ir.op_registry import define, lookup
from distgraph.ops import (
    blocks as blocks,
)
from distgraph.ops import (
    contraction,
    creation,
    elementwise,
    gather_scatter,
    optimizer_steps,
    reduction,
    shape,
    sorting,
)
from distgraph.ops.activation import erf, gelu, relu, sigmoid, silu, tanh
from distgraph.ops.attention import attention
from distgraph.ops.contraction import einsum, matmul, outer
from distgraph.ops.control import while_loop
from distgraph.ops.conv import avg_pool, conv, max_pool
from distgraph.ops.creation import (
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
from distgraph.ops.elementwise import (
    absolute,
    accumulate,
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
from distgraph.ops.gather_scatter import embedding, one_hot, pick, scatter_add, take, take_along
from distgraph.ops.loss import cross_entropy
from distgraph.ops.manipulation import expand_dims, flip, getitem, repeat, roll, split, squeeze, stack, tile
from distgraph.ops.normalization import layer_norm, log_softmax, rms_norm, softmax
from distgraph.ops.random import dropout, random_normal, random_uniform
from distgraph.ops.reduction import cumprod, cumsum, logsumexp, mean, norm, reduce, std, var
from distgraph.ops.shape import broadcast_to, concat, pad, reshape, transpose
from distgraph.ops.sorting import argmax, argmin, argsort, sort, top_k
from distgraph.ops.tensor_methods import bind_tensor_methods

bind_tensor_methods()

__all__ = [
    "absolute", "accumulate", "add", "arange", "arccos", "arcsin", "arctan", "arctan2", "argmax",
    "argmin", "argsort", "attention", "avg_pool", "bitwise_and", "bitwise_not", "bitwise_or",
    "bitwise_xor", "broadcast_to", "cast", "ceil", "clip", "concat", "conv", "cos", "cosh",
    "cross_entropy", "cumprod", "cumsum", "define", "divide", "dropout", "dynamic_slice",
    "dynamic_update_slice", "einsum", "elementwise", "embedding", "equal", "erf", "exp", "expand_dims",
    "expm1", "flip", "floor", "floor_divide", "full", "gelu", "getitem", "greater", "greater_equal",
    "hypot", "identity", "gather_scatter", "iota", "isfinite", "isinf", "isnan", "layer_norm", "left_shift",
    "less", "less_equal", "contraction", "log", "log10", "log1p", "log2", "log_softmax", "logical_and",
    "logical_not", "logical_or", "logical_xor", "logsumexp", "lookup", "matmul", "max_pool", "maximum",
    "mean", "minimum", "multiply", "negative", "norm", "not_equal", "one_hot", "ones", "outer", "pad",
    "pick", "power", "random_normal", "random_uniform", "reciprocal", "reduce", "reduction", "relu",
    "remainder", "repeat", "reshape", "right_shift", "rint", "rms_norm", "roll", "rsqrt", "scatter_add",
    "shape", "sigmoid", "sign", "silu", "sin", "sinh", "softmax", "sort", "sorting", "creation", "split",
    "sqrt", "square", "squeeze", "stack", "std", "stop_gradient", "subtract", "take", "take_along",
    "tan", "tanh", "tile", "top_k", "transpose", "tril", "triu", "trunc", "optimizer_steps", "var", "where",
    "while_loop", "zeros",
]  # fmt: skip
