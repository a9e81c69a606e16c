"""Gather, scatter and one-hot ops: the dim that positions refer to may be split.

The kernel of a rank that holds rows start..stop of a table gets their start. It returns the rows that the
rank has and zeros for all others, so the result is partial (sum). No table is ever gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distgraph.errors import GraphError, OperandFault
from distgraph.errors.arguments import Size, checked_arguments
from distgraph.ir.dtypes import is_float, short, to_numpy
from distgraph.ir.graph import Value
from distgraph.ir.index_rule import Rule, make_rule, term_of
from distgraph.ir.op_registry import (
    Attrs,
    GradientContext,
    Kernel,
    Local,
    RuleFunction,
    Shape,
    Shapes,
    define,
)
from distgraph.kernels import embedding as rows
from distgraph.kernels import loss, workspace
from distgraph.kernels._common import store, widening
from distgraph.ops.contraction import as_tensors
from distgraph.ops.reduction import dims_of
from distgraph.tracing.tensor import Tensor, emit_one

Grads = Sequence[Tensor | None]


def _integer(value: Value, subject: str) -> None:
    if is_float(value.dtype) or value.dtype == "bool":
        raise GraphError(f"{subject} is {value.type} but positions must be integers; cast it with .astype")


def check_positions(xp: Any, ids: Any, length: int) -> None:
    """Refuse positions outside 0..length-1. On NumPy only: on a GPU the check would stall the stream."""
    if xp is np and ids.size and (int(ids.min()) < 0 or int(ids.max()) >= length):
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise OperandFault(
            f"position {wrong} is outside 0..{length - 1}; check the ids against the length of the dim"
        )


def _located(size: str = "") -> Callable[[Attrs, Local], Attrs]:
    """Attributes of a rank that holds a part of the dim that positions refer to: `offset`, where it starts.

    Args:
        size: attribute that is the length of the dim, where the result has it; it becomes that of the part.
            Empty where an operand has the dim: the attribute `length` becomes that of the whole dim.
    """

    def localize(attrs: Attrs, local: Local) -> Attrs:
        (index,) = local.rule.located
        if local.rule.sizes[index] == 1:
            return attrs
        start, stop = local.bounds(index)
        lengths = {size: stop - start} if size else {"length": local.rule.sizes[index]}
        return {**attrs, "offset": start, **lengths}

    return localize


def _define_lookup(name: str, rule: RuleFunction, kernel: Kernel, size: str = "", **fields: Any) -> None:
    """Declare a look-up by position, linear in operand 0; for `size` see `_located`."""
    declared = {"flops": 0, "linear": ((0,),), "localize": _located(size), "cost": "lookup"}
    define(name, rule, kernel, **{**declared, **fields})


# rows of a dim by position


def _take_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    dim = attrs.get("dim", 0)
    term, sizes = term_of(shapes[0])
    positions, more = term_of(shapes[1], "k")
    result = (*term[:dim], *positions, *term[dim + 1 :])
    return make_rule("take", (term, positions), (result,), sizes | more, located={f"i{dim}"})


def _infer_take(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    table, ids = operands
    dim = attrs.get("dim", 0)
    _integer(ids, "operand 1")
    if not table.shape:
        raise GraphError(f"operand 0 is {table.type}: a table needs at least one dim")
    return [((*table.shape[:dim], *ids.shape, *table.shape[dim + 1 :]), table.dtype)]


def _embedding_kernel(
    xp: Any, table: Any, ids: Any, out: Any = None, *, offset: int = 0, length: int | None = None
) -> Any:
    check_positions(xp, ids, table.shape[0] if length is None else length)
    return rows.embedding(xp, table, ids, offset=offset, out=out)


def _take_kernel(
    xp: Any, x: Any, ids: Any, out: Any = None, *, dim: int, offset: int = 0, length: int | None = None
) -> Any:
    front = xp.ascontiguousarray(xp.moveaxis(x, dim, 0)) if dim else x
    rows_found = _embedding_kernel(xp, front, ids, out=None if dim else out, offset=offset, length=length)
    if not dim:
        return rows_found
    dims = tuple(range(dim, dim + ids.ndim))
    result = xp.moveaxis(rows_found, tuple(range(ids.ndim)), dims)
    return store(xp, result, out)


def _take_gradient(c: GradientContext) -> Grads:
    table, ids = c.operands
    dim = c.attrs.get("dim", 0)
    grad = c.grad
    if dim:
        front = tuple(range(dim, dim + ids.ndim))
        grad = emit_one("transpose", grad, order=front + tuple(d for d in range(grad.ndim) if d not in front))
    gathered = emit_one("embedding_grad", grad, ids, rows=table.shape[dim])
    if dim:
        gathered = emit_one("transpose", gathered, order=(*range(1, dim + 1), 0, *range(dim + 1, table.ndim)))
    return [gathered, None]


_define_lookup(
    "take",
    _take_rule,
    _take_kernel,
    infer=_infer_take,
    gradient=_take_gradient,
    workspace=workspace.take,
)
_define_lookup(
    "embedding",
    _take_rule,
    _embedding_kernel,
    infer=_infer_take,
    gradient=_take_gradient,
    one_hot=True,
    workspace=workspace.embedding,
)


def _embedding_grad_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    positions, sizes = term_of(shapes[1], "k")
    rest, more = term_of(shapes[0][len(shapes[1]) :])
    result = (("v",), *rest)
    return make_rule(
        "embedding_grad",
        ((*positions, *rest), positions),
        (result,),
        sizes | more | {"v": attrs["rows"]},
        located={"v"},
    )


def _infer_embedding_grad(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    grad, ids = operands
    return [((attrs["rows"], *grad.shape[len(ids.shape) :]), grad.dtype)]


_define_lookup(
    "embedding_grad",
    _embedding_grad_rule,
    rows.embedding_grad,
    size="rows",
    infer=_infer_embedding_grad,
    gradient=lambda c: [emit_one("embedding", c.grad, c.operands[1]), None],
    flops=lambda op, rule: op.operands[0].size,
    one_hot=True,
)


def _scatter_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    term, sizes = term_of(shapes[0])
    positions, more = term_of(shapes[1], "k")
    updates = (*positions, *term[1:])
    # the positions stay whole: if they were split, the sum would contain the operand once for every rank
    return make_rule(
        "scatter_add", (term, positions, updates), (term,), sizes | more, whole=set(more), located={"i0"}
    )


def _infer_scatter(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    x, ids, updates = operands
    _integer(ids, "operand 1")
    expected = (*ids.shape, *x.shape[1:])
    if not x.shape or updates.shape != expected or updates.dtype != x.dtype:
        raise GraphError(
            f"updates are {updates.type} but {x.type} at {ids.type} takes {x.dtype}{list(expected)}"
        )
    return [(x.shape, x.dtype)]


@widening
def _scatter_kernel(
    xp: Any, x: Any, ids: Any, updates: Any, out: Any = None, *, offset: int = 0, length: int | None = None
) -> Any:
    check_positions(xp, ids, x.shape[0] if length is None else length)
    return rows.scatter_add(xp, x, ids, updates, offset=offset, out=out)


_define_lookup(
    "scatter_add",
    _scatter_rule,
    _scatter_kernel,
    infer=_infer_scatter,
    gradient=lambda c: [c.grad, None, emit_one("take", c.grad, c.operands[1], dim=0)],
    flops=lambda op, rule: op.operands[2].size,
    linear=((0, 2),),
)


# one element a row


def _pick_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    term, sizes = term_of(shapes[0])
    return make_rule("pick", (term, term[:-1]), (term[:-1],), sizes, located={f"i{len(term) - 1}"})


def _infer_pick(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    x, labels = operands
    _integer(labels, "operand 1")
    if not x.shape or labels.shape != x.shape[:-1]:
        raise GraphError(f"labels are {labels.type} but {x.type} needs shape {x.shape[:-1]}")
    return [(labels.shape, x.dtype)]


@widening
def _pick_kernel(
    xp: Any, x: Any, labels: Any, out: Any = None, *, offset: int = 0, length: int | None = None
) -> Any:
    check_positions(xp, labels, x.shape[-1] if length is None else length)
    return loss.pick(xp, x, labels, offset=offset, out=out)


_define_lookup(
    "pick",
    _pick_rule,
    _pick_kernel,
    infer=_infer_pick,
    gradient=lambda c: [emit_one("pick_grad", c.grad, c.operands[1], size=c.operands[0].shape[-1]), None],
    workspace=workspace.pick,
)


def _pick_grad_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    term, sizes = term_of(shapes[0])
    return make_rule(
        "pick_grad", (term, term), ((*term, ("v",)),), sizes | {"v": attrs["size"]}, located={"v"}
    )


_define_lookup(
    "pick_grad",
    _pick_grad_rule,
    loss.pick_grad,
    size="size",
    infer=lambda operands, attrs: [((*operands[0].shape, attrs["size"]), operands[0].dtype)],
    gradient=lambda c: [emit_one("pick", c.grad, c.operands[1]), None],
    workspace=workspace.pick_grad,
)


# several elements along a dim


def _along_terms(shape: Shape, dim: int, length: int, other: int) -> tuple[Any, Any, dict[str, int]]:
    """Terms of the table (index v at `dim`) and of the positions (index k at `dim`), and index sizes."""
    term, sizes = term_of(shape)
    table = tuple(("v",) if d == dim else i for d, i in enumerate(term))
    positions = tuple(("k",) if d == dim else i for d, i in enumerate(term))
    del sizes[f"i{dim}"]
    return table, positions, sizes | {"v": length, "k": other}


def _take_along_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    dim = attrs["dim"]
    table, positions, sizes = _along_terms(shapes[0], dim, shapes[0][dim], shapes[1][dim])
    return make_rule("take_along", (table, positions), (positions,), sizes, located={"v"})


def _infer_take_along(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    x, ids = operands
    dim = attrs["dim"]
    _integer(ids, "operand 1")
    if len(ids.shape) != len(x.shape) or any(
        a != b for d, (a, b) in enumerate(zip(x.shape, ids.shape, strict=True)) if d != dim
    ):
        raise GraphError(
            f"positions are {ids.type} but {x.type} needs the same lengths in every dim but {dim}"
        )
    return [(ids.shape, x.dtype)]


def _take_along_kernel(
    xp: Any, x: Any, ids: Any, out: Any = None, *, dim: int, offset: int = 0, length: int | None = None
) -> Any:
    size = x.shape[dim]
    check_positions(xp, ids, size if length is None else length)
    local = ids.astype(np.int64) - offset
    inside = (local >= 0) & (local < size)
    result = xp.zeros(ids.shape, x.dtype) if out is None else out
    if size == 0:
        result[...] = 0
        return result
    result[...] = xp.where(
        inside, xp.take_along_axis(x, xp.where(inside, local, 0), axis=dim), x.dtype.type(0)
    )
    return result


_define_lookup(
    "take_along",
    _take_along_rule,
    _take_along_kernel,
    infer=_infer_take_along,
    gradient=lambda c: [
        emit_one(
            "put_along", c.grad, c.operands[1], dim=c.attrs["dim"], size=c.operands[0].shape[c.attrs["dim"]]
        ),
        None,
    ],
    workspace=workspace.take_along,
)


def _put_along_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    dim = attrs["dim"]
    table, positions, sizes = _along_terms(shapes[0], dim, attrs["size"], shapes[0][dim])
    return make_rule("put_along", (positions, positions), (table,), sizes, located={"v"})


def _infer_put_along(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    x, ids = operands
    _integer(ids, "operand 1")
    if ids.shape != x.shape:
        raise GraphError(f"positions are {ids.type} but the elements {x.type}; they need one shape")
    return [(tuple(attrs["size"] if d == attrs["dim"] else n for d, n in enumerate(x.shape)), x.dtype)]


def _put_along_kernel(
    xp: Any, x: Any, ids: Any, out: Any = None, *, dim: int, size: int, offset: int = 0
) -> Any:
    shape = tuple(size if d == dim else n for d, n in enumerate(x.shape))
    sum_dtype = np.dtype(np.float32) if x.dtype.itemsize == 2 and x.dtype.kind not in "iu" else x.dtype
    total = xp.zeros(shape, sum_dtype)
    local = ids.astype(np.int64) - offset
    inside = (local >= 0) & (local < size)
    if x.size and size:
        index = (
            list(xp.indices(ids.shape, sparse=True))
            if xp is np
            else list(xp.ogrid[tuple(map(slice, ids.shape))])
        )
        index[dim] = xp.where(inside, local, 0)
        xp.add.at(total, tuple(index), xp.where(inside, x, x.dtype.type(0)).astype(sum_dtype))
    return store(xp, total, out, x.dtype)


_define_lookup(
    "put_along",
    _put_along_rule,
    _put_along_kernel,
    size="size",
    infer=_infer_put_along,
    gradient=lambda c: [emit_one("take_along", c.grad, c.operands[1], dim=c.attrs["dim"]), None],
    workspace=workspace.put_along,
)


# one_hot


def _one_hot_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    term, sizes = term_of(shapes[0])
    return make_rule("one_hot", (term,), ((*term, ("v",)),), sizes | {"v": attrs["classes"]}, located={"v"})


def _infer_one_hot(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    _integer(operands[0], "operand 0")
    return [((*operands[0].shape, attrs["classes"]), short(attrs["dtype"]))]


def _one_hot_kernel(
    xp: Any,
    ids: Any,
    out: Any = None,
    *,
    classes: int,
    dtype: str,
    offset: int = 0,
    length: int | None = None,
) -> Any:
    if length is not None:
        check_positions(xp, ids, length)
    hit = ids[..., None] == xp.arange(offset, offset + classes)
    return store(xp, hit, out, to_numpy(dtype))


define(
    "one_hot",
    _one_hot_rule,
    _one_hot_kernel,
    infer=_infer_one_hot,
    gradient=lambda c: [None],
    flops=0,
    localize=_located("classes"),
    workspace=workspace.one_hot,
)


def embedding(table: Any, ids: Any) -> Tensor:
    """Rows of a table [rows, width] by position: [..., width]. A table split by rows gives a partial sum."""
    return emit_one("embedding", *as_tensors(table, ids))


@checked_arguments()
def take(x: Any, ids: Any, axis: int = 0) -> Tensor:
    """Elements of a dim by position: the dim is replaced by the dims of `ids`.

    Raises:
        GraphError: positions are no integers, or are an array with values out of range.
    """
    (tensor,) = as_tensors(x)
    if not -tensor.ndim <= axis < tensor.ndim:
        raise GraphError(f"axis {axis} is out of range for {tensor.value.type}")
    dim = axis % tensor.ndim
    if not isinstance(ids, Tensor) and not hasattr(ids, "__distgraph_tensor__"):
        positions, n = np.asarray(ids), tensor.shape[dim]
        if positions.size and positions.dtype.kind in "iu" and (positions.min() < -n or positions.max() >= n):
            raise GraphError(
                f"positions {positions.min()}..{positions.max()} are out of range for dim {dim}: "
                f"{tensor.value.type}"
            )
        ids = positions % n if n and positions.dtype.kind in "iu" else positions
    return emit_one("take", *as_tensors(tensor, ids), dim=dim)


@checked_arguments()
def take_along(x: Any, ids: Any, axis: int = -1) -> Tensor:
    """NumPy's take_along_axis for positions >= 0."""
    tensor, positions = as_tensors(x, ids)
    (dim,) = dims_of(axis, tensor.ndim)
    return emit_one("take_along", tensor, positions, dim=dim)


