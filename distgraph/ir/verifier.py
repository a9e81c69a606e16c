"""The verifier: the invariants of a graph at each stage; an error shows the faulty line, underlined.

serial     every operand is defined above, types fit, names are unique, outputs and updates exist
completed  also: every value has a layout, and every op a legal computation layout
resharded  also: every op reads and writes its values exactly in their stored layouts
lowered    also: every change of layout is one collective that makes exactly this change
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import numpy as np

from distgraph.errors import DistGraphError, GraphError, ShardingError
from distgraph.ir.collective_registry import NARROWED, WIRE, StepAttrs, halo_windows, of_one_tensor
from distgraph.ir.collectives import COLLECTIVES
from distgraph.ir.dtypes import NAMES, is_float, itemsize
from distgraph.ir.graph import ROLES, SOURCES, STORED, Graph, Op, Value
from distgraph.ir.index_rule import OpLayout, representable
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import (
    REGISTRY,
    infer_results,
    linear_groups,
    lookup,
    operand_layout,
    operand_mesh,
    operand_windows,
    result_layout,
    result_mesh,
    rule_of,
)
from distgraph.ir.printer import draw, op_cells
from distgraph.ir.sharding_spec import DistAttr, ShardSpec

STAGES = ("serial", "completed", "resharded", "lowered")
_NAME, _TYPE, _STORED, _CALL, _COMPUTED, _REST = range(6)  # cells of a printed line


def verify(graph: Graph, stage: str = "serial") -> Graph:
    """Check a graph.

    Args:
        graph: any graph.
        stage: serial, completed, resharded or lowered; each includes the ones before it.

    Returns:
        the graph itself.

    Raises:
        GraphError: the first fault, with the faulty part of the printed graph underlined.
    """
    if stage not in STAGES:
        raise GraphError(f"stage {stage!r} does not exist; the stages are {', '.join(STAGES)}")
    for op in graph.ops:
        _verify_bodies(graph, op, stage)
    level = STAGES.index(stage)
    defined: dict[str, Value] = {}
    for op in graph.ops:
        _check_op(graph, op, defined)
    for op in graph.ops:
        _check_link(graph, op)
    _check_ends(graph)
    for op in graph.ops if level else ():
        _check_completed(graph, op)
    if level > 1:
        _check_updates(graph)
    for op in graph.ops if level > 1 else ():
        _check_stored(graph, op, level)
    return graph


def _verify_bodies(graph: Graph, op: Op, stage: str) -> None:
    """Check the bodies of a loop, and that they are on its mesh."""
    bodies = lookup(op.kind).bodies if op.kind in REGISTRY else ()
    for name in bodies:
        body = op.attrs.get(name)
        if not isinstance(body, Graph):
            _fault(graph, op, _CALL, "", f"attribute {name} is no graph but {op.kind} needs one")
        try:
            verify(body, stage)
        except GraphError as error:
            raise GraphError(f"in {name} of %{op.name} {op.kind}: {error}") from None
        meshes = {attr.mesh for attr in body.attrs.values()}
        if stage == "serial" or op.layout is None:
            continue
        if any(mesh.rank_set != op.layout.mesh.rank_set for mesh in meshes):
            message = f"its {name} is on {', '.join(map(str, meshes))} but the loop on {op.layout.mesh}"
            _fault(graph, op, _COMPUTED, "", f"{message}: a loop has one mesh")


def _fault(graph: Graph, op: Op, cell: int, part: str, message: str) -> NoReturn:
    """Raise, with `^^^^` under `part` of one cell of the op's line, or under the whole cell."""
    cells = op_cells(graph, op)
    start = sum(len(c) + 1 for c in cells[:cell] if c)
    offset = cells[cell].find(part) if part else -1
    start, width = (start + offset, len(part)) if offset >= 0 else (start, len(cells[cell]))
    source = f" ({op.source})" if op.source else ""
    line = " ".join(c for c in cells if c)
    raise GraphError(
        f"graph @{graph.name}: %{op.name} {op.kind}{source}: {message}\n{draw(line, start, width)}"
    )


# serial


