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
from distgraph.frontends.torch.complex_numbers import Complex, complex_result
from distgraph.frontends.torch.exported_graph import Exported, module_path, op_name, source_line
from distgraph.frontends.torch.folded_constant import Constant
from distgraph.frontends.torch.opaque_ops import OPAQUE, opaque_results
from distgraph.frontends.torch.rule_registry import IGNORED, RANDOM, RULES
from distgraph.frontends.torch.torch_dtypes import short_dtype
from distgraph.nn.parameter import Parameter
from distgraph.tracing.annotations import pipeline_boundary
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

_LARGEST = 1 << 30
"""Bytes of the largest constant that is computed by torch: a causal mask of 32,768 positions."""

_VIEWS = {"aten.view.default", "aten._unsafe_view.default"}
_STRIDED = {"aten.as_strided.default", "aten.view.dtype", "aten.view_as_complex.default"}
"""Ops whose result depends on how the operand is stored."""


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
    values: dict[torch.fx.Node, Any] = {}
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
    results = _walk(exported.module, values, dict(boundaries))
    count = len(exported.mutated)
    return results[:count], results[count:]


def _walk(module: torch.fx.GraphModule, values: dict[torch.fx.Node, Any], ahead: dict[str, Any]) -> list[Any]:
    """The results of a graph or of a branch of `torch.cond`; `ahead`: boundaries that are still to come."""
    trace = Trace.current()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            attribute = getattr(module, node.target)
            values[node] = attribute if isinstance(attribute, torch.nn.Module) else Constant(attribute)
        elif node.op == "call_function":
            arguments = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            scope, base = module_path(node), trace.scope
            for path in [path for path in ahead if f"{scope}.".startswith(f"{path}.")]:
                pipeline_boundary(None, ahead.pop(path))
            scope = f"{base}.{scope}" if base and scope else base or scope
            with trace.on_behalf_of(trace.link, scope, source_line(node)):
                values[node] = _call(node, *arguments)
        elif node.op == "output":
            return [values[x] if isinstance(x, torch.fx.Node) else x for x in node.args[0]]
        elif node.op != "placeholder":
            raise GraphError(f"exported graph has a {node.op} {node.target}, which has no meaning here")
    raise AssertionError("an exported graph has an output")


def _branches(args: Sequence[Any]) -> tuple[Any, ...]:
    """The results of `torch.cond`: both branches are computed where the condition depends on data."""
    condition, *branches, operands = args
    if isinstance(condition, (bool, Constant)):
        chosen = bool(condition.value if isinstance(condition, Constant) else condition)
        return tuple(_branch(branches[0 if chosen else 1], operands))
    pairs = zip(*(_branch(branch, operands) for branch in branches), strict=True)
    return tuple(ops.where(condition, yes, no) for yes, no in pairs)


def _branch(module: torch.fx.GraphModule, operands: Sequence[Any]) -> list[Any]:
    trace = Trace.current()
    given = [trace.tensor(x) if isinstance(x, Parameter) else x for x in operands]
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    return _walk(module, dict(zip(inputs, given, strict=True)), {})


def _call(node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = op_name(node)
    if name in IGNORED:
        return None
    if node.target is torch.ops.higher_order.cond:
        return _branches(args)
    if not name:
        return _python(node, args, kwargs)
    if name.startswith("aten.sym_"):
        return _size(name, args)
    leaves = pytree.tree_leaves((args, kwargs))
    if name not in RANDOM and not any(isinstance(x, (Tensor, Parameter, Complex)) for x in leaves):
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
    """The results of a node without traced operands, computed by torch; None where they are too large.

    What is the same for every sample is computed and stored once: a causal mask takes the memory of one.
    """
    target: Any = node.target
    plain = pytree.tree_map(lambda x: x.value if isinstance(x, Constant) else x, (args, kwargs))
    options = {key: value for key, value in plain[1].items() if key not in ("device", "pin_memory", "layout")}
    values, shape = plain[0], None
    if op_name(node) in _VIEWS:
        target = torch.ops.aten.reshape.default  # which copies where repeated numbers cannot be viewed
    elif op_name(node) in _STRIDED:
        values = pytree.tree_map_only(torch.Tensor, lambda x: x.contiguous(), values)
    elif torch.Tag.pointwise in target.tags:
        tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]
        shape = torch.broadcast_shapes(*(x.shape for x in tensors))
        values = pytree.tree_map_only(torch.Tensor, _once, values)
    if _stored_bytes(target, values, options) > _LARGEST:
        return None
    with torch.no_grad():
        result = target(*values, **options)
    if isinstance(result, (tuple, list)):
        return tuple(Constant(x) if isinstance(x, torch.Tensor) else x for x in result)
    if not isinstance(result, torch.Tensor):
        return result
    recipe = (lambda: _traced(node, args, kwargs)) if op_name(node) in RULES else None
    result = _same_for_samples(node, result)
    return Constant(result if shape is None else result.expand(shape), recipe)


def _once(x: torch.Tensor) -> torch.Tensor:
    """A tensor once along the dims along which it repeats."""
    repeats = [n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True)]
    return x[tuple(slice(0, 1) if repeated else slice(None) for repeated in repeats)]


def _same_for_samples(node: torch.fx.Node, result: torch.Tensor) -> torch.Tensor:
    """A result that repeats along dims of symbolic size, such as the batch, where its numbers do."""
    expected = getattr(node.meta.get("val"), "shape", ())
    for d, size in enumerate(expected if len(expected) == result.ndim else ()):
        if isinstance(size, int) or result.shape[d] == 1 or result.stride(d) == 0:
            continue
        first = result.narrow(d, 0, 1)
        if result.numel() and torch.equal(result, first.expand_as(result)):
            result = first.clone().expand_as(result)
    return result


def _stored_bytes(target: Any, values: Any, options: Mapping[str, Any]) -> int:
    """Bytes of the largest result of an op, which is not computed."""

    def without_numbers(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    args, kwargs = pytree.tree_map_only(torch.Tensor, without_numbers, (values, dict(options)))
    if any(argument.name == "device" for argument in target._schema.arguments):
        kwargs["device"] = "meta"
    with torch.no_grad():
        results = pytree.tree_leaves(target(*args, **kwargs))
    return max((x.untyped_storage().nbytes() for x in results if isinstance(x, torch.Tensor)), default=0)


def _traced(node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of a node by its rule, in the dtypes that torch computes."""
    if any(isinstance(x, Complex) for x in pytree.tree_leaves((args, kwargs))):
        return complex_result(op_name(node), args, kwargs)
    if OPAQUE in node.meta:
        return opaque_results(node, node.meta[OPAQUE], args, kwargs)
    rule = RULES[op_name(node)]
    trace, expected = Trace.current(), node.meta.get("val")

    def ready(x: Any) -> Any:
        return trace.tensor(x) if isinstance(x, Parameter) else x

    if rule.operands:
        dtype = short_dtype(expected.dtype if rule.operands == "result" else _common(node))
        args, kwargs = pytree.tree_map(lambda x: _cast(ready(x), dtype), (list(args), dict(kwargs)))
    else:
        args, kwargs = pytree.tree_map(ready, (list(args), dict(kwargs)))
    try:
        result = rule.function(*args, **kwargs)
    except GraphError as error:
        raise GraphError(f"{op_name(node)} ({source_line(node)}): {error}") from error
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
            f"{tuple(expected.shape)} for the example; where the code of the model depends on the sizes of "
            "the example, give inputs of these sizes, or else correct the rule"
        )
    return _cast(result, short_dtype(expected.dtype))
