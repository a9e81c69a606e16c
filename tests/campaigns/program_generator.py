"""Random programs and random layouts of them as data: drawn from seeds, written as JSON, shrunk step by step.

A program is a list of instructions; each has a seed of its own, from which it draws its details (sizes, dims,
partners) when it is traced, for the tensors that it meets. So any instruction may be taken out of a program
and what is left is still a program. A layout says on which mesh every instruction is computed and what is
annotated; it too draws specs from seeds, so that it fits whatever the instructions make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

import distgraph as dg

LAYOUTS_PER_PROGRAM = 4
"""Trials in a row that share a program, and what one rank makes of it."""

OPTIMIZERS = ("sgd", "momentum", "nesterov", "adam", "adamw", "adafactor")
WEIGHTS = {  # instruction -> how often
    "unary": 8, "join": 6, "select": 2, "bias": 4, "scalar": 2, "linear": 8, "tied": 1, "contract": 4,
    "norm": 4, "softmax": 2, "reduce": 4, "extreme": 1, "reshape": 7, "transpose": 4, "slice": 7, "concat": 3,
    "stack": 1, "split": 2, "roll": 2, "flip": 2, "pad": 2, "repeat": 2, "take": 2, "cumsum": 2, "sort": 1,
    "embed": 3, "conv": 3, "pool": 2, "batch_norm": 2, "attention": 2, "block": 1, "moe": 1, "dropout": 4,
    "noise": 1, "recall": 4, "stop": 1, "skip": 3, "loop": 2,
}  # fmt: skip
STYLES = ("on", "on", "boundary", "pins")
KINDS = ("pipeline", "pipeline", "overlapping", "nested", "looped", "scattered")


@dataclass
class Instruction:
    """One step of a program.

    Attributes:
        kind: what it does, a key of `program_steps.STEPS`.
        seed: of its details.
        name: of its parameters; it stays when others are taken out.
    """

    kind: str
    seed: int
    name: str


@dataclass
class Program:
    """A serial program and how it is trained.

    Attributes:
        seed: of data, initial values, shuffling and dropout.
        pure: whether the first dim of every value is the batch and samples do not mix.
        shape: of a sample of the first input.
        other: a second input: "", "same" (of the first one's shape) or "ids".
        batch: samples of a micro-batch.
        loss: "square", "entropy", "sine", "inside" (the model returns it) or "whole" (of all outputs).
        keyed: whether batches are dicts.
        fitted: whether `Engine.fit` trains it, and not `Engine.run`.
        rest: samples of a short last batch, after `steps` whole ones; with `Engine.fit` only.
        plain: whether the model is given to the engine as a function, and not as a module.
        shift: relative change of all numbers of the data.
    """

    seed: int
    instructions: list[Instruction]
    pure: bool
    shape: list[int]
    other: str
    batch: int
    micro: int
    steps: int
    optimizer: str
    clip_norm: float | None
    weight_decay: float
    loss: str
    keyed: bool = False
    warmup: bool = False
    fitted: bool = False
    rest: int = 0
    plain: bool = False
    shift: float = 0.0


@dataclass
class Mesh:
    """A mesh as data: ranks in order, sizes of axes, weights of axes."""

    ranks: list[int]
    axes: dict[str, int]
    weights: dict[str, list[int]] = field(default_factory=dict)

    def build(self) -> dg.ProcessMesh:
        """The mesh itself."""
        ranks = np.array(self.ranks).reshape(tuple(self.axes.values()))
        return dg.ProcessMesh(ranks, list(self.axes), self.weights or None)


@dataclass
class Layout:
    """Where and how a program is computed.

    Attributes:
        meshes: of all instructions; none for a serial program.
        stages: mesh of each instruction, by its name.
        style: whether instructions are placed by `dg.on`, by `dg.pipeline_boundary`, or by pins alone.
        pins: instruction (or input) -> seed of the layout that its result is pinned to.
        reshards: instruction -> seed of the layout that its result is moved to.
        operators: instruction -> seed of the specs of `dg.shard_op`.
        parameters: instruction -> seed of the layouts of its parameters.
        recomputed: (first, last) instructions by name.
        states: whether optimiser states are split, as ZeRO does.
        loss: number of the mesh of the loss; -1 for none.
        executor: whether ranks follow the recorded order or run what is ready first.
        batch_axis: whether `Strategy.batch_axis` splits the inputs over an axis of the first mesh.
        searched: devices of the cluster for which a plan is searched, 0 for none.
        extra: what follows training, of "evaluate", "predict", "plan", "checkpoint".
        later: the layout in which another engine goes on after the first step, from a checkpoint; or None.
    """

    seed: int = 0
    meshes: list[Mesh] = field(default_factory=list)
    stages: dict[str, int] = field(default_factory=dict)
    style: str = "on"
    pins: dict[str, int] = field(default_factory=dict)
    reshards: dict[str, int] = field(default_factory=dict)
    operators: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    recomputed: list[list[str]] = field(default_factory=list)
    states: bool = False
    loss: int = -1
    batch_axis: bool = False
    schedule: str = "1f1b"
    executor: str = "static"
    refine: str = "conflicts"
    mode: str = "semi"
    searched: int = 0
    extra: list[str] = field(default_factory=list)
    later: Layout | None = None

    @property
    def ranks(self) -> int:
        """How many the layout needs, and the one that follows it."""
        own = 1 + max((max(mesh.ranks) for mesh in self.meshes), default=0)
        return own if self.later is None else max(own, self.later.ranks)

    @classmethod
    def from_json(cls, data: dict[str, Any] | None) -> Layout | None:
        """The layout that `Case.to_json` gave."""
        if data is None:
            return None
        meshes = [Mesh(**each) for each in data["meshes"]]
        return cls(**data | {"meshes": meshes, "later": cls.from_json(data.get("later"))})


@dataclass
class Case:
    """A program in a layout."""

    program: Program
    layout: Layout

    def to_json(self) -> dict[str, Any]:
        """The case as JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        """The case that `to_json` gave."""
        instructions = [Instruction(**each) for each in data["program"]["instructions"]]
        layout = Layout.from_json(data["layout"])
        assert layout is not None
        return cls(Program(**data["program"] | {"instructions": instructions}), layout)


class Draw:
    """Choices from one seed."""

    def __init__(self, *seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def below(self, count: int) -> int:
        """A number from 0 to count - 1."""
        return int(self.rng.integers(count))

    def between(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def chance(self, share: float) -> bool:
        """True in so many of all cases."""
        return bool(self.rng.random() < share)

    def pick(self, options: Sequence[Any]) -> Any:
        """One of them."""
        return options[self.below(len(options))]

    def seed(self) -> int:
        """A seed for what is drawn later."""
        return int(self.rng.integers(1 << 31))


def draw_program(*seed: int, pure: bool = False) -> Program:
    """A program of 2 to 14 instructions, at random or always one in which samples do not mix."""
    d = Draw(*seed)
    kinds, shares = list(WEIGHTS), np.array(list(WEIGHTS.values()), float)
    count = d.pick((2, 3, 4, 5, 6, 7, 8, 10, 12, 14))
    chosen = d.rng.choice(len(kinds), size=count, p=shares / shares.sum())
    instructions = [Instruction(kinds[k], d.seed(), f"s{i}") for i, k in enumerate(chosen)]
    pure = d.chance(0.6) or pure
    loss = d.pick(("square", "entropy", "sine", "inside")) if pure else "whole"
    program = Program(
        seed=d.seed(),
        instructions=instructions,
        pure=pure,
        shape=[d.between(1, 6) if n < 2 else d.between(2, 5) for n in range(d.pick((1, 1, 2, 2, 3)))],
        other=d.pick(("", "", "same", "ids")),
        batch=d.pick((1, 2, 3, 4, 5, 6)),
        micro=d.pick((1, 1, 2, 3, 4)),
        steps=3,
        optimizer=d.pick(OPTIMIZERS),
        clip_norm=d.pick((None, None, 0.05, 100.0)),
        weight_decay=d.pick((0.0, 0.0, 0.1)),
        loss=loss,
        keyed=d.chance(0.2),
        warmup=d.chance(0.2),
        fitted=d.chance(0.2),
        plain=d.chance(0.2),
    )
    if program.fitted and pure and d.chance(0.5):
        program.rest = d.between(1, program.batch * program.micro)
    return program


def draw_layout(program: Program, ranks: int, *seed: int) -> Layout:
    """A layout of a program on at most so many ranks."""
    d = Draw(*seed)
    kind = d.pick(KINDS)
    count = 1 if d.chance(0.4) and kind != "nested" else d.pick((2, 2, 2, 3, 3, 4))
    meshes = _draw_meshes(d, min(count, ranks) if kind == "pipeline" else count, ranks, kind)
    names = [each.name for each in program.instructions]
    layout = Layout(
        seed=d.seed(), meshes=meshes, style=d.pick(STYLES), stages=_stages(d, names, meshes, kind)
    )
    often = d.pick((0.0, 0.15, 0.4))
    for table, share in ((layout.pins, 1.0), (layout.reshards, 0.3), (layout.operators, 0.3)):
        table |= {name: d.seed() for name in names if d.chance(often * share)}
    layout.mode = "manual" if d.chance(0.08) else "semi"
    shared = 1.0 if layout.mode == "manual" else d.pick((0.0, 0.3, 0.7))
    layout.parameters |= {name: d.seed() for name in (*names, "head") if d.chance(shared)}
    layout.batch_axis = d.chance(0.25)
    if not layout.batch_axis:
        layout.pins |= {name: d.seed() for name in ("x", "other", "target") if d.chance(0.5)}
    if d.chance(0.3):
        first = d.below(len(names))
        layout.recomputed.append([names[first], names[d.between(first, len(names) - 1)]])
    layout.states = d.chance(0.3)
    layout.loss = d.pick((-1, len(meshes) - 1, len(meshes) - 1, d.below(len(meshes))))
    layout.schedule = d.pick(("1f1b", "gpipe") if kind == "nested" else ("1f1b", "1f1b", "gpipe"))
    layout.refine = d.pick(("conflicts", "conflicts", "conflicts", "never", "always"))
    extras = (("evaluate", 0.25), ("predict", 0.25), ("plan", 0.08), ("checkpoint", 0.04))
    layout.extra = [name for name, share in extras if d.chance(share)]
    if d.chance(0.5) and _equal_or_disjoint(meshes):
        layout.executor = "actors"
    return layout


def _equal_or_disjoint(meshes: Sequence[Mesh]) -> bool:
    """Whether no two meshes have some of their ranks in common but not all."""
    sets = [set(mesh.ranks) for mesh in meshes]
    return all(a == b or not a & b for a in sets for b in sets)


def draw_searched(program: Program, ranks: int, *seed: int) -> Layout:
    """A layout that is left to a search, mostly without annotations."""
    d = Draw(*seed)
    mode = d.pick(("auto", "auto", "recursive", "sharding_propagation"))
    if mode == "sharding_propagation" or (mode == "auto" and d.chance(0.3)):
        layout = draw_layout(program, ranks, d.seed())
        layout.meshes, layout.stages = layout.meshes[:1], dict.fromkeys(layout.stages, 0)
        layout.meshes[0].weights, layout.meshes[0].ranks = {}, sorted(layout.meshes[0].ranks)
        layout.loss, layout.extra = min(layout.loss, 0), []
    else:
        layout = Layout(seed=d.seed(), refine="never")
        layout.extra = [name for name in ("evaluate", "predict", "plan") if d.chance(0.2)]
    layout.mode, layout.searched = mode, max(d.pick((2, 2, 3, 4)), layout.ranks)
    return layout


def draw_case(seed: int, number: int, ranks: int = 8, searched: bool = False) -> Case:
    """Trial `number` of the campaign `seed`.

    A search may choose another number of micro-batches, which changes nothing only where samples do not mix.
    """
    program = draw_program(seed, number // LAYOUTS_PER_PROGRAM, pure=searched)
    draw = draw_searched if searched else draw_layout
    layout = draw(program, ranks, seed, number, ranks)
    d = Draw(layout.seed)
    if program.steps > 1 and d.chance(0.08) and "plan" not in layout.extra:
        layout.later = draw_layout(program, ranks, d.seed())
        layout.later.extra = []
    return Case(program, layout)


def _draw_meshes(d: Draw, count: int, ranks: int, kind: str) -> list[Mesh]:
    """Meshes next to each other for a pipeline; otherwise anywhere among the ranks."""
    if kind == "nested":
        (whole,) = _draw_meshes(d, 1, ranks, "overlapping")
        size = len(whole.ranks)
        parts = _draw_meshes(d, min(count - 1, size), size, "pipeline")
        return [whole, *(replace(part, ranks=[whole.ranks[i] for i in part.ranks]) for part in parts)]
    meshes: list[Mesh] = []
    start = 0
    for i in range(count):
        left = ranks - start - (count - 1 - i) if kind == "pipeline" else ranks
        size = min(d.pick((1, 2, 2, 3, 4, 4, 6, 8) if count == 1 else (1, 1, 2, 2, 3, 4)), left)
        if kind == "pipeline":
            members = list(range(start, start + size))
            start += size
        else:
            first = d.between(0, min(ranks - size, 3))
            members = list(range(first, first + size))
        if d.chance(0.2):
            members = [members[i] for i in d.rng.permutation(size)]
        axes = _draw_axes(d, size)
        weights = {
            axis: [d.between(1, 3) for _ in range(n)] for axis, n in axes.items() if n > 1 and d.chance(0.08)
        }
        meshes.append(Mesh(members, axes, weights))
    return meshes


def _draw_axes(d: Draw, size: int) -> dict[str, int]:
    """Axes whose sizes multiply to `size`; some have one position."""
    sizes, left = [], size
    while left > 1:
        divisors = [n for n in range(2, left + 1) if left % n == 0]
        sizes.append(d.pick(divisors))
        left //= sizes[-1]
    if not sizes or d.chance(0.1):
        sizes.insert(d.below(len(sizes) + 1), 1)
    names = ("dp", "tp", "sp", "x") if d.chance(0.8) else ("tp", "dp", "x", "y")
    return dict(zip(names, sizes, strict=False))


def _stages(d: Draw, names: Sequence[str], meshes: Sequence[Mesh], kind: str) -> dict[str, int]:
    count = len(meshes)
    if kind == "scattered":
        return {name: d.below(count) for name in names}
    runs = count if kind != "looped" else 2 * count - 1
    cuts = sorted(d.below(len(names) + 1) for _ in range(runs - 1))
    numbers = [sum(cut <= i for cut in cuts) for i in range(len(names))]
    return {name: number % count for name, number in zip(names, numbers, strict=True)}
