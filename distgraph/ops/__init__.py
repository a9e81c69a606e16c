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
from distgraph.ops import (
    opaque as opaque,
)
from distgraph.ops.activation import erf, gelu, relu, sigmoid, silu, tanh
from distgraph.ops.attention import attention, attention_from
from distgraph.ops.contraction import einsum, matmul, outer
from distgraph.ops.control import scan, while_loop
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
from distgraph.ops.elementwise import *  # noqa: F403 - its `__all__` is the one list of these functions
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
    "arange", "argmax", "argmin", "argsort", "attention", "attention_from", "avg_pool", "broadcast_to",
    "concat", "contraction", "conv", "creation", "cross_entropy", "cumprod", "cumsum", "define", "dropout",
    "dynamic_slice", "dynamic_update_slice", "einsum", "elementwise", "embedding", "erf", "expand_dims",
    "flip", "full", "gather_scatter", "gelu", "getitem", "iota", "layer_norm", "log_softmax", "logsumexp",
    "lookup", "matmul", "max_pool", "mean", "norm", "one_hot", "ones", "optimizer_steps", "outer", "pad",
    "pick", "random_normal", "random_uniform", "reduce", "reduction", "relu", "repeat", "reshape",
    "rms_norm", "roll", "scan", "scatter_add", "shape", "sigmoid", "silu", "softmax", "sort", "sorting",
    "split", "squeeze", "stack", "std", "take", "take_along", "tanh", "tile", "top_k", "transpose", "tril",
    "triu", "var", "while_loop", "zeros",
]  # fmt: skip
__all__ += elementwise.__all__
