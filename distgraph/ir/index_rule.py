"""Index rules: one einops-like line per op, from which sharding, partial results and legality are derived.

    "m k, k n -> m n"            k is missing from the result: splitting it leaves a partial result
    "b s (h d) -> b s h d"       a dim made of several indices, major first
    "... k! -> ... k!"           k must be whole: it cannot be split in this op
    "v@ d, i -> i d"             the op looks up positions of v: v may be split, the kernel gets its start
    "b h~, k! -> b h~"           the op slides over h: for its block of the result it reads a range of the
                                 operand, perhaps of another length; missing positions are fetched (a halo)
    "b _ -> b"                   _ is a dim that is never split

Sizes come from the shapes; an index of a composite dim needs its size given once. Every function here is
pure and cached on (text, shapes), so that repeated layers cost nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from distgraph.errors import GraphError
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec

Shape = tuple[int, ...]
Term = tuple[tuple[str, ...], ...]  # per dim the indices it is made of, major to minor

_DIM = re.compile(r"\(([^)]*)\)|(\.\.\.)!?|([A-Za-z][A-Za-z0-9]*)[!@~]?|_|1")


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A rule bound to shapes. Compared by identity: binding is cached.

    Attributes:
        text: the rule as written.
        operands, results: per tensor, per dim, the indices it is made of; an empty tuple is a dim never
            split.
        sizes: length of every index; of a sliding one the shortest.
        whole: indices that cannot be split here (`!`).
        located: indices whose start the kernel needs (`@`).
        composite: indices that share a dim with other indices in some tensor.
        sliding: indices along which the op reads other positions than it writes (`~`).
        joint: index -> the parts into which it is split where it is; all of them are split, or none.
    """

    text: str
    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str]
    located: frozenset[str]
    composite: frozenset[str] = field(default=frozenset())
    indices: tuple[str, ...] = ()
    sliding: frozenset[str] = field(default=frozenset())
    joint: Mapping[str, int] = field(default_factory=dict)

    def reduced(self, result: int) -> frozenset[str]:
        """Indices of the operands that a result does not have: splitting them makes that result partial."""
        return _reduced(self, result)

    def dims_of(self, index: str) -> tuple[tuple[bool, int, int], ...]:
        """Every (is_result, tensor, dim) that carries an index."""
        return _dims_of(self, index)


@lru_cache(maxsize=65536)
def _reduced(rule: Rule, result: int) -> frozenset[str]:
    present = {i for dim in rule.results[result] for i in dim}
    return frozenset(i for term in rule.operands for dim in term for i in dim if i not in present)


@lru_cache(maxsize=65536)
def _dims_of(rule: Rule, index: str) -> tuple[tuple[bool, int, int], ...]:
    carriers = []
    for is_result, terms in ((False, rule.operands), (True, rule.results)):
        for tensor, term in enumerate(terms):
            for dim, indices in enumerate(term):
                if index in indices:
                    carriers.append((is_result, tensor, dim))
    return tuple(carriers)


@dataclass(frozen=True, slots=True)
class OpLayout:
    """How an op is computed on its mesh: the axes that split each index, and the operands that are partial.

    Attributes:
        mesh: the ranks that compute the op together.
        axes: index -> axes that split it, major to minor; indices that are not split are left out.
        partial: axis -> which of the op's `linear` groups of operands is partial (sum) over it.
    """

    mesh: ProcessMesh
    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    partial: tuple[tuple[str, int], ...] = ()

    def of(self, index: str) -> tuple[str, ...]:
        """Axes that split an index."""
        for name, axes in self.axes:
            if name == index:
                return axes
        return ()

    def parts(self, index: str) -> int:
        """Number of parts in which an index is split."""
        return self.mesh.count(self.of(index))

    @property
    def without_unit_axes(self) -> OpLayout:
        """The same layout without axes of one rank."""
        long = {axis for axis, size in self.mesh.sizes.items() if size > 1}
        axes = ((index, tuple(axis for axis in split if axis in long)) for index, split in self.axes)
        partial = tuple((axis, group) for axis, group in self.partial if axis in long)
        return OpLayout(self.mesh, tuple((index, split) for index, split in axes if split), partial)

    def __str__(self) -> str:
        body = [f"{index}:{'*'.join(axes)}" for index, axes in self.axes]
        return "{" + ", ".join(body + [f"partial {axis}:{group}" for axis, group in self.partial]) + "}"


