"""What there is to do in one op on one rank: FLOPs and bytes from its local shapes.

*In:* an op with the shapes of one rank. *Out:* `Work`, which `ComputeCost` turns into seconds. *Invariant:*
an op costs what its kernel does: operands are read once, of a table only the rows that are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distgraph.ir.graph import Op
from distgraph.ir.op_registry import flops, lookup, rule_of
from distgraph.kernels.conv import window_of
from distgraph.resources.compute_cost import Dims, Patches


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
    """

    kind: str
    flops: float = 0.0
    nbytes: float = 0.0
    dtype: str = "f32"
    dims: Dims = (1, 1, 1, 1)
    op: str = ""
    patches: Patches = (0.0, 0.0)

    @property
    def amounts(self) -> tuple[str, float, float, str, Dims, str, Patches]:
        """What `ComputeCost.time` asks for."""
        return self.kind, self.flops, self.nbytes, self.dtype, self.dims, self.op, self.patches


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
    count = flops(op)
    kind = op.kind + "+=" if adds else op.kind
    return Work("matmul", count, total, dtype, _dims(op, count), kind, _patches(op))


def _is_located(op: Op, operand: int) -> bool:
    rule = rule_of(op)
    return any(index in rule.located for dim in rule.operands[operand] for index in dim)


def _dims(op: Op, count: int) -> Dims:
    """(batch, m, n, k) of a contraction."""
    if op.kind.startswith("conv"):
        return _convolution(op, count)
    if op.kind.startswith("attention"):
        q, k = (
            (op.operands[1], op.operands[2])
            if op.kind == "attention_grad"
            else (op.operands[0], op.operands[1])
        )
        return math.prod(q.shape[:2]), q.shape[2], k.shape[2], q.shape[3]
    rule = rule_of(op)
    factors = rule.operands[1:] if op.kind == "einsum_add" else rule.operands[:2]
    left, right = ({i for dim in term for i in dim} for term in factors)
    result = {i for dim in rule.results[0] for i in dim}

    def size(indices: set[str]) -> int:
        return math.prod(rule.sizes[i] for i in indices)

    batch, m, n = size(left & right & result), size((left & result) - right), size((right & result) - left)
    return batch, m, n, max(1, size(left | right)) // max(1, batch * m * n)


def _patches(op: Op) -> Patches:
    """Of a convolution, whose input may be its own patches; nothing of other contractions."""
    if not op.kind.startswith("conv"):
        return 0.0, 0.0
    first, second, result = (value.shape for value in (*op.operands, op.result))
    inputs, kernel, outputs = {
        "conv": (first, second, result),
        "conv_grad_input": (result, second, first),
        "conv_grad_weight": (first, result, second),
    }[op.kind]
    if not all(map(math.prod, (first, second, result))):
        return 0.0, 0.0  # a block of nothing, or of padding alone
    sides = (op.attrs[name] for name in ("stride", "padding", "dilation"))
    window = window_of(op.kind, inputs[2:], kernel[2:], *sides)
    if op.kind == "conv" and window.plain:
        return 0.0, 0.0
    elements = math.prod(inputs[:2]) * math.prod(kernel[2:]) * math.prod(outputs[2:])
    return float(elements), elements / outputs[-1]


def _convolution(op: Op, count: int) -> Dims:
    """A convolution as the matmul of its patches."""
    if op.kind == "conv_grad_weight":
        m, n = op.result.shape[0], math.prod(op.result.shape[1:])
    else:
        m, n = op.result.shape[0] * math.prod(op.result.shape[2:]), op.result.shape[1]
    return 1, m, n, max(1, round(count / (2 * max(1, m * n))))
