"""Modules: named parameters, and the layers that models are made of."""

import distgraph.array_api  # noqa: F401 (so that NumPy functions trace inside of modules)
from distgraph.nn.attention import MLP, MultiHeadAttention, TransformerBlock
from distgraph.nn.layers import (
    GELU,
    CrossEntropy,
    Dropout,
    Embedding,
    Flatten,
    LayerNorm,
    Linear,
    MeanSquaredError,
    ReLU,
    RMSNorm,
    Sequential,
    Sigmoid,
    SiLU,
    Tanh,
)
from distgraph.nn.module import Module
from distgraph.nn.moe import MoE
from distgraph.nn.parameter import Buffer, Parameter
from distgraph.nn.spatial import AvgPool2d, BatchNorm2d, Conv2d, MaxPool2d

__all__ = [
    "AvgPool2d", "BatchNorm2d", "Buffer", "Conv2d", "CrossEntropy", "Dropout", "Embedding", "Flatten",
    "GELU", "LayerNorm", "Linear", "MLP", "MaxPool2d", "MeanSquaredError", "MoE", "Module",
    "MultiHeadAttention", "Parameter", "RMSNorm", "ReLU", "Sequential", "SiLU", "Sigmoid", "Tanh",
    "TransformerBlock",
]  # fmt: skip
