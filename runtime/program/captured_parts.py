"""Parts of tasks that a CUDA graph can repeat: stretches of ops that are work of one stream and nothing else.

    def forward_last(m):
        einsum_2(x_1, weight_3, out=h_4)                    # %4 einsum                   a matrix product
        captured_5(forward_last_part_6, m)                  # 3 ops
        work_7 = all_reduce_start(comm, y_8, ...)           # %8 comm.all_reduce          communication

    def forward_last_part_6(m):
        add(h_4, bias_9, out=h_10)
        ...

*In:* the ops of a task. *Out:* its text, in which every longest stretch of ops that can be captured is a
function of the micro-batch alone, called through what `Captures.part` returns.
*Invariant:* a part reads and writes the same addresses in every step: buffers of the rank and, of the inputs,
arrays, which `Captures.part` takes. No number of the step is in it, no part of it communicates, and the
task waits for whatever a part reads before the part begins.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from distgraph.ir.graph import Op
from distgraph.ir.op_registry import lookup
from distgraph.kernels._common import has_raw_kernels
from distgraph.kernels.cuda.flash_attention import MOST_COLUMNS
from distgraph.passes.partition import LocalOp, LocalTask, RankProgram
from distgraph.runtime.program.codegen import Writer
from distgraph.runtime.program.storage import Storage, is_started

LOG = logging.getLogger("distgraph.cuda_graphs")

LEAST_LAUNCHES = 2
"""Launches from which a part pays: the launch of a graph costs the host about as much as that of a kernel."""

_NAMES_MEMORY = re.compile(r"\s*\w+ = ")  # a line that launches nothing: a buffer, an input or a view

Body = Callable[[int], None]
"""Runs a part for one micro-batch."""


class Captures(Protocol):
    """Runs parts of tasks, the first time as they are and later as graphs."""

    def part(self, task: str, inputs: Callable[[int], list[Any]]) -> Callable[[Body, int], None]:
        """What a task calls with the function of a part and the micro-batch.

        Args:
            task: name of the task.
            inputs: micro-batch -> the arrays of the step that the part reads.
        """


def obstacle(local: LocalOp, program: RankProgram, storage: Storage, xp: Any) -> str:
    """Why an op cannot be in a CUDA graph; "" if it can, as far as its declaration says."""
    op = local.op
    if local.mode == "loop":
        return "a loop"
    if is_started(local) or local.mode == "send":
        return "communication"
    if _number_of_step(op, program, storage):
        return "a number of the step"  # a kernel has it as an argument, which a graph would keep
    if local.mode != "compute":
        return ""
    declared = lookup(op.kind)
    if declared.micro:
        return "random numbers"
    if op.kind.startswith("opaque"):
        return "a function of another framework"
    if declared.view and any(_is_number(v.name, program, storage) for v in op.operands):
        return "a number of the host"  # it is copied to the device
    if declared.cost == "matmul" and len(op.operands) > 1 and not _is_fused_attention(local, program, xp):
        return "a matrix product"  # CuPy refuses calls of cuBLAS while a stream is captured
    return ""


def _is_number(value: str, program: RankProgram, storage: Storage) -> bool:
    """Whether a value is a number of the host: a constant or an input without dims, or a view of one."""
    slot = storage.slots.get(value)
    source = program.graph.producers[value if slot is None else slot.root]
    return source.kind in ("constant", "input") and source.result.shape == ()


def _number_of_step(op: Op, program: RankProgram, storage: Storage) -> bool:
    """Whether an op reads a number that may differ between steps, such as the learning rate."""
    numbers = [v.name for v in op.operands if _is_number(v.name, program, storage)]
    roots = (storage.slots[name].root if name in storage.slots else name for name in numbers)
    return any(program.graph.producers[root].kind == "input" for root in roots)


def _is_fused_attention(local: LocalOp, program: RankProgram, xp: Any) -> bool:
    """Whether an op is attention that kernels of distgraph compute, without cuBLAS."""
    if local.op.kind not in ("attention", "attention_grad") or not has_raw_kernels(xp):
        return False
    shapes = (program.types[v.name][0] for v in local.op.operands)
    return all(shape[-1] <= MOST_COLUMNS for shape in shapes if len(shape) == 4)


@dataclass(slots=True)
class _Part:
    """A part that is being written, and the task around it.

    Attributes:
        around: lines of the task so far.
        ready: values that have a name in the task.
        ops: number of ops.
        inputs: names of the inputs that are read.
    """

    around: list[str]
    ready: set[str]
    ops: int = 0
    inputs: list[str] = field(default_factory=list)


class CapturingWriter(Writer):
    """Writes tasks whose parts are run by `Captures`."""

    def __init__(self, captures: Captures, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.captures = captures
        self.part: _Part | None = None
        self.captured, self.parts = 0, 0
        self.reasons: Counter[str] = Counter()
        self.suffix = ""

    def emit(self, local: LocalOp, *, last: bool) -> None:
        """See `Writer`."""
        reason = obstacle(local, self.program, self.storage, self.xp)
        if reason:
            self.end_part()
            self.reasons[reason] += 1
            super().emit(local, last=last)
            return
        if self.part is None:
            self.write_together()
            self.part = _Part(self.lines, self.ready)
            # the names that are the same in all functions: of memory that stays the same in all steps
            self.lines, self.ready = [], {value for value in self.ready if self.name(value) in self.bound}
        self.part.ops += 1
        super().emit(local, last=last)

    def end_part(self) -> None:
        """Make the lines since the begin of a part a function, or leave a short one where it is."""
        self.write_together()
        part, self.part = self.part, None
        if part is None:
            return
        inside, self.lines = self.lines, part.around
        launches = sum(_NAMES_MEMORY.match(line) is None for line in inside)
        if launches < LEAST_LAUNCHES:
            self.lines += inside
            self.ready |= part.ready
            self.reasons["too short a stretch"] += part.ops
            return
        self.ready = part.ready
        self.parts, self.captured = self.parts + 1, self.captured + part.ops
        function = self.identifiers.once(f"{self.task}_{self.suffix}_part")
        run = self.captures.part(self.task, self._inputs(tuple(part.inputs)))
        self.line(f"{self.bind('captured', run)}({function}, m)  # {part.ops} ops")
        self.called.append(f"def {function}(m):\n" + "\n".join(inside))

    def _inputs(self, names: tuple[str, ...]) -> Callable[[int], list[Any]]:
        feeds = self.arena.feeds
        return lambda m: [feeds[name][m] for name in names]

    def fetch_source(self, value: str, name: str) -> None:
        """See `Writer`."""
        super().fetch_source(value, name)
        op = self.program.graph.producers[value]
        if self.part is not None and op.kind == "input" and op.result.shape:
            self.part.inputs.append(str(op.attrs["name"]))

    def finish_sends(self, root: str) -> None:
        """Write the wait before the part: a part starts no communication that it could wait for too early."""
        inside = self.lines
        if self.part is not None:
            self.lines = self.part.around
        super().finish_sends(root)
        self.lines = inside

    def wait(self, value: str) -> None:
        """See `Writer`."""
        self.end_part()
        super().wait(value)

    def elsewhere(self, local: LocalOp, task: LocalTask) -> list[str]:
        """See `Writer`. The waits of a task are outside of its parts, so the names around a part count."""
        inside = self.ready
        if self.part is not None:
            self.ready = self.part.ready
        results = super().elsewhere(local, task)
        if not results:
            self.ready = inside
        return results

    def ready_elsewhere(self, name: str) -> None:
        """See `Writer`."""
        self.end_part()
        super().ready_elsewhere(name)

    def hand_over(self, task: LocalTask, started: set[str]) -> None:
        """See `Writer`."""
        self.end_part()
        super().hand_over(task, started)

    def function(self, task: LocalTask, *, last: bool) -> list[str]:
        """See `Writer`; it also logs which ops are in graphs."""
        self.captured, self.parts, self.suffix = 0, 0, "last" if last else "body"
        self.reasons.clear()
        lines = super().function(task, last=last)
        LOG.debug(
            "rank %d, task %s%s: %d ops in %d CUDA graphs; not in one: %s",
            self.program.rank,
            task.name,
            " of the last micro-batch" if last and self.micro > 1 and task.per_micro else "",
            self.captured,
            self.parts,
            ", ".join(f"{count} ({reason})" for reason, count in self.reasons.items()) or "none",
        )
        return lines
