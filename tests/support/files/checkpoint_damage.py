"""Small checkpoints, random damage to them, and the right outcomes: refused, or exactly what was saved."""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import distgraph as dg
from distgraph.errors import DistGraphError
from distgraph.ir.dtypes import short
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.runtime.execute.checkpoint import (
    Checkpoint,
    CheckpointInProgress,
    SavedTensor,
    write_checkpoint,
)
from distgraph.runtime.execute.checkpoint.index import INDEX, content_checksum
from distgraph.runtime.execute.process_group import InProcessWorld

MESH = dg.ProcessMesh.grid(x=2)
SPECS = {"w": ["x", None], "v": [None, "x"], "b": [None], "s": [], "m": ["x"]}
HUGE = 10**18


@contextlib.contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder that is in memory where the machine has such a place: disks are slow, and not in question."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def values(step: int) -> dict[str, np.ndarray]:
    """What a checkpoint of a step holds: the same names, shapes and dtypes, other numbers."""
    rng = np.random.default_rng(step)
    return {
        "w": rng.normal(size=(6, 5)).astype("f4"),
        "v": rng.normal(size=(3, 8)),
        "b": rng.normal(size=7).astype(ml_dtypes.bfloat16),
        "s": np.array(rng.integers(100), "i8"),
        "m": rng.integers(0, 2, 9).astype(bool),
    }


def write(folder: Path, step: int, world: InProcessWorld, background: bool = False) -> None:
    full = values(step)
    placed = {
        name: SavedTensor("param", array.shape, short(array.dtype), DistAttr(MESH, ShardSpec.of(SPECS[name])))
        for name, array in full.items()
    }
    training = {"step": step, "losses": [float(step), 0.5], "epochs": [{"epoch": 0, "loss": 0.25}], "seed": 7}
    parts = (
        folder,
        world,
        placed,
        lambda name, rank: full[name][placed[name].attr.spec.slices(full[name].shape, MESH, rank)],
        training,
    )
    if background:
        CheckpointInProgress(*parts).wait()
    else:
        write_checkpoint(*parts)


@dataclass
class Trials:
    """Two checkpoints, of which copies are damaged.

    Args:
        folder: to work in.
        seed: of the damage.
    """

    folder: Path
    seed: int

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        world = InProcessWorld(MESH.size)
        for step in (1, 2):
            write(self.folder / str(step), step, world)
        world.close()
        self.originals = {
            step: {path.name: path.read_bytes() for path in (self.folder / str(step)).iterdir()}
            for step in (1, 2)
        }
        self.target = self.folder / "damaged"
        self.target.mkdir()
        self.touched = set(self.originals[1])
        self.wanted = values(1)
        self.whole = Checkpoint.open(self.folder / "1").index

    def trial(self) -> tuple[str, str | None]:
        """Damage a fresh copy and read it; name of the damage, and what is wrong with the outcome."""
        for name in self.touched:
            self._restore(self.target / name)
        self.touched.clear()
        kind = self.random.choice(list(KINDS))
        KINDS[kind](self)
        try:
            return kind, outcome(self.target, self.wanted, None if kind in FORGED else self.whole)
        except Exception as error:  # noqa: BLE001 - a raw error of any kind is what is looked for
            return kind, f"{type(error).__name__}: {error}"

    def shards(self) -> list[Path]:
        """Both of them, which may be damaged then."""
        names = sorted(name for name in self.originals[1] if name.startswith("step"))
        self.touched.update(names)
        return [self.target / name for name in names]

    def shard(self) -> Path:
        return self.random.choice(self.shards())

    def index(self) -> Path:
        self.touched.add(INDEX)
        return self.target / INDEX

    def _restore(self, path: Path) -> None:
        if path.is_symlink() or path.is_fifo():
            path.unlink()
        elif path.is_dir():
            path.rmdir()
        path.write_bytes(self.originals[1][path.name])


def outcome(folder: Path, wanted: dict[str, np.ndarray], index: dict[str, Any] | None) -> str | None:
    """None where a checkpoint is refused or gives what was saved, else what is wrong.

    Args:
        folder: of the checkpoint.
        wanted: the right values.
        index: the right index; None where a forged one may say anything that makes sense.
    """
    try:
        checkpoint = Checkpoint.open(folder)
    except DistGraphError:
        return None
    if index is not None and checkpoint.index != index:
        return None if checkpoint.verify() else "another index was read"
    damaged = bool(checkpoint.verify())
    for name, array in wanted.items():
        try:
            found = checkpoint.read(name)
        except DistGraphError:
            if not damaged and name in checkpoint.tensors:
                return f"verify found nothing but {name} cannot be read"
            continue
        same = (
            found.dtype == array.dtype and found.shape == array.shape and found.tobytes() == array.tobytes()
        )
        if index is not None and not same:
            return f"{name} has other values"
    return None


