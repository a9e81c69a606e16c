"""Row kernels, activations, losses, lookups and optimizers against SciPy, PyTorch and their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import scipy.stats

from distgraph.kernels import activation, embedding, loss, norm, optimizer, softmax

SHAPES = [(3, 4, 7), (150, 131)]


def draw(*shape: int, seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def close(got: np.ndarray, want: np.ndarray, units: float = 8) -> None:
    """Within ``units`` roundings of float32 (or float64), relative to the largest element."""
    eps = np.finfo(got.dtype).eps
    np.testing.assert_allclose(
        got, want, rtol=units * eps, atol=units * eps * max(1.0, float(np.abs(want).max()))
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softmax_against_scipy(shape: tuple[int, ...], dtype: type) -> None:
    x = draw(*shape, dtype=dtype) * 10
    for axis in range(-1, len(shape)):
        close(softmax.softmax(np, x, axis=axis), scipy.special.softmax(x.astype(np.float64), axis=axis))
        close(
            softmax.log_softmax(np, x, axis=axis), scipy.special.log_softmax(x.astype(np.float64), axis=axis)
        )


@pytest.mark.parametrize("size", [200, 30000])
def test_activations_against_scipy(size: int) -> None:
    x = np.linspace(-12, 12, size).astype(np.float32)
    wide = x.astype(np.float64)
    cdf, pdf, logistic = scipy.special.ndtr(wide), scipy.stats.norm.pdf(wide), scipy.special.expit(wide)
    inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    one = np.ones_like(x)
    close(activation.erf(np, x), scipy.special.erf(wide), 4)
    close(activation.sigmoid(np, x), logistic, 4)
    close(activation.gelu(np, x), wide * cdf, 4)
    close(activation.gelu(np, x, approximate=True), wide / 2 * (1 + np.tanh(inner)), 4)
    close(activation.gelu_grad(np, x, one), cdf + wide * pdf, 16)
    close(activation.silu(np, x), wide * logistic, 4)
    close(activation.silu_grad(np, x, one), logistic * (1 + wide * (1 - logistic)), 16)


def test_compiled_exponential_is_within_two_units_in_the_last_place() -> None:
    pytest.importorskip("numba")
    from distgraph.kernels._row_loops import exp_sum

    x = np.concatenate([np.linspace(-87.3, 88.7, 400001), [-np.inf, np.inf, np.nan, -100, 89]]).astype(
        np.float32
    )
    y = np.empty_like(x)
    exp_sum(x, np.float32(0), y)
    want = np.exp(x[:-5].astype(np.float64))
    assert np.max(np.abs(y[:-5] - want) / np.spacing(want.astype(np.float32))) <= 2
    np.testing.assert_array_equal(y[-5:], np.array([0, np.inf, np.nan, 0, np.inf], np.float32))


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_against_their_definition(shape: tuple[int, ...]) -> None:
    x, w, b = draw(*shape) * 3 + 2, draw(shape[-1], seed=1), draw(shape[-1], seed=2)
    wide = x.astype(np.float64)
    y, mean, rstd = norm.layer_norm(np, x, w, b, eps=1e-3)
    close(mean, wide.mean(-1))
    close(rstd, 1 / np.sqrt(wide.var(-1) + 1e-3))
    close(y, (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-3) * w + b)
    y, rstd = norm.rms_norm(np, x, w, eps=1e-3)
    close(rstd, 1 / np.sqrt((wide**2).mean(-1) + 1e-3))
    close(y, wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * w)


@pytest.mark.parametrize("classes", [7, 400])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_cross_entropy_of_split_classes_combines_to_the_whole(classes: int, parts: int) -> None:
    x = draw(9, 10, classes)
    labels = np.random.default_rng(3).integers(0, classes, (9, 10)).astype(np.int32)
    wide = x.astype(np.float64)
    whole = scipy.special.logsumexp(wide, axis=-1)
    want = whole - np.take_along_axis(wide, labels[..., None].astype(np.int64), -1)[..., 0]
    block = -(-classes // parts)
    shards = [(s, x[..., s : s + block]) for s in (min(i * block, classes) for i in range(parts))]
    results = [loss.cross_entropy(np, part, labels, offset=s, classes=classes) for s, part in shards]
    lse = scipy.special.logsumexp([r[1].astype(np.float64) for r in results], axis=0)
    picked = sum(loss.pick(np, part, labels, offset=s) for s, part in shards)
    close(lse.astype(np.float32), whole)
    close((lse - picked).astype(np.float32), want)
    dloss = draw(9, 10, seed=4)
    grads = [
        loss.cross_entropy_grad(np, part, labels, lse.astype(np.float32), dloss, offset=s)
        for s, part in shards
    ]
    onehot = np.eye(classes)[labels]
    close(np.concatenate(grads, -1), (np.exp(wide - whole[..., None]) - onehot) * dloss[..., None])
    spread = [loss.pick_grad(np, dloss, labels, offset=s, size=part.shape[-1]) for s, part in shards]
    np.testing.assert_array_equal(np.concatenate(spread, -1), (onehot * dloss[..., None]).astype(np.float32))


@pytest.mark.parametrize("ids_type", [np.int32, np.int64, np.uint16])
@pytest.mark.parametrize(("rows", "width"), [(7, 3), (90, 60)])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_lookups_of_a_split_table_add_to_the_whole(ids_type: type, rows: int, width: int, parts: int) -> None:
    table = draw(rows, width)
    ids = np.random.default_rng(1).integers(0, rows, (4, 90)).astype(ids_type)
    updates = draw(4, 90, width, seed=2)
    want = table.astype(np.float64)
    np.add.at(want, ids.astype(np.int64), updates)
    block = -(-rows // parts)
    pieces = [(s, table[s : s + block]) for s in (min(i * block, rows) for i in range(parts))]
    np.testing.assert_array_equal(
        sum(embedding.embedding(np, t, ids, offset=s) for s, t in pieces), table[ids]
    )
    grads = [embedding.embedding_grad(np, updates, ids, rows=len(t), offset=s) for s, t in pieces]
    close(np.concatenate(grads), want - table, 64)
    added = [embedding.scatter_add(np, t, ids, updates, offset=s) for s, t in pieces]
    close(np.concatenate(added), want, 64)


def test_scatter_add_in_place_and_embedding_of_vectors() -> None:
    x = np.zeros((3,), np.float32)
    assert embedding.scatter_add(np, x, np.array([2, 2, 5]), np.ones(3, np.float32), out=x) is x
    np.testing.assert_array_equal(x, [0, 0, 2])
    np.testing.assert_array_equal(embedding.embedding(np, np.arange(4), np.array([[3], [9]])), [[3], [0]])


@pytest.mark.torch
@pytest.mark.parametrize("size", [(5, 7), (140, 130)])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_follows_torch_for_several_steps(size: tuple[int, int], decoupled: bool) -> None:
    torch = pytest.importorskip("torch")
    p, m, v = draw(*size), np.zeros(size, np.float32), np.zeros(size, np.float32)
    weight = torch.nn.Parameter(torch.tensor(p))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    other = kind([weight], lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    for step in range(1, 6):
        g = draw(*size, seed=step)
        weight.grad = torch.tensor(g)
        other.step()
        attrs = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.3, "decoupled": decoupled}
        lr, count = np.asarray(0.02), np.asarray(step)
        optimizer.adam(np, p, g, m, v, lr, count, **attrs, out=(p, m, v))
        close(p, weight.detach().numpy(), 32)


@pytest.mark.torch
@pytest.mark.parametrize("size", [(5, 7), (140, 130)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_follows_torch_for_several_steps(size: tuple[int, int], nesterov: bool) -> None:
    torch = pytest.importorskip("torch")
    p, buf = draw(*size), np.zeros(size, np.float32)
    weight = torch.nn.Parameter(torch.tensor(p))
    other = torch.optim.SGD([weight], lr=0.02, momentum=0.7, nesterov=nesterov, weight_decay=0.1)
    for step in range(5):
        g = draw(*size, seed=step)
        weight.grad = torch.tensor(g)
        other.step()
        optimizer.momentum(
            np, p, g, buf, 0.02, momentum=0.7, nesterov=nesterov, weight_decay=0.1, out=(p, buf)
        )
        close(p, weight.detach().numpy(), 32)


def test_adam_keeps_the_moments_dtype_beside_half_precision_weights() -> None:
    p, g, m, v = draw(6).astype(np.float16), draw(6, seed=1).astype(np.float16), draw(6), draw(6) ** 2
    new_p, new_m, new_v = optimizer.adam(np, p, g, m, v, 0.1, 1)
    assert (new_p.dtype, new_m.dtype, new_v.dtype) == (np.float16, np.float32, np.float32)
