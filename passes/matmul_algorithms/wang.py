"""Wang's algorithm: one matrix goes round a ring of ranks, the other that moves does so as a whole.

In:   a contraction in one of the dataflows of `product.py`.
Out:  one matrix goes round its axis of P ranks in P - 1 steps, each of which
      sends a block to a neighbour while the block before it is multiplied; the matrix of the other direction
      is gathered before them, or scattered behind them, by one collective.
Invariant: in step t a rank at position j has block j + t of what goes round: the same tensor, on the mesh
      with its ranks in another order. A step from one order to the next is a transfer between neighbours, and
      products read their operands where they are stored (`distgraph/ops/ring_products.py`).

    OS, A goes round y on mesh (x=2, y=2)
    %c : [x, y] = matmul(%a, %b)   ->   %B  : [_, y] = reshard(%b)                          # all_gather(x)
                                        %a1 : [x, y] on mesh(1,0,3,2) = reshard(%a)           # to a neighbour
                                        %c0 : [x, y] = ring_einsum(%a, %B) {shift=0}
                                        %c  : [x, y] = ring_einsum_add(%c0, %a1, %B) {shift=1}

A result that goes round collects the products of the ranks that it visits, and arrives where it is stored.

Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models", ASPLOS 2022; Nam et al., "MeshSlice" (2025), section 2.3.4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from distgraph.errors import ShardingError
from distgraph.ir.graph import Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr
from distgraph.passes.matmul_algorithms.layer_products import nearest_multiples
from distgraph.passes.matmul_algorithms.product import Product
from distgraph.passes.matmul_algorithms.registry import register_matmul_algorithm


@dataclass(frozen=True, slots=True)
class Movement:
    """A matrix that moves along an axis.

    Attributes:
        tensor: 0 for A and 1 for B, which are gathered; 2 for C, which is scattered.
        axis: of the mesh.
        elements: that one rank sends.
        outer: letter whose blocks stay where they are along the axis.
        inner: letter whose blocks go round.
    """

    tensor: int
    axis: str
    elements: float
    outer: str
    inner: str


def movements(product: Product) -> list[Movement]:
    """The matrices that move, those that send most first.

    Raises:
        ShardingError: the ranks along an axis do not divide a dim that it splits.
    """
    rings = []
    for tensor in (0, 1, 2):
        computed = product.computed_axes()
        for inner, axis in product.stored_axes(tensor).items():
            if tensor < 2 and computed.get(inner) == axis:
                continue
            if tensor == 2 and axis != product.flow.reduced:
                continue
            outer = next(letter for letter, other in computed.items() if other == axis)
            if tensor == 2:
                outer, inner = inner, outer
            values = (*product.op.operands, product.op.result)
            parts = product.parts(axis)
            blocks = product.mesh.count(other for dim in product.specs[tensor].dims for other in dim)
            sent = values[tensor].size * (parts - 1) / blocks
            rings.append(Movement(tensor, axis, sent, outer, inner))
    for movement in rings:
        _check(product, movement)
    return sorted(rings, key=lambda movement: -movement.elements)


def _check(product: Product, movement: Movement) -> None:
    parts = product.parts(movement.axis)
    for letter in (movement.outer, movement.inner):
        length = product.length(letter)
        if length % parts:
            raise ShardingError(
                f"{product.subject}: blocks that go round {parts} ranks along {movement.axis} need dims of a "
                f"multiple of {parts} but dim {letter} of {product.spec} has length {length}; use "
                f"{nearest_multiples(length, parts)}"
            )


@register_matmul_algorithm("wang", options=("ring",))
def wang(product: Product, algorithm: MatmulAlgorithm) -> None:
    """Compute a contraction with one movement as a ring of SendRecvs under its partial products.

    That is the movement along the axis that the algorithm names, else the one that sends more bytes.

    Raises:
        ShardingError: the ranks along an axis do not divide a dim that it splits; no matrix moves along the
            axis that is to be the ring.
    """
    ring_moves = movements(product)
    ring = next((each for each in ring_moves if algorithm.ring in (None, each.axis)), None)
    if ring is None:
        axes = sorted({each.axis for each in ring_moves})
        raise ShardingError(
            f"{product.subject}: algorithm {algorithm} has a ring along {algorithm.ring} but matrices move "
            f"along {', '.join(axes)}; use one of these"
        )
    if ring.tensor == 2:
        _scatter_round(product, ring)
    else:
        _gather_round(product, ring)


def turned(product: Product, axis: str, step: int) -> ProcessMesh:
    """The mesh on which the rank at position j along an axis holds block j + step."""
    parts = product.parts(axis)
    return product.mesh.reordered((axis,), [(block - step) % parts for block in range(parts)])


def _operand(product: Product, tensor: int) -> Value:
    """An operand as the products read it: gathered where it is not the one that goes round."""
    value, letters = product.op.operands[tensor], product.letters[tensor]
    needed = product.layout(letters, product.computed_axes())
    if needed.spec == product.specs[tensor]:
        return value
    return product.reshard(value, needed, f"{'ab'[tensor]}.gathered")


def _computed(product: Product, ring: Movement, mesh: ProcessMesh) -> OpLayout:
    axes = {f"i{letter}": (axis,) for letter, axis in product.computed_axes().items() if axis != ring.axis}
    axes["q"] = (ring.axis,)
    return product.computed(axes, mesh, prefix="i")


def _gather_round(product: Product, ring: Movement) -> None:
    """An operand goes round: its blocks are multiplied as they arrive."""
    parts, flow = product.parts(ring.axis), product.flow
    moving = product.op.operands[ring.tensor]
    other = _operand(product, 1 - ring.tensor)
    collects = ring.inner in product.letters[2]  # else every product adds to the result
    axes = product.computed_axes()
    if collects:
        axes = {letter: axis for letter, axis in axes.items() if letter != ring.inner}
    made = product.layout(product.letters[2], axes, flow.reduced)
    total: Value | None = None
    blocks: list[Value] = []
    for step in range(parts):
        following = moving
        if step + 1 < parts:
            there = product.stored_on(turned(product, ring.axis, step + 1), ring.tensor)
            following = product.move(moving, there, f"{'ab'[ring.tensor]}{step + 1}")
        pair = [moving, other] if ring.tensor == 0 else [other, moving]
        last = step + 1 == parts and not collects
        total = product.emit(
            "ring_einsum" if total is None or collects else "ring_einsum_add",
            pair if total is None or collects else [total, *pair],
            made,
            _computed(product, ring, product.mesh),
            "" if last else f"product{step}",
            **_attrs(product, ring, step, whole=ring.inner),
        )
        blocks.append(total)
        moving = following
    if collects:
        _join(product, ring, blocks, made)


def _attrs(product: Product, ring: Movement, shift: int, *, whole: str) -> dict[str, str | int]:
    parts = product.parts(ring.axis)
    return {
        "spec": product.spec,
        "outer": ring.outer,
        "inner": ring.inner,
        "whole": whole,
        "parts": parts,
        "shift": shift % parts,
    }


def _join(product: Product, ring: Movement, blocks: list[Value], made: DistAttr) -> None:
    """The result of its blocks, scattered where it is a sum."""
    letters, scattered = product.letters[2], product.flow.reduced is not None
    joined = product.follow(
        "ring_join",
        blocks,
        made,
        "joined" if scattered else "",
        outer=letters.index(ring.outer),
        inner=letters.index(ring.inner),
    )
    if scattered:
        stored = replace(made, spec=product.specs[2])
        product.reshard(joined, stored, "")


def _scatter_round(product: Product, ring: Movement) -> None:
    """The result goes round: every rank adds its product to the block that arrives."""
    parts = product.parts(ring.axis)
    pair = [_operand(product, tensor) for tensor in (0, 1)]
    total: Value | None = None
    for step in reversed(range(parts)):
        mesh = turned(product, ring.axis, step)
        there = product.stored_on(mesh, 2)
        arriving = None if total is None else product.reshard(total, there, f"arriving{step}")
        last = step == 0
        alone = last and arriving is None
        made = product.emit(
            "ring_einsum",
            pair,
            there,
            _computed(product, ring, mesh),
            "" if alone else f"product{step}",
            **_attrs(product, ring, -step, whole=ring.outer),
        )
        total = made
        if arriving is not None:
            total = product.follow("add", [arriving, made], there, "" if last else f"sum{step}")
