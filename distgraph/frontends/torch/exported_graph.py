"""Exported graphs of modules of torch: the data, and queries on their nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from distgraph.frontends.torch.rule_registry import RANDOM

OWN = (f"{torch.__path__[0]}/", f"{Path(__file__).parents[2]}/", "<")
"""Begin of the paths of code that is not of a model: of torch, of distgraph, and generated."""


@dataclass(frozen=True, slots=True)
class Input:
    """An input of an exported graph.

    Attributes:
        kind: "input", "tensor" (a parameter or buffer), "constant" or "none" (an argument that is no tensor).
        name: argument of the module, or path of the parameter, buffer or constant.
    """

    kind: str
    name: str
    value: Any = None


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported graph.

    Attributes:
        module: holds the graph and its subgraphs.
        inputs: name of each placeholder -> what it is.
        shapes: input of the module -> its shape in the example; symbolic sizes are symbols.
        mutated: path of each buffer that a step changes.
        outputs: name of each output of the module, in order; None for the new value of a buffer.
        kind: "tensor" where the module returns one tensor, "tuple" or "dict".
        captured: text of the graph and its constants before decompositions.
        conditions: on the symbolic sizes, under which torch computes by this graph.
        lost_gradients: what changes gradients in torch, which the graph does not contain.
    """

    module: torch.fx.GraphModule
    inputs: Mapping[str, Input]
    shapes: Mapping[str, torch.Tensor]
    mutated: tuple[str, ...]
    outputs: tuple[str, ...]
    kind: str
    captured: str
    conditions: tuple[Any, ...] = ()
    lost_gradients: tuple[str, ...] = ()


def depending_nodes(exported: Exported) -> list[torch.fx.Node]:
    """The calls whose results depend on an input, a parameter, a buffer or a random number."""
    depending: list[torch.fx.Node] = []
    depends: set[torch.fx.Node] = set()
    for node in exported.module.graph.nodes:
        if node.op == "placeholder" and exported.inputs[node.name].kind in ("input", "tensor"):
            depends.add(node)
        elif node.op == "call_function" and (
            op_name(node) in RANDOM or any(n in depends for n in node.all_input_nodes)
        ):
            if "val" in node.meta and not _is_tensors(node.meta["val"]) and not _reads_number(node):
                continue  # a size, which is known when the graph is traced
            depends.add(node)
            depending.append(node)
    return depending


def branch_nodes(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The calls in the branches of every `torch.cond`, however deep."""
    nodes: list[torch.fx.Node] = []
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.higher_order.cond:
            for branch in (module.get_submodule(part.target) for part in node.args[1:3]):
                nodes += [inner for inner in branch.graph.nodes if inner.op == "call_function"]
                nodes += branch_nodes(branch)
    return nodes


def unnamed_op(node: torch.fx.Node) -> str:
    """Name of an op that holds graphs or has effects, such as "higher_order.map"; empty for other calls."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return ""
    if node.target is torch.ops.higher_order.with_effects:
        return str(node.args[1])
    return "" if node.target is torch.ops.higher_order.cond else f"higher_order.{node.target.name()}"


def _reads_number(node: torch.fx.Node) -> bool:
    """Whether a call is `Tensor.item()`: a number of Python that depends on data."""
    return node.target is torch.ops.aten._local_scalar_dense.default


def _is_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def op_name(node: torch.fx.Node) -> str:
    """Name of the op of a call, such as "aten.add.Tensor"; empty for a function of Python."""
    target: Any = node.target
    return str(target) if isinstance(target, torch._ops.OpOverload) else ""


def source_line(node: torch.fx.Node) -> str:
    """file:line of the innermost frame of the model that emitted a node, outside of torch and distgraph."""
    inner = outer = ""
    for line in (node.stack_trace or "").splitlines():
        text = line.strip()
        if text.startswith('File "'):
            path, _, rest = text[6:].partition('", line ')
            if path.startswith("<"):
                continue  # code that torch has generated
            place = f"{path.rsplit('/', 1)[-1]}:{rest.partition(',')[0]}"
            outer = outer or place
            if not path.startswith(OWN):
                inner = place
    return inner or outer or "?"


def model_line(frame: FrameType | None) -> str:
    """file:line of the innermost frame of the model, from a frame outward; "?" where there is none."""
    while frame is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    return "?" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def module_paths(node: torch.fx.Node) -> list[str]:
    """Paths of the modules of torch in whose call a node was emitted, outermost first."""
    return [str(entry[0]) for entry in (node.meta.get("nn_module_stack") or {}).values()]


def module_path(node: torch.fx.Node) -> str:
    """Path of the module of torch that emitted a node, such as "encoder.layers.0"."""
    path = next(reversed(module_paths(node)), "")
    return "" if path.startswith("_empty") else path


def value_text(value: Any) -> str:
    """A text that is equal for constants of equal numbers."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return repr(value)
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
