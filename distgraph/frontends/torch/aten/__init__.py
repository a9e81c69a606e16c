"""The rules of ATen ops; importing this package registers them."""

from distgraph.frontends.torch.aten import (
    aten_attention,
    aten_convolution,
    aten_creation,
    aten_ctc,
    aten_fractional_pooling,
    aten_indexing,
    aten_linear,
    aten_losses,
    aten_norms,
    aten_pointwise,
    aten_pooling,
    aten_random,
    aten_reductions,
    aten_shapes,
)

__all__ = [
    "aten_attention",
    "aten_convolution",
    "aten_creation",
    "aten_ctc",
    "aten_fractional_pooling",
    "aten_indexing",
    "aten_linear",
    "aten_losses",
    "aten_norms",
    "aten_pointwise",
    "aten_pooling",
    "aten_random",
    "aten_reductions",
    "aten_shapes",
]
