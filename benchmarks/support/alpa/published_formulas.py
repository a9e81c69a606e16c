"""What papers print for these models, as formulas: parameters, and FLOP of a training iteration.

The published formulas leave out some parameters and count some FLOP that a graph need not spend. `left_out`
and `unspent` say which, so that what is built can be compared to the last digit.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from distgraph.models.gpt import GPTConfig
from distgraph.models.gshard import MoEConfig


def _decoder_parameters(config: GPTConfig | MoEConfig, feed_forward: float) -> int:
    h = config.hidden
    attention = h * (3 * h + 1) + h * (h + 1) + 4 * h
    return round(config.layers * (attention + feed_forward) + config.vocabulary * (h + 1))


@singledispatch
def parameters(config: Any) -> int:
    """Parameters as Alpa (Zheng et al., OSDI 2022) counts them.

    GPT: L (H (3H + 1) + H (H + 1) + H (4H + 1) + 4H (H + 1) + 4H) + V (H + 1); in a GShard MoE half of the
    blocks have E times the two terms of the feed-forward part.
    """
    raise TypeError(f"no published count of parameters for {type(config).__name__}")


@parameters.register
def _(config: GPTConfig) -> int:
    h, factor = config.hidden, config.mlp_factor
    return _decoder_parameters(config, h * (factor * h + 1) + factor * h * (h + 1))


@parameters.register
def _(config: MoEConfig) -> int:
    h, factor = config.hidden, config.mlp_factor
    part = h * (factor * h + 1) + factor * h * (h + 1)
    return _decoder_parameters(config, part * (1 + config.experts) / 2)


def left_out(config: GPTConfig | MoEConfig) -> dict[str, int]:
    """Parameters of the presets that `parameters` does not count, by what they are.

    Two of the three parts of the bias of queries, keys and values; learned positions; the norm after the last
    block; the table of the untied head (the formula counts one table, and a bias of the logits); and the
    gates of the experts.
    """
    c = config
    found = {
        "bias of queries, keys and values": 2 * c.hidden * c.layers,
        "positions": c.sequence * c.hidden,
        "last norm": 2 * c.hidden,
        "second table of tokens": c.vocabulary * c.hidden,
    }
    if isinstance(c, MoEConfig):
        found["gates"] = c.layers // 2 * c.hidden * c.experts
    return found


@singledispatch
def flops(config: Any, batch: int, recompute: bool = True) -> float:
    """FLOP of one training iteration over `batch` sequences, matrix products only.

    GPT (Narayanan et al., SC 2021, appendix): 96 B S L H^2 (1 + S / 6H) + 6 B S H V, with 72 in place of 96
    without recomputation. GShard MoE in the same manner, with the products that send tokens to experts and
    back and the gates; everything in a block counts three times, or four.
    """
    raise TypeError(f"no published count of FLOP for {type(config).__name__}")


@flops.register
def _(config: GPTConfig, batch: int, recompute: bool = True) -> float:
    b, s, h = batch, config.sequence, config.hidden
    per_layer = (96 if recompute else 72) * b * s * h**2 * (1 + s / (6 * h))
    return per_layer * config.layers + 6 * b * s * h * config.vocabulary


@flops.register
def _(config: MoEConfig, batch: int, recompute: bool = True) -> float:
    c, h, tokens = config, config.hidden, batch * config.sequence
    attention = 8 * tokens * h**2 + 4 * tokens * c.sequence * h
    dense = 4 * tokens * c.mlp_factor * h**2
    sparse = 2 * dense + 2 * _dispatch(c, batch) + 2 * tokens * h * c.experts
    blocks = c.layers * attention + c.layers / 2 * (dense + sparse)
    return (4 if recompute else 3) * blocks + 6 * tokens * h * c.vocabulary


def _dispatch(config: MoEConfig, batch: int) -> float:
    """FLOP of sending every token of a block to its experts, once: 2 tokens (experts capacity) H."""
    return 2 * batch * config.sequence * 2 * config.capacity_factor * config.group * config.hidden


def unspent(config: MoEConfig, batch: int) -> float:
    """FLOP that the formula for a GShard MoE counts and no graph spends.

    The mask that sends tokens to experts is a comparison, which has no gradient: one product of each such
    block.
    """
    return config.layers // 2 * _dispatch(config, batch)
