"""Linear layers and products of matrices."""

from __future__ import annotations

import math
from typing import Any

from distgraph import ops
from distgraph.frontends.torch.rule_registry import aten

_LETTERS = "abcdefghij"


@aten("linear.default")
def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """x [..., k], weight [n, k]: the weight is contracted as it is stored, not transposed first."""
    if weight.ndim == 1:
        y = ops.matmul(x, weight)
        return y if bias is None else y + bias
    lead = _LETTERS[: x.ndim - 1]
    y = ops.einsum(f"{lead}z,yz->{lead}y", x, weight)
    return y if bias is None else y + bias


@aten("matmul.default", "mm.default", "bmm.default", "mv.default", "dot.default")
def _matmul(x: Any, y: Any) -> Any:
    return ops.matmul(x, y)


@aten("addmm.default", "baddbmm.default", "addmv.default", operands="result")
def _add_matmul(bias: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    product = ops.matmul(x, y)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


@aten("einsum.default")
def _einsum(equation: str, operands: Any, path: Any = None) -> Any:
    return ops.einsum(equation.replace(" ", ""), *operands)


aten("outer.default")(ops.outer)


@aten("bilinear.default", "_trilinear_bilinear.default")
def _bilinear(x: Any, y: Any, weight: Any, bias: Any = None) -> Any:
    """x [..., i], y [..., j], weight [o, i, j]."""
    lead = _LETTERS[: x.ndim - 1]
    z = ops.einsum(f"{lead}x,zxy,{lead}y->{lead}z", x, weight, y)
    return z if bias is None else z + bias


@aten("_cdist_forward.default", "cdist.default", "_euclidean_dist.default")
def _distances(x: Any, y: Any, p: float = 2.0, compute_mode: Any = None) -> Any:
    """Distances in the p-norm of all pairs of rows; their gradient at 0 is 0, as in torch."""
    apart = ops.absolute(ops.expand_dims(x, -2) - ops.expand_dims(y, -3))
    if p == 1.0:
        return ops.reduce("sum", apart, -1)
    if p == math.inf:
        return ops.reduce("max", apart, -1)
    if p == 0.0:
        return ops.reduce("sum", ops.cast(ops.not_equal(apart, 0), x.dtype), -1)
    total = ops.reduce("sum", ops.square(apart) if p == 2.0 else apart**p, -1)
    zero = ops.equal(total, 0)
    total = ops.where(zero, 1, total)
    return ops.where(zero, 0, ops.sqrt(total) if p == 2.0 else total ** (1 / p))
