"""`fit` in an elastic job (`distgraph run --elastic`, docs/running/elastic.md) keeps training over restarts.

The script runs from its beginning at every start of the job. The k-th call of `fit` goes on from the newest
of these that an earlier start has left for it: what the ranks that were left had in memory, and the complete
checkpoints of its `ModelCheckpoint` callbacks. Without any it trains from its beginning, and comes to the
same numbers.

`callbacks.Adapt` asks for another start with another plan. Then all ranks write what they have in memory and
end together, so that no step is lost; rank 0 leaves the plan in the folder, and shares it with the others at
the next start.
"""

from __future__ import annotations

import itertools
import platform
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from distgraph.engine.callbacks import Callback, ModelCheckpoint
from distgraph.engine.checkpoints.saving import contents_of
from distgraph.errors import RuntimeFault
from distgraph.ir.range_notation import spans
from distgraph.plan.plan import Plan
from distgraph.runtime.execute.checkpoint import INDEX, Checkpoint
from distgraph.runtime.execute.checkpoint.retention import find
from distgraph.runtime.execute.checkpoint.survivors import assemble, write_survivor
from distgraph.runtime.execute.process_group import enter
from distgraph.runtime.job.adaptations import ADAPTED, Adaptation
from distgraph.runtime.job.job_files import ranks_of_job
from distgraph.runtime.job.losses import elastic_folder, read_losses
from distgraph.runtime.launch.elastic_configurations import GROW, STOPPED, ScriptProgram
from distgraph.serialization.path_template import PathTemplate

if TYPE_CHECKING:
    from distgraph.engine.engine import Engine

_calls: Final = itertools.count()
"""Number of the next call of `fit` in this process."""
_OF_SEVERAL_RANKS: Final = {"zero": "0", "gradient_precision": "none"}
"""Fields of a strategy that are refused where one rank has the whole batch -> text of their default."""
_RECORDED_SECONDS: Final = 1.0
"""Seconds after an error in which the loss that has caused it is recorded, if one has."""
_SHARED_SECONDS: Final = 10.0
"""Seconds in which a file that one host has written must be there for the others."""


