"""Bad input of the tuner of matrix products: every message says what was given, and the way out."""

from __future__ import annotations

import math

import pytest

from benchmarks.support.mesh2d.torus_prices import TorusPrices, checked_seconds
from distgraph.errors import DistGraphError, InfeasibleError, ResourceError, ShardingError
from distgraph.passes.matmul_algorithms.layer_products import Layer, products
from distgraph.passes.matmul_algorithms.ring_prices import Ring
from distgraph.passes.matmul_algorithms.tuner import tune

KINDS = ("all_gather", "reduce_scatter", "send_receive")
PRICES = TorusPrices(dict.fromkeys(KINDS, 1e-5), 1e-6, dict.fromkeys(KINDS, (1e9, 2e9)))
FC = [Layer("fc", 64, 64, 64)]
FORWARD = products(Layer("fc", 64, 48, 96), "OS")[0]


def tune_fc(**changes: object) -> object:
    given = {"layers": FC, "chips": 4, "prices": PRICES, "flops_per_second": 1e12, **changes}
    return tune(**given)  # type: ignore[arg-type]


def forward_seconds(algorithm: str, mesh: tuple[int, int], slices: int = 1, block: int = 1) -> object:
    return checked_seconds(algorithm, FORWARD, mesh, slices, PRICES, 1e12, block=block)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tune_fc(chips=3), ShardingError, "chips is 3 but a mesh of two axes needs at least 4"),
        (lambda: tune_fc(chips=7), ShardingError, "7 is a prime number; use 6 or 8 chips"),
        (lambda: tune_fc(chips=8, algorithm="cannon"), ShardingError, "8 chips form none; use 4 or 9 chips"),
        (lambda: tune_fc(layers=[]), ShardingError, "no layers"),
        (lambda: tune_fc(algorithm="cannonball"), ShardingError, "'cannonball'; write one of meshslice, "),
        (lambda: tune_fc(forward="WS"), ShardingError, "unknown dataflow 'WS'; write one of OS, LS, RS"),
        (lambda: tune_fc(meshes=[(2, 3)]), ShardingError, "mesh 2x3 has 6 chips but chips is 4"),
        (lambda: tune_fc(meshes=[]), ShardingError, "meshes is empty"),
        (lambda: tune_fc(flops_per_second=0), ShardingError, "flops_per_second is 0 but"),
        (lambda: tune_fc(flops_per_second=math.nan), ShardingError, "flops_per_second is nan but"),
        (lambda: tune_fc(block=0), ShardingError, "block is 0 but"),
        (lambda: tune_fc(item_bytes=-2), ShardingError, "item_bytes is -2 but"),
        (
            lambda: tune_fc(layers=[Layer("fc", 100, 100, 100)]),
            InfeasibleError,
            r"layer fc: Y = LS\(X, W\^T\): index n is 100 but mesh 2x2 .* legal size is 96 or 112",
        ),
        (
            lambda: tune_fc(layers=[Layer("fc", 10, 64, 64)], algorithm="fsdp"),
            InfeasibleError,
            "samples is 10 but fsdp on 4 chips needs a multiple of 4; the nearest legal size is 8 or 12",
        ),
        (
            lambda: tune_fc(layers=[Layer("fc", 64, 66, 64)], algorithm="tensor_parallel"),
            InfeasibleError,
            "inputs is 66 but tensor_parallel on 4 chips needs a multiple of 4; .* legal size is 64 or 68",
        ),
        (lambda: Layer("fc", 0, 1, 1), ShardingError, "layer fc: samples is 0 but must be"),
        (
            lambda: forward_seconds("meshslice", (2, 4), slices=4, block=2),
            ShardingError,
            "slices is 4 but the shards of index k, 24 and 12 long, .* the nearest legal value is 3 or 6",
        ),
        (
            lambda: forward_seconds("meshslice", (2, 4), slices=13),
            ShardingError,
            "nearest legal value is 12$",
        ),
        (lambda: forward_seconds("meshslice", (2, 4), slices=0), ShardingError, "nearest legal value is 1$"),
        (lambda: forward_seconds("meshslice", (2, 5)), ShardingError, "index n is 96 .* size is 95 or 100"),
        (
            lambda: forward_seconds("wang", (2, 4), slices=2),
            ShardingError,
            "wang is not sliced but slices is 2",
        ),
        (
            lambda: forward_seconds("cannon", (2, 8)),
            ShardingError,
            "mesh 2x8 has 2 rows and 8 columns; use 4x4",
        ),
        (lambda: forward_seconds("fsdp", (2, 4)), ShardingError, "mesh 2x4 has two; use 1x8 or 8x1"),
        (lambda: forward_seconds("wang", (0, 4)), ShardingError, "mesh 0x4 has no chips"),
        (lambda: Ring(-1.0, 0.0, 1.0), ResourceError, "launch is -1.0 s but"),
        (lambda: Ring(0.0, 0.0, 0.0), ResourceError, "bandwidth is 0.0 bytes/s but"),
        (lambda: TorusPrices({"gossip": 0.0}, 0.0, {}), ResourceError, "unknown kind 'gossip'"),
        (lambda: TorusPrices({"reduce": 0.0}, 0.0, {}), ResourceError, "reduce has no bandwidth"),
        (lambda: TorusPrices({"reduce": 0.0}, 0.0, {"reduce": (1.0,)}), ResourceError, "has 1 numbers but"),
        (
            lambda: tune_fc(prices=TorusPrices({}, 0.0, {})),
            ResourceError,
            "no price for all_gather, only for nothing",
        ),
    ],
)
def test_bad_input(call: object, error: type[DistGraphError], message: str) -> None:
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]
