"""Constraints of a search: what its caller has decided already. What is not given is searched.

*In:* decisions of the caller. *Out:* the values that a decision may take, and which constraint a program
breaks. *Invariant:* a program that `broken_by` accepts keeps every constraint but those on memory and
devices, which the cluster that is searched keeps (`pools_of` and `with_memory` of `search_space`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from distgraph.errors import ShardingError
from distgraph.errors.arguments import check_count, is_integer
from distgraph.ir.range_notation import spans
from distgraph.plan.capabilities import Capabilities
from distgraph.plan.decisions import Decisions
from distgraph.plan.pipeline_schedules import schedule_names, schedule_policy

Value = TypeVar("Value")
ZERO_STAGES = (0, 1, 2, 3)
SEARCHED = ("sharding_propagation", "recursive", "mesh2d", "auto")
"""Modes that search; only "auto" searches more than layouts."""
_SETTINGS = ("manual", "semi", *SEARCHED)
AUTO = "auto"
"""Value of `recompute` that leaves the layers to the forecast, in modes that search nothing else too."""
_KEPT = {
    "micro_batches": _SETTINGS,
    "schedule": _SETTINGS,
    "recompute": ("manual", "semi", "auto"),
    "memory": SEARCHED,
    "devices": SEARCHED,
}
"""Constraint -> the modes that keep it; all others are for mode "auto" alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConstraints:
    """What a search keeps to. None, or False for `uniform`, leaves a decision to the search.

    Attributes:
        micro_batches: parts into which a batch is cut; they divide it.
        schedule: name of a pipeline schedule, also of one that is not searched by default.
        stages: number of pipeline stages.
        borders: first layer of every stage but the first; layers are counted from 0.
        layers: number of layers into which the forward part is cut, from which stages are made.
        recompute: True for all layers, False for none, the numbers of the layers that are recomputed, paths
            of the modules whose layers are (not in mode "auto"), or "auto" for those that memory asks for.
        zero: what the data axis `dp` may split besides the batch: 0 nothing, 1 optimiser states, 2 gradients
            too, as they are computed, 3 parameters too. The batch is split over `dp`.
        uniform: all stages have equally many devices in the same mesh shape.
        memory: that a device may use, such as "8 GiB", or bytes; what it has is the limit in any case.
        devices: number of devices that may be used: the first ones of the cluster.

    Raises:
        ShardingError: a value that no plan has, or two that contradict each other.

    Example:
        >>> SearchConstraints(stages=4, schedule="1f1b").among("stages", range(1, 9))
        (4,)
        >>> str(SearchConstraints(stages=4, memory="8 GiB"))
        'stages=4, memory=8 GiB'
    """

    micro_batches: int | None = None
    schedule: str | None = None
    stages: int | None = None
    borders: Sequence[int] | None = None
    layers: int | None = None
    recompute: bool | str | Sequence[int | str] | None = None
    zero: int | None = None
    uniform: bool = False
    memory: str | float | None = None
    devices: int | None = None

    def __post_init__(self) -> None:
        for name in ("micro_batches", "stages", "layers", "devices"):
            value = getattr(self, name)
            if value is not None:
                check_count(f"{name} of the search", value, ShardingError)
        if self.schedule is not None and self.schedule not in schedule_names():
            raise ShardingError(
                f"schedule {self.schedule!r} of the search does not exist; the schedules are "
                f"{', '.join(schedule_names())}"
            )
        if self.zero is not None and (not is_integer(self.zero) or self.zero not in ZERO_STAGES):
            raise ShardingError(
                f"zero of the search is {self.zero!r} but must be 0, 1 (states may be split), 2 (gradients "
                f"too) or 3 (parameters too)"
            )
        if not isinstance(self.uniform, (bool, np.bool_)):
            raise ShardingError(f"uniform of the search is {self.uniform!r} but must be True or False")
        self._check_memory()
        self._check_layers()

    def _check_memory(self) -> None:
        memory = self.memory
        if memory is None or (isinstance(memory, str) and memory.strip()):
            return
        if isinstance(memory, (str, bool)) or not memory > 0:
            raise ShardingError(
                f'memory of the search is {memory!r} but must be a size such as "8 GiB", or bytes'
            )
        if not math.isfinite(memory):
            raise ShardingError(f"memory of the search is {memory!r} but must be finite; leave it out")

    def _check_layers(self) -> None:
        object.__setattr__(self, "recompute", _recomputed(self.recompute))
        if self.borders is None:
            return
        object.__setattr__(self, "borders", _layers("borders", self.borders, 1))
        if not self.borders:
            raise ShardingError(
                "borders of the search are empty but must be the first layer of each further stage; for one "
                "stage give stages=1"
            )
        made, shown = len(self.borders) + 1, _numbers(self.borders, "borders")
        if self.stages is not None and self.stages != made:
            raise ShardingError(
                f"borders of the search are {shown}, which make {made} stages, but stages is {self.stages}; "
                "leave one of them out"
            )

    def check_mode(self, mode: str, owner: str = "the search") -> None:
        """Refuse constraints that a mode does not keep.

        Raises:
            ShardingError: only mode "auto" searches what is constrained, or the mode searches nothing.
        """
        if mode == "auto" and isinstance(self.recompute, tuple) and self.paths:
            raise ShardingError(
                f"recompute of {owner} names module {self.paths[0]!r} but mode 'auto' takes numbers of "
                f"layers; give their numbers, which distgraph plan prints"
            )
        if mode == "auto" and self.schedule is not None and schedule_policy(self.schedule).folded:
            raise ShardingError(
                f"schedule of {owner} is {self.schedule!r}, for pipelines that come back up their stages, "
                "but mode 'auto' makes none; name the stages in the program and use mode \"semi\", or give "
                "another schedule"
            )
        for name, value in self.given().items():
            if name == "memory" and self.chooses:
                continue
            if mode not in _KEPT.get(name, ("auto",)):
                raise ShardingError(
                    f"{name} of {owner} is {value!r} but mode {mode!r} does not search it; leave {name} out, "
                    f'or use mode "auto"'
                )

    def given(self) -> dict[str, str | int | float | bool]:
        """Constraint -> its value, of those that are given."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: (_numbers(value, name) or "none") if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None and not (name == "uniform" and not value)
        }

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.given().items())

    def over(self, other: SearchConstraints) -> SearchConstraints:
        """Both, where one gives nothing the other; these go first.

        Raises:
            ShardingError: together they contradict each other.
        """
        constraints = {field.name: getattr(self, field.name) for field in fields(self)}
        free = {field.name: field.default for field in fields(self)}
        return replace(
            other, **{name: value for name, value in constraints.items() if value is not free[name]}
        )

    def under(self, runtime: str, capabilities: Capabilities) -> SearchConstraints:
        """These constraints and those on stages that a runtime has.

        Raises:
            ShardingError: the runtime does not execute what is given.
        """
        stages, schedule = self.stage_count, self.schedule
        if capabilities.stages == "one":
            if stages not in (None, 1):
                raise ShardingError(
                    f"stages of the search is {stages} but runtime {runtime} has no pipeline; leave stages "
                    f"out, or search for another runtime"
                )
            return replace(self, stages=1)
        if schedule is not None and not capabilities.among([schedule]):
            raise ShardingError(
                f"schedule of the search is {schedule!r} but runtime {runtime} executes "
                f"{', '.join(capabilities.schedules)}; take one of them, or search for another runtime"
            )
        return replace(self, uniform=self.uniform or capabilities.stages == "equal")

    def among(self, name: str, values: Iterable[Value]) -> tuple[Value, ...]:
        """The values that a decision may take: the given one, or all of `values`."""
        value = getattr(self, name)
        return tuple(values) if value is None else (value,)

    @property
    def start(self) -> Decisions:
        """Decisions of a program about which nothing else was decided."""
        return Decisions(micro_batches=self.micro_batches or 1, schedule=self.schedule or "1f1b")

    @property
    def stage_count(self) -> int | None:
        """Number of stages, where it is given, also by borders."""
        return self.stages if self.borders is None else len(self.borders) + 1

    @property
    def chooses(self) -> bool:
        """Whether the forecast chooses what is recomputed, also where nothing else is searched."""
        return self.recompute == AUTO

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of modules among what is recomputed."""
        named = self.recompute if isinstance(self.recompute, tuple) else ()
        return tuple(path for path in named if isinstance(path, str))

    def recomputed(self, layers: int) -> tuple[int, ...] | None:
        """Numbers of the recomputed layers of a program of `layers` layers, besides those of modules; None
        where they are searched."""
        if self.recompute is None or self.chooses:
            return None
        if isinstance(self.recompute, tuple):
            return tuple(number for number in self.recompute if not isinstance(number, str))
        return tuple(range(layers)) if self.recompute else ()

    def broken_by(
        self, decisions: Decisions, borders: Sequence[int], layers: int, equal: bool, zero: int
    ) -> str:
        """The first constraint that a program does not keep, as text; "" where it keeps all.

        Args:
            decisions: about the whole program.
            borders: first layer of every stage but the first.
            layers: number of layers.
            equal: whether all stages have the same mesh shape.
            zero: what the data axis splits (see `zero`); 3 where that is not known.
        """
        actual = {
            "micro_batches": decisions.micro_batches,
            "schedule": decisions.schedule,
            "stages": len(borders) + 1,
            "borders": tuple(borders),
        }
        satisfied = {name: getattr(self, name) in (None, value) for name, value in actual.items()}
        satisfied["recompute"] = self.recomputed(layers) in (None, tuple(decisions.recompute))
        satisfied["zero"] = self.zero is None or max(zero, decisions.zero) <= self.zero
        satisfied["uniform"] = equal or not self.uniform
        return next(
            (f"{name}={self.given()[name]}" for name, is_kept in satisfied.items() if not is_kept), ""
        )


