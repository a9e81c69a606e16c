"""`distgraph checkpoint`: what it lists and shows, finds damaged, converts, and deletes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.files.checkpoint_damage import values, write
from support.files.faulty_disk import Crash, FaultyOs
from support.programs.training import data, engine, whole
from typer.testing import CliRunner

import distgraph as dg
from distgraph.cli.application import app
from distgraph.errors import DistGraphError
from distgraph.ir.dtypes import short
from distgraph.runtime.execute.checkpoint import Checkpoint, retention
from distgraph.runtime.execute.checkpoint.convert import convert
from distgraph.runtime.execute.checkpoint.index import content_checksum
from distgraph.runtime.execute.process_group import InProcessWorld


def command(*words: str | Path) -> tuple[int, str]:
    """Exit code and what is printed; an error in house form is printed too."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, words)])
    if isinstance(result.exception, DistGraphError):
        return 1, f"error: {result.exception}"
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def put(folder: Path, step: int, valid: float | None = None, run: str = "a1") -> None:
    """A checkpoint at the end of an epoch that has measured something, written at a time of its own."""
    world = InProcessWorld(2)
    write(folder, step, world)
    world.close()
    document = json.loads((folder / "index.json").read_text())
    document |= {"written": f"2026-01-01T00:00:{step:02d}+00:00", "epoch": 1, "run": run}
    if valid is not None:
        document["epochs"] = [{"epoch": 0, "loss": 0.25, "valid_loss": valid}]
    document["checksum"] = content_checksum(document)
    (folder / "index.json").write_text(json.dumps(document))


