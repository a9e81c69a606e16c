"""The programs that the step benchmark compares with train as a textbook NumPy program in float64 does.

The tolerance is relative 1e-5 over 5 steps: fp32 rounds a sum of some hundred terms to about 1e-6, and Adam's
step of 1e-4 a parameter keeps that from growing within so few steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.paths import ROOT

STEPS = 5
SIZES = {"layers": 4, "width": 27, "batch": 12, "microbatches": 3}  # an odd width: uneven halves
SIZE_WORDS = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    import benchmarks.support.peers

    return benchmarks.support.peers


@pytest.fixture
def handwritten(peers: ModuleType) -> ModuleType:
    import benchmarks.support.peers.handwritten

    return benchmarks.support.peers.handwritten


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    import benchmarks.step

    return benchmarks.step


def textbook_losses(peers: ModuleType, width: int = SIZES["width"]) -> list[float]:
    """Serial float64 training, from the definitions: only the data is shared with the programs."""
    sizes = peers.MlpSizes(**(SIZES | {"width": width}))
    values = [p.astype(np.float64) for pair in peers.mlp_parameters(sizes) for p in pair]
    x, target = (part.astype(np.float64) for part in peers.mlp_batch(sizes))
    first = [np.zeros_like(p) for p in values]
    second = [np.zeros_like(p) for p in values]
    losses = []
    for step in range(1, STEPS + 1):
        inputs = [x]
        for layer in range(sizes.layers):
            z = inputs[-1] @ values[2 * layer] + values[2 * layer + 1]
            inputs.append(z if layer == sizes.layers - 1 else z * (z > 0))
        losses.append(float(np.mean((inputs[-1] - target) ** 2)))
        dz = 2 * (inputs[-1] - target) / target.size
        gradients: list[np.ndarray] = []
        for layer in reversed(range(sizes.layers)):
            gradients = [inputs[layer].T @ dz, dz.sum(axis=0), *gradients]
            dz = (dz @ values[2 * layer].T) * (inputs[layer] > 0)
        for index, g in enumerate(gradients):
            first[index] = 0.9 * first[index] + 0.1 * g
            second[index] = 0.999 * second[index] + 0.001 * g**2
            mean = first[index] / (1 - 0.9**step)
            deviation = np.sqrt(second[index] / (1 - 0.999**step))
            values[index] = values[index] - 1e-4 * mean / (deviation + 1e-8)
    return losses


def test_the_textbook_run_learns(peers: ModuleType) -> None:
    losses = textbook_losses(peers)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] * (1 - 1e-3), "a loss that hardly moves would hide a wrong gradient"


@pytest.mark.mpi
def test_serial_program(peers: ModuleType, handwritten: ModuleType) -> None:
    from mpi4py import MPI

    report = handwritten.run(MPI.COMM_SELF, "mlp_serial", peers.MlpSizes(**SIZES), STEPS, 0)
    np.testing.assert_allclose(report.losses, textbook_losses(peers), rtol=1e-5)


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["mlp_dp2", "mlp_tp2", "mlp_pp2", "mlp_zero2"])
def test_program_of_two_ranks(peers: ModuleType, handwritten: ModuleType, name: str) -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.size != 2:
        pytest.skip("needs exactly 2 ranks")
    report = handwritten.run(MPI.COMM_WORLD, name, peers.MlpSizes(**SIZES), STEPS, 0)
    report = MPI.COMM_WORLD.bcast(report)
    np.testing.assert_allclose(report.losses, textbook_losses(peers), rtol=1e-5)
    assert len(report.seconds) == STEPS


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mlp_dp2", {"batch": 13}, "mlp_dp2 needs an even batch but got 13"),
        ("mlp_zero2", {"batch": 13}, "mlp_zero2 needs an even batch but got 13"),
        ("mlp_tp2", {"layers": 3}, "mlp_tp2 needs an even number of layers but got 3"),
        ("mlp_pp2", {"batch": 13}, "batch 13 and 3 micro-batches"),
        ("mlp_serial", {}, "mlp_serial needs 1 MPI ranks but has 2"),
    ],
)
def test_sizes_that_do_not_divide(
    peers: ModuleType, handwritten: ModuleType, name: str, change: dict[str, int], message: str
) -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.size != 2:
        pytest.skip("needs exactly 2 ranks")
    with pytest.raises(ValueError, match=message):
        handwritten.run(MPI.COMM_WORLD, name, peers.MlpSizes(**(SIZES | change)), 1, 0)


@pytest.mark.mpi
def test_pipeline_order(handwritten: ModuleType) -> None:
    """The 1F1B grids of the PipeDream-Flush figure, also with fewer micro-batches than stages."""

    def order(stage: int, stages: int, count: int) -> str:
        steps = handwritten.one_forward_one_backward(stage, stages, count)
        return " ".join(f"{kind}{number}" for kind, number in steps)

    assert order(0, 2, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert order(1, 2, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert order(0, 4, 2) == "F0 F1 B0 B1"


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp_serial", "mlp_dp2", "mlp_tp2", "mlp_pp2", "mlp_zero2"])
def test_torch_program(peers: ModuleType, name: str) -> None:
    width = 28 if name == "mlp_tp2" else SIZES["width"]  # DTensor's addmm refuses an uneven split
    words = [
        sys.executable,
        "-m",
        "benchmarks.support.peers.torch_peers",
        name,
        *SIZE_WORDS,
    ]
    words += ["--width", str(width), "--steps", str(STEPS), "--warmup", "0"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    np.testing.assert_allclose(report["losses"], textbook_losses(peers, width), rtol=1e-5)


def test_the_driver_refuses_programs_that_compute_something_else(driver: ModuleType) -> None:
    case = next(case for case in driver.CASES if case.name == "mlp_dp2")
    ours, good = driver.Measured(0.1, [3.0, 2.0]), driver.Measured(0.1, [3.0001, 2.0])
    driver.check_losses(case, {"ours": ours, "torch": good})
    wrong = driver.Measured(0.05, [3.0, 2.01])
    with pytest.raises(SystemExit, match=r"mlp_dp2 step 1: loss is 2 by ours but 2\.01 by torch"):
        driver.check_losses(case, {"ours": ours, "torch": wrong})
    with pytest.raises(SystemExit, match="nan"):
        driver.check_losses(case, {"ours": ours, "torch": driver.Measured(0.1, [3.0, float("nan")])})


def test_the_driver_reports_how_far_losses_differ(driver: ModuleType) -> None:
    exact, half = (next(c for c in driver.CASES if c.name == name) for name in ("gpt_serial", "gpt_bf16"))
    ours, other = driver.Measured(0.1, [2.0, 1.0]), driver.Measured(0.1, [2.0, 1.003])
    assert driver.check_losses(half, {"ours": ours, "torch": other}) == pytest.approx(3e-3)
    with pytest.raises(SystemExit, match="gpt_serial step 1"):
        driver.check_losses(exact, {"ours": ours, "torch": other})
    with pytest.raises(SystemExit, match="gpt_bf16 step 0"):
        driver.check_losses(half, {"ours": ours, "torch": driver.Measured(0.1, [2.01, 1.0])})


def llama_program() -> tuple[ModuleType, Any]:
    """The module of the Llama, and small sizes: an odd number of positions, two queries a key."""
    import benchmarks.support.peers.llama as llama

    return llama, llama.LlamaSizes(
        layers=2, hidden=24, inner=20, heads=4, key_heads=2, sequence=9, batch=3, vocabulary=31
    )


@pytest.mark.parametrize(("precision", "bound"), [(None, 0.0), ("bf16", 2.0**-8)])
def test_the_llama_of_the_benchmark_learns(peers: ModuleType, precision: str | None, bound: float) -> None:
    import benchmarks.support.peers.distgraph_peers as ours

    llama, sizes = llama_program()
    runs = []
    for of_run in (None, precision):
        engine = ours.llama_engine(sizes, of_run)
        runs.append([engine.run(llama.llama_batch(sizes))["loss"] for _ in range(STEPS)])
        engine.close()
    assert runs[0] == sorted(runs[0], reverse=True)
    assert runs[0][-1] < runs[0][0] * (1 - 1e-3)
    np.testing.assert_allclose(runs[1], runs[0], rtol=bound)


@pytest.mark.torch
@pytest.mark.parametrize(("precision", "bound"), [(None, 1e-5), ("bf16", 2.0**-8)])
def test_the_llama_of_pytorch_computes_the_same(
    peers: ModuleType, precision: str | None, bound: float
) -> None:
    import benchmarks.support.peers.distgraph_peers as ours

    llama, sizes = llama_program()
    engine = ours.llama_engine(sizes, precision)
    losses = [engine.run(llama.llama_batch(sizes))["loss"] for _ in range(STEPS)]
    engine.close()
    step = llama.torch_step(sizes, bf16=precision == "bf16")
    np.testing.assert_allclose([step() for _ in range(STEPS)], losses, rtol=bound)


def test_a_ratio_is_the_median_of_the_pairs(driver: ModuleType) -> None:
    case = next(case for case in driver.CASES if case.name == "mlp_pp2")
    # the machine slows down fourfold from round to round: medians of each side apart would say 2 / 3
    seconds = {"ours": [1.0, 4.0, 32.0], "handwritten": [2.0, 8.0, 16.0], "torch": [1.0, 8.0, 128.0]}
    assert driver.ratios(case, seconds) == {"mlp_pp2_over_handwritten": 0.5, "mlp_pp2_over_torch": 0.5}
    del seconds["ours"]
    assert driver.ratios(case, seconds) == {"handwritten_mlp_pp2_over_torch": 1.0}


def test_programs_that_share_a_start_have_one_number_of_ranks(driver: ModuleType) -> None:
    names = [[case.name for case in group] for group in driver.starts(driver.CASES, True)]
    serial = ["gpt_serial", "gpt_bf16", "llama_serial", "llama_bf16", "gpt_generate", "conv_serial"]
    serial += ["narrow_serial"]
    assert names == [serial, ["mlp_dp2", "mlp_tp2", "mlp_pp2", "mlp_zero2"]]
    assert [len(group) for group in driver.starts(driver.CASES, False)] == [1] * 11


@pytest.mark.parametrize("reports", [0, 1, 3])
def test_a_program_that_fails_is_quoted(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch, reports: int
) -> None:
    """Also where it ends with exit code 0 but has too few or too many reports."""
    code = f"""import sys
for _ in range({reports}): print('{{"seconds": [1.0], "losses": [1.0]}}')
print("the disk is full", file=sys.stderr)
sys.exit({0 if reports else 1})"""
    monkeypatch.setattr(driver, "command", lambda *_: [sys.executable, "-c", code])
    with pytest.raises(SystemExit, match=rf"(?s)exit code . and {reports} of 2 reports.*the disk is full"):
        driver.measure("torch", driver.CASES[1:3], 1, 0)
