"""Local search for the rank mapping: steepest swaps and moves, then Kernighan-Lin passes.

In: a Problem (weights between ranks, distance between places, which rank may run on which device) and a
mapping.
Out: a mapping that costs no more. Invariant: one rank per device, each rank on a device it is allowed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from distgraph.errors import ResourceError
from distgraph.resources.cluster import Cluster
from distgraph.resources.routing import Router

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_DEVICE_LEVEL = 128  # clusters up to this size price every pair of devices; larger ones pairs of machines
_PASS_LIMIT = 512  # devices up to which Kernighan-Lin passes run; above it only descent runs
_ROUNDS = 200  # of the descent; it stops by itself far earlier
_PATIENCE = 48  # steps of a pass without a new best before it is given up


@dataclass(frozen=True, slots=True)
class Problem:
    """The quadratic assignment problem of a rank mapping.

    Attributes:
        weights: symmetric bytes between ranks, [ranks, ranks].
        allowed: whether a rank may run on a device, [ranks, devices].
        place_of: place (machine or device) of each device.
        distance: symmetric distance of two places.
    """

    weights: csr_array[Any, Any]
    allowed: np.ndarray
    place_of: np.ndarray
    distance: np.ndarray

    def row(self, rank: int) -> np.ndarray:
        """Bytes between this rank and every other."""
        partners, sizes = partners_of(self.weights, rank)
        row = np.zeros(self.weights.shape[0])
        row[partners] = sizes
        return row

    def cost(self, mapping: np.ndarray) -> float:
        """Sum over pairs of ranks of bytes x distance."""
        pairs = self.weights.tocoo()
        places = self.place_of[mapping]
        return float((pairs.data * self.distance[places[pairs.row], places[pairs.col]]).sum() / 2)


def partners_of(weights: csr_array[Any, Any], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Ranks that exchange bytes with this one, and how many (scipy's own row slicing takes far longer)."""
    start, end = weights.indptr[rank], weights.indptr[rank + 1]
    return weights.indices[start:end], weights.data[start:end]


def distances(cluster: Cluster, objective: str) -> tuple[np.ndarray, np.ndarray]:
    """Place of each device, and distance between places.

    "bytes": places are machines, 1 apart. "seconds": seconds per byte over the narrowest link of the route;
    between devices, or in clusters above 128 devices between machines (the distance inside a machine is that
    of its first two devices).

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
        place_of, endpoints = np.arange(len(cluster.devices)), [(d.index, d.index) for d in cluster.devices]
    else:
        place_of, endpoints = (
            machine_of,
            [(m.devices[0], m.devices[min(1, len(m.devices) - 1)]) for m in cluster.machines],
        )
    distance = np.zeros((len(endpoints), len(endpoints)))
    for a, (here, second) in enumerate(endpoints):
        for b in range(a + 1):
            source, target = (here, endpoints[b][0]) if a != b else (here, second)
            if source != target:
                distance[a, b] = distance[b, a] = _seconds_per_byte(cluster, router, source, target)
    return place_of, distance


def _seconds_per_byte(cluster: Cluster, router: Router, source: int, target: int) -> float:
    narrowest = 0.0
    for directed in router.route(source, target):
        link = router.link(directed)
        if link.bandwidth is None:
            raise ResourceError(
                f"{cluster.source}: {link.origin}.bandwidth: missing, needed to map ranks by "
                f"seconds over {link}; "
                'add bandwidth such as "25 GB/s", or map by bytes'
            )
        narrowest = max(narrowest, 1.0 / link.bandwidth)
    return narrowest


class SearchState:
    """State of the local search: a mapping padded with ranks that send nothing, so that every move is a swap.

    load[r, p] is the cost of the traffic of rank r if r were at place p and all others stayed.
    """

    def __init__(self, problem: Problem, start: np.ndarray) -> None:
        ranks, devices = problem.allowed.shape
        self.ranks = ranks
        self.distance = problem.distance
        self.place_of = problem.place_of
        pairs = problem.weights.tocoo()
        sparse = import_module("scipy.sparse")
        self.weights = sparse.coo_array(
            (pairs.data, (pairs.row, pairs.col)), shape=(devices, devices)
        ).tocsr()
        self.allowed = np.ones((devices, devices), dtype=bool)
        self.allowed[:ranks] = problem.allowed
        self.mapping = np.concatenate([start, np.setdiff1d(np.arange(devices), start)])
        self.places = self.place_of[self.mapping]
        self.load = np.asarray(self.weights @ self.distance[self.places, :])

    def gains(self, rank: int) -> np.ndarray:
        """Saving of swapping the rank with every other one; -inf where not allowed or pointless."""
        place = self.places[rank]
        stay = self.load[np.arange(len(self.places)), self.places]
        gain = stay[rank] - self.load[rank, self.places] + stay - self.load[:, place]
        # Both loads assume that the other rank of the two stays; correct for partners.
        same = self.distance[place, place] + self.distance[self.places, self.places]
        partners, sizes = partners_of(self.weights, rank)
        apart = 2 * self.distance[place, self.places[partners]] - same[partners]
        gain[partners] -= sizes * apart
        legal = (
            self.allowed[rank, self.mapping] & self.allowed[:, self.mapping[rank]] & (self.places != place)
        )
        return np.where(legal, gain, -np.inf)

    def all_gains(self, dense: np.ndarray) -> np.ndarray:
        """`gains` of every rank at once; dense: the weights as a full matrix."""
        moved = self.load[:, self.places]
        stay = moved.diagonal()
        within = self.distance.diagonal()[self.places]  # distance of each rank's place to itself
        gain = stay[:, None] + stay[None, :] - moved - moved.T
        gain -= dense * (
            2 * self.distance[np.ix_(self.places, self.places)] - within[:, None] - within[None, :]
        )
        fits = self.allowed[:, self.mapping]
        gain[~(fits & fits.T) | (self.places[:, None] == self.places[None, :])] = -np.inf
        result: np.ndarray = gain
        return result

    def swap(self, first: int, second: int) -> None:
        """The two ranks change devices."""
        for rank, place in ((first, self.places[second]), (second, self.places[first])):
            change = self.distance[place] - self.distance[self.places[rank]]
            partners, sizes = partners_of(self.weights, rank)
            self.load[partners] += np.outer(sizes, change)
        for array in (self.mapping, self.places):
            array[[first, second]] = array[[second, first]]

    def result(self) -> np.ndarray:
        """The real ranks' devices."""
        return self.mapping[: self.ranks].copy()


