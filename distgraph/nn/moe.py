"""Mixture of experts: top-k gating, fixed capacity, all in einsums (GShard; Lepikhin et al., 2021, alg. 1).

Dispatch and combine are contractions with a [groups, tokens, experts, capacity] mask, so that experts split
over an axis turn into all_to_all by the index rules alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from distgraph import ops
from distgraph.errors import GraphError, ShardingError
from distgraph.errors.arguments import Count, Positive, checked_arguments
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import UserDim
from distgraph.nn.initializers import Init
from distgraph.nn.module import Module
from distgraph.nn.parameter import Parameter
from distgraph.tracing.annotations import reshard, shard_tensor
from distgraph.tracing.tensor import Tensor


@checked_arguments()
class MoE(Module):
    """Each token goes to its `top_k` best experts, weighted by their gates.

    A group is one sequence. An expert takes at most `capacity` tokens of a group; tokens beyond that are
    dropped (their output is 0, so use it inside a residual connection). First choices come before second
    ones, and so on. Every choice is used, not at random, so that a run is the same under every layout.

    Args:
        width: of input and output.
        hidden: of each expert.
        experts: their number, at least 2.
        capacity_factor: capacity = ceil(top_k * factor * tokens / experts).
        bias: whether experts have biases.
        top_k: experts of a token: 1 (Switch Transformer; Fedus et al., 2021), 2 (GShard) or more.
        normalize: whether the weights of the experts of a token are divided by their sum. By default they are
            with several experts; the weight of a single one is its gate, which has a gradient.

    Attributes:
        loss: after a call, the auxiliary loss that keeps experts equally busy, a scalar to be added with a
            small weight: mean over groups of experts * sum over experts of share of first choices * mean
            gate, so that 1 means evenly busy.
        dropped: after a call, the share of choices that found their expert full, a scalar for a metric.

    Parameters: gate [width, experts], up [experts, width, hidden], down [experts, hidden, width]; with biases
        also up_bias [experts, hidden], down_bias [experts, width].

    Example:
        `moe = nn.MoE(512, 2048, 8, 1.25, top_k=1).split_experts(mesh, "ep", batch=("dp", "ep"))`
    """

    def __init__(
        self,
        width: Count,
        hidden: Count,
        experts: Count,
        capacity_factor: Positive = 1.0,
        activation: Callable[..., Any] = ops.gelu,
        init: Init = ("normal", 0.02),
        dtype: Any = "f32",
        bias: bool = False,
        *,
        top_k: Count = 2,
        normalize: bool | None = None,
    ) -> None:
        if experts < 2:
            raise GraphError(f"MoE has {experts} experts but gating needs at least 2")
        if not 1 <= top_k <= experts:
            raise GraphError(
                f"MoE sends each token to {top_k} experts but has {experts}; take top_k from 1 to {experts}"
            )
        self.gate = Parameter((width, experts), dtype, init)
        self.up = Parameter((experts, width, hidden), dtype, init)
        self.down = Parameter((experts, hidden, width), dtype, init)
        self.up_bias = Parameter((experts, hidden), dtype, ("zeros",)) if bias else None
        self.down_bias = Parameter((experts, width), dtype, ("zeros",)) if bias else None
        self.experts, self.capacity_factor, self.activation = experts, capacity_factor, activation
        self.top_k, self.normalize = top_k, top_k > 1 if normalize is None else normalize
        self._routes: _Routes | None = None
        self._loss: Tensor | None = None
        self._choices: list[tuple[Tensor, Tensor]] = []

    @property
    def loss(self) -> Tensor:
        """Auxiliary loss of the latest call. Raises GraphError before the first."""
        if self._loss is None:
            raise GraphError("MoE has no auxiliary loss before it is called; call the module first")
        return self._loss

    @property
    def dropped(self) -> Tensor:
        """Share of choices of the latest call that were dropped. Raises GraphError before the first."""
        if not self._choices:
            raise GraphError("MoE has dropped nothing before it is called; call the module first")
        capacity = self.capacity(self._choices[0][0].shape[1])
        shares = [
            ops.mean((ops.reduce("sum", before * mask, -1) >= float(capacity)).astype(mask.dtype))
            for mask, before in self._choices
        ]
        total = shares[0]
        for share in shares[1:]:
            total = total + share
        return total / float(len(shares))

    def capacity(self, tokens: int) -> int:
        """Tokens that an expert takes of a group of a given number."""
        return max(1, math.ceil(self.top_k * self.capacity_factor * tokens / self.experts))

    @checked_arguments(ShardingError)
    def split_experts(
        self,
        mesh: ProcessMesh | None,
        experts: str,
        *,
        batch: str | Sequence[str] = (),
        hidden: str | None = None,
    ) -> Self:
        """Split the experts over a mesh axis: tokens are sent to them and back by all_to_all.

        Args:
            mesh: of the module; None splits nothing.
            experts: axis that splits the experts.
            batch: axes that split the groups of tokens outside of the experts, major to minor, `experts`
                among them if it does.
            hidden: axis that splits the inner width of each expert.

        Raises:
            ShardingError: the mesh has no such axis.
        """
        if mesh is None:
            return self
        rows = (batch,) if isinstance(batch, str) else tuple(batch)
        for axis in rows:
            mesh.axis_size(axis)
        self._routes = _Routes(mesh, experts, rows)
        shard_tensor(self.up, mesh, [experts, None, hidden])
        shard_tensor(self.down, mesh, [experts, hidden, None])
        if self.up_bias is not None and self.down_bias is not None:
            shard_tensor(self.up_bias, mesh, [experts, hidden])
            shard_tensor(self.down_bias, mesh, [experts, None])
        return self

    def forward(self, x: Any) -> Tensor:
        """x [groups, tokens, width] -> the same shape."""
        x = self._at_tokens(x)
        gates = self._at_tokens(ops.softmax(ops.einsum("gsm,me->gse", x, self.gate)))
        combine = self._at_tokens(self._combine(gates))
        dispatch = (ops.stop_gradient(combine) > 0.0).astype(x.dtype)
        routed = self._sent(ops.einsum("gsec,gsm->egcm", dispatch, x), to_experts=True)
        returned = self._sent(self.feed(routed), to_experts=False)
        y: Tensor = self._at_tokens(ops.einsum("gsec,egcm->gsm", combine, returned))
        return y

    def feed(self, routed: Tensor) -> Tensor:
        """Every expert on its tokens: [experts, groups, capacity, width] -> the same shape."""
        inner = self.activation(_shift(ops.einsum("egcm,emh->egch", routed, self.up), self.up_bias))
        return _shift(ops.einsum("egch,ehm->egcm", inner, self.down), self.down_bias)

    def _at_tokens(self, x: Any) -> Any:
        """A tensor whose first dim is the group, and its gradient, on the ranks of its tokens."""
        if self._routes is None:
            return x
        axes: list[UserDim] = [self._routes.batch, *[None] * (len(x.shape) - 1)]
        return shard_tensor(x, self._routes.mesh, axes, gradient=True)

    def _sent(self, x: Tensor, *, to_experts: bool) -> Tensor:
        """Tokens [experts, groups, capacity, width], sent from ranks of tokens to those of experts or back;
        their gradients go the other way."""
        routes = self._routes
        if routes is None:
            return x
        groups = tuple(axis for axis in routes.batch if axis != routes.experts)
        ends: list[list[UserDim]] = [[None, routes.batch, None, None], [routes.experts, groups, None, None]]
        here, there = ends if to_experts else reversed(ends)
        y: Tensor = reshard(shard_tensor(x, routes.mesh, here, gradient=True), routes.mesh, there)
        return y

    def _combine(self, gates: Tensor) -> Tensor:
        """Weight of every token in every slot of every expert: [groups, tokens, experts, capacity]."""
        masks: list[Tensor] = []
        left = ops.stop_gradient(gates)
        for _ in range(self.top_k):
            masks.append(self._chosen(left))
            left = ops.where(masks[-1] > 0.0, -1.0, left)
        self._loss = self._balance(gates, masks[0])
        weights = [ops.reduce("sum", gates * mask, -1, True) for mask in masks]
        if self.normalize:
            total = weights[0]
            for weight in weights[1:]:
                total = total + weight
            weights = [weight / (total + 1e-9) for weight in weights]
        self._choices = _with_earlier(masks)
        placed = [
            self._place(mask, before, weight)
            for (mask, before), weight in zip(self._choices, weights, strict=True)
        ]
        combine = placed[0]
        for part in placed[1:]:
            combine = combine + part
        return combine

    def _chosen(self, gates: Tensor) -> Tensor:
        """1 at the best expert of each token, [groups, tokens, experts]."""
        best = ops.argmax(ops.stop_gradient(gates), -1)  # always in range: "zeros" only avoids the check
        return ops.one_hot(best, self.experts, gates.dtype, outside="zeros")

    def _balance(self, gates: Tensor, first: Tensor) -> Tensor:
        """Auxiliary loss, GShard equation 3: differentiable in the gates; first choices are only counted."""
        return ops.mean(ops.mean(gates, 1) * ops.mean(first, 1)) * float(self.experts**2)

    def _place(self, mask: Tensor, before: Tensor, weight: Tensor) -> Tensor:
        """Weights at (expert, slot); the one-hot row of a slot beyond the capacity is zero."""
        slot = ops.reduce("sum", before * mask, -1).astype("i32")
        slots = ops.one_hot(slot, self.capacity(mask.shape[1]), mask.dtype, outside="zeros")
        return ops.einsum("gse,gsc->gsec", mask * weight, slots)


@dataclass(frozen=True, slots=True)
class _Routes:
    """The mesh of a module, the axis of its experts, and the axes of the groups of tokens."""

    mesh: ProcessMesh
    experts: str
    batch: tuple[str, ...]


def _with_earlier(masks: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each mask of choices [groups, tokens, experts] with the number of earlier choices of the same expert in
    its group: all earlier masks, and earlier tokens of this one."""
    pairs: list[tuple[Tensor, Tensor]] = []
    counts: Tensor | None = None
    for number, mask in enumerate(masks):
        before = ops.cumsum(mask, 1) - mask
        pairs.append((mask, before if counts is None else before + counts))
        if number + 1 < len(masks):
            total = ops.reduce("sum", mask, 1, True)
            counts = total if counts is None else counts + total
    return pairs


def _shift(x: Tensor, bias: Parameter | None) -> Tensor:
    """x [experts, groups, capacity, n] plus bias [experts, n]; x without one."""
    return x if bias is None else x + ops.reshape(bias, (bias.shape[0], 1, 1, bias.shape[1]))
