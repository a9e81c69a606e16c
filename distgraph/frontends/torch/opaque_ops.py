"""Opaque ops of torch: ops without a rule that are computed by torch itself, or by functions of NumPy.

    import_module(net, example, opaque="elementwise")
    import_module(net, example, opaque={"mylib.whiten.default": "... d! -> ... d!"})

They become ops `opaque` of the graph (`distgraph.ops.opaque`), which have the name of the op, its arguments
and an index rule. The gradient is the one that autograd of torch computes of the op on the same block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.torch.complex_numbers import is_complex
from distgraph.frontends.torch.exported_graph import Exported, branch_nodes, op_name, source_line, unnamed_op
from distgraph.frontends.torch.opaque_functions import registered
from distgraph.frontends.torch.rule_registry import RULES
from distgraph.frontends.torch.torch_dtypes import short_dtype
from distgraph.ir.index_rule import Rule
from distgraph.ops.opaque import opaque, opaque_rule
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

ELEMENTWISE = "elementwise"
OPAQUE = "opaque"
"""Entry of the meta data of a node that is imported as an opaque op."""
_PLACEMENT = (torch.device, torch.layout, torch.memory_format)
"""Types of arguments that do not change the numbers of a result."""


@dataclass(frozen=True, slots=True)
class OpaqueOp:
    """How to import an op of torch that has no rule of distgraph.

    Attributes:
        rule: index rule of its tensors, such as "... d! -> ... d!" (docs/models/pytorch.md), or
            "elementwise". An index that a result lacks is never split.
        function: computes the op on a rank, of arrays of NumPy in place of tensors; by default the op itself.
        gradient: (gradients of the results, *arguments of the op) -> a gradient for each tensor among them,
            None for zero; by default that of torch, if it has one.
        traffic: how often the op moves its operands and results through memory, for the forecast; its
            gradient is forecast to move all that it reads and writes twice as often.
    """

    rule: str = ELEMENTWISE
    function: Callable[..., Any] | None = None
    gradient: Callable[..., Any] | None = None
    traffic: float = 1.0


@dataclass(frozen=True, slots=True)
class OpaqueOps:
    """What the user allows to import without a rule.

    Attributes:
        elementwise: whether every op that torch declares elementwise.
        named: name of an op -> how.
    """

    elementwise: bool = False
    named: Mapping[str, OpaqueOp] | None = None

    def names(self) -> Iterator[str]:
        """Names of the ops that were given one by one."""
        yield from self.named or ()

    def find(self, node: torch.fx.Node) -> OpaqueOp | str:
        """How a call is imported, or why it cannot be; an empty reason where nothing was said about it."""
        entry = (self.named or {}).get(op_name(node))
        if entry is None and not self.elementwise:
            return ""
        reason = _obstacle(node)
        if reason:
            return reason
        if entry is None:
            target: Any = node.target
            if torch.Tag.pointwise not in target.tags:
                return "torch does not declare it elementwise; give its index rule"
            entry = OpaqueOp()
        return _fitting(node, entry)


def opaque_ops(given: Any) -> OpaqueOps:
    """The argument `opaque` of `import_module`. Raises GraphError for what has no meaning."""
    if given is None:
        return OpaqueOps()
    if given == ELEMENTWISE:
        return OpaqueOps(elementwise=True)
    if not isinstance(given, Mapping):
        raise GraphError(
            f'opaque is {given!r} but must be "elementwise", or a dict of names of ops to index rules, '
            'such as {"mylib.scale.default": "... d! -> ... d!"}'
        )
    named = {}
    for name, each in given.items():
        if not isinstance(name, str) or name.count(".") != 2:
            raise GraphError(
                f"opaque names the op {name!r} but a name has a library, a name and an overload, such as "
                '"mylib.scale.default"'
            )
        if name in RULES:
            raise GraphError(f"opaque names the op {name}, which has a rule; leave it out")
        entry = OpaqueOp(each) if isinstance(each, str) else each
        if not isinstance(entry, OpaqueOp):
            raise GraphError(f"opaque[{name!r}] is {each!r} but must be an index rule or an OpaqueOp")
        _check_entry(name, entry)
        named[name] = entry
    return OpaqueOps(named=named)


def _check_entry(name: str, entry: OpaqueOp) -> None:
    for what, function in (("function", entry.function), ("gradient", entry.gradient)):
        if function is not None and not callable(function):
            raise GraphError(f"{what} of opaque op {name} is {function!r} but must be callable")
    rule: Any = entry.rule
    if not isinstance(rule, str):
        raise GraphError(
            f'rule of opaque op {name} is {rule!r} but must be "elementwise", or a text such as '
            '"... d! -> ... d!"'
        )
    traffic: Any = entry.traffic
    if isinstance(traffic, bool) or not isinstance(traffic, (int, float)) or not 0 < traffic < math.inf:
        raise GraphError(f"traffic of opaque op {name} is {traffic!r} but must be a finite number above 0")


def check_used(given: OpaqueOps, graphs: Sequence[Exported], model: str) -> None:
    """Raises GraphError where an op was given that no graph of a model calls."""
    nodes = [node for each in graphs for node in (*each.module.graph.nodes, *branch_nodes(each.module))]
    used = {op_name(node) for node in nodes if OPAQUE in node.meta}
    for name in given.names():
        if name not in used:
            raise GraphError(
                f"opaque names the op {name}, but {model} computes nothing of its inputs by it; leave it out"
            )


# whether a call can be imported


def _obstacle(node: torch.fx.Node) -> str:
    """Why a call cannot be imported under any rule; empty where it can."""
    target: Any = node.target
    if unnamed_op(node):
        return "it changes an operand in place, has effects or holds graphs"
    if target._schema.is_mutable:
        return "it changes an operand in place"
    if torch.Tag.nondeterministic_seeded in target.tags:
        return "it draws random numbers"
    values = pytree.tree_leaves(node.meta.get("val"))
    if not values or not all(isinstance(x, torch.Tensor) for x in values):
        return "a result is no tensor"
    operands = [x.meta.get("val") for x in node.all_input_nodes]
    if not all(isinstance(x, torch.Tensor) for x in operands):
        return "an argument is computed from sizes of tensors"
    if is_complex([*operands, *values]):
        return "it has complex numbers"
    for x in pytree.tree_leaves((node.args, node.kwargs)):
        if not isinstance(x, (torch.fx.Node, bool, int, float, str, torch.dtype, type(None), *_PLACEMENT)):
            return f"argument {x!r} is a {type(x).__name__}"
    return ""


def _fitting(node: torch.fx.Node, entry: OpaqueOp) -> OpaqueOp | str:
    """The entry, if its rule fits the shapes of the example; else how it does not."""
    try:
        rule = _bound(node, entry)
        shapes = [_lengths(x.shape) for x in _results(node)]
        made = [tuple(_length(rule, dim) for dim in term) for term in rule.results]
        if made != shapes:
            return f"its rule {_text(node, entry)!r} makes shapes {made} but torch {shapes}"
    except GraphError as error:
        return str(error)
    return entry


def _length(rule: Rule, dim: Sequence[str]) -> int:
    length = 1
    for index in dim:
        length *= rule.sizes[index]
    return length


def _bound(node: torch.fx.Node, entry: OpaqueOp) -> Rule:
    shapes = tuple(_lengths(x.shape) for x in _operands(node))
    return opaque_rule(shapes, {"rule": _text(node, entry), **_declared(node, entry)})


def _declared(node: torch.fx.Node, entry: OpaqueOp) -> dict[str, Any]:
    return {"dtypes": tuple(short_dtype(x.dtype) for x in _results(node)), "sizes": _new_sizes(node, entry)}


def _text(node: torch.fx.Node, entry: OpaqueOp) -> str:
    """The index rule of a call as text."""
    if entry.rule != ELEMENTWISE:
        return entry.rule
    return f"{', '.join(['...'] * len(_operands(node)))} -> {', '.join(['...'] * len(_results(node)))}"


def _new_sizes(node: torch.fx.Node, entry: OpaqueOp) -> dict[str, int]:
    """Lengths of the indices that only results have: dims of results named by one index."""
    left, _, right = _text(node, entry).partition("->")
    sizes: dict[str, int] = {}
    for part, result in zip(right.split(","), _results(node), strict=False):
        names = part.split()
        if "..." in part and len(names) <= result.ndim:
            place = names.index("...") if "..." in names else 0
            names[place : place + 1] = [""] * (result.ndim - len(names) + 1)
        for name, size in zip(names, result.shape, strict=False):
            index = name.rstrip("!")
            if index.isalnum() and index not in left.replace("!", " ").replace(",", " ").split():
                if not isinstance(size, int):
                    raise GraphError(f"index {index} of rule {_text(node, entry)!r} has a size that varies")
                sizes[index] = size
    return sizes


def _operands(node: torch.fx.Node) -> list[torch.Tensor]:
    """The tensors that a call reads, in the order of its arguments."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return [x.meta["val"] for x in leaves if isinstance(x, torch.fx.Node)]


