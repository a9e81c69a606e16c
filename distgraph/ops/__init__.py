"""The ops: importing this package registers every family; the functions are what programs and modules call."""

from distgraph.ops import distributed, elementwise, index, linear, reduction, shape, sorting, source, update
from distgraph.ops.activation import erf, gelu, relu, sigmoid, silu, tanh
from distgraph.ops.attention import attention
from distgraph.ops.compose import expand_dims, flip, getitem, repeat, roll, split, squeeze, stack, tile
from distgraph.ops.control import while_loop
from distgraph.ops.conv import avg_pool, conv, max_pool
from distgraph.ops.distributed import accumulate
from distgraph.ops.functions import *  # noqa: F403 (elementwise functions, one a NumPy name)
from distgraph.ops.index import embedding, one_hot, pick, scatter_add, take, take_along
from distgraph.ops.linear import einsum, matmul, outer
from distgraph.ops.loss import cross_entropy
from distgraph.ops.normalize import layer_norm, log_softmax, rms_norm, softmax
from distgraph.ops.random import dropout, random_normal, random_uniform
from distgraph.ops.reduction import cumprod, cumsum, logsumexp, mean, norm, reduce, std, var
from distgraph.ops.registry import define, lookup
from distgraph.ops.shape import broadcast_to, concat, pad, reshape, transpose
from distgraph.ops.sorting import argmax, argmin, argsort, sort, top_k
from distgraph.ops.source import arange, dynamic_slice, dynamic_update_slice, full, iota, ones, tril, triu, zeros
