"""Saving an engine: what a checkpoint of it contains, and the save that is written while training goes on."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import distgraph
from distgraph.engine.checkpoints.loading import blocks_of, unread_of
from distgraph.engine.commands.interrupt import deferred
from distgraph.engine.nonfinite import fault_of
from distgraph.runtime.execute.checkpoint import CheckpointInProgress, SavedTensor, write_checkpoint
from distgraph.runtime.execute.checkpoint.shards import Fault
from distgraph.runtime.execute.checkpoint.writing import Block
from distgraph.runtime.execute.process_group import World

if TYPE_CHECKING:
    from distgraph.engine.checkpoints.loading import Loaded
    from distgraph.engine.engine import Engine
    from distgraph.engine.session import Session


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint of an engine contains; see `write_checkpoint`."""

    tensors: Mapping[str, SavedTensor]
    block: Block
    training: Mapping[str, Any]
    fault: Fault


def contents_of(engine: Engine, session: Session, loaded: Loaded | None) -> Contents:
    """The contents of a checkpoint of the present parameters and states.

    Args:
        engine: to be saved.
        session: its compiled programs and memory.
        loaded: the checkpoint from which it goes on; tensors that no program has read are copied.

    Raises:
        RuntimeFault: there is nothing to save yet, or a step was interrupted in its update.
    """
    memory = session.memory
    memory.check_present()
    tensors = {n: SavedTensor(r.kind, r.shape, r.dtype, r.attr) for n, r in memory.records.items()}
    unread = unread_of(loaded, memory.records, session.programs.values())
    tensors |= unread
    unused = [name for name in session.expected() if name not in tensors]
    training = {"distgraph": distgraph.__version__, "unused": unused, **training_of(engine)}
    fault = fault_of(session.training_spec.model, memory)
    return Contents(tensors, blocks_of(loaded, unread, memory.block), training, fault)


def training_of(engine: Engine) -> dict[str, Any]:
    """Where the training of an engine stands, as `index_schema.Training` stores it."""
    history, scale, means = engine.history, engine._nonfinite.scale, engine._means.copy()
    return {
        "run": engine._run,
        "step": engine.step, "epoch": engine.epoch, "position": engine.position, "seed": engine.seed,
        "losses": list(history.losses), "epochs": list(history.epochs), "skipped": list(history.skipped),
        "means": [means.terms, means.count],
        "loss_scale": [] if scale is None else [scale.value, scale.finished],
    }  # fmt: skip


class Saves:
    """The saves of an engine, of which one at most is in progress. All methods are collective.

    Args:
        after: called with the path of a checkpoint when it is complete.

    Attributes:
        completed: number of checkpoints that were written.
    """

    def __init__(self, after: Callable[[str | Path], None]) -> None:
        self._after = after
        self.completed = 0
        self._in_progress: CheckpointInProgress | None = None
        self._then: list[Callable[[], None]] = []

    def save(self, path: str | Path, world: World, contents: Contents, asynchronous: bool) -> None:
        """Write a checkpoint, at once or while training goes on. Raises as `write_checkpoint`."""
        parts = (path, world, contents.tensors, contents.block, contents.training, contents.fault)
        with deferred():
            if asynchronous:
                self._in_progress = CheckpointInProgress(*parts)
                atexit.register(self.wait)
                return
            write_checkpoint(*parts)
        self.completed += 1
        self._after(path)

    def poll(self) -> None:
        """Between two steps: go on with the save in progress, if there is one. Raises its error."""
        if self._in_progress is not None:
            self._advance(lambda save: save.poll())

    def wait(self) -> None:
        """Wait for the save in progress, if there is one. Raises its error."""
        if self._in_progress is not None:
            self._advance(lambda save: save.wait())

    def when_complete(self, action: Callable[[], None]) -> None:
        """Call a function when the save in progress has been written without an error; else now."""
        if self._in_progress is None:
            action()
        else:
            self._then.append(action)

    def _advance(self, move: Callable[[CheckpointInProgress], bool | None]) -> None:
        save = self._in_progress
        assert save is not None
        with deferred():
            try:
                ended = move(save) is not False
            except BaseException:
                self._end()
                raise
            if not ended:
                return
            actions = self._end()
        self.completed += 1
        self._after(save.path)
        for action in actions:
            action()

    def _end(self) -> list[Callable[[], None]]:
        """Forget the save in progress. Returns what was to be done after it."""
        actions, self._then, self._in_progress = self._then, [], None
        atexit.unregister(self.wait)
        return actions
