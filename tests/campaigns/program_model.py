"""A random program as a user would write it: a module, a loss, an optimiser, a strategy and an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from campaigns.program_generator import Case, Draw, Layout, Program
from campaigns.program_steps import STEPS, TOKENS, F
from support.files.clusters import cluster_of
from support.programs.searched import slow

import distgraph as dg
from distgraph import nn, ops, optim, schedules
from distgraph.engine import Engine
from distgraph.errors import GraphError
from distgraph.nn.module import name_tree
from distgraph.tracing.tensor import Tensor

CLASSES = 3
"""Outputs of the last layer of a pure program, and classes of its labels."""


class Model(nn.Module):
    """The instructions of a program, computed where a layout says. What steps draw from, too (`Context`).

    Parameters are made when the program is traced for the first time, which happens here: only then their
    shapes are known.
    """

    def __init__(self, case: Case) -> None:
        self._program, self._layout = case.program, case.layout
        self._meshes = [mesh.build() for mesh in case.layout.meshes]
        self.parts: dict[str, nn.Module | nn.Parameter] = {}
        self._shared: list[nn.Parameter] = []
        self._draw = Draw(0)
        self._key = ""
        self.values: list[Tensor] = []
        self.ids: Tensor | None = None
        self.batch = 0
        self._pinned: set[str] = set()
        self._complete = False  # whether all parameters are made
        example = sample(case.program, case.program.batch, 0)
        inputs = [a for name, a in example.items() if name != "target"]
        dg.trace(self._compute, *inputs)
        self._complete = True

    # What steps draw from

    @property
    def pure(self) -> bool:
        """See `Program`."""
        return self._program.pure

    def below(self, count: int) -> int:
        return self._draw.below(count)

    def between(self, low: int, high: int) -> int:
        return self._draw.between(low, high)

    def chance(self, share: float) -> bool:
        return self._draw.chance(share)

    def pick(self, options: Sequence[Any]) -> Any:
        return self._draw.pick(options)

    def part(self, make: Callable[[], Any]) -> Any:
        """The parameter or module of the present instruction; made when it is asked for the first time."""
        if self._key not in self.parts:
            self._keep(self._key, make())
        return self.parts[self._key]

    def shared(self, make: Callable[[], Any], fits: Callable[[Any], bool]) -> Any:
        """A parameter that other instructions use too."""
        for parameter in self._shared:
            if fits(parameter):
                return parameter
        if self._complete:
            raise GraphError("the model has parameters for another number of samples; give it as many")
        self._shared.append(make())
        self._keep(f"{self._key}_shared", self._shared[-1])
        return self._shared[-1]

    def _keep(self, key: str, made: Any) -> None:
        self.parts[key] = made
        name_tree(self)
        seed, mesh = self._layout.parameters.get(self._key), self._mesh(self._key)
        if seed is None or mesh is None:
            return
        for name, parameter in self.named_parameters():
            if name.startswith(f"parts.{key}.") or name == f"parts.{key}":
                d = Draw(seed, len(name))
                chosen = self._meshes[d.below(len(self._meshes))] if d.chance(0.1) else mesh
                dg.shard_tensor(parameter, chosen, spec(d, chosen, parameter.ndim))

    # Where things are

    def _mesh(self, name: str) -> dg.ProcessMesh | None:
        if not self._meshes:
            return None
        layout = self._layout
        last = layout.loss if layout.loss >= 0 else len(self._meshes) - 1
        return self._meshes[layout.stages.get(name, last if name in ("head", "target") else 0)]

    @contextmanager
    def _placed(self, name: str) -> Iterator[None]:
        with dg.on(self._mesh(name) if self._layout.style == "on" else None):
            yield

    def pin(self, x: Any, name: str) -> Any:
        """Pin a value where the layout has it, once."""
        seed, mesh = self._layout.pins.get(name), self._mesh(name)
        if seed is None or mesh is None or x.value.name in self._pinned:
            return x
        self._pinned.add(x.value.name)
        d = Draw(seed)
        if name in ("x", "other") and d.chance(0.2):
            mesh = d.pick(self._meshes)
        return dg.shard_tensor(x, mesh, spec(d, mesh, x.ndim), gradient=d.chance(0.2))

    # The program

    def forward(self, x: Any) -> Any:
        return self._compute(x)

    def _compute(self, x: Any, other: Any = None) -> Any:
        inputs = (
            [x, other] if self._layout.batch_axis and other is not None else [x] * self._layout.batch_axis
        )
        self._pinned = {tensor.value.name for tensor in inputs}
        self.values, self.ids, self.batch = [x], None, x.shape[0]
        self.pin(x, "x")
        if other is not None:
            self.pin(other, "other")
            if self._program.other == "ids":
                self.ids = other
            else:
                self.values.append(other)
        names = [each.name for each in self._program.instructions]
        at = 0
        while at < len(names):
            stop = self._recomputed(names, at)
            run = self._run if stop is None else dg.recompute(self._run)
            stop = at + 1 if stop is None else stop
            run(at, stop)
            at = stop
        return self._head(self.values[-1])

    def _recomputed(self, names: Sequence[str], at: int) -> int | None:
        """End of the recomputed instructions that begin here."""
        for first, last in self._layout.recomputed:
            if first == names[at] and last in names:
                return names.index(last) + 1
        return None

    def _run(self, start: int, stop: int) -> None:
        for each in self._program.instructions[start:stop]:
            self._key, self._draw = each.name, Draw(each.seed)
            x, mesh, layout = self.values[-1], self._mesh(each.name), self._layout
            if layout.style == "boundary":
                x = dg.pipeline_boundary(x, mesh)
            step = STEPS[each.kind]
            with self._placed(each.name):
                y = self._operator(each.name, step, x)
            if y is None:
                continue
            if each.name in layout.reshards and mesh is not None:
                y = dg.reshard(y, mesh, spec(Draw(layout.reshards[each.name]), mesh, y.ndim))
                self._pinned.add(y.value.name)
            self.values.append(self.pin(y, each.name))

    def _operator(self, name: str, step: Callable[..., Any], x: Tensor) -> Any:
        """The step itself, or under `dg.shard_op`."""
        mesh, seed = self._mesh(name), self._layout.operators.get(name)
        if mesh is None or seed is None:
            return step(self, x)
        d, done = Draw(seed), []

        def function(t: Tensor) -> Any:
            self._pinned.add(t.value.name)
            y = step(self, t)
            done.append(y is not None)
            result = t if y is None else y
            if outside is not None:  # the number of its dims is known only here
                result = ops.identity(result) if result.value.name in self._pinned else result
                self._pinned.add(result.value.name)
                outside.extend(spec(d, mesh, result.ndim))
            return result

        inside = [spec(d, mesh, x.ndim)] if d.chance(0.7) else None
        outside: list[Any] | None = [] if d.chance(0.4) else None
        y = dg.shard_op(function, mesh, inside, outside)(x)
        return y if done[0] else None

    def _head(self, x: Tensor) -> Any:
        """What the model returns: of a pure program a number for each class; always something to train."""
        self._key = "head"
        with self._placed("head"):
            if not self._program.pure:
                return x * (self.part(lambda: nn.Parameter((1,), F, ("ones",))) - 0.2)
            flat = ops.reshape(x, (x.shape[0], -1)) if x.ndim != 2 else x
            return self.part(lambda: nn.Linear(flat.shape[1], CLASSES, dtype=F))(flat)


class TwoInputs(Model):
    """A model with a second input."""

    def forward(self, x: Any, other: Any) -> Any:
        return self._compute(x, other)


class Judged(Model):
    """A model that returns its loss, and its output behind it."""

    def forward(self, x: Any, target: Any) -> Any:
        output = self._compute(x)
        return loss_of(self, output, target), output


class JudgedTwo(Model):
    """The same with a second input."""

    def forward(self, x: Any, other: Any, target: Any) -> Any:
        output = self._compute(x, other)
        return loss_of(self, output, target), output


def spec(d: Draw, mesh: dg.ProcessMesh, ndim: int) -> list[Any]:
    """Every axis on a dim or on none, in any order."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for i in d.rng.permutation(len(mesh.axes)):
        place = d.below(ndim + 1)
        if place < ndim:
            dims[place].append(mesh.axes[i])
    return [tuple(axes) or None for axes in dims]


