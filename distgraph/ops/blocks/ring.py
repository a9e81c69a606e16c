"""Ops of products whose operand or result goes round a ring of ranks, one block a step.

Two dims of a contraction are seen as p blocks each: `outer`, which stays split, and `inner`. One step
computes, for every block q of the outer dim, with block (q + shift) mod p of the inner one. On p ranks, each
with one q, a rank needs one block of the inner dim, which its neighbour had in the step before: the operand
that goes round is stored on the ranks in another order (`OpDef.operand_mesh`), and nothing is copied.

    spec "mk,kn->mn", outer n, inner k:  y[:, q] = a[:, q + shift] b[q + shift, q]    all shifts sum to a b
    spec "mk,kn->mn", outer m, inner n:  y[q, :] = a[q, :] b[:, q + shift]            blocks of a b

The passes of `distgraph/passes/matmul_algorithms/` make these ops after the backward part, so they have no
gradients.

Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models", ASPLOS 2022, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from distgraph.errors import GraphError
from distgraph.ir.graph import Op, Value
from distgraph.ir.index_rule import Rule, Term, make_rule
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import Attrs, Groups, Local, MatmulDims, Shape, Shapes, define
from distgraph.kernels import matmul as kernels
from distgraph.kernels import workspace
from distgraph.kernels._common import Array, Namespace, store
from distgraph.ops.contraction import infer_einsum, parse_einsum

_BLOCK = "q"  # index of the blocks; the letters of a spec are other indices with a prefix


def lengths_of(shapes: Sequence[Shape], attrs: Attrs) -> dict[str, int]:
    """Length of every index of a contraction, from the shapes of its operands."""
    terms, _ = parse_einsum(attrs["spec"])
    return {c: n for term, shape in zip(terms, shapes, strict=True) for c, n in zip(term, shape, strict=True)}


def _check(operands: Sequence[Value], attrs: Attrs) -> tuple[Shape, str]:
    """Shape and dtype of the product of one step. Raises GraphError."""
    ((shape, dtype),) = infer_einsum(operands, attrs)
    terms, right = parse_einsum(attrs["spec"])
    parts, outer, inner = attrs["parts"], attrs["outer"], attrs["inner"]
    lengths = lengths_of([v.shape for v in operands], attrs)
    for letter in (outer, inner):
        if letter not in lengths or lengths[letter] % parts:
            raise GraphError(
                f"index {letter!r} of {attrs['spec']!r} has length {lengths.get(letter, 0)}, which "
                f"{parts} blocks do not divide; use a multiple of {parts}"
            )
    if outer not in right or outer == inner or not any(inner in term for term in terms):
        raise GraphError(f"outer index {outer!r} must be in the result of {attrs['spec']!r}, and not inner")
    if inner in right:
        dim = right.index(inner)
        shape = (*shape[:dim], shape[dim] // parts, *shape[dim + 1 :])
    return shape, dtype


def _term(letters: str, attrs: Attrs, *, result: bool) -> Term:
    """Indices of a tensor. One that has both letters holds the `whole` one as it is, or the block made."""
    outer, inner = attrs["outer"], attrs["inner"]
    both = outer in letters and inner in letters
    dims: list[tuple[str, ...]] = []
    for letter in letters:
        if letter not in (outer, inner):
            dims.append((f"i{letter}",))
        elif both and letter == inner and result:
            dims.append((f"b{letter}",))
        elif both and letter == attrs["whole"]:
            dims.append((f"w{letter}",))
        else:
            dims.append((_BLOCK, f"b{letter}"))
    return tuple(dims)


def _rule(shapes: Shapes, attrs: Attrs) -> Rule:
    terms, right = parse_einsum(attrs["spec"])
    sizes = {_BLOCK: attrs["parts"]}
    for letter, length in lengths_of(shapes[-2:], attrs).items():
        sizes |= {f"i{letter}": length, f"w{letter}": length, f"b{letter}": length // attrs["parts"]}
    operands = tuple(_term(term, attrs, result=False) for term in terms)
    made = _term(right, attrs, result=True)
    whole = {f"{kind}{attrs[which]}" for kind in "wb" for which in ("outer", "inner")}
    if len(shapes) == 3:  # the total is no sum of parts, so nor is what is added to it
        operands = (made, *operands)
        whole |= {f"i{letter}" for term in terms for letter in term if letter not in right}
    used = {i for term in (*operands, made) for dim in term for i in dim}
    return make_rule(
        attrs["spec"],
        operands,
        (made,),
        {i: sizes[i] for i in used},
        whole & used,
        joint={_BLOCK: attrs["parts"]},
    )


def _operand_mesh(op: Op, operand: int) -> ProcessMesh:
    """The mesh on which the ranks have the blocks of the inner dim that belong to theirs of the outer one."""
    layout, position = op.layout, operand - len(op.operands) + 2
    assert layout is not None
    terms, _ = parse_einsum(op.attrs["spec"])
    letters = terms[position] if position >= 0 else ""
    inner, parts = op.attrs["inner"], op.attrs["parts"]
    stays = inner not in letters or (op.attrs["outer"] in letters and op.attrs["whole"] == inner)
    if stays or layout.parts(_BLOCK) == 1:
        return layout.mesh
    order = [(block - op.attrs["shift"]) % parts for block in range(parts)]
    return layout.mesh.reordered(layout.of(_BLOCK), order)


def _localize(attrs: Attrs, local: Local) -> Attrs:
    if local.layout.parts(_BLOCK) == 1:
        return attrs
    start, stop = local.bounds(_BLOCK)
    return {**attrs, "first": start, "count": stop - start}


def block_of(x: Array, dim: int, position: int, count: int) -> Array:
    """A view of one of `count` blocks of a dim."""
    length = x.shape[dim] // count
    return x[(slice(None),) * dim + (slice(position * length, (position + 1) * length),)]


def _blocks(a: Array, b: Array, y: Array | None, attrs: Attrs) -> Iterator[tuple[Array, Array, Array | None]]:
    """Views of the operands and of the result for every block of the outer dim that is computed here."""
    parts, first, count = attrs["parts"], attrs.get("first", 0), attrs.get("count")
    here = parts if count is None else count
    terms, right = parse_einsum(attrs["spec"])

    def seen(x: Array, letters: str, q: int, *, result: bool) -> Array:
        both = attrs["outer"] in letters and attrs["inner"] in letters
        for dim, letter in enumerate(letters):
            whole = both and letter == attrs["whole"]
            if letter == attrs["outer"]:
                x = block_of(x, dim, first + q, parts) if whole else block_of(x, dim, q, here)
            elif letter == attrs["inner"] and not (result and both):
                block = (first + q + attrs["shift"]) % parts
                arrived = count is not None and not whole  # its blocks here are those that are read
                x = block_of(x, dim, q, here) if arrived else block_of(x, dim, block, parts)
        return x

    for q in range(here):
        left, other = (seen(x, term, q, result=False) for x, term in zip((a, b), terms, strict=True))
        yield left, other, None if y is None else seen(y, right, q, result=True)


def _made(attrs: Attrs, a: Array, b: Array) -> Shape:
    """Shape of the result here."""
    left, other, _ = next(_blocks(a, b, None, attrs))
    _, right = parse_einsum(attrs["spec"])
    sizes = lengths_of([left.shape, other.shape], attrs)
    count = attrs.get("count")
    sizes[attrs["outer"]] *= attrs["parts"] if count is None else count
    return tuple(sizes[letter] for letter in right)


def _kernel(xp: Namespace, a: Array, b: Array, *, out: Array | None = None, **attrs: Any) -> Array:
    y = xp.empty(_made(attrs, a, b), a.dtype) if out is None else out
    for left, other, block in _blocks(a, b, y, attrs):
        kernels.einsum_add(xp, left, other, spec=attrs["spec"], out=block, fresh=True)
    return y


def _add_kernel(
    xp: Namespace, total: Array, a: Array, b: Array, *, out: Array | None = None, **attrs: Any
) -> Array:
    y = store(xp, total, out) if out is not None else total.copy()
    for left, other, block in _blocks(a, b, y, attrs):
        kernels.einsum_add(xp, left, other, spec=attrs["spec"], out=block)
    return y


def _workspace(*arrays: Array, **attrs: Any) -> int:
    pairs = _blocks(arrays[-2], arrays[-1], None, attrs)
    return max(workspace.einsum_workspace(a, b, spec=attrs["spec"], adds=True) for a, b, _ in pairs)


def _block_lengths(op: Op) -> tuple[dict[str, int], int]:
    """Length of every letter in the product of one block, and the number of these products."""
    attrs = op.attrs
    parts, count = attrs["parts"], attrs.get("count")
    here = parts if count is None else count
    terms, _ = parse_einsum(attrs["spec"])
    lengths = {}
    for term, value in zip(terms, op.operands[-2:], strict=True):
        both = attrs["outer"] in term and attrs["inner"] in term
        for letter, length in zip(term, value.shape, strict=True):
            split = parts if both and letter == attrs["whole"] else here
            lengths[letter] = length // split if letter in (attrs["outer"], attrs["inner"]) else length
    return lengths, here


def _flops(op: Op, rule: Rule) -> int:
    lengths, count = _block_lengths(op)
    return 2 * math.prod(lengths.values()) * count


def _matmul_dims(op: Op) -> MatmulDims:
    lengths, count = _block_lengths(op)
    (left, right), result = parse_einsum(op.attrs["spec"])

    def size(letters: set[str]) -> int:
        return math.prod(lengths[letter] for letter in letters)

    a, b, c = set(left), set(right), set(result)
    return count * size(a & b & c), size((a & c) - b), size((b & c) - a), size((a & b) - c)


def _traffic(op: Op) -> int:
    """Bytes read and written: of an operand with both letters only one of its blocks in `parts`."""
    attrs, terms = op.attrs, parse_einsum(op.attrs["spec"])[0]
    moved = op.result.nbytes * (len(op.operands) - 1)  # a total is read, too
    for term, value in zip(terms, op.operands[-2:], strict=True):
        both = attrs["outer"] in term and attrs["inner"] in term
        moved += value.nbytes // (attrs["parts"] if both else 1)
    return moved


def _infer(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    made = _check(operands[-2:], attrs)
    check_total(operands, made)
    return [made]


def check_total(operands: Sequence[Value], made: tuple[Shape, str]) -> None:
    """Raises GraphError where the first of three operands is no total to which the product can be added."""
    if len(operands) == 3 and (operands[0].shape, operands[0].dtype) != made:
        raise GraphError(f"operand 0 is {operands[0].type} but the product is {made[1]}{list(made[0])}")


_product = partial(
    define,
    infer=_infer,
    flops=_flops,
    operand_mesh=_operand_mesh,
    matmul_dims=_matmul_dims,
    localize=_localize,
    cost="matmul",
    traffic=_traffic,
    workspace=_workspace,
)
_product("ring_einsum", _rule, _kernel, linear=((0,), (1,)))
_product("ring_einsum_add", _rule, _add_kernel, inplace=(0,))


# ---------------------------------------------------------------------- the products of all steps, joined


def _join_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    outer, inner, parts = attrs["outer"], attrs["inner"], len(shapes)
    if shapes[0][outer] % parts or len(set(shapes)) > 1:
        raise GraphError(
            f"{parts} products of shapes {', '.join(map(str, shapes))} do not join; they need one shape, of "
            f"which {parts} divides dim {outer}"
        )
    plain = tuple((f"i{d}",) for d in range(len(shapes[0])))
    sizes = {f"i{d}": n for d, n in enumerate(shapes[0]) if d not in (outer, inner)}
    sizes |= {_BLOCK: parts, "b": shapes[0][outer] // parts, "n": shapes[0][inner]}
    sizes["w"] = sizes["n"] * parts

    def term(index: str) -> Term:
        dims: list[tuple[str, ...]] = list(plain)
        dims[outer], dims[inner] = (_BLOCK, "b"), (index,)
        return tuple(dims)

    return make_rule("ring_join", (term("n"),) * parts, (term("w"),), sizes, {"b", "n", "w"})


def _together(count: int, attrs: Attrs) -> Groups:
    return (tuple(range(count)),)


def _join_kernel(
    xp: Namespace,
    *steps: Array,
    outer: int,
    inner: int,
    first: int = 0,
    count: int | None = None,
    out: Array | None = None,
) -> Array:
    parts = len(steps)
    here = parts if count is None else count
    shape = steps[0].shape
    y = (
        xp.empty((*shape[:inner], shape[inner] * parts, *shape[inner + 1 :]), steps[0].dtype)
        if out is None
        else out
    )
    for shift, step in enumerate(steps):
        for q in range(here):
            rows = block_of(y, outer, q, here)
            block_of(rows, inner, (first + q + shift) % parts, parts)[...] = block_of(step, outer, q, here)
    return y


define("ring_join", _join_rule, _join_kernel, linear=_together, localize=_localize)
