"""Modules: named parameters, and the layers that models are made of."""

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
from distgraph.nn.parameter import Buffer, Parameter

__all__ = [
    "Buffer", "CrossEntropy", "Dropout", "Embedding", "Flatten", "GELU", "LayerNorm", "Linear", "MLP",
    "MeanSquaredError", "Module", "MultiHeadAttention", "Parameter", "RMSNorm", "ReLU", "Sequential", "SiLU", "Sigmoid",
    "Tanh", "TransformerBlock",
]
