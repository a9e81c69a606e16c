"""When nothing fits: the program that lacks least, what of it takes the memory, and what would make it fit.

*In:* the program that lacks least. *Out:* a proposal to forecast besides, the message. *Invariant:* every
number is one of a forecast, but for the number of devices, which divides the memory of the whole program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from distgraph.engine.search.candidate import Proposal, Realized
from distgraph.engine.search.layout_costs import Oracle
from distgraph.engine.search.stage_search import Front, best_row
from distgraph.errors import InfeasibleError
from distgraph.ir.name_ranges import spans
from distgraph.resources import Cluster
from distgraph.resources.units import format_bytes
from distgraph.runtime.forecast.memory_forecast import Shortage

_LEAST = 0.5  # share of its memory from which on a device is given more and more
_STEP, _STRIDE = 1.06, 1.2  # by so much, below what it has and above
_STEPS = 64
_STAYS = ("parameters", "gradients", "states")


def leanest(oracle: Oracle, found: Front) -> Iterator[Proposal]:
    """The best rows on devices with more and more memory, by the estimate, up to one that takes all there is.

    They begin below what a device has: what fits by the estimate need not by its forecast. Where nothing fits
    by the estimate either, it is one row, on devices with as little more as any row needs.

    Args:
        oracle: of the program.
        found: costs of stages.
    """
    slack, seen = _LEAST, set()
    for _ in range(_STEPS):
        if oracle.expired():
            return
        try:
            row = best_row(oracle, found, slack=slack)[0]
        except InfeasibleError:
            row = None
        if row is not None and row.decisions not in seen:
            seen.add(row.decisions)
            yield row
        if row is not None and slack >= 1:
            return
        slack *= _STEP if slack < 1 else _STRIDE


def nothing_fits(cluster: Cluster, nearest: Realized | None, seconds: float | None) -> str:
    """The message of a search without an answer.

    Args:
        cluster: what was searched for.
        nearest: the program that lacks least; None where none was forecast.
        seconds: that the search had, where they ran out.
    """
    head = f"search: no plan fits cluster {cluster.name}"
    if seconds is not None:
        head = f"search: no plan that fits cluster {cluster.name} was found in {seconds:g} s"
    if nearest is None:
        return f"{head}; use more or larger devices, or a smaller batch"
    worst = max(nearest.shortages, key=lambda s: s.missing)
    what = nearest.origin if nearest.proposal is None else str(nearest.proposal)
    lacks = f"lacks {format_bytes(worst.missing)} on device {worst.device}: {worst}"
    more = f"{_short(nearest)}; {_of_what(nearest, worst)}; {_ways_out(cluster, nearest, worst)}"
    return f"{head}; the nearest, {what}, {lacks}; {more}"


def _short(found: Realized) -> str:
    """Which devices lack memory."""
    ranks = sorted(rank for s in found.shortages for rank in found.forecast.ranks[s.rank])
    devices = sorted(found.forecast.devices[rank] for rank in ranks)
    return f"device{'s' * (len(devices) > 1)} {spans(devices)} of {len(found.devices)} used fall short"


def _of_what(found: Realized, worst: Shortage) -> str:
    """What the memory is for, the largest part first."""
    parts = sorted(found.forecast.memory[worst.rank].categories.items(), key=lambda pair: -pair[1])
    return "it takes " + ", ".join(f"{format_bytes(size)} for {name}" for name, size in parts if size)


def _ways_out(cluster: Cluster, found: Realized, worst: Shortage) -> str:
    """The nearest relaxations: memory, devices, and what the program could do with less of."""
    ways = [f"devices of {format_bytes(max(s.needed for s in found.shortages))}"]
    total = sum(
        memory.total * len(found.forecast.ranks[rank]) for rank, memory in found.forecast.memory.items()
    )
    count = math.ceil(total / min(device.memory for device in cluster.devices))
    if count > len(cluster.devices):
        ways.append(f"at least {count} devices like these")
    categories = found.forecast.memory[worst.rank].categories
    stays = sum(categories[name] for name in _STAYS)
    if worst.needed - stays >= worst.missing:
        ways.append("a smaller batch or shorter samples")
    if stays >= worst.missing:
        ways.append("a smaller model or narrower optimiser states")
    return "it would fit with " + ", or ".join(ways)
