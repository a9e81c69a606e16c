"""The rules of the primitives of JAX; importing this package registers them."""

from distgraph.frontends.jax.lax import (
    lax_contractions,
    lax_elementwise,
    lax_indexing,
    lax_ordering,
    lax_reductions,
    lax_shapes,
    lax_windows,
)

__all__ = [
    "lax_contractions",
    "lax_elementwise",
    "lax_indexing",
    "lax_ordering",
    "lax_reductions",
    "lax_shapes",
    "lax_windows",
]
