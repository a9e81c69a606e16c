"""The pass pipeline: the list of passes that every compilation runs, and the one runner of passes.

    final = run_passes(graph, ["complete", "reshard", "lower"], watch=print)

`PIPELINE` has one pass for each step from a stage of a program to the next (see `pass_registry`), and passes
that optimise a program of one stage.
`Strategy(passes=...)` adds passes to it, removes and replaces them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from distgraph.errors import GraphError, ShardingError
from distgraph.errors.arguments import switch_of
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.verifier import verify
from distgraph.passes.pass_registry import (
    GRAPH_STAGES,
    PASSES,
    STAGES,
    Pass,
    PassContext,
    Program,
    find_passes,
)

PIPELINE = (
    "dead_code_elimination",
    "choose_completion",
    "distribute_matmuls",
    "distribute_attention",
    "reshard",
    "lower",
    "bucket_gradients",
    "bucket_parameters",
    "fuse_reductions",
    "split_tasks",
    "split_user_tasks",
    "partition",
)
"""Names of the passes of a compilation, in order."""

VARIABLE = "DISTGRAPH_VERIFY"
LOG = logging.getLogger("distgraph.passes")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The passes of a compilation, in order, with one pass for each step from a stage to the next."""

    passes: tuple[Pass, ...]

    def into(self, stage: str) -> tuple[Pass, ...]:
        """The pass that takes the stage before this one and gives this one."""
        return tuple(each for each in self.passes if each.stage == stage != each.requires)

    def within(self, stage: str) -> tuple[Pass, ...]:
        """The passes that take a stage and give the same."""
        return tuple(each for each in self.passes if each.stage == stage == each.requires)

    def reaching(self, *stages: str) -> tuple[Pass, ...]:
        """The passes that give one of the stages."""
        return tuple(each for each in self.passes if each.stage in stages)

    def changed(self, changes: Iterable[str]) -> Pipeline:
        """The pipeline with passes added, removed and replaced.

        Args:
            changes: those of `Strategy(passes=...)`: "name" adds a pass behind those that give its stage (but
                before those that have to stand after it), "-name" removes one, and "name=other" puts another
                in its place.

        Raises:
            ShardingError: a pass does not exist, is not in the pipeline or is in it already, or the passes
                do not fit together.
        """
        passes = list(self.passes)
        for change in changes:
            _change(passes, change)
        return Pipeline(tuple(passes)).checked()

    def with_pass(self, added: Pass) -> Pipeline:
        """The pipeline with one more pass, behind those that give its stage. Raises ShardingError."""
        passes = list(self.passes)
        _add(passes, added)
        return Pipeline(tuple(passes)).checked()

    def checked(self) -> Pipeline:
        """The pipeline itself. Raises ShardingError: its passes do not fit together."""
        stage, names = STAGES[0], [each.name for each in self.passes]
        listed = f"the pipeline is {', '.join(names)}"
        for position, each in enumerate(self.passes):
            if each.requires != stage:
                raise ShardingError(
                    f"pass {each.name} takes a {each.requires} program but gets a {stage} one: each step to "
                    f'the next stage needs one pass, which "name=other" replaces; {listed}'
                )
            stage = each.stage
            late = next((name for name in each.after if name in names[position:]), None)
            if late is not None:
                raise ShardingError(f"pass {each.name} must stand after {late}; {listed}")
            excluded = next((name for name in each.excludes if name in names), None)
            if excluded is not None:
                raise ShardingError(
                    f"pass {each.name} excludes {excluded}; remove or replace one of them; {listed}"
                )
        if stage != STAGES[-1]:
            raise ShardingError(f"no pass turns a {stage} program into the next stage; {listed}")
        return self


def _change(passes: list[Pass], change: str) -> None:
    """Apply one change of `Strategy(passes=...)`."""
    name, replaces, other = change.partition("=")
    removes, name = name.startswith("-"), name.removeprefix("-")
    subject, names = f"passes of Strategy: {change!r}", [each.name for each in passes]
    for each in (name, other) if replaces else (name,):
        if each not in PASSES:
            raise ShardingError(
                f"{subject} names pass {each!r}, which does not exist; the passes are {', '.join(PASSES)}"
            )
    if (removes or replaces) and name not in names:
        raise ShardingError(
            f"{subject} names a pass that is not in the pipeline, which is {', '.join(names)}"
        )
    added = other if replaces else "" if removes else name
    if added in names:
        raise ShardingError(f"{subject} adds a pass that the pipeline has already; leave it out")
    if removes:
        del passes[names.index(name)]
    elif replaces:
        passes[names.index(name)] = PASSES[other]
    else:
        _add(passes, PASSES[name])


