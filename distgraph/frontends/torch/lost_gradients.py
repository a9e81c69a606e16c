"""What changes gradients of a module of torch and is no part of an exported graph: hooks, and functions with
a backward of their own.

torch.export records the forward part, and the backward part is derived from that. A program must not train
with other gradients than torch without a word.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from distgraph.frontends.torch.exported_graph import OWN, model_line


@contextmanager
def noted_lost_gradients(module: torch.nn.Module) -> Iterator[dict[str, None]]:
    """Collect in words what changes gradients of a module: its hooks, and what is called inside."""
    lost = dict.fromkeys(_hooks(module))
    apply, register = torch.autograd.Function.apply, torch.Tensor.register_hook

    def noted_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            lost.setdefault(f"the backward of {cls.__name__} ({model_line(sys._getframe(1))})")
        return apply.__func__(cls, *args, **kwargs)

    def noted_register(tensor: torch.Tensor, hook: Any) -> Any:
        caller = sys._getframe(1)
        if not caller.f_code.co_filename.startswith(OWN):
            lost.setdefault(f"a hook on a gradient ({model_line(caller)})")
        return register(tensor, hook)

    with (
        patch.object(torch.autograd.Function, "apply", classmethod(noted_apply)),
        patch.object(torch.Tensor, "register_hook", noted_register),
    ):
        yield lost


def _hooks(module: torch.nn.Module) -> Iterator[str]:
    """The hooks on gradients of modules and parameters."""
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            yield f"a backward hook of module {path or type(module).__name__}"
    for path, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield f"a hook on the gradient of parameter {path}"
