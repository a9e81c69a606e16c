"""Layouts in which training must give what one rank gives, and the two models that are trained in them.

A model is a row of four parts; a layout says which mesh computes each part, how weights, batch and the stream
between the parts are split, and nothing else: completion decides the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine import Engine
from distgraph.ir.dtypes import to_numpy
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import UserDim
from distgraph.plan.strategy import Strategy

BATCHES, ROUNDS, RATE, SEED = 5, 4, 1e-2, 3
STEPS = BATCHES * ROUNDS
"""Later rounds start from moments and parameters that every batch has changed."""

VOCABULARY, WIDTH, LENGTH = 30, 12, 6
CHANNELS, IMAGE, CLASSES = (2, 6, 8), 6, 7
"""Few sizes are a multiple of the number of ranks: 30 rows over 4, 6 positions over 4 (one rank has none)."""

EPS = {"f64": 1e-8, "f32": 1e-3}
"""Of Adam. It divides by the root of the second moment, so an eps below the rounding error of the gradients
would turn rounding errors into whole steps where the exact gradient is zero or nearly so."""

NO_GRADIENT = "attn.k.bias"
"""Adding one vector to all keys leaves the softmax as it is: the gradient is zero but for rounding errors,
which Adam scales up. The loss does not depend on it, and its moments are compared."""

grid = ProcessMesh.grid
Dims = Sequence[UserDim]


@dataclass(frozen=True)
class Layout:
    """Where the parts of a model are computed and how they are split.

    Attributes:
        stages: one mesh a stage; none for a serial program.
        cuts: stage of each of the four parts; equal runs by default.
        rows: axes that split the batch, where a stage has them.
        weights: end of a parameter's name -> axes of its leading dims; the first entry that fits counts.
        stream: axes of what flows from part to part; None leaves it to completion.
        states: axis over which the optimiser's states are split.
        tied: whether head and embedding share one table.
        heads: of the attention.
        zero: what is split over the axes of the batch besides (`Strategy.zero`).
    """

    name: str
    stages: tuple[ProcessMesh, ...] = ()
    cuts: tuple[int, ...] = ()
    rows: UserDim = None
    weights: Mapping[str, Dims] = field(default_factory=dict, hash=False)
    stream: Dims | None = None
    states: str | None = None
    tied: bool = False
    heads: int = 4
    zero: int = 0

    @property
    def ranks(self) -> int:
        """How many the layout needs."""
        return 1 + max((max(mesh.members) for mesh in self.stages), default=0)

    def mesh(self, part: int) -> ProcessMesh | None:
        """The mesh that computes a part (-1 for the last); None in a serial program."""
        if not self.stages:
            return None
        cuts = self.cuts or tuple(i * len(self.stages) // 4 for i in range(4))
        return self.stages[cuts[part]]


def fitting(mesh: ProcessMesh, dims: Dims, ndim: int) -> list[UserDim]:
    """Dims of a tensor with the axes that a mesh has; the rest whole."""
    kept: list[UserDim] = []
    for dim in dims[:ndim]:
        axes = tuple(a for a in ((dim,) if isinstance(dim, str) else dim or ()) if a in mesh.sizes)
        kept.append(axes or None)
    return kept + [None] * (ndim - len(kept))


def pinned(x: Any, mesh: ProcessMesh | None, dims: Dims | None) -> Any:
    """The tensor or parameter with its layout, where there is one to give."""
    if mesh is None or dims is None:
        return x
    return dg.shard_tensor(x, mesh, fitting(mesh, dims, len(x.shape)))


class Parts(nn.Module):
    """Four parts in a row, each on its stage."""

    def __init__(self, layout: Layout, *parts: nn.Module) -> None:
        self.parts = list(parts)
        self._layout = layout
        for name, parameter in self.named_parameters():
            mesh = layout.mesh(int(name.split(".")[1]))
            dims = next((d for end, d in layout.weights.items() if name.endswith(end)), None)
            pinned(parameter, mesh, dims)

    def forward(self, x: Any) -> Any:
        x = pinned(x, self._layout.mesh(0), [self._layout.rows])
        for number, part in enumerate(self.parts):
            mesh = self._layout.mesh(number)
            with dg.on(mesh):
                x = part(x)
                if number < len(self.parts) - 1:
                    pinned(x, mesh, self._layout.stream)
        return x


class Embed(nn.Module):
    def __init__(self, dtype: str, dropout: float) -> None:
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.positions = nn.Parameter((LENGTH, WIDTH), dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Any) -> Any:
        return self.dropout(self.tokens(ids) + self.positions)


class Head(nn.Module):
    """Logits; with the table of the embedding where that is given."""

    def __init__(self, dtype: str, table: nn.Parameter | None = None) -> None:
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.weight = nn.Parameter((WIDTH, VOCABULARY), dtype) if table is None else table
        self._tied = table is not None

    def forward(self, x: Any) -> Any:
        return ops.matmul(self.norm(x), self.weight.T if self._tied else self.weight)


class Stem(nn.Module):
    def __init__(self, dtype: str) -> None:
        self.conv = nn.Conv2d(*CHANNELS[:2], 3, padding=1, bias=False, dtype=dtype)
        self.norm = nn.BatchNorm2d(CHANNELS[1], dtype=dtype)

    def forward(self, x: Any) -> Any:
        return ops.max_pool(ops.relu(self.norm(self.conv(x))), 2)


class Body(nn.Module):
    def __init__(self, dtype: str) -> None:
        self.conv = nn.Conv2d(*CHANNELS[1:], 3, padding=1, dtype=dtype)

    def forward(self, x: Any) -> Any:
        return ops.relu(self.conv(x))


class Thin(nn.Module):
    def __init__(self) -> None:
        self.flatten, self.dropout = nn.Flatten(), nn.Dropout(0.2)

    def forward(self, x: Any) -> Any:
        return self.dropout(self.flatten(x))


class Turned(nn.Module):
    """A layer whose samples come in reverse order: what is split over ranks comes from others."""

    def __init__(self, inputs: int, dtype: str) -> None:
        self.flatten, self.linear = nn.Flatten(), nn.Linear(inputs, WIDTH, dtype=dtype)

    def forward(self, x: Any) -> Any:
        return ops.tanh(ops.flip(self.linear(self.flatten(x)), 0))


def gpt(layout: Layout, dtype: str, dropout: float = 0.1) -> Parts:
    """Two layers, dropout on."""
    blocks = [nn.TransformerBlock(WIDTH, layout.heads, dropout=dropout, dtype=dtype) for _ in range(2)]
    embed = Embed(dtype, dropout)
    return Parts(layout, embed, *blocks, Head(dtype, embed.tokens.weight if layout.tied else None))


def conv(layout: Layout, dtype: str) -> Parts:
    """Two convolutions, the first with batch norm; pooling and dropout."""
    features = CHANNELS[2] * (IMAGE // 2) ** 2
    return Parts(layout, Stem(dtype), Body(dtype), Thin(), nn.Linear(features, CLASSES, dtype=dtype))


def mirror(layout: Layout, dtype: str) -> Parts:
    """Linear layers with the batch turned around behind each: under refine, on the ranks in reverse order."""
    inputs = [CHANNELS[0] * IMAGE**2, WIDTH, WIDTH]
    turned = [Turned(n, dtype) for n in inputs]
    return Parts(layout, *turned, nn.Linear(WIDTH, CLASSES, dtype=dtype))


MODELS = {"gpt": gpt, "conv": conv, "mirror": mirror}


@cache
def batches(model: str, dtype: str, size: int) -> list[tuple[Any, Any]]:
    """The batches of all steps; there is something to learn in those of the GPT."""
    rng = np.random.default_rng(SEED)
    made = []
    for _ in range(BATCHES):
        if model == "gpt":
            x = rng.integers(0, VOCABULARY, (size, LENGTH)).astype(np.int32)
            y = (7 * x + 11) % VOCABULARY
        else:
            x = rng.standard_normal((size, CHANNELS[0], IMAGE, IMAGE)).astype(to_numpy(dtype))
            y = rng.integers(0, CLASSES, size).astype(np.int32)
        made.append((x, y))
    return made * ROUNDS


@dataclass(frozen=True)
class Case:
    """A model in a layout, and how a step is cut."""

    model: str
    layout: Layout
    micro: int = 1
    schedule: str = "1f1b"
    size: int = 16
    dtype: str = "f64"
    refine: str = "conflicts"
    device: str = "cpu"
    cuda_graphs: bool = False

    @property
    def serial(self) -> Case:
        """The same program on one rank."""
        layout = Layout("serial", tied=self.layout.tied, heads=self.layout.heads)
        return Case(self.model, layout, self.micro, size=self.size, dtype=self.dtype)

    def engine(self) -> Engine:
        """An engine that has not run yet."""
        return make_engine(self, MODELS[self.model](self.layout, self.dtype))

    def __str__(self) -> str:
        words = [self.model, self.layout.name, f"m{self.micro}", self.schedule, f"b{self.size}", self.dtype]
        return "-".join([*words, self.refine])


def make_engine(case: Case, model: Parts, eps: float | None = None) -> Engine:
    """An engine for a model that has the layout of the case."""
    layout, last = case.layout, case.layout.mesh(-1)

    def loss(logits: Any, labels: Any) -> Any:
        with dg.on(last):
            return nn.CrossEntropy()(logits, pinned(labels, last, [layout.rows]))

    spec = optim.shard_states(layout.stages[0], layout.states) if layout.states else None
    optimizer = optim.Adam(lr=RATE, eps=eps or EPS[case.dtype], state_spec=spec)
    strategy = Strategy(
        micro_batches=case.micro,
        schedule=case.schedule,
        refine=case.refine,
        device=case.device,
        cuda_graphs=case.cuda_graphs,
        zero=layout.zero,
    )
    return Engine(model, loss, optimizer, strategy=strategy, seed=SEED)


@dataclass(frozen=True)
class Outcome:
    """What training left: a loss a step, and parameters and states as whole arrays."""

    losses: np.ndarray
    tensors: Mapping[str, np.ndarray]


def train(case: Case, steps: int = STEPS) -> Outcome:
    """Train; under MPI every process calls it and gets the whole outcome."""
    engine = case.engine()
    try:
        losses = [engine.run(batch)["loss"] for batch in batches(case.model, case.dtype, case.size)[:steps]]
        return Outcome(np.array(losses), gathered(engine))
    finally:
        engine.close()


def gathered(engine: Engine) -> dict[str, np.ndarray]:
    """Parameters and states as whole arrays; ranks that hold the same block must hold the same bits."""
    world, records = engine._session.ranks(), engine.memory.records
    held = world.gather(
        {
            rank: {
                name: engine.memory.block(name, rank) for name, r in records.items() if rank in r.attr.mesh
            }
            for rank in world.local
        }
    )
    tensors = {}
    for name, record in records.items():
        whole = np.full(record.shape, np.nan, to_numpy(record.dtype))
        for rank in record.attr.mesh.members:
            where = record.attr.spec.slices(record.shape, record.attr.mesh, rank)
            before = whole[where].copy()
            whole[where] = held[rank][name]
            if not np.isnan(before).all():
                np.testing.assert_array_equal(before, whole[where], f"copies of {name} differ")
        tensors[name] = whole
    return tensors


@cache
def reference(case: Case) -> Outcome:
    """What one rank gives."""
    return train(case.serial)


def tolerance(case: Case) -> float:
    """Relative tolerance of losses and parameters.

    In fp64 it is 1e-10. In fp32 the sums of a step are added in another order: the expected error of a chain
    of sums of n terms is sqrt(n) eps (Higham and Mary, 2019), n the terms on the longest path forward and
    back, and the errors of the steps add up.
    """
    if case.dtype == "f64":
        return 1e-10
    samples = case.size
    if case.model == "gpt":
        block = 2 * WIDTH + LENGTH + 2 * WIDTH + 4 * WIDTH  # norm, q, scores, out, up, down
        terms = 2 * block + 2 * WIDTH + VOCABULARY + samples * LENGTH
    else:
        pixels = samples * IMAGE**2
        terms = (
            9 * (CHANNELS[0] + CHANNELS[1]) + 2 * pixels + CHANNELS[2] * (IMAGE // 2) ** 2 + CLASSES + samples
        )
    return float(STEPS * np.sqrt(2 * terms) * np.finfo(np.float32).eps)


def check(case: Case) -> Outcome:
    """Train in a layout and on one rank, and compare."""
    found, expected, near = train(case), reference(case.serial), tolerance(case)
    assert np.mean(expected.losses[-BATCHES:]) < np.mean(expected.losses[:BATCHES]) - 0.05
    np.testing.assert_allclose(found.losses, expected.losses, rtol=near, err_msg="losses")
    assert set(found.tensors) == set(expected.tensors)
    for name, tensor in expected.tensors.items():
        if name.endswith(NO_GRADIENT):
            continue
        np.testing.assert_allclose(found.tensors[name], tensor, rtol=near, atol=near, err_msg=name)
    return found


# Layouts

TENSOR = {
    "q.weight": (None, "tp"),
    "k.weight": (None, "tp"),
    "v.weight": (None, "tp"),
    "up.weight": (None, "tp"),
}
VOCAB = {"tokens.weight": ("tp",), "3.weight": (None, "tp")}
FILTERS = {"0.conv.weight": ("tp",), "1.conv.weight": (None, "tp"), "3.weight": (None, "tp")}
EVERY = {"": ("dp",)}


def layouts(model: str) -> list[Layout]:
    """The layouts that every model is trained in."""
    tensor = TENSOR if model == "gpt" else FILTERS
    two, four = grid(dp=2, tp=2), grid(dp=4)
    return [
        Layout("dp4", (four,), rows="dp"),
        Layout("tp4", (grid(tp=4),), weights=tensor),
        Layout("dp2_tp2", (two,), rows="dp", weights=tensor),
        Layout("pp2", (grid(0, one=1), grid(1, one=1))),
        Layout("pp4", tuple(grid(i, one=1) for i in range(4))),
        Layout("dp2_pp2", (grid(0, dp=2), grid(2, dp=2)), rows="dp"),
        Layout("dp2_tp2_pp2", (two, grid(4, dp=2, tp=2)), rows="dp", weights=tensor),
        Layout("stages_1_3", (grid(0, dp=1), grid(1, dp=3)), rows="dp"),
        Layout("stages_3_1", (grid(0, dp=3), grid(3, dp=1)), rows="dp"),
        Layout("stages_tp3_dp1", (grid(0, tp=3), grid(3, dp=1)), rows="dp", weights=tensor),
        Layout("dp2_tp3", (grid(dp=2, tp=3),), rows="dp", weights=tensor),
        Layout("stages_3_3", (grid(0, dp=3), grid(3, dp=3)), rows="dp"),
        Layout("stages_dp2_tp2_and_2", (two, grid(4, dp=2)), rows="dp", weights=tensor),
        Layout("zero", (four,), rows="dp", states="dp"),
        Layout("zero3", (four,), rows="dp", weights=EVERY, states="dp"),
        Layout("overlap", (grid(0, dp=3), grid(1, dp=3)), rows="dp"),
        Layout("dp_3_1", (grid(dp=2).weighted(dp=(3, 1)),), rows="dp"),
        Layout("dp_5_2_1_zero", (grid(dp=3).weighted(dp=(5, 2, 1)),), rows="dp", states="dp"),
        Layout("dp_1_3_tp2", (two.weighted(dp=(1, 3)),), rows="dp", weights=tensor),
        Layout(
            "stages_3_1_and_1_3",
            (grid(0, dp=2).weighted(dp=(3, 1)), grid(2, dp=2).weighted(dp=(1, 3))),
            rows="dp",
        ),
        Layout("back", (grid(0, dp=2), grid(2, dp=2), grid(0, dp=2)), (0, 1, 1, 2), rows="dp"),
    ]


GPT_LAYOUTS = [
    Layout("vocab", (grid(dp=2, tp=2),), rows="dp", weights=TENSOR | VOCAB),
    Layout("vocab_tp4", (grid(tp=4),), weights=TENSOR | VOCAB),
    Layout("sequence", (grid(dp=2, sp=2),), rows="dp", stream=("dp", "sp")),
    Layout("sequence4", (grid(sp=4),), stream=(None, "sp")),
    Layout("sequence_tp", (grid(dp=2, tp=2),), rows="dp", weights=TENSOR, stream=("dp", "tp")),
    Layout("heads3", (grid(tp=2),), weights=TENSOR, heads=3),
    Layout("tied", (grid(tp=2),), weights=TENSOR | VOCAB, tied=True),
    Layout("tied_pp2", (grid(0, dp=2), grid(2, dp=2)), rows="dp", tied=True),
    Layout("tied_1_3", (grid(0, dp=1), grid(1, dp=3)), rows="dp", tied=True),
    Layout("tied_zero", (grid(dp=4),), rows="dp", states="dp", tied=True),
    Layout("zero_tp", (grid(dp=2, tp=2),), rows="dp", weights=TENSOR, states="dp"),
    Layout("zero_pp2", (grid(0, dp=2), grid(2, dp=2)), rows="dp", states="dp"),
    Layout("two_axes", (grid(dp=3, sp=2),), rows=("dp", "sp")),
]


def cases() -> list[Case]:
    """What the tests train, in-process and under MPI: every layout, both schedules, 1 to 4 micro-batches."""
    found = mirrored() + split_over_the_batch()
    for model in ("gpt", "conv"):
        known = {
            layout.name: layout for layout in [*layouts(model), *(GPT_LAYOUTS if model == "gpt" else [])]
        }
        for layout in known.values():
            found.append(Case(model, layout))
            pipelined = (2, "gpipe"), (4, "1f1b"), (4, "gpipe")
            plain = ((2 if model == "gpt" else 4, "1f1b"),)
            for micro, policy in pipelined if len(layout.stages) > 1 else plain:
                found.append(Case(model, layout, micro, policy, refine="never"))
        # blocks of 3, 3, 3 and 1 rows; of 3, 3, 3 and none; two micro-batches of 2, 2, 1 and none; 9 and 1
        uneven = (
            ("dp4", 10, 1),
            ("dp4", 9, 1),
            ("dp4", 10, 2),
            ("zero", 10, 1),
            ("stages_1_3", 8, 2),
            ("overlap", 7, 1),
            ("dp_3_1", 10, 1),
        )
        found += [Case(model, known[name], micro, size=size) for name, size, micro in uneven]
        single = ("dp4", "tp4", "dp2_tp2_pp2", "zero3", "stages_tp3_dp1")
        found += [Case(model, known[name], 2, dtype="f32", refine="never") for name in single]
        found += [Case(model, known[name], refine="always") for name in ("tp4", "stages_tp3_dp1")]
    return found


def split_over_the_batch() -> list[Case]:
    """ZeRO by `Strategy.zero`: alone, with tensor and pipeline parallelism, uneven and tied."""
    four, two, pair = (grid(dp=4),), (grid(dp=2, tp=2),), (grid(0, dp=2), grid(2, dp=2))
    uneven = (grid(dp=3).weighted(dp=(5, 2, 1)),)
    made = [Layout(f"dp4_split{zero}", four, rows="dp", zero=zero) for zero in (1, 2, 3)]
    found = [Case(model, layout, micro) for model in ("gpt", "conv") for layout in made for micro in (1, 2)]
    found.append(Case("gpt", made[2], size=10))
    for zero in (2, 3):
        tensor = Layout(f"dp2_tp2_split{zero}", two, rows="dp", weights=TENSOR, zero=zero)
        stages = Layout(f"dp2_pp2_split{zero}", pair, rows="dp", zero=zero)
        weighted = Layout(f"dp_5_2_1_split{zero}", uneven, rows="dp", zero=zero)
        tied = Layout(f"tied_split{zero}", four, rows="dp", tied=True, zero=zero)
        found += [Case("gpt", layout) for layout in (tensor, weighted, tied)]
        found += [Case("gpt", stages, 4), Case("gpt", stages, 4, "gpipe"), Case("gpt", tensor, 2)]
    return found


def mirrored() -> list[Case]:
    """Reversals along the split batch, with blocks of one length and uneven ones."""
    pair, four, square = (grid(dp=2),), (grid(dp=4),), (grid(dp=2, tp=2),)
    stages = Layout("stages_2_2", (grid(0, dp=2), grid(2, dp=2)), rows="dp")
    flat = [Layout("dp2", pair, rows="dp"), Layout("dp4", four, rows="dp")]
    both = Layout("rows_dp_tp", square, rows=("dp", "tp"))
    made = [Case("mirror", layout, refine="always") for layout in (*flat, both, stages)]
    made += [Case("mirror", flat[1], micro, size=size, refine="always") for micro, size in ((2, 20), (1, 10))]
    return [*made, Case("mirror", stages, 4, refine="always")]
