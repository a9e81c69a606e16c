"""What torch.export cannot record, and what a program cannot do: errors with the line of the user's model."""

from __future__ import annotations

import logging
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from distgraph.errors import GraphError
from distgraph.frontends.torch.exported_graph import OWN, model_line, source_line
from distgraph.frontends.torch.repeated_layers import copied

_SHOWN = 200
"""Characters of a message of torch that an error has in front; all of it is the cause of the error."""
_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


@contextmanager
def quiet_export() -> Iterator[None]:
    """Keep torch from printing graphs and tracebacks of a module that it cannot export."""
    from torch.export import _trace  # noqa: PLC0415 - takes a second, which an export takes anyway

    with ExitStack() as stack:
        stack.enter_context(patch.object(_trace, "print", lambda *_, **__: None, create=True))
        for name in _LOGGERS:
            stack.enter_context(patch.object(logging.getLogger(name), "disabled", True))
        yield


def refused(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: BaseException
) -> GraphError:
    """The error of a module that torch.export cannot record; the error of torch is to be its cause."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # noqa: PLC0415 - slow

    name, where = type(module).__name__, _line_of_model(error)
    at = f" ({where})" if where else ""
    if isinstance(error, GuardOnDataDependentSymNode):
        return GraphError(
            f"{name}{at} asks for a number that is computed from its inputs or parameters (if, "
            "int(), float()), but a program is one graph for all numbers; keep it a tensor, and select with "
            "torch.where or branch with torch.cond"
        )
    use = "" if where else _use_of_data(module, args, kwargs)
    if use:
        return _data_used(name, use)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = textwrap.shorten(lines[0].rstrip("."), _SHOWN, placeholder=" ...")
    return GraphError(
        f"{name} cannot be exported by torch.export{at}: {reason}; change the model there; where sizes vary "
        "give dynamic_shapes, and dynamic_batch=False where those of the example are the only ones"
    )


def _data_used(model: str, use: str) -> GraphError:
    """The error of a model that uses `.data` of a tensor, which is given with its line."""
    return GraphError(
        f"{model} uses .data of its {use}, which torch.export does not record; compute a new tensor in place "
        "of changing it, and write .detach() where only the gradient is to be left out"
    )


def _line_of_model(error: BaseException) -> str:
    """file:line of the innermost frame of the model in which torch has failed; empty where there is none."""
    where, frame = "", error.__traceback__
    while frame is not None:
        path, line = frame.tb_frame.f_code.co_filename, frame.tb_lineno
        if not path.startswith(OWN):
            where = f"{Path(path).name}:{line}"
        frame = frame.tb_next
    return where


# changes in place


def check_in_place_changes(exported: Any, model: str) -> None:
    """Check the graph that torch.export has recorded, in which ops still change their operands.

    Args:
        exported: of torch.export, before decompositions.
        model: name of the module.

    Raises:
        GraphError: an op changes an input or a parameter, or a view of one; or `.data` of a tensor is set,
            which torch.export ignores.
    """
    signature = exported.graph_signature
    protected = {name: f"input {name}" for name in signature.user_inputs}
    protected |= {name: f"parameter {path}" for name, path in signature.inputs_to_parameters.items()}
    owners: dict[int | None, str] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in protected:
            owners[_memory(node)] = protected[node.name]
    owners.pop(None, None)
    for node in _calls(exported.graph_module):
        if node.target is torch.ops.aten._has_compatible_shallow_copy_type.default:
            given = owners.get(_memory(node.all_input_nodes[0]), "tensor")
            raise _data_used(model, f"{given} ({source_line(node)})")
        for operand in _changed_operands(node):
            owner = owners.get(_memory(operand))
            if owner is not None:
                raise GraphError(
                    f"{model} changes its {owner} in place ({source_line(node)}), which a program cannot do; "
                    "compute a new tensor from it, or make what changes from step to step a buffer"
                )


def _memory(node: torch.fx.Node) -> int | None:
    """Identifier of the memory that torch.export has given to a tensor; a view has that of its base."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _calls(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The calls of a graph and of its subgraphs, such as those under `torch.no_grad()`."""
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            yield from (node for node in part.graph.nodes if node.op == "call_function")


def _changed_operands(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The operands that a call changes in place, by the schema of its op."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return
    for position, argument in enumerate(target._schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if argument.is_write:
            yield from (x for x in pytree.tree_leaves(given) if isinstance(x, torch.fx.Node))


# uses of .data


class _DataUsed(Exception):
    """A model reads or sets `Tensor.data`; the text has the tensor and the line."""


class _DataFinder(TorchFunctionMode):  # type: ignore[misc]
    """Raises _DataUsed at the first use of `.data` in the code of a model.

    Args:
        names: identifier of a tensor -> what it is.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.data.__get__, torch.Tensor.data.__set__):
            line = model_line(sys._getframe(1))
            if line != "?":
                raise _DataUsed(f"{self._names.get(id(args[0]), 'tensor')} ({line})")
        return func(*args, **(kwargs or {}))


def _use_of_data(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The first tensor whose `.data` a module uses, with the line; empty where none is found.

    The module is called on tensors without numbers.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    named = [(f"parameter {n}", x) for n, x in module.named_parameters()]
    named += [(f"buffer {n}", x) for n, x in module.named_buffers()]
    try:
        fakes = {id(tensor): mode.from_tensor(tensor) for _, tensor in named}
        names = {id(fakes[id(tensor)]): name for name, tensor in named}
        inputs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, dict(kwargs)))
        names |= {id(x): "input" for x in pytree.tree_leaves(inputs)}
        copy = copied(module, (), fakes)
        with mode, _DataFinder(names):
            copy(*inputs[0], **inputs[1])
    except _DataUsed as use:
        return str(use)
    except Exception:  # noqa: BLE001 - of the model's own code, which torch.export has reported already
        return ""
    return ""
