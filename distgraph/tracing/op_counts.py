"""Counts of an op, as in the strategies of MindSpore: into how many parts each dim of each operand is cut.

*In:* a function that computes one op, its tensors, counts. *Out:* a mesh and layouts. *Invariant:* dims that
are one index of the op's rule are cut by one mesh axis, which has the name of the index; ranks that the
counts leave over compute the same along an axis `repeat`.

    matmul "m k, k n -> m n" with ((2, 1), (1, 4)):  mesh(m=2, n=4), operands [m, _] and [_, n], result [m, n]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distgraph.errors import ShardingError
from distgraph.errors.arguments import is_integer
from distgraph.ir.graph import SOURCES, Op
from distgraph.ir.index_rule import Term
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import rule_of
from distgraph.ir.sharding_spec import UserDim
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

Counts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class CutOp:
    """The layouts of one op.

    Attributes:
        mesh: that computes it.
        operands: for every tensor of the call the axis that splits each dim.
        results: the same for every result.
    """

    mesh: ProcessMesh
    operands: tuple[tuple[UserDim, ...], ...]
    results: tuple[tuple[UserDim, ...], ...]


def cut_op(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    counts: Counts,
    mesh: ProcessMesh | None,
    where: str,
) -> CutOp:
    """The layouts of the op that a call computes.

    Args:
        function: computes one op.
        args, kwargs: of the call; the tensors among `args` are those of `counts`.
        counts: for each tensor the number of parts of each dim.
        mesh: whose ranks compute it; None for as many ranks as parts, from 0 on.
        where: source line, for messages.

    Raises:
        ShardingError: the call computes several ops or none, the counts are no counts of its tensors, cut a
            dim that the op needs whole, or contradict each other; the parts do not divide the ranks.
    """
    tensors = [a for a in args if isinstance(a, Tensor)]
    _check(counts, tensors, where)
    op, numbers = only_op(function, args, kwargs, where, "counts")
    rule = rule_of(op)
    pairs = zip(op.operands, rule.operands, strict=True)
    terms = {numbers[value.name]: term for value, term in pairs if value.name in numbers}
    sizes = _sizes(op, terms, counts, where)
    operands = (_dims(terms[n], sizes) if n in terms else (None,) * t.ndim for n, t in enumerate(tensors))
    results = tuple(_dims(term, sizes) for term in rule.results)
    return CutOp(_mesh(sizes, mesh, where), tuple(operands), results)


def _sizes(op: Op, terms: Mapping[int, Term], counts: Counts, where: str) -> dict[str, int]:
    """Index of the op -> its parts, of those that are cut."""
    parts: dict[str, dict[tuple[int, int], int]] = {}
    for number, term in terms.items():
        for dim, (count, indices) in enumerate(zip(counts[number], term, strict=True)):
            if indices and indices[0] not in rule_of(op).whole:
                parts.setdefault(indices[0], {})[number, dim] = int(count)
            elif count > 1:
                raise ShardingError(
                    f"shard_op ({where}): counts cut dim {dim} of tensor {number} into {count} parts but "
                    f"{op.kind} needs it whole; give it the count 1"
                )
    sizes = {index: _agreed(index, of_dims, op, where) for index, of_dims in parts.items()}
    return {index: count for index, count in sizes.items() if count > 1}


def _check(counts: Any, tensors: Sequence[Tensor], where: str) -> None:
    if not isinstance(counts, Sequence) or len(counts) != len(tensors):
        raise ShardingError(
            f"shard_op ({where}): counts are {counts!r} but the call has {len(tensors)} tensors; give one "
            f"tuple for each"
        )
    for number, (given, tensor) in enumerate(zip(counts, tensors, strict=True)):
        parts = [0] if isinstance(given, str) or not isinstance(given, Sequence) else list(given)
        if len(parts) != tensor.ndim or not all(is_integer(n) and n >= 1 for n in parts):
            raise ShardingError(
                f"shard_op ({where}): counts of tensor {number} are {given!r} but it has {tensor.ndim} dims; "
                f"give a number from 1 up for each"
            )


def only_op(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], where: str, given: str
) -> tuple[Op, dict[str, int]]:
    """The op of a call, and the tensor of the call that each of its operands is, by name.

    What is `given` to the op is "counts" or "axes", for messages.

    Raises:
        ShardingError: the call computes several ops or none.
    """
    trial = Trace(given)
    numbers: dict[str, int] = {}
    with trial.activate():
        stand_ins = []
        for a in args:
            if isinstance(a, Tensor):
                stand_in = trial.source("input", f"tensor{len(numbers)}", a.shape, a.dtype)
                numbers[stand_in.value.name] = len(numbers)
                stand_ins.append(stand_in)
            else:
                stand_ins.append(a)
        function(*stand_ins, **kwargs)
    ops = [op for op in trial.ops if op.kind not in SOURCES]
    if len(ops) != 1:
        kinds = ", ".join(op.kind for op in ops) or "none"
        raise ShardingError(
            f"shard_op ({where}): {given} are those of one op but the call computes {kinds}; give {given} to "
            f"each op, such as dg.shard_op(ops.matmul, {given}=...)"
        )
    return ops[0], numbers


def _agreed(index: str, parts: Mapping[tuple[int, int], int], op: Op, where: str) -> int:
    """The number of parts of an index, which all of its dims have."""
    if len(set(parts.values())) > 1:
        cuts = ", ".join(f"{n} in dim {dim} of tensor {tensor}" for (tensor, dim), n in sorted(parts.items()))
        raise ShardingError(
            f"shard_op ({where}): counts cut index {index} of {op.kind} into {cuts}; give its dims one count"
        )
    return next(iter(parts.values()))


def _mesh(sizes: Mapping[str, int], mesh: ProcessMesh | None, where: str) -> ProcessMesh:
    """Axes of these sizes on the ranks of a mesh, or on as many ranks as they need."""
    parts = math.prod(sizes.values())
    ranks = np.arange(parts) if mesh is None else mesh.ranks.reshape(-1)
    if len(ranks) % parts:
        raise ShardingError(
            f"shard_op ({where}): counts make {parts} parts but {mesh} has {len(ranks)} ranks, which they do "
            f"not divide; give other counts or another mesh"
        )
    repeats = {"repeat": len(ranks) // parts} if len(ranks) > parts or not sizes else {}
    shape = {**repeats, **sizes}
    return ProcessMesh(ranks.reshape(tuple(shape.values())), tuple(shape))


def _dims(term: Term, axes: Mapping[str, int]) -> tuple[UserDim, ...]:
    return tuple(indices[0] if indices and indices[0] in axes else None for indices in term)