def cut(folder: Path) -> str:
    """Damage a checkpoint without changing a size; returns the file's name."""
    shard = min(folder.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    return shard.name


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Four checkpoints; the first is the best, the third is damaged."""
    for step, valid in ((1, 0.5), (2, 2.0), (3, 3.0), (4, 4.0)):
        put(tmp_path / "runs" / str(step), step, valid)
    cut(tmp_path / "runs" / "3")
    return tmp_path / "runs"


def test_list(runs: Path) -> None:
    (runs / "9").mkdir()
    (runs / "9" / "index.json").write_text("[")
    (runs / "4" / next((runs / "4").glob("*00001.safetensors")).name).unlink()
    code, text = command("list", runs)
    assert code == 0
    lines = text.splitlines()
    assert lines[0].split() == ["checkpoint", "step", "epoch", "size", "written", "last", "epoch"]
    assert [line.split()[0] for line in lines[1:]] == [str(runs / n) for n in ("9", "1", "2", "3", "4")]
    assert "/9/index.json cannot be read: Expecting value: line 1 column 2 (char 1); use an" in lines[1]
    assert lines[2].split()[1:3] == ["1", "1"]
    assert lines[2].endswith("2026-01-01T00:00:01+00:00  loss 0.25 valid_loss 0.5")
    assert "damaged: " in lines[5]
    assert "No such file" in lines[5]


def test_verify(runs: Path) -> None:
    name = next((runs / "3").glob("*00000.safetensors")).name
    code, text = command("verify", runs / "1", runs / "2")
    assert (code, text.count(": whole: step ")) == (0, 2)
    code, text = command("verify", runs)
    assert code == 1
    assert text.count(": whole: step ") == 3
    assert f"{runs}/3: damaged: {runs}/3/{name} is damaged: tensor " in text
    assert " have checksum " in text
    (runs / "1" / "index.json").write_text("{}")
    assert command("verify", runs / "1")[0] == 1


def test_exit_codes_of_a_process(runs: Path) -> None:
    """As a script sees them."""
    for folder, code in (("1", 0), ("3", 1), ("none", 1)):
        words = [sys.executable, "-m", "distgraph", "checkpoint", "verify", str(runs / folder)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == code, ended.stderr
        assert "Traceback" not in ended.stderr


def test_show(runs: Path) -> None:
    code, text = command("show", runs / "1", "--blocks")
    assert code == 0
    lines = text.splitlines()
    assert lines[0] == "step 1, epoch 1, seed 7"
    assert lines[2] == "epoch 1 of 1: loss 0.25 valid_loss 0.5"
    assert lines[3].startswith("5 tensors in 2 files, ")
    row = next(position for position, line in enumerate(lines) if line.startswith("  w"))
    assert lines[row].split("  ")[1:] == ["w", "param", "f32[6, 5]", "120 B", "2 x 1 blocks"]
    assert lines[row + 1].startswith("    [0:3, 0:5]  step-00000001-")
    assert lines[row + 2].startswith("    [3:6, 0:5]  step-00000001-")


def test_one_file_and_back(tmp_path: Path) -> None:
    """Training goes on from the checkpoint that came back as from the first, bit for bit."""
    trained = engine("dp2tp2")
    trained.fit(data(24), epochs=2, batch_size=8, progress=False)
    trained.save(tmp_path / "first")
    assert command("convert", tmp_path / "first", tmp_path / "one.safetensors")[0] == 0
    found = load_file(tmp_path / "one.safetensors")
    assert sorted(found) == sorted(trained.memory.records)
    np.testing.assert_array_equal(found["up.weight"], whole(trained, "up.weight"))
    assert command("convert", tmp_path / "one.safetensors", tmp_path / "back")[0] == 0
    first, back = Checkpoint.open(tmp_path / "first").index, Checkpoint.open(tmp_path / "back").index
    for name in first.keys() - {"files", "tensors", "run"}:
        assert first[name] == back[name], name
    assert back["run"] not in ("", first["run"])
    losses = []
    for folder in ("first", "back"):
        resumed = engine("tp2")
        resumed.load(tmp_path / folder)
        resumed.fit(data(24), epochs=3, batch_size=8, resume=True, progress=False)
        losses.append(resumed.history.losses)
    assert losses[0] == losses[1]


class WithStatistics(dg.nn.Module):
    """A layer with running statistics, which are buffers."""

    def __init__(self) -> None:
        self.conv, self.norm = dg.nn.Conv2d(1, 2, 3), dg.nn.BatchNorm2d(2)
        self.head = dg.nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.conv(x)).reshape(-1, 8))


def test_weights_only(tmp_path: Path) -> None:
    """The file has the parameters and buffers of the model; what it predicts is the same."""
    x = np.random.default_rng(1).normal(1, 2, size=(8, 1, 4, 4)).astype("f4")
    trained = dg.Engine(WithStatistics(), dg.nn.CrossEntropy(), dg.optim.Adam(lr=0.1))
    trained.fit((x, np.arange(8, dtype="i4") % 3), epochs=3, batch_size=4, progress=False)
    trained.save(tmp_path / "first")
    code, text = command("convert", tmp_path / "first", tmp_path / "w.safetensors", "--weights-only")
    assert (code, text) == (0, f"{tmp_path}/first -> {tmp_path}/w.safetensors\n")
    found, expected = load_file(tmp_path / "w.safetensors"), trained.parameters()
    assert sorted(found) == sorted(expected)
    assert any(name.startswith("norm.") and np.any(found[name]) for name in found.keys() - {"norm.weight"})
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    convert(tmp_path / "w.safetensors", tmp_path / "back")
    back, first = Checkpoint.open(tmp_path / "back"), Checkpoint.open(tmp_path / "first")
    assert back.index["step"] == 0 < first.index["step"]
    assert {n: back.tensors[n]["kind"] for n in found} == {n: first.tensors[n]["kind"] for n in found}
    fresh = dg.Engine(WithStatistics(), dg.nn.CrossEntropy(), dg.optim.Adam(lr=0.1))
    fresh.load(tmp_path / "back", states=False)
    np.testing.assert_array_equal(fresh.predict(x), trained.predict(x))


def test_weights_only_contradicts_a_file(tmp_path: Path) -> None:
    save_file({"w": np.ones(1)}, tmp_path / "w.safetensors")
    code, text = command("convert", tmp_path / "w.safetensors", tmp_path / "back", "--weights-only")
    assert code == 1
    assert "--weights-only makes a file of a checkpoint but" in text
    assert "leave the option out, and load with states=False" in text
    assert names(tmp_path) == ["w.safetensors"]


def test_every_dtype_survives_conversion(tmp_path: Path) -> None:
    put(tmp_path / "first", 1)
    convert(tmp_path / "first", tmp_path / "one.safetensors")
    convert(tmp_path / "one.safetensors", tmp_path / "back")
    back = Checkpoint.open(tmp_path / "back")
    for name, array in values(1).items():
        assert back.read(name).tobytes() == array.tobytes()
        assert back.tensors[name]["dtype"] == short(array.dtype)


def test_weights_from_elsewhere(tmp_path: Path) -> None:
    weights = {"weight": np.ones((3, 2), "f4"), "bias": np.full(2, 3, "f4")}
    save_file(weights, tmp_path / "other.safetensors", {"source": "elsewhere"})
    convert(tmp_path / "other.safetensors", tmp_path / "ckpt")
    model = dg.Engine(dg.nn.Linear(3, 2))
    model.load(tmp_path / "ckpt")
    np.testing.assert_array_equal(model.predict(np.ones((1, 3), "f4")), [[6, 6]])


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("nothing", "x", "is no checkpoint and no safetensors file"),
        ("1", "2", "exists already; choose another name"),
        ("1", "no/where", "is no folder"),
        ("3", "x", "is damaged: tensor"),
        ("text", "x", "text cannot be read: .*; give a whole safetensors file"),
        ("f8", "x", "tensor w is f8_e4m3 but a checkpoint has f64, f32"),
        ("forged", "x", r"metadata of training: step: expected a whole number"),
    ],
)
def test_what_cannot_be_converted(source: str, target: str, message: str, runs: Path) -> None:
    (runs / "text").write_text("not safetensors")
    header = b'{"w":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}'
    (runs / "f8").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    training = {"distgraph training": '{"step": "x"}'}
    save_file({"w": np.ones(1)}, runs / "forged", training)
    before = names(runs)
    with pytest.raises(DistGraphError, match=message):
        convert(runs / source, runs / target)
    assert names(runs) == before


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_prune(runs: Path) -> None:
    """A damaged one among the last does not count, and stays."""
    code, text = command("prune", runs, "--keep", "2", "--dry-run")
    assert code == 0
    assert text.splitlines() == [
        f"{runs}/{step}: run a1, step {step}: {what}"
        for step, what in enumerate(("would be deleted", "kept", "damaged, left", "kept"), 1)
    ]  # fmt: skip
    assert names(runs) == ["1", "2", "3", "4"]
    command("prune", runs, "--keep", "2", "--best", "valid_loss")
    assert names(runs) == ["1", "2", "3", "4"]
    command("prune", runs, "--keep", "1", "--best", "valid_loss")
    assert names(runs) == ["1", "4"]
    command("prune", runs, "--keep", "1", "--best", "valid_loss", "--mode", "max")
    assert names(runs) == ["4"]
    for name in ("2", "1", "7"):
        code, text = command("prune", runs, "--keep", "1", "--best", f"loss{name}")
        assert "no checkpoint has the metric" in text
        assert "give one of epoch, loss, valid_loss" in text


def test_prune_keeps_the_last_of_each_training(tmp_path: Path) -> None:
    """The other training is older, and one checkpoint names none."""
    for step, run in enumerate(("old", "old", "old", "", "new", "new"), 1):
        put(tmp_path / str(step), step, run=run)
    code, planned = command("prune", tmp_path, "--keep", "2", "--dry-run")
    assert (code, names(tmp_path)) == (0, ["1", "2", "3", "4", "5", "6"])
    code, text = command("prune", tmp_path, "--keep", "2")
    assert code == 0
    assert planned.replace("would be deleted", "deleted") == text
    assert text.splitlines() == [
        f"{tmp_path}/{step}: run {run}, step {step}: {'deleted' if step == 1 else 'kept'}"
        for step, run in enumerate(("old", "old", "old", "unknown", "new", "new"), 1)
    ]
    assert names(tmp_path) == ["2", "3", "4", "5", "6"]
    assert command("prune", tmp_path, "--keep", "1")[0] == 0
    assert names(tmp_path) == ["3", "4", "6"]


def test_prune_never_deletes_an_original_for_its_copy(tmp_path: Path) -> None:
    """Whatever their names are, by which checkpoints of one time are ordered."""
    put(tmp_path / "m", 1)
    convert(tmp_path / "m", tmp_path / "one.safetensors")
    for copy in ("a", "z"):
        convert(tmp_path / "one.safetensors", tmp_path / copy)
    assert command("prune", tmp_path, "--keep", "1")[0] == 0
    assert {"a", "m", "z"} < set(names(tmp_path))


def test_checkpoints_below_a_checkpoint(tmp_path: Path) -> None:
    put(tmp_path, 1)
    for step in (2, 3):
        put(tmp_path / "n" / str(step), step)
    lines = command("list", tmp_path)[1].splitlines()
    assert [line.split()[0] for line in lines[1:]] == [str(tmp_path / name) for name in ("", "n/2", "n/3")]
    assert command("prune", tmp_path, "--keep", "1")[0] == 0
    assert [each.path for each in retention.find(tmp_path)] == [tmp_path / "n" / "3"]


def test_verify_reports_every_argument(runs: Path) -> None:
    code, text = command("verify", runs / "none", runs / "3", "/dev/null", runs / "1")
    lines = text.splitlines()
    assert code == 1
    assert lines[0].startswith(f"{runs}/none: missing: ")
    assert "No such file or directory" in lines[0]
    assert lines[1].startswith(f"{runs}/3: damaged: ")
    assert lines[2].startswith("/dev/null: missing: ")
    assert lines[3].startswith(f"{runs}/1: whole: step 1")
    assert len(lines) == 4


@pytest.mark.parametrize(
    "words", ["list", "prune --keep 1", "verify", "verify 1", "show", "convert 1", "convert"]
)
def test_no_path_is_not_the_current_folder(words: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    rest = ["new"] if words == "convert" else []
    code, text = command(*words.split(), "", *rest)
    assert code == 1
    assert text.startswith('error: checkpoint path is "" but must be that of a directory')
    assert names(runs) == ["1", "2", "3", "4"]


def test_prune_never_deletes_the_only_good_one(runs: Path) -> None:
    for name in ("4", "2"):
        cut(runs / name)
    assert command("prune", runs, "--keep", "1")[0] == 0
    assert names(runs) == ["1", "2", "3", "4"]
    cut(runs / "1")
    code, text = command("prune", runs, "--keep", "1")
    assert (code, "no checkpoint in" in text, "is complete; nothing was deleted" in text) == (1, True, True)
    assert names(runs) == ["1", "2", "3", "4"]


def test_prune_leaves_what_is_not_its_own(runs: Path) -> None:
    (runs / "1" / "notes.txt").write_text("mine")
    (runs / "5").symlink_to(runs / "2", target_is_directory=True)
    assert command("prune", runs, "--keep", "1")[0] == 0
    assert names(runs) == ["1", "4", "5"]
    assert names(runs / "1") == ["notes.txt"]


def test_prune_leaves_what_another_job_writes(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(path: Path) -> None:
        raise DistGraphError(f"checkpoint {path} is written by another job: somebody")

    monkeypatch.setattr(retention, "hold", taken)
    code, text = command("prune", runs, "--keep", "1")
    assert code == 1
    assert "is written by another job" in text
    assert names(runs) == ["1", "2", "3", "4"]


def test_death_while_deleting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is being deleted is whole or no checkpoint at all."""
    at = 0
    while True:
        folder = tmp_path / str(at)
        put(folder, 1)
        disk: Any = FaultyOs(folder, at, Crash())
        with monkeypatch.context() as patched:
            patched.setattr("distgraph.runtime.execute.checkpoint.files.os", disk)
            try:
                retention.delete(folder)
                break
            except Crash:
                pass
        if (folder / "index.json").exists():
            assert Checkpoint.open(folder).verify() == []
        at += 1
    assert at > 4
    assert not folder.exists()


@pytest.mark.parametrize("name", ["list", "prune", "show"])
def test_no_checkpoint(name: str, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing", Path("/dev/null")):
        code, text = command(name, folder, *(["--keep", "1"] if name == "prune" else []))
        assert code == 1
        assert text.startswith("error: ")
