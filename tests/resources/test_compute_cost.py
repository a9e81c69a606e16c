from __future__ import annotations

from typing import Any

import pytest
from support.files.clusters import DEVICE, boxes, cluster_of, machine
from support.paths import ROOT
from typer.testing import CliRunner

from distgraph.cli import application
from distgraph.errors import ResourceError
from distgraph.resources import ComputeCost
from distgraph.resources.cluster import Cluster

COMPUTE = {
    "launch": "2 us",
    "memory_efficiency": 0.5,
    "lookup_efficiency": 0.25,
    "matmul": {"f32": {"efficiency": 0.5, "half": [100, 50, 25], "error": {"efficiency": 0.03}}},
    "error": {"launch": 0.2},
}


def device_of(compute: dict[str, Any] | None = None, **fields: Any) -> Cluster:
    """One machine with two devices: 10 TFLOP/s in f32, 1000 GB/s."""
    entry = {**DEVICE, "count": 2, "memory_bandwidth": "1000 GB/s", **fields}
    entry["compute"] = COMPUTE if compute is None else compute
    return cluster_of({"name": "c", "launch": "10 us", "machines": [machine(2, "m", devices=entry)]})


def test_memory_lookup_and_launch():
    cost = ComputeCost(device_of())
    assert cost.time(1, "memory", 1e9, 5e6, "i32") == pytest.approx(2e-6 + 5e6 / 0.5e12)
    assert cost.time(1, "lookup", 0, 5e6, "i32") == pytest.approx(2e-6 + 5e6 / 0.25e12)
    assert cost.time(1, "launch", 1e9, 5e6, "f32") == 2e-6


def test_a_kernel_that_adds_up_has_its_own_table_or_that_of_the_op():
    alone: dict[str, Any] = {"launch": "5 us", "ops": {"einsum": {"f32": {"launch": "7 us"}}}}
    both = {"launch": "5 us", "ops": alone["ops"] | {"einsum+=": {"f32": {"launch": "9 us"}}}}
    for compute, op, seconds in (
        ({"launch": "5 us"}, "einsum+=", 5e-6),
        (alone, "einsum+=", 7e-6),
        (both, "einsum+=", 9e-6),
        (both, "einsum", 7e-6),
    ):
        assert ComputeCost(device_of(compute)).time(0, "launch", 0, 0, "f32", op=op) == pytest.approx(seconds)


def test_a_convolution_is_priced_by_flops_and_patches():
    rates = {"launch": "3 us", "rates": ["2 ps", "0.5 ns", "7 ns"]}
    cost = ComputeCost(device_of(COMPUTE | {"ops": {"conv": {"f32": rates}}}))
    amounts = ("matmul", 1e9, 5e6, "f32", (1, 300, 150, 75))
    assert cost.time(0, *amounts, "conv", (4e6, 1e5)) == pytest.approx(3e-6 + 2e-3 + 2e-3 + 7e-4)
    assert cost.time(0, *amounts, "conv") == pytest.approx(3e-6 + 2e-3)  # 1 x 1: nothing is copied
    assert cost.time(0, *amounts, "conv_grad_input", (4e6, 1e5)) == cost.time(0, *amounts)


def test_a_convolution_in_tiles_is_priced_by_them_where_the_file_says_what_they_cost():
    rates = {"launch": "3 us", "rates": ["2 ps", "0.5 ns", "7 ns"], "tile_rates": ["1 ps", "2 ns", "9 ns"]}
    cost = ComputeCost(device_of(COMPUTE | {"ops": {"conv": {"f32": rates}}}))
    amounts = ("matmul", 1e9, 5e6, "f32", (1, 300, 150, 75), "conv", (4e6, 1e5), 0.0)
    assert cost.time(0, *amounts, (2e9, 1e6, 1e4)) == pytest.approx(3e-6 + 2e-3 + 2e-3 + 9e-5)
    assert cost.time(0, *amounts) == pytest.approx(3e-6 + 2e-3 + 2e-3 + 7e-4)
    alone = ComputeCost(device_of(COMPUTE | {"ops": {"conv": {"f32": {"rates": rates["rates"]}}}}))
    assert alone.time(0, *amounts, (2e9, 1e6, 1e4)) == alone.time(0, *amounts)


