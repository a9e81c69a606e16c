"""Cross-entropy over classes that may be split among ranks, and picking an element by label."""

from __future__ import annotations

from typing import Any

import numpy as np

from distgraph.errors import OperandFault
from distgraph.kernels._common import Array, Namespace, computed_in_f32, empty, outputs, rows, store
from distgraph.kernels._jit import jit, pays
from distgraph.kernels._math import exp32
from distgraph.kernels._row_loops import copy_row, row_max, sum_of_exp
from distgraph.kernels.cuda.block_kernel import INTEGERS, BlockKernel, launch_rows, result_dtype, takes
from distgraph.kernels.cuda.device_functions import ROW_EXPONENTIALS

_BLOCK = 1 << 15
"""Elements of a block of rows in plain NumPy: 128 KiB a temporary in float32."""


def _check_labels(xp: Namespace, kernel: str, labels: Array, classes: int) -> None:
    """Refuse labels outside [0, classes). Only on NumPy: on a GPU the check would stall the stream."""
    if xp is not np or labels.size == 0:
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise OperandFault(
            f"{kernel}: label {wrong} is outside the {classes} classes 0..{classes - 1}; check the data"
        )


def _local(xp: Namespace, labels: Array, offset: int, size: int) -> tuple[Array, Array]:
    """Labels as positions in this shard, clipped into it, and whether each is in it."""
    position = labels.astype(np.int64) - offset
    inside = (position >= 0) & (position < size)
    return xp.where(inside, position, 0), inside


@computed_in_f32(0)
def pick(xp: Namespace, x: Array, labels: Array, *, offset: int = 0, out: Array | None = None) -> Array:
    """y = x[..., label - offset], and 0 where the label is outside this shard: shards sum to the whole.

    Args:
        x: [..., n], the part of the last dim that starts at ``offset``.
        labels: [...], any integer type.
    """
    size = x.shape[-1]
    if size == 0:
        return store(xp, xp.zeros(labels.shape, x.dtype), out)
    position, inside = _local(xp, labels, offset, size)
    picked = xp.take_along_axis(x, position[..., None], axis=-1)[..., 0]
    return store(xp, xp.where(inside, picked, x.dtype.type(0)), out)


@computed_in_f32(0)
def pick_grad(
    xp: Namespace, dy: Array, labels: Array, *, size: int, offset: int = 0, out: Array | None = None
) -> Array:
    """dx = dy at position label - offset of the last dim, 0 elsewhere. Returns [..., size]."""
    dx = empty(xp, out, (*dy.shape, size), dy.dtype)
    dx[...] = 0
    if size:
        position, inside = _local(xp, labels, offset, size)
        xp.put_along_axis(dx, position[..., None], xp.where(inside, dy, dy.dtype.type(0))[..., None], axis=-1)
    return store(xp, dx, out)


