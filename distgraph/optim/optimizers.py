"""Optimisers: they append the update of every parameter and of its states to the graph.

The states are sources of the graph named after their parameter ("fc1.weight.adam_m"), so their layout may be
annotated, completed and searched like that of all other values: states split over the data-parallel axis are
ZeRO.

Mixed precision (Micikevicius et al., 2018): a model whose parameters are `f16` computes in that dtype; with
`master="f32"` the optimiser holds a copy of each parameter in f32, updates the copy, and rounds it to the
parameter. Its states are f32 too. Gradients are widened once a step, after any accumulation.

    optim.AdamW(lr=1e-3, master="f32")
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.errors.arguments import (
    NonNegative,
    Positive,
    Rate,
    check_argument,
    check_fields,
    check_takes,
    checked_arguments,
)
from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.nn.initializers import Init
from distgraph.optim.lr_schedules import Schedule
from distgraph.tracing.tensor import Tensor, emit, emit_one
from distgraph.tracing.tracer import Trace, caller

Pairs = Sequence[tuple[Tensor, Tensor]]
StateSpec = Callable[[str, tuple[int, ...], DistAttr | None], DistAttr | None]
"""(parameter name, shape of the state, what is known of its layout: the annotation of a parameter of
that shape, or the mesh of its stage with nothing split) -> mesh and layout of the state, or None to leave it
open."""


def matrices_only(name: str, shape: tuple[int, ...]) -> bool:
    """True for parameters that usually decay: those with two dims or more, so not biases and norm weights."""
    return len(shape) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer(ABC):
    """Base of all optimisers.

    Attributes:
        lr: learning rate, or a schedule (see `distgraph.optim.lr_schedules`); the only positional argument.
        clip_norm: gradients are scaled down so that their global norm is at most this; None for no clipping.
        weight_decay: see each optimiser.
        decays: (name, shape) -> whether weight decay applies to a parameter; by default to all.
        state_spec: layouts of states; see `shard_states`.
        master: dtype of the master copy of every narrower parameter; None for no master copies.
    """

    lr: NonNegative | Schedule = field(default=1e-3, kw_only=False)
    clip_norm: Positive | None = None
    weight_decay: NonNegative = 0.0
    decays: Callable[[str, tuple[int, ...]], bool] = field(default=lambda name, shape: True)
    state_spec: StateSpec | None = None
    master: Literal["f32", "f64"] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name, function, count in (
            ("lr", self.lr, 1),
            ("decays", self.decays, 2),
            ("state_spec", self.state_spec, 3),
        ):
            if callable(function):
                check_takes(type(self).__name__, name, function, count)

    def learning_rate(self, step: int) -> float:
        """The rate after `step` finished steps.

        Raises:
            GraphError: a schedule gives no number, or one that is negative or not finite.
        """
        if not callable(self.lr):
            return float(self.lr)
        rate: Any = self.lr(step)
        if isinstance(rate, np.ndarray) and not rate.shape:
            rate = float(rate)
        check_argument(type(self).__name__, f"lr after step {step}", rate, NonNegative)
        return float(rate)

    def inputs(self, step: int, skipped: int = 0) -> dict[str, float]:
        """Values of the graph inputs that `update` reads, after `step` finished steps, of which `skipped`
        have updated nothing."""
        return {"lr": self.learning_rate(step), "step": float(step + 1 - skipped)}

    def update(self, trace: Trace, pairs: Pairs) -> None:
        """Append the update of every parameter to the trace.

        Args:
            trace: holds the parameters and gradients.
            pairs: (parameter, gradient); gradients are of the whole step, after any accumulation.

        Raises:
            GraphError: a first member of a pair is no parameter, or shapes differ.
        """
        sources = {op.name: op for op in trace.ops if op.kind == "param"}
        for p, g in pairs:
            if p.value.name not in sources:
                raise GraphError(
                    f"%{p.value.name} is no parameter of trace {trace.name!r} and cannot be optimised"
                )
            if p.shape != g.shape:
                raise GraphError(
                    f"parameter %{p.value.name} is {p.value.type} but its gradient {g.value.type}"
                )
        with trace.activate(), trace.within(role="optimize"):
            if self.clip_norm is not None:
                with trace.on_behalf_of("", "", ""):
                    clipped = clip_by_global_norm([g for _, g in pairs], self.clip_norm)
                pairs = [(p, g) for (p, _), g in zip(pairs, clipped, strict=True)]
            dtypes = {p.dtype for p, _ in pairs} | {self.master}
            numbers = "f64" if "f64" in dtypes else "f32"  # those of the finest parameter
            lr, step = (trace.source("input", name, (), numbers) for name in ("lr", "step"))
            stages = _stages(trace) if self.state_spec else {}
            for p, g in pairs:
                op = sources[p.value.name]
                with trace.on_behalf_of(op.name, op.scope, op.source):
                    slot = _Slot(trace, op, p, self.state_spec, stages.get(op.name))
                    if self.master is not None and itemsize(p.dtype) < itemsize(self.master):
                        slot, g = slot.widened(self.master), g.astype(self.master)
                    self._apply(slot, g, lr, step)

    @abstractmethod
    def _apply(self, slot: _Slot, g: Tensor, lr: Tensor, step: Tensor) -> None:
        """Append the update of one parameter to the trace."""

    def _decay(self, slot: _Slot) -> float:
        return self.weight_decay if self.decays(slot.name, slot.p.shape) else 0.0


def _stages(trace: Trace) -> dict[str, ProcessMesh]:
    """Name of a value -> mesh of its first reader that the user placed, which will store a parameter."""
    stages: dict[str, ProcessMesh] = {}
    for op in trace.ops:
        mesh = trace.placements.get(op.name)
        if mesh is not None:
            for value in op.operands:
                stages.setdefault(value.name, mesh)
    return stages


@dataclass(frozen=True, slots=True)
class _Slot:
    """One parameter with its states while its update is traced.

    Attributes:
        p: the tensor to update: the parameter, or its master copy.
        rounded: the parameter, where `p` is its master copy.
    """

    trace: Trace
    op: Op
    p: Tensor
    state_spec: StateSpec | None
    stage: ProcessMesh | None
    rounded: Tensor | None = None

    @property
    def name(self) -> str:
        return str(self.op.attrs["name"])

    def widened(self, dtype: str) -> _Slot:
        """The slot of the parameter's master copy, which starts from the same numbers."""
        init = ("like", self.name, *self.op.attrs.get("init", ("zeros",)))
        return replace(self, p=self.state("master", dtype=dtype, init=init), rounded=self.p)

    def state(
        self,
        kind: str,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        init: Init = ("zeros",),
    ) -> Tensor:
        """A state of this parameter, zero at first."""
        shape = self.p.shape if shape is None else tuple(shape)
        state = self.trace.source("state", f"{self.name}.{kind}", shape, dtype or self.p.dtype, init=init)
        parameter_attr = self.trace.attrs.get(self.op.name)
        mesh = self.stage if parameter_attr is None else parameter_attr.mesh
        if mesh is not None and (parameter_attr is None or shape != self.p.shape):
            origin = Origin("user", "the stage of its parameter")
            parameter_attr = DistAttr(mesh, ShardSpec.replicated(len(shape)), origin)
        attr = self.state_spec(self.name, shape, parameter_attr) if self.state_spec else None
        if attr is not None:
            check_argument("an optimiser", f"state_spec({self.name!r}, ...)", attr, DistAttr)
            self.trace.annotate(state.value, attr)
        return state

    def store(self, old: Tensor, new: Tensor) -> None:
        """Replace `old` by `new` at the end of the step."""
        new = new if new.dtype == old.dtype else new.astype(old.dtype)
        self.trace.updates.append((old.value.name, new.value))
        if self.rounded is not None and old is self.p:
            self.trace.updates.append((self.rounded.value.name, new.astype(self.rounded.dtype).value))


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(Optimizer):
    """Gradient descent: g' = g + weight_decay * p; with momentum v = momentum * v + g'; p = p - lr * v.

    Attributes:
        momentum: 0 for none.
        nesterov: step along g' + momentum * v instead (Sutskever et al., 2013).
    """

    momentum: Rate = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        if self.nesterov and not self.momentum:
            raise GraphError("nesterov of SGD is True but momentum is 0; give a momentum, or leave it out")

    def _apply(self, slot: _Slot, g: Tensor, lr: Tensor, step: Tensor) -> None:
        p, decay = slot.p, self._decay(slot)
        if not self.momentum:
            g = g + p * decay if decay else g
            slot.store(p, p - g * _rate(lr, p))
            return
        velocity = slot.state("momentum")
        options = {"momentum": self.momentum, "nesterov": self.nesterov, "weight_decay": decay}
        new_p, new_v = emit("momentum", p, g, velocity, lr, **options)
        slot.store(p, new_p)
        slot.store(velocity, new_v)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015); weight decay is added to the gradient.

    Attributes:
        beta1, beta2: decay of the first and second moment.
        eps: added to the root of the second moment.
    """

    beta1: Rate = 0.9
    beta2: Rate = 0.999
    eps: NonNegative = 1e-8
    decoupled: bool = field(default=False, init=False)

    def _apply(self, slot: _Slot, g: Tensor, lr: Tensor, step: Tensor) -> None:
        m, v = slot.state("adam_m"), slot.state("adam_v")
        options: dict[str, Any] = {"beta1": self.beta1, "beta2": self.beta2, "eps": self.eps}
        options |= {"weight_decay": self._decay(slot), "decoupled": self.decoupled}
        for old, new in zip((slot.p, m, v), emit("adam", slot.p, g, m, v, lr, step, **options), strict=True):
            slot.store(old, new)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: p shrinks by lr * weight_decay (Loshchilov and Hutter, 2019)."""

    weight_decay: NonNegative = 0.01
    decoupled: bool = field(default=True, init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adafactor(Optimizer):
    """Adafactor (Shazeer and Stern, 2018, alg. 4): the second moment of a matrix is a row and a column.

    There are no relative step sizes: the rate is `lr`. Tensors with fewer than two dims have an unfactored
    second moment; for tensors with more, the last two dims are factored.

    Attributes:
        decay: c in beta2 = 1 - step ** -c.
        clip: the update is scaled down so that its root mean square is at most this.
        eps: added to squared gradients.
    """

    decay: NonNegative = 0.8
    clip: Positive = 1.0
    eps: NonNegative = 1e-30

    def _apply(self, slot: _Slot, g: Tensor, lr: Tensor, step: Tensor) -> None:
        p = slot.p
        widened = g if g.dtype in ("f32", "f64") else g.astype("f32")
        beta = 1.0 - ops.power(step, -self.decay)
        beta = _rate(beta, widened)
        square = ops.square(widened) + self.eps
        if p.ndim < 2:
            v = slot.state("adafactor_v", dtype=widened.dtype)
            new = v * beta + square * (1.0 - beta)
            slot.store(v, new)
            change = widened * ops.rsqrt(new)
        else:
            row = slot.state("adafactor_row", p.shape[:-1], widened.dtype)
            column = slot.state("adafactor_column", (*p.shape[:-2], p.shape[-1]), widened.dtype)
            new_row = row * beta + ops.mean(square, -1) * (1.0 - beta)
            new_column = column * beta + ops.mean(square, -2) * (1.0 - beta)
            slot.store(row, new_row)
            slot.store(column, new_column)
            share = new_row / ops.mean(new_row, -1, keepdims=True)
            change = (
                widened * ops.expand_dims(ops.rsqrt(share), -1) * ops.expand_dims(ops.rsqrt(new_column), -2)
            )
        size = ops.sqrt(ops.mean(ops.square(change)))
        change = change / ops.maximum(size * (1 / self.clip), 1.0)
        decay = self._decay(slot)
        if decay:
            change = change + p * decay
        slot.store(p, p - change * _rate(lr, change))


def _rate(scalar: Tensor, like: Tensor) -> Tensor:
    """A scalar cast to the dtype of the tensor that it multiplies, so that the product keeps that dtype."""
    return scalar if scalar.dtype == like.dtype else scalar.astype(like.dtype)


@checked_arguments()
def clip_by_global_norm(grads: Sequence[Tensor], limit: Positive) -> list[Tensor]:
    """Gradients scaled by min(1, limit / (norm + 1e-6)) with the global norm of all of them (Pascanu et al.,
    2013; the term against division by 0 as in PyTorch).

    Raises:
        GraphError: the limit is not positive.
    """
    if not grads:
        return []
    total = None
    for g in grads:
        widened = g if g.dtype in ("f32", "f64") else g.astype("f32")
        squares = (
            emit_one("reduce_sum", ops.square(widened), dims=tuple(range(g.ndim)), keepdims=False)
            if g.ndim
            else ops.square(widened)
        )
        total = squares if total is None else total + squares
    norm = ops.sqrt(total)
    scale = ops.minimum(limit / (norm + 1e-6), 1.0)
    return [g * _rate(scale, g) for g in grads]


@checked_arguments()
def shard_states(mesh: ProcessMesh, axis: str) -> StateSpec:
    """Split every state over one axis of a mesh, in addition to the axes of its parameter, as in ZeRO.

    The first dim that gives equal parts is split, because the parts of the first dims are consecutive in
    memory; where none does, the dim with the longest blocks. States that are too small for that get no
    annotation, nor do those whose parameter is stored on another mesh without this axis (another pipeline
    stage).

    Raises:
        GraphError: the mesh has no such axis.

    Example:
        `Adam(lr=1e-3, state_spec=shard_states(mesh, "dp"))`
    """
    if axis not in mesh.sizes:
        raise GraphError(f"mesh has axes {', '.join(mesh.axes)} but the states are to be split over {axis!r}")
    where = caller()

    def spec(name: str, shape: tuple[int, ...], parameter_attr: DistAttr | None) -> DistAttr | None:
        state_mesh = mesh if parameter_attr is None else parameter_attr.mesh
        dims = ((),) * len(shape) if parameter_attr is None else parameter_attr.spec.dims
        if axis not in state_mesh.sizes:
            return None
        if not any(axis in dim for dim in dims):
            blocks = [n // state_mesh.units(dim) for n, dim in zip(shape, dims, strict=True)]
            parts = state_mesh.units((axis,))
            if max(blocks, default=0) < parts:
                return None
            longest = blocks.index(max(blocks))
            split = next((d for d, n in enumerate(blocks) if n >= parts and n % parts == 0), longest)
            dims = tuple((*dim, axis) if d == split else dim for d, dim in enumerate(dims))
        return DistAttr(state_mesh, ShardSpec(dims), Origin("user", where))

    return spec
