"""Checkpoints: any mesh reads what any mesh wrote, training goes on bit for bit, and a failed save harms
nothing."""

from __future__ import annotations

import json
import os
import resource
import signal
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from support.programs.training import Net, data, engine, whole

import distgraph as dg
from distgraph import nn, optim
from distgraph.engine.callbacks import ModelCheckpoint
from distgraph.errors import RuntimeFault
from distgraph.ir.dtypes import to_numpy
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.runtime.execute.checkpoint import Checkpoint, SavedTensor, files, owned, write_checkpoint
from distgraph.runtime.execute.checkpoint.shards import BlockFile, RefusedError, StoredBlock, write_blocks
from distgraph.runtime.execute.process_group import InProcessWorld

P = dg.ProcessMesh.grid
SPECS = [["x", "y"], ["y", None], [("x", "y"), None], [None, ("y", "x")], [None, None], [None, "x"]]


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir())}


@given(
    st.sampled_from(SPECS),
    st.sampled_from(SPECS),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (3, 2), (7, 5), (2, 9), (0, 4)]),
    st.sampled_from(["f32", "bf16", "i8", "bool", "u64"]),
)
def test_a_checkpoint_of_any_layout_is_read_under_any_layout(
    tmp_path_factory: pytest.TempPathFactory,
    written: Any,
    read: Any,
    x: int,
    y: int,
    shape: tuple[int, int],
    dtype: str,
) -> None:
    directory = tmp_path_factory.mktemp("ckpt")
    mesh, other = P(x=x, y=y), P(y=y + 1, x=x)
    full = (np.arange(np.prod(shape)).reshape(shape) % 7).astype(to_numpy(dtype))
    placed = {"w": SavedTensor("param", shape, dtype, DistAttr(mesh, ShardSpec.of(written)))}
    spec = ShardSpec.of(written)
    world = InProcessWorld(mesh.size)
    write_checkpoint(
        directory, world, placed, lambda name, rank: full[spec.slices(shape, mesh, rank)], {"step": 1}
    )
    world.close()
    checkpoint = Checkpoint.open(directory)
    for rank in other.members:
        where = ShardSpec.of(read).slices(shape, other, rank)
        block = checkpoint.read("w", where)
        assert block.dtype == full.dtype
        np.testing.assert_array_equal(block, full[where])