def _logsumexp(xp: Namespace, x: Array) -> Array:
    """log(sum(exp(x))) over the last dim; on NumPy by blocks of rows, so that temporaries stay in the
    cache."""
    if xp is np and x.ndim > 1 and x.size > _BLOCK:
        matrix, step = rows(x), max(1, _BLOCK // x.shape[-1])
        lse = np.empty(len(matrix), x.dtype)
        for i in range(0, len(matrix), step):
            part = matrix[i : i + step]
            m = part.max(axis=-1, keepdims=True)
            lse[i : i + step] = (m + np.log(np.exp(part - m).sum(axis=-1, keepdims=True)))[:, 0]
        return lse.reshape(x.shape[:-1])
    m = x.max(axis=-1, keepdims=True)
    return (m + xp.log(xp.exp(x - m).sum(axis=-1, keepdims=True)))[..., 0]


@jit
def _cross_entropy_loop(logits: Any, labels: Any, offset: Any, loss: Any, lse: Any) -> None:
    """lse = logsumexp(row); loss = lse - row[label - offset], or lse where the label is elsewhere."""
    width = logits.shape[1]
    for i in range(logits.shape[0]):
        row = logits[i]
        m = row_max(row)
        total = m + np.log(sum_of_exp(row, m))
        lse[i] = total
        label = np.int64(labels[i]) - offset
        loss[i] = total - row[label] if 0 <= label < width else total


@jit
def _cross_entropy_grad_loop(logits: Any, labels: Any, offset: Any, lse: Any, dloss: Any, dx: Any) -> None:
    """dx = (exp(logits - lse) - onehot(label - offset)) * dloss, by row; float32."""
    width = logits.shape[1]
    scratch = np.empty(width, logits.dtype)
    for i in range(logits.shape[0]):
        row, shift, factor = logits[i], lse[i], dloss[i]
        for j in range(width):
            scratch[j] = exp32(row[j] - shift) * factor
        label = np.int64(labels[i]) - offset
        if 0 <= label < width:
            scratch[label] -= factor
        copy_row(scratch, dx[i])


_CROSS_ENTROPY_CUDA = BlockKernel(
    "cross_entropy",
    "logits labels",
    "loss lse",
    "int width, long long offset",
    """
    const logits_t* row = logits + (long long)blockIdx.x * width;
    const Exponentials sum = row_exponentials(row, width);
    if (threadIdx.x == 0) {
        const long long label = (long long)labels[blockIdx.x] - offset;
        const A total = sum.largest + log(sum.total);
        store(lse + blockIdx.x, total);
        store(loss + blockIdx.x, label >= 0 && label < width ? total - load(row[label]) : total);
    }
""",
    ROW_EXPONENTIALS,
)

_CROSS_ENTROPY_GRAD_CUDA = BlockKernel(
    "cross_entropy_grad",
    "logits labels lse dloss",
    "dx",
    "int width, long long offset",
    """
    const long long start = (long long)blockIdx.x * width;
    const long long label = (long long)labels[blockIdx.x] - offset;
    const A shift = load(lse[blockIdx.x]), factor = load(dloss[blockIdx.x]);
    for (int j = threadIdx.x; j < width; j += blockDim.x)
        store(dx + start + j, (exp(load(logits[start + j]) - shift) - (j == label ? A(1) : A(0))) * factor);
""",
)


def _has_rows_on_cuda(xp: Namespace, logits: Array, labels: Array, *of_rows: Array) -> bool:
    """Whether the CUDA sources take logits, labels and further numbers of their rows."""
    if not takes(xp, logits, *of_rows) or not isinstance(labels, xp.ndarray):
        return False
    same = all(a.shape == logits.shape[:-1] for a in (labels, *of_rows))
    return same and labels.dtype.name in INTEGERS


def _cross_entropy_on_cuda(
    xp: Namespace,
    logits: Array,
    labels: Array,
    *,
    offset: int = 0,
    classes: int | None = None,
    out: Any = None,
    wide: bool = False,
) -> Any:
    if not _has_rows_on_cuda(xp, logits, labels):
        return None
    results = [(labels.shape, result_dtype(logits, wide))] * 2
    return launch_rows(_CROSS_ENTROPY_CUDA, xp, (logits, labels), results, (offset,), out)


def _cross_entropy_grad_on_cuda(
    xp: Namespace,
    logits: Array,
    labels: Array,
    lse: Array,
    dloss: Array,
    *,
    offset: int = 0,
    out: Array | None = None,
    wide: bool = False,
) -> Any:
    if not _has_rows_on_cuda(xp, logits, labels, lse, dloss):
        return None
    results = [(logits.shape, result_dtype(logits, wide))]
    operands = logits, labels, lse, dloss
    return launch_rows(_CROSS_ENTROPY_GRAD_CUDA, xp, operands, results, (offset,), out)


@computed_in_f32(0, 0, cuda=_cross_entropy_on_cuda)
def cross_entropy(
    xp: Namespace,
    logits: Array,
    labels: Array,
    *,
    offset: int = 0,
    classes: int | None = None,
    out: Any = None,
) -> tuple[Array, Array]:
    """lse = log(sum(exp(logits))) and loss = lse - logits[label - offset], for each row.

    With the classes split among ranks both are of this shard: the loss is lse alone where the label is
    elsewhere. The whole is then LSE = logsumexp of the shards' lse and LOSS = LSE - sum over shards of (lse -
    loss).

    Args:
        logits: [..., n], the classes from ``offset``; with n = 0 both results are -infinity.
        labels: [...], any integer type, in [0, classes).
        classes: number of classes in all; offset + n where not given.

    Returns:
        loss [...], lse [...].

    Raises:
        OperandFault: a label outside [0, classes) (on NumPy; on CuPy it counts as elsewhere).
    """
    size = logits.shape[-1]
    _check_labels(xp, "cross_entropy", labels, offset + size if classes is None else classes)
    out_loss, out_lse = outputs(out, 2)
    if size == 0:  # the last shard of an uneven split may hold no class
        nothing = xp.full(labels.shape, -np.inf, logits.dtype)
        return store(xp, nothing, out_loss), store(xp, nothing.copy(), out_lse)
    if not pays(xp, logits, np.float32):
        lse = _logsumexp(xp, logits)
        loss = lse - pick(xp, logits, labels, offset=offset)
        return store(xp, loss, out_loss), store(xp, lse, out_lse)
    loss = empty(xp, out_loss, labels.shape, logits.dtype)
    lse = empty(xp, out_lse, labels.shape, logits.dtype)
    flat_labels = np.ascontiguousarray(labels).reshape(-1)
    _cross_entropy_loop(rows(logits), flat_labels, offset, loss.reshape(-1), lse.reshape(-1))
    return store(xp, loss, out_loss), store(xp, lse, out_lse)


@computed_in_f32(0, cuda=_cross_entropy_grad_on_cuda)
def cross_entropy_grad(
    xp: Namespace,
    logits: Array,
    labels: Array,
    lse: Array,
    dloss: Array,
    *,
    offset: int = 0,
    out: Array | None = None,
) -> Array:
    """dlogits = (exp(logits - lse) - [class = label]) * dloss.

    Args:
        logits: [..., n], the classes from ``offset``.
        labels, lse, dloss: [...]; lse over all classes, also those of other shards.
    """
    uniform = lse.dtype == dloss.dtype == logits.dtype
    if not uniform or not pays(xp, logits, np.float32):
        dx = empty(xp, out, logits.shape, logits.dtype)
        xp.subtract(logits, lse[..., None], out=dx)
        xp.exp(dx, out=dx)
        if logits.shape[-1]:
            position, inside = _local(xp, labels, offset, logits.shape[-1])
            index = position[..., None]
            here = xp.take_along_axis(dx, index, axis=-1) - inside[..., None].astype(dx.dtype)
            xp.put_along_axis(dx, index, here, axis=-1)
        dx *= dloss[..., None]
        return store(xp, dx, out)
    dx = empty(xp, out, logits.shape, logits.dtype)
    labels, lse, dloss = (np.ascontiguousarray(a).reshape(-1) for a in (labels, lse, dloss))
    _cross_entropy_grad_loop(rows(logits), labels, offset, lse, dloss, dx.reshape(-1, dx.shape[-1]))
    return store(xp, dx, out)