def descend(problem: Problem, start: np.ndarray) -> np.ndarray:
    """Mapping after rounds of the best swap of each rank in turn; never worse than `start`."""
    state = SearchState(problem, start)
    tolerance = 1e-9 * problem.cost(start)
    everyone = np.arange(len(state.mapping))
    for _ in range(_ROUNDS):
        improved = False
        reach = state.load[everyone, state.places] - state.load.min(axis=1)
        for rank in np.flatnonzero(reach > 0).tolist():
            gain = state.gains(rank)
            other = int(np.argmax(gain))
            if gain[other] > tolerance:
                state.swap(rank, other)
                improved = True
        if not improved:
            break
    return _not_worse(problem, state.result(), start)


def kernighan_lin(problem: Problem, start: np.ndarray) -> np.ndarray:
    """Mapping after Kernighan-Lin passes, until one improves nothing.

    A pass repeats the best swap, even if it increases the cost, with every rank swapped at most once, and
    returns the best mapping on the way.

    Source: Kernighan and Lin, "An efficient heuristic procedure for partitioning graphs", 1970, with swaps
    between any two places instead of two halves.
    """
    best = start
    if problem.allowed.shape[1] > _PASS_LIMIT:
        return best
    dense = np.zeros((problem.allowed.shape[1],) * 2)
    dense[: len(start), : len(start)] = problem.weights.toarray()
    while True:
        candidate = _pass(problem, best, dense)
        if not problem.cost(candidate) < problem.cost(best) * (1 - 1e-9):
            return best
        best = candidate


def _pass(problem: Problem, start: np.ndarray, dense: np.ndarray) -> np.ndarray:
    state = SearchState(problem, start)
    locked = np.zeros(len(state.mapping), dtype=bool)
    best, best_total, total, since = start, 0.0, 0.0, 0
    while since < _PATIENCE:
        gain = state.all_gains(dense)
        gain[locked] = -np.inf
        gain[:, locked] = -np.inf
        first, second = divmod(int(np.argmax(gain)), len(gain))
        if not np.isfinite(gain[first, second]):
            break
        total, since = total + float(gain[first, second]), since + 1
        state.swap(first, second)
        locked[[first, second]] = True
        if total > best_total:
            best, best_total, since = state.result(), total, 0
    return _not_worse(problem, best, start)


def _not_worse(problem: Problem, candidate: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The candidate unless it costs more than `start`; summed savings have rounding errors."""
    return candidate if problem.cost(candidate) <= problem.cost(start) else start
