"""A part of a torch model whose parameters and activations are DTensors over the model axis of a mesh.

The code of the model runs unchanged: shapes are those of whole tensors, and DTensor propagates layouts
through its ops. `DTensorMode` adds what that needs for arbitrary code: tensors that the code makes itself
become replicated DTensors, attention runs on the heads of each rank, and ops without a sharding rule run on
whole tensors. Activations get the layouts of the plan where they leave a module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from distgraph.errors import ShardingError
from distgraph.plan.apply.stage_layouts import Layout, Output

_REFUSALS = (RuntimeError, NotImplementedError, AssertionError, ValueError)


class DTensorMode(TorchFunctionMode):  # type: ignore[misc]
    """Runs functions of torch on DTensors and on other tensors, which count as replicated.

    Attributes:
        mesh: of one dim.
        gathered: names of functions that ran on whole tensors, since DTensor has no rule for them.
    """

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh
        self.gathered: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map(self.replicated, (args, kwargs))
        if func is torch.ops.aten._assert_tensor_metadata.default:
            return None
        if func in _ATTENTION:
            return self._attention(func, *args, **kwargs)
        if func in _OVER_CHANNELS and self._splits_channels(*args, **kwargs):
            return self._on_whole_tensors(func, args, kwargs)
        try:
            result = pytree.tree_map(self._reduced, func(*args, **kwargs))
        except _REFUSALS as error:
            result = self._on_whole_tensors(func, args, kwargs, error)
        return self._with_whole_gradient(result) if func in _VIEWS else result

    def replicated(self, x: Any) -> Any:
        """A plain tensor as a replicated DTensor; everything else unchanged."""
        if isinstance(x, torch.Tensor) and not isinstance(x, DTensor):
            return DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return x

    def whole(self, x: Any) -> Any:
        """A DTensor as a plain tensor with all its elements; everything else unchanged."""
        return x.redistribute(placements=[Replicate()]).to_local() if isinstance(x, DTensor) else x

    def _reduced(self, x: Any) -> Any:
        """The rows of a split table are summed at once: no other op reads such partial sums."""
        partial_sum = isinstance(x, DTensor) and "MaskPartial" in type(x.placements[0]).__name__
        return self.replicated(self.whole(x)) if partial_sum else x

    def _splits_channels(self, x: Any, *rest: Any, **options: Any) -> bool:
        """Whether more than the batch is split, where DTensor computes wrong shapes."""
        operands = [leaf for leaf in pytree.tree_leaves((x, rest, options)) if isinstance(leaf, DTensor)]
        splits = [(operand is x, operand.placements[0]) for operand in operands]
        return any(isinstance(split, Shard) and (split.dim or not first) for first, split in splits)

    def _with_whole_gradient(self, x: Any) -> Any:
        """A whole result whose gradient is whole too: a view of it may not be one of a split gradient."""
        if not isinstance(x, DTensor) or not isinstance(x.placements[0], Replicate):
            return x
        return DTensor.from_local(x.to_local(), self.mesh, x.placements, run_check=False)

    def _on_whole_tensors(self, func: Any, args: Any, kwargs: Any, error: BaseException | None = None) -> Any:
        name = resolve_name(func) or str(func)
        last = name.rpartition(".")[2]
        if (last.endswith("_") and not last.endswith("__")) or last in _IN_PLACE or "out" in kwargs:
            text = str(error).strip().splitlines()
            raise ShardingError(
                f"{name} changes a tensor that is split over {self.mesh.mesh_dim_names[0]} in place, which "
                f"DTensor refuses ({text[0] if text else type(error).__name__}); compute a new tensor"
            ) from error
        args, kwargs = pytree.tree_map(self.whole, (args, kwargs))
        result = pytree.tree_map(self.replicated, func(*args, **kwargs))
        self.gathered.add(name)
        return result

    def _attention(
        self, func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **options: Any
    ) -> Any:
        """Attention on the heads of this rank; on all heads where the operands are not split by heads."""
        (split,) = query.placements
        dim = split.dim if isinstance(split, Shard) else query.ndim
        operands = [query, key, value]
        equal = all(x.placements == query.placements and x.ndim == query.ndim for x in operands)
        if dim >= query.ndim - 2 or not equal or any(x.shape[dim] % self.mesh.size() for x in operands):
            operands, dim = [self.replicated(self.whole(x)) for x in operands], -1
            split = Replicate()
        if attn_mask is not None:
            position = dim - (query.ndim - attn_mask.ndim)
            whole = dim < 0 or position < 0 or attn_mask.shape[position] == 1
            placement = Replicate() if whole else Shard(position)
            attn_mask = attn_mask.redistribute(placements=[placement]).to_local()
        local = func(*[x.to_local() for x in operands], attn_mask, *rest, **options)
        return DTensor.from_local(local, self.mesh, [split], run_check=False)


_ATTENTION = (
    torch.nn.functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
_OVER_CHANNELS = (
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    torch.nn.functional.batch_norm,
    torch.nn.functional.group_norm,
    torch.nn.functional.instance_norm,
)
_VIEWS = (
    torch.Tensor.flatten,
    torch.Tensor.reshape,
    torch.Tensor.unflatten,
    torch.Tensor.view,
    torch.flatten,
    torch.reshape,
    torch.unflatten,
)
_IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ipow__")


class DTensorModule(torch.nn.Module):  # type: ignore[misc]
    """A module that takes and returns plain tensors, and computes on DTensors over a mesh of one dim.

    Args:
        module: its parameters are DTensors over the mesh already.
        mode: of the mesh; None to compute on plain tensors.
    """

    def __init__(self, module: torch.nn.Module, mode: DTensorMode | None) -> None:
        super().__init__()
        self.module = module
        self.mode = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes of these inputs."""
        if self.mode is None:
            return self.module(*args, **kwargs)
        args, kwargs = pytree.tree_map(self.mode.replicated, (args, kwargs))
        with self.mode:
            result = self.module(*args, **kwargs)
        return pytree.tree_map(self.mode.whole, result)


