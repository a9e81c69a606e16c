"""The layers that are missing in a cut copy of a module, added to the graph that was exported of the copy.

The nodes of a layer are those between the last one of the layer before it and its own last one. Those of the
third layer of a run are copied for each layer that was cut:

    %a2 = linear(%a1, layers.2.w)              %a2 = linear(%a1, layers.2.w)
    %y = linear(%a2, head.w)              ->   %a3 = linear(%a2, layers.3.w)
                                               %a4 = linear(%a3, layers.4.w)
                                               %y = linear(%a4, head.w)

The second and the third must be equal: the same ops with the same numbers on their own parameters, on values
that both read, and on results of the layer before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from distgraph.frontends.torch.exported_graph import Input, module_paths, value_text
from distgraph.frontends.torch.repeated_layers import Run


@dataclass(frozen=True, slots=True)
class _Template:
    """The nodes that are copied for each layer.

    Attributes:
        nodes: of the third layer, in order.
        previous: the corresponding nodes of the second layer.
        placeholders: those that only the third layer reads: its parameters, buffers and constants.
    """

    nodes: list[Node]
    previous: list[Node]
    placeholders: list[Node]


def replicate(graph: torch.fx.Graph, inputs: dict[str, Input], run: Run, module: torch.nn.Module) -> bool:
    """Add the layers of a run that were cut to a graph.

    Args:
        graph: of the cut copy; changed in place.
        inputs: name of each placeholder -> what it is; those of the new layers are added.
        run: of the module.
        module: which has all layers.

    Returns:
        whether the second and third layer of the run are equal; else nothing is added.
    """
    tensors = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    template = _template(graph, inputs, run, tensors)
    if template is None:
        return False
    following = template.nodes[-1].next
    current = template.nodes
    for path in run.cut:
        copies = dict(zip(template.previous, current, strict=True))
        copies |= {
            node: _placeholder(graph, inputs, node, run, path, tensors) for node in template.placeholders
        }
        current = []
        for node in template.nodes:
            with graph.inserting_before(following):
                new = graph.node_copy(node, lambda x, copies=copies: copies.get(x, x))
            new.meta["nn_module_stack"] = _renamed_stack(node, run.kept[-1], path)
            copies[node] = new
            current.append(new)
    last = dict(zip(template.nodes, current, strict=True))
    while following.op != "root":
        for node in following.all_input_nodes:
            if node in last:
                following.replace_input_with(node, last[node])
        following = following.next
    return True


def _template(
    graph: torch.fx.Graph, inputs: Mapping[str, Input], run: Run, tensors: Mapping[str, torch.Tensor]
) -> _Template | None:
    """The nodes of the third layer of a run; None where those of the second are not equal."""
    nodes = [node for node in graph.nodes if node.op != "placeholder"]
    ends = _ends(nodes, run)
    if ends is None:
        return None
    second, third = nodes[ends[0] + 1 : ends[1] + 1], nodes[ends[1] + 1 : ends[2] + 1]
    behind = nodes[ends[2] + 1 :]
    inside, before = set(third), set(second)
    if len(second) != len(third) or any(x in before for node in behind for x in node.all_input_nodes):
        return None
    partners: dict[Node, Node] = {}  # what the third layer reads of its own -> what the second reads instead
    for a, b in zip(second, third, strict=True):
        if a.op != "call_function" or _without_operands(a) != _without_operands(b):
            return None
        for x, y in zip(_operands(a), _operands(b), strict=True):
            private = y in inside or y in before or _corresponding(inputs, x, y, run, tensors)
            same = partners.setdefault(y, x) is x if private else x is y
            if not same or (x in before) != (y in inside):
                return None
        partners[b] = a
    return _Template(third, second, [node for node in partners if node.op == "placeholder"])


def _operands(node: Node) -> list[Node]:
    return [x for x in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(x, Node)]


def _without_operands(node: Node) -> tuple[Any, ...]:
    """The op of a node, its arguments that are no nodes, and shapes and dtypes of its results."""
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    numbers = ["" if isinstance(x, Node) else f"{type(x).__name__} {x!r}" for x in leaves]
    results, nesting = pytree.tree_flatten(node.meta.get("val"))
    shown = [
        f"{x.dtype} {x.device} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x) for x in results
    ]
    return (node.op, node.target, structure, numbers, nesting, shown)


def _ends(nodes: list[Node], run: Run) -> list[int] | None:
    """Position of the last node of each layer that was exported; None where their nodes are mixed."""
    ends = dict.fromkeys(run.kept, -1)
    latest = run.kept[0]
    for position, node in enumerate(nodes):
        layer = next((path for path in module_paths(node) if path in ends), None)
        if layer is None:
            continue
        if run.kept.index(layer) < run.kept.index(latest):
            return None
        latest, ends[layer] = layer, position
    return list(ends.values()) if min(ends.values()) >= 0 else None


def _corresponding(
    inputs: Mapping[str, Input], x: Node, y: Node, run: Run, tensors: Mapping[str, torch.Tensor]
) -> bool:
    """Whether placeholders are one parameter of the second and of the third layer, or equal constants."""
    if x is y or x.op != "placeholder" or y.op != "placeholder":
        return False
    a, b = inputs[x.name], inputs[y.name]
    if b.name in tensors and b.kind in ("tensor", "constant"):
        return a.kind == b.kind and _renamed(b.name, run.kept[2], run.kept[1]) == a.name != b.name
    return (
        a.kind == b.kind == "constant"
        and a.name not in tensors
        and value_text(a.value) == value_text(b.value)
    )


def _placeholder(
    graph: torch.fx.Graph,
    inputs: dict[str, Input],
    node: Node,
    run: Run,
    path: str,
    tensors: Mapping[str, torch.Tensor],
) -> Node:
    """The placeholder of another layer that corresponds to one of the third layer."""
    given = inputs[node.name]
    first = next(each for each in graph.nodes if each.op != "placeholder")
    with graph.inserting_before(first):
        new = graph.node_copy(node)
    new.name = (
        f"{node.name}_{len(inputs)}"  # torch.export renames placeholders, which the graph does not know
    )
    while new.name in inputs:
        new.name += "_"
    name = _renamed(given.name, run.kept[-1], path)
    if given.name in tensors:
        value = tensors[name] if given.kind == "constant" else None
        inputs[new.name] = replace(given, name=name, value=value)
    else:
        inputs[new.name] = given
    return new


def _renamed_stack(node: Node, old: str, new: str) -> dict[str, Any]:
    stack = node.meta.get("nn_module_stack") or {}
    return {key: (_renamed(path, old, new), *rest) for key, (path, *rest) in stack.items()}


def _renamed(path: str, old: str, new: str) -> str:
    """A path in one layer as that in another; itself outside of it."""
    return new + path.removeprefix(old) if f"{path}.".startswith(f"{old}.") else path
