"""Constants of an exported graph: what depends on no input and no parameter is computed by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distgraph.frontends.constant_tensor import ConstantTensor
from distgraph.frontends.torch.torch_dtypes import as_array, short_dtype


class Constant(ConstantTensor):
    """A tensor of torch in an exported graph, used as a tensor by a trace."""

    def __init__(self, value: Any, recipe: Callable[[], Any] | None = None) -> None:
        super().__init__(value, recipe)
        self.mask_kinds: dict[tuple[int, int], str] = {}  # (queries, keys) -> see `aten_attention`

    @property
    def dtype(self) -> str:
        """Short dtype name."""
        return short_dtype(self.value.dtype)

    def strides(self) -> tuple[int, ...]:
        """See `ConstantTensor`; in elements."""
        return tuple(self.value.stride())

    def numbers(self) -> Any:
        return as_array(self.value)