def distribute_parameters(module: torch.nn.Module, mesh: Any, layout: Callable[[str], Layout]) -> None:
    """Replace the parameters of a module by DTensors; every rank has the same values before.

    Args:
        module: changed in place; tied parameters stay tied.
        mesh: of one dim.
        layout: path of a parameter -> the dim that the mesh splits, or None.
    """
    replaced: dict[int, torch.nn.Parameter] = {}
    for path, owner in module.named_modules():
        for name, old in list(owner.named_parameters(recurse=False)):
            if id(old) not in replaced:
                dim = layout(f"{path}.{name}" if path else name)
                placement = Replicate() if dim is None else Shard(dim)
                values = distribute_tensor(old.detach(), mesh, [placement], src_data_rank=None)
                replaced[id(old)] = torch.nn.Parameter(values, requires_grad=old.requires_grad)
            owner.register_parameter(name, replaced[id(old)])


def constrain_outputs(module: torch.nn.Module, outputs: Mapping[str, Output], prefix: str = "") -> None:
    """Give the results of modules the layouts of a plan; gradients of these results get them too."""
    modules = dict(module.named_modules())
    for path, output in outputs.items():
        if prefix + path in modules:
            modules[prefix + path].register_forward_hook(partial(_constrained, output))


def _constrained(output: Output, module: Any, args: Any, result: Any) -> Any:
    """Forward hook; results of another rank or shape than planned are left as they are."""
    if isinstance(result, tuple) and result:
        return (_constrained(output, module, args, result[0]), *result[1:])
    if not isinstance(result, DTensor) or tuple(result.shape[1:]) != output.shape[1:]:
        return result
    placement = Replicate() if output.dim is None else Shard(output.dim)
    stored = result.redistribute(placements=[placement])
    shape = {"shape": stored.shape, "stride": stored.stride()}
    return DTensor.from_local(
        stored.to_local(), stored.device_mesh, stored.placements, run_check=False, **shape
    )


def recompute_activations(module: torch.nn.Module, mode: DTensorMode | None) -> None:
    """Recompute the activations of a module in its backward part instead of storing them."""
    contexts = partial(_contexts, mode)
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, context_fn=contexts)


def _contexts(mode: DTensorMode | None) -> tuple[Any, Any]:
    """Contexts of the forward part, which the mode is around already, and of the recomputation."""
    return nullcontext(), nullcontext() if mode is None else mode
