"""MeshSlice, and the collective algorithm, which is MeshSlice with one slice.

In:   a contraction in one of the dataflows of `product.py`, and a number of slices S.
Out:  for every slice s: the operands that have the sliced letter cut to slice s and gathered, the partial
      product, and where the dataflow sums over an axis a reduce_scatter of it into slice s of the result.
Invariant: the slices are strided by blocks (see `distgraph/ops/blocks.py`), so that on any mesh each rank
      gathers from others what multiplies its own. The communication of slice s + 1 stands before the product
      of slice s, and the result of slice s is read after the product of slice s + 1: both overlap with it.

    OS, 2 slices on mesh (x=2, y=4)
    %c : f32[8, 8] [x, y] = matmul(%a, %b)   ->   %a0 : f32[8, 8] [x, y] = block_slice(%a) {index=0, ...}
                                                  %A0 : f32[8, 8] [x, _] = reshard(%a0)      # all_gather(y)
                                                  %b0 : ..., %B0 : f32[8, 8] [_, y] = reshard(%b0)
                                                  %a1, %A1, %b1, %B1
                                                  %c0 : f32[8, 8] [x, y] = einsum(%A0, %B0)
                                                  %c  : f32[8, 8] [x, y] = einsum_add(%c0, %A1, %B1)

Source: Nam et al., "MeshSlice" (2025), section 3.1, figure 5; the collective algorithm: figure 2b.
"""

from __future__ import annotations

from typing import Any

from distgraph.ir.graph import Value
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.passes.matmul_algorithms.product import Product, check_slices, largest_block
from distgraph.passes.matmul_algorithms.registry import register_matmul_algorithm


@register_matmul_algorithm("collective")
def collective(product: Product, algorithm: MatmulAlgorithm) -> None:
    """Gather whole operands, multiply, and scatter the sums: no overlap."""
    meshslice(product, MatmulAlgorithm("collective"))


@register_matmul_algorithm("meshslice", options=("slices", "block"))
def meshslice(product: Product, algorithm: MatmulAlgorithm) -> None:
    """Compute a contraction slice by slice.

    Raises:
        ShardingError: a shard of the sliced dim does not divide by slices x block.
    """
    slices = algorithm.slices
    block = algorithm.block or largest_block(product, slices)
    check_slices(product, slices, block)
    compute_in_slices(Slices(product, slices, block))


def compute_in_slices(cut: Slices) -> None:
    """Compute a contraction slice by slice, with the communication of one under the product of another."""
    product, count = cut.product, cut.slices
    ready = cut.operands(0)
    total: Value | None = None
    scattered: Value | None = None
    for index in range(count):
        following = cut.operands(index + 1) if index + 1 < count else ready
        last = index + 1 == count
        if product.sliced in product.letters[2]:
            made = product.multiply(*ready, f"product{index}")
            arriving = cut.scatter(made, index)
            if scattered is not None:
                total = cut.insert(total, scattered, index - 1)
            scattered = arriving
        else:
            total = product.multiply(*ready, "" if last else f"sum{index}", total)
        ready = following
    if scattered is not None:
        cut.insert(total, scattered, count - 1, last=True)


class Slices:
    """Cuts the operands of a product, and puts its result together."""

    def __init__(self, product: Product, slices: int, block: int) -> None:
        self.product, self.slices, self.block = product, slices, block
        self.stored = [product.stored_on(product.mesh, which) for which in range(3)]

    def attrs(self, letters: str, index: int) -> dict[str, Any]:
        """Attributes of the ops that cut a tensor with these letters, or insert into it."""
        dim = letters.index(self.product.sliced)
        return {"dim": dim, "index": index, "slices": self.slices, "block": self.block}

    def operands(self, index: int) -> tuple[Value, Value]:
        """Both operands for one slice, as the partial product reads them."""
        left, right = (self._operand(position, index) for position in (0, 1))
        return left, right

    def _operand(self, position: int, index: int) -> Value:
        product, letters = self.product, self.product.letters[position]
        value, name = product.op.operands[position], f"{'ab'[position]}{index}"
        if product.sliced in letters and self.slices > 1:
            value = self.cut(position, index, name)
        needed = product.layout(letters, product.computed_axes())
        if needed.spec == product.attrs.get(value.name, self.stored[position]).spec:
            return value
        return product.reshard(value, needed, f"{name}.gathered")

    def cut(self, position: int, index: int, name: str) -> Value:
        """A slice of an operand."""
        value, attrs = self.product.op.operands[position], self.attrs(self.product.letters[position], index)
        return self.product.follow("block_slice", [value], self.stored[position], name, **attrs)

    def scatter(self, made: Value, index: int) -> Value:
        """A partial product as the result is stored."""
        if self.product.flow.reduced is None:
            return made
        return self.product.reshard(made, self.stored[2], f"scattered{index}")

    def insert(self, total: Value | None, part: Value, index: int, *, last: bool = False) -> Value:
        """The result with one more slice."""
        product = self.product
        attrs = self.attrs(product.letters[2], index)
        name = "" if last else f"result{index}"
        if total is None and self.slices == 1:
            return product.follow("identity", [part], self.stored[2], name)
        if total is None:
            return product.follow("block_expand", [part], self.stored[2], name, **attrs)
        return product.follow("block_insert", [total, part], self.stored[2], name, **attrs)
