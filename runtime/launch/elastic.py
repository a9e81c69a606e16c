"""Elastic jobs: `distgraph run --elastic -n 4 script.py` goes on when ranks are lost or come.

A job is started again, with another number of ranks, when it has lost some:

    start: ranks run the script --> a rank is killed, does not answer, or its host has gone
      ^                                 |  the others write what they have in memory, and end
      |                                 v
    configuration for the ranks that are left (`elastic_configurations.py`) <-- host list, read again

`fit` goes on at the last common step by itself (`distgraph/engine/checkpoints/elastic_fit.py`). A job that an
error of its program has ended is not started again, because the error would come again.

Where `callbacks.Adapt` has found a better plan, all ranks end, and the same configuration starts again; the
ranks take the plan from the folder of the job. Adapt limits these starts; they do not count as restarts. The
plan is for the ranks that it was made for: it is given up when some are lost or come.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

from distgraph.errors import RuntimeFault
from distgraph.runtime.job.adaptations import ADAPTED, Adaptation, give_up_adaptation
from distgraph.runtime.job.job_files import STRATEGY_VARIABLE
from distgraph.runtime.job.losses import ELASTIC, Loss, forget_losses, read_losses
from distgraph.runtime.launch.elastic_capacity import Capacity
from distgraph.runtime.launch.elastic_configurations import (
    GROW,
    STOPPED,
    Configuration,
    GivenPlan,
    ScriptProgram,
    choose,
)
from distgraph.runtime.launch.host_check import silent_hosts
from distgraph.runtime.launch.launch import launch, script_environment
from distgraph.runtime.launch.launch_hosts import launch_on_hosts, remote_shell
from distgraph.runtime.launch.monitor import Signals

_LOOK_SECONDS: Final = 1.0
_LONGEST_PAUSE: Final = 30.0  # seconds between two questions to hosts of a new list that do not answer
_MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class ElasticOptions:
    """Options of an elastic job.

    Attributes:
        plans: plans for several numbers of ranks; without them the mesh of the script changes its size.
        restarts: how often the job may be started again after a loss.
        search_seconds: limit of a search for the ranks that are left.
        launcher: what starts ranks on several hosts.
    """

    plans: tuple[GivenPlan, ...] = ()
    restarts: int = 3
    search_seconds: float = 60.0
    launcher: str = "mpiexec"


def launch_elastic(
    argv: Sequence[str],
    capacity: Capacity,
    options: ElasticOptions,
    *,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """Run a script on the ranks that there are, and start it again when some are lost or come.

    Args:
        argv: path of the script, then its arguments.
        capacity: hosts and slots.
        options: plans and limits.
        env: environment of the ranks; default this process's.
        stdout: receives the output of the ranks line by line; default this process's.
        stderr: receives their error output, and what happens to the job; default this process's.

    Returns:
        The exit code of the last start; see `launch`.

    Raises:
        RuntimeFault: as `launch` and `launch_on_hosts`; no plan fits the ranks of the first start.
    """
    settings = script_environment(max(capacity.ranks, 1), argv, env)
    first = Configuration(capacity.ranks, "the script's strategy")
    if options.plans:
        first = choose(capacity.ranks, options.plans, None)
    with Signals() as signals, _folder(capacity.local) as folder:
        settings[ELASTIC] = str(folder)
        job = _ElasticJob(
            argv, capacity, options, settings, signals, folder, stdout or sys.stdout, stderr or sys.stderr
        )
        return job.run(first)


@contextmanager
def _folder(local: bool) -> Iterator[Path]:
    """The folder of a job: in memory on one machine, else in the present one, which all hosts share."""
    memory = _MEMORY if local and os.access(_MEMORY, os.W_OK) else None
    place, start = (memory, "distgraph-elastic") if local else (Path.cwd(), ".distgraph-elastic")
    prefix = f"{start}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@dataclass(slots=True)
class _ElasticJob:
    argv: Sequence[str]
    capacity: Capacity
    options: ElasticOptions
    env: dict[str, str]
    signals: Signals
    folder: Path
    out: TextIO
    errors: TextIO
    _ended: threading.Event = field(default_factory=threading.Event)
    _absent: dict[str, str] = field(default_factory=dict)  # host of a new list that does not answer -> reason
    _pause: float = 0.0  # seconds between two questions to them
    _due: float = 0.0  # when they are asked again

    def run(self, configuration: Configuration) -> int:
        """Start ranks until a start ends by itself or there is no way to go on. Returns the exit code."""
        restarts = 0
        while True:
            code, losses = self._start(configuration)
            grown = (self.folder / STOPPED).exists() or (self.folder / GROW).exists()
            adapted = (self.folder / ADAPTED).exists()
            if self.signals.received or not (losses or adapted or (self.folder / STOPPED).exists()):
                self._note_without_fit(code)
                return code
            if adapted and not losses and not grown:
                self._note_adapted(configuration)
                continue
            what = "; ".join(loss.text for loss in losses) or "hosts have been added"
            if losses and restarts == self.options.restarts:
                self.errors.write(f"error: elastic: {what}; the job was started again {restarts} times\n")
                return code
            restarts += bool(losses)
            try:
                configuration = self._choose()
            except RuntimeFault as error:
                self.errors.write(f"error: {error}\n")
                return code or 1
            count = f" (restart {restarts} of {self.options.restarts})" if losses else ""
            self._note(f"{what}; training goes on on {_described(configuration)}{count}")
            if give_up_adaptation(self.folder, what):
                self._note("the plan of Adapt was for the ranks before; speeds are measured again")

    def _note_adapted(self, configuration: Configuration) -> None:
        """Say why the same ranks start again."""
        state = Adaptation.read(self.folder)
        assert state is not None  # written before the file that says so
        count = f"(adaptation {state.number} of {state.most})"
        self._note(f"{state.text}; training goes on on {_ranks(configuration.ranks)} with that plan {count}")

    def _start(self, configuration: Configuration) -> tuple[int, list[Loss]]:
        """Run a configuration until it ends. Returns the exit code, and what was lost."""
        forget_losses(self.folder)
        for name in (GROW, STOPPED, ADAPTED):
            (self.folder / name).unlink(missing_ok=True)
        self._ended.clear()
        watcher = threading.Thread(target=self._watch, args=[configuration.ranks], daemon=True)
        watcher.start()
        env, hosts = self.env | dict(configuration.variables), self.capacity.hosts
        streams = {"stdout": self.out, "stderr": self.errors}
        try:
            if self.capacity.local:
                code = launch(configuration.ranks, self.argv, env=env, signals=self.signals, **streams)
            else:
                code = launch_on_hosts(
                    configuration.ranks,
                    self.argv,
                    hosts,
                    placement=configuration.placement,
                    plan=configuration.text,
                    launcher=self.options.launcher,
                    env=env,
                    signals=self.signals,
                    **streams,
                )
        finally:
            self._ended.set()
            watcher.join()
        losses = self._losses() if code and not self.signals.received else []
        return code, losses

    def _losses(self) -> list[Loss]:
        """What a start has lost: hosts that do not answer any more, else ranks.

        Ranks of other hosts that end while a host is lost may have crashed because of that: they keep their
        slots, and are counted at the next start if they end again.
        """
        losses = read_losses(self.folder)
        silent = {loss.host: loss.text for loss in losses if loss.whole_host}
        silent = silent or self._silent()  # where heartbeats tell, the other hosts have just sent some
        self.capacity.lose_hosts(silent)
        if not silent:
            self.capacity.lose(losses)
        gone = [Loss(reason, host=host) for host, reason in silent.items()]
        return [*gone, *(loss for loss in losses if loss.host not in silent)]

    def _silent(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Hosts that cannot be used now -> the reason; among those of some names, or among all with slots."""
        if self.capacity.local:
            return {}
        hosts = [host.name for host in self.capacity.hosts] if names is None else list(names)
        return silent_hosts(hosts, str(Path(self.argv[0]).resolve()), self.env, remote_shell(self.env))

    def _choose(self) -> Configuration:
        """The configuration for the slots that are left. Raises RuntimeFault as `choose`."""
        program = ScriptProgram.read(self.folder)
        fields = self.env.get(STRATEGY_VARIABLE, "")
        return choose(self.capacity.ranks, self.options.plans, program, fields, self.options.search_seconds)

    def _watch(self, ranks: int) -> None:
        """While ranks run: ask them to stop after a checkpoint when the host list lets more of them run."""
        while not self._ended.wait(_LOOK_SECONDS):
            try:
                if not self._has_new_hosts():
                    continue
                configuration = self._choose()
            except RuntimeFault as error:
                self._note(str(error))
                continue
            if configuration.ranks > ranks:
                (self.folder / GROW).touch()
                self._note(
                    f"{configuration.ranks} ranks can run {configuration.text} after the next checkpoint"
                )

    def _has_new_hosts(self) -> bool:
        """Whether the host list was written since, or a host of it that did not answer answers now.

        Hosts of a new list that do not answer are asked again, after pauses that double.
        """
        if written := self.capacity.read_again():
            self._absent, self._pause = self._silent(), _LOOK_SECONDS
            self.capacity.lose_hosts(self._absent)
            for name, reason in self._absent.items():
                self._note(f"host {name} of the new host list is asked again until it answers: {reason}")
        elif not self._absent or time.monotonic() < self._due:
            return False
        else:
            before, self._absent = self._absent, self._silent(self._absent)
            self.capacity.regain_hosts(before.keys() - self._absent.keys())
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            written = len(self._absent) < len(before)
        self._due = time.monotonic() + self._pause
        return written

    def _note_without_fit(self, code: int) -> None:
        if not code and ScriptProgram.read(self.folder) is None:
            self._note("--elastic had no effect, because the script has not called engine.fit")

    def _note(self, text: str) -> None:
        self.errors.write(f"distgraph: {text}\n")
        self.errors.flush()


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


def _described(configuration: Configuration) -> str:
    """Number of ranks and what they run."""
    return f"{_ranks(configuration.ranks)} with {configuration.text}"
