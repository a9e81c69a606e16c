"""Models of other frameworks: `frontends.torch` imports a module of PyTorch.

A frontend is loaded on first use, so that importing distgraph never imports another framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "torch":
        return import_module("distgraph.frontends.torch")
    raise AttributeError(f"module 'distgraph.frontends' has no attribute {name!r}; it has torch")


def __dir__() -> list[str]:
    return ["torch"]