def _results(node: torch.fx.Node) -> list[torch.Tensor]:
    return list(pytree.tree_leaves(node.meta["val"]))


def _lengths(shape: Sequence[Any]) -> tuple[int, ...]:
    """A shape in which symbolic sizes are those of the example."""
    return tuple(n if isinstance(n, int) else int(n.node.hint) for n in shape)


# tracing


def opaque_results(node: torch.fx.Node, entry: OpaqueOp, args: Any, kwargs: Any) -> Any:
    """The results of a call as an opaque op of the trace."""
    trace = Trace.current()
    leaves = pytree.tree_leaves((list(args), dict(kwargs)))
    nodes = pytree.tree_leaves((node.args, node.kwargs))
    operands: list[Tensor] = []
    for x, given in zip(leaves, nodes, strict=True):
        if isinstance(given, torch.fx.Node):
            tensor, dtype = trace.tensor(x), short_dtype(given.meta["val"].dtype)
            operands.append(tensor if tensor.dtype == dtype else ops.cast(tensor, dtype))
    name = op_name(node)
    try:
        results = opaque(
            registered(name, entry.function, entry.gradient),
            operands,
            _text(node, entry),
            traffic=entry.traffic,
            arguments=_template(node),
            **_declared(node, entry),
        )
    except GraphError as error:
        raise GraphError(f"{name} ({source_line(node)}) as an opaque op: {error}") from None
    return results[0] if isinstance(node.meta["val"], torch.Tensor) else results


def _template(node: torch.fx.Node) -> dict[str, Any]:
    """Arguments of a call as attributes of an op; a tensor is {"operand": its position}."""
    count = iter(range(len(_operands(node))))

    def shown(x: Any) -> Any:
        if isinstance(x, torch.fx.Node):
            return {"operand": next(count)}
        if isinstance(x, torch.dtype):
            return {"dtype": short_dtype(x)}
        return None if isinstance(x, _PLACEMENT) else x

    def walk(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {key: walk(each) for key, each in x.items()}
        return [walk(each) for each in x] if isinstance(x, (list, tuple)) else shown(x)

    return {"args": walk(node.args), "kwargs": walk(node.kwargs)}
