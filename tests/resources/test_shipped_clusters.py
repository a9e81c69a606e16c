"""The resource files that come with distgraph: what they describe, and that each can be planned for."""

from __future__ import annotations

import pytest
from support.paths import ROOT

from distgraph import nn, optim
from distgraph.engine.commands.plan_search import SearchOptions, search
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.ir.mesh import ProcessMesh
from distgraph.models import GPT, GPTConfig
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import Strategy
from distgraph.resources import Cluster, ComputeCost, describe, load_cluster, shipped_clusters, summarize

BATCH, SEQUENCE = 8, 1024
PRICED = {
    **dict.fromkeys(
        ("dgx_a100_pod", "vtrain_a100", "vtrain_a100_pod"), ("f64", "f32", "tf32", "f16", "bf16")
    ),
    **dict.fromkeys(
        ("dgx_h100_pod", "dgx_h200_pod", "dgx_b200_pod", "gb200_nvl72", "mi300x_pod"),
        ("f64", "f32", "tf32", "f16", "bf16", "f8"),
    ),
    "p3_16xlarge_x8": ("f64", "f32", "f16"),
    "mixed_a100_v100": ("f64", "f32", "f16"),
    "gpu2_xpu2": ("f32", "f16"),
    "tpu_v4_16x16": ("f32", "bf16"),
    "local": ("f64", "f32", "f16", "bf16"),
}
"""Dtypes whose products every device of a cluster prices."""


@pytest.mark.parametrize(
    ("name", "machines", "devices", "model", "memory"),
    [
        ("p3_16xlarge_x8", 8, 64, "V100-SXM2-16GB", 16 * 2**30),
        ("dgx_a100_pod", 20, 160, "A100-SXM4-80GB", 80 * 2**30),
        ("vtrain_a100", 1, 8, "A100-SXM4-80GB", 80 * 2**30),
        ("vtrain_a100_pod", 64, 512, "A100-SXM4-80GB", 80 * 2**30),
        ("dgx_h100_pod", 32, 256, "H100-SXM5-80GB", 80 * 2**30),
        ("dgx_h200_pod", 32, 256, "H200-SXM5-141GB", 141e9),
        ("dgx_b200_pod", 32, 256, "B200-SXM-180GB", 180e9),
        ("gb200_nvl72", 8, 576, "GB200-186GB", 186e9),
        ("mi300x_pod", 32, 256, "MI300X-192GB", 192e9),
        ("tpu_v4_16x16", 64, 256, "TPU-v4", 32 * 2**30),
        ("gpu2_xpu2", 4, 32, "V100-SXM2-32GB", 32 * 2**30),
        ("mixed_a100_v100", 4, 24, "A100-SXM4-40GB", 40 * 2**30),
        ("local", 1, 2, "generic core", 8 * 2**30),
    ],
)
def test_shipped_files(name, machines, devices, model, memory):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.source == f"resources/files/{name}.yaml"
    assert (len(cluster.machines), len(cluster.devices)) == (machines, devices)
    assert (cluster.devices[0].model, cluster.devices[0].memory) == (model, memory)
    assert cluster.launch is not None
    assert all(device.memory_bandwidth for device in cluster.devices)


def test_every_shipped_file_is_tested_here():
    assert len(shipped_clusters()) == 13


def test_the_list_says_what_each_cluster_prices_and_where_its_numbers_come_from():
    golden = (ROOT / "tests" / "golden" / "clusters.txt").read_text()
    assert [summarize(load_cluster(name)) for name in shipped_clusters()] == golden.splitlines()


def test_a_description_in_full_has_every_origin():
    cluster = load_cluster("dgx_h100_pod")
    lines = describe(cluster).splitlines()
    assert "    ops: start 4 us, memory 2.881 TB/s, lookup 1.005 TB/s" in lines
    assert "  origin of machines[0].devices.peak: data sheet; dense, f64 without tensor cores" in lines
    assert "  origin of machines[0].nics.attach: guess within 30%; PCIe 5.0 x16" in lines
    texts = {str(origin) for origin in cluster.origins.values()}
    assert texts == {line.partition(": ")[2] for line in lines if line.startswith("  origin of ")}


