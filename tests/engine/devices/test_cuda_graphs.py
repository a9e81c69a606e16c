"""Training with `cuda_graphs=True` on a stand-in for CuPy: the bits of a run without graphs, in every layout;
what a graph repeats, and what it must not. What the hardware does is in `tests/gpu`."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.devices import fake_cupy, fake_device
from support.devices.mixed_devices import on, trained
from support.programs.equivalence import GPT_LAYOUTS, Case, layouts, train
from support.programs.training import Net, data

import distgraph as dg
from distgraph import nn, optim
from distgraph.errors import DistGraphError, ResourceError, ShardingError
from distgraph.ir.op_registry import REGISTRY
from distgraph.runtime.execute.cuda_graphs import CudaGraphs
from distgraph.runtime.program import captured_parts

STEPS = 4


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_device.Hardware:
    return fake_cupy.install(monkeypatch, devices=1)


def samples(count: int = 50) -> tuple[np.ndarray, np.ndarray]:
    x, y = data(count)
    return x.astype("f4"), y


def engine(
    layout: str, graphs: bool, micro: int = 1, optimizer: Any = None, dropout: float = 0.3, **strategy: Any
) -> dg.Engine:
    given = dg.Strategy(micro_batches=micro, device="gpu", cuda_graphs=graphs, **strategy)
    return dg.Engine(
        Net(layout, dropout=dropout, dtype="f32"),
        nn.CrossEntropy(),
        optimizer or optim.Adam(lr=0.01),
        strategy=given,
        seed=5,
    )


def outcome(layout: str, graphs: bool, **given: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and parameters; 3 epochs of 4 batches, of which the last is short: two programs."""
    made = engine(layout, graphs, **given)
    made.fit(samples(), epochs=3, batch_size=16, progress=False)
    found = list(made.history.losses), made.parameters()
    made.close()
    return found


def assert_same(found: Any, wanted: Any) -> None:
    assert found[0] == wanted[0]
    for name, array in wanted[1].items():
        np.testing.assert_array_equal(found[1][name], array, err_msg=name)