@lru_cache(maxsize=65536)
def bind(
    text: str,
    operand_shapes: tuple[Shape, ...],
    result_shapes: tuple[Shape, ...] | None = None,
    sizes: tuple[tuple[str, int], ...] = (),
) -> Rule:
    """Bind a rule to shapes.

    Args:
        text: the rule.
        operand_shapes: one shape an operand; `...` stands for the leading dims that the rule does not name.
        result_shapes: needed only for sizes of indices that no operand has.
        sizes: lengths of indices inside composite dims that cannot be inferred.

    Raises:
        GraphError: the number of operands or dims differs, or an index has two lengths.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise GraphError(f"rule {text!r} has no '->'")
    flags: dict[str, set[str]] = {"!": set(), "@": set(), "~": set()}
    parsed_left = [_parse_tensor(part, flags) for part in left.split(",")] if left.strip() else []
    parsed_right = [_parse_tensor(part, flags) for part in right.split(",")] if right.strip() else []
    if len(parsed_left) != len(operand_shapes):
        raise GraphError(
            f"rule {text!r} has {len(parsed_left)} operands but {len(operand_shapes)} were given"
        )
    index_sizes = dict(sizes)
    extra = _ellipsis_rank(text, parsed_left, operand_shapes)
    if not parsed_left and result_shapes is not None:
        extra = _ellipsis_rank(text, parsed_right, result_shapes)
    operands = tuple(_expand(t, extra, s) for t, s in zip(parsed_left, operand_shapes, strict=True))
    for position, (term, shape) in enumerate(zip(operands, operand_shapes, strict=True)):
        _solve(text, f"operand {position}", term, shape, index_sizes, flags["~"])
    results = tuple(_expand(t, extra, None) for t in parsed_right)
    if parsed_left:
        for position in range(extra):
            index_sizes.setdefault(f"z{position}", 1)  # every operand broadcasts here
    if result_shapes is not None:
        for position, (term, shape) in enumerate(zip(results, result_shapes, strict=True)):
            _solve(text, f"result {position}", term, shape, index_sizes, flags["~"])
    if "..." in flags["!"]:
        flags["!"] = (flags["!"] - {"..."}) | {f"z{i}" for i in range(extra)}
    return make_rule(text, operands, results, index_sizes, flags["!"], flags["@"], flags["~"])


def term_of(shape: Shape, prefix: str = "i") -> tuple[Term, dict[str, int]]:
    """A term with an index for every dim, and the sizes of the indices.

    Example:
        >>> term_of((4, 8))
        ((('i0',), ('i1',)), {'i0': 4, 'i1': 8})
    """
    indices = tuple(f"{prefix}{dim}" for dim in range(len(shape)))
    return tuple((index,) for index in indices), dict(zip(indices, shape, strict=True))


def make_rule(
    text: str,
    operands: tuple[Term, ...],
    results: tuple[Term, ...],
    sizes: Mapping[str, int],
    whole: set[str] | frozenset[str] = frozenset(),
    located: set[str] | frozenset[str] = frozenset(),
    sliding: set[str] | frozenset[str] = frozenset(),
    joint: Mapping[str, int] | None = None,
) -> Rule:
    """A rule from its parts; indices of length 1 are dropped, for there is nothing to split."""

    def trim(term: Term) -> Term:
        return tuple(tuple(i for i in dim if sizes.get(i, 2) != 1) for dim in term)

    operands, results = tuple(map(trim, operands)), tuple(map(trim, results))
    every = [dim for term in operands + results for dim in term]
    order = tuple(dict.fromkeys(i for dim in every for i in dim))
    composite = frozenset(i for dim in every if len(dim) > 1 for i in dim)
    flags = frozenset(whole), frozenset(located)
    joint_indices = {index: parts for index, parts in (joint or {}).items() if index in order}
    return Rule(
        text, operands, results, dict(sizes), *flags, composite, order, frozenset(sliding), joint_indices
    )


@lru_cache(maxsize=65536)
def reshape_rule(before: Shape, after: Shape) -> Rule:
    """Common indices of two shapes of equal size, found from the major side.

    The greatest common divisor of the remaining lengths of both sides is an index of both. Where it is 1, the
    dims up to the next one at which the products of both sides are equal have no common index and stay whole.

    Example:
        >>> rule = reshape_rule((8, 6), (2, 4, 6))
        >>> rule.operands, rule.results
        (((('i0', 'i1'), ('i2',)),), ((('i0',), ('i1',), ('i2',)),))
    """
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    sizes: dict[str, int] = {}
    if math.prod(before):
        _factor(before, after, left, right, sizes)
    operand = tuple(tuple(dim) for dim in left)
    result = tuple(tuple(dim) for dim in right)
    whole = {index for index in sizes if index.startswith("w")}
    return make_rule("reshape", (operand,), (result,), sizes, whole)


def _factor(
    before: Shape, after: Shape, left: list[list[str]], right: list[list[str]], sizes: dict[str, int]
) -> None:
    i = j = 0
    open_left, open_right = (before[0] if before else 1), (after[0] if after else 1)
    while i < len(before) or j < len(after):
        if i < len(before) and open_left == 1:
            i += 1
            open_left = before[i] if i < len(before) else 1
            continue
        if j < len(after) and open_right == 1:
            j += 1
            open_right = after[j] if j < len(after) else 1
            continue
        common = math.gcd(open_left, open_right)
        if common > 1:
            name = f"i{len(sizes)}"
            sizes[name] = common
            left[i].append(name)
            right[j].append(name)
            open_left, open_right = open_left // common, open_right // common
            continue
        # coprime lengths: whole up to the dim at which the products are equal
        product_left, product_right = open_left, open_right
        _whole(left[i], open_left, sizes)
        _whole(right[j], open_right, sizes)
        while product_left != product_right:
            if product_left < product_right:
                i += 1
                product_left *= before[i]
                _whole(left[i], before[i], sizes)
            else:
                j += 1
                product_right *= after[j]
                _whole(right[j], after[j], sizes)
        open_left = open_right = 1


def _whole(dim: list[str], size: int, sizes: dict[str, int]) -> None:
    name = f"w{len(sizes)}"
    sizes[name] = size
    dim.append(name)


def _parse_tensor(text: str, flags: dict[str, set[str]]) -> list[tuple[str, ...]]:
    dims: list[tuple[str, ...]] = []
    for match in _DIM.finditer(text):
        token = match[0]
        if token.startswith("("):
            names = token[1:-1].split()
            for name in names:
                if name[-1] in "!@~":
                    flags[name[-1]].add(name[:-1])
            dims.append(tuple(n.rstrip("!@~") for n in names))
        elif token in ("_", "1"):
            dims.append(())
        else:
            if token[-1] in "!@~":
                flags[token[-1]].add(token[:-1])
            dims.append((token.rstrip("!@~"),))
    return dims


def _ellipsis_rank(text: str, tensors: list[list[tuple[str, ...]]], shapes: tuple[Shape, ...]) -> int:
    extra = 0
    for tensor, shape in zip(tensors, shapes, strict=True):
        named = len(tensor) - (("...",) in tensor)
        if ("...",) in tensor and len(shape) >= named:
            extra = max(extra, len(shape) - named)
        elif len(shape) != named:
            raise GraphError(f"rule {text!r} names {named} dims but the operand has shape {shape}")
    return extra


def _expand(tensor: list[tuple[str, ...]], extra: int, shape: Shape | None) -> Term:
    dims: list[tuple[str, ...]] = []
    for dim in tensor:
        if dim == ("...",):
            count = extra if shape is None else len(shape) - len(tensor) + 1
            dims += [(f"z{i}",) for i in range(extra - count, extra)]
        else:
            dims.append(dim)
    if shape is None:
        return tuple(dims)
    # a length-1 dim under an ellipsis broadcasts: it carries no index
    return tuple(() if d and d[0].startswith("z") and n == 1 else d for d, n in zip(dims, shape, strict=True))


def _solve(
    text: str, subject: str, term: Term, shape: Shape, index_sizes: dict[str, int], sliding: set[str]
) -> None:
    for indices, length in zip(term, shape, strict=True):
        if not indices:
            continue
        if indices[0] in sliding:
            index_sizes[indices[0]] = min(length, index_sizes.get(indices[0], length))
            continue
        product, unknown = 1, []
        for index in indices:
            if index in index_sizes:
                product *= index_sizes[index]
            else:
                unknown.append(index)
        if len(unknown) == 1 and product and length % product == 0:
            index_sizes[unknown[0]] = length // product
        elif unknown or product != length:
            described = ", ".join(f"{i}={index_sizes.get(i, '?')}" for i in indices)
            raise GraphError(
                f"index {' '.join(indices)} is {length} in {subject} but {described} elsewhere ({text})"
            )


def representable(rule: Rule, layout: OpLayout) -> bool:
    """True when every dim of every tensor is a plain block under this layout (composite dims nest)."""
    split = [index for index in rule.joint if layout.of(index)]
    if split and (len(split) < len(rule.joint) or any(_parts(layout, i) != rule.joint[i] for i in split)):
        return False
    return all(
        _dim_ok(dim, rule.sizes, layout)
        for term in rule.operands + rule.results
        for dim in term
        if len(dim) > 1 or (dim and dim[0] in rule.whole)
    ) and not any(layout.of(i) for i in rule.whole)


def _parts(layout: OpLayout, index: str) -> int:
    """Parts into which an index is split, or 0 if they are uneven."""
    parts = layout.mesh.count(layout.of(index))
    return parts if parts == layout.mesh.units(layout.of(index)) else 0


def _dim_ok(dim: tuple[str, ...], sizes: Mapping[str, int], layout: OpLayout) -> bool:
    minor_split = False
    for index in reversed(dim):
        axes, size = layout.of(index), sizes[index]
        parts = layout.mesh.units(axes)
        if minor_split and not parts == layout.mesh.count(axes) == size:
            return False  # something minor is split: everything major must be split down to single elements
        if parts > 1:
            if len(dim) > 1 and size % parts:
                return False  # blocks of equal size nest; uneven ones would not be blocks of the whole dim
            minor_split = True
    return True


@lru_cache(maxsize=262144)
def operand_spec(
    rule: Rule, operand: int, layout: OpLayout, linear: tuple[tuple[int, ...], ...] = ()
) -> ShardSpec:
    """Layout that the op needs operand number `operand` in."""
    partial = tuple((axis, "sum") for axis, group in layout.partial if operand in linear[group])
    return ShardSpec(_dims(rule.operands[operand], layout), partial)


@lru_cache(maxsize=262144)
def result_spec(rule: Rule, result: int, layout: OpLayout, reduction: str = "sum") -> ShardSpec:
    """Layout in which the op writes result number `result`; partial over split indices it does not have."""
    partial = [(axis, "sum") for axis, _ in layout.partial]
    partial += [(axis, reduction) for index in rule.reduced(result) for axis in layout.of(index)]
    return ShardSpec(_dims(rule.results[result], layout), tuple(partial))


def _dims(term: Term, layout: OpLayout) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(axis for index in dim for axis in layout.of(index)) for dim in term)


def bounds(rule: Rule, layout: OpLayout, rank: int, index: str) -> tuple[int, int]:
    """(start, stop) of the positions of an index that one rank computes."""
    axes = layout.of(index)
    mesh = layout.mesh
    return mesh.block(rule.sizes[index], axes, mesh.index(rank, axes)) if axes else (0, rule.sizes[index])


def choices(rule: Rule, mesh: ProcessMesh, linear: Sequence[tuple[int, ...]] = ()) -> tuple[OpLayout, ...]:
    """Every legal layout of an op on a mesh: for each axis one index, a linear group, or nothing.

    An axis never splits an index into more parts, or units of uneven parts, than it has positions. With two
    axes on one index the major one comes first in mesh order.
    """
    layouts = [OpLayout(mesh)]
    for axis in mesh.axes:
        grown = list(layouts)
        for layout in layouts:
            for index in rule.indices:
                axes = dict(layout.axes)
                axes[index] = (*axes.get(index, ()), axis)
                candidate = OpLayout(mesh, tuple(sorted(axes.items())), layout.partial)
                if mesh.units(axes[index]) <= rule.sizes[index] and representable(rule, candidate):
                    grown.append(candidate)
            grown += [
                OpLayout(mesh, layout.axes, (*layout.partial, (axis, group))) for group in range(len(linear))
            ]
        layouts = grown
    return tuple(layouts)
