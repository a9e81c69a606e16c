"""The op registry: an op is declared once, and everything else is derived from its declaration.

    define("add", elementwise, kernel=ufunc("add"), gradient=add_gradient, linear=((0, 1),), inplace=(0, 1))

The index rule gives completion, legal layouts, partial results, local shapes, FLOPs and (where `infer` is
absent) the result shapes. See `distgraph.ir.index_rule` for the notation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from distgraph.errors import GraphError
from distgraph.ir.dtypes import promote, to_numpy
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.index_rule import OpLayout, Rule, bind, bounds, make_rule, operand_spec, result_spec
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.kernels._common import in_f32, widened

if TYPE_CHECKING:
    from distgraph.tracing.tensor import Tensor

Attrs = Mapping[str, Any]
Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
RuleFunction = Callable[[Shapes, Attrs], Rule]
Infer = Callable[[Sequence[Value], Attrs], Sequence[tuple[Shape, str]]]
Gradient = Callable[["GradientContext"], "Sequence[Tensor | None]"]
Kernel = Callable[..., Any]
Groups = tuple[tuple[int, ...], ...]
Windows = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]  # (dim, (start, stop) for every part of it)
Reads = Callable[[Op, int, int, int, int], tuple[int, int]]
View = Literal["", "same", "contiguous", "strided"]
MatmulDims = tuple[int, int, int, int]
Patches = tuple[float, float]  # number of elements of the patches, and of their contiguous rows
Tiles = tuple[float, float, float]  # FLOPs of whole tiles, elements that are copied for them, tiles

WIDE = "wide"
"""Attribute of a product of 16-bit operands whose result is in f32, see `OpDef.wide`."""


@dataclass(frozen=True, slots=True)
class GradientContext:
    """What a gradient function sees.

    Attributes:
        operands, results: tensors of the forward op.
        grads: gradient of every result; None where nothing depends on it.
        attrs: attributes of the forward op.
        needs: for every operand whether its gradient is needed (None may be returned for the others).
    """

    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    grads: tuple[Tensor | None, ...]
    attrs: Attrs
    needs: tuple[bool, ...]

    @property
    def grad(self) -> Tensor:
        """Gradient of the first result."""
        if self.grads[0] is None:
            raise AssertionError("gradient asked for without a cotangent")
        return self.grads[0]


@dataclass(frozen=True, slots=True)
class Local:
    """One rank's part of an op: what `localize` sees.

    Attributes:
        op, rule, layout: the global op and how it is computed.
        rank: the rank.
        operand_shapes, result_shapes: local shapes; those of operands with their halos.
    """

    op: Op
    rule: Rule
    layout: OpLayout
    rank: int
    operand_shapes: Shapes
    result_shapes: Shapes

    def bounds(self, index: str) -> tuple[int, int]:
        """(start, stop) of the positions of an index on this rank."""
        return bounds(self.rule, self.layout, self.rank, index)

    def starts(self, tensor: int, *, result: bool) -> tuple[int, ...]:
        """Global start of this rank's block on every dim of an operand or result."""
        return tuple(start for start, _ in self.block(tensor, result=result))

    def block(self, tensor: int, *, result: bool) -> tuple[tuple[int, int], ...]:
        """Global (start, stop) of this rank's block on every dim of an operand (without halo) or result."""
        term = (self.rule.results if result else self.rule.operands)[tensor]
        shape = (self.op.results if result else self.op.operands)[tensor].shape
        spec = ShardSpec(tuple(tuple(a for i in dim for a in self.layout.of(i)) for dim in term))
        return spec.bounds(shape, self.layout.mesh, self.rank)

    def window(self, operand: int) -> tuple[tuple[int, int], ...]:
        """Global (start, stop) of the part of an operand that this rank reads, on every dim."""
        spec = operand_layout(self.op, operand, self.layout)
        shape, mesh = self.op.operands[operand].shape, self.layout.mesh
        return window_bounds(shape, mesh, spec, operand_windows(self.op, operand, self.layout), self.rank)

    def slides(self, tensor: int, dim: int, *, result: bool) -> bool:
        """True when a dim is split along a sliding index."""
        indices = (self.rule.results if result else self.rule.operands)[tensor][dim]
        return bool(indices) and indices[0] in self.rule.sliding and self.layout.parts(indices[0]) > 1


