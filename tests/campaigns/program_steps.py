"""What the instructions of a random program do: small smooth functions of the tensors that they meet.

A step takes the context and the latest value and returns a new one, or None where it does not apply. Values
stay of the order of 1, and nothing jumps where rounding errors could decide: bounds lie where no value is by
construction, and what is compared or sorted is spread first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from distgraph import nn, ops
from distgraph.tracing.tensor import Tensor

LARGEST, LARGEST_SAMPLE = 300, 60
"""Elements of one value: all samples of a micro-batch together, and one sample of a pure program."""
TOKENS = 7
"""Rows of embeddings."""
F = "f64"


class Context(Protocol):
    """What a step draws from. See `program_model.Model`."""

    values: list[Tensor]
    ids: Tensor | None
    pure: bool
    batch: int

    def below(self, count: int) -> int: ...
    def between(self, low: int, high: int) -> int: ...
    def chance(self, share: float) -> bool: ...
    def pick(self, options: Sequence[Any]) -> Any: ...
    def part(self, make: Callable[[], Any]) -> Any: ...
    def shared(self, make: Callable[[], Any], fits: Callable[[Any], bool]) -> Any: ...


def _first(c: Context) -> int:
    """The first dim that may be changed."""
    return 1 if c.pure else 0


def _dim(c: Context, x: Tensor) -> int | None:
    """A dim that may be changed, counted from the end of the shape so that it does not depend on it."""
    low = _first(c)
    return None if x.ndim <= low else c.between(low, x.ndim - 1)


def _fits(c: Context, *shape: int) -> bool:
    """Whether a value of this shape is small enough; how many samples a batch has does not matter."""
    small = math.prod(shape[1:]) <= LARGEST_SAMPLE if c.pure else math.prod(shape) <= LARGEST
    return small and len(shape) <= 4 and min(shape, default=1) > 0


def _ramp(x: Tensor, dim: int) -> Tensor:
    """x with different numbers added along a dim, so that no two of it are equal."""
    shape = [1] * x.ndim
    shape[dim] = x.shape[dim]
    return x + (np.arange(x.shape[dim]) * 0.173).reshape(shape)


UNARY: tuple[Callable[[Any], Any], ...] = (
    np.sin, np.tanh, np.cos, ops.sigmoid, ops.silu, ops.gelu, ops.erf, ops.arctan, ops.negative, ops.identity,
    lambda x: x * 0.5, lambda x: 0.3 - x, lambda x: ops.square(x) * 0.3, lambda x: np.exp(-ops.square(x)),
    lambda x: np.log1p(np.exp(-x * x)), lambda x: np.sqrt(x * x + 1.0), lambda x: ops.rsqrt(x * x + 0.5),
    lambda x: ops.reciprocal(x * x + 1.0), lambda x: np.expm1(ops.tanh(x)), lambda x: ops.clip(x, -1.37, 1.7),
    lambda x: ops.relu(x + 0.31), lambda x: np.abs(x + 0.37), lambda x: np.maximum(x, -0.41),
    lambda x: ops.power(x * x + 1.0, 0.25), lambda x: ops.hypot(x, 1.0), lambda x: ops.arctan2(x, 1.5),
    lambda x: np.where(x > 0.237, x, x * 0.5 + 0.1185), lambda x: x / (1.0 + x * x),
)  # fmt: skip


def unary(c: Context, x: Tensor) -> Any:
    return c.pick(UNARY)(x)


def join(c: Context, x: Tensor) -> Any:
    """Two values of one shape, or one that is broadcast."""
    same = [v for v in c.values if v.shape == x.shape and v.dtype == F]
    other = c.pick(same)
    if x.ndim > _first(c) and c.chance(0.3):
        other = ops.mean(other, c.between(_first(c), x.ndim - 1), keepdims=True)
    far = lambda a, b: ops.hypot(a, b * b + 0.5)  # noqa: E731 - where both are 0 there is no gradient
    function = c.pick((ops.add, ops.subtract, ops.multiply, lambda a, b: a * 0.4 + b, far))
    return ops.tanh(function(x, other)) if function is ops.multiply else function(x, other) * 0.7


def select(c: Context, x: Tensor) -> Any:
    """The value seen last, chosen between two by a third."""
    same = [v for v in c.values if v.shape == x.shape and v.dtype == F]
    return ops.where(c.pick(same) > 0.1931, x, x * 0.25 + 0.3)


def bias(c: Context, x: Tensor) -> Any:
    shape = [c.pick((n, n, 1)) for n in x.shape[_first(c) :]]
    w = c.part(lambda: nn.Parameter(tuple(shape[c.below(len(shape) + 1) :]), F, ("normal", 0.3)))
    return x + w if c.chance(0.5) else x * (w + 0.8)


def scalar(c: Context, x: Tensor) -> Any:
    """A parameter without dims."""
    w = c.part(lambda: nn.Parameter((), F, c.pick((("zeros",), ("ones",), ("normal", 0.5)))))
    return c.pick((lambda: x * (w + 0.7), lambda: x + w, lambda: ops.sin(x * w), lambda: x - w * w))()


def linear(c: Context, x: Tensor) -> Any:
    if x.ndim <= _first(c):
        return None
    width = c.between(1, 8)
    if not _fits(c, *x.shape[:-1], width):
        return None
    with_bias = c.chance(0.6)
    y: Any = c.part(lambda: nn.Linear(x.shape[-1], width, with_bias, dtype=F))(x)
    return ops.tanh(y) if c.chance(0.3) else y


def tied(c: Context, x: Tensor) -> Any:
    """A square weight that several instructions share."""
    if x.ndim <= _first(c):
        return None
    n = x.shape[-1]
    w = c.shared(lambda: nn.Parameter((n, n), F, ("normal", 0.4)), lambda p: p.shape == (n, n))
    return ops.tanh(ops.matmul(x, w.T if c.chance(0.3) else w))


def contract(c: Context, x: Tensor) -> Any:
    """An einsum of two values, or with a parameter in the middle."""
    low = _first(c)
    others = [v for v in c.values if v.ndim and x.ndim and v.shape[0] == x.shape[0] and v.dtype == F]
    if not x.ndim or not others:
        return None
    other = c.pick(others)
    left, right = "abcd"[: x.ndim], "aefg"[: other.ndim]
    keep = c.pick([left + right[1:], left, *([] if low else [left[1:] + right[1:], left[1:]])])
    sizes = dict(zip(left, x.shape, strict=True)) | dict(zip(right, other.shape, strict=True))
    if not _fits(c, *(sizes[letter] for letter in keep)):
        return None
    summed = math.prod(n for letter, n in sizes.items() if letter not in keep)
    return ops.tanh(ops.einsum(f"{left},{right}->{keep}", x, other) * (1 / math.sqrt(summed)))


def norm(c: Context, x: Tensor) -> Any:
    if x.ndim <= _first(c) or x.shape[-1] < 2:
        return None
    kind = c.pick((nn.LayerNorm, nn.RMSNorm))
    return c.part(lambda: kind(x.shape[-1], eps=0.1, dtype=F))(x)


def softmax(c: Context, x: Tensor) -> Any:
    dim = _dim(c, x)
    if dim is None:
        return None
    return c.pick((ops.softmax, ops.log_softmax, lambda a, d: a - ops.logsumexp(a, d, keepdims=True)))(x, dim)


def reduce(c: Context, x: Tensor) -> Any:
    low = _first(c)
    if x.ndim <= low:
        return None
    dims = tuple(d for d in range(low, x.ndim) if c.chance(0.5)) or (c.between(low, x.ndim - 1),)
    keep = c.chance(0.4)
    count = math.prod(x.shape[d] for d in dims)
    kind = c.pick(("mean", "sum", "var", "std", "logsumexp"))
    if kind == "sum":
        return ops.reduce("sum", x, dims, keep) * (1 / math.sqrt(count))
    if kind == "std":
        return ops.sqrt(ops.var(x, dims, keep) + 0.1)
    return {"mean": ops.mean, "var": ops.var, "logsumexp": ops.logsumexp}[kind](x, dims, keepdims=keep)


def extreme(c: Context, x: Tensor) -> Any:
    dim = _dim(c, x)
    return None if dim is None else ops.reduce(c.pick(("max", "min")), _ramp(x, dim), (dim,), c.chance(0.5))


def reshape(c: Context, x: Tensor) -> Any:
    low = _first(c)
    if x.ndim <= low:
        return None
    kind = c.pick(("merge", "split", "flat", "expand", "squeeze"))
    if kind == "flat":
        return ops.reshape(x, (x.shape[0], -1) if low else (-1,))
    place = c.between(low, x.ndim - 1)
    shape = list(x.shape)
    if kind == "merge" and place + 1 < x.ndim:
        shape[place : place + 2] = [shape[place] * shape[place + 1]]
    elif kind in ("merge", "split"):
        factor = c.pick([n for n in range(1, shape[place] + 1) if shape[place] % n == 0])
        shape[place : place + 1] = [factor, shape[place] // factor]
    elif kind == "expand":
        shape.insert(place, 1)
    else:
        shape = [n for d, n in enumerate(shape) if n != 1 or d < low]
    return ops.reshape(x, tuple(shape)) if len(shape) <= 4 else None


def transpose(c: Context, x: Tensor) -> Any:
    low = _first(c)
    order = [low + int(n) for n in np.argsort([c.below(1000) for _ in range(x.ndim - low)], kind="stable")]
    return ops.transpose(x, [*range(low), *order])


def slice_(c: Context, x: Tensor) -> Any:
    dim = _dim(c, x)
    if dim is None:
        return None
    n, before = x.shape[dim], (slice(None),) * dim
    kind = c.pick(("run", "run", "stride", "index", "behind"))
    if kind == "stride":
        return x[(*before, slice(None, None, c.pick((-2, -1, 2, 3))))]
    if kind == "index":
        return x[(*before, c.below(n))]
    start = c.below(n) if kind == "run" else 0
    return x[(*before, slice(start, c.between(start + 1, n)))]


def concat(c: Context, x: Tensor) -> Any:
    dim = _dim(c, x)
    if dim is None or not _fits(c, *x.shape, 2):
        return None
    rest = [
        v
        for v in c.values
        if v.ndim == x.ndim
        and all(a == b or d == dim for d, (a, b) in enumerate(zip(v.shape, x.shape, strict=True)))
        and v.dtype == F
    ]
    other = c.pick(rest)
    joined = ops.concat([x, other] if c.chance(0.5) else [other, x, other], axis=dim)
    return joined if _fits(c, *joined.shape) else None


def stack(c: Context, x: Tensor) -> Any:
    same = [v for v in c.values if v.shape == x.shape and v.dtype == F]
    place = c.between(min(_first(c), x.ndim), x.ndim)
    return ops.stack([x, c.pick(same)], axis=place) if _fits(c, *x.shape, 2) and x.ndim < 4 else None


def split(c: Context, x: Tensor) -> Any:
    """Parts of a dim in another order."""
    dim = _dim(c, x)
    if dim is None or x.shape[dim] < 2:
        return None
    at = c.between(1, x.shape[dim] - 1)
    first, second = ops.split(x, [at], axis=dim)
    c.values.extend((first, second))
    return ops.concat([second * 0.9, first], axis=dim)


def roll(c: Context, x: Tensor) -> Any:
    dim = _dim(c, x)
    return None if dim is None else ops.roll(x, c.between(-7, 7), dim)


def flip(c: Context, x: Tensor) -> Any:
    dim = _dim(c, x)
    return None if dim is None else ops.flip(x, dim)


def pad(c: Context, x: Tensor) -> Any:
    dim = _dim(c, x)
    if dim is None:
        return None
    sides = [[c.below(3) * (d == dim) for d in range(x.ndim)] for _ in range(2)]
    shape = [n + a + b for n, a, b in zip(x.shape, *sides, strict=True)]
    return ops.pad(x, *sides, value=c.pick((0.0, 0.5))) if _fits(c, *shape) else None


def repeat(c: Context, x: Tensor) -> Any:
    dim = _dim(c, x)
    if dim is None or not _fits(c, *x.shape, 2):
        return None
    if c.chance(0.4):
        return ops.repeat(x, 2, dim)
    if x.shape[dim] == 1:
        return ops.broadcast_to(x, [2 if d == dim else n for d, n in enumerate(x.shape)])
    return ops.tile(x, [2 if d == dim else 1 for d in range(x.ndim)])


def take(c: Context, x: Tensor) -> Any:
    dim = _dim(c, x)
    if dim is None:
        return None
    ids = np.array([c.below(x.shape[dim]) for _ in range(c.between(1, 4))], "i4")
    return ops.take(x, ids, axis=dim)


def cumsum(c: Context, x: Tensor) -> Any:
    dim = _dim(c, x)
    return None if dim is None else ops.cumsum(x, dim) * (1 / x.shape[dim])


def sort(c: Context, x: Tensor) -> Any:
    dim = _dim(c, x)
    return None if dim is None else ops.sort(ops.sin(_ramp(x, dim)), dim)


def embed(c: Context, x: Tensor) -> Any:
    """Rows of a table, looked up by the ids of the samples, for each sample of x."""
    if c.ids is None or not x.ndim or x.shape[0] != c.ids.shape[0]:
        return None
    table = c.part(lambda: nn.Embedding(TOKENS, x.shape[-1] if x.ndim > 1 else 3, ("normal", 0.5), F))
    rows = table(c.ids)  # [b, t, w]
    if x.ndim > 1 and c.chance(0.5):
        return rows if _fits(c, *rows.shape) else None
    pooled = ops.mean(rows, 1)
    return pooled if x.ndim < 2 else x + ops.reshape(pooled, (x.shape[0], *(1,) * (x.ndim - 2), -1))


def conv(c: Context, x: Tensor) -> Any:
    if x.ndim != 4:
        return None
    outputs, stride, side = c.between(1, 4), c.pick((1, 1, 2)), c.pick((0, 1, 1))
    kernel = [min(3, n + 2 * side) for n in x.shape[2:]]
    made = c.part(lambda: nn.Conv2d(x.shape[1], outputs, kernel, stride, side, dtype=F))
    return made(x) if _fits(c, x.shape[0], outputs, *x.shape[2:]) else None


def pool(c: Context, x: Tensor) -> Any:
    if x.ndim != 4:
        return None
    window = [min(2, n) for n in x.shape[2:]]
    return nn.AvgPool2d(window)(x) if c.chance(0.5) else nn.MaxPool2d(window)(_ramp(_ramp(x, 2) * 1.3, 3))


def batch_norm(c: Context, x: Tensor) -> Any:
    if c.pure or x.ndim < 2 or x.size // x.shape[1] < 2:
        return None
    return c.part(lambda: nn.BatchNorm2d(x.shape[1], eps=0.1, dtype=F))(x)


def attention(c: Context, x: Tensor) -> Any:
    if x.ndim != 3:
        return None
    heads = 2 if x.shape[-1] % 2 == 0 else 1
    causal = c.chance(0.5)
    return c.part(lambda: nn.MultiHeadAttention(x.shape[-1], heads, causal, dtype=F))(x)


def block(c: Context, x: Tensor) -> Any:
    if x.ndim != 3 or x.shape[-1] < 2:
        return None
    heads, rate = 2 if x.shape[-1] % 2 == 0 else 1, c.pick((0.0, 0.2))
    made = c.part(lambda: nn.TransformerBlock(x.shape[-1], heads, 2 * x.shape[-1], dropout=rate, dtype=F))
    for each in (made.norm1, made.norm2):
        each.eps = 0.1
    return made(x)


def moe(c: Context, x: Tensor) -> Any:
    if x.ndim != 3 or x.shape[1] < 2:
        return None
    gate = ("normal", 0.7)
    return x + c.part(lambda: nn.MoE(x.shape[-1], 4, c.pick((2, 3)), init=gate, dtype=F))(x)


def dropout(c: Context, x: Tensor) -> Any:
    rate = c.pick((0.1, 0.3, 0.5))
    batched = x.ndim and x.shape[0] == c.batch
    return c.part(lambda: nn.Dropout(rate, batch_dim=0 if batched else None))(x)


def noise(c: Context, x: Tensor) -> Any:
    if not x.ndim or x.shape[0] != c.batch:
        return None
    return x + c.pick((ops.random_normal, ops.random_uniform))(x.shape, F) * 0.1


def recall(c: Context, x: Tensor) -> Any:
    """Go on from an earlier value."""
    return c.pick([v for v in c.values if v.dtype == F])


def stop(c: Context, x: Tensor) -> Any:
    return x * 0.5 + ops.stop_gradient(ops.sin(x))


def skip(c: Context, x: Tensor) -> Any:
    """One of the first values again, whatever its shape."""
    early = c.pick([v for v in c.values[:3] if v.dtype == F])
    kept = min(_first(c), early.ndim)
    if x.ndim < kept or x.shape[:kept] != early.shape[:kept]:
        return None
    mean = ops.mean(early, tuple(range(kept, early.ndim))) if early.ndim > kept else early
    return x * ops.cos(ops.reshape(mean, (*mean.shape, *(1,) * (x.ndim - mean.ndim))))


def loop(c: Context, x: Tensor) -> Any:
    """A loop, which has no gradient. Where samples may mix, the number of its turns depends on them."""
    start, turns = ops.stop_gradient(x), c.below(4)
    if c.pure or c.chance(0.5):
        _, y = ops.while_loop(lambda n, _: n < turns, lambda n, y: (n + 1, ops.sin(y) * 1.1), (0, start))
    else:
        (y,) = ops.while_loop(
            lambda y, _: ops.mean(ops.square(y)) > 0.0317,
            lambda y, a: y * 0.7 / (1.0 + a * a),
            (start,),
            (start,),
        )
    return x * 0.5 + y


STEPS: dict[str, Callable[[Context, Tensor], Any]] = {
    "unary": unary, "join": join, "select": select, "bias": bias, "scalar": scalar, "linear": linear,
    "tied": tied, "contract": contract, "norm": norm, "softmax": softmax, "reduce": reduce,
    "extreme": extreme, "reshape": reshape, "transpose": transpose, "slice": slice_, "concat": concat,
    "stack": stack, "split": split, "roll": roll, "flip": flip, "pad": pad, "repeat": repeat, "take": take,
    "cumsum": cumsum, "sort": sort, "embed": embed, "conv": conv, "pool": pool, "batch_norm": batch_norm,
    "attention": attention, "block": block, "moe": moe, "dropout": dropout, "noise": noise,
    "recall": recall, "stop": stop, "skip": skip, "loop": loop,
}  # fmt: skip
