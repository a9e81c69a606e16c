"""Which checkpoints there are below a folder, and which of them go: the last ones and the best stay.

Nothing is deleted that is not a checkpoint, no damaged checkpoint counts as one that is kept, and where none
is whole all stay.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distgraph.errors import RuntimeFault
from distgraph.runtime.execute.checkpoint import files
from distgraph.runtime.execute.checkpoint.index import INDEX, SHARD, is_draft
from distgraph.runtime.execute.checkpoint.lock import LOCK, hold, release
from distgraph.runtime.execute.checkpoint.reading import Checkpoint
from distgraph.serialization.documents import shown_path

DEPTH = 3
"""Levels of folders below the given one that are searched."""


@dataclass(frozen=True, slots=True)
class Found:
    """A folder with a checkpoint, or with the rest of one.

    Attributes:
        path: of the folder.
        checkpoint: its index; None where that cannot be read.
        problem: why not.
    """

    path: Path
    checkpoint: Checkpoint | None
    problem: str = ""

    @property
    def order(self) -> tuple[str, int, str]:
        """Greater for one that was written later."""
        if self.checkpoint is None:
            return "", -1, str(self.path)
        return self.checkpoint.contents.written, self.checkpoint.contents.step, str(self.path)

    @property
    def bytes(self) -> int:
        """Of its files with blocks."""
        entries = self.checkpoint.contents.files.values() if self.checkpoint is not None else ()
        return sum(entry.bytes for entry in entries)

    def measured(self, name: str) -> float | None:
        """What its last epoch measured; None where it ends within an epoch, or that was not measured."""
        if self.checkpoint is None or self.checkpoint.contents.position:
            return None
        epochs = self.checkpoint.contents.epochs
        number = epochs[-1].get(name, math.nan) if epochs else math.nan
        return None if math.isnan(number) else number

    def whole(self) -> bool:
        """Whether the index can be read and all files are there, with the right size."""
        return self.checkpoint is not None and not self.checkpoint.missing()


def find(folder: Path, depth: int = DEPTH) -> list[Found]:
    """Checkpoints in a folder and below, in the order in which they were written. Links are not followed."""
    found: list[Found] = []
    rest = [(folder, 0)]
    while rest:
        path, level = rest.pop()
        try:
            entries = list(os.scandir(path))
        except OSError as error:
            if path == folder:
                raise RuntimeFault(
                    f"{shown_path(folder)} cannot be read: {error.strerror or error}; give the path "
                    f"of a folder"
                ) from None
            continue
        if any(each.name == INDEX or SHARD.fullmatch(each.name) for each in entries):
            found.append(_look(path))
        if level < depth:
            rest += [(path / e.name, level + 1) for e in entries if e.is_dir(follow_symlinks=False)]
    return sorted(found, key=lambda each: each.order)


def _look(path: Path) -> Found:
    try:
        return Found(path, Checkpoint.open(path))
    except RuntimeFault as error:
        return Found(path, None, str(error))


def split(
    found: Sequence[Found],
    keep: int,
    best: str | None = None,
    mode: str = "min",
    good: Callable[[Found], bool] = Found.whole,
) -> tuple[list[Found], list[Found]]:
    """The last `keep` good ones and the best good one; and what may be deleted: older ones.

    Args:
        found: checkpoints.
        keep: how many of the last ones stay, from 1.
        best: name of a number that an epoch measures; the checkpoint with the best one stays, too.
        mode: "min" or "max", what better means.
        good: whether a checkpoint can be relied on.

    Returns:
        those that stay because they are good, and those that may go, both in the order written. Those found
        damaged among the last are in neither: what they may still be good for is not ours to judge. Where
        fewer than `keep` are good, none may go.
    """
    stay: list[Found] = []
    for each in sorted(found, key=lambda each: each.order, reverse=True):
        if len(stay) < keep and each.checkpoint is not None and good(each):
            stay.append(each)
    if len(stay) < keep:
        return stay[::-1], []
    oldest, paths = stay[-1].order, {each.path for each in stay}
    for each in _best_first(found, best, mode) if best is not None else []:
        if each.path in paths or good(each):
            paths.add(each.path)
            break
    gone = [e for e in found if e.checkpoint is not None and e.path not in paths and e.order < oldest]
    return [each for each in found if each.path in paths], gone


def _best_first(found: Sequence[Found], best: str, mode: str) -> list[Found]:
    sign = 1.0 if mode == "min" else -1.0
    numbers = [(each.measured(best), each) for each in found]
    ranked = [(sign * number, each) for number, each in numbers if number is not None]
    return [each for _, each in sorted(ranked, key=lambda pair: pair[0])]


def by_run(found: Sequence[Found]) -> list[list[Found]]:
    """Checkpoints grouped by the training that wrote them, `run` of the index, in the order of the first of
    each. One that names no training is a group of its own, as nothing shows which others belong to it; those
    whose index cannot be read are in no group."""
    groups: dict[tuple[str, str], list[Found]] = {}
    for each in found:
        if each.checkpoint is not None:
            run = each.checkpoint.contents.run
            groups.setdefault((run, "" if run else str(each.path)), []).append(each)
    return list(groups.values())


def delete(path: Path) -> None:
    """Delete a checkpoint: its index first, so that it is whole or none; then its files, and the folder if
    nothing else is in it.

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
