"""The training specification of a training step that is a function: `StepSpec` traces it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from distgraph.engine.compile.strategy_passes import strategy_pipeline
from distgraph.engine.compile.training_spec import TrainingSpec, annotate_stored
from distgraph.engine.data import Field
from distgraph.engine.functional.accumulation import FACTOR, FIXED, Growth, growths
from distgraph.engine.functional.gradients import StepTrace, tracing_step
from distgraph.engine.functional.pytrees import check_same, leaves, map_leaves
from distgraph.errors import GraphError
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr
from distgraph.optim import Optimizer
from distgraph.passes.pass_pipeline import run_passes
from distgraph.passes.pass_registry import PassContext
from distgraph.plan.precision import MixedPrecision
from distgraph.tracing.tensor import Tensor, emit_one
from distgraph.tracing.tracer import Trace

Function = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptimizer(Optimizer):
    """Stands for the update that the training step computes itself; it has no inputs of its own."""

    def inputs(self, step: int, skipped: int = 0) -> dict[str, float]:
        """None."""
        return {}

    def _apply(self, slot: Any, g: Any, lr: Any, step: Any) -> None:
        raise AssertionError("a training step updates its state itself")


@dataclass(slots=True)
class StepProgram:
    """What is known about a training step as a program.

    Attributes:
        function: (state, batch) -> (state, metrics).
        state: pytree of what the state is: parameters and buffers of distgraph, with names.
        batch: pytree of the batch, whose leaves are replaced by tensors.
        samples: of the whole batch.
        stages: meshes of the stages at the marked boundaries; empty for none.
        marked: whether marked boundaries count.
        metrics: pytree of the metrics, whose leaves are labels of outputs; known after a trace.
    """

    function: Function
    state: Any
    batch: Any
    samples: int
    stages: tuple[ProcessMesh, ...] = ()
    marked: bool = True
    metrics: Any = None


@dataclass(frozen=True, slots=True)
class StepSpec(TrainingSpec):
    """A `TrainingSpec` whose forward, backward and update parts are one function."""

    program: StepProgram = field(default=None, compare=False, repr=False, kw_only=True)  # type: ignore[assignment]

    def trace(
        self,
        mode: str,
        fields: Mapping[str, Field],
        layouts: Mapping[str, DistAttr],
        pruned: bool = True,
        recompute: Sequence[Sequence[str]] = (),
    ) -> Graph:
        """The serial graph of one micro-batch, as `TrainingSpec.trace`.

        Raises:
            GraphError: the step does not return its state, or computes no gradient; a value cannot be
                accumulated over micro-batches; a metric or new state reads one of them; there are fewer
                marked boundaries than stages need; the precision is fp16.
        """
        if self.strategy.scaling is not None:
            raise GraphError(
                "precision of Strategy is 'fp16' but the loss of a training step that is a function is not "
                'scaled, so small gradients would become zero; use precision="bf16", or an Engine'
            )
        rows = next(iter(fields.values()))[0][0]
        program = self.program
        found: Mapping[str, Growth] = {}
        if program.samples > rows:
            found = growths(*(self._forward(fields, factor) for factor in (1, FACTOR)))
        count = program.samples // rows

        def accumulated(x: Tensor, like: Tensor) -> Tensor:
            return _accumulated(x, like, found.get(like.value.name, FIXED), count)

        def prepare(trace: Trace) -> None:
            trace.recompute(recompute)

        trace = Trace(mode)
        trace.training = True
        step = StepTrace(accumulated, prepare, program.stages, program.marked)
        with trace.activate(), tracing_step(step):
            state, metrics = self._called(trace, fields)
            assert step.loss is not None
            step.check_marks()
            if count > 1:
                self._check_behind(trace, state, metrics, count)
            self._store(trace, state)
            outputs = {"loss": step.loss, **self._labelled(trace, metrics)}
            annotate_stored(trace, layouts)
        self.parameters.update(trace.parameters)
        passes = strategy_pipeline(self.strategy).reaching("serial") if pruned else ()
        context = PassContext(precision=self.strategy.mixed or MixedPrecision())
        graph: Graph = run_passes(trace.finish(outputs), passes, context, verified=False)
        return graph

    def _forward(self, fields: Mapping[str, Field], factor: int) -> Graph:
        """What a step traces up to its gradient, for `factor` times as many samples."""
        wide = {name: ((shape[0] * factor, *shape[1:]), dtype) for name, (shape, dtype) in fields.items()}
        trace = Trace("forward")
        trace.training = True
        ops: list[Any] = []
        step = StepTrace(_unchanged, lambda trace: ops.extend(trace.ops), (), False)
        with trace.activate(), tracing_step(step):
            self._called(trace, wide)
        return Graph("forward", tuple(ops), (), ())

    def _called(self, trace: Trace, fields: Mapping[str, Field]) -> tuple[Any, Any]:
        """State and metrics that the function returns."""
        inputs = {n: trace.source("input", n, shape, dtype) for n, (shape, dtype) in fields.items()}
        self._place_inputs(trace, inputs)
        state = map_leaves(lambda path, leaf: trace.tensor(leaf), self.program.state)
        batch = map_leaves(lambda path, leaf: inputs[path or "batch"], self.program.batch)
        first = self.program.stages
        with trace.on(first[0]) if first and trace.name != "forward" else nullcontext():
            returned = self.program.function(state, batch)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise GraphError(
                f"the training step returned a {type(returned).__name__} but must return (state, metrics)"
            )
        return returned

    def _check_behind(self, trace: Trace, state: Any, metrics: Any, count: int) -> None:
        """Raises GraphError where a metric or a leaf of the new state is that of one micro-batch only."""
        partial: set[str] = set()
        for op in trace.ops:
            fed = op.kind == "input" and op.result.shape != ()
            if fed or (op.kind != "accumulate" and any(v.name in partial for v in op.operands)):
                partial.update(value.name for value in op.results)
        for subject, tree in (("metric", metrics), ("new state", state)):
            for path, leaf in leaves(tree):
                if isinstance(leaf, Tensor) and leaf.value.name in partial:
                    raise GraphError(
                        f"{subject} {path or 'leaf'} is computed from the batch outside of the loss but the "
                        f"batch is split in {count} micro-batches; return it from the loss with "
                        "has_aux=True, or use micro_batches=1"
                    )

    def _store(self, trace: Trace, new: Any) -> None:
        """Replace the state by the one that the function returned, at the end of the step."""
        check_same("the state that the training step returned", self.program.state, new)
        after = dict(leaves(new))
        for path, old in leaves(self.program.state):
            tensor, value = trace.tensor(old), trace.tensor(after[path])
            if value.value.name == tensor.value.name:
                continue
            if value.shape != tensor.shape:
                raise GraphError(
                    f"leaf {path} of the state is {tensor.value.type} but its new value is "
                    f"{value.value.type}; keep shapes"
                )
            value = value if value.dtype == tensor.dtype else value.astype(tensor.dtype)
            trace.updates.append((tensor.value.name, value.value))

    def _labelled(self, trace: Trace, metrics: Any) -> dict[str, Tensor]:
        """The metrics by label; numbers, accumulated already."""
        found: dict[str, Tensor] = {}

        def label(path: str, leaf: Any) -> str:
            tensor = trace.tensor(leaf)
            if tensor.shape != ():
                raise GraphError(
                    f"metric {path or 'metrics'} is {tensor.value.type} but must be one number; take its mean"
                )
            name = f"metrics.{path}" if path else "metrics"
            found[name] = tensor
            return name

        self.program.metrics = map_leaves(label, metrics)
        return found


def _unchanged(x: Tensor, like: Tensor) -> Tensor:
    return x


def _accumulated(x: Tensor, like: Tensor, growth: Growth, count: int) -> Tensor:
    """The value of the whole batch from that of a micro-batch, as `like` grows with the number of samples."""
    if growth.kind in ("rows", "other") or growth.power not in (0, 1):
        raise GraphError(
            f"%{like.value.name} {like.value.type} is no mean and no sum over the samples, so that {count} "
            "micro-batches cannot give it; average it over the samples, or use micro_batches=1"
        )
    mean = emit_one("accumulate", x)
    return mean * float(count) if growth.power == 1 else mean


def differentiated_leaves(program: StepProgram, fields: Mapping[str, Field]) -> set[str]:
    """Names of the leaves of the state by which a step differentiates its loss."""
    trace = Trace("forward")
    trace.training = True
    step = StepTrace(_unchanged, marked=False)
    with trace.activate(), tracing_step(step):
        inputs = {n: trace.source("input", n, shape, dtype) for n, (shape, dtype) in fields.items()}
        state = map_leaves(lambda path, leaf: trace.tensor(leaf), program.state)
        program.function(state, map_leaves(lambda path, leaf: inputs[path or "batch"], program.batch))
    if step.loss is None:
        raise GraphError(
            "the training step computes no gradient; call distgraph.grad or value_and_grad in it"
        )
    return set(step.differentiated)
