"""Reverse-mode differentiation on the trace, before any layout is known.

In:   a trace whose forward part ends in a scalar loss.
Out:  the same trace, longer: for every forward op on a path from `wrt` to the loss the ops of its gradient,
      role backward, linked by name to their forward op.
Invariant: no forward op changes; a value used several times gets the sum of the gradients of its uses, so
      that tied parameters sum by themselves.

    %h = matmul(%x, %w)               %h = matmul(%x, %w)
    %l = reduce_sum(%h)         ->    %l = reduce_sum(%h)
                                      %g = broadcast_to(%one)           # link %l
                                      %dw = einsum(%x, %g)              # link %h

Ops that were traced inside `dg.recompute` are emitted again in the backward part, right before the first
gradient that reads them, so that their forward results need not be kept (Chen et al., "Training deep nets
with sublinear memory cost", 2016). Random ops are counter based: the second time they give the same numbers;
and what is annotated lies there the second time too.
"""

from __future__ import annotations

from collections.abc import Sequence

from distgraph.errors import GraphError
from distgraph.ir.dtypes import is_float
from distgraph.ir.graph import Op, Value
from distgraph.ir.op_registry import GradientContext, lookup
from distgraph.tracing.tensor import Tensor, emit_one
from distgraph.tracing.tracer import Trace


def differentiate(
    trace: Trace, loss: Tensor, wrt: Sequence[Tensor], factor: Tensor | None = None
) -> list[Tensor]:
    """Gradients of a scalar loss.

    Args:
        trace: the trace that holds the loss; ops are appended to it.
        loss: tensor of shape ().
        wrt: tensors of the same trace, usually parameters.
        factor: number of the loss's dtype; the gradients are those of the loss times this factor.

    Returns:
        one gradient each, of the shape of its tensor; zeros where the loss does not depend on it.

    Raises:
        GraphError: the loss is no scalar, or an op on the path has no gradient.
    """
    if loss.shape != ():
        raise GraphError(
            f"loss %{loss.value.name} is {loss.value.type} but must be a scalar; take its mean or sum"
        )
    forward = list(trace.ops)
    active = _reached(forward, {t.value.name for t in wrt})
    walk = _Walk(trace, forward, active)
    with trace.activate(), trace.within(role="backward"):
        with trace.on_behalf_of(loss.value.name, "", "loss"):
            walk.grads[loss.value.name] = trace.constant(1.0, loss.dtype) if factor is None else factor
        for op in reversed(forward):
            received = tuple(walk.grads.get(v.name) for v in op.results)
            if any(g is not None for g in received) and any(v.name in active for v in op.operands):
                walk.visit(op, received)
        results = []
        for tensor in wrt:
            grad = walk.grads.get(tensor.value.name)
            if grad is None:
                with trace.on_behalf_of(tensor.value.name, "", ""):
                    grad = emit_one("full", shape=tensor.shape, value=0.0, dtype=tensor.dtype)
            results.append(grad)
    return results


def _reached(ops: Sequence[Op], start: set[str]) -> set[str]:
    """Names of values that depend smoothly on the start values (which count themselves): never through
    integers or stop_gradient."""
    reached = set(start)
    for op in ops:
        if op.kind != "stop_gradient" and any(v.name in reached for v in op.operands):
            reached.update(v.name for v in op.results if is_float(v.dtype))
    return reached


class _Walk:
    """State of the backward pass: gradients so far, and recomputed values."""

    def __init__(self, trace: Trace, forward: Sequence[Op], active: set[str]) -> None:
        self.trace, self.forward, self.active = trace, forward, active
        self.grads: dict[str, Tensor] = {}
        self.again: dict[str, Value] = {}  # value of a recomputed block -> its copy in the backward part
        self.done: set[int] = set()

    def visit(self, op: Op, received: tuple[Tensor | None, ...]) -> None:
        """Emit the gradient of one op and add it to its operands'."""
        trace, declared = self.trace, lookup(op.kind)
        for value, grad in zip(op.results, received, strict=True):
            if value.name in trace.mirrored and grad is not None:
                self.follow(value, grad)
        if declared.gradient is None:
            raise GraphError(
                f"{op} has no gradient but the loss depends on it; wrap it in stop_gradient or use another op"
            )
        block = trace.recomputed.get(op.name)
        if block is not None and block not in self.done:
            self.recompute(block)
        operands = tuple(Tensor(self.again.get(v.name, v) if block else v, trace) for v in op.operands)
        results = tuple(Tensor(self.again.get(v.name, v) if block else v, trace) for v in op.results)
        needs = tuple(v.name in self.active for v in op.operands)
        with trace.on_behalf_of(op.name, op.scope, op.source):
            context = GradientContext(operands, results, received, op.attrs, needs)
            for value, need, grad in zip(op.operands, needs, declared.gradient(context), strict=True):
                if not need or grad is None:
                    continue
                if grad.shape != value.shape:
                    raise AssertionError(
                        f"gradient of {op.kind} has shape {grad.shape}, its operand {value.shape}"
                    )
                if op.name in trace.algorithms:  # a distributed algorithm leaves no partial sum
                    self.follow(value, grad)
                self.grads[value.name] = self.grads[value.name] + grad if value.name in self.grads else grad

    def follow(self, value: Value, grad: Tensor) -> None:
        """Annotate a gradient as the value is annotated, unless it has an annotation of its own."""
        trace = self.trace
        if value.name in trace.attrs and grad.value.name not in trace.attrs:
            trace.annotate(grad.value, trace.attrs[value.name])
        elif value.name in trace.axis_attrs and grad.value.name not in trace.axis_attrs:
            trace.annotate_axes(grad.value, trace.axis_attrs[value.name])

    def recompute(self, block: int) -> None:
        """Emit the forward ops of a block again; what of it nobody reads is pruned later.

        Not what happens once a step (statistics of batch norms): that has happened.
        """
        self.done.add(block)
        trace, once = self.trace, set[str]()
        for op in self.forward:
            if trace.recomputed.get(op.name) != block or not op.operands:
                continue
            if op.kind == "accumulate" or any(v.name in once for v in op.operands):
                once.update(v.name for v in op.results)
                continue
            with trace.on_behalf_of(op.name, op.scope, op.source):
                copies = trace.emit(
                    op.kind, [Tensor(self.again.get(v.name, v), trace) for v in op.operands], op.attrs
                )
            for value, copy in zip(op.results, copies, strict=True):
                self.again[value.name] = copy.value
                if value.name in trace.attrs:  # what is annotated lies there the second time too
                    trace.annotate(copy.value, trace.attrs[value.name])
