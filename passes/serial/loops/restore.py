"""Back from a program with flat loops (see `flatten`) to loops with bodies.

*In:* the completed flat program.
*Out:* the program with loops, with the layouts of the flat one; ops that were added to a body are in it.
*Invariant:* a loop reads its operands and leaves its results in the layouts that the boundary ops have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.loops import CARRY, FIXED, ITEM, Loop, source_values
from distgraph.ir.sharding_spec import DistAttr
from distgraph.ops.control.loop_boundary import INTO, OUT_OF, TEST
from distgraph.passes.redistribution.source_layout import follow
from distgraph.passes.serial.loops.flatten import BODY, CONDITION, HELD, KIND, RESULTS, is_flat, loops_around

Attrs = Mapping[str, DistAttr]


def restore(flat: Graph) -> Graph:
    """The program with loops, whose bodies have the ops and layouts of a completed flat program."""
    if not is_flat(flat):
        return flat
    return _restored(flat, flat.ops, flat.attrs)


def _restored(base: Graph, ops: Sequence[Op], attrs: Attrs) -> Graph:
    """A graph with its loops, from its flat ops; `base` gives what is not about ops and layouts."""
    firsts = [op for op in ops if op.kind in OUT_OF and HELD in op.attrs]
    owner = {name: op.name for op in firsts for name in op.attrs[RESULTS]}
    loops = dict.fromkeys(owner.values())
    inside: dict[str, list[Op]] = {name: [] for name in loops}
    last = {}  # loop -> the last of its flat ops, where it stands
    for op in ops:
        name = next(loops_around(op.name, loops), "") or owner.get(op.name, "")
        if name:
            inside[name].append(op)
            last[name] = op.name
    made = []
    for op in ops:
        name = next(loops_around(op.name, loops), "") or owner.get(op.name, "")
        if not name:
            made.append(op)
        elif last[name] == op.name:
            made.append(_loop(name, inside[name], attrs))
    names = {value.name for op in made for value in op.results}
    return replace(
        base,
        ops=tuple(made),
        attrs={name: attr for name, attr in attrs.items() if name in names},
        placements={name: mesh for name, mesh in base.placements.items() if name in names},
        algorithms={name: each for name, each in base.algorithms.items() if name in names},
        axis_attrs={},
        op_axes={},
    )


def _loop(name: str, ops: Sequence[Op], attrs: Attrs) -> Op:
    """A loop, from its flat ops."""
    flat, prefix = {each.name: each for each in ops}, f"{name}/{BODY}/"
    first = flat[name]
    leaving = [flat[result] for result in first.attrs[RESULTS]]
    template = replace(first, kind=first.attrs[KIND], attrs=first.attrs[HELD], operands=())
    loop = Loop(template)
    body_ops = [_stripped(each, prefix) for each in ops if each.name.startswith(prefix)]
    sources = {each.result.name: each for each in loop.body.sources("state", "input")}
    layouts = _part(attrs, prefix)
    body = _restored(loop.body, body_ops, layouts)
    inner = [
        replace(sources[each.name], layout=follow(sources[each.name], layouts[each.name]))
        if each.kind in INTO
        else each
        for each in body.ops
    ]
    ends = [_stripped_value(each.operands[-1], prefix) for each in leaving]
    carries, stacked = loop.carried, loop.carried + loop.sums
    values = (*ends[stacked:], *ends[carries:stacked])  # outputs are the stacked ones, then the sums
    labels = (label for label, _ in loop.body.outputs)
    updates = zip((begin.name for begin, _ in loop.carries), ends[:carries], strict=True)
    body = body.with_ops(inner, outputs=tuple(zip(labels, values, strict=True)), updates=tuple(updates))
    body = _without_links_outside(body)
    bodies = {BODY: body}
    if loop.condition is not None:
        bodies[CONDITION] = _condition(name, loop.condition, ops, body, attrs)
    layout = leaving[0].layout
    assert layout is not None
    values_of = {f"{prefix}{value.name}": source for source, value in source_values(loop.body).items()}
    into = [each for each in ops if each.name in values_of and each.operands]
    read = {values_of[each.name]: each.operands[0] for each in into}
    operands = tuple(read[source] for source in sorted(read, key=_place))
    results = tuple(each.result for each in leaving)
    return replace(
        template,
        operands=operands,
        results=results,
        attrs={**template.attrs, **bodies},
        layout=OpLayout(layout.mesh),
    )


def _place(source: str) -> tuple[int, int]:
    """The order of operands: carries, items, fixed ones, each in the order of their numbers."""
    part = source.rstrip("0123456789")
    return (CARRY, ITEM, FIXED).index(part), int(source[len(part) :])


def _without_links_outside(body: Graph) -> Graph:
    """A body whose ops have no links to forward ops outside of it."""
    values = body.values
    return body.with_ops(op if op.link in values else replace(op, link="") for op in body.ops)


def _condition(name: str, condition: Graph, ops: Sequence[Op], body: Graph, attrs: Attrs) -> Graph:
    """The condition of a loop, whose sources are laid out as those of the body."""
    prefix, shared, inner = f"{name}/{CONDITION}/", source_values(body), source_values(condition)
    names = {f"{name}/{BODY}/{shared[source].name}": inner[source].name for source in inner}
    layouts = {inner[source].name: body.attrs[shared[source].name] for source in inner} | _part(attrs, prefix)
    sources = [
        replace(source, layout=follow(source, layouts[source.name]))
        for source in condition.sources("state", "input")
    ]
    moved = []
    for op in ops:
        if op.name.startswith(prefix):
            operands = tuple(replace(v, name=names.get(v.name, v.name)) for v in op.operands)
            moved.append(_stripped(replace(op, operands=operands), prefix))
    (test,) = (op for op in moved if op.kind == TEST)
    graph = _restored(condition, [op for op in moved if op is not test], layouts)
    layouts = {**{each.result.name: layouts[each.result.name] for each in sources}, **graph.attrs}
    outputs = ((condition.outputs[0][0], test.operands[0]),)
    return _without_links_outside(graph.with_ops([*sources, *graph.ops], outputs=outputs, attrs=layouts))


def _part(attrs: Attrs, prefix: str) -> dict[str, DistAttr]:
    return {name[len(prefix) :]: attr for name, attr in attrs.items() if name.startswith(prefix)}


def _stripped_value(value: Value, prefix: str) -> Value:
    return replace(value, name=value.name.removeprefix(prefix))


def _stripped(op: Op, prefix: str) -> Op:
    """An op of a body with the names that its values have there."""
    if RESULTS in op.attrs:
        names = tuple(name.removeprefix(prefix) for name in op.attrs[RESULTS])
        op = replace(op, attrs={**op.attrs, RESULTS: names})
    return replace(
        op,
        operands=tuple(_stripped_value(value, prefix) for value in op.operands),
        results=tuple(_stripped_value(value, prefix) for value in op.results),
        link=op.link.removeprefix(prefix),
    )