def _check_op(graph: Graph, op: Op, defined: dict[str, Value]) -> None:
    fault = partial(_fault, graph, op)
    if not op.results:
        raise GraphError(
            f"graph @{graph.name}: an op {op.kind} ({op.source}) has no result; every op makes a value"
        )
    for value in op.operands:
        if value.name not in defined:
            later = "is made only further down" if value.name in graph.values else "is made nowhere"
            fault(_CALL, f"%{value.name}", f"operand %{value.name} {later}; define it above its first use")
        if defined[value.name] != value:
            type_ = defined[value.name].type
            fault(_CALL, value.type, f"operand %{value.name} is read as {value.type} but made as {type_}")
    for value in op.results:
        if value.name in defined:
            fault(_NAME, f"%{value.name}", f"value %{value.name} is made twice; every value has one op")
        defined[value.name] = value
    if op.role not in ROLES:
        fault(_REST, op.role, f"role {op.role!r} is not one of {', '.join(ROLES)}")
    try:
        lookup(op.kind)
    except GraphError as error:
        fault(_CALL, op.kind, str(error))
    _check_results(graph, op)
    for value in op.results:
        attr = graph.attrs.get(value.name)
        if attr is None:
            continue
        try:
            attr.spec.check(value.shape, attr.mesh, f"%{value.name} {value.type}")
        except ShardingError as error:
            fault(_STORED, str(attr.spec), str(error))


