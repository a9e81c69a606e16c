"""Ranks with NumPy, on a stand-in for CuPy and on a kind of device of their own in one job train as one rank
does. The stand-ins refuse arrays of the wrong memory; that for CuPy tells races between streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.devices import fake_cupy, fake_device
from support.devices.mixed_devices import Meshes, engine, on, samples, trained
from support.devices.own_memory import OwnMemory, namespace

import distgraph as dg
from distgraph import nn, optim
from distgraph.errors import NonFiniteError, RuntimeFault
from distgraph.models import GPT, GPTConfig, stages
from distgraph.plan.device_types import DEVICE_TYPES
from distgraph.plan.strategy import DEVICES
from distgraph.runtime.execute import device as devices
from distgraph.runtime.execute.device import register_device
from distgraph.runtime.transport.cuda_copies import CudaCopies

GIVEN: dict[str, Any] = {"clip_norm": 0.05, "weight_decay": 0.1}
CPU, GPU = "cpu", "gpu"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_device.Hardware:
    return fake_cupy.install(monkeypatch, devices=1)


def same(meshes: Meshes, tolerance: float = 1e-12, **given: Any) -> None:
    """A job trains as one rank with the same micro-batches does."""
    serial = {name: value for name, value in given.items() if name in ("optimizer", "micro_batches")}
    wanted, found = trained([None] * len(meshes), **serial), trained(meshes, **given)
    np.testing.assert_allclose(found[0], wanted[0], rtol=tolerance)
    for name, array in wanted[1].items():
        assert type(found[1][name]) is np.ndarray
        np.testing.assert_allclose(found[1][name], array, rtol=1e3 * tolerance, atol=1e-10, err_msg=name)


PIPELINES = {
    "cpu-gpu-cpu": on(CPU, GPU, CPU),
    "gpu-cpu": on(GPU, CPU),
    "gpu2-cpu2": on((GPU, GPU), (CPU, CPU)),
    "both-gpu": on((CPU, GPU), GPU),
}


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("meshes", PIPELINES.values(), ids=PIPELINES)
def test_stages_on_different_devices(meshes: Meshes, micro: int, gpu: fake_device.Hardware) -> None:
    same(meshes, micro_batches=micro)
    assert gpu.names  # something was computed there


@pytest.mark.parametrize("executor", ["static", "actors"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager-1f1b", "zb-h1"])
def test_every_schedule(schedule: str, executor: str, gpu: fake_device.Hardware) -> None:
    same(on(CPU, GPU, CPU), micro_batches=4, schedule=schedule, executor=executor)


@pytest.mark.parametrize("weights", [None, (1, 3), (3, 1)])
@pytest.mark.parametrize("micro", [1, 2])
def test_data_parallel_over_unequal_devices(
    weights: tuple[int, ...] | None, micro: int, gpu: fake_device.Hardware
) -> None:
    """The gradients are added over a processor and a GPU, which have uneven shares of the batch."""
    same(on((CPU, GPU), weights=weights), micro_batches=micro)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_states_and_parameters_in_parts_on_unequal_devices(zero: int, gpu: fake_device.Hardware) -> None:
    mesh = dg.ProcessMesh.grid(dp=3).weighted(dp=(2, 1, 1)).requiring((GPU, CPU, GPU))
    strategy = {"mesh": mesh, "batch_axis": "dp", "zero": zero}
    same([mesh], 1e-9, optimizer=optim.AdamW(lr=0.01, eps=1e-3, **GIVEN), **strategy)


def test_tensor_parallel_over_unequal_devices(gpu: fake_device.Hardware) -> None:
    same([dg.ProcessMesh.grid(tp=2).requiring((GPU, CPU)), dg.ProcessMesh.grid(tp=2)])


@pytest.mark.parametrize("meshes", [on(CPU, GPU, CPU), on((CPU, GPU), weights=(1, 3))], ids=["pp", "dp"])
def test_the_norm_of_gradients_is_reduced_over_all_devices(meshes: Meshes, gpu: fake_device.Hardware) -> None:
    same(meshes, 1e-9, optimizer=optim.AdamW(lr=0.01, eps=1e-3, **GIVEN), micro_batches=2)


@pytest.mark.parametrize("devices_of_machine", [2, 3])
def test_ranks_with_gpus_use_nccl_among_themselves(
    devices_of_machine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three ranks with GPUs, two share one where the machine has two."""
    fake_cupy.install(monkeypatch, devices=devices_of_machine)
    launched: list[str] = []
    original = devices.NcclTransport._launch

    def launch(self: Any, what: str, *given: Any) -> Any:
        launched.append(what)
        return original(self, what, *given)

    monkeypatch.setattr(devices.NcclTransport, "_launch", launch)
    same(on(CPU, (GPU, GPU), (GPU, CPU)), micro_batches=4)
    assert launched


