"""Damaged and forged checkpoints are refused with file, tensor and bytes, before an engine has changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.files.checkpoint_damage import KINDS, Trials, folder_in_memory, values, write
from support.programs.training import data, engine, whole

import distgraph as dg
from distgraph import optim
from distgraph.errors import RuntimeFault
from distgraph.ir.dtypes import itemsize
from distgraph.runtime.execute.checkpoint import Checkpoint, files
from distgraph.runtime.execute.checkpoint.index import content_checksum
from distgraph.runtime.execute.process_group import InProcessWorld


@pytest.fixture
def memory() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


def test_random_damage_is_refused_or_harmless(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short form of tests/campaigns/checkpoint_mutations.py."""
    monkeypatch.setattr(files, "PAGE", 16)
    trials = Trials(memory, seed=20)
    wrong, seen = [], set()
    for number in range(2_000):
        kind, problem = trials.trial()
        seen.add(kind)
        if problem is not None:
            wrong.append(f"trial {number}, {kind}: {problem}")
    assert not wrong, "\n".join(wrong[:20])
    assert seen == set(KINDS)


def test_trials_detect_bytes_that_are_not_verified(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would fail if checksums were not compared."""
    monkeypatch.setattr(files, "checksum", lambda data: "0" * 16)
    trials = Trials(memory, seed=21)
    assert sum(trials.trial()[1] is not None for _ in range(200)) > 10


def trained(folder: Path, layout: str = "tp2") -> dg.Engine:
    found = engine(layout)
    found.fit(data(8), batch_size=8, progress=False)
    found.save(folder)
    return found


def block(folder: Path, name: str, number: int = 0) -> tuple[Path, int, int]:
    """File of a block, its first byte, and its bytes."""
    entry = Checkpoint.open(folder).contents.tensors[name]
    shard = entry.shards[number]
    return folder / shard.file, shard.begin, int(np.prod(shard.shape)) * itemsize(entry.dtype)


def patch(path: Path, at: int, new: bytes) -> None:
    found = bytearray(path.read_bytes())
    found[at : at + len(new)] = new
    path.write_bytes(bytes(found))


def flipped(folder: Path) -> str:
    path, begin, count = block(folder, "up.weight", 1)
    patch(path, begin + 17, bytes([path.read_bytes()[begin + 17] ^ 4]))
    return rf"{path.name} is damaged: tensor up.weight: bytes {begin} to {begin + count - 1} have checksum"


def zeroed(folder: Path) -> str:
    path, begin, count = block(folder, "up.weight.adam_v")
    patch(path, begin, bytes(count))
    return rf"{path.name} is damaged: tensor up.weight.adam_v: bytes {begin} to {begin + count - 1} have"


def of_another_step(folder: Path) -> str:
    """Same names, shapes and sizes, so that nothing but the checksums tells."""
    path, _, _ = block(folder, "up.weight")
    other = folder.parent / "other"
    engine = trained(other)
    engine.fit(data(8), batch_size=8, progress=False)
    engine.save(other)
    path.write_bytes(block(other, "up.weight")[0].read_bytes())
    return rf"{path.name} is damaged: header, bytes 0 to \d+, has checksum \w+ but was written with"


def shorter(folder: Path) -> str:
    path, _, _ = block(folder, "up.weight")
    path.write_bytes(path.read_bytes()[:-8])
    return rf"{path.name} is damaged: the file has \d+ bytes but was written with \d+"


def missing(folder: Path) -> str:
    path, _, _ = block(folder, "up.weight")
    path.unlink()
    return rf"{path.name} cannot be read: .*No such file"


def linked(folder: Path) -> str:
    path, _, _ = block(folder, "up.weight")
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")
    return rf"{path.name} cannot be read: .*it is a symbolic link, and links are not followed"


def pipe(folder: Path) -> str:
    path, _, _ = block(folder, "up.weight")
    path.unlink()
    os.mkfifo(path)
    return rf"{path.name} cannot be read: .*not a regular file"


def rewritten(folder: Path) -> str:
    path = folder / "index.json"
    path.write_text(path.read_text().replace('"step": 1,', '"step": 2,'))
    return r"index.json is damaged: its content has checksum \w+ but was written with"


def linked_index(folder: Path) -> str:
    path = folder / "index.json"
    path.rename(folder.parent / "index.json")
    path.symlink_to(folder.parent / "index.json")
    return r"index.json cannot be read: .*symbolic link"


def older(folder: Path) -> str:
    path = folder / "index.json"
    path.write_text('{"format": "distgraph checkpoint 1", "step": 3}')
    return (
        "expected format 'distgraph checkpoint 2', found 'distgraph checkpoint 1'; load it with the version"
    )


DAMAGE = [
    flipped, zeroed, of_another_step, shorter, missing, linked, pipe, rewritten, linked_index, older
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_named_and_leaves_the_engine(damage: Callable[[Path], str], tmp_path: Path) -> None:
    trained(tmp_path / "ckpt")
    message = damage(tmp_path / "ckpt")
    running = engine("tp2")
    running.fit(data(16), batch_size=8, progress=False)
    before = {name: whole(running, name) for name in running.memory.records}
    with pytest.raises(RuntimeFault, match=message):
        running.load(tmp_path / "ckpt")
    assert running.step == 2
    for name, wanted in before.items():
        np.testing.assert_array_equal(whole(running, name), wanted)
    running.fit(data(8), batch_size=8, progress=False)
    fresh = engine()
    with pytest.raises(RuntimeFault, match=message):
        fresh.load(tmp_path / "ckpt")


def test_a_checkpoint_without_a_state_leaves_the_engine(tmp_path: Path) -> None:
    plain = engine(optimizer=optim.SGD(lr=0.1))
    plain.fit(data(8), batch_size=8, progress=False)
    plain.save(tmp_path)
    running = trained(tmp_path / "own")
    before = whole(running, "up.weight")
    with pytest.raises(RuntimeFault, match=r"has no \w+.weight.adam_[mv]; load it with states=False"):
        running.load(tmp_path)
    np.testing.assert_array_equal(whole(running, "up.weight"), before)
    running.fit(data(8), batch_size=8, progress=False)


def forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "index.json"
    document = json.loads(path.read_text())
    change(document)
    document["checksum"] = content_checksum(document)
    path.write_text(json.dumps(document))


def _w(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["tensors"]["w"]
    return found


def _shard(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = _w(document)["shards"][0]
    return found


def _outside(document: dict[str, Any]) -> None:
    name = _shard(document)["file"]
    document["files"][f"../1/{name}"] = document["files"].pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_outside, r'files\[.*expected a file such as "step-'),
        (lambda d: _shard(d).update(file="/etc/passwd"), r"shards\[0\].file: expected a file such as"),
        (lambda d: _shard(d).update(start=[0, -5]), r"shards\[0\].start\[1\]: expected a number from 0"),
        (lambda d: _shard(d).update(start=[1, 0]), r"tensors.w.shards: expected blocks that tile 0 to 6 of"),
        (lambda d: _w(d).update(shape=[10**18, 5]), r"blocks that tile 0 to 1000000000000000000 of dim 0"),
        (lambda d: _w(d).update(dtype="f128"), r"tensors.w.dtype: expected one of f64, f32"),
        (lambda d: _w(d).update(dtype="f64"), r"files.*expected a header and blocks without holes"),
        (lambda d: d["tensors"].pop("w"), r"files.*expected a header and blocks without holes or overlaps"),
        (lambda d: _shard(d).update(begin=_shard(d)["begin"] + 8), r"a header and blocks without holes"),
        (lambda d: _shard(d)["checksums"].append("0" * 16), r"checksums: expected 1 of them, got 2"),
        (lambda d: _w(d)["shards"].append(_shard(d)), r"expected 2 blocks, each once, got 3"),
        (lambda d: d.update(fingerprint="0" * 16), r"fingerprint: expected that of its tensors, \w+, got"),
        (lambda d: d.update(step="1"), r'step: expected a whole number, got "1"'),
        (lambda d: d.update(step=-1), r"step: expected a number from 0 up, got -1"),
        (lambda d: d.update(more=1), r"more: unknown field"),
        (lambda d: d.pop("losses"), r"losses: missing"),
        (lambda d: d.update(page=1), r"page: expected \d+, got 1"),
    ],
)  # fmt: skip
def test_a_forged_index_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    world = InProcessWorld(2)
    write(tmp_path / "1", 1, world)
    world.close()
    assert (tmp_path / "1" / "index.json").read_text().isascii()
    forge(tmp_path / "1", change)
    with pytest.raises(RuntimeFault, match=message):
        Checkpoint.open(tmp_path / "1")


def test_a_part_is_read_and_verified_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage in a page that a block does not need is not met; in one that it needs, it is."""
    monkeypatch.setattr(files, "PAGE", 32)
    monkeypatch.setattr("distgraph.runtime.execute.checkpoint.shards._PIECE", 70)
    world = InProcessWorld(2)
    write(tmp_path, 1, world)
    world.close()
    path, begin, _ = block(tmp_path, "v", 1)
    patch(path, begin + 2 * 32 + 8, b"\x00\x01\x02")
    opened, full = Checkpoint.open(tmp_path), values(1)["v"]
    for where in [(slice(0, 3), slice(0, 4)), (slice(0, 2), slice(0, 8)), (slice(0, 1), slice(5, 7))]:
        np.testing.assert_array_equal(opened.read("v", where), full[where])
    with pytest.raises(RuntimeFault, match=rf"tensor v: bytes {begin + 64} to {begin + 95} have checksum"):
        opened.read("v", (slice(1, 3), slice(6, 7)))
    assert [f"tensor v: bytes {begin + 64} to {begin + 95} " in each for each in opened.verify()] == [True]


def test_other_readers_of_safetensors_read_the_saved_tensors(tmp_path: Path) -> None:
    world = InProcessWorld(2)
    write(tmp_path, 1, world)
    world.close()
    full, found = values(1), {name: np.zeros_like(array) for name, array in values(1).items()}
    opened = Checkpoint.open(tmp_path)
    assert opened.verify() == []
    for name, entry in opened.contents.tensors.items():
        for shard in entry.shards:
            where = tuple(slice(a, a + n) for a, n in zip(shard.start, shard.shape, strict=True))
            if entry.dtype != "bf16":  # which the NumPy side of the library does not read
                found[name][where] = load_file(tmp_path / shard.file)[name]
    for name in ("w", "v", "s", "m"):
        np.testing.assert_array_equal(found[name], full[name])


def test_numbers_that_json_lacks_are_restored(tmp_path: Path) -> None:
    trained(tmp_path)
    again = engine()
    again.load(tmp_path)
    again.fit(data(8), batch_size=8, progress=False)
    again.history.losses[:] = [float("nan"), float("inf"), -float("inf"), 0.1]
    again.save(tmp_path)
    json.loads((tmp_path / "index.json").read_text(), parse_constant=pytest.fail)
    last = engine()
    last.load(tmp_path)
    assert np.array_equal(last.history.losses, [np.nan, np.inf, -np.inf, 0.1], equal_nan=True)