def _add(passes: list[Pass], added: Pass) -> None:
    """Insert a pass behind all that give its stage, or an earlier one, but before those to stand after it."""
    level = STAGES.index(added.stage)
    end = sum(STAGES.index(each.stage) <= level for each in passes)
    later = (n for n, each in enumerate(passes[:end]) if each.stage == added.stage and _follows(each, added))
    passes.insert(next(later, end), added)


def _follows(each: Pass, other: Pass) -> bool:
    """Whether a pass stands after another, or after one that does."""
    registered = (PASSES[name] for name in each.after if name in PASSES)
    return other.name in each.after or any(_follows(earlier, other) for earlier in registered)


def pipeline(changes: Iterable[str] = ()) -> Pipeline:
    """`PIPELINE`, changed (see `Pipeline.changed`)."""
    return Pipeline(find_passes(PIPELINE)).changed(changes)


@dataclass(frozen=True, slots=True)
class PassRun:
    """One run of a pass: the programs before and after it, and its seconds without verification."""

    ran: Pass
    before: Program
    after: Program
    seconds: float

    @property
    def name(self) -> str:
        """Of the pass."""
        return self.ran.name

    def changes(self) -> str:
        """What the pass changed of a graph: numbers of ops and of layouts."""
        old, new = ({op.name: op for op in graph.ops} for graph in (self.before, self.after))
        layouts = self.before.attrs
        counts = {
            "ops added": len(new.keys() - old.keys()),
            "removed": len(old.keys() - new.keys()),
            "changed": sum(op != old[name] for name, op in new.items() if name in old),
            "layouts set": sum(layouts.get(name) != attr for name, attr in self.after.attrs.items()),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "no change"

    def __str__(self) -> str:
        took = f"in {self.seconds * 1e3:.1f} ms"
        if not (isinstance(self.before, Graph) and isinstance(self.after, Graph)):
            return f"{self.name}: {took}"
        return f"{self.name}: {len(self.before.ops)} -> {len(self.after.ops)} ops {took}; {self.changes()}"


Watch = Callable[[PassRun], None]


def run_passes(
    program: Program,
    passes: Iterable[str | Pass],
    context: PassContext | None = None,
    watch: Watch | None = None,
    *,
    verified: bool = True,
) -> Program:
    """Run passes in order: verify the program before and after each, time it, log what it changed.

    Args:
        program: where to start.
        passes: in order, by name or as they are.
        context: for the passes; one of defaults otherwise.
        watch: called after each pass.
        verified: whether to verify around every pass. Without, only what passes from outside this package
            return is verified, unless the environment sets DISTGRAPH_VERIFY=1.

    Raises:
        GraphError: an unknown pass, or a graph that is malformed for the stage it is in.
        ShardingError: what the passes raise.
    """
    context = context or PassContext()
    verified = verified or switch_of(VARIABLE, GraphError)
    for each in find_passes(passes):
        before = program
        if verified and each.requires in GRAPH_STAGES:
            verify(before, each.requires)
        start = time.perf_counter()
        program = each.run(before, context)
        seconds = time.perf_counter() - start
        if verified or not each.shipped:
            _verify_result(each, before, program)
        run = PassRun(each, before, program, seconds)
        if LOG.isEnabledFor(logging.DEBUG):
            LOG.debug("%s", run)
        if watch is not None:
            watch(run)
    return program


def run_completion(serial: Graph, mesh: ProcessMesh | None = None) -> Graph:
    """A serial graph completed from its annotations alone, by the pass `complete`.

    Args:
        serial: annotated graph.
        mesh: of a graph without annotations.

    Raises:
        ShardingError: see `complete`.
    """
    completed: Graph = run_passes(serial, ("complete",), PassContext(mesh=mesh), verified=False)
    return completed


def _verify_result(each: Pass, before: Program, after: Program) -> None:
    if each.requires == each.stage and not isinstance(after, type(before)):
        raise GraphError(
            f"pass {each.name} returned a {type(after).__name__} but must return a {type(before).__name__}"
        )
    if each.stage not in GRAPH_STAGES:
        return
    try:
        verify(after, each.stage)
    except GraphError as error:
        raise GraphError(f"pass {each.name} returned a graph that is not {each.stage}: {error}") from None