@pytest.mark.parametrize("meshes", [on(CPU, GPU, CPU), on((CPU, GPU), weights=(1, 3))], ids=["pp", "dp"])
def test_checked_runs(meshes: Meshes, gpu: fake_device.Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value, buffer and message is compared when it is read."""
    monkeypatch.setenv("DISTGRAPH_CHECK", "1")
    same(meshes, micro_batches=4)


def test_dropout_draws_the_same_numbers(gpu: fake_device.Hardware) -> None:
    meshes = on(CPU, GPU, CPU)
    wanted, found = trained([None] * 3, dropout=0.3), trained(meshes, dropout=0.3)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)


def test_evaluate_predict_and_recording(gpu: fake_device.Hardware) -> None:
    x, y = samples(20)
    serial, mixed = engine([None] * 3), engine(on(CPU, GPU, CPU), micro_batches=2)
    for each in (serial, mixed):
        each.run((x, y))
    np.testing.assert_allclose(mixed.predict(x, batch_size=7), serial.predict(x, batch_size=7), rtol=1e-12)
    assert mixed.evaluate((x, y))["loss"] == pytest.approx(serial.evaluate((x, y))["loss"], rel=1e-12)
    mixed.start_recording()
    mixed.run((x, y))
    (step,) = mixed.stop_recording().steps
    assert sorted(step.ranks) == [0, 1, 2]
    assert all(rank.runs for rank in step.ranks.values())
    mixed.close()


def decoder(meshes: Meshes, **strategy: Any) -> tuple[dg.Engine, list[float]]:
    """A small GPT, one block on each mesh, after three steps, and their losses."""
    sizes: dict[str, Any] = {"hidden": 16, "layers": 2, "heads": 4, "vocabulary": 40, "sequence": 12}
    model = GPT(GPTConfig(**sizes, dtype="f64"))
    stages(model, meshes)
    made = dg.Engine(
        model, nn.CrossEntropy(), optim.Adam(lr=0.03, eps=1e-3), strategy=dg.Strategy(**strategy)
    )
    ids = np.random.default_rng(0).integers(0, 40, (8, 13)).astype("i4")
    return made, [made.run((ids[:, :-1], ids[:, 1:]))["loss"] for _ in range(3)]


def test_a_decoder_trains_and_generates(gpu: fake_device.Hardware) -> None:
    """With a cache of keys and values on each kind of device."""
    meshes = [
        dg.ProcessMesh.grid(tp=1).requiring(CPU),
        dg.ProcessMesh.grid(1, tp=2).requiring((GPU, CPU)),
    ]
    (serial, wanted), (mixed, losses) = decoder([None] * 2), decoder(meshes, micro_batches=2)
    np.testing.assert_allclose(losses, wanted, rtol=1e-9)
    prompts = [np.arange(4, dtype="i4"), np.arange(5, 8, dtype="i4")]
    generated = [engine.generate(prompts, 4) for engine in (serial, mixed)]
    for row, expected in zip(generated[1], generated[0], strict=True):
        np.testing.assert_array_equal(row, expected)
    mixed.close()


def test_checkpoints_cross_kinds_of_devices(gpu: fake_device.Hardware, tmp_path: Path) -> None:
    """Written by a mixed job, loaded by processors, by one rank and by another mixture; and back."""
    options: dict[str, Any] = {"optimizer": optim.Adam(lr=0.01, eps=1e-3)}
    first = engine(on(CPU, GPU, CPU), **options)
    first.fit(samples(), batch_size=16, progress=False)
    first.save(tmp_path / "a")
    wanted = first.predict(samples()[0])
    first.fit(samples(), batch_size=16, progress=False)
    for meshes in (on(CPU, CPU, CPU), [None] * 3, on((GPU, CPU), GPU, CPU), on(CPU, GPU, CPU)):
        other = engine(meshes, **options)
        other.load(tmp_path / "a")
        np.testing.assert_allclose(other.predict(samples()[0]), wanted, rtol=1e-12)
        other.fit(samples(), batch_size=16, progress=False)
        np.testing.assert_allclose(other.history.losses[-3:], first.history.losses[-3:], rtol=1e-9)
        other.load(tmp_path / "a")  # over blocks that are in use
        np.testing.assert_allclose(other.predict(samples()[0]), wanted, rtol=1e-12)
        other.close()
    first.close()


def test_blocks_move_to_the_device_that_a_later_program_needs(gpu: fake_device.Hardware) -> None:
    """A rank whose first program says nothing of devices starts on the host."""
    x, y = samples(16)
    mixed = engine(on(CPU, GPU))
    mixed.prepare((x, y))
    session = mixed._session
    (compiled,) = session.programs.values()
    object.__setattr__(compiled.build, "device_types", {})
    before = mixed.run((x, y))["loss"]
    assert session.devices == (CPU, CPU)
    object.__setattr__(compiled.build, "device_types", {1: GPU})
    session._placed = 0
    after = mixed.run((x, y))["loss"]
    assert session.devices == (CPU, GPU)
    serial = engine([None] * 2)
    np.testing.assert_allclose([before, after], [serial.run((x, y))["loss"] for _ in range(2)], rtol=1e-12)
    mixed.close()


# ---------------------------------------------------------------------- what is noticed


def test_equal_copies_are_verified_between_kinds(gpu: fake_device.Hardware) -> None:
    """Copies on different devices may differ by rounding, not by more; of one kind in no bit."""
    mixed = engine(on((CPU, GPU, GPU)), verify_replicas=1)
    batch = tuple(part[:48] for part in samples())
    for _ in range(3):
        mixed.run(batch)
    block = mixed.memory.block("layers.0.weight", 0).copy()
    block[0, 0] *= 1.01
    mixed.memory.overwrite("layers.0.weight", 0, block)
    with pytest.raises(
        RuntimeFault, match=r"layers.0.weight differ between rank 0 .cpu. and rank 1 .gpu. by"
    ):
        mixed.run(batch)
    mixed.close()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("meshes", [on(CPU, GPU, CPU), on((CPU, GPU))], ids=["pp", "dp"])
def test_numbers_that_are_not_finite_stop_all_kinds(meshes: Meshes, gpu: fake_device.Hardware) -> None:
    mixed = engine(meshes)
    x, y = samples(16)
    mixed.run((x, y))
    before = mixed.parameters()
    x[-1, 0] = np.inf
    with np.errstate(all="ignore"), pytest.raises(NonFiniteError, match=r"gradient of layers\.0\.weight"):
        mixed.run((x, y))
    for name, array in mixed.parameters().items():
        np.testing.assert_array_equal(array, before[name])
    mixed.close()


def test_a_copy_to_the_host_that_is_not_waited_for_is_noticed(
    gpu: fake_device.Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in tells that the device wrote to memory again that a copy was reading."""

    def read(self: CudaCopies, block: Any, host: np.ndarray) -> Any:
        with self._cupy.cuda.Stream():  # a stream of its own, without events
            block.get(out=host, blocking=False)
        return lambda: True

    monkeypatch.setattr(CudaCopies, "read", read)
    with pytest.raises(RuntimeFault, match="race: stream"):
        trained(on(CPU, GPU, CPU), micro_batches=4)


# ---------------------------------------------------------------------- a kind of device of a program's own


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[OwnMemory]]:
    """Declares the kind "npu", which has memory of its own and no streams; yields the devices in use."""
    monkeypatch.setattr(devices, "_DEVICE_TYPES", dict(devices._DEVICE_TYPES))
    names, types, in_use, xp = list(DEVICES), list(DEVICE_TYPES), [], namespace()

    def take(control: Any, ranks: Any) -> OwnMemory:
        in_use.append(OwnMemory(xp, control, ranks))
        return in_use[-1]

    register_device("npu", take, lambda: xp)
    yield in_use
    DEVICES[:], DEVICE_TYPES[:] = names, types


@pytest.mark.parametrize(
    "meshes",
    [on("npu"), on("npu", CPU, GPU), on((GPU, "npu", CPU), weights=(2, 1, 1)), on(("npu", "npu"), GPU)],
    ids=["alone", "pp", "dp", "both"],
)
def test_a_kind_of_device_of_its_own(meshes: Meshes, own: list[OwnMemory], gpu: fake_device.Hardware) -> None:
    same(meshes, 1e-9, optimizer=optim.AdamW(lr=0.01, eps=1e-3, **GIVEN), micro_batches=2)
    ranks = tuple(r for mesh in meshes for r in mesh.members if mesh.device_type_of(r) == "npu")  # type: ignore[union-attr]
    assert {each.ranks for each in own} == {ranks}
    if len(meshes) > 1:
        assert all(each.copies.counts["read"] and each.copies.counts["write"] for each in own)