@pytest.mark.parametrize("mesh", [P(x=2, y=3), P(y=4, x=2)])
@pytest.mark.parametrize("spec", SPECS)
def test_every_element_is_written_once(mesh: dg.ProcessMesh, spec: Any) -> None:
    shape = (5, 7)
    tensors = {
        f"w{i}": SavedTensor("param", shape, "f32", DistAttr(mesh, ShardSpec.of(spec))) for i in range(8)
    }
    count = {name: np.zeros(shape, int) for name in tensors}
    shares = []
    for rank in mesh.members:
        mine = owned(tensors, rank)
        shares.append(len(mine))
        for name, where in mine.items():
            count[name][where] += 1
    assert all((times == 1).all() for times in count.values())
    if all(axes is None for axes in spec):
        assert max(shares) <= -(-8 // mesh.size)  # replicas take turns


def test_four_ranks_write_and_others_read(tmp_path: Path) -> None:
    x, y = data(24)
    four = engine("dp2tp2", dropout=0.2)
    four.fit((x, y), epochs=2, batch_size=8, progress=False)
    four.save(tmp_path)
    four.fit((x, y), epochs=1, batch_size=8, progress=False)
    for layout in ("serial", "tp2", "dp3", "pp1_3", "dp2tp3"):
        other = engine(layout, dropout=0.2, seed=99)
        other.load(tmp_path)
        assert (other.step, other.epoch, other.seed) == (6, 2, 5)
        other.fit((x, y), epochs=1, batch_size=8, progress=False)
        np.testing.assert_allclose(other.history.losses, four.history.losses, rtol=1e-10)
        other.close()


def test_safetensors_reads_the_files(tmp_path: Path) -> None:
    trained = engine("dp2tp2")
    trained.fit(data(16), batch_size=8, progress=False)
    trained.save(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    weight = np.full((6, 10), np.nan)
    for shard in index["tensors"]["up.weight"]["shards"]:
        (a, b), (m, n) = shard["start"], shard["shape"]
        weight[a : a + m, b : b + n] = load_file(tmp_path / shard["file"])["up.weight"]
    np.testing.assert_array_equal(weight, whole(trained, "up.weight"))


@pytest.mark.parametrize("wrong", [None, 7, (2 << 20) + 1, (9 << 18) - 1])
def test_every_page_is_summed_and_checked(wrong: int | None, tmp_path: Path) -> None:
    """A block of two pages and a quarter, a value of which may be refused."""
    values = np.arange(9 << 18, dtype=np.float32)
    if wrong is not None:
        values[wrong] = np.nan
    path, shapes = tmp_path / "x", {"w": (values.shape, "f32"), "b": ((2,), "f32")}

    def fault(name: str, part: np.ndarray) -> str:
        return f"{name} of {part.size} has nan" if np.isnan(part).any() else ""

    def write() -> BlockFile:
        return write_blocks(path, shapes, {"w": values, "b": values[2:4]}.__getitem__, {}, fault)

    if wrong is not None:
        with pytest.raises(RefusedError, match=f"w of {9 << 18} has nan"):
            write()
        return
    written = write()
    with files.opened(path) as file:
        for name, (shape, dtype) in shapes.items():
            sums = written.checksums[name]
            assert len(sums) == (3 if name == "w" else 1)
            StoredBlock(shape, dtype, written.begins[name], tuple(sums)).verify(file)


@pytest.mark.parametrize("layout", ["serial", "dp2tp2", "pp1_3"])
@pytest.mark.parametrize("steps", [3, 5])
def test_resume_is_bit_for_bit(layout: str, steps: int, tmp_path: Path) -> None:
    """From the middle of an epoch too, with dropout and a short last batch."""
    x, y = data(22)
    through = engine(layout, dropout=0.3)
    through.fit((x, y), epochs=3, batch_size=8, progress=False)
    stopped = engine(layout, dropout=0.3)
    saver = ModelCheckpoint(tmp_path, every_steps=steps)
    stopped.fit((x, y), epochs=2, batch_size=8, callbacks=[saver], progress=False)
    resumed = engine(layout, dropout=0.3, seed=77)
    resumed.load(tmp_path)
    assert resumed.step == 6 // steps * steps
    resumed.fit((x, y), epochs=3, batch_size=8, resume=True, progress=False)
    assert resumed.history.losses == through.history.losses
    assert resumed.history.epochs == through.history.epochs
    for name in through.memory.records:
        np.testing.assert_array_equal(whole(resumed, name), whole(through, name))


def test_load_into_a_running_engine(tmp_path: Path) -> None:
    x, y = data(16)
    trained = engine("tp2")
    trained.fit((x, y), epochs=1, batch_size=8, progress=False)
    trained.save(tmp_path)
    before = {name: whole(trained, name) for name in trained.memory.records}
    trained.fit((x, y), epochs=1, batch_size=8, progress=False)
    assert not np.array_equal(whole(trained, "up.weight"), before["up.weight"])
    trained.load(tmp_path)
    for name, wanted in before.items():
        np.testing.assert_array_equal(whole(trained, name), wanted)
    assert len(trained.history.losses) == 2


@pytest.mark.parametrize("layout", ["serial", "tp2"])
@pytest.mark.parametrize("target", ["same", "other"])
def test_saving_before_training_loses_no_state(layout: str, target: str, tmp_path: Path) -> None:
    """An engine that loads, evaluates and saves has not met the states of the optimiser; they are kept."""
    through = engine("tp2")
    through.fit(data(16), epochs=1, batch_size=8, progress=False)
    through.save(tmp_path / "same")
    through.fit(data(16), epochs=2, batch_size=8, resume=True, progress=False)
    middle = engine(layout)
    middle.load(tmp_path / "same")
    middle.evaluate(data(8))
    middle.save(tmp_path / target)
    last = engine("tp2")
    last.load(tmp_path / target)
    for each in (middle, last):
        each.fit(data(16), epochs=2, batch_size=8, resume=True, progress=False)
        np.testing.assert_allclose(each.history.losses, through.history.losses, rtol=1e-12)
    assert last.history.losses == through.history.losses


def test_states_of_another_optimiser_are_not_carried_along(tmp_path: Path) -> None:
    """Else they would be taken for present ones when that optimiser comes back."""
    first = engine()
    first.fit(data(8), batch_size=8, progress=False)
    first.save(tmp_path)
    plain = engine(optimizer=optim.SGD(lr=0.1))
    plain.load(tmp_path)
    with pytest.warns(UserWarning, match="training by SGD does not read"):
        plain.fit(data(8), batch_size=8, progress=False)
    plain.save(tmp_path)
    assert not [name for name in Checkpoint.open(tmp_path).tensors if "adam" in name]


def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        trained = engine("tp2")
        trained.fit(data(8), batch_size=8, progress=False)
        trained.save(tmp_path / "ckpt")
    finally:
        os.umask(before)
    assert (tmp_path / "ckpt").stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "ckpt").iterdir()} == {0o640}


