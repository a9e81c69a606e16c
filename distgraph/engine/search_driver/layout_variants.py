"""What layouts are solved for, and what is made of the solutions: costs by layer, in a few variants a shape.

*In:* nothing, or a function that solves. *Out:* `LayoutQuery`, `Variant`, `Solutions`; `SolvingProcesses`, in
which several processes find them. *Invariant:* what passes between processes is small, but took long to find.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from distgraph.engine.search_driver.search_space import Shape
from distgraph.engine.search_driver.worker_pool import BackgroundCall, parallel_map
from distgraph.passes.search.inter_op.submesh_placement import SubMesh
from distgraph.passes.search.intra_op.chosen_layouts import Profile
from distgraph.passes.search.intra_op.memory_limit import MemoryLimit
from distgraph.passes.search.intra_op.restrictions import Restriction

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to lay out the layers on a mesh of some shape.

    Attributes:
        micro_batches: in a step.
        submesh, shape: devices and logical mesh.
        memory_multiplier: seconds a byte, as a Lagrange multiplier of the memory limit.
        restriction: what was forbidden.
        memory_limit: within which layouts were solved for; None without a limit.
        profile: costs by layer; recompute: the same where every layer is recomputed.
        estimate: the objective: seconds of a step, and what memory costs.
        solved: whether layouts were solved for this micro-batch count, not carried over from another.
    """

    micro_batches: int
    submesh: SubMesh
    shape: Shape
    memory_multiplier: float
    restriction: Restriction
    profile: Profile
    recompute: Profile
    estimate: float
    solved: bool
    memory_limit: MemoryLimit | None = None


VariantKind = Literal["fastest", "multipliers", "within memory"]
"""Which variants of a shape: the fastest, those of all memory multipliers, the fastest within a limit."""
VariantKey = tuple[int, SubMesh, Shape, Restriction, VariantKind, bool]
"""Micro-batch count, sub-mesh, shape, restriction, kind, and whether they are solved separately."""


@dataclass(frozen=True, slots=True)
class LayoutQuery:
    """What layouts of a stage are solved for; the memory multiplier is in seconds a byte."""

    devices: tuple[int, ...]
    shape: Shape
    memory_multiplier: float
    restriction: Restriction
    memory_limit: MemoryLimit | None = None


@dataclass(frozen=True, slots=True)
class Solutions:
    """What was solved, as one process sends it to another: small, but it took long.

    Attributes:
        choices: problem -> the best choice and its objective.
        bases: devices, shape and memory share -> micro-batch counts that were solved, with their multiplier.
        variants: of shapes.
    """

    choices: dict[object, tuple[tuple[int, ...], float]]
    bases: dict[object, dict[int, float]]
    variants: dict[VariantKey, tuple[Variant, ...]]

    def since(self, before: Solutions) -> Solutions:
        """What was solved after `before` was copied."""
        bases = {
            key: {m: multiplier for m, multiplier in counts.items() if m not in before.bases.get(key, ())}
            for key, counts in self.bases.items()
        }
        return Solutions(
            {key: choice for key, choice in self.choices.items() if key not in before.choices},
            {key: counts for key, counts in bases.items() if counts},
            {key: variants for key, variants in self.variants.items() if key not in before.variants},
        )

    def copy(self) -> Solutions:
        """A copy, to which nothing is added."""
        bases = {key: dict(counts) for key, counts in self.bases.items()}
        return Solutions(dict(self.choices), bases, dict(self.variants))

    def add(self, more: Solutions) -> None:
        """Add what another process solved."""
        self.choices.update(more.choices)
        self.variants.update(more.variants)
        for key, counts in more.bases.items():
            self.bases.setdefault(key, {}).update(counts)


@dataclass(eq=False)
class SolvingProcesses:
    """Processes that solve at the same time.

    Attributes:
        solutions: of all of them.
    """

    solutions: Solutions = field(default_factory=lambda: Solutions({}, {}, {}))
    _background: BackgroundCall[Any] | None = None
    _in_map: bool = False
    _item_seconds: float = 0.0

    def parallel_map(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        processes: int,
        *,
        serial_seconds: float = 0.0,
        pack: Callable[[Result], Result] = lambda result: result,
    ) -> list[Result]:
        """The results of `worker_pool.parallel_map`; what worker processes solve is added to the solutions.

        The calling process is alone for the first `serial_seconds`, as all items may take less time than
        forking, unless those of the last map took longer; within another map; and as long as a call in the
        background has the last process.
        """
        if self._in_map:
            return [function(item) for item in items]
        sent, begin = self.solutions.copy(), time.monotonic()
        end = begin + serial_seconds if self._item_seconds * len(items) < serial_seconds else begin

        def alone() -> bool:
            return time.monotonic() < end or (processes == 2 and self._background_runs)

        def computed(item: Item) -> tuple[Result, Solutions | None]:
            begin = time.monotonic()
            result = function(item)
            if serial_seconds:
                self._item_seconds = time.monotonic() - begin
            return result, None

        def with_solutions(result: tuple[Result, Solutions | None]) -> tuple[Result, Solutions | None]:
            nonlocal sent
            new, sent = self.solutions.since(sent), self.solutions.copy()
            return pack(result[0]), new

        self._in_map = True
        try:
            results: list[tuple[Result, Solutions | None]] = parallel_map(
                computed,
                items,
                max(min(processes, 2), processes - self._background_runs),
                alone,
                with_solutions,
            )
        finally:
            self._in_map = False
        for _, solutions in results:
            if solutions is not None:
                self.solutions.add(solutions)
        return [result for result, _ in results]

    @property
    def _background_runs(self) -> bool:
        return self._background is not None and self._background.running

    def in_background(self, function: Callable[[], Result]) -> Callable[[], Result | None]:
        """Begin a call in the background, and give up the one before. The function that is returned waits for
        the result, which is None where there is none, and adds the choices that the call has solved."""
        self.end_background()
        before = self.solutions.copy()
        call = self._background = BackgroundCall(lambda: (function(), self.solutions.since(before).choices))

        def wait() -> Result | None:
            if self._background is not call:
                return None  # it was given up
            made: tuple[Result, dict[object, tuple[tuple[int, ...], float]]] | None = call.result()
            self._background = None
            if made is None:
                return None
            self.solutions.choices.update(made[1])
            return made[0]

        return wait

    def end_background(self) -> None:
        """Give up the call in the background, if any."""
        if self._background is not None:
            self._background.end()
            self._background = None
