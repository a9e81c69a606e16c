"""`parallelize`: a training step written as a function of arrays, distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distgraph.engine.compile.program_summary import PlanView
from distgraph.engine.engine import Engine
from distgraph.engine.functional.state_arrays import StateArray, StateSource
from distgraph.engine.functional.step_spec import (
    StepOptimizer,
    StepProgram,
    StepSpec,
    differentiated_leaves,
)
from distgraph.engine.parameter_store import assign_tensors, gather_tensors
from distgraph.engine.validation import check_micro_batches
from distgraph.errors import GraphError, RuntimeFault, ShardingError, first_of
from distgraph.errors.arguments import check_count, checked_arguments, is_integer
from distgraph.ir.dtypes import short
from distgraph.ir.mesh import ProcessMesh
from distgraph.nn import Buffer, Parameter
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import Strategy
from distgraph.resources import Cluster, load_cluster, local_cluster
from distgraph.runtime.job.job_files import ranks_of_job
from distgraph.tracing.pytrees import leaves, map_leaves, same_leaves

if TYPE_CHECKING:
    from distgraph.runtime.forecast.forecast import Forecast

METHODS = ("data_parallel", "zero2", "zero3", "shard", "pipeline", "auto")
LAYERS = ("manual", "auto")


class ParallelizedStep:
    """A training step that runs on all ranks; made by `parallelize`.

    Attributes:
        engine: compiles and runs the step; None before the first batch is known. It has the plan, recordings
            and all else that engines have.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        strategy: Strategy,
        cluster: Cluster | None,
        stages: tuple[ProcessMesh, ...],
        marked: bool,
        donate: bool,
        plan: Plan | str | Path | None,
    ) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", "step")
        self.engine: Engine | None = None
        self._strategy, self._cluster, self._plan = strategy, cluster, plan
        self._stages, self._marked, self._donate = stages, marked, donate
        self._program: StepProgram | None = None
        self._tensors: dict[str, Parameter] = {}
        self._source = StateSource(self._gathered)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """One step of training.

        Args:
            state: pytree of arrays, or what the previous step returned, which is used up (donated).
            batch: pytree of arrays whose first dim is the samples, the same number in every step.

        Returns:
            the new state, whose leaves `numpy.asarray` gathers, and the metrics as numbers and NumPy arrays.

        Raises:
            GraphError, ShardingError, ResourceError: the step cannot be traced or distributed.
            RuntimeFault: the state was used up by an earlier step.
            NonFiniteError: the loss or a gradient is nan or infinite.
        """
        engine = self._prepared(state, batch)
        self._assign(engine, state)
        logs = engine.run(self._fields(batch))
        new = self._state()
        assert self._program is not None
        if not self._donate:
            new = map_leaves(lambda path, leaf: np.asarray(leaf), new)
        dims = self._program.sample_dims
        metrics = {
            label: np.moveaxis(np.asarray(x), 0, dims[label]) if label in dims else x
            for label, x in logs.items()
        }
        return new, map_leaves(lambda path, label: metrics[label], self._program.metrics)

    def plan(self, state: Any, batch: Any) -> PlanView:
        """The plan for such a state and batch, without running: print it, or `.portable.save(path)`."""
        return self._prepared(state, batch).plan

    def forecast(self, cluster: Cluster | str | Path | None = None, **options: Any) -> Forecast:
        """Seconds of a step and bytes of every rank, as `Engine.forecast`. Raises RuntimeFault before `plan`
        or the first step."""
        return self._ready("forecast").forecast(cluster, **options)

    def save(self, path: str | Path) -> None:
        """Write the state as a checkpoint, as `Engine.save`. Raises RuntimeFault before the first step."""
        self._ready("state").save(path)

    def load(self, path: str | Path) -> Any:
        """The state of a checkpoint, for the next step. Raises RuntimeFault before `plan` or a step."""
        self._ready("program").load(path)
        return self._state()

    def inspect(self, stage: str = "completed") -> str:
        """The training program as graph text: "completed", with layouts, or "lowered" to collectives.

        Raises:
            GraphError: there is no such stage.
            RuntimeFault: nothing was planned or run yet.
        """
        build = self._ready("program").plan.build
        graphs = {"completed": build.completed, "lowered": build.lowered}
        if stage not in graphs:
            raise GraphError(f"stage {stage!r} of a program does not exist; it is one of {', '.join(graphs)}")
        return str(graphs[stage])

    def close(self) -> None:
        """End the ranks' threads; the next step starts them again."""
        if self.engine is not None:
            self.engine.close()

    # Implementation

    def _state(self) -> Any:
        """The state that the ranks hold, as a new version."""
        version = self._source.advance()
        assert self._program is not None
        return map_leaves(
            lambda path, leaf: StateArray(self._source, leaf.name, leaf.shape, leaf.dtype, version),
            self._program.state,
        )

    def _prepared(self, state: Any, batch: Any) -> Engine:
        """The engine, with a compiled program for such a batch."""
        fields = self._fields(batch)
        samples = {len(array) for array in fields.values()}
        if self._program is not None:
            _check_leaves(self._fields(self._program.batch), fields)
        if len(samples) > 1:
            sizes = ", ".join(f"{name} {array.shape}" for name, array in fields.items())
            raise GraphError(
                f"leaves of the batch have different numbers of samples: {sizes}; give one number"
            )
        (count,) = samples
        if self.engine is None:
            self._begin(state, batch, fields, count)
        assert self.engine is not None
        assert self._program is not None
        if count != self._program.samples:
            raise GraphError(
                f"batch has {count} samples but the step was compiled for {self._program.samples}; leave a "
                "short batch out, or decorate the function a second time"
            )
        same_leaves("the state", self._program.state, state)
        if not self.engine.memory.records:
            self.engine.prepare(fields)
        return self.engine

    def _begin(self, state: Any, batch: Any, fields: Mapping[str, np.ndarray], samples: int) -> None:
        """Trace the step once to see which leaves of the state are parameters, and make the engine."""
        if self._plan is None:
            check_micro_batches(samples, self._strategy.start.micro_batches)
        types = {name: (array.shape, short(array.dtype)) for name, array in fields.items()}
        program = StepProgram(self.__wrapped__, map_leaves(_buffer, state), batch, samples)
        learned = differentiated_leaves(program, types)
        self._tensors = dict(_tensors(state, learned))
        program.state = map_leaves(lambda path, leaf: self._tensors[path], state)
        program.stages, program.marked = self._stages, self._marked
        self._program = program
        engine = Engine(_step_model, None, StepOptimizer(), (), self._strategy, self._cluster, 0, self._plan)
        session = engine._session
        spec = session.training_spec
        session.training_spec = StepSpec(
            spec.model, None, spec.optimizer, {}, spec.strategy, spec.parameters, program=program
        )
        self.engine = engine

    def _assign(self, engine: Engine, state: Any) -> None:
        """Give the ranks the leaves of the state that are arrays of the user's."""
        given: dict[str, np.ndarray] = {}
        for path, leaf in leaves(state):
            if isinstance(leaf, StateArray) and leaf.source is self._source:
                leaf.check_current()
            else:
                given[self._tensors[path].name] = np.asarray(leaf)
        if given:
            assign_tensors(engine._session.ranks(), engine.memory, engine.memory.records, given)

    def _gathered(self, name: str) -> np.ndarray:
        engine = self._ready("state")
        return gather_tensors(engine._session.ranks(), engine.memory, [name])[name]

    def _fields(self, batch: Any) -> dict[str, np.ndarray]:
        fields = {path or "batch": np.asarray(leaf) for path, leaf in leaves(batch)}
        if not fields:
            raise GraphError("batch has no leaves but a step needs samples; give at least one array")
        for name, array in fields.items():
            _check_field(name, array)
        return fields

    def _ready(self, what: str) -> Engine:
        if self.engine is None:
            raise RuntimeFault(f"{self.__name__} has no {what} yet; call it, or {self.__name__}.plan, first")
        return self.engine


