"""The checkpoints that one training has written under a path template: best one, and deleting old ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distgraph.errors import RuntimeFault
from distgraph.runtime.execute.checkpoint import files, reserve
from distgraph.runtime.execute.checkpoint.retention import CheckpointFolder, delete, find, select
from distgraph.runtime.execute.process_group import World, enter
from distgraph.serialization.path_template import PathTemplate


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Checkpoints of one training.

    Args:
        run: identifier of the training, shared by all runs that resume it, as in the index.
        world: the ranks.
        when_complete: calls a function when the save in progress, if there is one, is complete.
    """

    run: str
    world: World
    when_complete: Callable[[Callable[[], None]], None]

    def reserve(self, path: str | Path, lock: bool = True) -> None:
        """Check that `Engine.save` can write a checkpoint. Collective: every process calls it.

        Args:
            path: of the directory; with `lock` it is created, and locked against other jobs.
            lock: False where perhaps no checkpoint will be written.

        Raises:
            RuntimeFault: it cannot be written, or another job writes it.
        """
        enter("engine.checkpoints.reserve()")
        reserve(path, self.world, lock)

    def best(self, path: PathTemplate, name: str, mode: str) -> float | None:
        """The best metric of an epoch with a complete checkpoint; None where there is none. Collective.

        Args:
            path: template under which they were written.
            name: name of the number.
            mode: "min" or "max", the direction of improvement.
        """
        best: float | None = None
        if self.world.is_chief:
            numbers = [folder.metric(name) for folder in self._written(path) if folder.is_complete()]
            metrics = [number for number in numbers if number is not None]
            best = (min(metrics) if mode == "min" else max(metrics)) if metrics else None
        shared: float | None = self.world.share(best, 0)
        return shared

    def retain(self, path: PathTemplate, newest: Path, keep: int, best: str | None, mode: str) -> None:
        """Delete old checkpoints when the newest is complete, on rank 0; standard error gets failures.

        Args:
            path: template with `{epoch}` or `{step}` under which they were written.
            newest: the newest checkpoint, which is never deleted, whatever its time stamp.
            keep: number of the latest complete checkpoints that are not deleted.
            best: name of a number of an epoch; the checkpoint with its best value is not deleted either.
            mode: "min" or "max", the direction of improvement.
        """
        if self.world.is_chief:
            self.when_complete(lambda: self._delete_old(path, newest, keep, best, mode))

    def _delete_old(self, path: PathTemplate, newest: Path, keep: int, best: str | None, mode: str) -> None:
        _, deletable = select(self._written(path), keep, best, mode)
        for folder in deletable:
            if folder.path == newest:
                continue
            try:
                delete(folder.path)
            except RuntimeFault as error:
                sys.stderr.write(f"distgraph: {error}\n")
                continue
            for parent in folder.path.parents:
                if parent == path.root:
                    break
                files.remove_folder(parent)  # a folder of the template; only if it is empty

    def _written(self, path: PathTemplate) -> list[CheckpointFolder]:
        """Checkpoints of this training: those whose folder the template names for the index in it."""
        if not path.root.is_dir():
            return []
        return [folder for folder in find(path.root, path.depth) if self._is_own(folder, path)]

    def _is_own(self, folder: CheckpointFolder, path: PathTemplate) -> bool:
        if folder.checkpoint is None or folder.checkpoint.contents.run != self.run:
            return False
        index = folder.checkpoint.contents
        return path.at(index.epoch, index.step) == folder.path
