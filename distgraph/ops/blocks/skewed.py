"""Products of skewed blocks: on a square of ranks, each rank multiplies one block of either operand.

Three dims of a contraction are seen as p blocks each: `rows` of the first operand and the result, `inner` of
both operands, `cols` of the second operand and the result. For block (i, j) of the result,

    y[i, j] = a[i, s] b[s, j]    where s = (row_sign * i + col_sign * j + shift) mod p

so that on p x p ranks every rank reads one block of each operand: the operands are stored on the same ranks
in another order (`OpDef.operand_mesh`), and nothing is copied. The sum over all p shifts is a b.

Source: Cannon, "A Cellular Computer to Implement the Kalman Filter Algorithm", 1969.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from distgraph.errors import GraphError
from distgraph.ir.graph import Op, Value
from distgraph.ir.index_rule import Rule, Term, make_rule
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import Attrs, Local, Shape, Shapes, define
from distgraph.kernels import matmul as kernels
from distgraph.kernels import workspace
from distgraph.kernels._common import Array, Namespace, store
from distgraph.ops.blocks.ring import block_of, check_total, lengths_of
from distgraph.ops.contraction import infer_einsum, parse_einsum

_ROW, _COL = "q0", "q1"  # indices of the blocks of the result


def _infer(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    made = infer_einsum(operands[-2:], attrs)
    (left, right), result = parse_einsum(attrs["spec"])
    blocks, parts = (attrs["rows"], attrs["inner"], attrs["cols"]), attrs["parts"]
    lengths = lengths_of([v.shape for v in operands[-2:]], attrs)
    expected = (left + result, left + right, right + result)
    for letter, letters in zip(blocks, expected, strict=True):
        if letters.count(letter) != 2 or lengths[letter] % parts:
            raise GraphError(
                f"index {letter!r} of {attrs['spec']!r} has length {lengths.get(letter, 0)} but must be a "
                f"multiple of {parts}, in two of the three tensors"
            )
    check_total(operands, made[0])
    return list(made)


def _rule(shapes: Shapes, attrs: Attrs) -> Rule:
    (left, right), result = parse_einsum(attrs["spec"])
    rows, inner, cols = attrs["rows"], attrs["inner"], attrs["cols"]
    sizes = {_ROW: attrs["parts"], _COL: attrs["parts"]}
    for letter, length in lengths_of(shapes[-2:], attrs).items():
        sizes |= {f"i{letter}": length, f"b{letter}": length // attrs["parts"]}

    def term(letters: str, split: dict[str, str]) -> Term:
        return tuple((split[c], f"b{c}") if c in split else (f"i{c}",) for c in letters)

    halves = [{rows: _ROW, inner: _COL}, {inner: _ROW, cols: _COL}]
    if attrs["exchanged"] >= 0:
        first, second = halves[attrs["exchanged"]]
        halves[attrs["exchanged"]] = {first: _COL, second: _ROW}
    operands: tuple[Term, ...] = (term(left, halves[0]), term(right, halves[1]))
    made = term(result, {rows: _ROW, cols: _COL})
    whole = {f"b{letter}" for letter in (rows, inner, cols)}
    if len(shapes) == 3:  # a partial product added to the total would count the total several times
        operands = (made, *operands)
        whole |= {f"i{letter}" for letter in left + right if letter not in result}
    used = {index for term in (*operands, made) for dim in term for index in dim}
    sizes = {index: sizes[index] for index in used}
    return make_rule(
        attrs["spec"],
        operands,
        (made,),
        sizes,
        whole & used,
        joint={_ROW: attrs["parts"], _COL: attrs["parts"]},
    )


def _inner_block(attrs: Attrs, row: int, col: int) -> int:
    return int(attrs["row_sign"] * row + attrs["col_sign"] * col + attrs["shift"]) % int(attrs["parts"])


def _operand_mesh(op: Op, operand: int) -> ProcessMesh:
    """The mesh on which each rank has the block that it multiplies."""
    layout, which = op.layout, operand - len(op.operands) + 2
    assert layout is not None
    if which < 0 or layout.parts(_ROW) == 1:
        return layout.mesh
    parts, order = op.attrs["parts"], [0] * op.attrs["parts"] ** 2
    for position in range(parts * parts):
        row, col = divmod(position, parts)
        inner = _inner_block(op.attrs, row, col)
        first, second = (row, inner) if which == 0 else (inner, col)
        if op.attrs["exchanged"] == which:
            first, second = second, first
        order[first * parts + second] = position
    return layout.mesh.reordered((*layout.of(_ROW), *layout.of(_COL)), order)


def _localize(attrs: Attrs, local: Local) -> Attrs:
    return attrs if local.layout.parts(_ROW) == 1 else {**attrs, "parts": 1}


def _block(x: Array, letters: str, positions: dict[str, int], parts: int) -> Array:
    for dim, letter in enumerate(letters):
        if letter in positions:
            x = block_of(x, dim, positions[letter], parts)
    return x


def _multiply(xp: Namespace, a: Array, b: Array, y: Array, attrs: Attrs, *, fresh: bool) -> Array:
    (left, right), result = parse_einsum(attrs["spec"])
    rows, inner, cols, parts = attrs["rows"], attrs["inner"], attrs["cols"], attrs["parts"]
    for row in range(parts):
        for col in range(parts):
            where = {rows: row, inner: _inner_block(attrs, row, col), cols: col}
            pair = _block(a, left, where, parts), _block(b, right, where, parts)
            target = _block(y, result, where, parts)
            kernels.einsum_add(xp, *pair, spec=attrs["spec"], out=target, fresh=fresh)
    return y


def _kernel(xp: Namespace, a: Array, b: Array, *, out: Array | None = None, **attrs: Any) -> Array:
    sizes = lengths_of([a.shape, b.shape], attrs)
    _, result = parse_einsum(attrs["spec"])
    y = xp.empty(tuple(sizes[letter] for letter in result), a.dtype) if out is None else out
    return _multiply(xp, a, b, y, attrs, fresh=True)


def _add_kernel(
    xp: Namespace, total: Array, a: Array, b: Array, *, out: Array | None = None, **attrs: Any
) -> Array:
    y = store(xp, total, out) if out is not None else total.copy()
    return _multiply(xp, a, b, y, attrs, fresh=False)


def _workspace(*arrays: Array, **attrs: Any) -> int:
    (left, right), _ = parse_einsum(attrs["spec"])
    first = dict.fromkeys((attrs["rows"], attrs["inner"], attrs["cols"]), 0)
    pair = _block(arrays[-2], left, first, attrs["parts"]), _block(arrays[-1], right, first, attrs["parts"])
    return workspace.einsum_workspace(*pair, spec=attrs["spec"], adds=True)


def _flops(op: Op, rule: Rule) -> int:
    lengths = lengths_of([v.shape for v in op.operands[-2:]], op.attrs)
    return 2 * math.prod(lengths.values()) // int(op.attrs["parts"])


_product = partial(
    define,
    infer=_infer,
    flops=_flops,
    operand_mesh=_operand_mesh,
    localize=_localize,
    cost="matmul",
    workspace=_workspace,
)
_product("skewed_einsum", _rule, _kernel, linear=((0,), (1,)))
_product("skewed_einsum_add", _rule, _add_kernel, inplace=(0,), factors=(1, 2))
