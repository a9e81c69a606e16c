"""Sample instances of every op: tiny, not square, and with lengths that the meshes do not divide."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.ops.op_checks import Sample

SAMPLES: dict[str, list[Sample]] = {}
_RNG = np.random.default_rng(20)


def normal(*shape: int) -> Any:
    return _RNG.standard_normal(shape)


def positive(*shape: int) -> Any:
    return 0.5 + _RNG.random(shape)


def inside(*shape: int) -> Any:
    """Between -0.8 and 0.8, away from 0."""
    return (0.1 + 0.7 * _RNG.random(shape)) * _RNG.choice([-1.0, 1.0], shape)


def integers(low: int, high: int, *shape: int, dtype: Any = np.int32) -> Any:
    return _RNG.integers(low, high, shape).astype(dtype)


def distinct(*shape: int) -> Any:
    """Different numbers in random order, at least 0.25 apart: maxima and orders have a derivative."""
    return (_RNG.permutation(int(np.prod(shape))).reshape(shape) - 3.3) / 4


def add(
    kind: str, *operands: Any, reference: Any = None, wrt: Any = None, dtypes: Any = None, **attrs: Any
) -> None:
    options = {} if dtypes is None else {"dtypes": dtypes}
    arrays = tuple(np.asarray(x) for x in operands)
    SAMPLES.setdefault(kind, []).append(Sample(arrays, attrs, reference, wrt, **options))


# elementwise

for _name, _domain in {
    "negative": normal, "absolute": inside, "sign": inside, "exp": normal, "log": positive, "log1p": positive,
    "expm1": normal, "sqrt": positive, "square": normal, "reciprocal": positive, "sin": normal, "cos": normal,
    "tan": inside, "arcsin": inside, "arccos": inside, "arctan": normal, "sinh": normal, "cosh": normal,
    "log2": positive, "log10": positive, "floor": inside, "ceil": inside, "rint": inside, "trunc": inside,
}.items():  # fmt: skip
    add(_name, _domain(5, 3), reference=getattr(np, _name))
    if _name in ("negative", "absolute", "sign", "square"):
        add(_name, integers(-3, 4, 6, 2), reference=getattr(np, _name))
add("rsqrt", positive(5, 3), reference=lambda x: 1 / np.sqrt(x))
add("identity", normal(5, 3), reference=lambda x: x)
add("stop_gradient", normal(5, 3), reference=lambda x: x, wrt=())
add("cast", normal(5, 3), reference=lambda x: x.astype(np.float32), dtype="f32", wrt=(), dtypes=())
add("cast", integers(-3, 4, 5), reference=lambda x: x.astype(np.float64), dtype="f64")
add("bitwise_not", integers(0, 9, 5, 2), reference=np.bitwise_not)

for _name in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "arctan2", "hypot"):
    add(_name, normal(5, 3), positive(5, 3), reference=getattr(np, _name))
    add(_name, normal(2, 1, 3), positive(4, 1), reference=getattr(np, _name))
    add(_name, normal(6), positive(), reference=getattr(np, _name))
add("add", integers(-5, 6, 5, 3), integers(-5, 6, 3), reference=np.add)
add("multiply", integers(-5, 6, 5, 3), integers(-5, 6, 5, 1), reference=np.multiply)
add("power", positive(5, 3), normal(3), reference=np.power)
for _name in ("floor_divide", "remainder"):
    add(_name, integers(-9, 10, 5, 3), integers(1, 5, 3), reference=getattr(np, _name))
    add(
        _name, normal(5, 3), positive(5, 1), reference=getattr(np, _name), dtypes=()
    )  # steps differ by rounding
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"):
    add(_name, integers(0, 9, 5, 3), integers(0, 4, 3), reference=getattr(np, _name))
for _name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"):
    add(_name, integers(0, 3, 5, 3), integers(0, 3, 3), reference=getattr(np, _name))
    add(_name, normal(5, 3), normal(5, 1), reference=getattr(np, _name))
for _name in ("logical_and", "logical_or", "logical_xor"):
    add(_name, integers(0, 2, 5, 3, dtype=bool), integers(0, 2, 3, dtype=bool), reference=getattr(np, _name))
add("logical_not", integers(0, 2, 5, 3, dtype=bool), reference=np.logical_not)
_odd = normal(5, 3)
_odd[0, 0], _odd[3, 1], _odd[4, 2] = np.nan, np.inf, -np.inf
for _name in ("isnan", "isfinite", "isinf"):
    add(_name, _odd, reference=getattr(np, _name))
add("where", integers(0, 2, 5, 3, dtype=bool), normal(5, 3), normal(3), reference=np.where)
add("where", integers(0, 2, 3, dtype=bool), normal(5, 1), normal(5, 3), reference=np.where)

# contractions

add("matmul", normal(5, 6), normal(6, 3), reference=np.matmul)
add("matmul", normal(2, 5, 4), normal(4, 3), reference=np.matmul)
add("matmul", normal(2, 1, 3, 4), normal(3, 4, 2), reference=np.matmul)
add("matmul", normal(4, 3), normal(2, 3, 2), reference=np.matmul)
add("matmul", integers(-4, 5, 5, 7), integers(-4, 5, 7, 3), reference=np.matmul)


def einsum(spec: str, *operands: Any) -> None:
    add("einsum", *operands, spec=spec, reference=lambda *x: np.einsum(spec, *x))


einsum("mk,kn->nm", normal(5, 6), normal(6, 3))
einsum("bqhd,bkhd->bhqk", normal(2, 3, 2, 5), normal(2, 4, 2, 5))
einsum("ij,jk,kl->il", normal(3, 4), normal(4, 5), normal(5, 2))
einsum("i,i->", normal(7), normal(7))
einsum("ij->j", normal(5, 3))
einsum("abc->cab", normal(2, 3, 4))
einsum("ij,k->ki", normal(5, 3), normal(4))
einsum("sec,sm->ecm", normal(4, 3, 2), normal(4, 5))
einsum("ij,ij->i", integers(-3, 4, 5, 6), integers(-3, 4, 5, 6))

# reductions

for _name, _domain, _function in (
    ("reduce_sum", normal, np.sum), ("reduce_prod", inside, np.prod), ("reduce_max", distinct, np.max),
    ("reduce_min", distinct, np.min),
):  # fmt: skip
    for _shape, _dims in (
        ((5, 6), (1,)),
        ((5, 6), (0,)),
        ((2, 3, 5), (0, 2)),
        ((7,), (0,)),
        ((3, 1, 4), (1, 2)),
    ):
        for _keep in (False, True):
            add(
                _name,
                _domain(*_shape),
                dims=_dims,
                keepdims=_keep,
                reference=lambda x, f=_function, d=_dims, k=_keep: f(x, axis=d, keepdims=k),
            )
    add(
        _name,
        integers(-4, 5, 5, 6),
        dims=(1,),
        keepdims=False,
        reference=lambda x, f=_function: f(x, axis=1),
    )
_zeros = inside(3, 5)
_zeros[0, 2] = _zeros[1, 0] = _zeros[1, 4] = 0.0  # one zero, two zeros, none
add("reduce_prod", _zeros, dims=(1,), keepdims=False, reference=lambda x: np.prod(x, axis=1))
add("cumprod", _zeros, dim=1, reference=lambda x: np.cumprod(x, axis=1))
for _name, _function in (("reduce_any", np.any), ("reduce_all", np.all)):
    add(
        _name,
        integers(0, 2, 5, 3, dtype=bool),
        dims=(1,),
        keepdims=False,
        reference=lambda x, f=_function: f(x, axis=1),
    )
    add(_name, np.ones((5, 3), bool), dims=(0, 1), keepdims=True, reference=lambda x: np.ones((1, 1), bool))
for _name, _function in (("cumsum", np.cumsum), ("cumprod", np.cumprod)):
    add(_name, normal(5, 6), dim=0, reference=lambda x, f=_function: f(x, axis=0))
    add(_name, normal(2, 5, 3), dim=1, reference=lambda x, f=_function: f(x, axis=1))
add("cumsum", integers(-3, 4, 5, 3), dim=1, reference=lambda x: np.cumsum(x, axis=1))

# order along a dim

for _name, _function in (("argmax", np.argmax), ("argmin", np.argmin)):
    add(_name, distinct(5, 6), dim=1, reference=lambda x, f=_function: f(x, axis=1))
    add(_name, integers(0, 3, 5, 3, 2), dim=0, reference=lambda x, f=_function: f(x, axis=0))
add("sort", distinct(5, 6), dim=1, reference=lambda x: np.sort(x, axis=1))
add("sort", distinct(5, 3), dim=0, reference=lambda x: np.sort(x, axis=0))
add("argsort", integers(0, 3, 5, 6), dim=1, reference=lambda x: np.argsort(x, axis=1, kind="stable"))
add(
    "top_k",
    distinct(5, 6),
    k=2,
    reference=lambda x: (-np.sort(-x, axis=-1)[..., :2], np.argsort(-x, axis=-1)[..., :2]),
)

# shapes


def reshape(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    add("reshape", normal(*before), shape=after, reference=lambda x: x.reshape(after))


for _before, _after in (
    ((5, 6), (30,)),
    ((12,), (3, 4)), ((8, 3), (2, 4, 3)), ((2, 4, 5), (8, 5)), ((6, 4), (3, 8)), ((6, 4), (8, 3)),
    ((5, 1, 3), (5, 3)), ((4, 6), (2, 2, 6)), ((4, 6, 2), (4, 4, 3)), ((1,), ()),
    ((2, 6, 2), (12, 2)), ((8,), (2, 2, 2)),
):  # fmt: skip
    reshape(_before, _after)
add("transpose", normal(2, 5, 3), order=(2, 0, 1), reference=lambda x: x.transpose(2, 0, 1))
add("transpose", normal(5, 6), order=(1, 0), reference=np.transpose)
add("broadcast_to", normal(5, 1), shape=(2, 5, 3), reference=lambda x: np.broadcast_to(x, (2, 5, 3)))
add("broadcast_to", normal(5, 1), shape=(5, 3), reference=lambda x: np.broadcast_to(x, (5, 3)))
add("broadcast_to", normal(), shape=(5, 3), reference=lambda x: np.broadcast_to(x, (5, 3)))
add(
    "slice",
    normal(7, 5, 3),
    starts=(1, 0, 0),
    stops=(6, 5, 3),
    strides=(2, 1, 1),
    reference=lambda x: x[1:6:2],
)
add("slice", normal(9, 8), starts=(1, 0), stops=(9, 5), strides=(3, 1), reference=lambda x: x[1::3, :5])
add("slice", normal(5, 6), starts=(0, 2), stops=(5, 2), strides=(1, 1), reference=lambda x: x[:, 2:2])
add(
    "pad", normal(5, 3), low=(0, 1), high=(0, 2), interior=(0, 0), value=1.5,
    reference=lambda x: np.pad(x, ((0, 0), (1, 2)), constant_values=1.5),
)  # fmt: skip
add(
    "pad", normal(6, 5), low=(4, 1), high=(1, 0), interior=(0, 0), value=-2,
    reference=lambda x: np.pad(x, ((4, 1), (1, 0)), constant_values=-2),
)  # fmt: skip
add(
    "pad", normal(5, 3), low=(0, 1), high=(0, 1), interior=(0, 2), value=0,
    reference=lambda x: np.insert(x, [1, 1, 2, 2], 0.0, axis=1) @ np.eye(7, 9, 1),
)  # fmt: skip
add("concat", normal(5, 2), normal(5, 3), normal(5, 1), dim=1, reference=lambda *x: np.concatenate(x, 1))
add("concat", integers(0, 9, 2, 5), integers(0, 9, 3, 5), dim=0, reference=lambda *x: np.concatenate(x, 0))
add("flip", normal(5, 3), dims=(1,), reference=lambda x: x[:, ::-1])
add("flip", normal(7, 8), dims=(0, 1), reference=lambda x: x[::-1, ::-1])
for _shift in (1, 5, -2):
    add("roll", normal(7, 3), dim=0, shift=_shift, reference=lambda x, s=_shift: np.roll(x, s, 0))
add("roll", integers(0, 9, 3, 8), dim=1, shift=3, reference=lambda x: np.roll(x, 3, 1))

# positions


def _at(x: Any, ids: Any, updates: Any) -> Any:
    result = x.copy()
    np.add.at(result, ids, updates)
    return result


def _put(x: Any, ids: Any, size: int) -> Any:
    result = np.zeros((*x.shape[:-1], size))
    for place in np.ndindex(*x.shape):
        result[(*place[:-1], ids[place])] += x[place]
    return result


add("embedding", normal(7, 3), integers(0, 7, 2, 5), reference=lambda table, ids: table[ids])
add(
    "embedding",
    integers(0, 99, 5, 2),
    integers(0, 5, 6, dtype=np.int64),
    reference=lambda table, ids: table[ids],
)
add(
    "embedding_grad", normal(2, 5, 3), integers(0, 7, 2, 5), rows=7,
    reference=lambda grad, ids: _at(np.zeros((7, 3)), ids, grad),
)  # fmt: skip
add("take", normal(5, 6, 2), integers(0, 6, 4), dim=1, reference=lambda x, ids: np.take(x, ids, axis=1))
add("take", normal(5, 3), integers(0, 5, 2, 3), dim=0, reference=lambda x, ids: np.take(x, ids, axis=0))
add("scatter_add", normal(6, 3), integers(0, 6, 5), normal(5, 3), reference=_at)
add("pick", normal(5, 6), integers(0, 6, 5), reference=lambda x, labels: x[np.arange(5), labels])
add(
    "pick",
    normal(2, 3, 5),
    integers(0, 5, 2, 3),
    reference=lambda x, at: np.take_along_axis(x, at[..., None], 2)[..., 0],
)
add(
    "pick_grad",
    normal(5),
    integers(0, 6, 5),
    size=6,
    reference=lambda g, labels: np.eye(6)[labels] * g[:, None],
)
add(
    "take_along",
    normal(5, 6),
    integers(0, 6, 5, 3),
    dim=1,
    reference=lambda x, i: np.take_along_axis(x, i, 1),
)
add(
    "take_along",
    normal(5, 3),
    integers(0, 5, 2, 3),
    dim=0,
    reference=lambda x, i: np.take_along_axis(x, i, 0),
)
add("put_along", normal(5, 3), integers(0, 6, 5, 3), dim=1, size=6, reference=lambda x, i: _put(x, i, 6))
add(
    "one_hot",
    integers(0, 5, 2, 6),
    classes=5,
    dtype="f32",
    reference=lambda i: np.eye(5, dtype=np.float32)[i],
)

# without operands, and blocks at computed places

add("iota", shape=(5, 6), dim=1, dtype="i64", reference=lambda: np.tile(np.arange(6), (5, 1)))
add(
    "iota",
    shape=(5, 3),
    dim=0,
    dtype="f32",
    reference=lambda: np.arange(5, dtype=np.float32)[:, None] + np.zeros(3, np.float32),
)
add("full", shape=(5, 3), value=2.5, dtype="f32", reference=lambda: np.full((5, 3), 2.5, np.float32))
add("dynamic_slice", normal(5, 6), np.array([0, 2]), sizes=(5, 3), reference=lambda x, at: x[:, 2:5])
add("dynamic_slice", normal(5, 6), np.array([4, 9]), sizes=(2, 3), reference=lambda x, at: x[3:5, 3:6])


def _replaced(x: Any, update: Any, at: Any) -> Any:
    result = x.copy()
    result[:, 2:4] = update
    return result


add("dynamic_update_slice", normal(5, 6), normal(5, 2), np.array([0, 2]), reference=_replaced)


# slices of distributed matrix products: two slices in blocks of two

_slice = lambda x, s: x.reshape(3, 2, 2, 5)[:, s].reshape(6, 5)  # noqa: E731


def _with_slice(whole: Any, part: Any, s: int) -> Any:
    filled = whole.copy().reshape(3, 2, 2, 5)
    filled[:, s] = part.reshape(3, 2, 5)
    return filled.reshape(12, 5)


_CUT = {"dim": 0, "index": 1, "slices": 2, "block": 2}
add("block_slice", normal(12, 5), reference=lambda x: _slice(x, 1), wrt=(), **_CUT)
add("block_expand", normal(6, 5), reference=lambda x: _with_slice(np.zeros((12, 5)), x, 1), wrt=(), **_CUT)
add("block_insert", normal(12, 5), normal(6, 5), reference=lambda x, y: _with_slice(x, y, 1), wrt=(), **_CUT)
add(
    "einsum_add", normal(5, 3), normal(5, 6), normal(6, 3),
    reference=lambda t, x, y: t + x @ y, wrt=(), spec="mk,kn->mn",
)  # fmt: skip


def _ring(x: Any, y: Any, outer: str, inner: str, parts: int, shift: int) -> Any:
    """Every element of x y that has matching blocks of both letters; where both are in y, joined."""
    (m, k), n = x.shape, y.shape[1]
    lengths = {"m": m, "k": k, "n": n}
    block = {c: np.arange(lengths[c]) * parts // lengths[c] for c in (outer, inner)}
    where = {"m": (slice(None), None, None), "k": (None, slice(None), None), "n": (None, None, slice(None))}
    match = (block[outer][where[outer]] + shift) % parts == block[inner][where[inner]]
    full = np.where(match, x[:, :, None] * y[None], 0).sum(1)
    if "k" in (outer, inner):
        return full
    rolled = [
        np.roll(row, -((q + shift) % parts) * (n // parts)) for q, row in zip(block["m"], full, strict=True)
    ]
    return np.stack(rolled)[:, : n // parts]


for _outer, _inner, _whole in (("n", "k", "k"), ("m", "k", "k"), ("n", "k", "n"), ("m", "n", "n")):
    _RING = {
        "outer": _outer,
        "inner": _inner,
        "whole": _whole,
        "parts": 4 if _whole == "n" else 6,
        "shift": 3,
    }
    _expected = lambda x, y, a=_RING: _ring(x, y, *(a[i] for i in ("outer", "inner", "parts", "shift")))  # noqa: E731
    add("ring_einsum", normal(12, 12), normal(12, 12), reference=_expected, wrt=(), spec="mk,kn->mn", **_RING)
    if _inner == "k":
        add(
            "ring_einsum_add", normal(12, 12), normal(12, 12), normal(12, 12),
            reference=lambda t, x, y, f=_expected: t + f(x, y), wrt=(), spec="mk,kn->mn", **_RING,
        )  # fmt: skip


def _joined(*steps: Any) -> Any:
    parts, (m, n) = len(steps), steps[0].shape
    y = np.zeros((m, n * parts))
    for shift, step in enumerate(steps):
        for row in range(m):
            at = (row * parts // m + shift) % parts
            y[row, at * n : (at + 1) * n] = step[row]
    return y


add("ring_join", *(normal(12, 3) for _ in range(4)), reference=_joined, wrt=(), outer=0, inner=1)
add("ring_join", *(normal(6, 3) for _ in range(6)), reference=_joined, wrt=(), outer=0, inner=1)

# panels of distributed matrix products: slices in one block each


def _with_panel(whole: Any, part: Any) -> Any:
    filled = whole.copy()
    filled[6:9] = part
    return filled


_PANEL = {"dim": 0, "index": 2, "slices": 4, "block": 3}
add("block_slice", normal(12, 5), reference=lambda x: x[6:9], wrt=(), **_PANEL)
add("block_expand", normal(3, 5), reference=lambda x: _with_panel(np.zeros((12, 5)), x), wrt=(), **_PANEL)
add("block_insert", normal(12, 5), normal(3, 5), reference=_with_panel, wrt=(), **_PANEL)


# products of skewed blocks


def _skewed(x: Any, y: Any, rows: int, cols: int, shift: int) -> Any:
    """x[12, 12] y[12, 12] in 3 x 3 blocks, of which block (i, j) has one product."""
    block = np.arange(12) // 4
    picked = (rows * block[:, None, None] + cols * block[None, None, :] + shift) % 3
    return np.where(picked == block[None, :, None], x[:, :, None] * y[None], 0).sum(1)


for _rows, _cols, _exchanged in ((1, 1, -1), (-1, 1, 1), (1, -1, 0)):
    _SKEWED = {
        "spec": "mk,kn->mn", "rows": "m", "inner": "k", "cols": "n", "parts": 3,
        "row_sign": _rows, "col_sign": _cols, "exchanged": _exchanged, "shift": 1,
    }  # fmt: skip
    _made = lambda x, y, r=_rows, c=_cols: _skewed(x, y, r, c, 1)  # noqa: E731
    add("skewed_einsum", normal(12, 12), normal(12, 12), reference=_made, wrt=(), **_SKEWED)
    add(
        "skewed_einsum_add", normal(12, 12), normal(12, 12), normal(12, 12),
        reference=lambda t, x, y, f=_made: t + f(x, y), wrt=(), **_SKEWED,
    )  # fmt: skip
