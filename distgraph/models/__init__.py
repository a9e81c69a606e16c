"""Published model architectures: small ones can be trained, and all sizes can be planned from shapes alone.

model = GPT.preset("2.6B")
stages(model, [mesh[0:2], mesh[2:4]], recompute=True)
plan = Engine(model, model.loss, optim.AdamW()).prepare(shapes)
"""

from distgraph.models.decoder import Block, CausalAttention, Decoder
from distgraph.models.gpt import GPT, GPT_PRESETS, GPTConfig
from distgraph.models.gshard import MOE_PRESETS, GShardMoE, MoEConfig
from distgraph.models.llama import LLAMA_PRESETS, Llama, LlamaConfig
from distgraph.models.megatron_layout import Layout, Stack, annotate, stages
from distgraph.models.wide_resnet import WIDE_RESNET_PRESETS, WideResNet, WideResNetConfig

__all__ = [
    "Block", "CausalAttention", "Decoder", "GPT", "GPTConfig", "GPT_PRESETS", "GShardMoE", "LLAMA_PRESETS",
    "Layout", "Llama", "LlamaConfig", "MOE_PRESETS", "MoEConfig", "Stack", "WIDE_RESNET_PRESETS",
    "WideResNet", "WideResNetConfig", "annotate", "stages",
]  # fmt: skip
