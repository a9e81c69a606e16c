"""Strategy: how a program is to be distributed, apart from what its annotations say."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated

from distgraph.errors import GraphError, ShardingError
from distgraph.errors.arguments import Bounds, Count, check_fields
from distgraph.ir.mesh import ProcessMesh
from distgraph.plan.constraints import SEARCHED, SearchConstraints
from distgraph.plan.decisions import Decisions
from distgraph.plan.precision import MixedPrecision, precision_of
from distgraph.plan.schedule_text import given_schedule, text_table

MODES = ("manual", "semi", *SEARCHED)
REFINE = ("conflicts", "always", "never")
DEVICES = ["cpu", "gpu"]
"""Names of devices; `distgraph.runtime.execute.device.register_device` adds to them."""
EXECUTORS = ("static", "actors")
NONFINITE = ("raise", "skip", "warn")
ZERO = (0, 1, 2, 3)
ZERO_ORIGIN = "Strategy(zero="
"""How the origin of a layout begins that `zero` has made."""
STORED_ORIGIN = "as it is stored: "
"""How the origin of a layout begins in which an earlier program of the engine stores a tensor."""
GRADIENT_PRECISION = "bf16"
_DECIDED = ("micro_batches", "schedule")
"""Decisions that are settings of a program without a search too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How the engine distributes a program. Immutable.

    Attributes:
        mode: "semi" completes the annotations of the program; "manual" does too, but refuses a program in
            which a parameter of two dims or more has no annotation of its own. The others search a plan when
            the training program is first compiled, for the cluster of the engine, and keep to the
            annotations: "sharding_propagation" spreads layouts from annotated ops breadth first, "recursive"
            halves the devices again and again, "mesh2d" splits the linear layers over two axes and tunes
            their algorithms (docs/parallelism/matmul_algorithms.md), "auto" searches everything and takes
            the best forecast.
        micro_batches: parts into which a batch is cut; gradients are accumulated over them, and the stages of
            a pipeline work on different ones at the same time. It has to divide the batch size of `fit`,
            whose shorter last batch is cut into fewer parts if it must be. None for 1; in mode "auto" for the
            best number.
        schedule: order of the micro-batches in a pipeline: "1f1b", "gpipe", "eager-1f1b", "zb-h1",
            "interleaved-1f1b" and "zb-v" for stages that are reached several times, one that the program has
            registered (see `distgraph.plan.pipeline_schedules`), or a table as text or the path of a file
            with one (see `distgraph.plan.schedule_text`), which also says the number of micro-batches. None
            for "1f1b", in mode "auto" for the best one.
        stages, borders, layers, uniform: decisions that mode "auto" keeps to; what is not given is searched
            (see `distgraph.plan.constraints.SearchConstraints`).
        recompute: layers that are recomputed in the backward part instead of storing their activations:
            True for all, numbers of layers, or paths of modules such as "blocks.0", whose layers are meant.
            "auto" chooses them by the forecast: the fastest step within `memory`, on the engine's cluster,
            also where nothing else is searched. None and False for none; None in mode "auto" to search. See
            docs/planning/plan.md.
        zero: what the ranks that share a batch store in parts instead of whole: 0 nothing more than the
            annotations say; 1 the states of the optimiser; 2 the gradients too, which are reduced into parts
            as they are made; 3 the parameters too, which are gathered layer by layer for each use. Needs
            inputs whose first dim is split, such as by `batch_axis`. None for 0; in mode "auto" a decision
            that it keeps to, or searches. See docs/parallelism/data_parallel.md.
        memory: that a plan may use of each device, such as "8 GiB", or bytes. For modes that search and for
            recompute="auto"; None for what the device has.
        devices: number of devices that a plan may use, the first ones of the cluster.
        seconds: time limit of the search; None for 60.
        runtime: what is to execute a searched plan, such as "megatron" (docs/planning/runtimes.md); None for
            distgraph. Devices, seconds and runtime are for modes that search.
        mesh: where everything runs that no annotation places; without it, and without annotations, on one
            rank. Mode "auto" makes meshes itself: it takes one only with `batch_axis`, which annotates the
            inputs, so that layouts are searched on this mesh.
        batch_axis: axis (or axes) of `mesh` that split the first dim of every input: plain data parallelism
            in one word. Needs `mesh`.
        refine: what happens where annotations compete for an axis: "never" lets inputs and activations win
            over parameters; "conflicts" completes under every order of priorities, takes the one that sends
            least, and searches briefly from there for layouts of what nobody pinned that send less, also
            where an op cannot keep an annotation or reads less on its ranks in another order; "always"
            searches from every order, longer, with or without conflicts (slower to compile; the plan may look
            unlike what was annotated). Layouts that were searched have the origin "search" in reports.
        refine_budget: work after which the search of refine="always" ends with the best layouts found so far,
            counted and not timed, so that every rank and every run ends with the same ones: 1 for each layout
            of an op that is compared, 20 for each change of layout that is priced, 1 for each step examined
            in the search for its collectives, and 12 for each way to cut it into tiles between two meshes.
            The default, 500,000, is a few seconds. Needs refine="always".
        device: kind of device of the ranks: "cpu", or "gpu" to compute on CuPy arrays, which needs the extra
            cuda12 or cuda13, or one that the program has registered. Ranks on a mesh with a `device_type` are
            of that one, also beside others in one job. None for what a plan for several kinds of devices
            places ranks on, else "cpu". Planning for a GPU needs none; see docs/running/gpu.md.
        cuda_graphs: whether ranks on GPUs launch stretches of ops as CUDA graphs, each by one call of the
            host, with the same numbers. It has no effect on ranks with other devices, and is an error if no
            rank has a GPU. Not yet run on hardware; see docs/running/gpu.md.
        nonfinite: what happens to a training step whose loss or gradients are nan or infinite. "raise" ends
            training with a RuntimeFault that names the parameters; "skip" leaves out the update of this step,
            on all ranks, and notes it in the history; "warn" warns once and trains on. Under the first two,
            parameters and states stay those of before the step. See docs/running/training_safety.md.
        verify_replicas: training steps between two comparisons of the parameters and states that several
            ranks hold equally, by checksums; a copy that differs ends training with a RuntimeFault that names
            tensors, ranks and possible causes. Samples that several MPI ranks read at such a step are
            compared too. None for no comparison; none is made of what one rank alone holds.

        passes: changes of the pass pipeline: "name" adds a registered pass behind those that give its stage,
            "-name" removes a pass, "name=other" puts another in its place. `distgraph inspect --list-passes`
            lists the passes; the engine refuses names that it does not have. A plan describes what completion
            decides: passes on serial graphs run before it is made and applied, those on later stages after.
        precision: "bf16" or "fp16" to compute in 16 bits, with parameters, states and reduced gradients in
            f32; a `dg.MixedPrecision` also says which ops do, and how the loss is scaled under fp16. None
            computes in the types of the model. See docs/parallelism/mixed_precision.md.
        gradient_precision: "bf16" to send gradients in 16 bits where the ranks that share a batch add them
            up, which halves these bytes and rounds each gradient before and after the sum; accumulated and
            updated in f32. None sends what is computed. See docs/parallelism/data_parallel.md.
        executor: how ranks choose the next task of a pipeline: "static" follows the order that was recorded
            under the simulated clock; "actors" runs what is ready first, within the credits and by the
            priority of the schedule, as messages arrive. Results are equal bit for bit. A schedule that is a
            table keeps its order under both. See docs/parallelism/schedules.md.

    Raises:
        ShardingError: an unknown mode, schedule, device, policy, executor or axis; passes that are no list of
            changes; fewer than one micro-batch, or step between comparisons; a `zero` that is not 0 to 3;
            an unknown precision, or one that does not fit mode or policy; a `gradient_precision` other than
            bf16; a `device` while all ranks of `mesh` need others; a `cuda_graphs` that is neither True nor
            False; a constraint of the search in a mode that does not search, or one that contradicts another;
            a budget below one, or without a search.

    Example:
        >>> Strategy(mesh=ProcessMesh.grid(dp=4), batch_axis="dp", micro_batches=2).mode
        'semi'
    """

    mode: str = "semi"
    micro_batches: Count | None = None
    schedule: str | None = None
    stages: Count | None = None
    borders: Sequence[int] | None = None
    layers: Count | None = None
    recompute: bool | str | Sequence[int | str] | None = None
    zero: int | None = None
    uniform: bool = False
    memory: str | float | None = None
    devices: Count | None = None
    seconds: Annotated[float, Bounds(least=0, most=math.inf)] | None = None
    runtime: str | None = None
    mesh: ProcessMesh | None = None
    batch_axis: str | Sequence[str] | None = None
    refine: str = "conflicts"
    refine_budget: Count | None = None
    device: str | None = None
    cuda_graphs: bool = False
    nonfinite: str = "raise"
    verify_replicas: Count | None = None
    passes: Sequence[str] = ()
    precision: str | MixedPrecision | None = None
    gradient_precision: str | None = None
    executor: str = "static"

    def __post_init__(self) -> None:
        check_fields(self, ShardingError)
        if self.mode not in MODES:
            raise ShardingError(
                f"mode {self.mode!r} of Strategy does not exist; the modes are {', '.join(MODES)}"
            )
        self._read_schedule()
        for name, choices in (
            ("refine", REFINE),
            ("device", [None, *DEVICES]),
            ("nonfinite", NONFINITE),
            ("executor", EXECUTORS),
        ):
            if getattr(self, name) not in choices:
                raise ShardingError(
                    f"{name} {getattr(self, name)!r} of Strategy does not exist; it is one of "
                    f"{', '.join(choice for choice in choices if choice is not None)}"
                )
        if self.refine_budget is not None:
            self._check_budget(self.refine_budget)
        self._check_constraints()
        self._check_zero()
        self._check_passes()
        self._check_precision()
        if self.batch_axis is not None and not self.batch_axes:
            raise ShardingError(
                f"batch_axis of Strategy is {self.batch_axis!r} but must be the name of an axis, or several"
            )
        if self.mesh is not None and self.mode == "auto" and not self.batch_axes:
            raise ShardingError(
                f"mesh of Strategy is {self.mesh} but mode 'auto' makes meshes itself; leave mesh out, say "
                f"how many devices with devices={self.mesh.size}, or give batch_axis to keep to this mesh"
            )
        if self.batch_axes and self.mesh is None:
            raise ShardingError(
                f"batch_axis of Strategy is {self.batch_axis!r} but there is no mesh; give it one, or, where "
                "stages have meshes, annotate inputs in forward, such as "
                'dg.shard_tensor(x, mesh, ["dp", None])'
            )
        self._check_batch_axes()
        self._check_device()

    def _read_schedule(self) -> None:
        """Take the name of a schedule that is given as text, and the number of its micro-batches."""
        if self.schedule is None:
            return
        try:
            object.__setattr__(self, "schedule", given_schedule(self.schedule))
        except GraphError as error:
            raise ShardingError(str(error)) from None
        table = text_table(self.schedule)
        if table is None:
            return
        if self.mode in SEARCHED:
            raise ShardingError(
                f"schedule of Strategy is the table {table.name} for {table.stages} stages and "
                f"{table.micro_batches} micro-batches, but mode {self.mode!r} chooses these; use a schedule "
                'that is known by its name, or mode "semi"'
            )
        if self.micro_batches is None:
            object.__setattr__(self, "micro_batches", table.micro_batches)
        elif self.micro_batches != table.micro_batches:
            raise ShardingError(
                f"micro_batches of Strategy is {self.micro_batches!r} but the table of schedule {table.name} "
                f"has {table.micro_batches}; leave micro_batches out, or write a table for them"
            )

    def _check_batch_axes(self) -> None:
        for axis in self.batch_axes:
            assert self.mesh is not None
            self.mesh.axis_size(axis)

    def _check_device(self) -> None:
        """The device of a strategy is for the ranks of its mesh that need none of a certain type."""
        if self.device is None or self.mesh is None:
            return
        needed = {self.mesh.device_type_of(rank) for rank in self.mesh.members}
        if needed.isdisjoint({None, self.device}):
            raise ShardingError(
                f"device of Strategy is {self.device!r} but its {self.mesh} has the device_type "
                f"{', '.join(sorted(map(str, needed)))}; leave one of them out"
            )

    def _check_zero(self) -> None:
        if self.mode in SEARCHED or self.zero is None:
            return
        if self.zero not in ZERO:
            raise ShardingError(
                f"zero of Strategy is {self.zero!r} but must be 0, 1 (states are split), 2 (gradients too) "
                "or 3 (parameters too)"
            )

    def _check_passes(self) -> None:
        if not all(map(_is_change, self.passes)):
            raise ShardingError(
                f'passes of Strategy are {self.passes!r} but each must be "name", "-name" or "name=other"'
            )
        object.__setattr__(self, "passes", tuple(self.passes))

    def _check_precision(self) -> None:
        if self.mixed is not None and self.mode == "mesh2d":
            raise ShardingError(
                'mode of Strategy is "mesh2d", whose algorithms add partial products in the type of the '
                'operands, but precision is given; leave it out, or use mode "auto"'
            )
        if self.gradient_precision not in (None, GRADIENT_PRECISION):
            raise ShardingError(
                f"gradient_precision of Strategy is {self.gradient_precision!r} but must be "
                f"{GRADIENT_PRECISION!r}, which has the range of f32 as sums of gradients need it, or None"
            )
        if self.scaling is not None and self.nonfinite == "warn":
            raise ShardingError(
                'nonfinite of Strategy is "warn", which applies every update, but precision fp16 leaves out '
                'those that overflow; use nonfinite="skip" or "raise", or precision="bf16"'
            )

    def _check_budget(self, budget: int) -> None:
        if self.refine != "always":
            raise ShardingError(
                f"refine_budget of Strategy is {budget} but refine is {self.refine!r}, which takes "
                'none; use refine="always" or leave refine_budget out'
            )

    def _check_constraints(self) -> None:
        """Constraints make sense, and have a mode that keeps to them."""
        self.constraints.check_mode(self.mode, "Strategy")
        for name in ("seconds", "runtime") if self.mode not in SEARCHED else ():
            if (value := getattr(self, name)) is not None:
                raise ShardingError(
                    f"{name} of Strategy is {value!r} but mode {self.mode!r} searches nothing; leave {name} "
                    f'out, or use mode "auto"'
                )

    @property
    def constraints(self) -> SearchConstraints:
        """What a search keeps to. Raises ShardingError: constraints make no sense, or contradict another."""
        given = {field.name: getattr(self, field.name) for field in fields(SearchConstraints)}
        if self.mode not in SEARCHED:
            given["zero"] = None  # a setting of the program, see `split`
        return SearchConstraints(**given)

    @property
    def searches(self) -> bool:
        """Whether a plan is searched: by the mode, or for the layers that are recomputed."""
        return self.mode in SEARCHED or self.constraints.chooses

    @property
    def split(self) -> int:
        """`zero` of a program that is not searched."""
        return 0 if self.zero is None or self.mode in SEARCHED else self.zero

    @property
    def mixed(self) -> MixedPrecision | None:
        """`precision` as an object. Raises ShardingError if it is none."""
        return precision_of(self.precision)

    @property
    def scaling(self) -> MixedPrecision | None:
        """`mixed` if the loss is scaled, else None."""
        return self.mixed if self.mixed is not None and self.mixed.scales else None

    @property
    def start(self) -> Decisions:
        """Micro-batches and schedule of a program that is not searched."""
        return self.constraints.start

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """`batch_axis` as a tuple."""
        if self.batch_axis is None:
            return ()
        return (self.batch_axis,) if isinstance(self.batch_axis, str) else tuple(self.batch_axis)


def with_decisions(strategy: Strategy, decisions: Decisions) -> Strategy:
    """A strategy of mode "semi" that says what was decided, without constraints of a search."""
    free = {field.name: field.default for field in fields(SearchConstraints)}
    made = {name: value for name, value in decisions.decided().items() if name in _DECIDED}
    made["zero"] = max(decisions.zero, strategy.split) or None
    return replace(strategy, mode="semi", seconds=None, runtime=None, **{**free, **made})


def _is_change(change: object) -> bool:
    """Whether an entry of `passes` has the form of one; whether the passes exist is known to the engine."""
    return isinstance(change, str) and re.fullmatch(r"-?\w+|\w+=\w+", change) is not None
