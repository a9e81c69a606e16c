"""Training with device="gpu" on a stand-in for CuPy: the same losses as on the processor, without races
between streams and with one wait of the host a step. What the hardware does is in `tests/gpu`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.devices import fake_cupy, fake_device
from support.programs.equivalence import GPT_LAYOUTS, Case, layouts, train
from support.programs.training import INPUTS, Net, data

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.errors import ResourceError, RuntimeFault, ShardingError
from distgraph.ir.dtypes import to_numpy
from distgraph.runtime.execute import device as devices

F32 = 1e-5  # sums of tens of terms, 8 steps of Adam: some hundred times the 1.2e-7 of float32


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_device.Hardware:
    return fake_cupy.install(monkeypatch, devices=1)


def engine(layout: str, device: str, micro: int = 1, executor: str = "static", **given: Any) -> dg.Engine:
    strategy = dg.Strategy(micro_batches=micro, device=device, executor=executor)
    optimizer = given.pop("optimizer", optim.Adam(lr=0.01))
    return dg.Engine(
        Net(layout, dropout=0.3, dtype="f32"),
        nn.CrossEntropy(),
        optimizer,
        strategy=strategy,
        seed=5,
        **given,
    )


def samples(count: int = 50) -> tuple[np.ndarray, np.ndarray]:
    x, y = data(count)
    return x.astype("f4"), y


def losses(layout: str, device: str, micro: int, **given: Any) -> list[float]:
    trained = engine(layout, device, micro, **given)
    trained.fit(samples(), epochs=2, batch_size=16, progress=False)
    trained.close()
    return trained.history.losses


def test_actors_give_the_bits_of_the_recorded_order(gpu: fake_device.Hardware) -> None:
    """Arrivals are tested while the work that they need is still on its way to the GPU."""
    assert losses("dp2pp2", "gpu", 4, executor="actors") == losses("dp2pp2", "gpu", 4)


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("layout", ["serial", "dp2tp2", "dp3", "pp1_3", "dp2pp2"])
def test_same_losses_as_on_the_processor(layout: str, micro: int, gpu: fake_device.Hardware) -> None:
    """Ranks are threads that share the one GPU; the short batch of 2 included."""
    found = losses(layout, "gpu", micro)
    assert gpu.waits > 0
    np.testing.assert_allclose(found, losses(layout, "cpu", micro), rtol=F32)


def test_numbers_that_are_broadcast(gpu: fake_device.Hardware) -> None:
    """Constants and inputs without dims are numbers of the host; as arrays they have to be brought over."""

    def model(x: Any, shift: Any = 2.0) -> Any:
        scale = ops.broadcast_to(np.float32(0.5), x.shape)
        return (ops.transpose(x * scale) + ops.broadcast_to(np.float32(shift), x.shape[::-1])).sum(0)

    x = samples(6)[0]
    found = dg.Engine(model, strategy=dg.Strategy(device="gpu")).predict(x)
    np.testing.assert_allclose(found, (x * 0.5 + 2).sum(1), rtol=F32)

    trained = {}
    for device in ("cpu", "gpu"):
        engine = dg.Engine(
            nn.Linear(INPUTS, 3),
            nn.MeanSquaredError(),
            optim.Adafactor(lr=0.01),
            strategy=dg.Strategy(device=device),
        )
        target = np.ones((6, 3), "f4")
        trained[device] = [engine.run((x, target))["loss"] for _ in range(3)]
    np.testing.assert_allclose(trained["gpu"], trained["cpu"], rtol=F32)


LARGE = [
    Case(model, {x.name: x for x in (*layouts(model), *GPT_LAYOUTS)}[name], micro, dtype="f32")
    for model, name, micro in (
        ("gpt", "dp2_tp2", 1), ("gpt", "zero3", 2), ("gpt", "sequence_tp", 1), ("gpt", "tied_1_3", 4),
        ("gpt", "vocab", 1), ("conv", "dp2_tp2", 2), ("conv", "stages_3_1", 4),
    )
]  # fmt: skip


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_models_with_attention_and_convolutions(case: Case, gpu: fake_device.Hardware) -> None:
    """The code that kernels have for CuPy, and every collective; dropout on."""
    steps = 4
    wanted, found = train(case, steps), train(replace(case, device="gpu"), steps)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=F32)


@pytest.mark.parametrize("layout", ["dp2tp2", "pp1_3"])
def test_a_gpu_for_each_rank(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then arrays go by NCCL: its groups and pairs are prepared before the first step."""
    fake_cupy.install(monkeypatch, devices=4)
    np.testing.assert_allclose(losses(layout, "gpu", 2), losses(layout, "cpu", 2), rtol=F32)


