"""What there is to do in one op on one rank: FLOPs and bytes from its local shapes.

*In:* an op with the shapes of one rank. *Out:* `Work`, which `ComputeCost` turns into seconds. *Invariant:*
an op costs what its kernel does: operands are read once, of a table only the rows that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distgraph.ir.graph import Op
from distgraph.ir.op_registry import (
    MatmulDims,
    Patches,
    Tiles,
    flops,
    local_attrs,
    local_shapes,
    lookup,
    matmul_dims,
    rule_of,
)


@dataclass(frozen=True, slots=True)
class Work:
    """What an op does on one rank.

    Attributes:
        kind: matmul, memory, lookup, launch; "none" for what is only a name for memory.
        flops: floating point operations.
        nbytes: bytes read and written.
        dtype: of the first operand.
        dims: (batch, m, n, k) of a matmul, else ones.
        op: kind of the op, with "+=" where it is a kernel that adds to what is there; "" for a copy.
        patches: of a convolution: elements, and rows, of what is copied out of its input to be multiplied, or
            added to its gradient.
        copied: elements that a contraction copies, as they are not in the order in which they are multiplied.
        tiles: of a convolution that compiled loops of the CPU compute: FLOPs of whole tiles, elements that
            are copied for them, number of tiles.
    """

    kind: str
    flops: float = 0.0
    nbytes: float = 0.0
    dtype: str = "f32"
    dims: MatmulDims = (1, 1, 1, 1)
    op: str = ""
    patches: Patches = (0.0, 0.0)
    copied: float = 0.0
    tiles: Tiles = (0.0, 0.0, 0.0)

    @property
    def amounts(self) -> tuple[str, float, float, str, MatmulDims, str, Patches, float, Tiles]:
        """What `ComputeCost.time` asks for."""
        windows = self.patches, self.copied, self.tiles
        return self.kind, self.flops, self.nbytes, self.dtype, self.dims, self.op, *windows


NOTHING = Work("none")


def work_of(op: Op, read: Sequence[int], adds: bool = False) -> Work:
    """Work of an op whose values have the shapes of one rank.

    Args:
        op: with local shapes and attributes.
        read: bytes in memory behind each operand.
        adds: whether the result is added to what is there already.
    """
    declared = lookup(op.kind)
    written = sum(v.nbytes for v in op.results)
    dtype = op.operands[0].dtype if op.operands else op.results[0].dtype
    if declared.cost == "launch" or written == 0:
        return Work("launch", dtype=dtype, op=op.kind)
    if declared.cost == "lookup":
        read = tuple(
            min(size, written) if _is_located(op, i) else size for i, size in enumerate(read)
        )  # rows that nobody asks for are not read
    total = sum(read) + written * (2 if adds else 1)
    if declared.traffic is not None:
        total = declared.traffic(op)
    if declared.cost != "matmul" or len(op.operands) == 1:
        kind = "lookup" if declared.cost == "lookup" else "memory"
        return Work(kind, 0.0, total, dtype, op=op.kind)
    patches = (0.0, 0.0) if declared.patches is None else declared.patches(op)
    copied = 0.0 if declared.copied is None else declared.copied(op)
    tiles = (0.0, 0.0, 0.0) if declared.tiles is None else declared.tiles(op)
    kind = op.kind + "+=" if adds else op.kind
    return Work("matmul", flops(op), total, dtype, matmul_dims(op), kind, patches, copied, tiles)


def local_work(op: Op, rank: int) -> Work:
    """Work of a completed op on one rank, which reads each operand once from memory of its own."""
    read, made = local_shapes(op, rank)
    operands, results = (
        tuple(replace(value, shape=shape) for value, shape in zip(values, shapes, strict=True))
        for values, shapes in ((op.operands, read), (op.results, made))
    )
    local = replace(op, operands=operands, results=results, attrs=local_attrs(op, rank), layout=None)
    return work_of(local, [value.nbytes for value in operands])


def _is_located(op: Op, operand: int) -> bool:
    rule = rule_of(op)
    return any(index in rule.located for dim in rule.operands[operand] for index in dim)
