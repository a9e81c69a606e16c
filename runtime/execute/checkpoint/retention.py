"""Retention of checkpoints: which ones are below a folder, and which to delete. The last and the best stay.

Only checkpoints are deleted. A damaged checkpoint does not count as one that stays, and where none is
complete, all stay.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distgraph.errors import RuntimeFault
from distgraph.runtime.execute.checkpoint import files
from distgraph.runtime.execute.checkpoint.files import SHARD
from distgraph.runtime.execute.checkpoint.index import INDEX, is_draft
from distgraph.runtime.execute.checkpoint.lock import LOCK, hold, release
from distgraph.runtime.execute.checkpoint.resharding import Checkpoint
from distgraph.serialization.documents import shown_path

DEPTH = 3
"""Levels of folders below the given one that are searched."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder with a checkpoint, or with parts of one.

    Attributes:
        path: path of the folder.
        checkpoint: the checkpoint; None where its index cannot be read.
        problem: the reason for that.
    """

    path: Path
    checkpoint: Checkpoint | None
    problem: str = ""

    @property
    def order(self) -> tuple[str, int, str]:
        """Sort key: time of writing, then step and path."""
        if self.checkpoint is None:
            return "", -1, str(self.path)
        return self.checkpoint.contents.written, self.checkpoint.contents.step, str(self.path)

    @property
    def bytes(self) -> int:
        """Bytes of its files with blocks."""
        entries = self.checkpoint.contents.files.values() if self.checkpoint is not None else ()
        return sum(entry.bytes for entry in entries)

    def metric(self, name: str) -> float | None:
        """A metric of its last epoch; None where it was written within an epoch or has no such metric."""
        if self.checkpoint is None or self.checkpoint.contents.position:
            return None
        epochs = self.checkpoint.contents.epochs
        number = epochs[-1].get(name, math.nan) if epochs else math.nan
        return None if math.isnan(number) else number

    def is_complete(self) -> bool:
        """Whether the index can be read and all files exist with the right size."""
        return self.checkpoint is not None and not self.checkpoint.missing()


def find(folder: Path, depth: int = DEPTH) -> list[CheckpointFolder]:
    """Checkpoints in a folder and below, in the order of their writing. Links are not followed."""
    folders: list[CheckpointFolder] = []
    pending = [(folder, 0)]
    while pending:
        path, level = pending.pop()
        try:
            entries = list(os.scandir(path))
        except OSError as error:
            if path == folder:
                raise RuntimeFault(
                    f"{shown_path(folder)} cannot be read: {error.strerror or error}; give the path "
                    f"of a folder"
                ) from None
            continue
        if any(entry.name == INDEX or SHARD.fullmatch(entry.name) for entry in entries):
            folders.append(_open(path))
        if level < depth:
            pending += [(path / e.name, level + 1) for e in entries if e.is_dir(follow_symlinks=False)]
    return sorted(folders, key=lambda entry: entry.order)


def _open(path: Path) -> CheckpointFolder:
    try:
        return CheckpointFolder(path, Checkpoint.open(path))
    except RuntimeFault as error:
        return CheckpointFolder(path, None, str(error))


def select(
    folders: Sequence[CheckpointFolder],
    keep: int,
    best: str | None = None,
    mode: str = "min",
    good: Callable[[CheckpointFolder], bool] = CheckpointFolder.is_complete,
) -> tuple[list[CheckpointFolder], list[CheckpointFolder]]:
    """Select the checkpoints that stay (the last `keep` good ones and the best good one) and those to delete.

    Args:
        folders: checkpoints.
        keep: number of the last ones that stay, from 1.
        best: name of a metric of an epoch; the checkpoint with the best value stays as well.
        mode: "min" or "max": which value is better.
        good: whether a checkpoint is usable.

    Returns:
        The checkpoints that stay, and the older ones, which may be deleted; both in order of time. Damaged
        ones among the last are in neither. Where fewer than `keep` are good, none may be deleted.
    """
    selected: list[CheckpointFolder] = []
    for folder in sorted(folders, key=lambda folder: folder.order, reverse=True):
        if len(selected) < keep and folder.checkpoint is not None and good(folder):
            selected.append(folder)
    if len(selected) < keep:
        return selected[::-1], []
    oldest, paths = selected[-1].order, {folder.path for folder in selected}
    for folder in _best_first(folders, best, mode) if best is not None else []:
        if folder.path in paths or good(folder):
            paths.add(folder.path)
            break
    deletable = [
        folder
        for folder in folders
        if folder.checkpoint is not None and folder.path not in paths and folder.order < oldest
    ]
    return [folder for folder in folders if folder.path in paths], deletable


def _best_first(folders: Sequence[CheckpointFolder], best: str, mode: str) -> list[CheckpointFolder]:
    sign = 1.0 if mode == "min" else -1.0
    numbers = [(folder.metric(best), folder) for folder in folders]
    ranked = [(sign * number, folder) for number, folder in numbers if number is not None]
    return [folder for _, folder in sorted(ranked, key=lambda pair: pair[0])]


def by_run(folders: Sequence[CheckpointFolder]) -> list[list[CheckpointFolder]]:
    """Checkpoints grouped by the training that wrote them (`run` of the index), ordered by their first ones.

    One that names no training is a group of its own. Those whose index cannot be read are in no group.
    """
    groups: dict[tuple[str, str], list[CheckpointFolder]] = {}
    for folder in folders:
        if folder.checkpoint is not None:
            run = folder.checkpoint.contents.run
            groups.setdefault((run, "" if run else str(folder.path)), []).append(folder)
    return list(groups.values())


def delete(path: Path) -> None:
    """Delete a checkpoint: its index first, so that no incomplete checkpoint is left, then its files.

    The folder is deleted if nothing else is in it.

    Raises:
        RuntimeFault: another job writes it, or it cannot be deleted.
    """
    hold(path)
    try:
        files.unlink(path / INDEX)
        files.flush_names(path)
        for old in sorted(path.iterdir()):
            if SHARD.fullmatch(old.name) or is_draft(old.name):
                files.unlink(old)
    except OSError as error:
        raise RuntimeFault(
            f"checkpoint {path} cannot be deleted: {error}; delete the folder by hand"
        ) from None
    finally:
        release(path)
    files.remove(path / LOCK)
    files.remove_folder(path)
