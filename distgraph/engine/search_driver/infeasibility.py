"""When nothing fits: the program that exceeds memory least, what takes it, and what would make it fit.

*In:* the state of a search without an answer. *Out:* evaluations of what nearly fits, and the message of the
error. *Invariant:* every number is one of a forecast, but for the number of devices, which divides the memory
of the whole program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from distgraph.engine.search_driver.candidate import BuiltCandidate, Candidate
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.search_state import FORECASTS, Event, SearchState
from distgraph.engine.search_driver.stage_search import VariantTable, best_pipeline, variant_table
from distgraph.errors import InfeasibleError
from distgraph.ir.range_notation import spans
from distgraph.kernels._jit import has_numba
from distgraph.resources import Cluster
from distgraph.resources.units import format_bytes
from distgraph.runtime.forecast.memory_forecast import Shortage

_LEAST = 0.5
"""Share of its memory with which a device begins: an estimate may be above the forecast."""
_FACTOR_BELOW, _FACTOR_ABOVE = 1.06, 1.2
"""By which the memory grows, below what a device has and above."""
_STEPS = 64
"""How often it grows: up to 1.2 ** 52 times what a device has."""
_STAYS = ("parameters", "gradients", "states")


def evaluate_nearest(state: SearchState) -> Iterator[Event]:
    """Forecast the pipelines that need least memory: one may fit, else the error tells what is missing."""
    yield Event("the plan that exceeds memory least")
    pipelines = state.pipelines
    for count in pipelines.counts:
        if not pipelines.is_batch(count):
            continue
        table = variant_table(state.layout_costs, count, pipelines.submeshes)
        evaluated = 0
        for candidate in islice(candidates_by_memory(state.layout_costs, table), FORECASTS):
            evaluated += 1
            yield state.record(state.evaluations.evaluator.evaluate(candidate))
            if state.best is not None:
                return
        if evaluated:
            return


def candidates_by_memory(layout_costs: LayoutCosts, table: VariantTable) -> Iterator[Candidate]:
    """The best pipelines on devices with more and more memory, by the estimate, up to one that takes it all.

    They begin below what a device has: what fits by the estimate need not by its forecast. Where nothing fits
    by the estimate either, it is one pipeline, on devices with as little more as any pipeline needs.
    """
    slack, seen = _LEAST, set()
    schedule = layout_costs.constraints.start.schedule
    for _ in range(_STEPS):
        if layout_costs.expired():
            return
        try:
            pipeline = best_pipeline(layout_costs, table, slack=slack, schedule=schedule)[0]
        except InfeasibleError:
            pipeline = None
        if pipeline is not None and pipeline.decisions not in seen:
            seen.add(pipeline.decisions)
            yield pipeline
        if pipeline is not None and slack >= 1:
            return
        slack *= _FACTOR_BELOW if slack < 1 else _FACTOR_ABOVE


def infeasible_message(state: SearchState) -> str:
    """The message of a search without an answer."""
    cluster = state.cluster
    given = str(state.constraints)
    clause = f" and keeps {given}" if given else ""
    if named := state.layout_costs.named_axes:
        clause += f" with {' and '.join(named)} of two devices or more in every stage, which annotations name"
    head = f"search: no plan fits cluster {cluster.name}{clause}"
    if state.expired():
        head = f"search: no plan that fits cluster {cluster.name}{clause} was found in {state.seconds:g} s"
    unfit = [evaluation for evaluation in state.evaluations.all if not evaluation.fits]
    if not unfit and state.expired():
        return f"{head}; {_more_time()}" + (", or leave a constraint out" if given else "")
    if not unfit and given:
        broken = state.evaluations.left_out
        reasons = "; ".join(f"{origin} does not keep {constraint}" for origin, constraint in broken.items())
        return f"{head}{': ' if reasons else ''}{reasons}; leave a constraint out"
    if not unfit:
        return f"{head}; use more or larger devices, or a smaller batch"
    nearest = min(unfit, key=lambda evaluation: evaluation.memory_ratio).built(state.layout_costs)
    worst = max(nearest.shortages, key=lambda s: s.missing)
    name = nearest.origin if nearest.candidate is None else str(nearest.candidate)
    shortage = f"needs {format_bytes(worst.missing)} more on device {worst.device}: {worst}"
    more = f"{_short(nearest)}; {_of_what(nearest, worst)}; {_ways_out(cluster, nearest, worst)}"
    late = f"; {_more_time()}" if state.expired() else ""
    return f"{head}; the nearest, {name}, {shortage}; {more}{late}"


def _more_time() -> str:
    """What lets a search that its time limit ended find more."""
    interpreted = "" if has_numba() else ", or install numba, which compiles the loops of its solver"
    return f"give the search more seconds{interpreted}"


def _short(program: BuiltCandidate) -> str:
    """Which devices have too little memory."""
    ranks = sorted(rank for s in program.shortages for rank in program.forecast.ranks[s.rank])
    devices = sorted(program.forecast.devices[rank] for rank in ranks)
    return f"device{'s' * (len(devices) > 1)} {spans(devices)} of {len(program.devices)} used fall short"


def _of_what(program: BuiltCandidate, worst: Shortage) -> str:
    """What the memory is for, the largest part first."""
    parts = sorted(program.forecast.memory[worst.rank].categories.items(), key=lambda pair: -pair[1])
    return "it takes " + ", ".join(f"{format_bytes(size)} for {name}" for name, size in parts if size)


def _ways_out(cluster: Cluster, program: BuiltCandidate, worst: Shortage) -> str:
    """The nearest relaxations: memory, devices, and what the program could do with less of."""
    ways = [f"devices of {format_bytes(max(s.needed for s in program.shortages))}"]
    total = sum(
        memory.total * len(program.forecast.ranks[rank]) for rank, memory in program.forecast.memory.items()
    )
    count = math.ceil(total / min(device.memory for device in cluster.devices))
    if count > len(cluster.devices):
        ways.append(f"at least {count} devices like these")
    categories = program.forecast.memory[worst.rank].categories
    stays = sum(categories[name] for name in _STAYS)
    if worst.needed - stays >= worst.missing:
        ways.append("a smaller batch or shorter samples")
    if stays >= worst.missing:
        ways.append("a smaller model or narrower optimiser states")
    return "it would fit with " + ", or ".join(ways)