@dataclass(slots=True)
class ElasticFit(Callback):
    """One call of `fit`. As a callback it comes before all others.

    Args:
        engine: that trains.
        folder: of the elastic job; None in other jobs, where this does nothing.

    Attributes:
        number: of this call in the process.
        compiled_before: whether the engine has compiled a program before this call.
        adaptation: what adaptation has left; a new one where it has left nothing.
    """

    engine: Engine
    folder: Path | None = field(default_factory=elastic_folder)
    number: int = 0
    compiled_before: bool = False
    adaptation: Adaptation = field(default_factory=Adaptation)
    _requested: Adaptation | None = None
    _place: Path = Path()
    _state: tuple[int, int, int] = (0, 0, 0)  # step, epoch, position of the last complete step
    _updates: dict[Any, dict[int, int]] = field(default_factory=dict)
    _saves: int = 0

    def begin(self, callbacks: Sequence[Callback], batch_size: int) -> bool:
        """Go on from where an earlier start of the job has come, and return whether it has. Collective."""
        if self.folder is None:
            return False
        enter("engine.fit() of an elastic job")
        self.number = next(_calls)
        self._place = self.folder / f"fit-{self.number}"
        engine = self.engine
        self.compiled_before = bool(engine._session.programs)
        world = engine._session.ranks()
        start: tuple[str, str, str] = ("", "", "")  # run, path of a checkpoint, error
        if world.is_chief:
            start = self._prepared(callbacks, batch_size)
        run, path, note = world.share(start, 0)
        engine._run = run
        if self.number == 0:
            self._take_adaptation()
        if path:
            engine.load(path)
            if world.is_chief:
                place = f"step {engine.step} (epoch {engine.epoch}, sample {engine.position})"
                sys.stderr.write(f"distgraph: fit goes on after {place}, from {note}\n")
        self._mark()
        self._saves = engine._saves.completed
        return bool(path)

    def _take_adaptation(self) -> None:
        """Share what adaptation has left with all ranks, and train by its plan while that holds. Collective.

        Raises:
            RuntimeFault: the engine has compiled a program with other layouts.
        """
        assert self.folder is not None
        world = self.engine._session.ranks()
        state = Adaptation.read(self.folder) if world.is_chief else None
        state = world.share(state, 0)
        if state is None:
            return
        self.adaptation = state
        if state.plan and state.ranks != ranks_of_job():
            reason = f"it is for {state.ranks} ranks, and {ranks_of_job()} run"
            self.adaptation = replace(state, plan="", slowdowns={}, given_up=reason)
            if world.is_chief:
                sys.stderr.write(
                    f"distgraph: the plan of Adapt is given up: {reason}; speeds are measured again\n"
                )
        if not self.adaptation.plan:
            return
        if self.compiled_before:
            raise RuntimeFault(
                "Adapt: the job has started again with another plan but the engine has compiled a program "
                "before fit; call fit before prepare, evaluate and predict"
            )
        self.engine._session.take_plan(Plan.parse(state.plan))

    def _prepared(self, callbacks: Sequence[Callback], batch_size: int) -> tuple[str, str, str]:
        """On rank 0: describe this call for later starts.

        Returns:
            The identifier of the run, the newest checkpoint of it that is ahead of the engine, and what that
            is; empty texts for none.
        """
        assert self.folder is not None
        strategy, engine = self.engine.training_spec.strategy, self.engine
        mesh = strategy.mesh
        plain = mesh is not None and mesh.ranks.reshape(-1).tolist() == list(range(mesh.size))
        axes = strategy.batch_axis or ()
        ScriptProgram(
            dict(zip(mesh.axes, mesh.shape, strict=True)) if mesh is not None and plain else {},
            (axes,) if isinstance(axes, str) else tuple(axes),
            max(1, batch_size // (strategy.micro_batches or 1)),
            strategy.searches,
            {name: none for name, none in _OF_SEVERAL_RANKS.items() if getattr(strategy, name)},
        ).write(self.folder)
        self._place.mkdir(exist_ok=True)
        record = self._place / "run"
        run = record.read_text() if record.exists() else engine._run
        record.write_text(run)
        path, note = self._newest(run, [each.path for each in callbacks if isinstance(each, ModelCheckpoint)])
        return run, path, note

    def _newest(self, run: str, templates: Sequence[PathTemplate]) -> tuple[str, str]:
        """The newest state of this call that is ahead of the engine: path of a checkpoint, and what it is."""
        best, path, note = self.engine.step, "", ""
        for template in templates:
            for folder in find(template.root, template.depth) if template.root.is_dir() else ():
                if folder.checkpoint is None or folder.checkpoint.contents.run != run:
                    continue
                step = folder.checkpoint.contents.step
                if step > best and folder.is_complete():
                    best, path, note = step, str(folder.path), f"checkpoint {folder.path}"
        for memory in sorted(self._place.glob("memory-*")):
            made = self._made(memory) if (memory / INDEX).exists() else assemble(memory)
            if made is not None and made[0] >= max(best, self.engine.step + 1):
                ranks = f"rank{'s' * (len(made[1]) > 1)} {spans(made[1])}"
                best, path, note = made[0], str(memory), f"the memory of {ranks}"
        for memory in self._place.glob("memory-*"):
            if str(memory) != path:
                shutil.rmtree(memory, ignore_errors=True)
        return path, note

    @staticmethod
    def _made(folder: Path) -> tuple[int, tuple[int, ...]] | None:
        """Step and ranks of what an earlier start has assembled."""
        try:
            index = Checkpoint.open(folder).contents
        except RuntimeFault:
            return None
        ranks = {int(name.partition(".rank-")[2].partition(".")[0]) for name in index.files}
        return index.step, tuple(sorted(ranks))

    # Events
    # ------------------------------------------------------------------------------------------------

    @property
    def end_of_step(self) -> Callback:
        """A callback that comes after all others: it ends the ranks where another start was requested."""
        return _EndOfStep(self)

    def on_batch_end(self, engine: Engine, step: int, logs: dict[str, float]) -> None:
        self._mark()

    def on_epoch_end(self, engine: Engine, epoch: int, logs: dict[str, float]) -> None:
        self._mark()

    def _mark(self) -> None:
        """Note that parameters, states and history are those of a complete step."""
        if self.folder is None:
            return
        engine = self.engine
        self._state = engine.step, engine.epoch, engine.position
        self._updates = self._present_updates()

    def _present_updates(self) -> dict[Any, dict[int, int]]:
        return {key: compiled.updates for key, compiled in self.engine._session.programs.items()}

    # Other starts
    # ------------------------------------------------------------------------------------------------

    def check_shared(self) -> None:
        """Check that all ranks reach the folder of the job, through which blocks pass. Collective.

        Raises:
            RuntimeFault: on every rank: names the ranks and hosts that do not.
        """
        assert self.folder is not None
        world = self.engine._session.ranks()
        token, path = world.share(secrets.token_hex(8), 0), self.folder / "shared"
        if world.is_chief:
            path.write_text(token)
        world.share(None, 0)  # it is written
        reached = _is_written(path, token)
        hosts = world.gather(dict.fromkeys(world.local, (reached, platform.node())))
        missing = sorted(rank for rank, (there, _) in hosts.items() if not there)
        if missing:
            names = ", ".join(dict.fromkeys(hosts[rank][1] for rank in missing))
            raise RuntimeFault(
                f"Adapt: folder {self.folder} of the elastic job was written on host {hosts[0][1]} but ranks "
                f"{spans(missing)} ({names}) do not see it; start the job in a folder that all hosts share, "
                "or leave out --elastic to have plans only proposed"
            )

    def request_start(self, adaptation: Adaptation) -> None:
        """Have all ranks end after this step, and the job start again with another plan. On all ranks."""
        self._requested = adaptation

    def stop_where_requested(self) -> None:
        """After the last callback of a step: end all ranks if the job is to start again. Collective.

        Raises:
            SystemExit: all ranks end.
        """
        if self.folder is None:
            return
        if self._requested is not None and not self.engine.should_stop:
            self._stop_to_adapt(self._requested)
        self._requested = None
        self._stop_to_grow()

    def _stop_to_adapt(self, adaptation: Adaptation) -> None:
        """End all ranks if each of them could write what it has; else go on with the present plan."""
        assert self.folder is not None
        world = self.engine._session.ranks()
        self.engine._saves.wait()
        problems = world.gather(dict.fromkeys(world.local, self._write_memory()))
        problem = next((f"rank {rank}: {text}" for rank, text in sorted(problems.items()) if text), "")
        if world.is_chief and not problem:
            try:
                adaptation.write(self.folder)
                (self.folder / ADAPTED).touch()
            except OSError as failure:
                problem = f"rank 0: {failure}"
        problem = world.share(problem, 0)
        if not problem:
            raise SystemExit(0)
        if world.is_chief:
            shutil.rmtree(self._memory_folder(), ignore_errors=True)
            sys.stderr.write(
                f"distgraph: Adapt goes on with the present plan, because memory was not kept: {problem}\n"
            )

    def _stop_to_grow(self) -> None:
        """After a checkpoint: end all ranks if the launcher can start more of them."""
        engine = self.engine
        if self.folder is None or engine._saves.completed == self._saves:
            return
        self._saves = engine._saves.completed
        if not engine._session.ranks().share((self.folder / GROW).exists(), 0):
            return
        engine._saves.wait()
        self._write_memory()
        if engine.is_chief:
            (self.folder / STOPPED).touch()
        raise SystemExit(0)

    def __enter__(self) -> ElasticFit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Where other ranks were lost: write what this one has in memory, for the next start."""
        if self.folder is not None and isinstance(error, RuntimeFault) and self._has_lost_ranks():
            self._write_memory()

    def _has_lost_ranks(self) -> bool:
        """Whether ranks were lost. MPI may tell of the loss sooner than the process that records it."""
        assert self.folder is not None
        deadline = time.monotonic() + _RECORDED_SECONDS
        while not read_losses(self.folder):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _memory_folder(self) -> Path:
        return self._place / f"memory-{self._state[0]:012d}"

    def _write_memory(self) -> str:
        """Write the blocks of the local ranks, if they are those of a complete step.

        Returns:
            why it has not; "" where it has.
        """
        engine, (step, epoch, position) = self.engine, self._state
        updated = {
            (key, rank)
            for key, ranks in self._present_updates().items()
            for rank, count in ranks.items()
            if count != self._updates.get(key, {}).get(rank, 0)
        }
        if updated or step != engine.step or not engine.memory.records or engine.memory.damaged:
            return "its blocks are not those of a complete step"
        contents = contents_of(engine, engine._session, engine._loaded)
        training = dict(contents.training) | {"epoch": epoch, "position": position}
        try:
            for rank in engine._session.ranks().local:
                write_survivor(self._memory_folder(), rank, contents.tensors, contents.block, training)
        except OSError as failure:
            sys.stderr.write(f"distgraph: what this rank has in memory cannot be kept: {failure}\n")
            return str(failure)
        return ""


@dataclass(slots=True)
class _EndOfStep(Callback):
    elastic: ElasticFit

    def on_batch_end(self, engine: Engine, step: int, logs: dict[str, float]) -> None:
        self.elastic.stop_where_requested()


def _is_written(path: Path, text: str) -> bool:
    """Whether a file with a text is there, or comes soon: a network file system may take a while."""
    deadline = time.monotonic() + _SHARED_SECONDS
    while True:
        try:
            if path.read_text() == text:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
