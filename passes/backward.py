"""Reverse-mode differentiation on the trace, before any layout is known.

In:   a trace whose forward part ends in a scalar loss.
Out:  the same trace, longer: for every forward op on a path from `wrt` to the loss the ops of its gradient, role
      backward, linked by name to their forward op.
Invariant: no forward op changes; a value used several times gets the sum of the gradients of its uses, so that tied
      parameters sum by themselves.

    %h = matmul(%x, %w)               %h = matmul(%x, %w)
    %l = reduce_sum(%h)         ->    %l = reduce_sum(%h)
                                      %g = broadcast_to(%one)           # link %l
                                      %dw = einsum(%x, %g)              # link %h
"""

from __future__ import annotations

from collections.abc import Sequence

from distgraph.errors import GraphError
from distgraph.graph import Op
from distgraph.ops.registry import GradientContext, lookup
from distgraph.tensor import Tensor, emit_one
from distgraph.trace import Trace


def differentiate(trace: Trace, loss: Tensor, wrt: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a scalar loss.

    Args:
        trace: the trace that holds the loss; ops are appended to it.
        loss: tensor of shape ().
        wrt: tensors of the same trace, usually parameters.

    Returns:
        one gradient each, of the shape of its tensor; zeros where the loss does not depend on it.

    Raises:
        GraphError: the loss is no scalar, or an op on the path has no gradient.
    """
    if loss.shape != ():
        raise GraphError(f"loss %{loss.value.name} is {loss.value.type} but must be a scalar; take its mean or sum")
    active = _reached(trace.ops, {t.value.name for t in wrt})
    grads: dict[str, Tensor] = {}
    forward = list(trace.ops)
    with trace.activate(), trace.within(role="backward"):
        with trace.on_behalf_of(loss.value.name, "", "loss"):
            grads[loss.value.name] = trace.constant(1.0, loss.dtype)
        for op in reversed(forward):
            received = tuple(grads.get(v.name) for v in op.results)
            if op.operands and any(g is not None for g in received) and op.name in active:
                _visit(trace, op, received, active, grads, forward)
        found = []
        for tensor in wrt:
            grad = grads.get(tensor.value.name)
            if grad is None:
                with trace.on_behalf_of(tensor.value.name, "", ""):
                    grad = emit_one("full", shape=tensor.shape, value=0.0, dtype=tensor.dtype)
            found.append(grad)
    return found


def _reached(ops: Sequence[Op], start: set[str]) -> set[str]:
    """Names of values that depend on the start values (which count themselves)."""
    reached = set(start)
    for op in ops:
        if any(v.name in reached for v in op.operands):
            reached.update(v.name for v in op.results)
    return reached


def _visit(
    trace: Trace,
    op: Op,
    received: tuple[Tensor | None, ...],
    active: set[str],
    grads: dict[str, Tensor],
    forward: Sequence[Op],
) -> None:
    declared = lookup(op.kind)
    if declared.gradient is None:
        raise GraphError(f"{op} has no gradient but the loss depends on it; wrap it in stop_gradient or use another op")
    operands = tuple(Tensor(v, trace) for v in op.operands)
    results = tuple(Tensor(v, trace) for v in op.results)
    needs = tuple(v.name in active for v in op.operands)
    with trace.on_behalf_of(op.name, op.scope, op.source):
        context = GradientContext(operands, results, received, op.attrs, needs)
        for operand, need, grad in zip(operands, needs, declared.gradient(context), strict=True):
            if not need or grad is None:
                continue
            name = operand.value.name
            if grad.shape != operand.shape:
                raise AssertionError(f"gradient of {op.kind} has shape {grad.shape}, its operand {operand.shape}")
            grads[name] = grads[name] + grad if name in grads else grad
