"""Cannon's algorithm: blocks of both matrices that move go from neighbour to neighbour on a square mesh.

In:   a contraction in dataflow OS, LS or RS on a mesh of P x P ranks.
Out:  P products of blocks. In OS both operands are skewed, so that every rank has two blocks that belong
      together, and before each further product all blocks move to a neighbour, A along a row and B along a
      column. In LS and RS one operand is skewed and moves so, and so does the result, to which each rank adds
      its product, until it moves to where it is stored.
Invariant: a skew and a move leave the tensor as it is, on the mesh with its ranks in another order; products
      read their operands there (`distgraph/ops/blocks/skewed.py`). The next move stands before the product
      that hides it.

    OS on mesh (x=2, y=2)
    %c : [x, y] = matmul(%a, %b)   ->   %a0 : [x, y] on ranks 0, 1, 3, 2 = reshard(%a)
                                        %b0 : [x, y] on ranks 0, 3, 2, 1 = reshard(%b)
                                        %a1, %b1                                             # to neighbours
                                        %c0 : [x, y] = skewed_einsum(%a0, %b0) {shift=0}
                                        %c  : [x, y] = skewed_einsum_add(%c0, %a1, %b1) {shift=1}

Of every matrix that moves, P x (P - 1) ranks send a block to skew it, and all ranks send one in each of the
P - 1 moves.

Source: Cannon, "A Cellular Computer to Implement the Kalman Filter Algorithm", 1969; Nam et al., "MeshSlice"
(2025), section 2.3.2.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distgraph.errors import ShardingError
from distgraph.ir.graph import Op, Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import operand_mesh
from distgraph.ir.sharding_spec import DistAttr
from distgraph.passes.matmul_algorithms.layer_products import nearest_multiples
from distgraph.passes.matmul_algorithms.product import Product
from distgraph.passes.matmul_algorithms.registry import register_matmul_algorithm

_SIGNS = {"OS": (1, 1, -1), "LS": (-1, 1, 1), "RS": (1, -1, 0)}
"""Dataflow -> signs of the skew (see `skewed.py`), and the operand whose dims are split by exchanged axes."""


@register_matmul_algorithm("cannon")
def cannon(product: Product, algorithm: MatmulAlgorithm) -> None:
    """Compute a contraction by blocks that move between neighbours.

    Raises:
        ShardingError: the mesh is not square, or does not divide a dim of the contraction.
    """
    _check(product)
    square = _Square(product)
    if product.flow.name == "OS":
        square.move_operands()
    else:
        square.move_result()


def _check(product: Product) -> None:
    shape = product.sizes
    if product.flow.name not in _SIGNS or len(shape) != 2 or shape[0] != shape[1]:
        side = max(2, math.isqrt(product.mesh.size))
        raise ShardingError(
            f"{product.subject}: cannon needs a square mesh of two axes but {product.mesh} is "
            f"{' x '.join(map(str, product.mesh.shape))}; use {side} x {side}, or algorithm meshslice"
        )
    for letter in sorted(product.split_letter.values()):
        length, parts = product.length(letter), shape[0]
        if length % parts:
            raise ShardingError(
                f"{product.subject}: cannon on {product.mesh} needs dims that are multiples of {parts} but "
                f"dim {letter} of {product.spec} has length {length}; use {nearest_multiples(length, parts)}"
            )


class _Square:
    """The products of blocks of one contraction."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.row_sign, self.col_sign, self.exchanged = _SIGNS[product.flow.name]
        rows, cols = product.split[2]["m"], product.split[2]["n"]
        assert rows is not None
        assert cols is not None
        self.axes = rows, cols
        self.parts = product.parts(rows)

    def attrs(self, shift: int) -> dict[str, Any]:
        split = self.product.split_letter
        return {
            "spec": self.product.spec,
            "rows": split["m"],
            "inner": split["k"],
            "cols": split["n"],
            "parts": self.parts,
            "row_sign": self.row_sign,
            "col_sign": self.col_sign,
            "exchanged": self.exchanged,
            "shift": shift % self.parts,
        }

    def multiply(
        self, shift: int, pair: list[Value], attr: DistAttr, name: str, total: Value | None = None
    ) -> Value:
        """The product of one block on every rank."""
        kind = "skewed_einsum" if total is None else "skewed_einsum_add"
        operands = pair if total is None else [total, *pair]
        layout = self._layout(attr.mesh)
        return self.product.emit(kind, operands, attr, layout, name, **self.attrs(shift))

    def _layout(self, mesh: ProcessMesh) -> OpLayout:
        rows, cols = self.axes
        return self.product.computed({"q0": (rows,), "q1": (cols,)}, mesh, prefix="i")

    def mesh(self, operand: int, shift: int, mesh: ProcessMesh) -> ProcessMesh:
        """Mesh on which a product with some shift, computed on a mesh, reads an operand."""
        op, layout = self.product.op, self._layout(mesh)
        computed = Op("skewed_einsum", op.operands, op.results, self.attrs(shift), layout=layout)
        return operand_mesh(computed, operand)

    def moved(self, value: Value, operand: int, shift: int, mesh: ProcessMesh) -> Value:
        """An operand, or what it was before, where a product with some shift reads it."""
        attr = self.product.stored_on(self.mesh(operand, shift, mesh), operand)
        return self.product.move(value, attr, f"{'ab'[operand]}{shift}")

    def move_operands(self) -> None:
        """OS: the result stays, and both operands move."""
        product, mesh = self.product, self.product.mesh
        stored = product.stored_on(mesh, 2)
        pair = [self.moved(value, which, 0, mesh) for which, value in enumerate(product.op.operands)]
        total: Value | None = None
        for shift in range(self.parts):
            last = shift + 1 == self.parts
            following = (
                pair if last else [self.moved(pair[which], which, shift + 1, mesh) for which in (0, 1)]
            )
            total = self.multiply(shift, pair, stored, "" if last else f"sum{shift}", total)
            pair = following

    def move_result(self) -> None:
        """LS and RS: one operand stays, and the other one and the result move.

        The result is computed on the mesh on which the operand that stays is stored as the product reads it;
        it begins with shift P - 1 and ends with shift 0, in which all is where it is stored but for the skew.
        """
        product = self.product
        stays = 0 if product.flow.name == "LS" else 1
        moving, which = product.op.operands[1 - stays], 1 - stays
        total: Value | None = None
        meshes = [self._result_mesh(stays, shift) for shift in range(self.parts)]
        value = self.moved(moving, which, self.parts - 1, meshes[-1])
        for shift in reversed(range(self.parts)):
            attr = product.stored_on(meshes[shift], 2)
            following = value
            if shift:
                following = self.moved(value, which, shift - 1, meshes[shift - 1])
            arriving = None if total is None else product.reshard(total, attr, f"arriving{shift}")
            pair = [product.op.operands[stays], value] if stays == 0 else [value, product.op.operands[stays]]
            total = self.multiply(shift, pair, attr, f"product{shift}")
            if arriving is not None:
                total = product.follow("add", [arriving, total], attr, f"sum{shift}")
            value = following
        assert total is not None
        product.reshard(total, product.stored_on(product.mesh, 2), "")

    def _result_mesh(self, stays: int, shift: int) -> ProcessMesh:
        """The mesh of a product that reads the operand that stays where it is stored."""
        mesh = self.product.mesh
        there = self.mesh(stays, shift, mesh)
        order = [mesh.members[there.members.index(rank)] for rank in mesh.members]
        return mesh.renumbered(np.array(order).reshape(mesh.shape))