def _step_model(**inputs: Any) -> Any:
    raise AssertionError("a training step is traced as a whole")


def _check_field(name: str, array: np.ndarray) -> None:
    """Raises GraphError where a leaf of the batch is no array of numbers with a row for each sample."""
    if array.dtype.kind in "USO":
        raise GraphError(
            f"leaf {name} of the batch has dtype {array.dtype} but must be numbers; encode or omit it"
        )
    if not array.ndim:
        raise GraphError(
            f"leaf {name} of the batch is the number {array} but must be an array whose first dim is the "
            "samples; repeat it for every sample, or keep it in the state"
        )
    if not len(array):
        raise GraphError(
            f"leaf {name} of the batch has shape {array.shape} but a step needs at least 1 sample; leave an "
            "empty batch out"
        )


def _check_leaves(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> None:
    """Raises GraphError where a batch has other leaves than the one that the step was compiled for."""
    if before.keys() != after.keys():
        differing = [name for name in (*before, *after) if (name in before) != (name in after)]
        raise GraphError(
            f"batch has the leaves {first_of(after)} but the step was compiled for "
            f"{first_of(before)}: different are {first_of(differing)}; give batches of one "
            "structure, or decorate the function a second time"
        )


def _buffer(path: str, leaf: Any) -> Parameter:
    array = np.asarray(leaf)
    buffer = Buffer(array.shape, array.dtype)
    buffer.name = path or "state"
    return buffer


def _tensors(state: Any, learned: set[str]) -> list[tuple[str, Parameter]]:
    """(path, parameter or buffer with its value). States of the shape of a parameter are named after it.

    The moments "m.layers.0.w" of a parameter "params.layers.0.w" become "params.layers.0.w.m", as those of
    the optimisers of distgraph, which ZeRO and searches know as its states.
    """
    owners = {path.split(".", 1)[-1]: path for path in learned}
    tensors: list[tuple[str, Parameter]] = []
    for path, leaf in leaves(state):
        array, name = np.asarray(leaf), path or "state"
        tensor = Parameter(array.shape, array.dtype) if name in learned else Buffer(array.shape, array.dtype)
        tensor.assign(array)
        rest = next((rest for rest in owners if path.endswith(f".{rest}")), None)
        if name not in learned and rest is not None:
            name = f"{owners[rest]}.{path[: -len(rest) - 1]}"
        tensor.name = name
        tensors.append((path, tensor))
    return tensors


@checked_arguments()
def parallelize(
    function: Callable[[Any, Any], Any] | None = None,
    *,
    method: str = "auto",
    devices: int | None = None,
    micro_batches: int | None = None,
    stages: int | None = None,
    layers: str = "auto",
    cluster: Cluster | str | Path | None = None,
    donate: bool = True,
    plan: Plan | str | Path | None = None,
    strategy: Strategy | None = None,
) -> Any:
    """Distribute a training step that is written as a serial function of arrays; a decorator.

    The step is (state, batch) -> (state, metrics), in NumPy and `distgraph.ops`; it calls `distgraph.grad` or
    `value_and_grad` once. What it computes before is run for each micro-batch, what it computes behind once a
    step. State and batch are pytrees of arrays.

    Args:
        function: the step.
        method: "data_parallel"; "zero2" or "zero3", which also split the state, or parameters too; "shard", a
            search for layouts on one mesh; "pipeline"; "auto", a search of everything.
        devices: ranks; by default those of the launcher, of the cluster, or 1.
        micro_batches: parts of a batch; by default 1, or for searches the best number.
        stages: of a pipeline.
        layers: of a pipeline: "manual" ends a stage at every `mark_pipeline_boundary`, and gives the stages
            equal numbers of ranks; "auto" searches the stages.
        cluster: what searches and forecasts are for; by default a local one of `devices` ranks.
        donate: whether a step uses its state up; with False it returns NumPy arrays.
        plan: a plan, or its file; takes the place of method, devices, micro_batches and stages, which are
            left out.
        strategy: takes the place of method, devices, micro_batches and stages, which are left out.

    Raises:
        ShardingError: the method does not exist, or the numbers do not fit together.

    Example:
        >>> import numpy as np, distgraph as dg
        >>> @dg.parallelize(method="data_parallel", devices=2, micro_batches=2)
        ... def train_step(w, batch):
        ...     loss, g = dg.value_and_grad(lambda w: ((batch["x"] @ w - batch["y"]) ** 2).mean())(w)
        ...     return w - 0.1 * g, {"loss": loss}
        >>> batch = {"x": np.eye(4), "y": np.ones((4, 1))}
        >>> w, metrics = train_step(np.zeros((4, 1)), batch)
        >>> metrics["loss"], np.asarray(w).ravel().round(3).tolist()
        (1.0, [0.05, 0.05, 0.05, 0.05])
    """
    if function is None:
        settings = {k: v for k, v in locals().items() if k != "function"}
        return lambda step: parallelize(step, **settings)
    if not callable(function):
        raise GraphError(f"parallelize is given a {type(function).__name__} but decorates a function")
    if method not in METHODS:
        raise ShardingError(
            f"method {method!r} of parallelize does not exist; it is one of {', '.join(METHODS)}"
        )
    decided = "plan" if plan is not None else "strategy" if strategy is not None else ""
    _check_settings(method, layers, decided, devices=devices, micro_batches=micro_batches, stages=stages)
    resources = load_cluster(cluster) if isinstance(cluster, (str, Path)) else cluster
    count = _ranks(devices, resources)
    meshes: tuple[ProcessMesh, ...] = ()
    if plan is not None:
        chosen = strategy or Strategy()
    elif strategy is not None:
        chosen = strategy
    elif method == "pipeline" and layers == "manual":
        meshes = _stage_meshes(stages, count)
        chosen = Strategy(mesh=meshes[0], batch_axis="dp", micro_batches=micro_batches)
    else:
        chosen = _strategy(method, count, micro_batches, stages)
        if chosen.mode == "auto" and resources is None:
            resources = local_cluster(count)
    marked = method == "pipeline" and layers == "manual"
    return ParallelizedStep(function, chosen, resources, meshes, marked, donate, plan)


def _check_settings(method: str, layers: str, decided: str, **given: int | None) -> None:
    """Raises ShardingError where settings of `parallelize` do not go together, or a "plan" or "strategy"
    decides them."""
    if layers not in LAYERS:
        raise ShardingError(f"layers of parallelize is {layers!r} but must be one of {', '.join(LAYERS)}")
    if layers == "manual" and method != "pipeline":
        raise ShardingError(
            f"layers of parallelize is 'manual' but method {method!r} does not read marks; give "
            "method='pipeline', or leave layers out"
        )
    settings = {"method": None if method == "auto" else method, **given}
    name = next((name for name, value in settings.items() if value is not None), None)
    if decided and name is not None:
        raise ShardingError(
            f"{name} of parallelize is {settings[name]!r} but a {decided} is given, which takes its place; "
            f"leave one of them out"
        )


def _ranks(devices: int | None, cluster: Cluster | None) -> int:
    if devices is not None:
        check_count("devices of parallelize", devices, ShardingError)
        return int(devices)
    return len(cluster.devices) if cluster is not None else ranks_of_job()


def _stage_meshes(stages: int | None, devices: int) -> tuple[ProcessMesh, ...]:
    """Meshes of the stages of a pipeline at marked boundaries."""
    if stages is None or not is_integer(stages) or stages < 2 or devices % stages:
        raise ShardingError(
            f"stages of parallelize is {stages!r} but a pipeline of marked layers on {devices} ranks needs a "
            "number from 2 up that divides them; give stages= and devices="
        )
    width = devices // stages
    return tuple(ProcessMesh.grid(number * width, dp=width) for number in range(stages))


def _strategy(method: str, devices: int, micro_batches: int | None, stages: int | None) -> Strategy:
    if stages is not None and method in ("data_parallel", "zero2", "zero3", "shard"):
        raise ShardingError(
            f"stages of parallelize is {stages} but method {method!r} has no pipeline; give "
            "method='pipeline', or leave stages out"
        )
    if method in ("data_parallel", "zero2", "zero3"):
        zero = {"zero2": 2, "zero3": 3}.get(method) if devices > 1 else None  # one rank has nothing to split
        mesh = ProcessMesh.grid(dp=devices)
        return Strategy(mesh=mesh, batch_axis="dp", zero=zero, micro_batches=micro_batches)
    searched = Strategy(mode="auto", devices=devices, micro_batches=micro_batches, stages=stages)
    return replace(searched, stages=1) if method == "shard" else searched
