"""Mixture of experts: top-2 gating, fixed capacity, all in einsums (GShard; Lepikhin et al., 2021, alg. 1).

Dispatch and combine are contractions with a [groups, tokens, experts, capacity] mask, so that experts split
over an axis turn into all_to_all by the index rules alone.
"""

from __future__ import annotations

import math
from typing import Any

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.nn.initializers import Init
from distgraph.nn.module import Module
from distgraph.nn.parameter import Parameter
from distgraph.tracing.tensor import Tensor


class MoE(Module):
    """Each token goes to its two best experts, weighted by their gates.

    A group is one sequence. An expert takes at most `capacity` tokens of a group; tokens beyond that are
    dropped (their output is 0, so use it inside a residual connection). First choices come before second
    ones. The second expert is always used, not at random, so that a run is the same under every layout.

    Args:
        width: of input and output.
        hidden: of each expert.
        experts: their number, at least 2.
        capacity_factor: capacity = ceil(2 * factor * tokens / experts).
        bias: whether experts have biases.

    Attributes:
        loss: after a call, the auxiliary loss that keeps experts equally busy, a scalar to be added with a
            small weight: mean over groups of experts * sum over experts of share of first choices * mean
            gate, so that 1 means evenly busy.

    Parameters: gate [width, experts], up [experts, width, hidden], down [experts, hidden, width]; with biases
        also up_bias [experts, hidden], down_bias [experts, width].
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        capacity_factor: float = 1.0,
        activation: Any = ops.gelu,
        init: Init = ("normal", 0.02),
        dtype: str = "f32",
        bias: bool = False,
    ) -> None:
        if experts < 2:
            raise GraphError(f"MoE has {experts} experts but top-2 gating needs at least 2")
        self.gate = Parameter((width, experts), dtype, init)
        self.up = Parameter((experts, width, hidden), dtype, init)
        self.down = Parameter((experts, hidden, width), dtype, init)
        self.up_bias = Parameter((experts, hidden), dtype, ("zeros",)) if bias else None
        self.down_bias = Parameter((experts, width), dtype, ("zeros",)) if bias else None
        self.experts, self.capacity_factor, self.activation = experts, capacity_factor, activation
        self._loss: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """Auxiliary loss of the latest call. Raises GraphError before the first."""
        if self._loss is None:
            raise GraphError("MoE has no auxiliary loss before it is called; call the module first")
        return self._loss

    def forward(self, x: Any) -> Tensor:
        """x [groups, tokens, width] -> the same shape."""
        gates = ops.softmax(ops.einsum("gsm,me->gse", x, self.gate))
        combine = self._combine(gates)
        dispatch = (ops.stop_gradient(combine) > 0.0).astype(x.dtype)
        routed = ops.einsum("gsec,gsm->egcm", dispatch, x)
        return ops.einsum("gsec,egcm->gsm", combine, self.feed(routed))

    def feed(self, routed: Tensor) -> Tensor:
        """Every expert on its tokens: [experts, groups, capacity, width] -> the same shape."""
        inner = self.activation(_shift(ops.einsum("egcm,emh->egch", routed, self.up), self.up_bias))
        return _shift(ops.einsum("egch,ehm->egcm", inner, self.down), self.down_bias)

    def _combine(self, gates: Tensor) -> Tensor:
        """Weight of every token in every slot of every expert: [groups, tokens, experts, capacity]."""
        tokens = gates.shape[1]
        capacity = max(1, math.ceil(2 * self.capacity_factor * tokens / self.experts))
        first = self._chosen(gates)
        second = self._chosen(ops.where(first > 0.0, -1.0, ops.stop_gradient(gates)))
        self._loss = self._balance(gates, first)
        before = ops.cumsum(first, 1) - first  # earlier tokens of the same group with this expert
        first_counts = ops.reduce("sum", first, 1, True)
        before_second = ops.cumsum(second, 1) - second + first_counts
        weight_first = ops.reduce("sum", gates * first, -1, True)
        weight_second = ops.reduce("sum", gates * second, -1, True)
        share = weight_first + weight_second + 1e-9
        return self._place(first, before, weight_first / share, capacity) + self._place(
            second, before_second, weight_second / share, capacity
        )

    def _chosen(self, gates: Tensor) -> Tensor:
        """1 at the best expert of each token, [groups, tokens, experts]."""
        best = ops.argmax(ops.stop_gradient(gates), -1)  # always in range: "zeros" only avoids the check
        return ops.one_hot(best, self.experts, gates.dtype, outside="zeros")

    def _balance(self, gates: Tensor, first: Tensor) -> Tensor:
        """Auxiliary loss, GShard equation 3: differentiable in the gates; first choices are only counted."""
        return ops.mean(ops.mean(gates, 1) * ops.mean(first, 1)) * float(self.experts**2)

    def _place(self, mask: Tensor, before: Tensor, weight: Tensor, capacity: int) -> Tensor:
        """Weights at (expert, slot); the one-hot row of a slot beyond the capacity is zero."""
        slot = ops.reduce("sum", before * mask, -1).astype("i32")
        slots = ops.one_hot(slot, capacity, mask.dtype, outside="zeros")
        return ops.einsum("gse,gsc->gsec", mask * weight, slots)


def _shift(x: Tensor, bias: Parameter | None) -> Tensor:
    """x [experts, groups, capacity, n] plus bias [experts, n]; x without one."""
    return x if bias is None else x + ops.reshape(bias, (bias.shape[0], 1, 1, bias.shape[1]))
