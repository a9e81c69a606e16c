"""Rows by position: embedding, its gradient and scatter-add, over tables that may be split among ranks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from distgraph.kernels._common import Array, Namespace, computed_in_f32, empty, has_cuda, store
from distgraph.kernels._jit import jit, pays


def embedding(xp: Namespace, table: Array, ids: Array, *, offset: int = 0, out: Array | None = None) -> Array:
    """y = table[ids - offset], and rows of 0 where that is outside the table: shards sum to the whole.

    Args:
        table: [rows, ...], the rows from ``offset`` of the global table.
        ids: any shape, any integer type.

    Returns:
        [*ids.shape, ...].
    """
    size = table.shape[0]
    shape = (*ids.shape, *table.shape[1:])
    y = empty(xp, out, shape, table.dtype)
    if size == 0:
        y[...] = 0
        return store(xp, y, out)
    positions = ids.astype(np.int64) - offset if offset or ids.dtype.kind == "u" else ids
    if xp is np and y.flags.c_contiguous and ids.size:
        unsigned = positions.view(f"u{positions.itemsize}")  # where negative positions are the largest
        if int(unsigned.max()) < min(size, 1 << (8 * positions.itemsize - 1)):
            np.take(
                table, positions, axis=0, out=y, mode="clip"
            )  # "clip" writes to out directly; "raise" would buffer
            return store(xp, y, out)
    inside = (positions >= 0) & (positions < size)
    near = xp.where(inside, positions, 0)
    if xp is np and y.flags.c_contiguous:
        np.take(table, near, axis=0, out=y, mode="clip")
    else:
        y[...] = table[near]
    y[~inside] = 0
    return store(xp, y, out)


@jit
def _add_rows_loop(table: Any, positions: Any, updates: Any) -> None:
    """table[positions[i]] += updates[i], in order; positions outside the table are skipped."""
    for i in range(positions.size):
        position = positions[i]
        if 0 <= position < table.shape[0]:
            row, change = table[position], updates[i]
            for j in range(row.size):
                row[j] += change[j]


def _add_rows(xp: Namespace, table: Array, positions: Array, updates: Array) -> None:
    """table[at[i]] += updates[i] for positions inside the table; ``table`` [rows, width], ``updates`` [n,
    width].

    In order of i on NumPy with Numba; sorted by row on plain NumPy; in any order (atomics) on CuPy; by
    ``add.at`` of other namespaces.
    """
    fits = xp is np and table.dtype == updates.dtype and table.flags.c_contiguous
    if fits and pays(xp, updates, np.float32, np.float64):
        _add_rows_loop(table, np.ascontiguousarray(positions), np.ascontiguousarray(updates))
        return
    inside = (positions >= 0) & (positions < table.shape[0])
    if xp is not np:  # to choose by a mask, the host would wait; zeros are added to rows all over the table
        add = import_module("cupyx").scatter_add if has_cuda(xp) else xp.add.at
        add(table, positions % table.shape[0], xp.where(inside[:, None], updates, updates.dtype.type(0)))
        return
    positions, updates = positions[inside], updates[inside]
    if positions.size == 0:
        return
    order = np.argsort(positions, kind="stable")
    sorted_at = positions[order]
    first = np.flatnonzero(np.concatenate(([True], sorted_at[1:] != sorted_at[:-1])))
    table[sorted_at[first]] += np.add.reduceat(updates[order], first, axis=0)


@computed_in_f32(0)
def embedding_grad(
    xp: Namespace, dy: Array, ids: Array, *, rows: int, offset: int = 0, out: Array | None = None
) -> Array:
    """dtable[r] = sum of dy over the positions whose id is offset + r.

    Args:
        dy: [*ids.shape, ...].
        ids: any shape, any integer type.
        rows: of this shard of the table, which starts at ``offset``.

    Returns:
        [rows, ...], dense.
    """
    shape = (rows, *dy.shape[ids.ndim :])
    table = empty(xp, out, shape, dy.dtype)
    table[...] = 0
    if table.size and dy.size:
        positions = ids.astype(np.int64).reshape(-1) - offset
        width = table.size // rows
        _add_rows(xp, table.reshape(rows, width), positions, dy.reshape(ids.size, width))
    return store(xp, table, out)


@computed_in_f32(0)
def scatter_add(
    xp: Namespace, x: Array, ids: Array, updates: Array, *, offset: int = 0, out: Array | None = None
) -> Array:
    """y = x with updates[i] added to row ids[i] - offset; positions outside x are skipped.

    Args:
        x: [rows, ...], the rows from ``offset`` of the global array.
        ids: any shape, any integer type.
        updates: [*ids.shape, ...].
    """
    y = empty(xp, out, x.shape, x.dtype)
    if y is not x:
        y[...] = x
    if y.size and updates.size:
        positions = ids.astype(np.int64).reshape(-1) - offset
        width = y.size // y.shape[0]
        _add_rows(xp, y.reshape(y.shape[0], width), positions, updates.reshape(ids.size, width))
    return store(xp, y, out)