def planned(cluster: Cluster, dtype: str) -> Plan:
    """A data-parallel plan for a GPT of 21 million parameters on at most four devices."""
    ranks = min(4, len(cluster.devices))
    config = GPTConfig(hidden=512, layers=4, heads=8, vocabulary=8192, sequence=SEQUENCE, dtype=dtype)
    strategy = Strategy(mesh=ProcessMesh.grid(dp=ranks), batch_axis="dp")
    spec = TrainingSpec(GPT(config), nn.CrossEntropy(), optim.Adam(), {}, strategy)
    tokens = ((SEQUENCE,), "i32")
    request = CompileRequest(spec, "train", BATCH, {"batch.0": tokens, "batch.1": tokens}, {})
    return search(request, cluster, SearchOptions(mode="semi"))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name, dtypes in PRICED.items()
        for dtype in ("f32", "bf16" if "bf16" in dtypes else "f16")  # training in f32 and in 16 bits
    ],
)
def test_a_small_gpt_is_planned_for_every_cluster(name, dtype):
    """Its forecast uses at most what large products reach, and at least a hundredth of that."""
    cluster = load_cluster(name)
    plan = planned(cluster, dtype)
    assert plan.forecast is not None
    ranks = len(plan.stages[0].devices)
    parameters = 4 * 12 * 512**2 + 512 * 8192  # of products; the other table of tokens is only looked up
    useful = 6.0 * parameters * BATCH * SEQUENCE / ranks
    reached = (
        useful / plan.forecast.seconds / ComputeCost(cluster).matmul_rate(0, dtype, (1, 10**6, 10**6, 10**6))
    )
    assert 0.01 < reached < 1


@pytest.mark.parametrize("name", PRICED)
def test_what_a_cluster_prices(name):
    cluster = load_cluster(name)
    priced = [set(device.compute.matmul) for device in cluster.devices]
    assert set.intersection(*priced) == set(PRICED[name])
    assert all(device.compute.launch and device.compute.memory_efficiency for device in cluster.devices)
    assert all(link.bandwidth and link.latency is not None for link in cluster.links)


@pytest.mark.parametrize("name", PRICED)
def test_a_large_product_reaches_the_stated_fraction_of_the_peak(name):
    cluster = load_cluster(name)
    cost, size = ComputeCost(cluster), 8192
    for device in cluster.devices[:: len(cluster.devices) - 1 or 1]:
        for dtype, rate in device.compute.matmul.items():
            peak = device.peak[dtype] if dtype in device.peak else cluster.flops(device.index, dtype)
            work = 2.0 * size**3
            nbytes = 3.0 * size**2 * (8 if dtype == "f64" else 4)
            seconds = cost.time(device.index, "matmul", work, nbytes, dtype, (1, size, size, size))
            fraction = work / seconds / peak
            assert 0.85 * rate.efficiency < fraction <= rate.efficiency, dtype


PUBLISHED = [
    ("dgx_a100_pod", "bf16", (1024, 10240, 5120), 271.2),
    ("dgx_h100_pod", "bf16", (2048, 2048, 13312), 794.5),
    ("dgx_h100_pod", "f8", (1024, 9216, 14336), 1402.6),
    ("mi300x_pod", "bf16", (10240, 15360, 8192), 668.4),
    ("dgx_b200_pod", "bf16", (2048, 2048, 2048), 1006),
    ("dgx_b200_pod", "bf16", (4096, 4096, 4096), 1532),
    ("dgx_b200_pod", "bf16", (8192, 8192, 8192), 1610),
]
"""TFLOP/s of products on one device: the best of many shapes (Bekman, ml-engineering, 2025), cuBLAS on a B200
(pyptx.dev)."""


@pytest.mark.parametrize(("name", "dtype", "shape", "tera"), PUBLISHED)
def test_published_products_are_within_the_stated_errors(name, dtype, shape, tera):
    """The shapes that were best of many are faster than those of a program: a quarter above the forecast."""
    cluster = load_cluster(name)
    m, n, k = shape
    nbytes = (1.0 if dtype == "f8" else 2.0) * (m * n + n * k + m * k)
    seconds = ComputeCost(cluster).time(0, "matmul", 2.0 * m * n * k, nbytes, dtype, (1, m, n, k))
    assert 0.75 < 2.0 * m * n * k / seconds / (tera * 1e12) < 1.1