def test_bf16(tmp_path: Path) -> None:
    def build() -> dg.Engine:
        model = nn.Linear(4, 3, dtype="bf16")
        dg.shard_tensor(model.weight, P(tp=3), [None, "tp"])
        return dg.Engine(model, nn.MeanSquaredError(), optim.SGD(lr=0.1))

    x = np.random.default_rng(0).normal(size=(6, 4)).astype(ml_dtypes.bfloat16)
    first = build()
    first.fit((x, x[:, :3]), batch_size=6, progress=False)
    first.save(tmp_path)
    second = build()
    second.load(tmp_path)
    np.testing.assert_array_equal(second.predict(x), first.predict(x))
    assert Checkpoint.open(tmp_path).read("weight").dtype == ml_dtypes.bfloat16


# What goes wrong
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["serial", "dp2tp2"])
def test_disk_full_leaves_the_previous_checkpoint(layout: str, tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the write itself fails, in the middle."""
    x, y = data(16)
    trained = engine(layout, hidden=2000)
    trained.fit((x, y), batch_size=8, progress=False)
    trained.save(tmp_path)
    before, losses = contents(tmp_path), list(trained.history.losses)
    trained.fit((x, y), batch_size=8, progress=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, limits[1]))
    try:
        with pytest.raises(
            RuntimeFault, match=r"could not be written: rank \d: step-.*the previous one.*is whole"
        ):
            trained.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert contents(tmp_path) == before
    again = engine(layout, hidden=2000)
    again.load(tmp_path)
    again.evaluate((x, y))
    assert again.history.losses == losses
    trained.save(tmp_path)  # and the engine goes on
    assert Checkpoint.open(tmp_path).index["step"] == 4


def test_a_crash_before_the_index_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = engine("tp2")
    trained.fit(data(8), batch_size=8, progress=False)
    trained.save(tmp_path)
    before = Checkpoint.open(tmp_path).read("up.weight")
    trained.fit(data(8), batch_size=8, progress=False)

    def die(*args: Any) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("distgraph.runtime.execute.checkpoint.writing.commit", die)
        with pytest.raises(KeyboardInterrupt):
            trained.save(tmp_path)
    np.testing.assert_array_equal(Checkpoint.open(tmp_path).read("up.weight"), before)
    trained.save(tmp_path)
    assert not np.array_equal(Checkpoint.open(tmp_path).read("up.weight"), before)
    files = {s["file"] for t in Checkpoint.open(tmp_path).tensors.values() for s in t["shards"]}
    assert {p.name for p in tmp_path.iterdir()} == files | {
        "index.json",
        ".lock",
    }  # what the crash left is gone


@pytest.mark.parametrize(
    ("model", "difference"),
    [
        (
            lambda: Net(hidden=11),
            r"parameter up.weight is f64\[6, 11\] in the model but f64\[6, 10\] in the checkpoint",
        ),
        (
            lambda: Net(dtype="f32"),
            r"parameter up.weight is f32\[6, 10\] in the model but f64\[6, 10\] in the checkpoint",
        ),
        (
            lambda: nn.Linear(6, 3, dtype="f64"),
            r"parameter weight is f64\[6, 3\] in the model but not in the checkpoint",
        ),
        (lambda: nn.Sequential(Net()), r"parameter steps.0.up.weight is .* but not in the checkpoint"),
    ],
)
def test_checkpoint_of_another_model(model: Any, difference: str, tmp_path: Path) -> None:
    trained = engine("tp2")
    trained.fit(data(8), batch_size=8, progress=False)
    trained.save(tmp_path)
    other = dg.Engine(model(), nn.CrossEntropy(), optim.Adam())
    with pytest.raises(RuntimeFault, match=rf"is of another model: {difference}"):
        other.load(tmp_path)


def test_states_of_another_optimiser_are_refused(tmp_path: Path) -> None:
    trained = engine(optimizer=optim.SGD(lr=0.1))
    trained.fit(data(8), batch_size=8, progress=False)
    trained.save(tmp_path)
    other = engine()
    other.load(tmp_path)
    with pytest.raises(RuntimeFault, match=r"has no up.weight.adam_m; load it with states=False"):
        other.fit(data(8), batch_size=8, progress=False)
    anew = engine()
    anew.load(tmp_path, states=False)
    anew.fit(data(8), batch_size=8, progress=False)
    assert anew.step == 2


def test_states_that_the_optimiser_does_not_read_are_named(tmp_path: Path) -> None:
    """Once, whether the checkpoint is loaded before or after the training program is compiled."""
    trained = engine()
    trained.fit(data(8), batch_size=8, progress=False)
    trained.save(tmp_path)
    text = r"has down.bias.adam_m, .* and \d+ more, which training by SGD does not read; .* states=False"
    other = engine(optimizer=optim.SGD(lr=0.1))
    other.load(tmp_path)
    with pytest.warns(UserWarning, match=text) as raised:
        other.fit(data(8), batch_size=8, epochs=2, progress=False)
    assert len(raised) == 1
    other.run(data(4))  # another program, without a warning
    with pytest.warns(UserWarning, match=text):
        other.load(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load(tmp_path, states=False)
        other.run(data(8))
        trained.load(tmp_path)


def test_a_function_whose_parameters_the_checkpoint_does_not_have(tmp_path: Path) -> None:
    def of_function(layer: nn.Module) -> dg.Engine:
        def model(x: dg.Tensor) -> dg.Tensor:
            return layer(x)

        return dg.Engine(model, nn.MeanSquaredError(), optim.Adam(lr=0.1), seed=id(layer) % 97)

    x = np.ones((4, 3), "f4")
    trained = of_function(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    trained.fit((x, x), batch_size=4, progress=False)
    trained.save(tmp_path)
    for states in (True, False):
        other = of_function(nn.Linear(3, 3))
        other.load(tmp_path, states=states)
        message = r"has no parameter \w+, which the program reads; its parameters are steps.0.bias, steps.0.w"
        with pytest.raises(RuntimeFault, match=message):
            other.predict(x)
        same = of_function(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
        same.load(tmp_path, states=states)
        np.testing.assert_array_equal(same.predict(x), trained.predict(x))


def test_running_statistics_are_part_of_the_model(tmp_path: Path) -> None:
    def build() -> dg.Engine:
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2 * 4, 3))
        return dg.Engine(model, nn.CrossEntropy(), optim.SGD(lr=0.1))

    x, y = np.random.default_rng(1).normal(1, 2, size=(8, 1, 4, 4)).astype("f4"), np.arange(8, dtype="i4") % 3
    first = build()
    first.fit((x, y), epochs=3, batch_size=4, progress=False)
    first.save(tmp_path)
    for states in (True, False):
        second = build()
        second.load(tmp_path, states=states)
        np.testing.assert_array_equal(second.predict(x), first.predict(x))


def test_missing_and_damaged_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFault, match=r"has no index.json; give the directory"):
        engine().load(tmp_path)
    with pytest.raises(RuntimeFault, match="has no parameters yet"):
        engine().save(tmp_path)
    trained = engine("tp2")
    trained.fit(data(8), batch_size=8, progress=False)
    trained.save(tmp_path)
    index = (tmp_path / "index.json").read_text()
    (shard,) = tmp_path.glob("*rank-00001*")
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(RuntimeFault, match=r"rank-00001.safetensors is damaged: the file has 100 bytes but"):
        engine().load(tmp_path)
    shard.unlink()
    with pytest.raises(RuntimeFault, match=r"rank-00001.safetensors cannot be read: .*No such file"):
        engine().load(tmp_path)
    for text, message in (
        (index[:50], "cannot be read"),
        ('{"format": "other"}', "found 'other'"),
        ("[]", "found 'list'"),
    ):
        (tmp_path / "index.json").write_text(text)
        with pytest.raises(RuntimeFault, match=message):
            engine().load(tmp_path)
