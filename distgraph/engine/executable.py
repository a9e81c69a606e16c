"""Execution of a compiled program: one worker a rank, with the rank's part of each batch as input."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.data import Batch
from distgraph.engine.parameter_store import Memory
from distgraph.errors import GraphError, RuntimeFault
from distgraph.ir.dtypes import short, to_numpy
from distgraph.passes.partition import RankProgram
from distgraph.resources import RankMapping
from distgraph.runtime.execute.device import Device, Inlet, captures_of
from distgraph.runtime.execute.finite_check import Guard, checked_values, needs_no_message
from distgraph.runtime.execute.process_group import is_chief
from distgraph.runtime.execute.recorder import Recorder
from distgraph.runtime.execute.worker import Worker
from distgraph.runtime.program.build import Build
from distgraph.runtime.transport.transport import Transport
from distgraph.tracing.tracer import user_stack_level


@dataclass(frozen=True, slots=True)
class Feed:
    """One input of a rank.

    Attributes:
        name: name of the graph's input.
        field: field of the batch.
        rows: (start, stop) in the batch, one for each micro-batch.
        rest: the rank's block of the other dims.
        shape, dtype: shape and dtype of a block.
    """

    name: str
    field: str
    rows: tuple[tuple[int, int], ...]
    rest: tuple[slice, ...]
    shape: tuple[int, ...]
    dtype: str

    def load(self, batch: Batch) -> list[np.ndarray]:
        """The blocks. Raises RuntimeFault when the batch has no such field, or other shapes or dtypes."""
        return [self._block(batch.block(start, stop), stop - start) for start, stop in self.rows]

    def _block(self, fields: Mapping[str, Any], count: int) -> np.ndarray:
        values = fields.get(self.field)
        if values is None:
            raise RuntimeFault(f"batch has no field {self.field}; it has {', '.join(fields)}")
        block = np.ascontiguousarray(np.asarray(values)[(slice(None), *self.rest)])
        if block.shape != (count, *self.shape[1:]) or short(block.dtype) != self.dtype:
            raise RuntimeFault(
                f"field {self.name} of the batch gives {short(block.dtype)}{list(block.shape)} where the "
                f"program reads "
                f"{self.dtype}{list(self.shape)}; all samples of a data set must have one shape and dtype"
            )
        return block


@dataclass(slots=True)
class Compiled:
    """One program of an engine.

    Attributes:
        request: what was compiled.
        build: the compiled program for all ranks.
        fields: name of a graph's input -> field of the batch.
        mapping: device of every rank, where a cluster is given.
        ready: whether every local rank is prepared.
        workers: local rank -> worker, for ranks that have run it.
        feeds: local rank -> its inputs, each with a function for every block that copies it to the device.
        numbers: dtype of every scalar input.
    """

    request: CompileRequest
    build: Build
    fields: dict[str, str]
    mapping: RankMapping | None = None
    ready: bool = False
    workers: dict[int, Worker] = field(default_factory=dict)
    feeds: dict[int, list[tuple[Feed, list[Inlet]]]] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    _devices: dict[int, Device] = field(default_factory=dict)
    _checked: dict[str, str] | None = None  # values that are to be finite
    _rows_checked: bool = False

    @property
    def mode(self) -> str:
        """Train, evaluate or predict."""
        return self.request.mode

    @property
    def micro_batches(self) -> int:
        """How often the part before `accumulate` runs in a step."""
        return self.build.lowered.micro_batches

    @property
    def owners(self) -> dict[str, int]:
        """Label of an output -> first rank that stores it."""
        attrs = self.build.lowered.attrs
        return {label: min(attrs[value.name].mesh.members) for label, value in self.build.lowered.outputs}

    @property
    def everywhere(self) -> bool:
        """Whether every rank of the program has every output."""
        ranks = set(self.build.ranks)
        attrs = self.build.lowered.attrs
        return all(set(attrs[value.name].mesh.members) == ranks for _, value in self.build.lowered.outputs)

    def partition(self, rank: int) -> RankProgram | None:
        """The program of a rank; None for a rank without one."""
        return self.build.program(rank) if rank in self.build.ranks else None

    def prepare(
        self,
        rank: int,
        program: RankProgram | None,
        device: Device,
        memory: Memory,
        control: Transport | None,
        *,
        mixed: bool = False,
    ) -> None:
        """Compile the program of a rank. Collective: all ranks of the world call it, also those without one.

        Args:
            rank, program: the rank and its program, see `partition`.
            device, memory: its device, the blocks of parameters and states.
            control: transport of the rank for host arrays; None where there is one rank.
            mixed: whether the ranks of the program have devices of several types.
        """
        if program is None:
            device.prepare(None)
            return
        inputs = self.build.lowered.sources("input")
        self.numbers = {str(op.attrs["name"]): op.result.dtype for op in inputs if not op.result.shape}
        device.prepare(program)
        strategy = self.request.training_spec.strategy
        actors = self.build.actor_plan if strategy.executor == "actors" else None
        with device.working():
            sources = memory.local(program.graph, rank)
            self.feeds[rank] = [
                (feed, [device.inlet(feed.shape, to_numpy(feed.dtype)) for _ in feed.rows])
                for feed in self._plan_feeds(rank)
            ]
            self.workers[rank] = Worker(
                program,
                self.build.schedule,
                device.transport,
                device.xp,
                sources,
                self._guard(control, mixed),
                fetch=device.fetch,
                actors=actors,
                control=control,
                graphs=captures_of(device) if strategy.cuda_graphs else None,
            )
        self._devices[rank] = device

    def _guard(self, control: Transport | None, mixed: bool) -> Guard | None:
        """The check that a rank makes before the update of a training step; None outside training.

        Ranks on different types of devices always agree by a message, because these round differently.
        """
        if self.mode != "train":
            return None
        if self._checked is None:
            self._checked = checked_values(self.build.parts)
        values, ranks = self._checked, self.build.ranks
        alone = not mixed and needs_no_message(self.build.parts, values, ranks)
        policy = self.request.training_spec.strategy.nonfinite
        return Guard(values, ranks, None if alone else control, policy != "warn")

    def check_rows(self, samples: int) -> None:
        """Check that outputs of parts of a data set can be joined along their first dim.

        A number for each part, such as an auxiliary loss, is returned so with a warning.

        Args:
            samples: of the data set.

        Raises:
            GraphError: an output has no rows for each sample, and the data set is more than one part.
        """
        rows, outputs = self.request.size // self.micro_batches, self.build.lowered.outputs
        if rows >= samples or self._rows_checked:
            return
        self._rows_checked = True
        twice = self.request.outputs_of(2 * rows)
        for label, value in outputs:
            shape = value.shape
            grown = (2 * shape[0], *shape[1:]) if shape else ()
            if shape and shape[0] % rows == 0 and twice.get(label, grown) == grown:
                continue
            parts = f"{label} of the model is {value.type} for {rows} samples, not rows for each of them"
            at_once = "engine without a plan" if self.request.plan is not None else "engine"
            at_once = f"predict them at once: batch_size={samples}, in an {at_once} with micro_batches=1"
            if shape:
                raise GraphError(
                    f"{parts}, but predict joins the rows of {samples} samples; return rows, or {at_once}"
                )
            if rows > 1 and is_chief():
                warnings.warn(
                    f"{parts}: predict returns a number for every {rows} samples, which depends on "
                    f"batch_size and micro_batches; leave it out, or {at_once}",
                    UserWarning,
                    stacklevel=user_stack_level(),
                )

    @property
    def updates(self) -> dict[int, int]:
        """Local rank -> how often it has updated parameters and states; -1 in the middle of an update."""
        return {rank: -1 if worker.updating else worker.updates for rank, worker in self.workers.items()}

    def nonfinite(self) -> dict[int, dict[str, tuple[int, int]]] | None:
        """Values of the last step that were not finite on the local ranks; None if no rank has any.

        They are rank -> name -> (values that are not finite, values in the block).
        """
        checks = {rank: worker.check for rank, worker in sorted(self.workers.items())}
        if all(check is None or check.passed for check in checks.values()):
            return None
        return {rank: check.nonfinite for rank, check in checks.items() if check is not None}

    def release(self) -> None:
        """Drop the workers, feeds and devices of the ranks of a world."""
        self.ready = False
        for table in (self.workers, self.feeds, self._devices):
            table.clear()

    def step(
        self, rank: int, batch: Batch, scalars: Mapping[str, Any], recorder: Recorder | None = None
    ) -> dict[str, Any]:
        """Run the program once on a rank, recorded by `recorder` if given.

        Returns the outputs that the rank stores, as host arrays.
        """
        worker = self.workers.get(rank)
        if worker is None:
            return {}
        device = self._devices[rank]
        feeds: dict[str, Any] = {
            name: to_numpy(dtype).type(scalars[name]) for name, dtype in self.numbers.items()
        }
        scaled = self.request.training_spec.strategy.scaling is not None
        # the finite check sees overflow
        errors = np.errstate(over="ignore", invalid="ignore") if scaled else nullcontext()
        with device.working(), errors:
            for feed, inlets in self.feeds[rank]:
                blocks = zip(inlets, feed.load(batch), strict=True)
                feeds[feed.name] = [inlet(block) for inlet, block in blocks]
            if recorder is not None:
                recorder.begin(device.transport, self.build.ranks, device.xp)
            return worker.step(feeds, recorder)

    def _plan_feeds(self, rank: int) -> list[Feed]:
        graph, per = self.build.lowered, self.request.size // self.micro_batches
        planned: dict[str, Feed] = {}
        for op in graph.sources("input"):
            value, attr = op.result, graph.attrs[op.name]
            if not value.shape or rank not in attr.mesh:
                continue
            bounds = attr.spec.bounds(value.shape, attr.mesh, rank)
            (start, stop), other_dims = bounds[0], tuple(slice(a, b) for a, b in bounds[1:])
            rows = tuple((m * per + start, m * per + stop) for m in range(self.micro_batches))
            shape = tuple(b - a for a, b in bounds)
            name = str(op.attrs["name"])
            planned[name] = Feed(name, self.fields[name], rows, other_dims, shape, value.dtype)
        return list(planned.values())
