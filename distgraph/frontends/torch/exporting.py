"""Export: the graph of ATen ops of a module of torch, with the names of its inputs, outputs and tensors."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from distgraph.errors import GraphError, first_of
from distgraph.frontends.torch.complex_numbers import has_rule, is_complex
from distgraph.frontends.torch.export_errors import check_in_place_changes, quiet_export, refused
from distgraph.frontends.torch.exported_graph import (
    Exported,
    Input,
    branch_nodes,
    depending_nodes,
    op_name,
    source_line,
    unnamed_op,
    value_text,
)
from distgraph.frontends.torch.forward_recording import computes_the_same
from distgraph.frontends.torch.fused_patterns import fuse_patterns
from distgraph.frontends.torch.layer_replication import replicate
from distgraph.frontends.torch.lost_gradients import noted_lost_gradients
from distgraph.frontends.torch.opaque_ops import OPAQUE, OpaqueOp, OpaqueOps
from distgraph.frontends.torch.recordable_modules import recordable_modules
from distgraph.frontends.torch.repeated_layers import Run, copied, find_runs
from distgraph.frontends.torch.rule_registry import IGNORED, RULES

_FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    AttributeError,
    KeyError,
    NotImplementedError,
)


def export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    dynamic_batch: bool,
    opaque: OpaqueOps,
    other: Exported | None = None,
) -> Exported:
    """Export a module in its present mode (training or evaluation).

    Of equal layers in a row only the first are exported, and their nodes are copied for the others, if two
    recordings of the forward pass show that this is the same program; else the whole module is.

    Args:
        module, args, kwargs, dynamic_shapes, dynamic_batch, opaque: as of `import_module`.
        other: of the other mode, if there is one; it is the result where both are equal.

    Raises:
        GraphError: torch cannot export the module, it changes an input or a parameter, or ops have no rule.
    """
    if dynamic_shapes is None and dynamic_batch:
        args, kwargs = pytree.tree_map(_at_least_two, (args, dict(kwargs)))
        shapes = torch.export.ShapesCollection()
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.ndim:
                shapes[leaf] = {0: torch.export.Dim.AUTO}
        dynamic_shapes = shapes.dynamic_shapes(module, args, dict(kwargs))
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it replaces layers by one op without a gradient
    try:
        with (
            warnings.catch_warnings(),
            quiet_export(),
            recordable_modules(),
            noted_lost_gradients(module) as lost,
        ):
            warnings.simplefilter("ignore")  # of torch, about itself
            result, runs = None, find_runs(module)
            if runs and computes_the_same(module, runs, args, kwargs):
                result = export_by_layers(module, runs, args, kwargs, dynamic_shapes, opaque, other)
            if result is None:
                result = export_whole(module, args, kwargs, dynamic_shapes, opaque, other)
        return replace(result, lost_gradients=tuple(lost)) if lost else result
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def export_by_layers(
    module: torch.nn.Module,
    runs: Sequence[Run],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    opaque: OpaqueOps,
    other: Exported | None,
) -> Exported | None:
    """Export a module whose layers are equal in each of `runs`; None where their graphs differ."""
    try:
        result = export_whole(copied(module, runs, {}), args, kwargs, dynamic_shapes, opaque, other)
    except Exception:  # noqa: BLE001 - the export of all layers reports it, if it is the model's
        return None
    if result is other:
        return result
    of_layers = tuple(f"{path}." for run in runs for path in run.paths)
    if any(name.startswith(of_layers) for name in result.mutated):
        return None  # their new values are outputs of the graph, which are not copied
    inputs = dict(result.inputs)
    if not all(replicate(result.module.graph, inputs, run, module) for run in runs):
        return None
    return replace(result, inputs=inputs)


def export_whole(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    opaque: OpaqueOps,
    other: Exported | None,
) -> Exported:
    """Export all layers of a module.

    Most of the time goes into decompositions, which are left out where both modes compute the same.
    """
    try:
        exported = torch.export.export(module, args, dict(kwargs), dynamic_shapes=dynamic_shapes)
        check_in_place_changes(exported, type(module).__name__)
        captured = _text(exported)
        if other is not None and captured == other.captured:
            return other
        _detach_outside_gradients(exported.graph)
        exported = exported.run_decompositions(_decompositions(opaque))
    except _FAILURES as error:
        raise refused(module, args, kwargs, error) from error
    for node in reversed(exported.graph.nodes):
        if op_name(node) in IGNORED and not node.users:  # it would keep alive what it checks
            exported.graph.erase_node(node)
    fuse_patterns(exported.graph)
    mutated = _changed_buffers(exported, type(module).__name__)
    changed = {*mutated, *(other.mutated if other is not None else ())}
    inputs = dict(_inputs(exported, input_names(module, args, kwargs), changed))
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    shapes_of = {inputs[n.name].name: n.meta["val"] for n in placeholders if inputs[n.name].kind == "input"}
    kind, names = output_names(exported.call_spec.out_spec)
    conditions = tuple(_conditions(exported, shapes_of))
    result = Exported(exported.graph_module, inputs, shapes_of, mutated, names, kind, captured, conditions)
    check_rules(result, type(module).__name__, opaque)
    return result


def _conditions(exported: Any, shapes: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    """Conditions of the export on the symbolic sizes of inputs, as expressions of sympy."""
    symbolic = (size for x in shapes.values() for size in x.shape if isinstance(size, torch.SymInt))
    first = next(symbolic, None)
    if first is None:
        return
    for symbol, size_range in exported.range_constraints.items():
        yield symbol >= size_range.lower
        yield symbol <= size_range.upper
    for guard in first.node.shape_env.guards:
        yield guard.expr


def _text(exported: Any) -> str:
    """All graphs and constants of an exported module: equal texts compute the same."""
    graphs = [str(part.graph) for part in exported.graph_module.modules() if hasattr(part, "graph")]
    constants = [f"{name} {value_text(value)}" for name, value in exported.constants.items()]
    return "\n".join([*graphs, *constants])


def _detach_outside_gradients(graph: torch.fx.Graph) -> None:
    """Mark what is computed under `torch.no_grad()`, which decompositions forget: its gradient is zero."""
    for node in list(graph.nodes):
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False:
            for result in list(node.users):
                with graph.inserting_after(result):
                    detached = graph.call_function(torch.ops.aten.detach.default, (result,))
                detached.meta = dict(result.meta)
                result.replace_all_uses_with(detached, lambda user, own=detached: user is not own)


def _changed_buffers(exported: Any, model: str) -> tuple[str, ...]:
    """Paths of the buffers that a step changes. Raises GraphError where it changes anything else."""
    names = {OutputKind.USER_INPUT_MUTATION: "input", OutputKind.PARAMETER_MUTATION: "parameter"}
    specs = exported.graph_signature.output_specs
    lines = {node.name: source_line(node) for node in exported.graph.nodes}
    for spec in specs:
        if spec.kind in names:
            line = lines.get(spec.arg.name, "?")
            where = "" if line == "?" else f" ({line})"
            raise GraphError(
                f"{model} changes its {names[spec.kind]} {spec.target} in place{where}, which a program "
                "cannot do; compute a new tensor from it"
            )
    return tuple(str(s.target) for s in specs if s.kind is OutputKind.BUFFER_MUTATION)


def _at_least_two(leaf: Any) -> Any:
    """A tensor with two samples where the example has one: torch takes a size of 1 for a constant."""
    if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == 1:
        return torch.cat([leaf, leaf])
    return leaf


def _decompositions(opaque: OpaqueOps) -> Any:
    """The decompositions of torch, without those of the ops that have a rule or are named as opaque."""
    table = torch.export.default_decompositions()
    for name in (*RULES, *opaque.names()):
        library, op, overload = name.split(".")
        packet = getattr(getattr(torch.ops, library), op, None)
        if packet is not None and overload in packet.overloads():
            table.pop(getattr(packet, overload), None)
    return table


def input_names(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Name of each leaf of the example inputs, after the arguments of the module's forward."""
    parameters = [
        p.name
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names = []
    for path, _ in pytree.tree_flatten_with_path((args, dict(kwargs)))[0]:
        first, second, *rest = (_key(entry) for entry in path)
        position = int(second) if first == "0" else -1
        if first == "1":
            base = second
        else:
            base = parameters[position] if position < len(parameters) else f"x{position}"
        names.append("_".join([base, *rest]))
    return names


def _key(entry: Any) -> str:
    return str(getattr(entry, "idx", getattr(entry, "key", getattr(entry, "name", entry))))


def output_names(spec: Any) -> tuple[str, tuple[str, ...]]:
    """How a module returns its outputs ("tensor", "tuple" or "dict"), and the name of each of them."""
    if spec.is_leaf():
        return "tensor", ("output",)
    names = tuple(".".join(path) for path in _paths(spec))
    return ("tuple" if spec.type in (tuple, list) else "dict"), names


def _paths(spec: Any) -> Iterator[tuple[str, ...]]:
    if spec.is_leaf():
        yield ()
        return
    children = spec.children()
    keys = getattr(spec.context, "_fields", spec.context)  # of a namedtuple, or of a dict
    keys = keys if isinstance(keys, (list, tuple)) else None
    named = keys is not None and len(keys) == len(children) and all(isinstance(k, str) for k in keys)
    for position, child in enumerate(children):
        key = str(keys[position]) if named and keys is not None else str(position)
        for path in _paths(child):
            yield (key, *path)


def _inputs(exported: Any, names: Sequence[str], changed: set[str]) -> Iterator[tuple[str, Input]]:
    """(name of the placeholder, what it is); buffers that are `changed` are no constants."""
    remaining = iter(names)
    for spec in exported.graph_signature.input_specs:
        name, path = spec.arg.name, str(spec.target)
        if spec.kind is InputKind.USER_INPUT:
            argument = next(remaining)
            is_tensor = isinstance(spec.arg, torch.export.graph_signature.TensorArgument)
            value = None if is_tensor else getattr(spec.arg, "value", None)
            yield name, Input("input" if is_tensor else "none", argument, value)
        elif spec.kind is InputKind.PARAMETER:
            yield name, Input("tensor", path)
        elif spec.kind is InputKind.BUFFER:
            value = exported.state_dict.get(path, exported.constants.get(path))
            fixed = not spec.persistent and path not in changed and value is not None and not value.is_meta
            yield name, Input("constant" if fixed else "tensor", path, value if fixed else None)
        elif spec.kind is InputKind.TOKEN:  # of an op with effects, which `check_rules` lists
            yield name, Input("none", name)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            yield name, Input("constant", path, exported.constants[path])
        else:
            raise GraphError(
                f"input {name} of the exported graph is a {spec.kind.name}, which has no meaning here"
            )


# ops without a rule


def _without_rule(node: torch.fx.Node) -> str:
    """Name of the op of a call, if it has no rule."""
    name = op_name(node) or unnamed_op(node)
    if not name or name in IGNORED:
        return ""
    if is_complex([operand.meta.get("val") for operand in node.all_input_nodes]):
        return "" if has_rule(name) else f"{name} of complex numbers"
    if name == "aten.index.Tensor" and any(_is_mask(operand) for operand in node.all_input_nodes[1:]):
        return f"{name} with a boolean mask, whose number of elements depends on the data"
    return "" if name in RULES else name


def _is_mask(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def check_rules(exported: Exported, model: str, opaque: OpaqueOps) -> None:
    """Mark the calls that are imported as opaque ops.

    Raises:
        GraphError: ops have neither a rule nor can be opaque; lists all, with the lines of the model that
            call them.
    """
    missing: dict[tuple[str, str], list[str]] = {}
    graph = exported.module.graph
    with_graphs = [node for node in graph.nodes if node.op == "call_function" and unnamed_op(node)]
    for node in [*depending_nodes(exported), *branch_nodes(exported.module), *with_graphs]:
        name = _without_rule(node)
        if not name:
            continue
        opaque_op = opaque.find(node)
        if isinstance(opaque_op, OpaqueOp):
            node.meta[OPAQUE] = opaque_op
            continue
        reason = opaque_op
        places = missing.setdefault((name, reason), [])
        if source_line(node) not in places:
            places.append(source_line(node))
    if missing:
        lines = [
            f"  {name} ({first_of(places)}){reason and ': ' + reason}"
            for (name, reason), places in missing.items()
        ]
        raise GraphError(
            f"{model} uses {len(missing)} op{'s' if len(missing) > 1 else ''} of torch without a rule:\n"
            + "\n".join(lines)
            + "\nwrite them with other ops (torch.where for masks), give each a rule with "
            '@distgraph.frontends.torch.register_torch_op("name"), or have torch compute those that are '
            'elementwise, opaque="elementwise", or treat positions of dims independently, '
            'opaque={"name": "index rule"}'
        )
