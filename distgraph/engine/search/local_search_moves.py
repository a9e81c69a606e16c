"""Rows of stages that differ from one in a single decision (the prices of memory of all stages being one): a
forecast may like one better.

*In:* a `Proposal`. *Out:* others. *Invariant:* every layer has one stage, and no stage is empty; devices
stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from distgraph.engine.search.candidate import Proposal, StageChoice
from distgraph.engine.search.load_balancing import rebalanced
from distgraph.plan.schedule_policies import searched_schedules

_CHEAPER = (0.25, 0.5)  # of the price of memory


def neighbours(
    proposal: Proposal, counts: Sequence[int] = (), kinds: Sequence[int] = ()
) -> Iterator[Proposal]:
    """Other shares of samples, a lower price of memory, another number of micro-batches, a border moved by
    one layer, two stages exchanged, all in reverse, another schedule.

    Prices of memory are few where rows are found, and what a program holds is above the estimate or below it:
    between one that does not suffice and one that does may lie faster layouts that fit.

    Exchanged stages keep their devices and about their share of the layers. Layers that are computed again
    stay the same.

    Args:
        proposal: of any number of stages.
        counts: of micro-batches, where layouts depend neither on a price of memory, which is for one of them,
            nor on shares of samples.
        kinds: of all devices of the cluster: samples pass from one kind to another.
    """
    yield from _shared(proposal, kinds)
    for part in _CHEAPER if any(stage.memory_price for stage in proposal.stages) else ():
        cheaper = (replace(stage, memory_price=part * stage.memory_price) for stage in proposal.stages)
        yield replace(proposal, stages=tuple(cheaper))
    for count in sorted(counts, key=lambda count: abs(count - proposal.micro_batches)):
        if count != proposal.micro_batches and not of_one_count(proposal):
            yield replace(proposal, micro_batches=count)
    for stages in _moved(proposal.stages):
        yield replace(proposal, stages=stages)
    for schedule in searched_schedules() if len(proposal.stages) > 1 else ():
        if schedule != proposal.schedule:
            yield replace(proposal, schedule=schedule)


def of_one_count(proposal: Proposal) -> bool:
    """Whether its layouts are for one number of micro-batches."""
    return any(stage.memory_price or stage.shape.samples for stage in proposal.stages)


def _shared(proposal: Proposal, kinds: Sequence[int]) -> Iterator[Proposal]:
    """Other shares of samples."""
    stages = proposal.stages
    for at, stage in enumerate(stages):
        if stage.shape.samples:
            inner = stage.shape.size // len(stage.shape.samples)
            own = [kinds[device] for device in stage.devices[::inner]]
            for shape in rebalanced(stage.shape, own):
                yield replace(proposal, stages=(*stages[:at], replace(stage, shape=shape), *stages[at + 1 :]))


def _moved(stages: tuple[StageChoice, ...]) -> Iterator[tuple[StageChoice, ...]]:
    """A border moved by one layer, two stages exchanged, all in reverse."""
    for at in range(1, len(stages)):
        before, behind = stages[at - 1 : at + 1]
        for border in (before.stop - 1, before.stop + 1):
            if before.first < border < behind.stop:
                moved = replace(before, stop=border), replace(behind, first=border)
                yield (*stages[: at - 1], *moved, *stages[at + 1 :])
    for at in range(1, len(stages)):
        before, behind = stages[at - 1 : at + 1]
        if not _alike(before, behind):
            yield (*stages[: at - 1], *_row(before.first, (behind, before)), *stages[at + 1 :])
    if len(stages) > 2 and not all(_alike(a, b) for a, b in pairwise(stages)):
        yield _row(0, stages[::-1])


def _alike(one: StageChoice, other: StageChoice) -> bool:
    """Whether exchanging them may only change which devices of a kind they have."""
    return (one.shape, one.memory_price, one.stop - one.first, len(one.devices)) == (
        other.shape,
        other.memory_price,
        other.stop - other.first,
        len(other.devices),
    )


def _row(first: int, stages: tuple[StageChoice, ...]) -> tuple[StageChoice, ...]:
    """Stages one behind the other, with as many layers as they had."""
    found = []
    for stage in stages:
        stop = first + stage.stop - stage.first
        found.append(replace(stage, first=first, stop=stop))
        first = stop
    return tuple(found)