@dataclass(frozen=True, slots=True)
class OpDef:
    """Declaration of an op kind.

    Attributes:
        name: the kind.
        rule: index rule text, or a function of operand shapes and attrs that returns a bound rule.
        kernel: `kernel(xp, *arrays, out=None, **attrs)` over NumPy or CuPy; returns one array or several.
        infer: result shapes and dtypes; by default shapes from the rule and the promoted dtype of the
            operands.
        gradient: gradients of the operands from those of the results; None = not differentiable.
        flops: floating point operations of the whole op; a number is that for each element of the largest
            operand or result. Default one an element of the first result.
        linear: groups of operands in which the op is jointly linear: a group may be partial(sum) together,
            the other operands must not be, and the results are then partial too. A function of (number of
            operands, attrs) where they differ from op to op; read it through `linear_groups(op)`.
        reduction: how partial results combine when a split index is missing from them (sum, max, min, prod).
        reads: (op, operand, dim, start, stop) -> positions of a sliding dim of an operand that the op reads
            for the block start:stop (never empty) of its leading tensor: the first result that carries the
            index, or where none does the last operand. Positions that reach below 0 or past the end wrap
            around.
        operand_mesh: (op, operand) -> the mesh on which a completed op reads an operand: the ranks of its own
            mesh in the order in which each has the block that it reads. By default its own mesh.
        result_mesh: the same for the results: the mesh on which the op leaves one.
        root: (op) -> mesh axes, and the position along them of the only ranks that have a result other than
            zero, or that read the last operand; None if all do. See the collectives broadcast and reduce.
        localize: returns the attrs of the local op; needed where attrs contain shapes or positions.
        decompose: the same computation in simpler ops, used where an index that the fused op needs whole is
            split.
        inplace: operands whose buffer the first result may reuse (same shape and dtype).
        view: whether the result aliases the memory of operand 0, and how. "same": its elements in the same
            order. "contiguous": the same order in another shape, which needs a contiguous operand and is a
            copy of any other. "strided": some of its elements, or another order. "": it does not.
        part: (local attrs, local shape of operand 0) -> the slices of it that the result is, None for others.
        ufunc: name of a NumPy ufunc that is the kernel, so that programs may call it directly.
        cost: matmul, memory, lookup or launch: which cost model applies.
        factors: for cost matmul, the two operands whose index terms give (batch, m, n, k).
        matmul_dims: (batch, m, n, k) of an op with cost matmul of other operands; it has a table of its own.
        patches, tiles: of a convolution: what is copied as windows; what compiled loops compute without that.
        copied: for cost matmul, how many elements the NumPy kernel copies to multiply them, or after it has.
        one_hot: whether it is a product with one-hot rows: completion propagates axes as through a matmul.
        anywhere: whether an op without operands has its result on every mesh: each that reads it has a copy.
        traffic: bytes that the op reads and writes, where it is not all of its operands and results.
        every_micro_batch: whether the op runs in every micro-batch even if its operands are the same in all.
        micro: the kernel also takes `micro`, the number of the micro-batch (random ops).
        bodies: attributes with graphs that the op runs turn by turn, and `boundary`: (op) -> the layouts of
            operands and results that follow from them in place of the rule; see `distgraph.ir.loops`.
        wide: whether the op may have the attribute `WIDE`, which leaves a result of 16-bit operands in f32.
        workspace: `workspace(*arrays, **attrs)`: temporary bytes that the NumPy kernel allocates, by shape,
            dtype and strides of the arrays; with `adds=True` those of `adds`. None means that no temporary
            memory grows with the arrays. See `distgraph.kernels.workspace`.
        adds: `adds(xp, *arrays, out=, scale=, fresh=, **attrs)`: writes scale * result into `out` where
            `fresh`, else adds it to `out`; for sums over micro-batches, where that is cheaper.
        direct: `direct(xp, *arrays, out=, **attrs)`: the same as name, operands and `out` of one ufunc call.
        together: `together(xp, operands of each, outs of each, **attrs)`: a function of the scalar operands
            that runs several ops. Like `direct` for arrays that stay the same; None where there is none.
    """

    name: str
    rule: str | RuleFunction
    kernel: Kernel
    infer: Infer | None = None
    gradient: Gradient | None = None
    flops: float | Callable[[Op, Rule], int] | None = None
    linear: Groups | Callable[[int, Attrs], Groups] = ()
    reduction: str = "sum"
    reads: Reads | None = None
    operand_mesh: Callable[[Op, int], ProcessMesh] | None = None
    result_mesh: Callable[[Op, int], ProcessMesh] | None = None
    root: Callable[[Op], tuple[tuple[str, ...], int] | None] | None = None
    localize: Callable[[Attrs, Local], Attrs] | None = None
    decompose: Callable[..., Any] | None = None
    inplace: tuple[int, ...] = ()
    view: View = ""
    part: Callable[[Attrs, Shape], tuple[slice, ...] | None] | None = None
    ufunc: str = ""
    cost: str = "memory"
    factors: tuple[int, int] = (0, 1)
    matmul_dims: Callable[[Op], MatmulDims] | None = None
    patches: Callable[[Op], Patches] | None = None
    tiles: Callable[[Op], Tiles] | None = None
    copied: Callable[[Op], int] | None = None
    one_hot: bool = False
    anywhere: bool = False
    traffic: Callable[[Op], int] | None = None
    every_micro_batch: bool = False
    micro: bool = False
    bodies: tuple[str, ...] = ()
    boundary: Callable[[Op], tuple[tuple[ShardSpec, ...], tuple[ShardSpec, ...]]] | None = None
    adds: Kernel | None = None
    direct: Callable[..., tuple[str, tuple[Any, ...], Any] | None] | None = None
    together: Callable[..., Callable[..., None] | None] | None = None
    workspace: Callable[..., int] | None = None
    wide: bool = False