@pytest.mark.parametrize(
    ("layout", "micro", "given"),
    [
        ("serial", 1, {}),
        ("serial", 4, {}),
        ("dp2tp2", 1, {"optimizer": lambda: optim.AdamW(lr=0.01, clip_norm=0.1, weight_decay=0.1)}),
        ("dp2tp2", 2, {"dropout": 0.0}),
        ("dp3", 4, {"optimizer": lambda: optim.SGD(lr=0.1, momentum=0.9)}),
        ("pp2", 4, {}),
        ("pp1_3", 2, {"schedule": "gpipe"}),
        ("dp2pp2", 4, {"executor": "actors"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_same_bits_as_without_graphs(
    layout: str, micro: int, given: dict[str, Any], gpu: fake_device.Hardware
) -> None:
    def run(graphs: bool) -> Any:
        values = {name: value() if callable(value) else value for name, value in given.items()}
        return outcome(layout, graphs, micro=micro, **values)

    wanted = run(False)
    assert not gpu.captures.graphs
    assert_same(run(True), wanted)
    # the program of the batches of 16 runs 9 times: 1 as it is, 1 captured and launched, 7 launched
    assert 8 in {graph.launches for graph in gpu.captures.graphs}
    assert all(len(graph.work) >= 2 for graph in gpu.captures.graphs)


LARGE = [
    Case(model, {x.name: x for x in (*layouts(model), *GPT_LAYOUTS)}[name], micro, dtype="f32", device="gpu")
    for model, name, micro in (
        ("gpt", "zero3", 2), ("gpt", "sequence_tp", 1), ("gpt", "tied_1_3", 4), ("conv", "dp2_tp2", 2),
    )
]  # fmt: skip


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_models_with_attention_and_convolutions(case: Case, gpu: fake_device.Hardware) -> None:
    """Fused kernels are array operations here, so that more is in the graphs than on a GPU."""
    wanted, found = train(case, STEPS), train(replace(case, cuda_graphs=True), STEPS)
    np.testing.assert_array_equal(found.losses, wanted.losses)
    for name, array in wanted.tensors.items():
        np.testing.assert_array_equal(found.tensors[name], array, err_msg=name)
    assert max(graph.launches for graph in gpu.captures.graphs) == STEPS - 1


@pytest.mark.parametrize("zero", [1, 2])
def test_zero(zero: int, gpu: fake_device.Hardware) -> None:
    given = {"mesh": dg.ProcessMesh.grid(dp=3), "batch_axis": "dp", "zero": zero, "micro": 2}
    assert_same(outcome("serial", True, **given), outcome("serial", False, **given))
    assert gpu.captures.launches


def test_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays go by NCCL between the graphs."""
    hardware = fake_cupy.install(monkeypatch, devices=4)
    assert_same(outcome("dp2tp2", True, micro=2), outcome("dp2tp2", False, micro=2))
    assert hardware.captures.launches


def test_ranks_without_a_gpu_run_as_before(gpu: fake_device.Hardware) -> None:
    meshes = on("cpu", "gpu", "cpu")
    given = {"optimizer": optim.SGD(lr=0.1, momentum=0.9), "micro_batches": 4}
    assert_same(trained(meshes, cuda_graphs=True, **given), trained(meshes, **given))
    assert gpu.captures.launches


def test_evaluate_and_predict(gpu: fake_device.Hardware) -> None:
    x, y = samples(24)
    found = {}
    for graphs in (False, True):
        made = engine("dp2tp2", graphs)
        made.fit((x, y), epochs=1, batch_size=8, progress=False)
        before = gpu.captures.launches
        found[graphs] = [made.evaluate((x, y), batch_size=4), made.predict(x, batch_size=3).tolist()]
        assert (gpu.captures.launches > before) is graphs
        made.fit((x, y), epochs=1, batch_size=8, progress=False)
        found[graphs] += [made.evaluate((x, y), batch_size=4), made.history.losses]
        made.close()
    assert found[True] == found[False]


# -- what changes between steps ---------------------------------------------------------------------


def steps_with_changing_numbers(graphs: bool) -> list[float]:
    """A learning rate, a key of dropout and a batch that are others in every step."""
    made = engine("serial", graphs, optimizer=optim.SGD(lr=lambda step: 0.5 / (1 + step), momentum=0.9))
    x, y = samples(48)
    losses = [made.run((x[i : i + 8], y[i : i + 8]))["loss"] for i in range(0, 48, 8)]
    made.close()
    return losses


def test_numbers_and_batches_of_every_step_are_seen(gpu: fake_device.Hardware) -> None:
    assert steps_with_changing_numbers(True) == steps_with_changing_numbers(False)
    assert gpu.captures.launches


def test_a_captured_number_would_be_noticed(
    gpu: fake_device.Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above fails if a graph keeps the learning rate of the step that it was captured in."""
    wanted = steps_with_changing_numbers(False)
    monkeypatch.setattr(captured_parts, "_number_of_step", lambda *_: False)
    found = steps_with_changing_numbers(True)
    assert found[:2] == wanted[:2]  # the first step as it is; in the second, the graphs are new
    assert found != wanted


def test_inputs_at_other_addresses_are_captured_again(gpu: fake_device.Hardware) -> None:
    import cupy

    with cupy.cuda.Stream():
        arrays = [cupy.asarray(np.full(3, float(n))) for n in range(2)]
        present, total = [arrays[0]], cupy.asarray(np.zeros(3))
        part = CudaGraphs(cupy.cuda).part("forward", lambda m: present[:])
        for number in (0, 0, 0, 1, 1):
            present[0] = arrays[number]
            part(lambda m: cupy.add(total, present[0] + 1, out=total), 0)
    assert total.host.tolist() == [1 + 1 + 1 + 2 + 2] * 3
    assert (len(gpu.captures.graphs), gpu.captures.launches) == (2, 4)


# -- what cannot be captured ------------------------------------------------------------------------


def patched(monkeypatch: pytest.MonkeyPatch, before: Callable[[Any, Any], None]) -> None:
    """Let relu do something first."""
    kernel = REGISTRY["relu"].kernel

    def run(xp: Any, x: Any, **given: Any) -> Any:
        before(xp, x)
        return kernel(xp, x, **given)

    monkeypatch.setitem(REGISTRY, "relu", replace(REGISTRY["relu"], kernel=run, ufunc=""))


@pytest.mark.parametrize("micro", [1, 4])
def test_an_op_that_waits_for_the_host_is_run_as_it_is(
    micro: int, gpu: fake_device.Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched(monkeypatch, lambda xp, x: None if xp is np else xp.asnumpy(x))
    wanted = outcome("serial", False, micro=micro)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = outcome("serial", True, micro=micro)
    assert_same(found, wanted)
    messages = {str(each.message) for each in caught if each.category is RuntimeWarning}
    assert len(messages) == 1, messages
    (message,) = messages
    assert message.startswith("task forward.s0, %2 relu training.py:")
    assert "cannot be captured in a CUDA graph (CaptureError: copy to the host" in message
    assert gpu.captures.launches  # of the other parts


def test_the_warning_comes_once(gpu: fake_device.Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, lambda xp, x: None if xp is np else xp.asnumpy(x))
    made = engine("serial", True, micro=2)
    with pytest.warns(RuntimeWarning, match="%2 relu") as caught:
        made.fit(samples(8 * STEPS), epochs=1, batch_size=8, progress=False)
    assert len(caught) == 1
    made.close()


def test_calls_of_cublas_are_left_out(gpu: fake_device.Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy refuses them in a capture; without the rule for products every part with one is refused."""
    monkeypatch.setattr(captured_parts, "_is_fused_attention", lambda *_: True)
    wanted = outcome("serial", False)
    with pytest.warns(RuntimeWarning, match="NotImplementedError: calling cuBLAS API during stream capture"):
        found = outcome("serial", True)
    assert_same(found, wanted)


def test_an_error_of_a_task_ends_the_capture(
    gpu: fake_device.Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(xp: Any, x: Any) -> None:
        if gpu.captures.current is not None:
            raise KeyError("a mistake in a kernel")

    patched(monkeypatch, fail)
    made = engine("serial", True)
    made.run(samples(8))
    with pytest.raises((KeyError, DistGraphError), match="a mistake in a kernel"):
        made.run(samples(8))
    assert gpu.captures.current is None
    monkeypatch.undo()
    made.close()


# -- memory, checks, timelines ----------------------------------------------------------------------


def test_temporary_memory_belongs_to_the_graphs(gpu: fake_device.Hardware) -> None:
    made = engine("serial", True)
    for _ in range(3):
        made.run(samples(8))
    with_arrays = [graph for graph in gpu.captures.graphs if graph.pools]
    assert with_arrays
    assert len({pool for graph in with_arrays for pool in graph.pools}) == 1
    assert with_arrays[0].pools.copy().pop()() is not None
    made.close()
    del made
    gc.collect()
    assert with_arrays[0].pools.copy().pop()() is None


def test_memory_of_the_default_pool_would_be_noticed(
    gpu: fake_device.Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    monkeypatch.setattr(cupy.cuda, "using_allocator", lambda malloc: nullcontext())
    made = engine("serial", True)
    made.run(samples(8))
    with pytest.raises((AssertionError, DistGraphError), match="it is of the default pool"):
        made.run(samples(8))
    made.close()


def test_checked_runs_have_no_graphs(gpu: fake_device.Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = outcome("pp2", False, micro=2)
    monkeypatch.setenv("DISTGRAPH_CHECK", "1")
    assert_same(outcome("pp2", True, micro=2), wanted)
    assert not gpu.captures.graphs


def test_recorded_steps_launch_graphs(gpu: fake_device.Hardware) -> None:
    losses = {}
    for graphs in (False, True):
        made = engine("pp2", graphs, micro=2)
        made.start_recording()
        losses[graphs] = [made.run(samples(8))["loss"] for _ in range(STEPS)]
        timeline = made.stop_recording()
        assert len(timeline.steps) == STEPS
        assert {run.task for run in timeline.steps[-1].ranks[0].runs} >= {"forward.s0", "backward.s0"}
        made.close()
    assert losses[True] == losses[False]
    assert gpu.captures.launches


def test_what_is_captured_is_logged(gpu: fake_device.Hardware, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "distgraph.cuda_graphs"):
        made = engine("serial", True)
        made.run(samples(8))
        made.close()
    text = "\n".join(caplog.messages)
    assert "rank 0, task forward.s0: " in text
    assert "ops in 2 CUDA graphs" in text
    assert "2 (a matrix product)" in text
    assert "rank 0, task optimize.s0: 0 ops in 0 CUDA graphs; not in one: 4 (a number of the step)" in text


# -- the option -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_the_option_is_true_or_false(value: Any) -> None:
    with pytest.raises(ShardingError, match=r"cuda_graphs of Strategy is .* but must be True or False"):
        dg.Strategy(cuda_graphs=value)


def test_a_job_without_a_gpu_is_refused() -> None:
    made = dg.Engine(Net("pp2"), nn.CrossEntropy(), optim.SGD(lr=0.1), strategy=dg.Strategy(cuda_graphs=True))
    with pytest.raises(
        ResourceError, match=r"cuda_graphs=True\) but no rank has a GPU, ranks run on cpu; use"
    ):
        made.run(data(8))
