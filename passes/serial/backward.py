"""Reverse-mode differentiation on the trace, before any layout is known.

In:   a trace whose forward part ends in a scalar loss.
Out:  the same trace, longer: for every forward op on a path from `wrt` to the loss the ops of its gradient,
      role backward, linked by name to their forward op.
Invariant: no forward op changes, but a loop leaves more results (see `loop_gradient`); a value used several
      times gets the sum of the gradients of its uses, so that tied parameters sum by themselves.

    %h = matmul(%x, %w)               %h = matmul(%x, %w)
    %l = reduce_sum(%h)         ->    %l = reduce_sum(%h)
                                      %g = broadcast_to(%one)           # link %l
                                      %dw = einsum(%x, %g)              # link %h

Ops that were traced inside `dg.recompute` are emitted again in the backward part, right before the first
gradient that reads them, so that their forward results need not be kept (Chen et al., "Training deep nets
with sublinear memory cost", 2016). Random ops are counter based: the second time they give the same numbers;
and annotations hold for the copies too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distgraph.errors import GraphError
from distgraph.ir.dtypes import is_float
from distgraph.ir.graph import Op, Value
from distgraph.ir.loops import Loop
from distgraph.ir.op_registry import GradientContext, lookup
from distgraph.passes.serial.loop_gradient import LoopGradient
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
    with trace.activate(), trace.within(role="backward"):
        with trace.on_behalf_of(loss.value.name, "", "loss"):
            seed = trace.constant(1.0, loss.dtype) if factor is None else factor
        grads = _walk(trace, forward, {loss.value.name: seed}, active)
        results = []
        for tensor in wrt:
            grad = grads.get(tensor.value.name)
            if grad is None:
                with trace.on_behalf_of(tensor.value.name, "", ""):
                    grad = emit_one("full", shape=tensor.shape, value=0.0, dtype=tensor.dtype)
            results.append(grad)
    return results


def depends_on(trace: Trace, loss: Tensor, wrt: Sequence[Tensor]) -> bool:
    """Whether a loss depends smoothly on any of some tensors, so that it may have a gradient."""
    return loss.value.name in _reached(trace.ops, {tensor.value.name for tensor in wrt})


def pull_back(
    trace: Trace, forward: Sequence[Op], seeds: Mapping[str, Tensor], sources: Sequence[Value]
) -> list[Tensor | None]:
    """Gradients of values, from those of results of forward ops (`seeds`); None where there is none."""
    grads = _walk(trace, list(forward), seeds, _reached(forward, {value.name for value in sources}))
    return [grads.get(value.name) for value in sources]


def _walk(
    trace: Trace, forward: list[Op], seeds: Mapping[str, Tensor], active: set[str]
) -> dict[str, Tensor]:
    """Emit the gradients of forward ops, which are the first of a trace; value -> its gradient."""
    walk = _Walk(trace, forward, active, dict(seeds))
    for op in reversed(forward):
        received = tuple(walk.grads.get(v.name) for v in op.results)
        if any(g is not None for g in received) and any(v.name in active for v in op.operands):
            walk.visit(op, received)
    return walk.grads


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

    def __init__(self, trace: Trace, forward: list[Op], active: set[str], grads: dict[str, Tensor]) -> None:
        self.trace, self.forward, self.active = trace, forward, active
        self.grads = grads
        self.loops: dict[str, LoopGradient] = {}
        for position, op in enumerate(forward):
            if lookup(op.kind).bodies and Loop(op).condition is None:
                self.prepare(position, op)
        self.again: dict[str, Value] = {}  # value of a recomputed block -> its copy in the backward part
        self.done: set[int] = set()

    def prepare(self, position: int, op: Op) -> None:
        """Let a loop on the path to the loss leave what its gradient reads."""
        both = (op.operands, op.results)
        if all(any(value.name in self.active for value in values) for values in both):
            gradient = self.loops[op.name] = LoopGradient.of(op, self.active, pull_back, self.trace.fresh)
            self.forward[position] = gradient.loop.op
            self.trace.replace_op(position, gradient.loop.op)

    def visit(self, op: Op, received: tuple[Tensor | None, ...]) -> None:
        """Emit the gradient of one op and add it to its operands'."""
        trace, declared = self.trace, lookup(op.kind)
        for value, grad in zip(op.results, received, strict=True):
            if value.name in trace.mirrored and grad is not None:
                self.follow(value, grad)
        if declared.gradient is None and op.name not in self.loops:
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
            if op.name in self.loops:
                grads = self.loops[op.name].gradients(trace, operands, results, received)
            else:
                assert declared.gradient is not None
                context = GradientContext(operands, results, received, op.attrs, needs)
                grads = list(declared.gradient(context))
            for value, need, grad in zip(op.operands, needs, grads, strict=True):
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
        names = {op.task for op in self.forward if trace.recomputed.get(op.name) == block}
        task = None if len(names) == 1 else ""  # a block of several tasks is recomputed before them, in none
        for op in self.forward:
            if trace.recomputed.get(op.name) != block or not op.operands:
                continue
            if op.kind == "accumulate" or any(v.name in once for v in op.operands):
                once.update(v.name for v in op.results)
                continue
            with trace.on_behalf_of(op.name, op.scope, op.source, task):
                copies = trace.emit(
                    op.kind, [Tensor(self.again.get(v.name, v), trace) for v in op.operands], op.attrs
                )
            for value, copy in zip(op.results, copies, strict=True):
                self.again[value.name] = copy.value
                if value.name in trace.attrs:  # annotations hold for the copy too
                    trace.annotate(copy.value, trace.attrs[value.name])
