"""The part of a training step behind its gradient, as if the batch were not split in micro-batches.

A step may read the number of samples outside of its loss, as `len(batch["x"])`. The trace of a micro-batch
gives it that of a micro-batch. The step is therefore traced for the whole batch first, and the constants
behind the gradient are those of that trace. What cannot be taken over as a constant is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distgraph.errors import GraphError
from distgraph.ir.graph import Op
from distgraph.passes.analysis.accumulation import FIXED, Growth, attributes_differ
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace


class StepTracing(Trace):
    """A trace of a training step, whose constants behind the gradient may be those of another trace.

    Args:
        name: of the graph.
        whole: the trace of the same step for the whole batch; None to keep the constants.

    Attributes:
        constants: those behind the gradient, in order.
    """

    def __init__(self, name: str, whole: StepTracing | None = None) -> None:
        super().__init__(name)
        self.training = True
        self.constants: list[Any] = []
        self._whole = whole

    def constant(self, data: Any, dtype: str | None = None) -> Tensor:
        """A number or array."""
        if self.role == "optimize":
            number = len(self.constants)
            if self._whole is not None and number < len(self._whole.constants):
                data = self._whole.constants[number]
            self.constants.append(data)
        return super().constant(data, dtype)

    def behind(self) -> list[Op]:
        """The ops behind the gradient, without constants."""
        return [op for op in self.ops if op.role == "optimize" and op.kind != "constant"]


def check_behind(trace: StepTracing, whole: StepTracing, growth_of: Mapping[str, Growth], count: int) -> None:
    """Compare the part behind the gradient with that for the whole batch.

    Raises:
        GraphError: it depends on the number of samples in another way than by constants.
    """
    ops, others = trace.behind(), whole.behind()
    for op, other in zip(ops, others, strict=False):
        if _differ(op, other) or any(depends_on_samples(trace, v.name, growth_of) for v in op.operands):
            raise samples_refusal(f"%{op.name} {op.kind} ({op.source})", count)
    if len(ops) != len(others):
        op = max(ops, others, key=len)[min(len(ops), len(others))]
        raise samples_refusal(f"%{op.name} {op.kind} ({op.source})", count)


def depends_on_samples(trace: Trace, name: str, growth_of: Mapping[str, Growth]) -> bool:
    """Whether a value of the forward part, which is no constant, depends on the number of samples."""
    return growth_of.get(name, FIXED) != FIXED and not any(
        op.kind == "constant" and op.name == name for op in trace.ops
    )


def samples_refusal(subject: str, count: int) -> GraphError:
    """The error for a value that depends on the number of samples outside of the loss."""
    return GraphError(
        f"{subject} depends on the number of samples outside of the loss but the batch is split in {count} "
        "micro-batches; read len() of the batch behind the gradient, return the value from the loss with "
        "has_aux=True, or use micro_batches=1"
    )


def _differ(op: Op, other: Op) -> bool:
    types = [[(value.shape, value.dtype) for value in each.results] for each in (op, other)]
    return op.kind != other.kind or types[0] != types[1] or attributes_differ(op, other)
