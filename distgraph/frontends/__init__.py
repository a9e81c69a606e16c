"""Models of other frameworks: `frontends.torch` imports modules of PyTorch, `frontends.jax` functions of JAX.

A frontend is loaded on first use, so that importing distgraph never imports another framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FRONTENDS = {"torch": "distgraph.frontends.torch", "jax": "distgraph.frontends.jax"}


def __getattr__(name: str) -> Any:
    if name in _FRONTENDS:
        return import_module(_FRONTENDS[name])
    raise AttributeError(
        f"module 'distgraph.frontends' has no attribute {name!r}; it has {', '.join(_FRONTENDS)}"
    )


def __dir__() -> list[str]:
    return sorted(_FRONTENDS)