REGISTRY: dict[str, OpDef] = {}


def define(name: str, rule: str | RuleFunction, kernel: Kernel, **fields: Any) -> OpDef:
    """Declare an op kind. Raises GraphError when the name is taken."""
    if name in REGISTRY:
        raise GraphError(f"op {name} is declared twice")
    REGISTRY[name] = OpDef(name, rule, kernel, **fields)
    return REGISTRY[name]


def lookup(kind: str) -> OpDef:
    """Declaration of a kind. Raises GraphError for an unknown one."""
    try:
        return REGISTRY[kind]
    except KeyError:
        raise GraphError(
            f"op kind {kind!r} is not in the registry; declare it with distgraph.ops.define"
        ) from None


def freeze(attr: Any) -> Any:
    """A hashable key for the value of an attribute."""
    if isinstance(attr, np.ndarray):
        return (attr.shape, attr.dtype.str, attr.tobytes())
    if isinstance(attr, (list, tuple)):
        return tuple(freeze(a) for a in attr)
    if isinstance(attr, Mapping):
        return tuple(sorted((k, freeze(v)) for k, v in attr.items()))
    return _ByIdentity(attr) if attr.__hash__ is None or isinstance(attr, Graph) else attr


class _ByIdentity:
    """Key for an object without a hash, such as a subgraph: compares by identity, and keeps it alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.value is self.value


def rule_of(op: Op) -> Rule:
    """The bound index rule of an op: cached on the op, and shared by ops of equal kind, shapes and attrs."""
    if op._rule is not None:
        return op._rule
    # the attrs of a source (perhaps megabytes of data) do not influence its rule
    key = () if op.kind in SOURCES else tuple(sorted((k, freeze(v)) for k, v in op.attrs.items()))
    operands, results = tuple(v.shape for v in op.operands), tuple(v.shape for v in op.results)
    rule = _rule(op.kind, operands, results, key, _Box(op.attrs))
    object.__setattr__(op, "_rule", rule)  # a cache of the other fields: the op stays equal to itself
    return rule


class _Box:
    """Passes attrs through `lru_cache` without being part of its key: all boxes are equal."""

    __slots__ = ("attrs",)

    def __init__(self, attrs: Attrs) -> None:
        self.attrs = attrs

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Box)


@lru_cache(maxsize=65536)
def _rule(kind: str, operands: Shapes, results: Shapes, key: object, box: _Box) -> Rule:
    rule = lookup(kind).rule
    if callable(rule):
        return rule(operands, box.attrs)
    sizes = tuple((k, v) for k, v in box.attrs.items() if isinstance(v, int) and not isinstance(v, bool))
    return bind(rule, operands, results, sizes)


def infer_results(kind: str, operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    """Result shapes and dtypes of an op with these operands. Raises GraphError when they do not fit."""
    declared = lookup(kind)
    if declared.infer is not None:
        return list(declared.infer(operands, attrs))
    shapes = tuple(v.shape for v in operands)
    if callable(declared.rule):
        rule = declared.rule(shapes, attrs)
    else:
        sizes = tuple((k, v) for k, v in attrs.items() if isinstance(v, int) and not isinstance(v, bool))
        rule = bind(declared.rule, shapes, None, sizes)
    dtype = operands[0].dtype
    for value in operands[1:]:
        dtype = promote(dtype, value.dtype)
    return [(tuple(math.prod(rule.sizes[i] for i in dim) for dim in term), dtype) for term in rule.results]


def linear_groups(op: Op) -> Groups:
    """Groups of operands that may be partial(sum) together (see `OpDef.linear`)."""
    declared = lookup(op.kind).linear
    return declared(len(op.operands), op.attrs) if callable(declared) else declared


def operand_layout(op: Op, operand: int, layout: OpLayout | None = None) -> ShardSpec:
    """Layout in which a completed op (or one under `layout`) reads an operand."""
    layout, declared = layout or _completed(op), lookup(op.kind)
    if declared.boundary is not None:
        return declared.boundary(op)[0][operand]
    # linear groups list all operands: computing them for every operand would be quadratic
    return operand_spec(rule_of(op), operand, layout, linear_groups(op) if layout.partial else ())


def operand_mesh(op: Op, operand: int) -> ProcessMesh:
    """Mesh on which a completed op reads an operand."""
    declared = lookup(op.kind).operand_mesh
    return _completed(op).mesh if declared is None else declared(op, operand)


def result_mesh(op: Op, result: int) -> ProcessMesh:
    """Mesh on which a completed op leaves a result."""
    declared = lookup(op.kind).result_mesh
    return _completed(op).mesh if declared is None else declared(op, result)


def result_layout(op: Op, result: int, layout: OpLayout | None = None) -> ShardSpec:
    """Layout in which a completed op (or one under `layout`) leaves a result."""
    declared, layout = lookup(op.kind), layout or _completed(op)
    if declared.boundary is not None:
        return declared.boundary(op)[1][result]
    return result_spec(rule_of(op), result, layout, declared.reduction)


def operand_windows(op: Op, operand: int, layout: OpLayout | None = None) -> Windows:
    """Dims of an operand of which ranks read other positions than their block, with the range of each part.

    Empty where every rank reads exactly its block, as most ops do. See `OpDef.reads`.
    """
    rule = rule_of(op)
    if not rule.sliding:
        return ()
    layout = layout or _completed(op)
    windows = []
    for dim, indices in enumerate(rule.operands[operand]):
        parts = layout.parts(indices[0]) if indices and indices[0] in rule.sliding else 1
        if parts == 1:
            continue
        length = op.operands[operand].shape[dim]
        blocks = layout.mesh.blocks(length, layout.of(indices[0]))
        read = _read_ranges(op, operand, dim, rule, indices[0], layout)
        if read != blocks:
            windows.append((dim, read))
    return tuple(windows)


def _read_ranges(
    op: Op, operand: int, dim: int, rule: Rule, index: str, layout: OpLayout
) -> tuple[tuple[int, int], ...]:
    reads = lookup(op.kind).reads
    if reads is None:
        raise GraphError(f"op {op.kind} slides over index {index} but declares no `reads`")
    carriers = rule.dims_of(index)
    is_result, tensor, dim_of_index = next((c for c in carriers if c[0]), carriers[-1])
    leading = (op.results if is_result else op.operands)[tensor].shape[dim_of_index]
    operand_blocks = layout.mesh.blocks(op.operands[operand].shape[dim], layout.of(index))
    leading_blocks = layout.mesh.blocks(leading, layout.of(index))
    return tuple(
        reads(op, operand, dim, *block) if block[0] < block[1] else (start, start)
        for (start, _), block in zip(operand_blocks, leading_blocks, strict=True)
    )


def window_bounds(
    shape: Shape, mesh: ProcessMesh, spec: ShardSpec, windows: Windows, rank: int
) -> tuple[tuple[int, int], ...]:
    """(start, stop) on every dim of the part that a rank reads: its window, or its block without one."""
    bounds = list(spec.bounds(shape, mesh, rank))
    for dim, read in windows:
        bounds[dim] = read[mesh.index(rank, spec.dims[dim])]
    return tuple(bounds)


def _completed(op: Op) -> OpLayout:
    if op.layout is None:
        raise GraphError(f"{op} has no layout yet; run the pass complete first")
    return op.layout


def flops(op: Op) -> int:
    """Floating point operations of the whole (global) op."""
    declared = lookup(op.kind).flops
    if declared is None:
        return op.results[0].size
    if callable(declared):
        return declared(op, rule_of(op))
    return int(declared * max(v.size for v in op.operands + op.results))


def matmul_dims(op: Op) -> MatmulDims:
    """(batch, m, n, k) of an op with cost matmul."""
    declared = lookup(op.kind)
    if declared.matmul_dims is not None:
        return declared.matmul_dims(op)
    rule = rule_of(op)
    left, right = ({i for dim in rule.operands[factor] for i in dim} for factor in declared.factors)
    result = {i for dim in rule.results[0] for i in dim}

    def size(indices: set[str]) -> int:
        return math.prod(rule.sizes[i] for i in indices)

    batch, m, n = size(left & right & result), size((left & result) - right), size((right & result) - left)
    return batch, m, n, max(1, size(left | right)) // max(1, batch * m * n)


def local_attrs(op: Op, rank: int) -> Attrs:
    """Attributes of a completed op on one rank."""
    declared, layout = lookup(op.kind), _completed(op)
    if declared.localize is None:
        return op.attrs
    return declared.localize(op.attrs, Local(op, rule_of(op), layout, rank, *local_shapes(op, rank)))


def local_shapes(op: Op, rank: int) -> tuple[Shapes, Shapes]:
    """Shapes of the operands that a rank reads, and of the results that it makes."""
    layout = _completed(op)
    windows = (
        window_bounds(v.shape, layout.mesh, operand_layout(op, i), operand_windows(op, i), rank)
        for i, v in enumerate(op.operands)
    )
    read = tuple(tuple(stop - start for start, stop in window) for window in windows)
    made = (result_layout(op, i).local_shape(v.shape, layout.mesh, rank) for i, v in enumerate(op.results))
    return read, tuple(made)


def workspace(kind: str, arrays: Sequence[Any], attrs: Attrs, results: Sequence[Value], *, adds: bool) -> int:
    """Upper bound of the temporary bytes that the NumPy kernel of an op allocates.

    Args:
        kind: of the op.
        arrays: its operands on one rank; shape, dtype and strides are read and nothing else.
        attrs, results: of the op on that rank.
        adds: whether it is computed into a sum over micro-batches, by `OpDef.adds`.
    """
    declared = lookup(kind)
    halves = widened(arrays, [(v.shape, to_numpy(v.dtype)) for v in results])
    if halves and getattr(declared.kernel, "widens", False):
        arrays = [in_f32(x) for x in arrays]
    else:
        halves = 0
    if declared.workspace is None:
        return halves
    attrs = {key: value for key, value in attrs.items() if key != WIDE}
    return halves + declared.workspace(*arrays, **attrs, **({"adds": True} if adds else {}))


def ufunc(name: str) -> Kernel:
    """Kernel that is a NumPy ufunc of the array namespace."""

    def kernel(xp: Any, *arrays: Any, out: Any = None) -> Any:
        return getattr(xp, name)(*arrays, out=out)

    kernel.__name__ = name
    return kernel


def elementwise(shapes: Shapes, attrs: Attrs) -> Rule:
    """Rule of an elementwise op with NumPy broadcasting; one result."""
    return broadcast_rule(shapes, 1)


@lru_cache(maxsize=65536)
def broadcast_rule(shapes: Shapes, results: int) -> Rule:
    """Elementwise rule over broadcast shapes, with several results of the broadcast shape."""
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError:
        text = " and ".join(map(str, shapes))
        raise GraphError(f"shapes {text} do not broadcast; reshape one of them") from None
    letters = tuple(f"i{d}" for d in range(len(shape)))
    terms = []
    for sizes in shapes:
        skip = len(shape) - len(sizes)
        terms.append(tuple((letters[skip + d],) if n == shape[skip + d] else () for d, n in enumerate(sizes)))
    term = tuple((letter,) for letter in letters)
    return make_rule("elementwise", tuple(terms), (term,) * results, dict(zip(letters, shape, strict=True)))
