"""A compiled task, and the memory of a rank that its generated text is bound to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distgraph.runtime.transport import collectives


@dataclass(frozen=True, slots=True)
class CompiledTask:
    """A compiled task.

    Attributes:
        name: name of the task.
        post: starts the receives of micro-batch m; may be called before the task runs.
        body: runs micro-batch m, unless it is the last one.
        last: runs the last micro-batch, and the ops that run once per step.
        source: Python text of the three functions.
        scope: their globals; its "comm" is the transport that they use.
    """

    name: str
    post: Callable[[int], None]
    body: Callable[[int], None]
    last: Callable[[int], None]
    source: str
    scope: dict[str, Any]


@dataclass(slots=True)
class Arena:
    """Memory of one rank: arrays by value name, the feeds, and unfinished communication.

    Attributes:
        fixed: value name -> array that stays the same in all steps (sources in memory, persistent and scratch
            buffers, views of them).
        rings: root name -> buffers, one for each micro-batch in flight.
        feeds: input name -> one array for each micro-batch, or a scalar.
        pending: (value, micro-batch) -> handle of a collective that another task waits for.
        sends: root name -> for each of its buffers the unfinished sends from it.
        fused: name of a collective of several tensors -> the block of memory of its results.
        loops: name of a loop -> (micro-batch, operands, results) -> None, which runs it.
    """

    fixed: dict[str, Any]
    rings: dict[str, list[Any]]
    feeds: dict[str, Any]
    pending: dict[tuple[str, int], Any]
    sends: dict[str, list[list[collectives.Handle]]]
    fused: dict[str, Any] = field(default_factory=dict)
    loops: dict[str, Callable[[int, Sequence[Any], Sequence[Any]], None]] = field(default_factory=dict)
