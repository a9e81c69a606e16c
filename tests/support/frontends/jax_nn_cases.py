"""One case for each function of `jax.nn` and each module of `flax.linen` and `equinox.nn`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.frontends.jax_comparison import normal

jax: Any = pytest.importorskip("jax")
nn: Any = jax.nn
jnp: Any = jax.numpy

Case = Callable[[], tuple[Callable[..., Any], Any, list[Any]]]
"""Returns a function of (params, *inputs), params and inputs."""

SEQUENCE, IMAGE, VOLUME = (2, 6, 4), (2, 8, 6, 4), (2, 5, 6, 4, 4)
LISTED = {"jax": "0.10.2", "flax": "0.12.8", "equinox": "0.13.8"}
"""Versions whose names the tables of this module list; others may have more of them, or fewer."""
CASES: dict[str, Case] = {}
"""Name such as "jax.nn.gelu" -> its case."""


# functions of jax.nn; the parameter is one of their operands, so that gradients are compared


def _function(name: str, function: Callable[..., Any], *shape: int) -> None:
    CASES[f"jax.nn.{name}"] = lambda: (
        lambda params, x: function(x * params["w"]),
        {"w": normal(1, shape[1:])},
        [normal(0, shape)],
    )


for _name in (
    "celu", "elu", "gelu", "glu", "hard_sigmoid", "hard_silu", "hard_swish", "hard_tanh", "identity",
    "leaky_relu", "log_sigmoid", "log_softmax", "logmeanexp", "logsumexp", "mish", "relu", "relu6", "selu",
    "sigmoid", "silu", "soft_sign", "softmax", "softplus", "sparse_plus", "sparse_sigmoid", "squareplus",
    "standardize", "swish", "tanh",
):  # fmt: skip
    _function(_name, lambda x, name=_name: getattr(nn, name)(x), 3, 4)
_function("log1mexp", lambda x: nn.log1mexp(jnp.abs(x) + 0.1), 3, 4)
_function("one_hot", lambda x: nn.one_hot(jnp.argmax(x, -1), 4) * x, 3, 4)
_function("dot_product_attention", lambda x: nn.dot_product_attention(x, x, x, is_causal=True), 2, 5, 2, 4)
_function(
    "scaled_matmul", lambda x: nn.scaled_matmul(x, x, jnp.ones((2, 3, 4)), jnp.ones((2, 3, 4))), 2, 3, 4
)
_function("scaled_dot_general", lambda x: nn.scaled_dot_general(x, x, (((1,), (1,)), ((), ()))), 3, 32)


# modules of flax.linen


def _linen(name: str, make: Callable[[Any], Any], *shape: int, **apply: Any) -> None:
    def case() -> tuple[Callable[..., Any], Any, list[Any]]:
        linen: Any = pytest.importorskip("flax.linen")
        net, x = make(linen), normal(0, shape)
        variables = net.init(jax.random.key(0), x, **apply)
        mutable = [kind for kind in variables if kind != "params"]
        params = variables.get("params", {})
        rest = {kind: variables[kind] for kind in mutable}

        def function(params: Any, x: Any) -> Any:
            out = net.apply({"params": params, **rest}, x, mutable=mutable, **apply)
            return out[0]

        return function, params, [x]

    CASES[f"flax.linen.{name}"] = case


_linen("Dense", lambda m: m.Dense(5), 3, 4)
_linen("DenseGeneral", lambda m: m.DenseGeneral((2, 3), axis=(-2, -1)), *SEQUENCE)
_linen("Einsum", lambda m: m.Einsum((4, 5), "btd,de->bte"), *SEQUENCE)
_linen("Embed", lambda m: m.Sequential([lambda x: jnp.argmax(x, -1), m.Embed(4, 3)]), *SEQUENCE)
_linen("Conv", lambda m: m.Conv(6, (3, 3), strides=2, padding="CIRCULAR"), *IMAGE)
_linen("ConvLocal", lambda m: m.ConvLocal(6, (3, 3)), *IMAGE)
_linen("ConvTranspose", lambda m: m.ConvTranspose(6, (3, 3), strides=(2, 2)), *IMAGE)
_linen("BatchNorm", lambda m: m.BatchNorm(use_running_average=False), *IMAGE)
_linen("LayerNorm", lambda m: m.LayerNorm(), *SEQUENCE)
_linen("RMSNorm", lambda m: m.RMSNorm(), *SEQUENCE)
_linen("GroupNorm", lambda m: m.GroupNorm(2), *IMAGE)
_linen("InstanceNorm", lambda m: m.InstanceNorm(), *IMAGE)
_linen("SpectralNorm", lambda m: m.SpectralNorm(m.Dense(5)), 3, 4, update_stats=True)
_linen("WeightNorm", lambda m: m.WeightNorm(m.Dense(5)), 3, 4)
_linen("PReLU", lambda m: m.PReLU(), 3, 4)
_linen("Dropout", lambda m: m.Dropout(0.5, deterministic=True), 3, 4)
_linen("Sequential", lambda m: m.Sequential([m.Dense(5), nn.gelu, m.Dense(2)]), 3, 4)
_linen("MultiHeadAttention", lambda m: m.MultiHeadAttention(2), *SEQUENCE)
_linen("MultiHeadDotProductAttention", lambda m: m.MultiHeadDotProductAttention(2), *SEQUENCE)
_linen("SelfAttention", lambda m: m.SelfAttention(2), *SEQUENCE)
for _name in ("LSTMCell", "OptimizedLSTMCell", "GRUCell", "MGUCell", "SimpleCell"):
    _linen(_name, lambda m, name=_name: m.RNN(getattr(m, name)(5)), *SEQUENCE)
_linen("ConvLSTMCell", lambda m: m.RNN(m.ConvLSTMCell(3, (2, 2))), *VOLUME)
_linen("RNN", lambda m: m.RNN(m.GRUCell(5), reverse=True, keep_order=True), *SEQUENCE)
_linen("Bidirectional", lambda m: m.Bidirectional(m.RNN(m.GRUCell(5)), m.RNN(m.GRUCell(5))), *SEQUENCE)
for _name in ("Fp8DotGeneral", "Fp8DotGeneralOp", "Fp8DirectDotGeneralOp", "NANOOFp8DotGeneralOp"):
    _linen(_name, lambda m, name=_name: m.Dense(16, dot_general_cls=getattr(m, name)), 16, 16)


def _fp8_einsum(m: Any) -> Any:
    class Net(m.Module):  # type: ignore[misc]
        @m.compact
        def __call__(self, x: Any) -> Any:
            return m.Fp8Einsum()("bd,de->be", x, self.param("w", m.initializers.ones, (16, 16)))

    return Net()


_linen("Fp8Einsum", _fp8_einsum, 16, 16)


# modules of equinox.nn; they have no dim of samples, which vmap adds


def _equinox(name: str, make: Callable[[Any, Any], Any], *shape: int, call: Any = None) -> None:
    def case() -> tuple[Callable[..., Any], Any, list[Any]]:
        equinox: Any = pytest.importorskip("equinox")
        params, static = equinox.partition(make(equinox.nn, jax.random.key(0)), equinox.is_inexact_array)

        def function(params: Any, x: Any) -> Any:
            net = equinox.combine(params, static)
            return jax.vmap(net if call is None else lambda row: call(net, row))(x)

        return function, params, [normal(0, shape)]

    CASES[f"equinox.nn.{name}"] = case


def _stateful(name: str, make: Callable[[Any, Any], Any], *shape: int) -> None:
    """A module with a state, which its call returns."""

    def case() -> tuple[Callable[..., Any], Any, list[Any]]:
        equinox: Any = pytest.importorskip("equinox")
        net, state = equinox.nn.make_with_state(lambda: make(equinox.nn, jax.random.key(0)))()
        params, static = equinox.partition(net, equinox.is_inexact_array)

        def function(params: Any, x: Any) -> Any:
            one = equinox.combine(params, static)
            batched = jax.vmap(one, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            return batched(x, state)[0]

        return function, params, [normal(0, shape)]

    CASES[f"equinox.nn.{name}"] = case


def _over_time(cell: Any, x: Any, hidden: Any) -> Any:
    return jax.lax.scan(lambda state, step: (cell(step, state), None), hidden, x)[0]


_equinox("Linear", lambda m, key: m.Linear(4, 5, key=key), 3, 4)
_equinox("MLP", lambda m, key: m.MLP(4, 5, 8, 2, key=key), 3, 4)
_equinox("Identity", lambda m, key: m.Sequential([m.Identity(), m.Linear(4, 5, key=key)]), 3, 4)
_equinox("Lambda", lambda m, key: m.Sequential([m.Linear(4, 5, key=key), m.Lambda(nn.gelu)]), 3, 4)
_equinox("Sequential", lambda m, key: m.Sequential([m.Linear(4, 5, key=key), m.LayerNorm(5)]), 3, 4)
_equinox("Embedding", lambda m, key: m.Embedding(4, 5, key=key), 3, 4, call=lambda net, x: net(jnp.argmax(x)))
_equinox("PReLU", lambda m, key: m.PReLU(0.3), 3, 4)
_equinox(
    "Dropout", lambda m, key: m.Sequential([m.Linear(4, 5, key=key), m.Dropout(0.5, inference=True)]), 3, 4
)
_equinox("LayerNorm", lambda m, key: m.LayerNorm(4), 3, 4)
_equinox("RMSNorm", lambda m, key: m.RMSNorm(4), 3, 4)
_equinox("GroupNorm", lambda m, key: m.GroupNorm(2, 4), 3, 4, 5, 6)
_equinox("WeightNorm", lambda m, key: m.WeightNorm(m.Linear(4, 5, key=key)), 3, 4)
_stateful("SpectralNorm", lambda m, key: m.SpectralNorm(m.Linear(4, 5, key=key), "weight", key=key), 3, 4)
_stateful("BatchNorm", lambda m, key: m.BatchNorm(4, "batch", mode="batch"), 3, 4, 5)
_equinox(
    "MultiheadAttention",
    lambda m, key: m.MultiheadAttention(2, 4, key=key),
    3, 5, 4,
    call=lambda net, x: net(x, x, x),
)  # fmt: skip
_equinox(
    "RotaryPositionalEmbedding",
    lambda m, key: m.Sequential([m.LayerNorm((5, 4)), m.RotaryPositionalEmbedding(4)]),
    3,
    5,
    4,
)
_equinox(
    "GRUCell",
    lambda m, key: m.GRUCell(4, 5, key=key),
    3,
    6,
    4,
    call=lambda net, x: _over_time(net, x, jnp.zeros(5)),
)
_equinox(
    "LSTMCell",
    lambda m, key: m.LSTMCell(4, 5, key=key),
    3,
    6,
    4,
    call=lambda net, x: _over_time(net, x, (jnp.zeros(5),) * 2)[0],
)
for _dims in (1, 2, 3):
    _shape = (3, 4, 6, 5, 7)[: _dims + 2]
    _equinox(
        f"Conv{_dims}d",
        lambda m, key, d=_dims: getattr(m, f"Conv{d}d")(4, 6, 3, padding=1, groups=2, key=key),
        *_shape,
    )
    _equinox(
        f"ConvTranspose{_dims}d",
        lambda m, key, d=_dims: getattr(m, f"ConvTranspose{d}d")(4, 6, 3, 2, key=key),
        *_shape,
    )
    for _name in (f"AvgPool{_dims}d", f"MaxPool{_dims}d"):
        _equinox(
            _name,
            lambda m, key, name=_name, d=_dims: m.Sequential(
                [getattr(m, f"Conv{d}d")(4, 3, 1, key=key), getattr(m, name)(2, 2)]
            ),
            *_shape,
        )
    for _name in (f"AdaptiveAvgPool{_dims}d", f"AdaptiveMaxPool{_dims}d"):
        _equinox(
            _name,
            lambda m, key, name=_name, d=_dims: m.Sequential(
                [getattr(m, f"Conv{d}d")(4, 3, 1, key=key), getattr(m, name)(3)]
            ),
            *_shape,
        )
_equinox("Conv", lambda m, key: m.Conv(2, 4, 6, 3, dilation=2, key=key), 3, 4, 8, 7)
_equinox(
    "ConvTranspose", lambda m, key: m.ConvTranspose(2, 4, 6, 3, 2, output_padding=1, key=key), 3, 4, 5, 6
)
_equinox(
    "Pool",
    lambda m, key: m.Sequential([m.Conv1d(4, 3, 1, key=key), m.Pool(-jnp.inf, jax.lax.max, 1, 2, 2)]),
    3,
    4,
    6,
)
_equinox(
    "AdaptivePool",
    lambda m, key: m.Sequential([m.Conv1d(4, 3, 1, key=key), m.AdaptivePool(3, 1, jnp.mean)]),
    3,
    4,
    7,
)


def _shared() -> tuple[Callable[..., Any], Any, list[Any]]:
    """A table of tokens that is the matrix of the outputs, too."""
    equinox: Any = pytest.importorskip("equinox")
    first, second = jax.random.split(jax.random.key(0))
    layers = equinox.nn.Embedding(4, 5, key=first), equinox.nn.Linear(5, 4, use_bias=False, key=second)
    tied = equinox.nn.Shared(layers, lambda both: both[1].weight, lambda both: both[0].weight)
    params, static = equinox.partition(tied, equinox.is_inexact_array)

    def function(params: Any, x: Any) -> Any:
        embed, head = equinox.combine(params, static)()
        return jax.vmap(lambda row: head(jnp.tanh(embed(jnp.argmax(row)))))(x)

    return function, params, [normal(0, (3, 4))]


CASES["equinox.nn.Shared"] = _shared

NO_CASES = {
    "jax.nn": {"get_scaled_dot_general_config"},
    "flax.linen": {"Module", "RNNCellBase"},
    "equinox.nn": {"StateIndex", "StatefulLayer"},
}
"""Settings, base classes and parts of others."""

_EIGHT_BITS = "there are no numbers of 8 bits with a floating point"
REFUSED = {
    "flax.linen.Fp8DirectDotGeneralOp": _EIGHT_BITS,
    "flax.linen.Fp8DotGeneral": _EIGHT_BITS,
    "flax.linen.Fp8DotGeneralOp": _EIGHT_BITS,
    "flax.linen.Fp8Einsum": _EIGHT_BITS,
    "flax.linen.NANOOFp8DotGeneralOp": _EIGHT_BITS,
    "jax.nn.scaled_matmul": "no rule for products of blocks with scales",
}
"""What cannot be imported, and why."""
