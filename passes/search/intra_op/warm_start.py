"""A choice for one folded graph as a choice for another graph of the same program.

*In:* two formulations of one program on one mesh, whose graphs differ in the size of a micro-batch or in the
layers that are computed again; a choice for the first. *Out:* the choice for the second that computes and
stores alike. *Invariant:* only where every op has the same options in both: were there more of them, what is
best among the fewer would say little. (Whether sums pass through it may differ.)

The profile of such a choice is what the second graph costs under some layouts: an upper bound of its best,
for a tenth of the time that the best takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distgraph.passes.search.intra_op.decision_nodes import OpNode, Stored, ValueNode
from distgraph.passes.search.intra_op.decode import Reading
from distgraph.passes.search.intra_op.formulate import Formulation
from distgraph.passes.search.layering.layer_folding import Fold

Ints = NDArray[np.intp]


def twins(fold: Fold, other: Fold) -> Ints | None:
    """For every folded op of one graph the one of another that computes the same; None where one has none.

    Ops are the k-th with their role and link. One more of these than in the other graph is a forward op that
    is computed again: its twin is that one.
    """
    others = _by_role(other)
    place = {name: number for number, op in enumerate(other.ops) for name in op.members}
    twin: dict[str, str] = {}
    for (role, link), names in _by_role(fold).items():
        same = others.get((role, link), [])
        again = [link] * (len(names) - len(same))
        if len(again) + len(same) != len(names) or len(again) > 1 or (again and not link):
            return None
        twin.update(zip(names, (*again, *same), strict=True))
    found = [place.get(twin[op.op.name], -1) for op in fold.ops]
    alike = all(
        at >= 0 and op.op.kind == other.ops[at].op.kind for op, at in zip(fold.ops, found, strict=True)
    )
    return np.array(found, dtype=np.intp) if alike else None


def _by_role(fold: Fold) -> dict[tuple[str, str], list[str]]:
    """Names of ops by role and link, in program order."""
    found: dict[tuple[str, str], list[str]] = {}
    for op in fold.graph.ops:
        found.setdefault((op.role, op.link), []).append(op.name)
    return found


def transferred(
    source: Formulation, choice: Sequence[int], target: Formulation, twin: Ints
) -> tuple[int, ...] | None:
    """The choice for a target that computes and stores as a choice for the source does.

    Args:
        source: what the choice is for.
        choice: [nodes of the source].
        target: of the same program on the same mesh.
        twin: `twins` of the target's fold and the source's.

    Returns:
        the choice; None where an op has other options.
    """
    reading = Reading(source.fold, source.nodes, choice)
    found = []
    for node in target.nodes.all:
        at = (
            _op_option(source, choice, node, int(twin[node.number]))
            if isinstance(node, OpNode)
            else _value_option(source, choice, reading, target, node, twin)
        )
        if at is None:
            return None
        found.append(at)
    return tuple(found)


def _op_option(source: Formulation, choice: Sequence[int], node: OpNode, twin: int) -> int | None:
    number = source.nodes.of_op.get(twin)
    if number is None:
        return None
    own = source.nodes.all[number]
    assert isinstance(own, OpNode)
    if own.strategies is node.strategies:
        return choice[number]
    axes, partial = own.strategies.options[choice[number]]
    options = node.strategies.options
    if {split for split, _ in own.strategies.options} != {split for split, _ in options}:
        return None
    return options.index((axes, partial)) if (axes, partial) in options else options.index((axes, ()))


def _value_option(
    source: Formulation,
    choice: Sequence[int],
    reading: Reading,
    target: Formulation,
    node: ValueNode,
    twin: Ints,
) -> int | None:
    """The same layout and shared copy; else the same layout; else one in which it may be made."""
    value = target.fold.values[node.number]
    number = source.fold.ops[int(twin[value.producer])].results[value.result]
    stored = reading.stored(number)
    wanted: list[Stored] = [(stored, None), (stored.without_partial(), None)]
    if number in source.nodes.of_value:
        at = source.nodes.of_value[number]
        own = source.nodes.all[at]
        assert isinstance(own, ValueNode)
        wanted.insert(0, own.options[choice[at]])
    made = reading.made(source.fold.values[number])
    if made is not None:
        wanted += [(made, None), (made.without_partial(), None)]
    return next((node.options.index(option) for option in wanted if option in node.options), None)