def _bytes(random: random.Random, data: bytes) -> bytes:
    """Damage some bytes."""
    kind = random.randrange(7)
    at, end = sorted((random.randrange(len(data)), random.randrange(len(data) + 1)))
    changed = bytearray(data)
    if kind == 0:
        changed[at] ^= 1 << random.randrange(8)
    elif kind == 1:
        changed[at] = random.randrange(256)
    elif kind == 2:
        changed[at : at + 32] = bytes(len(changed[at : at + 32]))
    elif kind == 3:
        del changed[at:]
    elif kind == 4:
        del changed[at:end]
    elif kind == 5:
        changed[at:at] = random.randbytes(random.randrange(1, 20))
    else:
        changed[at:at] = changed[at:end]
    return bytes(changed)


def _damage_index(trials: Trials) -> None:
    trials.index().write_bytes(_bytes(trials.random, trials.originals[1][INDEX]))


def _damage_shard(trials: Trials) -> None:
    path = trials.shard()
    path.write_bytes(_bytes(trials.random, path.read_bytes()))


def _swap_shards(trials: Trials) -> None:
    first, second = trials.shards()
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def _shard_of_another_step(trials: Trials) -> None:
    path = trials.shard()
    end = path.name[path.name.index(".rank") :]
    (other,) = (data for name, data in trials.originals[2].items() if name.endswith(end))
    path.write_bytes(other)


def _index_of_another_step(trials: Trials) -> None:
    trials.index().write_bytes(trials.originals[2][INDEX])


def _replace(trials: Trials) -> None:
    """Something else than a file: a link (to the same content), a folder, a pipe, nothing."""
    path = trials.random.choice([trials.index(), *trials.shards()])
    same = trials.folder / "1" / path.name
    path.unlink()
    kind = trials.random.randrange(5)
    if kind == 0:
        path.symlink_to(same)
    elif kind == 1:
        path.symlink_to(path)
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        os.mkfifo(path)


def _values(random: random.Random, old: Any) -> Any:
    """Something to stand in an index."""
    deep: Any = 0
    for _ in range(random.choice([1, 70, 150])):
        deep = [deep]
    return random.choice([
        HUGE, -HUGE, 10**400, -1, 0, 1, 2.5, 1e308, float("nan"), float("inf"), True, None, "", "x", "nan",
        [], {}, deep, "/etc/passwd", "../1/index.json", "f32", "f128", "\ud800", "a\0b", "\n" * 50, "0" * 16,
        "step-00000001-0123456789abcdef.rank-00000.safetensors",
        [HUGE], [HUGE] * 2, [0] * 9, {"w": 1}, [old], [old, old], {"x": old},
    ])  # fmt: skip


def _spots(node: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    found: list[tuple[Any, Any]] = []
    rest = [node]
    while rest:
        container = rest.pop()
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            found.append((container, key))
            if isinstance(value, (dict, list)):
                rest.append(value)
    return found


def _forge(trials: Trials, sealed: bool = True) -> None:
    """Change what the index says, and make its checksum fit."""
    document = json.loads(trials.originals[1][INDEX])
    for _ in range(trials.random.choice([1, 1, 2, 5])):
        spots = _spots(document)
        if not spots:
            break
        container, key = trials.random.choice(spots)
        kind = trials.random.randrange(8)
        if kind == 0:
            del container[key]
        elif kind == 1:
            other, where = trials.random.choice(spots)
            container[key] = json.loads(json.dumps(other[where]))
        elif kind == 2 and isinstance(container[key], int):
            container[key] += trials.random.choice([-1, 1, 4, 8, HUGE])
        elif kind == 3 and isinstance(container, dict):
            container[trials.random.choice(["x", "__metadata__", "w", "file", "\u00b5"])] = container[key]
        elif kind == 4 and isinstance(container, list):
            container.append(container[key])
        else:
            container[key] = _values(trials.random, container[key])
    if sealed:
        document["checksum"] = content_checksum(document)
    trials.index().write_text(json.dumps(document))


def _unsealed(trials: Trials) -> None:
    _forge(trials, sealed=False)


def _nested(trials: Trials) -> None:
    depth = trials.random.choice([100, 5000, 200_000])
    left, right = trials.random.choice([("[", "]"), ('{"format":', "}"), ("[", "")])
    trials.index().write_text(left * depth + "1" + right * depth)


KINDS: dict[str, Callable[[Trials], None]] = {
    "index bytes": _damage_index,
    "index forged": _forge,
    "index changed": _unsealed,
    "index nested": _nested,
    "index of another step": _index_of_another_step,
    "shard bytes": _damage_shard,
    "shards swapped": _swap_shards,
    "shard of another step": _shard_of_another_step,
    "no file": _replace,
}
FORGED = ("index forged",)
