"""From measured seconds to the numbers of a resource file: convex, non-negative, robust.

*In:* works with their seconds; collectives with theirs.
*Out:* `Compute` of a device with the relative error of every number; launch time, latencies and bandwidths of
links likewise.

Fits are those of `robust_fitting.py`. Errors of links are relative to the measured times, which spread
because of disturbances, and the fit is near the median. Errors of ops are relative to the fit: after the mean
over rounds, their times spread because the same op takes longer in one place than in another (the first of
its kind has cold caches). A step is the sum of all ops, so the fit must be near the mean; errors relative to
the measured time would weight long times less than short ones and underestimate sums.

The efficiency of matmuls by shape is fitted in `matmul_fitting.py`. A table of one kind of op is an
increasing piecewise linear function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from distgraph.ir.op_registry import REGISTRY
from distgraph.resources import Cluster, CollectiveCost
from distgraph.resources.cluster import Compute, MatmulRate, OpTable
from distgraph.runtime.forecast.op_cost import Work
from distgraph.runtime.profile.matmul_fitting import fit_matmul
from distgraph.runtime.profile.robust_fitting import TURNS, Vector, expected, mean_error, robust

_SMALL, _LARGE = 2**16, 2**18  # bytes up to which starting an op, and from which moving bytes, decides
_SPACING: Final = 3.0  # least factor between two knots of a table


@dataclass(frozen=True, slots=True)
class ComputeFit:
    """Numbers of one device.

    Attributes:
        compute: efficiencies, launch time, tables, with their errors.
        memory_bandwidth: bytes/s that the efficiencies refer to.
        measured: FLOP/s of large matmuls by dtype, where the file states no peak.
    """

    compute: Compute
    memory_bandwidth: float
    measured: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Message:
    """A measured collective: devices of one group, of the concurrent groups, bytes, seconds."""

    kind: str
    group: tuple[int, ...]
    concurrent: tuple[tuple[int, ...], ...]
    nbytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LinkFit:
    """Numbers of the links.

    Attributes:
        launch: seconds that starting a collective costs.
        latency, bandwidth: by origin of the link in the resource file; only of links that were used.
        error: mean relative error of small messages (launch, latency) and of large ones (bandwidth).
    """

    launch: float
    latency: Mapping[str, float]
    bandwidth: Mapping[str, float]
    error: Mapping[str, float]


def fit_compute(
    samples: Sequence[tuple[Work, float]], peak: Mapping[str, float], memory_bandwidth: float | None
) -> ComputeFit:
    """Numbers of a device from works and their seconds.

    Args:
        samples: of all classes.
        peak: FLOP/s by dtype that the resource file states.
        memory_bandwidth: bytes/s that it states; raised where streams are faster.

    Raises:
        ResourceError: no small or no large op that streams through memory was measured.
    """
    error: dict[str, float] = {}
    small = _select(samples, "memory", most=_SMALL)
    launch = float(robust(_columns(small, 1.0, "nbytes"), _seconds(small))[0])
    per_byte, error["memory_efficiency"] = _slope(_select(samples, "memory", least=_LARGE), launch)
    near = [(work, s) for work, s in small if work.nbytes <= _SMALL // 16]
    error["launch"] = mean_error(launch + per_byte * _columns(near, "nbytes")[:, 0], _seconds(near))
    bandwidth = max(memory_bandwidth or 0.0, 1 / per_byte)
    lookups = _select(samples, "lookup")
    lookup_efficiency = None
    if lookups:
        slope, error["lookup_efficiency"] = _slope(lookups, launch)
        lookup_efficiency = _fraction(1 / (slope * bandwidth))
    measured, rates, launches = {}, {}, dict[str, dict[str, OpTable]]()
    per_flop: dict[str, float] = {}
    for dtype in dict.fromkeys(work.dtype for work, _ in samples):
        products = [s for s in _select(samples, "matmul") if s[0].dtype == dtype and _costs_by_shape(s[0].op)]
        if products:
            fit = fit_matmul(products)
            for op, start in fit.launches.items():
                launches.setdefault(op, {})[dtype] = OpTable(launch=start)
            if dtype not in peak:
                measured[dtype] = fit.rate
            efficiency = _fraction(fit.rate / peak.get(dtype, fit.rate))
            per_flop[dtype] = 1 / fit.rate
            error_of = {"efficiency": fit.error}
            rates[dtype] = MatmulRate(efficiency, fit.half, error_of, fit.copied, fit.exponent, fit.moved)
    ops = {**fit_tables(samples, per_byte, per_flop), **launches}
    compute = Compute(launch, _fraction(1 / (per_byte * bandwidth)), lookup_efficiency, rates, ops, error)
    return ComputeFit(compute, bandwidth, measured)


def _costs_by_shape(kind: str) -> bool:
    """Whether the rate of a matmul of its shape gives the cost of an op; others have tables."""
    declared = REGISTRY.get(kind.removesuffix("+="))
    return declared is not None and declared.cost == "matmul" and declared.matmul_dims is None


def _fraction(number: float) -> float:
    return min(1.0, max(number, 1e-6))


def _select(
    samples: Sequence[tuple[Work, float]], kind: str, least: float = 0, most: float = math.inf
) -> list[tuple[Work, float]]:
    return [(work, s) for work, s in samples if work.kind == kind and least <= work.nbytes <= most]


def _seconds(samples: Sequence[tuple[Work, float]]) -> Vector:
    return np.array([seconds for _, seconds in samples])


def _columns(samples: Sequence[tuple[Work, float]], *columns: str | float) -> Vector:
    """A column for each field of the works, or of a number."""
    rows = [[getattr(work, c) if isinstance(c, str) else c for c in columns] for work, _ in samples]
    return np.array(rows, float).reshape(len(samples), len(columns))


def _slope(samples: Sequence[tuple[Work, float]], launch: float) -> tuple[float, float]:
    """Seconds per byte in addition to the launch time, and the mean relative error."""
    rows, seconds = _columns(samples, "nbytes"), _seconds(samples)
    slope = max(float(expected(rows, seconds, launch)[0]), 1e-15)
    return slope, mean_error(launch + slope * rows[:, 0], seconds)


def fit_tables(
    samples: Sequence[tuple[Work, float]], per_byte: float, per_flop: Mapping[str, float]
) -> dict[str, dict[str, OpTable]]:
    """Kind of op -> dtype -> seconds by bytes, or by FLOPs of contractions that are no plain matmul.

    A kind that was measured on few bytes only has a launch time and no table: for more work, the costs of its
    class apply.
    """
    kinds: dict[tuple[str, str], list[tuple[Work, float]]] = {}
    for work, seconds in samples:
        if work.op and not _costs_by_shape(work.op):
            kinds.setdefault((work.op, work.dtype), []).append((work, seconds))
    tables: dict[str, dict[str, OpTable]] = {}
    for (op, dtype), op_samples in sorted(kinds.items()):
        if op_samples[0][0].kind == "matmul" and any(any(work.patches) for work, _ in op_samples):
            tables.setdefault(op, {})[dtype] = fit_rates(op_samples, per_flop.get(dtype, 0.0))
            continue
        unit = "flops" if op_samples[0][0].kind == "matmul" else "bytes"
        amounts = _columns(op_samples, "flops" if unit == "flops" else "nbytes")[:, 0]
        if unit == "bytes" and amounts.max() <= _SMALL:
            start = max(float(np.mean(_seconds(op_samples) - per_byte * amounts)), 1e-9)
            wrong = mean_error(start + per_byte * amounts, _seconds(op_samples))
            tables.setdefault(op, {})[dtype] = OpTable(error=wrong, launch=start)
        elif amounts.min() > 0:
            tables.setdefault(op, {})[dtype] = fit_table(unit, amounts, _seconds(op_samples))
    return tables


def fit_rates(samples: Sequence[tuple[Work, float]], least: float = 0.0) -> OpTable:
    """Seconds to start a convolution, for a FLOP, for an element and for a row of its patches; and of those
    that compiled loops compute, for a FLOP, a copied element and a tile.

    Args:
        samples: of one kind, of which not all have as many patches for a FLOP, nor rows as long.
        least: seconds of a FLOP of large matmuls; patches are not multiplied in less.
    """
    none, seconds = (0.0, 0.0, 0.0), _seconds(samples)
    rows = np.array(
        [(1.0, *none, *w.tiles) if any(w.tiles) else (1.0, w.flops, *w.patches, *none) for w, _ in samples]
    )
    limits = least * (rows[:, 1] + rows[:, 4])
    start, *rates = map(float, expected(rows, seconds, limits))
    rates[0], rates[3] = rates[0] + least, rates[3] + least
    wrong = mean_error(rows @ (start, *rates), seconds)
    copies, loops = rows[:, 1].any(), rows[:, 4].any()
    return OpTable(
        error=wrong,
        launch=max(start, 1e-9),
        rates=(rates[0], rates[1], rates[2]) if copies else None,
        tile_rates=(rates[3], rates[4], rates[5]) if loops else None,
    )


def fit_table(unit: str, amounts: Vector, seconds: Vector) -> OpTable:
    """A rising line through knots, the largest amount among them; less than the first knot takes as long.

    Args:
        unit: "bytes" or "flops".
        amounts: positive; of what was measured. seconds: of each.
    """
    knots = [float(amounts.max())]
    for amount in sorted(set(amounts.tolist()), reverse=True):
        if amount * _SPACING <= knots[0]:
            knots.insert(0, amount)
    places, weights = np.array([0.0, *knots]), np.zeros((len(amounts), len(knots) + 1))
    right = np.clip(np.searchsorted(places, amounts), 1, len(knots))
    share = (amounts - places[right - 1]) / (places[right] - places[right - 1])
    weights[np.arange(len(amounts)), right - 1] = 1 - share
    weights[np.arange(len(amounts)), right] = share
    weights = np.column_stack(
        [weights[:, 0] + weights[:, 1], weights[:, 2:]]
    )  # the same up to the first knot
    # Rising: the unknowns are the steps from knot to knot.
    steps = np.tril(np.ones((len(knots), len(knots))))
    times = np.maximum(np.cumsum(expected(weights @ steps, seconds)), 1e-9)
    start = float(times[0])
    table = OpTable(times=tuple(map(float, times)), error=mean_error(weights @ times, seconds), launch=start)
    return replace(table, bytes=tuple(knots)) if unit == "bytes" else replace(table, flops=tuple(knots))


def fit_links(cluster: Cluster, messages: Sequence[Message]) -> LinkFit:
    """Launch time of collectives, latencies and bandwidths of all links that the messages use.

    The time of a collective is linear in these numbers for a given algorithm and bottleneck link, which are
    those of the previous iteration.

    Raises:
        ResourceError: no message was measured.
    """
    present, origins = (
        _with_initial_numbers(cluster),
        list(dict.fromkeys(link.origin for link in cluster.links)),
    )
    prior = _stated_numbers(cluster, origins)
    seconds = np.array([m.seconds for m in messages])
    like = _typical_seconds(messages)
    x, rows = np.zeros(1 + 2 * len(origins)), np.zeros((len(messages), 1 + 2 * len(origins)))
    for turn in range(TURNS):
        # First every class of links that may be the bottleneck, then those that are with the numbers.
        rows = _link_rows(present, origins, messages, 1.0 if turn < TURNS // 2 else 1e-12)
        x = robust(rows, seconds, prior, like)
        present = _with_numbers(present, origins, x)
    used = [bool(column.any()) for column in rows.T]
    predicted, small = rows @ x, np.array([m.nbytes for m in messages]) <= _SMALL
    error = {
        "latency": mean_error(predicted[small], seconds[small], like[small]),
        "bandwidth": mean_error(predicted[~small], seconds[~small], like[~small]),
    }
    count = len(origins)
    return LinkFit(
        float(x[0]),
        {o: float(x[1 + i]) for i, o in enumerate(origins) if used[1 + i]},
        {
            o: 1 / float(x[1 + count + i])
            for i, o in enumerate(origins)
            if used[1 + count + i] and x[1 + count + i]
        },
        error,
    )


def link_bounds(cluster: Cluster, messages: Sequence[Message]) -> list[float]:
    """Least seconds of every message: those for which its bytes use the slowest link on their way.

    The seconds of a byte on a link are those of the largest message of every collective and pattern of
    groups, whose time a delay of a rank changes least; of these the lower quartile, because a collective that
    sends more bytes than the cheapest algorithm would makes a link look slow.

    Raises:
        ResourceError: no message was measured.
    """
    origins = list(dict.fromkeys(link.origin for link in cluster.links))
    fit = fit_links(cluster, messages)
    x = np.array([fit.launch, *(fit.latency.get(o, 0.0) for o in origins), *(0.0 for _ in origins)])
    x[1 + len(origins) :] = [1 / fit.bandwidth[o] if o in fit.bandwidth else 0.0 for o in origins]
    present = _with_numbers(_with_initial_numbers(cluster), origins, x)
    used = _link_rows(present, origins, messages, 1e-12)[:, 1 + len(origins) :]
    largest: dict[tuple[str, object, object], int] = {}
    for place, message in enumerate(messages):
        key = message.kind, message.group, message.concurrent
        if key not in largest or messages[largest[key]].nbytes < message.nbytes:
            largest[key] = place
    bounds = np.zeros(len(messages))
    for column in used.T:
        per_byte = [messages[place].seconds / column[place] for place in largest.values() if column[place]]
        bounds += column * (np.quantile(per_byte, 0.25) if per_byte else 0.0)
    return [float(seconds) for seconds in bounds]


def _typical_seconds(messages: Sequence[Message]) -> Vector:
    """What the errors of messages are relative to: their seconds, but no less than half of what is usual.

    The time of a message on shared cores is a difference, which may come out as almost nothing. An error
    relative to that would outweigh all other messages. Usual is the median over messages of the same size.
    """
    by_size: dict[float, list[float]] = {}
    for message in messages:
        by_size.setdefault(message.nbytes, []).append(message.seconds)
    usual = {nbytes: float(np.median(seconds)) for nbytes, seconds in by_size.items()}
    return np.array([max(message.seconds, usual[message.nbytes] / 2) for message in messages])


def _with_initial_numbers(cluster: Cluster) -> Cluster:
    """The cluster with initial numbers wherever the file states none, for the first iteration."""
    links = tuple(
        replace(link, bandwidth=link.bandwidth or 1e9, latency=1e-6 if link.latency is None else link.latency)
        for link in cluster.links
    )
    network = replace(cluster.network, rings=())  # what is measured now does not follow from numbers of rings
    return replace(cluster, links=links, launch=cluster.launch or 0.0, measured=(), network=network)


def _stated_numbers(cluster: Cluster, origins: Sequence[str]) -> Vector:
    """Inverse bandwidths and latencies that the file states; nan where it does not."""
    numbers = np.full(1 + 2 * len(origins), np.nan)
    for link in cluster.links:
        index = origins.index(link.origin)
        if link.latency is not None:
            numbers[1 + index] = max(link.latency, 1e-7)  # the prior is relative: it may not be zero
        if link.bandwidth:
            numbers[1 + len(origins) + index] = 1 / link.bandwidth
    return numbers


def _with_numbers(cluster: Cluster, origins: Sequence[str], x: Vector) -> Cluster:
    links = []
    for link in cluster.links:
        index = origins.index(link.origin)
        inverse = max(float(x[1 + len(origins) + index]), 1e-14)
        links.append(replace(link, latency=float(x[1 + index]), bandwidth=1 / inverse))
    return replace(cluster, links=tuple(links), launch=float(x[0]))


def _link_rows(
    cluster: Cluster, origins: Sequence[str], messages: Sequence[Message], increment: float
) -> Vector:
    """Coefficients of launch, latencies and inverse bandwidths in the seconds of every message.

    Args:
        increment: seconds by which a latency is increased to compute the finite difference.
    """
    cost, count = CollectiveCost(cluster), len(origins)
    steps = []
    for origin in origins:
        links = tuple(
            replace(k, latency=(k.latency or 0.0) + increment) if k.origin == origin else k
            for k in cluster.links
        )
        steps.append(CollectiveCost(replace(cluster, links=links)))
    rows = np.zeros((len(messages), 1 + 2 * count))
    for row, message in zip(rows, messages, strict=True):
        pattern = (message.kind, message.group, message.concurrent)
        lines: Any = cost.lines(*pattern)
        best = min(lines, key=lambda line: line.alpha + line.beta * message.nbytes)
        row[0] = 1.0
        for index, unit in enumerate(steps):
            same = [line.alpha for line in unit.lines(*pattern) if line.algorithm == best.algorithm]
            row[1 + index] = (same[0] - best.alpha) / increment if same else 0.0
        if best.bottleneck is not None:
            index = origins.index(best.bottleneck.origin)
            row[1 + count + index] = best.beta * best.bottleneck.bandwidth * message.nbytes
    return rows
