"""The programs that a profile times, over generic logarithmic grids of shapes and arithmetic intensity.

*In:* nothing. *Out:* `Probe`s.
*Invariant:* no shape is that of a benchmark or a tutorial, and none is chosen for a program that is to be
forecast. Lengths grow by a constant factor from a few to some thousand; they are multiples of 8, as those of
most programs, but no powers of two. Each pair of two lengths is met once, with the third length (the batch)
rotating, so that every kind of op is met with few and with many FLOPs per byte. `cost_fitting` interpolates.
A product is measured with several operands in turn, unless one takes as long as all of them may, and layers
with a large matrix, as most products of a step multiply weights that were last used a step before and are no
longer in the nearest caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any, Final

from distgraph import nn, ops
from distgraph.array_api.trace import trace
from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import Graph
from distgraph.optim import SGD, Adam, AdamW, Optimizer
from distgraph.passes.pass_pipeline import pipeline, run_passes
from distgraph.passes.serial.backward import differentiate
from distgraph.runtime.profile.op_probes import Probe
from distgraph.tracing.tensor import Tensor, emit_one
from distgraph.tracing.tracer import Trace

LENGTHS: Final = (6, 24, 112, 528, 2480)
"""Lengths of matrices: m, n and k of products are all triples of these within `_MOST_FLOPS`."""
_MOST_FLOPS: Final = 4e8
_FEW_FLOPS: Final = 4e6
"""Products of so few are timed together in one program."""
_MOST_COPIES: Final = 16  # operands of products of one shape
_COLD_BYTES: Final = 2**26  # that no caches hold
STREAM_SIZES: Final = tuple(3 * 4**power for power in range(3, 12))
"""Elements: 768 bytes to 48 MiB of f32."""
_TEXTS: Final = ((20, 5, 1), (12, 56, 264), (24, 72, 216))
"""Batches, lengths and widths of texts; heads are 24, 36 and 72 wide."""
_LONG_TEXT: Final = (1, 1240, 24)
_IMAGES: Final = ((40, 10, 3), (12, 20, 36), (24, 56, 136))
"""Batches, edges and channels of images."""
_SLICED_WIDTH: Final = 112  # columns of the products between copies of slices
_NARROW: Final = (3, 6, 24)  # lengths of many rows
_GROUPS: Final = (
    "bxyk,bkn->xbyn",  # the product is copied
    "xbyk,bkn->bxyn",  # the left operand is
    "bmk,xbyk->bmxy",  # the right one, whose last dim is summed
    "bmxy,xbyk->bmk",  # the right one, of which two dims are summed
)
"""Contractions in which the dims x and y count as one, but have b between them in an operand or result."""
_MICRO: Final = 4  # micro-batches of the probes with several


def probes() -> tuple[Probe, ...]:
    """All programs that a profile runs, quick ones first."""
    programs = []
    for dtype in ("f32", "f64"):
        triples = product(LENGTHS, LENGTHS, LENGTHS)
        shapes = [shape for shape in triples if 2 * _size(shape) <= _MOST_FLOPS]
        small = [shape for shape in shapes if 2 * _size(shape) <= _FEW_FLOPS]
        programs.append(Probe(f"matmul/{dtype}/small", partial(_products, dtype, small)))
        large = {shape: _copies(shape, itemsize(dtype)) for shape in shapes if shape not in small}
        programs += [
            Probe(f"matmul/{dtype}/{_name(shape)}", partial(_products_of_layers, dtype, shape, count))
            for shape, count in large.items()
        ]
    for rows, width in product(LENGTHS[2:], _NARROW):
        programs.append(Probe(f"rows/{rows}x{width}", partial(_narrow_rows, rows, width)))
    for shape in _rotated((6, 3, 12), LENGTHS[:3], LENGTHS[:3]):
        programs.append(Probe(f"contraction/{_name(shape)}", partial(_contractions, *shape)))
    for shape in (*_rotated(*_TEXTS), _LONG_TEXT):
        programs.append(Probe(f"transformer/{_name(shape)}", partial(_transformer, *shape)))
    for batch, edge, channels in _rotated(*_IMAGES):
        shape = batch, channels, edge
        programs.append(Probe(f"convolution/{_name(shape)}", partial(_convolution, *shape)))
        if batch != _IMAGES[0][0]:
            programs.append(Probe(f"residual/{_name(shape)}", partial(_residual, *shape)))
    for batch, width in product(LENGTHS[1:3], LENGTHS[2:4]):
        programs.append(Probe(f"perceptron/{batch}x{width}", partial(_perceptron, batch, width)))
    programs += [Probe(f"layer/{batch}", partial(_layer, batch)) for batch in LENGTHS[:3]]
    programs += [
        Probe("layer/micro", partial(_layer, LENGTHS[0]), _MICRO),
        Probe("transformer/micro", partial(_transformer, 5, 56, 72), _MICRO),
        Probe("convolution/micro", partial(_convolution, 10, 24, 12), _MICRO),
        Probe("perceptron/micro", partial(_perceptron, 24, 112), _MICRO),
    ]
    for rows, width in pairwise(LENGTHS):
        programs.append(Probe(f"selection/{rows}x{width}", partial(_selections, rows, width)))
    programs += [Probe(f"stream/{size}", partial(_streams, size)) for size in STREAM_SIZES]
    for rows, width in pairwise(LENGTHS):
        programs.append(Probe(f"slices/{rows}x{width}", partial(_slices, rows, width)))
    return tuple(programs)


def _size(shape: Sequence[int]) -> int:
    m, n, k = shape
    return m * n * k


def _copies(shape: Sequence[int], width: int) -> int:
    """Number of products of a shape, of elements of some bytes, whose operands are in no near cache."""
    m, n, k = shape
    nbytes = width * (m * k + k * n + m * n)
    return max(1, int(min(_MOST_COPIES, _COLD_BYTES // nbytes, _MOST_FLOPS // (2 * _size(shape)))))


def _name(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _rotated(
    batches: Sequence[int], firsts: Sequence[int], seconds: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """All pairs of two lengths, each with one of the batches in turn (a Latin square)."""
    for (row, first), (column, second) in product(enumerate(firsts), enumerate(seconds)):
        yield batches[(row + column) % len(batches)], first, second


def _products(dtype: str, shapes: Sequence[tuple[int, int, int]]) -> Graph:
    inputs = [((m, k), dtype) for m, _, k in shapes] + [((k, n), dtype) for _, n, k in shapes]

    def program(*tensors: Tensor) -> Any:
        half = len(shapes)
        return tuple(ops.matmul(a, b) for a, b in zip(tensors[:half], tensors[half:], strict=True))

    return trace(program, *inputs, name="matmul")


def _products_of_layers(dtype: str, shape: tuple[int, int, int], count: int) -> Graph:
    """Products of one shape, each of other operands: of layers, and of the gradients of inputs and weights,
    in which one operand is read across its rows."""
    m, n, k = shape
    kinds = [("mk,kn", (m, k), (k, n)), ("mk,nk", (m, k), (n, k)), ("km,kn", (k, m), (k, n))]
    chosen = [kinds[i % len(kinds)] for i in range(count)]

    def program(*tensors: Tensor) -> Any:
        pairs = zip(chosen, tensors[::2], tensors[1::2], strict=True)
        return tuple(
            ops.matmul(a, b) if spec == "mk,kn" else ops.einsum(f"{spec}->mn", a, b)
            for (spec, _, _), a, b in pairs
        )

    inputs = [(shape_of, dtype) for _, left, right in chosen for shape_of in (left, right)]
    return trace(program, *inputs, name="matmul")


def _streams(size: int) -> Graph:
    """Elementwise ops and lookups on `size` elements."""
    width = min(size // 12, 192)  # 12 rows at least: ids go up to 9
    rows = size // width

    def program(x: Tensor, y: Tensor, ids: Tensor) -> Any:
        return x + y, x * y, ops.relu(x), ops.embedding(x, ids)

    return trace(program, ((rows, width), "f32"), ((rows, width), "f32"), ((rows,), "i32"), name="stream")


def _selections(rows: int, width: int) -> Graph:
    """Ops that select, order, count and reduce, and those that move blocks."""
    rows = max(rows, 12)  # ids go up to 9

    def program(x: Tensor, ids: Tensor, places: Tensor) -> Any:
        ordered = (ops.sort(x), ops.argsort(x), *ops.top_k(x, 2), ops.argmax(x, -1), ops.cumsum(x, -1))
        moved = (ops.take(x, ids), ops.one_hot(ids, 12, "f32"), ops.pick(x, places))
        added = ops.scatter_add(x, ids, x)
        reduced = (x.sum(0), x.sum(-1), x.max(0), x.max(-1), ops.logsumexp(x, -1), ops.var(x, -1))
        shaped = (ops.transpose(x), ops.concat([x, x], 0), ops.pad(x, (1, 0), (1, 0)), ops.softmax(x))
        return (*ordered, *moved, added, *reduced, *shaped)

    ids = ((rows,), "i32")
    return trace(program, ((rows, width), "f32"), ids, ids, name="selection")


def _slices(rows: int, width: int) -> Graph:
    """Parts of matrices that are copied out and in, with products between them as in a program.

    Meanwhile the products fill the caches, so that most of what is copied comes from farther away.
    """
    cut = {"dim": 1, "slices": 2, "block": width // 4}

    def program(x: Tensor, y: Tensor, *weights: Tensor) -> Any:
        first = ops.matmul(y, weights[0])
        part = emit_one("block_slice", x, index=1, **cut)
        second = ops.matmul(y, weights[1])
        whole = emit_one("block_expand", part, index=0, **cut)
        third = ops.matmul(y, weights[2])
        return emit_one("block_insert", whole, part, index=1, **cut), first, second, third

    matrices = [((rows, width), "f32")] * 2
    return trace(program, *matrices, *[((width, _SLICED_WIDTH), "f32")] * 3, name="slices")


def _narrow_rows(rows: int, width: int) -> Graph:
    """Ops along rows that are short and many."""

    def program(x: Tensor, ids: Tensor) -> Any:
        y = ops.softmax(x)
        along = (ops.argmax(x, -1), ops.cumsum(x, -1), ops.logsumexp(x, -1), ops.softmax(y, -1))
        reduced = (x.sum(-1), x.sum(-1, keepdims=True), x.max(-1), x.mean(-1))
        hot = ops.one_hot(ids, width, "f32", outside="zeros")
        return (emit_one("softmax_grad", y, x, axis=1), *along, *reduced, hot)

    return trace(program, ((rows, width), "f32"), ((rows,), "i32"), name="rows")


def _contractions(batch: int, first: int, second: int) -> Graph:
    """Contractions that copy an operand or their product, as a group of dims is not one in memory."""
    sizes = {"b": batch, "x": first, "y": second, "k": 24, "m": 24, "n": 56}
    terms = [spec.partition("->")[0].split(",") for spec in _GROUPS]
    inputs = [(tuple(sizes[index] for index in term), "f32") for pair in terms for term in pair]

    def program(*tensors: Tensor) -> Any:
        pairs = zip(_GROUPS, tensors[::2], tensors[1::2], strict=True)
        return tuple(ops.einsum(spec, left, right) for spec, left, right in pairs)

    return trace(program, *inputs, name="contraction")


class _LanguageModel(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        self.token, self.place = nn.Embedding(240, width), nn.Parameter((length, width))
        self.block = nn.TransformerBlock(width, round(width**0.5 / 5), dropout=0.1)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 240)

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.block(self.token(text) + self.place)))
        return logits


class _ImageModel(nn.Module):
    def __init__(self, channels: int, edge: int) -> None:
        self.first = nn.Conv2d(1, channels // 2, 3, padding=1)
        self.second = nn.Conv2d(channels // 2, channels, 3, padding=1)
        self.third = nn.Conv2d(channels, channels // 8, 3, padding=1)  # as many patches for few FLOPs
        self.pool, self.dropout = nn.MaxPool2d(2), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(channels // 8 * (edge // 4) ** 2, 56), nn.Linear(56, 12)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(ops.relu(self.first(images)))
        x = self.pool(ops.relu(self.third(ops.relu(self.second(x)))))
        logits: Tensor = self.down(self.dropout(ops.relu(self.up(nn.Flatten()(x)))))
        return logits


class _ResidualModel(nn.Module):
    def __init__(self, channels: int) -> None:
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.first = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.project = nn.Conv2d(channels, channels, 1, stride=2)
        self.pool, self.head = nn.AvgPool2d(2), nn.Linear(channels, 12)

    def forward(self, images: Tensor) -> Tensor:
        x = ops.relu(self.norm1(self.stem(images)))
        x = ops.relu(self.norm2(self.second(ops.relu(self.first(x)))) + self.project(x))
        logits: Tensor = self.head(self.pool(x).mean((2, 3)))
        return logits


def _transformer(batch: int, length: int, width: int) -> Graph:
    text = ((batch, length), "i32")
    return _training(_LanguageModel(length, width), (text, text), AdamW(clip_norm=1.0))


def _convolution(batch: int, channels: int, edge: int) -> Graph:
    images = ((batch, 1, edge, edge), "f32")
    return _training(_ImageModel(channels, edge), (images, ((batch,), "i32")), Adam())


def _residual(batch: int, channels: int, edge: int) -> Graph:
    images = ((batch, 3, edge, edge), "f32")
    return _training(_ResidualModel(channels), (images, ((batch,), "i32")), SGD(momentum=0.9))


def _perceptron(batch: int, width: int) -> Graph:
    model = nn.Sequential(
        nn.Linear(56, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 12)
    )
    return _training(model, (((batch, 56), "f32"), ((batch,), "i32")), SGD(lr=1e-3, momentum=0.9))


def _layer(batch: int) -> Graph:
    """A layer whose matrix, its gradient and its optimizer states take 20 MiB."""
    model = nn.Sequential(nn.Linear(*LENGTHS[3:]), nn.ReLU(), nn.Linear(LENGTHS[4], 12))
    return _training(model, (((batch, LENGTHS[3]), "f32"), ((batch,), "i32")), Adam())


def _training(model: nn.Module, batch: Sequence[tuple[tuple[int, ...], str]], optimizer: Optimizer) -> Graph:
    """One step of training: forward, backward, update."""
    steps = Trace("train")
    steps.training = True
    nn.module.name_tree(model)
    with steps.activate():
        x, target = (
            steps.source("input", name, *kind) for name, kind in zip(("x", "target"), batch, strict=True)
        )
        loss = nn.CrossEntropy()(model(x), target)
        parameters = [Tensor(op.result, steps) for op in steps.ops if op.kind == "param"]
        gradients = differentiate(steps, loss, parameters)
        with steps.within(role="backward"):
            pairs = [(p, emit_one("accumulate", g)) for p, g in zip(parameters, gradients, strict=True)]
        optimizer.update(steps, pairs)
        traced = steps.finish({"loss": emit_one("accumulate", loss)})
        graph: Graph = run_passes(traced, pipeline().reaching("serial"), verified=False)
        return graph
