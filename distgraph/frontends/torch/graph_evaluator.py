"""Evaluation of an exported graph on traced tensors: one walk over its nodes, in order.

What depends on no input and no parameter stays a tensor of torch (`folded_constant`); everything else is
computed by the rule of its op. Sizes are those of the actual inputs, so the batch may differ from that of the
example.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.torch.exported_graph import Exported, module_path, op_name, source_line
from distgraph.frontends.torch.folded_constant import Constant
from distgraph.frontends.torch.rule_registry import IGNORED, RANDOM, RULES
from distgraph.frontends.torch.torch_dtypes import short_dtype
from distgraph.nn.parameter import Parameter
from distgraph.tracing.annotations import pipeline_boundary
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

_LARGEST = 1 << 26
"""Numbers of the largest constant that is computed by torch."""


def evaluate(
    exported: Exported,
    tensors: Mapping[str, Parameter],
    inputs: Mapping[str, Tensor],
    boundaries: Mapping[str, Any],
) -> tuple[list[Any], list[Any]]:
    """Trace an exported graph.

    Args:
        exported: the graph.
        tensors: path of each parameter and buffer -> the tensor of the model.
        inputs: name of each input -> traced tensor.
        boundaries: path of a module -> where its first op and what follows are computed.

    Returns:
        the new values of the mutated buffers, and the outputs.
    """
    trace = Trace.current()
    values: dict[torch.fx.Node, Any] = {}
    ahead = dict(boundaries)
    for node in exported.module.graph.nodes:
        if node.op == "placeholder":
            source = exported.inputs[node.name]
            if source.kind == "input":
                values[node] = inputs[source.name]
            elif source.kind == "tensor":
                values[node] = tensors[source.name]
            elif source.kind == "constant":
                values[node] = Constant(source.value)
            else:
                values[node] = source.value
        elif node.op == "call_function":
            arguments = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            scope, base = module_path(node), trace.scope
            for path in [path for path in ahead if f"{scope}.".startswith(f"{path}.")]:
                pipeline_boundary(None, ahead.pop(path))
            scope = f"{base}.{scope}" if base and scope else base or scope
            with trace.on_behalf_of(trace.link, scope, source_line(node)):
                values[node] = _call(node, *arguments)
        elif node.op == "output":
            results = [values[x] if isinstance(x, torch.fx.Node) else x for x in node.args[0]]
            count = len(exported.mutated)
            return results[:count], results[count:]
        else:
            raise GraphError(f"exported graph has a {node.op} {node.target}, which has no meaning here")
    raise AssertionError("an exported graph has an output")


def _call(node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = op_name(node)
    if name in IGNORED:
        return None
    if not name:
        return _python(node, args, kwargs)
    if name.startswith("aten.sym_"):
        return _size(name, args)
    leaves = pytree.tree_leaves((args, kwargs))
    if name not in RANDOM and not any(isinstance(x, (Tensor, Parameter)) for x in leaves):
        folded = _folded(node, args, kwargs)
        if folded is not None:
            return folded
    return _traced(node, args, kwargs)


def _python(node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A function of Python: an item of several results, or arithmetic of sizes."""
    target: Any = node.target
    result = target(*args, **kwargs)
    if target is operator.getitem and result is None and node.users:
        raise GraphError(
            f"{node.args[0]} ({source_line(node)}): result {args[1]} of this op of torch is not "
            "computed here; write the model without it"
        )
    return result


def _size(name: str, args: Sequence[Any]) -> Any:
    shape = args[0].shape
    if name == "aten.sym_numel.default":
        return int(torch.Size(shape).numel())
    return shape[args[1]] if name == "aten.sym_size.int" else tuple(shape)


def _folded(node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of a node without traced operands, computed by torch; None where they are too large."""
    for leaf in pytree.tree_leaves(node.meta.get("val")):
        sizes = [n for n in getattr(leaf, "shape", ()) if isinstance(n, int)]
        if torch.Size(sizes).numel() > _LARGEST:
            return None
    target: Any = node.target
    plain = pytree.tree_map(lambda x: x.value if isinstance(x, Constant) else x, (args, kwargs))
    options = {key: value for key, value in plain[1].items() if key not in ("device", "pin_memory", "layout")}
    with torch.no_grad():
        result = target(*plain[0], **options)
    if isinstance(result, (tuple, list)):
        return tuple(Constant(x) if isinstance(x, torch.Tensor) else x for x in result)
    if not isinstance(result, torch.Tensor):
        return result
    recipe = (lambda: _traced(node, args, kwargs)) if op_name(node) in RULES else None
    return Constant(result, recipe)


def _traced(node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of a node by its rule, in the dtypes that torch computes."""
    rule = RULES[op_name(node)]
    trace, expected = Trace.current(), node.meta.get("val")

    def ready(x: Any) -> Any:
        return trace.tensor(x) if isinstance(x, Parameter) else x

    if rule.operands:
        dtype = short_dtype(expected.dtype if rule.operands == "result" else _common(node))
        args, kwargs = pytree.tree_map(lambda x: _cast(ready(x), dtype), (list(args), dict(kwargs)))
    else:
        args, kwargs = pytree.tree_map(ready, (list(args), dict(kwargs)))
    result = rule.function(*args, **kwargs)
    if isinstance(expected, (tuple, list)) and isinstance(result, (tuple, list)):
        return tuple(_checked(node, x, e) for x, e in zip(result, expected, strict=False))
    return _checked(node, result, expected)


def _cast(x: Any, dtype: str) -> Any:
    return ops.cast(x, dtype) if isinstance(x, (Tensor, Constant)) and x.dtype != dtype else x


def _common(node: torch.fx.Node) -> torch.dtype:
    """The dtype to which torch promotes the operands of a comparison."""
    operands = [x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in node.args[:2]]
    return torch.result_type(*operands) if len(operands) == 2 else operands[0].dtype


def _checked(node: torch.fx.Node, result: Any, expected: Any) -> Any:
    """A result in the dtype that torch computes. Raises GraphError for another shape."""
    if not isinstance(result, (Tensor, Constant)) or not isinstance(expected, torch.Tensor):
        return result
    same = len(result.shape) == expected.ndim and all(
        not isinstance(n, int) or n == actual for n, actual in zip(expected.shape, result.shape, strict=True)
    )
    if not same:
        raise GraphError(
            f"{op_name(node)} ({source_line(node)}): the rule computes shape {tuple(result.shape)} but torch "
            f"{tuple(expected.shape)}; correct the rule"
        )
    return _cast(result, short_dtype(expected.dtype))
