"""Warm start: the choice for one folded graph is transferred to another graph of the same program.

*In:* two formulations of one program on one mesh, whose graphs differ in the size of a micro-batch or in the
recomputed layers, and a choice for the first. *Out:* the choice for the second with the same layouts.
*Invariant:* a choice is transferred only if every op has the same options in both formulations; with further
options the transferred choice could be far from the best. Options that differ only in the partial sums that
pass through an op count as the same.

The profile of a transferred choice is an upper bound of the best cost of the second graph, and takes a tenth
of the time that solving takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distgraph.passes.search.intra_op.decision_nodes import OpNode, Stored, ValueNode
from distgraph.passes.search.intra_op.decode import ValueSpecs
from distgraph.passes.search.intra_op.formulate import Formulation
from distgraph.passes.search.layering.layer_folding import Fold

Ints = NDArray[np.intp]


def corresponding_ops(fold: Fold, other: Fold) -> Ints | None:
    """For every folded op of one graph the index of the corresponding folded op of another graph.

    Ops correspond if they are the k-th with the same role and link. If one graph has one op more with a role
    and link, that op recomputes a forward op and corresponds to the forward op.

    Returns:
        The indices; None if some op corresponds to none.
    """
    others = _names_by_role(other)
    index_of = {name: index for index, op in enumerate(other.ops) for name in op.members}
    corresponding: dict[str, str] = {}
    for (role, link), names in _names_by_role(fold).items():
        other_names = others.get((role, link), [])
        recomputed = [link] * (len(names) - len(other_names))
        if (
            len(recomputed) + len(other_names) != len(names)
            or len(recomputed) > 1
            or (recomputed and not link)
        ):
            return None
        corresponding.update(zip(names, (*recomputed, *other_names), strict=True))
    indices = [index_of.get(corresponding[op.op.name], -1) for op in fold.ops]
    complete = all(
        index >= 0 and op.op.kind == other.ops[index].op.kind
        for op, index in zip(fold.ops, indices, strict=True)
    )
    return np.array(indices, dtype=np.intp) if complete else None


def _names_by_role(fold: Fold) -> dict[tuple[str, str], list[str]]:
    """Names of ops by role and link, in program order."""
    names: dict[tuple[str, str], list[str]] = {}
    for op in fold.graph.ops:
        names.setdefault((op.role, op.link), []).append(op.name)
    return names


def transfer_choice(
    source: Formulation, choice: Sequence[int], target: Formulation, corresponding: Ints
) -> tuple[int, ...] | None:
    """The choice for a target formulation with the layouts of a choice for the source formulation.

    Both are of one program on one mesh; for `corresponding` see `corresponding_ops` of their folds.

    Returns:
        The choice; None if an op has other options in the target.
    """
    specs = ValueSpecs(source.fold, source.nodes, choice)
    options = []
    for node in target.nodes.all:
        option = (
            _op_option(source, choice, node, int(corresponding[node.number]))
            if isinstance(node, OpNode)
            else _value_option(source, choice, specs, target, node, corresponding)
        )
        if option is None:
            return None
        options.append(option)
    return tuple(options)


def _op_option(source: Formulation, choice: Sequence[int], node: OpNode, corresponding: int) -> int | None:
    """The option with the layout that the corresponding op has in the source."""
    index = source.nodes.of_op.get(corresponding)
    if index is None:
        return None
    strategies = source.nodes.strategies(corresponding)
    if strategies is node.strategies:
        return choice[index]
    axes, partial = strategies.options[choice[index]]
    options = node.strategies.options
    if {split for split, _ in strategies.options} != {split for split, _ in options}:
        return None
    return options.index((axes, partial)) if (axes, partial) in options else options.index((axes, ()))


def _value_option(
    source: Formulation,
    choice: Sequence[int],
    specs: ValueSpecs,
    target: Formulation,
    node: ValueNode,
    corresponding: Ints,
) -> int | None:
    """The option with the same layout and shared copy, else with the same layout, else as produced."""
    value = target.fold.values[node.number]
    number = source.fold.ops[int(corresponding[value.producer])].results[value.result]
    stored = specs.stored(number)
    preferred: list[Stored] = [(stored, None), (stored.without_partial(), None)]
    if number in source.nodes.of_value:
        preferred.insert(0, source.nodes.options(number)[choice[source.nodes.of_value[number]]])
    produced = specs.produced(source.fold.values[number])
    if produced is not None:
        preferred += [(produced, None), (produced.without_partial(), None)]
    return next((node.options.index(option) for option in preferred if option in node.options), None)
