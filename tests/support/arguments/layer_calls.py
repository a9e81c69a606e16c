"""Public layers, models, optimisers and learning rates, with arguments that fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from support.arguments.public_call import PublicCall

import distgraph as dg
from distgraph import models, nn, ops, optim, schedules

X = np.random.default_rng(0).normal(size=(20, 6)).astype("f4")
Y = np.arange(20, dtype="i4") % 3
ROWS, SEQUENCES, IMAGES = ((4, 6), "f32"), ((2, 4, 6), "f32"), ((2, 3, 8, 8), "f32")
INIT = {"init": ("zeros",), "dtype": "f32"}
EPS = {"eps": 1e-5, "dtype": "f32"}
HEADS = {"heads": 2, "causal": True, "key_heads": 1, "dropout": 0.0, **INIT}
POOL = {"window": 2, "stride": 2, "padding": 0}
DECODER = {"packed": False, "fused": True, "dropout": 0.0, "dtype": "f32"}
SHAPE = {"hidden": 8, "heads": 2, "vocabulary": 16, "sequence": 8, "tied": False, **DECODER}

LAYERS: list[tuple[type[nn.Module], Any, dict[str, Any]]] = [
    (nn.Linear, ROWS, {"inputs": 6, "outputs": 3, "bias": True, **INIT}),
    (nn.Embedding, ((4,), "i32"), {"rows": 5, "width": 3, **INIT}),
    (nn.LayerNorm, ROWS, {"width": 6, **EPS}),
    (nn.RMSNorm, ROWS, {"width": 6, **EPS}),
    (nn.Dropout, ROWS, {"rate": 0.5, "batch_dim": 0}),
    (nn.GELU, ROWS, {"approximate": True}),
    (nn.MLP, ROWS, {"width": 6, "hidden": 8, "activation": ops.gelu, "bias": True, "dropout": 0.1, **INIT}),
    (nn.MultiHeadAttention, SEQUENCES, {"width": 6, "bias": True, **HEADS}),
    (
        nn.TransformerBlock,
        SEQUENCES,
        {"width": 6, "hidden": 8, "activation": ops.gelu, "mlp": None, **HEADS},
    ),
    (
        nn.MoE,
        SEQUENCES,
        {"width": 6, "hidden": 8, "experts": 2, "capacity_factor": 1.0, "activation": ops.gelu, **INIT}
        | {"bias": False, "top_k": 1, "normalize": None},
    ),
    (
        nn.Conv2d,
        IMAGES,
        {"inputs": 3, "outputs": 3, "kernel": 3, "stride": 1, "padding": 1, "dilation": 1, "groups": 1}
        | {"bias": True, **INIT},
    ),
    (nn.BatchNorm2d, IMAGES, {"channels": 3, "momentum": 0.1, **EPS}),
    (nn.AvgPool2d, IMAGES, POOL),
    (nn.MaxPool2d, IMAGES, POOL),
]
CONFIGS: list[tuple[Callable[..., Any], Callable[[Any], nn.Module], dict[str, Any]]] = [
    (models.GPTConfig, models.GPT, {**SHAPE, "layers": 1, "mlp_factor": 2, "head_bias": False}),
    (models.LlamaConfig, models.Llama, {**SHAPE, "layers": 1, "inner": 8, "key_heads": 1, "rotary": 1e4}),
    (
        models.MoEConfig,
        models.GShardMoE,
        {**SHAPE, "layers": 2, "mlp_factor": 2, "head_bias": False, "experts": 2, "group": 8, "top_k": 2}
        | {"capacity_factor": 1.0, "auxiliary": 0.01, "expert_bias": False},
    ),
]
OPTIMIZERS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.Adam, {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}),
    (optim.AdamW, {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}),
    (optim.Adafactor, {"decay": 0.8, "clip": 1.0, "eps": 1e-30}),
]
OF_ALL = {"lr": 0.1, "clip_norm": 1.0, "weight_decay": 0.1, "decays": optim.matrices_only}
STAGES = {"dp": "dp", "tp": "tp", "sp": "sp", "ep": None, "sequence_parallel": False, "recompute": False}


def _layer(make: Callable[..., Any], operand: Any) -> Callable[..., Any]:
    return lambda **arguments: dg.trace(make(**arguments), operand)


def _parameter(make: Callable[..., Any]) -> Callable[..., Any]:
    class Scaled(nn.Module):
        def __init__(self, **arguments: Any) -> None:
            self.w = make(**arguments)

        def forward(self, x: Any) -> Any:
            return x * ops.mean(self.w)

    return _layer(Scaled, ROWS)


def _model(config: Callable[..., Any], make: Callable[[Any], Any], operand: Any) -> Callable[..., Any]:
    return lambda **arguments: dg.trace(make(config(**arguments)), operand)


def _optimizer(make: Callable[..., Any]) -> Callable[..., Any]:
    def call(**arguments: Any) -> None:
        engine = dg.Engine(nn.Linear(6, 3), nn.CrossEntropy(), make(**arguments))
        engine.fit((X, Y), batch_size=10, progress=False)

    return call


def _rate(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **arguments: [make(**arguments)(step) for step in range(1, 4)]


def gpt(layers: int = 1) -> models.GPT:
    """A small GPT."""
    return models.GPT(models.GPTConfig(hidden=8, layers=layers, heads=2, vocabulary=16, sequence=8))


def _decoder_calls() -> dict[str, PublicCall]:
    block, attention = gpt().blocks[0], {"width": 6, "heads": 2, "key_heads": 1, "bias": True, "rotary": 1e4}
    parts = {"norm1": block.norm1, "attn": block.attn, "norm2": block.norm2, "mlp": block.mlp}
    sizes = {"vocabulary": 16, "width": 8, "positions": 8, "tied": False, "head_bias": False}
    decoder = {"blocks": [block], "norm": nn.LayerNorm(8), **sizes, "dropout": 0.0, "dtype": "f32"}
    layout = {"mesh": dg.ProcessMesh.grid(dp=2), "dp": "dp", "tp": "tp", "sp": "sp", "ep": "dp"}
    made: list[tuple[type, Callable[..., Any], dict[str, Any]]] = [
        (models.CausalAttention, _layer(models.CausalAttention, SEQUENCES), {**attention, **DECODER}),
        (models.Block, models.Block, parts),
        (models.Decoder, _layer(models.Decoder, ((2, 8), "i32")), decoder),
        (models.Layout, models.Layout, {**layout, "sequence": False, "context_parallel": "gather"}),
    ]
    return {f"models.{kind.__name__}": PublicCall(call, kind, given) for kind, call, given in made}


def layer_calls() -> dict[str, PublicCall]:
    """All calls by name."""
    calls = {
        f"nn.{layer.__name__}": PublicCall(_layer(layer, operand), layer, arguments)
        for layer, operand, arguments in LAYERS
    }
    weight = {"shape": (3, 2), **INIT}
    given = {**weight, "trainable": True, "annotation": None}
    calls["nn.Parameter"] = PublicCall(_parameter(nn.Parameter), nn.Parameter, given)
    calls["nn.Buffer"] = PublicCall(_parameter(nn.Buffer), nn.Buffer, weight)
    for config, model, arguments in CONFIGS:
        call = _model(config, model, ((2, 8), "i32"))
        calls[f"models.{config.__name__}"] = PublicCall(call, config, arguments)
    call = _model(models.WideResNetConfig, models.WideResNet, ((2, 3, 32, 32), "f32"))
    sizes = {"channels": 8, "width": 1, "blocks": (1, 1), "image": 32, "classes": 4, "dtype": "f32"}
    calls["models.WideResNetConfig"] = PublicCall(call, models.WideResNetConfig, sizes)
    for made in (models.GPT, models.Llama, models.GShardMoE, models.WideResNet):
        preset = {"name": next(iter(made.presets))}
        calls[f"models.{made.__name__}.preset"] = PublicCall(made.preset, made.preset, preset)
        calls[f"models.{made.__name__}"] = PublicCall(made, made, {"config": made.presets[preset["name"]]})
    calls |= _decoder_calls()
    mesh = {"mesh": dg.ProcessMesh.grid(dp=2, tp=2), **STAGES, "context_parallel": "gather"}
    calls["models.annotate"] = PublicCall(
        lambda **given: models.annotate(gpt(), **given), models.annotate, mesh
    )
    meshes = [dg.ProcessMesh.grid(dp=2), dg.ProcessMesh.grid(2, dp=2)]
    stages = {"meshes": meshes, "layers": [1, 1], **STAGES, "context_parallel": "gather"}
    calls["models.stages"] = PublicCall(lambda **given: models.stages(gpt(2), **given), models.stages, stages)
    return calls


def optimizer_calls() -> dict[str, PublicCall]:
    """All calls by name."""
    calls = {
        f"optim.{optimizer.__name__}": PublicCall(
            _optimizer(optimizer),
            optimizer,
            {**OF_ALL, "state_spec": None, "master": None, **arguments},
        )
        for optimizer, arguments in OPTIMIZERS
    }
    mesh = {"mesh": dg.ProcessMesh.grid(dp=2), "axis": "dp"}
    calls["optim.shard_states"] = PublicCall(optim.shard_states, optim.shard_states, mesh)
    for function, arguments in (
        (schedules.constant, {"rate": 0.1}),
        (schedules.cosine, {"rate": 0.1, "steps": 3, "final": 0.0}),
        (schedules.linear, {"rate": 0.1, "steps": 3, "final": 0.0}),
        (schedules.warmup, {"after": 0.1, "steps": 2}),
    ):
        calls[f"schedules.{function.__name__}"] = PublicCall(_rate(function), function, arguments)
    return calls
