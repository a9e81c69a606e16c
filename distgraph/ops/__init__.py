"""The ops: importing this package registers every family; the functions are what programs and modules call."""

from distgraph.ops import distributed, elementwise, index, linear, reduction, shape, sorting, source
from distgraph.ops.compose import expand_dims, flip, getitem, repeat, roll, split, squeeze, stack, tile
from distgraph.ops.distributed import accumulate
from distgraph.ops.functions import *  # noqa: F403 (elementwise functions, one a NumPy name)
from distgraph.ops.index import embedding, one_hot, pick, scatter_add, take, take_along
from distgraph.ops.linear import einsum, matmul, outer
from distgraph.ops.reduction import cumprod, cumsum, logsumexp, mean, norm, reduce, std, var
from distgraph.ops.registry import define, lookup
from distgraph.ops.shape import broadcast_to, concat, pad, reshape, transpose
from distgraph.ops.sorting import argmax, argmin, argsort, sort, top_k
from distgraph.ops.source import arange, dynamic_slice, dynamic_update_slice, full, iota, ones, tril, triu, zeros