def pick(x: Any, labels: Any) -> Tensor:
    """`x[..., label]`: an element of the last dim for every label; labels have the shape of the others."""
    return emit_one("pick", *as_tensors(x, labels))


def scatter_add(x: Any, ids: Any, updates: Any) -> Tensor:
    """`x` with `updates[i]` added to row `ids[i]`; equal positions add up."""
    return emit_one("scatter_add", *as_tensors(x, ids, updates))


@checked_arguments()
def one_hot(ids: Any, classes: Size, dtype: Any = "f32", outside: str = "error") -> Tensor:
    """1 where the new last dim equals the position, else 0.

    Args:
        ids: positions of any shape.
        classes: length of the new dim.
        dtype: of the result.
        outside: result for a position outside 0..classes-1: "error" raises a RuntimeFault in the step, as
            other look-ups do (on NumPy only), "zeros" gives a row of zeros.

    Raises:
        GraphError: the positions are no integers, or `outside` is neither.
    """
    if outside not in ("error", "zeros"):
        raise GraphError(f'outside of one_hot is {outside!r} but must be "error" or "zeros"')
    checked = {"length": int(classes)} if outside == "error" else {}
    return emit_one("one_hot", *as_tensors(ids), classes=int(classes), dtype=short(dtype), **checked)