def test_bytes_of_a_product_are_added_where_the_file_says_what_they_cost():
    rate = {"f32": {"efficiency": 0.5, "half": [0, 0, 0], "moved": "0.2 ns"}}
    cost = ComputeCost(device_of({**COMPUTE, "matmul": rate}))
    assert cost.time(0, "matmul", 1e9, 3e6, "f32", (1, 300, 150, 75)) == pytest.approx(2e-6 + 2e-4 + 6e-4)


def test_a_product_is_priced_by_what_it_copies_where_the_file_says_what_that_costs():
    rate = {"f32": {"efficiency": 0.5, "half": [0, 0, 0], "copied": "0.5 ns"}}
    amounts = ("matmul", 1e9, 0.0, "f32", (2, 300, 150, 75), "einsum", (0.0, 0.0))
    plain = ComputeCost(device_of()).time(0, *amounts)
    assert ComputeCost(device_of()).time(0, *amounts, 4e6) == plain
    cost = ComputeCost(device_of({**COMPUTE, "matmul": rate}))
    assert cost.time(0, *amounts, 4e6) == pytest.approx(2e-6 + 1e9 / 5e12 + 2e-3)
    assert cost.time(0, *amounts) == pytest.approx(2e-6 + 1e9 / 5e12)


def test_large_matmul_is_bound_by_flops():
    cost = ComputeCost(device_of())
    e = 0.5 * (300 / 400) * (150 / 200) * (75 / 100)
    assert cost.time(0, "matmul", 1e9, 0, "f32", (7, 300, 150, 75)) == pytest.approx(2e-6 + 1e9 / (10e12 * e))


def test_thin_matmul_is_bound_by_its_bytes():
    cost = ComputeCost(device_of())
    assert cost.time(0, "matmul", 10, 5e6, "f32", (1, 300, 150, 75)) == pytest.approx(2e-6 + 5e6 / 0.5e12)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_half_is_where_the_rate_falls_to_a_half(place: int):
    cost = ComputeCost(device_of())
    large, half = 10**12, COMPUTE["matmul"]["f32"]["half"]
    dims = [1, large, large, large]
    whole = cost.matmul_rate(0, "f32", tuple(dims))
    dims[place + 1] = half[place]
    assert cost.matmul_rate(0, "f32", tuple(dims)) == pytest.approx(whole / 2)
    assert whole == pytest.approx(5e12)


def test_exponent_says_how_steeply_the_rate_rises():
    steep = {**COMPUTE, "matmul": {"f32": {"efficiency": 0.5, "half": [100, 0, 0], "exponent": 2}}}
    cost = ComputeCost(device_of(steep))
    rates = [cost.matmul_rate(0, "f32", (1, size, 1, 1)) / 5e12 for size in (100, 400, 25, 0)]
    assert rates == pytest.approx([1 / 2, 16 / 17, 1 / 5, 0], abs=1e-9)


def test_half_of_zero_makes_no_difference():
    flat = {**COMPUTE, "matmul": {"f32": {"efficiency": 0.5, "half": [0, 0, 0]}}}
    cost = ComputeCost(device_of(flat))
    assert cost.matmul_rate(0, "f32", (1, 1, 1, 1)) == 5e12


def test_more_of_anything_never_takes_less():
    cost = ComputeCost(device_of())
    times = [cost.time(0, "matmul", 2.0 * n**3, 12.0 * n**2, "f32", (1, n, n, n)) for n in range(0, 400, 13)]
    assert times == sorted(times)


def test_efficiency_is_of_the_measured_rate_where_no_peak_is_stated():
    both = device_of(measured={"f32": "4 TFLOP/s"})
    alone = device_of(measured={"f32": "4 TFLOP/s"}, peak={})
    assert ComputeCost(both).matmul_rate(0, "f32", (1, 10**12, 10**12, 10**12)) == pytest.approx(5e12)
    assert ComputeCost(alone).matmul_rate(0, "f32", (1, 10**12, 10**12, 10**12)) == pytest.approx(2e12)


def test_fit_errors_are_kept():
    compute = device_of().devices[0].compute
    assert compute.error == {"launch": 0.2}
    assert compute.matmul["f32"].error == {"efficiency": 0.03}


