"""Runs of equal layers of a module of torch, and copies of the module with the first layers of each run only.

Layers are equal if they have the same class and the same attributes, the same submodules, and parameters
and buffers of the same shapes and dtypes. Numbers that grow by one from layer to layer, such as `layer_idx`,
count as the same: `forward_recording` decides whether a layer computes something else because of them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

KEPT = 3
"""Layers that are exported of each run: the first, and two whose graphs are compared."""

_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)
_OF_TENSORS = ("_parameters", "_buffers")


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive children of a container that are equal.

    Attributes:
        paths: path of each layer, such as "model.layers.0", in order; more than `KEPT`.
    """

    paths: tuple[str, ...]

    @property
    def kept(self) -> tuple[str, ...]:
        """Paths of the layers that a cut copy has."""
        return self.paths[:KEPT]

    @property
    def cut(self) -> tuple[str, ...]:
        """Paths of the layers that are missing in a cut copy."""
        return self.paths[KEPT:]


def find_runs(module: torch.nn.Module) -> list[Run]:
    """The runs of more than `KEPT` equal layers in a module, none of them inside a layer of another."""
    return _runs_below(module, "")


def _runs_below(module: torch.nn.Module, path: str) -> list[Run]:
    children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    runs: list[Run] = []
    while children:
        length = 1
        if isinstance(module, _CONTAINERS):
            while length < len(children) and _are_equal(children[0][1], children[length][1], length):
                length += 1
        if length > KEPT:
            runs.append(Run(tuple(child_path for child_path, _ in children[:length])))
        else:
            length = 1
            runs += _runs_below(children[0][1], children[0][0])
        children = children[length:]
    return runs


def _are_equal(first: torch.nn.Module, other: torch.nn.Module, distance: int) -> bool:
    """Whether two layers are equal, of which the other comes `distance` layers later."""
    ours, theirs = (list(layer.named_modules(remove_duplicate=False)) for layer in (first, other))
    return len(ours) == len(theirs) and all(
        a_path == b_path and type(a) is type(b) and _same(_attributes(a), _attributes(b), distance)
        for (a_path, a), (b_path, b) in zip(ours, theirs, strict=True)
    )


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    described = {
        kind: {name: _described(tensor) for name, tensor in module.__dict__[kind].items()}
        for kind in _OF_TENSORS
    }
    return {key: value for key, value in module.__dict__.items() if key != "_modules"} | described


def _described(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    kind = (type(tensor), tensor.dtype, tensor.device, tensor.layout)
    return [*kind, tuple(tensor.stride()), tensor.requires_grad, [str(size) for size in tensor.shape]]


def _same(first: Any, other: Any, distance: int) -> bool:
    """Whether two attributes are equal, or numbers that grow by one from layer to layer."""
    if first is other:
        return True
    if type(first) is not type(other) or isinstance(first, torch.Tensor):
        return False
    if type(first) is int:
        return other in (first, first + distance)
    if isinstance(first, (list, tuple)):
        return len(first) == len(other) and all(map(_same, first, other, [distance] * len(first)))
    if isinstance(first, Mapping):
        return list(first) == list(other) and all(_same(first[key], other[key], distance) for key in first)
    try:
        return bool(first == other)
    except (ValueError, TypeError, RuntimeError):  # arrays, whose comparison has no single answer
        return False


def copied(module: torch.nn.Module, runs: Sequence[Run], tensors: Mapping[int, Any]) -> torch.nn.Module:
    """A copy of a module with the first layers of each run only.

    Args:
        module: it stays as it is.
        runs: of the module.
        tensors: id of a tensor -> what stands for it in the copy; other parameters, buffers and tensors
            that are attributes of submodules are shared with the module.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        for holder in (part.__dict__, part._parameters, part._buffers):
            memo |= {id(x): x for x in holder.values() if isinstance(x, torch.Tensor)}
    copy_of = copy.deepcopy(module, memo | dict(tensors))
    for run in runs:
        for path in run.cut:
            container, _, name = path.rpartition(".")
            del copy_of.get_submodule(container)._modules[name]
    return copy_of
