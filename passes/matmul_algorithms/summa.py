"""SUMMA: panels of the operands are broadcast, panels of the result are reduced to the ranks that store them.

In:   a contraction in one of the dataflows of `product.py`, on a mesh of rows x cols ranks.
Out:  the sliced dim in lcm(rows, cols) panels, each stored in one row or column of ranks. For every panel: a
      broadcast of each operand with the sliced letter, the partial product, and if the dataflow sums over an
      axis, a reduce of it to the ranks that store this panel of the result.
Invariant: as in `meshslice.py`, the communication of a panel stands before the product of the panel before
      it, and its result is read after the product of the next panel.

    OS on mesh (x=2, y=2)
    %c : [x, y] = matmul(%a, %b)   ->   %a0 : [x, _] partial(y) = block_slice(%a) {index=0, slices=2, ...}
                                        %A0 : [x, _]            = comm.broadcast(%a0) {axes=("y",), root=0}
                                        %b0 : [_, y] partial(x), %B0 : [_, y]
                                        %a1, %A1, %b1, %B1
                                        %c0 : [x, y]            = einsum(%A0, %B0)
                                        %c  : [x, y]            = einsum_add(%c0, %A1, %B1)

A rank sends a panel whole, so that it sends P / (P - 1) times what it sends in an all_gather of P ranks.

Source: van de Geijn and Watts, "SUMMA: Scalable Universal Matrix Multiplication Algorithm", 1997; Nam et al.,
"MeshSlice" (2025), section 2.3.3, figure 3.
"""

from __future__ import annotations

import math

from distgraph.errors import ShardingError
from distgraph.ir.graph import Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.sharding_spec import DistAttr
from distgraph.passes.matmul_algorithms.layer_products import nearest_multiples
from distgraph.passes.matmul_algorithms.meshslice import Slices, compute_in_slices
from distgraph.passes.matmul_algorithms.product import Product
from distgraph.passes.matmul_algorithms.registry import register_matmul_algorithm


@register_matmul_algorithm("summa")
def summa(product: Product, algorithm: MatmulAlgorithm) -> None:
    """Compute a contraction panel by panel.

    Raises:
        ShardingError: lcm(rows, cols) does not divide the dim that is cut into panels.
    """
    panels, length = math.lcm(*product.sizes), product.length(product.sliced)
    if length % panels:
        raise ShardingError(
            f"{product.subject}: summa on {product.mesh} has {panels} panels but dim {product.sliced} of "
            f"{product.spec} has length {length}; use a multiple of {panels} such as "
            f"{nearest_multiples(length, panels)}"
        )
    compute_in_slices(_Panels(product, panels, length // panels))


class _Panels(Slices):
    """Cuts the operands of a product into panels, each of which is on one position along an axis."""

    def _root(self, axis: str, index: int) -> int:
        return index * self.product.parts(axis) // self.slices

    def cut(self, position: int, index: int, name: str) -> Value:
        """A panel of an operand, on all ranks that multiply it."""
        product, letters = self.product, self.product.letters[position]
        axes = product.stored_axes(position)
        split = {
            "s" if letter == product.sliced else f"i{dim}": (axes[letter],)
            for dim, letter in enumerate(letters)
            if letter in axes
        }
        data = {
            f"i{dim}": product.data[letter] for dim, letter in enumerate(letters) if letter in product.data
        }
        axis = axes.pop(product.sliced, None)
        panel = product.emit(
            "block_slice",
            [product.op.operands[position]],
            product.layout(letters, axes, axis),
            OpLayout(product.mesh, tuple(sorted({**split, **data}.items()))),
            name,
            **self.attrs(letters, index),
        )
        if axis is None:
            return panel
        return self._rooted("comm.broadcast", panel, product.layout(letters, axes), axis, index)

    def scatter(self, made: Value, index: int) -> Value:
        """A partial product on the ranks that store its panel of the result."""
        product = self.product
        if product.flow.reduced is None:
            return made
        summed = product.layout(product.letters[2], product.computed_axes())
        return self._rooted("comm.reduce", made, summed, product.flow.reduced, index)

    def _rooted(self, kind: str, value: Value, attr: DistAttr, axis: str, index: int) -> Value:
        name = value.name.removeprefix(f"{self.product.op.name}.")
        return self.product.emit(
            kind,
            [value],
            attr,
            OpLayout(self.product.mesh),
            f"{name}.{'everywhere' if kind == 'comm.broadcast' else 'reduced'}",
            axes=(axis,),
            root=self._root(axis, index),
            reduction="sum",
        )