def loss_of(model: Model, output: Any, target: Any) -> Any:
    """The loss of a program, on the mesh that the layout has for it."""
    program = model._program
    mesh = model._meshes[model._layout.loss] if model._layout.loss >= 0 and model._meshes else None
    with dg.on(mesh):
        model.pin(target, "target")
        if program.loss == "entropy":
            return nn.CrossEntropy()(output, target)
        if program.loss == "square":
            return nn.MeanSquaredError()(output, target)
        if program.loss == "whole":
            return ops.mean(ops.square(ops.mean(ops.sin(output)) - target)) + ops.mean(ops.tanh(output))
        return ops.mean(ops.sin(output) * target) + 0.1 * ops.mean(ops.square(output))


def far(output: Any, target: Any) -> Any:
    """A metric: mean distance."""
    return np.abs(output - target).mean()


def right(output: Any, target: Any) -> Any:
    """A metric: share of right answers. One that ties with the best within rounding is right, too."""
    picked = (ops.one_hot(target, output.shape[-1], dtype=F) * output).sum(-1)
    ties = output.max(-1) - picked < 1e-6
    return ((output.argmax(-1) == target) | ties).astype(F).mean()


def sample(program: Program, count: int, number: int) -> dict[str, np.ndarray]:
    """Arrays of so many samples; the same for every layout."""
    rng = np.random.default_rng((program.seed, number))
    fields: dict[str, np.ndarray] = {"x": rng.normal(size=(count, *program.shape))}
    if program.other == "same":
        fields["other"] = rng.normal(size=(count, *program.shape))
    elif program.other == "ids":
        fields["other"] = rng.integers(0, TOKENS, (count, 2)).astype("i4")
    if program.loss == "entropy":
        fields["target"] = rng.integers(0, CLASSES, count).astype("i4")
    elif program.loss == "whole":
        fields["target"] = rng.normal(size=(count, 2))
    else:
        fields["target"] = rng.normal(size=(count, CLASSES))
    return {
        name: array * (1 + program.shift) if array.dtype == "f8" else array for name, array in fields.items()
    }


