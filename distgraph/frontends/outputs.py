"""Outputs: the results of an imported model that returns several tensors under names."""

from __future__ import annotations

from typing import Any

from distgraph.errors import GraphError


class Outputs(dict[str, Any]):
    """Named outputs of a model, also as attributes: `output["logits"]` and `output.logits`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self:
            raise GraphError(f"model has no output {name!r} but {', '.join(self)}")
        return self[name]
