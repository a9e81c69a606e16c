"""How many micro-batches are alive on a stage at once, read off a timeline."""

from __future__ import annotations

from distgraph.runtime.schedule.timeline import Timeline


def peak_live(timeline: Timeline) -> tuple[int, ...]:
    """For each stage, the largest number of micro-batches that are alive there at once.

    A micro-batch lives on a stage from the start of its first forward task there to the end of its last
    backward task there; to the end of its last task there when the stage has no backward task.
    """
    tasks = {task.name: task for task in timeline.graph.tasks}
    trained = {task.stage for task in timeline.graph.tasks if task.kind == "backward"}
    born: dict[tuple[int, int], float] = {}
    died: dict[tuple[int, int], float] = {}
    for run in timeline.intervals:
        task = tasks[run.task]
        key = (task.stage, run.micro)
        if task.kind == "forward":
            born[key] = min(born.get(key, run.start), run.start)
        if task.kind == "backward" or (task.per_micro and task.stage not in trained):
            died[key] = max(died.get(key, run.end), run.end)
    peaks = [0] * timeline.graph.stages
    alive = [0] * timeline.graph.stages
    # at one moment a buffer is freed before it is taken again
    steps = [(time, 1, key[0]) for key, time in born.items()]
    steps += [(time, -1, key[0]) for key, time in died.items() if key in born]
    for _, change, stage in sorted(steps):
        alive[stage] += change
        peaks[stage] = max(peaks[stage], alive[stage])
    return tuple(peaks)
