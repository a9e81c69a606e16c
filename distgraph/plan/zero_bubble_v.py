"""The order of ZB-V: a pipeline that goes down its stages and comes back up, with backward parts in two.

Every stage but the last has two chunks of layers, one on the way down and one on the way up; the last stage,
where the pipeline turns, has one. The first stage thus has the first and the last layers, and the first
backward part starts where the last forward part ends. Of each micro-batch a stage has the forward, backward
and weight parts of both chunks, so that there is nearly always one of them to compute.

Sources: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6, and "Pipeline Parallelism with
Controllable Memory", NeurIPS 2024, section 3. The order is found as there, by a greedy simulation: all parts
of a chunk last one unit, those of the last stage, which has as many layers as two chunks, two units. A stage
that is free computes a backward part if one is ready, else a forward part, the one on the way up first, else
a weight part. It begins a micro-batch only while fewer than p are in progress on it, so that no stage holds
more than the first stage of p does under 1F1B.
"""

from __future__ import annotations

Part = tuple[str, int, int, int]
"""Phase, stage, micro-batch, chunk (0 on the way down, 1 on the way up)."""


def zero_bubble_v(stages: int, micro_batches: int) -> dict[tuple[int, int], Part]:
    """(stage, time) -> part.

    Args:
        stages: at least 2.
        micro_batches: at least 1.

    Example:
        >>> table = zero_bubble_v(2, 1)
        >>> [part for (stage, _), part in sorted(table.items()) if stage == 1]
        [('forward', 1, 0, 0), ('backward', 1, 0, 0), ('weight', 1, 0, 0)]
    """
    simulation = _Simulation(stages, micro_batches)
    while simulation.left:
        simulation.advance()
    return simulation.table


class _Simulation:
    """The parts that are done, and those that wait, at a time."""

    def __init__(self, stages: int, micro_batches: int) -> None:
        self.stages, self.last = stages, stages - 1
        self.now = 0
        self.free = [0] * stages  # when each stage has computed what it has begun
        self.ends: dict[Part, int] = {}
        self.table: dict[tuple[int, int], Part] = {}
        self.begun = [0] * stages  # micro-batches of which a stage has computed the first forward part
        self.finished = [0] * stages  # those of which it has computed the last weight part
        # next micro-batch of each phase and chunk on each stage: parts of one kind go in order
        self.next = {
            (phase, stage, chunk): 0
            for phase in ("forward", "backward", "weight")
            for stage in range(stages)
            for chunk in self.chunks(stage)
        }
        self.micro_batches = micro_batches
        self.left = micro_batches * len(self.next)

    def chunks(self, stage: int) -> tuple[int, ...]:
        """Of a stage."""
        return (0,) if stage == self.last else (0, 1)

    def advance(self) -> None:
        """Let every free stage begin a part, and go on to the next time."""
        for stage in range(self.stages):
            if self.free[stage] > self.now:
                continue
            part = self.choice(stage)
            if part is not None:
                self.begin(part)
        self.now += 1

    def choice(self, stage: int) -> Part | None:
        """What a stage computes next: a part that is ready, by the order of preference."""
        preferred = [("backward", chunk) for chunk in self.chunks(stage)]
        preferred += [("forward", chunk) for chunk in reversed(self.chunks(stage))]
        preferred += [("weight", chunk) for chunk in reversed(self.chunks(stage))]
        for phase, chunk in preferred:
            micro = self.next[phase, stage, chunk]
            part = phase, stage, micro, chunk
            if micro < self.micro_batches and self.is_ready(part):
                return part
        return None

    def is_ready(self, part: Part) -> bool:
        """Whether what a part needs is done, and the stage has memory for it."""
        phase, stage, _, chunk = part
        if (phase, chunk) == ("forward", 0) and self.begun[stage] - self.finished[stage] >= self.stages:
            return False
        return all(self.ends.get(needed, self.now + 1) <= self.now for needed in self.needs(part))

    def needs(self, part: Part) -> list[Part]:
        """The parts whose results a part needs."""
        phase, stage, micro, chunk = part
        if phase == "weight":
            return [("backward", stage, micro, chunk)]
        if phase == "forward":
            if chunk == 0:
                return [(phase, stage - 1, micro, 0)] if stage else []
            return [(phase, stage + 1, micro, self.returning(stage + 1))]
        same_stage: Part = ("forward", stage, micro, chunk)
        if stage == self.last:
            return [same_stage, (phase, stage - 1, micro, 1)]
        if chunk == 0:
            return [same_stage, (phase, stage + 1, micro, 0)]
        return [same_stage, (phase, stage - 1, micro, 1)] if stage else [same_stage]

    def returning(self, stage: int) -> int:
        """The chunk of a stage on the way up, which is its only one on the last stage."""
        return 0 if stage == self.last else 1

    def begin(self, part: Part) -> None:
        """Begin a part now."""
        phase, stage, _, chunk = part
        self.table[stage, self.now] = part
        self.free[stage] = self.ends[part] = self.now + (2 if stage == self.last else 1)
        self.next[phase, stage, chunk] += 1
        self.begun[stage] += (phase, chunk) == ("forward", 0)
        self.finished[stage] += (phase, chunk) == ("weight", 0)
        self.left -= 1