def batch_of(program: Program, count: int, number: int) -> Any:
    """A batch as a user would give it: a tuple, or a dict."""
    fields = sample(program, count, number)
    return fields if program.keyed else tuple(fields.values())


def make_model(case: Case) -> Model:
    """The model of a case."""
    inside, two = case.program.loss == "inside", bool(case.program.other)
    kind = (JudgedTwo if two else Judged) if inside else (TwoInputs if two else Model)
    return kind(case)


def make_engine(case: Case, plan: Any = None, seed: int | None = None) -> Engine:
    """An engine for a case that has not run yet. With a plan the strategy has nothing to say."""
    program, layout = case.program, case.layout
    model = make_model(case)
    metrics: list[Callable[..., Any]] = {"entropy": [right], "square": [far]}.get(program.loss, [])
    loss = None if program.loss == "inside" else lambda output, target: loss_of(model, output, target)
    meshes = model._meshes
    axis = meshes[0].axes[layout.seed % len(meshes[0].axes)] if meshes else None
    decided = (
        {}
        if plan is not None
        else {
            "mode": layout.mode,
            "micro_batches": program.micro,
            "schedule": layout.schedule,
            "refine": layout.refine,
            "mesh": meshes[0] if layout.batch_axis else None,
            "batch_axis": axis if layout.batch_axis else None,
        }
    )
    strategy = dg.Strategy(executor=layout.executor, **decided)
    states = optim.shard_states(meshes[0], axis) if layout.states and meshes else None
    return Engine(
        model.forward if program.plain else model,
        loss,
        make_optimizer(program, states),
        metrics,
        strategy,
        cluster=cluster(layout) if layout.searched else None,
        seed=program.seed if seed is None else seed,
        plan=plan,
    )


def make_optimizer(program: Program, states: Any) -> optim.Optimizer:
    """The optimiser; eps is far above rounding errors, which Adam would scale up where a gradient is zero."""
    rate: Any = schedules.warmup(0.02, 2) if program.warmup else 0.02
    given = {"lr": rate, "clip_norm": program.clip_norm, "state_spec": states}
    given["weight_decay"] = program.weight_decay
    if program.optimizer in ("adam", "adamw"):
        kind = optim.Adam if program.optimizer == "adam" else optim.AdamW
        return kind(eps=1e-3, **given)
    if program.optimizer == "adafactor":
        return optim.Adafactor(eps=1e-6, **given)
    momentum = 0.0 if program.optimizer == "sgd" else 0.9
    return optim.SGD(momentum=momentum, nesterov=program.optimizer == "nesterov", **given)


def cluster(layout: Layout) -> Any:
    """A cluster on which even small programs gain from being distributed."""
    return cluster_of(slow(layout.searched))
