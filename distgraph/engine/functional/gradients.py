"""`grad` and `value_and_grad` of a training step: they end the part of a step that runs once a micro-batch.

What is traced before is computed for each micro-batch; loss and gradients are accumulated over them; what is
traced behind is computed once a step, by the ranks that store the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from distgraph.engine.compile.training_spec import check_loss
from distgraph.errors import GraphError
from distgraph.errors.arguments import checked_arguments
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.serial.backward import differentiate
from distgraph.tracing.pytrees import leaves, map_leaves
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace


@dataclass(slots=True)
class StepTrace:
    """A training step while it is traced.

    Attributes:
        accumulated: (tensor of one micro-batch, tensor that is averaged or summed over the samples as it is)
            -> the same of the whole batch.
        further: (path, value of `has_aux` of one micro-batch) -> that of the whole batch, or which stands for
            it where it has a row for each sample.
        prepare: called when the forward part is complete.
        stages: meshes of the stages behind the marked boundaries; empty where marks end layers only.
        marked: whether marks count at all.
        differentiated: names of the tensors by which the loss was differentiated.
        loss: the loss of the whole batch.
        differentiable: whether gradients are computed; if not, the tensors themselves stand for them.
        marks: number of marked boundaries that ended a stage.
    """

    accumulated: Callable[[Tensor, Tensor], Tensor]
    further: Callable[[str, Tensor], Tensor] = lambda path, x: x
    prepare: Callable[[Trace], None] = lambda trace: None
    stages: tuple[ProcessMesh, ...] = ()
    marked: bool = True
    differentiable: bool = True
    differentiated: list[str] = field(default_factory=list)
    loss: Tensor | None = None
    marks: int = 0

    def check_marks(self) -> None:
        """Raises GraphError where there are fewer marked boundaries than the stages need."""
        if self.marks + 1 < len(self.stages):
            fewer = f", or give stages={self.marks + 1}" if self.marks else ""
            raise GraphError(
                f"mark_pipeline_boundary is called {self.marks} times but stages is {len(self.stages)}, "
                f"which needs {len(self.stages) - 1}; add marks in the loss{fewer}"
            )


_STEP: ContextVar[StepTrace | None] = ContextVar("step", default=None)


@contextmanager
def tracing_step(step: StepTrace) -> Iterator[StepTrace]:
    """The step that `grad` belongs to."""
    token = _STEP.set(step)
    try:
        yield step
    finally:
        _STEP.reset(token)


@checked_arguments()
def value_and_grad(function: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """A function that returns the value of a loss and its gradient by the first argument.

    It is called once in a training step (see `parallelize`). Both are of the whole batch, whatever the number
    of micro-batches: they are averaged or summed as the loss averages or sums over the samples.

    Args:
        function: (parameters, ...) -> loss, one number; with `has_aux` (loss, pytree of further values).
        has_aux: whether the function returns further values, which are then returned beside the loss.

    Raises:
        GraphError: it is called outside of a training step, or a second time in it; the loss is no number, or
            depends on the samples in a way that micro-batches cannot give.
    """

    def call(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        step = _STEP.get()
        if step is None:
            raise GraphError(
                "grad is called outside of a training step; decorate the step with distgraph.parallelize"
            )
        if step.loss is not None:
            raise GraphError(
                "grad is called twice in a training step, which has one gradient part; add the losses up"
            )
        trace = Trace.current()
        result = function(parameters, *args, **kwargs)
        loss, aux = result if has_aux else (result, None)
        check_loss(loss)
        wrt = [trace.tensor(leaf) for _, leaf in leaves(parameters)]
        step.prepare(trace)
        values = _gradients(trace, loss, wrt, step)
        gradients = dict(zip((path for path, _ in leaves(parameters)), values, strict=True))
        step.differentiated = [tensor.value.name for tensor in wrt]
        step.loss = step.accumulated(loss, loss)
        aux = map_leaves(lambda path, leaf: step.further(path, trace.tensor(leaf)), aux)
        trace.role, trace.placement = "optimize", None
        value = (step.loss, aux) if has_aux else step.loss
        return value, map_leaves(lambda path, leaf: gradients[path], parameters)

    return call


@checked_arguments()
def grad(function: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """As `value_and_grad`, without the value: the gradient, or with `has_aux` (gradient, further values)."""
    both = value_and_grad(function, has_aux)

    def call(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        value, gradients = both(parameters, *args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return call


def mark_pipeline_boundary() -> None:
    """Mark the boundary between two pipeline layers in the loss of a training step.

    Under `parallelize(method="pipeline", layers="manual")` a stage ends there; with layers="auto" the mark
    does nothing.

    Raises:
        GraphError: no trace is active, or there are more marks than stages.
    """
    trace, step = Trace.current(), _STEP.get()
    if step is not None and not step.marked:
        return
    if step is None or not step.stages:
        trace.boundaries.append(len(trace.ops))
        return
    following = step.stages.index(trace.placement) + 1 if trace.placement in step.stages else 1
    if following >= len(step.stages):
        raise GraphError(
            f"mark_pipeline_boundary is called {following} times but stages is {len(step.stages)}, "
            f"which needs {len(step.stages) - 1}; give stages={following + 1}, or remove marks"
        )
    trace.placement, step.marks = step.stages[following], following


def _gradients(trace: Trace, loss: Tensor, wrt: list[Tensor], step: StepTrace) -> list[Tensor]:
    """The gradients of the whole batch, each computed on behalf of its parameter."""
    sources = {op.result.name: op for op in trace.ops if op.kind in ("param", "state")}
    missing = next((t for t in wrt if t.value.name not in sources), None)
    if missing is not None:
        raise GraphError(
            f"%{missing.value.name} is differentiated but is no leaf of the state; pass parameters of "
            "the state to the function that grad returns"
        )
    if not step.differentiable:
        return wrt
    accumulated = []
    for parameter, gradient in zip(wrt, differentiate(trace, loss, wrt), strict=True):
        op = sources[parameter.value.name]
        with trace.within(role="backward"), trace.on_behalf_of(op.name, op.scope, op.source):
            accumulated.append(step.accumulated(gradient, loss))
    return accumulated
