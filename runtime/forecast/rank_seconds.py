"""Seconds that every rank computes in a step, each on its own device, by the forecast.

*In:* a `Build`, a cluster, a device for every rank.
*Out:* rank -> seconds of its tasks in which it does not wait for communication.
*Invariant:* a rank is represented by another one only if both do the same work on devices of one kind. Ranks
that share cores compute as fast as in the forecast of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from distgraph.resources import Cluster
from distgraph.runtime.forecast.core_contention import core_groups
from distgraph.runtime.forecast.forecast import StepForecaster
from distgraph.runtime.forecast.program_structure import ProgramStructure
from distgraph.runtime.forecast.rank_equivalence import representative_ranks
from distgraph.runtime.program.build import Build


def rank_seconds(build: Build, cluster: Cluster, devices: Sequence[int]) -> dict[int, float]:
    """Seconds of computation of every rank in a step.

    Args:
        build: the compiled program.
        cluster: what it runs on.
        devices: device of every rank.

    Raises:
        ResourceError: a number that a cost needs is not in the resource file.
    """
    structure = ProgramStructure(build)
    forecaster = StepForecaster(structure, cluster, tuple(devices), None, False)
    if core_groups(cluster, {r: devices[r] for column in build.schedule.columns for r in column.ranks}):
        of_step = StepForecaster(structure, cluster, tuple(devices), None, False)
        of_step.run()
        forecaster.speeds = of_step.speeds
    kinds = [(cluster.devices[device].model, cluster.devices[device].origin) for device in devices]
    represented: dict[int, int] = {}
    for column in build.schedule.columns:
        chosen, even = representative_ranks(
            build, column.ranks, forecaster.structure.uneven, cluster, devices
        )
        first = {kinds[rank]: rank for rank in chosen}
        represented |= {rank: first[kinds[rank]] if even else rank for rank in column.ranks}
    for rank in sorted(set(represented.values())):
        forecaster.time_rank(rank)
    seconds = dict.fromkeys(represented.values(), 0.0)
    others = build.task_graph.micro_batches - 1
    per_micro = {part.name: part.per_micro for part in build.parts.tasks}
    for times in forecaster.times.values():
        for task in times:
            seconds[task.rank] += task.last.seconds - task.last.exposed
            if per_micro[task.name]:
                seconds[task.rank] += others * (task.body.seconds - task.body.exposed)
    return {rank: seconds[other] for rank, other in sorted(represented.items())}
