"""The registry of passes: what a pass requires, what it produces, and which passes it excludes.

A pass is a pure function from a program to a program, registered under the name of its file:

    @register_pass("reshard", requires="completed", stage="resharded")
    def reshard(graph: Graph) -> Graph:

It may take a `PassContext` as its second argument. A pass from outside this package is registered in the same
way, and takes part in compilations whose `Strategy(passes=...)` names it. The stages of a program:

serial     a graph without layouts, as traced: forward, backward and optimiser of one micro-batch
completed  a graph in which every value and op has a layout
resharded  a graph in which every change of layout is a `reshard` op
lowered    a graph in which every change of layout is a collective
tasks      `Parts`: the lowered graph cut into tasks, for all ranks
rank       `RankProgram`: what one rank runs
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from distgraph.errors import GraphError
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.verifier import STAGES as VERIFIED
from distgraph.passes.redistribution.planner import Price, wire_price
from distgraph.plan.precision import MixedPrecision

F = TypeVar("F", bound=Callable[..., Any])
GRAPH_STAGES = VERIFIED
STAGES = (*GRAPH_STAGES, "tasks", "rank")

Program = Any
"""A Graph; at the stage "tasks" a Parts, at the stage "rank" a RankProgram."""


@dataclass(frozen=True, slots=True)
class PassContext:
    """What a pass may need in addition to the program.

    Attributes:
        mesh: of a serial graph whose annotations name none.
        layout_price: cost of a collective while layouts are chosen, before ranks are placed on devices.
        search_layouts: whether `choose_completion` searches for layouts of what nobody annotated from every
            completion, and of every program; otherwise from the cheapest one if annotations compete.
        search_budget: work after which that search ends (see `refine`); None for its default.
        price: cost of a collective, for the choice between sequences of them when a change of layout is
            lowered.
        rank: whose program `partition` makes, and passes on rank programs take.
        precision: of `mixed_precision`.
    """

    mesh: ProcessMesh | None = None
    layout_price: Price = wire_price
    search_layouts: bool = True
    search_budget: float | None = None
    price: Price = wire_price
    rank: int = 0
    precision: MixedPrecision = field(default_factory=MixedPrecision)


@dataclass(frozen=True, slots=True)
class Pass:
    """A registered pass.

    Attributes:
        name: of its file, on the command line and in `Strategy(passes=...)`.
        function: of a program, or of a program and a `PassContext`; returns a program.
        requires: stage of the program that it takes.
        stage: of the program that it gives: the same, or the next.
        after: names of passes that stand before it where a pipeline has both.
        excludes: names of passes that no pipeline has together with it.
        summary: what it does, in one line.
    """

    name: str
    function: Callable[..., Program]
    requires: str
    stage: str
    after: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    summary: str = ""

    def run(self, program: Program, context: PassContext) -> Program:
        """The program after the pass."""
        return self.function(program, context) if _takes_context(self.function) else self.function(program)

    @property
    def shipped(self) -> bool:
        """Whether the pass is part of this package."""
        return self.function.__module__.startswith("distgraph.")


@cache
def _takes_context(function: Callable[..., Program]) -> bool:
    """Whether a pass is called with a `PassContext`: to find out takes as long as a small pass."""
    return len(inspect.signature(function).parameters) > 1


PASSES: dict[str, Pass] = {}
"""Every registered pass by its name."""


def register_pass(
    name: str,
    *,
    stage: str,
    requires: str = "",
    after: Sequence[str] = (),
    excludes: Sequence[str] = (),
) -> Callable[[F], F]:
    """Register a function as a pass; the first line of its docstring says what the pass does.

    Args:
        name: an identifier; that of the file.
        stage: of the program that the pass gives.
        requires: stage of the program that it takes; by default the same.
        after: names of passes that stand before it where a pipeline has both.
        excludes: names of passes that no pipeline has together with it.

    Returns:
        a decorator for a function of a program, or of a program and a `PassContext`; the function stays as
        it is.

    Raises:
        GraphError: the name is no identifier or is that of another pass; a stage does not exist, or the pass
            skips one.

    Example:
        >>> @register_pass("change_nothing", stage="serial")
        ... def change_nothing(graph):
        ...     "Return the graph as it is."
        ...     return graph
        >>> PASSES.pop("change_nothing").summary
        'Return the graph as it is.'
    """
    requires = requires or stage
    if not name.isidentifier():
        raise GraphError(f"name of a pass is {name!r} but must be an identifier, such as fuse_bias")
    for each in (requires, stage):
        if each not in STAGES:
            raise GraphError(
                f"pass {name}: stage {each!r} does not exist; the stages are {', '.join(STAGES)}"
            )
    if STAGES.index(stage) - STAGES.index(requires) not in (0, 1):
        raise GraphError(
            f"pass {name} takes the stage {requires} and gives {stage} but must give {requires} or the next "
            f"stage; the stages are {', '.join(STAGES)}"
        )

    def register(function: F) -> F:
        other = PASSES.get(name)
        if other is not None and other.function.__module__ != function.__module__:
            raise GraphError(
                f"pass {name} of {function.__module__} has the name of one of {other.function.__module__}; "
                f"rename it"
            )
        summary = (inspect.getdoc(function) or "").partition("\n")[0]
        PASSES[name] = Pass(name, function, requires, stage, tuple(after), tuple(excludes), summary)
        return function

    return register


def find_passes(passes: Iterable[str | Pass]) -> tuple[Pass, ...]:
    """Passes, those given by name looked up. Raises GraphError: there is no such pass."""
    passes = tuple(passes)
    for each in passes:
        if isinstance(each, str) and each not in PASSES:
            raise GraphError(f"pass {each!r} does not exist; the passes are {', '.join(PASSES)}")
    return tuple(PASSES[each] if isinstance(each, str) else each for each in passes)
