"""`dg.tune_mesh2d`: brute force over the same model on several networks, prices of the cluster, bad input."""

from __future__ import annotations

import math

import pytest
from support.programs.search_cases import cluster as boxes
from typer.testing import CliRunner

import distgraph as dg
from distgraph.cli.application import app
from distgraph.errors import DistGraphError, InfeasibleError, ResourceError, ShardingError
from distgraph.passes.matmul_algorithms.cluster_prices import ClusterPrices, product_rate, slice_block
from distgraph.passes.matmul_algorithms.layer_products import (
    Layer,
    dataflow,
    legal_slices,
    products,
    transposed_forms,
)
from distgraph.passes.matmul_algorithms.product_seconds import product_seconds
from distgraph.passes.matmul_algorithms.tuner import tune
from distgraph.resources import Cluster, CollectiveCost, load_cluster, with_torus_shape

BLOCK_OF_GPT3 = {
    name: (262144, inputs * 12288, outputs * 12288)
    for name, inputs, outputs in (("qkv", 1, 3), ("out", 1, 1), ("up", 1, 4), ("down", 4, 1))
}
FEW_SAMPLES = {"up": (512, 1024, 4096), "down": (512, 4096, 1024)}


def least(layers: dict[str, tuple[int, int, int]], cluster: Cluster, count: int, dtype: str) -> float:
    """Of all meshes, the sum over all products of the best of all legal slices, each forecast by itself."""
    prices, rate = ClusterPrices(cluster, reconfigure=True), product_rate(cluster, dtype)
    block = slice_block(cluster)
    forwards = [dataflow(Layer(name, *size)) for name, size in layers.items()]
    best = math.inf
    for rows in range(2, count // 2 + 1):
        mesh = (rows, count // rows)
        if math.prod(mesh) != count:
            continue
        seconds = 0.0
        for (name, size), flow, form in zip(
            layers.items(), forwards, transposed_forms(forwards), strict=True
        ):
            for product in products(Layer(name, *size), flow, form):
                found = [
                    product_seconds(
                        "meshslice", product, mesh, slices, prices, rate(product, mesh),
                        4 if dtype == "f32" else 2,
                    ).total
                    for slices in legal_slices(product, mesh, block)
                ]  # fmt: skip
                seconds += min(found, default=math.inf)
        best = min(best, seconds)
    return best


@pytest.mark.parametrize("layers", [BLOCK_OF_GPT3, FEW_SAMPLES])
@pytest.mark.parametrize(
    ("name", "count", "dtype"),
    [("tpu_v4_16x16", 256, "bf16"), ("p3_16xlarge_x8", 16, "f16"), ("boxes", 8, "f32")],
)
def test_equals_brute_force(
    name: str, count: int, dtype: str, layers: dict[str, tuple[int, int, int]]
) -> None:
    cluster = boxes((4, 4)) if name == "boxes" else load_cluster(name)
    want = least(layers, cluster, count, dtype)
    if want == math.inf:
        with pytest.raises(InfeasibleError, match="nearest legal size"):
            dg.tune_mesh2d(layers, cluster, devices=count, dtype=dtype)
        return
    tuning = dg.tune_mesh2d(layers, cluster, devices=count)  # the dtype is the first that has a speed
    assert tuning.seconds == pytest.approx(want, rel=1e-12)
    assert math.prod(tuning.mesh) == count
    again = dg.tune_mesh2d(layers, cluster, devices=count, dtype=dtype, meshes=[tuning.mesh])
    assert again.best == tuning.best


@pytest.mark.parametrize("mesh", [(32, 8), (4, 64)])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_rings_cost_what_collectives_on_the_torus_of_the_mesh_cost(kind: str, mesh: tuple[int, int]) -> None:
    cluster = load_cluster("tpu_v4_16x16")
    torus = with_torus_shape(cluster, mesh)
    devices = torus.network.corner_block(mesh)
    rings = [devices[:: mesh[1]], devices[: mesh[1]]]
    for axis, members in enumerate(rings):
        shard = 3 * 2**20
        ring = ClusterPrices(cluster, reconfigure=True).ring(kind, axis, mesh)
        seconds = ring.seconds(mesh[axis], shard)
        assert seconds.total == pytest.approx(
            CollectiveCost(torus).time(kind, members, shard * mesh[axis]), rel=1e-5
        )
        assert seconds.launch == pytest.approx({"all_gather": 13e-6, "reduce_scatter": 26e-6}[kind])
        assert seconds.sync == pytest.approx(5e-6 * (mesh[axis] - 1), rel=1e-5)


def test_rivals_have_their_own_best_mesh_or_a_reason() -> None:
    tuning = dg.tune_mesh2d(BLOCK_OF_GPT3, "tpu_v4_16x16")
    assert tuning.mesh == (32, 8)
    assert tuning.rivals["cannon"].mesh == (16, 16)
    assert tuning.seconds < min(rival.seconds for rival in tuning.rivals.values())
    lines = str(tuning).splitlines()
    assert lines[0].startswith("tpu_v4_16x16: meshslice on mesh 32x8: ")
    assert [line.split()[0] for line in lines[-7:]] == ["meshslice", *tuning.rivals]
    eight = dg.tune_mesh2d(FEW_SAMPLES, boxes((4, 4)), dtype="f32")
    assert "8 chips form none" in eight.rivals["cannon"]
    assert f"cannon: {eight.rivals['cannon']}" in str(eight).splitlines()


def test_speed_may_depend_on_product_and_mesh() -> None:
    layers, prices = [Layer("fc", 64, 64, 64)], ClusterPrices(boxes((4, 4)))
    slow_rows = tune(layers, 8, prices, lambda product, mesh: 1e9 / mesh[0])
    assert slow_rows.mesh == (2, 4)
    assert tune(layers, 8, prices, lambda product, mesh: 1e9 / mesh[1]).mesh == (4, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layers": {}}, ShardingError, "no layers"),
        ({"layers": {"up": (64, 64)}}, ShardingError, "layers of tune_mesh2d is a dict but must be a dict"),
        ({"devices": 16}, ResourceError, "devices is 16 but cluster boxes has 8; use at most that many"),
        ({"devices": 7}, ShardingError, "7 is a prime number; use 6 or 8 chips"),
        ({"devices": 0}, ShardingError, "devices of tune_mesh2d is 0 but must be an integer of at least 1"),
        ({"meshes": [(2, 2)]}, ShardingError, "mesh 2x2 has 4 chips but chips is 8"),
        ({"algorithm": "fast"}, ShardingError, "unknown matmul algorithm 'fast'"),
        ({"dtype": "f16"}, ResourceError, "matmul.f16"),
    ],
)
def test_bad_input(options: dict[str, object], error: type[DistGraphError], message: str) -> None:
    given = {"layers": FEW_SAMPLES, "cluster": boxes((4, 4)), "dtype": "f32", **options}
    with pytest.raises(error, match=message):
        dg.tune_mesh2d(**given)  # type: ignore[arg-type]


def test_command() -> None:
    layers = [f"{name}={'x'.join(map(str, size))}" for name, size in BLOCK_OF_GPT3.items()]
    result = CliRunner().invoke(app, ["tune", "tpu_v4_16x16", *layers])
    assert result.exit_code == 0, result.output
    assert result.output == f"{dg.tune_mesh2d(BLOCK_OF_GPT3, 'tpu_v4_16x16')}\n"
    wrong = CliRunner().invoke(app, ["tune", "tpu_v4_16x16", "up=12x12"])
    assert isinstance(wrong.exception, ShardingError)
    assert "write one such as up=65536x12288x49152" in str(wrong.exception)