def _recomputed(given: object) -> bool | str | tuple[int | str, ...] | None:
    """What is recomputed, numbers of layers ascending and before paths of modules."""
    if given is None or isinstance(given, bool) or given == AUTO:
        return given
    paths: tuple[str, ...] = ()
    if isinstance(given, Sequence) and not isinstance(given, str):
        paths = tuple(path for path in given if isinstance(path, str) and path)
        given = tuple(number for number in given if number not in paths)
    return *sorted(_layers("recompute", given, 0)), *dict.fromkeys(paths)


def _layers(name: str, given: object, least: int) -> tuple[int, ...]:
    """Numbers of layers, ascending where they must be."""
    numbers = (
        tuple(given) if isinstance(given, (Sequence, np.ndarray)) and not isinstance(given, str) else None
    )
    if numbers is None or not all(is_integer(n) and n >= least for n in numbers):
        raise ShardingError(
            f"{name} is {given!r} but must be numbers of layers from {least} up"
            + (_RECOMPUTED if name == "recompute" else ", the first layer of each further stage")
        )
    if len(set(numbers)) < len(numbers) or (name == "borders" and list(numbers) != sorted(numbers)):
        raise ShardingError(f"{name} is {given!r} but must ascend, without a number twice")
    return tuple(int(n) for n in numbers)


def _numbers(layers: Sequence[int | str], name: str) -> str:
    """Numbers as they are given: borders one by one, layers in ranges, then paths of modules."""
    numbers = [number for number in layers if not isinstance(number, str)]
    if name == "borders":
        return ",".join(map(str, numbers))
    return ",".join(filter(None, [spans(numbers), *(path for path in layers if isinstance(path, str))]))


_RECOMPUTED = ', or paths of modules, or True or False or "auto"'
FREE = SearchConstraints()
"""Everything is searched."""
