"""Element types of torch, and arrays of its tensors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from distgraph.errors import GraphError

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


def short_dtype(dtype: torch.dtype) -> str:
    """Short name of a dtype of torch. Raises GraphError for one that distgraph does not have."""
    if dtype not in _SHORT:
        raise GraphError(f"dtype {dtype} is not supported; use one of {', '.join(map(str, _SHORT))}")
    return _SHORT[dtype]


def as_array(tensor: torch.Tensor) -> Any:
    """The numbers of a tensor as a NumPy array; it may share the memory of the tensor."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype is torch.bfloat16:
        return host.view(torch.int16).numpy().view(np.dtype(ml_dtypes.bfloat16))
    short_dtype(host.dtype)
    return host.numpy()


def as_tensor(array: Any) -> torch.Tensor:
    """The numbers of a NumPy array as a tensor on the host; it may share the memory of the array."""
    block = np.ascontiguousarray(array).reshape(np.shape(array))
    if not block.flags.writeable:  # torch has no tensors that cannot be written
        block = block.copy()
    if block.dtype == np.dtype(ml_dtypes.bfloat16):
        return torch.from_numpy(block.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(block)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of torch of a short name."""
    return next(dtype for dtype, short in _SHORT.items() if short == name)
