"""Writing a checkpoint while training goes on: a snapshot in memory, which threads write.

    main thread of every process      threads
    copy the blocks that it owns  ->  every process writes and sums its blocks
    all have written: gather      ->  rank 0 writes the index and puts it in place
    it is in place: share, delete the old files

All messages between ranks are sent by the main threads, in `poll`, which every process calls at the same
points of its program; the threads only use files. So a transport that is used by one thread only suffices,
and no message of a save can mix with those of a step. Until the index is in place the previous checkpoint is
complete, whatever ends the job.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from distgraph.runtime.execute.checkpoint.shards import Fault
from distgraph.runtime.execute.checkpoint.writing import (
    DONE,
    Block,
    SavedTensor,
    WrittenBlocks,
    check_names,
    check_written,
    commit,
    conclude,
    delete_old,
    on_rank_0,
    owned,
    prepare,
    refusal,
    shared_tag,
    write_rank,
)
from distgraph.runtime.execute.process_group import World

Result = TypeVar("Result")


class CheckpointInProgress:
    """A checkpoint that is being written. Its methods are collective: every process calls them.

    Args:
        directory, world, tensors, block, training, fault: as for `write_checkpoint`. Values are copied and
            checked here; they may change afterwards.

    Attributes:
        path: folder of the checkpoint.

    Raises:
        NonFiniteError, RuntimeFault: as `write_checkpoint`.
    """

    def __init__(
        self,
        directory: str | Path,
        world: World,
        tensors: Mapping[str, SavedTensor],
        block: Block,
        training: Mapping[str, Any],
        fault: Fault | None = None,
    ) -> None:
        check_names(tensors)
        self._world, self._tensors, self._training = world, tensors, training
        self._written: dict[int, WrittenBlocks] = {}
        self._commit: _Thread[tuple[str, bool]] | None = None
        with contextlib.ExitStack() as stack:
            self.path = on_rank_0(world, lambda: prepare(directory, stack))
            self._tag = shared_tag(world, training)
            copies = _snapshot(self.path, world, tensors, block, fault)
            self._folder = stack.pop_all()  # the lock, until the save has ended
        self._blocks = _Thread(lambda: self._write(copies))

    def _write(self, copies: Mapping[int, Mapping[str, np.ndarray]]) -> dict[int, WrittenBlocks]:
        """Write the blocks of this process, in a thread."""
        tensors = self._tensors
        return {
            rank: write_rank(self.path, self._tag, tensors, lambda name, rank: copies[rank][name], rank)
            for rank in copies
        }

    def poll(self) -> bool:
        """Go on as far as is possible without waiting for a disk. Returns whether the save has ended.

        Raises:
            RuntimeFault: on every process: the checkpoint could not be written.
        """
        try:
            ended = self._next()
        except BaseException:
            self._folder.close()
            raise
        if ended:
            self._folder.close()
        return ended

    def wait(self) -> None:
        """Wait until the save has ended. Raises as `poll`."""
        while not self.poll():
            (self._commit or self._blocks).join()

    def _next(self) -> bool:
        world = self._world
        if not self._written:
            if not all(world.gather(dict.fromkeys(world.local, self._blocks.ended)).values()):
                return False
            self._written = world.gather(self._blocks.result())
            check_written(self.path, self._tag, world, self._written)
            if world.is_chief:
                self._commit = _Thread(
                    lambda: commit(self.path, self._tensors, self._written, self._training)
                )
            return False
        result = self._commit.result() if self._commit is not None and self._commit.ended else None
        result = world.share(result, 0)
        if result is None:
            return False
        if world.is_chief and result == (DONE, True):
            delete_old(self.path, self._written)
        conclude(self.path, self._tag, world, result)
        return True


def _snapshot(
    path: Path, world: World, tensors: Mapping[str, SavedTensor], block: Block, fault: Fault | None
) -> dict[int, dict[str, np.ndarray]]:
    """Local rank -> copies of the blocks that it writes. Collective.

    Raises:
        NonFiniteError: on every process: `fault` refuses values of any rank.
    """

    def work(rank: int) -> tuple[dict[str, np.ndarray], str]:
        copies = {name: np.array(block(name, rank)) for name in owned(tensors, rank)}
        faults = (fault(name, copy) for name, copy in copies.items()) if fault is not None else ()
        return copies, next(filter(None, faults), "")

    results = world.run(work)
    refused = world.gather({rank: text for rank, (_, text) in results.items()})
    for rank, text in sorted(refused.items()):
        if text:
            raise refusal(path, f"{text} on rank {rank}")
    return {rank: copies for rank, (copies, _) in results.items()}


class _Thread(Generic[Result]):
    """A function that runs in a thread, and its result."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work, self._results = work, list[Result]()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - `result` raises it again
            self._error = error

    @property
    def ended(self) -> bool:
        """Whether there is a result, or an error."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the result."""
        self._thread.join()

    def result(self) -> Result:
        """The result; raises the error of the function."""
        if self._error is not None:
            raise self._error
        return self._results[0]