def _check_results(graph: Graph, op: Op) -> None:
    fault = partial(_fault, graph, op)
    if op.kind in SOURCES:
        _check_source(graph, op)
        return
    try:
        inferred = [(tuple(shape), dtype) for shape, dtype in infer_results(op.kind, op.operands, op.attrs)]
    except (GraphError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = str(error) if isinstance(error, GraphError) else f"attributes do not fit the op ({error!r})"
        fault(_CALL, "", reason)
    if len(inferred) != len(op.results):
        fault(_NAME, "", f"op has {len(op.results)} results but its operands make {len(inferred)}")
    for position, (value, (shape, dtype)) in enumerate(zip(op.results, inferred, strict=True)):
        expected = Value(value.name, shape, dtype)
        if value != expected:
            cell, part = (_TYPE, value.type) if position == 0 else (_STORED, f"%{value.name} : {value.type}")
            fault(cell, part, f"result %{value.name} is {value.type} but its operands make {expected.type}")


def _check_source(graph: Graph, op: Op) -> None:
    if op.operands or len(op.results) != 1:
        _fault(graph, op, _CALL, "", f"{op.kind} has no operand and one result")
    if op.kind != "constant":
        if not isinstance(op.attrs.get("name"), str):
            _fault(graph, op, _CALL, "", f"{op.kind} has no name; it needs the attribute name")
    elif "value" not in op.attrs or np.shape(op.attrs["value"]) not in ((), op.result.shape):
        _fault(graph, op, _CALL, "", f"constant has no value of shape {op.result.shape}")


def _check_link(graph: Graph, op: Op) -> None:
    if op.link and op.link not in graph.values:
        _fault(graph, op, _REST, f"of %{op.link}", f"op belongs to %{op.link}, which is made nowhere")


def _check_ends(graph: Graph) -> None:
    if graph.micro_batches < 1:
        raise GraphError(
            f"graph @{graph.name} has {graph.micro_batches} micro-batches but needs at least one"
        )
    labels = [label for label, _ in graph.outputs]
    for label, value in graph.outputs:
        line = f"output {label!r} = %{value.name} : {value.type}"
        if labels.count(label) > 1:
            _end_fault(graph, line, repr(label), "label is used twice; give every output its own")
        _check_end(graph, line, value)
    updated = [name for name, _ in graph.updates]
    for name, value in graph.updates:
        line = f"update %{name} = %{value.name} : {value.type}"
        producer = graph.producers.get(name)
        if producer is None or producer.kind not in ("param", "state"):
            definition = "made nowhere" if producer is None else f"made by {producer.kind}"
            _end_fault(graph, line, f"%{name}", f"%{name} is {definition}; only a param or state is updated")
        if updated.count(name) > 1:
            _end_fault(graph, line, f"%{name}", f"%{name} is updated twice; a step has one new value for it")
        _check_end(graph, line, value)
        if value.type != producer.result.type:
            _end_fault(
                graph, line, value.type, f"%{name} is {producer.result.type} but its new value {value.type}"
            )
    for name in graph.placements:
        if name not in graph.values:
            _end_fault(graph, f"place %{name}", f"%{name}", f"%{name} is made nowhere")
    for name, algorithm in graph.algorithms.items():
        producer = graph.producers.get(name)
        if producer is None or not algorithm.computes(producer.kind):
            definition = "made nowhere" if producer is None else f"made by {producer.kind}"
            message = f"%{name} is {definition}; {algorithm.name} computes {' or '.join(algorithm.kinds)}"
            _end_fault(graph, f'algorithm %{name} "{algorithm}"', f"%{name}", message)


def _check_end(graph: Graph, line: str, value: Value) -> None:
    definition = graph.values.get(value.name)
    if definition is None:
        _end_fault(graph, line, f"= %{value.name}", f"%{value.name} is made nowhere")
    if definition != value:
        _end_fault(
            graph, line, value.type, f"%{value.name} is {value.type} here but made as {definition.type}"
        )


def _end_fault(graph: Graph, line: str, part: str, message: str) -> NoReturn:
    raise GraphError(f"graph @{graph.name}: {message}\n{draw(line, line.find(part), len(part))}")


# completed


def _check_completed(graph: Graph, op: Op) -> None:
    fault = partial(_fault, graph, op)
    for value in op.results:
        if value.name not in graph.attrs:
            fault(_NAME, f"%{value.name}", f"value %{value.name} has no layout; run the pass complete")
        if op.kind in STORED and graph.attrs[value.name].spec.partial:
            message = (
                f"{op.kind} %{value.name} is partial but each rank stores it whole; give it no partial axis"
            )
            fault(_NAME, f"%{value.name}", message)
    if op.layout is None:
        fault(_CALL, "", "op has no layout of its own; run the pass complete")
    if not op.kind.startswith("comm."):
        _check_layout(graph, op, op.layout)


def _check_layout(graph: Graph, op: Op, layout: OpLayout) -> None:
    fault = partial(_fault, graph, op)
    rule = rule_of(op)
    used: list[str] = []
    for index, axes in layout.axes:
        part = f"{index}:{'*'.join(axes)}"
        if index not in rule.indices:
            indices = ", ".join(rule.indices) or "none"
            fault(_COMPUTED, part, f"index {index} is not in its rule {rule.text!r}, which has {indices}")
        if index in rule.whole:
            fault(_COMPUTED, part, f"index {index} must be whole in {op.kind} but is split over {axes}")
        used += axes
    groups = linear_groups(op)
    for axis, group in layout.partial:
        part = f"partial {axis}:{group}"
        if not 0 <= group < len(groups):
            fault(_COMPUTED, part, f"linear group {group} does not exist; {op.kind} has {len(groups)}")
        used.append(axis)
    for axis in used:
        if axis not in layout.mesh.sizes:
            has = ", ".join(layout.mesh.axes)
            fault(_COMPUTED, axis, f"axis {axis!r} is not in {layout.mesh}, which has {has}")
        if used.count(axis) > 1:
            fault(_COMPUTED, axis, f"axis {axis!r} is used twice; it splits one index of an op")
    if not representable(rule, layout):
        fault(_COMPUTED, "", f"blocks of a dim would not be plain blocks under the rule {rule.text!r}")


# resharded and lowered


def _check_updates(graph: Graph) -> None:
    for name, value in (*graph.outputs, *graph.updates):
        if graph.producers[value.name].kind == "comm.reduce":
            line = f"{name} = %{value.name}"
            _end_fault(graph, line, f"%{value.name}", f"%{value.name} is the result of a reduce, on one rank")
    for name, value in graph.updates:
        old, new = graph.attrs[name], graph.attrs[value.name]
        if _blocks(old) != _blocks(new):
            line = f"update %{name} = %{value.name} {new.spec}"
            _end_fault(graph, line, str(new.spec), f"%{name} is stored as {old} but its new value as {new}")


def _check_windows(graph: Graph, op: Op) -> None:
    """Check that operands have the windows that an op reads."""
    for position, value in enumerate(op.operands):
        producer, read = graph.producers[value.name], operand_windows(op, position)
        windows = halo_windows(producer)
        if windows != read:
            message = (
                f"operand %{value.name} has windows {windows} but the op reads {read}; run the pass reshard"
            )
            _fault(graph, op, _CALL, f"%{value.name}", message)


def _check_operands(graph: Graph, op: Op, layout: OpLayout) -> None:
    """Check that operands are stored as an op reads them."""
    fault = partial(_fault, graph, op)
    for position, value in enumerate(op.operands):
        needed = DistAttr(operand_mesh(op, position), operand_layout(op, position))
        if _blocks(graph.attrs[value.name]) != _blocks(needed):
            stored = graph.attrs[value.name]
            fault(
                _CALL,
                f"%{value.name}",
                f"operand %{value.name} is stored as {stored} but read as {needed}; run the pass reshard",
            )


def _check_roots(graph: Graph, op: Op) -> None:
    """Check that a broadcast starts where its operand is, and that the result of a reduce is read there."""
    for value in op.operands:
        producer = graph.producers[value.name]
        for collective, other in ((op, producer), (producer, op)):
            if collective.kind != ("comm.broadcast" if collective is op else "comm.reduce"):
                continue
            root_of = lookup(other.kind).root
            expected = None if root_of is None else root_of(other)
            stated = tuple(collective.attrs.get("axes", ())), collective.attrs.get("root")
            if stated != expected:
                message = f"root of %{collective.name} is {stated} but that of %{other.name} is {expected}"
                _fault(graph, op, _CALL, f"%{value.name}", message)


def _check_stored(graph: Graph, op: Op, level: int) -> None:
    fault = partial(_fault, graph, op)
    _check_roots(graph, op)
    if op.kind == "reshard" and level > 2:
        fault(_CALL, "reshard", "change of layout is not lowered; run the pass lower")
    if op.kind == "reshard":
        return
    if op.kind.startswith("comm."):
        _check_comm(graph, op)
        return
    layout = op.layout
    assert layout is not None  # checked above
    _check_windows(graph, op)
    if op.kind == "identity" and _blocks(graph.attrs[op.operands[0].name]) == _blocks(graph.attrs[op.name]):
        return  # the layouts differ only by axes of size 1
    _check_operands(graph, op, layout)
    if op.kind in SOURCES:
        return  # constants are computed on every rank that reads them
    for position, value in enumerate(op.results):
        written = DistAttr(result_mesh(op, position), result_layout(op, position))
        if _blocks(graph.attrs[value.name]) != _blocks(written):
            stored = graph.attrs[value.name]
            fault(
                _STORED,
                str(stored.spec),
                f"result %{value.name} is stored as {stored} but left as {written}; run the pass reshard",
            )


def _blocks(attr: DistAttr) -> tuple[ProcessMesh, ShardSpec]:
    """Mesh and spec without the axes of size 1, which change nothing."""
    mesh, spec = attr.mesh, attr.spec
    if 1 not in mesh.shape:
        return mesh, spec
    dims = tuple(tuple(a for a in dim if mesh.axis_size(a) > 1) for dim in spec.dims)
    return mesh, ShardSpec(dims, tuple((a, kind) for a, kind in spec.partial if mesh.axis_size(a) > 1))


def _check_comm(graph: Graph, op: Op) -> None:
    """Check that a collective leads from the layouts of its operands to those of its results."""
    kind = op.kind.removeprefix("comm.")
    if len(op.operands) > 1 and not COLLECTIVES[kind].fusible:
        _fault(graph, op, _CALL, op.kind, f"{kind} takes one tensor but has {len(op.operands)}")
    if len(op.operands) > 1 and COLLECTIVES[kind].fusible == "pieces":
        dims = op.attrs.get("dims")
        if not isinstance(dims, tuple) or len(dims) != len(op.operands):
            message = f"one {kind} of {len(op.operands)} tensors has as many dims but dims is {dims}"
            _fault(graph, op, _CALL, op.kind, message)
    if WIRE in op.attrs:
        _check_wire(graph, op)
    for position, (operand, result) in enumerate(zip(op.operands, op.results, strict=True)):
        first, attrs = op.operands[0], graph.attrs
        if operand.dtype != first.dtype or attrs[operand.name].mesh != attrs[first.name].mesh:
            types = (f"{value.type} on {attrs[value.name].mesh}" for value in (first, operand))
            message = f"one {kind} takes tensors of one dtype on one mesh but has {' and '.join(types)}"
            _fault(graph, op, _CALL, f"%{operand.name}", message)
        single = of_one_tensor(op, position)
        _check_move(graph, op, kind, graph.attrs[operand.name], graph.attrs[result.name], single.attrs)


def _check_wire(graph: Graph, op: Op) -> None:
    """Check that the dtype of messages is a narrower one of a sum of floats."""
    wire, dtype = op.attrs[WIRE], op.operands[0].dtype
    sums = op.kind in NARROWED and op.attrs.get("reduction") == "sum"
    floats = isinstance(wire, str) and wire in NAMES and is_float(wire) and is_float(dtype)
    if not sums or not floats or itemsize(wire) >= itemsize(dtype):
        message = f"wire is {wire!r} but must be a float narrower than {dtype}, of an all_reduce or "
        _fault(graph, op, _CALL, "wire", f"{message}reduce_scatter that sums floats")


def _check_move(
    graph: Graph, op: Op, kind: str, source: DistAttr, target: DistAttr, given: Mapping[str, Any]
) -> None:
    """Check that a collective leads from the layout of one operand to that of its result.

    Args:
        given: attributes of the collective of this operand alone.
    """
    fault = partial(_fault, graph, op)
    if kind == "halo":
        _check_halo(graph, op)
        return
    if kind == "transfer":
        if source.spec.partial != target.spec.partial:
            fault(_STORED, str(target.spec), f"transfer from {source} to {target} would drop a reduction")
        return
    if source.mesh != target.mesh:
        fault(_CALL, op.kind, f"{kind} stays on one mesh but leads from {source.mesh} to {target.mesh}")
    attrs = StepAttrs(
        tuple(given.get("axes", ())),
        given.get("dim", 0),
        given.get("to_dim", 0),
        given.get("reduction", "sum"),
    )
    for axis in attrs.axes:
        if axis not in source.mesh.sizes:
            fault(_CALL, f'"{axis}"', f"axis {axis!r} is not in {source.mesh}")
    for problem in _problems(kind, source, target, attrs):
        fault(_STORED, str(target.spec), problem)


def _check_halo(graph: Graph, op: Op) -> None:
    """Check a halo: every part of a dim has a window that is no longer than the dim.

    The layout does not change, but for the order of the ranks of the mesh.
    """
    fault = partial(_fault, graph, op)
    source, target = graph.attrs[op.operands[0].name], graph.attrs[op.name]
    same_ranks = source.mesh.rank_set == target.mesh.rank_set and source.spec.partial == target.spec.partial
    if source != target and (not same_ranks or source.mesh == target.mesh):
        fault(_STORED, str(target.spec), f"halo leaves the layout as it is, but leads from {source}")
    for dim, windows in op.attrs["windows"]:
        parts, length = target.mesh.count(target.spec.dims[dim]), op.result.shape[dim]
        if len(windows) != parts:
            fault(_CALL, "", f"dim {dim} is split in {parts} parts but has {len(windows)} windows")
        for start, stop in windows:
            if not 0 <= stop - start <= length:
                fault(_CALL, "", f"window {start}:{stop} does not fit dim {dim} of length {length}")


def _problems(kind: str, source: DistAttr, target: DistAttr, attrs: StepAttrs) -> Iterator[str]:
    before, after = _blocks(source)[1], _blocks(target)[1]
    layout_after = COLLECTIVES[kind].layout_after
    if layout_after is None:
        if before.partial != after.partial:
            yield f"{kind} leads from {before} to {after}, but it moves blocks and reduces nothing"
        return
    try:
        result = layout_after(before, attrs)
    except IndexError:
        yield f"{kind} names dim {max(attrs.dim, attrs.to_dim)} but {before} has {len(before.dims)} dims"
        return
    except DistGraphError as error:
        yield str(error)
        return
    axes = ", ".join(attrs.axes)
    if result is None:
        yield f"{kind} over {axes} is not possible from {before}"
    elif result != after:
        yield f"{kind} over {axes} leads from {before} to {result} but the result is stored as {after}"
