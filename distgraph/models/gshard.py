"""GShard MoE: a decoder with a mixture of experts in every second block (Lepikhin et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.errors.arguments import Count, NonNegative, Positive, checked_arguments
from distgraph.models.decoder import Decoder
from distgraph.models.gpt import GPTConfig, decoder_parts, feed_forward
from distgraph.models.megatron_layout import Placed
from distgraph.nn import MoE
from distgraph.tracing.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig(GPTConfig):
    """Shape of a mixture of experts.

    Attributes:
        experts: of each second block, from the second on.
        group: tokens that share the capacity of the experts: some whole sequences, or equal parts of one.
        capacity_factor: an expert takes top_k * factor * group / experts tokens of a group.
        auxiliary: weight of the loss that keeps experts equally busy, a mean over the blocks with some.
        expert_bias: whether experts have biases.
        top_k: experts of a token.

    The other fields are those of `GPTConfig`.
    """

    experts: Count
    heads: Count = 16
    vocabulary: Count = 32000
    mlp_factor: Count = 8
    group: Count = 2048
    capacity_factor: Positive = 1.0
    auxiliary: NonNegative = 0.01
    expert_bias: bool = False
    top_k: Count = 2


_ALPA: dict[str, Any] = {
    "expert_bias": True,
    "head_bias": True,
    "packed": True,
    "fused": False,
    "dtype": "f16",
}

MOE_PRESETS: dict[str, MoEConfig] = {
    name: MoEConfig(hidden=hidden, layers=layers, experts=experts, **_ALPA)
    for name, hidden, layers, experts in (
        ("380M", 768, 8, 8),
        ("690M", 768, 8, 16),
        ("1.3B", 768, 16, 16),
        ("2.4B", 1024, 16, 16),
        ("10B", 1536, 16, 32),
        ("27B", 2048, 16, 48),
        ("70B", 2048, 32, 64),
    )
}
"""Those of Alpa (Zheng et al., OSDI 2022, table 5)."""


class GroupedExperts(Placed, MoE):
    """`nn.MoE` on tokens in groups of a given size."""

    def __init__(self, config: MoEConfig) -> None:
        c = config
        inner = c.mlp_factor * c.hidden
        super().__init__(
            c.hidden, inner, c.experts, c.capacity_factor, bias=c.expert_bias, dtype=c.dtype, top_k=c.top_k
        )
        self.activation = self._activate
        self.group = c.group

    def forward(self, x: Any) -> Tensor:
        """x [b, s, width] -> the same shape. Raises GraphError where groups do not fit the sequences."""
        batch, length, width = x.shape
        if (batch * length) % self.group or (self.group % length and length % self.group):
            raise GraphError(
                f"expert group of {self.group} tokens does not fit {batch} sequences of {length}: it must "
                "hold whole sequences, or a sequence whole groups"
            )
        groups = batch * length // self.group
        wide = (groups, self.group // length, length, width) if self.group > length else x.shape
        grouped = ops.reshape(ops.reshape(x, wide), (groups, self.group, width))
        y = super().forward(self.layout.batch(grouped))
        return ops.reshape(ops.reshape(self.layout.batch(y), wide), x.shape)

    def _combine(self, gates: Tensor) -> Tensor:
        """As in `MoE`, with each group on the ranks of its tokens."""
        mask: Tensor = self.layout.batch(super()._combine(self.layout.batch(gates)))
        return mask

    def _activate(self, inner: Tensor) -> Tensor:
        return ops.gelu(self.layout.routed(inner, "tp"))

    def feed(self, routed: Tensor) -> Tensor:
        """As in `MoE`, with each expert on the ranks of its parameters."""
        y: Tensor = self.layout.routed(super().feed(self.layout.routed(routed)))
        return y


@checked_arguments()
class GShardMoE(Decoder):
    """A decoder over tokens with experts in every second block.

    Example:
        >>> model = GShardMoE.preset("380M", layers=2)
        >>> model.blocks[1].mlp.up.shape
        (8, 768, 6144)
    """

    presets = MOE_PRESETS

    def __init__(self, config: MoEConfig) -> None:
        self.config = config
        mlps = [
            GroupedExperts(config) if number % 2 else feed_forward(config) for number in range(config.layers)
        ]
        super().__init__(**decoder_parts(config, mlps))

    def loss(self, logits: Any, labels: Any) -> Tensor:
        """Cross-entropy as in `Decoder`, plus the weighted auxiliary losses of the latest call."""
        auxiliary_losses = [block.mlp.loss for block in self.blocks if isinstance(block.mlp, GroupedExperts)]
        total = super().loss(logits, labels)
        for auxiliary_loss in auxiliary_losses:
            total = total + auxiliary_loss * (self.config.auxiliary / len(auxiliary_losses))
        return total
