"""The training specification of a training step that is a function: `StepSpec` traces it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distgraph.engine.compile.training_spec import TrainingSpec, annotate_stored
from distgraph.engine.data import Field
from distgraph.engine.functional.gradients import StepTrace, tracing_step
from distgraph.engine.functional.whole_batch import (
    StepTracing,
    check_behind,
    depends_on_samples,
    samples_refusal,
)
from distgraph.errors import GraphError
from distgraph.ir.dtypes import is_float, itemsize
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr
from distgraph.optim import Optimizer
from distgraph.passes.analysis.accumulation import FIXED, Growth, growths
from distgraph.tracing.pytrees import leaves, map_leaves, same_leaves
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
        sample_dims: label of a metric that has a row for each sample, in front -> where its rows belong.
    """

    function: Function
    state: Any
    batch: Any
    samples: int
    stages: tuple[ProcessMesh, ...] = ()
    marked: bool = True
    metrics: Any = None
    sample_dims: dict[str, int] = field(default_factory=dict)


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
                accumulated over micro-batches; a metric or new state reads one of them, or their number of
                samples; there are fewer
                marked boundaries than stages need; the precision is fp16.
        """
        if self.strategy.scaling is not None:
            raise GraphError(
                "precision of Strategy is 'fp16' but the loss of a training step that is a function is not "
                'scaled, so small gradients would become zero; use precision="bf16", or an Engine'
            )
        rows = next(iter(fields.values()))[0][0]
        count = self.program.samples // rows
        whole, growth_of = self._whole(fields, count) if count > 1 else (None, {})
        per_sample: dict[str, int] = {}

        def accumulated(x: Tensor, like: Tensor) -> Tensor:
            return _accumulated(x, like, growth_of.get(like.value.name, FIXED), count)

        def further(path: str, x: Tensor) -> Tensor:
            growth = growth_of.get(x.value.name, FIXED)
            if growth.kind != "rows":
                return accumulated(x, x)
            result = x if not growth.power else x * float(count) ** growth.power
            per_sample[result.value.name] = growth.dim
            return result

        def prepare(trace: Trace) -> None:
            trace.recompute(recompute)

        trace = StepTracing(mode, whole)
        step = StepTrace(accumulated, further, prepare, self.program.stages, self.program.marked)
        with trace.activate(), tracing_step(step):
            state, metrics = self._called(trace, fields)
            assert step.loss is not None
            step.check_marks()
            if whole is not None:
                self._check_returned(trace, state, metrics, count, growth_of, per_sample)
            self._store(trace, state)
            outputs = {"loss": step.loss, **self._labelled(trace, metrics, per_sample)}
            if whole is not None:
                check_behind(trace, whole, growth_of, count)
            self._keep_unread(trace, outputs)
            annotate_stored(trace, layouts)
        return self._finished(trace, outputs, pruned)

    def _whole(self, fields: Mapping[str, Field], count: int) -> tuple[StepTracing, Mapping[str, Growth]]:
        """The trace for the whole batch, and how the values of the forward part depend on the samples."""
        forward: list[Graph] = []

        def traced(factor: int) -> StepTracing:
            wide = {n: ((shape[0] * factor, *shape[1:]), dtype) for n, (shape, dtype) in fields.items()}
            trace = StepTracing("forward")

            def prepare(trace: Trace) -> None:
                forward.append(Graph("forward", tuple(trace.ops), (), ()))

            step = StepTrace(_unchanged, prepare=prepare, marked=False, differentiable=False)
            with trace.activate(), tracing_step(step):
                state, metrics = self._called(trace, wide)
                if factor > 1:
                    self._store(trace, state)
                    self._labelled(trace, metrics, {})
            return trace

        traced(1)
        whole = traced(count)
        return whole, growths(forward[0], forward[1], count)

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

    def _check_returned(
        self,
        trace: Trace,
        state: Any,
        metrics: Any,
        count: int,
        growth_of: Mapping[str, Growth],
        per_sample: Mapping[str, int],
    ) -> None:
        """Raises GraphError where a metric or a leaf of the new state is that of one micro-batch only.

        Metrics with a row for each sample may be: those of the micro-batches follow each other.
        """
        partial: set[str] = set()
        for op in trace.ops:
            fed = op.kind == "input" and op.result.shape != ()
            if fed or (op.kind != "accumulate" and any(v.name in partial for v in op.operands)):
                partial.update(value.name for value in op.results)
        for subject, tree in (("metric", metrics), ("new state", state)):
            for path, leaf in leaves(tree):
                if not isinstance(leaf, Tensor) or (subject == "metric" and leaf.value.name in per_sample):
                    continue
                if leaf.value.name in partial:
                    raise GraphError(
                        f"{subject} {path or 'leaf'} is computed from the batch outside of the loss but the "
                        f"batch is split in {count} micro-batches; return it from the loss with "
                        "has_aux=True, or use micro_batches=1"
                    )
                if depends_on_samples(trace, leaf.value.name, growth_of):
                    raise samples_refusal(f"{subject} {path or 'leaf'}", count)

    def _store(self, trace: Trace, new: Any) -> None:
        """Replace the state by the one that the function returned, at the end of the step."""
        after = same_leaves("the state that the training step returned", self.program.state, new)
        for path, old in leaves(self.program.state):
            tensor, value = trace.tensor(old), trace.tensor(after[path])
            if value.value.name == tensor.value.name:
                continue
            if value.shape != tensor.shape:
                raise GraphError(
                    f"leaf {path} of the state is {tensor.value.type} but its new value is "
                    f"{value.value.type}; keep shapes"
                )
            if value.dtype != tensor.dtype:
                _check_precision(path, tensor, value)
                value = value.astype(tensor.dtype)
            trace.updates.append((tensor.value.name, value.value))

    def _keep_unread(self, trace: Trace, outputs: Mapping[str, Tensor]) -> None:
        """Update leaves of the state that no result depends on by themselves, so that they are stored too."""
        operands = {v.name: [x.name for x in op.operands] for op in trace.ops for v in op.results}
        read: set[str] = set()
        waiting = [tensor.value.name for tensor in outputs.values()]
        waiting += [name for old, new in trace.updates for name in (old, new.name)]
        while waiting:
            name = waiting.pop()
            if name not in read:
                read.add(name)
                waiting += operands[name]
        for _, leaf in leaves(self.program.state):
            tensor = trace.tensor(leaf)
            if tensor.value.name not in read:
                with trace.within(role="optimize"):
                    same = emit_one("reshape", tensor, shape=tensor.shape)
                trace.updates.append((tensor.value.name, same.value))

    def _labelled(self, trace: Trace, metrics: Any, per_sample: Mapping[str, int]) -> dict[str, Tensor]:
        """The metrics by label: accumulated already, or per sample with the dim of the samples in front.

        Args:
            trace: of the step.
            metrics: that it returned.
            per_sample: name of a value of a micro-batch -> its dim of the samples.
        """
        tensors: dict[str, Tensor] = {}
        self.program.sample_dims.clear()

        def label(path: str, leaf: Any) -> str:
            tensor = trace.tensor(leaf)
            name = f"metrics.{path}" if path else "metrics"
            dim = per_sample.get(tensor.value.name, 0)
            if dim:
                with trace.within(role="forward"):
                    tensor = np.moveaxis(tensor, dim, 0)  # type: ignore[type-var]
                self.program.sample_dims[name] = dim
            tensors[name] = tensor
            return name

        self.program.metrics = map_leaves(label, metrics)
        return tensors


def _check_precision(path: str, leaf: Tensor, new: Tensor) -> None:
    """Raises GraphError where a new value of a leaf is rounded more than the leaf, or would be truncated."""
    given = new.dtype
    if is_float(given) and (not is_float(leaf.dtype) or itemsize(given) < itemsize(leaf.dtype)):
        raise GraphError(
            f"leaf {path} of the state is {leaf.value.type} but its new value is {new.value.type}; compute "
            "it in that dtype, or convert it with .astype"
        )


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
    step = StepTrace(_unchanged, marked=False, differentiable=False)
    with trace.activate(), tracing_step(step):
        inputs = {n: trace.source("input", n, shape, dtype) for n, (shape, dtype) in fields.items()}
        state = map_leaves(lambda path, leaf: trace.tensor(leaf), program.state)
        program.function(state, map_leaves(lambda path, leaf: inputs[path or "batch"], program.batch))
    if step.loss is None:
        raise GraphError(
            "the training step computes no gradient; call distgraph.grad or value_and_grad in it"
        )
    return set(step.differentiated)