@pytest.mark.parametrize(
    ("lacks", "kind", "path"),
    [
        ("launch", "launch", r"machines\[0\].devices.compute.launch"),
        ("memory_efficiency", "memory", r"machines\[0\].devices.compute.memory_efficiency"),
        ("lookup_efficiency", "lookup", r"machines\[0\].devices.compute.lookup_efficiency"),
        ("matmul", "matmul", r"machines\[0\].devices.compute.matmul.f32"),
    ],
)
def test_a_missing_number_is_named_with_its_path_and_the_way_out(lacks: str, kind: str, path: str):
    cluster = device_of({name: value for name, value in COMPUTE.items() if name != lacks})
    with pytest.raises(ResourceError, match=rf"test.yaml: {path}: missing.*distgraph profile"):
        ComputeCost(cluster).time(0, kind, 1, 1, "f32")


def test_other_missing_numbers():
    with pytest.raises(ResourceError, match=r"compute.matmul.f16: missing, G states f32"):
        ComputeCost(device_of()).time(0, "matmul", 1, 1, "f16")
    with pytest.raises(ResourceError, match=r"devices.memory_bandwidth: missing"):
        ComputeCost(device_of(memory_bandwidth=None)).time(0, "memory", 0, 1, "f32")
    with pytest.raises(ResourceError, match=r"op class conv: unknown"):
        ComputeCost(device_of()).time(0, "conv", 0, 1, "f32")


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        ({"memory_efficiency": 1.5}, r"compute.memory_efficiency: expected a number up to 1(\.0)?, got 1.5"),
        (
            {"memory_efficiency": 0},
            r"compute.memory_efficiency: expected a number from 1e-06 up, got 0",
        ),
        ({"launch": 5}, r"compute.launch: expected a time such as \"2 us\", got 5"),
        ({"matmul": {"f32": {"efficiency": 0.5}}}, r"compute.matmul.f32.half: missing"),
        ({"matmul": {"f32": {"efficiency": 0.5, "half": [1, 2]}}}, r"half: expected 3 or more entries"),
        (
            {"matmul": {"f32": {"efficiency": 0.5, "half": [1, -2, 3]}}},
            r"half\[1\]: expected a number from 0 up, got -2",
        ),
        ({"lunch": "1 us"}, r"compute.lunch: unknown field"),
        ({"ops": {"conv": {"f32": {"rates": ["1 ps", "0 s"]}}}}, r"rates: expected 3 or more entries"),
        ({"ops": {"conv": {"f32": {"rates": [1e-12, 0, 0]}}}}, r"rates\[0\]: expected a time such as"),
        (
            {"ops": {"conv": {"f32": {"rates": 3 * ["1 ps"], "times": ["1 s"], "flops": ["1 FLOP"]}}}},
            r"compute.ops.conv.f32: expected either rates or times by an amount of work",
        ),
        (
            {"ops": {"gelu": {"f32": {"rates": 3 * ["1 ps"]}}}},
            r"compute.ops: expected rates of conv, conv_grad_input, conv_grad_weight alone, and times for",
        ),
    ],
)
def test_mistakes_in_the_file(compute: dict[str, Any], message: str):
    with pytest.raises(ResourceError, match=message):
        device_of(compute)


def test_all_numbers_that_computation_lacks_are_told_at_once():
    """A file without numbers for computation: what is missing, an example of each, and the way out."""
    with pytest.raises(ResourceError) as caught:
        ComputeCost(boxes([2])).time(0, "memory", 0, 2**20, "f32")
    text = str(caught.value)
    assert "test.yaml: machines[0].devices.compute.launch: missing, needed to price" in text
    for example in ("launch: 5 us", "memory_efficiency: 0.8", "lookup_efficiency: 0.3", "matmul: {f32: {eff"):
        assert example in text
    assert text.endswith("or run distgraph profile on that machine, which measures it")
    some = {name: value for name, value in COMPUTE.items() if name != "lookup_efficiency"}
    with pytest.raises(ResourceError) as caught:
        ComputeCost(device_of(some)).time(0, "matmul", 1, 1, "f16", (1, 1, 1, 1))
    text = str(caught.value)
    assert "compute.matmul.f16: missing, G states f32; add it such as f16: {efficiency" in text
    assert "(and, missing there too, lookup_efficiency: 0.3)" in text


def test_the_quickstart_is_forecast_on_a_shipped_cluster():
    script = ROOT / "tutorials" / "01_quickstart.py"
    result = CliRunner().invoke(application.app, ["forecast", str(script), "--cluster", "p3_16xlarge_x8"])
    assert result.exit_code == 0, result.output
    assert "fits every device" in result.output