def test_ranks_that_share_some_of_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on three GPUs: two of them exchange through the host."""
    fake_cupy.install(monkeypatch, devices=3)
    np.testing.assert_allclose(losses("dp2tp2", "gpu", 1), losses("dp2tp2", "cpu", 1), rtol=F32)


def test_clipping_keeps_its_norm_on_the_device(gpu: fake_device.Hardware) -> None:
    clipped = {"optimizer": optim.AdamW(lr=0.01, clip_norm=0.1, weight_decay=0.1)}
    np.testing.assert_allclose(
        losses("dp2tp2", "gpu", 2, **clipped), losses("dp2tp2", "cpu", 2, **clipped), rtol=F32
    )


@pytest.mark.parametrize(("layout", "ranks"), [("serial", 1), ("dp2tp2", 4)])
def test_the_host_waits_once_a_step(layout: str, ranks: int, gpu: fake_device.Hardware) -> None:
    x, y = samples(16)
    trained = engine(layout, "gpu", 2, optimizer=optim.AdamW(lr=0.01, clip_norm=0.1))
    trained.run((x, y))
    before = gpu.waits
    for _ in range(3):
        trained.run((x, y))
    assert gpu.waits - before == 3 * ranks
    trained.close()


def test_predict_evaluate_and_checkpoints_cross_to_the_host(gpu: fake_device.Hardware, tmp_path: Any) -> None:
    x, y = samples(23)
    trained = engine("dp2tp2", "gpu")
    trained.fit((x, y), batch_size=16, progress=False)
    trained.save(tmp_path / "ckpt")
    expected = trained.predict(x, batch_size=7), trained.evaluate((x, y))
    for device in ("cpu", "gpu"):
        other = engine("dp3", device)
        other.load(tmp_path / "ckpt")
        output = other.predict(x)
        assert type(output) is np.ndarray
        np.testing.assert_allclose(output, expected[0], rtol=F32, atol=1e-6)
        assert other.evaluate((x, y)) == pytest.approx(expected[1], rel=F32)
        other.fit((x, y), batch_size=16, progress=False)
        other.load(tmp_path / "ckpt")  # over blocks that are at work already
        np.testing.assert_allclose(other.predict(x), expected[0], rtol=F32, atol=1e-6)
        other.close()
    trained.close()


def test_parameters_are_made_on_the_device_with_the_same_numbers(gpu: fake_device.Hardware) -> None:
    made = {}
    for device in ("cpu", "gpu"):
        trained = engine("dp2tp3", device)
        trained.prepare(samples(16))
        trained._session.ranks()
        made[device] = [trained.memory.block("up.weight", rank) for rank in range(6)]
        trained.close()
    for host, device in zip(made["cpu"], made["gpu"], strict=True):
        assert host.shape == device.shape
        np.testing.assert_allclose(device, host, rtol=1e-6)


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    trained = engine("dp2tp2", "gpu")
    trained.prepare(samples(16))  # planning needs none
    with pytest.raises(ResourceError, match=r'device "gpu" needs CuPy .*pip install distgraph\[cuda12\]'):
        trained.run(samples(16))


def test_without_a_gpu_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch, devices=0)
    with pytest.raises(ResourceError, match="needs a CUDA device but none is visible"):
        engine("serial", "gpu").run(samples(16))


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ShardingError, match="device 'tpu' of Strategy does not exist; it is one of cpu, gpu"):
        dg.Strategy(device="tpu")


def test_bfloat16_needs_a_new_cupy(gpu: fake_device.Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["cupy"], "__version__", "13.6.0", raising=False)
    model = dg.Engine(nn.Linear(INPUTS, 3, dtype="bf16"), strategy=dg.Strategy(device="gpu"))
    x = samples(4)[0].astype(to_numpy("bf16"))
    with pytest.raises(RuntimeFault, match=r"cupy 13.6.0 has no bfloat16 .*install cupy 14"):
        model.predict(x)


def test_a_missing_order_between_streams_is_noticed(
    gpu: fake_device.Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in tells races: without the events between ranks that share a GPU a run fails."""
    monkeypatch.setattr(devices.Gpu, "after", lambda self, mark: None)
    with pytest.raises(RuntimeFault, match="race: stream"):
        losses("dp2tp2", "gpu", 1)
