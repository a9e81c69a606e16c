"""Local search for the rank mapping: steepest swaps and moves, then Kernighan-Lin passes.

In: a Problem (weights between ranks, distance between places, which rank may run on which device) and a mapping.
Out: a mapping that costs no more. Invariant: one rank per device, each rank on a device it is allowed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from distgraph.errors import ResourceError
from distgraph.resources.cluster import Cluster
from distgraph.resources.routing import Router

_DEVICE_LEVEL = 128  # clusters up to this size price every pair of devices; larger ones pairs of machines
_PASS_LIMIT = 512  # ranks up to which Kernighan-Lin passes run; beyond it plain descent
_PATIENCE = 48  # steps of a pass without a new best before it is given up


@dataclass(frozen=True, slots=True)
class Problem:
    """weights: symmetric bytes between ranks [ranks, ranks]; allowed: [ranks, devices];

    place_of: place (machine or device) of each device; between: distance of two places, symmetric.
    """

    weights: csr_array[Any, Any]
    allowed: np.ndarray
    place_of: np.ndarray
    between: np.ndarray

    def row(self, rank: int) -> np.ndarray:
        """Bytes between this rank and every other."""
        return np.asarray(self.weights[[rank], :].toarray()).ravel()

    def cost(self, mapping: np.ndarray) -> float:
        """Sum over pairs of ranks of bytes x distance."""
        pairs = self.weights.tocoo()
        places = self.place_of[mapping]
        return float((pairs.data * self.between[places[pairs.row], places[pairs.col]]).sum() / 2)


def distances(cluster: Cluster, objective: str) -> tuple[np.ndarray, np.ndarray]:
    """Place of each device, and distance between places.

    "bytes": places are machines, 1 apart. "seconds": seconds per byte over the narrowest link of the route; between
    devices, or in clusters above 128 devices between machines (a machine's own pairs as its first two devices).

    Raises:
        ResourceError: an unknown objective, or a bandwidth that the resource file does not state.
    """
    machine_of = np.array([device.machine for device in cluster.devices])
    if objective == "bytes":
        return machine_of, 1.0 - np.eye(len(cluster.machines))
    if objective != "seconds":
        raise ResourceError(f'objective {objective}: unknown; use "bytes" or "seconds"')
    router = Router(cluster)
    if len(cluster.devices) <= _DEVICE_LEVEL:
        place_of, faces = np.arange(len(cluster.devices)), [(d.index, d.index) for d in cluster.devices]
    else:
        place_of, faces = machine_of, [(m.devices[0], m.devices[min(1, len(m.devices) - 1)]) for m in cluster.machines]
    between = np.zeros((len(faces), len(faces)))
    for a, (here, second) in enumerate(faces):
        for b in range(a + 1):
            source, target = (here, faces[b][0]) if a != b else (here, second)
            if source != target:
                between[a, b] = between[b, a] = _seconds_per_byte(cluster, router, source, target)
    return place_of, between


def _seconds_per_byte(cluster: Cluster, router: Router, source: int, target: int) -> float:
    narrowest = 0.0
    for directed in router.route(source, target).links:
        link = router.link(directed)
        if link.bandwidth is None:
            raise ResourceError(
                f"{cluster.source}: {link.origin}.bandwidth: missing, needed to map ranks by seconds over {link}; "
                'add bandwidth such as "25 GB/s", or map by bytes'
            )
        narrowest = max(narrowest, 1.0 / link.bandwidth)
    return narrowest


class _State:
    """A mapping under change. load[r, p]: cost of rank r's traffic if it sat at place p, the others as they are."""

    def __init__(self, problem: Problem, mapping: np.ndarray) -> None:
        self.problem = problem
        self.mapping = mapping.copy()
        self.places = problem.place_of[self.mapping]
        self.rank_on = np.full(problem.allowed.shape[1], -1, dtype=np.int64)
        self.rank_on[self.mapping] = np.arange(len(mapping))
        self.load = np.asarray(problem.weights @ problem.between[self.places, :])

    def gains(self, rank: int) -> np.ndarray:
        """Saving of giving `rank` each device (swapping with whoever sits there); -inf where not allowed."""
        problem = self.problem
        place, mine = self.places[rank], self.load[rank]
        gain = np.where(problem.allowed[rank], mine[place] - mine[problem.place_of], -np.inf)
        taken = np.flatnonzero(self.rank_on >= 0)
        others = self.rank_on[taken]
        theirs = self.load[others, self.places[others]] - self.load[others, place]
        # Between the two nothing changes, but each load counted the other as staying: put that right, twice.
        apart = problem.between[place, self.places[others]]
        same = problem.between[place, place] + problem.between[self.places[others], self.places[others]]
        theirs = theirs - problem.row(rank)[others] * (2 * apart - same)
        gain[taken] += np.where(problem.allowed[others, self.mapping[rank]], theirs, -np.inf)
        gain[self.mapping[rank]] = -np.inf
        return gain

    def give(self, rank: int, device: int) -> None:
        """Put the rank on the device; whoever sits there takes the rank's old one."""
        other, old = int(self.rank_on[device]), int(self.mapping[rank])
        self.rank_on[old] = other
        self._settle(rank, device)
        if other >= 0:
            self._settle(other, old)

    def _settle(self, rank: int, device: int) -> None:
        before, after = self.places[rank], self.problem.place_of[device]
        self.mapping[rank], self.places[rank], self.rank_on[device] = device, after, rank
        if before != after:
            change = self.problem.between[after] - self.problem.between[before]
            row = self.problem.weights[[rank], :].tocoo()
            self.load[row.col] += np.outer(row.data, change)


def refine(problem: Problem, start: np.ndarray) -> np.ndarray:
    """A mapping that costs no more than the start: descent, then Kernighan-Lin passes until one brings nothing."""
    best = _descend(problem, start)
    if len(start) > _PASS_LIMIT:
        return best
    cost = problem.cost(best)
    while True:
        candidate = _kernighan_lin(problem, best)
        lower = problem.cost(candidate)
        if not lower < cost * (1 - 1e-12):
            return best
        best, cost = candidate, lower


def _descend(problem: Problem, start: np.ndarray) -> np.ndarray:
    """Best swap or move of one rank after another until a whole round brings nothing."""
    state = _State(problem, start)
    tolerance = 1e-9 * max(problem.cost(start), 1e-300)
    improved = True
    while improved:
        improved = False
        reach = state.load[np.arange(len(start)), state.places] - state.load.min(axis=1)
        for rank in np.flatnonzero(reach > 0):
            gain = state.gains(int(rank))
            device = int(np.argmax(gain))
            if gain[device] > tolerance:
                state.give(int(rank), device)
                improved = True
    # Guard against rounding: the start is kept unless the end is really no worse.
    return state.mapping if problem.cost(state.mapping) <= problem.cost(start) else start


def _kernighan_lin(problem: Problem, start: np.ndarray) -> np.ndarray:
    """One pass: the best exchange over and over, also where it costs, each rank once; back to the best point."""
    state = _State(problem, start)
    locked = np.zeros(len(start), dtype=bool)
    best, best_total, total, since = start.copy(), 0.0, 0.0, 0
    while not locked.all() and since < _PATIENCE:
        chosen: tuple[float, int, int] | None = None
        for rank in np.flatnonzero(~locked):
            gain = state.gains(int(rank))
            seated = np.flatnonzero(state.rank_on >= 0)
            gain[seated[locked[state.rank_on[seated]]]] = -np.inf
            gain[problem.place_of == state.places[rank]] = -np.inf
            device = int(np.argmax(gain))
            if np.isfinite(gain[device]) and (chosen is None or gain[device] > chosen[0]):
                chosen = (float(gain[device]), int(rank), device)
        if chosen is None:
            break
        value, rank, device = chosen
        other = int(state.rank_on[device])
        state.give(rank, device)
        locked[rank] = True
        if other >= 0:
            locked[other] = True
        total, since = total + value, since + 1
        if total > best_total + 1e-12 * abs(best_total):
            best, best_total, since = state.mapping.copy(), total, 0
    return best
